"""What a request costs is bounded before work is done for it, on every path, and the event loop does none of it."""

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.letters import Letters
from tests.web.chats import Scripted, save_chat
from tests.web.support import call, edge_over, served

from paceline.checkpoint import tokenizer as tokenizing
from paceline.checkpoint.chat import load_chat
from paceline.checkpoint.tokenizer import Tokenizer, encode_bounded
from paceline.errors import InvalidRequestError, PromptTooLongError, ResourceExhaustedError
from paceline.router.preparation import LONG_BYTES, Preparation
from paceline.types import RequestLimits
from paceline.web import app, fields, json_text
from paceline.web import bodies as receiving
from paceline.web.anthropic_schema import CountBody
from paceline.web.app import make_app
from paceline.web.schema import CompletionBody, read

CHAT = {"messages": [{"role": "user", "content": "a" * 300}] * 20}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a" * 6000, "truncate_prompt_tokens": 100},
    "/v1/chat/completions": CHAT,
    "/v1/chat/completions/batch": {"messages": [CHAT["messages"]] * 3},
    "/invocations": CHAT,
    "/v1/responses": {"input": "a" * 6000},
    "/v1/responses/input_tokens": {"input": "a" * 6000},
    "/v1/messages": CHAT | {"max_tokens": 5},
    "/v1/messages/count_tokens": CHAT,
    "/tokenize": {"prompt": "a" * 6000},
    "/detokenize": {"tokens": [77] * 3000},
}
"""Path -> a body that is too large for the event loop."""


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_chat(str(save_chat(tmp_path_factory.mktemp("cost"))))


def test_every_path_that_takes_a_body_is_in_the_table(chat: Any) -> None:
    routes = make_app(edge_over(Scripted(), chat=chat)).routes
    posts = {route.path for route in routes if "POST" in (getattr(route, "methods", None) or ())}
    assert posts - {"/ping", "/v1/responses/{response_id}/cancel"} == BODIES.keys()


@pytest.mark.parametrize("path", BODIES)
def test_the_event_loop_neither_parses_nor_validates_nor_tokenizes(path, chat, monkeypatch) -> None:
    done: dict[str, set[str]] = {}

    def watch(owner: Any, name: str) -> None:
        whole = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            done.setdefault(name, set()).add(threading.current_thread().name)
            return whole(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    watch(receiving, "parse")
    watch(json_text, "check_writable")
    for owner, name in (
        (type(chat), "render"),
        (Tokenizer, "encode"),
        (Tokenizer, "encode_text"),
        (Tokenizer, "decode"),
    ):
        watch(owner, name)
    watch(app, "read")
    with served(edge_over(Scripted(), chat=chat)) as url:
        status, _, answer = call(f"{url}{path}", BODIES[path])
    assert status == 200, answer
    assert {"parse", "check_writable", "read"} <= done.keys()
    for name, threads in done.items():
        assert all(thread.startswith("paceline-prepare") for thread in threads), (name, threads)


@pytest.mark.parametrize("path", BODIES)
def test_bodies_that_cannot_be_served_are_refused_by_their_bytes_and_values(path: str, url: str) -> None:
    bounds = receiving.BodyBounds.of(Scripted().info, 16 << 20)
    with served(edge_over(Scripted(), max_body_bytes=1 << 20)) as at:
        for size in ((1 << 20) + 1, 20 << 20):  # the client has sent all of it before it reads the answer
            status, _, answer = call(f"{at}{path}", b" " * size)
            assert (status, "more than 1048576 bytes" in json.dumps(answer)) == (413, True)
        for many in (b'{"prompt": [' + b"7," * 300_000 + b"7]}", b'{"messages": [' + b"{}," * 20_000 + b"{}]}"):
            status, _, answer = call(f"{at}{path}", many)
            assert (status, f"at most {bounds.max_values}, of these 16384" in json.dumps(answer)) == (400, True)


def test_the_bounds_of_a_body_follow_from_the_context() -> None:
    info = Scripted().info
    bounds = receiving.BodyBounds.of(info, 1 << 30)
    assert bounds.max_bytes == (4 << 20) + 2 * info.max_model_len * info.tokenizer.max_token_bytes
    assert bounds.max_values == (1 << 18) + 4 * info.max_model_len
    assert receiving.BodyBounds.of(info, 1 << 20).max_bytes == 1 << 20


def _num_values(value: Any) -> int:
    """Commas and opening brackets of a value's JSON text, outside of its strings."""
    if isinstance(value, list | dict):
        inner = [*value.values()] if isinstance(value, dict) else value
        return 1 + max(0, len(inner) - 1) + sum(map(_num_values, inner))
    return 0


JSONS = st.recursive(
    st.none() | st.integers() | st.text(st.sampled_from(',[]{}"\\a\n漢'), max_size=12),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(st.sampled_from('",[\\b'), max_size=3), inner),
    max_leaves=40,
)


