"""Models of a run: grown where a size is asked for, and labelled for the report."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from paceline.config import cache_dir
from paceline.errors import ConfigError
from paceline.logs import narrate
from paceline_bench.settings import RunSettings

FIFTH = -1
"""Size of a draft with a fifth of the target's parameters: its one-token step costs about a fifth of the target's."""
STAND_IN = "grown from the embedded pair, stands in for large weights"
_Settings = TypeVar("_Settings", bound=RunSettings)


@dataclass(frozen=True, slots=True)
class ModelLabel:
    """Name and size of a target or draft."""

    path: str
    num_parameters: int | None
    grown_from: int | None
    """Number of parameters of the model whose function it computes; None if it was not grown."""

    def describe(self) -> str:
        """Size and origin in one phrase."""
        size = "unknown size" if self.num_parameters is None else f"{self.num_parameters / 1e6:.1f} M parameters"
        if self.grown_from is None:
            return size
        return f"{size} ({STAND_IN}; computes the function of {self.grown_from / 1e6:.1f} M)"

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json``, with the description."""
        return asdict(self) | {"text": self.describe()}


def model_label(path: str) -> ModelLabel:
    """Reads a checkpoint directory without its weights; of a hub id nothing but the name is known."""
    directory = Path(path).expanduser()
    if not (directory / "config.json").is_file():
        return ModelLabel(path, None, None)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    total = 0
    for file in directory.glob("*.safetensors"):
        with file.open("rb") as handle:
            header = json.loads(handle.read(int.from_bytes(handle.read(8), "little")))
        total += sum(prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
    return ModelLabel(directory.name, total or None, config.get("grown_from_num_parameters"))


def model_labels(settings: RunSettings) -> dict[str, ModelLabel]:
    """Labels by role; no label of a model that is not there."""
    paths = {"target": settings.target, "draft": settings.draft}
    return {role: model_label(path) for role, path in paths.items() if path}


def grown(path: str, size: int, dtype: str) -> str:
    """Directory of ``path`` grown to ``size`` parameters, from the cache or made now.

    Raises:
        ConfigError: ``path`` is not a directory with a checkpoint, or the size is out of reach.
    """
    source = Path(path).expanduser()
    if not (source / "config.json").is_file():
        raise ConfigError(f"{path!r} cannot be grown: a directory with a checkpoint is needed")
    digest = hashlib.blake2b(f"1 {size} {dtype}".encode(), digest_size=8)
    for file in sorted([source / "config.json", *source.glob("*.safetensors")]):
        digest.update(file.read_bytes())
    destination = cache_dir() / "grown" / f"{source.name}-{size}-{dtype}-{digest.hexdigest()}"
    if destination.is_dir():
        return str(destination)
    import torch
    from transformers.utils import logging as hf_logging

    from paceline_bench.grow import grow_checkpoint

    hf_logging.disable_progress_bar()
    torch.set_num_threads(1)
    narrate(f"growing {source.name} to {size / 1e6:.0f} M parameters (once)")
    temporary = destination.with_name(f"{destination.name}.{os.getpid()}")
    try:
        grow_checkpoint(source, temporary, size, getattr(torch, dtype))
        with contextlib.suppress(OSError):  # another process was faster
            temporary.rename(destination)
    except ValueError as error:
        raise ConfigError(f"{source.name}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return str(destination)


def with_grown_models(settings: _Settings) -> _Settings:
    """The given settings with paths to the grown checkpoints.

    Raises:
        ConfigError: a model cannot be grown.
    """
    kind = "bfloat16" if settings.dtype == "auto" else settings.dtype
    target, draft, size = settings.target, settings.draft, settings.grow_draft
    if settings.grow_target is not None:
        target = grown(target, settings.grow_target, kind)
    if size == FIFTH:
        num_parameters = model_label(target).num_parameters
        if num_parameters is None:
            raise ConfigError("--grow-draft fifth needs a target that is a directory with a checkpoint")
        size = num_parameters // 5
    if size is not None:
        draft = grown(draft, size, kind)
    return replace(settings, target=target, draft=draft)
