"""`paceline bench sweep`: arguments, and a tiny run whose report can be rendered again."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from tests.support.refusals import refusal_of

from paceline.cli.main import main
from paceline_bench import sweep


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--parts", "light,dark"], "dark"),
        (["--max-tokens", "1"], "--max-tokens"),
        (["--sessions", "0"], "0"),
        (["--grow-target", "big"], "big"),
        (["--request-rate", "-1"], "-1"),
    ],
)
def test_a_bad_argument_is_refused_before_a_file_is_written(tmp_path: Path, arguments: list[str], named: str) -> None:
    assert named in refusal_of("bench", "sweep", "--out", str(tmp_path / "out"), *arguments)
    assert not (tmp_path / "out").exists()


def test_baselines_that_take_one_request_at_a_time_are_left_out_of_large_loads() -> None:
    assert "assisted" not in sweep._without(sweep._SERIAL)
    assert set(sweep._without(())) == {
        "transformers",
        "assisted",
        "lookup",
        "continuous",
        "replicated",
        "colocated",
    }


@pytest.mark.nightly
def test_a_tiny_sweep_and_its_report_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, again = tmp_path / "out", tmp_path / "again"
    arguments = shlex.split(
        "bench sweep --no-compile --grow-target none --grow-draft none --prompts 1 --max-tokens 8 --sessions "
        f"1,2 --temperatures 0,1 --parts light,groups --out {out}"
    )
    assert main(arguments) == 0
    assert {"light-1.json", "light-2.json", "groups.json", "report.html", "report.md"} < {p.name for p in out.iterdir()}
    groups = json.loads((out / "groups.json").read_text(encoding="utf-8"))
    assert len({r["category"] for r in groups["requests"]}) == 6
    files = [str(out / name) for name in ("light-1.json", "light-2.json", "groups.json")]
    capsys.readouterr()
    assert main(["bench", "report", *files, "--out", str(again)]) == 0
    assert (again / "report.md").read_text(encoding="utf-8") == (out / "report.md").read_text(encoding="utf-8")
