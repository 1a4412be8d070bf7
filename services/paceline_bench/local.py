"""``paceline bench local``: the modes and their baselines on the same prompts, in one run.

    pair of engines     core 0: target, core 1: draft       plain, sequential, overlapped
    two replicas        a core each (``replicas.py``)        replicated, colocated
    shared targets      1 core, N cores (``cores.py``)       plain and co-located by number of threads, and the choice
    transformers        core 0 (``baselines.py``)            transformers, assisted, lookup, continuous
    other engines       1 core, N cores (``peers.py``)       plain and with the draft

One pair of engines serves all modes, since the mode is a property of the request. Methods take turns prompt by
prompt, in an order that rotates, so that a machine that drifts does so for all of them alike.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from paceline.config import LocalConfig, TargetModel
from paceline.errors import ConfigError
from paceline.local import LocalPipeline
from paceline.plan.measured import Drafting
from paceline.runtime.workers import available_cores
from paceline.types import Acceptance, Mode, SamplingParams
from paceline_bench import baselines, cores, replicas
from paceline_bench.baselines import GenerateProcess, GenerateRequest
from paceline_bench.drafting import Drafting as Flags
from paceline_bench.jobs import Job, Reply, run_jobs, speculation
from paceline_bench.peers import PeerProcess, Start, Unit, start_of
from paceline_bench.prompts import Prompt, choose
from paceline_bench.records import TRANSFORMERS, RequestRecord
from paceline_bench.replicas import Replicas
from paceline_bench.settings import LocalSettings, Peer
from paceline_bench.steps import StepRecord, WatchedFactory, read_steps, timed_draft, timed_target

_WARM_UP_TOKENS = 24
_LOG_TIMEOUT_S = 0.5
_MODES = {mode.value for mode in Mode}
BASELINES = (*baselines.MODES, *replicas.MODES)
"""Names of all baselines."""


@dataclass(frozen=True, slots=True)
class Method:
    """One way to decode."""

    name: str
    mode: str
    """Name of a ``Mode``, or one of ``BASELINES``; of other engines and of shared targets the method without its K."""
    draft_tokens: int = 0
    cores: int = 1
    """Number of cores that it is given."""
    shared: Drafting | None = None
    """Way of drafting of a target whose products ``cores`` threads share."""
    chooses: bool = False
    """A target and a draft on ``cores`` cores choose for themselves where to draft, and whether."""
    peer: Peer | None = None
    """The engine, if it is neither ours nor transformers."""

    @property
    def engine(self) -> str:
        """Name of the engine; empty if it is ours."""
        return self.peer.engine if self.peer else TRANSFORMERS if self.mode in baselines.MODES else ""


def methods(settings: LocalSettings) -> list[Method]:
    """The methods to compare, in the order of the report; sequential and overlapped once for each K."""
    listed = []
    for mode in settings.modes:
        if mode is Mode.PLAIN:
            listed.append(Method("plain", mode.value))
        else:
            ks = settings.draft_tokens if mode is Mode.OVERLAPPED else settings.sequential_draft_tokens
            listed += [Method(f"{mode.value} K={k}", mode.value, k, devices(mode)) for k in ks]
    for name in settings.baselines:
        if name == "colocated":
            listed += [Method(f"{name} K={k}", name, k, devices(name)) for k in settings.sequential_draft_tokens]
        else:
            listed.append(Method(baselines.NAMES.get(name, name), name, 0, devices(name)))
    for threads in settings.thread_counts:
        for way, (_, k) in cores.WAYS.items():
            named = cores.name_of(way.value, threads)
            listed.append(Method(_with_k(named, k), named, k, threads, shared=way))
    if settings.thread_counts:
        named = cores.name_of(cores.CHOSEN, threads := max(settings.thread_counts))
        listed.append(Method(named, named, settings.draft_tokens[0], threads, chooses=True))
    for peer in settings.peers:
        for threads in settings.peer_cores:
            named, ks = cores.name_of(peer.engine, threads), settings.sequential_draft_tokens if settings.draft else ()
            listed += [Method(_with_k(named, k), named, k, threads, peer=peer) for k in (0, *ks)]
    return listed


def _with_k(mode: str, draft_tokens: int) -> str:
    return f"{mode} K={draft_tokens}" if draft_tokens else mode


def devices(mode: str) -> int:
    """Number of cores that a ``Mode`` or one of ``BASELINES`` is given."""
    return 1 if mode == Mode.PLAIN.value or mode in baselines.MODES else replicas.NUM_REPLICAS


class LocalBench:
    """The running engines, the baselines' processes and the records so far. A context manager."""

    def __init__(self, settings: LocalSettings, max_sessions: int | None = None) -> None:
        """``max_sessions``: maximum sessions of any run (default: of ``settings``)."""
        self.settings = settings
        self.records: list[RequestRecord] = []
        self.timelines: list[dict[str, Any]] = []
        """First request of each of our methods: its rounds, and steps as (start, seconds, width) since it began."""
        self.shared: cores.SharedTargets | None = None
        """Targets whose products several cores share, if any are measured."""
        self._peers: dict[Start, PeerProcess] = {}
        self._max_sessions = max_sessions or settings.sessions
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            settings = self.settings
            steps = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-")))
            self._target_log, self._draft_log = steps / "target", steps / "draft"
            drafting = Flags(settings.drafter, settings.heads)
            run: dict[str, Any] = {"dtype": settings.dtype, "compile": settings.compile}
            target = TargetModel(path=settings.target, max_sessions=self._max_sessions, **run)
            config = LocalConfig(
                target=target.model_copy(update={"heads": drafting.head_options()}),
                draft=drafting.draft_options(settings.draft, settings.tree_step_tokens, run, settings.draft_device),
                worker=settings.worker,
                generation_config="none",
            )
            draft_setup = config.draft_setup()
            draft_factory = None
            if draft_setup is not None:
                draft_factory = WatchedFactory(draft_setup, self._draft_log, timed_draft)
            self._pipeline = stack.enter_context(
                LocalPipeline(
                    config,
                    target_factory=WatchedFactory(config.target_setup(), self._target_log, timed_target),
                    draft_factory=draft_factory,
                )
            )
            if any(mode in replicas.MODES for mode in settings.baselines):
                self._replicas = stack.enter_context(Replicas(config.model_copy(update={"target": target})))
            if any(mode in baselines.MODES for mode in settings.baselines):
                available = available_cores()
                draft = settings.draft if "assisted" in settings.baselines else None
                core = available[0] if len(available) >= 2 else None
                self._generate = stack.enter_context(GenerateProcess(settings.target, draft, settings.dtype, core))
            if settings.cpu_threads:
                self.shared = stack.enter_context(cores.SharedTargets(settings))
            for start, peer in {self._start(m, m.peer): m.peer for m in methods(settings) if m.peer}.items():
                self._peers[start] = stack.enter_context(PeerProcess(peer.python, start))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def prompts(self) -> list[Prompt]:
        """Returns the prompts of the run.

        Raises:
            ConfigError: they do not fill whole units, or cannot be read.
        """
        settings, tokenizer = self.settings, self._pipeline.tokenizer
        prompts = choose(tokenizer, settings.prompts_file, settings.num_prompts, settings.task_groups, settings.seed)
        for group in dict.fromkeys(p.category for p in prompts) if settings.task_groups else ("",):
            count = sum(p.category == group for p in prompts) if settings.task_groups else len(prompts)
            if count % settings.sessions:
                of_group = f" of the group {group}" if group else ""
                raise ConfigError(
                    f"{count} prompts{of_group} cannot be run {settings.sessions} at once: a multiple is needed"
                )
        return prompts

    def run(self, settings: LocalSettings | None = None) -> list[RequestRecord]:
        """Warms up, measures, and returns a record per request. ``settings``: other loads, methods or prompts for the
        same engines.

        Raises:
            ConfigError: the prompts cannot be read.
            EngineError: an engine failed.
        """
        self.settings = settings = settings or self.settings
        self.records, self.timelines = [], []
        listed, prompts = methods(settings), self.prompts()
        for method in listed:
            self._run_unit(method, prompts[: settings.sessions], 0.0, 0, -1, _WARM_UP_TOKENS)
        units = [prompts[i : i + settings.sessions] for i in range(0, len(prompts), settings.sessions)]
        for repeat in range(settings.repeats):
            for unit, chosen in enumerate(units):
                for temperature in settings.temperatures:
                    turn = (repeat + unit) % len(listed)
                    for method in [*listed[turn:], *listed[:turn]]:
                        self.records += self._run_unit(method, chosen, temperature, unit, repeat, settings.max_tokens)
        order = {method.name: i for i, method in enumerate(listed)}
        self.records = list(_with_identity(self.records, settings))
        self.records.sort(key=lambda r: (r.temperature, order[r.method], r.repeat, r.unit))
        return self.records

    def _run_unit(
        self, method: Method, prompts: Sequence[Prompt], temperature: float, unit: int, repeat: int, max_tokens: int
    ) -> list[RequestRecord]:
        own = method.mode in _MODES
        run = self._run_pipelines
        if method.mode in baselines.MODES:
            run = self._run_transformers
        elif method.peer is not None:
            run = self._run_peer
        limits = [max_tokens if repeat < 0 else p.max_tokens or max_tokens for p in prompts]
        blank = RequestRecord(
            method.name,
            method.mode,
            method.draft_tokens,
            temperature,
            unit,
            repeat,
            "",
            0,
            (),
            0.0,
            0.0,
            (),
            cores=method.cores,
            engine=method.engine,
        )
        started = time.perf_counter()
        replies = run(method, prompts, limits, temperature, unit)
        begin = started + min(r.prefill_s for r in replies)
        end = started + max(r.prefill_s + r.decode_s for r in replies)
        expected = max(len(r.rounds) for r in replies) - 1 if own else 0
        target = _between(read_steps(self._target_log), begin, end)
        while len(target) < expected and time.perf_counter() < end + _LOG_TIMEOUT_S:  # written after the outcome
            time.sleep(1e-3)
            target = _between(read_steps(self._target_log), begin, end)
        draft = _between(read_steps(self._draft_log), begin, end)
        for log in (self._target_log, self._draft_log):
            if log.exists():
                os.truncate(log, 0)  # the engines append
        blank = replace(blank, target_steps=_widths(target), draft_steps=_widths(draft), ranks=_ranks(target))
        records = [reply.to_record(blank, prompt) for prompt, reply in zip(prompts, replies, strict=True)]
        if own and unit == repeat == 0 and len(prompts) == 1:
            self.timelines.append(_timeline(records[0], target, draft, started))
        return records

    def _run_pipelines(
        self, method: Method, prompts: Sequence[Prompt], limits: Sequence[int], temperature: float, unit: int
    ) -> list[Reply]:
        if method.shared is not None:
            mode = cores.WAYS[method.shared][0]
        else:
            mode = Mode.OVERLAPPED if method.chooses else replicas.MODES.get(method.mode) or Mode(method.mode)
        params = speculation(mode, method.draft_tokens, self.settings.acceptance)
        first_seed = self._seed(unit * len(prompts))
        jobs = [
            Job(prompt, SamplingParams(max_tokens=limit, temperature=temperature, ignore_eos=True, seed=first_seed + i))
            for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
        ]
        if method.shared is not None or method.chooses:
            assert self.shared is not None, "entered for them"
            return self.shared.choose(jobs, params) if method.chooses else self.shared.run(method.cores, jobs, params)
        if method.mode in replicas.MODES:
            return self._replicas.run(jobs, params)
        return run_jobs(self._pipeline, jobs, params)

    def _run_transformers(
        self, method: Method, prompts: Sequence[Prompt], limits: Sequence[int], temperature: float, unit: int
    ) -> list[Reply]:
        token_ids = tuple(p.token_ids for p in prompts)
        request = GenerateRequest(method.mode, token_ids, tuple(limits), temperature, self._seed(unit))
        return self._generate.generate(request)

    def _run_peer(
        self, method: Method, prompts: Sequence[Prompt], limits: Sequence[int], temperature: float, unit: int
    ) -> list[Reply]:
        assert method.peer is not None, "only for such methods"
        token_ids = tuple(p.token_ids for p in prompts)
        asked = Unit(token_ids, tuple(limits), temperature, self._seed(unit * len(prompts)), method.draft_tokens)
        return self._peers[self._start(method, method.peer)].generate(asked)

    def _start(self, method: Method, peer: Peer) -> Start:
        """The process that serves a method of an engine."""
        settings, where = self.settings, available_cores()[: method.cores]
        models = settings.target, settings.draft
        return start_of(peer, models, method.draft_tokens, where, settings.dtype, self._max_sessions)

    def _seed(self, number: int) -> int:
        return self.settings.seed * 100_003 + number


