"""Tokenizers of many shapes, and checkpoints that say what a test wants in their tokens.

``PUBLISHED`` are those of published models, which ``make tokenizers`` fetches; a test that asks for one is skipped
while it is not there. ``MADE`` are small ones that are made here, each for a shape that published ones may have. A test
over all of them is parametrized by ``EVERY``: large vocabularies, which take seconds to load, wait for the slow ring.
"""

import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from tests.support.fetch_tokenizers import FOLDER, PINS
from tests.support.rings import slow
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from paceline.checkpoint.tokenizer import Tokenizer, load_tokenizer

PUBLISHED = tuple(PINS)
QUICK = ("qwen3", "llama2", "deepseek_v3")
"""Those of the fast ring: added tokens that are not special; metaspaces; hundreds of added tokens."""
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<pad>")
"""Added tokens of the made tokenizers, besides their special tokens."""
WORDS = ("▁Hello", "▁big", "▁world", "▁and", "▁more")
"""Words that are one token each of a made tokenizer of metaspaces."""
_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_EMBEDDING_SIZE = 64
_NUM_POSITIONS = 2048


def folder(name: str) -> Path:
    """The folder of a tokenizer, as a checkpoint has it. Skips the test if it is one that was not fetched."""
    if name in MADE:
        return _made(name)
    found = FOLDER / name
    if not (found / "tokenizer.json").is_file():
        pytest.skip("the tokenizers of published models are not there: `make tokenizers` fetches them")
    return found


@functools.cache
def tokenizer(name: str) -> Tokenizer:
    """The tokenizer itself, loaded once."""
    return load_tokenizer(str(folder(name)))


class Pair(NamedTuple):
    """Checkpoints of a target and of its draft."""

    target: Path
    draft: Path


def says(
    name: str,
    prompt_ids: Sequence[int],
    answer_ids: Sequence[int],
    *,
    rows: int | None = None,
    wrong_every: int = 3,
    chat_template: str | None = None,
    settings: dict[str, Any] | None = None,
) -> Pair:
    """A target that answers a prompt with ``answer_ids`` and then with the end of sequence for ever, and its draft.

    The logits depend on the position alone. So a real engine says any tokens, whatever the prompt's tokens are, as
    long as there are as many of them.

    Args:
        name: of the tokenizer.
        prompt_ids: the prompt, of which only the number of tokens matters.
        answer_ids: the tokens of greedy decoding.
        rows: of the embedding; None: as many as the tokenizer needs.
        wrong_every: the draft says another token at every so many positions; 0: at none.
        chat_template: takes the place of the tokenizer's own.
        settings: further keys of ``tokenizer_config.json``.
    """
    eos = tokenizer(name).eos_token_ids[0]
    size = rows or max(tokenizer(name).vocab.values()) + 1
    script = [eos] * len(prompt_ids) + [*answer_ids]
    wrong = [(token + 1) % size if wrong_every and i % wrong_every == 0 else token for i, token in enumerate(script)]
    base = Path(tempfile.mkdtemp(dir=_scratch()))
    for part, tokens in (("target", script), ("draft", wrong)):
        _scripted(base / part, tokens, size, eos)
        copy_tokenizer(name, base / part, chat_template=chat_template, settings=settings)
    return Pair(base / "target", base / "draft")


def copy_tokenizer(
    name: str, into: Path, *, chat_template: str | None = None, settings: dict[str, Any] | None = None
) -> None:
    """Lays the files of a tokenizer into a checkpoint, with another template or further settings if they are given."""
    into.mkdir(parents=True, exist_ok=True)
    for file in folder(name).iterdir():
        if not (into / file.name).exists():
            os.symlink(file, into / file.name)
    changes = {**(settings or {}), **({} if chat_template is None else {"chat_template": chat_template})}
    if changes:
        path = into / "tokenizer_config.json"
        content = {**json.loads(path.read_text(encoding="utf-8")), **changes}
        path.unlink()
        path.write_text(json.dumps(content), encoding="utf-8")


@functools.cache
def _scratch() -> Path:
    """A folder of this process, which goes when it ends."""
    holder = tempfile.TemporaryDirectory(prefix="zoo-")
    _kept.append(holder)
    return Path(holder.name)


_kept: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def _codes(size: int) -> torch.Tensor:
    """A row for each token, [size, _EMBEDDING_SIZE]: all of the same length, with mean 0, and none near another."""
    halves = torch.ones(_EMBEDDING_SIZE)
    halves[::2] = -1
    generator = torch.Generator().manual_seed(size)
    order = torch.rand(size, _EMBEDDING_SIZE, generator=generator).argsort(1)
    return halves[order]


