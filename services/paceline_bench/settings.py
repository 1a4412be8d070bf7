"""Settings of each kind of run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from paceline.config import Device, DType
from paceline.types import Acceptance, Mode
from paceline_bench.endpoint import EndpointSettings
from paceline_bench.load import Load
from paceline_bench.records import LOCAL, SERVICE

PARTS = ("light", "heavy", "groups", "service")
"""The parts of a sweep."""
SERVICE_ONLY = (
    *("target", "draft", "grow_target", "grow_draft", "dtype", "compile"),
    *("modes", "draft_tokens"),
)
"""Fields of ``ServeSettings`` that an endpoint has no part in."""
_WAVES = 2
"""Requests per session that a unit of a closed load has at least."""
_OPEN_REQUESTS = 32
"""Requests of a unit of an open load, unless a number is given."""


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Models, prompts and repeats, which every kind of run has."""

    target: str
    draft: str
    grow_target: int | None = None
    """Number of parameters that the target is grown to."""
    grow_draft: int | None = None
    """Number of parameters that the draft is grown to, or ``models.FIFTH``."""
    dtype: DType = "bfloat16"
    compile: bool = True
    num_prompts: int | None = None
    """Number of prompts, of each task group if any are given; None: the whole file, or as the load needs."""
    prompts_file: Path | None = None
    task_groups: tuple[str, ...] = ()
    max_tokens: int = 128
    temperatures: tuple[float, ...] = (0.0, 1.0)
    repeats: int = 1
    seed: int = 0

    def common(self) -> dict[str, Any]:
        """The fields that every kind of run has, by their names."""
        return {field.name: getattr(self, field.name) for field in fields(RunSettings)}


@dataclass(frozen=True, slots=True)
class Peer:
    """Another engine, and the Python of the environment that it is installed in."""

    engine: str
    python: str


@dataclass(frozen=True, slots=True)
class LocalSettings(RunSettings):
    """One run of ``paceline bench local``."""

    modes: tuple[Mode, ...] = tuple(Mode)
    baselines: tuple[str, ...] = ("transformers", "assisted")
    draft_tokens: tuple[int, ...] = (8,)
    sequential_draft_tokens: tuple[int, ...] = (2, 3, 4, 6)
    sessions: int = 1
    drafter: str = "model"
    """``Drafting.drafter``; without a draft model ``draft`` is empty."""
    heads: tuple[str, ...] = ()
    """``Drafting.heads``."""
    acceptance: Acceptance = Acceptance.COUPLED
    tree_step_tokens: int | None = None
    draft_device: Device = "auto"
    """Where the draft model runs."""
    worker: Literal["process", "thread"] = "process"
    cpu_threads: tuple[int, ...] = ()
    """Numbers of threads other than one that share the products of further targets."""
    peers: tuple[Peer, ...] = ()
    """Other engines to measure in addition to ours."""

    @property
    def thread_counts(self) -> tuple[int, ...]:
        """Numbers of threads that targets are measured with; empty without ``cpu_threads``."""
        return (1, *self.cpu_threads) if self.cpu_threads else ()

    @property
    def peer_cores(self) -> tuple[int, ...]:
        """Numbers of cores on which other engines are measured: one, two (a target and its draft), and the numbers that
        share a target's products, as far as the machine has them."""
        from paceline.runtime.workers import available_cores  # torch is for the kinds that run a model

        return tuple(n for n in sorted({1, 2, *self.cpu_threads}) if n <= max(1, len(available_cores())))


@dataclass(frozen=True, slots=True)
class ServeSettings(RunSettings):
    """One run of ``paceline bench serve`` or ``paceline bench endpoint``."""

    modes: tuple[Mode, ...] = (Mode.PLAIN, Mode.OVERLAPPED)
    sessions: tuple[int, ...] = (1, 4, 16)
    """Closed loads."""
    rates: tuple[float, ...] = ()
    """Open loads: arrivals per second."""
    burstiness: float = 1.0
    goodput: Mapping[str, float] = field(default_factory=dict)
    """Limits in milliseconds by ``latency.LIMITED``; empty if goodput is not reported."""
    places: tuple[str, ...] = (LOCAL, SERVICE)
    endpoint: EndpointSettings | None = None
    draft_tokens: int = 8

    @property
    def max_sessions(self) -> int:
        """Number of sessions that both targets are built for."""
        return max((16, *self.sessions))

    @property
    def max_queued(self) -> int:
        """Number of requests that may wait at the service."""
        return max(self.max_sessions, *map(self.num_requests, self.loads))

    @property
    def loads(self) -> list[Load]:
        """All loads, closed ones first."""
        closed = [Load(sessions=sessions) for sessions in self.sessions]
        return [*closed, *(Load(rate=rate, burstiness=self.burstiness) for rate in self.rates)]

    def num_requests(self, load: Load) -> int:
        """Number of requests in one unit of a load."""
        count = (self.num_prompts or 0) * max(1, len(self.task_groups))
        return count or _OPEN_REQUESTS if load.rate else max(count or 8, _WAVES * load.sessions)

    def public(self, names: Mapping[str, str]) -> dict[str, Any]:
        """Plain data for a JSON file: models by their ``names``, and without the endpoint's key."""
        endpoint = None if self.endpoint is None else self.endpoint.public()
        return {**asdict(replace(self, endpoint=endpoint)), **names}


@dataclass(frozen=True, slots=True)
class SweepSettings(RunSettings):
    """One run of ``paceline bench sweep``; ``grow_draft`` is of the heavy draft, and without it there is none."""

    num_prompts: int = 4
    max_tokens: int = 64
    temperatures: tuple[float, ...] = (0.0, 0.6, 1.0)
    parts: tuple[str, ...] = PARTS
    sessions: tuple[int, ...] = (1, 4, 16)
    rates: tuple[float, ...] = (1.0, 2.0)
