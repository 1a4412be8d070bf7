"""Before a replica loads its model: whether the device that it finds has room for it.

``checks.py`` asks the same of the machine that starts the service; a replica may run elsewhere, and alone sees a GPU.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from paceline.checkpoint.files import ModelSize, read_checkpoint, read_facts
from paceline.config import DraftSetup, ModelOptions, TargetSetup
from paceline.errors import ConfigError
from paceline.model.device import resolve_device, resolve_dtype
from paceline.model.parallel.collectives import Collectives
from paceline.model.parallel.runner import agreed
from paceline.preflight.findings import Finding, Severity
from paceline.preflight.fit import Room, check_draft, check_target
from paceline.preflight.host_memory import available_bytes
from paceline.preflight.service import local_folder

log = logging.getLogger(__name__)


def dtype_name(options: ModelOptions) -> str:
    """The dtype of a model's weights on this machine: ``float32`` or ``bfloat16``."""
    return str(resolve_dtype(options.dtype, torch.device(resolve_device(options.device)))).removeprefix("torch.")


def require_target(setup: TargetSetup, group: Collectives | None = None) -> None:
    """Raises ConfigError, with the numbers and the nearest setting, if the target is certain not to fit.

    ``group``: its ranks, all of which must ask.
    """
    room = room_for(setup.options, group)
    if (size := _size(setup.source, setup.options)) is not None:
        _report(check_target(setup, size, _limit(setup.source), room))


def require_draft(setup: DraftSetup, group: Collectives | None = None) -> None:
    """Raises ConfigError, with the numbers and the nearest setting, if the draft model is certain not to fit.

    ``group``: its ranks, all of which must ask.
    """
    source, options = setup.model
    room = room_for(options, group)
    if (size := _size(source, options)) is not None:
        _report(check_draft(setup, size, _limit(source), room))


def room_for(options: ModelOptions, group: Collectives | None = None) -> Room:
    """The memory that a model's device has free for one rank, whose process runs already."""
    device = torch.device(resolve_device(options.device)) if group is None else group.device
    return Room(left_bytes(device, group), started=True, on_gpu=device.type == "cuda")


def left_bytes(device: torch.device, group: Collectives | None = None) -> int:
    """Bytes that every rank could still take on its ``device``. Ranks on CPUs share the memory of their machine."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return agreed(int(free), group)
    return agreed(available_bytes() // (1 if group is None else group.degree), group)


def _size(source: str, options: ModelOptions) -> ModelSize | None:
    """The size of a checkpoint; None if its files are not here yet, or cannot be read, which loading reports."""
    try:
        folder = local_folder(source)
        return None if folder is None else read_facts(folder, dtype_name(options), options.quantization)
    except ConfigError:
        return None


def _limit(source: str) -> int:
    return read_checkpoint(str(local_folder(source) or Path(source))).max_model_len


def _report(findings: list[Finding]) -> None:
    """Logs warnings. Raises ConfigError for the first error."""
    for finding in findings:
        if finding.severity is Severity.ERROR:
            raise ConfigError(finding.message)
        log.warning("%s", finding.message)
