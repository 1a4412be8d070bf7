"""The weights of a checkpoint that stay as they are stored on a GPU: which these are, and how they come into a model.

Those are linear layers that one tensor of 8 bits with scales fills (``Packing.scaled``), of several ranks each its part
of it. Everything else is dequantized while it is read (``dequantized.py``): experts, which a grouped product of plain
weights multiplies, formats of 4 bits, and parts of a weight that begin in the middle of a block.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from paceline.checkpoint.size import gib
from paceline.model.dequantized import Box, DequantizedFiles
from paceline.model.parallel.load import Source, sources_of
from paceline.model.parallel.plan import ShardPlan
from paceline.model.scaled import Scaled, why_not_scaled, without_weights

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeptWeights:
    """Weights of a model that stay as they are stored; by default none."""

    boxes: dict[str, list[Box]] = field(default_factory=dict)
    """What this rank holds of each, by the parameter's name: parts along the outputs, or one box."""
    tensors: dict[str, int] = field(default_factory=dict)
    """The tensors that fill them: the name in the checkpoint -> inputs that share a scale."""
    _of: dict[str, str] = field(default_factory=dict)
    """The parameters' tensors."""
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
                log.warning("weights of 8 bits are dequantized: their kernel %s", reason)
            return cls()
        linear = {f"{path}.weight" for path, module in model.named_modules() if type(module) is nn.Linear}
        kept = cls(_files=files)
        for name, sources in sources_of(files, model, linear, {} if plan is None else plan.aliases).items():
            tensor = sources[0].tensor
            if sources == [Source(tensor)] and tensor in found:
                boxes = _boxes(name, files.shape(tensor), plan)
                of_inputs = {box[1].start for box in boxes}
                if len(of_inputs) == 1 and _is_whole(boxes[0][1], found[tensor], files.shape(tensor)[1]):
                    kept.boxes[name], kept.tensors[tensor], kept._of[name] = boxes, found[tensor], tensor
        numbers = sum(math.prod(part.stop - part.start for part in box) for b in kept.boxes.values() for box in b)
        if found:
            log.info("%d weights of 8 bits stay so, %s; all others are dequantized", len(kept.boxes), gib(numbers))
        return kept

    def without(self, loader: type[PreTrainedModel]) -> Any:
        """A class whose models have places without weights in the place of these layers. ``fill`` makes them models of
        ``loader``."""
        if not self.boxes:
            return loader
        paths = {name.removesuffix(".weight") for name in self.boxes}

        def build(model: Any, *args: Any, **options: Any) -> None:
            loader.__init__(model, *args, **options)
            without_weights(model, paths)

        own = {"__init__": build, "__module__": loader.__module__, "plain_class": loader}
        return type(loader.__name__, (loader,), own)

    def fill(self, model: PreTrainedModel, device: torch.device) -> None:
        """Reads the weights to ``device``. Raises ConfigError if one is no number."""
        if self._files is None or not self.boxes:
            return
        model.__class__ = getattr(type(model), "plain_class", type(model))
        paths = [name.removesuffix(".weight") for name in self.boxes]
        layers = without_weights(model, paths) or {path: model.get_submodule(path) for path in paths}
        for path, layer in layers.items():
            name = f"{path}.weight"
            tensor = self._of[name]
            parts = [self._files.read_scaled(tensor, box, self.tensors[tensor]) for box in self.boxes[name]]
            codes = torch.cat([part.codes.view(torch.uint8) for part in parts]).view(parts[0].codes.dtype)
            weight = Scaled(codes, torch.cat([part.scales for part in parts]))
            layer.hold(weight, device, f"model {self._files.path!r}: {name}")
        self._files.close()


def _boxes(name: str, shape: tuple[int, ...], plan: ShardPlan | None) -> list[Box]:
    """The parts of a matrix that a rank holds."""
    shard = None if plan is None else plan.parameters.get(name)
    if shard is None or shard.dim is None:
        return [(slice(0, shape[0]), slice(0, shape[1]))]
    if shard.dim == 0:
        return [(slice(first, stop), slice(0, shape[1])) for first, stop in shard.parts]
    return [(slice(0, shape[0]), slice(*part)) for part in shard.parts]


def _is_whole(inputs: slice, group: int, size: int) -> bool:
    """True if inputs, of ``size``, all share a scale or are whole groups that do; the last of all may be smaller."""
    if group == size:
        return True
    is_end = inputs.stop == size or (inputs.stop - inputs.start) % group == 0
    return bool(is_end and inputs.start % group == 0)
