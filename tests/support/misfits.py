"""Calls of native functions with sizes and indices that mostly do not fit, for a process that must survive them.

``python -m tests.support.misfits SEED COUNT`` makes ``COUNT`` calls of each function and prints how many were refused.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from array import array
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from paceline.core import native_tree, rows
from paceline.core.tree import Producer
from paceline.drafters import calibration, parts
from paceline.drafters.protocol import Leaf
from paceline.errors import EngineError
from paceline.messages import NodeColumns, SparseDistribution
from paceline.model import layout
from paceline.model.attention import native as attention
from paceline.model.compiled import blocks, package
from paceline.model.compiled import linear as products
from paceline.model.linear import native as linear
from paceline.model.step_plan import SequenceStep, StepPlan

REFUSALS = (
    *(ValueError, TypeError, IndexError, OverflowError, AttributeError, MemoryError, struct.error),
    *(EngineError, RuntimeError, AssertionError),
)
"""What a call may raise; anything else fails, and so does a process that ends."""
VOCAB = 9
ODD = (-1, 0, 1, 2, 3, 8, 63, 64, 65, 200, 2**31, 2**62, 2**63 - 1, -(2**63), 2**70)


def number(rng: random.Random, most: int = 4) -> int:
    """Mostly one that fits."""
    return rng.choice(ODD) if rng.random() < 0.1 else rng.randint(0, most)


def numbers(rng: random.Random, count: int, most: int = 4) -> Any:
    count += rng.choice((-1, 1, 3)) * (rng.random() < 0.08)
    kind = rng.choice((list, list, tuple, lambda values: array("q", [v for v in values if abs(v) < 2**62])))
    return kind([number(rng, most) for _ in range(max(0, count))])


def step(rng: random.Random) -> SequenceStep:
    count, num_pages = rng.randint(1, 3), rng.randint(0, 2)
    keys = rng.choice((1, 3, 64, 64 * num_pages, 65))
    trees: dict[str, Any] = {}
    if rng.random() < 0.5:
        trees["visible"] = torch.ones(keys, dtype=rng.choice((torch.bool, torch.bool, torch.int64)))
        trees["own_rows"] = [list(numbers(rng, 2)) for _ in range(count)]
        if rng.random() < 0.5:
            trees["key_positions"] = torch.arange(keys, dtype=rng.choice((torch.int64, torch.int64, torch.int32)))
    spread = range(count) if rng.random() < 0.5 else numbers(rng, count, 70)
    also = [(number(rng, count - 1), number(rng, 99)) for _ in range(rng.randint(0, 2))]
    return SequenceStep(
        numbers(rng, count, 50), spread, spread, numbers(rng, num_pages, 3), number(rng, count), also=also, **trees
    )


def sizes(rng: random.Random) -> tuple[Any, ...]:
    return *(number(rng, 6) for _ in range(6)), rng.random() < 0.4


def lay_out(rng: random.Random) -> None:
    StepPlan.of([step(rng) for _ in range(rng.randint(1, 3))], number(rng, 99)).masks(
        torch.float32, rng.choice((None, 2))
    )


def buffers(rng: random.Random) -> None:
    buffer = torch.full((rng.choice((0, 8, 400, 60_000)),), rng.choice((0, 1, 255)), dtype=torch.uint8)
    other, given = buffer.clone(), sizes(rng)
    found = layout.gather([SequenceStep([1, 2], range(2), range(2), [0], 2)])
    if found is not None and rng.random() < 0.5:
        layout.lay_out(found[-1], number(rng), given, buffer)
    layout.pack(given, buffer, given if rng.random() < 0.4 else sizes(rng), other, number(rng))


def masks(rng: random.Random) -> None:
    given = (2, 2, number(rng), number(rng, 2), number(rng, 2), 1, rng.random() < 0.4)
    if given[3] < 9 and given[4] < 9:
        layout.masks(given, torch.randint(-1, 3, (900,)).view(torch.uint8), torch.bfloat16, rng.choice((None, 1)))


def pages(rng: random.Random) -> None:
    pools = [torch.zeros(rng.randint(0, 5), 3), torch.zeros(5, rng.randint(0, 2))[:: rng.choice((1, 1, 2))]]
    layout.clear_pages(pools, numbers(rng, 2))
    layout.copy_pages(pools, [(number(rng), number(rng))] * rng.randint(0, 2))


def columns(rng: random.Random, count: int) -> tuple[Any, ...]:
    flags = [rng.random() < 0.7 for _ in range(count)] if rng.random() < 0.4 else ()
    qs = [
        rng.choice((None, SparseDistribution(bytes(4), struct.pack("<d", 1.0)), SparseDistribution(b"1", b""), 3))
    ] * count
    probs = [
        rng.choice((0.5, 1.0, -1.0, float("nan"), "1")) if rng.random() < 0.1 else rng.random() for _ in range(count)
    ]
    return (
        numbers(rng, count, 9),
        numbers(rng, count),
        numbers(rng, count, VOCAB),
        probs,
        flags,
        qs if rng.random() < 0.4 else (),
    )


def trees(rng: random.Random) -> None:
    native_tree.new_tree(
        number(rng, 9), 5, producer=rng.choice((Producer.HEAD, 16, -1)) if rng.random() < 0.1 else Producer.DRAFT
    )
    made = [native_tree.new_tree(VOCAB, number(rng, 9), rejection=rng.random() < 0.3, max_nodes=8) for _ in range(2)]
    messages = [NodeColumns(*columns(rng, rng.randint(0, 5))) for _ in range(rng.randint(1, 3))]
    native_tree.add_each([rng.choice(made) for _ in messages], messages)
    for tree in made:
        ids = numbers(rng, 2, VOCAB)
        tree.grow(rng.choice([*tree.nodes()]), ids, [0.5] * len(ids), True, None)
        held = [*tree.nodes()]
        tree.proposal(number(rng))
        tree.walk(numbers(rng, 2, VOCAB))
        tree.grow(rng.choice(held), ids, [0.5] * len(ids), True, None)
        native_tree.columns_of(held)
        tree.get(number(rng))


def messages(rng: random.Random) -> None:
    passes = native_tree.native_module()
    packed = rng.randbytes(rng.randint(0, 9))
    written = passes.write_each([(columns(rng, rng.randint(0, 3)), rng.random() < 0.5, rng.random())])[0]
    if written:
        at = rng.randrange(len(written) + 1)
        packed = written[:at] + rng.randbytes(rng.randint(0, 2)) + written[at + rng.randint(0, 2) :]
    passes.read_each([packed, written, rng.choice((None, 3, b""))])


def grown(rng: random.Random) -> None:
    tree, weights = native_tree.new_tree(VOCAB, 5), calibration.Calibration(rng.randint(1, 3))
    places, candidates = [], []
    for _ in range(rng.randint(1, 3)):
        ids, size = [number(rng, VOCAB) for _ in range(3)], rng.randint(0, 4)
        scored = ids, [rng.choice((-0.5, -float("inf"), float("nan"), -2.0)) for _ in range(size)]
        weighed = tuple(ids), (0.5,) * rng.choice((3, 3, size)), rng.choice(((), (0.5,) * 3, (0.5,) * size)), None
        frontier = native_tree.native_frontier(tree, 4, -9.0, None, in_turn=False, chain=rng.random() < 0.5)
        place = frontier, rng.choice([*tree.nodes()]), number(rng), weights.address, weights.address, 0.5
        places.append(place)
        candidates.append(rng.choice((scored, weighed, weighed[:3])))
    native_tree.grow_each(places, candidates, 0.01, calibration.expect_address())


def observed(rng: random.Random) -> None:
    weights = calibration.Calibration(rng.randint(1, 3), calibration.Calibration(2))
    gaps = tuple(rng.choice((0.1, 9.0, float("inf"), float("nan"))) for _ in range(rng.randint(0, 5)))
    weights.observe(gaps, rng.choice((None, number(rng))))
    expansion = calibration.Expansion(gaps, weights, gaps[: rng.choice((0, len(gaps)))], weights, 0.5)
    calibration.expect([expansion], 0.01)


def leaves(rng: random.Random) -> None:
    tokens, node_rows = [1, 2], {number(rng): number(rng) for _ in range(2)}
    session = SimpleNamespace(
        tokens=rng.choice((tokens, (), tokens)), sampler=None, num_cached=number(rng), node_rows=node_rows
    )
    leaf = Leaf("s", number(rng), tuple(numbers(rng, 2)), tuple(numbers(rng, 2)))
    sessions = {"s": rng.choice((session, session, None))}
    parts.native_module().parts_of([rng.choice((leaf, leaf, leaf[:3]))] * rng.randint(1, 2), sessions, None)


def frontiers(rng: random.Random) -> None:
    trees = [native_tree.new_tree(VOCAB, 5) for _ in range(2)]
    given = SimpleNamespace(tokens=rng.choice((2, 4.0, 1, 1e400, None)))
    frontier = native_tree.native_frontier(trees[0], number(rng), -1.0, given, in_turn=rng.random() < 0.5, chain=False)
    assert frontier is not None
    for tree in trees:
        tree.grow(tree.anchor, (1, 2), [0.5, 0.5], True, None)
    held = [node for tree in trees for node in tree.nodes()]
    for _ in range(4):
        nodes = rng.choices([*held, None], weights=[*[9] * len(held), 1], k=2)
        frontier.push_below(nodes[0], nodes[1:])
        trees[0].walk(numbers(rng, 1, VOCAB))
        frontier.commit(numbers(rng, 2))
        frontier.wants(nodes[1])
        frontier.split()
        if frontier.peek() is not None or rng.random() < 0.1:
            frontier.pop()


def drawn(rng: random.Random) -> None:
    num_rows, n = rng.randint(1, 3), rng.randint(1, VOCAB)
    x = torch.randn(num_rows, n)
    each, keys = [rng.choice((0.0, 1.0))] * num_rows, [*numbers(rng, 3 * num_rows)]
    ids, log_q = torch.randint(0, n + (rng.random() < 0.1), (num_rows, n)), x.log_softmax(-1)
    fan_outs, top_k = [*numbers(rng, num_rows, 3)], [*numbers(rng, num_rows, n)]
    small = rng.choice((-1, 0, 1, 2, n, n + 1))
    flags = [True] * num_rows
    call = rng.randrange(8)
    if call == 0:
        rows.pick(x, each, keys, 1, top_k=top_k, num_best=small)
    elif call == 1:
        rows.pick(x, each, keys, 1, behind=([*numbers(rng, num_rows, n)], [*numbers(rng, num_rows, 1)]))
    elif call == 2:
        rows.largest(x, small)
    elif call == 3:
        rows.rank(ids, log_q, keys, flags, 1, small)
    elif call == 4:
        rows.sample(ids, log_q, keys, 1, [1.0] * num_rows, [*numbers(rng, num_rows, n)])
    elif call == 5:
        rows.guess(ids, log_q, keys, 1, [0] * num_rows, fan_outs, flags)
    elif call == 6:
        given: Any = {"top_k": top_k, "floors": [-9.0] * num_rows, "scales": [1.0] * num_rows, "fan_outs": fan_outs}
        rows.draft(
            x, each, keys, keys, masks=None, m=small, unlisted=flags, num_best=2, shift=0.0, streams=(1, 2), **given
        )
    else:
        q = bytes(4 * n), struct.pack(f"<{n}d", *[1 / n] * n)
        limits: Any = {"top_k": top_k, "floors": [-9.0] * num_rows, "tolerance": 1e-6, "streams": (1, 2)}
        starts = rng.choice(([0, num_rows], [0, num_rows], [*numbers(rng, 2)]))
        rows.verify(x, each, keys, starts=starts, drafted=[*numbers(rng, num_rows, n - 1)], qs=[q] * num_rows, **limits)


def misfit(rng: random.Random, x: torch.Tensor, share: float = 0.06) -> torch.Tensor:
    """Rarely a tensor with other sizes, other strides or another dtype."""
    if rng.random() > share:
        return x
    dim = rng.randrange(max(1, x.dim()))
    changes: tuple[Callable[[], torch.Tensor], ...] = (
        lambda: x[..., None].expand(*x.shape, rng.randint(0, 3)),
        lambda: x.flatten(),
        lambda: x.mT,
        lambda: x.to(rng.choice((torch.float16, torch.float32, torch.bfloat16, torch.int64, torch.uint8))),
        lambda: x.narrow(dim, 0, rng.randint(0, x.shape[dim])),
        lambda: x.repeat_interleave(2, dim),
        lambda: x.select(dim, 0),
        lambda: x.repeat_interleave(2, dim).narrow(dim, 0, x.shape[dim]).mT.contiguous().mT,
    )
    return rng.choice(changes)()


def integers(rng: random.Random, shape: tuple[int, ...], stop: int) -> torch.Tensor:
    x = torch.randint(0, max(1, stop), shape)
    if rng.random() < 0.1 and x.numel():
        x.view(-1)[rng.randrange(x.numel())] = rng.choice((-1, stop, 2**40))
    return x


def attended(rng: random.Random) -> None:
    attention.load_operator()
    dtype, kept = rng.choice(attention.DTYPES), rng.choice((None, None, torch.uint8))
    pages, kv_heads, groups, dim, value_dim = (rng.choice((1, 2, 3, 0)) for _ in range(5))
    rows, length, blocks, tokens = (rng.choice((1, 2, 3)) for _ in range(4))
    pool = (pages, 64, kv_heads)
    table, gather, scatter = (rows, blocks), (rows, length), (tokens,)
    if rng.random() < 0.3:
        heads, index = torch.randn(tokens, 2, dim), torch.randn(pages, 64, dim)
        seen = torch.rand(rows, length, 64 * blocks) < 0.5
        given = heads, index, torch.randn(tokens, 2), integers(rng, table, pages), integers(rng, gather, tokens), seen
        attention.score_index(*[misfit(rng, x) for x in given])
        return
    query = torch.randn(1, kv_heads * groups, tokens, dim, dtype=dtype)
    keys, values = (torch.randn(*pool, n).to(kept or dtype) for n in (dim, value_dim))
    mask = torch.where(torch.rand(rows, 1, length, 64 * blocks) < 0.5, 0.0, -torch.inf).to(dtype)
    places = integers(rng, table, pages), integers(rng, gather, tokens), integers(rng, scatter, rows * length)
    given = tuple(misfit(rng, x) for x in (query, keys, values, *places, mask))
    sinks = rng.choice((None, misfit(rng, torch.randn(kv_heads * groups))))
    attention.attend(*given, sinks, 1.0, rng.choice((None, 2.0)))
    attention.round_to_fp8(misfit(rng, query, 0.5))


def stepped(rng: random.Random) -> None:
    kind, dtype, tokens = rng.randrange(6), rng.choice(linear.DTYPES), rng.randint(0, 4)
    key_heads, groups, width = rng.randint(1, 2), rng.randint(1, 3), rng.randint(1, 4)
    key_dim, value_dim = rng.choice((1, 8, 20)), rng.choice((1, 8, 36))
    if kind == 3:
        key_dim, value_dim = 0, 1
    if kind == 4:
        key_heads, value_dim = 1, 1
    heads, slots, chunks = key_heads * groups, rng.choice((0, 2, 3, 3)), rng.choice((0, 2, 3, 3))
    width, decays = 1 if kind in (2, 4) else width, key_dim if kind == 1 else 1
    channels = heads * value_dim + (0 if kind in (3, 4) else 2 * key_heads * key_dim)
    kept = 0 if kind in (2, 4) else channels
    first = number(rng, 16) * rng.randint(0, 1)
    count, also = number(rng, min(4, 16 - first) if 0 <= first < 16 else 0), numbers(rng, 3, 1)
    chunk = [number(rng, 1), first, count, number(rng, 2) - 1, 1, *also]
    plan = [*numbers(rng, 4, 1)] if rng.random() < 0.1 else [0, 1, number(rng, 2) - 1, 1, *chunk]
    of_token = [
        torch.randn(tokens, n).to(dtype) for n in (channels, heads * decays, 2 * key_dim if kind == 4 else heads)
    ]
    of_layer = [
        torch.randn(width, kept),
        torch.randn(heads * (key_dim if kind == 4 else 1)),
        torch.randn(heads * decays),
    ]
    further = [rng.choice((None, torch.randn(kept))), rng.choice((None, torch.randn(heads)))]
    states = heads if key_dim else 0
    pools = [
        torch.randn(slots, states, key_dim, value_dim),
        torch.randn(slots, width - 1, kept).to(dtype),
        torch.randn(chunks, 16, kept).to(dtype),
        *(torch.randn(chunks, 16, *shape) for shape in ((key_heads, key_dim), (states, value_dim), (states, decays))),
    ]
    plan = [x for x in plan if abs(x) < 2**63]
    given = [
        None if x is None else misfit(rng, x, 0.03)
        for x in (torch.tensor(plan), *of_token, *of_layer, *further, *pools)
    ]
    sizes = [kind, key_heads, heads] if rng.random() < 0.9 else [number(rng, 6) for _ in range(3)]
    by_handles(rng, "linear_attention", linear.call, linear.load_library(), *given, *sizes, 1, 1, 1, 1.0, 0.0, 0.0, 9.0)


def multiplied(rng: random.Random) -> None:
    outputs, inputs = rng.choice((1, 16, 33)), rng.choice((1, 32, 40))
    weight, bits = torch.randn(outputs, inputs), rng.choice((4, 8, None))
    packed = products.pack(weight.bfloat16()) if bits is None else blocks.pack_blocks(blocks.quantize(weight, bits))
    x = torch.randn(*rng.choice(((3,), (1,), (2, 2), (0,))), inputs)
    x = x.bfloat16() if bits is None or rng.random() < 0.5 else x
    bias = rng.choice((None, misfit(rng, torch.randn(outputs), 0.2)))
    num = outputs if rng.random() < 0.8 else number(rng, 40)
    library = products.load_library()
    if rng.random() < 0.2:
        halves = misfit(rng, torch.randn(2, 2 * outputs).bfloat16(), 0.4)
        by_handles(rng, "gated_silu", products.gate, library, halves)
        return
    given = misfit(rng, x, 0.2), misfit(rng, packed, 0.2)
    by_handles(rng, "packed_linear", products.multiply, library, *given, bias, num)


def by_handles(rng: random.Random, name: str, call: Callable[..., Any], library: Any, *given: Any) -> None:
    """A call as Python makes it, or as a compiled model does."""
    if rng.random() < 0.5:
        call(library, *given)
        return
    tensors = [x for x in given if isinstance(x, torch.Tensor)]
    held = package._Handles(tensors)
    handles, places = iter(held.array), []
    for place, x in enumerate(given):
        if isinstance(x, torch.Tensor):
            handle = ctypes.c_void_p(next(handles))
            optional = (name, place) in {("packed_linear", 2), ("linear_attention", 7), ("linear_attention", 8)}
            places.append(ctypes.byref(handle) if optional else handle)
        else:
            kind = ctypes.c_double if isinstance(x, float) else ctypes.c_int64
            places.append(None if x is None else kind(x))
    out = (ctypes.c_void_p * 1)()
    failed = getattr(library, f"aoti_torch_cpu_{name}")(*places, out)
    if out[0] is not None:
        package._results(out)
    if failed:
        raise EngineError(name)


CALLS: tuple[Callable[[random.Random], None], ...] = (
    lay_out, buffers, masks, pages, trees, messages, grown, observed, leaves, drawn, frontiers,
    attended, stepped, multiplied,
)  # fmt: skip


def main(seed: int, count: int) -> None:
    refused: Counter[str] = Counter()
    for call in CALLS:
        for i in range(count):
            torch.manual_seed(i)
            try:
                call(random.Random(f"{seed} {call.__name__} {i}"))
            except REFUSALS:
                refused[call.__name__] += 1
    print(*(f"{call.__name__} {refused[call.__name__]}" for call in CALLS), sep="\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
