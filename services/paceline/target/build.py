"""From configuration to a running target engine; called in the process or thread that will own it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from paceline.config import PairConfig
from paceline.errors import ConfigError
from paceline.memory import available_bytes, fraction_pages, target_pages
from paceline.model.kv_cache import PAGE_SIZE
from paceline.model.loading import LoadedModel, load_model
from paceline.model.ranks import Follower, agreed, ranked
from paceline.model.runner import ModelRunner
from paceline.model.selftest import check_invariance
from paceline.ranks import Rendezvous
from paceline.target.engine import FromTarget, TargetEngine

_log = logging.getLogger(__name__)


def build_target_engine(
    config: PairConfig, emit: Callable[[Sequence[FromTarget]], None], rendezvous: Rendezvous | None = None
) -> TargetEngine:
    """Loads the target, sizes its KV cache and compares the bits of decoding and verification.

    ``rendezvous``: where the target's other ranks come; this is the first.

    Raises:
        ConfigError: the model cannot be loaded or run, or the settings do not fit it.
        EngineError: another rank has failed.
    """
    with ranked(config.target, rendezvous) as group:
        model = load_model(config.target, group)
        runner, max_len = _runner(config, model)
        return _engine(config, emit, runner, max_len)


def build_target_follower(config: PairConfig, rendezvous: Rendezvous) -> Follower:
    """Another rank of the same target. Raises as ``build_target_engine``."""
    with ranked(config.target, rendezvous) as group:
        runner, _ = _runner(config, load_model(config.target, group))
        return Follower(runner)


def _runner(config: PairConfig, model: LoadedModel) -> tuple[ModelRunner, int]:
    """A runner with as many KV pages as there shall be, and the longest context. The same on every rank."""
    max_len = config.max_model_len or model.max_len
    if max_len > model.max_len:
        raise ConfigError(
            f"max_model_len is {max_len}: the target {config.target.path!r} was made for at most {model.max_len}"
        )
    if config.kv_fraction is None:
        num_pages = target_pages(config, max_len)
    else:
        num_pages = fraction_pages(config.kv_fraction, max_len, _page_bytes(model), _left(model))
        _log.info("target: %d KV pages are %g of the memory left", num_pages, config.kv_fraction)
    return model.runner(num_pages), max_len


def _engine(
    config: PairConfig, emit: Callable[[Sequence[FromTarget]], None], runner: ModelRunner, max_len: int
) -> TargetEngine:
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


def _left(model: LoadedModel) -> int:
    """Bytes that the KV cache could take on every rank now: ranks on CPUs share the memory of their host."""
    if model.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(model.device)
        return agreed(int(free), model.group)
    return agreed(available_bytes() // (model.group.degree if model.group else 1), model.group)
