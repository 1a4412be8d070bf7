"""The weights of a checkpoint that stay as they are stored on a GPU: which these are, and how they come into a model.

Those are linear layers and experts that tensors of 8 or 4 bits with scales fill (``Packing.scaled``), of several ranks
each its part of them. A part that begins within a group of inputs has smaller groups. Everything else is dequantized
while it is read (``dequantized.py``).
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from paceline.checkpoint.packing import Format
from paceline.checkpoint.size import gib
from paceline.model.dequantized import Box, DequantizedFiles
from paceline.model.experts import EXPERT_WEIGHTS, run_scaled, takes_scaled
from paceline.model.parallel.load import pieces, sources_of
from paceline.model.parallel.plan import ParameterShard, ShardPlan
from paceline.model.scaled import ScaledWeight, why_not_scaled, without_weights

log = logging.getLogger(__name__)


class _Piece(NamedTuple):
    tensor: str
    box: Box
    """What is read of the tensor."""
    place: tuple[int | slice, ...]
    """The outputs that it fills: [.., outputs]."""


class _Kept(NamedTuple):
    format: Format
    pieces: list[_Piece]
    num_weights: int


@dataclass(frozen=True)
class StoredWeights:
    """Weights of a model that stay as they are stored; by default none."""

    weights: dict[str, _Kept] = field(default_factory=dict)
    """What this rank holds of each, by the parameter's name."""
    _files: DequantizedFiles | None = None

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        files: DequantizedFiles,
        plan: ShardPlan | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Self:
        """Finds the weights of a model, or with a ``plan`` of a rank's part of it, that stay as they are stored."""
        found = files.scaled
        if found and (reason := why_not_scaled(device, dtype)) is not None:
            if device.type == "cuda":
                log.warning("quantized weights are dequantized: their kernel %s", reason)
            return cls()
        kept, names = cls(_files=files), _names(model)
        for name, sources in sources_of(files, model, names, {} if plan is None else plan.aliases).items():
            formats = {found.get(source.tensor) for source in sources}
            shard = None if plan is None else plan.parameters.get(name)
            if len(formats) == 1 and (format := formats.pop()) is not None:
                shard = shard or ParameterShard(tuple(model.get_parameter(name).shape))
                parts = list(pieces(shard, sources, files, name))
                is_whole = _is_whole(files, parts) or all(files.order(tensor) is None for tensor, *_ in parts)
                if is_whole and (one := _kept(format, parts, shard, turned=names[name])) is not None:
                    kept.weights[name] = one
        for name, module in model.named_modules():  # experts as a whole
            of_module = {f"{name}.{leaf}" for leaf in EXPERT_WEIGHTS if leaf in module._parameters}
            if not of_module <= kept.weights.keys():
                for weight in of_module:
                    kept.weights.pop(weight, None)
        if found:
            numbers = sum(one.num_weights * one.format.bits // 8 for one in kept.weights.values())
            log.info("%d weights stay as they are stored, %s; others are dequantized", len(kept.weights), gib(numbers))
        return kept

    @property
    def tensors(self) -> set[str]:
        """The tensors that fill them."""
        return {piece.tensor for one in self.weights.values() for piece in one.pieces}

    def without(self, loader: type[PreTrainedModel]) -> Any:
        """A class whose models have places without weights in the place of these. ``fill`` makes them models of
        ``loader``."""
        if not self.weights:
            return loader

        def build(model: Any, *args: Any, **options: Any) -> None:
            loader.__init__(model, *args, **options)
            self._make_places(model)

        own = {"__init__": build, "__module__": loader.__module__, "plain_class": loader}
        return type(loader.__name__, (loader,), own)

    def fill(self, model: PreTrainedModel, device: torch.device) -> None:
        """Reads the weights to ``device``. Raises ConfigError if one is no number."""
        if self._files is None or not self.weights:
            return
        model.__class__ = getattr(type(model), "plain_class", type(model))
        self._make_places(model)
        for name, (format, parts, _) in self.weights.items():
            weight = model.get_submodule(name.removesuffix(".weight"))
            assert isinstance(weight, ScaledWeight)
            weight.allocate(format, device)
            for tensor, box, place in parts:
                part = self._files.read_scaled(tensor, box, format)
                weight.put(part, place, f"model {self._files.path!r}: {name}")
        self._files.close()
        if any(name.endswith(EXPERT_WEIGHTS) for name in self.weights):
            run_scaled(model)

    def _make_places(self, model: PreTrainedModel) -> None:
        """Replaces linear layers and parameters of experts that are plain yet."""
        without_weights(model, {name.removesuffix(".weight"): one.num_weights for name, one in self.weights.items()})
        for name in self.weights:
            path, _, leaf = name.rpartition(".")
            module = model.get_submodule(path)
            if leaf in EXPERT_WEIGHTS and (plain := module._parameters.pop(leaf, None)) is not None:
                shape = plain.mT.shape if module.is_transposed else plain.shape
                setattr(module, leaf, ScaledWeight(tuple(shape), plain.dtype))
                module._is_hf_initialized = True  # transformers would draw what is not loaded


def _names(model: PreTrainedModel) -> dict[str, bool]:
    """Parameters that can be kept; True: inputs come before outputs."""
    is_tied = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
    table = model.get_output_embeddings() if is_tied else None
    linear = [path for path, module in model.named_modules() if type(module) is nn.Linear and module is not table]
    names = {f"{path}.weight": False for path in linear}
    for path, module in model.named_modules():
        if takes_scaled(module):
            names |= {f"{path}.{leaf}": module.is_transposed for leaf in EXPERT_WEIGHTS if hasattr(module, leaf)}
    return names


def _is_whole(files: DequantizedFiles, parts: list[tuple[str, Box, tuple[slice, ...]]]) -> bool:
    """True if pieces are of one matrix, and have all of its inputs."""
    (tensor, *_), *_ = parts
    whole = slice(0, files.shape(tensor)[-1])
    return all(name == tensor and len(box) == 2 and box[1] == whole for name, box, _ in parts)


def _kept(
    format: Format, parts: list[tuple[str, Box, tuple[slice, ...]]], shard: ParameterShard, *, turned: bool
) -> _Kept | None:
    """Pieces of a weight, each of one expert; None if they are not whole rows, or their groups would be too small."""
    at, made, starts = -2 if turned else -1, [], set()
    for tensor, box, place in parts:
        starts |= {box[at].start}
        outputs = place[-1 if turned else -2]
        if place[at] != slice(0, shard.local_shape[at]):
            return None
        for expert in range(place[0].start, place[0].stop) if len(place) > 2 else ():
            own = box if len(box) == 2 else (slice(expert - place[0].start, expert - place[0].start + 1), *box[1:])
            made.append(_Piece(tensor, own, (expert, outputs)))
        if len(place) == 2:
            made.append(_Piece(tensor, box, (outputs,)))
    filled = sum(math.prod(part.stop - part.start for part in box) for _, box, _ in parts)
    begun = format.begun_at(*starts)
    if begun is None or filled != math.prod(shard.local_shape):
        return None
    return _Kept(begun, made, filled)
