"""Token ids that requests may name: those of the model's rows, whatever the tokenizer has. Others are its own fault."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.support import zoo
from tests.support.local import local_config

from paceline.errors import EngineError, InvalidRequestError
from paceline.local import LocalPipeline
from paceline.router.admission import TargetInfo

_NAME = "holes"
_NUM_IDS = zoo.tokenizer(_NAME).vocab_size
_ROWS = _NUM_IDS + 63
_PADDING = _NUM_IDS + 40
_ANSWER = "hello world"


@pytest.fixture(scope="module")
def pipeline() -> Iterator[LocalPipeline]:
    """A target whose embedding has more rows than its tokenizer has ids, and which says one of them."""
    tokenizer = zoo.tokenizer(_NAME)
    answer = tokenizer.encode_text(_ANSWER)
    folder = zoo.says(_NAME, tokenizer.encode("Say: "), [*answer[:4], _PADDING, *answer[4:]], rows=_ROWS).target
    with LocalPipeline(local_config(folder, kv_pages=2)) as pipeline:
        yield pipeline


def test_a_tokenizer_with_holes_counts_to_its_largest_id() -> None:
    tokenizer = zoo.tokenizer(_NAME)
    assert max(tokenizer.vocab.values()) + 1 == _NUM_IDS > len(tokenizer.vocab)


def test_what_the_model_says_is_a_prompt(pipeline: LocalPipeline) -> None:
    result = pipeline.generate("Say: ", max_tokens=40).result
    assert _PADDING in result.token_ids
    assert result.text == _ANSWER
    prompt = [*zoo.tokenizer(_NAME).encode("Say: "), *result.token_ids[:6]]
    assert pipeline.generate(prompt, max_tokens=40).result.text == _ANSWER[5:]


OPTIONS: dict[str, Any] = {
    "logit_bias": lambda token_id: {token_id: -1.0},
    "bad_words": lambda token_id: ((1, token_id),),
    "stop_token_ids": lambda token_id: (token_id,),
    "allowed_token_ids": lambda token_id: (*range(256), token_id),
    "logprob_token_ids": lambda token_id: (token_id,),
}


@pytest.mark.parametrize("name", ["prompt", *OPTIONS])
def test_ids_are_bounded_by_the_rows_of_the_model(pipeline: LocalPipeline, name: str) -> None:
    def run(token_id: int) -> None:
        prompt = [1, token_id] if name == "prompt" else [1]
        options = {name: OPTIONS[name](token_id)} if name in OPTIONS else {}
        assert pipeline.generate(prompt, max_tokens=1, **options).result.token_ids

    run(_ROWS - 1)
    allowed = f"0 to {_ROWS - 1}|\\[0, {_ROWS}\\)"
    with pytest.raises(InvalidRequestError, match=rf"holds token id {_ROWS}: .*({allowed}).* allowed"):
        run(_ROWS)


def test_routers_bound_ids_likewise(pipeline: LocalPipeline) -> None:
    info = pipeline.info
    assert info.num_token_ids == _ROWS
    assert TargetInfo(info.tokenizer, 10, ()).num_token_ids == _NUM_IDS


def test_what_the_cache_cannot_hold_is_the_fault_of_the_request(pipeline: LocalPipeline) -> None:
    """It holds 128 tokens, fewer than the model's context."""
    with pytest.raises(InvalidRequestError, match="together at most 128 fit the KV cache of a target") as caught:
        _ = pipeline.generate("Say: ", max_tokens=500).result
    assert not isinstance(caught.value, EngineError)
