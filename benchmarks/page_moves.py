"""The pause of a stream whose target drains: its KV pages moved to the next target, or its context computed again.

    python benchmarks/page_moves.py --target smollm2 --context 1500 --streams 1 4

Two targets in processes of their own and a router without Ray. Streams of equal contexts begin at one target, which
then drains; in turn their pages move, or not (``page_move_timeout_s: 0``). The pause is the time between the last
tokens of the old target and the first of the new one, the longest of all streams. Meanwhile a further stream runs at
the new target: the longest time between two of its tokens says how long the others hold it up. Both ways have the same
prompts and seeds, under salts of their own, so nothing is cached, and their tokens must be the same. Exit status 1 if
they are not, or if ``--backend nixl`` and a page did not come by NIXL. Without drafts, eagerly.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from paceline.checkpoint.files import Checkpoint
from paceline.config import LocalConfig, RouterConfig, TargetModel, apply_worker_environment
from paceline.metrics.registry import Registry
from paceline.metrics.router import RouterMetrics
from paceline.router.admission import TargetInfo
from paceline.router.pool import Member, StaticPool
from paceline.router.router import Router
from paceline.types import Mode, Request, Result, SamplingParams, SpeculationParams

PLAIN = SpeculationParams(mode=Mode.PLAIN)
BEFORE, AFTER = 12, 12
"""Tokens of each stream at the old target, at least, and after that."""
WINDOW_S = 0.5
"""The stream of the new target is watched for this long after the others have moved."""


@dataclass
class Pause:
    """One drain."""

    streams: int
    moved: bool
    pause_s: float
    """From the last tokens of the old target to the first of the new one: the longest of all streams."""
    other_gap_s: float
    """The longest time between two tokens of a stream that the new target already served."""
    pages: int
    bytes_by_nixl: int
    tokens: list[tuple[int, ...]]


def target(config: LocalConfig, name: str, pipe: Connection) -> None:
    """Runs a target replica until its parent ends."""
    apply_worker_environment()

    async def run() -> None:
        from paceline.runtime.server import engine_server

        server = engine_server(config.target_setup(), replica_id=name)
        await server.start()
        pipe.send(server.address)
        await asyncio.to_thread(multiprocessing.parent_process().join)  # type: ignore[union-attr]

    asyncio.run(run())


@contextlib.contextmanager
def targets(config: LocalConfig) -> Any:
    """Two targets."""
    context = multiprocessing.get_context("spawn")
    started, members = [], []
    for name in ("target-0", "target-1"):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=target, args=(config, name, theirs), daemon=True)
        process.start()
        started.append((process, name, ours))
    try:
        members = [Member(name, ours.recv()) for _, name, ours in started]
        yield members
    finally:
        for process, _, _ in started:
            process.terminate()


@contextlib.asynccontextmanager
async def routed(info: TargetInfo, member: Member, **settings: Any) -> Any:
    """A router with one target, and its pool."""
    pool = StaticPool("target", [member])
    router = Router(info, pool, None, RouterConfig(**settings), metrics=RouterMetrics(Registry("r"), "m"))
    await router.start()
    try:
        while not router.ready:
            await asyncio.sleep(0.01)
        yield router, pool
    finally:
        await router.stop()


class Stream:
    """One request, and when its chunks came."""

    def __init__(self, router: Router, request: Request) -> None:
        self.times: list[float] = []
        self.result: Result | None = None
        self.task = asyncio.create_task(self._run(router, request))

    async def _run(self, router: Router, request: Request) -> None:
        async with contextlib.aclosing(router.generate(request)) as items:
            async for item in items:
                if isinstance(item, Result):
                    self.result = item
                else:
                    self.times.append(time.perf_counter())

    async def until(self, count: int) -> None:
        """Waits for chunks."""
        while len(self.times) < count:
            await asyncio.sleep(0.002)

    def gap_s(self, after_s: float, until_s: float = float("inf")) -> float:
        """The longest time between two chunks, of which the second came within these times."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max((b - a for a, b in pairs if after_s <= b <= until_s), default=0.0)


def counted(router: Router, name: str) -> int:
    """A counter of all targets of a router."""
    return sum(int(status.counters.get(name, 0)) for status in router.statuses()["target"])


