"""A rank of a tensor-parallel model: the unchanged transformers class over a part of the weights.

Only the ends of split parts differ. Layers split by rows, and experts, add their outputs over the ranks. The embedding
looks up the tokens that it has. The output layer gives the logits of the rank's own tokens, which ``ranks.py`` joins or
compares. All ranks must take the same steps in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.packing import packing_of
from paceline.config import Quantization
from paceline.model.dequantized import DequantizedFiles, dequantized_files, plain_config
from paceline.model.local_config import BUILDING, build
from paceline.model.parallel.collectives import Collectives
from paceline.model.parallel.load import CheckpointFiles, Files, GgufFiles, Progress, read_shard
from paceline.model.parallel.plan import ParameterShard, Range, ShardPlan, plan_shards
from paceline.model.quantized import load_options, require_whole, round_linear
from paceline.model.scaled import Whole
from paceline.model.stored_weights import StoredWeights

_SHARE = "_paceline_share"
_LOAD_LIMIT_S = 3600.0
"""A rank may read its files this much longer than another."""


@dataclass(frozen=True, slots=True)
class Share:
    """Place of one rank's model among the ranks: its shard plan and its exchange with the others."""

    group: Collectives
    vocab: Range
    """Token ids whose logits this rank computes, in the first columns; the rest is padding."""
    width: int
    """Numbers of a token's hidden state: the largest that ranks exchange for a token within a step."""


def load_shard(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    group: Collectives,
    quantization: Quantization | None = None,
    *,
    progress: Progress | None = None,
) -> PreTrainedModel:
    """This rank's share of a checkpoint, ready for ``prepare``. Returns when all ranks have loaded theirs.

    ``progress`` is called with the bytes that are loaded and the bytes of this rank, after every parameter.

    Raises:
        ConfigError: no causal language model in safetensors, it cannot be split into ``group.degree`` ranks, or
            ``quantization`` cannot run here.
        EngineError: another rank has failed.
    """
    path, gguf = checkpoint.path, checkpoint.gguf
    require_whole(checkpoint, group.degree)
    if quantization is not None:
        load_options(checkpoint, quantization, group.device, dtype)
    config, kept = plain_config(checkpoint), StoredWeights()
    plan = plan_shards(config, group.rank, group.degree)
    files: Files
    if (packing := packing_of(checkpoint.quantization)) is not None:
        files = dequantized_files(checkpoint, packing)
    else:
        files = CheckpointFiles(path) if gguf is None else GgufFiles(path, gguf, dtype)
    try:
        with BUILDING, no_init_weights():  # what is not written to here takes no memory
            model = build(plan.config, dtype=dtype)
        if isinstance(files, DequantizedFiles):
            kept = StoredWeights.of(model, files, plan, group.device, dtype)
            plan = replace(plan, parameters={n: s for n, s in plan.parameters.items() if n not in kept.weights})
        for name, tensor in read_shard(files, model, plan, dtype, progress).items():
            _assign(model, name, tensor)
        kept.fill(model, group.device)
    finally:
        files.close()
    for name, first in plan.aliases.items():
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, model.get_parameter(first))
    model.name_or_path = path
    if quantization is not None:
        round_linear(model, quantization, group.device, path, whole=_OfRanks(plan, group))
    apply_plan(model, plan, group)
    group.barrier(timeout_s=_LOAD_LIMIT_S)
    return model.to(group.device).eval()


def apply_plan(model: PreTrainedModel, plan: ShardPlan, group: Collectives) -> None:
    """Lets the modules of a rank exchange what the plan says; ``share_of`` finds the group again."""
    setattr(model, _SHARE, Share(group, plan.vocab, model.config.get_text_config().hidden_size))
    for path, size in plan.sizes.items():
        module, _, name = path.rpartition(".")
        setattr(model.get_submodule(module), name, size)
    for name in plan.summed:
        _wrap(model.get_submodule(name), _Summed(group))
    for name in plan.gathered:
        _wrap(model.get_submodule(name), _Gathered(group))
    for name in plan.divided:
        _wrap(model.get_submodule(name), lambda forward, hidden: forward(hidden / plan.degree))
    first, stop = plan.vocab
    embedding = model.get_submodule(plan.embedding)
    assert isinstance(embedding, nn.Embedding)
    embedding.padding_idx = None  # only the gradient knows it
    if embedding.weight.shape[0] == stop - first:
        _wrap(embedding, _VocabularyEmbedding(group, first, stop))
    _wrap(model.get_submodule(plan.head), _VocabularyHead(plan.vocab_width))


def share_of(model: PreTrainedModel) -> Share | None:
    """Returns the share that a rank's model holds; None if the model is whole."""
    share: Share | None = getattr(model, _SHARE, None)
    return share


class _OfRanks(Whole):
    """The model of all ranks, of which this one has the part by ``plan``."""

    def __init__(self, plan: ShardPlan, group: Collectives) -> None:
        self._plan, self._group = plan, group

    def num_outputs(self, path: str, layer: nn.Linear) -> int:
        return self._shard(path).shape[0]

    def largest(self, path: str, own: Tensor) -> Tensor:
        if self._shard(path).dim != 1:
            return own
        of_ranks = self._group.host.all_gather(own.cpu(), timeout_s=_LOAD_LIMIT_S)
        return of_ranks.amax(0).to(own.device)

    def _shard(self, path: str) -> ParameterShard:
        name = f"{path}.weight"
        return self._plan.parameters[self._plan.aliases.get(name, name)]


def _assign(model: PreTrainedModel, name: str, tensor: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if leaf in module._parameters:
        module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        module._buffers[leaf] = tensor


def _wrap(module: nn.Module, around: Callable[..., Any]) -> None:
    """Puts ``around(forward, input, ...)`` in the place of the module's forward; its class stays what it is."""
    module.forward = partial(around, module.forward)


class _Summed:
    """Each rank computes a term of the output."""

    def __init__(self, group: Collectives) -> None:
        self._group = group

    def __call__(self, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        return self._group.all_reduce(forward(*args, **kwargs))


class _Gathered:
    """A norm over ``[..., size]``, and a gate if it has one, of which the rank has ``[..., size / degree]``."""

    def __init__(self, group: Collectives) -> None:
        self._group = group

    def __call__(self, forward: Callable[..., Tensor], *hidden: Tensor) -> Tensor:
        width = hidden[0].shape[-1]
        whole = [torch.cat(self._group.all_gather(part.contiguous()).unbind(), dim=-1) for part in hidden]
        return forward(*whole).narrow(-1, self._group.rank * width, width)


class _VocabularyEmbedding:
    """The rank has the rows [first, stop): of each token exactly one rank adds something that is not zero."""

    def __init__(self, group: Collectives, first: int, stop: int) -> None:
        self._group, self._first, self._stop = group, first, stop

    def __call__(self, forward: Callable[..., Tensor], ids: Tensor) -> Tensor:
        mine = (ids >= self._first) & (ids < self._stop)
        rows = forward((ids - self._first).clamp(0, self._stop - self._first - 1))
        return self._group.all_reduce(rows.masked_fill(~mine.unsqueeze(-1), 0))


class _VocabularyHead:
    """``[..., hidden] -> [..., width]``: the rank's own logits, padded at the end where it has fewer tokens."""

    def __init__(self, width: int) -> None:
        self._width = width

    def __call__(self, forward: Callable[..., Tensor], hidden: Tensor) -> Tensor:
        logits = forward(hidden)
        missing = self._width - logits.shape[-1]
        return F.pad(logits, (0, missing)) if missing else logits
