"""Hours of mixed load on a real service, with clients that leave and replicas that are killed: does anything stay?

    python benchmarks/soak.py --minutes 20 --targets 2 --drafts 2 --json soak.json

Requests come at random times and in all kinds: temperatures, both rules, every mode, stop strings; some are cancelled,
some have too little time, the connection of some breaks. Drafts, and now and then a target, get a SIGKILL. Checked:

- every request ends, in a way that is expected of it, within the time that it has;
- what is claimed to be plain decoding's is compared with it, token by token (a prefix, where the client left early);
- whenever the load is paused, sessions, KV pages, leases and tasks go back to where they were;
- memory and file descriptors of every process, and their linear trend.

With --secured all of it goes over TLS, inside too, with an API key; with --hostile it has callers beside it that mean
harm (``paceline_bench.hostility``).

Exit status 1 if anything fails. Ends only processes that it has started.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paceline.checkpoint.files import embedded_paths
from paceline.client import AsyncClient, AsyncStream, Tls
from paceline.config import LocalConfig, TargetModel
from paceline.errors import DeadlineExceededError, EngineError, PacelineError, ResourceExhaustedError
from paceline.local import LocalPipeline
from paceline.types import FinishReason, Result, ServerInfo
from paceline_bench.hostility import Hostility
from paceline_bench.processes import Process, ServiceProcess, num_descriptors, read_process
from paceline_bench.traffic import Expected, Template, Wire, expect, fault_in, make_templates, secured, service_of, tell

SAMPLE_S = 5.0
QUIET_TIMEOUT_S = 30.0
"""Within this after the last request everything has to be free."""
GRACE_S = 20.0
"""A client that has not come back so long after its deadline hangs."""
MAX_TASKS_MORE = 8
MAX_DESCRIPTORS_MORE = 16
LOG_MONITOR, MAX_LOGS = "log monitor", 200
"""Ray's log monitor keeps two files of every worker open, also of those that have ended, up to so many."""
MAX_RSS_MORE = 48 << 20
"""Rise that the fitted line may have after the first third of a process's life."""
MIN_SPAN_S = {"descriptors": 60.0, "rss_bytes": 450.0}
"""Shorter lives have no trend. An engine needs minutes until it has met every size of a step, for each of which oneDNN
keeps code: drafts end up at about 640 MiB here, targets at 760."""
MAX_STATES = 5
BEHAVIORS = {"complete": 0.64, "cancel": 0.08, "cancel_rpc": 0.06, "deadline": 0.1, "leave": 0.06, "break": 0.06}
"""Behaviors of clients and their frequencies: wait for the end; cancel their stream; cancel by id from elsewhere; give
too little time; close their channel; lose their connection without a goodbye."""


# -- clients --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """One request, and how it ended."""

    at_s: float
    """Seconds since the start of the load."""
    behavior: str
    template: int
    outcome: str
    """``complete``, ``abort``, ``deadline``, ``refused``, ``broken``, ``failed`` or ``hung``."""
    seconds: float
    num_tokens: int
    checked: bool
    """True if its tokens were compared."""
    fault: str | None = None


EXPECTED = {
    "complete": {"complete"},
    "cancel": {"complete", "abort"},
    "cancel_rpc": {"complete", "abort"},
    "deadline": {"complete", "deadline"},
    "leave": {"complete", "abort", "broken"},
    "break": {"complete", "broken"},
}


