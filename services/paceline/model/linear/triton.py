"""Linear layers for CUDA: one program for a head's columns, sequence after sequence of a group, chunk after chunk.

Formulas, and the rows and states that are kept, are the same as in ``operator.py``. A chunk is always one tile of CHUNK
rows, of which those before the step's are read and those after it are zeros. Each product is taken over the same tiles
and each sum in one order, so a token's bits do not depend on the rest of the step. Decoding, prefill and verification
run the same code over the same tile. The order differs from the CPU's.

A launch depends only on the number of tokens. Kernels read all other numbers of the step on the device, so steps can be
recorded. Sequences of a *group* (``LinearStep.groups``) may read what earlier ones have written, and run in one
program. Heads and columns share nothing but the queries' and keys' inputs, which each of their programs writes: the
same numbers to the same place.

Imports triton, so that it is imported only where linear layers run on a GPU (``layers.py``).
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from paceline.checkpoint.linear import Kind, LinearSpec
from paceline.model.linear.operator import Gates, LinearPools

NUM_GROUPS = 64
"""Programs at most that share the groups of a step, for each head's columns."""
_COLUMNS = 32
"""Columns of a state in one program. A head of 128 columns has four programs, which fill a device in decoding."""
_CHANNELS = 128
"""Channels of a convolution, or of Mamba, in one program."""
_PLAIN, _LIGHTNING, _MAMBA2 = 0, 1, 2
"""How a token's updates and decay come from its projections (``_RULES`` of ``operator.py``)."""
_RULE_OF = {
    Kind.GATED_DELTA: _PLAIN,
    Kind.KIMI_DELTA: _PLAIN,
    Kind.LIGHTNING: _LIGHTNING,
    Kind.MAMBA2: _MAMBA2,
    Kind.CONVOLUTION: _PLAIN,
}


@triton.jit
def _softplus(x):  # type: ignore[no-untyped-def]
    return tl.where(x > 20, x, tl.log(1 + tl.exp(tl.minimum(x, 20).to(tl.float64))).to(tl.float32))


