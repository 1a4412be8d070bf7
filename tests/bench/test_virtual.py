"""``paceline bench virtual``: every kind of run, tiny, on the embedded pair."""

import argparse

import pytest

from paceline.cli.extras import MODULES, extras_of
from paceline.cli.main import build_parser
from paceline_bench import virtual


def rows_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[list[str]]:
    args = build_parser().parse_args(
        ["bench", "virtual", *arguments, "--prompts", "1", "--max-tokens", "24", "--temperatures", "0"]
    )
    assert virtual.run(args) == 0, "a text differs"
    return [line.split() for line in capsys.readouterr().out.splitlines()[2:]]


def test_overlapped_decoding_wins_where_it_takes_no_core(capsys: pytest.CaptureFixture[str]) -> None:
    sequential, *overlapped = rows_of(capsys, "overlap", "--sequential-draft-tokens", "2")
    assert sequential[1:3] == ["sequential", "K=2"]
    assert all(float(row[-1]) > 1.0 for row in overlapped)


def test_subtrees_bring_no_fewer_tokens_than_chains(capsys: pytest.CaptureFixture[str]) -> None:
    ((_, number, chain, tree, _),) = rows_of(capsys, "rows", "--rows", "6")
    assert (number, float(chain) > 1.0) == ("6", True)
    assert float(tree) >= float(chain) * 0.9


def test_hits_are_counted_apart_after_rejected_and_accepted_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    ((_, rule, accepted, after_rejected, after_accepted, rounds),) = rows_of(capsys, "hits")
    assert (rule, int(rounds) > 10) == ("greedy", True)
    assert all(0.0 < float(share) <= 1.0 for share in (accepted, after_accepted))
    assert 0.0 <= float(after_rejected) <= 1.0


def test_hints_change_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    none, some = rows_of(capsys, "hints", "--boundaries", "6")
    assert (none[1], some[1:4]) == ("none", ["6", "of", "8"])


def test_a_text_that_differs_is_an_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    serve, calls = virtual.serve, []

    def mistaken(*args: object) -> virtual.Served:
        found = serve(*args)  # type: ignore[arg-type]
        calls.append(found)
        found.texts = [[len(calls)]]
        return found

    monkeypatch.setattr(virtual, "serve", mistaken)
    with pytest.raises(AssertionError, match="a text differs"):
        rows_of(capsys, "hints", "--boundaries", "6")


@pytest.mark.parametrize("kind", ["local", "serve", "endpoint", "sweep", "compare", "virtual", "parts", "report"])
def test_a_kind_of_benchmark_names_what_it_needs(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["bench", "--help"])
    assert f"    {kind} " in capsys.readouterr().out
    extras = extras_of(argparse.Namespace(command="bench", bench=kind))
    assert extras
    assert all(extra in MODULES for extra in extras)
