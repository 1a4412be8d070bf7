"""No page is lost, whatever comes in which order: subtrees, late nodes, cancels, preemptions, shared prefixes, heads
that keep rows on the pages, miss steps and give sessions up. A proposal says who made its nodes."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from tests.lossless.test_trees import any_subtrees
from tests.support.pump import Clock
from tests.support.rings import nightly, slow
from tests.target.simulation import VOCAB, SyntheticRunner, next_token

from paceline.checkpoint.linear import CHUNK, LinearSpec, Slots
from paceline.core.tree import Producer, Proposal, TreeNode
from paceline.drafters.protocol import Candidates, DrafterSessionError, Fed, Leaf, Plain
from paceline.messages import CloseSession, DraftState, InFlight, Node, Nodes, OpenSession, Outcome, SessionFailed
from paceline.model.features import OUT, Features
from paceline.model.kv_cache import KVCache, LayerSpec, flat_rows
from paceline.model.linear.copies import StateCopies
from paceline.model.linear.plan import CHUNKS_OF_PAGE, NONE, LinearSlots, SequencePart
from paceline.target.branches import branches_of
from paceline.target.control.allocation import Allocation
from paceline.target.control.head_gate import HeadGate
from paceline.target.engine import TargetEngine
from paceline.target.heads.mounted import MountedHead
from paceline.target.scheduler import Scheduled, Scheduler
from paceline.target.session import TargetSession
from paceline.types import PAGE_SIZE, SamplingParams, SpeculationParams

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


class LinearRunner(SyntheticRunner):
    """It has a linear layer, whose slots hold what they would be computed from: the tokens before. Free ones hold None.

    ``contexts``: of each sequence of the next step, all tokens up to its last one.
    """

    def __init__(self, *options: Any) -> None:
        super().__init__(*options)
        spec = LinearSpec(1, 1, 1, 1, 2)
        self.cache = KVCache([LayerSpec(1, 1, 1)], PAGES, torch.float32, "cpu", {0: spec}, Slots.of(6))
        assert self.cache.linear is not None
        self.linear = self.cache.linear
        self.states: list[int | None] = [None] * self.linear.slots.states
        self.rows: list[list[tuple[int, int] | None]] = [[None] * CHUNK for _ in range(self.linear.slots.rows)]
        self.contexts: list[list[int]] = []
        self.read = 0
        self.cache.state_copies = Copies(self.states)

    def forward(self, steps: Sequence[Any]) -> torch.Tensor:
        for slot in self.linear.free_states:
            self.states[slot] = None
        for slot in [*self.linear.free_rows, *self.linear.ended]:
            self.rows[slot] = [None] * CHUNK
        plan = self.linear.plan(steps)
        for source, to in plan.copies:
            self.rows[to] = [*self.rows[source]]
        for step, part, context in zip(steps, plan.sequences, self.contexts, strict=True):
            assert self._runs(part, iter(step.token_ids)) == functools.reduce(_after, context, 0), "another context"
        self.linear.confirm()
        return super().forward(steps)

    def _runs(self, part: SequencePart, token_ids: Iterator[int]) -> int:
        """What the last token is computed from, by states and rows alone."""
        before = 0 if part.state == NONE else self.states[part.state]
        for chunk in part.chunks:
            rows = [*self.rows[chunk.rows][: chunk.first]] if chunk.first else []
            self.read += len(rows) + 1
            for row in rows:
                assert before is not None, "a state that is not there is read"
                assert row is not None, "a row that is not there is read"
                before = _after(before, row[1])
                assert before == row[0], "a row of another context is read"
            for _ in range(chunk.count):
                assert before is not None, "a state that is not there is read"
                token = next(token_ids)
                before = _after(before, token)
                rows.append((before, token))
            if chunk.rows != NONE:
                self.rows[chunk.rows][: len(rows)] = rows
            for at, slot, offset in chunk.also:
                self.rows[slot][offset] = rows[at]
            if chunk.store != NONE:
                assert len(rows) == CHUNK, "a state within a chunk is stored"
                self.states[chunk.store] = before
        assert before is not None
        return before


class Copies(StateCopies):
    """Of the states of a ``LinearRunner``."""

    def __init__(self, states: list[int | None]) -> None:
        super().__init__((), len(states))
        self.states, self.kept = states, dict[bytes, int | None]()

    def keep(self, digest: bytes, slot: int) -> None:
        super().keep(digest, slot)
        self.kept[digest] = self.states[slot]

    def restore(self, digest: bytes, slot: int) -> None:
        super().restore(digest, slot)
        self.states[slot] = self.kept[digest]


def _after(before: int, token: int) -> int:
    return hash((before, token))


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

    def __init__(self, seed: int, *, with_head: bool = False, kind: type[SyntheticRunner] = SyntheticRunner) -> None:
        """``kind``: of the runner of a target without a head."""
        self.seed, self.rng = seed, random.Random(seed)
        self.clock = Clock()
        self.elsewhere = self
        """Where sessions migrate to."""
        self.runner: Any = self.make_runner(StatesRunner if with_head else kind)
        self.head = RowsHead(self.rng)
        self.mounted = [MountedHead("rows", self.head, num_tokens=5)] if with_head else []  # type: ignore[arg-type]
        for each in self.mounted:
            each.head.bind(self.runner.cache, self.runner.cache.add_layers(each.head.layers))
        self.sent: list[Any] = []
        self.engine = TargetEngine(
            self.runner,
            self.sent.extend,
            max_sessions=6,
            max_step_tokens=96,
            max_model_len=400,
            heads=self.mounted,
            clock=self.clock,
        )
        self.schedule = self.engine.scheduler.schedule
        self.engine.scheduler.schedule = self.checked  # type: ignore[method-assign]
        self.of_draft: dict[str, set[tuple[int, ...]]] = {}
        self.published: dict[str, set[int]] = {}
        self.used = dict.fromkeys(Producer, 0)
        self.opened = 0
        self.next_id: dict[str, int] = {}
        self.texts: dict[str, list[int]] = {}
        self.finished = 0
        self.migrations = 0

    def make_runner(self, kind: type[SyntheticRunner]) -> Any:
        """The runner of the engine."""
        return kind(self.clock, lambda n: 0.01, PAGES, self.rng, 0.0)

    def checked(self, now: float, **options: bool) -> list[Scheduled]:
        """The parts of a step: each node of a proposal stands where its producer has it, no two are equal."""
        parts = self.schedule(now, **options)
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
        if isinstance(self.runner, LinearRunner):
            self.runner.contexts = [context for part in parts for context in contexts_of(part)]
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
        return [*self.engine.sessions.values()]

    def open(self) -> None:
        rng, name = self.rng, f"{self.seed}.{self.opened}"
        self.opened += 1
        shared = [7] * rng.choice((0, 64, 130))
        prompt = [*shared, *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 90)))]
        sampling = SamplingParams(max_tokens=rng.randint(1, 90), temperature=0.0, ignore_eos=True)
        speculation = SpeculationParams(max_draft_tokens=rng.randint(1, 12))
        self.next_id[name], self.texts[name] = 1, prompt
        self.engine.receive([OpenSession(name, 1, tuple(prompt), len(prompt), 0, sampling, speculation)])

    def migrate(self, session: TargetSession) -> None:
        """The session goes on elsewhere, from all of its tokens."""
        name, to = session.session_id, self.elsewhere
        self.engine.receive([CloseSession(name, session.epoch)])
        to.next_id[name], to.texts[name] = 1, self.texts[name]
        to.published.pop(name, None)
        to.migrations += 1
        to.engine.receive([to.opening(name, session.draft_epoch + 1, session)])

    def opening(self, name: str, epoch: int, session: TargetSession) -> OpenSession:
        """The message that opens a session of another engine on this one."""
        sampling = SamplingParams(
            max_tokens=session.max_tokens - session.num_prompt_tokens, temperature=0.0, ignore_eos=True
        )
        speculation = SpeculationParams(max_draft_tokens=session.k)
        return OpenSession(name, epoch, tuple(self.texts[name]), session.num_prompt_tokens, 0, sampling, speculation)

    def right(self, name: str, last: int, position: int) -> int:
        """The session's token at a position, behind ``last``."""
        return next_token(last, position)

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
            right = self.right(name, last, position + 1)
            token = right if rng.random() < 0.5 else rng.randrange(self.runner.vocab_size)
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
                self.engine.receive([CloseSession(session.session_id, session.epoch)])
            elif rng.random() < 0.01:
                self.migrate(session)
            elif rng.random() < 0.01:
                self.next_id[session.session_id] = 1
                self.engine.receive(
                    [DraftState(session.session_id, session.epoch, True, session.draft_epoch + 1, session.num_tokens)]
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
                    assert token == self.right(message.session_id, text[-1], len(text)), "the law's own token"
                    text.append(token)
                self.finished += message.finish_reason is not None
        self.sent.clear()


def contexts_of(part: Scheduled) -> list[list[int]]:
    """All tokens up to the last one of each sequence of a part."""
    context, proposal = part.session.tokens[: part.stop], part.proposal
    if not part.tables:
        return [[*context, *proposal.token_ids]]
    ends = [branch.stop - 1 for branch in branches_of(proposal)]
    return [[*context, *(proposal.token_ids[i] for i in proposal.path(end))] for end in ends]


def pause_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads miss one second in five, which is a hundred steps."""
    monkeypatch.setattr(HeadGate, "wanted", lambda self, num_sessions: int(self.budget.now) % 5 != 4)


@pytest.mark.parametrize("with_head", [False, True], ids=["drafts", "heads"])
@pytest.mark.parametrize("num_steps", [600, *nightly([100_000])])
def test_pages_add_up_after_random_steps(num_steps: int, with_head: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pause_now_and_then(monkeypatch)
    any_subtrees(monkeypatch, most=20, seed=1)
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
        storm.engine.receive([CloseSession(session.session_id, session.epoch)])
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


def run_states(num_steps: int, monkeypatch: pytest.MonkeyPatch) -> Storm:
    """A storm over a linear layer; after every step each slot has its owner, and each token its own context."""
    any_subtrees(monkeypatch, most=20, seed=1)
    storm = Storm(11, kind=LinearRunner)
    for _ in range(num_steps):
        storm.step()
        storm.engine.check_integrity()
    for session in storm.sessions():
        storm.engine.receive([CloseSession(session.session_id, session.epoch)])
    storm.engine.check_integrity()
    return storm


@pytest.mark.parametrize("num_steps", [600, *slow([4000]), *nightly([100_000])])
def test_states_add_up_after_random_steps(num_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opens, cancels, migrations, preemptions, prefix hits and forks, at all offsets in chunks and pages."""
    storm = run_states(num_steps, monkeypatch)
    stats, linear = storm.engine.stats, storm.runner.cache.linear
    assert isinstance(storm.runner, LinearRunner)
    assert linear is not None
    assert storm.runner.read > 50 * num_steps
    assert min(stats.branches, stats.cached_tokens / PAGE_SIZE) > num_steps / 10
    assert min(stats.branches_used, stats.preemptions, storm.migrations, storm.finished) >= num_steps / 300
    assert not linear.held
    assert not linear._rows_of
    assert all(key // CHUNKS_OF_PAGE in storm.runner.cache._cached for key in linear.state_of)


def _kept_on_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    remove = Scheduler.remove

    def wrong(self: Scheduler, session: TargetSession) -> None:
        session.held_state = NONE
        remove(self, session)

    monkeypatch.setattr(Scheduler, "remove", wrong)


def _kept_on_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    preempt = Scheduler.preempt

    def wrong(self: Scheduler, session: TargetSession, parts: list[Scheduled]) -> None:
        session.held_state = NONE
        preempt(self, session, parts)

    monkeypatch.setattr(Scheduler, "preempt", wrong)


def _prefix_of_the_page_before(monkeypatch: pytest.MonkeyPatch) -> None:
    hit = LinearSlots.hit

    def wrong(self: LinearSlots, pages: Sequence[int]) -> int:
        count = hit(self, pages)
        if count > 1 and (early := pages[count - 2] * CHUNKS_OF_PAGE + CHUNKS_OF_PAGE - 1) in self.state_of:
            late = pages[count - 1] * CHUNKS_OF_PAGE + CHUNKS_OF_PAGE - 1
            self.drop_state(late)
            self._own(late, self.state_of[early])
        return count

    monkeypatch.setattr(LinearSlots, "hit", wrong)


@pytest.mark.parametrize(
    ("mutant", "message"),
    [
        (_kept_on_cancel, "holds of states differ"),
        (_kept_on_preemption, "holds of states differ"),
        (_prefix_of_the_page_before, "another context|a row of another context"),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else "",
)
def test_a_state_that_is_kept_or_wrong_is_caught(mutant: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match=message):
        run_states(600, monkeypatch)


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
