"""An error ends the sessions at fault and no others (``drafters/growing/blame.py``)."""

import pytest

from paceline.drafters.growing.blame import call_for_each
from paceline.drafters.protocol import DrafterSessionError
from paceline.errors import RanksLostError


class Broken:
    """Squares numbers; the sessions in ``bad`` raise."""

    def __init__(self, *bad: str, named: bool = False, alone: bool = True) -> None:
        self.bad, self.named, self.alone = bad, named, alone
        self.calls: list[list[str]] = []
        self.ended: list[str] = []

    def __call__(self, items: list[str]) -> int:
        self.calls.append(items)
        for item in items:
            if item[0] in self.bad:
                raise DrafterSessionError(item[0], "broken") if self.named else RuntimeError("broken")
        return len(items)

    def run(self, *items: str) -> list[tuple[list[str], int]]:
        """``call_for_each``; the session of "a1" is "a"."""
        return call_for_each(
            self,
            [*items],
            session_of=lambda item: item[0],
            on_failure=lambda _, sessions: self.ended.extend(sessions),
            alone=self.alone,
        )


def test_without_an_error_there_is_one_call() -> None:
    broken = Broken()
    assert broken.run("a1", "b1", "a2") == [(["a1", "b1", "a2"], 3)]
    assert not broken.ended


def test_the_named_session_ends_and_the_others_are_called_again_together() -> None:
    broken = Broken("a", named=True)
    assert broken.run("a1", "b1", "a2", "c1") == [(["b1", "c1"], 2)]
    assert broken.ended == ["a"]


def test_without_a_name_each_is_called_alone() -> None:
    broken = Broken("b")
    assert broken.run("a1", "b1", "a2", "c1") == [(["a1", "a2"], 2), (["c1"], 1)]
    assert broken.ended == ["b"]


def test_sessions_that_cannot_be_called_alone_end_together() -> None:
    broken = Broken("b", alone=False)
    assert broken.run("a1", "b1") == []
    assert (broken.ended, len(broken.calls)) == (["a", "b"], 1)


def test_a_name_that_is_not_among_the_sessions_is_none() -> None:
    def call(items: list[str]) -> None:
        raise DrafterSessionError("z", "another call's")

    ended: list[str] = []
    assert call_for_each(call, ["a"], session_of=str, on_failure=lambda _, s: ended.extend(s)) == []
    assert ended == ["a"]


def test_a_lost_rank_is_no_sessions_fault() -> None:
    def call(items: list[str]) -> None:
        raise RanksLostError("gone")

    with pytest.raises(RanksLostError):
        call_for_each(call, ["a"], session_of=str, on_failure=lambda *_: pytest.fail("a session was blamed"))
