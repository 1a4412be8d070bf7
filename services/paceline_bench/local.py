"""``paceline bench local``: the modes and their baselines on the same prompts, in one run.

    pair of engines     core 0: target, core 1: draft       plain, sequential, overlapped
    two replicas        a core each (``replicas.py``)        replicated, colocated
    transformers        core 0 (``baselines.py``)            transformers, assisted, lookup, continuous

One pair of engines serves all modes, since the mode is a property of the request. Methods take turns prompt by
prompt, in an order that rotates, so that a machine that drifts does so for all of them alike.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from paceline.config import DraftModel, DType, LocalConfig, TargetModel, cache_dir
from paceline.errors import ConfigError
from paceline.local import LocalPipeline
from paceline.runtime.workers import available_cores
from paceline.types import Acceptance, Mode, SamplingParams
from paceline_bench import baselines, replicas
from paceline_bench.baselines import GenerateProcess, GenerateRequest
from paceline_bench.prompts import Prompt, choose
from paceline_bench.records import RequestRecord, RoundRecord
from paceline_bench.replicas import Job, Replicas, run_jobs, speculation
from paceline_bench.steps import StepRecord, TimedDraftFactory, TimedTargetFactory, read_steps

_WARM_UP_TOKENS = 24
_LOG_TIMEOUT_S = 0.5
FIFTH = -1
"""A draft of a fifth of the target's parameters: its one-token step costs about a fifth of the target's."""
BASELINES = (*baselines.MODES, *replicas.MODES)


@dataclass(frozen=True, slots=True)
class Settings:
    """One run of the benchmark."""

    target: str
    draft: str
    grow_target: int | None = None
    """Parameters."""
    grow_draft: int | None = None
    """Parameters, or FIFTH."""
    modes: tuple[Mode, ...] = tuple(Mode)
    baselines: tuple[str, ...] = ("transformers", "assisted")
    num_prompts: int | None = None
    prompts_file: Path | None = None
    max_tokens: int = 128
    temperatures: tuple[float, ...] = (0.0, 1.0)
    repeats: int = 1
    draft_tokens: tuple[int, ...] = (8,)
    sequential_draft_tokens: tuple[int, ...] = (2, 3, 4, 6)
    sessions: int = 1
    task_groups: tuple[str, ...] = ()
    """``num_prompts`` of each; none: of whatever text comes."""
    seed: int = 0
    dtype: DType = "bfloat16"
    acceptance: Acceptance = Acceptance.COUPLED
    growth: str = "best_first"
    tree_step_tokens: int | None = None
    compile: bool = True
    worker: Literal["process", "thread"] = "process"


@dataclass(frozen=True, slots=True)
class Method:
    """One way to decode."""

    name: str
    mode: str
    """A ``Mode``, or one of BASELINES."""
    draft_tokens: int = 0


def methods(settings: Settings) -> list[Method]:
    """What is compared, in the order of the report; sequential and overlapped once for each K."""
    listed = []
    for mode in settings.modes:
        if mode is Mode.PLAIN:
            listed.append(Method("plain", mode.value))
        else:
            ks = settings.draft_tokens if mode is Mode.OVERLAPPED else settings.sequential_draft_tokens
            listed += [Method(f"{mode.value} K={k}", mode.value, k) for k in ks]
    for name in settings.baselines:
        if name == "colocated":
            listed += [Method(f"{name} K={k}", name, k) for k in settings.sequential_draft_tokens]
        else:
            listed.append(Method(baselines.NAMES.get(name, name), name))
    return listed


def devices(mode: str) -> int:
    """Cores that a method is given."""
    return 1 if mode == Mode.PLAIN.value or mode in baselines.MODES else replicas.NUM_REPLICAS


def grown(path: str, size: int, dtype: str) -> str:
    """Directory of ``path`` grown to ``size`` parameters, from the cache or made now. Raises ConfigError."""
    source = Path(path).expanduser()
    if not (source / "config.json").is_file():
        raise ConfigError(f"{path!r} cannot be grown: a directory with a checkpoint is needed")
    digest = hashlib.blake2b(f"1 {size} {dtype}".encode(), digest_size=8)
    for file in sorted([source / "config.json", *source.glob("*.safetensors")]):
        digest.update(file.read_bytes())
    destination = cache_dir() / "grown" / f"{source.name}-{size}-{dtype}-{digest.hexdigest()}"
    if destination.is_dir():
        return str(destination)
    import torch
    from transformers.utils import logging as hf_logging

    from paceline_bench.grow import grow_checkpoint

    hf_logging.disable_progress_bar()
    torch.set_num_threads(1)
    print(f"growing {source.name} to {size / 1e6:.0f} M parameters (once)", file=sys.stderr)
    temporary = destination.with_name(f"{destination.name}.{os.getpid()}")
    try:
        grow_checkpoint(source, temporary, size, getattr(torch, dtype))
        with contextlib.suppress(OSError):  # another process was faster
            temporary.rename(destination)
    except ValueError as error:
        raise ConfigError(f"{source.name}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return str(destination)


def with_grown_models(settings: Settings) -> Settings:
    """The same settings with paths to the grown checkpoints. Raises ConfigError."""
    from paceline_bench.report import model_facts

    kind = "bfloat16" if settings.dtype == "auto" else settings.dtype
    target, draft, size = settings.target, settings.draft, settings.grow_draft
    if settings.grow_target is not None:
        target = grown(target, settings.grow_target, kind)
    if size == FIFTH:
        num_parameters = model_facts(target).num_parameters
        if num_parameters is None:
            raise ConfigError("--grow-draft fifth needs a target that is a directory with a checkpoint")
        size = num_parameters // 5
    if size is not None:
        draft = grown(draft, size, kind)
    return replace(settings, target=target, draft=draft)


class Bench:
    """The running engines, the baselines' processes and the records so far. A context manager."""

    def __init__(self, settings: Settings, max_sessions: int | None = None) -> None:
        """``max_sessions``: of all runs (default: of ``settings``)."""
        self.settings = settings
        self.records: list[RequestRecord] = []
        self.timelines: list[dict[str, Any]] = []
        """Of the first request of each of our methods: rounds, and steps as (start, seconds, width), since it began."""
        self._max_sessions = max_sessions or settings.sessions
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Bench:
        with contextlib.ExitStack() as stack:
            settings = self.settings
            steps = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-")))
            self._target_log, self._draft_log = steps / "target", steps / "draft"
            run: dict[str, Any] = {"dtype": settings.dtype, "compile": settings.compile}
            config = LocalConfig(
                target=TargetModel(path=settings.target, max_sessions=self._max_sessions, **run),
                draft=DraftModel(path=settings.draft, tree_step_tokens=settings.tree_step_tokens, **run),
                worker=settings.worker,
            )
            draft_setup = config.draft_setup()
            assert draft_setup is not None
            self._pipeline = stack.enter_context(
                LocalPipeline(
                    config,
                    target_factory=TimedTargetFactory(config.target_setup(), self._target_log),
                    draft_factory=TimedDraftFactory(draft_setup, self._draft_log),
                )
            )
            if any(mode in replicas.MODES for mode in settings.baselines):
                self._replicas = stack.enter_context(Replicas(config))
            if any(mode in baselines.MODES for mode in settings.baselines):
                cores = available_cores()
                draft = settings.draft if "assisted" in settings.baselines else None
                core = cores[0] if len(cores) >= 2 else None
                self._generate = stack.enter_context(GenerateProcess(settings.target, draft, settings.dtype, core))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def prompts(self) -> list[Prompt]:
        """Prompts of the run, as many as fill whole units. Raises ConfigError."""
        settings, tokenizer = self.settings, self._pipeline.tokenizer
        prompts = choose(tokenizer, settings.prompts_file, settings.num_prompts, settings.task_groups, settings.seed)
        for group in dict.fromkeys(p.category for p in prompts) if settings.task_groups else ("",):
            count = sum(p.category == group for p in prompts) if settings.task_groups else len(prompts)
            if count % settings.sessions:
                raise ConfigError(
                    f"{count} prompts{group and f' of the group {group}'} cannot be run {settings.sessions} at once: a "
                    "multiple of --sessions is needed"
                )
        return prompts

    def run(self, settings: Settings | None = None) -> list[RequestRecord]:
        """Warms up, measures, and returns a record per request. ``settings``: those of the Bench with other loads,
        methods or prompts. Raises ConfigError or EngineError."""
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
        own = method.mode in {mode.value for mode in Mode}
        run = self._run_transformers if method.mode in baselines.MODES else self._run_pipelines
        blank = RequestRecord(
            method.name, method.mode, method.draft_tokens, temperature, unit, repeat, "", 0, (), 0.0, 0.0, ()
        )
        limits = [max_tokens if repeat < 0 else p.max_tokens or max_tokens for p in prompts]
        started = time.perf_counter()
        records = [
            replace(record, prompt=p.source, prompt_tokens=len(p.token_ids), category=p.category)
            for p, record in zip(prompts, run(prompts, blank, limits), strict=True)
        ]
        begin = started + min(r.prefill_s for r in records)
        end = started + max(r.prefill_s + r.decode_s for r in records)
        expected = max(len(r.rounds) for r in records) - 1 if own else 0
        target = _between(read_steps(self._target_log), begin, end)
        while len(target) < expected and time.perf_counter() < end + _LOG_TIMEOUT_S:  # written after the outcome
            time.sleep(1e-3)
            target = _between(read_steps(self._target_log), begin, end)
        draft = _between(read_steps(self._draft_log), begin, end)
        for log in (self._target_log, self._draft_log):
            if log.exists():
                os.truncate(log, 0)  # the engines append
        if own and unit == repeat == 0 and len(prompts) == 1:
            self.timelines.append(_timeline(records[0], target, draft, started))
        return [replace(r, target_steps=_widths(target), draft_steps=_widths(draft)) for r in records]

    def _run_pipelines(
        self, prompts: Sequence[Prompt], blank: RequestRecord, max_tokens: Sequence[int]
    ) -> list[RequestRecord]:
        mode = replicas.MODES.get(blank.mode) or Mode(blank.mode)
        params = speculation(mode, blank.draft_tokens, self.settings.acceptance, self.settings.growth)
        jobs = []
        for i, (prompt, limit) in enumerate(zip(prompts, max_tokens, strict=True)):
            seed = self.settings.seed * 100_003 + blank.unit * len(prompts) + i
            sampling = SamplingParams(max_tokens=limit, temperature=blank.temperature, ignore_eos=True, seed=seed)
            jobs.append(Job(prompt, sampling))
        replies = (
            self._replicas.run(jobs, params) if blank.mode in replicas.MODES else run_jobs(self._pipeline, jobs, params)
        )
        return [
            replace(blank, token_ids=r.token_ids, prefill_s=r.prefill_s, decode_s=r.decode_s, rounds=r.rounds)
            for r in replies
        ]

    def _run_transformers(
        self, prompts: Sequence[Prompt], blank: RequestRecord, max_tokens: Sequence[int]
    ) -> list[RequestRecord]:
        seed = self.settings.seed * 100_003 + blank.unit
        token_ids = tuple(p.token_ids for p in prompts)
        request = GenerateRequest(blank.mode, token_ids, tuple(max_tokens), blank.temperature, seed)
        records = []
        for reply in self._generate.generate(request):
            times = [at - reply.started_s for at in reply.times_s]
            rounds = tuple(RoundRecord(0, 0, size, "", at) for at, size in zip(times, reply.sizes, strict=True))
            records.append(
                replace(
                    blank, token_ids=reply.token_ids, prefill_s=times[0], decode_s=times[-1] - times[0], rounds=rounds
                )
            )
        return records


def _between(steps: Sequence[StepRecord], begin: float, end: float) -> list[StepRecord]:
    return [s for s in steps if begin <= s.started_s + s.duration_s / 2 <= end]


def _widths(steps: Sequence[StepRecord]) -> tuple[tuple[int, float], ...]:
    return tuple((s.width, s.duration_s) for s in steps)


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


def _with_identity(records: Sequence[RequestRecord], settings: Settings) -> Iterator[RequestRecord]:
    """Compares each request with plain decoding where the same tokens are claimed: greedy, or coupled."""
    plain = {(r.temperature, r.unit, r.prompt): r.token_ids for r in records if r.mode == "plain"}
    for record in records:
        own = record.mode in {*(mode.value for mode in Mode), *replicas.MODES}
        claimed = record.temperature == 0 or (own and settings.acceptance is Acceptance.COUPLED)
        theirs = plain.get((record.temperature, record.unit, record.prompt))
        yield replace(record, identical=record.token_ids == theirs if claimed and theirs is not None else None)
