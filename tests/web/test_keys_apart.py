"""What callers of different API keys find out about each other: nothing, unless the service shares its cache.

One test for each row of SECURITY.md's table of what requests share. Mutants: a salt without the key's name, or one
that runs name and salt together; ids without the key; one store of responses for all; a page of metrics that hides
nothing, or that every key sees whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import urllib.request

import pytest
from tests.security.conftest import digest, write_keys
from tests.support.models import prompt
from tests.web.support import call, served

from paceline import types
from paceline.cli.local_service import local_edge
from paceline.config import ServerConfig
from paceline.messages import OpenSession
from paceline.metrics.declaration import CATALOGUE
from paceline.runtime.workers import ThreadWorker
from paceline.security.access import METRICS_OF_KEYS as OF_KEYS
from paceline.security.access import Access
from paceline.security.keys import KeyRing
from paceline.types import Request
from paceline.web.response_store import ResponseStore

KEYS = {"a": "key-of-a", "ab": "key-of-ab", "root": "key-of-root"}
LONG = "abcdefgh " * 12


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    entries = [{"name": name, "sha256": digest(key), "metrics": name == "root"} for name, key in KEYS.items()]
    return KeyRing(write_keys(tmp_path_factory.mktemp("keys") / "keys.yaml", *entries))


@contextlib.contextmanager
def service(pipeline, keys, **server):
    with served(local_edge(pipeline, ServerConfig(**server), "tiny", keys)) as url:
        yield url


@pytest.fixture
def url(speaking, keys):
    with service(speaking[0], keys) as at:
        yield at


def of(name):
    return {} if name is None else {"authorization": f"Bearer {KEYS[name]}"}


COMMON = {"max_tokens": 2, "temperature": 0}
BODIES = {
    "/v1/completions": lambda text: {"prompt": text, **COMMON},
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}], **COMMON},
    "/v1/chat/completions/batch": lambda text: {"messages": [[{"role": "user", "content": text}]], **COMMON},
    "/v1/responses": lambda text: {"input": text, "max_output_tokens": 16, "temperature": 0},
    "/v1/messages": lambda text: {"messages": [{"role": "user", "content": text}], **COMMON},
}


def cached(url, name, body, path="/v1/completions"):
    """Tokens of the prompt that were found in the cache."""
    status, _, answer = call(url + path, body, of(name))
    assert status == 200, answer
    usage = answer["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    return usage["cache_read_input_tokens"] if details is None else details["cached_tokens"]


def a_key_has_a_cache_of_its_own(url, path, body):
    assert cached(url, "a", body, path) == 0
    assert (found := cached(url, "a", body, path)) > 0
    assert cached(url, "ab", body, path) == 0
    assert cached(url, "ab", body, path) == cached(url, "a", body, path) == found


@pytest.mark.parametrize("path", BODIES)
def test_the_prefix_cache_is_that_of_a_key(url, path):
    a_key_has_a_cache_of_its_own(url, path, BODIES[path](f"{path} {LONG}"))


def salts_of_a_key_are_apart(url):
    """Also those that would be the same text behind the names of two keys."""
    body = BODIES["/v1/completions"]("salted " + LONG)
    found = [(name, salt, cached(url, name, body | {"cache_salt": salt}) > 0) for name, salt in ORDER]
    assert found == [(name, salt, (name, salt) in ORDER[:i]) for i, (name, salt) in enumerate(ORDER)]


ORDER = [("a", "bc"), ("ab", "c"), ("a", ""), ("ab", ""), ("a", "b"), ("a", "bc"), ("ab", "c"), ("ab", "")]


def test_a_salt_of_the_request_is_one_within_its_key(url):
    salts_of_a_key_are_apart(url)


@pytest.mark.parametrize(("shares", "names"), [(True, ("a", "ab")), (False, (None, None))])
def test_the_cache_is_shared_where_the_service_says_so_and_without_keys(speaking, keys, shares, names):
    keys = None if names[0] is None else keys
    with service(speaking[0], keys, share_cache_between_keys=shares) as url:
        body = BODIES["/v1/completions"](f"shared {names} {LONG}")
        assert [cached(url, name, body) > 0 for name in names] == [False, True]
        assert cached(url, names[0], body | {"cache_salt": "own"}) == 0


def test_targets_and_drafts_are_told_one_salt_for_each_key(url, monkeypatch):
    """So whatever they share between sessions, pages and texts alike, is apart: engines know sessions by their salt."""
    told: dict[ThreadWorker, list[str]] = {}
    send = ThreadWorker.send

    def tapped(self, messages):
        told.setdefault(self, []).extend(one.cache_salt for one in messages if isinstance(one, OpenSession))
        send(self, messages)

    monkeypatch.setattr(ThreadWorker, "send", tapped)
    for name in ("a", "a", "ab"):
        cached(url, name, BODIES["/v1/completions"]("a draft"))
    target, draft = told.values()
    assert target == draft
    assert target[0] == target[1] != target[2]
    assert "" not in target
    assert not {"a", "ab"} & set(target)


def test_the_tokens_are_those_of_a_service_without_keys(speaking, keys, url):
    body = BODIES["/v1/completions"]("the same " + LONG) | {"max_tokens": 24, "temperature": 0.9, "seed": 3}
    with service(speaking[0], None) as anonymous:
        texts = [
            call(at + "/v1/completions", body, of(name))[2]["choices"]
            for at, name in ((anonymous, None), (url, "a"), (url, "ab"), (url, "a"))
        ]
    assert all(text[0]["text"] == texts[0][0]["text"] for text in texts)


def an_id_is_one_of_its_key(url):
    """While a request of one key runs, another key uses the same id; the first key itself may not."""
    body = {"prompt": prompt(3, 8), "max_tokens": 400, "ignore_eos": True, "temperature": 0, "stream": True}
    headers = {"x-request-id": "one", "content-type": "application/json"}
    running = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers | of("a"))
    with urllib.request.urlopen(running, timeout=60) as reply:
        assert reply.readline().startswith(b"data: ")
        short = body | {"max_tokens": 2, "stream": False}
        status, _, refused = call(f"{url}/v1/completions", short, headers | of("a"))
        assert "is in progress" in refused["error"]["message"], status
        status, _, answer = call(f"{url}/v1/completions", short, headers | of("ab"))
        assert (status, answer.get("id")) == (200, "cmpl-one"), answer


def test_a_request_id_is_one_of_its_key(url):
    an_id_is_one_of_its_key(url)


def a_response_is_kept_for_its_key(url):
    for name, text in (("a", "first"), ("ab", "second")):
        status, _, answer = call(
            f"{url}/v1/responses", BODIES["/v1/responses"](text), of(name) | {"x-request-id": "kept"}
        )
        assert (status, answer["id"]) == (200, "resp_kept")
    status, _, _ = call(f"{url}/v1/responses/resp_kept", headers=of("ab"), method="DELETE")
    assert status == 200
    for name, expected in (("a", 200), ("ab", 404), ("root", 404)):
        assert call(f"{url}/v1/responses/resp_kept", headers=of(name))[0] == expected
        more = BODIES["/v1/responses"]("more") | {"previous_response_id": "resp_kept"}
        status, _, answer = call(f"{url}/v1/responses", more, of(name))
        assert (status == 200) == (expected == 200), answer


def test_a_response_is_kept_for_its_key_alone(url):
    a_response_is_kept_for_its_key(url)


def counted(url):
    """The completion tokens of key ab."""
    page = call(f"{url}/metrics", headers=of("root"))[2].decode()
    found = re.search(rf'^{OF_KEYS}tokens_total{{key="ab",kind="completion"}} (.*)$', page, re.MULTILINE)
    return 0.0 if found is None else float(found[1])


def only_who_may_see_keys_sees_them(url):
    before = counted(url)
    for name in ("a", "ab"):
        assert call(f"{url}/v1/completions", BODIES["/v1/completions"]("count me"), of(name))[0] == 200
    pages = {name: call(f"{url}/metrics", headers=of(name))[2].decode() for name in (None, "a", "root")}
    wrong = call(f"{url}/metrics", headers={"authorization": "Bearer wrong"})[2].decode()
    assert counted(url) == before + 2
    for page in (pages[None], pages["a"], wrong):
        assert OF_KEYS not in page
        assert '"ab"' not in page
        assert "vllm:generation_tokens_total" in page


def test_names_and_amounts_of_keys_are_for_who_may_see_them(url):
    only_who_may_see_keys_sees_them(url)


def test_metrics_of_keys_are_known_by_their_names():
    labelled = {metric.name for metric in CATALOGUE.values() if "key" in metric.labels}
    assert labelled == {name for name in CATALOGUE if name.startswith(OF_KEYS)} != set()


def _of_all(self, owner, **_):
    return dataclasses.replace(self, owner=owner)


def _one_store(monkeypatch):
    for name in ("put", "get", "delete"):
        plain = getattr(ResponseStore, name)
        monkeypatch.setattr(ResponseStore, name, lambda self, owner, *rest, plain=plain: plain(self, "", *rest))


MUTANTS = {
    "no salt of the key": (
        lambda patch: patch.setattr(Request, "of", _of_all),
        lambda url: a_key_has_a_cache_of_its_own(url, "/v1/completions", BODIES["/v1/completions"]("mutant " + LONG)),
    ),
    "name and salt run together": (
        lambda patch: patch.setattr(types, "salt_of", lambda owner, salt: owner + salt),
        salts_of_a_key_are_apart,
    ),
    "ids of all keys together": (
        lambda patch: patch.setattr(types, "request_key", lambda request_id, owner: request_id),
        an_id_is_one_of_its_key,
    ),
    "one store": (_one_store, a_response_is_kept_for_its_key),
    "a page with all": (
        lambda patch: patch.setattr(Access, "visible", lambda self, page, metadata: page),
        only_who_may_see_keys_sees_them,
    ),
    "every key sees all": (
        lambda patch: patch.setattr(Access, "may_see_keys", lambda self, metadata: bool(self.identify(metadata))),
        only_who_may_see_keys_sees_them,
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mistakes_are_noticed(speaking, keys, monkeypatch, mutant):
    break_it, holds = MUTANTS[mutant]
    break_it(monkeypatch)
    with service(speaking[0], keys) as url, pytest.raises(AssertionError):
        holds(url)
