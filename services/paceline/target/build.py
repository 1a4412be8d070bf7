"""From configuration to a running target engine; called in the process or thread that will own it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from paceline.config import LocalConfig
from paceline.errors import ConfigError
from paceline.model.kv_cache import pages_for
from paceline.model.loading import load_model
from paceline.model.selftest import check_invariance
from paceline.target.engine import FromTarget, TargetEngine
from paceline.types import MAX_DRAFT_TOKENS

_log = logging.getLogger(__name__)
_DEFAULT_LEN = 1024


def build_target_engine(config: LocalConfig, emit: Callable[[Sequence[FromTarget]], None]) -> TargetEngine:
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
    per_session = pages_for(max_len + MAX_DRAFT_TOKENS)
    num_pages = config.kv_pages or max(
        per_session, config.max_sessions * pages_for(min(max_len, _DEFAULT_LEN) + MAX_DRAFT_TOKENS)
    )
    runner = model.runner(num_pages)
    report = check_invariance(runner, max_len)
    _log.log(logging.INFO if report.holds else logging.WARNING, "target %s: %s", config.target.path, report)
    return TargetEngine(
        runner,
        emit,
        max_sessions=config.max_sessions,
        max_step_tokens=config.max_step_tokens,
        max_model_len=max_len,
    )
