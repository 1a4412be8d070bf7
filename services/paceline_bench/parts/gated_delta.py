"""A linear layer's step by torch, by the native operator, and by a state without chunks.

Each way has layers of its own, and ways take turns on one core, so that no cache holds a state before its turn. Of each
way the fastest turn counts.
Sizes are from Qwen3-Next, Kimi Linear and Nemotron-H, and a tiny model's of the gated delta rule.

    operator     the native operator, of tokens [first, first + T) of a chunk, without projections
    torch        its reference implementation
    recurrent    one state, read and written for each token, which neither keeps nor rolls back: the least that any
                 engine does that cannot verify (``FORM_R``, by the same compiler options); e^x is given

The last table compares the prefill of a prompt with transformers' own fallback, which runs where no kernel package is
installed: convolution, gates and rule of one layer, in float32.

    paceline bench parts gated-delta [--tokens 1 5 8] [--prompt 512] [--seconds 3]
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from paceline.checkpoint.linear import CHUNK, Kind, LinearSpec, Slots
from paceline.cli.table import table
from paceline.core.native import find_compiler
from paceline.model.linear import native
from paceline.model.linear.layers import by_torch
from paceline.model.linear.operator import Gates, LinearPools
from paceline.model.linear.plan import NONE, Chunk, LinearStep, SequencePart
from paceline_bench.parts.linear import fastest_s

PUBLISHED = LinearSpec(key_heads=16, value_heads=32, key_dim=128, value_dim=128, width=4)
SIZES = {
    "gated delta, 32 heads of 128 x 128": PUBLISHED,
    "Kimi delta, 32 heads of 128 x 128": LinearSpec(32, 32, 128, 128, 4, Kind.KIMI_DELTA),
    "Mamba2, 64 heads of 128 x 64": LinearSpec(8, 64, 128, 64, 4, Kind.MAMBA2),
    "gated delta, 4 heads of 16 x 16": LinearSpec(key_heads=2, value_heads=4, key_dim=16, value_dim=16, width=4),
}
LAYERS = 16
FORM_R = r"""
#include <cstdint>
#include <cstring>
template <int D, bool kCorrected, bool kByChannel>
void form_r(float* states, const float* q, const float* k, const float* v, const float* fades, const float* b, float* o,
            int64_t heads, int64_t tokens, int64_t dk) {
  for (int64_t h = 0; h < heads; ++h) {
    float* s = states + h * dk * D;
    for (int64_t t = 0; t < tokens; ++t) {
      const float *qt = q + (t * heads + h) * dk, *kt = k + (t * heads + h) * dk, *vt = v + (t * heads + h) * D;
      const float *fade = fades + (t * heads + h) * (kByChannel ? dk : 1), beta = b[t * heads + h];
      float read[D] = {}, out[D] = {}, u[D];
      for (int64_t c = 0; kCorrected && c < dk; ++c) {
        const float f = fade[kByChannel ? c : 0];
        for (int d = 0; d < D; ++d) read[d] += (s[c * D + d] *= f) * kt[c];
      }
      for (int d = 0; d < D; ++d) u[d] = (vt[d] - read[d]) * beta;
      for (int64_t c = 0; c < dk; ++c) {
        const float f = kCorrected ? 1.0f : *fade;
        for (int d = 0; d < D; ++d) {
          s[c * D + d] = (kCorrected ? s[c * D + d] : s[c * D + d] * f) + kt[c] * u[d];
          out[d] += s[c * D + d] * qt[c];
        }
      }
      std::memcpy(o + (t * heads + h) * D, out, sizeof out);
    }
  }
}
using Form = void(float*, const float*, const float*, const float*, const float*, const float*, float*, int64_t,
                  int64_t, int64_t);
