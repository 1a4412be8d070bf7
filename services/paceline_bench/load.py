"""The load generator.

    closed   ``sessions`` concurrent requests; the next one begins when one ends, so a slow server is asked less
    open     requests arrive by themselves, ``rate`` per second on average, whether or not the others have ended

Gaps between arrivals follow a gamma distribution of shape ``burstiness`` and mean 1 / rate, as in `vllm bench serve`:
1 is a Poisson process, less is burstier, more is more even.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from paceline.errors import PacelineError

_Reply = TypeVar("_Reply")


@dataclass(frozen=True, slots=True)
class Load:
    """Arrival process of requests."""

    sessions: int = 0
    """Concurrent requests; 0 in an open load."""
    rate: float = 0.0
    """Arrivals per second; 0 in a closed load."""
    burstiness: float = 1.0

    @property
    def name(self) -> str:
        """Name in reports."""
        if not self.rate:
            return f"{self.sessions} at once"
        bursts = "Poisson" if self.burstiness == 1 else f"gamma of shape {self.burstiness:g}"
        return f"{self.rate:g}/s, {bursts}"


@dataclass(frozen=True, slots=True)
class Sent(Generic[_Reply]):
    """A request and its answer."""

    submitted_s: float
    """Seconds from the start of the load to the submission."""
    reply: _Reply | PacelineError


def arrivals_s(load: Load, count: int, seed: int) -> list[float]:
    """Arrivals of ``count`` requests of an open load, in seconds since it began, the first at 0. Equal seeds give equal
    arrivals."""
    gaps = np.random.default_rng(seed).gamma(load.burstiness, 1 / (load.rate * load.burstiness), count - 1)
    return [0.0, *np.cumsum(gaps).tolist()]


async def drive(load: Load, count: int, seed: int, send: Callable[[int], Awaitable[_Reply]]) -> list[Sent[_Reply]]:
    """Sends requests 0 to ``count - 1`` and returns each with its answer. ``send`` must keep a deadline of its own.

    A PacelineError is the answer to a request; any other error ends the load.
    """
    done: dict[int, Sent[_Reply]] = {}
    began = time.perf_counter()

    async def run(number: int) -> None:
        submitted_s = time.perf_counter() - began
        try:
            done[number] = Sent(submitted_s, await send(number))
        except PacelineError as error:
            done[number] = Sent(submitted_s, error)

    async def arrive(number: int, at_s: float) -> None:
        await asyncio.sleep(max(0.0, began + at_s - time.perf_counter()))
        await run(number)

    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            await run(number)

    async with asyncio.TaskGroup() as group:
        if load.rate:
            for number, at_s in enumerate(arrivals_s(load, count, seed)):
                group.create_task(arrive(number, at_s))
        else:
            for _ in range(min(load.sessions, count)):
                group.create_task(work())
    return [done[number] for number in range(count)]
