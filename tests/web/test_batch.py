"""Batch files: what is refused, that answers are those of single requests, and that a batch goes on."""

from __future__ import annotations

import asyncio
import json
import resource

import httpx2
import pytest
from tests.support.limits import limited
from tests.web.support import MODEL, call

from paceline.cli.main import main
from paceline.errors import ConfigError, EngineError, InvalidRequestError
from paceline.web.batch import Batch, read_requests


def line(custom_id="a", url="/v1/completions", **body):
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 4} | body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write(path, *lines):
    path.write_text("".join((text if isinstance(text, str) else json.dumps(text)) + "\n" for text in lines))
    return path


def answers(path):
    return [json.loads(text) for text in path.read_text().splitlines()]


def run(batch, url, transport=None, **options):
    async def work():
        async with httpx2.AsyncClient(base_url=url, transport=transport, timeout=60) as client:
            await batch.run(client, 4, **options)

    asyncio.run(work())


REFUSED = [
    ("{", "it is no JSON"),
    ("[]", "it is no JSON object"),
    ({"custom_id": "a"}, "method is null: a string is needed"),
    (line() | {"custom_id": 1}, "custom_id is 1: a string is needed"),
    (line() | {"body": "x"}, 'body is "x": an object is needed'),
    (line() | {"metod": "POST"}, "'metod' is no key of a request"),
    (line() | {"method": "GET"}, "method is 'GET': only POST is allowed"),
    (line(url="/v1/embeddings"), "url is '/v1/embeddings': it must be one of /v1/completions"),
    (line(stream=True), "body.stream is true"),
    (line("first"), "custom_id is 'first', as in line 1"),
]


@pytest.mark.parametrize(("bad", "sentence"), REFUSED)
def test_a_line_that_is_no_request_is_refused_with_its_place(tmp_path, bad, sentence):
    path = write(tmp_path / "in.jsonl", line("first"), "", bad)
    with pytest.raises(InvalidRequestError) as refused:
        read_requests(path)
    assert str(refused.value).startswith("in.jsonl:3: ")
    assert sentence in str(refused.value)


def test_files_that_cannot_be_used_are_refused_before_anything_is_asked(tmp_path, capsys):
    full = write(tmp_path / "in.jsonl", line())
    with pytest.raises(InvalidRequestError, match="holds no request"):
        read_requests(write(tmp_path / "empty.jsonl", "", ""))
    (tmp_path / "there").write_text("")
    for flags, sentence in [
        (("-i", tmp_path / "none", "-o", tmp_path / "o"), "it cannot be read"),
        (("-i", full, "-o", tmp_path / "there"), "which exists"),
        (("-i", full, "-o", tmp_path / "none" / "o"), "it cannot be written"),
        (("-i", full, "-o", tmp_path / "o", "--concurrency", 0), "--concurrency is 0"),
        (("-i", full, "-o", tmp_path / "o", "--api-key", "x"), "--api-key is given without --address"),
        (("-i", full, "-o", tmp_path / "o", "--address", "host"), "--address is 'host'"),
        (("-i", full, "-o", tmp_path / "o", "--address", "http://h", "--target", "x"), "--target is given with"),
    ]:
        assert main(["batch", *map(str, flags)]) == 2
        assert sentence in capsys.readouterr().err


def test_answers_are_those_of_single_requests_in_the_order_of_the_input(tmp_path, url, client):
    lines = [
        line(f"r{i}", prompt="ab" * (i + 1), seed=i, temperature=i % 2, max_tokens=3 + 9 * (i == 0)) for i in range(7)
    ]
    lines.append(line("bad", max_tokens=-1))
    lines.append(line("other", model="none"))
    path, output = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    batch, seen = Batch(read_requests(path), output), []
    run(batch, url, progress=lambda done, total: seen.append((done, total)))
    assert batch.num_refused == 2
    batch.finish()
    assert seen == [(done, 9) for done in range(10)]
    got = answers(output)
    assert [one["custom_id"] for one in got] == [one["custom_id"] for one in lines]
    assert {one["error"] for one in got} == {None}
    for asked, one in zip(lines[:7], got, strict=False):
        status, _, alone = call(f"{url}/v1/completions", asked["body"])
        assert one["response"]["status_code"] == status == 200
        for choice in (*one["response"]["body"]["choices"], *alone["choices"]):
            del choice["speculation"]  # how its tokens came about
        assert one["response"]["body"]["choices"] == alone["choices"]
    assert [one["response"]["status_code"] for one in got[7:]] == [400, 404]
    assert "max_tokens" in got[7]["response"]["body"]["error"]["message"]
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith("out")] == ["out.jsonl"]


