"""The published formats of heads: from a configuration and the names of tensors to a module without weights.

Each method has one or more published formats:

- ``medusa``: FasterDecoding's ``{head}.{layer}.linear.*`` with ``{head}.{layers}.weight``; the same without LM heads
  (Medusa-2 of text-generation-inference); vLLM's ``blocks.{head}.layers.{layer}.*`` with ``lm_heads.{head}.weight``.
- ``mlp_speculator``: IBM's ``speculator.{emb,proj,head,ln}.{depth}.*``, tied or not.
- ``eagle``: SafeAILab's ``fc.*`` and ``layers.0.*``.
- ``eagle3``: SafeAILab's ``midlayer.*``, or ``layers.{i}.*`` of vLLM and of the speculators library.
- ``peagle``: ``eagle3`` and ``mask_hidden``.
- ``dflash``, ``dspark``, ``jetspec``: z-lab's, DeepSpec's and the speculators library's (``block_formats.py``).
- ``early_exit``: ours, as ``paceline train-head`` writes it (``exit_adapter.py``).
- ``speculative_streaming``: ours, too (``stream_head.py``).
- ``gemma4_assistant``: Google's drafters of Gemma 4 (``gemma4.py``).
- ``mtp``: in the target's own files, ``model.layers.{N + k}.*`` of DeepSeek and GLM, or ``mtp.*`` of Qwen,
  Nemotron-H and DeepSeek V4.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PretrainedConfig

from paceline.checkpoint.compressed import num_streams
from paceline.checkpoint.mtp import MTP_LAYER, mtp_modules, mtp_parts
from paceline.checkpoint.packing import packing_of
from paceline.drafters.heads.eagle import Eagle, Eagle3, Eagle3Form, PEagle
from paceline.drafters.heads.layers import FAMILIES
from paceline.drafters.heads.medusa import Medusa
from paceline.drafters.heads.mlp import MLPSpeculator
from paceline.drafters.heads.mtp import Mtp
from paceline.drafters.heads.reading import (
    HeadForm,
    Reading,
    borrowed_embedding,
    drop_output_bias,
    later,
    layers_config,
    matched_tensors,
    meta_model,
    renaming,
)
from paceline.errors import ConfigError, named
from paceline.model.features import OUT, STREAMS


def read_medusa(reading: Reading) -> HeadForm:
    """Counts heads and layers by the keys: published configurations say 2 of 5."""
    reading.require_config(
        {
            *("medusa_num_heads", "medusa_num_layers", "num_heads", "num_hidden_layers", "hidden_size", "vocab_size"),
            *("max_paths", "topk", "max_seq_len", "truncated_vocab_size", "medusa_fc_bias", "original_lm_head"),
        }
    )
    size, vocab = reading.facts.hidden_size, reading.facts.vocab_size
    reading.require_equal("hidden_size", reading.integer("hidden_size"), size)
    reading.require_equal("vocab_size", reading.integer("vocab_size"), vocab)
    blocks = [match for key in reading.keys if (match := re.match(r"(\d+)\.(\d+)\.linear\.weight$", _medusa_name(key)))]
    if not blocks:
        raise ConfigError(f"{reading.what} is not whole: no weight file holds '0.0.linear.weight'")
    num_heads, num_layers = (max(int(match[i]) for match in blocks) + 1 for i in (1, 2))
    shared = bool(reading.config.get("original_lm_head"))

    def rename(key: str) -> str | None:
        name = _medusa_name(key)
        if shared and name == "lm_heads.0.weight":
            return "lm_head.weight"
        if name == "token_map" and rows == vocab:
            return None
        return re.sub(r"^lm_heads\.(\d+)\.weight$", rf"\1.{num_layers}.weight", name)

    rows = 0  # of the LM heads
    shapes = {rename(key): reading.files.shapes[key] for key in reading.keys}
    shared = shared or "lm_head.weight" in shapes
    lm_heads = ["lm_head.weight"] if shared else [f"{head}.{num_layers}.weight" for head in range(num_heads)]
    found = [shapes[name] for name in lm_heads if name in shapes]
    rows = found[0][0] if found else 0
    if found and rows != vocab and shapes.get("token_map") != (rows,):
        raise ConfigError(f"{reading.what} has {rows} tokens: the target {reading.target!r} has {vocab}")
    module = Medusa(
        size,
        num_heads,
        num_layers,
        vocab_size=rows if found and not shared else None,
        shared_vocab_size=rows if shared else None,
        lm_head=None if found else later,
        bias=any(str(name).endswith(".linear.bias") for name in shapes),
        token_map_size=rows if found and rows != vocab else None,
    )
    names, experts = matched_tensors(reading, module, rename)
    return HeadForm(module, (OUT,), names, experts)


def _medusa_name(key: str) -> str:
    """A name in the files by FasterDecoding's names, but for the LM heads."""
    key = key.removeprefix("medusa_heads.").removeprefix("medusa_head.")
    return re.sub(r"^blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$", r"\1.\2.linear.\3", key)


