"""From configuration to a running target engine; called in the process or thread that will own it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from paceline.config import PairConfig
from paceline.errors import ConfigError
from paceline.estimate import target_estimate
from paceline.memory import fraction_pages, gib, target_pages
from paceline.model.loading import load_model
from paceline.model.selftest import check_invariance
from paceline.preflight import left_bytes, require_target
from paceline.target.engine import FromTarget, TargetEngine

_log = logging.getLogger(__name__)


def build_target_engine(config: PairConfig, emit: Callable[[Sequence[FromTarget]], None]) -> TargetEngine:
    """Loads the target, sizes its KV cache and compares the bits of decoding and verification.

    Raises:
        ConfigError: the model cannot be loaded or run, or the settings do not fit it, or the device has no room.
    """
    require_target(config)
    model = load_model(config.target)
    max_len = config.max_model_len or model.max_len
    if max_len > model.max_len:
        raise ConfigError(
            f"max_model_len is {max_len}: the target {config.target.path!r} was made for at most {model.max_len}"
        )
    if config.kv_fraction is None:
        num_pages = target_pages(config, max_len)
    else:
        estimate = target_estimate(config, model.facts, max_len, on_gpu=model.device.type == "cuda")
        left = left_bytes(model.device) - estimate.reserved_bytes
        num_pages = fraction_pages(config.kv_fraction, max_len, model.facts.page_bytes, left)
        _log.info("target: %d KV pages are %g of the %s left", num_pages, config.kv_fraction, gib(left))
    runner = model.runner(num_pages)
    report = check_invariance(runner, max_len)
    _log.log(logging.INFO if report.holds else logging.WARNING, "target %s: %s", config.target.path, report)
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
