"""The gated delta rule over chunks at absolute positions, in one order of sums for one token and for many.

    G_t = G_(t-1) + g_t                                           from the chunk's beginning, token by token
    u_t = b_t (v_t - e^(G_t) S k_t - sum over j < t in the chunk of (k_t k_j) e^(G_t - G_j) u_j)
    o_t = e^(G_t) S q_t + sum over j < t in the chunk of (q_t k_j) e^(G_t - G_j) u_j + (q_t k_t) u_t
    S'  = e^(G_C) S + sum over j of e^(G_C - G_j) k_j (x) u_j     at the chunk's end

Every product and sum has the shape of a whole chunk, and a token its place in it, whatever else a step holds: kernels
of torch that round by shape or place then round each token alike. Numbers are float32, the convolution's result is
rounded to the model's dtype, as in transformers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.checkpoint.linear import CHUNK, LinearSpec, Slots
from paceline.model.linear.plan import NONE, Chunk, LinearStep, SequencePart


class LinearPools(NamedTuple):
    """Memory of one linear layer: slots of states, each with the convolution's inputs before it, and of rows."""

    states: Tensor  # [slots, value heads, key_dim, value_dim] float32
    tails: Tensor  # [slots, width - 1, conv_dim]
    inputs: Tensor  # [slots, CHUNK, conv_dim], of the convolution
    keys: Tensor  # [slots, CHUNK, key heads, key_dim] float32, normalized
    updates: Tensor  # [slots, CHUNK, value heads, value_dim] float32: u
    decays: Tensor  # [slots, CHUNK, value heads] float32: G

    @classmethod
    def of(cls, spec: LinearSpec, slots: Slots, dtype: torch.dtype) -> LinearPools:
        """Memory on the CPU, written to here and now, so that the process does not grow while it serves."""
        shapes = [
            (torch.float32, (slots.states, spec.value_heads, spec.key_dim, spec.value_dim)),
            (dtype, (slots.states, spec.width - 1, spec.conv_dim)),
            (dtype, (slots.rows, CHUNK, spec.conv_dim)),
            (torch.float32, (slots.rows, CHUNK, spec.key_heads, spec.key_dim)),
            (torch.float32, (slots.rows, CHUNK, spec.value_heads, spec.value_dim)),
            (torch.float32, (slots.rows, CHUNK, spec.value_heads)),
        ]
        return cls(*(torch.empty(shape, dtype=kind).zero_() for kind, shape in shapes))

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """The pools whose slots hold the rows of a chunk."""
        return self[2:]


class LinearInputs(NamedTuple):
    """What linear layers are called with beside hidden states."""

    step: LinearStep
    pools: dict[int, LinearPools]
    """Of each linear layer, by its index."""


class Gates(NamedTuple):
    """What a layer projects hidden states to, for all tokens of a step, and its own numbers."""

    inputs: Tensor  # [T, conv_dim]
    a: Tensor  # [T, value heads]
    b: Tensor  # [T, value heads]
    weight: Tensor  # [width, conv_dim] float32
    log_rate: Tensor  # [value heads]: A_log
    bias: Tensor  # [value heads]: dt_bias
    scale: float
    """Factor of b's sigmoid: 2 allows negative eigenvalues."""


def gated_delta(step: LinearStep, pools: LinearPools, spec: LinearSpec, gates: Gates) -> Tensor:
    """Runs the tokens of all sequences, and writes rows and states. Returns ``[T, value heads, value_dim]`` float32,
    zeros for padding."""
    out = gates.inputs.new_zeros(len(gates.inputs), spec.value_heads, spec.value_dim, dtype=torch.float32)
    at = 0
    for part in step.sequences:
        at = _run(part, pools, spec, gates, at, out)
    return out


def _run(part: SequencePart, pools: LinearPools, spec: LinearSpec, gates: Gates, at: int, out: Tensor) -> int:
    """Runs one sequence whose first token is ``at``; returns the token behind its last one."""
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
            out[at : at + chunk.count] = _tokens(tile, chunk, state, tail, spec, gates, at)
            for own, pool in zip(tile, pools.rows, strict=True):
                if chunk.rows != NONE:
                    pool[chunk.rows, chunk.first : end] = own[chunk.first : end]
                for offset, slot, to in chunk.also:
                    pool[slot, to] = own[offset]
            at += chunk.count
        if chunk is not part.chunks[-1] or chunk.store != NONE:
            inputs, keys, updates, decays = tile
            state, tail = _fold(state, keys, updates, decays, spec), inputs[CHUNK - spec.width + 1 :]
        if chunk.store != NONE:
            pools.states[chunk.store], pools.tails[chunk.store] = state, tail
    return at


