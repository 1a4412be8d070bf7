"""The last layer's MLP for the tokens whose logits are wanted: the same logits, of fewer tokens."""

import pytest
import torch
from tests.support.models import FAMILIES, prompt, random_model
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from paceline.model import logit_rows
from paceline.model.compiled import aot
from paceline.model.compiled import linear as cpu_linear
from paceline.model.features import OUT, Features
from paceline.model.loading import LoadedModel, prepare
from paceline.model.logit_rows import LogitRows
from paceline.model.runner import ModelRunner
from paceline.model.step import Step
from paceline.model.step_plan import SequenceStep
from paceline.types import pages_for


def config(**changes: object) -> LlamaConfig:
    sizes = {
        "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "intermediate_size": 128, "tie_word_embeddings": False, "bos_token_id": None,
        "eos_token_id": None,
    }  # fmt: skip
    return LlamaConfig(**(sizes | changes))


def logits_of(runner: ModelRunner, *, length: int = 90) -> list[Tensor]:
    """Those of a prompt in two chunks of which only the last token's are wanted, beside another session's token; then
    of a verified proposal, all of them."""
    text = prompt(1, length, 256)
    pages, beside = runner.cache.allocate(pages_for(length + 4)), runner.cache.allocate(1)
    found = [runner.forward([SequenceStep(text[:40], range(40), range(40), pages, num_logits=0)])]
    span = range(40, length)
    chunk = SequenceStep(text[40:], span, span, pages, num_logits=1)
    other = SequenceStep([7], [0], [0], beside, num_logits=1)
    found.append(runner.forward([other, chunk]).clone())
    span = range(length, length + 4)
    found.append(runner.forward([SequenceStep([3, 1, 4, 1], span, span, pages, num_logits=4)]).clone())
    runner.cache.release(pages)
    runner.cache.release(beside)
    return found[1:]


def with_rows(model: PreTrainedModel) -> tuple[LoadedModel, LogitRows]:
    loaded = prepare(model, compile=False)
    rows = LogitRows.of(model, None)
    assert rows is not None
    assert isinstance(loaded.step, Step)
    loaded.step.rows = rows
    return loaded, rows


@pytest.mark.parametrize("mutant", [False, True])
def test_the_logits_are_those_of_all_rows(mutant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The MLP sees the wanted tokens, padded to the least that a step has. The mutant takes their neighbours."""
    want = logits_of(prepare(random_model(config()), compile=False).runner(8))
    model = random_model(config())
    loaded, rows = with_rows(model)
    seen: list[int] = []
    model.model.layers[-1].mlp.gate_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    if mutant:
        expect = LogitRows.expect
        monkeypatch.setattr(LogitRows, "expect", lambda self, index: expect(self, (index - 1).clamp(min=0)))
    with rows.in_place():
        got = logits_of(loaded.runner(8))
    assert len(want) == len(got) == 2
    same = [torch.allclose(a, b, atol=1e-5) for a, b in zip(want, got, strict=True)]
    assert all(same) is not mutant
    assert max(seen) <= 4


def test_the_model_is_left_as_it_was() -> None:
    model = random_model(config())
    _, rows = with_rows(model)
    mlp, x = model.model.layers[-1].mlp, torch.randn(1, 5, 64)
    before = mlp(x)
    with rows.in_place():
        rows.expect(torch.tensor([4]))
        inside = mlp(x)
    assert torch.equal(mlp(x), before)
    torch.testing.assert_close(inside[:, 4], before[:, 4])
    assert not inside[:, :4].any()
    assert "forward" not in vars(mlp)


@pytest.mark.parametrize(
    ("features", "some"),
    [
        (None, True),
        (Features((0, 1), every_position=True), True),
        (Features((2, OUT), every_position=False), True),
        (Features((0, 2), every_position=True), False),
        (Features((OUT,), every_position=True), False),
    ],
)
def test_states_behind_the_last_layer_need_all_rows(features: Features | None, some: bool) -> None:
    assert (LogitRows.of(random_model(config()), features) is not None) is some


def test_which_layers_have_such_an_mlp(monkeypatch: pytest.MonkeyPatch) -> None:
    """No experts, which choose by token; and none whose outputs could end in the middle of a vector."""
    assert LogitRows.of(random_model(config(intermediate_size=96)), None) is None
    monkeypatch.setattr(logit_rows, "LANES", 1)
    families = {name for name in FAMILIES if LogitRows.of(random_model(name), None) is not None}
    assert {"llama", "qwen3", "gemma2", "gemma3", "mistral", "phi3"} <= families
    assert not {"qwen3_moe", "gpt2"} & families


def test_only_native_products_are_computed_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def some(model: PreTrainedModel, kernel: str = "native") -> bool:
        return aot._logit_rows(model, kernel, None) is not None  # type: ignore[arg-type]

    monkeypatch.setattr(cpu_linear, "usable", lambda: True)
    model = random_model(config(), dtype=torch.bfloat16)
    assert some(model)
    assert not some(model, "sdpa")
    assert not some(random_model(config()))
    monkeypatch.setattr(cpu_linear, "usable", lambda: False)
    assert not some(model)