extern "C" {
Form *gated_delta = form_r<128, true, false>, *kimi_delta = form_r<128, true, true>, *mamba2 = form_r<64, false, false>;
}
"""
_FORMS = {
    Kind.GATED_DELTA: ("gated_delta", 128),
    Kind.KIMI_DELTA: ("kimi_delta", 128),
    Kind.MAMBA2: ("mamba2", 64),
}
"""Of each kind the form of ``FORM_R`` and the columns of a state that it is compiled for."""


def recurrent() -> ctypes.CDLL:
    """The library of ``FORM_R``."""
    compiler = find_compiler()
    if compiler is None:
        raise SystemExit("no C++ compiler was found")
    with tempfile.TemporaryDirectory() as folder:
        source, path = Path(folder, "form_r.cpp"), Path(folder, "form_r.so")
        source.write_text(FORM_R, encoding="utf-8")
        options = ["-std=c++20", "-O3", "-shared", "-fPIC", "-march=native", "-ffp-contract=off", "-fno-math-errno"]
        subprocess.run([compiler, *options, str(source), "-o", str(path)], check=True)
        return ctypes.CDLL(str(path))


def step_of(first: int, count: int, *, prompt: bool = False) -> LinearStep:
    """Tokens [first, first + count) of a chunk; a ``prompt`` has all chunks that its tokens need, and no rows."""
    if not prompt:
        return LinearStep([SequencePart(0, [Chunk(0, first, count)])], [])
    chunks = [Chunk(NONE, 0, min(CHUNK, count - at)) for at in range(0, count, CHUNK)]
    chunks[-1].store = 1
    return LinearStep([SequencePart(NONE, chunks)], [])


def random_layer(spec: LinearSpec, dtype: torch.dtype, tokens: int) -> tuple[LinearPools, Gates]:
    """Pools and gates of one layer."""
    pools = LinearPools.of(spec, Slots(states=2, rows=1), dtype)
    for pool in pools[:-1]:
        pool.copy_(torch.randn(pool.shape) * 0.1)
    pools.decays.copy_(-torch.rand(pools.decays.shape).cumsum(1) * 0.1)
    heads, channels = spec.value_heads, spec.value_heads * spec.decay_dim
    inputs, a, b = [torch.randn(tokens, n).to(dtype) for n in (spec.conv_dim, channels, heads)]
    own = torch.randn(spec.width, spec.conv_dim), -torch.rand(heads), torch.randn(channels)
    skip = torch.randn(heads) if spec.kind is Kind.MAMBA2 else None
    return pools, Gates(inputs, a, b, *own, skip=skip)


def native_way(step: LinearStep, layers: list[tuple[LinearPools, Gates]], spec: LinearSpec) -> Callable[[], object]:
    """A step of all layers by the operator, called as compiled models do: without the interpreter's part."""
    numbers, library = torch.tensor(step.encode()), native.LIBRARY.load()
    calls = [native.pack(*native.arguments(numbers, pools, spec, gates)) for pools, gates in layers]
    return lambda: [library.paceline_linear_attention(packed) for packed, *_ in calls]


def torch_way(step: LinearStep, layers: list[tuple[LinearPools, Gates]], spec: LinearSpec) -> Callable[[], object]:
    """A step of all layers by the reference implementation."""
    numbers = torch.tensor(step.encode())
    return lambda: [by_torch(numbers, pools, spec, gates) for pools, gates in layers]


