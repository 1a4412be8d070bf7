"""Hints of a target in the middle of a step: what the draft expands sooner, and that nothing else depends on them."""

import dataclasses
import math
import random
import struct
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import pytest

from paceline.core import native_tree
from paceline.core.tree import Proposal, TreeNode
from paceline.draft import hints
from paceline.draft.engine import DraftEngine
from paceline.draft.report import explain
from paceline.draft.session import DraftSession
from paceline.drafters.calibration import Evidence
from paceline.messages import Commit, Hint, Nodes, States
from paceline.types import Acceptance

from .fakes import VOCAB, Harness, TableDrafter, open_session, plain

BEFORE, DURING = 4, 1
"""Steps of the draft before the target's begins, and while it runs."""


def hint_of(told: Mapping[int, Mapping[int, float]], context_len: int, *, weight: float = 0.9, epoch: int = 0) -> Hint:
    """A hint for session ``s``: the probabilities of tokens, by node."""
    most = max(map(len, told.values()))
    pairs = [[*tokens.items(), *[(0, 0.0)] * (most - len(tokens))] for tokens in told.values()]
    ids = [token_id for row in pairs for token_id, _ in row]
    values = [math.log(prob) if prob else -math.inf for row in pairs for _, prob in row]
    packed = struct.pack(f"<{len(ids)}i{len(ids)}f", *ids, *values)
    return Hint("s", epoch, context_len, tuple(told), weight, packed)


def without_rank(follow: Any) -> Any:
    """The new nodes with the ranks of their order among their siblings."""

    def mutant(session: DraftSession, parent: TreeNode, **options: Any) -> list[TreeNode]:
        before = len(parent.children)
        nodes: list[TreeNode] = follow(session, parent, **options)
        for i, node in enumerate(nodes):
            node.rank = before + i
        return nodes

    return mutant


class Recorded(TableDrafter):
    """Remembers the paths that it has expanded."""

    def __init__(self) -> None:
        super().__init__(max_leaves=1)
        self.paths: list[tuple[int, ...]] = []

    def expand(self, leaves: Sequence[Any]) -> Any:
        self.paths += [leaf.path for leaf in leaves]
        return super().expand(leaves)


class Step:
    """A target's step that runs: its proposal is in flight, and the draft has grown below it already."""

    def __init__(self, **options: Any) -> None:
        self.drafter = Recorded()
        self.harness = Harness(self.drafter)
        self.harness.open(open_session(temperature=0.0, **options))
        self.harness.steps(BEFORE)
        self.engine, self.target = self.harness.engine, self.harness.targets["s"]
        self.proposal: Proposal = self.target.begin()
        assert len(self.proposal) >= 2
        self.context_len = len(self.target.text)
        self.engine.receive([Commit("s", 0, self.context_len, (), self.proposal.node_ids)])
        self.harness.steps(DURING)
        self.session: DraftSession = self.engine.sessions["s"]

    def at(self, index: int) -> TreeNode:
        """The node behind which row ``index`` of the step decides."""
        node = self.session.tree.get(self.proposal.node_ids[index - 1]) if index else self.session.tree.anchor
        assert node is not None
        return node

    def unlikely(self, index: int) -> TreeNode:
        """An outcome that has not been expanded, the last of those that the draft thinks of."""
        return [node for node in self.at(index).children.values() if not node.expanded][-1]

    def hint(self, index: int, token_id: int, **changes: Any) -> Hint:
        told = {self.at(index).node_id if index else 0: {token_id: 0.97, (token_id + 1) % VOCAB: 0.001}}
        return hint_of(told, self.context_len, **changes)

    def next_path(self) -> tuple[int, ...]:
        """What the draft expands next."""
        before = len(self.drafter.paths)
        assert self.harness.steps(1) == 1
        return self.drafter.paths[before]


def check_first(index: int) -> None:
    """The outcome that a hint names is expanded at once, which it is not without one."""
    step = Step()
    outcome = step.unlikely(index)
    path = (*step.proposal.token_ids[:index], outcome.token_id)
    assert Step().next_path() != path
    step.engine.receive([step.hint(index, outcome.token_id)])
    assert step.next_path() == path
    assert step.session.tree.get(outcome.node_id) is outcome
    assert step.engine.stats.hints == 1
    assert step.engine.stats.hints_bytes == 16


@pytest.mark.parametrize("index", [0, 1])
def test_the_outcome_that_a_hint_names_is_expanded_first(index: int) -> None:
    check_first(index)


