"""Both engines in parallel on a virtual time line, with a law of their own instead of models.

Forwards take the seconds that a cost function says, so throughput is exact and a run takes no longer than its Python.
The target's next token follows from the last one and its position; the draft's first choice is that token with a given
probability, decided by a hash, so that runs with different settings meet the same text and the same draft.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import torch
from tests.support.pump import Clock

from paceline.draft.engine import DraftEngine
from paceline.drafters.protocol import Candidates, Plain, Stateless
from paceline.messages import SpeculationWanted
from paceline.model.kv_cache import KVCache, LayerSpec
from paceline.router.session import Actions, Session
from paceline.target.engine import TargetEngine
from paceline.target.heads.mounted import MountedHead
from paceline.types import Mode, SamplingParams, SpeculationParams

VOCAB = 32
LINK_S = 2e-4
_NUM_CANDIDATES = 8


def cpu_cost(num_tokens: int) -> float:
    """Like a step of 150M parameters on two cores: 1 up to 4 tokens, 1.2 for 8, 1.8 for 16, 5.4 for 64; unit 20 ms."""
    padded = max(4, -(-num_tokens // 4) * 4)
    return 0.02 * (1.0 + 0.05 * (padded - 4) if padded <= 8 else 1.2 + 0.075 * (padded - 8))


def gpu_cost(num_tokens: int) -> float:
    """Free up to 128 tokens, proportional beyond."""
    padded = -(-num_tokens // 8) * 8
    return 0.02 * max(1.0, padded / 128)


def next_token(token: int, position: int) -> int:
    """Of the text that follows no pattern."""
    return crc32(b"%d %d" % (token, position)) % VOCAB


class SyntheticRunner:
    """In the place of a model runner."""

    features = None
    is_asynchronous = False
    backend = SimpleNamespace(num_unrecorded=0, block_len=0)
    execution = "eager"

    def check(self) -> None:
        """There are no other ranks."""

    def __init__(
        self,
        clock: Clock,
        cost: Callable[[int], float],
        pages: int,
        rng: random.Random,
        noise: float,
        text: Callable[[int, int], int] = next_token,
        branch_s: float = 0.0,
    ) -> None:
        self.cache = KVCache([LayerSpec(1, 1, 1)], pages, torch.float32, "cpu")
        self.vocab_size = VOCAB
        self.cost = cost
        self.steps: list[tuple[float, int, int]] = []
        self.slowed_by = lambda: 0.0
        """By which share the draft slows a step down now: it runs on the same machine."""
        self._clock, self._rng, self._noise, self._text = clock, rng, noise, text
        self._branch_s = branch_s
        self.num_branches = 0

    def forward(self, steps: Sequence[Any]) -> torch.Tensor:
        num_tokens = sum(len(s.token_ids) for s in steps)
        self.steps.append((self._clock.now, num_tokens, len(steps)))
        noise = self._noise * abs(self._rng.gauss(0, 1))
        num_branches = sum(bool(s.copies) for s in steps)
        self.num_branches += num_branches
        seconds = self.cost(num_tokens) + num_branches * self._branch_s
        self._clock.now += seconds * (1 + noise) * (1 + self.slowed_by())
        chosen = [
            self._text(s.token_ids[i], s.positions[i] + 1)
            for s in steps
            for i in range(len(s.token_ids) - s.num_logits, len(s.token_ids))
        ]
        logits = torch.zeros(len(chosen), VOCAB)
        logits[torch.arange(len(chosen)), torch.tensor(chosen, dtype=torch.int64)] = 20.0
        return logits


class SyntheticDrafter(Plain):
    """Right with probability ``acceptance``; where it is wrong, the right token is often its second choice."""

    kind = "synthetic"

    def __init__(
        self,
        clock: Clock,
        step_s: float,
        width: int,
        acceptance: float,
        text: Callable[[int, int], int] = next_token,
        salt: str = "",
    ) -> None:
        self.salt = salt
        self.max_leaves = width
        self.step_s = step_s
        self.acceptance = acceptance
        self.num_steps = 0
        self._clock, self._text = clock, text
        self._contexts: dict[str, list[int]] = {}
        row = torch.tensor([0.7, 0.12, 0.05, 0.03, 0.02, 0.02, 0.01, 0.01])
        self._log_q = row.log()

    def open(self, session_id: str, token_ids: Sequence[int], sampler: Any, salt: str = "") -> None:
        self._contexts[session_id] = list(token_ids)

    def ready(self, session_id: str) -> bool:
        return True

    def expand(self, leaves: Sequence[Any]) -> Candidates:
        self._clock.now += self.step_s
        self.num_steps += 1
        rows = []
        for leaf in leaves:
            context = self._contexts[leaf.session_id]
            last = leaf.path[-1] if leaf.path else context[-1]
            position = len(context) + len(leaf.path)
            truth = self._text(last, position)
            draw = crc32(f"{self.salt}{leaf.session_id} {position} {last}".encode()) / 2**32
            rank = 0 if draw < self.acceptance else (1 if (draw * 97) % 1 < 0.6 else 6)
            order = [(truth + 1 + i) % VOCAB for i in range(_NUM_CANDIDATES - 1)]
            order.insert(rank, truth)
            rows.append(order)
        return Candidates(torch.tensor(rows), self._log_q.expand(len(leaves), -1).clone())

    def advance(self, session_id: str, token_ids: Sequence[int], node_ids: Any, kept: Any) -> None:
        self._contexts[session_id].extend(token_ids)

    def close(self, session_id: str) -> None:
        self._contexts.pop(session_id, None)


class SyntheticHead(Stateless, SyntheticDrafter):
    """The same inside the target, right where it likes."""


class Simulation:
    """A closed loop: as many sessions as ``load`` says at any time, each replaced when it ends.

    ``k`` None: adaptive with K = 8; else fixed. ``noise``: relative standard deviation of step times (upwards).
    ``contention``: by which share a busy draft makes them longer. ``period``: after so many tokens the text repeats.
    ``trees``: siblings may be verified. ``branch_s``: seconds of each branch that begins within a page. ``head``:
    acceptance of a head of the target, and the seconds of its call.
    """

    def __init__(
        self,
        *,
        k: int | None = None,
        load: Callable[[float], int] = lambda now: 1,
        acceptance: float = 0.7,
        cost: Callable[[int], float] = cpu_cost,
        draft_step_s: float = 0.004,
        draft_width: int = 16,
        tree_budget: int = 256,
        overhead_s: float = 2e-4,
        noise: float = 0.0,
        contention: float = 0.0,
        max_tokens: int = 400,
        mode: Mode = Mode.OVERLAPPED,
        speculation: dict[str, Any] | None = None,
        temperature: float = 0.0,
        calibrate: bool = False,
        period: int | None = None,
        trees: bool = False,
        branch_s: float = 0.0,
        head: tuple[float, float] | None = None,
        seed: int = 0,
    ) -> None:
        def text(token: int, position: int) -> int:
            return next_token(0, position % period) if period else next_token(token, position)

        self.rng = random.Random(seed)
        self.load = load
        self.overhead_s = overhead_s
        self.clocks = {"target": Clock(), "draft": Clock()}
        self.runner = SyntheticRunner(self.clocks["target"], cost, 4096, self.rng, noise, text, branch_s)
        heads = []
        if head is not None:
            drafter = SyntheticHead(self.clocks["target"], head[1], draft_width, head[0], text, "head ")
            heads.append(MountedHead("synthetic", drafter, num_tokens=4))  # type: ignore[arg-type]
        self.target = TargetEngine(
            self.runner,  # type: ignore[arg-type]
            lambda messages: self._post("router", "target", messages),
            max_sessions=256,
            max_step_tokens=2048,
            max_model_len=100_000,
            adaptive=k is None,
            trees=trees,
            heads=heads,
            clock=self.clocks["target"],
        )
        if calibrate:
            self.target.calibrate()
        self.drafter = SyntheticDrafter(self.clocks["draft"], draft_step_s, draft_width, acceptance, text)
        self.draft = DraftEngine(
            self.drafter,
            lambda messages: self._post("router", "draft", messages),
            vocab_size=VOCAB,
            tree_budget=tree_budget,
            clock=self.clocks["draft"],
        )
        self.runner.slowed_by = lambda: contention if self.draft.num_sessions else 0.0
        self.sessions: dict[str, Session] = {}
        self._most_with_drafts: int | None = None
        self.wanted: list[tuple[float, str, bool]] = []
        self.emitted: list[tuple[float, int]] = []
        self._options = (max_tokens, k, mode, temperature, speculation or {})
        self._mail: dict[str, list[tuple[float, int, Any]]] = {"target": [], "draft": [], "router": []}
        self._blocked: dict[str, float | None] = {"target": None, "draft": None}
        self._order = itertools.count()
        self._names = itertools.count()

    @property
    def now(self) -> float:
        """Seconds since the beginning, calibration included."""
        return self.clocks["target"].now

    def tokens_per_s(self, since: float, until: float) -> float:
        """Tokens emitted per second of that time."""
        return sum(n for at, n in self.emitted if since <= at < until) / (until - since)

    def run(self, until: float) -> Simulation:
        """Goes on to that time."""
        while (now := self._advance()) < until:
            wanted = self.load(now)
            while len(self.sessions) < wanted:
                self._submit(now)
            for name in list(self.sessions)[wanted:]:
                self._send(now, self.sessions.pop(name).cancel())
        return self

    def _advance(self) -> float:
        """The next event of whoever is behind; returns its time."""
        times = {"router": self._mail["router"][0][0] if self._mail["router"] else float("inf")}
        for name in ("target", "draft"):
            now, blocked = self.clocks[name].now, self._blocked[name]
            mail = self._mail[name]
            if blocked is not None:
                now = max(now, min(blocked, mail[0][0] if mail else float("inf")))
            times[name] = now
        actor = min(times, key=times.__getitem__)
        if times[actor] == float("inf"):
            return self.clocks["target"].now
        if actor == "router":
            at, _, (source, message) = heapq.heappop(self._mail["router"])
            self._relay(at, source, message)
            return at
        clock, engine = self.clocks[actor], getattr(self, actor)
        clock.now = times[actor]
        messages = []
        while self._mail[actor] and self._mail[actor][0][0] <= clock.now:
            messages.append(heapq.heappop(self._mail[actor])[2])
        if messages:
            engine.receive(messages)
        if engine.step():
            self._blocked[actor] = None
            clock.now += self.overhead_s if actor == "target" else 0.0
        else:
            wait = engine.wait_s()
            self._blocked[actor] = float("inf") if wait is None else clock.now + max(wait, 1e-6)
        return times[actor]

    def _submit(self, now: float) -> None:
        max_tokens, k, mode, temperature, speculation = self._options
        name = f"s{next(self._names)}"
        session = Session(
            name,
            [self.rng.randrange(VOCAB) for _ in range(4)],
            SamplingParams(
                max_tokens=self.rng.randint(max_tokens // 2, max_tokens),
                seed=1,
                ignore_eos=True,
                temperature=temperature,
            ),
            SpeculationParams(mode=mode, max_draft_tokens=8 if k is None else k, **speculation),
            decode=lambda ids: "",
            clock=self.clocks["target"],
        )
        self.sessions[name] = session
        most = self._most_with_drafts
        self._send(now, session.open(most is None or len(self.sessions) <= most))

    def _relay(self, at: float, source: str, message: Any) -> None:
        session = self.sessions.get(message.session_id)
        if session is None:
            return
        if source == "draft":
            self._send(at, session.on_draft(message))
            return
        actions = session.on_target(message)
        self._send(at, actions)
        if isinstance(message, SpeculationWanted):
            self.wanted.append((at, message.session_id, message.wanted))
            self._most_with_drafts = message.most_sessions
            if session.wants_draft:
                self._send(at, session.on_draft_up())
        actions = session.digest()
        for chunk in actions.chunks:
            self.emitted.append((at, len(chunk.token_ids)))
        self._send(at, actions)
        if session.finished:
            del self.sessions[message.session_id]

    def _send(self, at: float, actions: Actions) -> None:
        for name, messages in (("target", actions.to_target), ("draft", actions.to_draft)):
            for message in messages:
                heapq.heappush(self._mail[name], (at + LINK_S, next(self._order), message))
            if messages and self._blocked[name] is None and self.clocks[name].now == 0.0:
                self._blocked[name] = float("inf")

    def _post(self, to: str, source: str, messages: Sequence[Any]) -> None:
        at = self.clocks[source].now
        for message in messages:
            heapq.heappush(self._mail[to], (at + LINK_S, next(self._order), (source, message)))