@functools.cache
def _vocabulary(size: int) -> Path:
    """The weights that all scripts of a vocabulary share: safetensors, one file."""
    file = _scratch() / f"vocabulary-{size}.safetensors"
    head = 0.5 * _codes(size)  # logits of 32 for the token said, of about 0 for others
    save_file({"transformer.wte.weight": torch.zeros_like(head), "lm_head.weight": head}, file, {"format": "pt"})
    return file


def _scripted(into: Path, script: Sequence[int], size: int, eos: int) -> None:
    """Saves a GPT-2 that says ``script[p + 1]`` after position p."""
    from transformers import GPT2Config

    into.mkdir(parents=True)
    width = _EMBEDDING_SIZE
    positions = _codes(size)[[*script[1:], *[eos] * (_NUM_POSITIONS + 1 - len(script))]]
    config = GPT2Config(
        vocab_size=size,
        n_positions=_NUM_POSITIONS,
        n_embd=width,
        n_layer=1,
        n_head=2,
        n_inner=8,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=eos,
        architectures=["GPT2LMHeadModel"],
        dtype="float32",
    )
    config.save_pretrained(into)
    weights = {"transformer.wpe.weight": positions.contiguous()}
    shapes = {
        "attn.c_attn": (width, 3 * width),
        "attn.c_proj": (width, width),
        "mlp.c_fc": (width, 8),
        "mlp.c_proj": (8, width),
    }
    for part, (rows, columns) in shapes.items():  # the layer adds nothing
        weights[f"transformer.h.0.{part}.weight"] = torch.zeros(rows, columns)
        weights[f"transformer.h.0.{part}.bias"] = torch.zeros(columns)
    for norm in ("h.0.ln_1", "h.0.ln_2", "ln_f"):
        weights[f"transformer.{norm}.weight"] = torch.ones(width)
        weights[f"transformer.{norm}.bias"] = torch.zeros(width)
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    save_file(weights, into / names[0], {"format": "pt"})
    os.symlink(_vocabulary(size), into / names[1])
    index = dict.fromkeys(weights, names[0])
    index |= dict.fromkeys(("transformer.wte.weight", "lm_head.weight"), names[1])
    content = {"metadata": {"total_size": 0}, "weight_map": index}
    (into / "model.safetensors.index.json").write_text(json.dumps(content))
    (into / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))


# Tokenizers that are made here.


def _byte_level(
    *, specials: Sequence[str] = _SPECIALS, plain: Sequence[str] = (), holes: int = 0, add_prefix_space: bool = False
) -> tuple[Backend, dict[str, str]]:
    """Every byte is a token, and there are no merges; ``holes``: ids without a token before the added ones."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    if holes:
        vocab |= {"Ġa": 256 + holes}
    backend = Backend(models.BPE(vocab=vocab, merges=[("Ġ", "a")] if holes else []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return backend, {"eos_token": specials[-1]}


def _metaspace(
    *, prefix_space: bool, specials: Sequence[str] = ("<unk>", "<s>", "</s>"), plain: Sequence[str] = MARKS
) -> tuple[Backend, dict[str, str]]:
    """As Llama 2 (with a space before every text) or Gemma (without): byte fallback, metaspaces by a normalizer."""
    vocab = {text: i for i, text in enumerate(specials)}
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    merges = []
    for character in ("▁", *map(chr, range(33, 127))):
        vocab[character] = len(vocab)
    for word in WORDS:
        made = word[0]
        for character in word[1:]:
            if made + character not in vocab:
                vocab[made + character] = len(vocab)
                merges.append((made, character))
            made += character
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix_space else spaces
    strip = [decoders.Strip(" ", 1, 0)] if prefix_space else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    bos = [("<s>", vocab["<s>"])]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=bos)
    return backend, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


_MAKERS: dict[str, Callable[[], tuple[Backend, dict[str, str]]]] = {
    "byte_level": lambda: _byte_level(),
    "plain_marks": lambda: _byte_level(plain=MARKS),
    "special_marks": lambda: _byte_level(specials=(*MARKS, *_SPECIALS)),
    "holes": lambda: _byte_level(plain=MARKS, holes=40),
    "prefix_space": lambda: _byte_level(plain=MARKS, add_prefix_space=True),
    "metaspace": lambda: _metaspace(prefix_space=True),
    "metaspace_bare": lambda: _metaspace(prefix_space=False),
}
MADE = tuple(_MAKERS)
EVERY = [*MADE, *QUICK, *slow(name for name in PUBLISHED if name not in QUICK)]
"""Cases of a parametrization."""


@functools.cache
def _made(name: str) -> Path:
    found = _scratch() / name
    shutil.rmtree(found, ignore_errors=True)
    found.mkdir()
    backend, roles = _MAKERS[name]()
    backend.save(str(found / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **roles}
    (found / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return found
