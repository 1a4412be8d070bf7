"""Replicas whose steps take a stated time, for measurements of what no single machine has the devices for.

The models are real, and so are tokens, trees, policies, streams and the router. Only a forward lasts at least as long
as it is told to: the rest of that time its engine sleeps, and takes no core. So one machine holds several devices, as
long as what really computes fits into it. A pace of zero leaves an engine as it is.

A thread that has slept wakes late, on a core that has lost its caches, and for what it does next it takes twice as long
as one that waits for an accelerator by polling it. Where there are cores enough a pace may say so (``awake_s``).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import multiprocessing
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from paceline.checkpoint.tokenizer import load_tokenizer
from paceline.config import LocalConfig, RouterConfig, apply_worker_environment
from paceline.metrics.registry import Registry
from paceline.metrics.router import RouterMetrics
from paceline.router.admission import TargetInfo
from paceline.router.pool import Member, StaticPool
from paceline.router.router import Router
from paceline.runtime.build import EngineSpec
from paceline.runtime.host import EngineHost
from paceline.runtime.server import EngineServer
from paceline.types import Cause, Chunk, Request, Round, SamplingParams, SpeculationParams

Prompts = Sequence[Sequence[int]]
_START_TIMEOUT_S = 600.0
_TIMEOUT_S = 30.0
"""Limit of a silent or busy replica: a first forward of a shape can take a second where others want the cores too."""
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["paceline.target.build", "paceline.draft.build", "transformers", "grpc"])


@dataclass(frozen=True)
class Pace:
    """Least seconds of a forward of one token, and for each further one."""

    step_s: float = 0.0
    row_s: float = 0.0
    awake_s: float = 0.0
    """The last seconds of it, in which the engine does not sleep; other threads may still have its core."""


class PacedRunner:
    """A runner whose forwards keep a pace. Everything else is the runner's."""

    chains = False
    """Several steps in one native call would keep no pace."""

    def __init__(self, runner: Any, pace: Pace) -> None:
        self._runner, self._pace = runner, pace
        self.forwards = self.rows = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def compiled(self, step: Any) -> PacedRunner:
        """The runner that new sessions begin on once the model is compiled: it keeps the same pace."""
        return PacedRunner(self._runner.compiled(step), self._pace)

    def forward(self, steps: Sequence[Any]) -> Any:
        return self._paced(self._runner.forward, steps)

    def forward_with_states(self, steps: Sequence[Any]) -> Any:
        return self._paced(self._runner.forward_with_states, steps)

    def _paced(self, forward: Callable[[Sequence[Any]], Any], steps: Sequence[Any]) -> Any:
        started = time.perf_counter()
        made = forward(steps)
        num_tokens = sum(len(step.token_ids) for step in steps)
        self.forwards += 1
        self.rows += num_tokens
        until = started + self._pace.step_s + (num_tokens - 1) * self._pace.row_s
        if (left_s := until - self._pace.awake_s - time.perf_counter()) > 0:
            time.sleep(left_s)
        while time.perf_counter() < until:
            os.sched_yield()
        return made


@dataclass(frozen=True)
class PacedFactory:
    """Builds the target's or the draft's engine and gives it its pace, and a draft model in the target its own."""

    kind: str
    config: LocalConfig
    target: Pace
    draft: Pace
    disturbed: Callable[[Any], Any] | None = None
    """Makes a runner of the draft's own, such as one whose logits are less good. None: as it is."""

    def __call__(self, emit: Callable[[Sequence[Any]], None]) -> Any:
        if self.kind == "draft":
            setup = self.config.draft_setup()
            assert setup is not None
            draft: Any = EngineSpec(setup).build(emit)
            self._pace_drafter(draft.drafter)
            return _timed(draft)
        from paceline.target.control.step_cost import StepCost

        target: Any = EngineSpec(self.config.target_setup(), shares_interpreter=True).build(emit)
        if self.target.step_s:
            target.runners.current = PacedRunner(target.runner, self.target)
            target.allocation.cost = StepCost()
            target.calibrate()
        return _priced(target, [self._pace_drafter(mounted.head) for mounted in target.heads.mounted])

    def _pace_drafter(self, drafter: Any) -> PacedRunner:
        """Gives a draft model its pace, after ``disturbed`` has made its runner worse."""
        runner = drafter.runner if self.disturbed is None else self.disturbed(drafter.runner)
        drafter.runner = PacedRunner(runner, self.draft)
        return drafter.runner


def _timed(draft: Any) -> Any:
    """A draft's engine that counts the seconds in which it takes messages and steps."""
    measured = {"busy_s": 0.0}
    _telling(draft, measured)

    def timed(call: Callable[..., Any], *arguments: Any) -> Any:
        started = time.perf_counter()
        try:
            return call(*arguments)
        finally:
            measured["busy_s"] += time.perf_counter() - started

    draft.receive, draft.step = (functools.partial(timed, call) for call in (draft.receive, draft.step))
    return draft


