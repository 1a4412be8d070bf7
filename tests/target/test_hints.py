"""Hints in the middle of a step: what they say, when they leave, and that the text is the same with them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tests.drafters.head_files import write_exit
from tests.support.models import FAMILIES, noisy_copy, prompt, random_model
from tests.support.noise import gumbel_at
from tests.support.pump import Pump, Request, assert_same, in_mode, requests_for
from tests.support.rings import slow
from torch import Tensor
from transformers import PreTrainedModel

from paceline.checkpoint.files import Checkpoint
from paceline.config import HintOptions, LocalConfig, ServiceConfig, TargetOptions, TargetSetup
from paceline.core.noise import Stream, seed_bits
from paceline.core.tree import Producer, Proposal
from paceline.drafters.heads.exit_adapter import ExitAdapter
from paceline.drafters.heads.partial_model import Continued, borrow, layers_from
from paceline.embedded import DRAFT_DIR, TARGET_DIR
from paceline.errors import ConfigError
from paceline.local import LocalPipeline
from paceline.messages import Hint
from paceline.model.device import Placement
from paceline.model.layer_callback import heard_by
from paceline.model.loading import LoadedModel, prepare
from paceline.model.step_plan import SequenceStep
from paceline.preflight.heads import heads_size
from paceline.target import hints as hints_module
from paceline.target.control.report import explain
from paceline.target.hints import Hints
from paceline.target.mount import behind, require_hints
from paceline.target.scheduler import Scheduled
from paceline.types import Acceptance, Mode, SamplingParams

BOUNDARY, TOP = 2, 3


@cache
def models(family: str) -> tuple[PreTrainedModel, LoadedModel]:
    """A target of four layers and its draft."""
    config = FAMILIES[family]()
    config.num_hidden_layers = 4
    if getattr(config, "layer_types", None):
        config.layer_types = (config.layer_types * 4)[:4]
    target = random_model(config)
    return target, prepare(noisy_copy(target, 0.05), compile=False)


def loaded(family: str = "llama", callback_boundary: int | None = BOUNDARY) -> LoadedModel:
    return prepare(models(family)[0], compile=False, callback_boundary=callback_boundary)


def hints_for(model: LoadedModel, top: int = TOP) -> Hints:
    network: Any = model.step
    exit = Continued(borrow(lambda f: layers_from(model.size.num_layers, f), network.model))
    return Hints(HintOptions(boundary=BOUNDARY, top=top), exit.logits)


def requests_of(temperature: float, rule: Acceptance = Acceptance.COUPLED) -> dict[str, Request]:
    options = {"temperature": temperature, "max_tokens": 24, "ignore_eos": True}
    return requests_for([prompt(i, 20 + 30 * i) for i in range(3)], **options, max_draft_tokens=4, acceptance=rule)


class Wire:
    """A pump whose hints are kept, each with the tokens before the places that it speaks of."""

    def __init__(self, family: str = "llama", *, with_hints: bool = True, **options: Any) -> None:
        self.model = loaded(family, BOUNDARY if with_hints else None)
        self.pump = Pump(self.model, models(family)[1], adaptive=False, **{"late": 0.1, **options})
        self.told: list[tuple[Hint, list[list[int]]]] = []
        if with_hints:
            self.pump.target.hints = hints = hints_for(self.model)
            of = hints.of

            def recorded(parts: Sequence[Scheduled], states: Tensor) -> list[Hint]:
                found = of(parts, states)
                by_id = {part.session.session_id: part for part in parts}
                for hint in found:
                    self.told.append((hint, _before(by_id[hint.session_id], hint)))
                return found

            hints.of = recorded  # type: ignore[method-assign]

    def run(self, requests: dict[str, Request]) -> None:
        self.pump.run(requests, arrivals=0.3)
        assert self.pump.failures == {}


def _before(part: Scheduled, hint: Hint) -> list[list[int]]:
    """The texts up to the places of a hint, by the session's own tree."""
    assert hint.context_len == part.session.num_tokens
    found = []
    for node_id in hint.node_ids:
        path: list[int] = []
        node = part.session.tree.get(node_id) if node_id else None
        while node is not None and node is not part.session.tree.anchor:
            path.append(node.token_id)
            node = node.parent
        found.append([*part.session.tokens, *reversed(path)])
    return found