async def drain(
    info: TargetInfo, old: Member, new: Member, prompts: Sequence[tuple[int, ...]], salt: str, *, moved: bool
) -> Pause:
    """Drains ``old``, which serves the prompts, to ``new``."""
    sampling = SamplingParams(max_tokens=4 * (BEFORE + AFTER), seed=1, temperature=1.0, ignore_eos=True)
    async with (
        routed(info, old, page_move_timeout_s=30.0 if moved else 0.0) as (router, pool),
        routed(info, new) as (beside, _),
    ):
        streams = [
            Stream(router, Request(f"{salt}{i}", p, sampling, PLAIN, cache_salt=salt)) for i, p in enumerate(prompts)
        ]
        endless = sampling.model_copy(update={"max_tokens": 4000})
        other = Stream(beside, Request(f"{salt}other", "def main():", endless, PLAIN, cache_salt=salt))
        for stream in (*streams, other):
            await stream.until(BEFORE)
        pages, by_nixl = counted(beside, "pages_moved"), counted(beside, "page_bytes_by_nixl")
        pool.set_members([old, new])
        while len(router.targets.open_links()) < 2:
            await asyncio.sleep(0.005)
        begun, lengths = time.perf_counter(), [len(stream.times) for stream in streams]
        pool.set_members([new])
        for stream, length in zip(streams, lengths, strict=True):
            await stream.until(length + 2)
        ended = max(stream.times[length + 1] for stream, length in zip(streams, lengths, strict=True))
        await asyncio.sleep(WINDOW_S)
        await asyncio.gather(*(stream.task for stream in streams))
        beside.cancel(f"{salt}other")
        await other.task
        pages = counted(beside, "pages_moved") - pages
        by_nixl = counted(beside, "page_bytes_by_nixl") - by_nixl
        tokens = [stream.result.token_ids for stream in streams if stream.result is not None]
        pause_s = max(stream.gap_s(begun, ended) for stream in streams)
        return Pause(len(prompts), moved, pause_s, other.gap_s(begun, ended), pages, by_nixl, tokens)


def prompts_of(vocab_size: int, count: int, length: int, seed: int) -> list[tuple[int, ...]]:
    """Random tokens."""
    rng = random.Random(seed)
    return [tuple(rng.randrange(300, vocab_size) for _ in range(length)) for _ in range(count)]


async def measure(config: LocalConfig, args: argparse.Namespace, members: Sequence[Member]) -> list[Pause]:
    """All drains, in turn with and without moves."""
    checkpoint = Checkpoint.open(config.target.path)
    info = TargetInfo(checkpoint.tokenizer, config.target.max_model_len, checkpoint.eos_token_ids)
    pauses = []
    for repeat in range(args.repeats + 1):  # the first one warms up
        for count in args.streams:
            prompts = prompts_of(checkpoint.vocab_size, count, args.context, repeat)
            pair = []
            for moved in (True, False) if repeat % 2 else (False, True):
                old, new = members[:: -1 if moved else 1]
                pair.append(await drain(info, old, new, prompts, f"{repeat}-{count}-{moved}-", moved=moved))
            if pair[0].tokens != pair[1].tokens:
                raise SystemExit("the tokens of a moved session differ")
            if any(pause.pages and args.backend == "nixl" and not pause.bytes_by_nixl for pause in pair):
                raise SystemExit("pages did not come by NIXL")
            pauses += pair if repeat else []
            for each in pair:
                print({k: v for k, v in asdict(each).items() if k != "tokens"}, file=sys.stderr, flush=True)
    return pauses


def report(pauses: Sequence[Pause], context: int) -> str:
    """A table of medians."""
    rows = [f"context of {context} tokens; medians [least, most]", ""]
    for count in sorted({pause.streams for pause in pauses}):
        medians = {}
        for moved in (True, False):
            own = [p for p in pauses if p.streams == count and p.moved == moved]
            times, gaps = [p.pause_s for p in own], [p.other_gap_s for p in own]
            medians[moved] = statistics.median(times)
            rows.append(
                f"{count} streams, {'pages moved    ' if moved else 'computed again '}: pause {medians[moved]:6.3f} s"
                f" [{min(times):.3f}, {max(times):.3f}], longest gap of another stream {statistics.median(gaps):.3f} s"
                f" [{min(gaps):.3f}, {max(gaps):.3f}], pages {sum(p.pages for p in own) // len(own)}, n {len(own)}"
            )
        rows.append(f"{count} streams: the pause is {medians[False] / medians[True]:.1f} times shorter")
    return "\n".join(rows)


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2", help="the model (default: %(default)s)")
    parser.add_argument("--context", type=int, default=1500, help="tokens of each prompt (default: %(default)s)")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4], help="streams that move at once")
    parser.add_argument("--repeats", type=int, default=5, help="drains of each kind (default: %(default)s)")
    parser.add_argument("--backend", choices=["nixl", "host"], default="host", help="how pages move (default: host)")
    parser.add_argument("--json", type=Path, help="write all drains to this file")
    args = parser.parse_args()
    config = LocalConfig(
        target=TargetModel(
            path=args.target, max_model_len=4096, max_sessions=16, compile=False, kv_transfer_backend=args.backend
        ),
        draft=None,
        pin_cores=False,
    )
    with targets(config) as members:
        pauses = asyncio.run(measure(config, args, members))
    if args.json:
        args.json.write_text(json.dumps([asdict(pause) for pause in pauses]))
    print(report(pauses, args.context))


if __name__ == "__main__":
    main()