def read_mlp(reading: Reading) -> HeadForm:
    config = reading.config
    reading.require_config(
        {
            *("vocab_size", "emb_dim", "inner_dim", "n_predict", "top_k_tokens_per_head", "n_candidates"),
            *("tie_weights", "scale_input", "max_seq_len", "hidden_size"),
        }
    )
    size, vocab = reading.facts.hidden_size, reading.facts.vocab_size
    reading.require_equal("vocab_size", reading.integer("vocab_size"), vocab)
    reading.require_equal("emb_dim", reading.integer("emb_dim", "hidden_size"), size)
    depths, tied = reading.integer("n_predict"), bool(config.get("tie_weights", False))
    if not depths:
        raise ConfigError(f"n_predict is {depths} in config.json of {reading.what}: the number of its tokens is needed")
    inner = reading.integer("inner_dim") or 0
    scale = bool(config.get("scale_input", False))
    module = MLPSpeculator(vocab, size, depths, inner, tie_weights=tied, scale_input=scale)
    names: dict[str, str] = {}
    published = {key.removeprefix("speculator."): key for key in reading.keys}
    distinct = dict(module.named_parameters())
    if unknown := sorted(published[key] for key in published.keys() - module.state_dict().keys()):
        raise ConfigError(f"{reading.what} holds {named(map(repr, unknown))}, which its format does not have")
    for name in distinct:  # tied ones count once, and may be there more than once
        kind, depth, part = name.split(".")
        same = [f"{kind}.{i}.{part}" for i in range(int(depth), depths)] if tied else [name]
        if not tied or kind != "proj" or depth != "0":
            choices = [key for key in same if key in published]
        else:
            choices = [key for key in [name] if key in published]
        if not choices:
            raise ConfigError(f"{reading.what} is not whole: no weight file holds {'speculator.' + name!r}")
        names[name] = published[choices[0]]
    return HeadForm(module, (OUT,), names, {})


_EAGLE_KEYS = {
    *("bias", "draft_vocab_size", "target_hidden_size", "eagle_config", "norm_before_residual", "norm_before_fc"),
    *("fc_norm", "norm_output", "num_aux_hidden_states", "tie_word_embeddings", "eagle_aux_hidden_state_layer_ids"),
    *("mask_token_id", "pard_token", "ptd_token_id", "speculators_model_type", "speculators_config", "ttt_length"),
    *("transformer_layer_config", "embed_requires_grad", "has_no_defaults_at_init", "rope_theta", "rope_scaling"),
    *("target_model_type", "fusion_bias", "layernorms", "add_para_norm", "use_aux_hidden_state"),
    *("layer_types", "sliding_window", "use_sliding_window", "max_window_layers"),
}
_EAGLE_CONFIG_KEYS = {"eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state", "norm_before_fc", "fc_norm"}
_EAGLE_CONFIG_KEYS |= {"norm_output", "norm_before_residual", "parallel_draft_step"}