def exit_logits(text: Sequence[int], family: str = "llama") -> Tensor:
    """[vocabulary] after a text, by the final norm and the LM head on the state at the boundary."""
    network: Any = models(family)[0]
    network.set_attn_implementation("sdpa")
    with torch.no_grad():
        out = network.model(torch.tensor([text]), use_cache=False, output_hidden_states=True)
        logits: Tensor = network.lm_head(network.model.norm(out.hidden_states[BOUNDARY][0, -1]))
    return logits


def check_tokens(family: str, temperature: float = 0.0) -> None:
    """The tokens of every hint are the first of an early exit, in the order in which the target draws."""
    wire = Wire(family)
    wire.run(requests_of(temperature))
    places = 0
    for hint, texts in wire.told[::3]:
        half = len(hint.packed) // 2
        ids = torch.frombuffer(bytearray(hint.packed[:half]), dtype=torch.int32).view(-1, hint.num_tokens)
        log_p = torch.frombuffer(bytearray(hint.packed[half:]), dtype=torch.float32).view(-1, hint.num_tokens)
        assert hint.num_tokens == TOP
        for text, got, values in zip(texts, ids, log_p, strict=True):
            scores = expected = exit_logits(text, family).double().log_softmax(-1)
            if temperature > 0:
                seed, position = seed_bits(wire.pump.sessions[hint.session_id].noise_key), torch.tensor([len(text)])
                every = torch.arange(len(scores))[None]
                scores = scores + gumbel_at(torch.tensor([seed]), position, Stream.COUPLED, every)[0]
                torch.testing.assert_close(values.double(), expected[got.long()], atol=1e-3, rtol=1e-3)
            assert {*got.tolist()} == {*scores.topk(TOP).indices.tolist()}
            places += 1
    assert places > 20
    assert any(len(hint.node_ids) > 1 for hint, _ in wire.told)


@pytest.mark.parametrize(("family", "temperature"), [("llama", 0.0), ("llama", 1.0), *slow([("qwen3", 0.0)])])
def test_a_hint_is_the_top_of_an_early_exit(family: str, temperature: float) -> None:
    check_tokens(family, temperature)


def test_hints_of_the_next_row_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant of the test before."""
    of = Hints.of
    monkeypatch.setattr(Hints, "of", lambda self, parts, states: of(self, parts, states.roll(-1, 0)))
    with pytest.raises(AssertionError):
        check_tokens("llama")


def check_text(temperature: float, rule: Acceptance, **options: Any) -> Wire:
    """With hints, without them, and plain."""
    requests = requests_of(temperature, rule)
    wires = [Wire(with_hints=with_hints, **options) for with_hints in (True, False)]
    for wire in wires:
        wire.run(requests)
    on, off = wires
    assert_same(on.pump.results, off.pump.results)
    if rule is Acceptance.COUPLED:
        plain = Wire(with_hints=False)
        plain.run(in_mode(requests, Mode.PLAIN))
        assert_same(on.pump.results, plain.pump.results)
    stats, drafted = on.pump.target.stats, on.pump.draft
    assert drafted is not None
    assert drafted.stats.hints > 5
    assert drafted.stats.hints_invalid == drafted.stats.failed_sessions == 0
    assert drafted.stats.hints + drafted.stats.hints_late + drafted.stats.unknown_messages >= len(on.told)
    places = sum(len(hint.node_ids) for hint, _ in on.told)
    assert (stats.hints_sent, stats.hints_bytes) == (places, sum(len(hint.packed) for hint, _ in on.told))
    assert f"hints from boundary {BOUNDARY} for {places} places were sent to drafts" in explain(on.pump.target)
    assert off.pump.target.stats.hints_sent == 0
    return on


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_the_same_with_hints_without_and_plain(temperature: float) -> None:
    check_text(temperature, Acceptance.COUPLED)


@pytest.mark.parametrize("lost", ["half of them", "all late"])
def test_hints_may_be_lost_or_late(lost: str) -> None:
    held: list[Hint] = []

    def tamper(message: Any) -> list[Any]:
        if not isinstance(message, Hint):
            return [message]
        held.append(message)
        if lost == "half of them":
            return [message] if len(held) % 2 else []
        return [held[-6]] if len(held) > 5 else []

    wire = Wire(tamper_draft=tamper)
    plain = Wire(with_hints=False)
    wire.run(requests_of(1.0))
    plain.run(in_mode(requests_of(1.0), Mode.PLAIN))
    assert_same(wire.pump.results, plain.pump.results)
    assert wire.pump.draft is not None
    stats = wire.pump.draft.stats
    assert stats.failed_sessions == 0
    assert (stats.hints_late > 5) if lost == "all late" else (stats.hints > 5)


def test_a_hint_leaves_before_the_layers_above_it_run() -> None:
    """And behind the announcement of what is in flight; the outcome follows the last layer."""
    wire = Wire()
    events: list[str] = []
    network: Any = models("llama")[0]
    layers = network.model.layers
    hooks = [
        layers[BOUNDARY - 1].register_forward_hook(lambda *_: events.append("below")),
        layers[BOUNDARY].register_forward_hook(lambda *_: events.append("above")),
    ]
    emit = wire.pump.target.emit

    def noted(messages: Sequence[Any]) -> None:
        events.extend(type(message).__name__ for message in messages)
        emit(messages)

    wire.pump.target.emit = noted
    try:
        wire.run({"s0": requests_of(0.0)["s0"]})
    finally:
        for hook in hooks:
            hook.remove()
    assert "Hint" in events
    for at in (i for i, event in enumerate(events) if event == "Hint"):
        assert events[at - 2 : at + 3] == ["InFlight", "below", "Hint", "above", "Outcome"]


def test_sessions_that_do_not_draft_ahead_are_told_nothing() -> None:
    wire = Wire()
    requests = requests_of(0.0)
    wire.run(in_mode({"s0": requests["s0"]}, Mode.PLAIN) | in_mode({"s1": requests["s1"]}, Mode.SEQUENTIAL))
    assert wire.told == []


def test_tokens_of_other_producers_are_no_places() -> None:
    """A place is named by what the draft calls the token before it, and it does not know a head's."""
    wire = Wire()
    wire.run({"s0": requests_of(0.0)["s0"]})
    session: Any = type("Session", (), {"sampler": None})
    for producer, places in ((Producer.DRAFT, {0: 0, 1: 5, 2: 6}), (Producer.HEAD, {0: 0})):
        proposal = Proposal((1, 2), (None,) * 2, (0.5, 0.5), (5, 6), producer=producer)
        part: Any = type("Part", (), {"session": session, "proposal": proposal})
        assert hints_module._places(part) == places


