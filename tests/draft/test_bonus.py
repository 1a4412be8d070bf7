"""Rejection rule: a proposal in flight ends with a bonus token, and the draft grows where it expects that one."""

import math
from collections.abc import Sequence

import pytest

from paceline.core.tree import TreeNode
from paceline.draft.session import DraftSession
from paceline.drafters.calibration import bonus_probs
from paceline.messages import Commit
from paceline.types import Acceptance

from .fakes import VOCAB, Harness, TableDrafter, open_session


class Grown:
    """A session with a tree below its anchor; one leaf is expanded in each step."""

    def __init__(self, seed: int = 7, steps: int = 8) -> None:
        self.harness = Harness(TableDrafter(max_leaves=1))
        self.harness.open(open_session(acceptance=Acceptance.REJECTION, seed=seed, max_draft_tokens=6))
        self.harness.steps(steps)
        self.engine = self.harness.engine
        self.session = self.engine.sessions["s"]

    def path(self, length: int) -> list[TreeNode]:
        """That many of the nodes that are proposed."""
        node, path = self.session.tree.anchor, []
        for _ in range(length):
            assert node.best is not None
            path.append(node := node.best)
        return path

    def announce(self, nodes: Sequence[TreeNode]) -> None:
        in_flight = tuple(node.node_id for node in nodes)
        self.engine.receive([Commit("s", 0, self.session.tree.context_len, (), in_flight)])
        self.engine.check_integrity()

    def commit(self, token_ids: tuple[int, ...]) -> None:
        self.engine.receive([Commit("s", 0, self.session.tree.context_len, token_ids, ())])
        self.engine.check_integrity()


def expanded_end() -> tuple[Grown, list[TreeNode]]:
    """A session, and a proposal whose last node is expanded and has a best guess that is not the sampled token."""
    for seed in range(50):
        grown = Grown(seed)
        path = grown.path(2)
        if path[-1].expanded and path[-1].bonus[0] > 0 and 0 in path[-1].bonus[: len(path[-1].children)]:
            return grown, path
    raise AssertionError("no seed has such a tree")


def probs_below(parent: TreeNode) -> list[float]:
    return [math.exp(child.log_path - parent.log_path) for child in parent.children.values()]


def check_that_the_best_guess_is_grown_first() -> None:
    grown, path = expanded_end()
    end = path[-1]
    grown.announce(path)
    probs = probs_below(end)
    guess = end.bonus.index(0.0)
    assert probs[guess] == max(probs)
    assert probs == pytest.approx(bonus_probs(grown.session.bonus, end.bonus)[: len(probs)])
    below = [node for node in grown.session.tree.nodes() if node.parent is end and not node.expanded]
    if below:
        first = max(below, key=lambda node: node.log_path)
        for _ in range(40):
            if first.expanded:
                break
            assert not any(node.expanded for node in below if node is not first)
            assert grown.engine.step()


def test_below_the_end_of_a_proposal_in_flight_the_best_guess_is_grown_first() -> None:
    check_that_the_best_guess_is_grown_first()


def test_growth_that_does_not_know_the_end_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant of the test before: the sampled token would be taken for one that is verified."""
    monkeypatch.setattr(DraftSession, "aim", lambda *_: None)
    with pytest.raises(AssertionError):
        check_that_the_best_guess_is_grown_first()


def test_another_end_puts_the_first_one_back() -> None:
    grown, path = expanded_end()
    before = {node.node_id: node.log_path for node in grown.session.tree.nodes()}
    grown.announce(path)
    assert {node.node_id: node.log_path for node in grown.session.tree.nodes()} != before
    grown.announce(path[:1])
    assert probs_below(path[-1]) == pytest.approx([child.prob for child in path[-1].children.values()])
    grown.announce(())
    after = {node.node_id: node.log_path for node in grown.session.tree.nodes()}
    assert after == pytest.approx(before)


def test_an_end_that_is_expanded_in_flight_is_placed_at_once() -> None:
    grown = Grown(steps=4)
    path = grown.path(1)
    while path[-1].best is not None:
        path.append(path[-1].best)
    end = path[-1]
    assert not end.expanded
    grown.announce(path)
    while not end.expanded:
        assert grown.engine.step()
    assert probs_below(end) == pytest.approx(bonus_probs(grown.session.bonus, end.bonus)[: len(end.children)])
    assert [child.sampled for child in end.children.values()] == [True] + [False] * (len(end.children) - 1)


@pytest.mark.parametrize("tried", [True, False])
def test_each_kind_of_outcome_teaches_its_own_table(tried: bool) -> None:
    """A recovered token says nothing of bonus tokens, nor the other way round."""
    grown, path = expanded_end()
    session, end = grown.session, path[-1]
    grown.announce(path)
    before = tables(session)
    if tried:  # the first token is rejected for another
        grown.commit((next(t for t in range(VOCAB) if t != path[0].token_id),))
        assert [now == old for now, old in zip(tables(session), before, strict=True)] == [False, True]
    else:
        grown.commit((*[node.token_id for node in path], list(end.children)[end.bonus.index(0.0)]))
        assert tables(session)[1] != before[1]


def tables(session: DraftSession) -> list[list[float]]:
    """Hits and observations in every bin, of tried tokens and of bonus tokens."""
    return [calibration.cells.tolist() for calibration in (session.calibration, session.bonus)]
