"""What clients see when a part of the service dies or hangs under their streams, again and again.

    python benchmarks/faults.py --repeats 10 --json faults.json

A real ``paceline serve`` with two routers, two drafts and a target to spare; a fixed number of streams of long answers
goes on all the time through one client, which resumes streams that break. Before each fault everything has to be
whole, and after it until it is whole again every stream is compared with plain decoding: failed requests, answers that
differ, tokens lost or doubled, the longest gap between two messages of a stream, and the time until all replicas serve
again. ``--strangers``: that many streams of clients that know nothing of this service, each on a connection of its own,
whose errors are counted by their status. The row ``none`` is the same without a fault. Ends only processes that it has
started. Exit status 1 if an answer differs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import grpc

from paceline.checkpoint.files import embedded_paths
from paceline.client import AsyncClient
from paceline.config import LocalConfig, TargetModel
from paceline.errors import PacelineError
from paceline.local import LocalPipeline
from paceline.types import SamplingParams, SpeculationParams
from paceline.v1 import generation_pb2 as pb
from paceline.v1 import types_pb2
from paceline.v1.generation_pb2_grpc import GenerationServiceStub
from paceline_bench.processes import Process, ServiceProcess
from paceline_bench.prompts import held_out_prompts
from paceline_bench.traffic import Expected, Template, expect, fault_in, service_of, tell

SERVE = {
    "ray::ServeController": "controller",
    "ray::ProxyActor": "proxy",
    "ray::HAProxyManager": "haproxy manager",
}
"""How the commands of Serve's own processes begin -> role: the proxy is haproxy's fallback, the manager its keeper."""
KILLED = ("draft", "target", "router", "monitor", "haproxy", *SERVE.values())
PAUSED = ("draft", "target")
FAULTS = ("none", *(f"{role} killed" for role in KILLED), *(f"{role} paused" for role in PAUSED))
SETTLED_S = 3.0
"""Streams run for this long before a fault, and go on for this long after everything is whole."""
WHOLE_TIMEOUT_S = 180.0
LIMIT_S = 300.0
"""Deadline of a request."""


@dataclass
class Seen:
    """What clients saw of one fault."""

    fault: str
    requests: int = 0
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)
    """Status and text of each error that a stranger got."""
    gap_s: float = 0.0
    """Longest time between two messages of a stream, or before its first."""
    whole_s: float | None = None
    """Seconds until all replicas serve again; None: not within the limit."""


class Streams:
    """A fixed number of streams, each followed by the next."""

    def __init__(self, client: AsyncClient, templates: Sequence[Template], expected: Sequence[Expected]) -> None:
        self._client, self._templates, self._expected = client, templates, expected
        self._last: dict[int, float] = {}
        self._numbers = iter(range(10**9))
        self.seen = Seen("before")

    async def run(self, slot: int) -> None:
        """One stream after the other, for good."""
        while True:
            await self._one(slot)

    def gaps(self) -> None:
        """Counts the gaps that last still."""
        now = time.monotonic()
        self.seen.gap_s = max([self.seen.gap_s, *(now - last for last in self._last.values())])

    async def _one(self, slot: int) -> None:
        number = next(self._numbers) % len(self._templates)
        template, expected = self._templates[number], self._expected[number]
        self._last[slot] = time.monotonic()
        try:
            stream = self._client.generate(template.prompt, template.sampling, template.speculation, timeout_s=LIMIT_S)
            async for _ in stream:
                now = time.monotonic()
                self.seen.gap_s = max(self.seen.gap_s, now - self._last[slot])
                self._last[slot] = now
            fault = fault_in(await stream.result, expected, whole=True)
        except PacelineError as error:
            self.seen.failed.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(0.2)
        else:
            if fault is not None:
                self.seen.wrong.append(f"template {number}: {fault}")
        self.seen.requests += 1


async def stranger(address: str, streams: Streams, template: Template) -> None:
    """Streams one after the other over the bare protocol, without retries."""
    sampling = types_pb2.SamplingParams(max_tokens=template.sampling.max_tokens, ignore_eos=True)
    request = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=template.prompt), sampling_params=sampling)
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = GenerationServiceStub(channel)
        while True:
            try:
                async for _ in stub.Generate(request):
                    pass
            except grpc.aio.AioRpcError as error:
                streams.seen.strangers.append(f"{error.code().name} {error.details()}")
                await asyncio.sleep(0.2)


def role(process: Process) -> str:
    """Role of a process of the service, Serve's own told apart."""
    return next((name for title, name in SERVE.items() if process.command.startswith(title)), process.role)


