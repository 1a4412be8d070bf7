"""`paceline bench parts overlap`: the engine is real, the device a stub that is waited for."""

from __future__ import annotations

import pytest

from paceline_bench.parts import overlap


def test_both_ways_have_the_time_of_the_device(capfd: pytest.CaptureFixture[str]) -> None:
    overlap.main(["--sessions", "2", "--device-ms", "2", "--steps", "6"])
    title, line = capfd.readouterr().out.splitlines()
    names = ("sessions", "device ms", "serial ms", "ahead ms", "tokens/s", "hidden")
    assert title.split() == " ".join(names).split()
    num_sessions, device_ms, serial_ms, *_ = line.split()
    assert (num_sessions, device_ms) == ("2", "2.00")
    assert float(serial_ms) > float(device_ms)
