"""What vLLM exports and what its own Grafana boards ask for, as facts; and why some of it is not exported here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

_PAGE = Path(__file__).parents[1] / "metrics" / "golden" / "vllm.yaml"
_FACTS: dict[str, dict[str, Any]] = yaml.safe_load(_PAGE.read_text(encoding="utf-8"))


def _labels(groups: dict[str, str]) -> dict[str, tuple[str, ...]]:
    """Name -> its labels."""
    return {name: tuple(labels.split()) for labels, names in groups.items() for name in names.split()}


LABELLED = _labels(_FACTS["labelled"])
ABSENT = {reason: tuple(names.split()) for reason, names in _FACTS["absent"].items()}
BOARDS = {board: _labels(groups) for board, groups in _FACTS["boards"].items()}
CHOSEN = {tuple(place.split()): {*values.split()} for place, values in _FACTS["chosen"].items()}
