"""``paceline plan`` from the command line, and what it reads."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import paceline
from paceline.cli.exit import EXIT_USAGE
from paceline.cli.main import main
from paceline.config import ServiceConfig
from paceline.errors import ConfigError
from paceline.plan.closed_form import Load, predict
from paceline.plan.measured import at_hit_rate, compare, read
from paceline.types import Mode

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
GIVEN = {"--target-step-ms": "11.5", "--draft-step-ms": "2.5", "--acceptance": "0.8", "--sessions": "20"}


def plan(changes: dict[str, str | None] | None = None, *more: str) -> int:
    flags = GIVEN | {"--slo-itl-ms": "25"} | (changes or {})
    return main(
        ["plan", *(part for flag, value in flags.items() if value is not None for part in (flag, value) if part), *more]
    )


def yaml_of(out: str) -> dict[str, Any]:
    """The configuration in what is printed, which ends at an empty line."""
    found: dict[str, Any] = yaml.safe_load(out[out.index("# of a service") :].split("\n\n")[0])
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"--sessions": "1"},
        {"--sessions": "200", "--max-sessions": "16"},
        {"--fan-out": "32", "--tree-budget": "4096"},
        {"--fan-out": "1"},
        {"--draft-on-target-nodes": ""},
        {"--rule": "rejection", "--acceptance": "0.95", "--draft-width": "256", "--sessions": "7"},
    ],
)
def test_what_it_prints_is_a_configuration(changes: dict[str, str | None], capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(changes) == 0
    printed = yaml_of(capsys.readouterr().out)
    pair = {"target_config": {"model_loading_config": {"model_id": "a/b"}}}
    pair |= {"draft_config": {"model_loading_config": {"model_id": "a/c"}}}
    config = ServiceConfig.parse({pool: pair[pool] | printed[pool] for pool in printed})
    options = config.target_config.engine_kwargs
    assert options.max_sessions == printed["target_config"]["engine_kwargs"]["max_sessions"]
    assert plan(changes, "--json") == 0
    flat = json.loads(capsys.readouterr().out)["config"]
    assert config.with_overrides([f"{key}={value}" for key, value in flat.items()]) == config


@pytest.mark.parametrize(
    ("flag", "key"),
    [
        ("--max-sessions", "target_config.engine_kwargs.max_sessions"),
        ("--fan-out", "draft_config.engine_kwargs.fan_out"),
        ("--tree-budget", "draft_config.engine_kwargs.tree_budget"),
    ],
)
def test_a_flag_goes_as_far_as_the_configuration(flag: str, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plan({flag: "1000000"})
    most = int(capsys.readouterr().err.rsplit("from 1 to ", 1)[1].split()[0])
    ServiceConfig().with_overrides([f"{key}={most}"])
    with pytest.raises(ConfigError):
        ServiceConfig().with_overrides([f"{key}={most + 1}"])


def test_drafts_on_hosts_of_targets_cost_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan({"--draft-on-target-nodes": ""}, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["overlapped"]["per_hour"] == found["overlapped"]["load"]["targets"] * 10


def test_it_says_how_many_to_run_and_what_tokens_cost(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan() == 0
    out = capsys.readouterr().out
    assert "Run 1 target and 1 draft (1 for each target)" in out
    assert "less than by plain decoding" in out
    assert yaml_of(out)["target_config"]["deployment_config"] == {"num_replicas": 1}


def test_json_holds_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(None, "--json") == 0
    out = capsys.readouterr().out
    assert "NaN" not in out
    assert "Infinity" not in out
    found = json.loads(out)
    assert found["speculation_pays"] is True
    assert found["overlapped"]["load"] == {"sessions": 20, "targets": 1, "drafts": 1, "requests": None}
    assert found["overlapped"]["per_million"] < found["plain"]["per_million"]


def test_it_says_when_speculation_does_not_pay(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan({"--acceptance": "0.1"}) == 0
    assert "Speculation does not pay" in capsys.readouterr().out


def test_a_limit_that_nothing_keeps(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan({"--slo-itl-ms": "0.5"}) == 1
    assert "No fleet with drafts keeps 0.5 ms." in capsys.readouterr().out


def test_whole_trees(capsys: pytest.CaptureFixture[str]) -> None:
    """What is said of them reaches the simulation; its draft is told how unlikely a node may be."""
    rates, flags = [], {"--sessions": "2", "--siblings": "0.75", "--fan-out": "4", "--min-path-prob": "0.01"}
    lookups = {"--branch-ms": "0.1", "--lookup-share": "0.9", "--lookup-acceptance": "0.99"}
    for changes, more in ((flags, ()), (flags, ("--trees",)), (flags | lookups, ("--trees",))):
        assert plan(changes, *more, "--json") == 0
        found = json.loads(capsys.readouterr().out)
        rates.append(found["overlapped"]["simulated"]["tokens_per_round"])
        assert found["assumptions"]["outcomes"]["power"] == pytest.approx(1.0)  # 4^-1 is missed
        assert found["assumptions"]["min_path_prob"] == 0.01
        assert found["config"]["draft_config.engine_kwargs.min_path_prob"] == 0.01
    assert found["assumptions"]["branch_s"] == pytest.approx(1e-4)
    assert rates[0] != rates[1]
    assert rates[1] + 0.2 < rates[2]
    assert plan({}, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["assumptions"]["min_path_prob"] == 0.02
    assert "draft_config.engine_kwargs.min_path_prob" not in found["config"]


def test_what_is_not_given_comes_from_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    none: dict[str, str | None] = dict.fromkeys(("--target-step-ms", "--draft-step-ms", "--acceptance"))
    source = str(RESULTS / "local-heavy.json")
    assert plan(none | {"--from": source, "--at-temperature": "1", "--sessions": "2"}, "--json") == 0
    assumed = json.loads(capsys.readouterr().out)["assumptions"]
    assert assumed["outcomes"]["acceptance"] == pytest.approx(0.567, abs=1e-3)
    assert assumed["target"]["points"][0][1] == pytest.approx(0.0187, abs=1e-3)
    assert plan(none | {"--from": source, "--at-temperature": "0.5"}) == EXIT_USAGE
    assert "which has 0, 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heads": ["medusa=x"]}, "was measured with the head medusa=x: the times of its steps include the head's"),
        ({"drafter": "ngram"}, "was measured with --drafter ngram: a run with a draft model is needed"),
    ],
)
def test_a_run_with_another_drafter_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    data = json.loads((RESULTS / "local-heavy.json").read_text(encoding="utf-8"))
    path = tmp_path / "run.json"
    path.write_text(json.dumps(data | {"settings": data["settings"] | settings}), encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read(path)


@pytest.mark.parametrize("content", [[], {}, {"requests": [{}], "summaries": []}])
def test_a_file_of_something_else(content: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ConfigError, match="paceline bench local --json"):
        read(path)


def test_the_recorded_runs_are_predicted_within_ten_percent() -> None:
    for name in ("local-light.json", "local-heavy.json"):
        for measurements in read(RESULTS / name):
            for comparison in compare(measurements, seconds=20.0):
                assert abs(comparison.error) < 0.1, comparison.row.name
                if comparison.row.mode is Mode.OVERLAPPED:
                    assert 0.85 < comparison.reached < 1.15, comparison.row.name


def test_a_path_by_one_call_comes_from_a_run_that_has_any_or_from_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    none: dict[str, str | None] = dict.fromkeys(("--target-step-ms", "--draft-step-ms", "--acceptance"))
    new, old = str(RESULTS / "sweep" / "light-1.json"), str(RESULTS / "local-light.json")

    def path(changes: dict[str, str | None]) -> Any:
        assert plan(changes, "--json") == 0
        found = json.loads(capsys.readouterr().out)["assumptions"].get("path")
        return found and [(tokens, round(1e3 * seconds, 1)) for tokens, seconds in found["points"]]

    assert path(none | {"--from": new}) == [(1, 1.2), (3, 1.5), (4, 1.8), (6, 1.9)]
    assert path(none | {"--from": new, "--draft-step-ms": "2"}) is None
    assert path(none | {"--from": old}) is path({}) is None
    assert path({"--draft-step-ms": "2", "--draft-path-ms": "0.1"}) == [(1, 2.0), (2, 2.1)]
    assert plan({"--draft-path-ms": "0.1"}) == 0
    assert "path of a draft by one call: 2.5 ms of one token, 2.8 ms of four" in capsys.readouterr().out


def test_the_recorded_paths_by_one_call_are_predicted() -> None:
    """Overlapped, what lookups and siblings add is left out."""
    for name in ("light-1.json", "heavy.json"):
        for measurements in read(RESULTS / "sweep" / name):
            for comparison in compare(measurements, seconds=5.0):
                assert abs(comparison.error) < 0.14, comparison.row.name


def test_a_system_is_given_the_hit_rate_that_was_measured() -> None:
    measurements = read(RESULTS / "local-heavy.json")[0]
    for hit_rate in (0.7, 0.8):
        changed = at_hit_rate(measurements.system, Load(1, 1, 1), 4, hit_rate)
        predicted = predict(changed, Load(1, 1, 1), Mode.OVERLAPPED, 4)
        assert predicted.hit_rate == pytest.approx(hit_rate, abs=0.01)


def test_nothing_heavy_is_imported() -> None:
    code = "import sys, paceline.cli.plan; sys.exit(any(m in sys.modules for m in ('torch', 'ray', 'numpy')))"
    source_root = str(Path(paceline.__file__).parents[1])
    ran = subprocess.run([sys.executable, "-c", code], check=False, timeout=300, env={"PYTHONPATH": source_root})
    assert ran.returncode == 0


def test_prompts_contexts_and_the_time_to_first_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    """A limit on the first tokens that one target misses makes it two."""
    more: dict[str, str | None] = {
        "--prompt-tokens": "2000",
        "--tokens-per-request": "64",
        "--target-kv-kib": "32",
        "--draft-kv-kib": "4",
    }
    found: dict[str | None, Any] = {}
    for ttft_ms in (None, "400"):
        assert plan(more | {"--slo-itl-ms": "60", "--slo-ttft-ms": ttft_ms}, "--json") == 0
        found[ttft_ms] = json.loads(capsys.readouterr().out)["overlapped"]
    assert found["400"]["simulated"]["mean_ttft_s"] <= 0.4 < found[None]["simulated"]["mean_ttft_s"]
    assert found["400"]["load"]["targets"] > found[None]["load"]["targets"]
    assert plan(more | {"--slo-itl-ms": "60", "--slo-ttft-ms": "10"}) == 1
    assert "keeps 60 ms and 10 ms to the first tokens" in capsys.readouterr().out


def test_the_same_devices_in_four_ways(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan({"--target-devices": "2"}, "--json") == 0
    ways = {way["name"]: way for way in json.loads(capsys.readouterr().out)["same_devices"]}
    assert list(ways) == ["plain", "co-located", "sequential", "overlapped"]
    assert ways["overlapped"]["per_device"] == pytest.approx(ways["overlapped"]["tokens_per_s"] / 3)
    assert ways["co-located"]["load"]["targets"] == 1  # the third device is too little for a target
    assert ways["overlapped"]["tokens_per_s"] > ways["co-located"]["tokens_per_s"] > ways["plain"]["tokens_per_s"]


RATES = [{"temperature": at, "k": 4, "plain": 55.0 - at, "co-located": 120.0 - 30 * at} for at in (0, 1)]
CORES: list[dict[str, Any]] = [
    {
        "cpu_threads": threads,
        "target_s": [[1, step], [9, 1.4 * step]],
        "draft_s": [[1, depth]],
        "gap_s": 0.0005,
        "tokens_per_s": [rates | {"co-located": threads * rates["co-located"]} for rates in RATES],
    }
    for threads, step, depth in ((1, 0.0175, 0.0016), (2, 0.0135, 0.0014))
]


def run_of_cores(folder: Path) -> str:
    """A run of ``paceline bench local --cpu-threads 2``."""
    data = json.loads((RESULTS / "local-light.json").read_text(encoding="utf-8"))
    path = folder / "run.json"
    path.write_text(json.dumps(data | {"cores": CORES}), encoding="utf-8")
    return str(path)


def test_acceptance_and_siblings_are_those_of_the_ranks_that_were_counted(tmp_path: Path) -> None:
    """What was accepted of whole trees is not the acceptance of a chain: rounds with siblings would say 0.9."""
    data, path = json.loads((RESULTS / "local-light.json").read_text(encoding="utf-8")), tmp_path / "run.json"
    units = 0
    for request in data["requests"]:
        if request["mode"] in ("sequential", "overlapped") and request["temperature"] == 1.0:
            request["ranks"], units = [[20, 12], [8, 2], [6, 1]], units + 1
            request["rounds"] = [r | {"drafted": 12, "accepted": 9} for r in request["rounds"]]
    assert 8 * units > 100
    path.write_text(json.dumps(data), encoding="utf-8")
    old, new = read(RESULTS / "local-light.json"), read(path)
    assert new[0].system.outcomes == old[0].system.outcomes
    assert new[1].system.outcomes.acceptance == pytest.approx(12 / 20)
    assert 1 - 2 ** -new[1].system.outcomes.power == pytest.approx(2 / 8)


def test_rows_of_shared_targets_are_compared_with_their_forecast(tmp_path: Path) -> None:
    for run in read(Path(run_of_cores(tmp_path))):
        assert [(row.drafting.value, row.cores, row.k) for row in run.core_rows] == [
            ("plain", 1, 0),
            ("co-located", 1, 4),
            ("plain", 2, 0),
            ("co-located", 2, 4),
        ]
        plainly, inside = run.core_rows[2:]
        assert (plainly.tokens_per_s, inside.tokens_per_s) == (55 - run.temperature, 240 - 60 * run.temperature)
        assert plainly.predicted(run).tokens_per_s == pytest.approx(1 / (0.0135 + 0.0005))
        tokens = sum(run.system.outcomes.acceptance**i for i in range(5))
        round_s = 4 * 0.0014 + 0.0135 * 1.2 + 0.0005
        assert tokens / round_s <= inside.predicted(run).tokens_per_s < 1.15 * tokens / round_s, "with siblings"