def _eagle_layers(reading: Reading) -> PretrainedConfig:
    """The configuration of a head's layers, of a plain checkpoint or of the speculators library."""
    values = dict(reading.config.get("transformer_layer_config") or reading.config)
    kind = values.get("model_type", "llama")
    family = FAMILIES.get(kind)
    if family is None and "transformer_layer_config" in reading.config:
        raise ConfigError(f"model_type is {kind!r} in {reading.what}: {', '.join(FAMILIES)} are allowed")
    known = set((family or FAMILIES["llama"])[0]().to_dict())
    reading.require_config(known | _EAGLE_KEYS)
    reading.nested("eagle_config", reading.config.get("eagle_config") or {}).require_config(_EAGLE_CONFIG_KEYS)
    for name in ("layernorms", "add_para_norm", "fusion_bias"):
        if reading.config.get(name):
            raise ConfigError(f"{name} is {reading.config[name]!r} in {reading.what}: only its absence is allowed")
    own = {key: value for key, value in values.items() if key in known | {"rope_theta", "rope_scaling"}}
    config = layers_config(reading, own, kind if family else "llama")
    windowed = [*(values.get("layer_types") or ()), *(getattr(config, "layer_types", None) or ())]
    if values.get("use_sliding_window") or "sliding_attention" in windowed:
        raise ConfigError(f"layer_types of {reading.what} has 'sliding_attention': heads attend to the whole context")
    return config


def _eagle_names(key: str) -> str:
    return re.sub(r"^midlayer\.", "layers.0.", key.removeprefix("model."))


def read_eagle(reading: Reading) -> HeadForm:
    config = _eagle_layers(reading)
    names = {_eagle_names(key) for key in reading.keys}
    reading.require_equal("hidden_size", int(config.hidden_size), reading.facts.hidden_size)
    reading.require_equal("vocab_size", int(config.vocab_size), reading.facts.vocab_size)
    embed = borrowed_embedding(reading, names, config)
    module = Eagle(config, embed=embed, lm_head=later, bias="fc.bias" in names)
    drop_output_bias(module, names)
    matched, experts = matched_tensors(reading, module, _eagle_names)
    return HeadForm(module, (OUT,), matched, experts)


