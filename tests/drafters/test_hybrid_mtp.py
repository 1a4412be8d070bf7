"""MTP modules in the files of hybrids: what they say is what the published modules say, and no text changes.

The oracle takes transformers' layers, computes every row anew, and knows nothing of pages and states.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.drafters.asked import Answer, Run, check_head, difference, lengths_of, run_head
from tests.model.families import checkpoint
from tests.support.hybrids import hybrid_config
from tests.support.models import letters_tokenizer, prompt
from tests.support.pump import Request, plain_reference, requests_for
from tests.support.rings import slow
from torch import Tensor

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.mtp import mtp_parts
from paceline.drafters.heads.load import mtp_layers, open_head
from paceline.drafters.heads.mtp import MtpModule, Parts
from paceline.errors import ConfigError
from paceline.model.features import OUT, Features
from paceline.model.loading import LoadedModel, prepare

TOKENS = 4
"""Tokens of a round."""
FAMILIES = ("qwen3_5_text", "nemotron_h", *slow(["qwen3_next"]))


class Published(NamedTuple):
    """A target, and its module by the published names."""

    target: Any
    block: Any
    """A model of transformers whose layers are those of the module."""
    tensors: dict[str, Tensor]


@functools.cache
def published(family: str) -> Published:
    """Both depend on the last token for the most part, so that some tokens are right."""
    own = {"layer_types": ["full_attention"], "num_hidden_layers": 1}
    if family == "nemotron_h":
        own = {"layer_types": ["full_attention", "moe"]}
    target = checkpoint(hybrid_config(family, tie_word_embeddings=False))
    block = checkpoint(hybrid_config(family, tie_word_embeddings=False, **own), seed=1)
    with torch.no_grad():
        for name, weight in (*target.named_parameters(), *block.named_parameters()):
            if any(part in name for part in ("o_proj", "out_proj", "down_proj")):
                weight *= 0.06
        target.get_input_embeddings().weight.normal_(generator=torch.Generator().manual_seed(3))
    size, generator = target.config.hidden_size, torch.Generator().manual_seed(2)

    def norm() -> Tensor:  # those of Qwen are added to 1
        drawn = 0.1 * torch.randn(size, generator=generator)
        return drawn + 1 if family == "nemotron_h" else drawn

    mixed = torch.cat([torch.eye(size), 0.1 * torch.randn(size, size, generator=generator) / size**0.5], 1)
    names = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
    if family == "nemotron_h":
        names = ("mtp.layers.0.enorm", "mtp.layers.0.hnorm", "mtp.layers.0.eh_proj", "mtp.layers.1.final_layernorm")
    tensors = {f"{name}.weight": mixed if "fc" in name[-2:] or "proj" in name else norm() for name in names}
    last = target.model.norm_f if family == "nemotron_h" else target.model.norm
    tensors[f"{names[3]}.weight"] = last.weight.detach() + 0.05 * torch.randn(size, generator=generator)
    for index, layer in enumerate(block.model.layers):
        for name, weight in layer.state_dict().items():
            tensors |= split(f"mtp.layers.{index}.{name}", weight.clone())
    return Published(target, block, tensors)


def split(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Experts are published one by one."""
    before, experts, part = name.partition(".experts.")
    if not experts:
        return {name: weight}
    found = {}
    for index, own in enumerate(weight):
        halves = {"gate_proj": own.chunk(2)[0], "up_proj": own.chunk(2)[1]} if part == "gate_up_proj" else {part: own}
        found |= {f"{before}.experts.{index}.{key}.weight": half.clone() for key, half in halves.items()}
    return found


