"""Real engines and real sessions in lockstep on a virtual clock (``tests.support.pump``), over links that do harm.

A seeded choice harms messages on the four links, and an owner does what owners do: it re-opens a lost target, gives a
draft to sessions that want one, and re-opens a session that has made no progress for long (a broken stream; only losses
between target and router may need it). Token ids inside outcomes are never corrupted, nor an outcome passed off as the
one before it: nobody could notice, and the transport has checksums.

After every tick: engines keep their invariants; where no content was corrupted, the target's context begins with the
session's history and the draft's context is the beginning of it; nothing stale is relayed.
"""

import dataclasses
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tests.support.models import VOCAB
from tests.support.pump import Pump

from paceline.drafters.model import ModelDrafter
from paceline.messages import (
    CloseSession,
    Commit,
    DraftState,
    InFlight,
    Node,
    Nodes,
    OpenSession,
    Outcome,
    SparseDistribution,
    SpeculationWanted,
)
from paceline.router.session import Session
from paceline.target.heads.mounted import MountedHead
from paceline.types import Round

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
        self.pages = options.get("pages", 64)
        self.faults = faults or {}
        self.chaos = random.Random(options.get("seed", 0) + 1)
        self.injected: Counter[tuple[str, str]] = Counter()
        self.counts: Counter[str] = Counter()
        self.content_is_true = all(kind != "corrupt" for _, kind in self.faults)
        self.chunks: dict[str, list[int]] = defaultdict(list)
        self.on_outcome: Callable[[Session], None] | None = None
        """Called between an outcome and its digest."""
        self.each_tick: Callable[[], None] = lambda: None
        self._seen: dict[str, list[Any]] = {link: [] for link in LINKS}
        self._delayed: list[tuple[int, str, Any]] = []
        self._progress: dict[str, tuple[int, int]] = {}
        self.now = 0

    # -- the links -------------------------------------------------------------------------------------------------

    def deliver(self, queue: Any, receive: Callable[[list[Any]], None]) -> bool:
        link = next(name for name in LINKS if getattr(self, name) is queue)
        return super().deliver(queue, lambda messages: receive(self._harm(link, messages)))

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
                self._delayed.append((self.now + self.chaos.randint(1, 30), link, message))
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
        self.now += 1
        assert self.now < LONGEST, "no end"
        due = [d for d in self._delayed if d[0] <= self.now]
        self._delayed = [d for d in self._delayed if d[0] > self.now]
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
            if session.finished or len(session.history) != length:
                self._progress[name] = len(session.history), self.now
            elif self.now - since > PATIENCE:
                self.counts["stalls"] += 1
                self._progress[name] = length, self.now
                self.reopen(session)

    def _check(self) -> None:
        """What the engines believe is true, as far as they know it."""
        for name, session in self.sessions.items():
            if session.finished or not self.content_is_true:
                continue
            history = session.history
            target = self.target.sessions.get(name)
            if target is not None and target.epoch == session.target_epoch:
                same = target.tokens[: len(history)] == history
                assert same or self._has_ended(name, target.epoch), "the target is elsewhere"
            draft = self.draft.sessions.get(name) if self.draft and not self.draft_dead else None
            if draft is not None and draft.epoch == session.draft_epoch:
                context = self.drafter.sessions[name].tokens
                assert history[: len(context)] == context, "the draft is elsewhere"
                if target is not None and target.draft_epoch == draft.epoch:
                    for node in target.tree.nodes():
                        twin = draft.tree.get(node.node_id)
                        same = twin is None or node.node_id == 0 or twin.token_id == node.token_id
                        assert same, "the trees differ"
                        assert twin is None or twin.position == node.position, "the trees differ"

    def _has_ended(self, name: str, epoch: int) -> bool:
        """True if the target has sent a session's last outcome: a repeated message may open it once more, which is no
        harm, as outcomes that begin elsewhere are dropped."""
        sent = (*self.from_target, *self._seen["from_target"])
        return any((m.session_id, m.epoch) == (name, epoch) and getattr(m, "finish_reason", None) for m in sent)

    def reopen(self, session: Session) -> None:
        """On the same target, or the one that has taken its place."""
        self.send(session.reopen_target())
        if session.wants_draft and not self.draft_dead:
            self.send(session.on_draft_up())

    def _target_failed(self, session: Session, reason: str) -> None:
        self.reopen(session)

    def on_target(self, messages: list[Any]) -> None:
        if self.on_outcome is None:
            super().on_target(messages)
            return
        for message in messages:  # one at a time: the engine may die with the rest of the batch on its way
            outbox = self.relay.on_target([message])
            self._carry_out(outbox)
            if isinstance(message, Outcome):
                self.on_outcome(self.sessions[message.session_id])
            for session in outbox.touched.values():
                self.digest(session)

    def on_draft(self, messages: list[Any]) -> None:
        for message in messages:  # one at a time, so that what is relayed can be compared with the session's state
            session = self.sessions[message.session_id]
            available, epoch = session.draft_available, session.draft_epoch
            outbox = self.relay.on_draft([message])
            if any(isinstance(relayed, Nodes) for relayed in outbox.to_target):
                assert available
                assert message.epoch == epoch, "something stale is relayed"
            self._carry_out(outbox)

    def digest(self, session: Session) -> None:
        actions = session.digest()
        self.chunks[session.session_id] += [t for chunk in actions.chunks for t in chunk.token_ids]
        self.send(actions)
        if session.result is not None:
            self.results[session.session_id] = session.result

    # -- deaths ----------------------------------------------------------------------------------------------------

    def heads_again(self) -> Sequence[MountedHead]:
        """The heads of a target that takes another's place."""
        return ()

    def kill_target(self, *, keeps_talking: bool = False) -> None:
        """Another takes its place and every session is re-opened; what the old one had sent may still come."""
        self._count(self.target.stats)
        old = self.target
        self.target = self._new_target(self.models[0].runner(self.pages), heads=self.heads_again())
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
            self.send(session.on_draft_down())

    def restart_draft(self) -> None:
        """Sessions that want a draft are opened on it."""
        self.drafter = ModelDrafter(self.models[1].runner(64), max_leaves=32, max_prefill_tokens=64, top_m=64)
        self.draft = self._new_draft(self.drafter)
        self.draft_dead = False
        for session in self.sessions.values():
            if session.wants_draft:
                self.send(session.on_draft_up())

    # -- the end ---------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """The streams end: replicas close what came over them, as ``replica.py`` does; then nothing is held."""
        self.faults = {}
        while self._delayed:
            self.tick()
        for engine, queue in ((self.target, self.to_target), (self.draft, self.to_draft)):
            queue.clear()
            if engine is not None:
                queue.extend(CloseSession(name, s.epoch) for name, s in engine.sessions.items())
        super().settle()
        self._count(self.target.stats)
        if self.draft is not None and not self.draft_dead:
            self._count(self.draft.stats)
        for session in self.sessions.values():
            self._count(session.relay_stats)

    def _count(self, stats: Any) -> None:
        for key, value in dataclasses.asdict(stats).items():
            self.counts[key] += value


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
            SparseDistribution.of((), ()),
            SparseDistribution.of((node.token_id,), (math.nan,)),
            SparseDistribution.of((node.token_id, node.token_id), (0.5, 0.5)),
            SparseDistribution.of((node.token_id, VOCAB), (0.5, 0.5)),
            SparseDistribution.of((node.token_id,), (0.5,)),
            SparseDistribution.of((node.token_id, 11), (1e308, 1e308)),
        )
    ]
    harmed = replace(node, **rng.choice(harms))
    return replace(message, nodes=(*message.nodes[:at], harmed, *message.nodes[at + 1 :]))
