"""config.json of a GGUF file: its metadata in transformers' words, family by family."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from paceline.checkpoint.gguf.header import Header
from paceline.errors import ConfigError

FAMILIES: Mapping[str, tuple[str, str]] = {
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen2moe": ("qwen2_moe", "Qwen2MoeForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "gemma": ("gemma", "GemmaForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
    "gpt-oss": ("gpt_oss", "GptOssForCausalLM"),
}
"""``general.architecture`` -> (model type, class) of transformers."""
_KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
"""Keys that every family has."""
_WIDTH = "feed_forward_length"
"""The one of them that models of experts may lack."""
_KNOWN = {
    *_KEYS,
    *("vocab_size", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("rope.dimension_count", "rope.freq_base", "rope.freq_base_swa", "attention.causal"),
    *(f"rope.scaling.{key}" for key in ("type", "factor", "original_context_length", "attn_factor", "finetuned")),
    *(f"rope.scaling.yarn_{key}" for key in ("beta_fast", "beta_slow", "ext_factor", "attn_factor", "log_multiplier")),
    *("rope.scale_linear", "attention.sliding_window", "attention.sliding_window_pattern"),
    *("expert_count", "expert_used_count", "expert_feed_forward_length", "expert_shared_feed_forward_length"),
    *("expert_weights_norm", "expert_gating_func", "attn_logit_softcapping", "final_logit_softcapping"),
    *("attention.scale", "tensor_data_layout", "nextn_predict_layers", "leading_dense_block_count"),
}
"""Keys whose meaning is known; others could change what the model computes."""
_WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "rope.scale_linear": (1.0,),
    "tensor_data_layout": ("Meta AI original pth",),
    "nextn_predict_layers": (0,),
    "leading_dense_block_count": (0,),
    "expert_weights_norm": (True,),
    "expert_gating_func": (0, 1),
}
"""Keys that are read with these values only, in which they change nothing."""
_SOFTMAX_OVER_CHOSEN = 3
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""Layers of the models of 27 B, which alone scale attention by their width."""
_LLAMA3_TOLERANCE = 1e-4


class _Metadata:
    """The metadata of one family: keys without its name."""

    def __init__(self, header: Header) -> None:
        self.header, self.arch = header, header.architecture
        self.what = repr(str(header.files[0]))

    def get(self, key: str, otherwise: Any = None) -> Any:
        """The value of a key; ``otherwise`` if the file has none."""
        return self.header.metadata.get(f"{self.arch}.{key}", otherwise)

    def number(self, key: str, otherwise: float | None = None) -> Any:
        """A positive number, the same for all layers. Raises ConfigError for anything else."""
        value = self.get(key, otherwise)
        if isinstance(value, list) and value and all(one == value[0] for one in value):
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self.refuse(key, "a number above 0 is needed")
        return value

    def refuse(self, key: str, allowed: str) -> ConfigError:
        """An error about a key."""
        value = self.get(key)
        shown = repr(value) if not isinstance(value, list) or len(value) < 9 else f"a list of {len(value)}"
        return ConfigError(f"{self.arch}.{key} is {shown} in {self.what}: {allowed}")


def config_of(header: Header, values: Callable[[str], list[float]]) -> dict[str, Any]:
    """The content of config.json.

    Args:
        header: that of the files.
        values: gives the numbers of a small tensor by its name in the file.

    Raises:
        ConfigError: the family, or something of the file, is not read.
    """
    meta = _Metadata(header)
    if meta.arch not in FAMILIES:
        raise ConfigError(f"general.architecture is {meta.arch!r} in {meta.what}: {', '.join(FAMILIES)} are read")
    _require_known(meta)
    model_type, name = FAMILIES[meta.arch]
    config = {own: meta.number(key) for key, own in _KEYS.items() if meta.get(key) is not None or key != _WIDTH}
    heads = config["num_attention_heads"]
    usual = config["hidden_size"] // heads
    if model_type in ("llama", "mistral"):
        usual = meta.number("rope.dimension_count", usual)
    head_dim = meta.number("attention.key_length", usual)
    if meta.number("attention.value_length", head_dim) != head_dim:
        raise meta.refuse("attention.value_length", f"{head_dim}, the length of keys, is read")
    if "token_embd.weight" not in header.tensors:
        raise ConfigError(f"{meta.what} holds no token_embd.weight: a whole model is needed")
    config |= {
        "model_type": model_type,
        "architectures": [name],
        "dtype": "bfloat16",
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "num_key_value_heads": meta.number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_parameters": _rope(meta, head_dim, values),
        **{f"{role}_token_id": None for role in ("bos", "eos", "pad")},
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token_id = header.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token_id, int) and token_id < config["vocab_size"]:
            config[f"{role}_token_id"] = token_id
    return _OF_FAMILY[meta.arch](meta, config)


