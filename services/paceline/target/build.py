"""From configuration to a running target engine; called in the process or thread that will own it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from paceline.config import PairConfig
from paceline.errors import ConfigError
from paceline.memory import available_bytes, fraction_pages, session_pages, target_pages
from paceline.model.buckets import Limits
from paceline.model.graphs import record_steps
from paceline.model.kv_cache import PAGE_SIZE
from paceline.model.loading import LoadedModel, load_model
from paceline.model.selftest import check_invariance
from paceline.target.engine import FromTarget, TargetEngine

_log = logging.getLogger(__name__)


def build_target_engine(config: PairConfig, emit: Callable[[Sequence[FromTarget]], None]) -> TargetEngine:
    """Loads the target, sizes its KV cache and compares the bits of decoding and verification.

    Raises:
        ConfigError: the model cannot be loaded or run, or the settings do not fit it.
    """
    model = load_model(config.target)
    max_len = config.max_model_len or model.max_len
    if max_len > model.max_len:
        raise ConfigError(
            f"max_model_len is {max_len}: the target {config.target.path!r} was made for at most {model.max_len}"
        )
    if config.kv_fraction is None:
        num_pages = target_pages(config, max_len)
    else:
        num_pages = fraction_pages(config.kv_fraction, max_len, _page_bytes(model), _left(model.device))
        _log.info("target: %d KV pages are %g of the memory left", num_pages, config.kv_fraction)
    runner = model.runner(num_pages)
    limits = Limits(config.max_sessions, config.max_step_tokens, min(session_pages(max_len), num_pages))
    record_steps(runner, limits, model.max_len, config.target.cuda_graphs)
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


def _page_bytes(model: LoadedModel) -> int:
    """Bytes of one KV page over all layers, keys and values."""
    return PAGE_SIZE * sum(layer.kv_bytes(model.dtype) for layer in model.layers)


def _left(device: torch.device) -> int:
    """Bytes that the KV cache could take on ``device`` now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return available_bytes()
