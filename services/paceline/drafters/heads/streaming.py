"""Speculative streaming in a target: a head of streams (``stream_head.py``) and its drafter.

The drafter is ``HeadDrafter``, as for all heads. It is fed with the state at the boundary. One pass of the streams
makes all depths. The pass sees the target's rows on the session's pages, read only.
"""

from __future__ import annotations

from functools import partial

import torch
from transformers import PreTrainedModel

from paceline.checkpoint.files import Checkpoint
from paceline.drafters.heads.drafter import HeadDrafter
from paceline.drafters.heads.load import HeadPlan, open_head
from paceline.drafters.heads.partial_model import Continued, borrowed_or_read, layers_from, require_borrowable
from paceline.drafters.heads.stream_head import StreamHead
from paceline.errors import ConfigError
from paceline.types import MAX_DRAFT_TOKENS


def load_streams(
    plan: HeadPlan,
    dtype: torch.dtype,
    device: torch.device,
    *,
    target: PreTrainedModel | None = None,
    max_leaves: int = 64,
) -> HeadDrafter:
    """Makes the drafter. Once only.

    Args:
        plan: of ``open_streams``.
        dtype: of the target.
        device: of the target.
        target: the target itself, whose weights are shared; None: the layers are read from its files once more.
        max_leaves: the most leaves of one ``expand``.

    Raises:
        ConfigError: the target's files cannot be read.
    """
    drafter = plan.load(dtype, device, max_leaves=max_leaves)
    assert isinstance(drafter.module, StreamHead)
    part = partial(layers_from, plan.features.boundaries[0])
    drafter.module.run_on(Continued(borrowed_or_read(part, target, plan.facts.checkpoint, dtype, device)))
    return drafter


def open_streams(target: Checkpoint, source: str, num_tokens: int | None = None) -> HeadPlan:
    """Checks that a head of streams fits a target, without reading a weight.

    Args:
        target: the target.
        source: directory or id of the head.
        num_tokens: tokens that it drafts in a round; None: one for each stream.

    Raises:
        ConfigError: the head cannot be read, is of another target or has fewer streams. Or the target is quantized, or
            its attention has parts that heads lack.
    """
    method = "speculative_streaming"
    plan = open_head(method, source, target, num_tokens=num_tokens or MAX_DRAFT_TOKENS)
    (boundary,), most = plan.features.boundaries, plan.most_tokens
    if num_tokens is not None and most is not None and most < num_tokens:
        raise ConfigError(
            f"num_speculative_tokens is {num_tokens} of method {method!r}: the head {source!r} has {most} streams, so "
            f"1 to {most} are allowed"
        )
    layers = range(boundary, plan.facts.num_layers)
    require_borrowable(f"method is {method!r}", target, partial(layers_from, boundary), layers)
    return plan
