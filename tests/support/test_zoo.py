"""The tokenizers load as those of a checkpoint, and a scripted checkpoint says its script."""

from __future__ import annotations

import pytest
from tests.support import zoo
from tests.support.local import local_config
from tests.support.rings import slow

from paceline.local import LocalPipeline

_ROUND = 'Grüße, 世界 👩‍👧!\n  {"a": [1, 2.5]}'


@pytest.mark.parametrize("name", zoo.EVERY)
def test_a_text_comes_back_from_its_tokens(name: str) -> None:
    tokenizer = zoo.tokenizer(name)
    assert len(tokenizer.eos_token_ids) == 1
    assert tokenizer.decode(tokenizer.encode_text(_ROUND)).removeprefix(" ") == _ROUND


@pytest.mark.parametrize("name", ["plain_marks", *slow(["qwen3"])])
def test_a_checkpoint_says_its_script(name: str) -> None:
    tokenizer = zoo.tokenizer(name)
    prompt, answer = tokenizer.encode("Say: "), tokenizer.encode_text("x<think>big world</think>!")
    pair = zoo.says(name, prompt, answer)
    with LocalPipeline(local_config(pair.target, pair.draft)) as pipeline:
        result = pipeline.generate("Say: ", max_tokens=100).result
    assert result.token_ids == (*answer, *tokenizer.eos_token_ids)
    assert result.finish_reason == "stop"
