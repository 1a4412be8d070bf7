"""Targets whose products several cores share, with the draft model in their process: ``--cpu-threads``.

    1 core      target and draft     plain, co-located
    N cores     the same             plain, co-located
                a target, and a draft with ``placement`` auto, which choose for themselves

The pipelines stand side by side, and one that is not asked sleeps. What ``paceline advise`` takes of each is what its
controllers have learned when it ends: the steps of the target by tokens, and the depths of the draft, whose weights the
target's push out of the caches here as they will there.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Self

from pydantic import ValidationError

from paceline.cli.table import table
from paceline.config import DraftModel, HeadOptions, LocalConfig, TargetModel
from paceline.errors import ConfigError
from paceline.errors.refusals import explain
from paceline.local import LocalPipeline
from paceline.plan.measured import Drafting
from paceline.types import Mode, SpeculationParams
from paceline_bench.jobs import Job, Reply, run_jobs
from paceline_bench.records import RequestRecord
from paceline_bench.report.summaries import summarize
from paceline_bench.settings import LocalSettings
from paceline_bench.steps import WatchedFactory, learning_target, timed_draft, timed_target

_K = 4
WAYS = {Drafting.PLAIN: (Mode.PLAIN, 0), Drafting.COLOCATED: (Mode.OVERLAPPED, _K)}
"""Mode and K of the requests by which each is measured."""


@dataclass(frozen=True, slots=True)
class CoresRecord:
    """Measurements of a target with ``cpu_threads`` threads."""

    cpu_threads: int
    tokens_per_s: Mapping[Drafting, Mapping[float, float]]
    """Rates of plain and of co-located decoding, keyed by temperature."""
    target_s: Sequence[tuple[int, float]]
    """(tokens, seconds) of a step."""
    draft_s: Sequence[tuple[int, float]]
    """(leaves, seconds) of a depth of the draft."""
    gap_s: float
    """Seconds between two steps of plain decoding; 0 at several sessions."""


CHOSEN = "placement auto"
"""Name of the method that chooses for itself."""


def chosen(settings: LocalSettings) -> LocalConfig:
    """A target with a core of its own and a draft with the others, which choose the draft's place themselves."""
    run: dict[str, Any] = {"dtype": settings.dtype, "compile": settings.compile}
    target = TargetModel(path=settings.target, max_sessions=settings.sessions, **run)
    threads = max(1, max(settings.thread_counts) - 1)
    draft = DraftModel(path=settings.draft, placement="auto", cpu_threads=threads, **run)
    return LocalConfig(target=target, draft=draft, worker=settings.worker, generation_config="none")


def configs(settings: LocalSettings) -> dict[int, LocalConfig]:
    """Returns the pipelines of a run by their threads: 1, and the numbers of ``--cpu-threads``.

    Raises:
        ConfigError: threads of this machine cannot share the products of such a target.
    """
    from paceline.preflight.device import why_not_shared  # torch is for the kinds that run a model

    found = {}
    head = {"method": "draft_model", "model": settings.draft, "num_speculative_tokens": _K}
    for threads in settings.thread_counts or (1,):
        try:
            target = TargetModel(
                path=settings.target,
                max_sessions=settings.sessions,
                dtype=settings.dtype,
                compile=settings.compile,
                cpu_threads=threads,
                heads=[HeadOptions.model_validate(head)],
            )
        except ValidationError as error:
            raise ConfigError(f"--cpu-threads holds {threads}: {explain(error, TargetModel)}") from error
        if threads > 1 and (reason := why_not_shared(target)) is not None:
            raise ConfigError(f"--cpu-threads holds {threads}: {reason}")
        found[threads] = LocalConfig(target=target, worker=settings.worker, generation_config="none")
    return found


def name_of(what: str, threads: int) -> str:
    """Name of a method that ``threads`` threads share."""
    return f"{what}, {threads} thread" + "s" * (threads > 1)


