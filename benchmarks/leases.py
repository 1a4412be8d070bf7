"""What leases take: the open calls of a router through Ray Serve's handles, with no session behind them.

    python benchmarks/leases.py --leases 640 3200 12800

A Ray of its own with replicas that only hold leases, and this process as the router. Printed for each number of
leases: how many are opened and closed in a second, the CPU time that opening one takes in the router and in all other
processes, the share of a core that they take while nothing changes, and their memory.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import time
from collections.abc import AsyncIterator, Callable
from itertools import cycle

from ray import serve

from paceline.cli.table import table
from paceline.cluster.first_node import start_ray
from paceline.cluster.placement import ServePool
from paceline.cluster.replicas import _LEASE_BEAT_S
from paceline_bench.processes import family

_IDLE_S = 2 * _LEASE_BEAT_S + 5.0
_PATIENCE_S = 300.0
_POLL_S = 0.05
_HEADER = ("leases", "opened/s", "CPU ms each", "of the router", "idle, cores", "of the router", "KiB each", "closed/s")


@serve.deployment(
    max_ongoing_requests=1 << 20,
    ray_actor_options={"num_cpus": 0},
    request_router_config={"request_router_class": "paceline.cluster.placement.PoolRequestRouter"},
)
class Holder:
    """A replica that holds leases as a target does."""

    def __init__(self) -> None:
        self._num = 0

    def record_replica_metadata(self) -> dict[str, str]:
        """What the router learns of it. Nothing listens there."""
        return {"address": "127.0.0.1:1", "node": "one"}

    async def lease(self, session_id: str) -> AsyncIterator[None]:
        """Holds a lease until its caller cancels."""
        self._num += 1
        try:
            while True:
                yield None
                await asyncio.sleep(_LEASE_BEAT_S)
        finally:
            self._num -= 1

    async def num_leases(self) -> int:
        """Leases that are open here."""
        return self._num


class Readings:
    """CPU seconds and memory of this process and of those below it."""

    def __init__(self) -> None:
        processes = family(os.getpid())
        self.at_s = time.monotonic()
        self.all_s = sum(process.cpu_s for process in processes)
        self.router_s = next(process.cpu_s for process in processes if process.pid == os.getpid())
        self.num_bytes = sum(process.rss_bytes for process in processes)


async def until(holds: Callable[[], bool]) -> None:
    """Waits until a condition holds. Raises TimeoutError."""
    async with asyncio.timeout(_PATIENCE_S):
        while not holds():
            await asyncio.sleep(_POLL_S)


async def measure(pool: ServePool, num: int) -> tuple[str, ...]:
    """A row of the table."""
    gc.collect()
    members = cycle(pool.members())
    before = Readings()
    leases = [pool.lease(f"session-{i}", next(members)) for i in range(num)]
    await until(lambda: all(lease._held for lease in leases))
    opened = Readings()
    await asyncio.sleep(_IDLE_S)
    idle = Readings()
    for lease in leases:
        lease.close()
    await until(lambda: pool.num_leases == 0)
    closed_s, idle_s = time.monotonic() - idle.at_s, idle.at_s - opened.at_s
    cpu_ms = [1e3 * seconds / num for seconds in _spent(before, opened)]
    shares = [seconds / idle_s for seconds in _spent(opened, idle)]
    kib = (idle.num_bytes - before.num_bytes) / num / 1024
    row = (f"{num:,}", f"{num / (opened.at_s - before.at_s):,.0f}", *(f"{ms:.2f}" for ms in cpu_ms))
    return (*row, *(f"{share:.3f}" for share in shares), f"{kib:.0f}", f"{num / closed_s:,.0f}")


async def rows(handle: serve.handle.DeploymentHandle, num_replicas: int, numbers: list[int]) -> None:
    """Prints one row after the other."""
    pool = ServePool("target", handle)
    await until(lambda: len(pool.members()) == num_replicas)
    before = Readings()
    await asyncio.sleep(_IDLE_S)
    after = Readings()
    found = [("0", "", "", "", *(f"{cpu_s / _IDLE_S:.3f}" for cpu_s in _spent(before, after)), "", "")]
    for num in numbers:
        found.append(await measure(pool, num))
        print("\n".join(table([_HEADER, *found])), flush=True)
    closed_s = time.monotonic()
    while (held := max([await handle.num_leases.remote() for _ in range(8 * num_replicas)])) and (
        time.monotonic() - closed_s < _PATIENCE_S
    ):
        await asyncio.sleep(1.0)
    print(f"after {time.monotonic() - closed_s:.0f} s a replica holds at most {held} of them")
    await pool.stop()


def _spent(before: Readings, after: Readings) -> tuple[float, float]:
    return after.all_s - before.all_s, after.router_s - before.router_s


def main() -> None:
    """Starts Ray, measures, and ends it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leases", type=int, nargs="+", default=[640, 3200, 12800], metavar="N")
    parser.add_argument("--replicas", type=int, default=4, metavar="N", help="that hold them (default 4)")
    args = parser.parse_args()
    start_ray(num_cpus=args.replicas + 2, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(proxy_location="Disabled")
        handle = serve.run(Holder.options(num_replicas=args.replicas).bind(), name="leases", route_prefix=None)
        asyncio.run(rows(handle, args.replicas, args.leases))
    finally:
        serve.shutdown()


if __name__ == "__main__":
    main()
