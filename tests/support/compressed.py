"""Tiny models of DeepSeek V4, whose layers see entries that stand for several tokens each."""

import functools
import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.model.families import checkpoint, small_config
from tests.support.packed import FLOAT4, Written, fp8, spread
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from paceline.checkpoint.compressed import HEAVY, SLIDING, SPARSE
from paceline.model.loading import LoadedModel, prepare

TOP_K = 8
"""Entries that a query sees in sparse layers: from 36 tokens on not all of them."""


def compressed_config(heavy: int = 128, num_heads: int = 2) -> PretrainedConfig:
    """Each kind of layer, and a window of 16 tokens.

    ``heavy``: tokens of an entry of heavily compressed layers; 128 as published, of two pages. ``num_heads``: of
    indexers. Of few, many scores are 0, and equal.
    """
    return small_config(
        "deepseek_v4",
        num_hidden_layers=4,
        layer_types=[SLIDING, HEAVY, SPARSE, SPARSE],
        mlp_layer_types=["hash_moe", "hash_moe", "moe", "moe"],
        compress_rates={SPARSE: 4, HEAVY: heavy},
        index_topk=TOP_K,
        index_n_heads=num_heads,
    )


@functools.cache
def compressed_model(heavy: int = 128) -> PreTrainedModel:
    """A random checkpoint in float32, as transformers runs it; of 16 index heads, as no scores are equal then."""
    return checkpoint(compressed_config(heavy, 16))


@functools.cache
def compressed(dtype: torch.dtype = torch.float32, heavy: int = 128, num_heads: int = 2) -> LoadedModel:
    """The same, as we run it."""
    return prepare(checkpoint(compressed_config(heavy, num_heads)).to(dtype), compile=False)


FP8 = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}  # fmt: skip
"""The ``quantization_config`` of DeepSeek-V4-Flash."""
PUBLISHED = {
    "embed_tokens.weight": "embed.weight", "lm_head.weight": "head.weight", "hc_head.hc_": "hc_head_",
    "input_layernorm.": "attn_norm.", "post_attention_layernorm.": "ffn_norm.", "attn_hc.": "hc_attn_",
    "ffn_hc.": "hc_ffn_", ".self_attn.sinks": ".attn.attn_sink", ".self_attn.q_a_proj.": ".attn.wq_a.",
    ".self_attn.q_b_proj.": ".attn.wq_b.", ".self_attn.q_a_norm.": ".attn.q_norm.",
    ".self_attn.kv_proj.": ".attn.wkv.", ".self_attn.kv_norm.": ".attn.kv_norm.",
    ".self_attn.o_a_proj.": ".attn.wo_a.", ".self_attn.o_b_proj.": ".attn.wo_b.",
    ".compressor.indexer.scorer.weights_proj.": ".indexer.weights_proj.",
    ".compressor.indexer.q_b_proj.": ".indexer.wq_b.", ".compressor.indexer.": ".indexer.compressor.",
    ".compressor.kv_proj.": ".compressor.wkv.", ".compressor.gate_proj.": ".compressor.wgate.",
    ".compressor.kv_norm.": ".compressor.norm.", ".position_bias": ".ape", ".self_attn.": ".attn.", ".mlp.": ".ffn.",
    "e_score_correction_bias": "bias", "shared_experts.gate_proj.": "shared_experts.w1.",
    "shared_experts.down_proj.": "shared_experts.w2.", "shared_experts.up_proj.": "shared_experts.w3.",
}  # fmt: skip
"""Parts of names in transformers, and in the published files, in the order in which they are replaced."""
_IN_FP8 = re.compile(r"\.(wq_a|wq_b|wkv|wo_a|wo_b|w1|w2|w3|e_proj|h_proj)\.weight$")
_IN_FP32 = re.compile(r"(hc_\w+|attn_sink|ape|gate\.bias)$")


def exponents(shape: tuple[int, int], generator: torch.Generator, typical: int) -> Tensor:
    """Scales that are powers of two, as E8M0."""
    codes = torch.randint(typical - 2, typical + 3, shape, generator=generator, dtype=torch.uint8)
    return codes.view(torch.float8_e8m0fnu)


