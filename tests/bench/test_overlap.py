"""`paceline bench parts overlap`: the engine is real, the device a stub that is waited for."""

import itertools
import time

import pytest

from paceline_bench.parts import overlap


def measured(capfd: pytest.CaptureFixture[str], degree: str, *options: str) -> None:
    sizes = ("--sessions", "2", "--device-ms", "2", "--steps", "6", "--repeats", "1")
    overlap.main(["--ranks", degree, *sizes, *options])
    title, line = capfd.readouterr().out.splitlines()
    names = ("ranks", "sessions", "device ms", "serial ms", "ahead ms", "tokens/s", "hidden")
    assert title.split() == " ".join(names).split()
    num_ranks, num_sessions, device_ms, serial_ms, ahead_ms, tokens_per_s, _ = line.split()
    assert (num_ranks, num_sessions, device_ms) == (degree, "2", "2.00")
    assert float(serial_ms) > float(device_ms)
    per_step = float(tokens_per_s) * float(ahead_ms) / 1e3
    if "--drafts" in options:
        assert 6 <= per_step <= 18  # of two sessions, whose texts are made for at most nine each
    else:
        assert per_step == pytest.approx(2, rel=0.1)


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread's CPU time is 2 us more at each look, so that what the controller decides is always the same."""
    looks = itertools.count(1)
    monkeypatch.setattr(time, "thread_time", lambda: 2e-6 * next(looks))


@pytest.mark.usefixtures("ticks")
def test_both_ways_have_the_time_of_the_device(capfd: pytest.CaptureFixture[str]) -> None:
    measured(capfd, "1")


@pytest.mark.usefixtures("ticks")
def test_sessions_have_the_tokens_of_their_drafts(capfd: pytest.CaptureFixture[str]) -> None:
    """At least two are accepted in a step, and one more comes."""
    measured(capfd, "1", "--drafts")


@pytest.mark.slow
def test_the_other_ranks_take_the_steps_too(capfd: pytest.CaptureFixture[str]) -> None:
    """In a process, which takes seconds to begin."""
    measured(capfd, "2")
