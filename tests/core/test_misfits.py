"""Native functions refuse what does not fit: the process goes on, whatever arrives."""

import subprocess
import sys

import pytest
from tests.support import misfits


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("seed", [1, 2])
def test_a_process_survives_whatever_does_not_fit(seed: int) -> None:
    command = [sys.executable, "-X", "faulthandler", "-W", "ignore", "-m", "tests.support.misfits", str(seed), "2000"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    refused = dict(line.split() for line in done.stdout.splitlines())
    assert list(refused) == [call.__name__ for call in misfits.CALLS]
    never = {"observed"}  # numbers of any size are observations
    assert all(int(refused[name]) > 20 for name in refused.keys() - never), refused
