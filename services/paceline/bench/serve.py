"""``paceline bench serve``: a real service against the one-process pipeline, on the same prompts, in one run.

    this process ─ sockets ─▶ engine processes                     local plain, local overlapped
                 ─ gRPC ─▶ HAProxy ─▶ router ─▶ replicas           service plain, service overlapped

Both are up all the time; engines that have nothing to do wait for messages. Configurations take turns, in an order
that rotates, so that a machine that drifts does so for all of them alike. Load is closed: as many requests at once as
there are sessions, the next one begins when one ends. A request is the same for every configuration and load, so its
tokens have to be the same everywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from paceline.bench.local import Settings as LocalSettings
from paceline.bench.local import with_grown_models
from paceline.bench.processes import Process, ServiceProcess, cpu_by_role, family, read_process
from paceline.bench.prompts import Prompt, file_prompts, held_out_prompts
from paceline.bench.records import RequestRecord, RoundRecord
from paceline.config import DraftModelConfig, DType, LocalConfig, ModelConfig
from paceline.errors import ConfigError, EngineError
from paceline.factories import TargetFactory
from paceline.local import LocalPipeline
from paceline.ranks import Rendezvous
from paceline.router.session import Chunk, Result
from paceline.types import Mode, ReplicaStatus, SamplingParams, SpeculationParams
from paceline.workers import Emit, Engine

if TYPE_CHECKING:
    from paceline.client import AsyncClient

LOCAL, SERVICE = "local", "service"
_TARGET, _DRAFT = "bench-target", "bench-draft"
_WAVES = 2
"""A unit has at least as many requests per session."""
_WARM_UP_TOKENS = 24
_COUNTERS_TIMEOUT_S = 10.0
_REQUEST_TIMEOUT_S = 300.0
_IDLE_S = 3.0


@dataclass(frozen=True, slots=True)
class Settings:
    """One run of the benchmark."""

    target: str
    draft: str
    grow_target: int | None = None
    """Parameters."""
    grow_draft: int | None = None
    """Parameters, or ``local.FIFTH``."""
    modes: tuple[Mode, ...] = (Mode.PLAIN, Mode.OVERLAPPED)
    num_prompts: int | None = None
    prompts_file: Path | None = None
    max_tokens: int = 128
    temperatures: tuple[float, ...] = (0.0, 1.0)
    sessions: tuple[int, ...] = (1, 4, 16)
    delays_ms: tuple[float, ...] = (0.0,)
    """Added to each way between router and draft; a service is started for each."""
    repeats: int = 1
    draft_tokens: int = 8
    seed: int = 0
    dtype: DType = "bfloat16"
    compile: bool = True

    @property
    def max_sessions(self) -> int:
        """What both targets are built for."""
        return max(16, *self.sessions)

    def num_requests(self, sessions: int) -> int:
        """Of one unit."""
        return max(self.num_prompts or 8, _WAVES * sessions)


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to decode, and where."""

    place: str
    mode: Mode

    @property
    def name(self) -> str:
        """As it is reported."""
        return f"{self.place} {self.mode.value}"


def configurations(settings: Settings, delay_ms: float) -> list[Configuration]:
    """What is compared; with a delayed link local speculation is left out, since it has no such link."""
    listed = [Configuration(place, mode) for place in (LOCAL, SERVICE) for mode in settings.modes]
    return [c for c in listed if not delay_ms or c.place == SERVICE or c.mode is Mode.PLAIN]