@triton.jit
def _row(x, is_row):  # type: ignore[no-untyped-def]
    """The row of a tile for which ``is_row`` is True."""
    return tl.sum(tl.where(is_row[:, None], x, 0.0), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _sources(  # type: ignore[no-untyped-def]
    inputs, rows, tails, slot, own, before, place, input_stride, CHANNELS: tl.constexpr, HISTORY: tl.constexpr
):
    """Addresses of the convolution's inputs at ``place`` in a chunk, below 0 before it; and which of them there are.

    ``own``, ``before``: slot of rows, first computed row and its token, of the chunk and of the one before it. A first
    row below 0: this step has no chunk before it, and the state's ``slot`` holds the inputs before the chunk.
    """
    own_slot, own_first, own_token, own_end = own
    last_slot, last_first, last_token = before
    here, there, earlier = place >= 0, last_first >= 0, place + 16
    is_new = here & (place >= own_first) | (earlier >= last_first) & (here == 0) & there
    in_tail = (here == 0) & (there == 0)
    token = tl.where(here, own_token + place - own_first, last_token + earlier - last_first)
    row = tl.where(here, own_slot * 16 + place, last_slot * 16 + earlier)
    at = tl.where(in_tail, tails + (slot * HISTORY + HISTORY + place) * CHANNELS, rows + row * CHANNELS)
    at = tl.where(is_new, inputs + token * input_stride, at)
    return at, (place < own_end) & ((slot >= 0) | (in_tail == 0))


@triton.jit  # type: ignore[untyped-decorator]
def _convolved(  # type: ignore[no-untyped-def]
    inputs,
    rows,
    tails,
    weight,
    shift,
    slot,
    own,
    before,
    input_stride,
    channels,
    is_channel,
    CHANNELS: tl.constexpr,
    HISTORY: tl.constexpr,
    SHIFTED: tl.constexpr,
    ROUNDS: tl.constexpr,
    SILU: tl.constexpr,
):
    """The convolution of a chunk's rows in some channels, and SiLU of it."""
    place = tl.arange(0, 16)
    total = tl.zeros([16, channels.shape[0]], tl.float32)
    for tap in tl.static_range(HISTORY + 1):
        at, there = _sources(
            inputs, rows, tails, slot, own, before, place + tap - HISTORY, input_stride, CHANNELS, HISTORY
        )
        x = tl.load(at[:, None] + channels[None, :], there[:, None] & is_channel[None, :], 0.0).to(tl.float32)
        total += x * tl.load(weight + tap * CHANNELS + channels, is_channel, 0.0)[None, :]
    if SHIFTED:
        total += tl.load(shift + channels, is_channel, 0.0)[None, :]
    if ROUNDS:
        total = total.to(inputs.dtype.element_ty).to(tl.float32)
    if SILU:
        total = (total / (1 + tl.exp(-total))).to(inputs.dtype.element_ty).to(tl.float32)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _keep(  # type: ignore[no-untyped-def]
    inputs,
    rows,
    tails,
    numbers,
    slot,
    own,
    before,
    store,
    num_also,
    input_stride,
    channels,
    is_channel,
    CHANNELS: tl.constexpr,
    HISTORY: tl.constexpr,
):
    """Writes the convolution's inputs of a chunk to its slot, to further places, and to the tail of a state."""
    place = tl.arange(0, 16)
    own_slot, own_first, _, own_end = own
    at, there = _sources(inputs, rows, tails, slot, own, before, place, input_stride, CHANNELS, HISTORY)
    x = tl.load(at[:, None] + channels[None, :], there[:, None] & is_channel[None, :], 0.0)
    is_own = (place >= own_first) & (place < own_end) & (own_slot >= 0)
    to = rows + (own_slot * 16 + place) * CHANNELS
    tl.store(to[:, None] + channels[None, :], x, is_own[:, None] & is_channel[None, :])
    for index in range(num_also):
        further = numbers + 3 * index
        to = rows + (tl.load(further + 1) * 16 + tl.load(further + 2)) * CHANNELS + place * 0
        tl.store(to[:, None] + channels[None, :], x, (place == tl.load(further))[:, None] & is_channel[None, :])
    first_kept = 16 - HISTORY
    to = tails + (store * HISTORY + place - first_kept) * CHANNELS
    tl.store(to[:, None] + channels[None, :], x, ((place >= first_kept) & (store >= 0))[:, None] & is_channel[None, :])


# Variants for kinds of sizes and of addresses would be compiled in the middle of serving (``attention/triton.py``).
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["input_stride", "a_stride", "b_stride"],
    do_not_specialize_on_alignment=["numbers", "inputs", "a", "b", "out"],
)
def _recurrent(  # type: ignore[no-untyped-def]
    numbers,
    inputs,
    a,
    b,
    weight,
    shift,
    decay,
    bias,
    skip,
    states,
    tails,
    rows,
    keys,
    updates,
    decays,
    out,
    input_stride,
    a_stride,
    b_stride,
    query_scale,
    strength_scale,
    lowest,
    shortest,
    longest,
    RULE: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
    HISTORY: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    CONVOLVED: tl.constexpr,
    SHIFTED: tl.constexpr,
    SKIPS: tl.constexpr,
    IS_LOWEST: tl.constexpr,
    ROUNDS_RATES: tl.constexpr,
    ROUNDS_CONVOLUTION: tl.constexpr,
):
    """Runs the groups' tokens for some columns of a value head, and writes what is kept of them."""
    head, columns = tl.program_id(1), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    place, dims = tl.arange(0, 16), tl.arange(0, KEY_TILE)
    is_dim, is_column = dims < KEY_DIM, columns < VALUE_DIM
    in_state = is_dim[:, None] & is_column[None, :]
    of_query, of_key = QUERIES + key_head * KEY_DIM + dims, KEYS + key_head * KEY_DIM + dims
    of_value = VALUES + head * VALUE_DIM + columns
    state_dims = dims[:, None] * VALUE_DIM + columns[None, :]
    for group in range(tl.program_id(0), tl.load(numbers), tl.num_programs(0)):
        at = numbers + tl.load(numbers + 1 + 3 * group)
        token = tl.load(numbers + 2 + 3 * group)
        for _ in range(tl.load(numbers + 3 + 3 * group)):
            slot, num_chunks = tl.load(at), tl.load(at + 1)
            at += 2
            state = states + (slot * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM) + state_dims
            total = tl.load(state, in_state & (slot >= 0), 0.0)
            last_slot, last_first, last_token = slot, slot * 0 - 1, token
            for index in range(num_chunks):
                row_slot, first, count = tl.load(at), tl.load(at + 1), tl.load(at + 2)
                store, num_also = tl.load(at + 3), tl.load(at + 4)
                end = first + count
                own, before = (row_slot, first, token, end), (last_slot, last_first, last_token)
                is_known, is_own = place < first, (place >= first) & (place < end)
                row = row_slot * 16 + place
                at_keys = keys + ((row * KEY_HEADS + key_head) * KEY_DIM)[:, None] + dims[None, :]
                at_updates = updates + ((row * VALUE_HEADS + head) * VALUE_DIM)[:, None] + columns[None, :]
                k = tl.load(at_keys, is_known[:, None] & is_dim[None, :], 0.0)
                u = tl.load(at_updates, is_known[:, None] & is_column[None, :], 0.0)
                at_decays = decays + row * VALUE_HEADS + head
                if BY_CHANNEL:
                    at_decays = decays + ((row * VALUE_HEADS + head) * KEY_DIM)[:, None] + dims[None, :]
                    sums = tl.load(at_decays, is_known[:, None] & is_dim[None, :], 0.0)
                else:
                    sums = tl.load(at_decays, is_known, 0.0)
                if count > 0:
                    tokens = token + place - first
                    if CONVOLVED:
                        q = _convolved(
                            inputs, rows, tails, weight, shift, slot, own, before, input_stride, of_query, is_dim,
                            CHANNELS, HISTORY, SHIFTED, ROUNDS_CONVOLUTION, True,
                        )  # fmt: skip
                        own_k = _convolved(
                            inputs, rows, tails, weight, shift, slot, own, before, input_stride, of_key, is_dim,
                            CHANNELS, HISTORY, SHIFTED, ROUNDS_CONVOLUTION, True,
                        )  # fmt: skip
                        v = _convolved(
                            inputs, rows, tails, weight, shift, slot, own, before, input_stride, of_value, is_column,
                            CHANNELS, HISTORY, SHIFTED, ROUNDS_CONVOLUTION, True,
                        )  # fmt: skip
                    else:
                        of_token = inputs + (tokens * input_stride)[:, None]
                        q = tl.load(of_token + of_query[None, :], is_own[:, None] & is_dim[None, :], 0.0)
                        own_k = tl.load(of_token + of_key[None, :], is_own[:, None] & is_dim[None, :], 0.0)
                        v = tl.load(of_token + of_value[None, :], is_own[:, None] & is_column[None, :], 0.0)
                        q, own_k, v = q.to(tl.float32), own_k.to(tl.float32), v.to(tl.float32)
                    strength = tl.full([16], 1.0, tl.float32)
                    if RULE == 0:
                        q = q * (1 / tl.sqrt_rn(tl.sum(q * q, 1) + 1e-6))[:, None] * query_scale
                        own_k = own_k * (1 / tl.sqrt_rn(tl.sum(own_k * own_k, 1) + 1e-6))[:, None]
                        given = tl.load(b + tokens * b_stride + head, is_own, 0.0).to(tl.float64)
                        strength = (1 / (1 + tl.exp(-given))).to(tl.float32).to(b.dtype.element_ty).to(tl.float32)
                        strength *= strength_scale
                    rate = tl.load(decay + head)
                    if BY_CHANNEL:
                        of_head = head * KEY_DIM + dims
                        x = tl.load(
                            a + (tokens * a_stride)[:, None] + of_head[None, :], is_own[:, None] & is_dim[None, :], 0.0
                        )
                        x = x.to(tl.float32) + tl.load(bias + of_head, is_dim, 0.0)[None, :]
                    elif RULE != 1:
                        x = tl.load(a + tokens * a_stride + head, is_own, 0.0).to(tl.float32) + tl.load(bias + head)
                    if RULE == 1:
                        rates = tl.full([16], 1.0, tl.float32) * rate
                    elif RULE == 2:
                        strength = tl.minimum(tl.maximum(_softplus(x), shortest), longest)
                        rates = rate * strength
                    elif IS_LOWEST:
                        rates = (lowest / (1 + tl.exp((rate * x).to(tl.float64)))).to(tl.float32)
                    else:
                        rates = rate * _softplus(x)
                    if ROUNDS_RATES:
                        rates = rates.to(a.dtype.element_ty).to(tl.float32)
                    k = tl.where(is_known[:, None], k, tl.where(is_own[:, None], own_k, 0.0))
                    if BY_CHANNEL:
                        until = _row(sums, place == first - 1)
                    else:
                        until = tl.sum(tl.where(place == first - 1, sums, 0.0), 0)
                    for t in range(first, end):
                        is_t, earlier = place == t, place <= t
                        own_key, own_query = _row(k, is_t), _row(q, is_t)
                        if BY_CHANNEL:
                            until += _row(rates, is_t)
                            sums = tl.where(is_t[:, None], until[None, :], sums)
                            since = tl.exp(until)
                            fade = tl.exp(tl.where(earlier[:, None], until[None, :] - sums, 0.0))
                            of_keys = tl.sum(k * fade * own_key[None, :], 1)
                            of_queries = tl.sum(k * fade * own_query[None, :], 1)
                            by_key = tl.sum(total * (own_key * since)[:, None], 0)
                            by_query = tl.sum(total * (own_query * since)[:, None], 0)
                        else:
                            until += tl.sum(tl.where(is_t, rates, 0.0), 0)
                            sums = tl.where(is_t, until, sums)
                            since = tl.exp(until)
                            fade = tl.exp(tl.where(earlier, until - sums, 0.0))
                            of_keys = tl.sum(k * own_key[None, :], 1) * fade
                            of_queries = tl.sum(k * own_query[None, :], 1) * fade
                            by_key = tl.sum(total * own_key[:, None], 0) * since
                            by_query = tl.sum(total * own_query[:, None], 0) * since
                        value = _row(v, is_t)
                        update = value
                        if RULE == 0:
                            update = value - by_key - tl.sum(tl.where(place < t, of_keys, 0.0)[:, None] * u, 0)
                        update = update * tl.sum(tl.where(is_t, strength, 0.0), 0)
                        u = tl.where(is_t[:, None], update[None, :], u)
                        result = by_query + tl.sum(tl.where(earlier, of_queries, 0.0)[:, None] * u, 0)
                        if SKIPS:
                            result += value * tl.load(skip + head)
                        at_out = out + ((token + t - first) * VALUE_HEADS + head) * VALUE_DIM + columns
                        tl.store(at_out, result.to(out.dtype.element_ty), is_column)
                    kept = is_own & (row_slot >= 0)
                    tl.store(at_keys, k, kept[:, None] & is_dim[None, :])
                    tl.store(at_updates, u, kept[:, None] & is_column[None, :])
                    if BY_CHANNEL:
                        tl.store(at_decays, sums, kept[:, None] & is_dim[None, :])
                    else:
                        tl.store(at_decays, sums, kept)
                    for further in range(num_also):
                        other = at + 5 + 3 * further
                        is_it = place == tl.load(other)
                        to = tl.load(other + 1) * 16 + tl.load(other + 2) + place * 0
                        to_keys = keys + ((to * KEY_HEADS + key_head) * KEY_DIM)[:, None] + dims[None, :]
                        tl.store(to_keys, k, is_it[:, None] & is_dim[None, :])
                        to_updates = updates + ((to * VALUE_HEADS + head) * VALUE_DIM)[:, None] + columns[None, :]
                        tl.store(to_updates, u, is_it[:, None] & is_column[None, :])
                        if BY_CHANNEL:
                            to_decays = decays + ((to * VALUE_HEADS + head) * KEY_DIM)[:, None] + dims[None, :]
                            tl.store(to_decays, sums, is_it[:, None] & is_dim[None, :])
                        else:
                            tl.store(decays + to * VALUE_HEADS + head, sums, is_it)
                if CONVOLVED:
                    _keep(
                        inputs, rows, tails, at + 5, slot, own, before, store, num_also, input_stride, of_query, is_dim,
                        CHANNELS, HISTORY,
                    )  # fmt: skip
                    _keep(
                        inputs, rows, tails, at + 5, slot, own, before, store, num_also, input_stride, of_key, is_dim,
                        CHANNELS, HISTORY,
                    )  # fmt: skip
                    _keep(
                        inputs, rows, tails, at + 5, slot, own, before, store, num_also, input_stride, of_value,
                        is_column, CHANNELS, HISTORY,
                    )  # fmt: skip
                if (index < num_chunks - 1) | (store >= 0):
                    if BY_CHANNEL:
                        until = _row(sums, place == 15)
                        faded = k * tl.exp(until[None, :] - sums)
                        total = total * tl.exp(until)[:, None]
                    else:
                        until = tl.sum(tl.where(place == 15, sums, 0.0), 0)
                        faded = k * tl.exp(until - sums)[:, None]
                        total = total * tl.exp(until)
                    for t in range(16):
                        total += _row(faded, place == t)[:, None] * _row(u, place == t)[None, :]
                    stored = states + (store * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM) + state_dims
                    tl.store(stored, total, in_state & (store >= 0))
                last_slot, last_first, last_token = row_slot, first, token
                token += count
                at += 5 + 3 * num_also
            tl.debug_barrier()  # later sequences of the group read what this one has written


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["input_stride"], do_not_specialize_on_alignment=["numbers", "inputs", "out"]
)
def _convolution(  # type: ignore[no-untyped-def]
    numbers,
    inputs,
    weight,
    shift,
    tails,
    rows,
    out,
    input_stride,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HISTORY: tl.constexpr,
    SHIFTED: tl.constexpr,
    ROUNDS_CONVOLUTION: tl.constexpr,
    SILU: tl.constexpr,
):
    """Runs the groups' tokens through some channels of a convolution alone, and writes what is kept of them."""
    columns, place = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, 16)
    is_column = columns < CHANNELS
    for group in range(tl.program_id(0), tl.load(numbers), tl.num_programs(0)):
        at = numbers + tl.load(numbers + 1 + 3 * group)
        token = tl.load(numbers + 2 + 3 * group)
        for _ in range(tl.load(numbers + 3 + 3 * group)):
            slot, num_chunks = tl.load(at), tl.load(at + 1)
            at += 2
            last_slot, last_first, last_token = slot, slot * 0 - 1, token
            for _ in range(num_chunks):
                row_slot, first, count = tl.load(at), tl.load(at + 1), tl.load(at + 2)
                store, num_also = tl.load(at + 3), tl.load(at + 4)
                own, before = (row_slot, first, token, first + count), (last_slot, last_first, last_token)
                if count > 0:
                    total = _convolved(
                        inputs, rows, tails, weight, shift, slot, own, before, input_stride, columns, is_column,
                        CHANNELS, HISTORY, SHIFTED, ROUNDS_CONVOLUTION, SILU,
                    )  # fmt: skip
                    to = out + (token + place - first) * CHANNELS
                    is_own = (place >= first) & (place < first + count)
                    total = total.to(out.dtype.element_ty)
                    tl.store(to[:, None] + columns[None, :], total, is_own[:, None] & is_column[None, :])
                _keep(
                    inputs, rows, tails, at + 5, slot, own, before, store, num_also, input_stride, columns, is_column,
                    CHANNELS, HISTORY,
                )  # fmt: skip
                last_slot, last_first, last_token = row_slot, first, token
                token += count
                at += 5 + 3 * num_also
            tl.debug_barrier()  # later sequences of the group read what this one has written


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["input_stride", "a_stride", "b_stride"],
    do_not_specialize_on_alignment=["numbers", "inputs", "a", "b", "out"],
)
def _scanned(  # type: ignore[no-untyped-def]
    numbers,
    inputs,
    a,
    b,
    decay,
    bias,
    skip,
    states,
    keys,
    updates,
    decays,
    out,
    input_stride,
    a_stride,
    b_stride,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr,
):
    """Runs the groups' tokens through some channels of Mamba, and writes what is kept of them."""
    columns, dims = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, KEY_TILE)
    is_column, is_dim = columns < CHANNELS, dims < KEY_DIM
    of_state = columns[:, None] * KEY_DIM + dims[None, :]
    in_state = is_column[:, None] & is_dim[None, :]
    speed = tl.load(decay + of_state, in_state, 0.0)
    offset, share = tl.load(bias + columns, is_column, 0.0), tl.load(skip + columns, is_column, 0.0)
    for group in range(tl.program_id(0), tl.load(numbers), tl.num_programs(0)):
        at = numbers + tl.load(numbers + 1 + 3 * group)
        token = tl.load(numbers + 2 + 3 * group)
        for _ in range(tl.load(numbers + 3 + 3 * group)):
            slot, num_chunks = tl.load(at), tl.load(at + 1)
            at += 2
            total = tl.load(states + slot * (CHANNELS * KEY_DIM) + of_state, in_state & (slot >= 0), 0.0)
            for index in range(num_chunks):
                row_slot, first, count = tl.load(at), tl.load(at + 1), tl.load(at + 2)
                store, num_also = tl.load(at + 3), tl.load(at + 4)
                state = total
                for t in range(first + count):
                    row, own = row_slot * 16 + t, token + t - first
                    known, new = is_column & (t < first), is_column & (t >= first)
                    x = tl.load(inputs + own * input_stride + columns, new, 0.0).to(tl.float32)
                    step = _softplus(tl.load(a + own * a_stride + columns, new, 0.0).to(tl.float32) + offset)
                    step = tl.where(t < first, tl.load(decays + row * CHANNELS + columns, known, 0.0), step)
                    update = tl.where(t < first, tl.load(updates + row * CHANNELS + columns, known, 0.0), step * x)
                    key = tl.load(b + own * b_stride + dims, is_dim & (t >= first), 0.0).to(tl.float32)
                    key = tl.where(t < first, tl.load(keys + row * KEY_DIM + dims, is_dim & (t < first), 0.0), key)
                    query = tl.load(b + own * b_stride + KEY_DIM + dims, is_dim & (t >= first), 0.0).to(tl.float32)
                    state = state * tl.exp(speed * step[:, None]) + key[None, :] * update[:, None]
                    result = tl.sum(state * query[None, :], 1) + x * share
                    tl.store(out + own * CHANNELS + columns, result.to(out.dtype.element_ty), new)
                    kept = (t >= first) & (row_slot >= 0)
                    tl.store(keys + row * KEY_DIM + dims, key, is_dim & kept)
                    tl.store(updates + row * CHANNELS + columns, update, is_column & kept)
                    tl.store(decays + row * CHANNELS + columns, step, is_column & kept)
                    for further in range(num_also):
                        other = at + 5 + 3 * further
                        is_it, to = tl.load(other) == t, tl.load(other + 1) * 16 + tl.load(other + 2)
                        tl.store(keys + to * KEY_DIM + dims, key, is_dim & is_it)
                        tl.store(updates + to * CHANNELS + columns, update, is_column & is_it)
                        tl.store(decays + to * CHANNELS + columns, step, is_column & is_it)
                if (index < num_chunks - 1) | (store >= 0):
                    total = state
                    tl.store(states + store * (CHANNELS * KEY_DIM) + of_state, total, in_state & (store >= 0))
                token += count
                at += 5 + 3 * num_also
            tl.debug_barrier()  # later sequences of the group read what this one has written


