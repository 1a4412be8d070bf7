"""Checkpoints with quantized weights as they are published, written from the definitions of the formats.

Each writer draws codes, scales and zero points at random, returns them under the published endings, and the weight that
they mean, computed number by number in float64.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.support.models import random_model
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig

CONFIG = LlamaConfig(
    vocab_size=300, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=320, max_position_embeddings=2048, tie_word_embeddings=False, initializer_range=0.15,
)  # fmt: skip
"""Half of 320 inputs begins in the middle of a group of 64 and of a block of 128."""
FLOAT4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]

Written = tuple[dict[str, Tensor], Tensor]
"""Tensors by their endings, and the weight."""
Writer = Callable[[tuple[int, int], torch.Generator], Written]


def spread(values: Tensor, shape: tuple[int, int], rows: int, columns: int) -> Tensor:
    """Each number of a grid, for a block of ``rows`` by ``columns``."""
    return values.double().repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: shape[0], : shape[1]]


def scales_of(shape: tuple[int, int], generator: torch.Generator, dtype: torch.dtype, typical: float) -> Tensor:
    """Scales that all differ."""
    return ((0.5 + torch.rand(shape, generator=generator)) * typical).to(dtype)


def fp8(ending: str, rows: int, columns: int, *, vector: bool = False, static: bool = False) -> Writer:
    """Floats of 8 bits with a scale for a block; 0 rows: for all; 0 columns: for a row."""

    def write(shape: tuple[int, int], generator: torch.Generator) -> Written:
        codes = (torch.randn(shape, generator=generator) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
        block = rows or shape[0], columns or shape[1]
        scale = scales_of((-(-shape[0] // block[0]), -(-shape[1] // block[1])), generator, torch.float32, 0.003)
        weight = codes.double() * spread(scale, shape, *block)
        stored = scale[0, 0].clone() if not rows else scale[:, 0].contiguous() if vector else scale
        further = {"input_scale": torch.tensor(0.02)} if static else {}
        return {"weight": codes, ending: stored, **further}, weight

    return write


def int8(shape: tuple[int, int], generator: torch.Generator) -> Written:
    """Integers of 8 bits with a scale and a zero point for each output."""
    codes = torch.randint(-128, 128, shape, generator=generator).to(torch.int8)
    scale = scales_of((shape[0], 1), generator, torch.bfloat16, 0.002)
    zeros = torch.randint(-20, 20, (shape[0], 1), generator=generator).to(torch.int8)
    weight = (codes.double() - zeros.double()) * scale.double()
    return {"weight": codes, "weight_scale": scale, "weight_zero_point": zeros}, weight


def words(codes: Tensor, bits: int, order: tuple[int, ...] = ()) -> Tensor:
    """[m, n] codes in words of 32 bits along the last dimension; ``order``: the code at each place of a word."""
    per_word = 32 // bits
    rows, columns = codes.shape
    padded = torch.zeros(rows, -(-columns // per_word) * per_word, dtype=torch.int64)
    padded[:, :columns] = codes
    packed = torch.zeros(rows, padded.shape[1] // per_word, dtype=torch.int64)
    for place in range(per_word):
        packed |= padded[:, (order[place] if order else place) :: per_word] << bits * place
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def packed_ints(bits: int, group: int, *, zeros: bool, ordered: bool = False) -> Writer:
    """compressed-tensors' ``pack-quantized``: integers with an offset; ``ordered``: groups are given."""

    def write(shape: tuple[int, int], generator: torch.Generator) -> Written:
        half, groups = 1 << bits - 1, -(-shape[1] // (group or shape[1]))
        codes = torch.randint(-half, half, shape, generator=generator)
        scale = scales_of((shape[0], groups), generator, torch.bfloat16, 0.3 / half)
        of = torch.arange(shape[1]) // (group or shape[1])
        if ordered:
            of = of[torch.randperm(shape[1], generator=generator)]
        tensors = {
            "weight_packed": words(codes + half, bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor(shape),
        }
        points = torch.zeros(shape[0], groups, dtype=torch.int64)
        if zeros:
            points = torch.randint(-half, half, (shape[0], groups), generator=generator)
            tensors["weight_zero_point"] = words((points + half).T, bits).T.contiguous()
        if ordered:
            tensors["weight_g_idx"] = of.to(torch.int32)
        return tensors, (codes.double() - points[:, of]) * scale.double()[:, of]

    return write


def gptq(bits: int, group: int, *, added: int = 1, ordered: bool = False) -> Writer:
    """AutoGPTQ's: stored as inputs by outputs, zero points less one; ``ordered``: groups in any order."""

    def write(shape: tuple[int, int], generator: torch.Generator) -> Written:
        outputs, inputs = shape
        groups = -(-inputs // group)
        codes = torch.randint(0, 1 << bits, (inputs, outputs), generator=generator)
        points = torch.randint(0, (1 << bits) - 1, (groups, outputs), generator=generator)
        scale = scales_of((groups, outputs), generator, torch.float16, 0.4 / (1 << bits))
        of = torch.arange(inputs) // group
        if ordered:
            of = of[torch.randperm(inputs, generator=generator)]
        weight = (codes.double() - (points + added)[of]) * scale.double()[of]
        tensors = {
            "qweight": words(codes.T, bits).T.contiguous(), "qzeros": words(points, bits), "scales": scale,
            "g_idx": of.to(torch.int32),
        }  # fmt: skip
        return tensors, weight.T

    return write


def awq(group: int) -> Writer:
    """AutoAWQ's "gemm": the outputs of a word lie in the order 0, 2, 4, 6, 1, 3, 5, 7."""

    def write(shape: tuple[int, int], generator: torch.Generator) -> Written:
        outputs, inputs = shape
        groups, order = -(-inputs // group), (0, 2, 4, 6, 1, 3, 5, 7)
        codes = torch.randint(0, 16, (inputs, outputs), generator=generator)
        points = torch.randint(0, 16, (groups, outputs), generator=generator)
        scale = scales_of((groups, outputs), generator, torch.float16, 0.02)
        of = torch.arange(inputs) // group
        weight = (codes.double() - points[of]) * scale.double()[of]
        return {"qweight": words(codes, 4, order), "qzeros": words(points, 4, order), "scales": scale}, weight.T

    return write


def nvfp4(codes_end: str, second_end: str, *, divides: bool) -> Writer:
    """Floats of 4 bits, two in a byte, the first in its low half; a scale of 8 bits for 16, and one for all."""

    def write(shape: tuple[int, int], generator: torch.Generator) -> Written:
        codes = torch.randint(0, 16, shape, generator=generator)
        values = torch.tensor(FLOAT4 + [-value for value in FLOAT4], dtype=torch.float64)[codes]
        scale = scales_of((shape[0], shape[1] // 16), generator, torch.float8_e4m3fn, 30)
        second = torch.tensor(0.0015)
        weight = values * spread(scale, shape, 1, 16) * second.double()
        packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
        stored = 1 / second if divides else second
        return {codes_end: packed, "weight_scale": scale, second_end: stored.reshape([1] if divides else [])}, weight

    return write


def _group(num_bits: int, kind: str, strategy: str, **further: Any) -> dict[str, Any]:
    """A ``quantization_config`` of compressed-tensors."""
    weights = {"num_bits": num_bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False} | further
    forms = {("float", 8): "float-quantized", ("int", 8): "int-quantized", ("float", 4): "nvfp4-pack-quantized"}
    form = further.pop("format", forms.get((kind, num_bits), "pack-quantized"))
    weights.pop("format", None)
    inputs = {"num_bits": 8, "type": kind, "strategy": "token", "dynamic": True, "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "output_activations": None,
             "input_activations": inputs if num_bits == 8 else None}  # fmt: skip
    return {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
            "kv_cache_scheme": None, "ignore": ["lm_head"], "config_groups": {"group_0": group}}  # fmt: skip


_GPTQ = {"quant_method": "gptq", "desc_act": False, "sym": True, "lm_head": False, "damp_percent": 0.1}
_AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True, "modules_to_not_convert": None}
_MODELOPT = {"quant_method": "modelopt", "ignore": ["lm_head"], "producer": {"name": "modelopt", "version": "0.33.0"}}

FORMATS: Mapping[str, tuple[dict[str, Any], Writer]] = {
    "fp8, blocks": (
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        fp8("weight_scale_inv", 128, 128),
    ),
    "fp8, tensor": (
        {"quant_method": "fp8", "activation_scheme": "static"}, fp8("weight_scale", 0, 0, static=True),
    ),
    "float-quantized, tensor": (_group(8, "float", "tensor"), fp8("weight_scale", 0, 0, static=True)),
    "float-quantized, channel": (_group(8, "float", "channel"), fp8("weight_scale", 1, 0)),
    "float-quantized, block": (
        _group(8, "float", "block", block_structure=[128, 128]), fp8("weight_scale", 128, 128),
    ),
    "int-quantized": (_group(8, "int", "channel", symmetric=False), int8),
    "pack-quantized": (_group(4, "int", "group", group_size=64), packed_ints(4, 64, zeros=False)),
    "pack-quantized, zeros": (
        _group(4, "int", "group", group_size=64, symmetric=False), packed_ints(4, 64, zeros=True),
    ),
    "pack-quantized, 8 bits": (
        _group(8, "int", "channel", format="pack-quantized"), packed_ints(8, 0, zeros=False),
    ),
    "pack-quantized, ordered": (
        _group(4, "int", "group", group_size=64, actorder="group"), packed_ints(4, 64, zeros=False, ordered=True),
    ),
    "nvfp4-pack-quantized": (
        _group(4, "float", "tensor_group", group_size=16), nvfp4("weight_packed", "weight_global_scale", divides=True),
    ),
    "modelopt FP8": (_MODELOPT | {"quant_algo": "FP8"}, fp8("weight_scale", 0, 0, static=True)),
    "modelopt, channels": (
        _MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, fp8("weight_scale", 1, 0, vector=True),
    ),
    "modelopt NVFP4": (
        _MODELOPT | {"quant_algo": "NVFP4", "group_size": 16}, nvfp4("weight", "weight_scale_2", divides=False),
    ),
    "gptq": (_GPTQ | {"bits": 4, "group_size": 64}, gptq(4, 64)),
    "gptq, ordered": (_GPTQ | {"bits": 4, "group_size": 64, "desc_act": True}, gptq(4, 64, ordered=True)),
    "gptq, 8 bits": (_GPTQ | {"bits": 8, "group_size": 32, "checkpoint_format": "gptq"}, gptq(8, 32)),
    "gptq_v2": (_GPTQ | {"bits": 4, "group_size": 64, "checkpoint_format": "gptq_v2"}, gptq(4, 64, added=0)),
    "awq": (_AWQ | {"group_size": 64}, awq(64)),
}  # fmt: skip
"""The ``quantization_config`` and the writer of each format."""


def write_packed(
    folder: Path, name: str, config: PretrainedConfig = CONFIG, *, beside: bool = False, head: bool = False
) -> dict[str, Tensor]:
    """A checkpoint whose projections are quantized, with ``head`` the output layer, too. Returns what its weights mean,
    in float64.

    ``beside``: its quantization is in ``hf_quant_config.json`` alone, as older ones of Model Optimizer have it.
    """
    quantization, write = FORMATS[name]
    generator = torch.Generator().manual_seed(7)
    random_model(config, dtype=torch.bfloat16).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    means = {key: tensor.double() for key, tensor in tensors.items()}
    pattern = r"(_proj\w*|lm_head)\.weight$" if head else r"_proj\w*\.weight$"
    for key in [key for key in tensors if re.search(pattern, key)]:
        written, means[key] = write(tuple(tensors.pop(key).shape), generator)
        tensors |= {key.removesuffix("weight") + ending: tensor for ending, tensor in written.items()}
    if "modelopt" in name:
        tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(1.0)
    save_file(
        {key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    content = json.loads((folder / "config.json").read_text())
    if beside:
        own = {"producer": quantization["producer"], "quantization": {"quant_algo": quantization["quant_algo"]}}
        (folder / "hf_quant_config.json").write_text(json.dumps(own))
    else:
        content["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(content))
    return means
