"""The device check of a replica, before it loads its model: is there room on the device that it finds?

Called by the builders of both engines. ``preflight.service`` asks the same of the machine that starts the service; a
replica may run elsewhere, and only it sees its GPU.
"""

from __future__ import annotations

import logging

import torch

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.linear import require_draft_model
from paceline.checkpoint.size import ModelSize, gib
from paceline.config import DraftSetup, HeadDraftOptions, ModelOptions, TargetSetup
from paceline.errors import ConfigError
from paceline.model.compiled import linear
from paceline.model.device import Placement, resolve
from paceline.model.parallel.collectives import Collectives
from paceline.model.parallel.runner import agreed
from paceline.model.scaled import why_not_scaled
from paceline.preflight.findings import Finding, Severity
from paceline.preflight.fit import Room, check_draft, check_target
from paceline.preflight.heads import remote_size
from paceline.preflight.host_memory import available_bytes

_COPIES = 5
"""Copies of the weights while an engine serves eagerly and another process compiles: the engine's, the process's own
and packed ones, their file, and the loaded packed ones."""
log = logging.getLogger(__name__)


def dtype_name(options: ModelOptions) -> str:
    """The dtype of a model's weights on this machine: ``float32`` or ``bfloat16``."""
    return resolve(options).dtype_name


def why_not_shared(options: ModelOptions) -> str | None:
    """Why no threads of this machine can share the products of a model; None: they can."""
    placement = resolve(options)
    return linear.why_not_shared(options.cpu_threads, placement.device, placement.dtype)


def require_target(
    setup: TargetSetup, checkpoint: Checkpoint, placement: Placement, group: Collectives | None = None
) -> None:
    """Refuses a target that is certain not to fit its device, with the numbers and the nearest setting that does.

    ``group``: its ranks, all of which must ask.

    Raises:
        ConfigError: it does not fit.
    """
    room = _room(placement, group)
    if (size := _size(checkpoint, setup.options, placement)) is not None:
        _report(check_target(setup, size, checkpoint.max_model_len, room))


def require_draft(
    setup: DraftSetup, checkpoint: Checkpoint, placement: Placement, group: Collectives | None = None
) -> None:
    """Refuses a draft model that is certain not to fit its device, with the numbers and the nearest setting that does.

    ``group``: its ranks, all of which must ask.

    Raises:
        ConfigError: it does not fit.
    """
    source, options = setup.model
    require_draft_model(checkpoint.config, "the draft model", source)
    room = _room(placement, group)
    if (size := _size(checkpoint, options, placement)) is not None:
        _report(check_draft(setup, size, checkpoint.max_model_len, room))


def require_head(setup: DraftSetup, target: Checkpoint, placement: Placement) -> None:
    """Refuses a head in the draft pool that is certain not to fit its device, with the numbers and the nearest setting
    that does. Raises ConfigError."""
    assert isinstance(setup.options, HeadDraftOptions)
    try:
        size = target.size(placement.dtype_name, None)
    except ConfigError:
        return  # loading reports it
    if size is not None:
        room = _room(placement, None)
        _report(check_draft(setup, remote_size(setup.options, size), target.max_model_len, room))


def begins_eagerly(options: ModelOptions, checkpoint: Checkpoint, placement: Placement) -> bool:
    """True if a model serves eagerly until it is compiled (``background_compilation``).

    Raises:
        ConfigError: the option is set, but the device compiles nothing ahead of time.
    """
    wanted = options.background_compilation
    if placement.device.type != "cpu":
        if wanted is True:
            raise ConfigError(
                f"background_compilation is true, and the model is on device {placement.device.type!r}, for which "
                "nothing is compiled ahead of time: use 'auto' or false"
            )
        return False
    if isinstance(wanted, bool):
        return wanted
    if options.compile != "auto" or options.tensor_parallel_size > 1:
        return False
    size = _size(checkpoint, options, placement)
    needed = 0 if size is None else _COPIES * size.weights_bytes
    if needed > (left := available_bytes()):
        log.info("it is compiled before it serves: both at once need %s, of which %s are free", gib(needed), gib(left))
        return False
    return True


def _room(placement: Placement, group: Collectives | None) -> Room:
    """The memory that the device has free for one rank, whose process runs already."""
    return Room(left_bytes(placement.device, group), started=True, on_gpu=placement.device.type == "cuda")


def left_bytes(device: torch.device, group: Collectives | None = None) -> int:
    """Free bytes on a rank's ``device``, the fewest of all ranks. Ranks on CPUs share the memory of their machine."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return agreed(int(free), group)
    return agreed(available_bytes() // (1 if group is None else group.degree), group)


def _size(checkpoint: Checkpoint, options: ModelOptions, placement: Placement) -> ModelSize | None:
    """The size of a checkpoint; None if its weights are not here yet, or cannot be read, which loading reports."""
    try:
        keeps, cache = why_not_scaled(*placement) is None, options.kv_cache_dtype
        return checkpoint.size(placement.dtype_name, options.quantization, on_gpu=keeps, kv_cache_dtype=cache)
    except ConfigError:
        return None


def _report(findings: list[Finding]) -> None:
    """Logs warnings. Raises ConfigError for the first error."""
    for finding in findings:
        if finding.severity is Severity.ERROR:
            raise ConfigError(finding.message)
        log.warning("%s", finding.message)
