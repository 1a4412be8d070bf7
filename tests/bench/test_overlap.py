"""`paceline bench parts overlap`: the engine is real, the device a stub that is waited for."""

from __future__ import annotations

import pytest

from paceline_bench.parts import overlap


def measured(capfd: pytest.CaptureFixture[str], degree: str) -> None:
    overlap.main(["--ranks", degree, "--sessions", "2", "--device-ms", "2", "--steps", "6"])
    title, line = capfd.readouterr().out.splitlines()
    names = ("ranks", "sessions", "device ms", "serial ms", "ahead ms", "tokens/s", "hidden")
    assert title.split() == " ".join(names).split()
    num_ranks, num_sessions, device_ms, serial_ms, *_ = line.split()
    assert (num_ranks, num_sessions, device_ms) == (degree, "2", "2.00")
    assert float(serial_ms) > float(device_ms)


def test_both_ways_have_the_time_of_the_device(capfd: pytest.CaptureFixture[str]) -> None:
    measured(capfd, "1")


@pytest.mark.slow
def test_the_other_ranks_take_the_steps_too(capfd: pytest.CaptureFixture[str]) -> None:
    """In a process, which takes seconds to begin."""
    measured(capfd, "2")
