"""Early exit: what the first layers of the target say on the target's own pages, and no text that they change."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.drafters.asked import Answer, Run, Said, check_head, difference, paged, run_head
from tests.drafters.head_files import write_exit
from tests.drafters.head_oracles import exit_states
from tests.model.families import checkpoint, small_config
from tests.support.models import prompt, random_model, save_pair
from tests.support.mutants import mutant
from tests.support.pump import Request, assert_same, plain_reference, requests_for
from tests.support.rings import slow
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig, PreTrainedModel

from paceline.checkpoint.files import Checkpoint
from paceline.cli.flags import heads_of
from paceline.config import HeadOptions, TargetOptions, TargetSetup
from paceline.drafters.heads import early_exit
from paceline.drafters.heads.early_exit import EarlyExit, layers_below, open_exit, truncated
from paceline.drafters.heads.exit_adapter import ExitAdapter
from paceline.drafters.heads.paged import Paged, Part
from paceline.drafters.heads.partial_model import borrow
from paceline.drafters.protocol import Candidates, Leaf
from paceline.errors import ConfigError
from paceline.messages import OpenSession
from paceline.model.compiled.linear import pack_layers
from paceline.model.kv_cache import KVCache
from paceline.model.loading import LoadedModel, prepare
from paceline.model.step import Step
from paceline.preflight.heads import heads_size
from paceline.target.build import build_target_engine
from paceline.target.session import TargetSession
from paceline.types import PAGE_SIZE, Result, SamplingParams, SpeculationParams, pages_for

PREFIX = prompt(999, PAGE_SIZE)


def whole_model(family: str) -> PreTrainedModel:
    """A random target; of latent attention a small one."""
    return checkpoint(small_config(family)) if family in LATENT else random_model(family)


@functools.cache
def target(family: str) -> LoadedModel:
    return prepare(whole_model(family), compile=False, features=EarlyExit.features)


@functools.cache
def first_layer(family: str) -> PreTrainedModel:
    """The first layer of the target as transformers runs it."""
    whole = whole_model(family)
    model = AutoModelForCausalLM.from_config(truncated(whole.config, 1)).eval()
    weights = whole.state_dict()
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    return model


def requests_of(temperature: float) -> dict[str, Request]:
    prompts = [prompt(n, n) for n in (2, 63, 64, 65, 129)] + [[*PREFIX, *prompt(i, i)] for i in (1, 40)]
    return requests_for(prompts, temperature=temperature, max_tokens=20, max_draft_tokens=4)


@functools.cache
def plain(family: str, temperature: float) -> dict[str, Result]:
    return plain_reference(target(family), requests_of(temperature))


def pump_of(family: str, **options: Any) -> Run:
    """An engine with the first layer as a head, whose pages are the session's."""
    loaded = target(family)
    assert isinstance(loaded.step, Step)
    model = borrow(partial(layers_below, 1), loaded.step.model)
    head = EarlyExit(model, vocab_size=loaded.vocab_size, max_leaves=5)
    pump, mounted, asked = run_head(loaded, head, 4, **{"pages": 9} | options)
    expand = head.expand

    def on_its_pages(leaves: Sequence[Leaf]) -> Candidates:
        for leaf in leaves:
            session = pump.target.sessions[leaf.session_id]
            held = pages_for(session.num_tokens - 1)
            assert head.sessions[leaf.session_id].pages[:held] == session.pages[:held]
        return expand(leaves)

    head.expand = on_its_pages  # type: ignore[method-assign]
    return pump, mounted, asked


def said_by(family: str, answer: Answer) -> Tensor:
    """What transformers' first layer says."""
    with torch.no_grad():
        return first_layer(family)(torch.tensor([[*answer.tokens, *answer.path]]), use_cache=False).logits[0, -1]


LATENT = ("minicpm3",)
FAMILIES = ["llama", "gemma3", *LATENT, *slow(["qwen3", "mistral", "gpt2", "phi3", "qwen3_moe"])]


@pytest.mark.parametrize("family", FAMILIES)
def test_it_says_what_the_first_layers_say_and_no_text_changes(family: str) -> None:
    """Prompts in chunks, a shared prefix, preemption, sliding windows, four tokens deep."""
    said = partial(said_by, family)
    check_head(pump_of(family), requests_of(1.0), plain(family, 1.0), said, 4, within=1e-3)


