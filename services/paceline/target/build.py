"""From configuration to a running target engine; called in the process or thread that will own it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from paceline.checkpoint.files import gib
from paceline.config import PairConfig
from paceline.errors import ConfigError
from paceline.model.compiled.buckets import Limits
from paceline.model.compiled.graphs import record_steps
from paceline.model.loading import LoadedModel, load_model
from paceline.model.parallel.collectives import Collectives
from paceline.model.parallel.runner import Follower, ranked
from paceline.model.runner import ModelRunner
from paceline.model.selftest import InvarianceReport, check_invariance
from paceline.preflight.device import left_bytes, require_target
from paceline.preflight.estimate import target_estimate
from paceline.preflight.host_memory import fraction_pages, session_pages, target_pages
from paceline.target.engine import FromTarget, TargetEngine
from paceline.types import Rendezvous

_log = logging.getLogger(__name__)


def build_target_engine(
    config: PairConfig, emit: Callable[[Sequence[FromTarget]], None], rendezvous: Rendezvous | None = None
) -> TargetEngine:
    """Loads the target, sizes its KV cache and compares the bits of decoding and verification.

    ``rendezvous``: where the target's other ranks come; this is the first.

    Raises:
        ConfigError: the model cannot be loaded or run, or the settings do not fit it, or the device has no room.
        EngineError: another rank has failed.
    """
    with ranked(config.target, rendezvous) as group:
        model, runner, max_len = _runner(config, group)
        return _engine(config, emit, model, runner, max_len)


def build_target_follower(config: PairConfig, rendezvous: Rendezvous) -> Follower:
    """Another rank of the same target. Raises as ``build_target_engine``."""
    with ranked(config.target, rendezvous) as group:
        _, runner, _ = _runner(config, group)
        return Follower(runner)


def _runner(config: PairConfig, group: Collectives | None) -> tuple[LoadedModel, ModelRunner, int]:
    """The model, a runner with as many KV pages as there shall be, and the longest context. The same on every rank."""
    require_target(config, group)
    model = load_model(config.target, group)
    max_len = config.max_model_len or model.max_len
    if max_len > model.max_len:
        raise ConfigError(
            f"max_model_len is {max_len}: the target {config.target.path!r} was made for at most {model.max_len}"
        )
    if config.kv_fraction is None:
        num_pages = target_pages(config, max_len)
    else:
        on_gpu = model.device.type == "cuda"
        estimate = target_estimate(config, model.facts, max_len, on_gpu=on_gpu, tensor_parallel_size=1)
        left = left_bytes(model.device, group) - estimate.reserved_bytes
        num_pages = fraction_pages(config.kv_fraction, max_len, model.facts.page_bytes, left)
        _log.info("target: %d KV pages are %g of the %s left", num_pages, config.kv_fraction, gib(left))
    return model, model.runner(num_pages), max_len


def _engine(
    config: PairConfig,
    emit: Callable[[Sequence[FromTarget]], None],
    model: LoadedModel,
    runner: ModelRunner,
    max_len: int,
) -> TargetEngine:
    limits = Limits(config.max_sessions, config.max_step_tokens, min(session_pages(max_len), runner.cache.num_pages))
    record_steps(runner, limits, model.max_len, config.target.cuda_graphs)
    report = check_invariance(runner, max_len)
    _log.log(logging.INFO if report.holds else logging.WARNING, "target %s: %s", config.target.path, report)
    if config.draft is not None and model.quantization is not None:
        _require_lossless(model, report, config.target.path)
    engine = TargetEngine(
        runner,
        emit,
        max_sessions=config.max_sessions,
        max_step_tokens=config.max_step_tokens,
        max_model_len=max_len,
        adaptive=config.adaptive,
    )
    engine.calibrate()
    return engine


def _require_lossless(model: LoadedModel, report: InvarianceReport, path: str) -> None:
    """Raises ConfigError if quantised weights make verification another model than decoding."""
    reason = model.batch_dependence or (None if report.holds else f"it is {report}")
    if reason is not None:
        raise ConfigError(
            f"the target {path!r} is quantised by {model.quantization!r}, and speculation could change its output, for "
            f"{reason}: set draft_config to null for plain decoding, or use another checkpoint"
        )
