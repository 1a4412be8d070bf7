"""States heard in the middle of a step: the right ones, in time, of eager and of compiled steps."""

import threading
from typing import Any

import pytest
import torch
from tests.model.compiled.test_aot import smallest
from tests.support.rings import nightly, slow
from torch import Tensor
from transformers import PreTrainedModel

from paceline.model.compiled.aot import artifact_key
from paceline.model.compiled.package import CompiledPackage
from paceline.model.features import Features
from paceline.model.layer_callback import heard_by
from paceline.model.loading import prepare
from paceline.model.runner import ModelRunner
from paceline.model.step_plan import SequenceStep

BOUNDARY = 1


def steps_of(runner: ModelRunner) -> list[SequenceStep]:
    """A prompt without logits, one with the last, and a decoding step with a proposal of two."""
    steps = []
    for size, num_logits in ((5, 0), (4, 1), (3, 3)):
        pages = runner.cache.allocate(1)
        steps.append(SequenceStep(list(range(1, size + 1)), range(size), range(size), pages, num_logits))
    return steps


def expected(model: PreTrainedModel) -> Tensor:
    """The states of the rows with logits, by transformers."""
    model.set_attn_implementation("sdpa")
    rows = []
    with torch.no_grad():
        for size, num_logits in ((4, 1), (3, 3)):
            ids = torch.arange(1, size + 1)[None]
            rows.append(model(ids, use_cache=False, output_hidden_states=True).hidden_states[BOUNDARY][0, -num_logits:])
    return torch.cat(rows)


def check(model: PreTrainedModel, *, compile: bool) -> None:
    """A listener hears the states once a step, no other thread does, and the step raises what it raises."""
    loaded = prepare(model, compile=compile, callback_boundary=BOUNDARY)
    runner = loaded.runner(8)
    steps = steps_of(runner)
    heard: list[Tensor] = []
    silent = runner.forward(steps)
    with heard_by(lambda states: heard.append(states.clone())):
        logits = runner.forward(steps)
    assert torch.equal(logits, silent), "nothing that is computed depends on a listener"
    (states,) = heard
    want = expected(model)
    torch.testing.assert_close(states[: len(want)], want, atol=1e-5, rtol=1e-4)

    with heard_by(heard.append):
        thread = threading.Thread(target=runner.forward, args=(steps,))
        thread.start()
        thread.join()
    assert len(heard) == 1

    def fails(states: Tensor) -> None:
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"), heard_by(fails):
        runner.forward(steps)
    with heard_by(heard.append):
        runner.forward(steps)
    assert len(heard) == 2


def test_a_listener_hears_the_states_of_an_eager_step() -> None:
    check(smallest(), compile=False)


def test_a_hook_at_another_boundary_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant of the test before."""
    hook = torch.nn.Module.register_forward_pre_hook

    def mutant(self: Any, function: Any, **options: Any) -> Any:
        return hook(self, lambda module, args, kwargs: function(module, (args[0] * 1.01, *args[1:]), kwargs), **options)

    monkeypatch.setattr(torch.nn.Module, "register_forward_pre_hook", mutant)
    with pytest.raises(AssertionError):
        check(smallest(), compile=False)


@pytest.mark.compiler
@pytest.mark.usefixtures("compiled_steps")
@pytest.mark.parametrize("dtype", [*slow([torch.float32]), *nightly([torch.bfloat16])])
def test_a_listener_hears_the_states_of_a_compiled_step(dtype: torch.dtype) -> None:
    """The package is still run without the interpreter's lock: torch's loader would keep it."""
    model = smallest()
    if dtype == torch.float32:
        check(model, compile=True)
    model = smallest().to(dtype)
    loaded, eager = (prepare(model, compile=compile, callback_boundary=BOUNDARY) for compile in (True, False))
    assert isinstance(loaded.step, CompiledPackage)
    told = []
    for each in (loaded, eager):
        runner = each.runner(8)
        heard: list[Tensor] = []
        with heard_by(lambda states, heard=heard: heard.append(states.clone())):
            runner.forward(steps_of(runner))
        told.append(heard[0][:4])
    torch.testing.assert_close(*told, atol=0.05, rtol=0.05)
    assert told[0].dtype == dtype


@pytest.mark.compiler
def test_a_compiled_step_that_can_be_heard_is_one_of_its_own() -> None:
    model = smallest()
    keys = {
        artifact_key(model, None),
        artifact_key(model, None, callback_boundary=1),
        artifact_key(model, None, features=Features((1,), True)),
        artifact_key(model, None, features=Features((1,), True), callback_boundary=1),
    }
    assert len(keys) == 4
