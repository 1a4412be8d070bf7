"""Hidden states out of the model: against transformers' own, whatever shares the step, and of real tokens only."""

from __future__ import annotations

import pytest
import torch
from tests.support.models import FAMILIES, chunk, prompt, random_model
from tests.support.rings import nightly
from torch import Tensor

from paceline.checkpoint.files import Checkpoint
from paceline.config import ModelOptions
from paceline.errors import ConfigError
from paceline.model import loading
from paceline.model.features import OUT, Features
from paceline.model.loading import load_model, prepare
from paceline.model.runner import ModelRunner
from paceline.model.selftest import check_invariance
from paceline.types import PAGE_SIZE, pages_for


def layers_of(family: str) -> int:
    return int(FAMILIES[family]().num_hidden_layers)


def every(family: str) -> Features:
    """All boundaries of a model, in an order that is not theirs."""
    return Features((OUT, *range(layers_of(family), -1, -1)), every_position=True)


def reference(family: str, token_ids: list[int]) -> dict[int, Tensor]:
    """Boundary -> ``[tokens, hidden]`` by transformers alone. The one before the final norm, which it does not return,
    is what the norm has been given."""
    model, last = random_model(family), []
    norm = model.base_model.ln_f if family == "gpt2" else model.base_model.norm
    norm.register_forward_pre_hook(lambda module, args: last.append(args[0][0]))
    with torch.no_grad():
        states = model(torch.tensor([token_ids]), use_cache=False, output_hidden_states=True).hidden_states
    num_layers = layers_of(family)
    assert len(states) == num_layers + 1
    return {b: states[b][0] for b in range(num_layers)} | {num_layers: last[-1], OUT: states[-1][0]}


def by_chunks(runner: ModelRunner, text: list[int], sizes: list[int]) -> Tensor:
    """States of all tokens, computed in chunks beside another session."""
    pages, beside = runner.cache.allocate(pages_for(len(text))), runner.cache.allocate(1)
    found, at = [], 0
    for size in sizes:
        stop = min(len(text), at + size)
        steps = [chunk(text, 0, 3, beside, 1), chunk(text, at, stop, pages, 1)]
        found.append(runner.forward_with_states(steps)[1][3:])
        at = stop
    runner.cache.release(pages)
    runner.cache.release(beside)
    assert at == len(text)
    return torch.cat(found)


