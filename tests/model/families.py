"""Tiny random checkpoints of every decoder family that transformers ships a tensor-parallel plan for.

Nothing here lists families by hand: a family is a class of MODEL_FOR_CAUSAL_LM_MAPPING whose configuration has a plan.
Its configuration is the class's own default with every size made small by name; OVERRIDES holds what no rule finds.
A configuration of more than MAX_PARAMETERS is refused before any memory is taken.

``EXCLUDED`` and ``WHOLE_ONLY`` say of each family that does not work why. What is in neither must work.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.support.models import random_model
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

MAX_PARAMETERS = 5_000_000
VOCAB = 301
WINDOW = 16

_EXACT: dict[str, Any] = {
    "vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 96, "sliding_window": WINDOW,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "top_k_experts": 2, "moe_k": 2,
    "n_group": 1, "topk_group": 1,
    "num_expert_group": 1, "first_k_dense_replace": 1, "num_dense_layers": 1, "moe_layer_start_index": 1,
    "num_shared_experts": 1, "n_shared_experts": 1, "moe_num_shared_experts": 1, "num_nextn_predict_layers": 0,
    "max_position_embeddings": 2048, "original_max_position_embeddings": 2048, "initializer_range": 0.15,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "q_lora_rank": 32, "kv_lora_rank": 32,
    "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "index_head_dim": 32, "index_n_heads": 16,
    "index_topk": 64, "hidden_size_per_layer_input": 16,
}  # fmt: skip
_BY_NAME: list[tuple[re.Pattern[str], int]] = [
    (re.compile(r"^(num|n|moe_num|num_local|n_routed)_.*experts$"), 4),
    (re.compile(r"expert.*intermediate_size|intermediate_size.*expert|moe_.*intermediate_size|moe_ffn"), 48),
    (re.compile(r"intermediate_size|ffn_dim|ffn_hidden_size|ffn_size"), 96),
    (re.compile(r"_lora_rank$|_rank$"), 32),
    (re.compile(r"head_dim$"), 32),
    (re.compile(r"_heads$"), 4),
    (re.compile(r"hidden_size|_size$|_dim$"), 64),
]
"""Of integers above the value that is given here, in this order."""

_LAST_NORM = re.compile(r"^[a-z_.]*(norm|layernorm|layer_norm|ln_f)\.weight$")

_BY_ITSELF = r"computes its attention by itself \(\w+Attention\), not through the attention interface"
_SPARSE = "layers of type .*indexed_attention"
_LINEAR = "layers of type .*(linear_attention|conv|hybrid)"
EXCLUDED = {
    "doge": "gives its attention a mask of its own",
    "hrm_text": "attends to later tokens of a prompt too",
    "inkling2_text": _LINEAR,
    "inkling_text": _LINEAR,
    "qwen4_exp_text": _SPARSE,
    "bloom, no plan": _BY_ITSELF,
    "codegen, no plan": _BY_ITSELF,
    "falcon, no plan": _BY_ITSELF,
    "gptj, no plan": _BY_ITSELF,
    "mpt, no plan": _BY_ITSELF,
}
"""Refused at any degree, with a reason that matches this."""
WHOLE_ONLY: dict[str, str] = {}
"""Refused at degree 2: none."""

_MAMBA2 = {"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_head": 32, "mamba_d_state": 32}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_local_experts": 8},
    "kimi_linear": {"num_local_experts": 8},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"], "num_key_value_heads": 2,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("sliding_attention", "full_attention")
        },
    },
    "dots3_note_text": {
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 32, "swa_kv_lora_rank": 32,
        "swa_head_dim": 32, "swa_qk_nope_head_dim": 16, "swa_v_head_dim": 16,
    },
    "nemotron_h": {"n_groups": 2, "mamba_num_heads": 4, "mamba_head_dim": 32},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v4": {
        "num_key_value_heads": 1, "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "num_key_value_heads": 2},
    "bloom": {"n_layer": 2, "n_head": 4},
    "codegen": {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 16},
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 16},
    "mpt": {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 2048},
    "gemma3n_text": {
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
        "intermediate_size": 96, "activation_sparsity_pattern": [0.9, 0.0, 0.9, 0.0],
    },
    "bamba": _MAMBA2 | {"attn_layer_indices": [1]},
    "falcon_h1": _MAMBA2 | {"mamba_d_ssm": 128},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3, "mamba_headdim": 32,
        "n_mamba_heads": 4, "mamba_ngroups": 2, "mamba_d_state": 32, "attention_hidden_size": 128,
        "num_key_value_heads": 4, "adapter_rank": 16, "use_shared_attention_adapter": True, "use_mem_rope": True,
        "initializer_range": 0.1,
    },
    "granitemoehybrid": _MAMBA2 | {
        "layer_types": ["linear_attention", "full_attention"], "shared_intermediate_size": 96,
    },
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 2048},
    "helium": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 32, "num_key_value_heads": 2, "num_experts": 4},
    "hunyuan_v1_dense": {"head_dim": 32, "num_key_value_heads": 2},
    "llama4_text": {
        "attention_chunk_size": 48, "floor_scale": 16, "attn_scale": 0.5, "no_rope_layers": [1, 0], "moe_layers": [1],
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"num_layers": 2, "head_dim": 16, "zero_expert_num": 2},
    "ministral": {"head_dim": 32},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 32, "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "phi4_multimodal": {
        "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
        "audio_config": {
            "hidden_size": 32, "intermediate_size": 32, "num_blocks": 1, "num_attention_heads": 2,
            "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 32,
        },
    },
}  # fmt: skip
"""What no rule finds."""


@dataclass(frozen=True)
class Case:
    """A family, or one of its variants."""

    name: str
    family: str
    changes: dict[str, Any] = field(default_factory=dict)

    def config(self, **changes: Any) -> PretrainedConfig:
        """See ``small_config``."""
        return small_config(self.family, **{**self.changes, **changes})


_ROPE = {"rope_theta": 1e4, "factor": 4.0}
_TRAINED = {"original_max_position_embeddings": 64}
_OWN_PLANS = ("bamba", "falcon_h1", "gpt2", "gpt_oss", "hunyuan_v1_dense", "lfm2", "stablelm", "zamba2")
VARIANTS = [
    Case("llama, biases, one KV head", "llama", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    Case("llama, rope linear", "llama", {"rope_parameters": {"rope_type": "linear", **_ROPE}}),
    Case("llama, rope yarn", "llama", {"rope_parameters": {"rope_type": "yarn", **_ROPE, **_TRAINED}}),
    Case(
        "llama, rope llama3",
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3", **_ROPE, **_TRAINED, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            }
        },
    ),
    Case("llama, rope dynamic", "llama", {"rope_parameters": {"rope_type": "dynamic", **_ROPE}}),
    Case("phi3, rope longrope", "phi3", {
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
            **_TRAINED,
        },
        **_TRAINED,
    }),
    Case("mistral, no window", "mistral", {"sliding_window": None}),
    Case("mixtral, window", "mixtral", {"sliding_window": WINDOW}),
    Case("qwen2, window", "qwen2", {
        "use_sliding_window": True, "sliding_window": WINDOW, "layer_types": ["full_attention", "sliding_attention"],
    }),
    Case("gemma2, strong softcap", "gemma2", {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 12.0}),
    Case("hunyuan_v1_dense, alpha", "hunyuan_v1_dense", {
        "rope_parameters": {"rope_type": "dynamic", "alpha": 4.0, **_ROPE}
    }),
    *(Case(f"{family}, our plan", family) for family in _OWN_PLANS),
    *(Case(f"{family}, no plan", family) for family in ("bloom", "codegen", "falcon", "gptj", "mpt")),
]  # fmt: skip
"""What defaults do not show, and popular families that come without a plan."""


def cases() -> list[Case]:
    """All families, and the variants."""
    return [*(Case(name, name) for name in family_names()), *VARIANTS]


def family_names() -> list[str]:
    """Model types with a plan, in alphabetical order; of composite ones the part that is the decoder."""
    return sorted(
        name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if _plan(name) and name + "_text" not in CONFIG_MAPPING
    )


def class_name(family: str) -> str:
    """Of the causal language model."""
    return str(MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[family]].__name__)


def _plan(family: str) -> Any:
    return getattr(CONFIG_MAPPING[family], "base_model_tp_plan", None)


def small_config(family: str, **changes: Any) -> PretrainedConfig:
    """A configuration of the family in which everything is small and nothing is left out.

    Raises:
        AssertionError: a model of it would have more than MAX_PARAMETERS.
    """
    cls = CONFIG_MAPPING[family]
    default = cls()
    known = default.to_dict()
    values = {key: small for key, value in known.items() if (small := _small(key, value)) is not None}
    if "kv_lora_rank" in known:  # latent attention: as many heads for keys as for queries
        values["num_key_value_heads"] = values["num_attention_heads"]
        values.pop("head_dim", None)
    num_layers = 2
    for name in ("layer_types", "mlp_layer_types"):
        if kinds := [*dict.fromkeys(known.get(name) or ())]:
            num_layers = max(num_layers, len(kinds))
    values["num_hidden_layers"] = num_layers
    for name in ("layer_types", "mlp_layer_types"):
        if kinds := [*dict.fromkeys(known.get(name) or ())]:
            values[name] = [kinds[i * len(kinds) // num_layers] for i in range(num_layers)]
    config = cls(**values | OVERRIDES.get(family, {}) | changes)
    with torch.device("meta"):
        count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    assert count <= MAX_PARAMETERS, f"{family} would have {count} parameters"
    return config


def _small(key: str, value: Any) -> Any:
    """What takes the place of a value; None: it stays."""
    if value is None or isinstance(value, bool):
        return None
    if key in _EXACT:
        return _EXACT[key] if not (isinstance(value, int) and value == 0) else None
    if isinstance(value, int):
        return next((small for pattern, small in _BY_NAME if pattern.search(key) and value > small), None)
    return None


def checkpoint(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Random weights in which no bias is zero and no norm is one.

    The last norm has signs at random: with tied embeddings the likeliest token would be the one that was read.
    """
    model = random_model(config, seed)
    generator = torch.Generator().manual_seed(seed + 7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
            if _LAST_NORM.search(name):
                parameter.sub_(torch.randint(0, 2, parameter.shape, generator=generator) * 2)
            if name.endswith(".position_bias"):
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.5)
        for name, table in model.named_buffers():
            if name.endswith(".tid2eid"):  # the experts of each token
                experts = torch.rand(len(table), config.n_routed_experts, generator=generator)
                table.copy_(experts.topk(table.shape[1]).indices)
    return model
