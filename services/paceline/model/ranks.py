"""Who says what the ranks of a sharded model do: rank 0, which has the engine. The others follow.

Before every step rank 0 sends its sequences; each rank builds the same inputs, runs its part, and keeps the KV of its
own heads in pages of the same numbers. Only rank 0 knows whose they are.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.model.kv_cache import KVCache, LayerSpec
from paceline.model.runner import ModelRunner, SequenceStep, StepFunction, StepInputs
from paceline.model.sharded import Share
from paceline.model.vocabulary import sample_sharded
from paceline.sampling import RowKeys

_IDLE_LIMIT_S = 14 * 24 * 3600.0
"""A rank waits this long for the next step; that rank 0 has died is noticed at once, or by a closed connection."""


@dataclass(frozen=True, slots=True)
class _Begin:
    """A new KV cache, in the place of the one before."""

    num_pages: int


@dataclass(frozen=True, slots=True)
class _Forward:
    """A step whose logits rank 0 wants."""

    steps: tuple[SequenceStep, ...]


@dataclass(frozen=True, slots=True)
class _Sample:
    """A step whose tokens rank 0 wants."""

    steps: tuple[SequenceStep, ...]
    keys: RowKeys
    temperatures: Tensor


@dataclass(frozen=True, slots=True)
class _End:
    """There will be no more."""


_Message = _Begin | _Forward | _Sample | _End


class LeadingRunner(ModelRunner):
    """Rank 0's runner of a sharded model: one at a time, its logits are those of the whole vocabulary."""

    def __init__(
        self,
        step: StepFunction,
        cache: KVCache,
        *,
        share: Share,
        dtype: torch.dtype,
        sliding_window: int | None,
        vocab_size: int,
    ) -> None:
        assert share.group.rank == 0, "rank 0 has the runner, the others follow"
        super().__init__(step, cache, dtype=dtype, sliding_window=sliding_window, vocab_size=vocab_size)
        self._group = share.group
        self._part = _Part(step, cache, share, dtype, sliding_window)
        self._tell(_Begin(cache.num_pages))

    def forward(self, steps: Sequence[SequenceStep]) -> Tensor:
        """As that of ``ModelRunner``, on all ranks. Raises EngineError if one of them is gone or late."""
        message = _Forward(tuple(steps))
        self._tell(message)
        self.num_forwards += 1
        return self._part.forward(message)[:, : self.vocab_size]

    def sample(self, steps: Sequence[SequenceStep], keys: RowKeys, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids and log-probabilities ``[sum(num_logits)]`` instead of logits, which stay where they are.

        Only for rows without processors but the temperature (``vocabulary.sample_sharded``). Raises as ``forward``.
        """
        message = _Sample(tuple(steps), keys, temperatures)
        self._tell(message)
        self.num_forwards += 1
        return self._part.sample(message)

    def close(self) -> None:
        """Lets the other ranks return from ``follow``."""
        self._tell(_End())

    def _tell(self, message: _Message) -> None:
        self._group.broadcast(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def follow(
    step: StepFunction,
    layers: Sequence[LayerSpec],
    share: Share,
    *,
    dtype: torch.dtype,
    device: torch.device,
    sliding_window: int | None,
) -> None:
    """Runs what rank 0 runs, until it closes its runner. Raises EngineError if a rank is gone, or late in a step."""
    part: _Part | None = None
    while True:
        payload = share.group.broadcast(None, timeout_s=_IDLE_LIMIT_S)
        message: _Message = pickle.loads(payload)  # of our own rank 0, over memory or sockets that it opened
        if isinstance(message, _End):
            return
        if isinstance(message, _Begin):
            part = None  # the pages of the cache before are given back first
            part = _Part(step, KVCache(layers, message.num_pages, dtype, device), share, dtype, sliding_window)
            continue
        assert part is not None, "a runner begins with its KV cache"
        if isinstance(message, _Forward):
            part.forward(message)
        else:
            part.sample(message)


@dataclass(frozen=True, slots=True)
class _Part:
    """What every rank does with a message."""

    step: StepFunction
    cache: KVCache
    share: Share
    dtype: torch.dtype
    sliding_window: int | None

    def forward(self, message: _Forward) -> Tensor:
        """Logits ``[rows, degree * width]``, the padding of the last rank at the end."""
        group, local = self.share.group, self._logits(message.steps)
        if not len(local):
            return local.new_empty(0, group.degree * local.shape[-1])
        return torch.cat(group.all_gather(local).unbind(), dim=-1)

    def sample(self, message: _Sample) -> tuple[Tensor, Tensor]:
        """Token ids and log-probabilities ``[rows]``."""
        first, stop = self.share.vocab
        local, keys = self._logits(message.steps)[:, : stop - first], message.keys
        seeds, positions, greedy = (t.to(local.device) for t in (keys.seeds, keys.positions, keys.greedy))
        here = RowKeys(greedy, seeds, positions, keys.num_greedy)
        return sample_sharded(self.share.group, local, first, here, message.temperatures.to(local.device))

    def _logits(self, steps: Sequence[SequenceStep]) -> Tensor:
        """The rank's own ``[rows, width]``."""
        inputs = StepInputs(steps, self.cache, self.dtype, self.sliding_window)
        with torch.no_grad():
            return self.step(*inputs.tensors)[0, : inputs.num_logits]