def _require_known(meta: _Metadata) -> None:
    prefix = f"{meta.arch}."
    for full, value in meta.header.metadata.items():
        key = full.removeprefix(prefix)
        if not full.startswith(prefix):
            continue
        if key not in _KNOWN:
            raise meta.refuse(key, "it is not known, and could change what the model computes")
        allowed = _WITHOUT_EFFECT.get(key)
        if allowed is not None and value not in allowed:
            if key == "expert_gating_func" and meta.arch == "gpt-oss" and value == _SOFTMAX_OVER_CHOSEN:
                continue
            if key == "expert_weights_norm" and meta.arch == "qwen2moe":
                continue
            raise meta.refuse(key, f"{' or '.join(map(repr, allowed))} is read")


def _rope(meta: _Metadata, head_dim: int, values: Callable[[str], list[float]]) -> dict[str, Any]:
    """Rotary embeddings: base, share of a head, and how they are stretched."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(meta.number("rope.freq_base", 10000.0))}
    width = meta.number("rope.dimension_count", head_dim)
    if width != head_dim:
        if meta.arch != "phi3":
            raise meta.refuse("rope.dimension_count", f"{head_dim}, all of a head, is read")
        rope["partial_rotary_factor"] = width / head_dim
    kind = meta.get("rope.scaling.type", "none")
    if "rope_freqs.weight" in meta.header.tensors:
        if kind not in ("none", "") or meta.arch not in ("llama", "mistral"):
            raise ConfigError(f"{meta.what} holds rope_freqs.weight, which is read of Llama without another scaling")
        return rope | _llama3(meta, width, rope["rope_theta"], values("rope_freqs.weight"))
    if meta.arch == "phi3" and "rope_factors_long.weight" in meta.header.tensors:
        return rope | _longrope(meta, values)
    if meta.get("rope.scaling.attn_factor", 1.0) != 1:
        raise meta.refuse("rope.scaling.attn_factor", "1.0 is read")
    if kind in ("none", ""):
        return rope
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": float(meta.number("rope.scaling.factor"))}
    if kind == "yarn":
        rope |= {"rope_type": "yarn", "factor": float(meta.number("rope.scaling.factor"))}
        rope["original_max_position_embeddings"] = meta.number(
            "rope.scaling.original_context_length", meta.number("context_length")
        )
        for key, own, otherwise in (("beta_fast", "beta_fast", 32.0), ("beta_slow", "beta_slow", 1.0)):
            rope[own] = float(meta.number(f"rope.scaling.yarn_{key}", otherwise))
        return rope
    raise meta.refuse("rope.scaling.type", "none, linear and yarn are read")


def _longrope(meta: _Metadata, values: Callable[[str], list[float]]) -> dict[str, Any]:
    """Factors of Phi-3's long context."""
    original = meta.number("rope.scaling.original_context_length")
    scale = meta.number("context_length") / original
    usual = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    factor = meta.number("rope.scaling.attn_factor", usual)
    return {
        "rope_type": "longrope",
        "original_max_position_embeddings": original,
        "long_factor": values("rope_factors_long.weight"),
        "short_factor": values("rope_factors_short.weight"),
        **({} if math.isclose(factor, usual, rel_tol=1e-5) else {"attention_factor": factor}),
    }