def float4(shape: tuple[int, int], generator: torch.Generator) -> Written:
    """Floats of 4 bits, two in a signed byte, the first in its low half; a power of two for 32."""
    codes = torch.randint(0, 16, shape, generator=generator)
    values = torch.tensor(FLOAT4 + [-value for value in FLOAT4], dtype=torch.float64)[codes]
    scale = exponents((shape[0], shape[1] // 32), generator, 122)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
    return {"weight": packed, "scale": scale}, values * spread(scale.float(), shape, 1, 32)


def float8(shape: tuple[int, int], generator: torch.Generator) -> Written:
    """Floats of 8 bits with a power of two for a block."""
    codes = (torch.randn(shape, generator=generator) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = exponents((-(-shape[0] // 128), -(-shape[1] // 128)), generator, 119)
    return {"weight": codes, "scale": scale}, codes.double() * spread(scale.float(), shape, 128, 128)


def published_config(**changes: Any) -> PretrainedConfig:
    """Shapes of several blocks, which end within them, and groups of 32."""
    sizes = {"hidden_size": 160, "moe_intermediate_size": 192, "index_n_heads": 2, "q_lora_rank": 32, "vocab_size": 300}
    return small_config("deepseek_v4", mlp_layer_types=["hash_moe", "moe", "moe"], sliding_window=16, **sizes | changes)


def write_published(
    folder: Path, config: PretrainedConfig, experts: str = "fp4", *, mtp: bool = False
) -> dict[str, Tensor]:
    """A checkpoint with the names, formats and configuration of DeepSeek-V4-Flash, or with experts in ``fp8`` and
    scales in float32 of its base model. Returns what its weights mean, by transformers' names.

    ``mtp``: with a module, whose weights have the names of ``mtp_weights``.
    """
    folder.mkdir(exist_ok=True)
    generator, means, stored = torch.Generator().manual_seed(3), {}, {}
    for name, tensor in (checkpoint(config).state_dict() | (mtp_weights(mtp_block(config)) if mtp else {})).items():
        meant = []
        for part, weight in published_parts(name, tensor).items():
            tensors, mean = _stored(part, weight, generator, experts)
            stored |= tensors
            meant.append(mean)
        means[name] = meant[0] if len(meant) == 1 else torch.cat(meant).view(tensor.shape)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_as_published(config, experts)))
    return means


def mtp_block(config: PretrainedConfig) -> PreTrainedModel:
    """A model whose only layer is that of an MTP module."""
    changes = {"num_hidden_layers": 1, "layer_types": [SLIDING], "mlp_layer_types": ["moe"]}
    return checkpoint(type(config)(**config.to_dict() | changes), seed=1)


def mtp_weights(block: PreTrainedModel) -> dict[str, Tensor]:
    """The weights of an MTP module, whose layer, last norm and collapse of streams are the block's, by the names of
    transformers but for what it has not."""
    generator, size = torch.Generator().manual_seed(5), int(block.config.hidden_size)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    own = {name.replace("model.layers.0.", "mtp.0."): tensor for name, tensor in block.state_dict().items()
           if name.startswith("model.layers.0.")}  # fmt: skip
    own |= {f"mtp.0.hc_head.{name}": tensor.detach() for name, tensor in block.model.hc_head.named_parameters()}
    own["mtp.0.norm.weight"] = block.model.norm.weight.detach()
    own |= {f"mtp.0.{name}.weight": 1 + 0.1 * drawn(size) for name in ("enorm", "hnorm")}
    return own | {"mtp.0.e_proj.weight": torch.eye(size), "mtp.0.h_proj.weight": 0.1 * drawn(size, size) / size**0.5}


def published_parts(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A weight of transformers by its names in the published files, where experts are apart."""
    parts = {name: tensor}
    if (found := re.fullmatch(r"(.*\.experts\.)(\w+)_proj", name)) is not None:
        names = ("w1", "w3") if found[2] == "gate_up" else ("w2",)
        parts = {
            f"{found[1]}{expert}.{each}.weight": rows
            for expert, both in enumerate(tensor)
            for each, rows in zip(names, both.chunk(len(names)), strict=True)
        }
    return {_published(name): weight for name, weight in parts.items()}


def _published(name: str) -> str:
    for ours, theirs in PUBLISHED.items():
        name = name.replace(ours, theirs)
    return name.removeprefix("model.")


def _stored(name: str, weight: Tensor, generator: torch.Generator, experts: str) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a weight by their names, and what they mean."""
    if _IN_FP8.search(name) is None or ".compressor." in name:
        kind = weight.dtype if not weight.is_floating_point() or _IN_FP32.search(name) else torch.bfloat16
        kept = weight.to(kind, copy=True)
        return {name: kept}, kept
    write = float4 if ".experts." in name and experts == "fp4" else float8
    if experts == "fp8":
        write = fp8("scale", 128, 128)
    written, mean = write((weight.shape[0], weight.shape[1]), generator)
    return {name.removesuffix("weight") + ending: tensor for ending, tensor in written.items()}, mean


def _as_published(config: PretrainedConfig, experts: str) -> dict[str, Any]:
    """The content of ``config.json`` under the published keys."""
    content: dict[str, Any] = config.to_dict()
    kinds, mlps = content.pop("layer_types"), content.pop("mlp_layer_types")
    for name in ("compress_rates", "rope_parameters", "partial_rotary_factor"):
        del content[name]
    ratios = {SLIDING: 0, SPARSE: 4, HEAVY: 128}
    return content | {
        "architectures": ["DeepseekV4ForCausalLM"],
        "compress_ratios": [*(ratios[kind] for kind in kinds), 0],
        "num_hash_layers": mlps.count("hash_moe"),
        "num_nextn_predict_layers": 1,
        "expert_dtype": experts,
        "quantization_config": FP8 | ({"scale_fmt": "float"} if experts == "fp8" else {}),
        "rope_scaling": {"type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                         "original_max_position_embeddings": 128},
    }  # fmt: skip
