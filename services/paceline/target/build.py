"""From configuration to a running target engine; called in the process or thread that will own it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.size import gib
from paceline.config import TargetSetup
from paceline.errors import ConfigError
from paceline.messages import FromTarget
from paceline.model.compiled.buckets import Limits
from paceline.model.compiled.graphs import record_steps
from paceline.model.device import resolve
from paceline.model.loading import LoadedModel, load_model
from paceline.model.parallel.collectives import Collectives
from paceline.model.parallel.runner import Follower, ranked
from paceline.model.runner import ModelRunner
from paceline.model.selftest import InvarianceReport, check_invariance
from paceline.preflight.device import left_bytes, require_target
from paceline.preflight.estimate import target_estimate
from paceline.preflight.host_memory import fraction_pages, session_pages, target_pages
from paceline.target.engine import TargetEngine
from paceline.types import Rendezvous

log = logging.getLogger(__name__)


def build_target_engine(
    setup: TargetSetup, emit: Callable[[Sequence[FromTarget]], None], rendezvous: Rendezvous | None = None
) -> TargetEngine:
    """Loads the target, sizes its KV cache and compares the bits of decoding and verification.

    ``rendezvous``: where the target's other ranks come; this is the first.

    Raises:
        ConfigError: the model cannot be loaded or run, or the settings do not fit it, or the device has no room.
        EngineError: another rank has failed.
    """
    with ranked(setup.source, setup.options, rendezvous) as group:
        model, runner, max_len = _runner(setup, group)
        return _engine(setup, emit, model, runner, max_len)


def build_target_follower(setup: TargetSetup, rendezvous: Rendezvous) -> Follower:
    """Builds another rank of a target. Raises as ``build_target_engine``."""
    with ranked(setup.source, setup.options, rendezvous) as group:
        _, runner, _ = _runner(setup, group)
        return Follower(runner)


def _runner(setup: TargetSetup, group: Collectives | None) -> tuple[LoadedModel, ModelRunner, int]:
    """The model, a runner with all of its KV pages, and the longest context; equal on every rank."""
    options = setup.options
    checkpoint, placement = (
        Checkpoint.open(setup.source, options.trust_remote_code),
        resolve(options, None if group is None else group.device),
    )
    require_target(setup, checkpoint, placement, group)
    model = load_model(checkpoint, options, group, placement)
    max_len = options.max_model_len or model.max_len
    if max_len > model.max_len:
        raise ConfigError(
            f"max_model_len is {max_len}: the target {setup.source!r} was made for at most {model.max_len}"
        )
    if options.kv_fraction is None:
        num_pages = target_pages(options, max_len)
    else:
        on_gpu = model.device.type == "cuda"
        # The loaded model's size is that of this rank already.
        estimate = target_estimate(setup, model.size, max_len, on_gpu=on_gpu, tensor_parallel_size=1)
        free = left_bytes(model.device, group) - estimate.reserved_bytes
        num_pages = fraction_pages(options.kv_fraction, max_len, model.size.page_bytes, free)
        log.info("target: %d KV pages are %g of the free %s", num_pages, options.kv_fraction, gib(free))
    return model, model.runner(num_pages), max_len


def _engine(
    setup: TargetSetup,
    emit: Callable[[Sequence[FromTarget]], None],
    model: LoadedModel,
    runner: ModelRunner,
    max_len: int,
) -> TargetEngine:
    options = setup.options
    limits = Limits(options.max_sessions, options.max_step_tokens, min(session_pages(max_len), runner.cache.num_pages))
    record_steps(runner, limits, model.max_len, options.cuda_graphs)
    report = check_invariance(runner, max_len)
    log.log(logging.INFO if report.holds else logging.WARNING, "target %s: %s", setup.source, report)
    if setup.tree_budget and model.quantization is not None:
        _require_lossless(model, report, setup.source)
    engine = TargetEngine(
        runner,
        emit,
        max_sessions=options.max_sessions,
        max_step_tokens=options.max_step_tokens,
        max_model_len=max_len,
        adaptive=options.adaptive,
    )
    engine.calibrate()
    return engine


def _require_lossless(model: LoadedModel, report: InvarianceReport, path: str) -> None:
    """Raises ConfigError if quantized weights make verification another model than decoding."""
    reason = model.batch_dependence or (None if report.holds else f"it is {report}")
    if reason is not None:
        raise ConfigError(
            f"the target {path!r} is quantized by {model.quantization!r}, and speculation could change its output, for "
            f"{reason}: set draft_config to null for plain decoding, or use another checkpoint"
        )