def difference(family: str, features: Features, states: Tensor, text: list[int]) -> float:
    """The largest of all boundaries, relative to the largest state."""
    want = reference(family, text)
    parts = states.chunk(len(features.boundaries), dim=-1)
    return max(
        float((part - want[b]).abs().max() / want[b].abs().max())
        for b, part in zip(features.boundaries, parts, strict=True)
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_of_transformers(family: str) -> None:
    """fp32 within 1e-5, at every boundary; a boundary off by one, or OUT before the norm, is far away."""
    features, text = every(family), prompt(1, PAGE_SIZE + 30)
    states = by_chunks(prepare(random_model(family), compile=False, features=features).runner(8), text, [1, 40, 5, 900])
    assert difference(family, features, states, text) <= 1e-5
    num_layers = layers_of(family)
    for shifted in (
        (OUT, *range(num_layers - 1, -1, -1), num_layers),
        (num_layers, OUT, *range(num_layers - 1, -1, -1)),  # OUT before the norm
    ):
        assert difference(family, Features(shifted, True), states, text) > 1e-2


def test_logits_are_those_of_a_model_without_states() -> None:
    """Bit for bit, and ``forward`` returns them alone."""
    text, pages = prompt(2, 70), [0, 1]
    model = random_model("llama")
    plain = prepare(random_model("llama"), compile=False).runner(4)
    runner = prepare(model, compile=False, features=every("llama")).runner(4)
    want = plain.forward([chunk(text, 0, 70, pages)])
    prepare(model, compile=False, features=Features((1,), False))  # another step of the model
    assert torch.equal(runner.forward([chunk(text, 0, 70, pages)]), want)
    assert torch.equal(runner.forward_with_states([chunk(text, 0, 70, pages)])[0], want)


@pytest.mark.parametrize(
    ("family", "every_position"),
    [("llama", True), ("gemma3", False), *nightly([("llama", False), ("gemma3", True)])],
)
def test_the_self_test_compares_states_of_verification_decoding_and_prefill(family: str, every_position: bool) -> None:
    """It holds, and one unit in the last place of one state, in steps of many tokens or in prefill, is noticed."""
    features = Features((0, 1, OUT), every_position)
    runner = prepare(random_model(family), compile=False, features=features).runner(12)
    report = check_invariance(runner, 600)
    assert report.holds
    assert report.num_states_different == 0, str(report)
    assert "hidden states" not in str(report)
    step = runner.step_function
    for shortest in (17, 128):  # verification; prefill

        def changed(*inputs, shortest=shortest):
            logits, states = step(*inputs)
            if inputs[0].shape[1] >= shortest:
                states[..., -1] = torch.nextafter(states[..., -1], torch.tensor(1e9))
            return logits, states

        runner.step_function = changed
        report = check_invariance(runner, 600)
        assert report.holds, "the logits are what they were"
        assert report.num_states_different > 0
        assert f"the hidden states of {report.num_states_different} rows differ" in str(report)


def test_only_rows_of_real_tokens_or_of_those_with_logits() -> None:
    """A step of 5 tokens is padded, and so are its logits: neither leaves a row behind. Order is that of the steps."""
    features = Features((1, OUT), every_position=True)
    last = Features((1, OUT), every_position=False)
    of_all = prepare(random_model("llama"), compile=False, features=features).runner(4)
    of_some = prepare(random_model("llama"), compile=False, features=last).runner(4)
    a, b = prompt(1, 3), prompt(2, 2)
    steps = [chunk(a, 0, 3, [0], num_logits=1), chunk(b, 0, 2, [1], num_logits=2)]
    assert len(of_all.plan(steps).arrays.tokens) > 5
    assert len(of_all.plan(steps).arrays.logits_index) > 3
    logits, states = of_all.forward_with_states(steps)
    assert (logits.shape[0], *states.shape) == (3, 5, 2 * 64)
    some = of_some.forward_with_states(steps)[1]
    assert torch.equal(some, states[2:])
    for text, rows in ((a, states[:3]), (b, states[3:])):
        assert difference("llama", features, rows, text) <= 1e-5
    nothing = of_some.forward_with_states([chunk(a, 0, 3, [0], num_logits=0)])[1]
    assert nothing.shape == (0, 2 * 64)


@pytest.mark.parametrize("boundaries", [(3,), (0, -2), (1, 99)])
def test_boundaries_outside_of_the_model_are_refused_before_loading(boundaries, tmp_path, monkeypatch) -> None:
    """The sentence names the range."""
    random_model("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(loading, "load_pretrained", None)
    with pytest.raises(ConfigError, match=r": -?\d+ is outside of model .*, which has 2 layers: 0 .* to 2 "):
        load_model(Checkpoint.open(str(tmp_path)), ModelOptions(), features=Features(boundaries, True))


def test_a_model_without_such_states_is_refused_with_the_reason() -> None:
    """No boundary at all; layers that run twice; layers that are not modules of one list; several streams."""

    def refused(model, features: Features | None = None) -> str:
        with pytest.raises(ConfigError) as error:
            prepare(model, compile=False, features=features or Features((1,), True))
        return str(error.value)

    assert refused(random_model("llama"), Features((), True)) == (
        "boundaries is (): at least one hidden state must be named"
    )
    model = random_model("llama")
    forward = model.model.layers[1].forward
    model.model.layers[1].forward = lambda hidden, **kwargs: forward(model.model.layers[0](hidden, **kwargs), **kwargs)
    assert "passes boundary 0 more than once" in refused(model, Features((0, 1), True))
    model = random_model("llama")
    model.config.num_hidden_layers = 3
    assert "the 3 layers of LlamaForCausalLM" in refused(model)
    model = random_model("llama")
    first = model.model.layers[0].forward
    model.model.layers[0].forward = lambda hidden, **kwargs: torch.stack([first(hidden, **kwargs)] * 2)
    second = model.model.layers[1].forward
    model.model.layers[1].forward = lambda hidden, **kwargs: second(hidden[0], **kwargs)
    assert "has (2, 1, 2, 64) at boundary 1 instead of one hidden state of (1, 2, 64)" in refused(model)
    model = random_model("llama")
    inner = model.model.layers[1].forward
    model.model.layers[1].forward = lambda hidden, **kwargs: inner(hidden.clone(), **kwargs) + 0 * hidden.mul_(2)
    assert "changes the hidden state of boundary 1 in place" in refused(model)
