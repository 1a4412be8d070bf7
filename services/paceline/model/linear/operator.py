"""Linear layers over chunks at absolute positions, in one order of sums for one token and for many.

    G_t = G_(t-1) + g_t                                           from the chunk's beginning, token by token
    u_t = b_t (v_t - e^(G_t) S k_t - sum over j < t in the chunk of (k_t k_j) e^(G_t - G_j) u_j)
    o_t = e^(G_t) S q_t + sum over j < t in the chunk of (q_t k_j) e^(G_t - G_j) u_j + (q_t k_t) u_t
    S'  = e^(G_C) S + sum over j of e^(G_C - G_j) k_j (x) u_j     at the chunk's end

Kinds of layers differ in how a token's q, k, v, b and g come from its projections (``_RULES``). In Kimi delta layers
(arXiv 2510.26692) g and G are vectors with one number for each row of S. There e^(G_t - G_j) is inside the products of
k and q. In lightning attention (arXiv 2401.04658) g is a constant of the head, u_t = v_t, and there is no convolution.
A short convolution ends before: its result is the output. Mamba2 (arXiv 2405.21060) has u_t = b_t v_t, where b is the
length of the step, and adds D v_t to o_t. In Mamba (arXiv 2312.00752) the decay differs by channel and by row of the
state. It is computed token by token from the chunk's beginning, in any step:

    S_t = e^(A b_t) S_(t-1) + k_t (x) (b_t v_t)                   b_t: the length of the step
    o_t = S_t q_t + D v_t

Every sum begins with 0 and has one order for steps of any size: rows of a chunk one by one, a state's rows in blocks of
BLOCK, products of two rows in lanes. So a token's bits do not depend on what else a step holds. ``native.py``, which
runs where it can, gives the same. This is its reference implementation. Numbers are float32; the convolution's result
is rounded to the model's dtype, as in transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.checkpoint.linear import CHUNK, Kind, LinearSpec, Slots
from paceline.model.linear.plan import NONE, Chunk, LinearStep, SequencePart

BLOCK = 16
"""Rows of a state that are summed by themselves, and lanes in which products of two rows are summed."""
_LOG2E = 1.44269504
_EXP2 = (1.54035304e-4, 1.33335581e-3, 9.61812911e-3, 5.55041087e-2, 2.40226507e-1, 6.93147181e-1, 1.0)
"""Coefficients of 2^x in ``exponential.h``."""


class LinearPools(NamedTuple):
    """Memory of one linear layer: slots of states, each with the convolution's inputs before it, and of rows."""

    states: Tensor  # [slots, value heads, key_dim, value_dim] float32
    tails: Tensor  # [slots, width - 1, conv_dim]
    inputs: Tensor  # [slots, CHUNK, conv_dim], of the convolution
    keys: Tensor  # [slots, CHUNK, key heads, key_dim] float32
    updates: Tensor  # [slots, CHUNK, value heads, value_dim] float32: u
    decays: Tensor  # [slots, CHUNK, value heads, decay_dim] float32: G; of Mamba b

    @classmethod
    def of(cls, spec: LinearSpec, slots: Slots, dtype: torch.dtype, device: torch.device | str = "cpu") -> LinearPools:
        """Memory that is written to here and now, so that the process does not grow while it serves."""
        shapes = [
            (torch.float32, (slots.states, spec.state_heads, spec.key_dim, spec.value_dim)),
            (dtype, (slots.states, spec.width - 1, spec.conv_dim)),
            (dtype, (slots.rows, CHUNK, spec.conv_dim)),
            (torch.float32, (slots.rows, CHUNK, spec.key_heads, spec.key_dim)),
            (torch.float32, (slots.rows, CHUNK, spec.state_heads, spec.value_dim)),
            (torch.float32, (slots.rows, CHUNK, spec.state_heads, spec.decay_dim)),
        ]
        return cls(*(torch.empty(shape, dtype=kind, device=device).zero_() for kind, shape in shapes))

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """The pools whose slots hold the rows of a chunk."""
        return self[2:]


