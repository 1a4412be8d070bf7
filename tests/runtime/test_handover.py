"""Calls from threads into a loop: all of them, in order, and without giving the interpreter up."""

import asyncio
import ctypes
import gc
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from paceline.runtime import handover
from paceline.runtime.handover import Handover

TIMEOUT_S = 60


def run(body: Callable[[Handover, asyncio.AbstractEventLoop], Any]) -> Any:
    async def main() -> Any:
        loop = asyncio.get_running_loop()
        made = Handover(loop)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await body(made, loop)
        finally:
            made.close()

    return asyncio.run(main())


def test_calls_of_every_thread_come_in_its_order() -> None:
    taken: list[tuple[int, int]] = []

    async def body(made: Handover, loop: asyncio.AbstractEventLoop) -> None:
        done = asyncio.Event()

        def take(thread: int, number: int) -> None:
            taken.append((thread, number))
            if len(taken) == 4 * 2_000:
                done.set()

        def calls(thread: int) -> None:
            for number in range(2_000):
                made.call(take, thread, number)

        threads = [threading.Thread(target=calls, args=(thread,)) for thread in range(4)]
        for thread in threads:
            thread.start()
        await done.wait()
        for thread in threads:
            thread.join()

    run(body)
    for thread in range(4):
        assert [number for of, number in taken if of == thread] == list(range(2_000))


def went_on_first(made_call: threading.Event) -> bool:
    """True if a thread that calls goes on to its next statements before the loop makes the call, and sets the event."""

    async def body(made: Handover, loop: asyncio.AbstractEventLoop) -> bool:
        found: asyncio.Future[bool] = loop.create_future()
        went_on: list[int] = []

        def take() -> None:
            found.set_result(went_on == [1000])
            made_call.set()

        def calls() -> None:
            made.call(take)
            went_on.append(sum(1 for _ in range(1000)))

        thread = threading.Thread(target=calls)
        thread.start()
        result = await found
        thread.join()
        return result

    before = sys.getswitchinterval()
    sys.setswitchinterval(TIMEOUT_S)  # no thread has to give the interpreter up
    try:
        return bool(run(body))
    finally:
        sys.setswitchinterval(before)


def test_the_caller_keeps_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [went_on_first(threading.Event()) for _ in range(20)] == [True] * 20
    releasing, made_call = ctypes.CDLL(None).write, threading.Event()
    monkeypatch.setattr(handover, "write_with_lock", lambda *args: (releasing(*args), made_call.wait(TIMEOUT_S)))
    assert not went_on_first(made_call), "what gives it up is found out"


def test_a_call_that_fails_is_reported_and_the_next_ones_are_made() -> None:
    reported: list[dict[str, Any]] = []

    async def body(made: Handover, loop: asyncio.AbstractEventLoop) -> None:
        loop.set_exception_handler(lambda _, context: reported.append(context))
        done = asyncio.Event()
        made.call(lambda: 1 / 0)
        made.call(done.set)
        await done.wait()

    run(body)
    assert [type(context["exception"]) for context in reported] == [ZeroDivisionError]


def test_a_closed_one_makes_no_call_and_keeps_no_file_open() -> None:
    made_calls: list[int] = []

    async def body(made: Handover, loop: asyncio.AbstractEventLoop) -> None:
        made.close()
        made.close()
        for number in range(3):
            made.call(made_calls.append, number)
        await asyncio.sleep(0.05)

    before = os.listdir("/proc/self/fd")
    run(body)
    gc.collect()
    assert made_calls == []
    assert len(os.listdir("/proc/self/fd")) <= len(before)
