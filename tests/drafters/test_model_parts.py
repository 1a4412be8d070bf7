"""A leaf alone is laid out by a shorter way than several; both come to the same tokens, rows and masks.

Mutants that must fail here: a leaf that does not see its own row, or an ancestor's; pending tokens that all see each
other; rows taken from the free ones in another order.
"""

from __future__ import annotations

import copy
import random
from array import array

import numpy as np
import torch
from tests.support.models import VOCAB

from paceline.core.processors import SamplerState
from paceline.drafters.model import ModelDrafter
from paceline.drafters.protocol import Leaf
from paceline.drafters.rows import NO_TAIL, RowSession
from paceline.model.runner import ModelRunner
from paceline.model.step_plan import SequenceStep
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
    runner = ModelRunner(
        lambda *_: torch.zeros(0), Pages(), dtype=torch.float32, sliding_window=None, vocab_size=VOCAB, backend=object()
    )
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


def test_a_leaf_alone_is_laid_out_as_among_others(monkeypatch) -> None:
    rng, short = random.Random(3), 0
    for _ in range(300):
        fast = drafter()
        session = random_session(rng, fast._cache)
        slow, twin = copy.deepcopy((fast, session))
        monkeypatch.setattr(slow, "_single", lambda *_: None)
        pending = session.num_cached < len(session.tokens)
        path = () if pending else tuple(rng.sample(sorted(session.node_rows), rng.randint(0, len(session.node_rows))))
        if not pending:
            path = (*path, 99)  # the leaf, which has no row
        if rng.random() < 0.1 and path:
            path = (77, *path)  # above it one that has none: the long way
        leaf = Leaf("s", path[-1] if path else 0, path, tuple(rng.randrange(VOCAB) for _ in path))
        tried, own = copy.deepcopy((fast, session))
        short += tried._single(own, leaf, NO_TAIL, own.tokens[own.num_cached :]) is not None
        made, want = fast._part(session, [(leaf, NO_TAIL)]), slow._part(twin, [(leaf, NO_TAIL)])
        for name in ("token_ids", "positions", "rows", "pages", "num_logits"):
            assert list_of(getattr(made.step, name)) == list_of(getattr(want.step, name)), name
        assert torch.equal(seen(made.step, session.num_rows), seen(want.step, session.num_rows))
        assert torch.equal(made.step.key_positions[: session.num_rows], want.step.key_positions)
        assert (made.num_pending, dict(made.node_rows)) == (want.num_pending, dict(want.node_rows))
        for part in (made, want):
            part.keep()
        assert sorted(session.free_rows) == sorted(twin.free_rows)
        assert session.node_rows == twin.node_rows
        assert np.array_equal(session.committed, twin.committed)
        assert session.num_cached == twin.num_cached
    assert 200 < short < 300, "both ways were taken"


def seen(step: SequenceStep, num_rows: int) -> torch.Tensor:
    """bool [tokens, num_rows]: the rows that each token sees; all beyond are hidden."""
    visible = step.visible.clone()
    if step.own_rows:
        visible = visible.repeat(len(step.token_ids), 1)
        for of_token, rows in zip(visible, step.own_rows, strict=True):
            of_token[list(rows)] = True
    assert not visible[:, num_rows:].any()
    return visible[:, :num_rows]


def list_of(value):
    return value if isinstance(value, int) else list(value)


def test_rows_are_taken_from_the_free_ones_last_first() -> None:
    rng = random.Random(5)
    for _ in range(200):
        pages = Pages()
        session = random_session(rng, pages)
        free, num_rows, count = list(session.free_rows), session.num_rows, rng.randint(1, 9)
        want = [free.pop() if free else num_rows + i for i in range(count)][: len(session.free_rows)]
        want += range(num_rows, num_rows + count - len(want))
        assert session.take_rows(pages, count) == want[:count]
        assert session.free_rows == free
        assert len(session.committed) == len(session.positions) == len(session.pages) * PAGE_SIZE
        assert session.num_rows <= len(session.committed)
