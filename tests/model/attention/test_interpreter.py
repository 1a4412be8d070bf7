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
import re, subprocess, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from paceline.model.attention import triton as kernels

SIZES = dict(GROUPS=4, PAGE=64, SPLIT=2, BLOCK=16, ROWS=256, PROGRAMS=1024, CAPPED=False, MASKED=False, SINKS=False)
PLAIN = dict(HEADS=8, KEY_DIM=128, VALUE_DIM=128, VALUE_STRIDE=128, KEY_TILE=128, REST_TILE=16, VALUE_TILE=128,
             VALUES_IN_KEYS=False, KEYS=64)
WIDE = PLAIN | dict(GROUPS=2, KEY_DIM=256, VALUE_DIM=256, VALUE_STRIDE=256, KEY_TILE=256, VALUE_TILE=256)
WALKED = dict(BLOCK=64, TILES=1), dict(BLOCK=32, TILES=1), dict(BLOCK=32, TILES=64, GROUPS=128)
MOST_SHARED, MOST_SPILLED = 96 << 10, {80: 16, 90: 16, 100: 256}
LATENTS = dict(HEADS=1, KEY_DIM=576, VALUE_DIM=512, VALUE_STRIDE=576, KEY_TILE=512, REST_TILE=64, VALUE_TILE=512,
               VALUES_IN_KEYS=True, KEYS=32)
TYPES = dict.fromkeys(["query", "keys", "values", "key", "value", "sinks", "result"], "*bf16")
TYPES |= dict.fromkeys(["table", "gather", "scatter", "rows", "tokens"], "*i64")
TYPES |= dict.fromkeys(["first", "stop", "mask", "work", "ends"], "*i32")
TYPES |= dict.fromkeys(["sums", "maxima", "totals"], "*fp32") | dict.fromkeys(["scale", "softcap"], "fp32")
ALIGNED = {"query", "keys", "values", "result", "sums"}
capability = int(sys.argv[1])
for kernel, sizes, warps, stages in (
    (kernels._partial, PLAIN, 4, 2), (kernels._partial, LATENTS, 8, 1), (kernels._combined, LATENTS, 4, 1),
    (kernels._write, PLAIN, 4, 1), *((kernels._walked, heads | own, 8, 2)
                                     for heads, own in zip((PLAIN, WIDE, LATENTS), WALKED)),
):
    names = [p.name for p in kernel.params]
    signature = {n: "constexpr" if n.isupper() else TYPES.get(n, "i32") for n in names}
    constants = {(i,): (SIZES | sizes)[n] for i, n in enumerate(names) if n.isupper()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in ALIGNED}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
    made = compile(source, GPUTarget("cuda", capability, 32), options=options)
    ptx, of = made.asm["ptx"], (kernel, sizes)
    if kernel in (kernels._partial, kernels._walked):
        assert re.search("mma.sync|wgmma|tcgen05", ptx), ("products do not use matrix units", of)
    assert "fma.rn.f32" not in ptx, ("fused multiplications and additions", of)
    assert made.metadata.shared <= MOST_SHARED, (made.metadata.shared, of)
    assembler = f"{triton.__path__[0]}/backends/nvidia/bin/ptxas" + "-blackwell" * (capability >= 100)
    arch = re.search(r"[.]target (sm_[0-9a-z]+)", ptx)[1]
    command = [assembler, "-v", "--gpu-name=" + arch, sys.argv[2], "-o", "/dev/null"]
    with open(sys.argv[2], "w") as file:
        file.write(ptx)
    told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = int(re.search("([0-9]+) bytes spill stores", told)[1])
    assert spilled <= MOST_SPILLED[capability], (spilled, of)
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
    """An A100, an H100 and a B200: matrix units are used, what programs share fits any of them, registers suffice, and
    nothing is fused that another kernel might not fuse."""
    given = environment(TRITON_CACHE_DIR=str(tmp_path))
    script = tmp_path / "compile_kernels.py"
    script.write_text(COMPILE)
    command = [sys.executable, str(script), capability, str(tmp_path / "kernel.ptx")]
    run = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
