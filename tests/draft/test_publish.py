"""The native pass that publishes the children of ranked leaves equals what the engine does one by one."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.mutants import Mutant, mutant

from paceline.core import native_tree
from paceline.core.tree import TreeNode
from paceline.draft import grower, session
from paceline.draft.growth import Growth
from paceline.draft.session import DraftSession, new_frontier
from paceline.drafters.calibration import Calibration, expect_address
from paceline.drafters.protocol import Candidates, Leaf
from paceline.drafters.ranking import Ranking, RankingRow, rank
from paceline.messages import Hint
from paceline.model.chain import Ranked

from .fakes import VOCAB, Harness, TableDrafter, open_session


class RankedDrafter(TableDrafter):
    """Ranks its candidates itself: a function of the text, with whatever a drafter might get wrong now and then."""

    def __init__(self, seed: int, *, harm: float) -> None:
        super().__init__()
        self._seed, self._harm = seed, harm

    @property
    def ranker(self):
        return self

    def expand_best(self, leaves: Sequence[Leaf]) -> Candidates:
        candidates = self.expand(leaves)
        ranked: Ranked = []
        rows = zip(candidates.token_ids.tolist(), candidates.log_q.tolist(), leaves, strict=True)
        for ids, scores, leaf in rows:
            rng = random.Random(f"{self._seed} {self._texts[leaf.session_id]} {leaf.path}")
            if rng.random() < self._harm:
                ids[rng.randrange(3)] = rng.choice([*range(VOCAB), -1, VOCAB, 2**70])
            if rng.random() < self._harm:
                at = rng.randrange(4)
                scores[at:] = [rng.choice([-math.inf, math.nan, scores[at]])] * len(scores[at:])
            ranked.append((ids[:4], scores[:4]) if rng.random() < 0.9 else ([], []))
        nothing = torch.zeros(len(leaves), 0)
        return Candidates(nothing.long(), nothing, ranked=ranked)


def place(node: TreeNode) -> object:
    """All that a node holds, with its neighbors by their ids."""
    held = {name: getattr(node, name) for name in TreeNode.__slots__}
    held["parent"], held["best"] = (at.node_id if at else None for at in (node.parent, node.best))
    held["children"] = [(token_id, child.node_id) for token_id, child in node.children.items()]
    return held


def state(session: DraftSession) -> object:
    """All that publishing may change of a session."""
    tree, (wanted, unwanted) = session.tree, session.frontier.split()
    return (
        [place(node) for node in tree.nodes()],
        repr(tree.proposal(4)),
        [node.node_id for node in wanted],
        sorted(node.node_id for node in unwanted),
        [node.node_id for node in session.outbox],
        (tree.next_id, session.changed, session.idle),
        (list(session.calibration.cells), list(session.bonus.cells)),
        session.end and session.end.node_id,
    )


MODES = [{"mode": "overlapped"}, {"mode": "overlapped"}, {"mode": "sequential"}]


def harmed(rankings: Sequence[Ranking], rng: random.Random, harm: float) -> list[Ranking]:
    """Rankings with whatever a ranking might get wrong now and then."""
    found = []
    for ranking in rankings:
        if ranking.token_ids and rng.random() < harm:
            token_ids = list(ranking.token_ids)
            token_ids[rng.randrange(len(token_ids))] = rng.choice([*range(VOCAB), -1, VOCAB, 2**70])
            ranking = replace(ranking, token_ids=tuple(token_ids))
        if rng.random() < harm:
            ranking = rng.choice([replace(ranking, q=None), Ranking((), ())])
        found.append(ranking)
    return found


def grown(
    seed: int, harm: float, rounds: Sequence[int], kind: str, *, one_by_one: bool
) -> tuple[list[object], Harness]:
    """States of two sessions after each of some steps, with native functions or without any; ``kind``: who ranks, and
    how."""
    passes = None if one_by_one else native_tree.native_module()
    drafter = RankedDrafter(seed, harm=harm) if kind == "by the drafter" else TableDrafter()
    given = {} if kind == "by the drafter" else {"acceptance": kind}
    harness = Harness(drafter, tree_budget=40, fan_out=3)
    states: list[object] = []
    rng = random.Random(seed)

    def ranks(candidates: Candidates, rows: Sequence[RankingRow]) -> list[Ranking]:
        return harmed(rank(candidates, rows), rng, harm)

    def steps(count: int) -> int:
        done = 0
        while done < count and harness.engine.step():
            states.extend(repr(state(session)) for session in harness.engine.sessions.values())
            done += 1
        return done

    with (
        mock.patch.object(harness, "steps", steps),
        mock.patch.object(grower, "rank", ranks),
        mock.patch.object(native_tree, "native_module", return_value=passes),
    ):
        for name in ("a", "b"):
            options = given | random.Random(f"{seed} {name}").choice(MODES)
            harness.open(open_session(name, temperature=float(bool(given)), text=(1, 2, ord(name) % 7), **options))
        for number, num_steps in enumerate(rounds):
            harness.round(num_steps)
            if number == 3:
                packed = torch.tensor([[5, 3]], dtype=torch.int32).numpy().tobytes()
                packed += torch.tensor([[-0.1, -3.0]]).numpy().tobytes()
                text = harness.targets["a"].text
                harness.engine.receive([Hint("a", 0, len(text), (0,), 0.5, packed)])
    return states, harness


@pytest.mark.compiler
@pytest.mark.parametrize("kind", ["by the drafter", "coupled", "rejection"])
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.2]), st.lists(st.integers(0, 6), min_size=5, max_size=9))
@settings(max_examples=30, deadline=None)
def test_a_tree_grows_as_it_does_one_by_one(kind: str, seed: int, harm: float, rounds: list[int]) -> None:
    expected, twin = grown(seed, harm, rounds, kind, one_by_one=True)
    found, harness = grown(seed, harm, rounds, kind, one_by_one=False)
    assert found == expected
    assert harness.sent == twin.sent
    assert harness.engine.stats == twin.engine.stats


@mutant(session, "native_frontier")
def _grows_siblings(native_frontier: Any, *args: Any, in_turn: bool, chain: bool) -> Any:
    """A native frontier has siblings of a chain expanded."""
    return native_frontier(*args, in_turn=in_turn, chain=False)


@mutant(session, "native_frontier")
def _takes_the_unlikely(native_frontier: Any, tree: Any, k: int, min_log: float, reach: Any, **order: bool) -> Any:
    """A native frontier has nodes of any probability expanded."""
    return native_frontier(tree, k, -math.inf, reach, **order)


@pytest.mark.compiler
@pytest.mark.parametrize("mistake", [_grows_siblings, _takes_the_unlikely])
def test_a_mutant_that_grows_in_another_order_is_noticed(mistake: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    rounds, kind = [4] * 12, "coupled"
    differ = (
        grown(seed, 0.0, rounds, kind, one_by_one=True)[0] != grown(seed, 0.0, rounds, kind, one_by_one=False)[0]
        for seed in range(10)
    )
    assert any(differ)


@pytest.mark.compiler
@pytest.mark.parametrize("kind", ["by the drafter", "coupled", "rejection"])
def test_leaves_of_the_common_case_are_left_to_nobody(kind: str) -> None:
    own, grown = kind == "by the drafter", []

    def grow_each(*args: Any) -> list[list[TreeNode]] | None:
        grown.append(native_tree.grow_each(*args))
        return grown[-1]

    harness = Harness(RankedDrafter(1, harm=0.0) if own else TableDrafter())
    with mock.patch.object(grower, "grow_each", grow_each), mock.patch.object(grower.DraftGrower, "publish", None):
        harness.open(open_session(temperature=0.0) if own else open_session(acceptance=kind))
        for _ in range(10):
            harness.round(3)
        assert isinstance(harness.engine.sessions["s"].tree, native_tree.native_module().SpeculationTree)
    assert sum(len(nodes) for step in grown for nodes in step) > 20


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("places", "candidates", "message"),
    [
        ([()], [], "1 nodes have 0 rows"),
        ([("tree",)], [([], [])], "no tuple of six"),
        ([("tree", "node", 1, 0, 0, 1.0)], [([], [])], "no frontier of a native tree"),
        (None, [((), ())], "no lists"),
        (None, [((1,), (0.5, 0.5), (), None)], "1 ids, 2 gaps and 0 of a bonus"),
        (None, [((1,), (0.5,), (0.5, 0.5), None)], "1 ids, 1 gaps and 2 of a bonus"),
        (None, [((1,), (0.5,))[:1]], "1 columns"),
    ],
    ids=str,
)
def test_candidates_that_do_not_fit_are_refused(places: Any, candidates: Any, message: str) -> None:
    tree = native_tree.new_tree(VOCAB, 5)
    calibration = Calibration(3)
    frontier = new_frontier(tree, Growth(3))
    place = (frontier, tree.anchor, 3, calibration.address, calibration.address, 1.0)
    with pytest.raises((TypeError, ValueError), match=message):
        native_tree.grow_each([place] if places is None else places, candidates, 0.01, expect_address())
    assert len(tree) == 0
