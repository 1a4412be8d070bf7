"""GGUF files of tiny models, written by the ``gguf`` package as llama.cpp's converter lays them out."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from tests.support.models import EOS, SLIDING_WINDOW, _config, letters_tokenizer
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

_LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 1e4}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
    "original_max_position_embeddings": 64,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SWA = {"head_dim": 32, "sliding_window": SLIDING_WINDOW, "query_pre_attn_scalar": 32, "tie_word_embeddings": True}

MODELS: Mapping[str, tuple[str, Callable[[], PretrainedConfig]]] = {
    "llama": ("llama", _config(LlamaConfig)),
    "llama-tied": ("llama", _config(LlamaConfig, tie_word_embeddings=True, head_dim=32, num_hidden_layers=1)),
    "llama-biased": ("llama", _config(LlamaConfig, attention_bias=True, num_hidden_layers=1)),
    "llama-3": (
        "llama",
        _config(LlamaConfig, head_dim=64, rope_parameters={**_LLAMA3, "original_max_position_embeddings": 512}),
    ),
    "llama-linear": (
        "llama",
        _config(LlamaConfig, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
    ),
    "mistral": ("llama", _config(MistralConfig, sliding_window=None)),
    "mixtral": (
        "llama",
        _config(MixtralConfig, num_local_experts=4, num_experts_per_tok=2, num_hidden_layers=1, sliding_window=None),
    ),
    "qwen2": ("qwen2", _config(Qwen2Config)),
    "qwen2-yarn": ("qwen2", _config(Qwen2Config, rope_parameters=_YARN, num_hidden_layers=1)),
    "qwen2moe": (
        "qwen2moe",
        _config(Qwen2MoeConfig, **_EXPERTS, shared_expert_intermediate_size=64, num_hidden_layers=1),
    ),
    "qwen3": ("qwen3", _config(Qwen3Config, head_dim=32)),
    "qwen3moe": ("qwen3moe", _config(Qwen3MoeConfig, **_EXPERTS, head_dim=32, norm_topk_prob=True)),
    "gemma": ("gemma", _config(GemmaConfig, head_dim=32, tie_word_embeddings=True, num_hidden_layers=1)),
    "gemma2": ("gemma2", _config(Gemma2Config, **_SWA, attn_logit_softcapping=2.0, final_logit_softcapping=30.0)),
    "gemma3": ("gemma3", _config(Gemma3TextConfig, **_SWA, num_hidden_layers=7)),
    "phi3": ("phi3", _config(Phi3Config, num_key_value_heads=4, original_max_position_embeddings=2048)),
    "phi3-long": (
        "phi3",
        _config(Phi3Config, original_max_position_embeddings=64, rope_parameters=_LONG, max_position_embeddings=256),
    ),
    "gpt-oss": (
        "gpt-oss",
        _config(GptOssConfig, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=SLIDING_WINDOW),
    ),
}
"""By name the architecture of the file, and a tiny model of it."""


def tensors_of(arch: str, model: PreTrainedModel) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of a model by llama.cpp's names, in its layout."""
    config, known = model.config, {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(known[arch], config.num_hidden_layers)
    found: dict[str, np.ndarray[Any, Any]] = {}

    def put(name: str, tensor: torch.Tensor) -> None:
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own is not None, name
        found[own] = tensor.detach().float().contiguous().numpy()

    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        kind = config.model_type
        if kind in ("llama", "mistral", "mixtral") and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            tensor = tensor.view(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
        if kind.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        if name.endswith(("experts.gate_up_proj", "experts.gate_up_proj_bias")):
            layer, end = name.split(".")[2], ".bias" if name.endswith("_bias") else ".weight"
            if kind == "gpt_oss":
                whole = tensor if end == ".bias" else tensor.mT
                halves = whole[:, ::2], whole[:, 1::2]
            else:
                halves = tensor.chunk(2, dim=1)
            for part, half in zip(("gate", "up"), halves, strict=True):
                found[f"blk.{layer}.ffn_{part}_exps{end}"] = half.detach().float().contiguous().numpy()
        elif name.endswith(("experts.down_proj", "experts.down_proj_bias")):
            layer, end = name.split(".")[2], ".bias" if name.endswith("_bias") else ".weight"
            tensor = tensor.mT if kind == "gpt_oss" and end == ".weight" else tensor
            found[f"blk.{layer}.ffn_down_exps{end}"] = tensor.detach().float().contiguous().numpy()
        elif name.endswith("shared_expert_gate.weight"):
            put(name, tensor.view(-1))
        elif name.endswith("mlp.gate.weight"):
            put(name.replace("mlp.gate", "block_sparse_moe.gate") if kind == "mixtral" else name, tensor)
        elif name.endswith("self_attn.sinks"):
            put(name + ".weight", tensor)
        else:
            put(name, tensor)
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        plain = 1 / rope["rope_theta"] ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
        found["rope_freqs.weight"] = (plain / model.model.rotary_emb.inv_freq).float().numpy()
    if rope.get("rope_type") == "longrope":
        for length in ("long", "short"):
            found[f"rope_factors_{length}.weight"] = np.array(rope[f"{length}_factor"], np.float32)
    return found


def _write_config(writer: gguf.GGUFWriter, arch: str, model: PreTrainedModel) -> None:
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_file_type(0)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    if head_dim * config.num_attention_heads != config.hidden_size or arch not in ("llama", "qwen2", "phi3"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    kind = rope.get("rope_type")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if arch == "phi3" or (getattr(config, "layer_types", None) and "sliding_attention" in config.layer_types):
        writer.add_sliding_window(config.sliding_window or 0)
    for key in ("attn", "final"):
        if (cap := getattr(config, f"{key}_logit_softcapping", None)) is not None:
            writer.add_float32(f"{arch}.{key}_logit_softcapping", cap)
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if arch != "llama":
            width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
            writer.add_expert_feed_forward_length(width)
    if arch == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def write_letters(writer: gguf.GGUFWriter, changes: Mapping[int, str] | None = None) -> None:
    """The tokenizer of letters: ids 0 to 9 are control tokens. ``changes``: other texts of some."""
    backend = letters_tokenizer().backend_tokenizer
    vocab = backend.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=lambda token: vocab[token])
    for token_id, text in (changes or {}).items():
        tokens[token_id] = text
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<") else 1 for token in tokens])
    writer.add_token_merges([" ".join(token) for token in tokens if len(token) == 2])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(EOS)
    writer.add_pad_token_id(0)


def write_gguf(
    path: Path,
    name: str,
    model: PreTrainedModel,
    kind: Kind = Kind.F32,
    *,
    shard: int = 0,
    tokenizer: Callable[[gguf.GGUFWriter], None] = write_letters,
    more: Mapping[str, np.ndarray[Any, Any]] | None = None,
    without: Collection[str] = (),
    change: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    """Writes a model of ``MODELS``; matrices as ``kind`` where their rows fit. Returns the first file.

    ``shard``: tensors of one file, of several. ``more``: tensors beside the model's, ``without``: some that are left
    out. ``change``: called before the end.
    """
    arch = MODELS[name][0]
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=shard)
    writer.add_name(f"Tiny {name}")
    _write_config(writer, arch, model)
    tokenizer(writer)
    tensors = {key: value for key, value in tensors_of(arch, model).items() if key not in without}
    for tensor, numbers in {**tensors, **(more or {})}.items():
        block = gguf.GGML_QUANT_SIZES[kind][0]
        chosen = kind if numbers.ndim > 1 and numbers.shape[-1] % block == 0 else Kind.F32
        if numbers.dtype == np.float32:
            writer.add_tensor(tensor, gguf.quants.quantize(numbers, chosen), raw_dtype=chosen)
        else:
            writer.add_tensor(tensor, numbers)
    if change is not None:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if not shard else next(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))
