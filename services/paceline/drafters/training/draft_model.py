"""A draft model of its own: the first layers of a target, over the tokens that the target writes most.

It reads no states, so it drafts on other devices, and its checkpoint is one of transformers. With fewer tokens than the
target it has a tokenizer of its own: the target's byte pairs without the merges that lead to other tokens. What it
cannot propose it can still read, as its tokenizer cuts it (``vocabulary: shared``).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as Backend
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from paceline.checkpoint.tokenizer import Tokenizer
from paceline.drafters.heads.module import Attend, HeadModule
from paceline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens of a target that a draft has, and how it reads the others."""

    target_ids: Tensor
    """[draft vocabulary] int64: the target's id of each of its tokens."""
    read_as: Tensor
    """[vocabulary] int64: the draft's token for each of the target's, of others the last one that it is cut into."""
    content: str
    """Content of ``tokenizer.json``."""
    names: dict[str, str]
    """Role -> token that has it."""

    def save(self, folder: Path) -> None:
        """Writes the tokenizer."""
        backend = Backend.from_str(self.content)
        PreTrainedTokenizerFast(tokenizer_object=backend, **self.names).save_pretrained(folder)


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int, frequent: Sequence[int] | None) -> Vocabulary:
    """The vocabulary of a draft.

    Args:
        tokenizer: of the target.
        vocab_size: of the target's logits.
        frequent: tokens that it must have, by the target's ids; None: all.

    Raises:
        ConfigError: the target's tokenizer cannot be written, or made smaller.
    """
    text = tokenizer.backend_json()
    if text is None:
        raise ConfigError(f"the tokenizer {tokenizer.name!r} has no tokenizer.json: no draft model is made for it")
    names = {name: token for name, token in tokenizer.special_names.items() if token is not None}
    every = torch.arange(vocab_size)
    if frequent is None:
        return Vocabulary(every, every, text, names)
    content = json.loads(text)
    model = content["model"]
    if model["type"] != "BPE":
        raise ConfigError(
            f"--draft-vocab-size is given for a tokenizer of {model['type']}: only byte-pair tokenizers can be smaller"
        )
    merges = [tuple(merge.split(" ", 1) if isinstance(merge, str) else merge) for merge in model["merges"]]
    parts = {"".join(merge): merge for merge in reversed(merges)}  # the first merge that makes it
    ids: dict[str, int] = model["vocab"]
    added = {token["content"]: int(token["id"]) for token in content["added_tokens"]}
    tokens = {token_id: token for token, token_id in {**ids, **added}.items()}
    kept = {token for token in ids if token not in parts} | {*added}
    todo = [tokens[token_id] for token_id in frequent if token_id in tokens]
    while todo:  # a token is there if what it is merged from is
        if (token := todo.pop()) not in kept:
            kept.add(token)
            todo += parts[token]
    order = sorted((token_id, token) for token_id, token in tokens.items() if token in kept and token_id < vocab_size)
    own = {token: i for i, (_, token) in enumerate(order)}
    model["vocab"] = {token: own[token] for token in ids if token in own}
    model["merges"] = [list(merge) for merge in merges if "".join(merge) in own and own.keys() >= {*merge}]
    content["added_tokens"] = [
        token | {"id": own[token["content"]]} for token in content["added_tokens"] if token["content"] in own
    ]
    processor = content.get("post_processor") or {}
    for part in (processor, *processor.get("processors", ())):
        for special in (part.get("special_tokens") or {}).values():
            special["ids"] = [own[token] for token in special["tokens"]]
    read_as = torch.zeros(vocab_size, dtype=torch.int64)
    for token_id, token in tokens.items():
        while token not in own:
            token = parts[token][-1]
        if token_id < vocab_size:
            read_as[token_id] = own[token]
    target_ids = torch.tensor([token_id for token_id, _ in order])
    return Vocabulary(target_ids, read_as, json.dumps(content), names)


