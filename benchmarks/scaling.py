"""A scaling trace: load in steps on a real Ray Serve cluster of this machine, and what both pools make of it.

    python benchmarks/scaling.py                  # runs it (less than six minutes), writes the records and the plot
    python benchmarks/scaling.py --plot-only      # the plot again, from the records

The embedded pair, replicas that reserve no cores, 1 to 3 targets of a few sessions each and 0 to 3 drafts. Two kinds of
load come and go by themselves: *plain* sessions, which no draft can help, and *speculating* ones. So each pool has to
move without the other. All replicas share the cores of one machine: that more of them make anything faster is not to be
seen here, only that requests no longer wait for a place.

Records: one line of the service's own GetServerInfo per second, and every request with its times.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.tokenizer import load_tokenizer
from paceline.client import AsyncClient, Client
from paceline.cluster.launch import Service
from paceline.cluster.ports import free_ports
from paceline.config import EMBEDDED_TARGET, ModelLoadingConfig, ServiceConfig
from paceline.errors import PacelineError
from paceline.types import Mode, ServerInfo, SpeculationParams
from paceline_bench.machine import environment
from paceline_bench.prompts import held_out_prompts

RECORDS, PLOT = Path("benchmarks/results/scaling.json"), Path("docs/scaling.svg")

POOLS = ("target", "draft")
MAX_TOKENS = 160
_WINDOW_S = 10.0


@dataclass(frozen=True, slots=True)
class Phase:
    """Sessions that are kept in progress, each beginning its next request when one has ended."""

    seconds: float
    plain: int
    speculating: int
    what: str


PHASES = (
    Phase(10, 0, 0, "nothing"),
    Phase(35, 2, 0, "a few plain"),
    Phase(50, 10, 0, "many plain"),
    Phase(45, 2, 0, "a few plain"),
    Phase(55, 0, 3, "a few speculating"),
    Phase(60, 0, 10, "many speculating"),
    Phase(45, 0, 0, "nothing"),
)


@dataclass(slots=True)
class Request:
    """One request; times in seconds since the trace began."""

    mode: str
    began_s: float
    first_s: float | None = None
    ended_s: float | None = None
    tokens: int = 0
    error: str | None = None


def config(phases_scale: float) -> ServiceConfig:
    """Quick policies: what takes minutes in production takes seconds here."""
    grpc_port, http_port = free_ports(2)
    no_cores = {"ray_actor_options": {"num_cpus": 0.0}, "graceful_shutdown_timeout_s": 30.0}
    pace = {"upscale_delay_s": 4.0, "downscale_delay_s": 12.0 * phases_scale, "max_replicas": 3}
    targets = pace | {"min_replicas": 1, "policy": {"window_s": 4.0}}
    drafts = pace | {"min_replicas": 0, "policy": {"window_s": 4.0, "probe_interval_s": 40.0, "probe_s": 20.0}}
    return ServiceConfig.parse(
        {
            "target_config": {
                "engine_kwargs": {"max_sessions": 4},
                "deployment_config": no_cores | {"autoscaling_config": targets},
            },
            "draft_config": {
                "model_loading_config": {"model_id": "paceline/embedded-draft"},
                "deployment_config": no_cores | {"autoscaling_config": drafts},
            },
            "router_config": {"deployment_config": no_cores},
            "server": {"host": "127.0.0.1", "grpc_port": grpc_port, "http_port": http_port},
            "log": {"level": "INFO"},
        }
    )


# -- running ---------------------------------------------------------------------------------------------------------


class Trace:
    """One run: clients, samples and requests."""

    def __init__(self, address: str, phases: Sequence[Phase], prompts: Sequence[tuple[int, ...]]) -> None:
        self._address, self._phases, self._prompts = address, phases, prompts
        self.requests: list[Request] = []
        self.samples: list[dict[str, Any]] = []
        self._wanted = {Mode.PLAIN: 0, Mode.OVERLAPPED: 0}
        self._running: dict[Mode, set[asyncio.Task[None]]] = {mode: set() for mode in self._wanted}
        self._began = 0.0
        self._number = 0

    async def run(self) -> None:
        """All phases."""
        async with AsyncClient(self._address) as client:
            self._began = time.monotonic()
            sampler = asyncio.create_task(self._sample(client))
            for phase in self._phases:
                self._wanted = {Mode.PLAIN: phase.plain, Mode.OVERLAPPED: phase.speculating}
                self._say(f"{phase.what}: {phase.plain} plain, {phase.speculating} speculating")
                end = time.monotonic() + phase.seconds
                while time.monotonic() < end:
                    self._fill(client)
                    await asyncio.sleep(0.1)
            self._wanted = dict.fromkeys(self._wanted, 0)
            await asyncio.gather(*(task for tasks in self._running.values() for task in tasks), return_exceptions=True)
            sampler.cancel()
            await asyncio.gather(sampler, return_exceptions=True)

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _say(self, text: str) -> None:
        print(f"{self._now():5.0f} s  {text}", file=sys.stderr, flush=True)

    def _fill(self, client: AsyncClient) -> None:
        for mode, wanted in self._wanted.items():
            running = self._running[mode] = {task for task in self._running[mode] if not task.done()}
            while len(running) < wanted:
                running.add(asyncio.create_task(self._session(client, mode)))

    async def _session(self, client: AsyncClient, mode: Mode) -> None:
        self._number += 1
        request = Request(mode.value, self._now())
        self.requests.append(request)
        prompt = self._prompts[self._number % len(self._prompts)]
        try:
            options: dict[str, Any] = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "seed": self._number}
            speculation = SpeculationParams(mode=mode)
            async with client.generate(prompt, speculation=speculation, timeout_s=120, **options) as stream:
                async for chunk in stream:
                    request.first_s = self._now() if request.first_s is None else request.first_s
                    request.tokens += len(chunk.token_ids)
        except PacelineError as error:
            request.error = f"{type(error).__name__}: {error}"
        request.ended_s = self._now()

    async def _sample(self, client: AsyncClient) -> None:
        while True:
            begun = self._now()
            try:
                self.samples.append(self._sample_of(await client.server_info(timeout_s=5.0), begun))
            except PacelineError as error:
                self._say(f"no sample: {error}")
            await asyncio.sleep(max(0.05, begun + 1.0 - self._now()))

    def _sample_of(self, info: ServerInfo, now: float) -> dict[str, Any]:
        last = self.samples[-1]["pools"] if self.samples else {}
        pools = {pool.name: asdict(pool) for pool in info.scaling}
        for name, pool in pools.items():
            before = last.get(name, {})
            if (pool["wanted"], pool["actual"]) != (before.get("wanted"), before.get("actual")):
                self._say(f"{name}: {pool['actual']} of {pool['wanted']}: {pool['reason']}")
        return {
            "at_s": round(now, 2),
            "plain": len(self._running[Mode.PLAIN]),
            "speculating": len(self._running[Mode.OVERLAPPED]),
            "queued": info.sessions_queued,
            "drafting": info.sessions_drafting,
            "busy": {name: [round(s.busy_share, 3) for s in info.pools.get(name, ())] for name in POOLS},
            "pools": pools,
        }


def measure(phases: Sequence[Phase], scale: float) -> dict[str, Any]:
    """Runs the service and the trace."""
    service_config = config(scale)
    tokenizer = load_tokenizer(ModelLoadingConfig(model_id=EMBEDDED_TARGET).tokenizer)
    prompts = [prompt.token_ids for prompt in held_out_prompts(tokenizer, 16)]
    with Service(service_config) as service:
        address = f"127.0.0.1:{service.config.server.grpc_port}"
        with Client(address) as client:
            client.wait_ready(timeout_s=300)
            client.generate(prompts[0], speculation=SpeculationParams(mode=Mode.PLAIN), max_tokens=16).result  # noqa: B018
        trace = Trace(address, phases, prompts)
        asyncio.run(trace.run())
    return {
        "environment": environment(),
        "phases": [asdict(phase) for phase in phases],
        "samples": trace.samples,
        "requests": [asdict(request) for request in trace.requests],
    }


# -- showing ---------------------------------------------------------------------------------------------------------


def latencies(requests: Sequence[dict[str, Any]], at: float, share: float) -> float | None:
    """The percentile of the times to the first token of requests that began within ten seconds around ``at``."""
    times = sorted(
        r["first_s"] - r["began_s"]
        for r in requests
        if r["first_s"] is not None and abs(r["began_s"] - at) <= _WINDOW_S / 2
    )
    return times[min(len(times) - 1, int(share * len(times)))] if times else None


def plot(records: dict[str, Any], path: Path) -> None:
    """Four panels over one time axis."""
    importlib.import_module("matplotlib").use("svg")
    plt = importlib.import_module("matplotlib.pyplot")
    plt.rcParams |= {"svg.hashsalt": "paceline", "font.size": 9}
    samples, requests = records["samples"], records["requests"]
    at = [sample["at_s"] for sample in samples]
    figure, axes = plt.subplots(4, 1, figsize=(9, 8), sharex=True, constrained_layout=True)
    axes[0].step(at, [s["plain"] for s in samples], where="post", label="plain", color="tab:gray")
    axes[0].step(at, [s["speculating"] for s in samples], where="post", label="speculating", color="tab:green")
    axes[0].step(at, [s["queued"] for s in samples], where="post", label="of them waiting", color="tab:red", lw=0.8)
    axes[0].set_ylabel("sessions")
    for axis, name, color in ((axes[1], "target", "tab:blue"), (axes[2], "draft", "tab:orange")):
        pools = [sample["pools"].get(name, {}) for sample in samples]
        axis.step(at, [p.get("wanted") for p in pools], where="post", label="wanted", color=color, ls="--")
        axis.step(at, [p.get("actual") for p in pools], where="post", label="actual", color=color, lw=2)
        axis.plot(at, [p.get("demand") for p in pools], label="needed", color="black", lw=0.6, alpha=0.6)
        axis.set_ylabel(f"{name}s")
        axis.set_ylim(-0.2, 3.6)
        axis.set_yticks(range(4))
    for share, style in ((0.5, "-"), (0.95, ":")):
        values = [latencies(requests, second, share) for second in at]
        axes[3].plot(at, values, style, label=f"p{share * 100:.0f}", color="tab:purple")
    axes[3].set_ylabel("first token, s")
    axes[3].set_yscale("log")
    axes[3].set_xlabel("seconds")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.legend(loc="upper left", fontsize=7, ncols=3)
        start = 0.0
        for phase in records["phases"]:
            axis.axvline(start, color="black", lw=0.4, alpha=0.5)
            start += phase["seconds"]
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def summary(records: dict[str, Any]) -> Iterator[str]:
    """A line for each phase."""
    start = 0.0
    for phase in records["phases"]:
        end = start + phase["seconds"]
        samples = [s for s in records["samples"] if start <= s["at_s"] < end]
        requests = [r for r in records["requests"] if start <= r["began_s"] < end]
        first = sorted(r["first_s"] - r["began_s"] for r in requests if r["first_s"] is not None)
        rates = [
            r["tokens"] / (r["ended_s"] - r["first_s"])
            for r in requests
            if r["first_s"] is not None and r["ended_s"] is not None and r["ended_s"] > r["first_s"]
        ]
        sizes = {name: [s["pools"][name]["actual"] for s in samples] for name in POOLS}
        text = ", ".join(f"{name}s {min(s)} to {max(s)}, {s[-1]} at its end" for name, s in sizes.items() if s)
        yield f"{start:4.0f} to {end:4.0f} s, {phase['plain']} plain, {phase['speculating']} speculating: {text}"
        if first:
            yield (
                f"     {len(requests)} requests, {sum(r['error'] is not None for r in requests)} failed; first token "
                f"p50 {statistics.median(first):.3f} s, p95 {first[int(0.95 * len(first))]:.3f} s; "
                f"{statistics.median(rates) if rates else 0:.0f} tokens/s each"
            )
        start = end


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0, metavar="X", help="of the phases' lengths (default 1)")
    parser.add_argument("--records", type=Path, default=RECORDS, metavar="FILE")
    parser.add_argument("--plot", type=Path, default=PLOT, metavar="FILE")
    parser.add_argument("--plot-only", action="store_true", help="from the records that are there")
    args = parser.parse_args(argv)
    if not args.plot_only:
        phases = [Phase(p.seconds * args.scale, p.plain, p.speculating, p.what) for p in PHASES]
        records = measure(phases, args.scale)
        args.records.parent.mkdir(parents=True, exist_ok=True)
        args.records.write_text(json.dumps(records, indent=None, separators=(",", ":")) + "\n", encoding="utf-8")
    records = json.loads(args.records.read_text(encoding="utf-8"))
    print("\n".join(summary(records)))
    plot(records, args.plot)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a cluster of its own, gone with it
    sys.exit(main())
