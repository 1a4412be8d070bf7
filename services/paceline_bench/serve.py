"""``paceline bench serve``: a real service against the one-process pipeline, on the same prompts, in one run.

    this process ─ sockets ─▶ engine processes                     local plain, local overlapped
                 ─ gRPC ─▶ HAProxy ─▶ router ─▶ replicas           service plain, service overlapped
                 ─ HTTP ─▶ whatever is there                       endpoint

All are up all the time; engines that have nothing to do wait for messages. Configurations take turns, in an order
that rotates, so that a machine that drifts does so for all of them alike. Loads are closed or open (``load.py``). A
request is the same for every configuration and load, so its tokens have to be the same everywhere but at an endpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from paceline.checkpoint.tokenizer import load_tokenizer
from paceline.config import DType
from paceline.errors import DeadlineExceededError, PacelineError, ResourceExhaustedError
from paceline.types import Mode, SamplingParams, SpeculationParams
from paceline_bench.endpoint import Endpoint, EndpointSettings
from paceline_bench.load import Load, Sent, drive
from paceline_bench.local import Settings as LocalSettings
from paceline_bench.local import with_grown_models
from paceline_bench.processes import Process, cpu_by_role
from paceline_bench.prompts import Prompt, choose
from paceline_bench.records import RequestRecord
from paceline_bench.replicas import Job
from paceline_bench.report import ModelFacts
from paceline_bench.sides import Pair, Pipeline, Reply, Service, Side
from paceline_bench.units import ENDPOINT, LOCAL, SERVICE, Configuration, Failure, Outcome, UnitRecord, with_identity

_WAVES = 2
"""A unit of a closed load has at least as many requests per session."""
_OPEN_REQUESTS = 32
"""A unit of an open load, unless a number is given."""
_WARM_UP_TOKENS = 24
_COUNTERS_TIMEOUT_S = 10.0
_OVERLOAD = (ResourceExhaustedError, DeadlineExceededError)
"""What a service of ours may answer to a load that is too much for it."""


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
    task_groups: tuple[str, ...] = ()
    max_tokens: int = 128
    temperatures: tuple[float, ...] = (0.0, 1.0)
    sessions: tuple[int, ...] = (1, 4, 16)
    """Closed loads."""
    rates: tuple[float, ...] = ()
    """Open loads: arrivals per second."""
    burstiness: float = 1.0
    goodput: Mapping[str, float] = field(default_factory=dict)
    """Limits in milliseconds by ``latency.LIMITED``; empty: none asked for."""
    places: tuple[str, ...] = (LOCAL, SERVICE)
    endpoint: EndpointSettings | None = None
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
        return max((16, *self.sessions))

    @property
    def loads(self) -> list[Load]:
        """Closed ones first."""
        closed = [Load(sessions=sessions) for sessions in self.sessions]
        return [*closed, *(Load(rate=rate, burstiness=self.burstiness) for rate in self.rates)]

    def num_requests(self, load: Load) -> int:
        """Of one unit."""
        count = (self.num_prompts or 0) * max(1, len(self.task_groups))
        return count or _OPEN_REQUESTS if load.rate else max(count or 8, _WAVES * load.sessions)


def configurations(settings: Settings, delay_ms: float) -> list[Configuration]:
    """What is compared; with a delayed link local speculation is left out, since it has no such link."""
    listed = [Configuration(place, mode) for place in settings.places for mode in settings.modes]
    listed = [c for c in listed if not delay_ms or c.place == SERVICE or c.mode is Mode.PLAIN]
    return [*listed, *([Configuration(ENDPOINT, None)] if settings.endpoint is not None else [])]


class Bench:
    """All sides and the records so far. A context manager."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._pair = Pair(
            settings.target, settings.draft, settings.dtype, settings.compile, settings.max_sessions,
            max(settings.max_sessions, *(settings.num_requests(load) for load in settings.loads)),
        )  # fmt: skip
        self._stack = contextlib.ExitStack()
        self._sides: dict[str, Side] = {}
        self._local: Pipeline | None = None
        self._service: Service | None = None

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._runner = stack.enter_context(asyncio.Runner())
            if self.settings.endpoint is not None:
                endpoint = Endpoint(self.settings.endpoint, self._runner)
                self._runner.run(endpoint.__aenter__())
                stack.callback(lambda: self._runner.run(endpoint.__aexit__()))
                self._sides[ENDPOINT] = endpoint
            if LOCAL in self.settings.places:
                self._sides[LOCAL] = self._local = stack.enter_context(Pipeline(self._pair))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def prompts(self) -> list[Prompt]:
        """One per request of the largest unit; those of a file are repeated. Task groups take turns. Raises
        ConfigError."""
        settings = self.settings
        count = max(settings.num_requests(load) for load in settings.loads)
        wanted = settings.num_prompts
        if settings.prompts_file is None and not settings.task_groups:
            wanted = count
        tokenizer = load_tokenizer(settings.target)
        prompts = choose(tokenizer, settings.prompts_file, wanted, settings.task_groups, settings.seed)
        by_group = [[p for p in prompts if p.category == group] for group in dict.fromkeys(p.category for p in prompts)]
        if settings.task_groups:
            prompts = [p for turn in itertools.zip_longest(*by_group) for p in turn if p is not None]
        return [prompts[i % len(prompts)] for i in range(count)]

    def run(self) -> Outcome:
        """Measures everything. Raises ConfigError or EngineError."""
        prompts, outcome = self.prompts(), Outcome([], [])
        for delay_ms in self.settings.delays_ms:
            with contextlib.ExitStack() as stack:
                if SERVICE in self.settings.places:
                    say(f"starting the service, draft link delay {delay_ms:g} ms")
                    self._service = stack.enter_context(Service(self._pair, delay_ms, self._runner))
                    self._sides[SERVICE] = self._service
                self._run_delay(delay_ms, prompts, outcome)
        outcome.units[:] = with_identity(outcome.units)
        return outcome

    def _run_delay(self, delay_ms: float, prompts: Sequence[Prompt], outcome: Outcome) -> None:
        settings = self.settings
        listed = configurations(settings, delay_ms)
        for configuration in listed:
            self._warm_up(configuration, prompts)
        if self._service is not None:
            outcome.services.append(self._service.facts())
        turn = itertools.count()
        for repeat in range(settings.repeats):
            for load, temperature in itertools.product(settings.loads, settings.temperatures):
                first = next(turn) % len(listed)
                for configuration in [*listed[first:], *listed[:first]]:
                    unit = self._run_unit(configuration, prompts, load, temperature, delay_ms, repeat)
                    outcome.units.append(unit)
                    if self._service is not None:
                        self._service.process.check()
            say(f"repeat {repeat + 1} of {settings.repeats} is done")

    def _warm_up(self, configuration: Configuration, prompts: Sequence[Prompt]) -> None:
        """Compiles, connects, and brings every prompt into the prefix cache: it is there for all configurations."""
        say(f"  warming up {configuration.name}")
        sessions = min(4, self.settings.max_sessions)
        jobs = [Job(p, SamplingParams(max_tokens=1, ignore_eos=True, seed=0)) for p in prompts]
        longer = SamplingParams(max_tokens=_WARM_UP_TOKENS, ignore_eos=True, seed=0)
        jobs[:sessions] = [replace(job, sampling=longer) for job in jobs[:sessions]]
        for sent in self._drive(configuration, jobs, Load(sessions=sessions), 0):
            if isinstance(sent.reply, PacelineError):
                raise sent.reply

    def _drive(self, configuration: Configuration, jobs: Sequence[Job], load: Load, repeat: int) -> list[Sent[Reply]]:
        """Raises what is no answer to a load: a service of ours may be overloaded, an endpoint may fail."""
        side = self._sides[configuration.place]
        params = SpeculationParams(mode=configuration.mode or Mode.PLAIN, max_draft_tokens=self.settings.draft_tokens)
        seed = self.settings.seed * 100_003 + repeat  # the same arrivals for every configuration
        done = self._runner.run(drive(load, len(jobs), seed, lambda number: side.send(jobs[number], params)))
        errors = [sent.reply for sent in done if isinstance(sent.reply, PacelineError)]
        if configuration.place != ENDPOINT:
            errors = [error for error in errors if not isinstance(error, _OVERLOAD)]
        elif len(errors) < len(done):
            errors = []
        if errors:
            raise errors[0]
        return done

    def _run_unit(
        self, configuration: Configuration, prompts: Sequence[Prompt], load: Load, temperature: float,
        delay_ms: float, repeat: int,
    ) -> UnitRecord:  # fmt: skip
        settings = self.settings
        side = self._sides[configuration.place]
        jobs = [
            Job(
                prompt,
                SamplingParams(
                    max_tokens=prompt.max_tokens or settings.max_tokens, temperature=temperature, ignore_eos=True,
                    seed=settings.seed * 100_003 + number,
                ),
            )
            for number, prompt in enumerate(prompts[: settings.num_requests(load)])
        ]  # fmt: skip
        counters = side.counters()
        looks = [self._look()]
        started = time.perf_counter()
        done = self._drive(configuration, jobs, load, repeat)
        wall_s = time.perf_counter() - started
        looks.append(self._look())
        blank = RequestRecord(
            configuration.name, "" if configuration.mode is None else configuration.mode.value,
            settings.draft_tokens, temperature, 0, repeat, "", 0, (), 0.0, 0.0, (),
        )  # fmt: skip
        answered = [(n, s, s.reply) for n, s in enumerate(done) if isinstance(s.reply, Reply)]
        requests = tuple(_request(blank, n, jobs[n].prompt, s.submitted_s, reply) for n, s, reply in answered)
        failed = tuple(
            Failure(n, s.submitted_s, f"{type(s.reply).__name__}: {s.reply}")
            for n, s in enumerate(done)
            if isinstance(s.reply, PacelineError)
        )
        num_tokens = sum(r.num_tokens for r in requests)
        what = f"{configuration.name}, {load.name}, temperature {temperature:g}"
        say(f"  {what}: {num_tokens / wall_s:.1f} tokens/s" + (f", {len(failed)} failed" if failed else ""))
        if configuration.place == ENDPOINT:
            grown = _difference(side.counters(), counters)
        else:  # those of requests that failed are not known
            grown = {} if failed else _grown(side.counters, counters, num_tokens)
        return UnitRecord(
            configuration, load.sessions, temperature, delay_ms, repeat, wall_s, requests,
            sum(reply.cached_tokens for *_, reply in answered), grown,
            looks[1].since(looks[0], configuration.place), load.rate, load.burstiness, failed,
        )  # fmt: skip

    def _look(self) -> _Look:
        local = {} if self._local is None else self._local.cpu_s()
        return _Look(time.process_time(), local, [] if self._service is None else self._service.process.family())


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
        return {**spent, **(cpu_by_role(before.family, self.family) if place == SERVICE else {})}