def read_eagle3(reading: Reading) -> HeadForm:
    config, own = _eagle_layers(reading), dict(reading.config)
    own |= reading.config.get("eagle_config") or {}
    facts, names = reading.facts, {_eagle_names(key): key for key in reading.keys}
    chosen = reading.boundaries or own.get("eagle_aux_hidden_state_layer_ids")
    speculators = "transformer_layer_config" in reading.config
    if chosen is None:
        chosen = (2, facts.num_layers // 2, facts.num_layers - 3)
    if not isinstance(chosen, (list, tuple)) or not chosen or not all(type(b) is int for b in chosen):
        raise ConfigError(f"eagle_aux_hidden_state_layer_ids is {chosen!r} in {reading.what}: numbers are needed")
    target_size = own.get("target_hidden_size") or facts.hidden_size
    reading.require_equal("target_hidden_size", target_size, facts.hidden_size)
    reading.require_equal("num_aux_hidden_states", own.get("num_aux_hidden_states"), len(chosen))
    use_fc = own.get("use_aux_hidden_state", True) or "fc.weight" in names
    draft = own.get("draft_vocab_size") or config.vocab_size
    has_head = "lm_head.weight" in names
    if not has_head and draft != facts.vocab_size:
        raise ConfigError(f"{reading.what} is not whole: no weight file holds 'lm_head.weight'")
    if draft != facts.vocab_size and "d2t" not in names:
        raise ConfigError(
            f"{reading.what} has {draft} tokens and no d2t: the target {reading.target!r} has {facts.vocab_size}"
        )
    form = Eagle3Form(
        num_boundaries=len(chosen),
        target_hidden_size=target_size,
        use_fc=bool(use_fc),
        norm_before_residual=bool(own.get("norm_before_residual", False)),
        norm_before_fc=bool(own.get("norm_before_fc", False)),
        fc_norm=bool(own.get("fc_norm", False)),
        norm_output=bool(own.get("norm_output", False)),
        fc_bias="fc.bias" in names,
    )
    rest: dict[str, Any] = {
        "draft_vocab_size": draft if has_head else None,
        "embed": borrowed_embedding(reading, set(names), config),
        "lm_head": None if has_head else later,
        "target_ids": torch.zeros(draft, dtype=torch.long) if "d2t" in names else None,
    }
    if not has_head and "embed_tokens.weight" in names and config.tie_word_embeddings:
        raise ConfigError(
            f"tie_word_embeddings is true in {reading.what}: a head with an embedding of its own needs its own "
            "lm_head.weight"
        )
    module: Eagle3
    if reading.what.startswith("peagle"):
        mask = reading.integer("mask_token_id", "pard_token", "ptd_token_id")
        if mask is None:
            raise ConfigError(f"config.json of {reading.what} has no mask_token_id: a P-EAGLE head needs it")
        if mask >= facts.vocab_size:
            raise ConfigError(f"mask_token_id is {mask} in {reading.what}: the target has {facts.vocab_size} tokens")
        module = PEagle(config, form, mask_token_id=mask, depths=reading.num_tokens, **rest)
    else:
        if not speculators and any(own.get(key) is not None for key in ("mask_token_id", "pard_token")):
            raise ConfigError(f"{reading.what} drafts all tokens in one pass: its method is 'peagle'")
        module = Eagle3(config, form, **rest)
    drop_output_bias(module, names)
    matched, experts = matched_tensors(reading, module, _eagle_names)
    return HeadForm(module, tuple(chosen), matched, experts)


def read_mtp(reading: Reading) -> HeadForm:
    target, facts = reading.facts.checkpoint, reading.facts
    names = reading.files.shapes
    parts = mtp_parts(target.config)
    modules = mtp_modules(names, target.config, facts.num_layers)
    if not modules:
        raise ConfigError(
            f"{reading.what} has no MTP layers: no weight is named model.layers.{facts.num_layers} or mtp"
        )
    if modules != set(range(len(modules))):
        raise ConfigError(f"{reading.what} is not whole: it has MTP layers {sorted(modules)}")
    if (
        target.quantization is not None
        and packing_of(target.quantization) is None
        and reading.files.folder == target.folder
    ):
        raise ConfigError(f"{reading.what} is quantized: MTP layers are run as plain weights only")
    model = meta_model(target)
    decoder, config = model.get_decoder(), model.config.get_text_config()
    if other := {*parts} - {"full_attention", "moe", "mlp"}:
        raise ConfigError(f"{reading.what} has MTP layers of type {other.pop()}: full_attention, moe and mlp work")
    streams = num_streams(target.config)
    rename = _streams_rename(model) if streams > 1 else _mtp_rename(facts.num_layers, len(parts))
    renamed = {key: name for key in names if (name := rename(key)) is not None}
    own = {name: key for key, name in renamed.items()}
    if "d2t" in own and "lm_head.weight" not in own:
        raise ConfigError(f"{reading.what} has d2t and no LM head of its own: it names the tokens of one")
    try:
        module = Mtp(
            config,
            decoder,
            len(modules),
            embed=None if "embed_tokens.weight" in own else later,
            lm_head=None if "lm_head.weight" in own else later,
            target_ids=torch.zeros(names[own["lm_head.weight"]][0], dtype=torch.long) if "d2t" in own else None,
        )
    except (AttributeError, TypeError, ValueError, IndexError, StopIteration) as error:
        raise ConfigError(
            f"{reading.what} has MTP layers of a family that they cannot be made of ({type(model).__name__}): {error}"
        ) from error
    publish = str if streams > 1 else _mtp_publish(facts.num_layers, renamed, len(parts))
    matched, experts = matched_tensors(reading, module, rename, publish)
    boundaries = tuple(range(STREAMS, STREAMS - streams, -1)) if streams > 1 else (OUT,)
    return HeadForm(module, boundaries, matched, experts)


def _streams_rename(model: Any) -> Callable[[str], str | None]:
    """Maps the names of DeepSeek V4 to the module's names; None for the target's own weights.

    ``model``: the target's, by whose renamings transformers reads layers of these names.
    """
    renamed = renaming(model)
    experts = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}

    def rename(key: str) -> str | None:
        found = re.fullmatch(r"mtp\.(\d+)\.(.+)", key)
        if found is None:
            return None
        depth, name = found.groups()
        if re.fullmatch(r"(enorm|hnorm|norm|e_proj|h_proj)\.weight", name):
            return f"modules_by_depth.{depth}.{name}"
        if name.startswith("hc_head_"):
            return f"modules_by_depth.{depth}.{name.replace('hc_head_', 'hc_head.hc_')}"
        own = renamed(f"layers.0.{name}")
        own = re.sub(r"(\.experts\.\d+)\.(w[123])\.", lambda m: f"{m[1]}.{experts[m[2]]}.", own)
        return f"modules_by_depth.{depth}.block.{own.removeprefix('layers.0.')}"

    return rename


