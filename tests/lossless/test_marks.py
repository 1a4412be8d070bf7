"""Forms that hold an added token, drafted and plain: the same tokens, which have the form."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.checkpoint.test_grammar_zoo import forms, text_of
from tests.support import zoo
from tests.support.local import local_config

from paceline.local import LocalPipeline
from paceline.types import Mode, SpeculationParams

_NAME = "plain_marks"
_MARK = "<tool_call>"


@pytest.fixture(scope="module")
def pipeline() -> Iterator[LocalPipeline]:
    """A target that would say something else, and a draft that agrees with it in part."""
    tokenizer = zoo.tokenizer(_NAME)
    pair = zoo.says(_NAME, tokenizer.encode("Say: "), tokenizer.encode_text("a<think>xb<tool_call>a y</tool_call>" * 3))
    with LocalPipeline(local_config(pair.target, pair.draft)) as pipeline:
        yield pipeline


@pytest.mark.parametrize("kind", forms(_MARK))
def test_drafted_is_plain_and_has_the_form(pipeline: LocalPipeline, kind: str) -> None:
    form = forms(_MARK)[kind]
    results = [
        pipeline.generate(
            "Say: ", None, speculation, max_tokens=60, temperature=1.0, seed=3, structured_output=form.form
        ).result
        for speculation in (SpeculationParams(mode=Mode.PLAIN), SpeculationParams(max_draft_tokens=4))
    ]
    plain, drafted = results
    assert drafted.token_ids == plain.token_ids
    if plain.finish_reason == "stop":
        assert form.holds(text_of(_NAME, plain.token_ids[:-1]))
    else:
        assert kind in ("free text", "triggered tags", "tags with separator", "regex that may", "Lark", "GBNF")
