"""The linear layers of a model, from its configuration: their number, their memory, and the options that they
exclude."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

from paceline.checkpoint.compressed import compressors
from paceline.checkpoint.folder import text_config
from paceline.checkpoint.indexed import num_indexers, why_eager
from paceline.checkpoint.packing import packing_of
from paceline.checkpoint.quantization import method_of
from paceline.errors import ConfigError
from paceline.types import least_states

CHUNK = 16
"""Rows of a chunk of linear layers. Part of the order of sums, so of the bits: no option."""
LINEAR = "linear_attention"
"""The name of most linear layers in configurations."""
CONV = "conv"
"""The name of short convolutions there."""
BOTH = "hybrid"
"""The name of layers that attend in addition."""
PASSING = {"mlp", "moe"}
"""Names of layers that keep nothing of a token."""
_LEGACY = {"mamba": LINEAR, "M": LINEAR, "E": "moe", "-": "mlp"}
"""Names of layers in older configurations; any other is of attention."""
_FLOAT32_BYTES = 4


class Kind(StrEnum):
    """What a linear layer computes."""

    GATED_DELTA = "gated delta"
    KIMI_DELTA = "Kimi delta"
    LIGHTNING = "lightning attention"
    CONVOLUTION = "short convolution"
    MAMBA = "Mamba"
    MAMBA2 = "Mamba2"


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """The sizes of a linear layer."""

    key_heads: int
    value_heads: int
    key_dim: int
    """0: there is no state, as of a short convolution, whose channels are value heads of one number each."""
    value_dim: int
    width: int
    """Tokens that the convolution reads, the current one included."""
    kind: Kind = Kind.GATED_DELTA

    def of_rank(self, degree: int) -> LinearSpec:
        """The sizes of one of ``degree`` ranks."""
        return replace(self, key_heads=-(-self.key_heads // degree), value_heads=-(-self.value_heads // degree))

    @property
    def state_heads(self) -> int:
        """Heads that have a state."""
        return self.value_heads if self.key_dim else 0

    @property
    def decay_dim(self) -> int:
        """Decays of a head: one for each row of its state, or one for all."""
        return self.key_dim if self.kind is Kind.KIMI_DELTA else 1

    @property
    def has_convolution(self) -> bool:
        """False: queries, keys and values are the token's own; the width is 1."""
        return self.kind is not Kind.LIGHTNING

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: queries, keys and values; of Mamba, which makes the others of them, values."""
        if not self.has_convolution:
            return 0
        keys = 0 if self.kind is Kind.MAMBA else 2 * self.key_heads * self.key_dim
        return keys + self.value_heads * self.value_dim

    def state_bytes(self, item_bytes: int) -> int:
        """Bytes of a state with the inputs of the convolution before it, which have ``item_bytes`` each."""
        state = self.state_heads * self.key_dim * self.value_dim
        return _FLOAT32_BYTES * state + (self.width - 1) * self.conv_dim * item_bytes

    def chunk_bytes(self, item_bytes: int) -> int:
        """Bytes of the rows of a chunk."""
        numbers = self.key_heads * self.key_dim + self.state_heads * (self.value_dim + self.decay_dim)
        return CHUNK * (_FLOAT32_BYTES * numbers + self.conv_dim * item_bytes)


@dataclass(frozen=True, slots=True)
class Slots:
    """Numbers of slots for states, and for the rows of chunks."""

    states: int
    rows: int

    @classmethod
    def of(cls, max_sessions: int, states: int | None = None, branches: int = 0) -> Slots:
        """Returns the slots for ``max_sessions`` sessions. ``states``: those for states; None: the default number.

        Free slots keep states for prefix hits. A session's rows are in two chunks, or in four if a long proposal
        crosses a boundary. Each other branch of a tree needs the same number. ``branches``: how many a session of a
        draft keeps from step to step, each in one chunk of its own.
        """
        return cls(least_states(max_sessions) + 8 if states is None else states, (4 + branches) * max_sessions + 32)


@dataclass(frozen=True, slots=True)
class LinearLayers:
    """The linear layers of a model, all of one size."""

    num: int
    spec: LinearSpec
    num_others: int = 0
    """Further layers that keep no keys and values, such as an MLP alone."""
    num_both: int = 0
    """Linear layers that also keep keys and values."""

    @property
    def num_without_kv(self) -> int:
        """Layers that keep no keys and values."""
        return self.num - self.num_both + self.num_others

    def state_bytes(self, item_bytes: int) -> int:
        """Bytes of one state in all layers."""
        return self.num * self.spec.state_bytes(item_bytes)

    def slots_bytes(self, slots: Slots, item_bytes: int) -> int:
        """Bytes of all slots."""
        rows = slots.rows * self.num * self.spec.chunk_bytes(item_bytes)
        return slots.states * self.state_bytes(item_bytes) + rows


class _Names(NamedTuple):
    """The settings that hold the sizes of linear layers."""

    kind: Kind
    sizes: tuple[str | tuple[str, ...] | int, ...]
    """In the order of ``LinearSpec``. Of several names the first one that is set counts; ``a.b`` is b in the table a,
    ``a * b`` a product; a number is the size itself."""


_GATED_DELTA = _Names(
    Kind.GATED_DELTA,
    (
        *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
        "linear_conv_kernel_dim",
    ),
)
_KIMI_HEADS = ("linear_attn_config.num_heads", "linear_num_heads", "num_attention_heads")
_KIMI_DIM = ("linear_attn_config.head_dim", "linear_head_dim", "head_dim")
_KIMI_WIDTH = ("linear_attn_config.short_conv_kernel_size", "linear_conv_kernel_dim", "short_conv_kernel_size")
_KIMI_DELTA = _Names(Kind.KIMI_DELTA, (_KIMI_HEADS, _KIMI_HEADS, _KIMI_DIM, _KIMI_DIM, _KIMI_WIDTH))
_CONVOLUTION = _Names(Kind.CONVOLUTION, (0, "hidden_size", 0, 1, "conv_L_cache"))
_JAMBA = _Names(Kind.MAMBA, (1, "mamba_expand * hidden_size", "mamba_d_state", 1, "mamba_d_conv"))
_NEMOTRON_H = _Names(Kind.MAMBA2, ("n_groups", "mamba_num_heads", "ssm_state_size", "mamba_head_dim", "conv_kernel"))
_MAMBA2 = _Names(Kind.MAMBA2, ("mamba_n_groups", "mamba_n_heads", "mamba_d_state", "mamba_d_head", "mamba_d_conv"))
_ZAMBA2 = _Names(Kind.MAMBA2, ("mamba_ngroups", "n_mamba_heads", "mamba_d_state", "mamba_headdim", "mamba_d_conv"))
_LIGHTNING = _Names(Kind.LIGHTNING, ("num_attention_heads", "num_attention_heads", "head_dim", "head_dim", 1))
_FAMILIES = {
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _GATED_DELTA),
    "olmo_hybrid": _GATED_DELTA,
    "kimi_linear": _KIMI_DELTA,
    "bailing_hybrid": _KIMI_DELTA,
    "minimax": _LIGHTNING,
    "jamba": _JAMBA,
    "lfm2": _CONVOLUTION,
    "lfm2_moe": _CONVOLUTION,
    "nemotron_h": _NEMOTRON_H,
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid"), _MAMBA2),
    "zamba2": _ZAMBA2,
}
"""Model types with linear layers that run."""


def linear_layers(config: Mapping[str, Any]) -> LinearLayers | None:
    """The linear layers of a configuration; None: it has none of a known kind."""
    text = text_config(config)
    names = _FAMILIES.get(text.get("model_type") or "")
    if names is None:
        return None
    kinds = layer_types(text)
    if not text.get("head_dim"):
        text = {**text, "head_dim": (text.get("hidden_size") or 0) // (text.get("num_attention_heads") or 1)}
    if text.get("mamba_d_head") == "auto":
        channels = text.get("mamba_d_ssm") or _size(text, "mamba_expand * hidden_size") or 0
        text = {**text, "mamba_d_head": channels // (text.get("mamba_n_heads") or 1)}
    sizes: list[Any] = [_size(text, setting) for setting in names.sizes]
    num = sum(kind in (LINEAR, CONV, BOTH) for kind in kinds)
    if not num or None in sizes:
        return None
    spec = replace(LinearSpec(*sizes), kind=names.kind)
    return LinearLayers(num, spec, sum(kind in PASSING for kind in kinds), kinds.count(BOTH))


def _size(text: Mapping[str, Any], setting: str | tuple[str, ...] | int) -> int | None:
    """The size that a setting of ``_Names`` holds; None: it is unknown, as is 0."""
    if isinstance(setting, int):
        return setting
    for names in (setting,) if isinstance(setting, str) else setting:
        factors = []
        for name in names.split(" * "):
            table, _, key = name.rpartition(".")
            factors.append((text.get(table) or {} if table else text).get(key))
        sizes = [size for size in factors if isinstance(size, int) and size]
        if len(sizes) == len(factors):
            return math.prod(sizes)
    return None


def layer_types(text: Mapping[str, Any]) -> list[str]:
    """The name of each layer's type in the configuration of a model with linear layers."""
    if kinds := text.get("layer_types") or text.get("layers_block_type") or text.get("hybrid_override_pattern"):
        return [_LEGACY.get(kind, kind) for kind in kinds]
    num = text.get("num_hidden_layers") or 0
    if (published := text.get("linear_attn_config")) is not None:
        return [LINEAR if i + 1 in published.get("kda_layers", ()) else "" for i in range(num)]
    if (period := text.get("attn_layer_period")) is not None:
        return ["" if i % period == text.get("attn_layer_offset") else LINEAR for i in range(num)]
    if "mamba_d_ssm" in text:
        return [BOTH] * num
    if "attn_layer_indices" in text:
        return ["" if i in (text["attn_layer_indices"] or ()) else LINEAR for i in range(num)]
    if (attending := text.get("full_attn_idxs")) is not None:
        return ["" if i in attending else CONV for i in range(num)]
    interval = text.get("full_attention_interval") or text.get("layer_group_size")
    interval = interval or (1 if "conv_L_cache" in text else 4)
    return [LINEAR if (i + 1) % interval else "" for i in range(num)]


