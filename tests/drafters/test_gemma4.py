"""Gemma 4's own drafters: what transformers' modules say of the same states and keys, and no text changes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.drafters.asked import Answer, Run, check_head, difference, run_head, stale
from tests.drafters.head_files import GEMMA4_VOCAB, SIZE, WINDOW, HeadFile, gemma4, made, tiny_target
from tests.drafters.head_oracles import gemma4_drafter, gemma4_models, shared_as_published
from tests.support.models import letters_tokenizer
from tests.support.mutants import mutant
from tests.support.pump import Pump, Request, assert_same, plain_reference, requests_for
from tests.support.rings import nightly, slow
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.linear import require_draft_model
from paceline.cli.drafting import choose
from paceline.cli.flags import heads_of
from paceline.config import HeadOptions, TargetOptions, TargetSetup
from paceline.drafters.available import available_methods
from paceline.drafters.heads import drafter as head_drafter
from paceline.drafters.heads import gemma4 as gemma4_module
from paceline.drafters.heads.drafter import HeadDrafter
from paceline.drafters.heads.gemma4 import Gemma4Drafter
from paceline.drafters.heads.load import open_head
from paceline.drafters.heads.paged import Part
from paceline.errors import ConfigError
from paceline.model.features import OUT, Features
from paceline.model.loading import LoadedModel, prepare
from paceline.preflight.estimate import HeadsSize
from paceline.preflight.heads import heads_size
from paceline.target.build import build_target_engine
from paceline.target.heads.mounted import MountedHead
from paceline.types import Result, SamplingParams, SpeculationParams

METHOD, TOKENS = "gemma4_assistant", 4
FEATURES = Features((OUT,), every_position=False)


@functools.cache
def head_file(name: str) -> HeadFile:
    return made(name)


@functools.cache
def target(kind: str) -> LoadedModel:
    return prepare(tiny_target(kind), compile=False, features=FEATURES)


@functools.cache
def models(name: str) -> tuple[Any, Any]:
    """transformers' modules of a target and its drafter."""
    file = head_file(name)
    return gemma4_models(file.tensors, file.config, tiny_target(file.target))


def prompt(num_tokens: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, GEMMA4_VOCAB, (num_tokens,), generator=generator).tolist()


def requests_of(temperature: float) -> dict[str, Request]:
    """Contexts below and beyond the window, which ends within a page, and two with the same first pages."""
    first = prompt(130, 99)
    prompts = [prompt(n, n) for n in (2, WINDOW - 12, WINDOW, 150)] + [[*first, *prompt(i, i)] for i in (1, 40)]
    return requests_for(prompts, temperature=temperature, max_tokens=20, ignore_eos=True, max_draft_tokens=TOKENS)


@functools.cache
def plain(kind: str, temperature: float, name: str = "") -> dict[str, Result]:
    """Of all requests, or of one."""
    return plain_reference(
        target(kind), {each: r for each, r in requests_of(temperature).items() if name in ("", each)}
    )


def written(name: str, folder: Path) -> tuple[Checkpoint, str]:
    """A target and its drafter on disk."""
    path = folder / "target"
    tiny_target(head_file(name).target).save_pretrained(path)
    letters_tokenizer(GEMMA4_VOCAB).save_pretrained(path)
    return Checkpoint.open(str(path)), str(head_file(name).write(folder / "target-assistant"))


def pump_of(name: str, folder: Path, **options: Any) -> Run:
    checkpoint, source = written(name, folder)
    loaded = target(head_file(name).target)
    plan = open_head(METHOD, source, checkpoint, num_tokens=TOKENS)
    assert (plan.features, plan.layers) == (FEATURES, ())
    return run_head(loaded, plan.load(loaded.dtype, loaded.device, max_leaves=5), TOKENS, **{"pages": 14} | options)


def said_by(name: str, answer: Answer) -> Tensor:
    """What transformers' drafter says."""
    return head_file(name).oracle(models(name), answer.tokens, list(answer.path))[-1]


