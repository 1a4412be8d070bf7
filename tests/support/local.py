"""``LocalPipeline`` in threads of this process, over models as their files are."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paceline.config import LocalConfig
from paceline.local import LocalPipeline
from paceline.types import Mode, Result, SpeculationParams


def local_config(target: str | Path, draft: str | Path | None = None, **options: Any) -> LocalConfig:
    """``options``: those of the target. What one test makes of its draft does not change the next."""
    run = {"dtype": "float32", "device": "cpu", "compile": False}
    model = {"path": str(target), "adaptive": False, "batch_invariant": "off"} | run | options
    drafter = None if draft is None else {"path": str(draft)} | run
    return LocalConfig(target=model, draft=drafter, worker="thread", pin_cores=False)  # type: ignore[arg-type]


def plain_results(target: str | Path, asked: Iterable[tuple[Any, ...]]) -> list[Result]:
    """Of plain decoding: a prompt, its sampling parameters and its stop strings each."""
    plain = SpeculationParams(mode=Mode.PLAIN)
    with LocalPipeline(local_config(target)) as pipeline:
        return [pipeline.generate(prompt, sampling, plain, *stop).result for prompt, sampling, *stop in asked]