def test_a_step_of_two_models_tells_each_sessions_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """While sessions that began eagerly are open beside compiled ones, a step is two forwards."""
    wire = Wire()
    runners = wire.pump.target.runners
    requests = requests_of(0.0)
    wire.pump.submit("s0", requests["s0"])
    while not wire.told:
        wire.pump.tick()
    runners._by_generation[1] = runners.current.compiled(wire.model.step)
    runners.generation = 1
    wire.run({name: requests[name] for name in ("s1", "s2")})
    plain = Wire(with_hints=False)
    plain.run(in_mode(requests, Mode.PLAIN))
    assert_same(wire.pump.results, plain.pump.results)
    for hint, texts in wire.told:
        ids = torch.frombuffer(bytearray(hint.packed), dtype=torch.int32)[: hint.num_tokens]
        assert ids.tolist() == exit_logits(texts[0]).topk(TOP).indices.tolist()


def test_what_a_listener_raises_the_step_raises() -> None:
    model = loaded()
    runner = model.runner(8)
    step = SequenceStep([1, 2], range(2), range(2), runner.cache.allocate(1), num_logits=1)
    heard: list[tuple[int, ...]] = []
    with heard_by(lambda states: heard.append(tuple(states.shape))):
        runner.forward([step])
    assert heard[0][1] == model.size.hidden_size
    runner.forward([step])
    assert len(heard) == 1, "nobody listens any more"

    def fails(states: Tensor) -> None:
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"), heard_by(fails):
        runner.forward([step])


# -- configuration -----------------------------------------------------------------------------------------------------


def refused(hints: dict[str, Any], device: str = "cpu") -> str:
    setup = TargetSetup(str(TARGET_DIR), TargetOptions.model_validate({"hints": hints}), tree_budget=64)
    with pytest.raises(ConfigError) as refusal:
        require_hints(setup, Checkpoint.open(setup.source), Placement(torch.device(device), torch.float32))
    return str(refusal.value)


