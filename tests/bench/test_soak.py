"""The soak: what it takes for a leak, what it takes for wrong, and one minute of it."""

import re
import shlex
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from benchmarks import soak

from paceline.types import (
    Acceptance,
    FinishReason,
    ReplicaStatus,
    Result,
    SamplingParams,
    SpeculationParams,
    SpeculationStats,
    Timing,
    Usage,
)
from paceline_bench.processes import Process

EXPECTED = soak.Expected((1, 2, 3), "abc", FinishReason.STOP, "d")


def _result(**fields: Any) -> Result:
    values: dict[str, Any] = {
        "text": "abc",
        "token_ids": (1, 2, 3),
        "logprobs": (),
        "finish_reason": FinishReason.STOP,
        "usage": Usage(1, 3),
        "speculation": SpeculationStats(),
        "timing": Timing(0.0, 0.0, 0.0),
        "seed": 0,
        "matched_stop": "d",
    }
    return Result(**values | fields)


@pytest.mark.parametrize(
    ("fields", "whole", "fault"),
    [
        ({}, True, None),
        ({"token_ids": (1, 2)}, True, "tokens are not"),
        ({"text": "ab"}, True, "text is not"),
        ({"matched_stop": None}, True, "ended by"),
        ({"finish_reason": FinishReason.LENGTH}, True, "ended by length"),
        ({"token_ids": (1, 2), "text": "ab", "finish_reason": FinishReason.ABORT}, False, None),
        ({"token_ids": ()}, False, None),
        ({"token_ids": (1, 3)}, False, "no beginning"),
        ({"token_ids": (1, 2, 3, 4)}, False, "no beginning"),
    ],
)
def test_a_result_is_compared(fields: dict[str, Any], whole: bool, fault: str | None) -> None:
    found = soak.fault_in(_result(**fields), EXPECTED, whole=whole)
    assert (found is None) == (fault is None)
    assert fault is None or fault in found


@pytest.mark.parametrize(
    ("temperature", "acceptance", "claimed"),
    [(0.0, "coupled", True), (1.0, "coupled", True), (0.0, "rejection", True), (1.0, "rejection", False)],
)
def test_what_is_claimed_to_be_plain_decodings(temperature: float, acceptance: str, claimed: bool) -> None:
    speculation = SpeculationParams(acceptance=Acceptance(acceptance))
    template = soak.Template("x", SamplingParams(temperature=temperature), speculation, ())
    assert template.claimed is claimed


def _samples(
    values: list[float], what: str = "rss_bytes", every_s: float = 60.0, **fields: Any
) -> list[dict[str, Any]]:
    blank = {"quiet": True, "pid": 7, "started": 1, "role": "router", "rss_bytes": None, "descriptors": None} | fields
    return [{**blank, "at_s": i * every_s, what: value} for i, value in enumerate(values)]


def test_a_line_is_fitted() -> None:
    assert soak.line([(0.0, 1.0), (1.0, 3.0), (2.0, 5.0)]) == (2.0, pytest.approx(0.0), pytest.approx(1.0))
    assert soak.line([(0.0, 1.0), (1.0, 1.0)]) == (0.0, 0.0, 0.0)


def test_a_slope_has_its_standard_error() -> None:
    points = [(0.0, 1.0), (1.0, 2.0), (2.0, 1.5), (3.0, 4.0), (4.0, 3.5), (5.0, 6.0)]
    x, y = np.array(points).T
    (slope, _), covariance = np.polyfit(x, y, 1, cov=True)
    found = soak.line(points)
    expected = slope, covariance[0, 0] ** 0.5, np.corrcoef(x, y)[0, 1] ** 2
    assert (found.slope, found.error, found.fit) == pytest.approx(expected)


def test_a_trend_is_printed_with_the_error_of_its_slope() -> None:
    (trend,) = soak.trends(_samples([100 * MIB + i * MIB + i % 2 * MIB for i in range(12)]))
    load = SimpleNamespace(
        now_s=720.0, ended=[], templates=[], kills=[], quiets=[], faults=[], num_unanswered=0,
        hostility=SimpleNamespace(statuses={}),
    )  # fmt: skip
    text = soak.summary(load, [trend], [])  # type: ignore[arg-type]
    slope, error = trend.per_hour / MIB, trend.error_per_hour / MIB
    assert 0 < error < slope
    assert f"{slope:+9.1f} +- {error:.1f} per hour" in text