@mutant(early_exit, "Paged")
def _next_layer(make: Any, cache: Any, first_layer: int, parts: Any) -> Any:
    """It reads the layer behind its own."""
    return make(cache, first_layer + 1, parts)


def _no_anchor(part: Part) -> None:
    """Nodes do not see the anchor, which the target has not computed."""
    part.above = [[node for node in nodes if node != early_exit.ANCHOR] for nodes in part.above]


_WRONG_ROWS = {
    "next layer": _next_layer,
    "without anchor": paged(early_exit, _no_anchor),
    "first row hidden": paged(early_exit, lambda part: setattr(part, "first_row", 1)),
}
"""Row 0 is one that other heads do not have."""


class _Writes(Paged):
    """The last committed row on the pages gets the head's own keys: of the wrong token."""

    def __init__(self, cache: Any, first_layer: int, parts: Any) -> None:
        super().__init__(cache, first_layer, parts)
        for part in parts:
            at = part.num_rows - 1
            cache.keys[0][part.pages[at // PAGE_SIZE], at % PAGE_SIZE] += 1.0


@pytest.mark.parametrize("name", _WRONG_ROWS)
def test_wrong_rows_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text stays plain's; what is proposed is not what the first layers say."""
    _WRONG_ROWS[name](monkeypatch)
    pump, _, asked = pump_of("llama")
    assert_same(pump.run(requests_of(1.0)), plain("llama", 1.0))
    assert difference(asked, partial(said_by, "llama")) > 1e-2


def test_a_head_that_wrote_to_the_pages_would_change_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_exit, "Paged", _Writes)
    pump, mounted, _ = pump_of("llama")
    del mounted.head.expand  # nobody watches
    with pytest.raises(AssertionError):
        assert_same(pump.run(requests_of(1.0)), plain("llama", 1.0))


@pytest.mark.parametrize("noticed", [True, False])
def test_after_a_preemption_it_waits_for_its_pages(noticed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows of a session may be cached when it comes back: nothing is computed then, and it lies elsewhere."""
    if not noticed:
        attach = TargetSession.attach_prefix

        def uncounted(self: TargetSession, cache: KVCache) -> None:
            attach(self, cache)
            self.attachment = 1

        monkeypatch.setattr(TargetSession, "attach_prefix", uncounted)
    pump, _, answers = pump_of("llama", pages=40)
    tokens = tuple(prompt(5, PAGE_SIZE - 1))
    engine = pump.target
    params = SpeculationParams(max_draft_tokens=1)
    engine.receive([OpenSession("s", 1, tokens, len(tokens), 1, SamplingParams(max_tokens=40, seed=1), params)])
    while (session := engine.sessions["s"]).num_tokens < PAGE_SIZE + 1:
        engine.step()
    assert session.num_computed == PAGE_SIZE
    engine.scheduler.preempt(session, [])
    asked = len(answers)
    engine.step()
    assert (len(answers) == asked) == noticed
    engine.step()
    assert len(answers) > asked


def test_a_compiled_target_cannot_lend_its_layers(tmp_path: Path) -> None:
    """They are read from the files once more, and say the same."""
    folder = save_pair(tmp_path) / "target"
    checkpoint = Checkpoint.open(str(folder))
    plan = open_exit(checkpoint, 1)
    whole = AutoModelForCausalLM.from_pretrained(folder).eval()
    lent = plan.load(torch.float32, torch.device("cpu"), target=whole).model
    read = plan.load(torch.float32, torch.device("cpu")).model
    assert {p.data_ptr() for p in lent.parameters()} <= {p.data_ptr() for p in whole.parameters()}
    own, theirs = read.state_dict(), lent.state_dict()
    assert own.keys() == theirs.keys()
    assert all(torch.equal(own[name], theirs[name]) for name in own)
    options = TargetOptions(heads=[HeadOptions(method="early_exit", boundaries=[1])], compile=True)
    size = checkpoint.size("float32", None)
    assert size is not None
    counted = heads_size(TargetSetup(str(folder), options), size, 256).weights_bytes
    held = 4 * sum(p.numel() for p in {p.data_ptr(): p for p in read.parameters()}.values())
    assert 0.99 * held <= counted <= 1.01 * held
    eager = options.model_copy(update={"compile": False})
    assert heads_size(TargetSetup(str(folder), eager), size, 256).weights_bytes == 0


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tied_table_is_counted_once_unless_the_lm_head_is_packed(dtype: str, tmp_path: Path) -> None:
    config = random_model("llama").config
    config.tie_word_embeddings = True
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    size = Checkpoint("tied", 128, (), 64, folder=tmp_path, config=config.to_dict()).size(dtype, None)
    assert size is not None
    part = AutoModelForCausalLM.from_config(truncated(config, 1)).to(getattr(torch, dtype))
    pack_layers(part)
    tensors = {t.data_ptr(): t.nbytes for t in (*part.parameters(), *(b for b in part.buffers() if b.ndim > 1))}
    options = TargetOptions(heads=[HeadOptions(method="early_exit", boundaries=[1])], compile=True)
    counted = heads_size(TargetSetup("tied", options), size, 256).weights_bytes
    assert counted == pytest.approx(sum(tensors.values()), rel=0.02)


def test_a_boundary_that_the_target_lacks_is_refused_by_name(tmp_path: Path) -> None:
    folder = save_pair(tmp_path) / "target"
    for boundary in (2, 9):
        head = HeadOptions(method="early_exit", boundaries=[boundary])
        options = TargetOptions(dtype="float32", device="cpu", compile=False, heads=[head])
        with pytest.raises(ConfigError, match=rf"^boundaries is \[{boundary}\] of method 'early_exit'.* 1 to 1 are"):
            build_target_engine(TargetSetup(str(folder), options), lambda messages: None)


def adapted(family: str, folder: Path) -> tuple[Run, Said]:
    """An early exit with a head of random weights, and what it should say."""
    whole = random_model(family)
    size, num_layers = whole.config.hidden_size, whole.config.num_hidden_layers
    checkpoint = Checkpoint.open(str(save_pair(folder) / "target"))
    source = write_exit(folder / "exit", size, num_layers, 1)
    plan = open_exit(checkpoint, None, str(source))
    assert plan.boundary == 1
    assert plan.adapter is not None
    run = pump_of(family)
    early_exit.append_exit(run[1].head.model, plan.adapter.load_module(torch.float32, torch.device("cpu")), "target")
    weights = load_file(source / "model.safetensors")

    def said(answer: Answer) -> Tensor:
        text = torch.tensor([[*answer.tokens, *answer.path]])
        with torch.no_grad():
            states = whole(text, use_cache=False, output_hidden_states=True).hidden_states[1]
            return whole.lm_head(whole.model.norm(exit_states(weights, states[0, -1])))

    return run, said


def _not_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is loaded, and that is all."""
    monkeypatch.setattr(early_exit, "append_exit", lambda model, adapter, name: None)


def _without_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it adds to a state takes the state's place."""
    forward = ExitAdapter.forward
    monkeypatch.setattr(ExitAdapter, "forward", lambda self, state: forward(self, state) - state)


def _twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state is adapted two times."""
    forward = ExitAdapter.forward
    monkeypatch.setattr(ExitAdapter, "forward", lambda self, state: forward(self, forward(self, state)))


@pytest.mark.parametrize("mutant", [None, _not_applied, _without_residual, _twice])
def test_an_exit_head_changes_what_is_said_and_no_text(
    mutant: Callable[[pytest.MonkeyPatch], None] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against plain lines; a mutant is noticed."""
    if mutant is not None:
        mutant(monkeypatch)
    (pump, mounted, asked), said = adapted("llama", tmp_path)
    assert_same(pump.run(requests_of(1.0)), plain("llama", 1.0))
    assert not mounted.failure
    assert {len(answer.path) for answer in asked} == {0, 1, 2, 3}
    worst = difference(asked, said)
    assert worst < 1e-3 if mutant is None else worst > 1e-2


def test_an_exit_head_that_does_not_fit_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(str(save_pair(tmp_path) / "target"))
    size = checkpoint.size("float32", None)
    assert size is not None
    source = write_exit(tmp_path / "exit", size.hidden_size, size.num_layers, 1)
    config, tensors = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")

    def refused(said: str, boundary: int | None = None) -> None:
        with pytest.raises(ConfigError, match=said):
            open_exit(checkpoint, boundary, str(source))

    refused(r"^boundaries is \[2\]: the early_exit head '.*' was trained at \[1\]", 2)
    for key, value, said in (
        ("boundary", 2, r"^boundaries is \[2\] of method 'early_exit'.* 1 to 1 are"),
        ("boundary", "1", "boundary is '1' in config.json"),
        ("hidden_size", 9, f"hidden_size is 9 in .* has {size.hidden_size}"),
        ("num_target_layers", 7, f"num_target_layers is 7 in .* has {size.num_layers}"),
        ("inner_dim", 0, "inner_dim is 0 in config.json .* at least 1"),
        ("inner_dim", 23, r"'(gate|up|down)_proj.weight' of .* it must be"),
        ("rms_norm_eps", 2.0, "rms_norm_eps is 2.0 in config.json"),
        ("rms_norm_eps", None, "lacks 'rms_norm_eps'"),
        ("boundary", None, "lacks 'boundary'"),
        ("model_type", "medusa", "model_type is 'medusa' in .*'exit_head' is allowed"),
        ("scale", 2, "config.json of .* has 'scale': an unknown key could change its result"),
    ):
        (source / "config.json").write_text(json.dumps(config | {key: value}), encoding="utf-8")
        refused(said)
    (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for changed, said in (
        (tensors | {"bias": torch.zeros(1)}, "holds 'bias', which its format does not have"),
        ({"norm.weight": tensors["norm.weight"]}, "is not whole: no weight file holds 'down_proj.weight'"),
    ):
        save_file(changed, source / "model.safetensors")
        refused(said)
    with pytest.raises(ConfigError, match="is not on this machine"):
        open_exit(checkpoint, 1, "nobody/nothing")


def test_an_exit_head_is_served_from_its_folder_and_counted(tmp_path: Path) -> None:
    folder = save_pair(tmp_path) / "target"
    size = Checkpoint.open(str(folder)).size("float32", None)
    assert size is not None
    source = str(write_exit(tmp_path / "exit", size.hidden_size, size.num_layers, 1))
    held = 4 * sum(tensor.numel() for tensor in load_file(Path(source) / "model.safetensors").values())
    (head,) = heads_of([f"early_exit={source},4"])
    assert head == HeadOptions(method="early_exit", model=source, num_speculative_tokens=4)
    setup = TargetSetup(str(folder), TargetOptions(dtype="float32", device="cpu", compile=False, heads=[head]))
    engine = build_target_engine(setup, lambda messages: None)
    (mounted,) = engine.heads.mounted
    assert isinstance(mounted.head, EarlyExit)
    (layer,) = mounted.head.model.get_decoder().layers
    assert len(layer._forward_hooks) == 1
    assert heads_size(setup, size, 256).weights_bytes == held
    with_, without = (
        heads_size(TargetSetup(str(folder), TargetOptions(heads=[head], compile=True)), size, 256).weights_bytes
        for head in (head, HeadOptions(method="early_exit", boundaries=[1]))
    )
    assert with_ - without == held
    wrong = HeadOptions(method="early_exit", model=source, boundaries=[2])
    with pytest.raises(ConfigError, match=r"^boundaries is \[2\]: the exit head '.*' was trained at \[1\]"):
        heads_size(TargetSetup(str(folder), TargetOptions(heads=[wrong])), size, 256)
    other = write_exit(tmp_path / "other", size.hidden_size, size.num_layers + 1, 1)
    wrong = HeadOptions(method="early_exit", model=str(other))
    with pytest.raises(ConfigError, match=r"^num_target_layers of the exit head '.*' is 3: the target has 2"):
        heads_size(TargetSetup(str(folder), TargetOptions(heads=[wrong])), size, 256)


def test_attention_that_heads_lack_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    small = {"num_hidden_layers": 2, "intermediate_size": 16, "num_local_experts": 2, "num_experts_per_tok": 1}
    GptOssConfig(vocab_size=64, architectures=["GptOssForCausalLM"], **sizes, **small).save_pretrained(tmp_path)
    checkpoint = Checkpoint(str(tmp_path), 128, (), 64, folder=tmp_path, config={"num_hidden_layers": 2})
    with pytest.raises(ConfigError, match="GptOssAttention attends with s_aux, which heads do not have"):
        open_exit(checkpoint, 1)
    with pytest.raises(ConfigError, match="is quantized, and layers of plain weights only can draft"):
        open_exit(replace(checkpoint, quantization={"quant_method": "fp8"}), 1)