class SharedTargets:
    """The pipelines of a run. A context manager."""

    def __init__(self, settings: LocalSettings) -> None:
        """Raises ConfigError: as ``configs``."""
        self._configs, self._chosen = configs(settings), chosen(settings)
        self.learned: dict[int, dict[str, Any]] = {}
        """The knowledge of the controllers of each target, by its threads; filled in when the pipelines have ended."""
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._files = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-")))
            stack.callback(self._learn)
            self._pipelines = {}
            for threads, config in self._configs.items():
                factory = WatchedFactory(config.target_setup(), self._files / str(threads), learning_target)
                self._pipelines[threads] = stack.enter_context(LocalPipeline(config, target_factory=factory))
            nowhere, draft_setup = Path(os.devnull), self._chosen.draft_setup()
            assert draft_setup is not None
            self._choosing = stack.enter_context(
                LocalPipeline(  # watched for their empty prefix caches
                    self._chosen,
                    target_factory=WatchedFactory(self._chosen.target_setup(), nowhere, timed_target),
                    draft_factory=WatchedFactory(draft_setup, nowhere, timed_draft),
                )
            )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def run(self, threads: int, jobs: Sequence[Job], params: SpeculationParams) -> list[Reply]:
        """Runs all jobs concurrently. Raises as ``run_jobs``."""
        return run_jobs(self._pipelines[threads], jobs, params)

    def choose(self, jobs: Sequence[Job], params: SpeculationParams) -> list[Reply]:
        """``run`` by the target and the draft that choose for themselves."""
        return run_jobs(self._choosing, jobs, params)

    def _learn(self) -> None:
        for file in self._files.iterdir():
            self.learned[int(file.name)] = json.loads(file.read_text(encoding="utf-8"))


def records(settings: LocalSettings, measured: Sequence[RequestRecord], shared: SharedTargets) -> list[CoresRecord]:
    """The measurements of each target of a run that has ended."""
    return [_record(settings, measured, threads, learned) for threads, learned in sorted(shared.learned.items())]


def _record(
    settings: LocalSettings, measured: Sequence[RequestRecord], threads: int, learned: Mapping[str, Any]
) -> CoresRecord:
    names = {name_of(way.value, threads): way for way in WAYS}
    found: dict[Drafting, dict[float, float]] = {way: {} for way in WAYS}
    for summary in summarize([record for record in measured if record.mode in names]):
        found[names[summary.mode]][summary.temperature] = summary.decode_tokens_per_s
    step_s, plain = dict(map(tuple, learned["target_s"]))[1], found[Drafting.PLAIN].values()
    gap_s = max(0.0, mean(1.0 / rate for rate in plain) - step_s) if settings.sessions == 1 else 0.0
    return CoresRecord(threads, found, learned["target_s"], learned["draft_s"], gap_s)


def text(records: Sequence[CoresRecord]) -> str:
    """The table that is printed."""
    header = ("cores of a target", "temperature", "plain", "co-located", "step of 1", "of 5", "a draft's depth")
    rows: list[tuple[str, ...]] = [header]
    for record in records:
        steps = dict(record.target_s)
        depth = f"{1e3 * record.draft_s[0][1]:.2f} ms" if record.draft_s else "-"  # many sessions may not ask for any
        rows += [
            (
                str(record.cpu_threads),
                f"{temperature:g}",
                *(f"{record.tokens_per_s[way][temperature]:.1f}" for way in WAYS),
                *(f"{1e3 * steps[size]:.2f} ms" for size in (1, 1 + _K)),
                depth,
            )
            for temperature in record.tokens_per_s[Drafting.PLAIN]
        ]
    return "\n".join(["tokens/s by the cores that share a target's products:", *table(rows)])


def as_json(record: CoresRecord) -> dict[str, Any]:
    """The record that ``paceline plan --from`` reads."""
    rates = [
        {"temperature": at, "k": _K} | {way.value: record.tokens_per_s[way][at] for way in WAYS}
        for at in record.tokens_per_s[Drafting.PLAIN]
    ]
    return {
        "cpu_threads": record.cpu_threads,
        "target_s": record.target_s,
        "draft_s": record.draft_s,
        "gap_s": record.gap_s,
        "tokens_per_s": rates,
    }
