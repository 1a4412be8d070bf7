"""Arms answer the same requests in turn, unit by unit, in an order that rotates.

A unit is one request per session, all at once, and the same ones for every arm: what else the machine does meets all
arms alike. Every arm answers a short unit first, which is not counted. Texts are compared with the baseline's.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.checkpoint.tokenizer import load_tokenizer
from paceline.cli.local_service import local_of
from paceline.client import AsyncClient, Tls
from paceline.config import DraftSetup, LocalConfig, ServiceConfig
from paceline.config.loading import place_of
from paceline.errors import ConfigError, PacelineError
from paceline.local import LocalPipeline
from paceline.runtime.build import EngineSpec
from paceline.runtime.workers import Emit, Engine, EngineFactory, available_cores
from paceline.types import Mode, Rendezvous, SpeculationParams
from paceline_bench.baselines import GenerateProcess, GenerateRequest
from paceline_bench.compare.spec import Arm, Spec, merged
from paceline_bench.jobs import Job, Reply, TimedChunks, run_jobs
from paceline_bench.peers import PeerProcess, Unit, start_of
from paceline_bench.processes import ServiceProcess
from paceline_bench.prompts import Prompt, chat_prompts, held_out_prompts
from paceline_bench.records import RequestRecord
from paceline_bench.settings import Peer

_WARM_UP_TOKENS = 24
_REQUEST_TIMEOUT_S = 600.0

Ask = Callable[[Sequence[Job], SpeculationParams, str], list[Reply]]
"""Answers requests that are sent at once; the last argument is the salt of their prefix cache."""


@dataclass
class Found:
    """Answers of one arm under one load: its units, or its failure."""

    arm: Arm
    units: list[list[RequestRecord]] = field(default_factory=list)
    baseline: list[list[RequestRecord]] = field(default_factory=list)
    """The baseline's, in turns with it."""
    failure: str = ""
    different: int = 0
    """Texts that are not the baseline's."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests in progress at once, and their temperature."""

    sessions: int
    temperature: float


Results = dict[Load, list[Found]]


def compare(spec: Spec, arms: Sequence[Arm], say: Callable[[Load, Sequence[Found]], None]) -> Results:
    """Measures all arms, group by group. ``say`` gets what a group found, as soon as it is there.

    Raises:
        PacelineError: the baseline cannot be opened, or fails.
    """
    (baseline,) = (arm for arm in arms if arm.name == spec.baseline)
    others = [arm for arm in arms if arm is not baseline]
    loads = [Load(sessions, temperature) for sessions in spec.sessions for temperature in spec.temperatures]
    results: Results = {load: [] for load in loads}
    size = spec.at_once or max(1, len(others))
    for start in range(0, max(1, len(others)), size):
        with ExitStack() as stack:
            group = Group(spec, [baseline, *others[start : start + size]], stack)
            for load in loads:
                found = group.measure(load)
                say(load, found)
                results[load] += found
    return results


