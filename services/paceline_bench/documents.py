"""JSON files of ``paceline bench`` read again: what ``report`` renders."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline_bench.records import RequestRecord, Summary, summarise


@dataclass(frozen=True, slots=True)
class LocalRun:
    """Of ``paceline bench local``, or a part of a sweep."""

    label: str
    data: Mapping[str, Any]
    records: Sequence[RequestRecord]
    summaries: Sequence[Summary]

    @property
    def sessions(self) -> int:
        """Requests at once."""
        return int(self.data["settings"]["sessions"])

    @property
    def grouped(self) -> bool:
        """Whether its prompts are of task groups."""
        return any(r.category for r in self.records)


@dataclass(frozen=True, slots=True)
class ServeRun:
    """Of ``paceline bench serve`` or ``paceline bench endpoint``."""

    label: str
    data: Mapping[str, Any]

    @property
    def cells(self) -> list[Mapping[str, Any]]:
        """Ours in closed loads first, then open loads and endpoints."""
        return [*self.data["cells"], *self.data.get("other_cells", ())]


Run = LocalRun | ServeRun


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """In the order of ``paths``. Raises ConfigError, naming the file."""
    return [read_run(path) for path in paths]


def read_run(path: Path) -> Run:
    """Raises ConfigError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}") from error
    try:
        return to_run(data, path.stem)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{str(path)!r} is not what paceline bench --json writes: {error!r}") from error


def to_run(data: Mapping[str, Any], name: str) -> Run:
    """``name``: for a run without a label. Raises KeyError, TypeError or ValueError."""
    label = data.get("label") or name
    data["environment"], data["models"], data["settings"]
    if "cells" in data:
        for cell in data["cells"]:
            cell["configuration"], cell["tokens_per_s"], cell["sessions"]
        return ServeRun(label, data)
    records = [RequestRecord.from_json(request) for request in data["requests"]]
    run = LocalRun(label, data, records, summarise(records))
    if not run.records or run.sessions < 1:
        raise ValueError("it holds no requests")
    return run
