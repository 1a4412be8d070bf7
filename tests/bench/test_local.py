"""`paceline bench local`: arguments, the arithmetic of the report, and one tiny run of everything."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from paceline.config import CascadeOptions, NgramOptions
from paceline.embedded import TARGET_DIR
from paceline.types import Mode
from paceline_bench.arithmetic import (
    Amount,
    Share,
    by_producer,
    decode_amount,
    end_to_end_amount,
    hit_shares,
    one_token_steps,
    rate,
    ratio,
)
from paceline_bench.drafting import Drafting
from paceline_bench.models import ModelLabel, model_label
from paceline_bench.records import RequestRecord, RoundRecord
from paceline_bench.report import documents
from paceline_bench.report.summaries import best_of, summarize
from paceline_bench.report.text import text_of


def test_what_a_drafter_leaves_of_the_defaults() -> None:
    default = ("transformers", "assisted", "lookup")
    assert Drafting().modes(None) == Drafting("ngram").modes(None) == tuple(Mode)
    assert Drafting("none").modes(None) == (Mode.PLAIN, Mode.OVERLAPPED)
    assert Drafting().baselines(None, default) == default
    assert Drafting("ngram").baselines(None, default) == ("transformers", "lookup")
    assert Drafting().draft_options("a/b", 4, {"dtype": "float32"}).device == "auto"
    assert Drafting().draft_options("a/b", 4, {"dtype": "float32"}, "cpu").device == "cpu"
    assert isinstance(Drafting("ngram").draft_options("", None, {}), NgramOptions)
    assert Drafting("none").draft_options("", None, {}) is None
    cascade = Drafting("vertical=a/b:3,ngram").draft_options("", None, {"dtype": "float32"})
    assert isinstance(cascade, CascadeOptions)
    assert [(part.kind, part.model, part.options) for part in cascade.drafters] == [
        ("model", "a/b", {"dtype": "float32"}),
        ("ngram", None, {}),
    ]
    assert cascade.lengths == [3]
    assert Drafting("vertical=a/b,ngram").baselines(None, default) == ("transformers", "lookup")


def _round(drafted: int, accepted: int, cause: str, at_s: float = 0.0) -> RoundRecord:
    return RoundRecord(drafted, accepted, accepted + 1, cause, at_s)


def _record(method: str = "plain", **fields: Any) -> RequestRecord:
    values: dict[str, Any] = {
        "mode": method.split()[0],
        "draft_tokens": 0,
        "temperature": 0.0,
        "unit": 0,
        "repeat": 0,
        "prompt": "a",
        "prompt_tokens": 3,
        "token_ids": (1, 2, 3, 4, 5),
        "prefill_s": 1.0,
        "decode_s": 2.0,
        "rounds": (_round(0, 0, "start"), *[_round(0, 0, "disabled")] * 4),
    }
    return RequestRecord(method=method, **values | fields)


def test_decode_leaves_out_the_first_outcome_and_prefill() -> None:
    record = _record()
    assert decode_amount([record]) == Amount(4, 2.0)
    assert end_to_end_amount([record]) == Amount(5, 3.0)


def test_requests_at_once_share_their_time() -> None:
    early, late = _record(prefill_s=1.0, decode_s=2.0), _record(prefill_s=1.5, decode_s=2.5)
    # From 1.0, the first outcome of either, to 4.0; only that outcome's token is left out.
    assert decode_amount([late, early]) == Amount(9, 3.0)
    assert end_to_end_amount([late, early]) == Amount(10, 4.0)


def test_rates_are_totals_not_means() -> None:
    assert rate([Amount(10, 1.0), Amount(10, 4.0)]) == 4.0
    assert rate([]) == 0.0
    assert rate([Amount(3, 0.0)]) == 0.0


def test_ratio_and_its_spread() -> None:
    own, plain = [Amount(10, 1.0), Amount(10, 4.0)], [Amount(10, 2.0), Amount(10, 4.0)]
    found = ratio(own, plain)
    assert found is not None
    assert found.value == pytest.approx(6 / 5)
    assert (found.least, found.most) == (1.0, 2.0)
    assert (found.low, found.high) == (1.0, 2.0)  # of two pairs a quarter of the resamples is twice the same
    assert ratio(own, plain) == found, "the bootstrap is seeded"
    assert ratio([], []) is None
    assert ratio([Amount(0, 0.0)], [Amount(4, 2.0)]) is None


def test_hits_are_told_apart_by_how_the_round_before_ended() -> None:
    rounds = (
        _round(0, 0, "start"),
        _round(2, 2, "k"),  # after no proposal: miss
        _round(3, 1, "hit"),  # after full acceptance: hit
        _round(2, 0, "hit"),  # after a rejection: hit
        _round(0, 0, "token"),  # after a rejection: miss
        _round(1, 1, "late"),  # after no proposal: miss
        _round(1, 0, "draft_down"),  # after full acceptance: miss
        _round(0, 0, "disabled"),  # could not hit: not counted
    )
    assert hit_shares([_record("overlapped K=8", rounds=rounds)]) == (Share(1, 2), Share(1, 2), Share(0, 2))


def test_rounds_are_counted_for_their_producer() -> None:
    made = [("", 0, 0), ("draft", 4, 2), ("head", 3, 3), ("head", 3, 0), ("lookup", 8, 1), ("", 0, 0)]
    rounds = tuple(RoundRecord(n, a, a + 1, "hit", 0.0, name) for name, n, a in [("draft", 9, 9), *made])
    found = by_producer([_record("overlapped K=8", rounds=rounds)])
    assert found == {"draft": (1, Share(2, 4)), "head": (2, Share(3, 6)), "lookup": (1, Share(1, 8))}, "but the first"


def test_summary_of_synthetic_records() -> None:
    plain = _record(identical=True, target_steps=((1, 0.5), (1, 0.25), (1, 0.75)))
    rounds = (_round(0, 0, "start"), _round(4, 2, "hit"), _round(2, 0, "token"))
    fast = _record(
        "overlapped K=8",
        decode_s=0.5,
        rounds=rounds,
        identical=True,
        target_steps=((5, 0.2),),
        draft_steps=((4, 0.1), (8, 0.3), (6, 0.2)),
    )
    one, two = summarize([plain, fast])
    assert (one.method, one.decode_tokens_per_s, one.tokens_per_step) == ("plain", 2.0, 1.0)
    assert (one.acceptance, one.target_step_s, one.draft_step_s) == (None, 0.5, None)
    assert two.decode_tokens_per_s == 8.0
    assert two.ratio is not None
    assert (two.ratio.value, two.ratio.low, two.ratio.high) == (4.0, 4.0, 4.0)
    assert two.end_to_end_tokens_per_s == pytest.approx(5 / 1.5)
    assert two.tokens_per_step == 2.0
    assert two.acceptance == pytest.approx(2 / 6)
    assert (two.after_rejection, two.after_no_proposal) == (Share(0, 1), Share(1, 1))
    assert two.causes == {"hit": 1, "token": 1}
    assert (two.draft_step_s, two.draft_step_nodes) == (0.2, 6.0)
    assert two.identical == Share(1, 1)
    assert best_of([one, two], "overlapped", 0.0) is two
    assert best_of([one, two], "sequential", 0.0) is None


def test_sequential_is_compared_at_its_best() -> None:
    records = [
        _record(),
        _record("sequential K=2", decode_s=1.0, draft_steps=((1, 0.1), (3, 9.0))),
        _record("sequential K=4", decode_s=1.6),
        _record("overlapped K=8", decode_s=0.8),
    ]
    best = best_of(summarize(records), "sequential", 0.0)
    assert best is not None
    assert best.method == "sequential K=2"
    assert one_token_steps(records) == (None, 0.1)
    settings = {"sessions": 1, "dtype": "float32"}
    document = documents.of_local(settings, {"target": ModelLabel("t", 100, 10)}, records)
    text = text_of("title", documents.run_of(document))
    assert "Over sequential K=2, the fastest of its mode: 1.25." in text
    assert "grown from the embedded pair, stands in for large weights" in text


def test_the_label_of_a_checkpoint() -> None:
    label = model_label(str(TARGET_DIR))
    assert label.num_parameters is not None
    assert 10e6 < label.num_parameters < 20e6
    assert label.grown_from is None
    assert model_label("some/hub-id") == ModelLabel("some/hub-id", None, None)


def test_a_head_alone_is_measured_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    run = ["--prompts", "1", "--max-tokens", "24", "--temperatures", "0", "--dtype", "float32", "--no-compile"]
    drafter = ["--drafter", "none", "--head", "medusa=paceline/embedded-medusa,3", "--baselines", "none"]
    assert main(["bench", "local", *run, *drafter, "--worker", "thread", "--json", str(file)]) == 0
    assert "drafter none, head medusa=paceline/embedded-medusa,3" in capsys.readouterr().out
    data = json.loads(file.read_text(encoding="utf-8"))
    assert [s["method"] for s in data["summaries"]] == ["plain", "overlapped K=8"]
    plain, headed = data["summaries"]
    assert plain["producers"] == {}
    assert headed["identical"] == {"hits": 1, "events": 1}
    rounds, tokens = headed["producers"]["head"]
    assert rounds > 0
    assert tokens["events"] >= rounds
    assert data["settings"]["heads"] == ["medusa=paceline/embedded-medusa,3"]
    assert "draft" not in data["models"]


@pytest.mark.nightly
def test_a_tiny_run_of_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    arguments = shlex.split(
        "bench local --no-compile --prompts 1 --max-tokens 16 --baselines all --temperatures 0,1 "
        f"--sequential-draft-tokens 3 --dtype float32 --json {file}"
    )
    assert main(arguments) == 0
    text = capsys.readouterr().out
    data = json.loads(file.read_text(encoding="utf-8"))
    assert set(data) == {
        "label",
        "environment",
        "settings",
        "models",
        "floor",
        "one_token_step_s",
        "summaries",
        "timelines",
        "requests",
    }
    known = {"cpu", "cores", "python", "torch", "transformers", "threads_per_engine"}
    assert known | {"cpu_flags", "commit", "load_average", "command"} <= set(data["environment"])
    assert data["floor"]["read_bytes_per_s"] > 1e8
    assert data["floor"]["target"]["weight_bytes"] > 4e7
    timed = ["plain", "sequential K=3", "overlapped K=8"]
    own = [*timed, "replicated", "colocated K=3"]
    theirs = ["transformers generate", "assisted generate", "prompt lookup generate", "continuous batching"]
    methods = [*timed, *theirs, *own[3:]]
    assert [t["method"] for t in data["timelines"]] == timed * 2
    for timeline in data["timelines"]:
        ends = [start + seconds for start, seconds, _ in timeline["target"]]
        assert all(start >= end - 1e-4 for (start, *_), end in zip(timeline["target"][1:], ends, strict=False))
        assert len(timeline["target"]) == len(timeline["rounds"]) - 1
        assert not (timeline["draft"] and timeline["method"] == "plain")  # a draft may be found not worth its cost
    for temperature in (0, 1):
        records = [r for r in data["requests"] if r["temperature"] == temperature]
        assert [r["method"] for r in records] == methods
        for record in records:
            assert len(record["token_ids"]) == 16
            assert sum(r["tokens"] for r in record["rounds"]) == 16
            assert record["prefill_s"] > 0
            assert record["decode_s"] > 0
            if record["method"] in own:
                assert record["identical"] is True
            if record["method"] in timed:
                assert len(record["target_steps"]) == len(record["rounds"]) - 1
                verified, accepted = zip(*record["ranks"], strict=True)
                assert all(right <= tried for tried, right in record["ranks"])
                assert verified[0] == 0 or record["mode"] != "plain"
                assert sum(accepted) <= sum(r["accepted"] for r in record["rounds"])
    drafting = [r for r in data["requests"] if r["method"] in timed[1:]]
    assert any(r["draft_steps"] for r in drafting), "one of four: a draft may be found not worth its cost"
    for method in methods:
        assert method in text
    assert data["one_token_step_s"]["target"] > 0


@pytest.mark.nightly
def test_several_sessions_with_every_baseline(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    arguments = shlex.split(
        "bench local --no-compile --prompts 3 --sessions 3 --max-tokens 12 --baselines all --temperatures 0 "
        f"--sequential-draft-tokens 3 --dtype float32 --json {file}"
    )
    assert main(arguments) == 0
    data = json.loads(file.read_text(encoding="utf-8"))
    of = {s["method"]: s for s in data["summaries"]}
    assert len(of) == 9
    plain = {r["prompt"]: r["token_ids"] for r in data["requests"] if r["method"] == "plain"}
    assert len(plain) == 3
    for method in ("transformers generate", "continuous batching", "prompt lookup generate"):
        records = [r for r in data["requests"] if r["method"] == method]
        assert [len(r["token_ids"]) for r in records] == [12] * 3
        # float32 and greedy: padding and paged attention round a little differently, so most must agree, not all
        assert sum(r["token_ids"] == plain[r["prompt"]] for r in records) >= 2
    batch = [r for r in data["requests"] if r["method"] == "transformers generate"]
    assert len({tuple(round_["at_s"] for round_ in r["rounds"]) for r in batch}) == 1, "a static batch ends together"
    serial = [r for r in data["requests"] if r["method"] == "assisted generate"]
    ends = [r["prefill_s"] + r["decode_s"] for r in serial]
    assert all(later["prefill_s"] > end for end, later in zip(ends, serial[1:], strict=False)), "one after the other"
    assert of["colocated K=3"]["identical"] == {"hits": 3, "events": 3}
