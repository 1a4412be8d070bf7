"""A storm around a target on an accelerator: sessions leave, drafts and targets die, pages are too few."""

from typing import Any

import pytest
from tests.faults.pump import FaultyPump
from tests.support.late import LateDevice

from paceline.messages import Outcome

STEP_S = 1e-3
_CALM = 600
"""Ticks after which nothing happens any more."""


class Storm(FaultyPump):
    """A pump in it. Sessions whose name begins with "gone" leave at some time."""

    def __init__(
        self, target: Any, draft: Any, patch: pytest.MonkeyPatch, seed: int, *, targets_die: bool, pages: int = 12
    ) -> None:
        super().__init__(target, draft, seed=seed, pages=pages, max_step_tokens=100, draft_steps=(2, 6))
        self.told: list[Outcome] = []
        self.num_left = 0
        self._targets_die = targets_die
        self._device = LateDevice(self.clock, lambda num_tokens: STEP_S)
        self._device.install(patch)
        self._device.adopt(self.target.runner, target)
        self.each_tick = self._disturb

    def _harm(self, link: str, messages: list[Any]) -> list[Any]:
        if link == "from_target":
            self.told += [message for message in messages if isinstance(message, Outcome)]
        return super()._harm(link, messages)

    def _disturb(self) -> None:
        event = self.chaos.random()
        if self.ticks > _CALM:
            return
        if event < 0.01 and self._targets_die:
            self.kill_target(keeps_talking=True)
            self._device.adopt(self.target.runner, self.models[0])
        elif event < 0.03 and not self.draft_dead:
            self.kill_draft()
        elif event < 0.13 and self.draft_dead:
            self.restart_draft()
        elif event < 0.25:
            leaving = [s for name, s in self.sessions.items() if name.startswith("gone") and not s.finished]
            for session in leaving[:1]:
                self.send(session.cancel())
                assert session.result is not None
                self.results[session.session_id] = session.result
                self.num_left += 1

    def require_totals(self) -> None:
        """Asserts that the targets have counted what they have told, each round once."""
        keys = {(each.session_id, each.epoch, each.context_len) for each in self.told}
        assert self.counts["rounds"] == len(keys) == len(self.told), "an outcome was lost or told twice"
        assert self.counts["tokens_emitted"] == sum(len(each.token_ids) for each in self.told)
        rounds = [each.round for each in self.told]
        assert self.counts["draft_rows"] + self.counts["lookup_rows"] == sum(each.num_drafted for each in rounds)
