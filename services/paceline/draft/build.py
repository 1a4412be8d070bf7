"""From configuration to a running draft engine; called in the process or thread that will own it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.checkpoints import inspect_checkpoint
from paceline.config import LocalConfig, NgramConfig
from paceline.draft.drafter import Drafter
from paceline.draft.engine import DraftEngine
from paceline.draft.model_drafter import ModelDrafter
from paceline.draft.ngram import NgramDrafter
from paceline.errors import ConfigError
from paceline.model.kv_cache import pages_for
from paceline.model.loading import load_model
from paceline.types import Nodes, SessionFailed

_DEFAULT_LEN = 1024


def build_draft_engine(config: LocalConfig, emit: Callable[[Sequence[Nodes | SessionFailed]], None]) -> DraftEngine:
    """Loads the drafter that ``config.draft`` describes.

    Raises:
        ConfigError: there is none, or it cannot be loaded.
    """
    drafter: Drafter
    if config.draft is None:
        raise ConfigError("draft is not configured: name a draft model or an n-gram drafter")
    vocab_size = inspect_checkpoint(config.target.path).vocab_size
    if isinstance(config.draft, NgramConfig):
        drafter = NgramDrafter(
            min_match=config.draft.min_match,
            max_match=config.draft.max_match,
            max_leaves=config.tree_step_tokens,
        )
    else:
        model = load_model(config.draft)
        max_len = min(config.max_model_len or model.max_len, model.max_len)
        rows = config.tree_budget + min(max_len, _DEFAULT_LEN)
        num_pages = config.max_sessions * (pages_for(rows) + 1)
        drafter = ModelDrafter(
            model.runner(num_pages),
            max_leaves=config.tree_step_tokens,
            max_prefill_tokens=config.max_step_tokens,
            top_m=config.draft_top_m,
        )
    return DraftEngine(drafter, emit, vocab_size=vocab_size, tree_budget=config.tree_budget, fan_out=config.fan_out)
