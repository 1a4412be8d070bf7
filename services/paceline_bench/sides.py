"""The sides of ``paceline bench serve``: the one-process pipeline, and a real service through its port."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from paceline.config import DraftModel, LocalConfig, TargetModel
from paceline.errors import EngineError
from paceline.local import LocalPipeline
from paceline.logs import narrate
from paceline.types import ReplicaStatus, SpeculationParams
from paceline_bench.jobs import Job, Reply, TimedChunks
from paceline_bench.processes import Process, ServiceProcess, cpu_by_role, family, read_process
from paceline_bench.records import ServiceFacts
from paceline_bench.settings import ServeSettings
from paceline_bench.steps import CountedEngine, WatchedFactory

if TYPE_CHECKING:
    from paceline.client import AsyncClient

_TARGET, _DRAFT = "bench-target", "bench-draft"
_REQUEST_TIMEOUT_S = 300.0
_IDLE_S = 3.0
_MAX_THREADS = 4096


class Side(Protocol):
    """Answers requests."""

    async def send(self, job: Job, params: SpeculationParams) -> Reply:
        """Answers one request.

        Raises:
            PacelineError: it was refused or failed.
        """
        ...

    def counters(self) -> Mapping[str, float]:
        """The counters of its target so far; empty if it does not report them."""
        ...


class Pipeline:
    """The one-process side: LocalPipeline, its processes and its target's counters. A context manager."""

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            settings = self._settings
            self._readers = stack.enter_context(ThreadPoolExecutor(_MAX_THREADS, "paceline-reader"))
            self._counters = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-"))) / "counters"
            run: dict[str, Any] = {"dtype": settings.dtype, "compile": settings.compile}
            config = LocalConfig(
                target=TargetModel(path=settings.target, max_sessions=settings.max_sessions, **run),
                draft=DraftModel(path=settings.draft, **run),
                generation_config="none",
            )
            before = {p.pid for p in family(os.getpid())}
            factory = WatchedFactory(config.target_setup(), self._counters, CountedEngine)
            self.pipeline = stack.enter_context(LocalPipeline(config, target_factory=factory))
            workers = [p for p in family(os.getpid()) if p.pid not in before and "spawn_main" in p.command]
            self._roles = dict(zip((p.pid for p in sorted(workers, key=_by_age)), ("target", "draft"), strict=False))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds by role, since each process started."""
        seconds = dict.fromkeys(self._roles.values(), 0.0)
        for pid, role in self._roles.items():
            process = read_process(pid)
            seconds[role] += process.cpu_s if process is not None else 0.0
        return seconds

    def counters(self) -> dict[str, float]:
        """The target's counters as of its last idle moment."""
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads(self._counters.read_text(encoding="utf-8")))
        return {}

    async def send(self, job: Job, params: SpeculationParams) -> Reply:
        """Runs one request in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._run, job, params)

    def _run(self, job: Job, params: SpeculationParams) -> Reply:
        started, times = time.perf_counter(), TimedChunks()
        generation = self.pipeline.submit(job.prompt.token_ids, job.sampling, params)
        for chunk in generation:
            times.append((chunk, time.perf_counter() - started))
        return Reply.of_result(generation.result, times)


class Service:
    """A real ``paceline serve``, and a real client of its public port. A context manager."""

    def __init__(self, settings: ServeSettings, runner: asyncio.Runner) -> None:
        self._runner = runner
        engine = {"dtype": settings.dtype, "compile": settings.compile}
        config = {
            "target_config": {
                "model_loading_config": {"model_id": _TARGET, "model_source": settings.target},
                "engine_kwargs": {**engine, "max_sessions": settings.max_sessions},
            },
            "draft_config": {
                "model_loading_config": {"model_id": _DRAFT, "model_source": settings.draft},
                "engine_kwargs": engine,
            },
            "router_config": {
                "max_queued_requests": settings.max_queued,
                "generation_config": "none",
            },
        }
        self.process = ServiceProcess(config, say=lambda line: narrate(f"  {line}"))
        self._client: AsyncClient | None = None

    def __enter__(self) -> Self:
        from paceline.client import AsyncClient

        started = time.monotonic()
        self.process.__enter__()
        try:
            self._client = AsyncClient(self.process.address)
            served = self._runner.run(self._client.wait_ready(60.0)).model_id
            if served != _TARGET:
                raise EngineError(f"{self.process.address} serves {served!r}: it is another service")
        except BaseException:
            self.__exit__()
            raise
        self.start_s = time.monotonic() - started
        return self

    def __exit__(self, *error: object) -> None:
        if self._client is not None:
            self._runner.run(self._client.aclose())
        self.process.stop()

    def facts(self) -> ServiceFacts:
        """Measures an idle service for some seconds."""
        before, began = self.process.family(), time.monotonic()
        time.sleep(_IDLE_S)
        after = self.process.family()
        idle = sum(cpu_by_role(before, after).values()) / (time.monotonic() - began)
        rss: dict[str, int] = {}
        for process in after:
            rss[process.role] = rss.get(process.role, 0) + process.rss_bytes
        return ServiceFacts(self.start_s, idle, rss, len(after), draft_link_s(self._metrics()))

    def _metrics(self) -> str:
        with urllib.request.urlopen(self.process.metrics_url, timeout=10) as answer:
            text: str = answer.read().decode()
        return text

    def counters(self) -> dict[str, float]:
        """Counters of all targets, summed; empty if the service does not report them."""
        return sum_counters(self._targets())

    def _targets(self) -> Sequence[ReplicaStatus]:
        assert self._client is not None
        return self._runner.run(self._client.server_info()).pools.get("target", ())

    async def send(self, job: Job, params: SpeculationParams) -> Reply:
        """Sends one request through the client."""
        assert self._client is not None
        started, times = time.perf_counter(), TimedChunks()
        async with self._client.generate(
            job.prompt.token_ids, job.sampling, params, timeout_s=_REQUEST_TIMEOUT_S
        ) as stream:
            async for chunk in stream:
                times.append((chunk, time.perf_counter() - started))
            return Reply.of_result(await stream.result, times)


def _by_age(process: Process) -> tuple[int, int]:
    return process.started, process.pid


def sum_counters(statuses: Sequence[ReplicaStatus]) -> dict[str, float]:
    """Sums the counters of several replicas."""
    total: dict[str, float] = {}
    for status in statuses:
        for name, value in status.counters.items():
            total[name] = total.get(name, 0.0) + value
    return total


def draft_link_s(exposition: str) -> float | None:
    """Mean round trip to the draft by the routers' metrics, in Prometheus' text; None if there are none."""
    found = dict(re.findall(r"^paceline_draft_link_seconds_(sum|count)(?:\{[^}]*\})? (\S+)", exposition, re.MULTILINE))
    count = float(found.get("count", 0))
    return float(found["sum"]) / count if count else None
