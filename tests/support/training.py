"""Trainings of seconds, on texts of letters."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path
from typing import Any

from paceline.drafters.training.options import HeadForm, Schedule, TrainingOptions


def letters(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices(string.ascii_lowercase, k=40)) for _ in range(count)]


def silent(stage: str, done: int, total: int, note: str = "") -> None:
    """Shows nothing."""


def write_texts(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def options_for(
    form: HeadForm, target: Path, out: Path, schedule: Schedule, *, texts: int, rows: int, length: int, **more: Any
) -> TrainingOptions:
    """Of a training on ``texts`` texts beside ``out``, cut into ``rows`` rows of ``length`` tokens."""
    given = {"prompt_tokens": 8, "held_out_rows": 8, "device": "cpu", "dtype": "float32"} | more
    data = [write_texts(out.parent / "texts.jsonl", letters(texts, 0))]
    return TrainingOptions(form, str(target), data, out, schedule, num_tokens=rows * length, length=length, **given)