MIB = 2.0**20


@pytest.mark.parametrize(
    ("values", "what", "leaks"),
    [
        ([100 * MIB + i * 10 * MIB for i in range(12)], "rss_bytes", True),
        ([100 * MIB + i * MIB for i in range(12)], "rss_bytes", False),  # it may
        ([100 * MIB, 150 * MIB, 300 * MIB, 300 * MIB] + [301 * MIB] * 8, "rss_bytes", False),  # start-up
        ([100 * MIB + (90 * MIB if i == 9 else 0) for i in range(12)], "rss_bytes", False),  # a moment
        ([20.0 + 5 * i for i in range(12)], "descriptors", True),
        ([20.0 + i % 3 for i in range(12)], "descriptors", False),
        ([200 * MIB - i * 10 * MIB for i in range(12)], "rss_bytes", False),
    ],
)
def test_a_leak_is_a_steady_rise(values: list[float], what: str, leaks: bool) -> None:
    (trend,) = soak.trends(_samples(values, what))
    assert trend.leaks is leaks
    (shorter,) = soak.trends(_samples(values, what, every_s=1.0))
    assert not shorter.leaks, "too short to say"


def test_each_incarnation_has_a_trend_of_its_own_and_descriptors_count_at_rest_only() -> None:
    samples = _samples([MIB] * 6) + _samples([MIB] * 6, started=2) + _samples([5.0] * 6, "descriptors", quiet=False)
    assert [(t.what, t.pid) for t in soak.trends(samples)] == [("rss_bytes", 7)] * 2


def test_what_is_left_over_is_named() -> None:
    status = ReplicaStatus("t", "target", 0, 2, 0, 16, kv_pages_used=3, counters={"leases": 1.0})
    info = soak.ServerInfo(
        "1", 0.0, {"target": (status,), "draft": (replace(status, kind="draft"),)}, 1, 0, 0.0, 0.0, 0.0
    )
    left = soak.leftovers(info)
    assert left["running"] == 1
    assert (left["target sessions"], left["target KV pages"], left["target leases"]) == (2, 3, 1)
    idle = replace(status, num_sessions=0, kv_pages_used=0, counters={})
    assert not any(soak.leftovers(replace(info, pools={"target": (idle,)}, sessions_running=0)).values())


def test_tasks_may_step_up_but_not_go_on_rising() -> None:
    def quiets(counts: list[float]) -> list[dict[str, Any]]:
        return [{"at_s": 90.0 * i, "tasks": {"r": count}} for i, count in enumerate(counts)]

    assert soak.task_rises(quiets([34, 34, 44, 44, 44, 44, 44])) == {"r": (0.0, 44)}
    assert soak.task_rises(quiets([34, 44])) == {}
    assert soak.task_rises(quiets([34, 38, 42, 46, 50, 54, 58]))["r"][0] == pytest.approx(16)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.ray
def test_a_minute(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    arguments = shlex.split(
        "--minutes 1 --no-compile --rate 1.5 --templates 12 --max-tokens 48 --kill-draft-s 15 --kill-target-s "
        "25 --quiet-s 20 --secured --hostile 2"
    )
    status = soak.main(arguments)
    output = capsys.readouterr()
    assert status == 0, output.out
    assert "nothing stays, nothing differs, nothing hangs" in output.out
    assert re.search(r"\d+ hostile calls", output.out)
    assert "a stranger: " in output.out


@pytest.mark.parametrize(("per_sample", "leaks"), [(5, False), (30, True)])
def test_the_log_monitor_may_keep_the_logs_of_ended_workers_open_up_to_a_limit(per_sample: int, leaks: bool) -> None:
    process = Process(8, 1, 1, "python -u site-packages/ray/_private/log_monitor.py --session-dir=x", 0.0, 0, 1)
    samples = _samples([20.0 + per_sample * i for i in range(12)], "descriptors", role=soak.role_of(process))
    (trend,) = soak.trends(samples)
    assert trend.leaks is leaks
