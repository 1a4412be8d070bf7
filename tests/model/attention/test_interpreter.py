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
TYPES |= dict.fromkeys(["sums", "maxima", "totals"], "*fp32")
TYPES |= dict.fromkeys(["scale", "softcap", "key_scale", "value_scale"], "fp32")
FP8 = dict.fromkeys(["keys", "values"], "*u8")
ALIGNED = {"query", "keys", "values", "result", "sums"}
capability = int(sys.argv[1])
RUN = [
    (kernels.partial_results, PLAIN, 4, 2), (kernels.partial_results, LATENTS, 8, 1),
    (kernels.combine_results, LATENTS, 4, 1),
    (kernels._write, PLAIN, 4, 1), *((kernels.walk_pages, heads | own, 8, 2)
                                     for heads, own in zip((PLAIN, WIDE, LATENTS), WALKED)),
]
IN_FP8 = [(*RUN[i], FP8) for i in (0, 1, 3, 4)]
for kernel, sizes, warps, stages, types in [*((*each, {}) for each in RUN), *IN_FP8]:
    names = [p.name for p in kernel.params]
    signature = {n: "constexpr" if n.isupper() else (TYPES | types).get(n, "i32") for n in names}
    constants = {(i,): (SIZES | sizes)[n] for i, n in enumerate(names) if n.isupper()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in ALIGNED}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
    made = compile(source, GPUTarget("cuda", capability, 32), options=options)
    ptx, of = made.asm["ptx"], (kernel, sizes, types)
    if kernel in (kernels.partial_results, kernels.walk_pages):
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


LINEAR = """
import os, re, subprocess, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from paceline.model.linear import triton as kernels

DELTA = dict(RULE=0, KEY_HEADS=16, VALUE_HEADS=32, KEY_DIM=128, VALUE_DIM=128, KEY_TILE=128,
             COLUMNS=kernels._COLUMNS, CHANNELS=8192, HISTORY=3, QUERIES=0, KEYS=2048, VALUES=4096, BY_CHANNEL=False,
             CONVOLVED=True, SHIFTED=False, SKIPS=False, IS_LOWEST=False, ROUNDS_RATES=False, ROUNDS_CONVOLUTION=True)
KIMI = DELTA | dict(BY_CHANNEL=True, VALUE_HEADS=16, ROUNDS_RATES=True)
MAMBA2 = DELTA | dict(RULE=2, KEY_HEADS=8, VALUE_HEADS=64, VALUE_DIM=64, SHIFTED=True, SKIPS=True)
LIGHTNING = DELTA | dict(RULE=1, CONVOLVED=False, KEY_HEADS=32)
CONVOLUTION = dict(CHANNELS=2048, COLUMNS=kernels._CHANNELS, HISTORY=2, SHIFTED=True, ROUNDS_CONVOLUTION=True,
                   SILU=True)
MAMBA = dict(CHANNELS=8192, COLUMNS=kernels._CHANNELS, KEY_DIM=16, KEY_TILE=16)
TYPES = dict.fromkeys(["inputs", "a", "b", "tails", "rows", "out"], "*bf16") | {"numbers": "*i64"}
TYPES |= dict.fromkeys(["weight", "shift", "decay", "bias", "skip"], "*fp32")
TYPES |= dict.fromkeys(["states", "keys", "updates", "decays"], "*fp32")
TYPES |= dict.fromkeys(["query_scale", "strength_scale", "lowest", "shortest", "longest"], "fp32")
for kernel, sizes, warps in (
    (kernels._recurrent, DELTA, 8), (kernels._recurrent, KIMI, 8), (kernels._recurrent, MAMBA2, 8),
    (kernels._recurrent, LIGHTNING, 8), (kernels._convolution, CONVOLUTION, 8), (kernels._scanned, MAMBA, 4),
):
    names = [p.name for p in kernel.params]
    signature = {n: "constexpr" if n.isupper() else TYPES.get(n, "i32") for n in names}
    constants = {(i,): sizes[n] for i, n in enumerate(names) if n.isupper()}
    kept = {"weight", "shift", "decay", "bias", "skip", "states", "tails", "rows", "keys", "updates", "decays"}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in kept}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    made = compile(source, GPUTarget("cuda", int(sys.argv[1]), 32), options={"num_warps": warps})
    assert made.metadata.shared <= 64 << 10, made.metadata.shared
    target, path = re.search(r"[.]target (\\w+)", made.asm["ptx"]).group(1), sys.argv[2]
    open(path, "w").write(made.asm["ptx"])
    tool = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/ptxas")
    tool += "-blackwell" if sys.argv[1] == "100" and os.path.exists(tool + "-blackwell") else ""
    command = [tool, "-v", "--gpu-name=" + target, path, "-o", os.devnull]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert " 0 bytes spill stores" in said, said
"""

