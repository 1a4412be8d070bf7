"""Chunks of one client that leave together, by a clock that the test sets."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.support.mutants import Mutant, mutant

from paceline.router.outlet import Outlet, joined
from paceline.types import Cause, Chunk, PromptLogprobs, Round, Trace, Usage

WINDOW_S = 0.005


class Timers:
    """A clock, and what is to be called when."""

    def __init__(self) -> None:
        self.now = 100.0
        self.calls: dict[float, Callable[[], object]] = {}

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], object], /) -> Any:
        self.calls[when] = callback
        return self

    def cancel(self) -> None:
        self.calls.clear()

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for when in [when for when in self.calls if when <= self.now]:
            self.calls.pop(when)()


def chunk(i: int, *, accepted: int = 0, last: bool = False) -> Chunk:
    """The tokens ``10 i``, ``10 i + 1`` ... of one round, with a text and a likeliest token each."""
    ids = tuple(range(10 * i, 10 * i + accepted + 1))
    drafted = (True,) * accepted + (False,)
    texts = tuple((f"<{token}>", flag) for token, flag in zip(ids, drafted, strict=True))
    top = tuple(((token, -0.5),) for token in ids)
    logprobs = tuple(-token / 7 for token in ids)
    round_ = Round(accepted, accepted, Cause.HIT if accepted else Cause.DISABLED)
    return Chunk(ids, logprobs, drafted, texts, round_, Usage(3, ids[-1]), top_logprobs=top, last=last)


async def left(outlet: Outlet) -> list[Chunk] | None:
    """What leaves now; None: nothing does."""
    waiting = asyncio.ensure_future(outlet.due())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    if not waiting.done():
        waiting.cancel()
        return None
    return outlet.take()


async def run(gaps_s: list[float], window_s: float = WINDOW_S, *, ends: bool = True) -> list[tuple[float, list[int]]]:
    """When chunks leave after the first, and their tokens. One comes after each gap, the last of which ends the output;
    the client takes each chunk at once."""
    timers = Timers()
    outlet, out, coming = Outlet(window_s, timers), list[tuple[float, list[int]]](), 0.0
    times = [coming := coming + gap for gap in gaps_s]
    for step in range(round(max(times) / 0.0005) + 40):
        timers.advance(0.0005 if step else 0.0)
        for i, at in enumerate(times):
            if abs(at - step * 0.0005) < 0.0002:
                outlet.put(chunk(i, last=ends and i == len(times) - 1))
        for each in await left(outlet) or []:
            out.append((round(step * 0.0005, 4), [token // 10 for token in each.token_ids]))
    assert not len(outlet), "a lost tail"
    assert [i for _, each in out for i in each] == [*range(len(times))], "once each, in order"
    return out


async def test_a_stream_of_few_rounds_never_waits() -> None:
    assert await run([0.0, 0.014, 0.014, 0.003, 0.014]) == [
        (at, [i]) for i, at in enumerate([0.0, 0.014, 0.028, 0.031, 0.045])
    ]


async def test_rounds_that_follow_one_another_fast_leave_together() -> None:
    """The first one and the last one leave at once."""
    assert await run([0.0] + [0.001] * 12) == [
        (0.0, [0]),
        (0.005, [1, 2, 3, 4, 5]),
        (0.01, [6, 7, 8, 9, 10]),
        (0.012, [11, 12]),
    ]


async def test_the_last_rounds_of_a_burst_leave_with_the_window() -> None:
    assert await run([0.0, 0.001, 0.001], ends=False) == [(0.0, [0]), (0.005, [1, 2])]


async def test_without_a_window_each_round_is_a_chunk() -> None:
    assert await run([0.0] + [0.0005] * 6, window_s=0.0) == [(i * 0.0005, [i]) for i in range(7)]


async def test_what_comes_while_the_client_takes_a_chunk_leaves_with_the_next() -> None:
    timers = Timers()
    outlet = Outlet(WINDOW_S, timers)
    outlet.put(chunk(0))
    assert await left(outlet) == [chunk(0)]
    for i in range(1, 4):
        timers.advance(0.02)
        outlet.put(chunk(i))
    (one,) = await left(outlet) or []
    assert one.token_ids == (10, 20, 30)


async def test_an_error_and_a_result_end_the_wait() -> None:
    timers = Timers()
    outlet = Outlet(WINDOW_S, timers)
    outlet.put(chunk(0))
    await left(outlet)
    timers.advance(0.001)
    outlet.put(chunk(1))
    assert await left(outlet) is None
    outlet.flush()
    assert await left(outlet) == [chunk(1)]
    assert not timers.calls


def test_a_chunk_of_several_rounds_holds_all_that_they_had() -> None:
    parts = [chunk(1, accepted=2), chunk(2), chunk(3, accepted=1, last=True)]
    (one,) = joined(parts)
    for name in ("token_ids", "logprobs", "drafted", "segments", "top_logprobs"):
        assert getattr(one, name) == tuple(value for part in parts for value in getattr(part, name)), name
    assert one.rounds == tuple(part.round for part in parts)
    assert one.tokens_by_round() == [3, 1, 2]
    assert (one.usage, one.last, one.text) == (parts[-1].usage, True, "".join(part.text for part in parts))
    (again,) = joined([*joined(parts[:2]), parts[2]])
    assert again == one


def test_traces_parts_of_the_prompt_and_released_text_stay_alone() -> None:
    scores = Chunk((), (), (), (), None, Usage(3, 0), prompt_logprobs=PromptLogprobs(1, ()))
    text = Chunk((), (), (), (("tail", False),), None, Usage(3, 2))
    traced = Chunk((1,), (-1.0,), (False,), (), Round(0, 0, Cause.HIT), trace=Trace(0.0, 1.0, (), None, ()))
    assert joined([scores, scores, chunk(1), chunk(2), text, traced, traced]) == [
        *[scores, scores],
        *joined([chunk(1), chunk(2)]),
        *[text, traced, traced],
    ]


def test_a_chunk_is_bounded() -> None:
    sizes = [len(each.token_ids) for each in joined([chunk(i, accepted=9) for i in range(30)])]
    assert sizes == [70, 70, 70, 70, 20]


# -- mutants -----------------------------------------------------------------------------------------------------------


@mutant(Outlet, "take")
def the_tail_is_lost(original: Any, outlet: Outlet) -> list[Chunk]:
    return original(outlet)[:1] if len(outlet) < 3 else original(outlet)[:0]


@mutant(Outlet, "waits")
def every_round_waits(original: Any, outlet: Outlet, chunk: Chunk, now: float) -> bool:
    return not chunk.last


@mutant(Outlet, "waits")
def the_last_round_waits(original: Any, outlet: Outlet, chunk: Chunk, now: float) -> bool:
    return bool(original(outlet, replace(chunk, last=False), now))


@pytest.mark.parametrize(
    ("change", "check"),
    [
        (the_tail_is_lost, test_rounds_that_follow_one_another_fast_leave_together),
        (every_round_waits, test_a_stream_of_few_rounds_never_waits),
        (the_last_round_waits, test_rounds_that_follow_one_another_fast_leave_together),
    ],
    ids=lambda each: each.__name__,
)
async def test_wrong_chunks_are_noticed(change: Mutant, check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch)
    with pytest.raises(AssertionError):
        await check()