def _mtp_rename(num_layers: int, num_parts: int = 0) -> Callable[[str], str | None]:
    """Maps the tensor names of DeepSeek, GLM, Qwen and Nemotron-H to the module's names; None for the target's own
    weights. ``num_parts``: layers of a module of Nemotron-H, which are counted through; 0: a module is one layer."""
    inside = {"shared_head.norm.weight": "norm.weight", "final_layernorm.weight": "norm.weight"}
    direct = ("enorm.weight", "hnorm.weight", "eh_proj.weight")
    qwen = {
        "mtp.fc.weight": "modules_by_depth.0.eh_proj.weight",
        "mtp.pre_fc_norm_embedding.weight": "modules_by_depth.0.enorm.weight",
        "mtp.pre_fc_norm_hidden.weight": "modules_by_depth.0.hnorm.weight",
        "mtp.norm.weight": "modules_by_depth.0.norm.weight",
        "mtp.embed_tokens.weight": "embed_tokens.weight",
        "mtp.lm_head.weight": "lm_head.weight",
    }

    def rename(key: str) -> str | None:
        if key == "d2t":
            return key
        if key.startswith("mtp."):
            if key in qwen:
                return qwen[key]
            found = re.fullmatch(r"mtp\.layers\.(\d+)\.(.+)", key)
            if found is None:
                return key
            if not num_parts:
                return f"modules_by_depth.{found[1]}.block.{found[2]}"
            depth, part = divmod(int(found[1]), num_parts)
            own = found[2] if found[2] in direct else inside.get(found[2])
            return f"modules_by_depth.{depth}.{own or f'block.parts.{part}.{found[2]}'}"
        found = MTP_LAYER.fullmatch(key)
        if found is None or int(found[1]) < num_layers:
            return None
        depth, name = int(found[1]) - num_layers, found[2]
        if name == "embed_tokens.weight":
            return name
        if name == "shared_head.head.weight":
            return "lm_head.weight"
        if name in direct:
            return f"modules_by_depth.{depth}.{name}"
        return f"modules_by_depth.{depth}.{inside.get(name) or 'block.' + name}"

    return rename


def _mtp_publish(num_layers: int, renamed: Mapping[str, str], num_parts: int = 0) -> Callable[[str], str]:
    """Maps names of the module to names in the files: Qwen's names if any of ``renamed`` has them. ``num_parts``: as in
    ``_mtp_rename``."""
    qwen = any(key.startswith("mtp.") for key in renamed)
    own = {"eh_proj": "mtp.fc", "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden"}

    def publish(name: str) -> str:
        found = re.fullmatch(r"modules_by_depth\.(\d+)\.(\w+)\.(.+)", name)
        if found is None:
            return name
        part, rest, index = found[2], found[3], int(found[1])
        if num_parts:
            number, _, inner = rest.removeprefix("parts.").partition(".") if part == "block" else ("0", "", "")
            last = (index + 1) * num_parts - 1
            own_part = {"block": inner, "norm": "final_layernorm.weight"}.get(part, f"{part}.{rest}")
            return f"mtp.layers.{last if part == 'norm' else index * num_parts + int(number)}.{own_part}"
        if qwen:
            return f"mtp.layers.{index}.{rest}" if part == "block" else f"{own.get(part, 'mtp.norm')}.{rest}"
        part = {"block": "", "norm": "shared_head.norm."}.get(part, f"{part}.")
        return f"model.layers.{num_layers + index}.{part}{rest}"

    return publish