def why_not_runnable(
    config: Mapping[str, Any],
    stored: Mapping[str, Any] | None,
    *,
    device: str,
    quantization: str | None,
    compile: bool | str = "auto",
    state_slots: int | None = None,
    kv_cache_dtype: str = "auto",
) -> tuple[str, str] | None:
    """The option that a model with linear, indexed or compressed layers does not support, and the reason as a clause
    that follows the option's name. None: the model has no such layers, or can run.

    Args:
        config: the model's.
        stored: the quantization that its weights come with; None: they are plain.
        device: type of the device.
        quantization: the option.
        compile: the option; of Llama 4 it is refused, too.
        state_slots, kv_cache_dtype: the options.
    """
    layers, reason = linear_layers(config), why_eager(config, demanded=True)
    if layers is None and state_slots is not None:
        return "state_slots", f"is {state_slots}, and the model has no linear layers: null is allowed"
    if compile is True and device == "cpu" and reason is not None:
        return "compile", f"is true, but {reason}: set compile to auto or false"
    kind: str | None = None if layers is None else layers.spec.kind
    if layers is None and num_indexers(config):
        kind = "indexed attention"
    if compressors(config):
        kind = "compressed attention"
    if kind is None:
        return None
    has = f"and the model has {kind} layers"
    if compressors(config) and kv_cache_dtype != "auto":
        return "kv_cache_dtype", f"is {kv_cache_dtype!r} {has}, which keep the model's dtype: 'auto' is allowed"
    if device == "cuda" and layers is None:
        return "device", f"is 'cuda' {has}, which run on the CPU alone: 'cpu' is allowed"
    rounds = layers is not None and layers.spec.kind is not Kind.MAMBA  # which reads weights itself
    if quantization is not None and not rounds:
        return "quantization", f"is {quantization!r} {has}, which run with plain weights alone: null is allowed"
    if stored is not None and packing_of(stored) is None:
        return "model", f"is quantized by {method_of(stored)!r} {has}, which run with plain weights alone"
    return None


def require_runnable(config: Mapping[str, Any], stored: Mapping[str, Any] | None, name: str, **options: Any) -> None:
    """Checks ``why_not_runnable`` before a weight is read. Raises ConfigError, which names the model ``name``."""
    if (wrong := why_not_runnable(config, stored, **options)) is not None:
        raise ConfigError(f"{' '.join(wrong)} ({name})")


def require_draft_model(config: Mapping[str, Any], key: str, name: str) -> None:
    """Checks that a draft model has no compressed layers, and is no drafter that needs its target's cache. Raises
    ConfigError, which begins with ``key``."""
    if (kind := config.get("model_type")) in ("gemma4_assistant", "gemma4_unified_assistant"):
        raise ConfigError(
            f"{key} is {name!r}, a {kind}, which needs the target's keys and values: it drafts in the target, as a "
            "head of method 'gemma4_assistant'"
        )
    if compressors(config):
        raise ConfigError(
            f"{key} is {name!r}, which has compressed attention layers, and these run in a target alone: a model with "
            "other layers, a head of the target or n-grams can draft"
        )
