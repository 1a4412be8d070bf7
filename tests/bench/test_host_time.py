"""`paceline bench parts host-time --apart`: recorded calls are made again elsewhere, and what differs is an error."""

from typing import Any

import pytest

from paceline_bench.parts import host_time, replay


class Part:
    """Answers with how often it was asked, the batch and the time."""

    def __init__(self, clock: Any, first: int = 0) -> None:
        self._clock = clock
        self._num_calls = first

    def turn(self, batch: bytes) -> tuple[int, bytes, float]:
        self._num_calls += 1
        return self._num_calls, batch, self._clock()


def test_recorded_calls_give_the_same_results_by_the_clock_of_then() -> None:
    clock = replay.Clock()
    part = Part(clock)
    calls = replay.record(part, ["turn"], clock)
    for batch in (b"a", b"b"):
        clock()  # between two calls it may be read too
        part.turn(batch)
    assert [(call.arguments, call.result[:2]) for call in calls] == [((b"a",), (1, b"a")), ((b"b",), (2, b"b"))]
    assert [[call.result[2]] for call in calls] == [call.readings for call in calls]
    clock = replay.Clock()
    assert len(replay.play(Part(clock), calls, clock)) == 2


def test_a_part_that_does_something_else_is_an_error() -> None:
    clock = replay.Clock()
    part = Part(clock)
    calls = replay.record(part, ["turn"], clock)
    part.turn(b"a")
    clock = replay.Clock()
    with pytest.raises(RuntimeError, match=r"Part.turn, call 0 of 1: \(2, b'a'.* where \(1, b'a'.* was recorded"):
        replay.play(Part(clock, first=1), calls, clock)


def test_the_least_of_every_row_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = iter([(12, 100), (9, 300), (110, 200)])

    def apart(*_: object) -> list[tuple[str, ...]]:
        return [
            ("target plain", "0", str(n), "1.0", "", "", "", str(us), "")
            for n, us in zip((1, 16), next(turns), strict=True)
        ]

    monkeypatch.setattr(host_time, "apart", apart)
    rows = host_time.least("target", 16, [], 3)
    assert [(row[2], row[7]) for row in rows] == [("1", "9"), ("16", "100")]
    assert next(turns, None) is None


@pytest.mark.nightly
def test_each_part_has_its_rows_in_turns_and_apart(capfd: pytest.CaptureFixture[str]) -> None:
    options = ("--sessions", "2", "--temperatures", "0", "--steps", "8", "--apart", "--repeats", "2")
    host_time.main(options)
    lines = capfd.readouterr().out.splitlines()
    rows = [line.split()[:4] for line in lines if line.startswith(("target ", "draft ", "relay "))]
    once = [["target", "plain"], ["target", "overlapped"], ["draft", "overlapped"], ["relay", "plain"]]
    assert rows == [[*names, "0", "2"] for names in (*once, ["relay", "overlapped"])] * 2
