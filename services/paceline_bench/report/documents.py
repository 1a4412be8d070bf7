"""JSON files of ``paceline bench``: written by every kind of run, read again by ``report``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.errors.files import MOST_TEXT_BYTES, read_text
from paceline_bench.arithmetic import one_token_steps
from paceline_bench.machine import CLIENT, environment
from paceline_bench.models import ModelLabel
from paceline_bench.records import Outcome, RequestRecord
from paceline_bench.report.summaries import Summary, cells_of, summarize
from paceline_bench.settings import SERVICE_ONLY


def of_local(
    settings: Mapping[str, Any],
    labels: Mapping[str, ModelLabel],
    records: Sequence[RequestRecord],
    *,
    floor: Mapping[str, Any] | None = None,
    timelines: Sequence[Mapping[str, Any]] = (),
    label: str = "",
) -> dict[str, Any]:
    """Document of ``paceline bench local``: summaries and every request."""
    target_s, draft_s = one_token_steps(records)
    return {
        **_head(settings, labels, label),
        "floor": dict(floor or {}),
        "one_token_step_s": {"target": target_s, "draft": draft_s},
        "summaries": [asdict(summary) for summary in summarize(records)],
        "timelines": list(timelines),
        "requests": [record.to_json() for record in records],
    }


def of_service(
    settings: Mapping[str, Any], labels: Mapping[str, ModelLabel], outcome: Outcome, label: str = ""
) -> dict[str, Any]:
    """Returns the document of ``paceline bench serve``: services, every request, and cells: ours in closed loads, and
    separately the ones of open loads and endpoints."""
    cells = cells_of(outcome.units, settings.get("goodput"))
    head = _head(settings, labels, label)
    if not settings.get("places", True):  # an endpoint alone, of which these say nothing
        head["environment"] = {name: value for name, value in head["environment"].items() if name in CLIENT}
        head["settings"] = {name: value for name, value in settings.items() if name not in SERVICE_ONLY}
    return {
        **head,
        "services": [asdict(facts) for facts in outcome.services],
        "cells": [asdict(cell) for cell in cells if not cell.apart],
        "other_cells": [asdict(cell) for cell in cells if cell.apart],
        "units": [unit.to_json() for unit in outcome.units],
    }


def _head(settings: Mapping[str, Any], labels: Mapping[str, ModelLabel], label: str) -> dict[str, Any]:
    models = {role: model.to_json() for role, model in labels.items()}
    return {"label": label, "environment": environment(), "settings": dict(settings), "models": models}


def write(file: Path, document: Mapping[str, Any]) -> None:
    """Writes a document as one JSON object."""
    file.write_text(json.dumps(document, default=str) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class LocalRun:
    """A run of ``paceline bench local``, or a part of a sweep."""

    label: str
    data: Mapping[str, Any]
    records: Sequence[RequestRecord]
    summaries: Sequence[Summary]

    @property
    def sessions(self) -> int:
        """Number of concurrent requests."""
        return int(self.data["settings"]["sessions"])

    @property
    def grouped(self) -> bool:
        """True if its prompts are of task groups."""
        return any(r.category for r in self.records)


@dataclass(frozen=True, slots=True)
class ServeRun:
    """A run of ``paceline bench serve`` or ``paceline bench endpoint``."""

    label: str
    data: Mapping[str, Any]

    @property
    def foreign(self) -> bool:
        """True if only an endpoint was measured, and nothing of ours."""
        return not self.data["settings"].get("places", True)

    @property
    def cells(self) -> list[Mapping[str, Any]]:
        """All cells: ours in closed loads first, then open loads and endpoints."""
        return [*self.data["cells"], *self.data.get("other_cells", ())]


Run = LocalRun | ServeRun


def read_run(path: Path) -> Run:
    """Reads the document of a run.

    Raises:
        ConfigError: the file cannot be read or is not such a document; the message names it.
    """
    try:
        data = json.loads(read_text(path, repr(str(path)), MOST_TEXT_BYTES))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{str(path)!r} is not valid JSON: {error}") from error
    try:
        return run_of(data, path.stem)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{str(path)!r} is not what paceline bench --json writes: {error!r}") from error


def run_of(data: Mapping[str, Any], name: str = "") -> Run:
    """The run of a document; ``name``: of its file."""
    label = data.get("label") or name
    data["environment"], data["models"], data["settings"]
    if "cells" in data:
        for cell in data["cells"]:
            cell["configuration"], cell["tokens_per_s"], cell["sessions"]
        return ServeRun(label, data)
    records = [RequestRecord.from_json(request) for request in data["requests"]]
    run = LocalRun(label, data, records, summarize(records))
    if not run.records or run.sessions < 1:
        raise ValueError("it holds no requests")
    return run
