"""Targets whose products several cores share, as `paceline bench local --cpu-threads` measures them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.checkpoint.files import embedded_paths
from paceline.checkpoint.tokenizer import load_tokenizer
from paceline.cli.main import main
from paceline.errors import ConfigError
from paceline.plan.layouts import Drafting
from paceline.plan.measured import core_times
from paceline_bench import cores
from paceline_bench.prompts import held_out_prompts
from paceline_bench.settings import LocalSettings

TARGET, DRAFT = map(str, embedded_paths())


@pytest.mark.slow
def test_what_is_measured_on_one_core_is_what_the_plan_reads() -> None:
    run = {"dtype": "float32", "compile": False, "worker": "thread", "max_tokens": 24, "temperatures": (0.0,)}
    prompts = held_out_prompts(load_tokenizer(TARGET), 2)
    (record,) = cores.measure(LocalSettings(TARGET, DRAFT, **run), prompts)
    assert record.cpu_threads == 1
    assert all(record.tokens_per_s[way][0.0] > 0 for way in (Drafting.PLAIN, Drafting.COLOCATED))
    times = core_times(cores.as_json(record))
    assert times.draft.seconds(1) > 0
    assert 0 < times.target.seconds(1) <= times.target.seconds(5) <= times.target.seconds(64)
    assert times.gap_s >= 0
    assert "1" in cores.text([record]).splitlines()[2]


def test_more_threads_than_cores_are_refused_before_the_run() -> None:
    with pytest.raises(ConfigError, match=r"--cpu-threads holds 64: "):
        cores.configs(LocalSettings(TARGET, DRAFT, cpu_threads=(64,)))


@pytest.mark.slow
def test_the_threads_of_a_run_are_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real run in which the targets of one core and of two are made up."""
    asked = []

    def measure(settings: LocalSettings, prompts: object) -> list[cores.CoresRecord]:
        asked.append(settings.cpu_threads)
        rates = {way: {0.0: 10.0} for way in (Drafting.PLAIN, Drafting.COLOCATED)}
        steps = {threads: [(size, 0.1 / threads) for size in (1, 5, 9)] for threads in (1, 2)}
        return [cores.CoresRecord(threads, rates, steps[threads], [(1, 0.01)], 0.0) for threads in steps]

    monkeypatch.setattr(cores, "configs", lambda settings: {})
    monkeypatch.setattr(cores, "measure", measure)
    file = tmp_path / "run.json"
    run = ["--prompts", "1", "--max-tokens", "48", "--temperatures", "0", "--dtype", "float32", "--no-compile"]
    run += ["--baselines", "none", "--sequential-draft-tokens", "4", "--worker", "thread", "--cpu-threads", "2"]
    assert main(["bench", "local", *run, "--json", str(file)]) == 0
    assert asked == [(2,)]
    assert "tokens/s by the cores that share a target's products:" in capsys.readouterr().out
    written = json.loads(file.read_text(encoding="utf-8"))["cores"]
    assert [one["cpu_threads"] for one in written] == [1, 2]
    assert [core_times(one).target.seconds(1) for one in written] == pytest.approx([0.1, 0.05])
    assert written[0]["tokens_per_s"] == [{"temperature": 0.0, "k": 4, "plain": 10.0, "co-located": 10.0}]
