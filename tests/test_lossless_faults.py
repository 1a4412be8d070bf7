"""The promise under a hostile wire: whatever is dropped, repeated, reordered, delayed, corrupted or replayed, and
whoever dies when, a session ends with the tokens of plain decoding, each exactly once.

Real engines and real sessions in lockstep on a virtual clock (``support.Pump``). A seeded choice harms messages on the
four links, and an owner does what owners do: it re-opens a lost target, gives a draft to sessions that want one, and
re-opens a session that has made no progress for long (a broken stream; only losses between target and router may need
it). Token ids inside outcomes are never corrupted, nor an outcome passed off as the one before it: nobody could notice,
and the transport has checksums.

What is proven besides equality, after every tick: engines keep their invariants; where no content was corrupted, the
target's context begins with the session's history and the draft's context is the beginning of it; nothing stale is
relayed. Each guard has a mutant without it, which must be caught.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.support import EOS, VOCAB, Pump, Request, assert_same, pair, plain_reference, prompt

from paceline.draft.engine import DraftEngine
from paceline.draft.model_drafter import ModelDrafter
from paceline.router import session as session_module
from paceline.router.session import MAX_DRAFT_RETRIES, Actions, Result, Session
from paceline.speculation import SpeculationTree
from paceline.target.engine import TargetEngine
from paceline.types import (
    Acceptance,
    CloseSession,
    Commit,
    DraftState,
    FinishReason,
    InFlight,
    Mode,
    Node,
    Nodes,
    OpenSession,
    Outcome,
    Round,
    SamplingParams,
    SparseDistribution,
    SpeculationParams,
    SpeculationWanted,
)

LINKS = ("to_target", "from_target", "to_draft", "from_draft")
RATES = {"drop": 0.08, "duplicate": 0.3, "reorder": 0.5, "delay": 0.15, "corrupt": 0.25, "replay": 0.3}

PATIENCE = 100
"""Ticks without progress after which the owner takes the stream of a session for broken."""
LONGEST = 5000
"""Ticks in which every run must end; a run without faults takes a few hundred."""


class FaultyPump(Pump):
    """A pump whose links do harm and whose engines die."""

    def __init__(self, target: Any, draft: Any, *, faults: dict[tuple[str, str], float] | None = None, **options: Any):
        super().__init__(target, draft, **options)
        self.models = target, draft
        self.faults = faults or {}
        self.chaos = random.Random(options.get("seed", 0) + 1)
        self.injected: Counter[tuple[str, str]] = Counter()
        self.counts: Counter[str] = Counter()
        self.content_is_true = all(kind != "corrupt" for _, kind in self.faults)
        self.chunks: dict[str, list[int]] = defaultdict(list)
        self.on_outcome: Callable[[Session], None] = lambda session: None
        """Called between an outcome and its digest."""
        self.each_tick: Callable[[], None] = lambda: None
        self._seen: dict[str, list[Any]] = {link: [] for link in LINKS}
        self._delayed: list[tuple[int, str, Any]] = []
        self._progress: dict[str, tuple[int, int]] = {}
        self._now = 0

    # -- the links -------------------------------------------------------------------------------------------------

    def _deliver(self, queue: Any, receive: Callable[[list[Any]], None]) -> bool:
        link = next(name for name in LINKS if getattr(self, name) is queue)
        return super()._deliver(queue, lambda messages: receive(self._harm(link, messages)))

    def _harm(self, link: str, messages: list[Any]) -> list[Any]:
        out: list[Any] = []
        for message in messages:
            kind = self._draw(link)
            repeated = self._seen[link]
            repeated.append(message)
            if kind == "drop":
                self._injected(link, kind)
            elif kind == "duplicate":
                out += [message, message]
                self._injected(link, kind)
            elif kind == "delay":
                self._delayed.append((self._now + self.chaos.randint(1, 30), link, message))
                self._injected(link, kind)
            elif kind == "replay":
                old = [m for m in repeated if m.epoch < message.epoch] or repeated
                out += [message, self.chaos.choice(old)]
                self._injected(link, kind)
            elif kind == "corrupt" and (harmed := corrupted(link, message, self.chaos)) is not None:
                out.append(harmed)
                self._injected(link, kind)
            elif kind == "reorder" and out:
                out.insert(self.chaos.randrange(len(out)), message)
                self._injected(link, kind)
            else:
                out.append(message)
        return out

    def _draw(self, link: str) -> str | None:
        at = self.chaos.random()
        for kind in RATES:
            at -= self.faults.get((link, kind), 0.0)
            if at < 0:
                return kind
        return None

    def _injected(self, link: str, kind: str) -> None:
        self.injected[link, kind] += 1

    # -- the owner -------------------------------------------------------------------------------------------------

    def tick(self) -> bool:
        self._now += 1
        assert self._now < LONGEST, "no end"
        due = [d for d in self._delayed if d[0] <= self._now]
        self._delayed = [d for d in self._delayed if d[0] > self._now]
        for _, link, message in due:
            getattr(self, link).append(message)
        self.each_tick()
        moved = super().tick()
        self._watch()
        self._check()
        return moved or bool(self._delayed)

    def _watch(self) -> None:
        for name, session in self.sessions.items():
            length, since = self._progress.get(name, (-1, 0))
            if session.finished or len(session._history) != length:
                self._progress[name] = len(session._history), self._now
            elif self._now - since > PATIENCE:
                self.counts["stalls"] += 1
                self._progress[name] = length, self._now
                self.reopen(session)

    def _check(self) -> None:
        """What the engines believe is true, as far as they know it."""
        for name, session in self.sessions.items():
            if session.finished or not self.content_is_true:
                continue
            history = session._history
            target = self.target._sessions.get(name)
            if target is not None and target.epoch == session.target_epoch:
                assert target.tokens[: len(history)] == history, "the target is elsewhere"
            draft = self.draft._sessions.get(name) if self.draft and not self.draft_dead else None
            if draft is not None and draft.epoch == session.draft_epoch:
                context = self.drafter._sessions[name].tokens
                assert history[: len(context)] == context, "the draft is elsewhere"
                if target is not None and target.draft_epoch == draft.epoch:
                    for node in target.tree.nodes():
                        twin = draft.tree.get(node.node_id)
                        same = twin is None or node.node_id == 0 or twin.token_id == node.token_id
                        assert same, "the trees differ"
                        assert twin is None or twin.position == node.position, "the trees differ"

    def reopen(self, session: Session) -> None:
        """On the same target, or the one that has taken its place."""
        actions = session.reopen_target()
        self._send(actions)
        self._give_draft(session, actions)

    def _give_draft(self, session: Session, actions: Actions) -> None:
        assert actions.draft_wanted <= session.wants_draft
        if actions.draft_wanted and not self.draft_dead:
            self._send(session.on_draft_up())

    def _on_target(self, events: list[Any]) -> None:
        for event in events:
            session = self.sessions[event.session_id]
            actions = session.on_target(event)
            self._send(actions)
            if actions.target_lost is not None:
                self.reopen(session)
            else:
                self._give_draft(session, actions)
            if isinstance(event, Outcome):
                self.on_outcome(session)
            actions = session.digest()
            self.chunks[event.session_id] += [t for chunk in actions.chunks for t in chunk.token_ids]
            self._send(actions)

    def _on_draft(self, events: list[Any]) -> None:
        for event in events:
            session = self.sessions[event.session_id]
            actions = session.on_draft(event)
            for message in actions.to_target:
                if isinstance(message, Nodes):
                    assert session.draft_available
                    assert message.epoch == session.draft_epoch, "something stale is relayed"
            self._send(actions)
            self._give_draft(session, actions)

    # -- deaths ----------------------------------------------------------------------------------------------------

    def kill_target(self, *, keeps_talking: bool = False) -> None:
        """Another takes its place and every session is re-opened; what the old one had sent may still come."""
        self._count(self.target.stats)
        old = self.target
        self.target = TargetEngine(
            self.models[0].runner(64),
            self.from_target.extend,
            max_sessions=16,
            max_step_tokens=64,
            max_model_len=1024,
            clock=self.clock,
        )
        assert old is not self.target
        self.to_target.clear()
        if not keeps_talking:
            self.from_target.clear()
        for session in self.sessions.values():
            if not session.finished:
                self.reopen(session)

    def kill_draft(self, *, keeps_talking: bool = False) -> None:
        """Its sessions go on without."""
        assert self.draft is not None
        self._count(self.draft.stats)
        self.draft_dead = True
        if not keeps_talking:
            self.from_draft.clear()
        for session in self.sessions.values():
            self._send(session.on_draft_down())

    def restart_draft(self) -> None:
        """Sessions that want a draft are opened on it."""
        self.drafter = ModelDrafter(self.models[1].runner(64), max_leaves=32, max_prefill_tokens=64, top_m=64)
        self.draft = DraftEngine(
            self.drafter, self.from_draft.extend, vocab_size=VOCAB, tree_budget=32, clock=self.clock
        )
        self.draft_dead = False
        for session in self.sessions.values():
            if session.wants_draft:
                self._send(session.on_draft_up())

    # -- the end ---------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """The streams end: replicas close what came over them, as ``replica.py`` does; then nothing is held."""
        self.faults = {}
        while self._delayed:
            self.tick()
        for engine, queue in ((self.target, self.to_target), (self.draft, self.to_draft)):
            queue.clear()
            if engine is not None:
                queue.extend(CloseSession(name, s.epoch) for name, s in engine._sessions.items())
        super().settle()
        self._count(self.target.stats)
        if self.draft is not None and not self.draft_dead:
            self._count(self.draft.stats)
        for session in self.sessions.values():
            self._count(session.relay)

    def _count(self, stats: Any) -> None:
        for key, value in dataclasses.asdict(stats).items():
            self.counts[key] += value


# -- corruption -----------------------------------------------------------------------------------------------------


def corrupted(link: str, message: Any, rng: random.Random) -> Any:
    """A message that no engine sends, or a plausible one that is wrong; None: of this kind none is harmed here."""
    if isinstance(message, Nodes):
        return _corrupted_nodes(message, rng)
    changes: list[dict[str, Any]] = [{"epoch": message.epoch + d} for d in (-1, 1)]
    if isinstance(message, Commit):
        changes += [{"context_len": message.context_len + d} for d in (-1, 1, 2**40, -(2**40))]
        changes += [{"in_flight": ids} for ids in ((999, 1000), (-1, 2**70), tuple(range(4200)))]
        changes += [{"token_ids": (*message.token_ids, token)} for token in (VOCAB, -1, 2**31, 11)]
        changes += [{"token_ids": tuple((t + 1) % VOCAB for t in message.token_ids)}, {"token_ids": ()}]
    elif isinstance(message, OpenSession):
        changes += [{"token_ids": ()}, {"token_ids": (VOCAB, *message.token_ids[1:])}]
        if link == "to_draft":  # a target could not know better: the text would be that of another request
            changes += [{"num_prompt_tokens": n} for n in (0, -1, len(message.token_ids) + 1)]
            changes += [{"seed": -1}, {"seed": message.seed ^ 1}]
            changes += [{"token_ids": (*message.token_ids[:-1], token)} for token in (VOCAB, -1)]
    elif isinstance(message, DraftState):
        changes += [{"available": not message.available}]
        changes += [{"context_len": message.context_len + d} for d in (-1, 1, 10**6, -(10**6))]
        changes += [{"draft_epoch": message.draft_epoch + d} for d in (-1, 1)]
    elif isinstance(message, InFlight):
        changes += [{"context_len": message.context_len + d} for d in (-1, 1)]
        changes += [{"node_ids": ids} for ids in ((999,), (-1,), (2**70,), tuple(range(4200)))]
    elif isinstance(message, Outcome):
        # not one less: with the outcome before it lost or late, nobody could notice that this one is not it
        changes += [{"context_len": message.context_len + d} for d in (1, 2**40, -(2**40))]
        changes += [{"token_ids": ()}, {"token_ids": (-1,)}, {"logprobs": message.logprobs[1:]}]
        changes += [{"round": Round(1, 10**6, message.round.cause)}, {"round": Round(0, -1, message.round.cause)}]
    elif isinstance(message, SpeculationWanted):
        changes += [{"wanted": not message.wanted}]
    return replace(message, **rng.choice(changes))


def _corrupted_nodes(message: Nodes, rng: random.Random) -> Nodes:
    changes: list[dict[str, Any]] = [{"epoch": message.epoch + d} for d in (-1, 1, 1000)]
    changes += [{"context_len": n} for n in (-1, 0, message.context_len + 1000, 2**40, message.context_len - 1)]
    changes += [{"step_s": s} for s in (math.nan, -1.0)] + [{"idle": not message.idle}, {"nodes": ()}]
    parent = message.nodes[0].parent_id if message.nodes else 0
    flood = tuple(Node(10**6 + i, 10**6 + i - 1 if i else parent, i % VOCAB, 1.0) for i in range(4200))
    wide = tuple(Node(10**6 + i, parent, i % VOCAB, 1.0) for i in range(4200))
    if not message.nodes or rng.random() < 0.4:
        return replace(message, **rng.choice([*changes, {"nodes": flood}, {"nodes": (*message.nodes, *wide)}]))
    at = rng.randrange(len(message.nodes))
    node = message.nodes[at]
    harms: list[dict[str, Any]] = [{"token_id": t} for t in (VOCAB, -1, 2**31, (node.token_id + 1) % VOCAB)]
    harms += [{"prob": p} for p in (math.nan, -0.5, 1.5, math.inf, 1.0)]
    harms += [{"parent_id": p} for p in (0, -1, node.node_id, node.node_id + 5, 2**40, max(0, node.parent_id - 1))]
    harms += [{"node_id": n} for n in (0, -1, node.parent_id, 2**70)]
    harms += [
        {"q": q}
        for q in (
            None,
            SparseDistribution((), ()),
            SparseDistribution((node.token_id,), (math.nan,)),
            SparseDistribution((node.token_id, node.token_id), (0.5, 0.5)),
            SparseDistribution((node.token_id, VOCAB), (0.5, 0.5)),
            SparseDistribution((node.token_id,), (0.5,)),
            SparseDistribution((node.token_id, 11), (1e308, 1e308)),
        )
    ]
    harmed = replace(node, **rng.choice(harms))
    return replace(message, nodes=(*message.nodes[:at], harmed, *message.nodes[at + 1 :]))


# -- the runs -------------------------------------------------------------------------------------------------------


def requests(num: int = 4, max_tokens: int = 24, **speculation: Any) -> dict[str, Request]:
    """Greedy and sampled, with and without processors, both speculating modes, short and long proposals."""
    sampling = [
        {"temperature": 1.0},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 0.8, "top_k": 40, "frequency_penalty": 0.4, "min_tokens": 3},
        {"temperature": 1.0, "bad_words": ((20,), (21, 22)), "logit_bias": {EOS: 4.0}},
    ]
    return {
        f"s{i}": Request(
            prompt(i, 1 + 23 * i),
            SamplingParams(max_tokens=max_tokens, seed=100 + i, **sampling[i % 4]),
            SpeculationParams(
                **{"mode": (Mode.OVERLAPPED, Mode.SEQUENTIAL)[i == 1], "max_draft_tokens": (6, 4, 8, 3)[i % 4]}
                | speculation
            ),
            eos_token_ids=(EOS,),
        )
        for i in range(num)
    }


@pytest.fixture(scope="module")
def reference() -> dict[str, Result]:
    """Plain decoding of each request alone."""
    return plain_reference(pair("llama")[0], requests())


def run(
    reference: dict[str, Result], seed: int, faults: dict[tuple[str, str], float], prepare: Any = None, **options: Any
) -> FaultyPump:
    """One run and its oracle."""
    target, draft = pair("llama")
    pump = FaultyPump(target, draft, seed=seed, faults=faults, **options)
    if prepare is not None:
        prepare(pump)
    wanted = requests(len(reference))
    assert_same(pump.run(wanted), reference)
    for name, result in reference.items():
        assert tuple(pump.chunks[name]) == result.token_ids, "a token was emitted twice, or never"
    assert not pump.failures
    return pump


def accepted(pump: FaultyPump) -> int:
    """Draft tokens that were of use."""
    return sum(result.speculation.accepted for result in pump.results.values())


NOTICED = {
    ("to_target", "drop"): ("trees_lost",),
    ("to_target", "duplicate"): ("nodes_invalid",),
    ("to_target", "reorder"): ("trees_lost", "draft_reopens"),
    ("to_target", "delay"): ("trees_lost", "draft_reopens"),
    ("to_target", "corrupt"): ("nodes_invalid", "messages_stale"),
    ("to_target", "replay"): ("nodes_invalid",),
    ("from_target", "drop"): ("early", "targets_lost", "target_reopens"),
    ("from_target", "duplicate"): ("repeated",),
    ("from_target", "reorder"): ("early", "repeated", "target_reopens"),
    ("from_target", "delay"): ("early", "stale", "target_reopens"),
    ("from_target", "corrupt"): ("malformed", "stale", "target_reopens"),
    ("from_target", "replay"): ("repeated",),
    ("to_draft", "drop"): ("lost_commits", "unknown_messages", "drafts_lost", "draft_reopens"),
    ("to_draft", "duplicate"): ("stale_messages",),
    ("to_draft", "reorder"): ("lost_commits", "drafts_lost", "draft_reopens"),
    ("to_draft", "delay"): ("lost_commits", "stale_messages", "draft_reopens"),
    ("to_draft", "corrupt"): ("invalid_messages", "failed_sessions", "draft_reopens"),
    ("to_draft", "replay"): ("stale_messages",),
    ("from_draft", "drop"): ("trees_lost", "draft_reopens"),
    ("from_draft", "duplicate"): ("nodes_invalid",),
    ("from_draft", "reorder"): ("trees_lost", "draft_reopens"),
    ("from_draft", "delay"): ("trees_lost", "draft_reopens"),
    ("from_draft", "corrupt"): ("nodes_invalid", "malformed"),
    ("from_draft", "replay"): ("nodes_invalid",),
}
"""What must have been counted after each fault."""

LOSSES = ("trees_lost", "drafts_lost", "lost_commits", "failed_sessions")
STALLS = ("stalls", "targets_lost", "target_reopens")


def one_fault(reference: dict[str, Result], link: str, kind: str, prepare: Any = None) -> Counter[str]:
    """Three runs with one kind of fault on one link, and what must and must not have been counted after them."""
    total: Counter[str] = Counter()
    injected = useful = 0
    for seed in range(3):
        pump = run(reference, seed, {(link, kind): RATES[kind]}, prepare)
        total += pump.counts
        injected += pump.injected[link, kind]
        useful += accepted(pump)
    assert injected > 10
    assert useful > 10, "drafting goes on after a fault"
    for name in NOTICED[link, kind]:
        assert total[name] > 0, name
    if kind in ("duplicate", "replay"):
        for name in LOSSES:
            assert total[name] == 0, f"{name}: nothing was lost"
    if prepare is None and (link.endswith("draft") or kind in ("duplicate", "replay")):
        for name in STALLS:
            assert total[name] == 0, f"{name}: the target was never in doubt"
    return total


@pytest.mark.parametrize(("link", "kind"), NOTICED)
def test_one_kind_of_fault_on_one_link(reference: dict[str, Result], link: str, kind: str) -> None:
    """Same tokens, the fault was noticed, drafting goes on. What only comes twice, or late from an old epoch, costs
    nothing: no engine is re-opened. What happens to drafts never costs the target."""
    one_fault(reference, link, kind)


# -- deaths ---------------------------------------------------------------------------------------------------------


def _at_outcome(number: int, action: Callable[[FaultyPump], None]) -> Callable[[FaultyPump], None]:
    """Prepares a pump to do it once, between that outcome and its digest."""

    def prepare(pump: FaultyPump) -> None:
        count = itertools.count(1)

        def on_outcome(_: Session) -> None:
            if next(count) == number:
                action(pump)

        pump.on_outcome = on_outcome

    return prepare


def _num_outcomes(pump: FaultyPump) -> int:
    return sum(result.speculation.rounds for result in pump.results.values())


@pytest.fixture(scope="module")
def two(reference: dict[str, Result]) -> dict[str, Result]:
    """Of the first two requests."""
    return dict(itertools.islice(reference.items(), 2))


@pytest.mark.parametrize("keeps_talking", [False, True])
def test_a_target_that_dies_at_any_round(two: dict[str, Result], keeps_talking: bool) -> None:
    """Between an outcome and its text, once in each run, at each round of the run; with and without its last words."""
    number, reopened = 1, 0
    while True:
        pump = run(two, 7, {}, _at_outcome(number, lambda pump: pump.kill_target(keeps_talking=keeps_talking)))
        reopened += pump.counts["target_reopens"]
        assert pump.counts["target_reopens"] <= 2
        assert pump.counts["stalls"] == pump.counts["targets_lost"] == 0
        if number >= _num_outcomes(pump):
            break
        number += 1
    assert number > 10
    assert reopened > 15


def _die_for(num_ticks: int, keeps_talking: bool, pump: FaultyPump) -> None:
    pump.kill_draft(keeps_talking=keeps_talking)
    back = pump._now + num_ticks

    def each_tick() -> None:
        if pump._now == back:
            pump.restart_draft()

    pump.each_tick = each_tick


@pytest.mark.parametrize("keeps_talking", [False, True])
def test_a_draft_that_dies_at_any_round_and_comes_back(two: dict[str, Result], keeps_talking: bool) -> None:
    """Some ticks later. In the end draft tokens were of use again."""
    number = reopened = useful = 0
    while True:
        number += 1

        pump = run(two, 8, {}, _at_outcome(number, functools.partial(_die_for, number, keeps_talking)))
        assert pump.counts["target_reopens"] == pump.counts["stalls"] == 0
        reopened += pump.counts["draft_reopens"]
        useful += accepted(pump)
        if number >= _num_outcomes(pump):
            break
    assert number > 10
    assert reopened > 10
    assert useful > 20


def _deaths(pump: FaultyPump) -> None:
    """Every now and then somebody dies, or comes back."""

    def each_tick() -> None:
        event = pump.chaos.random()
        if pump._now > LONGEST // 2:
            return
        if event < 0.01:
            pump.kill_target(keeps_talking=pump.chaos.random() < 0.5)
        elif event < 0.03 and not pump.draft_dead:
            pump.kill_draft(keeps_talking=pump.chaos.random() < 0.5)
        elif event < 0.13 and pump.draft_dead:
            pump.restart_draft()

    pump.each_tick = each_tick


def _everything(seed: int, corrupt: bool) -> dict[tuple[str, str], float]:
    rng = random.Random(seed)
    kinds = [kind for kind in RATES if corrupt or kind != "corrupt"]
    return {(link, kind): RATES[kind] * rng.choice((0.0, 0.1, 0.3)) for link in LINKS for kind in kinds}


def _chaos(reference: dict[str, Result], seeds: range) -> None:
    total: Counter[str] = Counter()
    for seed in seeds:
        total += run(reference, seed, _everything(seed, corrupt=seed % 2 == 1), _deaths).counts
    for name in ("target_reopens", "draft_reopens", "drafts_lost", "stale", "repeated", "nodes_invalid"):
        assert total[name] > 0, name


def test_everything_at_once(reference: dict[str, Result]) -> None:
    """All faults on all links, with and without corruption, and deaths of both engines."""
    _chaos(reference, range(6))


@pytest.mark.slow
def test_everything_at_once_for_longer(reference: dict[str, Result]) -> None:
    """The same with other seeds."""
    _chaos(reference, range(6, 80))


def test_nothing_at_all(reference: dict[str, Result]) -> None:
    """The harness itself harms nothing: without faults every counter of a loss is zero."""
    for seed in range(2):
        pump = run(reference, seed, {})
        for name in (*LOSSES, *STALLS, "repeated", "early", "malformed", "nodes_invalid", "draft_reopens"):
            assert pump.counts[name] == 0, name


@pytest.mark.parametrize("link", ["to_target", "from_draft", "to_draft"])
def test_the_rejection_rule_ends_too(link: str) -> None:
    """Its tokens depend on the proposals, so there is no reference: but it ends, within the vocabulary."""
    target, draft = pair("llama")
    for seed in range(2):
        wanted = requests(acceptance=Acceptance.REJECTION)
        pump = FaultyPump(target, draft, seed=seed, faults={(link, kind): rate / 2 for kind, rate in RATES.items()})
        for name, result in pump.run(wanted).items():
            assert tuple(pump.chunks[name]) == result.token_ids
            assert all(0 <= token_id < VOCAB for token_id in result.token_ids)
            stopped = result.finish_reason is FinishReason.STOP
            assert stopped or len(result.token_ids) == wanted[name].sampling.max_tokens
        assert not pump.failures


def _refuse(pump: FaultyPump) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no room")

    pump.drafter.open = refuse


def _draft_refuses(reference: dict[str, Result]) -> None:
    pump = run(reference, 1, {}, _refuse)
    assert pump.counts["drafts_lost"] == len(reference) * (1 + MAX_DRAFT_RETRIES)
    assert pump.counts["draft_reopens"] == len(reference) * MAX_DRAFT_RETRIES
    assert accepted(pump) == 0


def test_a_draft_that_refuses_every_session_is_left_in_peace(reference: dict[str, Result]) -> None:
    """Each is tried again twice, then it stays plain."""
    _draft_refuses(reference)


# -- mutants: the guards, taken away one at a time ------------------------------------------------------------------


def _mutant(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, change: Callable[[Any, Any], Any]) -> None:
    """Changes the first argument of a method, before the guard inside can see it."""
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda self, event, *rest: original(self, change(self, event), *rest))


def _repeated_outcomes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The relay takes an outcome whose context has been passed."""

    def change(session: Session, event: Any) -> Any:
        late = isinstance(event, Outcome) and event.context_len < len(session._history)
        return replace(event, context_len=len(session._history)) if late else event

    _mutant(monkeypatch, Session, "on_target", change)