def _tokens(
    tile: list[Tensor], chunk: Chunk, state: Tensor, tail: Tensor, spec: LinearSpec, gates: Gates, at: int
) -> Tensor:
    """Computes the tokens of a chunk, the first of which is ``at``, and their rows; returns their outputs."""
    inputs, keys, updates, decays = tile
    first, end = chunk.first, chunk.first + chunk.count
    own = slice(first, end)
    inputs[own] = gates.inputs[at : at + chunk.count]
    q, k, v = _convolved(inputs, tail, gates.weight, spec)
    keys[own] = k[own]
    beta, rate = _gated(gates, spec, first, at, chunk.count)
    groups = spec.value_heads // spec.key_heads
    q, wide = q.repeat_interleave(groups, 1), keys.repeat_interleave(groups, 1)
    out, rows = torch.zeros_like(updates), torch.arange(CHUNK)[:, None]
    decays[own] = _summed(decays[first - 1] if first else torch.zeros_like(rate[0]), rate[own])
    for t in range(first, end):
        total = decays[t]
        both = torch.stack((wide[t], q[t]))  # [2, heads, key_dim]
        faded = torch.where(rows < t, total - decays, -torch.inf).exp()  # [CHUNK, heads]
        weights = (wide * both[:, None]).sum(-1)  # [2, CHUNK, heads]
        read = (state * both[..., None]).sum(2) * total.exp()[:, None]  # [2, heads, value_dim]
        read = read + ((weights * faded)[..., None] * updates).sum(1)
        updates[t] = (v[t] - read[0]) * beta[t][:, None]
        out[t] = read[1] + weights[1, t][:, None] * updates[t]
    return out[own]


def _summed(before: Tensor, rates: Tensor) -> Tensor:
    """Sums from the chunk's beginning, row after row: a cumulative sum of several rows would group them by the step."""
    sums = []
    for rate in rates:
        sums.append(before := before + rate)
    return torch.stack(sums)


def _convolved(inputs: Tensor, tail: Tensor, weight: Tensor, spec: LinearSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys ``[CHUNK, key heads, key_dim]``, normalized, and values of a chunk's rows."""
    x = torch.cat((tail, inputs)).float()
    total = x[:CHUNK] * weight[0]
    for place in range(1, spec.width):
        total = total + x[place : place + CHUNK] * weight[place]
    mixed = F.silu(total.to(inputs.dtype)).float()
    size = spec.key_heads * spec.key_dim
    q, k, v = torch.split(mixed, [size, size, spec.value_heads * spec.value_dim], -1)
    shape = CHUNK, spec.key_heads, spec.key_dim
    return (
        _normalized(q.reshape(shape)) * spec.key_dim**-0.5,
        _normalized(k.reshape(shape)),
        v.reshape(CHUNK, spec.value_heads, spec.value_dim),
    )


def _normalized(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _gated(gates: Gates, spec: LinearSpec, first: int, at: int, count: int) -> tuple[Tensor, Tensor]:
    """Strength of each token's update, and its logarithm of decay, ``[CHUNK, value heads]`` float32."""
    a, b = (gates.a.new_zeros(CHUNK, spec.value_heads) for _ in range(2))
    a[first : first + count], b[first : first + count] = gates.a[at : at + count], gates.b[at : at + count]
    rate = -gates.log_rate.float().exp() * F.softplus(a.float() + gates.bias)
    return (b.sigmoid() * gates.scale).float(), rate


def _fold(state: Tensor, keys: Tensor, updates: Tensor, decays: Tensor, spec: LinearSpec) -> Tensor:
    """The state behind a whole chunk, row after row."""
    faded = (decays[-1] - decays).exp()
    wide = keys.repeat_interleave(spec.value_heads // spec.key_heads, 1) * faded[..., None]
    state = state * decays[-1].exp()[:, None, None]
    for row in range(CHUNK):
        state = state + wide[row][:, :, None] * updates[row][:, None]
    return state
