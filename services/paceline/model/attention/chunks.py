"""Attention in chunks, and queries whose temperature follows their position: the layers of Llama 4.

A layer of type ``chunked_attention`` sees the keys of the query's own chunk of ``attention_chunk_size`` positions. A
layer without rotary embedding multiplies its query at position n by 1 + attn_scale * log(1 + floor((n + 1) /
floor_scale)) (Nakanishi 2025, arXiv:2501.19399). transformers takes the place of a token in its call for the position,
and in a step of several sessions that is another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.errors import ConfigError

if TYPE_CHECKING:  # importing it takes a second, and layouts do without
    from transformers import PreTrainedModel

CHUNKED = "chunked_attention"
"""The name of such a layer in configurations."""
_ATTENTION = "Llama4TextAttention"


class Chunks(int):
    """The size of chunks, where a sliding window has a plain number. A model has one or the other."""

    @property
    def code(self) -> int:
        """The number by which native passes tell chunks from a window."""
        return -int(self)


def code_of(window: int | None) -> int:
    """A window or chunks as native passes take them: 0 for none, negative for chunks."""
    return window.code if isinstance(window, Chunks) else window or 0


def first_seen(positions: Tensor, window: int) -> Tensor:
    """The first position that a query at each of ``positions`` sees through a window, or in its chunk."""
    return positions - (positions % window if isinstance(window, Chunks) else window - 1)


class Temperature(nn.Module):
    """Multiplies queries by the temperature of their positions.

    The factors come from a table: a logarithm of many tokens at once has other bits than one of a few.
    """

    factors: Tensor

    def __init__(self, scale: float, floor: int, num_positions: int, device: torch.device) -> None:
        """``scale``, ``floor``: ``attn_scale`` and ``floor_scale``. ``num_positions``: of the longest context."""
        super().__init__()
        self._floor = int(floor)
        steps = torch.arange(num_positions // self._floor + 2, dtype=torch.float32)
        factors = (torch.log1p(steps) * scale + 1.0).to(device)
        self.register_buffer("factors", factors, persistent=False)

    def forward(self, query: Tensor, positions: Tensor) -> Tensor:
        """``[1, heads, T, dim]`` of the same dtype; ``positions`` [1, T]."""
        factors = self.factors[(positions[0] + 1) // self._floor]
        return (query * factors[:, None]).to(query.dtype)


def adopt_chunks(model: PreTrainedModel, name: str) -> Chunks | None:
    """Marks the layers of a model that attend in chunks, and takes over the temperature of its queries.

    Returns the size of the chunks; None: the model has none. A second call changes nothing.

    Raises:
        ConfigError: the model has such layers and no size for their chunks.
    """
    size: Any = None
    for module in model.modules():
        if type(module).__name__ != _ATTENTION:
            continue
        layer: Any = module
        config = layer.config
        layer.attends_in_chunks = config.layer_types[layer.layer_idx] == CHUNKED
        if layer.attends_in_chunks:
            size = config.attention_chunk_size
            if not isinstance(size, int) or size < 1:
                raise ConfigError(f"{name} has attention_chunk_size {size}: a number of tokens is needed")
        if layer.attn_temperature_tuning and not layer.use_rope:
            longest, device = config.max_position_embeddings, model.device
            layer.temperature = Temperature(layer.attn_scale, layer.floor_scale, longest, device)
            layer.attn_temperature_tuning = False  # its own takes the place in the call
    return None if size is None else Chunks(size)