def run_step(numbers: Tensor, pools: LinearPools, spec: LinearSpec, gates: Gates) -> Tensor:
    """Runs the tokens of all sequences, and writes rows and states (``operator.run_step``).

    Args:
        numbers: ``LinearStep.encode``, on the device. Numbers after its end are not read.

    Returns ``[T, value heads, value_dim]`` in the model's dtype, zeros for padding.
    """
    gates = gates._replace(inputs=_dense(gates.inputs), a=_dense(gates.a), b=_dense(gates.b))
    if spec.kind is Kind.CONVOLUTION:
        return _convolve(numbers, pools, spec, gates, silu=False)
    if spec.kind is not Kind.MAMBA:
        return _recur(numbers, pools, spec, gates)
    assert gates.select is not None
    values = _convolve(numbers, pools, spec, gates, silu=True)[..., 0]
    a, b = gates.select(values)
    return _scan(numbers, pools, spec, gates._replace(inputs=values, a=_dense(a), b=_dense(b)))


def _recur(numbers: Tensor, pools: LinearPools, spec: LinearSpec, gates: Gates) -> Tensor:
    inputs, bias = gates.inputs, gates.bias
    out = inputs.new_zeros(inputs.shape[0], spec.value_heads, spec.value_dim)
    keys_at, values_at = spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim
    first_values = spec.kind is Kind.MAMBA2
    shortest, longest = gates.limits
    blocks = triton.cdiv(spec.value_dim, _COLUMNS)
    _recurrent[(min(NUM_GROUPS, inputs.shape[0]), spec.value_heads, blocks)](
        numbers,
        inputs,
        gates.a,
        gates.b,
        gates.weight,
        bias if gates.shift is None else gates.shift,
        gates.decay,
        bias,
        bias if gates.skip is None else gates.skip,
        *pools,
        out,
        inputs.stride(0),
        gates.a.stride(0),
        gates.b.stride(0),
        1 / math.sqrt(spec.key_dim),
        float(gates.scale),
        gates.lowest or 0.0,
        float(shortest),
        float(longest),
        RULE=_RULE_OF[spec.kind],
        KEY_HEADS=spec.key_heads,
        VALUE_HEADS=spec.value_heads,
        KEY_DIM=spec.key_dim,
        VALUE_DIM=spec.value_dim,
        KEY_TILE=triton.next_power_of_2(spec.key_dim),
        COLUMNS=_COLUMNS,
        CHANNELS=spec.conv_dim,
        HISTORY=spec.width - 1,
        QUERIES=values_at + keys_at if first_values else 0,
        KEYS=values_at if first_values else keys_at,
        VALUES=0 if first_values else 2 * keys_at,
        BY_CHANNEL=spec.decay_dim > 1,
        CONVOLVED=spec.has_convolution,
        SHIFTED=gates.shift is not None,
        SKIPS=gates.skip is not None,
        IS_LOWEST=gates.lowest is not None,
        ROUNDS_RATES=gates.rounds_rates,
        ROUNDS_CONVOLUTION=gates.rounds_convolution,
        num_warps=8,  # with 4, registers of Kimi delta and Mamba2 spill
    )
    return out


