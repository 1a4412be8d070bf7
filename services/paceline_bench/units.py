"""What ``paceline bench serve`` keeps: units, each all requests of one configuration at one load. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.types import Mode
from paceline_bench.records import RequestRecord
from paceline_bench.sides import ServiceFacts

LOCAL, SERVICE, ENDPOINT = "local", "service", "endpoint"


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to decode, and where."""

    place: str
    mode: Mode | None
    """None: whatever the endpoint does."""

    @property
    def name(self) -> str:
        """As it is reported."""
        return self.place if self.mode is None else f"{self.place} {self.mode.value}"


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that got no answer, or a broken one."""

    number: int
    submitted_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class UnitRecord:
    """All requests of one configuration at one load, once."""

    configuration: Configuration
    sessions: int
    """At once; 0 in an open load."""
    temperature: float
    delay_ms: float
    repeat: int
    wall_s: float
    """From the first submission to the last end."""
    requests: tuple[RequestRecord, ...]
    """Those that were answered. ``unit`` is the request's number; times are the client's, since its submission."""
    cached_tokens: int
    """Prompt tokens whose KV was there already."""
    target: Mapping[str, float]
    """What the target's counters grew by; empty if it did not say in time."""
    cpu_s: Mapping[str, float]
    """CPU seconds by what a process does; ``client`` is this process, which is also the relay of a local pipeline."""
    rate: float = 0.0
    """Arrivals per second; 0 in a closed load."""
    burstiness: float = 1.0
    failed: tuple[Failure, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Emitted."""
        return sum(r.num_tokens for r in self.requests)

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json``; token ids and rounds are left out, their counts are not."""
        data = asdict(self)
        data["configuration"] = self.configuration.name
        for request in data["requests"]:
            token_ids, counted = request.pop("token_ids"), request.pop("num_counted")
            request["num_tokens"] = len(token_ids) if counted is None else counted
            fields = ("drafted", "accepted", "cause", "at_s", "tokens")
            request["rounds"] = [[r[name] for name in fields] for r in request["rounds"]]
        return data


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that was measured."""

    units: list[UnitRecord]
    services: list[ServiceFacts]


def with_identity(units: Sequence[UnitRecord]) -> Iterator[UnitRecord]:
    """Compares each request with the same one by plain decoding in one process, at the smallest load that had it."""
    plain: dict[tuple[float, int], tuple[int, ...]] = {}
    ordered = sorted(units, key=lambda u: (u.configuration.place != LOCAL, u.configuration.mode is not Mode.PLAIN))
    for unit in ordered:
        if unit.configuration.place == ENDPOINT:
            continue
        for request in unit.requests:
            plain.setdefault((unit.temperature, request.unit), request.token_ids)
    for unit in units:
        if unit.configuration.place == ENDPOINT:
            yield unit
            continue
        requests = (replace(r, identical=r.token_ids == plain[unit.temperature, r.unit]) for r in unit.requests)
        yield replace(unit, requests=tuple(requests))


def differing(units: Sequence[UnitRecord]) -> list[tuple[UnitRecord, RequestRecord]]:
    """Requests whose tokens are not those of plain decoding in one process."""
    return [(unit, request) for unit in units for request in unit.requests if request.identical is False]
