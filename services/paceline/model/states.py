"""Hidden states out of a transformers model, caught by hooks on its layers while it runs: see ``features.py``.

Hooks need nothing of a model class but that its layers are modules of one list, and they survive ``torch.export``.
(transformers' own ``output_hidden_states`` is not there in every family, and has no state between the last layer and
the final norm.)
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.checkpoint.compressed import num_streams
from paceline.errors import ConfigError
from paceline.model.features import OUT, STREAMS, Features


def require_boundaries(features: Features, num_layers: int, name: str, num_streams: int = 1) -> None:
    """Checks what can be said of ``features`` before the model ``name`` of ``num_layers`` layers is loaded.

    Raises:
        ConfigError: there are no boundaries, or one is outside of the model.
    """
    if not features.boundaries:
        raise ConfigError("boundaries is (): at least one hidden state must be named")
    streams = range(STREAMS, STREAMS - num_streams, -1) if num_streams > 1 else ()
    if outside := [b for b in features.boundaries if b != OUT and b not in streams and not 0 <= b <= num_layers]:
        raise ConfigError(
            f"boundaries is {features.boundaries}: {outside[0]} is outside of {name}, which has {num_layers} layers: "
            f"0 (embeddings) to {num_layers} (after the last layer) are allowed, and {OUT} (after the final norm)"
        )


class StateTaps:
    """Catches the states of each forward of one model, from hooks that stay on it. Used by one thread."""

    def __init__(self, model: PreTrainedModel, features: Features, name: str) -> None:
        """Puts the hooks on ``model``; ``name`` is what messages call it.

        Raises:
            ConfigError: its layers are not to be found, or a boundary is outside of them.
        """
        self.features = features
        self._name = name
        self._width = int(model.config.get_text_config().hidden_size)
        self._caught: dict[int, Tensor] | None = None
        self._versions: dict[int, int] = {}
        decoder, layers = find_layers(model, name)
        require_boundaries(features, len(layers), name, num_streams(model.config.to_dict()))
        for boundary in {*features.boundaries}:
            if boundary == OUT:
                decoder.register_forward_hook(partial(self._leaving, boundary))
            elif boundary == len(layers) or boundary <= STREAMS:
                layers[-1].register_forward_hook(partial(self._leaving, boundary))
            else:
                layers[boundary].register_forward_pre_hook(partial(self._entering, boundary), with_kwargs=True)

    def listen(self) -> None:
        """Catches the states of the forward that follows."""
        self._caught = {}

    def require(self, num_tokens: int) -> None:
        """Checks the states that a forward of ``num_tokens`` tokens has passed.

        Raises:
            ConfigError: a state is missing or has another shape.
        """
        expected, caught = (1, num_tokens, self._width), self._take()
        for boundary in self.features.boundaries:
            state = caught.get(boundary)
            if state is None:
                raise ConfigError(f"{self._name} does not pass boundary {boundary}: it has no hidden state there")
            shape = tuple(state.shape) if isinstance(state, Tensor) else type(state).__name__
            if shape != expected:
                raise ConfigError(
                    f"{self._name} has {shape} at boundary {boundary} instead of one hidden state of {expected}: "
                    "drafters that read hidden states do not work with it"
                )
            if state._version != self._versions[boundary]:
                raise ConfigError(f"{self._name} changes the hidden state of boundary {boundary} in place")

    def join(self, logits_index: Tensor) -> Tensor:
        """The states ``[1, n, len(boundaries) * hidden]`` of the last forward, for all tokens of the step with padding,
        or for the tokens at ``logits_index`` [R]."""
        caught = self._take()
        states = [caught[boundary] for boundary in self.features.boundaries]
        if not self.features.every_position:
            states = [state[:, logits_index] for state in states]
        return torch.cat(states, dim=-1)

    def _take(self) -> dict[int, Tensor]:
        """Returns the states that were caught; other forwards of the model, by another step, leave nothing."""
        caught, self._caught = self._caught, None
        assert caught is not None
        return caught

    def _entering(self, boundary: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.catch(boundary, args[0] if args else kwargs.get("hidden_states"))

    def _leaving(self, boundary: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        state = output if isinstance(output, Tensor) else output[0]
        self.catch(boundary, state[:, :, STREAMS - boundary] if boundary <= STREAMS else state)

    def catch(self, boundary: int, state: Any) -> None:
        """Keeps the state at a boundary while a forward is observed."""
        if self._caught is None:
            return
        if boundary in self._caught:
            raise ConfigError(f"{self._name} passes boundary {boundary} more than once: it has no single state there")
        self._caught[boundary] = state
        self._versions[boundary] = getattr(state, "_version", 0)


def find_layers(model: PreTrainedModel, name: str) -> tuple[nn.Module, list[nn.Module]]:
    """The decoder of ``model``, which ends with the final norm, and its layers.

    Raises:
        ConfigError: the layers that keep a KV cache are not modules of one list.
    """
    num_layers = int(model.config.get_text_config().num_hidden_layers)
    for path, found in model.named_modules():
        if isinstance(found, nn.ModuleList) and len(found) == num_layers:
            owned = [{getattr(part, "layer_idx", None) for part in layer.modules()} - {None} for layer in found]
            if owned == [{i} for i in range(num_layers)]:
                return model.get_submodule(path.rpartition(".")[0]), [*found]
    raise ConfigError(
        f"the {num_layers} layers of {name} are not {num_layers} modules of one list, each with one attention: "
        "drafters that read hidden states do not work with it"
    )
