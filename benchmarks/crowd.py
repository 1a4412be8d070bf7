"""What clients see when more come than there is room for: tries per answer, and how soon a refusal comes.

    python benchmarks/crowd.py --clients 150 --json crowd.json

A real ``paceline serve``; every client sends one request after the other, and after RESOURCE_EXHAUSTED tries again
when the service told it to. Printed: answers, tries of each, the time until a refusal, and what is left of the wait of
those that were served; and apart from these, what the first crowd was told, of which nothing had ended yet. A try
counts if it had ended when the time was over.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from paceline.checkpoint.files import embedded_paths
from paceline.client import AsyncClient
from paceline.errors import ResourceExhaustedError
from paceline.types import SamplingParams
from paceline_bench.processes import ServiceProcess
from paceline_bench.traffic import service_of, tell

PROMPT = "def read_file(path):"
WARM_UP_S = 20.0
"""The first answers all begin at one time, and the first crowd is told when to come before any has ended: nothing else
is counted before that crowd should have come back."""


@dataclass
class Seen:
    """What clients saw, from the end of the warm-up on."""

    tries: int = 0
    answers: int = 0
    failed: list[str] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    """Time until each refusal."""
    hints_s: list[float] = field(default_factory=list)
    first_hints_s: list[float] = field(default_factory=list)
    """What each client was told by its first try, before it was counted."""
    first_token_s: list[float] = field(default_factory=list)
    """Time until the first token of each answer, from the try that brought it."""


async def _client(client: AsyncClient, number: int, max_tokens: int, seen: Seen, begins_s: float) -> None:
    """Requests one after the other, for good."""
    for attempt in itertools.count():
        started = time.monotonic()
        sampling = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=number, ignore_eos=True)
        try:
            stream = client.generate(PROMPT, sampling, timeout_s=300.0)
            first_s = 0.0
            async for _ in stream:
                first_s = first_s or time.monotonic() - started
        except ResourceExhaustedError as error:
            if time.monotonic() >= begins_s:
                seen.tries += 1
                seen.refused_s.append(time.monotonic() - started)
                seen.hints_s.append(error.retry_after_s)
            elif attempt == 0:
                seen.first_hints_s.append(error.retry_after_s)
            await asyncio.sleep(error.retry_after_s)
            continue
        except Exception as error:
            seen.failed.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(1.0)
            continue
        if time.monotonic() >= begins_s:
            seen.tries += 1
            seen.answers += 1
            seen.first_token_s.append(first_s)


async def measure(args: argparse.Namespace, address: str) -> Seen:
    """All clients at once, for ``--seconds``."""
    seen = Seen()
    async with AsyncClient(address) as client:
        await client.wait_ready(120)
        begins_s = time.monotonic() + WARM_UP_S
        clients = (_client(client, number, args.max_tokens, seen, begins_s) for number in range(args.clients))
        crowd = [asyncio.create_task(one) for one in clients]
        await asyncio.sleep(WARM_UP_S + args.seconds)
        for task in crowd:
            task.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)
    return seen


def _quantiles(values: Sequence[float]) -> str:
    """Median and 99th percentile."""
    if not values:
        return "-"
    ordered = sorted(values)
    return f"{ordered[len(ordered) // 2]:.3f} s, p99 {ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]:.3f} s"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 if a request failed otherwise than by a refusal."""
    parser = argparse.ArgumentParser(description="What clients see of a crowd; see the module.")
    parser.add_argument("--clients", type=int, default=150)
    parser.add_argument("--sessions", type=int, default=16, help="that the target serves at once (default 16)")
    parser.add_argument("--queued", type=int, default=16, help="that may wait in the router (default 16)")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    engines = {"compile": False, "max_sessions": args.sessions}, {"compile": False}
    config = service_of(embedded_paths(), engines) | {"router_config": {"max_queued_requests": args.queued}}
    with ServiceProcess(config, say=tell) as service:
        seen = asyncio.run(measure(args, service.address))
    print(f"{args.clients} clients, {args.sessions} served at once, {args.queued} waiting, {args.seconds:g} s")
    print(f"answers          {seen.answers} ({seen.answers / args.seconds:.1f} a second), {len(seen.failed)} failed")
    print(f"tries an answer  {seen.tries / max(seen.answers, 1):.2f}")
    print(f"refused after    {_quantiles(seen.refused_s)}")
    print(f"told to wait     {_quantiles(seen.hints_s)}")
    print(f"first crowd told {_quantiles(seen.first_hints_s)}")
    print(f"first token      {_quantiles(seen.first_token_s)}")
    for text in sorted(set(seen.failed)):
        print(f"failed: {text}")
    if args.json is not None:
        args.json.write_text(json.dumps(asdict(seen), indent=1) + "\n", encoding="utf-8")
    return 1 if seen.failed else 0


if __name__ == "__main__":
    sys.exit(main())
