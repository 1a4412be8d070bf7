"""Large answers: the bytes of small ones, made where no stream waits for them, and bounded."""

import threading
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.web.support import MODEL

from paceline.errors import InvalidRequestError
from paceline.web import sending
from paceline.web.logprobs import TokenColumns
from paceline.web.responses_schema import ResponseBody
from paceline.web.schema import read
from paceline.web.sending import dumps, pieces

leaves = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4)
)
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=4), inner))


@given(values, st.integers(0, 4), st.integers(1, 4))
def test_pieces_are_the_whole(value: Any, depth: int, slice_: int) -> None:
    before, sending.SLICE = sending.SLICE, slice_
    try:
        assert "".join(pieces(value, depth)) == dumps(value)
        assert "".join(pieces({"a": iter([value] * 3)})) == dumps({"a": [value] * 3})
        assert "".join(pieces([iter(())])) == "[[]]"
    finally:
        sending.SLICE = before


def test_no_piece_holds_more_than_a_slice_of_a_list() -> None:
    entry = {"token": "x", "logprob": -1.0, "bytes": [120]}
    content = [entry | {"top_logprobs": [entry] * 20} for _ in range(5000)]
    whole = {"choices": [{"index": i, "logprobs": {"content": content}} for i in range(3)]}
    longest = max(map(len, pieces(whole)))
    assert longest <= sending.SLICE * (len(dumps(content[0])) + 1) < len(dumps(whole)) / 50


def test_the_log_probabilities_of_prompts_are_made_beside_the_event_loop(client, monkeypatch) -> None:
    threads, plain = set(), TokenColumns.add

    def watched(self: TokenColumns, *args: Any) -> None:
        threads.add(threading.current_thread().name)
        plain(self, *args)

    monkeypatch.setattr(TokenColumns, "add", watched)
    asked: dict[str, Any] = {"model": MODEL, "prompt": "lazy dog", "max_tokens": 3, "logprobs": 3, "echo": True}
    whole = client.completions.create(**asked)
    streamed = [*client.completions.create(**asked, stream=True)]
    assert {name.rpartition("_")[0] for name in threads} == {"paceline-answer"}
    assert "".join(event.choices[0].text for event in streamed) == whole.choices[0].text


def test_too_many_log_probabilities_of_prompts_are_refused(client, monkeypatch) -> None:
    monkeypatch.setattr(sending, "MAX_PROMPT_LOGPROBS", 100)
    with pytest.raises(
        openai.BadRequestError, match="show 21 log probabilities for each token of their prompts"
    ) as error:
        client.completions.create(model=MODEL, prompt="lazy", n=3, extra_body={"prompt_logprobs": 20})
    assert "at most 100 are allowed" in str(error.value)
    client.completions.create(model=MODEL, prompt="lazy", max_tokens=2, extra_body={"prompt_logprobs": 1})


@pytest.mark.parametrize(
    "metadata", [{f"k{i}": "v" for i in range(17)}, {"k" * 65: "v"}, {"k": "v" * 513}, {"k": [["x"] * 200]}]
)
def test_metadata_is_bounded(metadata: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=r"metadata has \d+ pairs"):
        read(ResponseBody, {"input": "hi", "metadata": metadata})
    read(ResponseBody, {"input": "hi", "metadata": {f"k{i}": "v" * 512 for i in range(16)}})


@pytest.mark.parametrize("name", ["user", "safety_identifier", "prompt_cache_key"])
@pytest.mark.parametrize("value", ["u" * 513, {"id": "u" * 513}])
def test_what_each_response_repeats_is_bounded(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=rf"{name} has \d+ characters: at most 512 are allowed"):
        read(ResponseBody, {"input": "hi", name: value})
    read(ResponseBody, {"input": "hi", name: "u" * 512})