def rms(family: str, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (weight if family == "nemotron_h" else 1 + weight)


def oracle(family: str, tokens: Sequence[int], path: Sequence[int]) -> Tensor:
    """Logits behind a text, whose last token the target has not computed, and behind each token of a path below it."""
    target, block, w = published(family)
    nemotron = family == "nemotron_h"
    eps = block.config.layer_norm_epsilon if nemotron else block.config.rms_norm_eps
    e, h, fc, out = (
        ("layers.0.enorm", "layers.0.hnorm", "layers.0.eh_proj", "layers.1.final_layernorm")
        if nemotron
        else ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
    )
    text, rows = [*tokens, *path], []
    with torch.no_grad():
        states = target.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
        for _ in range(len(path) + 1):
            count = len(states)
            embedded = target.get_input_embeddings()(torch.tensor(text[1 : count + 1]))
            both = [
                rms(family, embedded, w[f"mtp.{e}.weight"], eps),
                rms(family, states, w[f"mtp.{h}.weight"], eps),
            ]
            x = (torch.cat(both, -1) @ w[f"mtp.{fc}.weight"].T)[None]
            mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
            options: dict[str, Any] = {"attention_mask": mask}
            if not nemotron:
                options["position_embeddings"] = block.model.rotary_emb(x, torch.arange(count)[None])
            for layer in block.model.layers:
                x = layer(x, **options)
            state = rms(family, x[0, -1], w[f"mtp.{out}.weight"], eps)
            rows.append(target.lm_head(state))
            states = torch.cat([states, state[None]])
    return torch.stack(rows)


@functools.cache
def loaded(family: str) -> LoadedModel:
    return prepare(checkpoint_of(family), compile=False, features=Features((OUT,), every_position=True))


def checkpoint_of(family: str) -> Any:
    """A copy, as ours replaces forwards."""
    model = checkpoint(hybrid_config(family, tie_word_embeddings=False))
    model.load_state_dict(published(family).target.state_dict())
    return model


def written(family: str, folder: Path) -> Checkpoint:
    """The target with its module, in one set of files."""
    published(family).target.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file(load_file(file) | published(family).tensors, file, metadata={"format": "pt"})
    letters_tokenizer().save_pretrained(folder)
    return Checkpoint.open(str(folder))


def requests_of(temperature: float, max_tokens: int = 24) -> dict[str, Request]:
    """Contexts that end around ends of chunks and pages, two with the same first page."""
    first = prompt(9, 64)
    prompts = [prompt(i, n) for i, n in enumerate((2, 15, 47, 63, 64))] + [[*first, *prompt(i, i)] for i in (1, 20)]
    options = {"temperature": temperature, "max_tokens": max_tokens, "ignore_eos": True}
    return requests_for(prompts, **options, max_draft_tokens=TOKENS)


def run_module(checkpoint: Checkpoint, model: LoadedModel, **options: Any) -> Run:
    """An engine with the module as its head."""
    plan = open_head("mtp", None, checkpoint, num_tokens=TOKENS)
    assert (mtp_layers(checkpoint), len(plan.layers), plan.features) == (1, 1, model.features)
    head = plan.load(torch.float32, torch.device("cpu"), max_leaves=8)
    return run_head(model, head, TOKENS, **{"pages": 14} | options)


def watched(family: str, folder: Path, **options: Any) -> Run:
    return run_module(written(family, folder), loaded(family), **options)


def said_by(family: str, answer: Answer) -> Tensor:
    return oracle(family, answer.tokens, answer.path)[-1]


@pytest.mark.parametrize("family", FAMILIES)
def test_it_says_what_the_published_module_says_and_no_text_changes(family: str, tmp_path: Path) -> None:
    """Prompts in chunks, shared prefixes, preemption, all depths, rejections."""
    requests, said = requests_of(1.0), functools.partial(said_by, family)
    reference = plain_reference(loaded(family), requests)
    check_head(watched(family, tmp_path, pages=5), requests, reference, said, TOKENS, num=40, arrivals=1.0)


def lengths_of_oracle(family: str, tokens: Sequence[int], text: Sequence[int]) -> list[int]:
    """Tokens of each round of greedy assisted generation, until ``text`` has come behind ``tokens``."""
    lengths, done = [1], 1
    while done < len(text):
        path: list[int] = []
        for _ in range(TOKENS):
            path.append(int(oracle(family, [*tokens, *text[:done]], path)[-1].argmax()))
        right = next((i for i, pair in enumerate(zip(path, text[done:], strict=False)) if pair[0] != pair[1]), TOKENS)
        lengths.append(right + 1)
        done += right + 1
    return lengths


@pytest.mark.parametrize("family", FAMILIES)
def test_accepted_lengths_are_those_of_greedy_assisted_generation(family: str, tmp_path: Path) -> None:
    """From prompts that end before, at and behind the end of a chunk."""
    (pump, *_), longest = watched(family, tmp_path), 0
    lengths = lengths_of(pump)
    for name in ("s0", "s1", "s3"):
        request = requests_of(0.0, 20)[name]
        lengths.clear()
        result = pump.run({name: request})[name]
        ids = torch.tensor([[*request.prompt]])
        text = published(family).target.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None)
        assert [*request.prompt, *result.token_ids] == text[0].tolist()
        expected = lengths_of_oracle(family, request.prompt, result.token_ids)
        assert lengths[:-1] == expected[:-1]
        longest = max(longest, *expected[:-1])
    assert longest > 2


def _inputs_swapped(patch: pytest.MonkeyPatch) -> None:
    forward = MtpModule.forward
    patch.setattr(MtpModule, "forward", lambda self, embedded, state, *rest: forward(self, state, embedded, *rest))


def _recycled_before_the_norm(patch: pytest.MonkeyPatch) -> None:
    def mutant(self: MtpModule, embedded: Tensor, state: Tensor, rotary: Any, positions: Tensor, attend: Any) -> Tensor:
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(state)], -1))
        return self.block(x, attention_mask=None, position_ids=positions, position_embeddings=rotary, attend=attend)

    patch.setattr(MtpModule, "forward", mutant)


def _without_its_experts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Parts, "forward", lambda self, x, **options: self.parts[0](x, **options))


@pytest.mark.parametrize("mutant", [_inputs_swapped, _recycled_before_the_norm, _without_its_experts])
def test_wrong_modules_are_noticed(mutant: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    pump, _, asked = watched("nemotron_h", tmp_path)
    pump.run({"s1": requests_of(1.0)["s1"]})
    assert difference(asked, functools.partial(said_by, "nemotron_h"), 8) > 1e-2


def test_layers_with_a_state_are_refused_in_a_module(tmp_path: Path) -> None:
    checkpoint = written("nemotron_h", tmp_path)
    checkpoint.config["mtp_layers_block_type"] = ["linear_attention", "moe"]
    with pytest.raises(ConfigError, match="has MTP layers of type linear_attention: full_attention, moe and mlp work"):
        open_head("mtp", None, checkpoint)


def test_the_layers_of_a_module_are_read_from_either_setting() -> None:
    nemotron = {"model_type": "nemotron_h"}
    assert mtp_parts(nemotron | {"mtp_hybrid_override_pattern": "*E"}) == ["full_attention", "moe"]
    assert mtp_parts(nemotron | {"mtp_layers_block_type": ["attention", "moe"]}) == ["full_attention", "moe"]
    assert mtp_parts({"model_type": "qwen3_next"}) == []