def _llama3(meta: _Metadata, width: int, theta: float, factors: list[float]) -> dict[str, Any]:
    """Recovers the parameters of Llama 3's factors, from which transformers computes the factors again.

    A factor is 1 for short waves and ``factor`` for long ones. Between the bounds its inverse is linear in the
    frequency, so two such factors give both bounds. One suffices if the bounds differ by 4, as in published models.
    """
    refusal = ConfigError(f"{meta.what} holds rope_freqs.weight with factors that are not Llama 3's: those are read")
    turns = [theta ** (-2 * i / width) / (2 * math.pi) for i in range(width // 2)]
    if len(factors) != len(turns) or not all(1 <= one < math.inf for one in factors):
        raise refusal
    factor = max(factors)
    between = [(turn, one) for turn, one in zip(turns, factors, strict=True) if 1.0001 < one < factor * 0.9999]
    smooth = [(turn, (1 / one - 1 / factor) / (1 - 1 / factor)) for turn, one in between]
    high = 4.0
    if len(smooth) > 1:
        (x0, y0), (x1, y1) = smooth[0], smooth[-1]
        slope = (y0 - y1) / (x0 - x1)
        high = 1 - 1 / min(y0 - slope * x0, -1e-9)
        original = slope * (high - 1)
    elif smooth:
        original = (1 + smooth[0][1] * 3) / smooth[0][0]
    else:  # the bounds lie between two neighbors
        short = [turn for turn, one in zip(turns, factors, strict=True) if one < factor]
        original = math.ceil(high / min(short)) if short else 0.0
    if not 0 < original < 1 << 30:
        raise refusal
    found = {
        "rope_type": "llama3",
        "factor": round(factor, 4),
        "low_freq_factor": 1.0,
        "high_freq_factor": round(high, 3),
        "original_max_position_embeddings": round(original),
    }
    again = [_llama3_factor(turn, found) for turn in turns]
    if not all(math.isclose(a, b, rel_tol=_LLAMA3_TOLERANCE) for a, b in zip(again, factors, strict=True)):
        raise refusal
    return found


def _llama3_factor(turns: float, rope: Mapping[str, Any]) -> float:
    """Returns the factor of a wave with ``turns`` turns per token."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    total = turns * rope["original_max_position_embeddings"]
    if total > high:
        return 1.0
    if total < low:
        return float(rope["factor"])
    smooth = (total - low) / (high - low)
    return float(1 / ((1 - smooth) / rope["factor"] + smooth))


def _llama(meta: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Completes the configuration of Llama, Mixtral and Mistral, which llama.cpp distinguishes by name at most."""
    if meta.get("expert_count", 0):
        experts = meta.number("expert_count")
        return config | {
            "model_type": "mixtral",
            "architectures": ["MixtralForCausalLM"],
            "num_local_experts": experts,
            "num_experts_per_tok": meta.number("expert_used_count"),
            "sliding_window": None,
        }
    if meta.arch == "mistral":
        return config | {"sliding_window": meta.get("attention.sliding_window") or None}
    if meta.get("attention.sliding_window"):
        return config | {
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "sliding_window": meta.number("attention.sliding_window"),
        }
    biases = {name for name in ("attn_q", "ffn_up") if f"blk.0.{name}.bias" in meta.header.tensors}
    return config | {"attention_bias": "attn_q" in biases, "mlp_bias": "ffn_up" in biases}


def _qwen2(meta: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return config | {"use_sliding_window": False}


def _qwen2moe(meta: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    norm = bool(meta.get("expert_weights_norm", False))
    shared = {"shared_expert_intermediate_size": meta.number("expert_shared_feed_forward_length")}
    return _qwen3moe(meta, config) | shared | {"norm_topk_prob": norm}


def _qwen3moe(meta: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    width = meta.number("expert_feed_forward_length")
    return (
        {"intermediate_size": width}
        | config
        | {
            "use_sliding_window": False,
            "num_experts": meta.number("expert_count"),
            "num_experts_per_tok": meta.number("expert_used_count"),
            "moe_intermediate_size": width,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    )


def _gemma(meta: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return config | {"hidden_activation": "gelu_pytorch_tanh"}


def _gemma2(meta: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return _windows(meta, _gemma(meta, config), 2) | {
        "attn_logit_softcapping": meta.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": meta.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _attention_scalar(meta, config),
    }


def _gemma3(meta: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    local = float(meta.number("rope.freq_base_swa", 10000.0))
    rope = {
        "full_attention": config["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }
    return _windows(meta, _gemma(meta, config), 6) | {
        "rope_parameters": rope,
        "attn_logit_softcapping": meta.get("attn_logit_softcapping"),
        "final_logit_softcapping": meta.get("final_logit_softcapping"),
        "query_pre_attn_scalar": _attention_scalar(meta, config),
    }


def _gpt_oss(meta: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"]
    if rope["rope_type"] == "yarn":
        rope = rope | {"truncate": False}
    return _windows(meta, config, 2) | {
        "intermediate_size": meta.number("expert_feed_forward_length"),
        "num_local_experts": meta.number("expert_count"),
        "num_experts_per_tok": meta.number("expert_used_count"),
        "rope_parameters": rope,
    }


def _phi3(meta: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"]
    original = rope.get("original_max_position_embeddings", config["max_position_embeddings"])
    share = rope.setdefault("partial_rotary_factor", 1.0)
    if config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]:
        raise meta.refuse("attention.key_length", "the width divided by the heads is read")
    return config | {
        "original_max_position_embeddings": original,
        "partial_rotary_factor": share,
        "sliding_window": meta.get("attention.sliding_window") or None,
    }


def _windows(meta: _Metadata, config: dict[str, Any], every: int) -> dict[str, Any]:
    """Which layers see a window only: all but one in ``every``, unless the file says otherwise."""
    pattern = meta.get("attention.sliding_window_pattern", every)
    layers = config["num_hidden_layers"]
    if isinstance(pattern, list):
        if len(pattern) != layers:
            raise meta.refuse("attention.sliding_window_pattern", f"one value for each of {layers} layers is needed")
        windowed = [bool(one) for one in pattern]
    else:
        windowed = [
            bool((layer + 1) % meta.number("attention.sliding_window_pattern", every)) for layer in range(layers)
        ]
    return config | {
        "sliding_window": meta.number("attention.sliding_window"),
        "layer_types": ["sliding_attention" if one else "full_attention" for one in windowed],
    }


def _attention_scalar(meta: _Metadata, config: dict[str, Any]) -> int:
    """Square of what Gemma's scores are divided by."""
    if meta.get("attention.scale") is not None:
        return round(1 / float(meta.number("attention.scale")) ** 2)
    if config["num_hidden_layers"] == _LAYERS_OF_27B.get(meta.arch):
        return int(config["hidden_size"]) // int(config["num_attention_heads"])
    return int(config["head_dim"])


_OF_FAMILY: Mapping[str, Callable[[_Metadata, dict[str, Any]], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen2,
    "qwen2moe": _qwen2moe,
    "qwen3moe": _qwen3moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "gpt-oss": _gpt_oss,
}