def _gaps_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The relay takes an outcome although the one before is missing."""

    def change(session: Session, event: Any) -> Any:
        early = isinstance(event, Outcome) and event.context_len > len(session._history)
        return replace(event, context_len=len(session._history)) if early else event

    _mutant(monkeypatch, Session, "on_target", change)


def _old_targets_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The relay does not look at the epoch of the target's events."""
    _mutant(monkeypatch, Session, "on_target", lambda session, event: replace(event, epoch=session.target_epoch))


def _old_drafts_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The relay does not look at the epoch of nodes."""
    on_draft = Session.on_draft

    def deaf(session: Session, event: Any) -> Actions:
        epoch, session._draft_epoch = session._draft_epoch, event.epoch
        try:
            return on_draft(session, event)
        finally:
            session._draft_epoch = epoch

    monkeypatch.setattr(Session, "on_draft", deaf)


def _lost_trees_stay_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The relay does not re-open the draft of a session that has lost nodes."""
    monkeypatch.setattr(Session, "_on_tree_lost", lambda session, actions: None)


def _malformed_outcomes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The relay believes what no target can have meant."""
    monkeypatch.setattr(session_module, "_malformed", lambda outcome: False)


def _history_is_what_was_digested(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target is re-opened from the text instead of from the outcomes."""
    reopen_target = Session.reopen_target

    def reopen(session: Session) -> Actions:
        history = session._history
        session._history = [*session._prompt, *session._emitted]
        try:
            return reopen_target(session)
        finally:
            session._history = history

    monkeypatch.setattr(Session, "reopen_target", reopen)