class Group:
    """Arms that are up together; the first is the baseline."""

    def __init__(self, spec: Spec, arms: Sequence[Arm], stack: ExitStack) -> None:
        """Raises PacelineError if the baseline cannot be opened; of any other arm it is kept as its failure."""
        self._spec = spec
        self._failures: dict[str, str] = {}
        self._asks: dict[str, Ask] = {}
        opened: dict[str, Ask] = {}
        for arm in arms:
            key = json.dumps(
                [arm.tree, arm.service, arm.draft_delay_s, arm.peer, arm.transformers and arm.name], default=str
            )
            try:
                if key not in opened:
                    opened[key] = open_arm(arm, spec, stack)
                self._asks[arm.name] = opened[key]
            except PacelineError as error:
                if arm.name == spec.baseline:
                    raise
                self._failures[arm.name] = str(error)
        self._arms = list(arms)

    def measure(self, load: Load) -> list[Found]:
        """All arms in turn under one load, the baseline first."""
        spec = self._spec
        found = [Found(arm, failure=self._failures.get(arm.name, "")) for arm in self._arms]
        prompts, size = prompts_of(self._arms[0], spec, max(spec.prompts, load.sessions)), load.sessions
        count = len(prompts)
        units = [list(range(at, at + size)) for at in range(0, count - size + 1, size)]
        for one in found:
            if not one.failure:
                self._settle(one, load, prompts[:size])
        for turn, chosen in enumerate(units * spec.repeats):
            if spec.cached:
                self._warm(found, self._jobs(found[0].arm, load, prompts, chosen, 2))
            salt = "" if spec.cached else f"{load} {turn}"
            at = turn % len(found)
            for one in (*found[at:], *found[:at]):
                self._unit(one, load, prompts, chosen, salt)
            for one in found[1:]:
                self._compare(found[0], one)
        return found

    def _warm(self, found: Sequence[Found], jobs: Sequence[Job]) -> None:
        """Brings the prompts of a unit into the KV cache of all engines."""
        done = set()
        for one in found:
            if not one.failure and one.arm.is_ours and id(ask := self._asks[one.arm.name]) not in done:
                done.add(id(ask))
                try:
                    ask(jobs, SpeculationParams(mode=Mode.PLAIN), "")
                except PacelineError as error:
                    _fail(one, self._spec, error)

    def _jobs(self, arm: Arm, load: Load, prompts: Sequence[Prompt], chosen: Sequence[int], num: int) -> list[Job]:
        """Requests of an arm, each of ``num`` tokens."""
        whole = arm.sampling.structured_output is None  # the other ends where its form does
        own = {"temperature": load.temperature, "max_tokens": num, "ignore_eos": whole}
        return [Job(prompts[i], arm.sampling.model_copy(update={"seed": i, **own})) for i in chosen]

    def _settle(self, one: Found, load: Load, prompts: Sequence[Prompt]) -> None:
        """A short unit, and then others for as long as the arm says."""
        end = time.monotonic() + one.arm.settle_s
        max_tokens, chosen = min(_WARM_UP_TOKENS, self._spec.max_tokens), range(len(prompts))
        while not one.failure:
            try:
                jobs = self._jobs(one.arm, load, prompts, chosen, max_tokens)
                self._asks[one.arm.name](jobs, one.arm.params, "settle")
            except PacelineError as error:
                _fail(one, self._spec, error)
            if time.monotonic() >= end:
                break
            max_tokens = self._spec.max_tokens

    def _unit(self, one: Found, load: Load, prompts: Sequence[Prompt], chosen: Sequence[int], salt: str) -> None:
        if one.failure:
            return
        jobs = self._jobs(one.arm, load, prompts, chosen, self._spec.max_tokens)
        try:
            replies = self._asks[one.arm.name](jobs, one.arm.params, salt)
        except PacelineError as error:
            _fail(one, self._spec, error)
            return
        params = one.arm.params
        blank = RequestRecord(
            one.arm.name, params.mode.value, params.max_draft_tokens, load.temperature, len(one.units), 0, "", 0, (),
            0.0, 0.0, (),
        )  # fmt: skip
        one.units.append([r.to_record(blank, job.prompt) for r, job in zip(replies, jobs, strict=True)])

    def _compare(self, plain: Found, one: Found) -> None:
        if one.failure:
            return
        one.baseline.append(plain.units[-1])
        if one.arm.equal and one.arm.is_ours:
            pairs = zip(one.units[-1], plain.units[-1], strict=True)
            one.different += sum(own.token_ids != theirs.token_ids for own, theirs in pairs)


def _fail(one: Found, spec: Spec, error: PacelineError) -> None:
    """Raises the error of the baseline; of any other arm it is kept in the place of its units."""
    if one.arm.name == spec.baseline:
        raise error
    one.failure, one.units, one.baseline = str(error), [], []


# ------------------------------------------------------------------------------------------------ who answers


def prompts_of(arm: Arm, spec: Spec, count: int) -> list[Prompt]:
    """Prompts for the target of an arm.

    Raises:
        ConfigError: there are fewer, or the target has no chat template where chats are requested.
    """
    loading = ServiceConfig.parse(arm.tree).target_config.model_loading_config
    if spec.chats is None:
        return held_out_prompts(load_tokenizer(loading.tokenizer), count, spec.seed)
    if len(found := chat_prompts(loading.tokenizer, spec.chats)) < count:
        raise ConfigError(f"chats is {str(spec.chats)!r}: it holds {len(found)} questions, and {count} are needed")
    return found[:count]


