"""Refusals: OpenAI's bodies, the right statuses, the name of the parameter; keys and their limits."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from tests.security.conftest import digest, write_keys
from tests.support.schemas import json_tokenizer
from tests.web.chats import Scripted
from tests.web.support import MODEL, call, edge_over, events, served

from paceline.errors import (
    ConfigError,
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    NotFoundError,
    PromptTooLongError,
    RequestCancelledError,
    ResourceExhaustedError,
    UnauthenticatedError,
)
from paceline.router.admission import TargetInfo
from paceline.security.haproxy_config import TLS_HEADER
from paceline.security.keys import KeyRing
from paceline.types import Cause, Chunk, RequestLimits, Round, Usage
from paceline.web import schema
from paceline.web.app import make_app
from paceline.web.errors import to_http

CHUNK = Chunk((1,), (0.0,), (False,), (("a", False),), Round(0, 0, Cause.START), Usage(7, 1, 0))

REFUSED = {
    "best_of": [2],
    "stop": [["a"] * 65, "x" * 2000],
    "logprob_token_ids": [[1] * 129],
    "allowed_token_ids": [[1] * 1025],
    "model": ["gpt-5"],
}
"""Parameter -> values that are refused by its name, beside those of ``golden/``."""

HABITS = {
    "user": "me",
    "metadata": {"a": "b"},
    "best_of": 1,
    "suffix": "",
    "service_tier": "auto",
    "use_beam_search": False,
    "skip_special_tokens": True,
    "length_penalty": 1.0,
    "response_format": {"type": "text"},
    "logit_bias": None,
    "logprobs": None,
    "stop": None,
    "stream_options": None,
    "top_k": -1,
}
"""Parameters that clients send although they change nothing."""


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values])
def test_what_is_not_served_is_refused_by_its_name(url, name, value):
    status, headers, body = call(f"{url}/v1/completions", {"prompt": "lazy", "max_tokens": 2} | {name: value})
    assert status == (404 if name == "model" else 400), body
    error = body["error"]
    assert error["message"].startswith(name)
    assert error["type"] == ("not_found_error" if name == "model" else "invalid_request_error")
    assert error["param"] == name
    assert headers["x-request-id"]


def test_habits_are_accepted(url):
    status, _, body = call(f"{url}/v1/completions", {"model": MODEL, "prompt": "lazy", "max_tokens": 2} | HABITS)
    assert status == 200, body


def test_a_prompt_beyond_the_context_is_refused_as_openai_does(client):
    with pytest.raises(openai.BadRequestError, match="the model's context") as refused:
        client.completions.create(model=MODEL, prompt="the" * 3000)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="max_tokens is 9999") as refused:
        client.completions.create(model=MODEL, prompt="the", max_tokens=9999)
    assert refused.value.type == "invalid_request_error"


NO_REQUESTS = {
    b"": "is no JSON: Expecting value at 0",
    b"{": "is no JSON: Expecting property name enclosed in double quotes at 1",
    b"[]": "is []: a JSON object is needed",
    b"3": "is 3: a JSON object is needed",
    b"\xff": "is no JSON: invalid start byte at 0, UTF-8 is needed",
    b"[" * 100_000: "is nested too deeply: at most 128 levels are allowed",
    b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}": "is nested too deeply: at most 128 levels are allowed",
    b'{"prompt": "\\ud800"}': "holds text that is not valid Unicode: surrogates not allowed at 0",
    b'{"\\ud800": 1, "prompt": "a"}': "holds text that is not valid Unicode: surrogates not allowed at 0",
    b'{"user": {"x": ["a\\udfff"]}}': "holds text that is not valid Unicode: surrogates not allowed at 1",
    b'{"prompt": "a", "temperature": NaN}': "is no JSON: it holds NaN",
    b'{"prompt": "a", "temperature": -Infinity}': "is no JSON: it holds -Infinity",
    b'{"prompt": "a", "temperature": 1e999}': "holds a number that is too large: at most 1.8e308 is allowed",
    b'{"prompt": "a", "seed": 1' + b"0" * 400 + b"}": "holds a number that is too large: at most 1.8e308 is allowed",
    b'{"prompt": "a", "seed": ' + b"1" * 5000 + b"}": "holds a number of too many digits: at most 4300 are allowed",
    b'{"prompt": "a", "prompt": "b"}': "holds the key 'prompt' twice: once is allowed",
}


@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses"])
@pytest.mark.parametrize("body", NO_REQUESTS)
def test_a_body_that_is_no_request_is_refused(url, path, body):
    status, _, answer = call(f"{url}/v1/{path}", body)
    assert (status, answer["error"]["message"]) == (400, f"the body {NO_REQUESTS[body]}")
    assert answer["error"]["type"] == "invalid_request_error"


NOT = {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}
FORMS = [
    ({"response_format": NOT}, "response_format: # has 'not'"),
    ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json: # has 'not'"),
    ({"guided_regex": "("}, "guided_regex cannot be compiled"),
]


@pytest.mark.parametrize(("form", "sentence"), FORMS)
def test_a_form_that_cannot_be_compiled_is_refused_by_its_name(url, form, sentence):
    status, _, answer = call(f"{url}/v1/completions", {"prompt": "a"} | form)
    assert (status, answer["error"]["message"][: len(sentence)]) == (400, sentence)
    assert answer["error"]["param"] in form


def test_paths_and_methods_that_are_not_served(url):
    status, _, body = call(f"{url}/v1/embeddings", {})
    assert status == 404
    assert "this path is not served" in body["error"]["message"]
    assert "/playground" not in body["error"]["message"]
    assert "embeddings" not in body["error"]["message"]
    assert "/v1/completions" in body["error"]["message"]
    for path, methods in {
        "v1/completions": ["POST"],
        "v1/responses/a": ["DELETE", "GET"],
        "ping": ["GET", "POST"],
    }.items():
        status, headers, body = call(f"{url}/{path}", method="PUT")
        assert (status, headers["allow"].split(", ")) == (405, methods)
        assert body["error"]["message"] == f"the method is PUT: {' or '.join(methods)} is allowed"
    assert call(f"{url}/health")[::2] == (200, b"serving\n")
    assert call(f"{url}/ping", {})[0] == 200
    assert call(f"{url}/version")[2]["version"]


def test_a_request_id_is_the_clients_or_our_own(url):
    asked = {"prompt": "lazy", "max_tokens": 1}
    _, headers, body = call(f"{url}/v1/completions", asked, {"X-Request-Id": "mine"})
    assert (headers["x-request-id"], body["id"]) == ("mine", "cmpl-mine")
    _, headers, body = call(f"{url}/v1/completions", asked)
    assert body["id"] == f"cmpl-{headers['x-request-id']}"
    status, _, body = call(f"{url}/v1/completions", asked, {"X-Request-Id": "x" * 257})
    assert (status, body["error"]["message"][:10]) == (400, "request_id")


STATUSES = [
    (InvalidRequestError("top_k is 3"), 400, "invalid_request_error"),
    (PromptTooLongError("x"), 400, "invalid_request_error"),
    (UnauthenticatedError("x"), 401, "authentication_error"),
    (ConfigError("x"), 403, "permission_error"),
    (NotFoundError("x"), 404, "not_found_error"),
    (ResourceExhaustedError("x", 1.5), 429, "rate_limit_error"),
    (RequestCancelledError("x"), 499, "request_cancelled"),
    (EngineError("x"), 503, "server_error"),
    (DeadlineExceededError("x"), 504, "timeout_error"),
    (RuntimeError("a secret"), 500, "server_error"),
]


class Failing:
    """A service that fails, before its first chunk or after it."""

    trouble = "no target is up"
    limits = RequestLimits()
    info = TargetInfo(json_tokenizer(), 100, ())

    def __init__(self, error, chunks=0):
        self.error, self.chunks = error, chunks

    async def run(self, request, owner="", on_usage=None):
        for _ in range(self.chunks):
            yield CHUNK
        raise self.error


@pytest.fixture(scope="module")
def failing():
    service = Failing(None)
    with served(edge_over(service)) as at:
        yield service, at


@pytest.mark.parametrize(("error", "status", "kind"), STATUSES)
def test_each_error_has_its_status(failing, error, status, kind):
    service, at = failing
    service.error, service.chunks = error, 0
    for stream in (False, True):  # also a stream that has not begun
        got, headers, body = call(f"{at}/v1/completions", {"prompt": "a", "stream": stream})
        assert (got, body["error"]["type"]) == (status, kind)
        assert "secret" not in json.dumps(body)
        if status == 429:
            assert (headers["retry-after"], headers["retry-after-ms"]) == ("2", "1500")
        if status == 401:
            assert headers["www-authenticate"] == "Bearer"
    assert to_http(error, {"top_k"})[1]["error"]["param"] == ("top_k" if "top_k" in str(error) else None)


@pytest.mark.parametrize(("error", "status", "kind"), STATUSES)
def test_a_stream_that_breaks_says_why_and_is_not_done(failing, error, status, kind):
    service, at = failing
    service.error, service.chunks = error, 2
    *chunks, last = events(f"{at}/v1/completions", {"prompt": "a", "stream": True})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "aa"
    assert last["error"]["type"] == kind


def test_a_service_without_a_target_is_not_healthy(failing):
    _, at = failing
    assert call(f"{at}/health")[0] == 503
    assert call(f"{at}/ping")[0] == 503


def test_keys_are_asked_for_and_their_limits_hold(pipeline, tmp_path):
    entries = [
        {"name": "alice", "sha256": digest("key-of-alice"), "max_requests": 2},
        {"name": "bob", "sha256": digest("key-of-bob"), "tokens_per_minute": 10},
    ]
    keys = KeyRing(write_keys(tmp_path / "keys.yaml", *entries))
    body = {"prompt": "lazy", "max_tokens": 12, "ignore_eos": True}
    with served(edge_over(pipeline, keys=keys)) as at:
        for headers in ({}, {"Authorization": "Bearer nobody"}, {"Authorization": "Basic key-of-alice"}):
            for path in ("completions", "models", "models/x"):
                status, got, answer = call(f"{at}/v1/{path}", body if path == "completions" else None, headers)
                assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
                assert got["www-authenticate"] == "Bearer"
        assert call(f"{at}/health")[0] == call(f"{at}/version")[0] == 200
        alice, bob = ({"Authorization": f"Bearer key-of-{name}"} for name in ("alice", "bob"))
        assert call(f"{at}/v1/completions", body | {"n": 2}, alice)[0] == 200
        status, _, answer = call(f"{at}/v1/completions", body | {"n": 3}, alice)  # each choice is a request
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")  # later it is as much
        assert call(f"{at}/v1/completions", body, bob)[0] == 200
        status, headers, answer = call(f"{at}/v1/completions", body, bob)
        assert status == 429
        assert "used its tokens" in answer["error"]["message"]
        assert int(headers["retry-after"]) >= 1


def test_a_connection_that_must_be_encrypted_and_is_not_is_refused(pipeline):
    with served(edge_over(pipeline, require_tls=True)) as at:
        assert call(f"{at}/v1/models")[0] == 403
        assert call(f"{at}/v1/models", headers={TLS_HEADER: "1"})[0] == 200  # as the proxy says


def test_a_body_that_is_too_long_is_refused(pipeline):
    with served(edge_over(pipeline, max_body_bytes=1000)) as at:
        assert call(f"{at}/v1/completions", {"prompt": "a" * 900, "max_tokens": 1})[0] == 200
        status, _, body = call(f"{at}/v1/completions", {"prompt": "a" * 1000})
        assert (status, body["error"]["message"]) == (
            413,
            "the body has more than 1000 bytes, which is the limit",
        )


def test_a_parameter_that_is_ignored_in_silence_is_noticed(monkeypatch, url):
    """The mutant: values of parameters that are not served are not looked at."""
    monkeypatch.setattr(schema, "check", lambda *_: None)
    with pytest.raises(AssertionError):
        test_what_is_not_served_is_refused_by_its_name(url, "best_of", 2)


def test_a_client_that_leaves_within_its_body_is_no_error_of_ours(monkeypatch):
    unexpected, sent = [], []
    monkeypatch.setattr("paceline.web.app.logs.unexpected", lambda _, error: unexpected.append(error))
    arriving = [
        {"type": "http.request", "body": b'{"prompt": "a', "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive():
        return arriving.pop(0)

    async def send(message):
        sent.append(message)

    path = "/v1/completions"
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    scope |= {"headers": [], "http_version": "1.1", "scheme": "http", "server": ("localhost", 1), "root_path": ""}
    asyncio.run(make_app(edge_over(Scripted()))(scope, receive, send))
    assert sent[0]["status"] == 499
    assert not unexpected
