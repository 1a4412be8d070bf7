"""No page is lost, whatever comes in which order: subtrees, late nodes, cancels, preemptions, shared prefixes, heads
that keep rows on the pages, miss steps and give sessions up. A proposal says who made its nodes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.support.pump import Clock
from tests.support.rings import nightly
from tests.target.simulation import VOCAB, SyntheticRunner, next_token

from paceline.core.tree import Producer, Proposal, TreeNode
from paceline.drafters.protocol import Candidates, DrafterSessionError, Fed, Leaf, Plain
from paceline.messages import CloseSession, DraftState, InFlight, Node, Nodes, OpenSession, Outcome, SessionFailed
from paceline.model.features import OUT, Features
from paceline.model.kv_cache import KVCache, LayerSpec, flat_rows
from paceline.target.control.allocation import Allocation
from paceline.target.control.head_gate import HeadGate
from paceline.target.engine import TargetEngine
from paceline.target.heads.mounted import MountedHead
from paceline.target.scheduler import Scheduled
from paceline.target.session import TargetSession
from paceline.types import SamplingParams, SpeculationParams

PAGES = 14


class StatesRunner(SyntheticRunner):
    """Its states are the token and the position of each row, and it copies pages for branches, as a runner does."""

    features = Features((OUT,), every_position=True)

    def forward(self, steps: Sequence[Any]) -> torch.Tensor:
        self.cache.copy([pair for step in steps for pair in step.copies])
        return super().forward(steps)

    def forward_with_states(self, steps: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [pair for step in steps for pair in zip(step.token_ids, step.positions, strict=True)]
        return self.forward(steps), torch.tensor(rows, dtype=torch.float32)


class RowsHead(Plain):
    """A head that keeps the token of each position on the target's pages, and reads all of them back when it is asked.

    It is often right, and gives sessions up at random.
    """

    kind, features, layers = "rows", StatesRunner.features, (LayerSpec(1, 1, 1),)
    max_leaves, tokens_per_leaf, conditional = 4, 1, True

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.texts: dict[str, list[int]] = {}
        self.pages: dict[str, Sequence[int]] = {}
        self.holes: dict[str, tuple[range, ...]] = {}
        self.rows_checked = 0

    def bind(self, cache: KVCache, first_layer: int) -> None:
        self.rows = cache.keys[first_layer].view(-1)

    def open(self, session_id: str, token_ids: Sequence[int], sampler: Any, salt: str = "") -> None:
        assert session_id not in self.texts
        self.texts[session_id] = list(token_ids)

    def prefill(self) -> bool:
        return False

    def ready(self, session_id: str) -> bool:
        return session_id in self.pages

    def feed(self, fed: Sequence[Fed]) -> None:
        for item in fed:
            if self._rng.random() < 0.002:
                raise DrafterSessionError(item.session_id, "is given up")
        for item in fed:
            text, stop = self.texts[item.session_id], item.position + len(item.token_ids)
            assert item.states.tolist() == [[text[p], p] for p in range(item.position, stop)]
            assert list(item.token_ids) == text[item.position + 1 : stop + 1]
            self.rows[torch.tensor(flat_rows(item.pages, item.position + 1, stop + 1))] = torch.tensor(
                item.token_ids, dtype=torch.float32
            )
            self.pages[item.session_id], self.holes[item.session_id] = item.pages, item.holes

    def expand(self, leaves: Sequence[Leaf]) -> Candidates:
        token_ids = []
        for leaf in leaves:
            text = self.texts[leaf.session_id]
            rows = self.rows[torch.tensor(flat_rows(self.pages[leaf.session_id], 1, len(text)))].tolist()
            for hole in self.holes[leaf.session_id]:
                rows[hole.start - 1 : hole.stop - 1] = text[hole.start : hole.stop]
            assert rows == text[1:], "its rows lie on the session's pages, but those that it was told of"
            self.rows_checked += len(text)
            right = next_token(leaf.path[-1] if leaf.path else text[-1], len(text) + len(leaf.path))
            first = right if self._rng.random() < 0.7 else (right + 1) % VOCAB
            token_ids.append([first, (first + 1) % VOCAB, (first + 2) % VOCAB])
        return Candidates(torch.tensor(token_ids), torch.tensor([0.6, 0.3, 0.1]).log().expand(len(leaves), -1))

    def advance(self, session_id: str, token_ids: Sequence[int], node_ids: Sequence[int], kept: Sequence[int]) -> None:
        self.texts[session_id] += token_ids

    def close(self, session_id: str) -> None:
        del self.texts[session_id]
        self.pages.pop(session_id, None)

    def check_integrity(self) -> None:
        assert self.pages.keys() <= self.texts.keys()

    def shutdown(self) -> None:
        pass


class Storm:
    """One engine with a law in the place of a model, and messages at random."""

    def __init__(self, seed: int, *, with_head: bool = False) -> None:
        self.rng = random.Random(seed)
        self.clock = Clock()
        runner = StatesRunner if with_head else SyntheticRunner
        self.runner = runner(self.clock, lambda n: 0.01, PAGES, self.rng, 0.0)
        self.head = RowsHead(self.rng)
        self.mounted = [MountedHead("rows", self.head, num_tokens=5)] if with_head else []  # type: ignore[arg-type]
        for each in self.mounted:
            each.head.bind(self.runner.cache, self.runner.cache.add_layers(each.head.layers))
        self.sent: list[Any] = []
        self.engine = TargetEngine(
            self.runner,  # type: ignore[arg-type]
            self.sent.extend,
            max_sessions=6,
            max_step_tokens=96,
            max_model_len=400,
            heads=self.mounted,
            clock=self.clock,
        )
        self.schedule = self.engine._scheduler.schedule
        self.engine._scheduler.schedule = self.checked  # type: ignore[method-assign]
        self.of_draft: dict[str, set[tuple[int, ...]]] = {}
        self.published: dict[str, set[int]] = {}
        self.used = dict.fromkeys(Producer, 0)
        self.opened = 0
        self.next_id: dict[str, int] = {}
        self.texts: dict[str, list[int]] = {}
        self.finished = 0

    def checked(self, now: float) -> list[Scheduled]:
        """The parts of a step: each node of a proposal stands where its producer has it, no two are equal."""
        parts = self.schedule(now)
        for part in parts:
            session, proposal = part.session, part.proposal
            name = session.session_id
            followed = next((m.sessions[name] for m in self.mounted if name in m.sessions), None)
            trees = {Producer.DRAFT: session.tree, Producer.HEAD: followed.tree if followed else None}
            self.of_draft[name] = set()
            for i, node_id in enumerate(proposal.node_ids):
                path = tuple(proposal.token_ids[at] for at in proposal.path(i))
                tree = trees[proposal.producer]
                node: TreeNode | None = tree.anchor if tree else None
                for token in path:
                    node = node.children.get(token) if node else None
                assert node is not None, "its producer has it elsewhere"
                assert (node.node_id, node.prob) == (node_id, proposal.probs[i]), "its producer has it elsewhere"
                if proposal.producer is Producer.DRAFT:
                    self.of_draft[name].add(path)
            places = {(proposal.parent(i), token) for i, token in enumerate(proposal.token_ids)}
            assert len(places) == len(proposal), "siblings differ"
        return parts

    def count(self, message: Outcome) -> None:
        """An outcome says how many of its tokens are whose."""
        one, path, num_drafted = message.round, (), 0
        for token in message.token_ids[: one.num_accepted]:
            path = (*path, token)
            num_drafted += path in self.of_draft[message.session_id]
        assert num_drafted == one.num_accepted - one.head_accepted - one.lookup_accepted, "whose tokens they were"
        self.used[Producer.DRAFT] += num_drafted
        self.used[Producer.HEAD] += one.head_accepted
        self.used[Producer.LOOKUP] += one.lookup_accepted

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
            self.published.setdefault(name, set()).add(self.next_id[name])
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
            if isinstance(message, InFlight):
                known = self.published.get(message.session_id, set())
                assert known.issuperset(message.node_ids), "a draft is told of its own nodes"
            if isinstance(message, Outcome):
                self.count(message)
                text = self.texts[message.session_id]
                for token in message.token_ids:
                    assert token == next_token(text[-1], len(text)), "the law's own token"
                    text.append(token)
                self.finished += message.finish_reason is not None
        self.sent.clear()


def pause_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads miss one second in five, which is a hundred steps."""
    monkeypatch.setattr(HeadGate, "wanted", lambda self, num_sessions, now: int(now) % 5 != 4)