def open_arm(arm: Arm, spec: Spec, stack: ExitStack) -> Ask:
    """Starts who answers for an arm; the stack ends it.

    Raises:
        PacelineError: the configuration is wrong, or it does not start.
    """
    config = ServiceConfig.parse(arm.tree)
    if arm.transformers is not None:
        return _transformers(arm, config, stack)
    if arm.peer is not None:
        return _peer(arm.peer, config, spec, stack)
    if arm.service:
        tree = merged(arm.tree, {"router_config": {"generation_config": "none"}})  # as in one process
        address = stack.enter_context(ServiceProcess(tree, server=tree.pop("server", None))).address
        tls = None if config.server.tls is None else Tls(ca_file=Path(config.server.tls.certificate))  # self-signed
        return lambda jobs, params, salt: asyncio.run(_streamed(address, tls, jobs, params, salt))
    local = local_of(config).model_copy(update={"worker": spec.worker, "generation_config": "none"})
    sessions = {"max_sessions": max(spec.sessions)}
    target = local.target.model_copy(update=sessions if "max_sessions" not in local.target.model_fields_set else {})
    local = local.model_copy(update={"target": target})
    pipeline = stack.enter_context(LocalPipeline(local, draft_factory=_slow_draft(local, arm.draft_delay_s)))
    return functools.partial(run_jobs, pipeline)


async def _streamed(
    address: str, tls: Tls | None, jobs: Sequence[Job], params: SpeculationParams, salt: str
) -> list[Reply]:
    started = time.perf_counter()
    async with AsyncClient(address, tls=tls) as client:

        async def one(job: Job) -> Reply:
            times: TimedChunks = []
            ids, limit_s = job.prompt.token_ids, _REQUEST_TIMEOUT_S
            async with client.generate(ids, job.sampling, params, timeout_s=limit_s, cache_salt=salt) as stream:
                async for chunk in stream:
                    times.append((chunk, time.perf_counter() - started))
                return Reply.of_result(await stream.result, times)

        return list(await asyncio.gather(*map(one, jobs)))


def _transformers(arm: Arm, config: ServiceConfig, stack: ExitStack) -> Ask:
    """transformers with the models of the arm. A refused mode ends its process; the next request has a new one."""
    target, draft = config.target_setup(), config.draft_setup()
    started: list[GenerateProcess] = []
    assert arm.transformers is not None
    mode = arm.transformers

    def ask(jobs: Sequence[Job], params: SpeculationParams, salt: str) -> list[Reply]:
        if not started:
            core = next(iter(available_cores()), None)
            process = GenerateProcess(
                target.source, None if draft is None else draft.source, target.options.dtype, core
            )
            started.append(stack.enter_context(process))
        try:
            return started[0].generate(GenerateRequest(mode, *_asked(jobs)))
        except PacelineError:
            started.clear()
            raise

    return ask


def _peer(given: str, config: ServiceConfig, spec: Spec, stack: ExitStack) -> Ask:
    """Another engine with the target of the arm, which decodes plainly."""
    (engine, _, python), setup = given.partition("="), config.target_setup()
    cores, path = available_cores()[: setup.options.cpu_threads or 1], str(place_of(setup.source))
    start = start_of(Peer(engine, python), (path, ""), 0, cores, setup.options.dtype, max(spec.sessions))
    process = stack.enter_context(PeerProcess(python, start))
    return lambda jobs, params, salt: process.generate(Unit(*_asked(jobs), draft_tokens=0))


def _asked(jobs: Sequence[Job]) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...], float, int]:
    """Prompts, their limits, temperature and first seed, as other engines take them."""
    prompts, first = tuple(job.prompt.token_ids for job in jobs), jobs[0].sampling
    limits = tuple(job.sampling.max_tokens or 1 for job in jobs)
    return prompts, limits, first.temperature or 0.0, first.seed or 0


def _slow_draft(config: LocalConfig, delay_s: float) -> EngineFactory[Any, Any] | None:
    setup = config.draft_setup()
    return None if setup is None or not delay_s else SlowFactory(setup, delay_s)


@dataclass(frozen=True, slots=True)
class SlowFactory:
    """Builds a draft whose every tree step takes ``delay_s`` longer; inf: it takes no message and does nothing."""

    setup: DraftSetup
    delay_s: float
    rendezvous: Rendezvous | None = None

    def __call__(self, emit: Emit[Any]) -> Engine[Any]:
        """Builds the engine in its worker."""
        engine: Any = EngineSpec(self.setup, self.rendezvous).build(emit)
        if math.isinf(self.delay_s):
            engine.receive = lambda messages: None
            engine.step = lambda: False
            return engine  # type: ignore[no-any-return]
        expand = engine.drafter.expand

        def slowly(leaves: Any) -> Any:
            time.sleep(self.delay_s)
            return expand(leaves)

        engine.drafter.expand = slowly
        return engine  # type: ignore[no-any-return]
