"""Where a run's figures are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_json(file: Path, data: dict[str, Any]) -> None:
    """Writes ``data`` to ``file`` as one JSON object."""
    file.write_text(json.dumps(data, default=str) + "\n", encoding="utf-8")
