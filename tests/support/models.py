"""Tiny checkpoints with random weights of many families, with tokenizers and prompts for them."""

from __future__ import annotations

import copy
import functools
import itertools
import random
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, processors
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)

from paceline.model.loading import LoadedModel, prepare
from paceline.model.step_plan import SequenceStep

torch.set_num_threads(1)

VOCAB = 300
EOS = 7
_NUM_SPECIAL = 10
SLIDING_WINDOW = 24

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}


def _config(cls: type[PretrainedConfig], **changes: Any) -> Callable[[], PretrainedConfig]:
    return lambda: cls(**{**_BASE, **changes})


FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": _config(LlamaConfig),
    "qwen3": _config(Qwen3Config, head_dim=32),
    "gemma3": _config(
        Gemma3TextConfig,
        head_dim=32,
        num_hidden_layers=3,
        sliding_window=SLIDING_WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        query_pre_attn_scalar=32,
    ),
    "mistral": _config(MistralConfig, sliding_window=SLIDING_WINDOW),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=2048,
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=EOS,
        tie_word_embeddings=False,
    ),
    "phi3": _config(Phi3Config, num_key_value_heads=4, original_max_position_embeddings=2048),
    "gemma2": _config(
        Gemma2Config,
        head_dim=32,
        sliding_window=SLIDING_WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        attn_logit_softcapping=2.0,
        final_logit_softcapping=30.0,
        query_pre_attn_scalar=32,
    ),
    "qwen3_moe": _config(
        Qwen3MoeConfig,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        decoder_sparse_step=1,
    ),
}
LOSSLESS_FAMILIES = ("llama", "qwen3", "gemma3", "mistral", "gpt2", "phi3")


def random_model(
    family: str | PretrainedConfig, seed: int = 0, *, dtype: torch.dtype = torch.float32, peak: float = 2.5
) -> PreTrainedModel:
    """A checkpoint with random weights whose logits have a standard deviation of about ``peak``."""
    config = FAMILIES[family]() if isinstance(family, str) else copy.deepcopy(family)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            ids = torch.randint(0, model.config.vocab_size, (1, 48))
            model.get_output_embeddings().weight.mul_(peak / model(ids, use_cache=False).logits.std())
    model.generation_config.eos_token_id = None
    return model.to(dtype)


def noisy_copy(model: PreTrainedModel, noise: float, seed: int = 1) -> PreTrainedModel:
    """A good draft for ``model``: its weights with relative noise, so that acceptance is high but not 1."""
    generator = torch.Generator().manual_seed(seed)
    noisy = AutoModelForCausalLM.from_config(copy.deepcopy(model.config)).eval()
    noisy.load_state_dict(model.state_dict())
    with torch.no_grad():
        for weight in noisy.parameters():
            if weight.dim() > 1:
                weight.add_(torch.randn(weight.shape, generator=generator) * weight.std() * noise)
    return noisy.to(model.dtype)


def letters_tokenizer(size: int = VOCAB) -> PreTrainedTokenizerFast:
    """Ids 0 to 9 are special, the others are one or two letters: any text of letters has tokens and a text again."""
    pairs = ["".join(pair) for pair in itertools.product(string.ascii_lowercase, repeat=2)]
    words = [f"<{i}>" for i in range(_NUM_SPECIAL)] + list(string.ascii_lowercase) + pairs
    vocab = {word: i for i, word in enumerate(words[:size])}
    merges = [tuple(word) for word in vocab if len(word) == 2]
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.add_special_tokens(list(itertools.islice(vocab, _NUM_SPECIAL)))
    backend.decoder = decoders.ByteLevel()  # which structured output can read
    backend.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=f"<{EOS}>")


def save_pair(folder: Path) -> Path:
    """Directories ``target`` and ``draft`` with random weights and one tokenizer."""
    target = random_model("llama")
    for name, model in (("target", target), ("draft", noisy_copy(target, 0.05))):
        model.save_pretrained(folder / name)
        letters_tokenizer().save_pretrained(folder / name)
    return folder


@functools.cache
def pair(family: str, dtype: torch.dtype = torch.float32, noise: float = 0.05) -> tuple[LoadedModel, LoadedModel]:
    """Target and draft of a family, eager."""
    model = random_model(family)
    draft = noisy_copy(model, noise)
    return prepare(model.to(dtype), compile=False), prepare(draft.to(dtype), compile=False)


def prompt(seed: int, length: int, vocab_size: int = VOCAB) -> list[int]:
    """Random tokens without special ids."""
    rng = random.Random(seed)
    return [rng.randrange(10, vocab_size) for _ in range(length)]


def chunk(
    tokens: Sequence[int], start: int, stop: int, pages: Sequence[int], num_logits: int | None = None
) -> SequenceStep:
    """The tokens [start, stop) of a context, with the logits of all unless it is said of how many."""
    span = range(start, stop)
    return SequenceStep(tokens[start:stop], span, span, pages, stop - start if num_logits is None else num_logits)
