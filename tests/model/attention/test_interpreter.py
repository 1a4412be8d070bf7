"""The Triton kernels without a GPU: run by triton's interpreter, and compiled for devices that are not there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "build" / "triton"
COMPILE = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from paceline.model.attention import triton as kernels

SIZES = dict(GROUPS=4, PAGE=64, SPLIT=2, BLOCK=16, ROWS=256, PROGRAMS=1024, CAPPED=False, MASKED=False, CHUNK=16,
             SINKS=False)
PLAIN = dict(HEADS=8, KEY_DIM=128, VALUE_DIM=128, VALUE_STRIDE=128, KEY_TILE=128, REST_TILE=16, VALUE_TILE=128,
             VALUES_IN_KEYS=False, KEYS=64)
LATENTS = dict(HEADS=1, KEY_DIM=576, VALUE_DIM=512, VALUE_STRIDE=576, KEY_TILE=512, REST_TILE=64, VALUE_TILE=512,
               VALUES_IN_KEYS=True, KEYS=32)
TYPES = dict.fromkeys(["query", "keys", "values", "key", "value", "sinks", "result"], "*bf16")
TYPES |= dict.fromkeys(["table", "gather", "scatter", "rows", "tokens"], "*i64")
TYPES |= dict.fromkeys(["first", "stop", "mask", "work"], "*i32")
TYPES |= dict.fromkeys(["sums", "maxima", "totals"], "*fp32") | dict.fromkeys(["scale", "softcap"], "fp32")
for kernel, sizes, warps in (
    (kernels._partial, PLAIN, 4), (kernels._partial, LATENTS, 8), (kernels._combined, LATENTS, 4),
    (kernels._write, PLAIN, 4),
):
    names = [p.name for p in kernel.params]
    signature = {n: "constexpr" if n.isupper() else TYPES.get(n, "i32") for n in names}
    constants = {(i,): (SIZES | sizes)[n] for i, n in enumerate(names) if n.isupper()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    made = compile(source, GPUTarget("cuda", int(sys.argv[1]), 32), options={"num_warps": warps})
    assert "mma.sync" in made.asm["ptx"] or kernel is not kernels._partial, "products do not use matrix units"
    assert made.metadata.shared <= 64 << 10, made.metadata.shared
"""


def environment(**changes: str) -> dict[str, str]:
    """With triton on the path. Skips the test if it was not fetched."""
    if not (FOLDER / "triton").is_dir():
        pytest.skip("triton is not there: `make triton`")
    path = os.pathsep.join([str(FOLDER), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **changes}


@pytest.mark.slow
def test_the_kernels_pass_their_tests_in_the_interpreter() -> None:
    """Those of ``test_kernels.py`` that need triton: none is skipped there."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not variant"]
    given = environment(TRITON_INTERPRET="1")
    run = subprocess.run(
        [*command, "tests/model/attention/test_kernels.py"], cwd=ROOT, env=given, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout[-4000:]
    assert "skipped" not in run.stdout


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "90", "100"])
def test_the_kernels_compile_for_devices(capability: str, tmp_path: Path) -> None:
    """An A100, an H100 and a B200: matrix units are used, and what programs share fits any of them."""
    given = environment(TRITON_CACHE_DIR=str(tmp_path))
    script = tmp_path / "compile_kernels.py"
    script.write_text(COMPILE)
    run = subprocess.run([sys.executable, str(script), capability], cwd=ROOT, env=given, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