@settings(max_examples=300, deadline=None)
@given(JSONS, st.integers(0, 30), st.booleans())
@example("[", 0, True)
@example(["\\", ",,,,,,,,"], 2, True)
@example(['"', ",,,,,,,,", "\\\\"], 3, True)
def test_values_are_counted_outside_of_strings(value: Any, most: int, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    if _num_values(value) <= most:
        assert json_text.parse(text, most) == value
    else:
        with pytest.raises(ValueError, match="holds too many values"):
            json_text.parse(text, most)


def test_other_encodings_cannot_hide_values() -> None:
    for encoding in ("utf-16", "utf-32-le"):
        with pytest.raises(ValueError, match="is no JSON"):
            json_text.parse(json.dumps(["a"]).encode(encoding), 10)


class Counted(Letters):
    """Counts the characters that it is given."""

    num_chars = 0
    max_token_bytes = 64

    def encode(self, text: str) -> tuple[int, ...]:
        self.num_chars += len(text)
        return super().encode(text)

    def encode_text(self, text: str) -> list[int]:
        return list(self.encode(text))


@pytest.mark.parametrize("special", [True, False])
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(special: bool) -> None:
    counted: Any = Counted()
    with pytest.raises(PromptTooLongError, match="has 6401 bytes: at most 6400 can fit"):
        encode_bounded(counted, "a" * 6401, 100, special=special)
    assert counted.num_chars == 0
    with pytest.raises(PromptTooLongError, match="at least 65536 tokens"):  # long tokens might have saved it
        encode_bounded(counted, "a" * 600_000, 10_000, special=special)
    assert counted.num_chars == tokenizing.MAX_PIECE_CHARS
    assert len(encode_bounded(counted, "a" * 150, 100, special=special)) == 150


def test_a_prompt_that_is_cut_is_tokenized_in_part(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    service, counted = Scripted(), []
    encode = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text: counted.append(len(text)) or encode(self, text))
    with served(edge_over(service)) as at:
        asked = {"prompt": "ab" * 400_000, "truncate_prompt_tokens": 4}
        assert call(f"{at}/v1/completions", asked)[0] == 200
    assert service.requests[-1].prompt == tuple(map(ord, "abab"))
    assert sum(counted) < 1000


def test_too_many_bad_words_are_refused_before_they_are_tokenized() -> None:
    body = read(CompletionBody, {"prompt": "a", "bad_words": ["long" * 10_000]})
    with pytest.raises(InvalidRequestError, match="bad_words has"):
        body.with_word_ids(_Deaf(4), RequestLimits())
    body = read(CompletionBody, {"prompt": "a", "bad_words": ["a"] * 1025})
    with pytest.raises(InvalidRequestError, match="bad_words has 1025 sequences: at most 1024"):
        body.with_word_ids(_Deaf(4), RequestLimits())


class _Deaf:
    """A tokenizer that must not be asked."""

    def __init__(self, max_token_bytes: int) -> None:
        self.max_token_bytes = max_token_bytes


def test_only_as_many_unknown_fields_are_compared_as_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    close = fields.difflib.get_close_matches
    monkeypatch.setattr(fields.difflib, "get_close_matches", lambda *a, **k: compared.append(a[0]) or close(*a, **k))
    ignored = fields.Ignored()
    read(CompletionBody, {"prompt": "a"} | {f"promt{i}": 1 for i in range(5000)}, ignored)
    assert len(compared) <= fields.MAX_NAMED + 1
    assert ignored.header[fields.HEADER].endswith(", ...")


def test_many_turns_of_one_role_are_joined_once() -> None:
    body = read(CountBody, {"messages": [{"role": "user", "content": f"{i}"} for i in range(3000)]})
    (turn,) = body.chat()
    assert turn["content"].split() == [str(i) for i in range(3000)]


# -- the queue of what is costly --


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def test_a_full_queue_refuses_and_a_short_input_does_not_wait_for_long_ones() -> None:
    preparation, go, begun = Preparation(max_short=1, max_long=1), threading.Event(), threading.Event()

    def slow() -> bool:
        begun.set()
        return go.wait(60)

    long = [asyncio.create_task(preparation.run(LONG_BYTES + 1, slow)) for _ in range(2)]
    await _until(begun.is_set)
    with pytest.raises(ResourceExhaustedError, match="2 prompts are to be tokenized: at most 1 may wait") as full:
        await preparation.run(LONG_BYTES + 1, slow)
    assert full.value.retry_after_s > 0
    assert await preparation.run(LONG_BYTES, threading.current_thread) is not threading.current_thread()
    long[1].cancel()  # it leaves the queue
    await asyncio.wait([long[1]])
    third = asyncio.create_task(preparation.run(LONG_BYTES + 1, slow))
    await asyncio.sleep(0)
    assert not third.done()
    go.set()
    assert [await long[0], await third] == [True, True]
    assert not preparation.is_busy


def test_a_full_queue_is_status_429(chat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.web.app.Preparation", lambda: Preparation(max_short=-1, max_long=-1))
    with served(edge_over(Scripted(), chat=chat)) as url:
        status, headers, answer = call(f"{url}/v1/chat/completions", CHAT)
    assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
    assert int(headers["retry-after"]) >= 1


async def test_bodies_on_their_way_are_bounded_together() -> None:
    bodies = receiving.Bodies(receiving.BodyBounds(max_bytes=100, max_values=10))
    bodies.most_bytes = 150
    held = asyncio.Event()

    class Arriving:
        headers: ClassVar[dict[str, str]] = {}

        def __init__(self, waits: bool) -> None:
            self._waits = waits

        async def stream(self) -> Any:
            yield b"a" * 90
            if self._waits:
                await held.wait()

    first = asyncio.create_task(bodies.receive(Arriving(waits=True)))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhaustedError, match="bodies of more than 150 bytes are on their way"):
        await bodies.receive(Arriving(waits=False))  # type: ignore[arg-type]
    held.set()
    assert len(await first) == 90
    assert len(await bodies.receive(Arriving(waits=False))) == 90  # type: ignore[arg-type]


# -- pages of other origins --

UNASKED = [
    ({"origin": "https://evil.example", "content-type": "text/plain"}, 415),
    ({"origin": "https://evil.example", "content-type": "application/x-www-form-urlencoded"}, 415),
    ({"origin": "null", "content-type": "text/plain;charset=UTF-8"}, 415),
    ({"sec-fetch-site": "cross-site", "content-type": "text/plain"}, 415),
    ({"origin": "http://localhost:3000", "content-type": "text/plain"}, 200),
    ({"content-type": "text/plain"}, 200),
    ({"origin": "https://evil.example", "content-type": "application/json; charset=utf-8"}, 200),
]


@pytest.mark.parametrize(("headers", "wanted"), UNASKED)
def test_what_pages_of_other_origins_send_unasked_is_refused(headers: dict[str, str], wanted: int) -> None:
    import urllib.error
    import urllib.request

    service = Scripted()
    with served(edge_over(service)) as url:
        asked = urllib.request.Request(f"{url}/v1/completions", b'{"prompt": "a"}', headers)
        try:
            status = urllib.request.urlopen(asked, timeout=60).status
        except urllib.error.HTTPError as error:
            status = error.code
    assert (status, len(service.requests)) == (wanted, int(wanted == 200))
