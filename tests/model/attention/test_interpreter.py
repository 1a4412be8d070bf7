"""The Triton kernels without a GPU: run by triton's interpreter, and compiled for devices that are not there.

Of attention, of linear layers, and of products by weights of 8 bits.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.rings import nightly

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "build" / "triton"


def environment(**changes: str) -> dict[str, str]:
    """With triton on the path. Skips the test if it was not fetched."""
    if not (FOLDER / "triton").is_dir():
        pytest.skip("triton is not there: `make triton`")
    path = os.pathsep.join([str(FOLDER), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **changes}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "some", "ring"),
    [
        ("tests/model/attention/test_kernels.py", "not variant", "not nightly"),
        ("tests/model/test_scaled_triton.py", "not variant", "not nightly"),
        ("tests/model/test_linear_triton.py", "numbers or mistakes", "not nightly"),
        ("tests/model/test_linear_triton.py", "trees and of_the_step or any_tree and dtype2", "not nightly"),
        *nightly([("tests/model/attention/test_kernels.py", "not variant", "nightly")]),
        *nightly([("tests/model/test_linear_triton.py", "trees or any_tree", "")]),
    ],
)
def test_the_kernels_pass_their_tests_in_the_interpreter(path: str, some: str, ring: str) -> None:
    """Those that need triton: none is skipped there."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", some, "-m", ring]
    given = environment(TRITON_INTERPRET="1")
    run = subprocess.run([*command, path], cwd=ROOT, env=given, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:]
    assert "skipped" not in run.stdout


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "90", "100"])
@pytest.mark.parametrize("kernels", ["attention", "linear", "products", "sums_of_ranks"])
def test_the_kernels_compile_for_devices(kernels: str, capability: str, tmp_path: Path) -> None:
    """An A100, an H100 and a B200."""
    command = [sys.executable, "-m", "tests.model.compiled_kernels", kernels, capability]
    given = environment(TRITON_CACHE_DIR=str(tmp_path))
    run = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
