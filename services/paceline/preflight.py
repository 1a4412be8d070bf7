"""Before a replica loads its model: whether the device that it finds has room for it.

``checks.py`` asks the same of the machine that starts the service; a replica may run elsewhere, and alone sees a GPU.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from paceline.checkpoints import read_checkpoint, read_facts
from paceline.checks import local_folder
from paceline.config import ModelConfig, PairConfig
from paceline.errors import ConfigError
from paceline.estimate import ModelFacts
from paceline.findings import Finding, Severity
from paceline.fitting import Room, check_draft, check_target
from paceline.memory import available_bytes
from paceline.model.loading import resolve_device, resolve_dtype

_log = logging.getLogger(__name__)


def require_target(config: PairConfig) -> None:
    """Raises ConfigError, with the numbers and the nearest setting, if the target is certain not to fit."""
    if (facts := _facts(config.target)) is not None:
        _say(check_target(config, facts, _limit(config.target), room(config.target)))


def require_draft(config: PairConfig) -> None:
    """The same of a draft model."""
    assert isinstance(config.draft, ModelConfig)
    if (facts := _facts(config.draft)) is not None:
        _say(check_draft(config, facts, _limit(config.draft), room(config.draft)))


def room(model: ModelConfig) -> Room:
    """What the device of a model has left, now that the process is there."""
    device = torch.device(resolve_device(model.device))
    return Room(left_bytes(device), started=True, on_gpu=device.type == "cuda")


def left_bytes(device: torch.device) -> int:
    """Bytes that this process could still take on ``device``."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return available_bytes()


def _facts(model: ModelConfig) -> ModelFacts | None:
    """None: its files are not here yet, or cannot be read, which loading says."""
    dtype = resolve_dtype(model.dtype, torch.device(resolve_device(model.device)))
    try:
        folder = local_folder(model.path)
        return None if folder is None else read_facts(folder, str(dtype).removeprefix("torch."))
    except ConfigError:
        return None


def _limit(model: ModelConfig) -> int:
    return read_checkpoint(str(local_folder(model.path) or Path(model.path))).max_model_len


def _say(findings: list[Finding]) -> None:
    for finding in findings:
        if finding.severity is Severity.ERROR:
            raise ConfigError(finding.message)
        _log.warning("%s", finding.message)
