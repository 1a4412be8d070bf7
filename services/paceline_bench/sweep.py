"""``paceline bench sweep``: the run whose report is committed. Every part writes a JSON file of its own when it ends.

    light      the pair as it is: every mode and baseline at each load
    heavy      the same target with a draft that costs a fifth of it, at one session
    groups     task groups of the held-out text, the pair as it is, at one session
    service    a real service against the one-process pipeline: closed and open loads

A part that has ended stays on disk whatever happens to the next; ``paceline bench report`` renders what there is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from paceline.logs import narrate
from paceline_bench import local, serve
from paceline_bench.local import BASELINES, LocalBench
from paceline_bench.machine import measure_floor
from paceline_bench.models import model_labels, with_grown_models
from paceline_bench.records import differing
from paceline_bench.report import documents, page, sections
from paceline_bench.report.text import identity, text_of
from paceline_bench.settings import PARTS, LocalSettings, ServeSettings, SweepSettings
from paceline_bench.tasks import GROUPS

_ALONE, _SERIAL, _SERIAL_SESSIONS = ("continuous",), ("assisted", "lookup"), 4
"""Baselines that are left out: with one session the ones for several; above ``_SERIAL_SESSIONS`` sessions the ones that
run requests in sequence, whose tokens/s do not change."""
_KS, _HEAVY_KS, _OVERLAPPED_KS = (3, 4, 6), (2, 3, 4), (4, 8)


class _Sweep:
    def __init__(self, settings: SweepSettings, out: Path) -> None:
        self.settings, self.out = settings, out
        self.files: list[Path] = []
        self.differs = False
        self._began = time.monotonic()

    def light(self) -> None:
        """Measures every method at each load."""
        s = self.settings
        every = self._local(baselines=BASELINES)
        loads = []
        for n in s.sessions:
            left_out = _ALONE if n == 1 else _SERIAL if n > _SERIAL_SESSIONS else ()
            load = replace(every, sessions=n, num_prompts=max(s.num_prompts, n) // n * n, baselines=_without(left_out))
            loads.append(load if n == min(s.sessions) else replace(load, temperatures=_ends(s.temperatures)))
        self._measure("light", every, loads)

    def heavy(self) -> None:
        """Measures a draft of a fifth of the target's size, at one session."""
        given = self._local(
            grow_draft=self.settings.grow_draft,
            baselines=("colocated",),
            sequential_draft_tokens=_HEAVY_KS,
            temperatures=_ends(self.settings.temperatures),
        )
        self._measure("heavy", given, [given])

    def groups(self) -> None:
        """Measures task groups at one session, at the lowest temperature."""
        given = self._local(
            baselines=("lookup",),
            sequential_draft_tokens=(4,),
            draft_tokens=(8,),
            task_groups=GROUPS,
            num_prompts=max(1, self.settings.num_prompts // 2),
            temperatures=self.settings.temperatures[:1],
        )
        self._measure("groups", given, [given])

    def service(self) -> None:
        """Measures a service at closed and open loads, at the lowest temperature."""
        s = self.settings
        changes = {"grow_draft": None, "num_prompts": 2 * s.num_prompts, "temperatures": s.temperatures[:1]}
        given = ServeSettings(**{**s.common(), **changes}, sessions=s.sessions, rates=s.rates)
        settings = with_grown_models(given)
        labels = model_labels(settings)
        outcome = serve.measure(settings)
        self.differs |= bool(differing(outcome.units))
        names = {role: label.path for role, label in labels.items()}
        document = documents.of_service(given.public(names), labels, outcome, "service")
        self._keep("service", document)
        print(text_of("service", documents.run_of(document)), *identity(outcome.units), sep="\n", flush=True)

    def _local(self, **changes: Any) -> LocalSettings:
        ks = {"draft_tokens": _OVERLAPPED_KS, "sequential_draft_tokens": _KS}
        return LocalSettings(**{**self.settings.common(), "grow_draft": None, **ks, **changes})

    def _measure(self, name: str, given: LocalSettings, loads: Sequence[LocalSettings]) -> None:
        """Measures all ``loads`` with one pair of engines; writes a file for each."""
        settings = with_grown_models(given)
        labels = model_labels(settings)
        floor = measure_floor(settings.target, settings.draft, settings.dtype)
        with LocalBench(settings, max(load.sessions for load in loads)) as bench:
            for load in loads:
                self.say(f"{name}: {load.sessions} at once, {len(local.methods(load))} methods")
                records = bench.run(replace(load, target=settings.target, draft=settings.draft))
                self.differs |= local.differs(records)
                named = asdict(load) | {role: label.path for role, label in labels.items()}
                data = documents.of_local(named, labels, records, floor=floor, timelines=bench.timelines, label=name)
                self._keep(f"{name}-{load.sessions}" if len(loads) > 1 else name, data)
                title = f"{name}: {load.sessions} at once, {load.max_tokens} tokens each"
                print(text_of(title, documents.run_of(data)), end="\n\n", flush=True)

    def _keep(self, name: str, data: dict[str, Any]) -> None:
        file = self.out / f"{name}.json"
        documents.write(file, data)
        self.files.append(file)
        self.say(f"wrote {file}")

    def say(self, text: str) -> None:
        """Prints progress with the time since the beginning."""
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        narrate(f"[{minutes:2}:{seconds:02}] {text}")


def run(settings: SweepSettings, out: Path, title: str) -> int:
    """Measures, writes and renders. Returns 1 if a text differs that is claimed to be plain decoding's.

    Raises:
        ConfigError, EngineError: a part failed; the files of earlier parts stay in ``out``.
    """
    out.mkdir(parents=True, exist_ok=True)
    sweep = _Sweep(settings, out)
    measure = {"light": sweep.light, "heavy": sweep.heavy, "groups": sweep.groups, "service": sweep.service}
    for part in PARTS:
        if part in settings.parts and (part != "heavy" or settings.grow_draft is not None):
            measure[part]()
    for file in page.write(out, title, sections.all_sections([documents.read_run(file) for file in sweep.files])):
        sweep.say(f"wrote {file}")
    return int(sweep.differs)


def _without(left_out: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in BASELINES if name not in left_out)


def _ends(temperatures: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(dict.fromkeys((temperatures[0], temperatures[-1])))
