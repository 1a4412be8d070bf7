"""The published formats of block heads: DFlash, DFlash 2, DSpark, JetSpec.

Three kinds of config.json are read. z-lab's has its own keys in ``dflash_config``, DeepSpec's has them at the top, and
the speculators library has the layers in ``transformer_layer_config``. A key counts wherever it stands. A key that
stands twice must have one value. The tensors are the same in all three: ``fc``, ``hidden_norm``, ``norm``,
``layers.{i}`` of the Qwen 3 or Llama family, and the tensors of ``block.py``. JetSpec's files are DFlash's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from paceline.drafters.heads.block import BlockForm, BlockHead
from paceline.drafters.heads.layers import FAMILIES
from paceline.drafters.heads.reading import (
    HeadForm,
    Reading,
    borrowed_embedding,
    drop_output_bias,
    later,
    layers_config,
    matched_tensors,
)
from paceline.errors import ConfigError

SINGLE = dict.fromkeys(("dflash", "dspark", "jetspec"), ("mask_embedding",))
"""Method -> names, without the ending, of further files that hold one tensor each."""

_BLOCK = {"mask_token_id", "target_layer_ids", "block_size", "sample_from_anchor", "dspark_bonus_anchor"}
_CAUSAL = ("causal", "causal_head", "dflash_query_causal", "is_causal")
_WINDOW = {"layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "use_swa", "swa_window_size"}
_DFLASH2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_DSPARK = {"markov_rank", "dspark_markov_rank", "markov_head_type", "dspark_fixup_head_type"}
_DSPARK |= {"enable_confidence_head", "confidence_head_with_markov"}
_SCALES = {"input_embedding_scale", "output_multiplier", "final_logit_softcapping"}
_KEYS = {
    *(*_BLOCK, *_CAUSAL, *_WINDOW, *_DFLASH2, *_DSPARK, *_SCALES),
    *("num_target_layers", "target_hidden_size", "draft_vocab_size", "attention_sink_bias", "is_neox_style"),
    *("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids", "has_embed_tokens", "has_lm_head"),
    *("rope_theta", "rope_scaling", "sliding_window_non_causal"),
}
_OF_TRAINING = {
    *("max_anchors", "num_anchors", "train_embed_tokens", "draft_arch", "target_model_type", "target_text_model_type"),
    *("speculators_model_type", "speculators_config", "has_no_defaults_at_init", "transformer_layer_config"),
    *("use_aux_hidden_state", "dflash_config"),
}
"""Keys of training, and of parts that are read on their own. Their values decide nothing by themselves."""


@dataclass(frozen=True)
class _Block:
    """The values of a configuration, wherever they stand in it."""

    reading: Reading
    values: Mapping[str, Any]
    config: PretrainedConfig
    names: frozenset[str]

    def integer(self, name: str, *, least: int = 1, default: int | None = None) -> int:
        """Returns a whole number.

        Raises:
            ConfigError: it is smaller than ``least``, no whole number, or missing without a ``default``.
        """
        value = self.values.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(
                f"{name} is {value!r} in config.json of {self.reading.what}: a number of at least {least} is needed"
            )
        return value

    def agreed(self, default: bool, **said: object) -> bool:
        """Returns the value that the given keys share. None: a key is absent; ``default``: all keys are absent.

        Raises:
            ConfigError: two keys have different values.
        """
        values = {name: bool(value) for name, value in said.items() if value is not None}
        if len(set(values.values())) > 1:
            raise ConfigError(f"{' and '.join(values)} of {self.reading.what} contradict each other")
        return next(iter(values.values()), default)


def read_block(reading: Reading) -> HeadForm:
    """Opens a head of method ``dflash``, ``dspark`` or ``jetspec``.

    Raises:
        ConfigError: as ``open_head``.
    """
    block, facts, method = _examined(reading), reading.facts, reading.what.split()[0]
    boundaries = reading.boundaries or _boundaries(block)
    form = _form(block, method, boundaries)
    names, values = block.names, block.values
    vocab = facts.vocab_size
    reading.require_equal("vocab_size", int(block.config.vocab_size), vocab)
    draft, own_head = values.get("draft_vocab_size") or vocab, "lm_head.weight" in names
    if draft != vocab:
        if form.selector is not None:
            raise ConfigError(f"draft_vocab_size is {draft} in {reading.what}: a DFlash 2 head has all tokens, {vocab}")
        if missing := [name for name in ("lm_head.weight", "d2t") if name not in names]:
            raise ConfigError(f"{reading.what} has {draft} tokens, not {vocab}: no weight file holds {missing[0]!r}")
    for key, name in (("has_embed_tokens", "embed_tokens.weight"), ("has_lm_head", "lm_head.weight")):
        if values.get(key) and name not in names:
            raise ConfigError(f"{key} is true in {reading.what}: no weight file holds {name!r}")
    if not own_head:
        reading.require_equal("hidden_size (it has no lm_head)", int(block.config.hidden_size), facts.hidden_size)
    module = BlockHead(
        block.config,
        form,
        vocab_size=vocab,
        draft_vocab_size=draft if own_head else None,
        embed=borrowed_embedding(reading, set(names), block.config),
        lm_head=None if own_head else later,
        target_ids=torch.zeros(draft, dtype=torch.long) if "d2t" in names else None,
    )
    drop_output_bias(module, names)
    matched, experts = matched_tensors(reading, module, _name)
    return HeadForm(module, boundaries, matched, experts)


def _name(key: str) -> str:
    return key.removeprefix("model.")


def _examined(reading: Reading) -> _Block:
    """Reads the configuration, and refuses unknown keys."""
    nested = reading.config.get("dflash_config") or {}
    layers = reading.config.get("transformer_layer_config") or {}
    names = frozenset(_name(key) for key in reading.keys)
    family = "qwen3" if any(name.endswith("self_attn.q_norm.weight") for name in names) else "llama"
    known = set(FAMILIES[family][0]().to_dict())
    reading.require_config(known | _KEYS | _OF_TRAINING)
    for where, part, allowed in (
        ("dflash_config", nested, _KEYS | _OF_TRAINING),
        ("transformer_layer_config", layers, known | _KEYS),
    ):
        reading.nested(where, part).require_config(allowed)
    values = dict(layers)
    for part in (reading.config, nested):
        for key in part.keys() & _KEYS:
            if values.get(key) is not None and part[key] is not None and values[key] != part[key]:
                raise ConfigError(f"{key} is {values[key]!r} and {part[key]!r} in config.json of {reading.what}")
            values[key] = part[key] if part[key] is not None else values.get(key)
    if values.get("attention_sink_bias"):
        raise ConfigError(f"attention_sink_bias is true in {reading.what}: only its absence is allowed")
    if values.get("is_neox_style") is False:
        raise ConfigError(f"is_neox_style is false in {reading.what}: heads rotate halves, not pairs")
    own = dict(layers or reading.config)
    own = {key: own[key] for key in own.keys() & (known | {"rope_theta", "rope_scaling"}) if key not in _WINDOW}
    config = layers_config(reading, own, family)
    return _Block(reading, {key: value for key, value in values.items() if value is not None}, config, names)


def _boundaries(block: _Block) -> tuple[int, ...]:
    """Returns the boundaries. ``target_layer_ids`` lists layers by their output, the other two keys by their input."""
    reading, values = block.reading, block.values
    num_layers = reading.facts.num_layers
    reading.require_equal("num_target_layers", values.get("num_target_layers"), num_layers)
    found = {
        key: _numbers(reading, key, values[key], shift)
        for key, shift in (
            ("target_layer_ids", 1),
            ("aux_hidden_state_layer_ids", 0),
            ("eagle_aux_hidden_state_layer_ids", 0),
        )
        if key in values
    }
    if len(set(found.values())) > 1:
        raise ConfigError(f"{' and '.join(found)} of {reading.what} name different layers")
    if found:
        return next(iter(found.values()))
    count = int(block.config.num_hidden_layers)
    if count == 1:
        return (num_layers // 2 + 1,)
    return tuple(round(1 + i * (num_layers - 4) / (count - 1)) + 1 for i in range(count))


def _numbers(reading: Reading, key: str, value: object, shift: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(type(each) is int for each in value):
        raise ConfigError(f"{key} is {value!r} in {reading.what}: numbers are needed")
    return tuple(each + shift for each in value)


def _form(block: _Block, method: str, boundaries: tuple[int, ...]) -> BlockForm:
    reading, values, facts = block.reading, block.values, block.reading.facts
    mask = block.integer("mask_token_id", least=0)
    if mask >= facts.vocab_size:
        raise ConfigError(f"mask_token_id is {mask} in {reading.what}: the target has {facts.vocab_size} tokens")
    reading.require_equal("target_hidden_size", values.get("target_hidden_size"), facts.hidden_size)
    bonus = values.get("dspark_bonus_anchor")
    from_anchor = block.agreed(
        method == "dspark",
        sample_from_anchor=values.get("sample_from_anchor"),
        dspark_bonus_anchor=None if bonus is None else not bonus,
    )
    size = block.integer("block_size", least=1 if from_anchor else 2)
    windows = _windows(block)
    return BlockForm(
        target_width=len(boundaries) * facts.hidden_size,
        mask_token_id=mask,
        num_tokens=min(reading.num_tokens, size if from_anchor else size - 1),
        first_row=0 if from_anchor else 1,
        windows=windows,
        causal=_causal(block, method, windows),
        own_mask="mask_embedding" in block.names,
        embedding_scale=float(values.get("input_embedding_scale", 1.0)),
        logit_scale=float(values.get("output_multiplier", 1.0)),
        logit_cap=float(values.get("final_logit_softcapping", 0.0)) or None,
        **_second(block, method),
        **_sequential(block, method),
    )


def _windows(block: _Block) -> tuple[int | None, ...]:
    """Window of each layer; None: it sees all of the context."""
    values, what, count = block.values, block.reading.what, int(block.config.num_hidden_layers)
    kinds = values.get("layer_types")
    if values.get("use_swa"):
        kinds = ["sliding_attention"] * count
    elif kinds is None:
        first = block.integer("max_window_layers", least=0, default=28)
        sliding = bool(values.get("use_sliding_window"))
        kinds = ["sliding_attention" if sliding and i >= first else "full_attention" for i in range(count)]
    if len(kinds) != count or set(kinds) - {"sliding_attention", "full_attention"}:
        raise ConfigError(
            f"layer_types is {kinds!r} in {what}: {count} of 'sliding_attention', 'full_attention' are needed"
        )
    if "sliding_attention" not in kinds:
        return (None,) * count
    window = block.integer("swa_window_size" if "swa_window_size" in values else "sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _causal(block: _Block, method: str, windows: tuple[int | None, ...]) -> tuple[bool, ...]:
    """Returns for each layer whether a row sees only the rows before it.

    In files of the speculators library only layers with windows can be causal.
    """
    values = block.values
    if "transformer_layer_config" in block.reading.config and method != "jetspec":
        open_ = bool(values.get("sliding_window_non_causal", _is_second(block)))
        return tuple(window is not None and not open_ for window in windows)
    causal = block.agreed(method == "jetspec", **{name: values.get(name) for name in _CAUSAL})
    if method == "jetspec" and not causal:
        raise ConfigError(f"{block.reading.what} has rows that see the whole block: its method is 'dflash'")
    return (causal,) * len(windows)


def _is_second(block: _Block) -> bool:
    """True for DFlash 2."""
    kinds = [*(block.reading.config.get("architectures") or ()), block.reading.config.get("speculators_model_type")]
    return any(name in block.values for name in _DFLASH2) or any("dflash2" in str(kind).lower() for kind in kinds)


def _second(block: _Block, method: str) -> dict[str, Any]:
    """The parts that DFlash 2 adds."""
    if not _is_second(block):
        return {}
    if method == "dspark":
        raise ConfigError(f"{block.reading.what} has the parts of DFlash 2: its method is 'dflash'")
    group, size = block.integer("conv_group_size", default=16), int(block.config.hidden_size)
    if size % group:
        raise ConfigError(f"conv_group_size is {group} in {block.reading.what}: it must divide hidden_size, {size}")
    return {
        "convolution": (block.integer("conv_kernel_size", default=2), group),
        "selector": (block.integer("selector_rank", default=256), block.integer("selector_top_k", default=16)),
    }


def _sequential(block: _Block, method: str) -> dict[str, Any]:
    """The parts that DSpark adds."""
    values, what, shapes = block.values, block.reading.what, _shapes(block.reading)
    if method != "dspark":
        if any(name.startswith(("markov_head.", "confidence_head.")) for name in block.names):
            raise ConfigError(f"{what} has a Markov head: its method is 'dspark'")
        return {}
    kind = values.get("markov_head_type", "vanilla")
    if kind not in ("vanilla", "gated"):
        raise ConfigError(f"markov_head_type is {kind!r} in {what}: vanilla, gated are allowed")
    if values.get("dspark_fixup_head_type", "markov") != "markov":
        raise ConfigError(
            f"dspark_fixup_head_type is {values['dspark_fixup_head_type']!r} in {what}: markov is allowed"
        )
    ranks = [values[name] for name in ("markov_rank", "dspark_markov_rank") if name in values]
    if len(set(ranks)) > 1:
        raise ConfigError(f"markov_rank and dspark_markov_rank of {what} contradict each other")
    found = shapes.get("markov_head.markov_w1.weight", (0, 256))[-1]
    rank = block.integer("markov_rank" if "markov_rank" in values else "dspark_markov_rank", least=0, default=found)
    weight = shapes.get("confidence_head.proj.weight")
    wide = weight is None or weight[-1] != int(block.config.hidden_size)
    return {
        "markov": rank or None,
        "gated": kind == "gated",
        "confidence": bool(values.get("enable_confidence_head", weight is not None)),
        "confidence_bias": weight is None or "confidence_head.proj.bias" in shapes,
        "confidence_with_markov": bool(values.get("confidence_head_with_markov", wide)),
    }


def _shapes(reading: Reading) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each tensor by its name in the module."""
    keys: Iterable[str] = reading.keys
    return {_name(key): reading.files.shapes[key] for key in keys}
