"""No page is lost, whatever comes in which order: subtrees, late nodes, cancels, preemptions, shared prefixes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from tests.support.pump import Clock
from tests.support.rings import nightly
from tests.target.simulation import VOCAB, SyntheticRunner, next_token

from paceline.messages import CloseSession, DraftState, Node, Nodes, OpenSession, Outcome, SessionFailed
from paceline.target.control.allocation import Allocation
from paceline.target.engine import TargetEngine
from paceline.target.session import TargetSession
from paceline.types import SamplingParams, SpeculationParams

PAGES = 14


class Storm:
    """One engine with a law in the place of a model, and messages at random."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = Clock()
        self.runner = SyntheticRunner(self.clock, lambda n: 0.01, PAGES, self.rng, 0.0)
        self.sent: list[Any] = []
        self.engine = TargetEngine(
            self.runner,  # type: ignore[arg-type]
            self.sent.extend,
            max_sessions=6,
            max_step_tokens=96,
            max_model_len=400,
            clock=self.clock,
        )
        self.opened = 0
        self.next_id: dict[str, int] = {}
        self.texts: dict[str, list[int]] = {}
        self.finished = 0

    def sessions(self) -> list[TargetSession]:
        return [*self.engine._sessions.values()]

    def open(self) -> None:
        rng, name = self.rng, f"s{self.opened}"
        self.opened += 1
        shared = [7] * rng.choice((0, 64, 130))
        prompt = [*shared, *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 90)))]
        sampling = SamplingParams(max_tokens=rng.randint(1, 90), temperature=0.0, ignore_eos=True)
        speculation = SpeculationParams(max_draft_tokens=rng.randint(1, 12))
        self.next_id[name], self.texts[name] = 1, prompt
        self.engine.receive([OpenSession(name, 1, tuple(prompt), len(prompt), 0, sampling, speculation)])

    def publish(self, session: TargetSession) -> None:
        """Nodes below random ones of its tree, or of parents that are gone; often the right token, and siblings."""
        rng, name = self.rng, session.session_id
        tree, nodes = session.tree, []

        def node(parent_id: int, token_id: int, prob: float) -> int:
            nodes.append(Node(self.next_id[name], parent_id, token_id, prob))
            self.next_id[name] += 1
            return self.next_id[name] - 1

        below = [
            (n.node_id, session.tokens[n.position] if n.node_id == 0 else n.token_id, n.position) for n in tree.nodes()
        ]
        if tree.suffix and rng.random() < 0.9:
            at = tree.anchor.node_id
            for token in tree.suffix:
                at = node(at, token, 1.0)
            below = [(at, tree.suffix[-1], tree.context_len - 1)]
        for _ in range(rng.randint(1, 12)):
            parent_id, last, position = rng.choice(below)
            right = next_token(last, position + 1)
            token = right if rng.random() < 0.5 else rng.randrange(VOCAB)
            if rng.random() < 0.03:
                parent_id = rng.randrange(self.next_id[name])
            below.append((node(parent_id, token, rng.random()), token, position + 1))
        self.engine.receive([Nodes(name, session.draft_epoch, session.num_tokens, tuple(nodes))])

    def step(self) -> None:
        rng, sessions = self.rng, self.sessions()
        if len(sessions) < rng.randint(0, 10):
            self.open()
        for session in sessions:
            if rng.random() < 0.5:
                self.publish(session)
            if rng.random() < 0.01:
                self.engine.receive([CloseSession(session.session_id, 1)])
            elif rng.random() < 0.01:
                self.next_id[session.session_id] = 1
                self.engine.receive(
                    [DraftState(session.session_id, 1, True, session.draft_epoch + 1, session.num_tokens)]
                )
        self.engine.step()
        self.clock.now += 0.01
        for message in self.sent:
            assert not isinstance(message, SessionFailed), message
            if isinstance(message, Outcome):
                text = self.texts[message.session_id]
                for token in message.token_ids:
                    assert token == next_token(text[-1], len(text)), "the law's own token"
                    text.append(token)
                self.finished += message.finish_reason is not None
        self.sent.clear()


@pytest.mark.parametrize("num_steps", [600, *nightly([100_000])])
def test_pages_add_up_after_random_steps(num_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Allocation, "offers_trees", lambda self: True)
    rng = random.Random(1)
    monkeypatch.setattr(
        Allocation,
        "allocate_draft_tokens",
        lambda self, offers, **options: [rng.randint(0, min(20, len(offer))) for offer in offers],
    )
    storm = Storm(0)
    for index in range(num_steps):
        storm.step()
        if num_steps < 10_000 or index % 50 == 0:
            storm.engine.check_integrity()
    stats = storm.engine.stats
    assert stats.branches > num_steps / 4
    assert min(stats.branches_used, stats.preemptions, stats.nodes_stale, storm.finished) >= num_steps / 300
    for session in storm.sessions():
        storm.engine.receive([CloseSession(session.session_id, 1)])
    storm.engine.check_integrity()
    assert storm.runner.cache.num_used == 0


def test_a_page_that_is_kept_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that goes on with a branch and forgets to give the others back."""
    monkeypatch.setattr(Allocation, "offers_trees", lambda self: True)
    monkeypatch.setattr(
        Allocation, "allocate_draft_tokens", lambda self, offers, **options: [min(9, len(offer)) for offer in offers]
    )

    def wrong(self: TargetSession, cache: Any, pages: Sequence[int]) -> None:
        self.pages, self.private_pages = [*pages], []

    monkeypatch.setattr(TargetSession, "join", wrong)
    storm = Storm(0)

    def run() -> None:
        for _ in range(300):
            storm.step()
            storm.engine.check_integrity()

    with pytest.raises(AssertionError, match="reference counts"):
        run()
