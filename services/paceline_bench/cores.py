"""A target whose products several cores share, with the draft model in its process: ``--cpu-threads``.

    1 core      target and draft     plain, co-located
    N cores     the same             plain, co-located

The pipelines stand side by side and take turns unit by unit; one that is not asked sleeps. What ``paceline plan`` takes
of each is what its controllers have learned when it ends: the steps of the target by tokens, and the depths of the
draft, whose weights the target's push out of the caches here as they will there.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from pydantic import ValidationError

from paceline.cli.table import table
from paceline.config import HeadOptions, LocalConfig, TargetModel
from paceline.errors import ConfigError
from paceline.errors.refusals import explain
from paceline.local import LocalPipeline
from paceline.plan.layouts import Drafting
from paceline.preflight.device import why_not_shared
from paceline.types import Mode, SamplingParams
from paceline_bench.jobs import Job, Reply, run_jobs, speculation
from paceline_bench.prompts import Prompt
from paceline_bench.settings import LocalSettings
from paceline_bench.steps import WatchedFactory, learning_target

_K = 4
_WARM_UP_TOKENS = 24
_WAYS = {Drafting.PLAIN: (Mode.PLAIN, 0), Drafting.COLOCATED: (Mode.OVERLAPPED, _K)}
"""Mode and K of the requests."""


@dataclass(frozen=True, slots=True)
class CoresRecord:
    """What was measured of a target with so many threads."""

    cpu_threads: int
    tokens_per_s: Mapping[Drafting, Mapping[float, float]]
    """Of plain and of co-located decoding, by temperature."""
    target_s: Sequence[tuple[int, float]]
    """(tokens, seconds) of a step."""
    draft_s: Sequence[tuple[int, float]]
    """(leaves, seconds) of a depth of the draft."""
    gap_s: float
    """Seconds between two steps of plain decoding; 0 at several sessions."""


def configs(settings: LocalSettings) -> dict[int, LocalConfig]:
    """The pipelines of a run by their threads: 1, and those of ``--cpu-threads``.

    Raises:
        ConfigError: threads of this machine cannot share the products of such a target.
    """
    found = {}
    head = {"method": "draft_model", "model": settings.draft, "num_speculative_tokens": _K}
    for threads in (1, *settings.cpu_threads):
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


def measure(settings: LocalSettings, prompts: Sequence[Prompt]) -> list[CoresRecord]:
    """Runs the prompts through every pipeline, plain and co-located.

    Raises:
        ConfigError: as ``configs``.
        EngineError: an engine failed.
    """
    known = configs(settings)
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        files = {threads: Path(folder) / str(threads) for threads in known}
        spent = {threads: _Spent() for threads in known}
        with contextlib.ExitStack() as stack:
            pipelines = {}
            for threads, config in known.items():
                factory = WatchedFactory(config.target_setup(), files[threads], learning_target)
                pipelines[threads] = stack.enter_context(LocalPipeline(config, target_factory=factory))
            for unit, temperature, chosen in _units(settings, prompts):
                for threads, pipeline in pipelines.items():
                    for way, (mode, k) in _WAYS.items():
                        params = speculation(mode, k, settings.acceptance, settings.growth)
                        limit = _WARM_UP_TOKENS if unit < 0 else settings.max_tokens
                        jobs = [_job(prompt, temperature, limit, settings.seed + i) for i, prompt in enumerate(chosen)]
                        replies = run_jobs(pipeline, jobs, params)
                        if unit >= 0:
                            spent[threads].add(way, temperature, replies)
        return [_record(threads, spent[threads], files[threads], settings.sessions) for threads in known]


def _units(settings: LocalSettings, prompts: Sequence[Prompt]) -> Iterator[tuple[int, float, Sequence[Prompt]]]:
    """(number, temperature, prompts) of what is run at once; number -1 warms up."""
    units = [prompts[at : at + settings.sessions] for at in range(0, len(prompts), settings.sessions)]
    yield -1, 0.0, units[0]
    for _ in range(settings.repeats):
        for number, unit in enumerate(units):
            for temperature in settings.temperatures:
                yield number, temperature, unit


def _job(prompt: Prompt, temperature: float, limit: int, seed: int) -> Job:
    return Job(prompt, SamplingParams(max_tokens=limit, temperature=temperature, ignore_eos=True, seed=seed))


class _Spent:
    """Decoded tokens and the seconds they took, by way and temperature."""

    def __init__(self) -> None:
        self._found: dict[Drafting, dict[float, tuple[int, float]]] = {way: {} for way in _WAYS}

    def add(self, way: Drafting, temperature: float, replies: Sequence[Reply]) -> None:
        """Takes the replies of a unit."""
        tokens, seconds = self._found[way].get(temperature, (0, 0.0))
        tokens += sum(len(reply.token_ids) - 1 for reply in replies)
        begin, end = min(r.prefill_s for r in replies), max(r.prefill_s + r.decode_s for r in replies)
        self._found[way][temperature] = tokens, seconds + end - begin

    def rates(self) -> dict[Drafting, dict[float, float]]:
        """Tokens per second."""
        return {way: {at: n / seconds for at, (n, seconds) in of.items()} for way, of in self._found.items()}


def _record(threads: int, spent: _Spent, file: Path, sessions: int) -> CoresRecord:
    learned, rates = json.loads(file.read_text(encoding="utf-8")), spent.rates()
    step_s = dict(map(tuple, learned["target_s"]))[1]
    gap_s = max(0.0, mean(1.0 / rate for rate in rates[Drafting.PLAIN].values()) - step_s) if sessions == 1 else 0.0
    return CoresRecord(threads, rates, learned["target_s"], learned["draft_s"], gap_s)


def text(records: Sequence[CoresRecord]) -> str:
    """The table that is printed."""
    header = ("cores of a target", "temperature", "plain", "co-located", "step of 1", "of 5", "a draft's depth")
    rows: list[tuple[str, ...]] = [header]
    for record in records:
        steps, depth_s = dict(record.target_s), record.draft_s[0][1]
        rows += [
            (
                str(record.cpu_threads),
                f"{temperature:g}",
                *(f"{record.tokens_per_s[way][temperature]:.1f}" for way in _WAYS),
                *(f"{1e3 * seconds:.2f} ms" for seconds in (steps[1], steps[1 + _K], depth_s)),
            )
            for temperature in record.tokens_per_s[Drafting.PLAIN]
        ]
    return "\n".join(["tokens/s by the cores that share a target's products:", *table(rows)])


def as_json(record: CoresRecord) -> dict[str, Any]:
    """What ``paceline plan --from`` reads."""
    rates = [
        {"temperature": at, "k": _K} | {way.value: record.tokens_per_s[way][at] for way in _WAYS}
        for at in record.tokens_per_s[Drafting.PLAIN]
    ]
    return {
        "cpu_threads": record.cpu_threads,
        "target_s": record.target_s,
        "draft_s": record.draft_s,
        "gap_s": record.gap_s,
        "tokens_per_s": rates,
    }
