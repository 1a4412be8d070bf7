"""Sampling parameters that a request leaves out come from generation_config.json, locally and at a router alike."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.fakes import Idle
from tests.support.letters import Letters
from tests.support.models import FAMILIES
from transformers import GenerationConfig

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.generation import HONORED, NOT_HONORED, WITHOUT_EFFECT, not_honored
from paceline.config import LocalConfig, RouterConfig, TargetModel
from paceline.errors import ConfigError, InvalidRequestError
from paceline.local import LocalPipeline
from paceline.messages import OpenSession
from paceline.metrics.registry import Registry
from paceline.metrics.router import RouterMetrics
from paceline.router.admission import Admission, TargetInfo
from paceline.rpc.generation import request_from_proto, request_to_proto
from paceline.types import Request, SamplingParams

QWEN = {"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "pad_token_id": 3}
"""What the files of a widely used family say."""
QWEN_DEFAULTS = {"repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20}


def set_fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.model_fields_set}


def checkpoint_with(generation_config: dict[str, Any]) -> Checkpoint:
    return Checkpoint("model", 256, (), 128, generation_config=generation_config)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, {}),
        (QWEN, QWEN_DEFAULTS),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": False, "eos_token_id": 3, "temperature": None}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
        ({"temperature": 0.7}, {"temperature": 0.7}),
        ({"bad_words_ids": [[1, 2], [3]], "suppress_tokens": [4, 128]}, {"bad_words": ((1, 2), (3,), (4,))}),
        ({"suppress_tokens": [], "bad_words_ids": None, "min_new_tokens": 2}, {"min_tokens": 2}),
        ({"max_new_tokens": 512, "min_p": 0.1}, {"max_tokens": 512, "min_p": 0.1}),
    ],
)
def test_what_a_checkpoint_names(content, expected):
    assert set_fields(checkpoint_with(content).sampling_defaults()) == expected


@pytest.mark.parametrize("value", [-1.0, "warm", 1e9])
def test_a_value_that_is_not_allowed_is_named(value):
    with pytest.raises(
        ConfigError, match=r"^temperature is .* in the generation_config.json of 'model'.*: none ignores"
    ):
        checkpoint_with({"temperature": value}).sampling_defaults()


@pytest.mark.parametrize("content", [{"bad_words_ids": [1, 2]}, {"bad_words_ids": 3}, {"suppress_tokens": ["a"]}])
def test_forbidden_tokens_that_are_no_token_ids_are_named(content):
    with pytest.raises(ConfigError, match=r"^bad_words.* in the generation_config.json of 'model': .*: none ignores"):
        checkpoint_with(content).sampling_defaults()


def test_every_setting_that_transformers_knows_is_honored_told_or_without_effect() -> None:
    known = vars(GenerationConfig()).keys()
    assert known - HONORED - NOT_HONORED.keys() - WITHOUT_EFFECT == set()
    assert not HONORED & (NOT_HONORED.keys() | WITHOUT_EFFECT)
    assert not NOT_HONORED.keys() & WITHOUT_EFFECT


def test_settings_that_are_not_honored_are_told_once_and_only_where_they_say_something(caplog):
    neutral = {key: values[0] for key, values in NOT_HONORED.items() if values}
    assert not_honored(QWEN | neutral | dict.fromkeys(NOT_HONORED)) == []
    checkpoint_with(QWEN | neutral).warn_of_settings()
    assert caplog.messages == []
    told = {"num_beams": 4, "typical_p": 0.9, "begin_suppress_tokens": [220, 50256], "a_new_one": 3}
    checkpoint_with(QWEN | told).warn_of_settings()
    (line,) = caplog.messages
    assert line == (
        "generation_config.json of model: num_beams is 4, typical_p is 0.9, begin_suppress_tokens is [220, 50256], "
        "a_new_one is 3, which is not honored"
    )


def test_both_readers_of_a_checkpoint_find_the_file(tmp_path: Path) -> None:
    config = FAMILIES["llama"]()
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(QWEN))
    for read in (Checkpoint.open, Checkpoint.ask_transformers):
        assert set_fields(read(str(tmp_path)).sampling_defaults()) == QWEN_DEFAULTS


def by_router(request: Request, defaults: SamplingParams) -> SamplingParams:
    """The parameters of the session that a router makes of a request, which comes as a message."""
    metrics = RouterMetrics(Registry("router"), "none")
    info = TargetInfo(Letters(), 256, (), defaults)  # type: ignore[arg-type]
    admission = Admission(info, RouterConfig(), "r", metrics=metrics, clock=lambda: 0.0)
    received = request_from_proto(request_to_proto(request))
    active = asyncio.run(admission.prepare(received, [], SimpleNamespace()))
    (message,) = [m for m in active.session.open().to_target if isinstance(m, OpenSession)]
    return message.sampling


def by_pipeline(request: Request, checkpoint: Checkpoint, **options: Any) -> SamplingParams:
    """The parameters of the session that the one-process pipeline makes of a request."""
    config = LocalConfig(target=TargetModel(path="scripted"), worker="thread", **options)
    pipeline = LocalPipeline(config, target_factory=lambda emit: Idle(), tokenizer=Letters(), checkpoint=checkpoint)  # type: ignore[arg-type]
    with pipeline:
        return pipeline.submit(request.prompt, request.sampling).session.sampling


GIVEN: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},  # greedy, although the checkpoint samples
    {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0},  # everything off
    {"top_k": 5, "max_tokens": 7},
]


@pytest.mark.parametrize("given", GIVEN)
def test_router_and_pipeline_take_the_same_defaults_and_what_is_given_wins(given):
    checkpoint = checkpoint_with(QWEN)
    request = Request("id", "abc", SamplingParams(seed=1, **given))
    expected = {**QWEN_DEFAULTS, **given}
    for params in (by_router(request, checkpoint.sampling_defaults()), by_pipeline(request, checkpoint)):
        assert {name: getattr(params, name) for name in expected} == expected
    bare = SamplingParams(seed=1, **given)
    for params in (
        by_router(request, SamplingParams()),
        by_pipeline(request, checkpoint, generation_config="none"),
        by_pipeline(request, checkpoint_with({})),
    ):
        assert params == bare, "greedy where neither says otherwise"


def test_defaults_that_replace_what_is_given_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: the checkpoint wins."""
    monkeypatch.setattr(SamplingParams, "with_defaults", lambda self, other: self.model_copy(update=set_fields(other)))
    with pytest.raises(AssertionError):
        test_router_and_pipeline_take_the_same_defaults_and_what_is_given_wins(GIVEN[1])


def test_min_tokens_is_judged_by_the_max_tokens_that_applies():
    given, defaults = SamplingParams(min_tokens=200), SamplingParams(max_tokens=210)
    assert given.with_defaults(defaults).max_tokens == 210
    with pytest.raises(InvalidRequestError, match=r"^min_tokens is 200: at most max_tokens \(128, by default\) is"):
        given.with_defaults(SamplingParams())
    with pytest.raises(InvalidRequestError, match=r"^min_tokens is 200"):
        by_router(Request("id", "abc", given), SamplingParams())
