"""Speculative streaming: the streams say what rows of one whole forward would say, and change no text."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.drafters.asked import Answer, Run, check_head, difference, paged, run_head, stale
from tests.drafters.head_files import HeadFile, streams
from tests.drafters.test_early_exit import requests_of
from tests.support.models import FAMILIES, letters_tokenizer, random_model
from tests.support.mutants import mutant
from tests.support.pump import assert_same, plain_reference
from tests.support.rings import slow
from torch import Tensor
from transformers import PreTrainedModel

from paceline.checkpoint.files import Checkpoint
from paceline.cli.flags import heads_of
from paceline.config import HeadOptions, TargetOptions, TargetSetup
from paceline.drafters.available import available_methods
from paceline.drafters.heads import drafter as head_drafter
from paceline.drafters.heads.drafter import HeadDrafter
from paceline.drafters.heads.module import Unrolled
from paceline.drafters.heads.partial_model import Continued
from paceline.drafters.heads.stream_head import LowRank, StreamHead
from paceline.drafters.heads.streaming import load_streams, open_streams
from paceline.errors import ConfigError
from paceline.model.features import Features
from paceline.model.loading import LoadedModel, prepare
from paceline.model.step import Step
from paceline.preflight.heads import heads_size
from paceline.target.build import build_target_engine
from paceline.types import Result

METHOD, BOUNDARY, STREAMS = "speculative_streaming", 1, 4


def made(family: str) -> PreTrainedModel:
    """A target whose last two layers the streams go through."""
    config = FAMILIES[family]()
    config.num_hidden_layers = 3
    if hasattr(config, "layer_types"):
        config.layer_types = (config.layer_types * 2)[:3]
    return random_model(config)


whole = functools.cache(made)
"""The target as transformers runs it."""


@functools.cache
def target(family: str, boundary: int = BOUNDARY) -> LoadedModel:
    return prepare(made(family), compile=False, features=Features((boundary,), every_position=False))


@functools.cache
def head_file(family: str) -> HeadFile:
    return streams(whole(family), BOUNDARY)


@functools.cache
def plain(family: str, temperature: float) -> dict[str, Result]:
    return plain_reference(target(family), requests_of(temperature))


def written(family: str, folder: Path) -> tuple[Checkpoint, str]:
    """A target and its streams on disk."""
    path = folder / "target"
    whole(family).save_pretrained(path)
    letters_tokenizer().save_pretrained(path)
    return Checkpoint.open(str(path)), str(head_file(family).write(folder / "streams"))


def pump_of(family: str, folder: Path, *, boundary: int = BOUNDARY, **options: Any) -> Run:
    checkpoint, source = written(family, folder)
    loaded = target(family, boundary)
    assert isinstance(loaded.step, Step)
    plan = open_streams(checkpoint, source, STREAMS)
    head = load_streams(plan, loaded.dtype, loaded.device, target=loaded.step.model, max_leaves=5)
    head.features = Features((boundary,), every_position=False)
    return run_head(loaded, head, STREAMS, **{"pages": 12} | options)


def said_by(family: str, answer: Answer) -> Tensor:
    """What rows of a whole forward say."""
    file = head_file(family)
    return file.oracle(file.tensors, whole(family), BOUNDARY, answer.tokens)[len(answer.path)]


@pytest.mark.compiler
@pytest.mark.parametrize("family", ["llama", "gemma3", *slow(["qwen3", "mistral", "phi3", "qwen3_moe"])])
def test_they_say_what_rows_of_a_whole_forward_say_and_no_text_changes(family: str, tmp_path: Path) -> None:
    """Prompts in chunks, a shared prefix, preemption, sliding windows, all depths."""
    said = partial(said_by, family)
    check_head(pump_of(family, tmp_path, pages=9), requests_of(1.0), plain(family, 1.0), said, STREAMS)


# -- mutants: the text stays plain's, but what is proposed is not what the oracle says ---------------------------------


def _one_position_late(patch: pytest.MonkeyPatch) -> None:
    run = Continued.__call__
    patch.setattr(Continued, "__call__", lambda self, states, positions, *rest: run(self, states, positions + 1, *rest))


def _in_reverse(patch: pytest.MonkeyPatch) -> None:
    ahead = StreamHead.ahead
    patch.setattr(StreamHead, "ahead", lambda self, *arguments: ahead(self, *arguments).flip(1))


@mutant(HeadDrafter, "bind")
def _pages_of_the_layer_below(bind: Any, self: HeadDrafter, cache: Any, first_layer: int) -> None:
    bind(self, cache, first_layer)
    self._first_layer = -1


def _without_additions(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StreamHead, "with_addition", lambda self, addition, linear, args, output: output)


def _without_the_anchor(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Continued, "embed", lambda self, token_ids: torch.zeros(len(token_ids), 64))


MUTANTS = {
    "one position late": _one_position_late,
    "stale states": stale("states"),
    "kept logits": stale("ahead"),
    "in reverse": _in_reverse,
    "streams do not see those before them": paged(head_drafter, lambda part: setattr(part, "chain", False)),
    "without row 0, which other heads do not have": paged(head_drafter, lambda part: setattr(part, "first_row", 1)),
    "without the last row": paged(head_drafter, lambda part: setattr(part, "num_rows", part.num_rows - 1)),
    "pages of the layer below": _pages_of_the_layer_below,
    "without additions": _without_additions,
    "without the anchor": _without_the_anchor,
}


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_streams_are_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    pump, _, asked = pump_of("llama", tmp_path)
    requests = {name: request for name, request in requests_of(1.0).items() if len(request.prompt) < 66}
    expected = {name: result for name, result in plain("llama", 1.0).items() if name in requests}
    assert_same(pump.run(requests), expected)
    assert difference(asked, partial(said_by, "llama")) > 1e-2


def test_states_of_another_boundary_are_noticed(tmp_path: Path) -> None:
    pump, _, asked = pump_of("llama", tmp_path, boundary=0)
    assert_same(pump.run(requests_of(1.0)), plain("llama", 1.0))
    assert difference(asked, partial(said_by, "llama")) > 1e-2


# -- files and options -------------------------------------------------------------------------------------------------


def test_a_compiled_target_cannot_lend_its_layers(tmp_path: Path) -> None:
    """They are read from the files once more, and say the same; ``paceline check`` counts them."""
    checkpoint, source = written("llama", tmp_path)
    size = checkpoint.size("float32", None)
    assert size is not None
    cpu = torch.device("cpu")
    lent, read = (
        load_streams(open_streams(checkpoint, source, STREAMS), torch.float32, cpu, target=lender).module
        for lender in (whole("llama"), None)
    )
    models = []
    for module in (lent, read):
        assert isinstance(module, StreamHead)
        assert module._target is not None
        models.append(module._target.model)
    own, theirs = (model.state_dict() for model in models)
    assert own.keys() == theirs.keys()
    assert all(torch.equal(own[name], theirs[name]) for name in own)
    assert not any("layers.0." in name for name in own)
    assert {p.data_ptr() for p in models[0].parameters()} <= {p.data_ptr() for p in whole("llama").parameters()}
    added = 4 * sum(tensor.numel() for tensor in head_file("llama").tensors.values())
    head = HeadOptions(method=METHOD, model=source)
    eager, compiled = (
        heads_size(TargetSetup(checkpoint.path, TargetOptions(heads=[head], compile=compile)), size, 256).weights_bytes
        for compile in (False, True)
    )
    assert eager == added
    held = 4 * sum(p.numel() for p in models[1].parameters())
    assert 0.99 * held <= compiled - added <= 1.01 * held


@torch.inference_mode()
def test_layers_that_were_read_in_bfloat16_have_the_additions_too(tmp_path: Path) -> None:
    """Their products are packed where this machine has native ones."""
    checkpoint, source = written("llama", tmp_path)
    lender = made("llama").bfloat16()
    state = torch.randn(1, lender.config.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    logits = []
    for given in (lender, None):
        plan = open_streams(checkpoint, source, STREAMS)
        head = load_streams(plan, torch.bfloat16, torch.device("cpu"), target=given)
        logits.append(head.module.ahead(torch.tensor([7]), state, torch.arange(STREAMS)[None], Unrolled()))
    torch.testing.assert_close(logits[1], logits[0], rtol=0.05, atol=0.05)
    bare = load_streams(open_streams(checkpoint, source, STREAMS), torch.bfloat16, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LowRank, "forward", lambda self, x: x.new_zeros(()))
        without = bare.module.ahead(torch.tensor([7]), state, torch.arange(STREAMS)[None], Unrolled())
    assert not torch.allclose(without, logits[0], rtol=0.05, atol=0.05)


def test_streams_are_served_from_their_folder(tmp_path: Path) -> None:
    checkpoint, source = written("llama", tmp_path)
    (head,) = heads_of([f"{METHOD}={source},3"])
    assert head == HeadOptions(method=METHOD, model=source, num_speculative_tokens=3)
    options = TargetOptions(dtype="float32", device="cpu", compile=False, heads=[head])
    (mounted,) = build_target_engine(TargetSetup(checkpoint.path, options), lambda messages: None).heads.mounted
    assert isinstance(mounted.head, HeadDrafter)
    assert mounted.head.module.ahead_rows == 3
    assert mounted.head.features == Features((BOUNDARY,), every_position=False)
    assert not mounted.head.layers


def test_advice_knows_what_a_pass_reads(tmp_path: Path) -> None:
    checkpoint, source = written("llama", tmp_path)
    head, size = HeadOptions(method=METHOD, model=source), checkpoint.size()
    assert size is not None
    given, missing = (
        next(found for found in available_methods(checkpoint, None, heads) if found.method.kind == METHOD)
        for heads in ([head], [])
    )
    own = size.item_bytes * sum(tensor.numel() for tensor in head_file("llama").tensors.values())
    assert (given.refusal, given.one_pass, given.most_tokens) == ("", True, STREAMS)
    assert given.forward_bytes - own == int(2 / 3 * size.weights_bytes)
    assert missing.refusal.endswith("--head speculative_streaming=DIRECTORY")


def test_streams_that_do_not_fit_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    checkpoint, source = written("llama", tmp_path)
    folder, config, tensors = Path(source), head_file("llama").config, head_file("llama").tensors

    def refused(said: str, num_tokens: int = STREAMS) -> None:
        with pytest.raises(ConfigError, match=said):
            open_streams(checkpoint, source, num_tokens)

    refused(r"^num_speculative_tokens is 5 of method 'speculative_streaming': .* has 4 streams, so 1 to 4 are", 5)
    for key, value, said in (
        ("boundary", 3, r"boundary is 3 in config.json .* has 3 layers, so 1 to 2 are allowed"),
        ("boundary", 0, r"boundary is 0 in config.json .* 1 to 2 are allowed"),
        ("boundary", "1", "boundary is '1' in config.json"),
        ("boundary", 2, "holds 'layers.1.* more, which its format does not have"),
        ("boundary", None, "lacks 'boundary'"),
        ("hidden_size", 9, "hidden_size is 9 in .* has 64"),
        ("vocab_size", 9, "vocab_size is 9 in .* has 300"),
        ("num_target_layers", 7, "num_target_layers is 7 in .* has 3"),
        ("rank", 0, "rank is 0 in config.json .* at least 1"),
        ("rank", 4, r"'.*(down|up).weight' of .* it must be"),
        ("num_streams", 0, "num_streams is 0 in config.json .* at least 1"),
        ("num_streams", 5, r"'streams' of .* is \[4, 64\]: .* it must be \[5, 64\]"),
        ("model_type", "medusa", "model_type is 'medusa' in .*'stream_head' is allowed"),
        ("alpha", 2, "config.json of .* has 'alpha': an unknown key could change its result"),
    ):
        (folder / "config.json").write_text(json.dumps(config | {key: value}), encoding="utf-8")
        refused(said)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for changed, said in (
        (tensors | {"bias": torch.zeros(1)}, "holds 'bias', which its format does not have"),
        ({"streams": tensors["streams"]}, "is not whole: no weight file holds 'anchor.down.weight'"),
    ):
        save_file(changed, folder / "model.safetensors")
        refused(said)
    with pytest.raises(ConfigError, match="is not on this machine"):
        open_streams(checkpoint, "nobody/nothing", STREAMS)
    head_file("llama").write(folder)
    with pytest.raises(ConfigError, match="is quantized, and layers of plain weights only can draft"):
        open_streams(replace(checkpoint, quantization={"quant_method": "fp8"}), source, STREAMS)


def test_a_target_without_linear_layers_is_refused(tmp_path: Path) -> None:
    random_model("gpt2").save_pretrained(tmp_path / "target")
    letters_tokenizer().save_pretrained(tmp_path / "target")
    config = head_file("llama").config | {"num_target_layers": 2}
    source = replace(head_file("llama"), config=config).write(tmp_path / "streams")
    with pytest.raises(ConfigError, match=r"^layer 1 of the target .* \(GPT2Block\) has no linear layer to add"):
        open_streams(Checkpoint.open(str(tmp_path / "target")), str(source), STREAMS)
