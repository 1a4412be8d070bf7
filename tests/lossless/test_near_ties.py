"""Targets whose best tokens are all but equal: a difference in the last bits of a forward shows as another token.

The vocabulary comes in pairs whose rows of the output layer differ by 3e-7, so that every choice is a near-tie.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.model.families import checkpoint, small_config
from tests.support.models import noisy_copy, prompt
from tests.support.pump import Pump, Request, in_mode, plain_reference, requests_for
from tests.support.rings import nightly, slow
from transformers import PreTrainedModel
from transformers.integrations.moe import grouped_mm_experts_forward

from paceline.core.native import has_amx, packs_bfloat16
from paceline.errors import ConfigError
from paceline.model import experts, loading
from paceline.model.loading import LoadedModel, prepare
from paceline.model.selftest import check_invariance
from paceline.model.step import Step
from paceline.types import Mode

NUM_SESSIONS = 10
MIXTURES = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss", "minimax_m2", "deepseek_v3", "longcat_flash")
ODD = {
    "llama": {"hidden_size": 144, "intermediate_size": 250},
    "gemma2": {"hidden_size": 144, "intermediate_size": 250, "head_dim": 36},
    "qwen2": {"hidden_size": 144, "intermediate_size": 250},
    "olmo2": {"hidden_size": 144, "intermediate_size": 250},
    "starcoder2": {"hidden_size": 144, "intermediate_size": 250},
    "granite": {"hidden_size": 144, "intermediate_size": 250},
    "cohere2": {"hidden_size": 144, "intermediate_size": 250, "head_dim": 36},
    "exaone4": {"hidden_size": 144, "intermediate_size": 250},
}
"""Sizes that are no multiple of any vector: 250 numbers a token."""
CASES = [(family, {}) for family in MIXTURES] + [*ODD.items()]
FAST = ("qwen3_moe", "llama")
SLOW = ("gpt_oss", "deepseek_v3")


def near_ties(family: str, changes: dict | None = None) -> PreTrainedModel:
    """A random float32 checkpoint whose tokens 2i and 2i + 1 have almost the same logits."""
    model = checkpoint(small_config(family, tie_word_embeddings=False, **changes or {}))
    weight = model.get_output_embeddings().weight
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for first in range(0, len(weight) - 1, 2):
            weight[first + 1] = weight[first] + 3e-7 * torch.randn(weight.shape[1], generator=generator)
    return model


def requests() -> dict[str, Request]:
    return requests_for([prompt(i, 11 + 7 * i) for i in range(NUM_SESSIONS)], max_tokens=24, temperature=0.0)


def changed(target: LoadedModel, draft: LoadedModel | None, *modes: Mode) -> list[int]:
    """Sessions that have other tokens in a batch, in each of ``modes``, than alone in plain decoding."""
    asked = requests()
    alone = plain_reference(target, asked)
    together = [Pump(target, draft, late=0.1).run(in_mode(asked, mode), arrivals=1.0) for mode in modes]
    return [sum(found[name].token_ids != alone[name].token_ids for name in asked) for found in together]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *(case for case in CASES if case[0] in FAST),
        *slow(case for case in CASES if case[0] in SLOW),
        *nightly(case for case in CASES if case[0] not in (*FAST, *SLOW)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_no_session_changes_in_a_batch(family: str, changes: dict) -> None:
    """Plain, sequential and overlapped, experts and odd widths: 0 of 10 sessions; the self-test says the same."""
    model = near_ties(family, changes)
    check(prepare(model, compile=False), prepare(noisy_copy(model, 0.05), compile=False))


def check(target: LoadedModel, draft: LoadedModel) -> None:
    """Asserts that the self-test holds and that no session changes in a batch, in any mode."""
    report = check_invariance(target.runner(24))
    assert report.holds, str(report)
    assert changed(target, draft, Mode.PLAIN, Mode.SEQUENTIAL, Mode.OVERLAPPED) == [0, 0, 0]


@pytest.mark.compiler
@pytest.mark.nightly
@pytest.mark.usefixtures("compiled_steps")
def test_no_session_of_compiled_experts_changes_in_a_batch() -> None:
    """A compiled float32 mixture of experts: the same of the code that the compiler has made."""
    model = near_ties("qwen3_moe", {})
    target = prepare(model, compile=True)
    assert not isinstance(target.step, Step), "it is eager"
    check(target, prepare(noisy_copy(model, 0.05), compile=False))


def test_experts_that_return_their_input_are_not_compiled() -> None:
    """In LongCat's compiled step half of the rows differed from decoding."""
    with pytest.raises(ConfigError, match="compile is true, but it has experts that return their input"):
        prepare(near_ties("longcat_flash", {}), compile=True)


