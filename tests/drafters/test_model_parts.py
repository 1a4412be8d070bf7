"""Leaves of all sessions are laid out by one native function as by Python session by session.

Mutants that must fail here: a leaf that does not see its own row, or an ancestor's; pending tokens that all see each
other; rows taken from the free ones in another order.
"""

from __future__ import annotations

import copy
import random
from array import array
from collections import Counter
from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest
import torch
from tests.support.models import VOCAB

from paceline.core.processors import Row, SamplerState
from paceline.drafters import parts as parts_module
from paceline.drafters.model import ModelDrafter
from paceline.drafters.parts import parts_of
from paceline.drafters.protocol import Leaf
from paceline.drafters.rows import NO_TAIL, Part, RowSession
from paceline.errors import ResourceExhaustedError
from paceline.model.runner import ModelRunner
from paceline.types import PAGE_SIZE, SamplingParams


class Pages:
    """As much of a cache as rows need: pages without memory."""

    scratch_row = 0

    def __init__(self) -> None:
        self.num_taken = 0

    def allocate(self, count: int) -> list[int]:
        self.num_taken += count
        return list(range(self.num_taken - count, self.num_taken))


def drafter() -> ModelDrafter:
    runner = ModelRunner(lambda *_: torch.zeros(0), Pages(), dtype=torch.float32, sliding_window=None, vocab_size=VOCAB)
    return ModelDrafter(runner, max_leaves=8, max_prefill_tokens=8, top_m=4)


def random_session(rng: random.Random, pages: Pages) -> RowSession:
    """One with committed, free and tree rows in any order."""
    num_tokens = rng.randint(2, 90)
    session = RowSession([rng.randrange(VOCAB) for _ in range(num_tokens)], sampler())
    session.num_cached = num_tokens - rng.randint(0, min(3, num_tokens - 1))
    num_nodes, num_free = rng.randint(0, 6), rng.randint(0, 5)
    count = session.num_cached + num_nodes + num_free
    session.pages = array("q", pages.allocate(-(-count // PAGE_SIZE)))
    rows = list(range(count))
    rng.shuffle(rows)
    session.committed, session.positions = (np.zeros(len(session.pages) * PAGE_SIZE, kind) for kind in (bool, int))
    session.committed[rows[: session.num_cached]] = True
    session.positions[:count] = [rng.randrange(100) for _ in rows]
    session.node_rows = {i + 1: row for i, row in enumerate(rows[session.num_cached :][:num_nodes])}
    session.free_rows = rows[session.num_cached + num_nodes :]
    session.num_rows = count
    return session


def sampler() -> SamplerState:
    return SamplerState(SamplingParams(), 1, (1,), vocab_size=VOCAB)


def state(drafter: ModelDrafter) -> str:
    """All that a step changes of a drafter's sessions."""
    return repr([replace(session, sampler=None, shared=None) for session in drafter.sessions.values()])


def listed(part: Part) -> str:
    """A part, but for its session."""
    return repr(replace(part, session=None, step=replace(part.step, positions=[*part.step.positions])))


@pytest.mark.compiler
def test_leaves_of_all_sessions_are_laid_out_as_session_by_session() -> None:
    rng, seen_before = random.Random(8), Counter[str]()
    for _ in range(400):
        own = drafter()
        own.sessions = {name: random_session(rng, own.cache) for name in "abc"}
        leaves, has_paths = [], {}
        for name in rng.sample("abc", rng.randint(1, 3)):
            session = own.sessions[name]
            pending = session.num_cached < len(session.tokens)
            has_paths[name] = not pending
            leaves += [leaf_of(rng, session, 99 + i, name) for i in range(1 if pending else rng.randint(1, 5))]
            if rng.random() < 0.1:  # a leaf beside an anchor with pending tokens, or an anchor without any
                leaves.append(Leaf(name, 98, (98,), (3,)) if pending else Leaf(name, 0, (), ()))
        if rng.random() < 0.1:
            rng.shuffle(leaves)
        slow, before = copy.deepcopy(own), state(own)
        made = parts_of(leaves, own.sessions, own.cache)
        common = all(77 not in leaf.path_ids for leaf in leaves) and all(
            {bool(leaf.path) for leaf in leaves if leaf.session_id == name} in ({expected}, set())
            for name, expected in has_paths.items()
        )
        together = len({leaf.session_id for leaf in leaves}) == sum(1 for _ in groupby(leaves, lambda x: x.session_id))
        assert (made is not None) == (common and together)
        seen_before["laid out" if made else "left"] += 1
        if made is None:
            assert state(own) == before
            continue
        parts, rows = made
        want, want_rows, at, depths = slow._parts(leaves, [NO_TAIL] * len(leaves))
        assert [(row.state.seed_bits, row.suffix) for row in rows] == [(r.state.seed_bits, r.suffix) for r in want_rows]
        assert all(row.state is own.sessions[leaf.session_id].sampler for row, leaf in zip(rows, leaves, strict=True))
        assert (at, depths) == ([*range(len(leaves))], [0] * len(leaves))
        assert [listed(part) for part in parts] == [listed(part) for part in want]
        assert [type(row) for row in rows] == [Row] * len(leaves)
        for part in (*parts, *want):
            part.keep()
        assert state(own) == state(slow)
        for session in own.sessions.values():
            used = [*session.node_rows.values(), *session.free_rows, *session.committed.nonzero()[0].tolist()]
            assert sorted(used) == [*range(session.num_rows)], "a row leaked or has two uses"
    assert min(seen_before.values()) > 30


@pytest.mark.compiler
def test_rows_are_given_back_where_one_session_has_no_room() -> None:
    rng, own = random.Random(9), drafter()
    own.sessions = {"a": random_session(rng, own.cache), "b": random_session(rng, own.cache)}
    for session in own.sessions.values():
        session.num_cached = len(session.tokens)
    leaves = [Leaf("a", 99, (99,), (1,)), Leaf("b", 99, (99,), (1,))]
    full = own.sessions["b"]
    full.free_rows, full.num_rows = [], len(full.pages) * PAGE_SIZE

    def refuse(count: int) -> list[int]:
        raise ResourceExhaustedError(f"no room for {count} pages")

    own.cache.allocate = refuse  # type: ignore[method-assign]
    free, room = sorted(own.sessions["a"].free_rows), own.sessions["a"].num_rows
    assert parts_of(leaves, own.sessions, own.cache) is None
    given_back = sorted(set(own.sessions["a"].free_rows) - set(range(room, own.sessions["a"].num_rows)))
    assert given_back == free
    assert sorted(own.sessions["a"].free_rows)[len(free) :] == [*range(room, own.sessions["a"].num_rows)]
    with pytest.raises(TypeError, match="a list of leaves, a dict"):
        parts_module.native_module().parts_of([], [()], own.cache)
    assert parts_module.native_module().parts_of([()], {}, own.cache) is None


def leaf_of(rng: random.Random, session: RowSession, node_id: int, name: str = "s") -> Leaf:
    """The anchor where tokens are pending, else a leaf that has no row, now and then below another that has none."""
    path: tuple[int, ...] = ()
    if session.num_cached == len(session.tokens):
        path = (*rng.sample(sorted(session.node_rows), rng.randint(0, len(session.node_rows))), node_id)
        if rng.random() < 0.1:
            path = (77, *path)
        elif rng.random() < 0.1 and len(path) > 1:
            path = path[:-1]  # a node that is computed once more
    return Leaf(name, path[-1] if path else 0, path, tuple(rng.randrange(VOCAB) for _ in path))