def _request(blank: RequestRecord, number: int, prompt: Prompt, submitted_s: float, reply: Reply) -> RequestRecord:
    rounds = reply.rounds
    first_s, last_s = (rounds[0].at_s, rounds[-1].at_s) if rounds else (0.0, 0.0)
    return replace(
        blank, unit=number, prompt=prompt.source, prompt_tokens=len(prompt.token_ids), token_ids=reply.token_ids,
        prefill_s=first_s, decode_s=last_s - first_s, rounds=rounds, category=prompt.category,
        submitted_s=submitted_s, num_counted=reply.num_counted,
    )  # fmt: skip


def _difference(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def _grown(read: Callable[[], Mapping[str, float]], before: Mapping[str, float], num_tokens: int) -> dict[str, float]:
    """What counters grew by, once they show all tokens of the unit; they come with a delay."""
    end = time.monotonic() + _COUNTERS_TIMEOUT_S
    while True:
        after = read()
        grown = _difference(after, before)
        if grown.get("tokens_emitted", 0) >= num_tokens:
            return grown
        if time.monotonic() > end:
            return {}
        time.sleep(0.05)


def grown_settings(settings: Settings) -> Settings:
    """The same settings with paths to the grown checkpoints. Raises ConfigError."""
    models = with_grown_models(
        LocalSettings(
            target=settings.target, draft=settings.draft, grow_target=settings.grow_target,
            grow_draft=settings.grow_draft, dtype=settings.dtype,
        )
    )  # fmt: skip
    return replace(settings, target=models.target, draft=models.draft)


def public(settings: Settings, facts: Mapping[str, ModelFacts]) -> dict[str, Any]:
    """Settings for a JSON file: models by their names, and no key."""
    endpoint = None if settings.endpoint is None else settings.endpoint.public()
    return {**asdict(replace(settings, endpoint=endpoint)), **{role: fact.path for role, fact in facts.items()}}


def measure(settings: Settings) -> Outcome:
    """The whole run. Raises ConfigError or EngineError."""
    with Bench(settings) as bench:
        return bench.run()


def say(text: str) -> None:
    """Progress, on standard error."""
    print(text, file=sys.stderr, flush=True)