class LinearInputs(NamedTuple):
    """Inputs of linear layers in addition to hidden states."""

    pools: dict[int, LinearPools]
    """Pools of each linear layer, by its index."""
    numbers: Tensor
    """``LinearStep.encode``, int64."""

    @property
    def tensors(self) -> list[Tensor]:
        """All of them, the numbers last: a compiled step is called with nothing but tensors."""
        return [*chain.from_iterable(self.pools.values()), self.numbers]

    @classmethod
    def of(cls, layers: Sequence[int], tensors: Sequence[Tensor]) -> Self:
        """The inputs whose ``tensors`` are given, of these layers."""
        each = len(LinearPools._fields)
        pools = {index: LinearPools(*tensors[i * each : (i + 1) * each]) for i, index in enumerate(layers)}
        return cls(pools, tensors[-1])


class Gates(NamedTuple):
    """A layer's projections of the hidden states of all tokens of a step, and its own parameters."""

    inputs: Tensor  # [T, queries, keys and values]
    a: Tensor  # [T, value heads * decay_dim], of the decay; [T, 0] without a state
    b: Tensor  # [T, value heads], of the strength of updates; [T, 0] where a gives it, or it is 1
    weight: Tensor  # [width, conv_dim] float32; none without a convolution
    decay: Tensor  # [value heads], of Mamba [value heads, key_dim], float32: -e^A_log
    bias: Tensor  # [value heads * decay_dim] float32: dt_bias
    scale: int = 1
    """Factor of b's sigmoid: 1, or 2, which allows negative eigenvalues."""
    lowest: float | None = None
    """What rates are this times a sigmoid of; None: they are by softplus."""
    rounds_rates: bool = False
    """True: rates are rounded to the model's dtype."""
    rounds_convolution: bool = True
    """True: the convolution is rounded to the model's dtype before SiLU, too."""
    shift: Tensor | None = None
    """[conv_dim] float32: the convolution's bias."""
    skip: Tensor | None = None
    """[value heads] float32: D, the part of a token's own value in its output."""
    limits: tuple[float, float] = (0.0, math.inf)
    """The least and the greatest length of a step."""
    activates: bool = False
    """True: SiLU of a short convolution's result; of other kinds it is always taken."""
    select: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    """Of Mamba: from the convolution's results ``[T, channels]`` to ``a``, and to keys and queries, side by side in the
    place of ``b``: ``[T, 2 * key_dim]``."""


class _Rows(NamedTuple):
    """Effect of a chunk's rows on a state, and their reads of it."""

    queries: Tensor  # [CHUNK, key heads, key_dim]
    keys: Tensor  # the same
    values: Tensor  # [CHUNK, value heads, value_dim]
    rates: Tensor  # [CHUNK, value heads, decay_dim]: logarithms of decay
    strength: Tensor | None  # [CHUNK, value heads]; None: values are the updates


def run_step(step: LinearStep, pools: LinearPools, spec: LinearSpec, gates: Gates) -> Tensor:
    """Runs the tokens of all sequences, and writes rows and states. Returns ``[T, value heads, value_dim]`` in the
    model's dtype, zeros for padding."""
    run = partial(_run_all, step)
    return (run if gates.select is None else partial(run_selective, run))(pools, spec, gates)


def run_selective(
    run: Callable[[LinearPools, LinearSpec, Gates], Tensor], pools: LinearPools, spec: LinearSpec, gates: Gates
) -> Tensor:
    """Runs all tokens of Mamba through the convolution, then through the states, by ``run`` each, with its own part of
    the pools."""
    states, tails, inputs, keys, updates, decays = pools
    convolution = LinearSpec(0, spec.value_heads, 0, 1, spec.width, Kind.CONVOLUTION)
    no_states = LinearPools(states[:, :0], tails, inputs, keys[:, :, :0], updates[:, :, :0], decays[:, :, :0])
    values = run(no_states, convolution, gates._replace(activates=True))[..., 0]
    assert gates.select is not None
    a, b = gates.select(values)
    no_tails = LinearPools(states, tails[:, :0, :0], inputs[..., :0], keys, updates, decays)
    return run(no_tails, replace(spec, width=1), gates._replace(inputs=values, a=a, b=b))


def _run_all(step: LinearStep, pools: LinearPools, spec: LinearSpec, gates: Gates) -> Tensor:
    out = gates.inputs.new_zeros(len(gates.inputs), spec.value_heads, spec.value_dim, dtype=torch.float32)
    at = 0
    for part in step.sequences:
        at = _run(part, pools, spec, gates, at, out)
    return out.to(gates.inputs.dtype)


