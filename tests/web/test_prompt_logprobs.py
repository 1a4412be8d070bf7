"""Log probabilities of prompts over HTTP: as OpenAI echoes them, as vLLM lists them, as lm-eval reads them."""

from __future__ import annotations

import math

import pytest
from tests.web.support import MODEL, call

from paceline.types import SamplingParams
from paceline.web.logprobs import LEAST_LOGPROB, prompt_entries, shown

TEXTS = ["thequickbrownfox", "lazy", "a"]


def scored(pipeline, prompt, top=20, **options):
    return pipeline.generate(prompt, SamplingParams(prompt_logprobs=top, max_tokens=0, **options)).result


@pytest.fixture(scope="module")
def ids(pipeline):
    return [list(pipeline.tokenizer.encode(text)) for text in TEXTS]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_requests_of_lm_eval(url, pipeline, ids, max_tokens):
    """Prompts as token ids, several at once; it reads what the tokens from a place on have, but the last."""
    asked = {"prompt": ids, "max_tokens": max_tokens, "temperature": 0, "logprobs": 1, "seed": 1234, "echo": True}
    status, _, answer = call(f"{url}/v1/completions", {"model": MODEL, **asked})
    assert status == 200
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for prompt, choice in zip(ids, answer["choices"], strict=True):
        result, columns = scored(pipeline, prompt, 1), choice["logprobs"]
        num_tokens = len(prompt) + max_tokens
        assert {key: len(column) for key, column in columns.items()} == dict.fromkeys(columns, num_tokens)
        assert columns["token_logprobs"][0] is columns["top_logprobs"][0] is None
        assert columns["token_logprobs"][1 : len(prompt)] == [one.logprob for one in result.prompt_logprobs[1:]]
        for one, logprob, top in zip(
            result.prompt_logprobs[1:], columns["token_logprobs"][1:], columns["top_logprobs"][1:], strict=False
        ):
            assert (logprob == max(top.values())) == (one.rank == 1), "whether it is what greedy decoding takes"
            assert len(top) == (1 if one.rank == 1 else 2)
        assert choice["text"].startswith(pipeline.tokenizer.decode(prompt))
        assert choice["finish_reason"] == "length"
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (sum(map(len, ids)), 3 * max_tokens)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_an_echo_is_the_same_in_a_stream(client):
    asked = {"model": MODEL, "prompt": TEXTS[0], "echo": True, "logprobs": 3, "max_tokens": 7, "temperature": 0}
    (choice,) = client.completions.create(**asked).choices
    parts = [part.choices[0] for part in client.completions.create(**asked, stream=True)]
    assert "".join(part.text for part in parts) == choice.text
    assert choice.text.startswith(TEXTS[0])
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        found = [one for part in parts if part.logprobs for one in getattr(part.logprobs, name)]
        assert found == getattr(choice.logprobs, name)
    for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
        assert token.startswith("<") or choice.text[offset:].startswith(token)


def test_an_echo_alone_needs_no_token(client):
    for more in ({}, {"stream": True}):
        answer = client.completions.create(model=MODEL, prompt=TEXTS[0], echo=True, max_tokens=0, **more)
        parts = [part.choices[0] for part in answer] if more else answer.choices
        assert "".join(part.text for part in parts) == TEXTS[0]
        assert (parts[-1].finish_reason, parts[-1].logprobs) == ("length", None)


def test_the_list_of_vllm(client, pipeline, ids):
    prompts = {"prompt": TEXTS[:2], "model": MODEL, "max_tokens": 2}
    answer = client.completions.create(**prompts, extra_body={"prompt_logprobs": 2})
    for prompt, choice in zip(ids, answer.choices, strict=False):
        result = scored(pipeline, prompt, 2)
        assert choice.prompt_logprobs[0] is None
        assert choice.logprobs is None
        for token_id, one, found in zip(
            prompt[1:], result.prompt_logprobs[1:], choice.prompt_logprobs[1:], strict=True
        ):
            assert found[str(token_id)]["rank"] == one.rank
            assert found[str(token_id)]["logprob"] == one.logprob
            assert len(found) == (2 if one.rank <= 2 else 3)
            for i, (other, value) in enumerate(one.top, 1):
                text = pipeline.tokenizer.decode([other], special=True)
                assert found[str(other)] == {"logprob": value, "rank": i, "decoded_token": text}
    assert client.completions.create(**prompts).choices[0].model_extra.get("prompt_logprobs") is None


def test_chats_have_the_list_at_the_top(speaking):
    from tests.web.support import edge_over, served

    pipeline, chat = speaking
    with served(edge_over(pipeline, chat=chat)) as at:
        body = {"messages": [{"role": "user", "content": "hi"}], "prompt_logprobs": 1, "return_token_ids": True}
        status, _, answer = call(f"{at}/v1/chat/completions", {**body, "max_completion_tokens": 0})
        assert status == 200
        (choice,) = answer["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
        result = scored(pipeline, answer["prompt_token_ids"], 1)
        found = answer["prompt_logprobs"]
        assert [one and one.logprob for one in result.prompt_logprobs] == [
            one and one[str(token_id)]["logprob"]
            for one, token_id in zip(found, answer["prompt_token_ids"], strict=True)
        ]
        status, _, answer = call(f"{at}/v1/chat/completions", {**body, "max_completion_tokens": 3})
        assert (status, answer["prompt_logprobs"]) == (200, found)


def test_zero_top_logprobs_show_the_token_alone(client):
    asked = {"model": MODEL, "prompt": "lazy", "max_tokens": 3, "temperature": 0}
    (choice,) = client.completions.create(**asked, logprobs=0).choices
    columns = choice.logprobs
    assert columns.top_logprobs == [
        {token: value} for token, value in zip(columns.tokens, columns.token_logprobs, strict=True)
    ]


def test_what_json_cannot_hold_is_a_large_number(pipeline):
    from paceline.types import TokenLogprob

    assert shown(-math.inf) == LEAST_LOGPROB
    assert shown(-1.5) == -1.5
    scores = (None, TokenLogprob(-math.inf, 300))
    assert list(prompt_entries(scores, (11, 12), pipeline.tokenizer))[1]["12"]["logprob"] == LEAST_LOGPROB
