"""From configuration to a running draft engine; called in the process or thread that will own it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch

from paceline.checkpoint.files import inspect_checkpoint
from paceline.config import DraftModelConfig, ModelConfig, NgramConfig, PairConfig
from paceline.core import rows
from paceline.draft.engine import DraftEngine
from paceline.drafters.model import ModelDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.protocol import Drafter
from paceline.errors import ConfigError
from paceline.messages import Nodes, SessionFailed
from paceline.model.compiled.buckets import Limits
from paceline.model.compiled.graphs import record_steps
from paceline.model.loading import LoadedModel, load_model
from paceline.model.parallel.collectives import Collectives
from paceline.model.parallel.runner import Follower, ranked
from paceline.model.runner import ModelRunner
from paceline.model.step_plan import SequenceStep
from paceline.preflight.device import require_draft
from paceline.preflight.host_memory import MEASURED_LEAVES, draft_pages
from paceline.types import PAGE_SIZE, Rendezvous, pages_for

_NGRAM_WIDTH = 64
_WIDTHS = (4, 6, 8, 12, 16, 24, MEASURED_LEAVES)
_AFFORDABLE = 1.25
_TIMED_FORWARDS = 5
_log = logging.getLogger(__name__)


def affordable_width(runner: ModelRunner) -> int:
    """The largest number of tree nodes whose forward takes at most 1.25 times as long as that of one.

    A forward of few tokens waits for the weights, so several cost as much as one, until arithmetic takes over: past
    AMX tiles or GPU cores late, on plain AVX512 at four to eight. Also warms the draft up.
    """
    pages = runner.cache.allocate(1)

    def seconds(num_tokens: int) -> float:
        span = range(num_tokens)
        visible = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril_()  # as a tree: that is what a draft runs
        step = SequenceStep([0] * num_tokens, span, span, pages, num_logits=num_tokens, visible=visible)
        times = []
        for _ in range(_TIMED_FORWARDS):
            started = time.perf_counter()
            runner.forward([step]).sum().item()
            times.append(time.perf_counter() - started)
        return min(times)

    try:
        seconds(1)
        limit = _AFFORDABLE * seconds(1)
        width = max((n for n in _WIDTHS if seconds(n) <= limit), default=_WIDTHS[0])
    finally:
        runner.cache.release(pages)
    _log.info("draft: %d tree nodes per forward cost at most %.2f times one", width, _AFFORDABLE)
    return width


def build_draft_engine(
    config: PairConfig,
    emit: Callable[[Sequence[Nodes | SessionFailed]], None],
    rendezvous: Rendezvous | None = None,
) -> DraftEngine:
    """Loads the drafter that ``config.draft`` describes.

    ``rendezvous``: where the other ranks of a draft model come; this is the first.

    Raises:
        ConfigError: there is none, or it cannot be loaded, or the device has no room for it.
        EngineError: another rank has failed.
    """
    with ranked(config.draft, rendezvous) as group:
        return _engine(config, emit, group)


def build_draft_follower(config: PairConfig, rendezvous: Rendezvous) -> Follower:
    """Another rank of the same draft model. Raises as ``build_draft_engine``."""
    assert isinstance(config.draft, DraftModelConfig)
    with ranked(config.draft, rendezvous) as group:
        _, runner, _ = _runner(config, config.draft, group)
        return Follower(runner)


def _runner(config: PairConfig, draft: ModelConfig, group: Collectives | None) -> tuple[LoadedModel, ModelRunner, int]:
    """The model, a runner, and the longest context. The same on every rank."""
    require_draft(config, group)
    model = load_model(draft, group)
    max_len = min(config.max_model_len or model.max_len, model.max_len)
    return model, model.runner(draft_pages(config, max_len)), max_len


def _engine(
    config: PairConfig, emit: Callable[[Sequence[Nodes | SessionFailed]], None], group: Collectives | None
) -> DraftEngine:
    drafter: Drafter
    rows.prepare()
    if config.draft is None:
        raise ConfigError("draft is not configured: name a draft model or an n-gram drafter")
    target = inspect_checkpoint(config.target.path)
    if isinstance(config.draft, NgramConfig):
        max_context_len = min(config.max_model_len or target.max_model_len, target.max_model_len)
        drafter = NgramDrafter(
            min_match=config.draft.min_match,
            max_match=config.draft.max_match,
            max_leaves=config.tree_step_tokens or _NGRAM_WIDTH,
        )
    else:
        model, runner, max_len = _runner(config, config.draft, group)
        max_context_len = min(max_len, runner.cache.num_pages * PAGE_SIZE)
        most = config.tree_step_tokens or _WIDTHS[-1]
        max_pages = min(pages_for(max_context_len + config.tree_budget) + 1, runner.cache.num_pages)
        num_sessions = min(most, config.draft_max_sessions or config.max_sessions)
        limits = Limits(num_sessions, most, max_pages, is_tree=True)
        record_steps(runner, limits, model.max_len, config.draft.cuda_graphs)
        drafter = ModelDrafter(
            runner,
            max_leaves=config.tree_step_tokens or affordable_width(runner),
            max_prefill_tokens=config.max_step_tokens,
            top_m=config.draft_top_m,
        )
    return DraftEngine(
        drafter,
        emit,
        vocab_size=target.vocab_size,
        tree_budget=config.tree_budget,
        fan_out=config.fan_out,
        max_context_len=max_context_len,
    )