class Flaky(httpx2.AsyncBaseTransport):
    """Answers with these statuses in turn, the last for ever; 0: the connection fails."""

    def __init__(self, *statuses):
        self.statuses, self.asked = list(statuses), []

    async def handle_async_request(self, request):
        self.asked.append(json.loads(request.content)["prompt"])
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        if not status:
            raise httpx2.ConnectError("refused")
        return httpx2.Response(status, json={"status": status}, headers={"x-request-id": "id"})


def test_a_batch_goes_on_where_it_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.web.batch.FIRST_PAUSE_S", 0.001)
    path = write(tmp_path / "in.jsonl", *(line(f"r{i}", prompt=f"p{i}") for i in range(6)))
    requests, output = read_requests(path), tmp_path / "out.jsonl"
    with pytest.raises(EngineError, match=r"has no answer after 0\.01 s: http://x cannot be reached: refused"):
        run(Batch(requests, output), "http://x", Flaky(200, 200, 200, 0), patience_s=0.01)
    partial = tmp_path / "out.jsonl.partial"
    kept = partial.read_bytes()
    assert kept.count(b"\n") == 3
    partial.write_bytes(kept + kept[:40])  # as a machine that went down has left it
    again = Batch(requests, output)
    assert again.num_done == 3
    service = Flaky(503, 429, 0, 500, 200)
    run(again, "http://x", service)
    again.finish()
    assert {*service.asked} == {"p3", "p4", "p5"}, "what is answered is not asked again"
    got = answers(output)
    assert [one["custom_id"] for one in got] == [f"r{i}" for i in range(6)]
    assert sorted(one["response"]["status_code"] for one in got) == [200] * 5 + [500]


def test_a_full_disk_leaves_what_is_answered(tmp_path):
    """Writes fail beyond some bytes of a file, as on a full disk; with room again the same command goes on."""
    path = write(tmp_path / "in.jsonl", *(line(f"r{i}", prompt=f"p{i}") for i in range(6)))
    requests, output = read_requests(path), tmp_path / "out.jsonl"
    with (
        limited(resource.RLIMIT_FSIZE, 700),
        pytest.raises(ConfigError, match=r"--output is .*: it cannot be written \(File too large\)"),
    ):
        run(Batch(requests, output), "http://x", Flaky(200))
    again = Batch(requests, output)
    assert 0 < again.num_done < 6
    missing, service = 6 - again.num_done, Flaky(200)
    run(again, "http://x", service)
    assert len(service.asked) == missing
    with limited(resource.RLIMIT_FSIZE, 700), pytest.raises(ConfigError, match="it cannot be written"):
        again.finish()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl.partial"]
    again.finish()
    assert [one["custom_id"] for one in answers(output)] == [f"r{i}" for i in range(6)]


def test_answers_to_other_requests_are_not_taken_up(tmp_path):
    output = tmp_path / "out.jsonl"
    run(Batch(read_requests(write(tmp_path / "a", line("r1"))), output), "http://x", Flaky(200))
    for other in (line("r1", prompt="another"), line("r2")):
        with pytest.raises(ConfigError, match=r"out\.jsonl\.partial holds an answer to 'r1'"):
            Batch(read_requests(write(tmp_path / "b", other)), output)


@pytest.mark.slow
def test_the_command_answers_with_engines_of_this_machine(tmp_path, capsys):
    chat = tmp_path / "chat.jinja"
    chat.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    lines = [
        line("text", prompt="def read_file(path):", model="paceline/embedded-target"),
        {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions",
         "body": {"messages": [{"role": "user", "content": "import os"}], "max_tokens": 5}},
    ]  # fmt: skip
    path, output = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    flags = ("-i", path, "-o", output, "--no-compile", "--chat-template", chat)
    assert main(["batch", *map(str, flags)]) == 0
    assert "2 requests answered in " in capsys.readouterr().err
    text, chat = (one["response"]["body"] for one in answers(output))
    assert text["usage"]["completion_tokens"] == 4
    assert chat["choices"][0]["message"]["content"]