def _epochs_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target is re-opened under the epoch of the old one."""
    reopen_target = Session.reopen_target

    def reopen(session: Session) -> Actions:
        session._epoch -= 1
        return reopen_target(session)

    monkeypatch.setattr(Session, "reopen_target", reopen)


def _repeated_commits_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft takes a commit whose context has been passed."""
    commit = DraftEngine._commit

    def deaf(engine: DraftEngine, session: Any, message: Commit) -> None:
        late = message.context_len < session.tree.context_len
        commit(engine, session, replace(message, context_len=session.tree.context_len) if late else message)

    monkeypatch.setattr(DraftEngine, "_commit", deaf)


def _commits_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft takes a commit although the one before is missing."""
    commit = DraftEngine._commit

    def deaf(engine: DraftEngine, session: Any, message: Commit) -> None:
        early = message.context_len > session.tree.context_len
        commit(engine, session, replace(message, context_len=session.tree.context_len) if early else message)

    monkeypatch.setattr(DraftEngine, "_commit", deaf)


def _drafts_ignore_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft takes commits and closes of any epoch."""
    receive = DraftEngine.receive

    def deaf(engine: DraftEngine, messages: Sequence[Any]) -> None:
        for message in messages:
            session = engine._sessions.get(message.session_id)
            known = session is not None and not isinstance(message, OpenSession)
            receive(engine, [replace(message, epoch=session.epoch) if known else message])

    monkeypatch.setattr(DraftEngine, "receive", deaf)


