"""`paceline bench endpoint` against a real HTTP server, its faults included."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from tests.bench.fake_openai import FakeOpenAI

from paceline.cli.main import main
from paceline.cluster.ports import free_ports
from paceline.errors import ConfigError, EngineError
from paceline.types import SamplingParams, SpeculationParams
from paceline_bench.endpoint import Endpoint, EndpointSettings, spec_decode_counters
from paceline_bench.jobs import Job, Reply
from paceline_bench.latency import times
from paceline_bench.prompts import Prompt
from paceline_bench.records import RequestRecord

JOB = Job(Prompt("p", (1, 2), "def f():"), SamplingParams(max_tokens=6, temperature=0.5, seed=3))


def ask(settings: EndpointSettings) -> tuple[Reply, dict[str, float]]:
    async def run() -> tuple[Reply, dict[str, float]]:
        async with Endpoint(settings) as endpoint:
            return await endpoint.send(JOB, SpeculationParams()), await endpoint.scrape()

    return asyncio.run(run())


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_tokens_of_each_chunk_are_those_that_the_server_counts(api: str) -> None:
    with FakeOpenAI() as server:
        reply, counters = ask(EndpointSettings(f"{server.url}/v1/", api=api, key="secret"))
        (asked,), (headers,) = server.requests, server.headers
    assert reply.num_counted == 6
    assert [r.tokens for r in reply.rounds] == [2, 2, 2]
    assert [r.at_s for r in reply.rounds] == sorted(r.at_s for r in reply.rounds)
    assert asked["model"] == "good"
    assert (asked["max_tokens"], asked["temperature"], asked["seed"], asked["ignore_eos"]) == (6, 0.5, 3, True)
    assert asked.get("prompt", asked.get("messages")) in ("def f():", [{"role": "user", "content": "def f():"}])
    assert headers["Authorization"] == "Bearer secret"
    assert counters == {
        "num_drafts": 3,
        "num_draft_tokens": 12,
        "num_accepted_tokens": 6,
        "num_accepted_tokens_per_pos.0": 4,
    }


def _times(reply: Reply) -> object:
    return times(
        RequestRecord("e", "", 0, 0.0, 0, 0, "p", 2, (), 0.0, 0.0, reply.rounds, num_counted=reply.num_counted)
    )


def test_chunks_of_unknown_size_have_no_itl() -> None:
    with FakeOpenAI("single") as server:
        single, counters = ask(EndpointSettings(server.url, extra={}))
        assert "ignore_eos" not in server.requests[0]
    with FakeOpenAI("final") as server:
        bursts, _ = ask(EndpointSettings(server.url))
    assert counters == {}
    assert [r.tokens for r in single.rounds] == [1] * 6
    assert _times(single).itl_s == _times(single).gap_s  # type: ignore[attr-defined]
    assert [r.tokens for r in bursts.rounds] == [0, 0, 0]
    assert bursts.num_counted == 6
    assert _times(bursts).itl_s is None  # type: ignore[attr-defined]
    assert _times(bursts).tpot_s > 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("500", "answered 500: 'out of order'"),
        ("malformed", "invalid JSON"),
        ("garbage", "not a server-sent event: 'hello'"),
        ("error", "the engine died"),
        ("cut", "before [DONE]"),
        ("uncounted", "does not count tokens"),
    ],
)
def test_a_broken_answer_says_what_is_wrong(model: str, said: str) -> None:
    with FakeOpenAI(model) as server, pytest.raises(EngineError) as error:
        ask(EndpointSettings(server.url, model))
    assert said in str(error.value)
    assert server.url in str(error.value)


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    (port,) = free_ports(1)
    assert main(["bench", "endpoint", f"http://127.0.0.1:{port}", "--endpoint-model", "m", "--prompts", "1"]) == 1
    assert str(port) in capsys.readouterr().err.splitlines()[-1]


def test_a_server_without_models_and_a_url_that_is_none() -> None:
    with FakeOpenAI("none") as server, pytest.raises(ConfigError, match="--endpoint-model"):
        ask(EndpointSettings(server.url))
    with pytest.raises(ConfigError, match="'localhost:8000'"):
        EndpointSettings("localhost:8000").check()


def test_counters_are_summed_over_labels_and_others_left_out() -> None:
    with pytest.raises(ValueError):
        spec_decode_counters("what { is this")
    assert spec_decode_counters("") == {}


def test_a_run_of_closed_and_open_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, key = tmp_path / "out.json", tmp_path / "key"
    key.write_text("secret\n", encoding="utf-8")
    with FakeOpenAI("good", tokens=8) as server:
        arguments = [
            "bench",
            "endpoint",
            server.url,
            "--prompts",
            "6",
            "--max-tokens",
            "8",
            "--sessions",
            "2",
            "--request-rate",
            "200",
            "--burstiness",
            "0.5",
            "--goodput",
            "ttft:5000",
            "e2el:9000",
            "--endpoint-key-file",
            str(key),
            "--json",
            str(file),
        ]
        assert main(arguments) == 0
        assert server.most_at_once >= 2
        assert len(server.requests) == 3 * 6, "a warm-up and two loads"
    printed = capsys.readouterr().out
    assert "200/s, gamma of shape 0.5 endpoint" in printed
    text = file.read_text(encoding="utf-8")
    data = json.loads(text)
    assert "secret" not in text
    assert data["cells"] == []
    closed, opened = data["other_cells"]
    assert (closed["sessions"], closed["rate"], opened["rate"], opened["burstiness"]) == (2, 0.0, 200.0, 0.5)
    for cell in (closed, opened):
        assert (cell["requests"], cell["failed"]) == (6, 0)
        assert cell["goodput_per_s"] == cell["requests_per_s"] > 0
        assert cell["latency_s"]["itl"]["50"] is not None
        assert cell["tokens_per_round"] == pytest.approx(1 + 6 / 3)
        assert cell["acceptance"] == pytest.approx(0.5)
        assert cell["tokens_per_s"] == pytest.approx(
            48 / sum(u["wall_s"] for u in data["units"] if u["rate"] == cell["rate"])
        )
