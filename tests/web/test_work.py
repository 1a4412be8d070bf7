"""The work that a request makes grows with its length at most, whatever its shape, and ends where it is refused.

Work is counted as calls of functions in all threads of the service, and as characters that are tokenized: neither
depends on the machine.
"""

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.web.chats import Scripted, save_chat
from tests.web.support import edge_over

from paceline.checkpoint.chat import load_chat
from paceline.web.app import make_app
from paceline.web.json_text import MAX_CONTAINERS

CALLS_OF_ANY, CALLS_PER_VALUE = 3_000, 250
"""Calls that each request may make, and further ones for each value of its body."""


@contextmanager
def counted() -> Iterator[list[int]]:
    """Counts the calls of this thread and of those that begin meanwhile."""
    found = [0]

    def count(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            found[0] += 1

    threading.setprofile(count)
    sys.setprofile(count)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return edge_over(Scripted(), chat=load_chat(str(save_chat(tmp_path_factory.mktemp("work")))))


def ask(edge: Any, path: str, body: bytes) -> tuple[int, int]:
    """The status of a request, and its work."""
    statuses: list[int] = []

    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> dict[str, Any]:
        for message in messages:
            return message
        return await asyncio.Event().wait()  # type: ignore[return-value]  # the client stays

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    headers = [(b"content-type", b"application/json"), (b"host", b"localhost"), (b"content-length", b"%d" % len(body))]
    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "path": path, "raw_path": path.encode(),
        "query_string": b"", "headers": headers, "scheme": "http", "client": ("127.0.0.1", 1),
        "server": ("localhost", 80), "asgi": {"version": "3.0"}, "root_path": "", "state": {},
    }  # fmt: skip
    app = make_app(edge)
    with counted() as calls:  # threads of the application begin within
        asyncio.run(asyncio.wait_for(app(scope, receive, send), 60))
    return statuses[0], calls[0]


SHAPES: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "messages": ("/v1/chat/completions", lambda n: {"messages": [{"role": "user", "content": "a"}] * n}),
    "messages of the other API": ("/v1/messages", lambda n: {"messages": [{"role": "user", "content": "a"}] * n}),
    "parts": (
        "/v1/chat/completions",
        lambda n: {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * n}]},
    ),
    "calls": (
        "/v1/chat/completions",
        lambda n: {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}, "id": "a"}] * n},
            ]
        },
    ),
    "tools": (
        "/v1/chat/completions",
        lambda n: {
            "messages": [{"role": "user", "content": "a"}],
            "tools": [{"type": "function", "function": {"name": f"f{i}", "parameters": {}}} for i in range(n)],
        },
    ),
    "prompts": ("/v1/completions", lambda n: {"prompt": ["a"] * n}),
    "prompts of ids": ("/v1/completions", lambda n: {"prompt": [[65]] * n}),
    "ids": ("/v1/completions", lambda n: {"prompt": [65] * n}),
    "unknown fields": ("/v1/completions", lambda n: {"prompt": "a"} | {f"x{i}": i for i in range(n)}),
    "stop strings": ("/v1/completions", lambda n: {"prompt": "a", "stop": [f"s{i}" for i in range(n)]}),
    "bad words": ("/v1/completions", lambda n: {"prompt": "a", "bad_words": [f"w{i}" for i in range(n)]}),
    "biases": ("/v1/completions", lambda n: {"prompt": "a", "logit_bias": {str(i): 1 for i in range(n)}}),
    "choices": (
        "/v1/completions",
        lambda n: {"prompt": "a", "structured_outputs": {"choice": [f"c{i}" for i in range(n)]}},
    ),
    "properties": (
        "/v1/completions",
        lambda n: {"prompt": "a", "structured_outputs": {"json": {"properties": {f"p{i}": {} for i in range(n)}}}},
    ),
    "any of any": (
        "/v1/chat/completions",
        lambda n: {
            "messages": [{"role": "user", "content": "a"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"anyOf": [{}] * n}}},
        },
    ),
    "items": ("/v1/responses", lambda n: {"input": [{"role": "user", "content": "a"}] * n}),
    "outputs of functions": (
        "/v1/responses",
        lambda n: {"input": [{"type": "function_call_output", "call_id": f"c{i}", "output": "a"} for i in range(n)]},
    ),
    "tokens": ("/detokenize", lambda n: {"tokens": [65] * n}),
    "letters": ("/v1/completions", lambda n: {"prompt": "a" * (64 * n)}),
    "letters to count": ("/tokenize", lambda n: {"prompt": "a" * (64 * n)}),
}
"""What a body may hold many of: the path, and the body with so many."""


def values_of(body: dict[str, Any]) -> int:
    """Values of a body, and pieces of its text of 64 characters."""
    text = json.dumps(body)
    return sum(map(text.count, ",[{")) + len(text) // 64


@pytest.mark.parametrize("shape", SHAPES)
def test_work_grows_with_the_values_of_a_body_and_no_faster(edge: Any, shape: str) -> None:
    path, make = SHAPES[shape]
    ask(edge, path, json.dumps(make(1)).encode())  # what is loaded and compiled once
    for count in (100, 2_000):
        body = make(count)
        status, work = ask(edge, path, json.dumps(body).encode())
        assert status < 500
        assert work <= CALLS_OF_ANY + CALLS_PER_VALUE * values_of(body), (count, status, work)


@pytest.mark.parametrize("shape", ["messages", "parts", "tools", "prompts of ids", "items"])
def test_a_body_of_too_many_lists_and_objects_is_refused_before_any_is_looked_at(edge: Any, shape: str) -> None:
    path, make = SHAPES[shape]
    status, work = ask(edge, path, json.dumps(make(MAX_CONTAINERS + 1)).encode())
    assert (status, work < CALLS_OF_ANY) == (400, True), work


@settings(max_examples=12, deadline=None, suppress_health_check=[*HealthCheck])
@given(st.lists(st.tuples(st.sampled_from([*SHAPES]), st.integers(0, 600)), min_size=1, max_size=3))
def test_shapes_in_one_body_cost_no_more_than_one_by_one(edge: Any, parts: list[tuple[str, int]]) -> None:
    path = SHAPES[parts[0][0]][0]
    body: dict[str, Any] = {}
    for shape, count in parts:
        body |= SHAPES[shape][1](count)
    status, work = ask(edge, path, json.dumps(body).encode())
    assert status < 500
    assert work <= CALLS_OF_ANY + CALLS_PER_VALUE * values_of(body), (status, work)
