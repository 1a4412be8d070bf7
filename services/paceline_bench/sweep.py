"""``paceline bench sweep``: the run whose report is committed. Every part writes a JSON file of its own at once.

    light      the pair as it is: every mode and baseline at each load
    heavy      the same target with a draft that costs a fifth of it, at one session
    groups     task groups of the held-out text, the pair as it is, at one session
    service    a real service against the one-process pipeline: closed and open loads

A part that has ended stays on disk whatever happens to the next; ``paceline bench report`` renders what there is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.config import DType
from paceline.types import Mode
from paceline_bench import documents, local, page, replicas, sections, serve, serve_report
from paceline_bench.machine import measure_floor
from paceline_bench.output import write_json
from paceline_bench.report import as_json, model_facts, render
from paceline_bench.tasks import GROUPS
from paceline_bench.units import differing

PARTS = ("light", "heavy", "groups", "service")
_ALONE, _SERIAL, _SERIAL_SESSIONS = ("continuous",), ("assisted", "lookup"), 4
"""Baselines that are left out: at one session those that are for several, and above so many sessions those that take
one request after the other, whose tokens/s are the same as with fewer."""
_KS, _HEAVY_KS, _OVERLAPPED_KS = (3, 4, 6), (2, 3, 4), (4, 8)


@dataclass(frozen=True, slots=True)
class Settings:
    """Of the whole run."""

    target: str
    draft: str
    grow_target: int | None
    grow_draft: int | None
    """Of the heavy draft; None: there is none."""
    dtype: DType = "bfloat16"
    compile: bool = True
    parts: tuple[str, ...] = PARTS
    sessions: tuple[int, ...] = (1, 4, 16)
    rates: tuple[float, ...] = (1.0, 2.0)
    temperatures: tuple[float, ...] = (0.0, 0.6, 1.0)
    prompts: int = 4
    max_tokens: int = 64
    repeats: int = 1
    seed: int = 0


class _Sweep:
    def __init__(self, settings: Settings, out: Path) -> None:
        self.settings, self.out = settings, out
        self.files: list[Path] = []
        self.differs = False
        self._began = time.monotonic()

    def light(self) -> None:
        """Every method at each load."""
        s = self.settings
        every = self._local(baselines=local.BASELINES)
        loads = [
            replace(
                every, sessions=n, num_prompts=max(s.prompts, n) // n * n,
                baselines=_without(_ALONE if n == 1 else _SERIAL if n > _SERIAL_SESSIONS else ()),
                temperatures=s.temperatures if n == min(s.sessions) else _ends(s.temperatures),
            )
            for n in s.sessions
        ]  # fmt: skip
        self._measure("light", every, loads)

    def heavy(self) -> None:
        """A draft of a fifth, at one session."""
        s = self.settings
        given = self._local(
            grow_draft=s.grow_draft, baselines=("colocated",), sequential_draft_tokens=_HEAVY_KS,
            num_prompts=s.prompts, temperatures=_ends(s.temperatures),
        )  # fmt: skip
        self._measure("heavy", given, [given])

    def groups(self) -> None:
        """Task groups at one session, greedy."""
        given = self._local(
            baselines=("lookup",), sequential_draft_tokens=(4,), draft_tokens=(8,), task_groups=GROUPS,
            num_prompts=max(1, self.settings.prompts // 2), temperatures=self.settings.temperatures[:1],
        )  # fmt: skip
        self._measure("groups", given, [given])

    def service(self) -> None:
        """A service, closed and open loads, at the lowest temperature."""
        s = self.settings
        given = serve.Settings(
            target=s.target, draft=s.draft, grow_target=s.grow_target, num_prompts=2 * s.prompts,
            max_tokens=s.max_tokens, temperatures=s.temperatures[:1], sessions=s.sessions, rates=s.rates,
            repeats=s.repeats, seed=s.seed, dtype=s.dtype, compile=s.compile,
        )  # fmt: skip
        settings = serve.grown_settings(given)
        facts = {"target": model_facts(settings.target), "draft": model_facts(settings.draft)}
        outcome = serve.measure(settings)
        self.differs |= bool(differing(outcome.units))
        self._keep("service", serve_report.as_json(serve.public(given, facts), facts, outcome, "service"))
        print(serve_report.render(facts, settings, outcome), flush=True)

    def _local(self, **changes: Any) -> local.Settings:
        s = self.settings
        given = local.Settings(
            target=s.target, draft=s.draft, grow_target=s.grow_target, max_tokens=s.max_tokens,
            repeats=s.repeats, draft_tokens=_OVERLAPPED_KS, sequential_draft_tokens=_KS, seed=s.seed,
            dtype=s.dtype, compile=s.compile,
        )  # fmt: skip
        return replace(given, **changes)

    def _measure(self, label: str, given: local.Settings, loads: Sequence[local.Settings]) -> None:
        """One pair of engines for all ``loads``; a file for each."""
        settings = local.with_grown_models(given)
        facts = {"target": model_facts(settings.target), "draft": model_facts(settings.draft)}
        floor = measure_floor(settings.target, settings.draft, settings.dtype)
        with local.Bench(settings, max(load.sessions for load in loads)) as bench:
            for load in loads:
                self.say(f"{label}: {load.sessions} at once, {len(local.methods(load))} methods")
                records = bench.run(replace(load, target=settings.target, draft=settings.draft))
                own = {*(mode.value for mode in Mode), *replicas.MODES}
                self.differs |= any(r.identical is False for r in records if r.mode in own)
                named = asdict(load) | {role: fact.path for role, fact in facts.items()}
                name = f"{label}-{load.sessions}" if len(loads) > 1 else label
                data = as_json(named, facts, records, floor=floor, timelines=bench.timelines, label=label)
                self._keep(name, data)
                title = f"{label}: {load.sessions} at once, {load.max_tokens} tokens each"
                print(render(facts, load.dtype, records, title, floor), end="\n\n", flush=True)

    def _keep(self, name: str, data: dict[str, Any]) -> None:
        file = self.out / f"{name}.json"
        write_json(file, data)
        self.files.append(file)
        self.say(f"{file} is written")

    def say(self, text: str) -> None:
        """With the time since the beginning."""
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        serve.say(f"[{minutes:2}:{seconds:02}] {text}")


def run(settings: Settings, out: Path, title: str) -> int:
    """Measures, writes and renders. Returns 1 if a text differs that is claimed to be plain decoding's.

    Raises ConfigError or EngineError; what was measured before stays in ``out``.
    """
    out.mkdir(parents=True, exist_ok=True)
    sweep = _Sweep(settings, out)
    makers = {"light": sweep.light, "heavy": sweep.heavy, "groups": sweep.groups, "service": sweep.service}
    for part in PARTS:
        if part in settings.parts and (part != "heavy" or settings.grow_draft is not None):
            makers[part]()
    for file in page.write(out, title, sections.all_sections(documents.read_runs(sweep.files))):
        sweep.say(f"{file} is written")
    return int(sweep.differs)


def _without(left_out: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in local.BASELINES if name not in left_out)


def _ends(temperatures: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(dict.fromkeys((temperatures[0], temperatures[-1])))
