"""``paceline bench parts``: every part has its flags, and ways take turns."""

import itertools

import pytest

from paceline.cli.main import build_parser
from paceline_bench.cli import PARTS_OF_A_STEP
from paceline_bench.parts import overlap, stream
from paceline_bench.parts.turns import in_turn


@pytest.mark.parametrize("name", PARTS_OF_A_STEP)
def test_every_part_has_its_flags(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = build_parser().parse_args(["bench", "parts", name, "--help"])
    with pytest.raises(SystemExit) as end:
        args.run(args)
    assert end.value.code == 0
    assert f"usage: paceline bench parts {name}" in capsys.readouterr().out


def test_ways_take_turns_and_the_first_round_is_not_counted() -> None:
    calls: list[str] = []
    ticks = itertools.count()
    ways = {name: lambda name=name: calls.append(name) for name in "ab"}  # type: ignore[misc]
    found = in_turn(ways, rounds=2, before=lambda: calls.append("-"), clock=lambda: float(next(ticks)))
    assert "".join(calls) == "-a-b" * 3
    assert found == {"a": [1.0, 1.0], "b": [1.0, 1.0]}


def test_steps_ahead_are_measured_on_a_stub_of_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    """The benchmark itself asserts that steps were launched ahead, and that none ran without a recording."""
    overlap.main(["--ranks", "1", "--sessions", "1", "3", "--steps", "4", "--device-ms", "1"])
    found = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert found == [["ranks", "sessions"], ["1", "1"], ["1", "3"]]


def test_chunks_of_streams_are_counted_over_grpc(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a window each token is a chunk, whatever else the machine does."""
    stream.main(["--streams", "2", "--rates", "1000", "--seconds", "0.02"])
    head, line = (text.split() for text in capsys.readouterr().out.splitlines())
    assert (head[:2], line[:3]) == (["streams", "tokens/s"], ["2", "1000", "1.00"])
    assert 0 < float(line[4]) <= 1