@pytest.mark.parametrize("index", [0, 1])
def test_a_hint_taken_for_that_of_the_next_row_is_noticed(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant of the test before."""
    read = hints.read_hint

    def mutant(session: DraftSession, hint: Hint) -> Any:
        tree, (node_id,) = session.tree, hint.node_ids
        node = tree.get(node_id) if node_id else tree.anchor
        assert node is not None
        assert node.best is not None
        return read(session, dataclasses.replace(hint, node_ids=(node.best.node_id,)))

    monkeypatch.setattr(hints, "read_hint", mutant)
    with pytest.raises(AssertionError):
        check_first(index)


def check_stale() -> None:
    """A hint about a step that has ended, or of an older draft, changes nothing."""
    paths = []
    for told in (False, True):
        step = Step()
        tokens = step.target.end(step.proposal)
        step.engine.receive([Commit("s", 0, step.context_len, tokens)])
        step.harness.steps(2)
        outcome = step.unlikely(0)
        if told:
            step.engine.receive([step.hint(0, outcome.token_id), step.hint(0, outcome.token_id, epoch=-1)])
            assert (step.engine.stats.hints_late, step.engine.stats.stale_messages) == (1, 1)
            assert "0 hints of a target have come in time, 1 too late" in explain(step.engine)
        paths.append(step.next_path())
    assert paths[0] == paths[1]


def test_a_late_hint_changes_nothing() -> None:
    check_stale()


def test_a_draft_that_takes_hints_of_earlier_rounds_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant of the test before."""
    take = DraftEngine.take_hint

    def mutant(self: DraftEngine, session: DraftSession, message: Hint) -> None:
        take(self, session, dataclasses.replace(message, context_len=session.tree.context_len))

    monkeypatch.setattr(DraftEngine, "take_hint", mutant)
    with pytest.raises(AssertionError):
        check_stale()


def test_a_hint_about_a_node_that_is_expanded_later_counts_then() -> None:
    step = Step()
    node = step.unlikely(0)
    told = {0: {node.token_id: 0.9}, node.node_id: dict.fromkeys(range(VOCAB), 1 / VOCAB)}
    step.engine.receive([hint_of(told, step.context_len)])
    assert not node.children
    step.next_path()
    step.harness.steps(1)
    assert len(node.children) > step.session.growth.fan_out
    assert step.engine.stats.hints_nodes > 0


def test_a_token_that_the_draft_had_not_thought_of_becomes_a_node() -> None:
    step = Step()
    absent = next(t for t in range(VOCAB) if t not in step.at(1).children)
    step.engine.receive([step.hint(1, absent)])
    path = (step.proposal.token_ids[0], absent)
    assert step.next_path() == path
    assert step.engine.stats.hints_nodes == 1
    (node,) = [n for m in step.harness.sent if isinstance(m, Nodes) for n in m.nodes if n.token_id == absent][-1:]
    assert node.parent_id == step.proposal.node_ids[0]


def check_calibration() -> None:
    """That a token comes which only a hint had is a miss of every rank of the draft's, not a hit of one of them."""
    ratios = []
    for told in (False, True):
        with mock.patch.object(native_tree, "native_module", return_value=None):  # whose children can be taken away
            step = Step()
        parent = step.at(0)
        for child in [*parent.children.values()][1:]:  # as if the draft had found them too unlikely for a node
            if child.node_id not in step.proposal.node_ids:
                del parent.children[child.token_id]
        absent = next(t for t in range(VOCAB) if t not in parent.children)
        if told:
            step.engine.receive([step.hint(0, absent)])
            assert parent.children[absent].rank >= step.session.growth.fan_out
        step.session.observe([absent])
        calibration = step.session.calibration
        ratios.append(calibration.probabilities(Evidence(parent.gaps, (0.1,) * len(parent.gaps))))
    assert ratios[0] == ratios[1]


def test_a_token_that_only_a_hint_had_is_no_hit_of_the_drafts_own_ranks() -> None:
    check_calibration()


def test_a_hints_node_that_takes_the_next_rank_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant of the test before: low ranks would seem to be right often, and trees grow wide instead of deep."""
    monkeypatch.setattr(hints, "follow", without_rank(hints.follow))
    with pytest.raises(AssertionError):
        check_calibration()


def test_outcomes_are_ranked_by_the_product() -> None:
    """q^(1 - w) e^w, where what one of them leaves out counts as the last one that it has."""
    step = Step()
    parent = step.at(0)
    own = {t: child.prob for t, child in parent.children.items()}
    absent = next(t for t in range(VOCAB) if t not in own)
    first, *_, last = own
    step.session.hinted, step.session.hint_weight = {parent.node_id: {absent: 0.5, first: 0.2}}, 0.25
    told = {t: {absent: 0.5}.get(t, 0.2) for t in own | {absent: 0.0}}
    product = {t: own.get(t, own[last]) ** 0.75 * e**0.25 for t, e in told.items()}
    expected = {t: p / sum(product.values()) * sum(own.values()) for t, p in product.items()}
    assert hints.expected(step.session, parent) == pytest.approx(expected)


def test_the_token_that_may_be_proposed_is_not_touched_under_the_rejection_rule() -> None:
    """Neither where it is nor how likely it is may depend on a hint: whether it is proposed could, then."""
    harness = Harness(Recorded())
    harness.open(open_session(acceptance=Acceptance.REJECTION))
    harness.steps(6)
    session = harness.engine.sessions["s"]
    anchor = session.tree.anchor
    sampled = anchor.best
    assert sampled is not None
    before = sampled.log_path, sampled.prob, len(anchor.children)
    told = {0: dict.fromkeys(range(VOCAB), 1 / VOCAB)}
    harness.engine.receive([hint_of(told, session.tree.context_len)])
    assert harness.engine.stats.hints == 1
    assert len(anchor.children) > before[2]
    assert (sampled.log_path, sampled.prob) == before[:2]
    assert [child.sampled for child in anchor.children.values()].count(True) == 1
    assert anchor.best is sampled
    harness.engine.check_integrity()


MALFORMED = {
    "a token outside of the vocabulary": {"packed": struct.pack("<if", VOCAB, -1.0)},
    "a negative token": {"packed": struct.pack("<if", -1, -1.0)},
    "a probability above 1": {"packed": struct.pack("<if", 1, 0.5)},
    "no number": {"packed": struct.pack("<if", 1, math.nan)},
    "half a row": {"packed": bytes(4)},
    "nothing": {"packed": b""},
    "no nodes": {"node_ids": ()},
    "a weight of 0": {"weight": 0.0},
    "a weight above 1": {"weight": 1.5},
}


@pytest.mark.parametrize("change", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_hint_harms_nothing(change: Mapping[str, Any]) -> None:
    step = Step()
    hint = Hint(**{"session_id": "s", "epoch": 0, "context_len": step.context_len, "node_ids": (0,), "weight": 0.5,
                   "packed": struct.pack("<if", 1, -1.0)} | dict(change))  # fmt: skip
    step.engine.receive([hint])
    assert (step.engine.stats.hints, step.engine.stats.hints_invalid, step.engine.stats.failed_sessions) == (0, 1, 0)
    assert step.next_path() == Step().next_path()


def test_a_hint_about_nodes_that_are_not_there_is_none() -> None:
    step = Step()
    step.engine.receive([hint_of({999: {1: 0.9}}, step.context_len)])
    assert step.engine.stats.hints == 1
    assert step.next_path() == Step().next_path()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_that_of_plain_decoding_whatever_hints_say(temperature: float) -> None:
    rng = random.Random(5)
    harness = Harness()
    session = open_session(temperature=temperature)
    harness.open(session)
    target, receive = harness.targets["s"], harness.engine.receive

    def told(messages: Sequence[Any]) -> None:
        receive(messages)
        for message in messages:
            if isinstance(message, Commit):
                places = [0, *message.in_flight][: rng.randint(1, 4)]
                said = {i: {t: rng.random() for t in rng.sample(range(VOCAB), 3)} for i in places}
                receive([hint_of(said, message.context_len, weight=rng.uniform(0.1, 1.0))])

    harness.engine.receive = told  # type: ignore[method-assign]
    for _ in range(20):
        harness.round(rng.randint(0, 6))
    assert target.text == plain(session, len(target.text) - 3)
    stats = harness.engine.stats
    assert stats.hints == 20
    assert stats.hints_late == 20, "those that came with an outcome"
    assert stats.failed_sessions == stats.hints_invalid == 0


def test_states_are_no_hints() -> None:
    """A drafter that reads no states still refuses them."""
    step = Step()
    step.engine.receive([States("s", 0, 0, 2, bytes(4))])
    assert step.engine.num_sessions == 0
