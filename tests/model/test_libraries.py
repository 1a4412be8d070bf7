"""Torch's products on processors with AMX: once ``keep_order`` has run, their bits depend on no number of rows."""

import os
import subprocess
import sys

import pytest

from paceline.core.native import has_amx
from paceline.model import libraries

_COUNT = """
import sys
if sys.argv[1] == "kept":
    import paceline.model
import torch
torch.manual_seed(0)
for dtype in (torch.float32, torch.bfloat16):
    rows, weight = torch.randn(64, 576, dtype=dtype), torch.randn(1536, 576, dtype=dtype)
    whole = torch.nn.functional.linear(rows, weight)
    counts = [int((torch.nn.functional.linear(rows[:n], weight) != whole[:n]).sum()) for n in (4, 5, 8, 16, 31, 48)]
    print(sum(counts))
"""


def changed(how: str) -> list[int]:
    """Numbers that differ between steps of several sizes, in float32 and bfloat16, in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name not in libraries.SETTINGS}
    command = [sys.executable, "-c", _COUNT, how]
    return [*map(int, subprocess.run(command, env=environment, check=True, capture_output=True).stdout.split())]


@pytest.mark.skipif(not has_amx(), reason="needs a processor with AMX")
def test_the_bits_of_products_depend_on_no_number_of_rows() -> None:
    """The mutant is the process that did not ask for it."""
    assert changed("kept") == [0, 0]
    assert max(changed("not kept")) > 0


@pytest.mark.parametrize("amx", [False, True])
def test_settings_of_users_stay(amx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "has_amx", lambda: amx)
    environment = {"MKL_CBWR": "AVX2"}
    libraries.keep_order(environment)
    assert environment == {"MKL_CBWR": "AVX2"} | ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"} if amx else {})