@dataclass(frozen=True, slots=True)
class UnitRecord:
    """All requests of one configuration at one load, once."""

    configuration: Configuration
    sessions: int
    temperature: float
    delay_ms: float
    repeat: int
    wall_s: float
    """From the first submission to the last end."""
    requests: tuple[RequestRecord, ...]
    """``unit`` is the request's number; times are the client's."""
    cached_tokens: int
    """Prompt tokens whose KV was there already."""
    target: Mapping[str, float]
    """What the target's counters grew by; empty if it did not say in time."""
    cpu_s: Mapping[str, float]
    """CPU seconds by what a process does; ``client`` is this process, which is also the relay of a local pipeline."""

    @property
    def num_tokens(self) -> int:
        """Emitted."""
        return sum(len(r.token_ids) for r in self.requests)

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json``; token ids and rounds are left out, their counts are not."""
        data = asdict(self)
        data["configuration"] = self.configuration.name
        for request in data["requests"]:
            request["num_tokens"] = len(request.pop("token_ids"))
            request["rounds"] = [[r["drafted"], r["accepted"], r["cause"], r["at_s"]] for r in request["rounds"]]
        return data


@dataclass(frozen=True, slots=True)
class ServiceFacts:
    """What a service took before it was given anything to do, and how far away its draft is."""

    delay_ms: float
    start_s: float
    idle_cpu: float
    """Cores that all of its processes take together while nothing runs."""
    rss_bytes: Mapping[str, int]
    """By what a process does. Pages that are shared are counted in each."""
    num_processes: int
    draft_link_s: float | None
    """Mean time to the draft and back, as the routers measure it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that was measured."""

    units: list[UnitRecord]
    services: list[ServiceFacts]


class Pipeline:
    """The one-process side: LocalPipeline, its processes and its target's counters. A context manager."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            settings = self._settings
            self._counters = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-"))) / "counters"
            config = LocalConfig.model_validate(
                {
                    "target": self._model(settings.target),
                    "draft": DraftModelConfig(**self._model(settings.draft)),
                    "max_sessions": settings.max_sessions,
                }
            )
            before = {p.pid for p in family(os.getpid())}
            factory = _CountedTargetFactory(config, self._counters)
            self.pipeline = stack.enter_context(LocalPipeline(config, target_factory=factory))
            workers = [p for p in family(os.getpid()) if p.pid not in before and "spawn_main" in p.command]
            self._roles = dict(zip((p.pid for p in sorted(workers, key=_by_age)), ("target", "draft"), strict=False))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _model(self, path: str) -> dict[str, Any]:
        return ModelConfig(path=path, dtype=self._settings.dtype, compile=self._settings.compile).model_dump()

    def cpu_s(self) -> dict[str, float]:
        """By role, since each process started."""
        seconds = dict.fromkeys(self._roles.values(), 0.0)
        for pid, role in self._roles.items():
            process = read_process(pid)
            seconds[role] += process.cpu_s if process is not None else 0.0
        return seconds

    def counters(self) -> dict[str, float]:
        """Of the target, as of its last idle moment."""
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads(self._counters.read_text(encoding="utf-8")))
        return {}

    def run(
        self, jobs: Sequence[tuple[Prompt, SamplingParams]], speculation: SpeculationParams, sessions: int
    ) -> list[_Timed]:
        """Runs all jobs, ``sessions`` at once. Raises the first error."""
        done: dict[int, _Timed] = {}
        errors: list[BaseException] = []
        numbers, lock = iter(range(len(jobs))), threading.Lock()

        def work() -> None:
            while not errors:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                prompt, sampling = jobs[number]
                started, times = time.perf_counter(), []
                try:
                    generation = self.pipeline.submit(prompt.token_ids, sampling, speculation)
                    for chunk in generation:
                        times.append((chunk, time.perf_counter() - started))
                    done[number] = _Timed(generation.result, times)
                except BaseException as error:
                    errors.append(error)

        threads = [threading.Thread(target=work, name=f"paceline-reader-{i}", daemon=True) for i in range(sessions)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [done[number] for number in range(len(jobs))]


@dataclass(frozen=True, slots=True)
class _Timed:
    result: Result
    chunks: list[tuple[Chunk, float]]
    """With seconds since submission."""


@dataclass(frozen=True, slots=True)
class _CountedTargetFactory:
    """Builds the target engine; writes its counters to a file whenever it has run out of sessions."""

    config: LocalConfig
    path: Path
    rendezvous: Rendezvous | None = None

    def __call__(self, emit: Emit) -> Engine:
        """See EngineFactory."""
        return _Counted(TargetFactory(self.config, self.rendezvous)(emit), self.path)


class _Counted:
    """An engine that reports when it is idle, so never at the cost of a request."""

    def __init__(self, engine: Any, path: Path) -> None:
        self._engine, self._path = engine, path
        self._written = -1

    def receive(self, messages: Sequence[Any]) -> None:
        """See Engine."""
        self._engine.receive(messages)

    def step(self) -> bool:
        """See Engine."""
        worked: bool = self._engine.step()
        if not worked and not self._engine.num_sessions and self._engine.stats.steps != self._written:
            self._written = self._engine.stats.steps
            temporary = self._path.with_suffix(".new")
            temporary.write_text(json.dumps(asdict(self._engine.stats)), encoding="utf-8")
            temporary.rename(self._path)
        return worked

    def wait_s(self) -> float | None:
        """See Engine."""
        wait_s: float | None = self._engine.wait_s()
        return wait_s

    def close(self) -> None:
        """See Engine."""
        self._engine.close()


class Service:
    """The other side: a real ``paceline serve``, and a real client of its public port. A context manager."""

    def __init__(self, settings: Settings, delay_ms: float, runner: asyncio.Runner) -> None:
        self._settings, self.delay_ms, self._runner = settings, delay_ms, runner
        engine = {"dtype": settings.dtype, "compile": settings.compile}
        config = {
            "target_config": {
                "model_loading_config": {"model_id": _TARGET, "model_source": settings.target},
                "engine_kwargs": {**engine, "max_sessions": settings.max_sessions},
            },
            "draft_config": {
                "model_loading_config": {"model_id": _DRAFT, "model_source": settings.draft},
                "engine_kwargs": engine,
            },
            "router_config": {"draft_link_delay_s": delay_ms / 1e3, "max_queued_requests": settings.max_sessions},
        }
        self.process = ServiceProcess(config, say=lambda line: print(f"  {line}", file=sys.stderr))
        self._client: AsyncClient | None = None

    def __enter__(self) -> Self:
        from paceline.client import AsyncClient

        started = time.monotonic()
        self.process.__enter__()
        try:
            self._client = AsyncClient(self.process.address)
            served = self._runner.run(self._client.wait_ready(60.0)).model_id
            if served != _TARGET:
                raise EngineError(f"{self.process.address} serves {served!r}: it is another service")
        except BaseException:
            self.__exit__()
            raise
        self.start_s = time.monotonic() - started
        return self

    def __exit__(self, *error: object) -> None:
        if self._client is not None:
            self._runner.run(self._client.aclose())
        self.process.stop()

    def facts(self) -> ServiceFacts:
        """Of a service that has nothing to do; takes some seconds. Raises ConfigError if the delay is not there."""
        before, began = self.process.family(), time.monotonic()
        time.sleep(_IDLE_S)
        after = self.process.family()
        idle = sum(cpu_by_role(before, after).values()) / (time.monotonic() - began)
        rss: dict[str, int] = {}
        for process in after:
            rss[process.role] = rss.get(process.role, 0) + process.rss_bytes
        link_s = draft_link_s(self._metrics())
        if self.delay_ms and (link_s is None or link_s < 2 * self.delay_ms / 1e3):
            said = "does not say how long it takes" if link_s is None else f"takes {link_s * 1e3:.2f} ms"
            raise ConfigError(
                f"--draft-link-delay-ms is {self.delay_ms:g}, but the way to the draft and back {said}: "
                "router_config.draft_link_delay_s has no effect"
            )
        return ServiceFacts(self.delay_ms, self.start_s, idle, rss, len(after), link_s)

    def _metrics(self) -> str:
        with urllib.request.urlopen(self.process.metrics_url, timeout=10) as answer:
            text: str = answer.read().decode()
        return text

    def counters(self) -> dict[str, float]:
        """Of all targets, summed; empty if the service does not say."""
        return sum_counters(self._targets())

    def _targets(self) -> Sequence[ReplicaStatus]:
        assert self._client is not None
        return self._runner.run(self._client.server_info()).pools.get("target", ())

    def run(
        self, jobs: Sequence[tuple[Prompt, SamplingParams]], speculation: SpeculationParams, sessions: int
    ) -> list[_Timed]:
        """Runs all jobs, ``sessions`` at once. Raises the first error."""
        try:
            return self._runner.run(self._run(jobs, speculation, sessions))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _run(
        self, jobs: Sequence[tuple[Prompt, SamplingParams]], speculation: SpeculationParams, sessions: int
    ) -> list[_Timed]:
        done: dict[int, _Timed] = {}
        numbers = iter(range(len(jobs)))

        async def work() -> None:
            assert self._client is not None
            for number in numbers:
                prompt, sampling = jobs[number]
                started, times = time.perf_counter(), []
                async with self._client.generate(
                    prompt.token_ids, sampling, speculation, timeout_s=_REQUEST_TIMEOUT_S
                ) as stream:
                    async for chunk in stream:
                        times.append((chunk, time.perf_counter() - started))
                    done[number] = _Timed(await stream.result, times)

        async with asyncio.TaskGroup() as group:
            for _ in range(sessions):
                group.create_task(work())
        return [done[number] for number in range(len(jobs))]


class Bench:
    """Both sides and the records so far. A context manager."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._runner = stack.enter_context(asyncio.Runner())
            self._local = stack.enter_context(Pipeline(self.settings))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def prompts(self) -> list[Prompt]:
        """One per request of the largest unit; those of a file are repeated. Raises ConfigError."""
        settings, tokenizer = self.settings, self._local.pipeline.tokenizer
        count = max(settings.num_requests(sessions) for sessions in settings.sessions)
        if settings.prompts_file is None:
            return held_out_prompts(tokenizer, count, settings.seed)
        prompts = file_prompts(tokenizer, settings.prompts_file, settings.num_prompts)
        return [prompts[i % len(prompts)] for i in range(count)]

    def run(self) -> Outcome:
        """Measures everything. Raises ConfigError or EngineError."""
        settings, prompts = self.settings, self.prompts()
        outcome = Outcome([], [])
        for delay_ms in settings.delays_ms:
            _say(f"starting the service, draft link delay {delay_ms:g} ms")
            with Service(settings, delay_ms, self._runner) as service:
                listed = configurations(settings, delay_ms)
                for configuration in listed:
                    self._warm_up(service, configuration, prompts)
                outcome.services.append(service.facts())
                turn = itertools.count()
                for repeat in range(settings.repeats):
                    for sessions, temperature in itertools.product(settings.sessions, settings.temperatures):
                        first = next(turn) % len(listed)
                        for configuration in [*listed[first:], *listed[:first]]:
                            unit = self._run_unit(service, configuration, prompts, sessions, temperature, repeat)
                            outcome.units.append(unit)
                            service.process.check()
                    _say(f"repeat {repeat + 1} of {settings.repeats} is done")
        outcome.units[:] = with_identity(outcome.units)
        return outcome

    def _warm_up(self, service: Service, configuration: Configuration, prompts: Sequence[Prompt]) -> None:
        """Compiles, connects, and brings every prompt into the prefix cache: it is there for all configurations."""
        _say(f"  warming up {configuration.name}")
        sessions = min(4, self.settings.max_sessions)
        jobs = [(p, SamplingParams(max_tokens=1, ignore_eos=True)) for p in prompts]
        jobs[:sessions] = [(p, s.model_copy(update={"max_tokens": _WARM_UP_TOKENS})) for p, s in jobs[:sessions]]
        side = self._local if configuration.place == LOCAL else service
        side.run(jobs, self._speculation(configuration), sessions)

    def _speculation(self, configuration: Configuration) -> SpeculationParams:
        return SpeculationParams(mode=configuration.mode, max_draft_tokens=self.settings.draft_tokens)

    def _run_unit(
        self, service: Service, configuration: Configuration, prompts: Sequence[Prompt], sessions: int,
        temperature: float, repeat: int,
    ) -> UnitRecord:  # fmt: skip
        settings = self.settings
        side: Pipeline | Service = self._local if configuration.place == LOCAL else service
        jobs = [
            (
                prompt,
                SamplingParams(
                    max_tokens=settings.max_tokens, temperature=temperature, ignore_eos=True,
                    seed=settings.seed * 100_003 + number,
                ),
            )
            for number, prompt in enumerate(prompts[: settings.num_requests(sessions)])
        ]  # fmt: skip
        counters = side.counters()
        looks = [self._look(service)]
        started = time.perf_counter()
        timed = side.run(jobs, self._speculation(configuration), sessions)
        wall_s = time.perf_counter() - started
        looks.append(self._look(service))
        num_tokens = sum(len(t.result.token_ids) for t in timed)
        load = f"{sessions} at once, temperature {temperature:g}"
        _say(f"  {configuration.name}, {load}: {num_tokens / wall_s:.1f} tokens/s")
        blank = RequestRecord(
            configuration.name, configuration.mode.value, settings.draft_tokens, temperature, 0, repeat, "", 0, (),
            0.0, 0.0, (),
        )  # fmt: skip
        return UnitRecord(
            configuration, sessions, temperature, service.delay_ms, repeat, wall_s,
            tuple(_request(blank, number, jobs[number][0], t) for number, t in enumerate(timed)),
            sum(t.result.usage.cached_tokens for t in timed),
            _grown(side.counters, counters, num_tokens),
            looks[1].since(looks[0], configuration.place),
        )  # fmt: skip

    def _look(self, service: Service) -> _Look:
        own = time.process_time()
        return _Look(own, self._local.cpu_s(), service.process.family())


@dataclass(frozen=True, slots=True)
class _Look:
    """CPU seconds so far."""

    client_s: float
    local_s: Mapping[str, float]
    family: list[Process]

    def since(self, before: _Look, place: str) -> dict[str, float]:
        spent = {"client": self.client_s - before.client_s}
        if place == LOCAL:
            return {**spent, **{role: s - before.local_s[role] for role, s in self.local_s.items()}}
        return {**spent, **cpu_by_role(before.family, self.family)}


def _by_age(process: Process) -> tuple[int, int]:
    return process.started, process.pid


def _request(blank: RequestRecord, number: int, prompt: Prompt, timed: _Timed) -> RequestRecord:
    rounds = tuple(
        RoundRecord(c.round.num_drafted, c.round.num_accepted, len(c.token_ids), c.round.cause.value, at)
        for c, at in timed.chunks
        if c.round is not None
    )
    first_s, last_s = (rounds[0].at_s, rounds[-1].at_s) if rounds else (0.0, 0.0)
    return replace(
        blank, unit=number, prompt=prompt.source, prompt_tokens=len(prompt.token_ids),
        token_ids=timed.result.token_ids, prefill_s=first_s, decode_s=last_s - first_s, rounds=rounds,
    )  # fmt: skip


def _grown(read: Callable[[], Mapping[str, float]], before: Mapping[str, float], num_tokens: int) -> dict[str, float]:
    """What counters grew by, once they show all tokens of the unit; they come with a delay."""
    end = time.monotonic() + _COUNTERS_TIMEOUT_S
    while True:
        after = read()
        grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
        if grown.get("tokens_emitted", 0) >= num_tokens:
            return grown
        if time.monotonic() > end:
            return {}
        time.sleep(0.05)


def sum_counters(statuses: Sequence[ReplicaStatus]) -> dict[str, float]:
    """Counters of several replicas together."""
    total: dict[str, float] = {}
    for status in statuses:
        for name, value in status.counters.items():
            total[name] = total.get(name, 0.0) + value
    return total


def draft_link_s(exposition: str) -> float | None:
    """Mean of the routers' measurements in Prometheus' text; None if there are none."""
    found = dict(re.findall(r"^paceline_draft_link_seconds_(sum|count)(?:\{[^}]*\})? (\S+)", exposition, re.MULTILINE))
    count = float(found.get("count", 0))
    return float(found["sum"]) / count if count else None


def with_identity(units: Sequence[UnitRecord]) -> Iterator[UnitRecord]:
    """Compares each request with the same one by plain decoding in one process, at the smallest load that had it."""
    plain: dict[tuple[float, int], tuple[int, ...]] = {}
    ordered = sorted(units, key=lambda u: (u.configuration.place != LOCAL, u.configuration.mode is not Mode.PLAIN))
    for unit in ordered:
        for request in unit.requests:
            plain.setdefault((unit.temperature, request.unit), request.token_ids)
    for unit in units:
        requests = (replace(r, identical=r.token_ids == plain[unit.temperature, r.unit]) for r in unit.requests)
        yield replace(unit, requests=tuple(requests))


def differing(units: Sequence[UnitRecord]) -> list[tuple[UnitRecord, RequestRecord]]:
    """Requests whose tokens are not those of plain decoding in one process."""
    return [(unit, request) for unit in units for request in unit.requests if request.identical is False]


def grown_settings(settings: Settings) -> Settings:
    """The same settings with paths to the grown checkpoints. Raises ConfigError."""
    models = with_grown_models(
        LocalSettings(
            target=settings.target, draft=settings.draft, grow_target=settings.grow_target,
            grow_draft=settings.grow_draft, dtype=settings.dtype,
        )
    )  # fmt: skip
    return replace(settings, target=models.target, draft=models.draft)


def measure(settings: Settings) -> Outcome:
    """The whole run. Raises ConfigError or EngineError."""
    with Bench(settings) as bench:
        return bench.run()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
