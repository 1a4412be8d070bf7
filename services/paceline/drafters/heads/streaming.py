"""Speculative streaming in a target: the plan of a head of streams (``stream_head.py``), and its drafter.

The drafter is ``HeadDrafter``, as for all heads. It is fed with the state at the boundary. One pass of the streams
makes all depths. The pass sees the target's rows on the session's pages, read only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel

from paceline.checkpoint.files import Checkpoint
from paceline.drafters.heads.drafter import HeadDrafter
from paceline.drafters.heads.load import HeadPlan, open_head
from paceline.drafters.heads.partial_model import Continued, borrowed_or_read, layers_from, require_borrowable
from paceline.drafters.heads.reading import TargetFacts
from paceline.drafters.heads.stream_head import StreamHead
from paceline.drafters.protocol import Features
from paceline.errors import ConfigError
from paceline.model.kv_cache import LayerSpec
from paceline.types import MAX_DRAFT_TOKENS


@dataclass(frozen=True)
class StreamsPlan:
    """A head of streams that fits its target; no weight has been read yet."""

    head: HeadPlan
    _target: Checkpoint
    layers: tuple[LayerSpec, ...] = ()

    @property
    def features(self) -> Features:
        """The states that it reads."""
        return self.head.features

    @property
    def boundary(self) -> int:
        """Layers from it on are run."""
        (boundary,) = self.features.boundaries
        return boundary

    @property
    def num_streams(self) -> int:
        """Streams that it computes."""
        assert self.head.most_tokens is not None
        return self.head.most_tokens

    def load(
        self,
        dtype: torch.dtype,
        device: torch.device,
        *,
        target: PreTrainedModel | None = None,
        max_leaves: int = 64,
    ) -> HeadDrafter:
        """Makes the drafter. Once only.

        Args:
            dtype: of the target.
            device: of the target.
            target: the target itself, whose weights are shared; None: the layers are read from its files once more.
            max_leaves: the most leaves of one ``expand``.

        Raises:
            ConfigError: the target's files cannot be read.
        """
        drafter = self.head.load(dtype, device, max_leaves=max_leaves)
        assert isinstance(drafter.module, StreamHead)
        model = borrowed_or_read(partial(layers_from, self.boundary), target, self._target, dtype, device)
        drafter.module.run_on(Continued(model))
        return drafter


def open_streams(target: Checkpoint, source: str, num_tokens: int | None = None) -> StreamsPlan:
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
    plan = StreamsPlan(open_head(method, source, target, num_tokens=num_tokens or MAX_DRAFT_TOKENS), target)
    if num_tokens is not None and plan.num_streams < num_tokens:
        raise ConfigError(
            f"num_speculative_tokens is {num_tokens} of method {method!r}: the head {source!r} has {plan.num_streams} "
            f"streams, so 1 to {plan.num_streams} are allowed"
        )
    layers = range(plan.boundary, TargetFacts.of(target).num_layers)
    require_borrowable(f"method is {method!r}", target, partial(layers_from, plan.boundary), layers)
    return plan
