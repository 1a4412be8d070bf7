"""Decoder layers that drop the arguments that a model gives them for its attention, and hooks that pass them on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # importing it takes a second
    from transformers import PreTrainedModel

_DROPPING = {"NemotronDecoderLayer", "StableLmDecoderLayer"}
"""Classes whose forward takes any argument, and calls ``self_attn`` with those alone that it names."""
_Call = tuple[tuple[Any, ...], dict[str, Any]]


def pass_arguments_on(model: PreTrainedModel) -> None:
    """Gives the attention of such layers all arguments that its layer has. A second call changes nothing."""
    for module in model.modules():
        if type(module).__name__ in _DROPPING and not hasattr(module, "passing"):
            layer: Any = module
            layer.passing = _Passing()
            layer.register_forward_pre_hook(layer.passing.take, with_kwargs=True)
            layer.self_attn.register_forward_pre_hook(layer.passing.give, with_kwargs=True)


class _Passing:
    """The arguments of a layer from the beginning of its forward until its attention has them."""

    def __init__(self) -> None:
        self._kept: dict[str, Any] = {}

    def take(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the layer's forward."""
        self._kept = kwargs

    def give(self, attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        """Before the attention's."""
        kept, self._kept = self._kept, {}
        return args, kept | kwargs
