"""Targets whose products several cores share, as `paceline bench local --cpu-threads` measures them."""

from __future__ import annotations

import pytest

from paceline.checkpoint.files import embedded_paths
from paceline.checkpoint.tokenizer import load_tokenizer
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