def steps_of(spec: LinearSpec, dtype: torch.dtype, num_tokens: list[int], seconds: float) -> list[tuple[str, ...]]:
    """The rows of a table: microseconds of a layer's step of T tokens."""
    form, columns = _FORMS[spec.kind]
    library = recurrent() if spec.value_dim == columns else None
    jobs: list[Callable[[], object]] = []
    for tokens in num_tokens:
        layers, others, last = ([random_layer(spec, dtype, tokens) for _ in range(LAYERS)] for _ in range(3))
        step = step_of((CHUNK - tokens) // 2, tokens)
        whole = LinearStep([SequencePart(0, [Chunk(0, CHUNK - tokens, tokens, 0)])], [])
        jobs += [native_way(step, layers, spec), native_way(whole, others, spec)]
        jobs.append(torch_way(step, layers, spec))
        jobs.append(recurrent_way(library, form, last, spec, tokens) if library is not None else lambda: None)
    times = [1e6 * each / LAYERS for each in fastest_s(jobs, seconds * len(num_tokens))]
    rows: list[tuple[str, ...]] = []
    for at, tokens in enumerate(num_tokens):
        ours, folding, reference, least = times[4 * at : 4 * at + 4]
        fold = (folding - ours) * tokens / CHUNK
        against = (f"{least:.0f}", f"{(ours + fold) / least:.2f}") if library is not None else ("", "")
        further = f"{(ours - times[0]) / (tokens - 1) / times[0]:.2f}" if tokens > 1 and num_tokens[0] == 1 else ""
        each = (f"{ours:.0f}", f"{folding - ours:.0f}", f"{reference:.0f}", f"{reference / ours:.0f}")
        rows.append((str(tokens), *each, *against, further))
    return rows


def recurrent_way(
    library: ctypes.CDLL, name: str, layers: list[tuple[LinearPools, Gates]], spec: LinearSpec, tokens: int
) -> Callable[[], object]:
    """A step of all layers by one state each, which every token changes."""
    heads, n = spec.value_heads, F.normalize
    q, k = (n(torch.randn(tokens, heads, spec.key_dim), dim=-1) for _ in range(2))
    v, out = (torch.randn(tokens, heads, spec.value_dim) for _ in range(2))
    g, b = (-torch.rand(tokens, heads * spec.decay_dim) * 0.1).exp(), torch.rand(tokens, heads)
    given = [ctypes.c_void_p(x.data_ptr()) for x in (q, k, v, g, b, out)]
    sizes = [ctypes.c_int64(x) for x in (heads, tokens, spec.key_dim)]
    form = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 7, *[ctypes.c_int64] * 3).in_dll(library, name)

    def way(kept: tuple[Tensor, ...] = (q, k, v, g, b, out)) -> None:
        for pools, _ in layers:
            form(ctypes.c_void_p(pools.states.data_ptr()), *given, *sizes)

    return way


def prefill(spec: LinearSpec, tokens: int, seconds: float) -> tuple[str, ...]:
    """Milliseconds of a prompt in one layer: the operator's, transformers' fallback's."""
    pools, gates = random_layer(spec, torch.float32, tokens)
    size = spec.key_heads * spec.key_dim
    conv = gates.weight.t()[:, None].contiguous()
    decay, bias = gates.decay, gates.bias

    def fallback() -> None:
        x = F.silu(F.conv1d(F.pad(gates.inputs.t()[None], (spec.width - 1, 0)), conv, groups=spec.conv_dim))[0].t()
        q, k, v = torch.split(x, [size, size, spec.value_heads * spec.value_dim], -1)
        groups = spec.value_heads // spec.key_heads
        q, k = (y.reshape(1, tokens, spec.key_heads, spec.key_dim).repeat_interleave(groups, 2) for y in (q, k))
        v = v.reshape(1, tokens, spec.value_heads, spec.value_dim)
        g, beta = (decay * F.softplus(gates.a + bias))[None], gates.b.sigmoid()[None]
        theirs.torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)

    with torch.no_grad():
        ours, other = fastest_s(
            [native_way(step_of(0, tokens, prompt=True), [(pools, gates)], spec), fallback], seconds
        )
    return str(tokens), f"{1e3 * ours:.1f}", f"{1e3 * other:.1f}", f"{other / ours:.1f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table for each size, and one for prompts."""
    parser = argparse.ArgumentParser(
        "paceline bench parts gated-delta", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 5, 8])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each row of a table")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if (reason := native.unavailable()) is not None:
        raise SystemExit(f"linear attention layers cannot run natively here: {reason}")
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, one thread; us of a layer's step\n")
    head = (
        "T",
        "operator",
        "its fold",
        "torch",
        "torch / operator",
        "recurrent",
        "with folds / recurrent",
        "further row / first",
    )
    for name, spec in SIZES.items():
        rows = steps_of(spec, torch.bfloat16, args.tokens, args.seconds)
        print("\n".join(table([(f"{name}, {head[0]}", *head[1:]), *rows])) + "\n", flush=True)
    titles = ("prompt", "operator ms", "transformers ms", "transformers / operator")
    print("\n".join(table([titles, prefill(PUBLISHED, args.prompt, args.seconds)])))
