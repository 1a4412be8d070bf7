"""Stand-ins that many tests need: a clock, an engine without work, a drafter that keeps the texts of its sessions."""

from collections.abc import Callable, Sequence
from typing import Any


class Clock:
    """Virtual seconds."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Idle:
    """An engine that takes messages, and does nothing of its own accord."""

    def __init__(self) -> None:
        self.received: list[Any] = []

    def receive(self, messages: Sequence[Any]) -> None:
        self.received += messages

    def step(self) -> bool:
        return False

    def wait_s(self) -> float | None:
        return None

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


class Scripted(Idle):
    """An engine that answers as told and keeps what it was sent."""

    def __init__(self, emit: Callable[[Sequence[Any]], None], answer: Callable[[Any], Sequence[Any]]) -> None:
        super().__init__()
        self.emit, self.answer = emit, answer

    def receive(self, messages: Sequence[Any]) -> None:
        for message in messages:
            self.received.append(message)
            if answers := self.answer(message):
                self.emit(list(answers))
