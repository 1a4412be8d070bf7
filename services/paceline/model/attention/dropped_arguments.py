"""Decoder layers that drop arguments that their attention or mixer needs, and hooks that pass them on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # importing it takes a second
    from transformers import PreTrainedModel

_DROPPING = {
    "NemotronDecoderLayer": "self_attn",
    "StableLmDecoderLayer": "self_attn",
    "JambaMambaDecoderLayer": "mamba",
}
"""Classes whose forward takes any argument, and calls this part of it with those alone that it names."""
_Call = tuple[tuple[Any, ...], dict[str, Any]]


def pass_arguments_on(model: PreTrainedModel) -> None:
    """Passes such a part all arguments of its layer. A second call changes nothing."""
    for module in model.modules():
        if type(module).__name__ in _DROPPING and not hasattr(module, "arguments"):
            layer: Any = module
            layer.arguments = _LayerArguments()
            layer.register_forward_pre_hook(layer.arguments.take, with_kwargs=True)
            part = layer.get_submodule(_DROPPING[type(module).__name__])
            part.register_forward_pre_hook(layer.arguments.give, with_kwargs=True)


class _LayerArguments:
    """The arguments of a layer from the beginning of its forward until its part has them."""

    def __init__(self) -> None:
        self._kept: dict[str, Any] = {}

    def take(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the layer's forward."""
        self._kept = kwargs

    def give(self, part: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        """Before the part's."""
        kept, self._kept = self._kept, {}
        return args, kept | kwargs