def _priced(target: Any, own: Sequence[PacedRunner]) -> Any:
    """A target's engine that sums up the seconds for which it takes a branch, step by step.

    ``own``: the runners of its draft models, whose forwards and rows it counts as a draft does.
    """
    measured, step = {"branch_s": 0.0}, target.step
    _telling(target, measured)

    def wrapped() -> Any:
        before = target.stats.steps
        worked = step()
        measured["branch_s"] += (target.stats.steps - before) * target.allocation.branch_s
        if own:
            measured["tree_steps"], measured["leaves"] = (sum(getattr(r, n) for r in own) for n in ("forwards", "rows"))
            measured["busy_s"] = target.stats.head_s
        return worked

    target.step = wrapped
    return target


def _telling(engine: Any, measured: dict[str, float]) -> None:
    """Puts what is measured here among the counters of an engine's facts."""
    facts = engine.facts

    def told() -> dict[str, Any]:
        known = facts()
        return {**known, "counters": {**known["counters"], **measured}}

    engine.facts = told


class _Metrics(RouterMetrics):
    """A router's metrics, with the delays of its draft links summed up."""

    links, links_s = 0, 0.0

    def draft_link(self, latency_s: float) -> None:
        super().draft_link(latency_s)
        self.links, self.links_s = self.links + 1, self.links_s + latency_s


def _serve(factory: PacedFactory, replica_id: str, pipe: Connection) -> None:
    """A replica's process."""
    apply_worker_environment()

    async def run() -> None:
        num, kind = factory.config.target.max_sessions, factory.kind
        server = EngineServer(EngineHost(kind, factory, replica_id=replica_id, max_sessions=num))
        await server.start()
        pipe.send(server.address)
        await asyncio.to_thread(multiprocessing.parent_process().join)

    asyncio.run(run())


@dataclass
class Window:
    """Yield of sessions from ``warm_s`` on, for ``seconds``."""

    warm_s: float
    seconds: float
    k: int = 0
    """Most tokens of a proposal in a row."""
    tokens: int = 0
    rounds: int = 0
    accepted: int = 0
    trials: int = 0
    """Draft tokens up to the first that was rejected."""
    hits: int = 0
    misses: int = 0
    ranked: int = 0
    """Tokens of rounds that verified a draft's only, where the draft had candidates for the last one."""
    strangers: int = 0
    """Such rounds whose last token was not among these candidates."""
    lookups: int = 0
    """Rounds with accepted tokens that only the session's own text had."""
    looked_up: int = 0
    lookups_accepted: int = 0
    """Such tokens, verified and accepted."""
    draft_steps: int = 0
    draft_leaves: int = 0
    """Nodes that the draft's steps expanded."""
    draft_s: float = 0.0
    """Seconds of the draft's steps, and of its thread between two forwards."""
    steps: int = 0
    step_rows: int = 0
    """Steps of the target, and the tokens that they computed."""
    steps_s: float = 0.0
    """Seconds of these steps and between them, unless all sessions waited for drafts."""
    branch_s: float = 0.0
    """Seconds for which the target takes a branch, summed over its steps."""
    links: int = 0
    links_s: float = 0.0
    """Messages that a draft has sent back at once, and the seconds until the router had them."""
    started: float = field(default_factory=time.perf_counter)

    def add(self, chunk: Chunk, before: Round | None = None) -> None:
        """Takes a round of any session, now; ``before``: its last one."""
        if chunk.round is None or not 0 <= time.perf_counter() - self.started - self.warm_s < self.seconds:
            return
        self.tokens += len(chunk.token_ids)
        self.rounds += 1
        self.accepted += chunk.round.num_accepted
        self.trials += min(chunk.round.num_drafted, chunk.round.num_accepted + 1, self.k)
        self.hits += chunk.round.cause is Cause.HIT
        self.misses += chunk.round.cause in (Cause.TOKEN, Cause.K, Cause.LATE)
        if before is not None and not before.lookup_drafted and chunk.round.cause in (Cause.HIT, Cause.TOKEN):
            self.ranked += before.num_accepted + 1
            self.strangers += chunk.round.cause is Cause.TOKEN
        if chunk.round.lookup_accepted:
            self.lookups += 1
            self.looked_up += chunk.round.lookup_drafted
            self.lookups_accepted += chunk.round.lookup_accepted

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / max(self.rounds, 1)

    @property
    def draft_step_s(self) -> float:
        """Mean seconds of a draft's step; 0 without one."""
        return self.draft_s / max(self.draft_steps, 1)

    def gap_s(self, pace: Pace) -> float:
        """Mean seconds of the target between two forwards of this pace."""
        forwards_s = self.steps * pace.step_s + (self.step_rows - self.steps) * pace.row_s
        return max(0.0, self.steps_s - forwards_s) / max(self.steps, 1)

    @property
    def link_s(self) -> float:
        """Mean seconds from the target to the draft: two ways of which the router's round trip measures one twice."""
        return self.links_s / max(self.links, 1)

    def siblings_hold(self, acceptance: float) -> float | None:
        """Share of the tokens that a first candidate misses which are among the others; None: none was missed.

        ``acceptance``: of first candidates.
        """
        missed = (1.0 - acceptance) * self.ranked
        return 1.0 - self.strangers / missed if missed else None

    @property
    def hit_rate(self) -> float | None:
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else None