@pytest.mark.parametrize("with_head", [False, True], ids=["drafts", "heads"])
@pytest.mark.parametrize("num_steps", [600, *nightly([100_000])])
def test_pages_add_up_after_random_steps(num_steps: int, with_head: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pause_now_and_then(monkeypatch)
    monkeypatch.setattr(Allocation, "offers_trees", lambda self: True)
    rng = random.Random(1)
    monkeypatch.setattr(
        Allocation,
        "allocate_draft_tokens",
        lambda self, offers, **options: [rng.randint(0, min(20, len(offer))) for offer in offers],
    )
    storm = Storm(1, with_head=with_head)  # where a branch begins on a page with a head's row alone
    for index in range(num_steps):
        storm.step()
        if num_steps < 10_000 or index % 50 == 0:
            storm.engine.check_integrity()
    stats = storm.engine.stats
    assert stats.branches > num_steps / 4
    assert min(stats.branches_used, stats.preemptions, stats.nodes_stale, storm.finished) >= num_steps / 300
    assert storm.used == {
        Producer.DRAFT: stats.nodes_used,
        Producer.HEAD: stats.head_rows_used,
        Producer.LOOKUP: stats.lookup_rows_used,
    }
    for session in storm.sessions():
        storm.engine.receive([CloseSession(session.session_id, 1)])
    storm.engine.check_integrity()
    assert storm.runner.cache.num_used == 0
    for mounted in storm.mounted:
        assert not mounted.failure
        assert min(mounted.stats.rounds, mounted.stats.rows_used) > num_steps / 10
        assert mounted.stats.rows_used == stats.head_rows_used
        assert mounted.stats.sessions_failed > 0
        assert mounted.stats.holes > num_steps / 200
        assert storm.head.rows_checked > 10 * num_steps
    assert not storm.head.texts


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


@pytest.mark.parametrize("name", ["drop", "catch_up"])
def test_a_head_that_keeps_a_session_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not told of a session's end, or of its tokens."""
    monkeypatch.setattr(MountedHead, name, lambda self, session: None)
    storm = Storm(0, with_head=True)

    def run() -> None:
        for _ in range(300):
            storm.step()
            storm.engine.check_integrity()
            assert not storm.mounted[0].failure

    with pytest.raises(AssertionError):
        run()


def _a_heads_node_passes_for_the_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Proposal, "draft_ids", property(lambda self: self.node_ids))


def _a_heads_tree_passes_for_the_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Producer, "of", staticmethod(lambda node_id: Producer.DRAFT))


@pytest.mark.parametrize(
    "mutant",
    [
        _a_heads_node_passes_for_the_drafts,
        _a_heads_tree_passes_for_the_drafts,
    ],
    ids=lambda mutant: mutant.__name__.strip("_"),
)
def test_nodes_of_the_wrong_producer_are_caught(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match=r"elsewhere|its own nodes|whose tokens"):
        test_pages_add_up_after_random_steps(300, True, monkeypatch)