def _between(steps: Sequence[StepRecord], begin: float, end: float) -> list[StepRecord]:
    return [s for s in steps if begin <= s.started_s + s.duration_s / 2 <= end]


def _widths(steps: Sequence[StepRecord]) -> tuple[tuple[int, float], ...]:
    return tuple((s.width, s.duration_s) for s in steps)


def _ranks(steps: Sequence[StepRecord]) -> tuple[tuple[int, int], ...]:
    totals = [sum(counts) for counts in zip(*(s.ranks for s in steps), strict=True)]
    return tuple(zip(totals[: len(totals) // 2], totals[len(totals) // 2 :], strict=True))


def _timeline(
    record: RequestRecord, target: Sequence[StepRecord], draft: Sequence[StepRecord], began: float
) -> dict[str, Any]:
    def steps(listed: Sequence[StepRecord]) -> list[tuple[float, float, int]]:
        return [(round(s.started_s - began, 6), round(s.duration_s, 6), s.width) for s in listed]

    return {
        "method": record.method,
        "temperature": record.temperature,
        "prompt": record.prompt,
        "rounds": [asdict(r) for r in record.rounds],
        "target": steps(target),
        "draft": steps(draft),
    }


def _with_identity(records: Sequence[RequestRecord], settings: LocalSettings) -> Iterator[RequestRecord]:
    """Compares each request with plain decoding where the same tokens are claimed: greedy, or coupled."""
    plain = {(r.temperature, r.unit, r.prompt): r.token_ids for r in records if r.mode == "plain"}
    for record in records:
        claimed = record.temperature == 0 or (not record.engine and settings.acceptance is Acceptance.COUPLED)
        theirs = plain.get((record.temperature, record.unit, record.prompt))
        yield replace(record, identical=record.token_ids == theirs if claimed and theirs is not None else None)


def differs(records: Sequence[RequestRecord]) -> bool:
    """True if any text of ours differs that is claimed to be plain decoding's."""
    return any(record.identical is False for record in records if not record.engine)
