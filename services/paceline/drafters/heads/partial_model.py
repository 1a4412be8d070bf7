"""Some layers of the target as a model of their own, for drafters that compute with them.

Such a model is of the target's class. So all around the layers is the target's own: angles, final norm, LM head, caps.
It shares the target's weights if the whole target is a module of this process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.linear import linear_layers
from paceline.drafters.heads.layers import attend_with_ours
from paceline.drafters.heads.module import Attend
from paceline.drafters.heads.reading import meta_model
from paceline.errors import ConfigError
from paceline.model.compiled.linear import pack_layers
from paceline.model.loading import load_pretrained
from paceline.model.states import find_layers

Family = type[PreTrainedModel]
Part = Callable[[Family], Family]
"""Maps the class of a target to the class of a model of some of its layers. Tensors keep their names."""


def without_weights(part: Part, whole: PreTrainedModel) -> PreTrainedModel:
    """The part of a model, on device ``meta``."""
    make: Any = part(type(whole))
    with torch.device("meta"):
        return attend_with_ours(make(copy.deepcopy(whole.config)).to(whole.dtype).eval())


def borrow(part: Part, target: PreTrainedModel) -> PreTrainedModel:
    """The part of a loaded target, on its own weights."""
    model, weights, buffers = without_weights(part, target), target.state_dict(), dict(target.named_buffers())
    model.load_state_dict({name: weights[name] for name in model.state_dict()}, assign=True)
    for name, _ in list(model.named_buffers()):  # angles and the like, which no checkpoint holds
        path, _, own = name.rpartition(".")
        setattr(model.get_submodule(path), own, buffers[name])
    return model


def borrowed_or_read(
    part: Part, target: PreTrainedModel | None, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """The part of a target on its own weights; ``target`` None: these layers are read from its files once more.

    Raises:
        ConfigError: the files cannot be read.
    """
    if target is not None:
        return borrow(part, target)
    model = load_pretrained(checkpoint, dtype, device, part=part(type(meta_model(checkpoint))))
    pack_layers(attend_with_ours(model))
    return model


def require_borrowable(asked: str, target: Checkpoint, part: Part, layers: Collection[int]) -> None:
    """Checks that some layers of a target can draft. Reads no weight.

    Args:
        asked: the option that asks for them; messages begin with it.
        target: the target.
        part: these layers.
        layers: their indices among the layers with attention.

    Raises:
        ConfigError: the target is quantized, or the layers are no model by themselves, or their attention has parts
            that heads lack.
    """
    if target.quantization is not None:
        raise ConfigError(
            f"{asked}: the target {target.path!r} is quantized, and layers of plain weights only can draft"
        )
    if layers and (linear := linear_layers(target.config)) is not None and linear.num_both:
        raise ConfigError(
            f"{asked}: the target {target.path!r} has layers of attention and {linear.spec.kind} together, "
            "and only layers of attention can draft"
        )
    whole = meta_model(target)
    try:
        _run_once(without_weights(part, whole).bfloat16(), layers)  # experts have no other products without weights
    except (AttributeError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{asked}: the target {target.path!r} is of a family whose layers are no model by themselves "
            f"({type(whole).__name__}: {error})"
        ) from error


def _run_once(model: PreTrainedModel, layers: Collection[int]) -> None:
    """Runs a token through layers without weights. Raises ConfigError if their attention has parts that heads lack."""
    seen: set[int] = set()

    def record(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None) -> Tensor:
        seen.add(layer)
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3])

    ids = torch.zeros(1, 1, dtype=torch.long, device="meta")
    with torch.no_grad():
        model(input_ids=ids, position_ids=ids, use_cache=False, attend=record)
    if seen != {*layers}:
        raise ValueError(f"{len(seen)} of {len(layers)} layers attend")


def subclass(family: Family, init: Callable[[Any, Any], None]) -> Family:
    """A class of a family that is made otherwise; transformers takes it for the family itself."""
    return type(family.__name__, (family,), {"__init__": init, "__module__": family.__module__})


class _LeftOut(nn.Module):
    """Stands for a layer that is left out."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.attention_type = getattr(layer, "attention_type", None)  # which some decoders ask for

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The value that came in."""
        return hidden_states


def layers_from(boundary: int, family: Family) -> Family:
    """A ``Part`` without the layers below a boundary. All layers may be below it.

    The other layers keep their indices. The model has an optional argument ``entering``, states ``[B, T, hidden]`` at
    the boundary. If given, they replace the states of the first layer that is left, and the tokens are ignored.
    """

    def init(self: Any, config: Any) -> None:
        family.__init__(self, config)
        decoder, layers = find_layers(self, family.__name__)
        (held,) = (part for part in decoder.children() if isinstance(part, nn.ModuleList) and part[0] is layers[0])
        for index in range(boundary):
            held[index] = _LeftOut(layers[index])
        self.lent_layers = {index: layers[index] for index in range(boundary, len(layers))}
        (layers[boundary] if boundary < len(layers) else held[-1]).register_forward_pre_hook(_enter, with_kwargs=True)

    return subclass(family, init)


def _enter(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    entering = kwargs.get("entering")
    if entering is None:
        return args, kwargs
    return ((entering, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": entering})


def _attends_to_nothing(
    layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
) -> Tensor:
    raise AssertionError("a model without layers has no attention")


class Continued:
    """Logits from the states at a boundary, by the target's own layers from there on."""

    def __init__(self, model: Any) -> None:
        """``model``: of a class that ``layers_from`` has made, with weights."""
        self.model = model
        self.layers: Mapping[int, nn.Module] = model.lent_layers

    def __call__(self, states: Tensor, positions: Tensor, attend: Attend, *, every: bool = True) -> Tensor:
        """Runs the layers.

        Args:
            states: [B, T, hidden] at the boundary.
            positions: [B, T].
            attend: how the rows see each other and the context, by the target's layers.
            every: False: the logits of the last row alone.

        Returns:
            [B, T or 1, vocabulary].
        """
        logits: Tensor = self.model(
            input_ids=torch.zeros_like(positions),
            position_ids=positions,
            use_cache=False,
            logits_to_keep=0 if every else 1,
            attend=attend,
            entering=states.to(self.model.dtype),
        ).logits
        return logits

    def logits(self, states: Tensor) -> Tensor:
        """``[n, vocabulary]`` from states ``[n, hidden]``, of a model without layers."""
        positions = torch.zeros(1, len(states), dtype=torch.long, device=states.device)
        return self(states[None], positions, _attends_to_nothing)[0]

    def embed(self, token_ids: Tensor) -> Tensor:
        """[..., hidden] as the target embeds tokens."""
        out: Tensor = self.model.get_input_embeddings()(token_ids)
        return out
