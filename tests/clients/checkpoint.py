"""A chat checkpoint with Qwen3's real tokenizer and template, and trained weights that answer briefly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

WEIGHTS = Path(__file__).with_name("weights.safetensors")
"""The trained rows and layers, in float16: ``train.py`` writes them."""
VOCABULARY = 151_936
_NO_THOUGHT = """
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}"""
"""The end of the chat template that says that an answer has no thought."""
END = 151_645
"""``<|im_end|>``."""
THINK = 151_667
"""``<think>``."""


def tiny_config(num_rows: int) -> Qwen3Config:
    """A Qwen3 of two layers."""
    return Qwen3Config(
        vocab_size=num_rows,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=8192,
        rope_theta=10_000.0,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=END,
        dtype="float32",
        architectures=["Qwen3ForCausalLM"],
    )


def save_chat_checkpoint(folder: Path, tokenizer: Path, *, thinks: bool = True, seed: int | None = None) -> Path:
    """Writes the checkpoint; returns its folder.

    ``tokenizer`` holds tokenizer.json and tokenizer_config.json. ``thinks``: False: it knows no thoughts, as Qwen 2.5.
    ``seed``: noise on the layers, as a draft has that does not always agree.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(tokenizer / "tokenizer.json", folder)
    config = json.loads((tokenizer / "tokenizer_config.json").read_text(encoding="utf-8"))
    if not thinks:
        assert _NO_THOUGHT in config["chat_template"]
        config["chat_template"] = config["chat_template"].replace(_NO_THOUGHT, "")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    tiny_config(VOCABULARY).save_pretrained(folder)
    generation = {"eos_token_id": [END, 151_643], "pad_token_id": 151_643}
    (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    parts = {name: tensor.float() for name, tensor in load_file(WEIGHTS).items() if name != "token_ids"}
    ids = load_file(WEIGHTS)["token_ids"].long()
    if seed is not None:
        noise = torch.Generator().manual_seed(seed)
        for name in [name for name in parts if "proj" in name]:
            parts[name] += 0.02 * torch.randn(parts[name].shape, generator=noise)
    rows, head = parts.pop("body.embed_tokens.weight"), parts.pop("head.weight")
    embedded = rows[-1:].repeat(VOCABULARY, 1)
    embedded[ids] = rows[:-1]
    logits = torch.zeros(VOCABULARY, head.shape[1])
    logits[ids] = head
    if not thinks:
        logits[THINK] = 0.0
    found = {name.replace("body.", "model."): tensor for name, tensor in parts.items()}
    found |= {"model.embed_tokens.weight": embedded, "lm_head.weight": logits}
    save_file(
        {name: tensor.contiguous() for name, tensor in found.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder
