# ruff: noqa: C408
"""Compiles Triton kernels for devices that are not there: ``python -m tests.model.compiled_kernels KIND CAPABILITY``.

Products use matrix units, nothing is fused that another kernel might not fuse, what programs share fits any device,
and registers suffice.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from paceline.checkpoint.packing import factor
from paceline.model import scaled_triton
from paceline.model.attention import triton as attending
from paceline.model.linear import triton as recurring
from paceline.model.parallel.one_shot import _exchange


def compiled(
    kernel: Any,
    capability: int,
    sizes: Mapping[str, Any],
    types: Mapping[str, str],
    aligned: Collection[str] = (),
    **options: Any,
) -> Any:
    """``types``: of the parameters that are no sizes; i32 where they say nothing. ``aligned``: to 16 bytes."""
    names = [p.name for p in kernel.params]
    signature = {n: "constexpr" if n.isupper() else types.get(n, "i32") for n in names}
    constants = {(i,): sizes[n] for i, n in enumerate(names) if n.isupper()}
    attributes = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return compile(source, GPUTarget("cuda", capability, 32), options=options)


def spilled_bytes(ptx: str, capability: int) -> int:
    """What registers have no room for, by NVIDIA's assembler."""
    assembler = f"{triton.__path__[0]}/backends/nvidia/bin/ptxas" + "-blackwell" * (capability >= 100)
    arch = re.search(r"[.]target (\w+)", ptx)[1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        command = [assembler, "-v", f"--gpu-name={arch}", str(path), "-o", "/dev/null"]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return int(re.search("([0-9]+) bytes spill stores", told)[1])


def attention(capability: int) -> None:
    sizes = dict(GROUPS=4, PAGE=64, SPLIT=2, BLOCK=16, ROWS=256, PROGRAMS=1024, CAPPED=False, MASKED=False, SINKS=False)
    plain = dict(HEADS=8, KEY_DIM=128, VALUE_DIM=128, VALUE_STRIDE=128, KEY_TILE=128, REST_TILE=16, VALUE_TILE=128,
                 VALUES_IN_KEYS=False, KEYS=64)  # fmt: skip
    wide = plain | dict(GROUPS=2, KEY_DIM=256, VALUE_DIM=256, VALUE_STRIDE=256, KEY_TILE=256, VALUE_TILE=256)
    latents = dict(HEADS=1, KEY_DIM=576, VALUE_DIM=512, VALUE_STRIDE=576, KEY_TILE=512, REST_TILE=64, VALUE_TILE=512,
                   VALUES_IN_KEYS=True, KEYS=32)  # fmt: skip
    walked = dict(BLOCK=64, TILES=1), dict(BLOCK=32, TILES=1), dict(BLOCK=32, TILES=64, GROUPS=128)
    types = dict.fromkeys(["query", "keys", "values", "key", "value", "sinks", "result"], "*bf16")
    types |= dict.fromkeys(["table", "gather", "scatter", "rows", "tokens"], "*i64")
    types |= dict.fromkeys(["first", "stop", "mask", "work", "ends"], "*i32")
    types |= dict.fromkeys(["sums", "maxima", "totals"], "*fp32")
    types |= dict.fromkeys(["scale", "softcap", "key_scale", "value_scale"], "fp32")
    fp8 = dict.fromkeys(["keys", "values"], "*u8")
    aligned = {"query", "keys", "values", "result", "sums"}
    run = [
        (attending.partial_results, plain, 4, 2),
        (attending.partial_results, latents, 8, 1),
        (attending.combine_results, latents, 4, 1),
        (attending._write, plain, 4, 1),
        *((attending.walk_pages, h | own, 8, 2) for h, own in zip((plain, wide, latents), walked, strict=True)),
    ]
    in_fp8 = [(*run[i], fp8) for i in (0, 1, 3, 4)]
    for kernel, own, warps, stages, numbers in [*((*each, {}) for each in run), *in_fp8]:
        options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
        made = compiled(kernel, capability, sizes | own, types | numbers, aligned, **options)
        ptx, of = made.asm["ptx"], (kernel, own, numbers)
        if kernel in (attending.partial_results, attending.walk_pages):
            assert re.search("mma.sync|wgmma|tcgen05", ptx), ("products do not use matrix units", of)
        assert "fma.rn.f32" not in ptx, ("fused multiplications and additions", of)
        assert made.metadata.shared <= 96 << 10, (made.metadata.shared, of)
        assert spilled_bytes(ptx, capability) <= {80: 16, 90: 16, 100: 256}[capability], of


def linear(capability: int) -> None:
    delta = dict(RULE=0, KEY_HEADS=16, VALUE_HEADS=32, KEY_DIM=128, VALUE_DIM=128, KEY_TILE=128,
                 COLUMNS=recurring._COLUMNS, CHANNELS=8192, HISTORY=3, QUERIES=0, KEYS=2048, VALUES=4096,
                 BY_CHANNEL=False, CONVOLVED=True, SHIFTED=False, SKIPS=False, IS_LOWEST=False, ROUNDS_RATES=False,
                 ROUNDS_CONVOLUTION=True)  # fmt: skip
    kimi = delta | dict(BY_CHANNEL=True, VALUE_HEADS=16, ROUNDS_RATES=True)
    mamba2 = delta | dict(RULE=2, KEY_HEADS=8, VALUE_HEADS=64, VALUE_DIM=64, SHIFTED=True, SKIPS=True)
    lightning = delta | dict(RULE=1, CONVOLVED=False, KEY_HEADS=32)
    convolution = dict(CHANNELS=2048, COLUMNS=recurring._CHANNELS, HISTORY=2, SHIFTED=True, ROUNDS_CONVOLUTION=True,
                       SILU=True)  # fmt: skip
    mamba = dict(CHANNELS=8192, COLUMNS=recurring._CHANNELS, KEY_DIM=16, KEY_TILE=16)
    types = dict.fromkeys(["inputs", "a", "b", "tails", "rows", "out"], "*bf16") | {"numbers": "*i64"}
    types |= dict.fromkeys(["weight", "shift", "decay", "bias", "skip"], "*fp32")
    types |= dict.fromkeys(["states", "keys", "updates", "decays"], "*fp32")
    types |= dict.fromkeys(["query_scale", "strength_scale", "lowest", "shortest", "longest"], "fp32")
    aligned = {"weight", "shift", "decay", "bias", "skip", "states", "tails", "rows", "keys", "updates", "decays"}
    for kernel, sizes, warps in (
        *((recurring._recurrent, rule, 8) for rule in (delta, kimi, mamba2, lightning)),
        (recurring._convolution, convolution, 8),
        (recurring._scanned, mamba, 4),
    ):
        made = compiled(kernel, capability, sizes, types, aligned, num_warps=warps)
        assert made.metadata.shared <= 64 << 10, made.metadata.shared
        assert spilled_bytes(made.asm["ptx"], capability) == 0, sizes


def products(capability: int) -> None:
    units = {80: "mma.sync.aligned.m16n8k16", 90: "wgmma.mma_async.sync.aligned.m64n{}k16", 100: "tcgen05.mma"}
    for bits, exponent, kind, parts, routed, tokens, whole, zeros in (
        (8, 4, "fp32", 1, 0, 16, False, False), (8, 0, "fp32", 1, 0, 64, True, False),
        (8, 4, "fp32", 1, 1, 128, True, False), (4, 0, "bf16", 2, 1, 16, False, False),
        (4, 2, "u8", 2, 2, 64, True, False), (4, 2, "u8", 2, 1, 128, True, False),
        (4, 0, "fp16", 1, 0, 16, False, True), (4, 0, "fp16", 2, 0, 128, True, True),
    ):  # fmt: skip
        large = tokens > 64
        pairs = bits == 4 and kind in ("bf16", "u8")
        sizes = dict(BITS=bits, EXPONENT=exponent, FACTOR=factor(exponent), FACTORS=False, ZEROS=zeros, ROUTED=routed,
                     PAIRS=pairs, ZERO=(136 if pairs else 8388616) if (bits, exponent) == (4, 0) else 0,
                     WHOLE=whole, BIASED=False, PARTS=parts, OUTPUTS=128 if large else 64, TOKENS=tokens,
                     BLOCK=64 if large or bits == 4 else 128)  # fmt: skip
        types = {"x": "*bf16", "bias": "*bf16", "codes": "*i8", "scales": f"*{kind}", "factors": "*fp32"}
        types |= {"zeros": "*i8", "tiles": "*i32", "order": "*i32", "out": "*bf16" if whole else "*fp32"}
        aligned = {"x", "codes", "scales", "out", "inputs", "outputs", "row_len"}
        stages = 4 if not large else 3 if bits == 8 else 2
        options = {"num_warps": 8 if large else 4, "num_stages": stages, "enable_fp_fusion": False}
        made = compiled(scaled_triton._product, capability, sizes, types, aligned, **options)
        ptx, of = made.asm["ptx"], (bits, exponent, routed, tokens, whole)
        assert units[capability].format(tokens) in ptx, ("products do not use matrix units", of)
        assert "fma.rn.f32" not in ptx, ("fused multiplications and additions", of)
        assert ".ftz" not in ptx, ("small numbers are flushed", of)
        assert "cp.async" in ptx, ("no fetching ahead", of)
        assert kind == "u8" or zeros or "ld.global.b8" not in ptx, ("no fetching ahead", of)
        assert made.metadata.shared <= 96 << 10, (made.metadata.shared, of)
        assert spilled_bytes(ptx, capability) <= {80: 4, 90: 0, 100: 64}[capability], of
    types = dict.fromkeys(["results", "out"], "*bf16") | dict.fromkeys(["order", "ends", "tiles"], "*i32")
    types |= {"chosen": "*i64", "weights": "*fp32"}
    cut = {"TOKENS": 16, "EXPERTS": 512}
    for name, sizes in {"_ordered": {"PAIRS": 1024}, "_cut": cut, "_weighted": {"OUTPUTS": 1024}}.items():
        made = compiled(getattr(scaled_triton, name), capability, sizes, types, enable_fp_fusion=False)
        assert "fma.rn.f32" not in made.asm["ptx"], ("fused multiplications and additions", name)


def sums_of_ranks(capability: int) -> None:
    """Counters are raised by a release and read by an acquire of the whole system."""
    for degree, (name, dtype), sums, twice in (
        (2, ("bf16", tl.bfloat16), True, False),
        (8, ("fp32", tl.float32), True, False),
        (4, ("i16", tl.int16), False, False),
        (4, ("bf16", tl.bfloat16), True, True),
    ):
        sizes = dict(RANK=1, DEGREE=degree, BLOCK=1024, BLOCK_BYTES=4096, NUM_BLOCKS=2048, DTYPE=dtype, SUMS=sums,
                     TWICE=twice, TIMED=True)  # fmt: skip
        types = {"addresses": "*i64", "calls": "*i32", "broken": "*i32", "told": "*i32", "limit": "i64"}
        ptx = compiled(_exchange, capability, sizes, types | {"given": f"*{name}", "result": f"*{name}"}).asm["ptx"]
        lines = ptx.splitlines()
        raised = [i for i, line in enumerate(lines) if re.search("atom.*sys.*release.*exch", line)]
        looks = [i for i, line in enumerate(lines) if re.search(r"acquire.*sys|sys.*acquire", line)]
        read = [i for i, line in enumerate(lines) if "ld.volatile" in line]
        barriers = [i for i, line in enumerate(lines) if "bar.sync" in line]
        assert len(raised) == degree + twice, len(raised)
        assert len(looks) >= 2 * degree, "one before the loop, one in it"
        assert len(read) >= degree, "the terms are not read from memory"
        assert any(i < raised[0] for i in barriers), "a counter is raised before all threads have written"
        assert any(looks[-1] < i < read[0] for i in barriers), "threads read before one has seen the counters"
        assert "globaltimer" in ptx


if __name__ == "__main__":
    globals()[sys.argv[1]](int(sys.argv[2]))
