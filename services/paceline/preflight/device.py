"""Before a replica loads its model: whether the device that it finds has room for it.

``checks.py`` asks the same of the machine that starts the service; a replica may run elsewhere, and alone sees a GPU.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from paceline.checkpoint.files import ModelSize, read_checkpoint, read_facts
from paceline.config import ModelConfig, PairConfig
from paceline.errors import ConfigError
from paceline.model.device import resolve_device, resolve_dtype
from paceline.model.parallel.collectives import Collectives
from paceline.model.parallel.runner import agreed
from paceline.preflight.findings import Finding, Severity
from paceline.preflight.fit import Room, check_draft, check_target
from paceline.preflight.host_memory import available_bytes
from paceline.preflight.service import local_folder

_log = logging.getLogger(__name__)


def dtype_name(config: ModelConfig) -> str:
    """The dtype that a model's weights have on this machine: ``float32`` or ``bfloat16``."""
    return str(resolve_dtype(config.dtype, torch.device(resolve_device(config.device)))).removeprefix("torch.")


def require_target(config: PairConfig, group: Collectives | None = None) -> None:
    """Raises ConfigError, with the numbers and the nearest setting, if the target is certain not to fit.

    ``group``: of its ranks, which must all ask.
    """
    left = room(config.target, group)
    if (facts := _facts(config.target)) is not None:
        _say(check_target(config, facts, _limit(config.target), left))


def require_draft(config: PairConfig, group: Collectives | None = None) -> None:
    """The same of a draft model."""
    assert isinstance(config.draft, ModelConfig)
    left = room(config.draft, group)
    if (facts := _facts(config.draft)) is not None:
        _say(check_draft(config, facts, _limit(config.draft), left))


def room(model: ModelConfig, group: Collectives | None = None) -> Room:
    """What the device of a model has left for a rank, now that the process is there."""
    device = torch.device(resolve_device(model.device)) if group is None else group.device
    return Room(left_bytes(device, group), started=True, on_gpu=device.type == "cuda")


def left_bytes(device: torch.device, group: Collectives | None = None) -> int:
    """Bytes that every rank could still take on its ``device``. Ranks on CPUs share the memory of their machine."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return agreed(int(free), group)
    return agreed(available_bytes() // (1 if group is None else group.degree), group)


def _facts(model: ModelConfig) -> ModelSize | None:
    """None: its files are not here yet, or cannot be read, which loading says."""
    dtype = resolve_dtype(model.dtype, torch.device(resolve_device(model.device)))
    try:
        folder = local_folder(model.path)
        return None if folder is None else read_facts(folder, str(dtype).removeprefix("torch."), model.quantization)
    except ConfigError:
        return None


def _limit(model: ModelConfig) -> int:
    return read_checkpoint(str(local_folder(model.path) or Path(model.path))).max_model_len


def _say(findings: list[Finding]) -> None:
    for finding in findings:
        if finding.severity is Severity.ERROR:
            raise ConfigError(finding.message)
        _log.warning("%s", finding.message)
