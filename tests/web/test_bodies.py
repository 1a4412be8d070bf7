"""No body gives status 500, and every refusal is a well-formed error: each odd value in each place, and by chance.

``python -m tests.web.test_bodies SECONDS [SEED]`` tries bodies by chance for as long, and prints those that fail.
"""

import http.client
import json
import logging
import sys
import tempfile
import time
import urllib.parse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.web.bodies import BODIES, DEEPER, Bodies, places, put
from tests.web.chats import RESPONSE, Scripted
from tests.web.support import edge_over, served
from tests.web.test_endpoints import Characters
from tests.web.test_fields import Tokenizer as WithTemplate

from paceline.checkpoint.answer_formats import of_response
from paceline.checkpoint.chat import ChatTemplate
from paceline.checkpoint.tokenizer import Tokenizer
from paceline.router.admission import TargetInfo
from paceline.web import json_text

ROUNDS, SEED = 800, 20261127


class Sender:
    """A connection that is kept."""

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        self._connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=60)

    def close(self) -> None:
        self._connection.close()

    def send(self, path: str, data: bytes, content_type: str = "application/json") -> int:
        """Status of one request. Raises AssertionError unless it may have this answer."""
        self._connection.request("POST", path, data, {"content-type": content_type})
        answer = self._connection.getresponse()
        text = answer.read()
        shown = f"{path} {data[:600]!r}"
        assert answer.status in (200, 400, 404, 413), f"{answer.status}: {shown}"
        if answer.status == 200:
            assert b'"server_error"' not in text, f"{text[-300:]!r}: {shown}"
            assert b'"api_error"' not in text, f"{text[-300:]!r}: {shown}"
            return 200
        error = json.loads(text)["error"]
        assert error["message"], shown
        assert error["type"] in ("invalid_request_error", "not_found_error", "request_too_large"), shown
        return answer.status


def each_place() -> Iterator[tuple[str, Any]]:
    """Each odd value once in each place of each path's body."""
    for path, (_, good) in BODIES.items():
        for place in places(good):
            for odd in DEEPER:
                yield path, put(good, place, odd)


@pytest.fixture(scope="module")
def sender():
    """Without engines: what they refuse, the command tries."""
    service = Scripted()
    service.says = "yes<2>"
    service.info = TargetInfo(Tokenizer("characters", Characters()), 4000, (7,))
    with served(edge_over(service, chat=ChatTemplate(WithTemplate(), None, of_response(RESPONSE)))) as at:
        made = Sender(at)
        yield made
        made.close()


def surrogates() -> list[tuple[str, bytes]]:
    """A lone surrogate in place of every text, and of every key."""
    found = []
    for path, (_, good) in BODIES.items():
        for place in places(good):
            inner = good
            for key in place:
                inner = inner[key]
            if isinstance(inner, str):
                found.append((path, put(good, place, f"{inner}\ud83d")))
            elif isinstance(inner, dict):
                found.append((path, put(good, place, {**inner, "\ude00": 1})))
    return [(path, json.dumps(value).encode()) for path, value in found]


def test_a_lone_surrogate_is_refused_in_every_place(sender):
    tried = surrogates()
    assert len(tried) > 200
    for path, data in tried:
        assert sender.send(path, data) == 400, (path, data)


def test_a_lone_surrogate_within_json_within_text_is_refused(sender):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert sender.send("/v1/chat/completions", json.dumps({"messages": chat}).encode()) == 400
    call["function"]["arguments"] = "[" * 100_000
    assert sender.send("/v1/chat/completions", json.dumps({"messages": chat}).encode()) == 400


def test_no_body_gives_an_internal_error(sender):
    bodies, statuses = Bodies(SEED), Counter[int]()
    for _ in range(ROUNDS):
        statuses[sender.send(*bodies.body())] += 1
    assert statuses[200] > ROUNDS / 20
    assert statuses[400] > ROUNDS / 20


@pytest.mark.parametrize("kind", ["", "text/plain", "multipart/form-data; boundary=x", "application/xml", "\xe9"])
def test_the_type_of_a_body_does_not_matter(sender, kind):
    assert sender.send("/tokenize", b'{"prompt": "a"}', kind) == 200
    assert sender.send("/tokenize", b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\na', kind) == 400


def test_a_check_that_is_left_out_is_noticed(monkeypatch, sender):
    """The mutant: texts are not looked at where bodies are parsed."""
    monkeypatch.setattr(json_text, "check_text", lambda _: None)
    with pytest.raises(AssertionError):
        test_a_lone_surrogate_is_refused_in_every_place(sender)


def main() -> None:
    """The command."""
    from tests.web.chats import save_speaking_pair
    from tests.web.conftest import started

    from paceline.checkpoint.chat import load_chat

    seconds, seed = float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else int(time.time())
    logging.disable(logging.WARNING)
    print(f"seed {seed}", flush=True)
    bodies, statuses, failed = Bodies(seed), Counter[int](), 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = save_speaking_pair(Path(temporary))
        with started(folder) as pipeline, served(edge_over(pipeline, chat=load_chat(str(folder / "target")))) as at:
            sender, end = Sender(at), time.monotonic() + seconds
            all_places = list(each_place())
            bodies.rng.shuffle(all_places)
            tried = iter(all_places)
            while time.monotonic() < end:
                path, value = next(tried, (None, None))
                case = bodies.body() if path is None else (path, json.dumps(value).encode())
                try:
                    statuses[sender.send(*case)] += 1
                except (AssertionError, OSError, http.client.HTTPException) as error:
                    failed += 1
                    print("FAILED", str(error)[:700], flush=True)
                    sender = Sender(at)
    print(dict(statuses), f"{failed} failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