def _run(part: SequencePart, pools: LinearPools, spec: LinearSpec, gates: Gates, at: int, out: Tensor) -> int:
    """Runs one sequence whose first token is ``at``; returns the index after its last token."""
    if part.state == NONE:
        state, tail = torch.zeros_like(pools.states[0]), torch.zeros_like(pools.tails[0])
    else:
        state, tail = pools.states[part.state], pools.tails[part.state]
    for chunk in part.chunks:
        tile = [torch.zeros_like(pool[0]) for pool in pools.rows]
        for own, pool in zip(tile, pools.rows, strict=True):
            own[: chunk.first] = pool[chunk.rows, : chunk.first]
        if chunk.count:
            end = chunk.first + chunk.count
            out[at : at + chunk.count] = compute_tokens(tile, chunk, state, tail, spec, gates, at)
            for own, pool in zip(tile, pools.rows, strict=True):
                if chunk.rows != NONE:
                    pool[chunk.rows, chunk.first : end] = own[chunk.first : end]
                for offset, slot, to in chunk.also:
                    pool[slot, to] = own[offset]
            at += chunk.count
        if chunk is not part.chunks[-1] or chunk.store != NONE:
            state, tail = _fold(state, tile, spec, gates), tile[0][CHUNK - spec.width + 1 :]
        if chunk.store != NONE:
            pools.states[chunk.store], pools.tails[chunk.store] = state, tail
    return at


def compute_tokens(
    tile: list[Tensor], chunk: Chunk, state: Tensor, tail: Tensor, spec: LinearSpec, gates: Gates, at: int
) -> Tensor:
    """Computes the tokens of a chunk, the first of which is ``at``, and their rows; returns their outputs."""
    inputs, keys, _, decays = tile
    first, end = chunk.first, chunk.first + chunk.count
    own = slice(first, end)
    if spec.has_convolution and spec.kind is not Kind.MAMBA:
        inputs[own] = gates.inputs[at : at + chunk.count]
        mixed = _convolved(inputs, tail, gates, spec)
    else:
        mixed = _placed(gates.inputs, chunk, at).float()
    if spec.kind is Kind.CONVOLUTION:
        return mixed[own].view(chunk.count, spec.value_heads, spec.value_dim)
    rows = _RULES[spec.kind](mixed, _placed(gates.a, chunk, at), _placed(gates.b, chunk, at), spec, gates)
    keys[own] = rows.keys[own]
    before = decays[first - 1] if first and spec.kind is not Kind.MAMBA else torch.zeros_like(decays[0])
    decays[own] = rows.rates[own] if spec.kind is Kind.MAMBA else summed(before, rows.rates[own])
    out = (scanned if spec.kind is Kind.MAMBA else _attended)(tile, own, state, rows, spec, gates)
    return out if gates.skip is None else out + rows.values[own] * gates.skip[:, None]


def _attended(tile: list[Tensor], own: slice, state: Tensor, rows: _Rows, spec: LinearSpec, gates: Gates) -> Tensor:
    """Products of a chunk's ``own`` rows with the state and with the rows up to each; fills their updates."""
    _, keys, updates, decays = tile
    wide, queries = (_widened(x, spec) for x in (keys, rows.queries))
    corrected, out = spec.kind in _CORRECTED, torch.zeros_like(updates[own])
    pairs = torch.stack((wide[own], queries[own]) if corrected else (queries[own],))  # [2 or 1, count, heads, key_dim]
    since = _exponential(decays[own])  # [count, heads, decay_dim], of the state
    fade = _exponential(decays[own, None] - decays)  # [count, CHUNK, heads, decay_dim], of use before the own row
    if spec.decay_dim == 1:
        reads = _read(state, pairs) * since  # [2 or 1, count, heads, value_dim]
        weights = _dots(wide, pairs[:, :, None])[..., None] * fade
    else:
        reads = _read(state, pairs * since)
        weights = _dots(wide * fade, pairs[:, :, None])[..., None]
    for row in range(own.stop):
        token = row - own.start
        if token >= 0:
            value = rows.values[row] - reads[0, token] if corrected else rows.values[row]
            updates[row] = value if rows.strength is None else value * rows.strength[row][:, None]
            out[token] = reads[-1, token] + weights[-1, token, row] * updates[row]
        reads[:, max(token + 1, 0) :] += weights[:, max(token + 1, 0) :, row] * updates[row]
    return out


