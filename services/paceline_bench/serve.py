"""``paceline bench serve``: a real service against the one-process pipeline, on the same prompts, in one run.

    this process ─ sockets ─▶ engine processes                     local plain, local overlapped
                 ─ gRPC ─▶ HAProxy ─▶ router ─▶ replicas           service plain, service overlapped
                 ─ HTTP ─▶ an OpenAI-compatible server              endpoint

All run all the time; engines that have nothing to do wait for messages. Configurations take turns, in an order
that rotates, so that a machine that drifts does so for all of them alike. Loads are closed or open (``load.py``). A
request is the same for every configuration and load, so its tokens have to be the same everywhere but at an endpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from paceline.checkpoint.tokenizer import load_tokenizer
from paceline.errors import DeadlineExceededError, PacelineError, ResourceExhaustedError
from paceline.logs import narrate
from paceline.types import Mode, SamplingParams, SpeculationParams
from paceline_bench.endpoint import Endpoint
from paceline_bench.jobs import Job, Reply
from paceline_bench.load import Load, Sent, drive
from paceline_bench.processes import Process, cpu_by_role
from paceline_bench.prompts import Prompt, choose
from paceline_bench.records import (
    ENDPOINT,
    LOCAL,
    SERVICE,
    Configuration,
    Failure,
    Outcome,
    RequestRecord,
    UnitRecord,
    with_identity,
)
from paceline_bench.settings import ServeSettings
from paceline_bench.sides import Pipeline, Service, Side

_WARM_UP_TOKENS = 24
COUNTERS_TIMEOUT_S = 10.0
_OVERLOAD = (ResourceExhaustedError, DeadlineExceededError)
"""Errors that a service of ours may answer to a load that is too much for it."""


def configurations(settings: ServeSettings) -> list[Configuration]:
    """The configurations to compare."""
    listed = [Configuration(place, mode) for place in settings.places for mode in settings.modes]
    return [*listed, *([Configuration(ENDPOINT, None)] if settings.endpoint is not None else [])]


class ServeBench:
    """All sides and the records so far. A context manager."""

    def __init__(self, settings: ServeSettings) -> None:
        self.settings = settings
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
                self._sides[LOCAL] = self._local = stack.enter_context(Pipeline(self.settings))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def prompts(self) -> list[Prompt]:
        """Returns one prompt per request of the largest unit; repeats the prompts of a file. Task groups take turns.

        Raises:
            ConfigError: the prompts cannot be read.
        """
        settings = self.settings
        count = max(map(settings.num_requests, settings.loads))
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
        """Measures everything.

        Raises:
            ConfigError: the prompts cannot be had.
            EngineError: a side failed.
        """
        prompts, outcome = self.prompts(), Outcome([], [])
        with contextlib.ExitStack() as stack:
            if SERVICE in self.settings.places:
                narrate("starting the service")
                self._service = stack.enter_context(Service(self.settings, self._runner))
                self._sides[SERVICE] = self._service
            self._run_all(prompts, outcome)
        outcome.units[:] = with_identity(outcome.units)
        return outcome

    def _run_all(self, prompts: Sequence[Prompt], outcome: Outcome) -> None:
        settings = self.settings
        listed = configurations(settings)
        for configuration in listed:
            self._warm_up(configuration, prompts)
        if self._service is not None:
            outcome.services.append(self._service.facts())
        turn = itertools.count()
        for repeat in range(settings.repeats):
            for load, temperature in itertools.product(settings.loads, settings.temperatures):
                first = next(turn) % len(listed)
                for configuration in [*listed[first:], *listed[:first]]:
                    unit = self._run_unit(configuration, prompts, load, temperature, repeat)
                    outcome.units.append(unit)
                    if self._service is not None:
                        self._service.process.check()
            narrate(f"repeat {repeat + 1} of {settings.repeats} is done")

    def _warm_up(self, configuration: Configuration, prompts: Sequence[Prompt]) -> None:
        """Compiles, connects, and brings every prompt into the prefix cache, for all configurations alike."""
        narrate(f"  warming up {configuration.name}")
        sessions = min(4, self.settings.max_sessions)
        jobs = [Job(p, SamplingParams(max_tokens=1, ignore_eos=True, seed=0)) for p in prompts]
        longer = SamplingParams(max_tokens=_WARM_UP_TOKENS, ignore_eos=True, seed=0)
        jobs[:sessions] = [replace(job, sampling=longer) for job in jobs[:sessions]]
        for sent in self._drive(configuration, jobs, Load(sessions=sessions), 0):
            if isinstance(sent.reply, PacelineError):
                raise sent.reply

    def _drive(self, configuration: Configuration, jobs: Sequence[Job], load: Load, repeat: int) -> list[Sent[Reply]]:
        """Sends all jobs. Failures that a load explains are kept: a service of ours may be overloaded, an endpoint
        may fail. The first of any others is raised."""
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
        self,
        configuration: Configuration,
        prompts: Sequence[Prompt],
        load: Load,
        temperature: float,
        repeat: int,
    ) -> UnitRecord:
        settings = self.settings
        side = self._sides[configuration.place]
        jobs = []
        for number, prompt in enumerate(prompts[: settings.num_requests(load)]):
            limit, seed = prompt.max_tokens or settings.max_tokens, settings.seed * 100_003 + number
            jobs.append(
                Job(prompt, SamplingParams(max_tokens=limit, temperature=temperature, ignore_eos=True, seed=seed))
            )
        counters, before = side.counters(), self._look()
        started = time.perf_counter()
        done = self._drive(configuration, jobs, load, repeat)
        wall_s = time.perf_counter() - started
        cpu_s = self._look().since(before, configuration.place)
        mode = "" if configuration.mode is None else configuration.mode.value
        blank = RequestRecord(
            configuration.name, mode, settings.draft_tokens, temperature, 0, repeat, "", 0, (), 0.0, 0.0, ()
        )
        requests, failed, cached_tokens = [], [], 0
        for number, (job, sent) in enumerate(zip(jobs, done, strict=True)):
            if isinstance(sent.reply, PacelineError):
                failed.append(Failure(number, sent.submitted_s, f"{type(sent.reply).__name__}: {sent.reply}"))
            else:
                record = sent.reply.to_record(blank, job.prompt)
                requests.append(replace(record, unit=number, submitted_s=sent.submitted_s))
                cached_tokens += sent.reply.cached_tokens
        num_tokens = sum(r.num_tokens for r in requests)
        what = f"{configuration.name}, {load.name}, temperature {temperature:g}"
        narrate(f"  {what}: {num_tokens / wall_s:.1f} tokens/s" + (f", {len(failed)} failed" if failed else ""))
        if configuration.place == ENDPOINT:
            target = _difference(side.counters(), counters)
        else:  # the tokens of failed requests are not known
            target = {} if failed else _growth(side.counters, counters, num_tokens)
        return UnitRecord(
            configuration,
            load.sessions,
            temperature,
            repeat,
            wall_s,
            tuple(requests),
            cached_tokens,
            target,
            cpu_s,
            load.rate,
            load.burstiness,
            tuple(failed),
        )

    def _look(self) -> _Look:
        local = {} if self._local is None else self._local.cpu_s()
        return _Look(time.process_time(), local, [] if self._service is None else self._service.process.family())


@dataclass(frozen=True, slots=True)
class _Look:
    """CPU seconds of all processes so far."""

    client_s: float
    local_s: Mapping[str, float]
    family: list[Process]

    def since(self, before: _Look, place: str) -> dict[str, float]:
        spent = {"client": self.client_s - before.client_s}
        if place == LOCAL:
            return {**spent, **{role: s - before.local_s[role] for role, s in self.local_s.items()}}
        return {**spent, **(cpu_by_role(before.family, self.family) if place == SERVICE else {})}


def _difference(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def _growth(read: Callable[[], Mapping[str, float]], before: Mapping[str, float], num_tokens: int) -> dict[str, float]:
    """Growth of counters that come with a delay, once they show all tokens of the unit; {} if they never do."""
    end = time.monotonic() + COUNTERS_TIMEOUT_S
    while True:
        after = read()
        grown = _difference(after, before)
        if grown.get("tokens_emitted", 0) >= num_tokens:
            return grown
        if time.monotonic() > end:
            return {}
        time.sleep(0.05)


def measure(settings: ServeSettings) -> Outcome:
    """Runs the whole benchmark.

    Raises:
        ConfigError: the prompts cannot be had.
        EngineError: a side failed.
    """
    with ServeBench(settings) as bench:
        return bench.run()