def test_what_cannot_work_is_refused() -> None:
    assert refused({"boundary": 8}).endswith("has 8 layers, so 1 to 7 are allowed")
    assert "set cuda_graphs to false" in refused({"boundary": 6}, "cuda")
    for options, sentence in (
        ({"hints": {"boundary": 0}}, "hints.boundary is 0"),
        ({"hints": {"boundary": 6, "weight": 0}}, "hints.weight is 0"),
        ({"hints": {"boundary": 6, "top": 65}}, "hints.top is 65"),
        (
            {"hints": {"boundary": 6}, "tensor_parallel_size": 2},
            "hints needs whole layers while tensor_parallel_size is 2",
        ),
        ({"hints": {"boundary": 6}, "quantization": "int8"}, "hints needs plain weights while quantization is 'int8'"),
    ):
        with pytest.raises(ConfigError, match=f"target_config.engine_kwargs.{sentence}"):
            ServiceConfig.parse({"target_config": {"engine_kwargs": options}})
    alone = {"target_config": {"engine_kwargs": {"hints": {"boundary": 6}}}, "draft_config": None}
    with pytest.raises(ConfigError, match="hints is set while draft_config is null: hints need a draft pool"):
        ServiceConfig.parse(alone)
    with pytest.raises(ValueError, match="hints is set while draft is null"):
        LocalConfig.model_validate({"target": {"path": str(TARGET_DIR), "hints": {"boundary": 6}}})


def exit_head(folder: Path, boundary: int = BOUNDARY, size: int = 64, num_layers: int = 4) -> Path:
    """One that changes what is said."""
    return write_exit(folder / f"exit{boundary}", size, num_layers, boundary)


def test_an_exit_head_has_its_say_in_a_hint(tmp_path: Path) -> None:
    """By its own equation, at the state of the boundary; without it, the mutant, the hint is another one."""
    model = loaded()
    folder, hints = exit_head(tmp_path), hints_for(model)
    states = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    weights = load_file(folder / "model.safetensors")
    plain, n = hints._exit(states), F.rms_norm(states, (64,), weights["norm.weight"], 1e-6)
    inner = F.silu(n @ weights["gate_proj.weight"].T) * (n @ weights["up_proj.weight"].T)
    adapter = ExitAdapter(64, 24, 1e-6)
    adapter.load_state_dict(weights)
    found = behind(adapter, hints._exit)(states)
    torch.testing.assert_close(found, hints._exit(states + inner @ weights["down_proj.weight"].T))
    assert not torch.allclose(found, plain)


def test_an_exit_head_of_another_boundary_or_target_is_refused(tmp_path: Path) -> None:
    def hints(boundary: int, folder: Path) -> dict[str, Any]:
        return {"boundary": boundary, "model": str(folder)}

    right = exit_head(tmp_path, 6, 384, 8)
    accepted = TargetSetup(str(TARGET_DIR), TargetOptions(hints=hints(6, right)))
    require_hints(accepted, Checkpoint.open(str(TARGET_DIR)), Placement(torch.device("cpu"), torch.float32))
    assert "was trained at [6]" in refused(hints(5, right))
    assert refused(hints(2, exit_head(tmp_path, 2, 384, 4))).startswith("num_target_layers")
    assert "nowhere" in refused(hints(6, tmp_path / "nowhere"))


def test_an_exit_head_is_counted_and_checked_before_anything_is_loaded(tmp_path: Path) -> None:
    target = Checkpoint.open(str(TARGET_DIR)).size()
    assert target is not None

    def weights_bytes(**hints: Any) -> int:
        options = TargetOptions(compile=False, hints=HintOptions(**hints))
        return heads_size(TargetSetup(str(TARGET_DIR), options), target, 64).weights_bytes

    head = exit_head(tmp_path, 6, 384, 8)
    own = sum(tensor.numel() for tensor in load_file(head / "model.safetensors").values())
    assert weights_bytes(boundary=6) == 0
    assert weights_bytes(boundary=6, model=str(head)) == own * target.item_bytes
    with pytest.raises(ConfigError, match=r"boundaries is \[5\]: the exit head .* was trained at \[6\]"):
        weights_bytes(boundary=5, model=str(head))


@pytest.mark.slow
def test_a_pipeline_with_hints_has_the_text_of_one_without(tmp_path: Path) -> None:
    run = {"dtype": "float32", "compile": False, "device": "cpu"}
    texts = []
    head = exit_head(tmp_path, 6, 384, 8)
    for hints in (None, {"boundary": 6}, {"boundary": 6, "model": str(head)}):
        options = run | {"adaptive": False, "batch_invariant": "off", "hints": hints}
        config = {"target": {"path": str(TARGET_DIR), **options}, "draft": {"path": str(DRAFT_DIR), **run}}
        with LocalPipeline(LocalConfig.model_validate(config | {"worker": "thread", "pin_cores": False})) as pipeline:
            sampling = [SamplingParams(max_tokens=24, temperature=t, seed=3) for t in (0.0, 1.0)]
            texts.append([tuple(pipeline.generate("def main():\n", each).result.token_ids) for each in sampling])
    assert texts[0] == texts[1] == texts[2]