@dataclass
class Load:
    """Random requests on the service, and the replicas that are killed meanwhile."""

    service: ServiceProcess
    templates: Sequence[Template]
    expected: Sequence[Expected]
    args: argparse.Namespace
    rng: random.Random
    tls: Tls | None = None
    api_key: str | None = None
    ended: list[Ended] = field(default_factory=list)
    kills: list[tuple[float, str, int]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    quiets: list[dict[str, Any]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    """State of the service when a request went wrong."""
    num_unanswered: int = 0
    """Questions for the state of the service that failed."""

    async def run(self) -> None:
        """The whole load."""
        self._started = time.monotonic()
        self._open = asyncio.Event()
        self._open.set()
        self._requests: set[asyncio.Task[None]] = set()
        until = self._started + 60 * self.args.minutes
        self.hostility = Hostility(self.service.address, self.service.metrics_url, self.tls, self.api_key, self.rng)
        async with self._connected(self.service.address) as self._client:
            await self._client.wait_ready(60)
            await self._quiet()  # what is there without load
            kills = self._kill("draft", self.args.kill_draft_s), self._kill("target", self.args.kill_target_s)
            hostile = [self.hostility.run(self.args.hostile)] if self.args.hostile else []
            helpers = [asyncio.create_task(part) for part in (self._sample(), *kills, *hostile)]
            try:
                next_quiet = time.monotonic() + self.args.quiet_s
                while (now := time.monotonic()) < until:
                    self.service.check()
                    for helper in helpers:
                        if helper.done():
                            helper.result()
                    if now >= next_quiet:
                        await self._quiet()
                        next_quiet = time.monotonic() + self.args.quiet_s
                    self._begin()
                    await asyncio.sleep(self.rng.expovariate(self.args.rate))
                await self._quiet()
            finally:
                for helper in helpers:
                    helper.cancel()
                await asyncio.gather(*helpers, return_exceptions=True)

    def _connected(self, address: str) -> AsyncClient:
        return AsyncClient(address, tls=self.tls, api_key=self.api_key)

    @property
    def now_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    # -- requests --

    def _begin(self) -> None:
        if len(self._requests) >= self.args.max_at_once:
            return
        number = self.rng.randrange(len(self.templates))
        behavior = self.rng.choices(list(BEHAVIORS), list(BEHAVIORS.values()))[0]
        task = asyncio.create_task(self._request(number, behavior))
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)

    async def _request(self, number: int, behavior: str) -> None:
        began, at_s = time.monotonic(), self.now_s
        outcome, fault, result = "hung", None, None
        limit_s = self.rng.uniform(0.02, 1.0) if behavior == "deadline" else self.args.limit_s
        try:
            async with asyncio.timeout(limit_s + GRACE_S):
                outcome, result = await self._ask(number, behavior, limit_s)
        except DeadlineExceededError as error:
            outcome, fault = "deadline", None if behavior == "deadline" else str(error)
        except ResourceExhaustedError:
            outcome = "refused"
        except PacelineError as error:
            outcome = "broken" if behavior in ("break", "leave") and isinstance(error, EngineError) else "failed"
            fault = f"{type(error).__name__}: {error}" if outcome == "failed" else None
        except TimeoutError:  # DeadlineExceededError is one, too
            fault = f"it hangs: no end {GRACE_S:g} s after its deadline"
        if fault is None and outcome not in EXPECTED[behavior] | {"refused"}:
            fault = f"it ended as {outcome}"
        template, checked = self.templates[number], False
        if fault is None and result is not None and template.claimed:
            checked = True
            fault = fault_in(result, self.expected[number], whole=outcome == "complete")
        num_tokens = 0 if result is None else len(result.token_ids)
        seconds = time.monotonic() - began
        self.ended.append(Ended(at_s, behavior, number, outcome, seconds, num_tokens, checked, fault))
        if outcome in ("hung", "failed", "deadline") and fault is not None and len(self.states) < MAX_STATES:
            self.states.append({"at_s": self.now_s, **state(await self._info())})
            print(f"state: {self.states[-1]}", file=sys.stderr, flush=True)
        if fault is not None:
            self._fault(f"request of template {number} ({behavior}, {template.speculation.mode}): {fault}")

    async def _ask(self, number: int, behavior: str, limit_s: float) -> tuple[str, Result]:
        async with contextlib.AsyncExitStack() as stack:
            client, wire = self._client, None
            if behavior == "break":
                wire = await stack.enter_async_context(Wire(self.service.address))
                client = await stack.enter_async_context(self._connected(wire.address))
            elif behavior == "leave":
                client = await stack.enter_async_context(self._connected(self.service.address))
            template = self.templates[number]
            request = (template.prompt, template.sampling, template.speculation)
            options = {"stop": template.stop, "timeout_s": limit_s, "logprobs": self.rng.random() < 0.2}
            stream = client.generate(*request, **options)
            if behavior in ("complete", "deadline"):
                result = await stream.result
            else:
                result = await self._disturbed(stream, behavior, client, wire)
        return "abort" if result.finish_reason is FinishReason.ABORT else "complete", result

    async def _disturbed(self, stream: AsyncStream, behavior: str, client: AsyncClient, wire: Wire | None) -> Result:
        """Reads some of the stream, then does to it what the behavior says."""
        after = self.rng.randrange(6)
        if after:
            async for _ in stream:
                after -= 1
                if not after:
                    break
        else:
            await asyncio.sleep(self.rng.uniform(0, 0.1))
        if behavior == "cancel":
            stream.cancel()
        elif behavior == "cancel_rpc":
            await client.cancel(stream.request_id)
        elif behavior == "leave":
            await client.aclose()
        elif wire is not None:
            wire.cut()
        return await stream.result

    # -- what is done to the service --

    async def _kill(self, kind: str, mean_s: float) -> None:
        """SIGKILL for a replica now and then; a target only while there is another one."""
        while mean_s > 0:
            await asyncio.sleep(self.rng.expovariate(1 / mean_s))
            await self._open.wait()
            own = {p.pid for p in self.service.family() if p.role == kind}
            if kind == "target" and len(own) < 2:
                continue
            info = await self._info()
            num_up = 0 if info is None else len(info.pools.get(kind, ()))
            if own and min(num_up, len(own)) >= (2 if kind == "target" else 1):
                pid = self.rng.choice(sorted(own))
                self.kills.append((self.now_s, kind, pid))
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    # -- what is looked at --

    async def _info(self) -> ServerInfo | None:
        try:
            return await self._client.server_info(timeout_s=5)
        except PacelineError:
            self.num_unanswered += 1
            return None

    async def _sample(self, once: bool = False) -> None:
        while True:
            at_s = self.now_s
            for process in filter(None, [*self.service.family(), read_process(os.getpid())]):
                fields = {name: getattr(process, name) for name in ("pid", "started", "rss_bytes", "threads", "cpu_s")}
                role = "soak" if process.pid == os.getpid() else role_of(process)
                fields |= {"role": role, "command": process.command[:60], "descriptors": num_descriptors(process.pid)}
                self.samples.append({"at_s": at_s, "quiet": once, **fields})
            if once:
                return
            await asyncio.sleep(SAMPLE_S)

    async def _quiet(self) -> None:
        """Pauses the load until all requests have ended, and looks what has stayed."""
        self._open.clear()
        if self._requests:
            await asyncio.wait(set(self._requests), timeout=self.args.limit_s + 2 * GRACE_S)
        if self._requests:
            self._fault(f"{len(self._requests)} requests never ended")
        end = time.monotonic() + QUIET_TIMEOUT_S
        while True:
            info = await self._info()
            seen = None if info is None else leftovers(info)
            if seen is not None and not any(seen.values()):
                break
            if time.monotonic() > end:
                self._fault(f"after {QUIET_TIMEOUT_S:g} s without requests there are still {seen}")
                break
            await asyncio.sleep(0.5)
        await self._sample(once=True)
        if info is not None:
            self.quiets.append({"at_s": self.now_s, **figures(info)})
        self._open.set()

    def _fault(self, text: str) -> None:
        self.faults.append(f"{self.now_s:.0f} s: {text}")
        print(f"FAULT {self.faults[-1]}", file=sys.stderr, flush=True)


def leftovers(info: ServerInfo) -> dict[str, float]:
    """Counts that have to be zero while nothing runs."""
    left = Counter[str]()
    left["running"], left["queued"] = info.sessions_running, info.sessions_queued
    for kind, statuses in info.pools.items():
        for status in statuses:
            left[f"{kind} sessions"] += status.num_sessions
            left[f"{kind} KV pages"] += status.kv_pages_used
            left[f"{kind} leases"] += int(status.counters.get("leases", 0))
    return dict(left)


def state(info: ServerInfo | None) -> dict[str, Any]:
    """Facts that help to find out why a request does not end."""
    if info is None:
        return {}
    shown = ("num_sessions", "num_waiting", "kv_pages_used", "busy_s", "counters")
    return {
        "running": info.sessions_running,
        "queued": info.sessions_queued,
        **{s.replica_id: {name: getattr(s, name) for name in shown} for each in info.pools.values() for s in each},
    }


def figures(info: ServerInfo) -> dict[str, Any]:
    """Record of a quiet moment."""
    replicas = {kind: [s.replica_id for s in statuses] for kind, statuses in info.pools.items()}
    counted = [s for statuses in info.pools.values() for s in statuses]
    tasks = {s.replica_id: s.counters["asyncio_tasks"] for s in counted if "asyncio_tasks" in s.counters}
    leases = all("leases" in s.counters for s in counted)
    return {"replicas": replicas, "tasks": tasks, "leases_reported": leases, "hit_rate": info.hit_rate}


# -- trends ---------------------------------------------------------------------------------------------------------


def role_of(process: Process) -> str:
    """Role of a process of the service."""
    return LOG_MONITOR if "log_monitor.py" in process.command else process.role


@dataclass(frozen=True)
class Trend:
    """A line through the samples of one process, its first third left out."""

    role: str
    pid: int
    what: str
    span_s: float
    first: float
    last: float
    per_hour: float
    error_per_hour: float
    """Standard error of ``per_hour``, as if samples were independent: they are not quite, so it is the least."""
    rise: float
    """Rise of the line over the part that it is fitted to."""
    fit: float
    """Coefficient of determination, 0 to 1."""

    @property
    def leaks(self) -> bool:
        """True if it rises steadily and by more than it may."""
        limit = MAX_DESCRIPTORS_MORE if self.what == "descriptors" else MAX_RSS_MORE
        if self.what == "descriptors" and self.role == LOG_MONITOR:
            limit = MAX_LOGS
        return self.span_s >= MIN_SPAN_S[self.what] and self.rise > limit and self.fit > 0.5


class Line(NamedTuple):
    """A least-squares line: slope, its standard error, and the coefficient of determination, 0 to 1."""

    slope: float
    error: float
    fit: float


def line(points: Sequence[tuple[float, float]]) -> Line:
    """Fits a line; all zero if either coordinate is constant."""
    x, y = np.array(points).T
    x, y = x - x.mean(), y - y.mean()
    xx, yy, xy = float(x @ x), float(y @ y), float(x @ y)
    if xx == 0 or yy == 0:
        return Line(0.0, 0.0, 0.0)
    rest, spare = max(yy - xy * xy / xx, 0.0), len(points) - 2
    return Line(xy / xx, math.sqrt(rest / spare / xx) if spare else math.inf, xy * xy / (xx * yy))


def trends(samples: Sequence[Mapping[str, Any]]) -> list[Trend]:
    """Trends of every process that lived long enough: memory by all samples, descriptors by those of quiet moments."""
    lives: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for sample in samples:
        lives.setdefault((sample["pid"], sample["started"]), []).append(sample)
    found = []
    for (pid, _), life in lives.items():
        for what in ("rss_bytes", "descriptors"):
            chosen = [s for s in life if s[what] is not None and (what == "rss_bytes" or s["quiet"])]
            points = [(s["at_s"], float(s[what])) for s in chosen]
            later = points[len(points) // 3 :]
            if len(later) < 3:
                continue
            span_s = later[-1][0] - later[0][0]
            slope, error, fit = line(later)
            times = points[-1][0] - points[0][0], points[0][1], points[-1][1]
            found.append(Trend(life[-1]["role"], pid, what, *times, 3600 * slope, 3600 * error, slope * span_s, fit))
    return found


def task_rises(quiets: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """Steady rise of each replica's tasks over all pauses but the first third, and their number at the last one."""
    seen: dict[str, list[tuple[float, float]]] = {}
    for quiet in quiets:
        for replica_id, tasks in quiet["tasks"].items():
            seen.setdefault(replica_id, []).append((quiet["at_s"], tasks))
    rises = {}
    for replica_id, points in seen.items():
        later = points[len(points) // 3 :]
        if len(later) >= 4:  # replicas come and go, and their links have tasks
            slope, _, fit = line(later)
            rises[replica_id] = (slope * (later[-1][0] - later[0][0]) if fit > 0.5 else 0.0, points[-1][1])
    return rises


def judge(load: Load, found: Sequence[Trend]) -> list[str]:
    """Faults beyond those that were seen immediately."""
    wrong = [
        f"{t.role} (pid {t.pid}): {t.what} rises by {t.rise:.0f} over the last two thirds of {t.span_s:.0f} s"
        for t in found
        if t.leaks and t.role != "soak"
    ]
    wrong += [
        f"{replica_id}: asyncio tasks at rest rise by {rise:.0f}, to {last:.0f}"
        for replica_id, (rise, last) in task_rises(load.quiets).items()
        if rise > MAX_TASKS_MORE
    ]
    wrong += load.hostility.faults
    if not load.ended:
        wrong.append("no request was sent")
    return wrong


# -- the report -----------------------------------------------------------------------------------------------------


def summary(load: Load, found: Sequence[Trend], wrong: Sequence[str]) -> str:
    """Readable."""
    counts = Counter((e.behavior, e.outcome) for e in load.ended)
    checked = sum(e.checked for e in load.ended)
    tokens = sum(e.num_tokens for e in load.ended)
    times = sorted(e.seconds for e in load.ended if e.outcome == "complete")
    claimed = f"{sum(t.claimed for t in load.templates)} of {len(load.templates)} templates are claimed"
    done = f"{len(load.ended)} requests, {tokens} tokens, {checked} compared with plain decoding ({claimed})"
    lines = [f"{load.now_s / 60:.1f} minutes: {done}"]
    for behavior in BEHAVIORS:
        ends = ", ".join(f"{n} {o}" for (b, o), n in sorted(counts.items()) if b == behavior)
        lines.append(f"  {behavior}: {ends}")
    kills = sorted(Counter(kind for _, kind, _ in load.kills).items())
    lines.append("killed: " + ", ".join(f"{n} {kind}s" for kind, n in kills))
    if times:
        at = [times[min(len(times) - 1, math.ceil(len(times) * p) - 1)] for p in (0.5, 0.99)]
        shown = f"{at[0]:.2f} s (median), {at[1]:.2f} s (99 %), {times[-1]:.2f} s (longest)"
        lines.append(f"complete requests took {shown}")
    if statuses := load.hostility.statuses:
        lines.append(f"{statuses.total()} hostile calls, by what each got:")
        lines += [f"  {kind}: {count} {status}" for (kind, status), count in sorted(statuses.items())]
    if load.num_unanswered:
        lines.append(f"questions for the state that failed: {load.num_unanswered}")
    quiets = load.quiets
    if quiets:
        reported = "yes" if quiets[-1]["leases_reported"] else "NOT REPORTED by this service"
        tasks = ", ".join(f"{r} {n:.0f}" for r, n in quiets[-1]["tasks"].items()) or "NOT REPORTED by this service"
        lines.append(f"{len(quiets)} pauses: leases checked: {reported}; asyncio tasks at rest: {tasks}")
    lines.append("memory and descriptors, first -> last, slope +- its standard error after the first third:")
    for trend in sorted(found, key=lambda t: (t.what, t.role, t.pid)):
        scale, unit = (2**20, "MiB") if trend.what == "rss_bytes" else (1, "descriptors")
        slope = f"{trend.per_hour / scale:+9.1f} +- {trend.error_per_hour / scale:.1f} per hour (r2 {trend.fit:.2f})"
        lines.append(
            f"  {trend.role:8} {trend.pid:7} {trend.span_s:6.0f} s  {trend.first / scale:8.1f} -> "
            f"{trend.last / scale:8.1f} {unit}, {slope}"
        )
    lines += [f"WRONG: {text}" for text in [*load.faults, *wrong]] or ["nothing stays, nothing differs, nothing hangs"]
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description="Mixed load with cancels and kills on a real service; see the module.")
    target, draft = embedded_paths()
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--targets", type=int, default=2)
    parser.add_argument("--drafts", type=int, default=2)
    parser.add_argument("--target", default=str(target), help="default: the embedded target")
    parser.add_argument("--draft", default=str(draft), help="default: the embedded draft")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second (default 2)")
    parser.add_argument("--max-at-once", type=int, default=64, help="further ones are not sent (default 64)")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--templates", type=int, default=50)
    parser.add_argument("--limit-s", type=float, default=120.0, help="deadline of an ordinary request (default 120)")
    parser.add_argument("--kill-draft-s", type=float, default=60.0, help="mean time between kills; 0: never")
    parser.add_argument("--kill-target-s", type=float, default=240.0, help="likewise")
    parser.add_argument("--secured", action="store_true", help="TLS outside and inside, and API keys")
    parser.add_argument("--hostile", type=float, default=0.0, metavar="PER_S", help="hostile calls a second")
    parser.add_argument("--quiet-s", type=float, default=90.0, help="time between pauses (default 90)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    args = parse(argv)
    rng = random.Random(args.seed)
    engine = {"dtype": args.dtype, "compile": args.compile}
    model = TargetModel(path=args.target, **engine)
    print("plain decoding of every template", file=sys.stderr, flush=True)
    with LocalPipeline(LocalConfig(target=model)) as pipeline:
        templates = make_templates(pipeline, args.templates, args.max_tokens, rng)
        expected = expect(pipeline, templates)
    config = service_of((args.target, args.draft), (engine, engine), (args.targets, args.drafts))
    server: dict[str, Any] = {}
    tls, key = None, None
    with tempfile.TemporaryDirectory() as folder:
        if args.secured:
            key = "key-of-the-soak"
            server, internal, tls = secured(Path(folder), key)
            config |= internal
        with ServiceProcess(config, server=server, say=tell) as service:
            load = Load(service, templates, expected, args, rng, tls, key)
            asyncio.run(load.run())
    found = trends(load.samples)
    wrong = judge(load, found)
    print(summary(load, found, wrong))
    if args.json is not None:
        data = {name: getattr(load, name) for name in ("kills", "quiets", "states", "samples")}
        data |= {"settings": vars(args), "faults": [*load.faults, *wrong], "trends": [asdict(trend) for trend in found]}
        data |= {"requests": [asdict(ended) for ended in load.ended]}
        args.json.write_text(json.dumps(data, default=str) + "\n", encoding="utf-8")
    return 1 if load.faults or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