@pytest.mark.parametrize("name", ["gemma4", *slow(["gemma4_clusters", "gemma4_unified"])])
def test_it_says_what_transformers_says_and_no_text_changes(name: str, tmp_path: Path) -> None:
    """Prompts in chunks, a shared prefix, preemption, sliding windows, all depths."""
    reference, said = plain(head_file(name).target, 1.0), partial(said_by, name)
    run = pump_of(name, tmp_path, pages=6)
    check_head(run, requests_of(1.0), reference, said, TOKENS, pressed=name == "gemma4")


# -- mutants: the text stays plain's, but what is proposed is not what transformers says ------------------------------


@mutant(gemma4_module, "target_layers_of")
def _first_layers_of_a_type(layers: Any, reading: Any, text: Any, target: Any) -> dict[str, int]:
    """In the place of the last ones that have keys."""
    return {**layers(reading, text, target), "sliding_attention": target.layer_types.index("sliding_attention")}


@mutant(gemma4_module, "attend_before")
def _windows_of_the_other_type(_: Any, attend: Any, *rest: Any) -> Tensor:
    return attend(*rest[:-1], WINDOW + 2 if rest[-1] is None else None)


@mutant(gemma4_module, "attend_before")
def _window_of_one_row_less(attend_before: Any, *rest: Any) -> Tensor:
    return attend_before(*rest[:-1], None if rest[-1] is None else rest[-1] - 1)


def _keyless(patch: pytest.MonkeyPatch, change: Callable[[Part, Part], None]) -> None:
    """``change`` takes the rows as they should be, and as they are of a head with keys."""
    keyless = head_drafter.keyless_part

    def mutant(part: Part) -> Part:
        made = keyless(part)
        change(made, part)
        return made

    patch.setattr(head_drafter, "keyless_part", mutant)


def _position_that_advances(patch: pytest.MonkeyPatch) -> None:
    _keyless(patch, lambda made, part: setattr(made, "positions", part.positions))


def _position_of_the_state(patch: pytest.MonkeyPatch) -> None:
    _keyless(patch, lambda made, part: setattr(made, "positions", [p - 1 for p in made.positions]))


def _row_of_the_anchor(patch: pytest.MonkeyPatch) -> None:
    """It holds nothing yet, or a rejected token."""
    _keyless(patch, lambda made, part: setattr(made, "num_rows", part.num_rows))


def _without_the_first_row(patch: pytest.MonkeyPatch) -> None:
    _keyless(patch, lambda made, part: setattr(made, "first_row", 1))


@mutant(Gemma4Drafter, "step")
def _state_of_the_target_at_every_depth(
    step: Any, self: Gemma4Drafter, token_ids: Tensor, state: Tensor, *rest: Any
) -> Tensor:
    return torch.cat([step(self, token_ids, state, *rest)[..., : self._size], state[..., self._size :]], -1)


@mutant(Gemma4Drafter, "borrow")
def _embedding_without_its_factor(borrow: Any, self: Gemma4Drafter, embed: Any, lm_head: Any) -> None:
    borrow(self, lambda ids: embed(ids) / SIZE**0.5, lm_head)


MUTANTS = {
    "first layers of a type": _first_layers_of_a_type,
    "windows of the other type": _windows_of_the_other_type,
    "window of one row less": _window_of_one_row_less,
    "position that advances": _position_that_advances,
    "position of the state": _position_of_the_state,
    "row of the anchor": _row_of_the_anchor,
    "without the first row": _without_the_first_row,
    "state of the target at every depth": _state_of_the_target_at_every_depth,
    "state of the round before": stale("states"),
    "embedding without its factor": _embedding_without_its_factor,
}


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_drafters_are_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    pump, _, asked = pump_of("gemma4", tmp_path)
    assert_same(pump.run({"s2": requests_of(1.0)["s2"]}), plain("gemma4 4", 1.0, "s2"))
    assert difference(asked, partial(said_by, "gemma4"), 10) > 1e-2