class Faults:
    """Does to the service what the names say."""

    def __init__(self, service: ServiceProcess, client: AsyncClient, sizes: dict[str, int], pause_s: float) -> None:
        self._service, self._client, self._sizes, self._pause_s = service, client, sizes, pause_s
        self._rng = random.Random(0)

    async def do(self, fault: str) -> set[int]:
        """Does it to one process of that role, and returns the process ids that must be gone."""
        kind, _, how = fault.rpartition(" ")
        if fault == "none":
            return set()
        pids = [process.pid for process in self._service.family() if role(process) == kind]
        pid = self._rng.choice(pids)
        if how == "killed":
            os.kill(pid, signal.SIGKILL)
            return {pid}
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(self._pause_s)
        with contextlib.suppress(ProcessLookupError):  # replaced meanwhile
            os.kill(pid, signal.SIGCONT)
        return set()

    async def whole(self) -> bool:
        """True if as many replicas serve as there should be."""
        self._service.check()
        roles = [role(process) for process in self._service.family()]
        if any(roles.count(kind) < count for kind, count in self._sizes.items()):
            return False
        try:
            info = await self._client.server_info(timeout_s=5)
        except PacelineError:
            return False
        return all(
            sum(not status.draining for status in info.pools.get(kind, ())) >= count
            for kind, count in self._sizes.items()
            if kind in ("target", "draft", "router")
        )

    async def until_whole(self) -> float | None:
        """Seconds until then; None: not within the limit."""
        began = time.monotonic()
        while not await self.whole():
            if time.monotonic() - began > WHOLE_TIMEOUT_S:
                return None
            await asyncio.sleep(0.25)
        return time.monotonic() - began


async def measure(
    args: argparse.Namespace, service: ServiceProcess, templates: Sequence[Template], expected: Sequence[Expected]
) -> list[Seen]:
    """All faults in turn, each ``--repeats`` times."""
    sizes = {"target": args.targets, "draft": args.drafts, "router": args.routers, "monitor": 1, "haproxy": 1}
    sizes |= dict.fromkeys(SERVE.values(), 1)
    found: list[Seen] = []
    async with AsyncClient(service.address) as client, asyncio.TaskGroup() as group:
        await client.wait_ready(120)
        faults, streams = Faults(service, client, sizes, args.pause_s), Streams(client, templates, expected)
        tasks = [group.create_task(streams.run(slot)) for slot in range(args.streams)]
        strange = (stranger(service.address, streams, templates[n % len(templates)]) for n in range(args.strangers))
        tasks += [group.create_task(one) for one in strange]
        for _ in range(args.repeats):
            for fault in args.faults:
                if await faults.until_whole() is None:
                    raise SystemExit(f"the service was not whole before {fault!r}")
                await asyncio.sleep(SETTLED_S)
                streams.seen = seen = Seen(fault)
                began = time.monotonic()
                await faults.do(fault)
                await asyncio.sleep(1.0)  # whoever watches has to notice first
                if await faults.until_whole() is not None:
                    seen.whole_s = time.monotonic() - began
                await asyncio.sleep(SETTLED_S)
                streams.gaps()
                found.append(seen)
                print(row([seen]), file=sys.stderr, flush=True)
        for task in tasks:
            task.cancel()
    return found


def row(seen: Sequence[Seen]) -> str:
    """One line of the table: all times that a fault was done."""
    whole = [one.whole_s for one in seen]
    slowest = "never" if None in whole else f"{max(one for one in whole if one is not None):.1f}"
    gaps = sorted(one.gap_s for one in seen)
    return (
        f"{seen[0].fault:<18}{len(seen):>6}{sum(one.requests for one in seen):>10}"
        f"{sum(len(one.failed) for one in seen):>8}{sum(len(one.wrong) for one in seen):>7}"
        f"{gaps[len(gaps) // 2]:>12.1f}{gaps[-1]:>9.1f}{slowest:>11}"
    )


HEADER = (
    f"{'fault':<18}{'times':>6}{'requests':>10}{'failed':>8}{'wrong':>7}"
    f"{'gap median':>12}{'longest':>9}{'whole, s':>11}"
)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description="What clients see when a part of the service fails; see the module.")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="FAULT")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--strangers", type=int, default=0)
    parser.add_argument("--targets", type=int, default=2)
    parser.add_argument("--drafts", type=int, default=2)
    parser.add_argument("--routers", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--pause-s", type=float, default=20.0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    args, rng = parse(argv), random.Random(0)
    target, draft = embedded_paths()
    engine = {"compile": False, "max_sessions": args.streams}  # each target holds all of them
    with LocalPipeline(LocalConfig(target=TargetModel(path=str(target), compile=False))) as pipeline:
        prompts = [prompt.token_ids for prompt in held_out_prompts(pipeline.tokenizer, args.streams, 1)]
        templates = []
        for prompt in prompts:
            own = {"temperature": rng.choice([0.0, 1.0]), "seed": rng.getrandbits(64)}
            own |= {"presence_penalty": rng.choice([0.0, 0.5]), "max_tokens": args.max_tokens, "ignore_eos": True}
            templates.append(Template(prompt, SamplingParams(**own), SpeculationParams(), ()))
        expected = expect(pipeline, templates)
    config = service_of((target, draft), (engine, {"compile": False}), (args.targets, args.drafts))
    config["router_config"] = {"deployment_config": {"num_replicas": args.routers}}
    with ServiceProcess(config, say=tell) as service:
        found = asyncio.run(measure(args, service, templates, expected))
    names = list(dict.fromkeys(seen.fault for seen in found))
    print("\n".join([HEADER, *(row([seen for seen in found if seen.fault == name]) for name in names)]))
    reasons = Counter((one.fault, text) for one in found for text in [*one.failed, *one.wrong])
    reasons.update((one.fault, f"a stranger got {text}") for one in found for text in one.strangers)
    for (fault, text), times in reasons.items():
        print(f"{fault}: {times} times {text}")
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(seen) for seen in found], indent=1) + "\n", encoding="utf-8")
    return 1 if any(seen.wrong for seen in found) else 0


if __name__ == "__main__":
    sys.exit(main())