def _targets_ignore_the_epoch_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target hangs up nodes of an old draft."""
    receive = TargetEngine.receive

    def deaf(engine: TargetEngine, messages: Sequence[Any]) -> None:
        for message in messages:
            session = engine._sessions.get(message.session_id)
            known = session is not None and isinstance(message, Nodes)
            receive(engine, [replace(message, epoch=session.draft_epoch) if known else message])

    monkeypatch.setattr(TargetEngine, "receive", deaf)


def _any_node_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tree hangs up nodes that no draft can have meant."""
    monkeypatch.setattr(SpeculationTree, "_valid", lambda *_: True)


def _drafts_are_tried_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that is refused is opened again, and again."""
    monkeypatch.setattr(session_module, "MAX_DRAFT_RETRIES", 10**6)


def _three(link: str, kind: str, prepare: Any = None) -> Callable[[dict[str, Result]], Any]:
    return lambda reference: one_fault(reference, link, kind, prepare)


def _target_dies(reference: dict[str, Result]) -> None:
    for number in range(1, 12):
        pump = run(reference, 7, {}, _at_outcome(number, lambda pump: pump.kill_target(keeps_talking=True)))
        assert pump.counts["stalls"] == pump.counts["targets_lost"] == 0


def _new_epochs(pump: FaultyPump) -> None:
    """The target dies now and then, so that most of what is replayed is of an old epoch."""
    pump.each_tick = lambda: pump.kill_target(keeps_talking=True) if pump._now in range(12, 100, 12) else None


def _old_closes(reference: dict[str, Result]) -> None:
    """After every death the close of the epoch before comes once more, when the next one is open."""

    def prepare(pump: FaultyPump) -> None:
        def each_tick() -> None:
            if pump._now in range(12, 100, 12):
                pump.kill_target()
            elif pump._now % 12 == 6:
                pump.to_draft.extend(CloseSession(n, s.draft_epoch - 1) for n, s in pump.sessions.items())

        pump.each_tick = each_tick

    for seed in range(3):
        pump = run(reference, seed, {}, prepare)
        assert pump.counts["stale_messages"] > 0
        for name in (*LOSSES, "stalls"):
            assert pump.counts[name] == 0, name


MUTANTS: list[tuple[Callable[[pytest.MonkeyPatch], None], Callable[[dict[str, Result]], Any]]] = [
    (_repeated_outcomes_count, _three("from_target", "duplicate")),
    (_gaps_are_closed, _three("from_target", "drop")),
    (_malformed_outcomes_count, _three("from_target", "corrupt")),
    (_old_targets_are_heard, _target_dies),
    (_epochs_stand_still, _target_dies),
    (_history_is_what_was_digested, _target_dies),
    (_old_drafts_are_heard, _three("from_draft", "replay", _new_epochs)),
    (_lost_trees_stay_lost, _three("from_draft", "drop")),
    (_repeated_commits_count, _three("to_draft", "duplicate")),
    (_commits_may_be_missing, _three("to_draft", "drop")),
    (_drafts_ignore_epochs, _old_closes),
    (_targets_ignore_the_epoch_of_nodes, _three("to_target", "replay", _new_epochs)),
    (_any_node_is_valid, _three("from_draft", "corrupt")),
    (_drafts_are_tried_for_ever, _draft_refuses),
]


@pytest.mark.parametrize(("mutant", "check"), MUTANTS, ids=lambda case: getattr(case, "__name__", ""))
def test_a_mutant_is_caught(
    monkeypatch: pytest.MonkeyPatch, reference: dict[str, Result], mutant: Any, check: Any
) -> None:
    """Without the guard the check fails."""
    mutant(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017 - an engine that breaks is as good as a wrong token
        check(reference)


@pytest.mark.parametrize("check", {check: None for _, check in MUTANTS[3:]}, ids=lambda check: "")
def test_the_checks_of_the_mutants_hold_without_them(reference: dict[str, Result], check: Any) -> None:
    """Those that no test above has run."""
    check(reference)