def scanned(tile: list[Tensor], own: slice, state: Tensor, rows: _Rows, spec: LinearSpec, gates: Gates) -> Tensor:
    """``_attended`` of Mamba."""
    _, keys, updates, steps = tile
    updates[own] = steps[own] * rows.values[own]
    out = torch.zeros_like(updates[own])
    for row in range(own.stop):
        state = _stepped(state, keys[row], updates[row], steps[row], gates)
        if row >= own.start:
            out[row - own.start] = _read(state, rows.queries[row].expand(spec.value_heads, -1))
    return out


def _stepped(state: Tensor, key: Tensor, update: Tensor, step: Tensor, gates: Gates) -> Tensor:
    """The state ``[value heads, key_dim, 1]`` of Mamba after one more token."""
    return state * _exponential(gates.decay * step)[..., None] + key[..., None] * update[:, None]


def _placed(x: Tensor, chunk: Chunk, at: int) -> Tensor:
    """The rows of a chunk's tokens in one of CHUNK: each function of them takes a row at one place, in any step."""
    rows = x.new_zeros(CHUNK, x.shape[1])
    rows[chunk.first : chunk.first + chunk.count] = x[at : at + chunk.count]
    return rows


def _widened(x: Tensor, spec: LinearSpec) -> Tensor:
    """``[CHUNK, key heads, key_dim] -> [CHUNK, value heads, key_dim]``."""
    return x.repeat_interleave(spec.value_heads // spec.key_heads, 1)


def summed(before: Tensor, rates: Tensor) -> Tensor:
    """Sums from the chunk's beginning, row after row: a cumulative sum of several rows would group them by the step."""
    sums = []
    for rate in rates:
        sums.append(before := before + rate)
    return torch.stack(sums)


def _read(state: Tensor, rows: Tensor) -> Tensor:
    """Products of a state with ``rows [.., heads, key_dim]``: ``[.., heads, value_dim]``."""
    heads, size, value_dim = state.shape
    blocks = F.pad(state, (0, 0, 0, -size % BLOCK)).view(heads, -1, BLOCK, value_dim)
    factors = _in_blocks(rows)
    of_block = torch.zeros_like(factors[..., :1] * blocks[:, :, 0])
    for row in range(BLOCK):
        of_block = of_block + blocks[:, :, row] * factors[..., row, None]
    total = torch.zeros_like(of_block[..., 0, :])
    for sums in of_block.unbind(-2):
        total = total + sums
    return total


def _in_blocks(x: Tensor) -> Tensor:
    """``[.., n] -> [.., blocks, BLOCK]``, the last one padded with zeros."""
    return F.pad(x, (0, -x.shape[-1] % BLOCK)).view(*x.shape[:-1], -1, BLOCK)


def _dots(a: Tensor, b: Tensor) -> Tensor:
    """Products of rows, over the last dimension, of which the lanes are added up by halves."""
    lanes = _in_blocks(a * b)
    total = torch.zeros_like(lanes[..., 0, :])
    for part in lanes.unbind(-2):
        total = total + part
    while (half := total.shape[-1] // 2) > 0:
        total = total[..., :half] + total[..., half:]
    return total[..., 0]


def _convolved(inputs: Tensor, tail: Tensor, gates: Gates, spec: LinearSpec) -> Tensor:
    """The convolution of a chunk's rows ``[CHUNK, conv_dim]``, and SiLU of it where there is a state."""
    x = torch.cat((tail, inputs)).float()
    total = torch.zeros_like(x[:CHUNK])
    for place in range(spec.width):
        total = total + x[place : place + CHUNK] * gates.weight[place]
    if gates.shift is not None:
        total = total + gates.shift
    if gates.rounds_convolution:
        total = total.to(inputs.dtype).float()
    if spec.kind is Kind.CONVOLUTION and not gates.activates:
        return total
    return _silu(total).to(inputs.dtype).float()


def _delta(mixed: Tensor, a: Tensor, b: Tensor, spec: LinearSpec, gates: Gates) -> _Rows:
    """Normalized queries and keys; the strength is a sigmoid, rounded to the model's dtype."""
    q, k, v = _parted(mixed, spec)
    rates = _rates((a.float() + gates.bias).view(CHUNK, spec.value_heads, spec.decay_dim), gates)
    return _Rows(
        _normalized(q) * (1 / math.sqrt(spec.key_dim)),
        _normalized(k),
        v,
        rates.to(a.dtype).float() if gates.rounds_rates else rates,
        (1 / (1 + (-b.double()).exp())).float().to(b.dtype).float() * gates.scale,
    )


def _rates(x: Tensor, gates: Gates) -> Tensor:
    """``[CHUNK, value heads, decay_dim]``, of gates the same."""
    if gates.lowest is None:
        return gates.decay[:, None] * _softplus(x)
    return (gates.lowest / (1 + (gates.decay[:, None] * x).double().exp())).float()


def _lightning(mixed: Tensor, a: Tensor, b: Tensor, spec: LinearSpec, gates: Gates) -> _Rows:
    """A rate of each head."""
    return _Rows(*_parted(mixed, spec), gates.decay[:, None].expand(CHUNK, -1, -1), None)


def _parted(mixed: Tensor, spec: LinearSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, by heads."""
    size = spec.key_heads * spec.key_dim
    q, k, v = torch.split(mixed, [size, size, spec.value_heads * spec.value_dim], -1)
    shape = CHUNK, spec.key_heads, spec.key_dim
    return q.reshape(shape), k.reshape(shape), v.reshape(CHUNK, spec.value_heads, spec.value_dim)


def _mamba(mixed: Tensor, a: Tensor, b: Tensor, spec: LinearSpec, gates: Gates) -> _Rows:
    """Of each channel the length of a step in place of a rate."""
    keys, queries = torch.split(b.float()[:, None], [spec.key_dim, spec.key_dim], -1)
    return _Rows(queries, keys, mixed[..., None], _softplus(a.float() + gates.bias)[..., None], None)


def _mamba2(mixed: Tensor, a: Tensor, b: Tensor, spec: LinearSpec, gates: Gates) -> _Rows:
    """The convolution's channels are values, keys and queries.

    The length of a step keeps ``time_step_limit`` in prefill and in decoding. transformers' form for many tokens does
    so, from which training and its forward without a cache have their numbers; its form for one token does not.
    """
    size = spec.key_heads * spec.key_dim
    v, k, q = torch.split(mixed, [spec.value_heads * spec.value_dim, size, size], -1)
    shape = CHUNK, spec.key_heads, spec.key_dim
    step = _softplus(a.float() + gates.bias).clamp(*gates.limits)
    values = v.reshape(CHUNK, spec.value_heads, spec.value_dim)
    return _Rows(q.reshape(shape), k.reshape(shape), values, (gates.decay * step)[..., None], step)


_RULES: dict[Kind, Callable[[Tensor, Tensor, Tensor, LinearSpec, Gates], _Rows]] = {
    Kind.GATED_DELTA: _delta,
    Kind.KIMI_DELTA: _delta,
    Kind.LIGHTNING: _lightning,
    Kind.MAMBA: _mamba,
    Kind.MAMBA2: _mamba2,
}
_CORRECTED = {Kind.GATED_DELTA, Kind.KIMI_DELTA}
"""Kinds whose updates are corrected by what the state holds for their key already."""


def _normalized(x: Tensor) -> Tensor:
    return x * (
        1 / (_dots(x, x)[..., None] + 1e-6).double().sqrt().float()
    )  # torch's in float32 is not always the nearest


def _silu(x: Tensor) -> Tensor:
    return x / (1 + _exponential(-x))


def _softplus(x: Tensor) -> Tensor:
    return torch.where(x > 20, x, x.double().exp().log1p().float())


def _exponential(x: Tensor) -> Tensor:
    """Returns e^x with the roundings of ``exponential.h``: a fused operation there is a float64 operation here."""
    x = (x * _LOG2E).clamp(max=200.0)
    whole = x.round()
    rest, total = (x - whole).double(), torch.full_like(x, _EXP2[0])
    for coefficient in torch.tensor(_EXP2[1:]).double():
        total = (total.double() * rest + coefficient).float()
    power = (whole.clamp(min=-126.0).long() + 1023 << 52).view(torch.float64)
    return torch.where(x < -126, 0.0, (total.double() * power).float())


def _fold(state: Tensor, tile: list[Tensor], spec: LinearSpec, gates: Gates) -> Tensor:
    """Returns the state after a whole chunk, row after row."""
    _, keys, updates, decays = tile
    if not spec.key_dim:
        return state
    if spec.kind is Kind.MAMBA:
        for row in range(CHUNK):
            state = _stepped(state, keys[row], updates[row], decays[row], gates)
        return state
    faded = _widened(keys, spec) * _exponential(decays[-1] - decays)
    state = state * _exponential(decays[-1])[..., None]
    for row in range(CHUNK):
        state = state + faded[row][:, :, None] * updates[row][:, None]
    return state
