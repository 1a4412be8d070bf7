"""From configuration to the heads of a target: loaded in its process, on its device, by its first rank."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.tokenizer import require_same_tokens
from paceline.config import DraftOptions, DraftSetup, HeadOptions, ModelOptions, TargetSetup
from paceline.drafters.colocated import DraftModelHead
from paceline.model.compiled.buckets import Limits
from paceline.model.compiled.graphs import record_steps
from paceline.model.device import Placement
from paceline.model.kv_cache import KVCache
from paceline.model.loading import load_model
from paceline.preflight.device import require_draft
from paceline.preflight.host_memory import draft_pages
from paceline.target.heads import MountedHead
from paceline.types import PAGE_SIZE, pages_for

log = logging.getLogger(__name__)

_TOP_M = 64
TREE_BUDGET = 64
"""Rows of a session's nodes that the KV pages of a draft model in the target have room for."""


def load_heads(setup: TargetSetup, target: Checkpoint, placement: Placement) -> list[MountedHead]:
    """Loads the heads of a target, which is loaded already; ``bind_heads`` follows.

    Raises:
        ConfigError: one cannot be loaded, does not fit the target, or the device has no room for it.
    """
    heads = []
    for options in setup.options.heads:
        heads.append(_draft_model(setup, options, target, placement))
        log.info("target: head %s is loaded", options)
    return heads


def bind_heads(heads: Sequence[MountedHead], cache: KVCache) -> None:
    """Gives the heads their layers on the target's pages."""
    for mounted in heads:
        mounted.head.bind(cache, cache.add_layers(mounted.head.layers))


def draft_setup_of(setup: TargetSetup, head: HeadOptions) -> DraftSetup:
    """A draft model in the target's process as the setup of a draft: it runs as the target does, on one rank."""
    options, own = setup.options, DraftOptions.model_fields
    same = options.model_dump(include=ModelOptions.model_fields.keys() & own.keys())
    changed = same | {"tensor_parallel_size": 1, "tree_budget": TREE_BUDGET, "quantization": None}
    return DraftSetup.for_target(setup, head.source, DraftOptions(**changed))


def _draft_model(setup: TargetSetup, head: HeadOptions, target: Checkpoint, placement: Placement) -> MountedHead:
    draft_setup = draft_setup_of(setup, head)
    source, options = draft_setup.model
    checkpoint = Checkpoint.open(source, options.trust_remote_code)
    require_same_tokens(target.tokenizer, checkpoint.tokenizer)
    require_draft(draft_setup, checkpoint, placement)
    model = load_model(checkpoint, options, None, placement)
    max_len = min(setup.options.max_model_len or model.max_len, model.max_len)
    runner = model.runner(draft_pages(draft_setup, max_len))
    num_sessions = setup.options.max_sessions
    max_pages = min(pages_for(max_len + TREE_BUDGET) + 1, runner.cache.num_pages)
    limits = Limits(num_sessions, num_sessions, max_pages, is_tree=True)
    record_steps(runner, limits, model.max_len, options.cuda_graphs)
    drafter = DraftModelHead(
        runner, max_leaves=num_sessions, max_prefill_tokens=setup.options.max_step_tokens, top_m=_TOP_M
    )
    longest = min(max_len, runner.cache.num_pages * PAGE_SIZE)
    return MountedHead(str(head), drafter, num_tokens=head.num_speculative_tokens, max_len=longest)