@pytest.mark.compiler
@pytest.mark.nightly
@pytest.mark.usefixtures("own_cache")
def test_compiled_experts_that_are_not_padded_change_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant of compiled steps."""
    if has_amx() or not torch.backends.mkl.is_available():
        return  # products by another library may not need it
    monkeypatch.setattr(loading, "pad_experts", lambda model: False)
    target = prepare(near_ties("qwen3_moe", {}), compile=True)
    assert not check_invariance(target.runner(24)).holds
    assert changed(target, None, Mode.PLAIN) > [0]


@pytest.mark.parametrize("family", ["qwen3_moe", *slow(["longcat_flash"])])
def test_experts_that_are_not_padded_change_sessions(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: plain batches already have other tokens, and the self-test says so."""
    if has_amx() or not torch.backends.mkl.is_available():
        return  # products by another library may not need it
    monkeypatch.setattr(loading, "pad_experts", lambda model: False)
    target = prepare(near_ties(family, {}), compile=False)
    assert not check_invariance(target.runner(24)).holds
    assert changed(target, None, Mode.PLAIN) > [0]


def test_no_token_of_bfloat16_experts_changes_in_a_batch() -> None:
    """An expert that one token alone has chosen multiplies one row: without padding one result in 20,000 is another."""
    model = prepare(checkpoint(small_config("mixtral", intermediate_size=64)).to(torch.bfloat16), compile=False).step
    layer = next(module for name, module in model.named_modules() if name.endswith("mlp.experts"))
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2000, layer.num_experts, layer.hidden_dim, generator=generator).bfloat16()
    chosen = torch.arange(layer.num_experts)[:, None]  # one token for each expert
    weights = torch.ones(len(chosen), 1)

    def num_changed(forward: Callable[..., torch.Tensor]) -> int:
        alone = torch.cat([forward(layer, tokens, chosen, weights) for tokens in hidden])
        n = len(hidden)
        return int((alone != forward(layer, hidden.flatten(0, 1), chosen.repeat(n, 1), weights.repeat(n, 1))).sum())

    with torch.inference_mode():
        assert num_changed(experts.padded_experts) == 0
        layer._is_expert_parallel = False
        if packs_bfloat16() and torch.backends.mkl.is_available():  # other machines' products may not need it
            assert num_changed(grouped_mm_experts_forward) > 0


def test_without_padding_behind_the_last_token_bits_differ() -> None:
    """The mutant: the last token of a step ends in the tail of elementwise kernels."""
    target = prepare(near_ties("llama", ODD["llama"]), compile=False)
    runner = target.runner(24)
    assert runner.shapes.spare_tokens > 0
    runner.shapes = replace(runner.shapes, spare_tokens=0)
    assert not check_invariance(runner).holds


def test_few_padding_routes_reach_only_chosen_experts() -> None:
    """Hand-computed: three experts, two chosen; each has at least four rows, the third none, and a rest lies beyond."""
    chosen = torch.tensor([[0, 2], [0, 2], [0, 2], [2, 0], [2, 2]])
    rows, routes = experts.padding_routes(chosen, 3)
    assert routes.shape == (rows, 2)
    counts = torch.bincount(torch.cat([chosen, routes]).flatten(), minlength=4).tolist()
    assert counts[:3] == [4, 0, 6]
    assert counts[3] >= 2
    single, routes = experts.padding_routes(torch.tensor([[1]]), 3)
    assert torch.bincount(routes.flatten(), minlength=4).tolist()[:3] == [0, 3, 0]
    assert single == 10