def _convolve(numbers: Tensor, pools: LinearPools, spec: LinearSpec, gates: Gates, *, silu: bool) -> Tensor:
    inputs = gates.inputs
    out = inputs.new_zeros(inputs.shape[0], spec.conv_dim, 1)
    blocks = triton.cdiv(spec.conv_dim, _CHANNELS)
    _convolution[(min(NUM_GROUPS, inputs.shape[0]), blocks)](
        numbers,
        inputs,
        gates.weight,
        gates.weight if gates.shift is None else gates.shift,
        pools.tails,
        pools.inputs,
        out,
        inputs.stride(0),
        CHANNELS=spec.conv_dim,
        COLUMNS=_CHANNELS,
        HISTORY=spec.width - 1,
        SHIFTED=gates.shift is not None,
        ROUNDS_CONVOLUTION=gates.rounds_convolution,
        SILU=silu,
        num_warps=8,
    )
    return out


def _scan(numbers: Tensor, pools: LinearPools, spec: LinearSpec, gates: Gates) -> Tensor:
    inputs = gates.inputs
    out = inputs.new_zeros(inputs.shape[0], spec.value_heads, 1)
    _scanned[(min(NUM_GROUPS, inputs.shape[0]), triton.cdiv(spec.value_heads, _CHANNELS))](
        numbers,
        inputs,
        gates.a,
        gates.b,
        gates.decay,
        gates.bias,
        gates.skip,
        pools.states,
        pools.keys,
        pools.updates,
        pools.decays,
        out,
        inputs.stride(0),
        gates.a.stride(0),
        gates.b.stride(0),
        CHANNELS=spec.value_heads,
        COLUMNS=_CHANNELS,
        KEY_DIM=spec.key_dim,
        KEY_TILE=triton.next_power_of_2(spec.key_dim),
    )
    return out


def _dense(x: Tensor) -> Tensor:
    """``x`` with the numbers of each token next to each other."""
    return x if x.stride(1) == 1 or x.shape[1] == 0 else x.contiguous()
