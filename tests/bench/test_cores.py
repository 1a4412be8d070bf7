"""Targets whose products several cores share, as `paceline bench local --cpu-threads` measures them."""

import json
from dataclasses import replace

import pytest

from paceline.checkpoint.files import embedded_paths
from paceline.cli.main import main
from paceline.config import LocalConfig
from paceline.errors import ConfigError
from paceline.plan.measured import Drafting, core_times
from paceline_bench import cores
from paceline_bench.local import LocalBench
from paceline_bench.report.summaries import summarize
from paceline_bench.settings import LocalSettings

TARGET, DRAFT = map(str, embedded_paths())


@pytest.mark.nightly
def test_what_is_measured_on_one_core_is_what_the_plan_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real run of the target that one thread serves."""
    monkeypatch.setattr(LocalSettings, "thread_counts", (1,))
    run = {"dtype": "float32", "compile": False, "worker": "thread", "max_tokens": 24, "temperatures": (0.0,)}
    settings = LocalSettings(TARGET, DRAFT, **run, modes=(), baselines=(), num_prompts=2, cpu_threads=(2,))
    with LocalBench(settings) as bench:
        measured = bench.run()
    assert bench.shared is not None
    (record,) = cores.records(settings, measured, bench.shared)
    assert record.cpu_threads == 1
    rates = {s.method: s.decode_tokens_per_s for s in summarize(measured)}
    assert rates == {
        "plain, 1 thread": record.tokens_per_s[Drafting.PLAIN][0.0],
        "co-located, 1 thread K=4": record.tokens_per_s[Drafting.COLOCATED][0.0],
        "placement auto, 1 thread": rates["placement auto, 1 thread"],
    }
    assert all(rate > 0 for rate in rates.values())
    assert all(r.prefill_s > 0 for r in measured)
    entry = cores.as_json(record)
    with pytest.raises(ConfigError, match="with a target of 1 threads the draft was never asked"):
        core_times({**entry, "draft_s": []})
    times = core_times({**entry, "draft_s": entry["draft_s"] or [(1, 1e-3)]})  # a busy machine may not ask
    assert times.draft.seconds(1) > 0
    assert 0 < times.target.seconds(1) <= times.target.seconds(5) <= times.target.seconds(64)
    assert times.gap_s >= 0
    assert "1" in cores.text([record]).splitlines()[2]


@pytest.mark.parametrize(("draft_s", "shown"), [([(1, 0.00227)], "2.27 ms"), ([], "-")])
def test_the_depth_of_a_draft_is_printed_where_it_was_asked(draft_s: list[tuple[int, float]], shown: str) -> None:
    """With many sessions a co-located draft may never be."""
    rates = {way: {0.0: 100.0} for way in cores.WAYS}
    record = cores.CoresRecord(2, rates, [(1, 0.009), (5, 0.01)], draft_s, 0.0)
    assert cores.text([record]).splitlines()[-1].split()[-1 if shown == "-" else -2 :] == shown.split()


def test_more_threads_than_cores_are_refused_before_the_run() -> None:
    with pytest.raises(ConfigError, match=r"--cpu-threads holds 64: "):
        cores.configs(LocalSettings(TARGET, DRAFT, cpu_threads=(64,)))


@pytest.mark.nightly
def test_the_threads_of_a_run_are_printed_and_written(tmp_path, capsys, monkeypatch) -> None:
    """A real run in which the target of two threads is another one of one."""
    alone = cores.configs

    def configs(settings: LocalSettings) -> dict[int, LocalConfig]:
        assert settings.cpu_threads == (2,)
        (config,) = alone(replace(settings, cpu_threads=())).values()
        return {1: config, 2: config}

    monkeypatch.setattr(cores, "configs", configs)
    file = tmp_path / "run.json"
    run = ["--prompts", "1", "--max-tokens", "48", "--temperatures", "0", "--dtype", "float32", "--no-compile"]
    run += ["--modes", "plain", "--baselines", "none", "--worker", "thread", "--cpu-threads", "2"]
    assert main(["bench", "local", *run, "--json", str(file)]) == 0
    assert "tokens/s by the cores that share a target's products:" in capsys.readouterr().out
    data = json.loads(file.read_text(encoding="utf-8"))
    assert {r["identical"] for r in data["requests"]} == {True}
    assert [one["cpu_threads"] for one in data["cores"]] == [1, 2]
    for one in data["cores"]:
        assert dict(map(tuple, one["target_s"]))[1] > 0
        ((at, k, *rates),) = (list(cell.values()) for cell in one["tokens_per_s"])
        assert (at, k, len(rates)) == (0.0, 4, 2)
