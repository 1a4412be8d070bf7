"""What clients of vLLM read of an answer's shape: its last event, fields that are null, times, echoes, refusals."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tests.web.chats import save_chat
from tests.web.support import call, edge_over, events, refusal, served

from paceline.checkpoint.chat import load_chat
from paceline.cli.main import build_parser
from paceline.cli.vllm import vllm_settings
from paceline.web.response_store import ResponseStore

USER = [{"role": "user", "content": "hi"}]
LONG = {"max_tokens": 9, "ignore_eos": True}
TIMES = {"time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"}


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return load_chat(str(save_chat(tmp_path_factory.mktemp("chat"))))


@pytest.fixture(scope="module")
def at(pipeline, chat):
    with served(edge_over(pipeline, chat=chat, responses=ResponseStore(1 << 20))) as at:
        yield at


PATHS = {"/v1/completions": {"prompt": "lazy"}, "/v1/chat/completions": {"messages": USER}}


def text_of(choice):
    return choice["text"] if "text" in choice else choice["delta"].get("content") or ""


@pytest.mark.parametrize("speculation", [{}, {"include_speculation": True}])
@pytest.mark.parametrize("path", PATHS)
def test_the_last_event_has_text_and_says_why_it_ends(at, path, speculation):
    options = {"include_usage": True, "continuous_usage_stats": True, **speculation}
    body = PATHS[path] | LONG | {"stream": True, "stream_options": options, "return_token_ids": True}
    body["logit_bias"] = {str(i): -100 for i in range(10)}  # letters alone
    *parts, counts, done = events(f"{at}{path}", body)
    choices = [part["choices"][0] for part in parts]
    assert (done, counts["choices"]) == ("[DONE]", [])
    assert [choice["finish_reason"] for choice in choices][-2:] == [None, "length"]
    assert text_of(choices[-1])
    assert sum(len(choice.get("token_ids", ())) for choice in choices) == 9
    numbers = [part["usage"]["completion_tokens"] for part in parts]
    assert all(a < b for a, b in pairwise(numbers))
    assert numbers[-1] == counts["usage"]["completion_tokens"] == 9
    told = choices[-1]["speculation"]
    assert told["rounds"] >= 1
    assert ("segments" in told) is bool(speculation)


@pytest.mark.parametrize("path", PATHS)
def test_an_end_without_text_has_an_event(at, path):
    body = PATHS[path] | {"max_tokens": 1, "logit_bias": {"7": 100}, "stream": True}
    *_, last, done = events(f"{at}{path}", body)
    (choice,) = last["choices"]
    assert (done, choice["finish_reason"], text_of(choice)) == ("[DONE]", "stop", "")


def test_what_was_not_asked_for_is_null(at):
    answer = call(f"{at}/v1/completions", PATHS["/v1/completions"] | LONG)[2]
    assert {answer["choices"][0][name] for name in ("token_ids", "prompt_token_ids", "prompt_logprobs")} == {None}
    answer = call(f"{at}/v1/chat/completions", PATHS["/v1/chat/completions"] | LONG)[2]
    assert {answer["choices"][0]["token_ids"], answer["prompt_token_ids"], answer["prompt_logprobs"]} == {None}
    asked = {"return_token_ids": True, "prompt_logprobs": 1}
    answer = call(f"{at}/v1/chat/completions", PATHS["/v1/chat/completions"] | LONG | asked)[2]
    assert len(answer["choices"][0]["token_ids"]) == 9
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"]) > 0


@pytest.mark.parametrize("path", PATHS)
def test_an_answer_of_one_choice_has_its_times(at, path):
    metrics = call(f"{at}{path}", PATHS[path] | LONG)[2]["metrics"]
    assert metrics.keys() - {"speculative_decoding"} == TIMES
    assert all(metrics[name] >= 0 for name in TIMES)
    seconds = (metrics["time_to_first_token_ms"] + metrics["generation_time_ms"]) / 1000
    assert metrics["tokens_per_second"] == pytest.approx(9 / seconds)
    assert metrics["mean_itl_ms"] == pytest.approx(metrics["generation_time_ms"] / 8)
    one = call(f"{at}{path}", PATHS[path] | LONG | {"max_tokens": 1})[2]["metrics"]
    assert one.keys() - {"speculative_decoding"} == TIMES - {"mean_itl_ms"}
    assert "metrics" not in call(f"{at}{path}", PATHS[path] | LONG | {"n": 2})[2]


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_an_echo_begins_with_the_answer_so_far(at, role):
    begun = {"messages": [*USER, {"role": role, "content": "so far"}], "add_generation_prompt": False} | LONG
    plain = call(f"{at}/v1/chat/completions", begun)[2]["choices"][0]["message"]["content"]
    shown = ("so far" if role == "assistant" else "") + plain
    assert call(f"{at}/v1/chat/completions", begun | {"echo": True})[2]["choices"][0]["message"]["content"] == shown
    streamed = events(f"{at}/v1/chat/completions", begun | {"echo": True, "stream": True})[:-1]
    assert "".join(text_of(part["choices"][0]) for part in streamed) == shown


def test_every_wrong_key_of_a_bias_is_named(at):
    bias = {"a": 1, "7": 2, "b": 3}
    said = "logit_bias has the keys 'a' and 'b': a key must be a whole number"
    assert refusal(f"{at}/v1/chat/completions", {"messages": USER, "logit_bias": bias}) == said
    said = "logit_bias has the key 'a': a key must be a whole number"
    assert refusal(f"{at}/v1/completions", {"prompt": "a", "logit_bias": {"a": 1}}) == said


def test_ids_without_a_row_are_out_of_vocabulary(at):
    assert "others are out of vocabulary" in refusal(f"{at}/v1/completions", {"prompt": [999_999]})


def test_what_is_kept_has_ended_and_cannot_be_cancelled(at):
    kept = call(f"{at}/v1/responses", {"input": "hi", "max_output_tokens": 2})[2]
    assert refusal(f"{at}/v1/responses/{kept['id']}/cancel", {}) == "Cannot cancel a synchronous response."
    status, _, answer = call(f"{at}/v1/responses/resp_x/cancel", {})
    assert (status, answer["error"]["message"]) == (404, "Response with id 'resp_x' not found.")


def test_a_response_can_show_what_the_model_reads_and_writes(at, pipeline):
    body = {"input": "hi", "max_output_tokens": 4, "return_token_ids": True}
    answer = call(f"{at}/v1/responses", body | {"enable_response_messages": True})[2]
    decode = pipeline.info.tokenizer.decode
    for side, ids in (("input_messages", answer["prompt_token_ids"]), ("output_messages", answer["token_ids"])):
        (message,) = answer[side]
        text = decode(ids, special=True)
        assert message == {"type": "raw_message_tokens", "message": text, "tokens": ids}
    assert "input_messages" not in call(f"{at}/v1/responses", body)[2]


def test_usage_may_be_told_without_being_asked_for(pipeline, chat):
    args = build_parser("serve").parse_args(["serve", "m", "--enable-force-include-usage"])
    assert vllm_settings(args) == {"server.force_include_usage": True}
    with served(edge_over(pipeline, chat=chat, force_include_usage=True)) as at:
        for path, body in PATHS.items():
            parts = events(f"{at}{path}", body | LONG | {"stream": True})[:-1]
            assert [part["usage"]["completion_tokens"] for part in parts][-2:] == [9, 9]
            assert parts[-1]["choices"] == []
            unasked = {"stream": True, "stream_options": {"include_usage": False}}
            assert all(part.get("usage") is None for part in events(f"{at}{path}", body | LONG | unasked)[:-1])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_listed_tokens_are_told_instead_of_the_likeliest(at, path, stream):
    asked = {"logprobs": True, "top_logprobs": 5} if "chat" in path else {"logprobs": 5}
    asked |= {"logprob_token_ids": [7, 50, 7], "return_tokens_as_token_ids": True, "max_tokens": 3, "temperature": 0}
    if stream:
        choices = [event["choices"][0] for event in events(f"{at}{path}", PATHS[path] | asked | {"stream": True})[:-1]]
    else:
        status, _, answer = call(f"{at}{path}", PATHS[path] | asked)
        assert status == 200, answer
        choices = answer["choices"]
    told = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    if "chat" in path:
        entries = [(one["token"], one["top_logprobs"]) for some in told for one in some["content"]]
        found = [(token, [one["token"] for one in tops]) for token, tops in entries]
    else:
        found = [one for some in told for one in zip(some["tokens"], map(list, some["top_logprobs"]), strict=True)]
    assert len(found) == 3
    assert found == [(token, list(dict.fromkeys((token, "token_id:7", "token_id:50")))) for token, _ in found]


def test_a_list_asks_for_no_more_numbers_than_the_likeliest_could(at):
    body = {"messages": USER, "logprobs": True, "logprob_token_ids": list(range(30))}
    assert refusal(f"{at}/v1/chat/completions", body).startswith("logprob_token_ids holds 30 ids and max_tokens is ")
    assert call(f"{at}/v1/chat/completions", body | {"max_tokens": 2})[0] == 200


def test_several_chats_have_a_choice_each_which_they_would_have_alone(at):
    chats = [[{"role": "user", "content": text}] for text in ("lazy", "dog", "quick brown")]
    more = {"max_tokens": 6, "temperature": 1.0, "seed": 3, "logprobs": True, "return_token_ids": True}
    status, _, answer = call(f"{at}/v1/chat/completions/batch", {"messages": chats} | more)
    assert status == 200, answer
    alone = [call(f"{at}/v1/chat/completions", {"messages": chat} | more)[2] for chat in chats]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for choice, one in zip(answer["choices"], alone, strict=True):
        (expected,) = one["choices"]
        for name in ("message", "logprobs", "token_ids", "finish_reason"):
            assert choice[name] == expected[name]
        assert choice["prompt_token_ids"] == one["prompt_token_ids"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer["usage"][name] == sum(one["usage"][name] for one in alone)
    assert answer["object"] == "chat.completion"


@pytest.mark.parametrize(
    ("chats", "sentence"),
    [
        ([USER] * 129, "it must be of at most 128 entries"),
        ([USER, [{"role": "user", "content": "ab " * 9000}]], "the prompt has"),
    ],
)
def test_a_batch_that_is_too_large_is_refused(at, chats, sentence):
    assert sentence in refusal(f"{at}/v1/chat/completions/batch", {"messages": chats})