class DraftModel(HeadModule):
    """A model under training, with the interface of heads; it ignores the states."""

    alike = True

    def __init__(self, model: PreTrainedModel, vocabulary: Vocabulary) -> None:
        """``model``: of the draft's tokens."""
        super().__init__()
        self.model, self.vocabulary = model, vocabulary
        self.state_size = model.config.hidden_size

    @property
    def target_ids(self) -> Tensor:
        """[draft vocabulary] ids of the target."""
        return self.vocabulary.target_ids.to(self.model.device)

    def fuse(self, states: Tensor) -> Tensor:
        """The states as they are."""
        return states

    def step(self, token_ids: Tensor, state: Tensor, positions: Tensor, attend: Attend, depth: int) -> Tensor:
        """Raises NotImplementedError: a draft model drafts by itself, not from states."""
        raise NotImplementedError("a draft model has no states")

    def logits(self, state: Tensor, depth: int) -> Tensor:
        """Logits of a state after its last layer."""
        out: Tensor = self.model.get_output_embeddings()(state)
        return out

    def unroll(self, states: Tensor, token_ids: Tensor, depths: int) -> Iterator[Tensor]:
        """Implements ``HeadModule.unroll``: yields the model's predictions after the tokens of the text, for each
        depth.
        """
        num_rows = states.shape[1]
        own = self.vocabulary.read_as[token_ids[:, : num_rows + depths]].to(token_ids.device)
        logits = self.model(own, use_cache=False).logits
        for depth in range(depths):
            yield logits[:, 1 + depth : 1 + depth + num_rows]

    def save(self, folder: Path) -> None:
        """Writes the checkpoint, in bfloat16, and its tokenizer."""
        copy.deepcopy(self.model).bfloat16().save_pretrained(folder)
        self.vocabulary.save(folder)


def first_layers(target: PreTrainedModel, vocabulary: Vocabulary, num_layers: int) -> PreTrainedModel:
    """A model of the target's class with its first layers, its embedding, final norm and LM head for some tokens.

    Raises:
        ConfigError: the target has no such layers, or is more than a language model.
    """
    config = copy.deepcopy(target.config)
    most = config.get_text_config().num_hidden_layers
    if config.get_text_config() is not config:
        raise ConfigError(f"{type(target).__name__} is more than a language model: no draft model is made of it")
    if num_layers > most:
        raise ConfigError(f"--layers is {num_layers}: it must be from 1 to {most}, the target's layers")
    config.num_hidden_layers, config.tie_word_embeddings = num_layers, False
    for name in ("layer_types", "mlp_layer_types", "no_rope_layers"):
        if isinstance(kinds := getattr(config, name, None), list):
            setattr(config, name, kinds[:num_layers])
    config.vocab_size = len(vocabulary.target_ids)
    ends = _ends(target)
    own = {int(token_id): i for i, token_id in enumerate(vocabulary.target_ids)}
    config.eos_token_id = [own[token_id] for token_id in ends if token_id in own] or None
    config.bos_token_id, config.pad_token_id = own.get(config.bos_token_id), own.get(config.pad_token_id)
    model_class: Any = type(target)
    model: PreTrainedModel = model_class(config).float()
    theirs, state = target.state_dict(), model.state_dict()
    tables = {
        id(part.weight): part.weight[vocabulary.target_ids]
        for part in (target.get_input_embeddings(), target.get_output_embeddings())
    }
    by_name = dict(target.named_parameters(remove_duplicate=False))
    for name in state:
        whole = by_name.get(name, theirs[name])
        state[name] = tables.get(id(whole), whole).detach().float().clone()
    model.load_state_dict(state)
    model.generation_config.eos_token_id = config.eos_token_id
    model.generation_config.bos_token_id = config.bos_token_id
    model.generation_config.pad_token_id = config.pad_token_id
    return model


def _ends(target: PreTrainedModel) -> list[int]:
    found = getattr(target.generation_config, "eos_token_id", None)
    found = target.config.eos_token_id if found is None else found
    return [] if found is None else torch.tensor(found).flatten().tolist()
