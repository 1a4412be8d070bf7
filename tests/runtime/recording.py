"""An engine that keeps what it is sent and answers questions, for any connection; a process imports nothing else."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.messages import CloseSession, OpenSession, SessionFailed


class Recording:
    """Answers each opened session by its failure, the one message that both kinds of engine send.

    The first word of the session's id says what it does: ``echo`` tells the length of its context, ``tell`` what came
    before, ``large`` much; ``raise`` ends the engine, ``stuck`` keeps it until the gate is open, ``tick`` is answered
    after three steps without a message, ``hold`` never.
    """

    def __init__(self, emit: Any, gate: Path) -> None:
        self.emit, self.gate = emit, gate
        self.said: list[str] = []
        self.waiting: list[OpenSession] = []
        self.ticking: OpenSession | None = None
        self.ticks = 0

    def receive(self, messages: Sequence[Any]) -> None:
        for message in messages:
            if isinstance(message, CloseSession):
                self.said.append(f"close {message.session_id}")
            else:
                self.said.append(message.session_id)
                self.waiting.append(message)

    def step(self) -> bool:
        if self.ticking is not None:
            self.ticks += 1
            if self.ticks >= 3:
                self.answer(self.ticking, "three steps")
                self.ticking = None
            return False
        if not self.waiting:
            return False
        message = self.waiting.pop(0)
        match message.session_id.partition(" ")[0]:
            case "echo":
                self.answer(message, str(len(message.token_ids)))
            case "tell":
                self.answer(message, ", ".join(self.said))
            case "large":
                self.answer(message, "x" * 3_000_000)
            case "raise":
                raise RuntimeError("out of order")
            case "stuck":
                while not self.gate.exists():
                    time.sleep(0.005)
            case "tick":
                self.ticking = message
        return True

    def answer(self, message: OpenSession, text: str) -> None:
        self.emit([SessionFailed(message.session_id, message.epoch, text)])

    def wait_s(self) -> float | None:
        return None if self.ticking is None else 0.001

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self.gate.with_name("closed").touch()


@dataclass(frozen=True)
class Build:
    """Builds the engine. The file ``gate`` lets it out of a step; it leaves a file ``closed`` there at its end."""

    gate: Path

    def __call__(self, emit: Any) -> Recording:
        return Recording(emit, self.gate)