def total(windows: Sequence[Window]) -> Window:
    """Sum of several windows, one after the other."""
    names = [f.name for f in dataclasses.fields(Window) if f.name not in ("warm_s", "k", "started")]
    sums = {name: sum(getattr(w, name) for w in windows) for name in names}
    return Window(0.0, k=max(w.k for w in windows), **sums, started=0.0)


def acceptance(windows: Sequence[Window]) -> float:
    """Accepted over tried draft tokens."""
    return sum(w.accepted for w in windows) / max(1, sum(w.trials for w in windows))


@dataclass
class Process:
    """A started process and the pipe to it."""

    process: Any
    pipe: Connection

    @classmethod
    def start(cls, main: Callable[..., None], *arguments: object) -> Process:
        pipe, child = _context.Pipe()
        process = _context.Process(target=main, args=(*arguments, child), daemon=True)
        process.start()
        child.close()
        return cls(process, pipe)

    def answer(self) -> Any:
        """Its next message.

        Raises:
            RuntimeError: it sends nothing.
        """
        if not self.pipe.poll(_START_TIMEOUT_S):
            raise RuntimeError(f"process {self.process.pid} does not answer")
        return self.pipe.recv()

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def replicas(stack: contextlib.AsyncExitStack, factories: Sequence[PacedFactory]) -> dict[str, list[Member]]:
    """Targets and drafts, ready to be connected to, by kind."""
    begun = []
    for i, factory in enumerate(factories):
        begun.append(Process.start(_serve, factory, f"{factory.kind}-{i}"))
        stack.callback(begun[-1].stop)
    members: dict[str, list[Member]] = {"target": [], "draft": []}
    for i, (factory, process) in enumerate(zip(factories, begun, strict=True)):
        members[factory.kind].append(Member(f"{factory.kind}-{i}", process.answer()))
    return members


def _delay(link: Any, delay_s: float) -> None:
    """Adds ``delay_s`` to each way of a link; delays overlap and keep the order."""
    loop = asyncio.get_running_loop()
    queue, receive = link._queue, link.receive
    link._queue = lambda messages: loop.call_later(delay_s, queue, list(messages))
    link.receive = lambda *received: loop.call_later(delay_s, receive, *received)


@contextlib.asynccontextmanager
async def routed(
    config: LocalConfig, members: dict[str, list[Member]], *, delay_s: float = 0.0
) -> AsyncIterator[Router]:
    """A router of its own to these replicas; ``delay_s`` is added to each way of its draft links."""
    info = TargetInfo(load_tokenizer(config.target.path), config.target.max_model_len or 4096, ())
    pools = StaticPool("target", members["target"]), StaticPool("draft", members["draft"])
    settings = RouterConfig(target_timeout_s=_TIMEOUT_S, draft_timeout_s=_TIMEOUT_S, chunk_window_s=0.0)
    metrics = _Metrics(Registry("router"), "paced")
    router = Router(info, *pools, settings, metrics=metrics)
    await router.start()
    for link in router.drafts.links.values() if delay_s else ():
        _delay(link, delay_s)
    try:
        yield router
    finally:
        await router.stop()


_numbers = iter(range(1 << 62))


async def load(
    router: Router, prompts: Prompts, sessions: int, sampling: SamplingParams, speculation: SpeculationParams,
    *times: float,
) -> Window:  # fmt: skip
    """``sessions`` at once, one request after the other; ``times``: seconds to warm up, and of the window."""
    warm_s, seconds = times
    window = Window(warm_s, seconds, speculation.max_draft_tokens)
    before = _counters(router)

    async def session() -> None:
        while True:
            number, before = next(_numbers), None
            request = Request(f"r{number}", tuple(prompts[number % len(prompts)]), sampling, speculation)
            async with contextlib.aclosing(router.generate(request)) as stream:
                async for item in stream:
                    if isinstance(item, Chunk):
                        window.add(item, before)
                        before = item.round or before

    tasks = [asyncio.create_task(session()) for _ in range(sessions)]
    done, _ = await asyncio.wait(tasks, timeout=warm_s + seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
    for name, value in _counters(router).items():
        setattr(window, name, value - before[name])
    return window


def _counters(router: Router) -> dict[str, float]:
    """Counts and seconds of all replicas and links, by the field of a window."""
    statuses = router.statuses()
    drafts, targets = ([status.counters for status in statuses.get(kind, [])] for kind in ("draft", "target"))
    drafting = [*drafts, *(c for c in targets if "leaves" in c)]
    metrics: Any = router.metrics
    return {
        "draft_steps": sum(c["tree_steps"] for c in drafting),
        "draft_leaves": sum(c["leaves"] for c in drafting),
        "draft_s": sum(c["busy_s"] for c in drafting),
        "steps": sum(c["steps"] for c in targets),
        "step_rows": sum(c["tokens_computed"] for c in targets),
        "steps_s": sum(c["step_s"] + c["bubble_s"] for c in targets),
        "branch_s": sum(c["branch_s"] for c in targets),
        "links": metrics.links,
        "links_s": metrics.links_s,
    }