def test_tokens_of_other_clusters_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_clusters = Gemma4Drafter.logits_of_clusters

    def mutant(self: Gemma4Drafter, y: Tensor) -> Tensor:
        self.masked_embedding.token_ordering = torch.arange(GEMMA4_VOCAB)
        return of_clusters(self, y)

    monkeypatch.setattr(Gemma4Drafter, "logits_of_clusters", mutant)
    pump, _, asked = pump_of("gemma4_clusters", tmp_path)
    pump.run({"s1": requests_of(1.0)["s1"]})
    assert difference(asked, partial(said_by, "gemma4_clusters"), 12) > 1e-2


# -- accepted lengths --------------------------------------------------------------------------------------------------


def alike(folder: Path) -> tuple[Any, HeadFile]:
    """A target whose next token depends on the last one for the most part, and a drafter that knows that part."""
    torch.manual_seed(5)
    model, file = tiny_target("gemma4 4"), gemma4(size=SIZE)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(torch.randn(GEMMA4_VOCAB, SIZE))
    for name, parameter in model.named_parameters():
        if ".post_" in name:
            torch.nn.init.constant_(parameter, 0.1)
    for name, tensor in file.tensors.items():
        if ".post_" in name:
            tensor.fill_(0.1)
    identity, zero = torch.eye(SIZE), torch.zeros(SIZE, SIZE)
    file.tensors |= {
        "model.embed_tokens.weight": model.lm_head.weight.detach().clone(),
        "model.norm.weight": torch.ones(SIZE),
        "pre_projection.weight": torch.cat([identity, zero + 0.02 * torch.randn(SIZE, SIZE)], 1),
    }
    model.save_pretrained(folder / "target")
    letters_tokenizer(GEMMA4_VOCAB).save_pretrained(folder / "target")
    return model.eval(), file


def reloaded(folder: Path) -> Any:
    """The target as transformers runs it."""
    return AutoModelForCausalLM.from_pretrained(folder / "target").eval()


def lengths_of_transformers(model: Any, file: HeadFile, tokens: list[int], num: int) -> tuple[list[int], list[int]]:
    """The text of ``generate`` with the drafter, and the tokens that each step of the target has brought.

    After a rejection its generator (5.23) leaves the row of the rejected token among those that the drafter sees; it is
    cut here.
    """
    with shared_as_published():
        drafter = gemma4_drafter(file.tensors, file.config)
    drafter.generation_config.num_assistant_tokens = TOKENS
    forward, anchors = drafter.forward, [len(tokens) - 1]

    def watched(**arguments: Any) -> Any:
        anchor = int(arguments["position_ids"])
        if anchor != anchors[-1]:
            anchors.append(anchor)
        shared = arguments["shared_kv_states"]
        rows = {kind: tuple(part[:, :, :anchor] for part in both) for kind, both in shared.items()}
        return forward(**arguments | {"shared_kv_states": rows})

    drafter.forward = watched
    options = {"max_new_tokens": num, "do_sample": False, "eos_token_id": None}
    out = model.generate(torch.tensor([tokens]), assistant_model=drafter, **options)
    return out[0, len(tokens) :].tolist(), [b - a for a, b in itertools.pairwise(anchors)]


def advances_of(head: HeadDrafter) -> list[int]:
    """The tokens that each step brings, from now on."""
    lengths: list[int] = []
    advance = head.advance

    def watched(name: str, token_ids: Sequence[int], *rest: Any) -> None:
        lengths.append(len(token_ids))
        advance(name, token_ids, *rest)

    head.advance = watched  # type: ignore[method-assign]
    return lengths


