"""`paceline bench endpoint` against a real HTTP server, its faults included."""

import asyncio
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.bench.fake_openai import FakeOpenAI
from tests.support.models import save_pair
from tests.web.support import edge_over, served

from paceline.cli.main import main
from paceline.cluster.ports import free_ports
from paceline.config import LocalConfig
from paceline.errors import ConfigError, EngineError
from paceline.local import LocalPipeline
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


def test_the_commands_of_the_benchmark_import_no_torch() -> None:
    """An endpoint is measured without it."""
    script = "import sys, paceline_bench.cli; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


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


def test_a_server_without_models_and_a_url_that_is_none() -> None:
    with FakeOpenAI("none") as server, pytest.raises(ConfigError, match="--endpoint-model"):
        ask(EndpointSettings(server.url))
    for url in ("localhost:8000", "http://localhost:8000x"):
        with pytest.raises(ConfigError, match=f"'{url}'"):
            EndpointSettings(url).check()


def test_counters_are_summed_over_labels_and_others_left_out() -> None:
    with pytest.raises(ValueError):
        spec_decode_counters("what { is this")
    assert spec_decode_counters("") == {}


def test_a_run_of_closed_and_open_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, key = tmp_path / "out.json", tmp_path / "key"
    key.write_text("secret\n", encoding="utf-8")
    with FakeOpenAI("good", tokens=8) as server:
        arguments = shlex.split(
            f"bench endpoint {server.url} --prompts 6 --max-tokens 8 --sessions 2 --request-rate 200 --burstiness "
            f"0.5 --goodput ttft:5000 e2el:9000 --endpoint-key-file {key} --json {file}"
        )
        assert main(arguments) == 0
        assert server.most_at_once >= 2
        assert len(server.requests) == 3 * 6, "a warm-up and two loads"
    printed = capsys.readouterr().out
    assert "200/s, shape 0.5  endpoint" in printed
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


OURS = ("K=", "coupled", "bfloat16", "torch", "commit", "x local", "x plain", "same", "gap on a hit", "prefix cache")
"""Words of reports on our own services, of which a foreign server knows nothing."""


def test_nothing_of_ours_is_said_of_a_foreign_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "out.json", tmp_path / "report"
    with FakeOpenAI("final", tokens=8) as server:
        command = ["bench", "endpoint", server.url, "--prompts", "2", "--max-tokens", "8", "--sessions", "1,2"]
        assert main([*command, "--temperatures", "0", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert server.url in printed
    assert "not repeated" in printed
    data = json.loads(file.read_text(encoding="utf-8"))
    assert not {"torch", "ray", "commit", "threads_per_engine"} & set(data["environment"])
    assert not {"dtype", "draft_tokens", "target", "draft", "modes"} & set(data["settings"])
    assert main(["bench", "report", str(file), "--out", str(out)]) == 0
    report = (out / "report.md").read_text(encoding="utf-8")
    for text in (printed, report):
        assert [word for word in OURS if word in text] == []
    assert "The endpoint in a closed loop" in report
    assert "The machine of the client" in report
    assert f"**{max(c['tokens_per_s'] for c in data['other_cells']):.1f} tokens/s**" in report


@pytest.fixture
def own_url(tmp_path: Path) -> Iterator[str]:
    """Our own HTTP interface, over a pipeline of two small models."""
    pair = save_pair(tmp_path)
    run = {"dtype": "float32", "compile": False}
    config = LocalConfig.model_validate(
        {
            "target": {"path": str(pair / "target"), "adaptive": False, "max_sessions": 4, **run},
            "draft": {"path": str(pair / "draft"), **run},
            "worker": "thread",
            "pin_cores": False,
        }
    )
    with LocalPipeline(config) as pipeline, served(edge_over(pipeline)) as url:
        yield url


def test_our_own_http_interface_is_an_endpoint_like_any_other(own_url, tmp_path, capsys) -> None:
    prompts, file = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text('{"prompt": "ab"}\n{"prompt": "ba"}\n', encoding="utf-8")
    command = ["bench", "endpoint", own_url, "--prompts-file", str(prompts), "--max-tokens", "6", "--sessions", "2"]
    assert main([*command, "--temperatures", "0", "--json", str(file)]) == 0, capsys.readouterr().err
    data = json.loads(file.read_text(encoding="utf-8"))
    (cell,), (unit,) = data["other_cells"], data["units"]
    assert (cell["failed"], cell["requests"]) == (0, 8)
    assert cell["tokens_per_s"] == pytest.approx(8 * 6 / unit["wall_s"]), "every token is counted"
    assert cell["latency_s"]["itl"]["50"] is not None, "the tokens of each chunk are counted"


def test_a_server_that_cannot_be_reached_is_not_said_to_speak_tls(capsys: pytest.CaptureFixture[str]) -> None:
    (port,) = free_ports(1)
    assert main(["bench", "endpoint", f"http://127.0.0.1:{port}", "--endpoint-model", "m", "--prompts", "1"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert str(port) in last
    assert "cannot be reached" in last
    assert "ssl" not in last