SCALED = """
import re, subprocess, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from paceline.checkpoint.packing import factor
from paceline.model import scaled_triton as kernels

capability, names = int(sys.argv[1]), [p.name for p in kernels._product.params]
for bits, exponent, kind, parts, routed, tokens, whole, zeros in (
    (8, 4, "fp32", 1, 0, 16, False, False), (8, 0, "fp32", 1, 0, 64, True, False),
    (8, 4, "fp32", 1, 1, 128, True, False), (4, 0, "bf16", 2, 1, 16, False, False),
    (4, 2, "u8", 2, 2, 64, True, False), (4, 2, "u8", 2, 1, 128, True, False),
    (4, 0, "fp16", 1, 0, 16, False, True), (4, 0, "fp16", 2, 0, 128, True, True),
):
    large = tokens > 64
    pairs = bits == 4 and kind in ("bf16", "u8")
    sizes = dict(BITS=bits, EXPONENT=exponent, FACTOR=factor(exponent), FACTORS=False, ZEROS=zeros, ROUTED=routed,
                 PAIRS=pairs, ZERO=(136 if pairs else 8388616) if (bits, exponent) == (4, 0) else 0,
                 WHOLE=whole, BIASED=False, PARTS=parts, OUTPUTS=128 if large else 64, TOKENS=tokens,
                 BLOCK=64 if large or bits == 4 else 128)
    types = {"x": "*bf16", "bias": "*bf16", "codes": "*i8", "scales": "*" + kind, "factors": "*fp32", "zeros": "*i8",
             "tiles": "*i32", "order": "*i32", "out": "*bf16" if whole else "*fp32"}
    signature = {n: "constexpr" if n.isupper() else types.get(n, "i32") for n in names}
    constants = {(i,): sizes[n] for i, n in enumerate(names) if n.isupper()}
    kept = {"x", "codes", "scales", "out", "inputs", "outputs", "row_len"}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in kept}
    source = ASTSource(fn=kernels._product, signature=signature, constexprs=constants, attrs=aligned)
    stages = 4 if not large else 3 if bits == 8 else 2
    options = {"num_warps": 8 if large else 4, "num_stages": stages, "enable_fp_fusion": False}
    made = compile(source, GPUTarget("cuda", capability, 32), options=options)
    ptx, of = made.asm["ptx"], (bits, exponent, routed, tokens, whole)
    units = {80: "mma.sync.aligned.m16n8k16", 90: f"wgmma.mma_async.sync.aligned.m64n{tokens}k16", 100: "tcgen05.mma"}
    assert units[capability] in ptx, ("products do not use matrix units", of)
    assert "fma.rn.f32" not in ptx, ("fused multiplications and additions", of)
    assert ".ftz" not in ptx, ("small numbers are flushed", of)
    assert "cp.async" in ptx and (kind == "u8" or zeros or "ld.global.b8" not in ptx), ("no fetching ahead", of)
    assert made.metadata.shared <= 96 << 10, (made.metadata.shared, of)
    assembler = f"{triton.__path__[0]}/backends/nvidia/bin/ptxas" + "-blackwell" * (capability >= 100)
    arch = re.search(r"[.]target (sm_[0-9a-z]+)", ptx)[1]
    with open(sys.argv[2], "w") as file:
        file.write(ptx)
    command = [assembler, "-v", "--gpu-name=" + arch, sys.argv[2], "-o", "/dev/null"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = int(re.search("([0-9]+) bytes spill stores", told)[1])
    assert spilled <= {80: 4, 90: 0, 100: 64}[capability], (spilled, of)
for kernel, sizes in ((kernels._ordered, dict(PAIRS=1024)), (kernels._cut, dict(TOKENS=16, EXPERTS=512)),
                      (kernels._weighted, dict(OUTPUTS=1024))):
    types = dict.fromkeys(["results", "out"], "*bf16") | dict.fromkeys(["order", "ends", "tiles"], "*i32")
    types |= {"chosen": "*i64", "weights": "*fp32"}
    names = [p.name for p in kernel.params]
    signature = {n: "constexpr" if n.isupper() else types.get(n, "i32") for n in names}
    constants = {(i,): sizes[n] for i, n in enumerate(names) if n.isupper()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    made = compile(source, GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": False})
    assert "fma.rn.f32" not in made.asm["ptx"], ("fused multiplications and additions", kernel)
"""


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
@pytest.mark.parametrize("script_text", [COMPILE, LINEAR, SCALED], ids=["attention", "linear layers", "products"])
def test_the_kernels_compile_for_devices(script_text: str, capability: str, tmp_path: Path) -> None:
    """An A100, an H100 and a B200: attention uses matrix units and fuses nothing that another kernel might not fuse;
    what programs share fits any of them, and registers suffice."""
    given = environment(TRITON_CACHE_DIR=str(tmp_path))
    script = tmp_path / "compile_kernels.py"
    script.write_text(script_text)
    command = [sys.executable, str(script), capability, str(tmp_path / "kernel.ptx")]
    run = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