def test_as_many_tokens_are_accepted_as_by_transformers(tmp_path: Path) -> None:
    """At temperature 0, chains, in every step of the target."""
    model, file = alike(tmp_path)
    source, num = str(file.write(tmp_path / "drafter")), 40
    checkpoint, loaded = Checkpoint.open(str(tmp_path / "target")), prepare(model, compile=False, features=FEATURES)
    accepted = 0
    for seed in range(2):
        tokens = prompt(12, seed)
        text, expected = lengths_of_transformers(reloaded(tmp_path), file, tokens, num)
        head = open_head(METHOD, source, checkpoint, num_tokens=TOKENS).load(loaded.dtype, loaded.device)
        pump = Pump(loaded, None, heads=[MountedHead("gemma4", head, num_tokens=TOKENS)], late=0.0, adaptive=False)
        head.bind(pump.target.runner.cache, pump.target.runner.cache.add_layers(head.layers))
        lengths = advances_of(head)
        sampling = SamplingParams(temperature=0.0, max_tokens=num, ignore_eos=True)
        request = Request(tokens, sampling, SpeculationParams(max_draft_tokens=TOKENS))
        assert list(pump.run({"s": request})["s"].token_ids) == text
        assert lengths[: len(expected)] == expected
        accepted += sum(expected) - len(expected)
    assert accepted > 20


# -- files and options -------------------------------------------------------------------------------------------------


@pytest.mark.compiler
@pytest.mark.parametrize(("name", "compile"), [("gemma4_clusters", False), *nightly([("gemma4", True)])])
def test_it_is_served_from_its_folder(name: str, compile: bool, tmp_path: Path) -> None:
    """A compiled target lends no embedding: it is read from the files, with the factor that no file holds."""
    checkpoint, source = written(name, tmp_path)
    (head,) = heads_of([f"{METHOD}={source},3"])
    assert head == HeadOptions(method=METHOD, model=source, num_speculative_tokens=3)
    options = TargetOptions(dtype="float32", device="cpu", compile=compile, heads=[head], max_model_len=256)
    engine = build_target_engine(TargetSetup(checkpoint.path, options), lambda messages: None)
    (mounted,) = engine.heads.mounted
    assert isinstance(mounted.head, HeadDrafter)
    assert mounted.head.features == FEATURES
    assert not mounted.head.layers
    embed, ids = mounted.head.module._embed, torch.arange(GEMMA4_VOCAB)
    assert embed is not None
    assert torch.equal(embed(ids), tiny_target(head_file(name).target).get_input_embeddings()(ids))


def test_what_check_counts_is_what_it_holds(tmp_path: Path) -> None:
    """Its tensors, and the embedding where the target lends none."""
    checkpoint, source = written("gemma4_clusters", tmp_path)
    size, head = checkpoint.size("float32", None), HeadOptions(method=METHOD, model=source)
    assert size is not None
    own = 4 * sum(tensor.numel() for tensor in head_file("gemma4_clusters").tensors.values())
    for compile, table in ((False, 0), (True, 4 * GEMMA4_VOCAB * SIZE)):
        setup = TargetSetup(checkpoint.path, TargetOptions(heads=[head], compile=compile))
        assert heads_size(setup, size, 256) == HeadsSize(own + table)


def test_advice_knows_what_a_token_reads(tmp_path: Path) -> None:
    """All weights for each token, but for the table of which clusters take a few rows."""
    for name in ("gemma4", "gemma4_clusters"):
        checkpoint, source = written(name, tmp_path / name)
        size = checkpoint.size()
        assert size is not None
        given, missing = (
            next(found for found in available_methods(checkpoint, None, heads) if found.method.kind == METHOD)
            for heads in ([HeadOptions(method=METHOD, model=source)], [])
        )
        tensors = dict(head_file(name).tensors)
        if name == "gemma4_clusters":
            tensors.pop("model.embed_tokens.weight")
        numbers = sum(t.numel() for key, t in tensors.items() if not key.endswith(("layer_scalar", "token_ordering")))
        assert (given.refusal, given.one_pass, given.forward_bytes) == ("", False, size.item_bytes * numbers)
        assert missing.refusal.endswith("--head gemma4_assistant=DIRECTORY")


