"""Values that a benchmark keeps of rounds, requests and units. Pure: no engines, no clocks, no text.

A *unit* is the requests that run concurrently: of ``paceline bench local`` only its number is kept, in the requests
themselves; of ``paceline bench serve`` a UnitRecord.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

from paceline.types import Mode

LOCAL, SERVICE, ENDPOINT = "local", "service", "endpoint"
TRANSFORMERS = "transformers"
"""Name of the engine whose modes are all baselines."""


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One target step for one request."""

    drafted: int
    accepted: int
    tokens: int
    """Emitted tokens: the accepted ones and the next token, cut at the end of the request."""
    cause: str
    """A ``types.Cause``; empty for other servers, which do not report one."""
    at_s: float
    """Seconds from the submission of the request until the client saw the round."""
    producer: str = ""
    """The producer of the tokens: ``draft``, ``head`` or ``lookup``; empty if none were, or where that is not known."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request. Everything that is reported can be computed again from a list of these."""

    method: str
    mode: str
    """A ``types.Mode``, or the baseline."""
    draft_tokens: int
    """K; 0 where it does not apply."""
    temperature: float
    unit: int
    """Number of the unit; the same unit holds the same prompts for every method."""
    repeat: int
    prompt: str
    prompt_tokens: int
    token_ids: tuple[int, ...]
    prefill_s: float
    """Seconds from submission to the first outcome."""
    decode_s: float
    """Seconds from the first to the last outcome."""
    rounds: tuple[RoundRecord, ...]
    target_steps: tuple[tuple[int, float], ...] = ()
    """(tokens, seconds) of the target's steps while this unit decoded."""
    draft_steps: tuple[tuple[int, float], ...] = ()
    """(nodes, seconds) of the draft's tree steps while this unit decoded."""
    ranks: tuple[tuple[int, int], ...] = ()
    """(verified, accepted) tokens of the draft by rank while this unit decoded: positions on the accepted path where
    the token of this rank was verified and no earlier rank was right, and positions among these where it was right.
    Empty: not counted."""
    identical: bool | None = None
    """True if the tokens equal plain decoding's; None where that is not claimed."""
    category: str = ""
    """Task group of the prompt; empty if none was asked for."""
    submitted_s: float = 0.0
    """Seconds from the start of the unit to the submission."""
    num_counted: int | None = None
    """Number of emitted tokens, as counted by a server that does not send their ids."""
    cores: int = 0
    """Number of cores of the method; 0 where that is not recorded."""
    engine: str = ""
    """The engine, if it is not ours, where that is recorded."""

    @property
    def num_tokens(self) -> int:
        """Number of emitted tokens."""
        return len(self.token_ids) if self.num_counted is None else self.num_counted

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Reads what ``to_json`` gave; missing fields get their defaults, unknown ones are ignored.

        Raises:
            KeyError, TypeError: ``data`` is not a request.
        """
        known = {field.name for field in fields(cls)}
        values = {name: value for name, value in data.items() if name in known}
        for name in ("token_ids", "target_steps", "draft_steps", "ranks"):
            values[name] = tuple(tuple(v) if isinstance(v, list) else v for v in values.get(name) or ())
        values["rounds"] = tuple(RoundRecord(**r) for r in values["rounds"])
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json``; times to a microsecond, steps to a tenth of one."""
        data = asdict(self)
        for name in ("target_steps", "draft_steps"):
            data[name] = [(width, round(seconds, 7)) for width, seconds in data[name]]
        for found in data["rounds"]:
            found["at_s"] = round(found["at_s"], 6)
        return data


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to decode, and where."""

    place: str
    mode: Mode | None
    """Mode of the requests; None at an endpoint, which decodes as it likes."""

    @property
    def name(self) -> str:
        """Name in reports."""
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
    """Concurrent requests; 0 in an open load."""
    temperature: float
    repeat: int
    wall_s: float
    """Seconds from the first submission to the last end."""
    requests: tuple[RequestRecord, ...]
    """Answered requests. ``unit`` is the request's number; times are the client's, from its submission."""
    cached_tokens: int
    """Prompt tokens whose KV was cached already."""
    target: Mapping[str, float]
    """Growth of the target's counters; empty if it did not report in time."""
    cpu_s: Mapping[str, float]
    """CPU seconds by role; ``client`` is this process, which is also the relay of a local pipeline."""
    rate: float = 0.0
    """Arrivals per second; 0 in a closed load."""
    burstiness: float = 1.0
    failed: tuple[Failure, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Number of emitted tokens."""
        return sum(r.num_tokens for r in self.requests)

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``json``; token ids are left out, and rounds are lists of their values."""
        data = asdict(self)
        data["configuration"] = self.configuration.name
        for request in data["requests"]:
            token_ids, counted = request.pop("token_ids"), request.pop("num_counted")
            request["num_tokens"] = len(token_ids) if counted is None else counted
            names = ("drafted", "accepted", "cause", "at_s", "tokens")
            request["rounds"] = [[r[name] for name in names] for r in request["rounds"]]
        return data


@dataclass(frozen=True, slots=True)
class ServiceFacts:
    """Resources that a service takes before it has anything to do, and the round trip to its draft."""

    start_s: float
    idle_cpu: float
    """Cores that all of its processes take together while nothing runs."""
    rss_bytes: Mapping[str, int]
    """Resident bytes by role. Shared pages are counted in each process."""
    num_processes: int
    draft_link_s: float | None
    """Mean round trip to the draft, as the routers measure it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that ``paceline bench serve`` has measured."""

    units: list[UnitRecord]
    services: list[ServiceFacts]


def with_identity(units: Sequence[UnitRecord]) -> Iterator[UnitRecord]:
    """Compares each request with the same one by plain decoding in one process, at the smallest load that had it."""
    ours = [unit for unit in units if unit.configuration.place != ENDPOINT]
    plain: dict[tuple[float, int], tuple[int, ...]] = {}
    for unit in sorted(ours, key=lambda u: (u.configuration.place != LOCAL, u.configuration.mode is not Mode.PLAIN)):
        for request in unit.requests:
            plain.setdefault((unit.temperature, request.unit), request.token_ids)
    for unit in units:
        if unit.configuration.place != ENDPOINT:
            compared = (replace(r, identical=r.token_ids == plain[unit.temperature, r.unit]) for r in unit.requests)
            unit = replace(unit, requests=tuple(compared))
        yield unit


def differing(units: Sequence[UnitRecord]) -> list[tuple[UnitRecord, RequestRecord]]:
    """Requests whose tokens differ from plain decoding's in one process."""
    return [(unit, request) for unit in units for request in unit.requests if request.identical is False]
