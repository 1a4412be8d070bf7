"""The linear layers of a model, from its configuration: how many, what they keep, and what does not run with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from paceline.checkpoint.indexed import num_indexers, why_eager
from paceline.checkpoint.quantization import method_of
from paceline.errors import ConfigError

CHUNK = 16
"""Rows of a chunk of linear layers. Part of the order of sums, so of the bits: no option."""
LINEAR = "linear_attention"
"""The name of such a layer in configurations."""
_FAMILIES = {"qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "olmo_hybrid"}
"""Model types whose linear layers follow the gated delta rule."""
_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """The sizes of a linear layer."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    """Tokens that the convolution reads, the current one included."""

    @classmethod
    def of(cls, layer: Any) -> Self:
        """The sizes of a layer of transformers."""
        return cls(layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim, layer.conv_kernel_size)

    def of_rank(self, degree: int) -> LinearSpec:
        """The sizes of one of ``degree`` ranks."""
        return replace(self, key_heads=-(-self.key_heads // degree), value_heads=-(-self.value_heads // degree))

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def state_bytes(self, item_bytes: int) -> int:
        """Bytes of a state with the inputs of the convolution before it, which have ``item_bytes`` each."""
        state = self.value_heads * self.key_dim * self.value_dim
        return _FLOAT32_BYTES * state + (self.width - 1) * self.conv_dim * item_bytes

    def chunk_bytes(self, item_bytes: int) -> int:
        """Bytes of the rows of a chunk."""
        numbers = self.key_heads * self.key_dim + self.value_heads * (self.value_dim + 1)
        return CHUNK * (_FLOAT32_BYTES * numbers + self.conv_dim * item_bytes)


@dataclass(frozen=True, slots=True)
class Slots:
    """Numbers of slots for states, and for the rows of chunks."""

    states: int
    rows: int

    @classmethod
    def of(cls, max_sessions: int) -> Slots:
        """Returns the slots for ``max_sessions`` sessions.

        A session holds one state, and a second one while its context passes a boundary. Free slots keep states for
        prefix hits. A session's rows are in two chunks, and in four where a long proposal crosses a boundary; each
        further branch of a tree needs the same number.
        """
        return cls(2 * max_sessions + 8, 4 * max_sessions + 32)


@dataclass(frozen=True, slots=True)
class LinearLayers:
    """The linear layers of a model, all of one size."""

    num: int
    spec: LinearSpec

    def state_bytes(self, item_bytes: int) -> int:
        """Bytes of one state in all layers."""
        return self.num * self.spec.state_bytes(item_bytes)

    def slots_bytes(self, slots: Slots, item_bytes: int) -> int:
        """Bytes of all slots."""
        rows = slots.rows * self.num * self.spec.chunk_bytes(item_bytes)
        return slots.states * self.state_bytes(item_bytes) + rows


def linear_layers(config: Mapping[str, Any]) -> LinearLayers | None:
    """The linear layers of a configuration; None: it has none of which this is known."""
    text = config.get("text_config") or config
    if text.get("model_type") not in _FAMILIES:
        return None
    kinds = text.get("layer_types")
    if not kinds:
        interval = text.get("full_attention_interval") or 4
        kinds = [LINEAR if (i + 1) % interval else "" for i in range(text.get("num_hidden_layers") or 0)]
    num = sum(kind == LINEAR for kind in kinds)
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    sizes: list[Any] = [text.get(f"linear_{name}") for name in names]
    if not num or not all(isinstance(size, int) and size for size in sizes):
        return None
    return LinearLayers(num, LinearSpec(*sizes))


def why_not_runnable(
    config: Mapping[str, Any],
    stored: Mapping[str, Any] | None,
    *,
    device: str,
    quantization: str | None,
    compile: bool | str = "auto",
) -> tuple[str, str] | None:
    """The option with which a model with linear or indexed layers cannot run, and why not, which continues a sentence
    that begins with the option; None: it has no such layers or can run.

    Args:
        config: the model's.
        stored: the quantization that its weights come with; None: they are plain.
        device: type of the device.
        quantization: the option.
        compile: the option; of Llama 4 it is refused, too.
    """
    if compile is True and device == "cpu" and (reason := why_eager(config)) is not None:
        return "compile", f"is true, but {reason}: set compile to auto or false"
    kind = "linear" if linear_layers(config) is not None else "indexed" if num_indexers(config) else None
    if kind is None:
        return None
    has = f"and the model has {kind} attention layers"
    if device == "cuda":
        return "device", f"is 'cuda' {has}, which run on the CPU alone: 'cpu' is allowed"
    if quantization is not None:
        return "quantization", f"is {quantization!r} {has}, which run with plain weights alone: null is allowed"
    if stored is not None:
        return "model", f"is quantized by {method_of(stored)!r} {has}, which run with plain weights alone"
    return None


def require_runnable(config: Mapping[str, Any], stored: Mapping[str, Any] | None, name: str, **options: Any) -> None:
    """Checks ``why_not_runnable`` before a weight is read. Raises ConfigError, which names the model ``name``."""
    if (wrong := why_not_runnable(config, stored, **options)) is not None:
        raise ConfigError(f"{' '.join(wrong)} ({name})")


def require_draft_model(config: Mapping[str, Any], key: str, name: str) -> None:
    """Checks that a draft model has no linear layers, and is no drafter that needs its target's cache. Raises
    ConfigError, which begins with ``key``."""
    if (kind := config.get("model_type")) in ("gemma4_assistant", "gemma4_unified_assistant"):
        raise ConfigError(
            f"{key} is {name!r}, a {kind}, which needs the target's keys and values: it drafts in the target, as a "
            "head of method 'gemma4_assistant'"
        )
    if linear_layers(config) is not None:
        raise ConfigError(
            f"{key} is {name!r}, which has linear attention layers, and these run in a target alone: a model with "
            "attention layers only, a head of the target or n-grams can draft"
        )