def test_clusters_that_are_no_partition_are_refused(tmp_path: Path) -> None:
    """Mutant: no look at them, and a token outside of the vocabulary ends a process on a GPU."""
    checkpoint, source = written("gemma4_clusters", tmp_path)
    tensors = dict(head_file("gemma4_clusters").tensors)
    tensors["masked_embedding.token_ordering"] = torch.full((GEMMA4_VOCAB,), GEMMA4_VOCAB)
    save_file(tensors, Path(source) / "model.safetensors")
    with pytest.raises(ConfigError, match=r"token_ordering of .* must name each of 64 tokens once"):
        open_head(METHOD, source, checkpoint).load(torch.float32, torch.device("cpu"))


def test_a_target_of_another_family_is_refused(tmp_path: Path) -> None:
    tiny_target().save_pretrained(tmp_path / "target")
    letters_tokenizer(61).save_pretrained(tmp_path / "target")
    source = head_file("gemma4").write(tmp_path / "drafter")
    with pytest.raises(ConfigError, match=r"model_type of the target .* is 'llama': .* keys and values of a 'gemma4'"):
        open_head(METHOD, str(source), Checkpoint.open(str(tmp_path / "target")))


def test_files_may_hold_what_is_not_used(tmp_path: Path) -> None:
    """Keys of layers that have none, and the LM head beside the table that it is tied to."""
    checkpoint, source = written("gemma4", tmp_path)
    tensors = dict(head_file("gemma4").tensors)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(8, 8)
    save_file(tensors, Path(source) / "model.safetensors")
    module = open_head(METHOD, source, checkpoint).load_module(torch.float32, torch.device("cpu"))
    assert torch.equal(module.get_parameter("lm_head.weight"), tensors["model.embed_tokens.weight"])


def test_it_is_no_draft_model() -> None:
    with pytest.raises(ConfigError, match="the draft model is 'x', a gemma4_assistant, which needs the target's keys"):
        require_draft_model(head_file("gemma4").config, "the draft model", "x")


@pytest.mark.parametrize("name", slow(["gemma4", "gemma4_unified"]))
def test_it_drafts_for_checkpoints_with_images(name: str, tmp_path: Path) -> None:
    """Published targets have an encoder of images, too. The text is that of the text model, which is found with it."""
    text = tiny_target(head_file(name).target)
    sizes: dict[str, Any] = {"text_config": text.config.to_dict()}
    if name == "gemma4":
        sizes["vision_config"] = dict.fromkeys(("hidden_size", "intermediate_size"), 16) | {
            **dict.fromkeys(("head_dim", "global_head_dim"), 8),
            **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 2),
            "num_hidden_layers": 1,
        }
    whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes)).eval()
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.tie_weights()
    whole.save_pretrained(tmp_path / "Tiny-it")
    letters_tokenizer(GEMMA4_VOCAB).save_pretrained(tmp_path / "Tiny-it")
    source = str(head_file(name).write(tmp_path / "tiny-it-assistant"))
    (found,) = choose(str(tmp_path / "Tiny-it")).heads
    assert (found.method, found.model) == (METHOD, source)
    head = open_head(METHOD, source, Checkpoint.open(str(tmp_path / "Tiny-it"))).load(
        torch.float32, torch.device("cpu")
    )
    mounted = MountedHead("gemma4", head, num_tokens=TOKENS)
    loaded = prepare(whole, compile=False, features=FEATURES)
    pump = Pump(loaded, None, heads=[mounted], late=0.0, adaptive=False)
    head.bind(pump.target.runner.cache, pump.target.runner.cache.add_layers(head.layers))
    assert_same(pump.run(requests_of(1.0)), plain(head_file(name).target, 1.0))
    assert mounted.stats.rows_used > 0
