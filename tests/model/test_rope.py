"""LongRoPE: one set of rotary factors for all sessions of a service, which is transformers' on that side."""

import copy
import logging
from typing import Any

import pytest
import torch
from tests.model.conformance import FP32_LIMIT, assert_follows
from tests.model.families import checkpoint, small_config
from tests.model.test_forward import ragged
from tests.support.models import prompt
from transformers import PreTrainedModel

from paceline.checkpoint.rope import longrope_limit
from paceline.drafters.heads.partial_model import borrow, layers_from
from paceline.errors import ConfigError
from paceline.model import rope
from paceline.model.compiled.aot import artifact_key
from paceline.model.loading import prepare

LIMIT, LONGEST = 48, 2048
"""The context of the short factors, and the longest one."""
ROPE: dict[str, Any] = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
    "original_max_position_embeddings": LIMIT,
}  # fmt: skip


def phi3() -> PreTrainedModel:
    config = small_config("phi3", rope_parameters=copy.deepcopy(ROPE), original_max_position_embeddings=LIMIT)
    return checkpoint(config)


def farthest(max_model_len: int | None, length: int) -> float:
    """The largest difference of any logit from transformers, which sees the whole text of ``length`` at once."""
    runner = prepare(phi3(), compile=False, max_model_len=max_model_len).runner(8)
    text = prompt(1, length)
    got = ragged(runner, [text, prompt(2, 30)], seed=0)[0]
    with torch.no_grad():
        want = phi3()(torch.tensor([text]), use_cache=False).logits[0]
    return float((got - want).abs().max() / want.abs().max())


@pytest.mark.parametrize(("max_model_len", "length"), [(LIMIT, LIMIT), (None, LIMIT + 1), (LIMIT + 1, LIMIT + 1)])
def test_logits_are_those_of_transformers_on_the_service_s_side(max_model_len: int | None, length: int) -> None:
    """In chunks that end before the limit, with others in the step that do."""
    assert farthest(max_model_len, length) <= FP32_LIMIT


@pytest.mark.parametrize(("max_model_len", "length"), [(LIMIT, 40), (LONGEST, 70)])
def test_greedy_tokens_are_those_of_generate(max_model_len: int, length: int) -> None:
    """A prompt and its continuation on one side."""
    runner = prepare(phi3(), compile=False, max_model_len=max_model_len).runner(4)
    assert_follows(runner, phi3(), prompt(3, length), (), 8)


def test_a_mutant_with_the_other_factors_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = rope.settle_factors
    monkeypatch.setattr(rope, "settle_factors", lambda module, *, long: settle(module, long=not long))
    assert farthest(LIMIT, LIMIT) > 100 * FP32_LIMIT
    assert farthest(None, LIMIT + 1) > 100 * FP32_LIMIT


def test_the_log_says_which_factors(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "paceline.model.rope"):
        for max_model_len in (LIMIT, None):
            prepare(phi3(), compile=False, max_model_len=max_model_len)
    assert [record.getMessage().partition(" has ")[2] for record in caplog.records] == [
        f"the short rotary factors, as max_model_len is {LIMIT}, at most {LIMIT}",
        f"the long rotary factors, as max_model_len is {LONGEST}, more than {LIMIT}",
    ]


def test_a_compiled_step_is_of_one_side() -> None:
    keys = []
    for max_model_len in (LIMIT, LIMIT - 1, LONGEST):
        model = phi3()
        prepare(model, compile=False, max_model_len=max_model_len)
        keys.append(artifact_key(model, None))
    assert keys[0] == keys[1] != keys[2]


def test_lent_layers_do_not_change_the_target_s_angles() -> None:
    """They share its tables: a call that ends before the limit must not write the short factors there."""
    model = phi3()
    prepare(model, compile=False)
    before = model.model.rotary_emb.inv_freq.clone()
    part = borrow(lambda family: layers_from(1, family), model)
    assert part.model.rotary_emb.inv_freq is model.model.rotary_emb.inv_freq
    part.model.rotary_emb(torch.zeros(1, 1, 1), torch.tensor([[1]]))
    assert torch.equal(model.model.rotary_emb.inv_freq, before)


def test_an_embedding_that_chooses_by_itself_is_refused() -> None:
    """phimoe's scales angles by the longest sequence of the call, whatever the factors are."""
    parameters = {**ROPE, "short_mscale": 1.0, "long_mscale": 2.0}
    with pytest.raises(ConfigError, match="rope_type 'longrope', whose angles depend on the longest sequence"):
        prepare(checkpoint(small_config("phimoe", rope_parameters=parameters)), compile=False)


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 4096}, 4096),
        ({"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 4096}, 4096),
        ({"rope_parameters": ROPE, "max_position_embeddings": LONGEST}, LIMIT),
        ({"rope_parameters": ROPE, "original_max_position_embeddings": 4096}, 4096),
        ({"text_config": {"rope_parameters": ROPE}}, LIMIT),
        ({"rope_parameters": {"full_attention": ROPE, "sliding_attention": {"rope_type": "default"}}}, LIMIT),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "original_max_position_embeddings": 4096}, None),
        ({"rope_scaling": None}, None),
        ({}, None),
    ],
)
def test_where_the_limit_is_read(config: dict[str, Any], limit: int | None) -> None:
    assert longrope_limit(config) == limit
