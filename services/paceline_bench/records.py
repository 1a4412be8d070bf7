"""What a benchmark keeps of every request, and the arithmetic on it. Pure: no engines, no clocks, no text.

Definitions. *Decode* is what comes after a request's first outcome, so prefill is in neither tokens nor seconds.
A *unit* is the requests that ran at once (one, unless sessions run concurrently). Rates are total tokens over
total seconds, never means of rates.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import median
from typing import Any, Self, TypeVar

from paceline.types import Cause

_MISSES = (Cause.TOKEN, Cause.K, Cause.LATE, Cause.DRAFT_DOWN)
_RESAMPLES = 1000
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One target step for one request."""

    drafted: int
    accepted: int
    tokens: int
    """Emitted: the accepted ones and the next token, cut at the end of the request."""
    cause: str
    """A ``types.Cause``; empty for transformers, which does not say."""
    at_s: float
    """When the client saw it, seconds since the request was submitted."""


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
    """Requests of the same unit ran at once; the same unit holds the same prompts for every method."""
    repeat: int
    prompt: str
    prompt_tokens: int
    token_ids: tuple[int, ...]
    prefill_s: float
    """From submission to the first outcome."""
    decode_s: float
    """From the first to the last outcome."""
    rounds: tuple[RoundRecord, ...]
    target_steps: tuple[tuple[int, float], ...] = ()
    """(tokens, seconds) of the target's steps while this unit decoded."""
    draft_steps: tuple[tuple[int, float], ...] = ()
    """(nodes, seconds) of the draft's tree steps while this unit decoded."""
    identical: bool | None = None
    """Whether the tokens are those of plain decoding; None where nobody claims that they are."""
    category: str = ""
    """Task group of the prompt; empty: none was asked for."""
    submitted_s: float = 0.0
    """Since the unit began."""
    num_counted: int | None = None
    """Emitted tokens of a server that does not tell their ids."""

    @property
    def num_tokens(self) -> int:
        """Emitted."""
        return len(self.token_ids) if self.num_counted is None else self.num_counted

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of ``to_json``; fields that are missing have their defaults. Raises KeyError or TypeError."""
        known = {field.name for field in fields(cls)}
        values = {name: value for name, value in data.items() if name in known}
        for name in ("token_ids", "target_steps", "draft_steps"):
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
class Share:
    """Hits among events, both counted."""

    hits: int = 0
    events: int = 0

    @property
    def rate(self) -> float | None:
        """None if there were no events."""
        return self.hits / self.events if self.events else None


@dataclass(frozen=True, slots=True)
class Ratio:
    """A speed-up over plain decoding with its spread."""

    value: float
    low: float
    high: float
    """95 % bootstrap interval over units, resampled in pairs with plain decoding."""
    least: float
    most: float
    """Over single units."""


@dataclass(frozen=True, slots=True)
class Summary:
    """One method at one temperature."""

    method: str
    mode: str
    temperature: float
    requests: int
    decode_tokens_per_s: float
    decode_interval: tuple[float, float]
    """95 % bootstrap interval over units."""
    stream_tokens_per_s: float
    """What single requests see: decode tokens over decode seconds, summed over requests."""
    end_to_end_tokens_per_s: float
    ratio: Ratio | None
    end_to_end_ratio: Ratio | None
    tokens_per_step: float
    """Decode tokens per target step, next token included: the acceptance length."""
    acceptance: float | None
    """Accepted draft tokens over proposed ones, next tokens excluded."""
    after_rejection: Share
    after_full_acceptance: Share
    after_no_proposal: Share
    causes: dict[str, int]
    target_step_s: float | None
    """Median."""
    draft_step_s: float | None
    draft_step_nodes: float | None
    """Mean nodes of a draft tree step."""
    identical: Share | None
    """Requests whose tokens are plain decoding's; None where that is not claimed."""


@dataclass(frozen=True, slots=True)
class Amount:
    """Tokens and the seconds that they took."""

    tokens: int
    seconds: float


def decode_amount(unit: Sequence[RequestRecord]) -> Amount:
    """From the first outcome of any request to the last of any; that first outcome's tokens are left out."""
    first = min(unit, key=lambda r: r.prefill_s)
    tokens = sum(r.num_tokens for r in unit) - (first.rounds[0].tokens if first.rounds else 0)
    return Amount(tokens, max(r.prefill_s + r.decode_s for r in unit) - first.prefill_s)


def end_to_end_amount(unit: Sequence[RequestRecord]) -> Amount:
    """From submission to the last outcome."""
    return Amount(sum(r.num_tokens for r in unit), max(r.prefill_s + r.decode_s for r in unit))


def rate(amounts: Sequence[Amount]) -> float:
    """Total tokens over total seconds; 0.0 if no time passed."""
    seconds = sum(a.seconds for a in amounts)
    return sum(a.tokens for a in amounts) / seconds if seconds > 0 else 0.0


def ratio(own: Sequence[Amount], plain: Sequence[Amount], seed: int = 0) -> Ratio | None:
    """Speed-up of paired units; None if there is nothing to divide by."""
    assert len(own) == len(plain), "units are paired"
    pairs = [(a, b) for a, b in zip(own, plain, strict=True) if rate([a]) > 0 and rate([b]) > 0]
    if not pairs:
        return None

    def of(sample: Sequence[tuple[Amount, Amount]]) -> float:
        return rate([a for a, _ in sample]) / rate([b for _, b in sample])

    singles = [of([pair]) for pair in pairs]
    return Ratio(of(pairs), *interval(pairs, of, seed), min(singles), max(singles))


def interval(
    items: Sequence[_Item], statistic: Callable[[Sequence[_Item]], float], seed: int = 0
) -> tuple[float, float]:
    """95 % bootstrap interval: percentiles over resamples of ``items``, which are independent. Seeded."""
    rng = random.Random(seed)
    resampled = sorted(statistic(rng.choices(items, k=len(items))) for _ in range(_RESAMPLES))
    cut = int(_RESAMPLES * 0.025)
    return resampled[cut], resampled[-cut - 1]


def hit_shares(records: Sequence[RequestRecord]) -> tuple[Share, Share, Share]:
    """Hits among the rounds that could hit, by how the round before ended: after a rejection, after full
    acceptance, after a round without a proposal. The first round of a request has none before it."""
    hits, events = Counter[int](), Counter[int]()
    for record in records:
        for before, after in zip(record.rounds, record.rounds[1:], strict=False):
            if after.cause != Cause.HIT and after.cause not in _MISSES:
                continue
            kind = 2 if before.drafted == 0 else 0 if before.accepted < before.drafted else 1
            events[kind] += 1
            hits[kind] += after.cause == Cause.HIT
    after_rejection, after_full, after_none = (Share(hits[kind], events[kind]) for kind in range(3))
    return after_rejection, after_full, after_none


def _units(records: Sequence[RequestRecord]) -> dict[tuple[int, int], list[RequestRecord]]:
    units: dict[tuple[int, int], list[RequestRecord]] = {}
    for record in records:
        units.setdefault((record.unit, record.repeat), []).append(record)
    return units


def summarise(records: Sequence[RequestRecord]) -> list[Summary]:
    """One summary per method and temperature, in the order of their first record."""
    cells: dict[tuple[float, str], list[RequestRecord]] = {}
    for record in records:
        cells.setdefault((record.temperature, record.method), []).append(record)
    return [_summary(cell, cells.get((temperature, "plain"))) for (temperature, _), cell in cells.items()]


def _summary(cell: Sequence[RequestRecord], plain: Sequence[RequestRecord] | None) -> Summary:
    units = _units(cell)

    def against_plain(amount: Callable[[Sequence[RequestRecord]], Amount]) -> Ratio | None:
        theirs = _units(plain or ())
        keys = [key for key in units if key in theirs]
        return ratio([amount(units[key]) for key in keys], [amount(theirs[key]) for key in keys])

    amounts = [decode_amount(unit) for unit in units.values()]
    later = [r for record in cell for r in record.rounds[1:]]
    drafted = sum(r.drafted for r in later)
    claims = [record.identical for record in cell if record.identical is not None]
    after_rejection, after_full, after_none = hit_shares(cell)
    # The requests of one unit ran at once and saw the same steps: count those of the first.
    target_steps = [step for unit in units.values() for step in unit[0].target_steps]
    draft_steps = [step for unit in units.values() for step in unit[0].draft_steps]
    return Summary(
        method=cell[0].method,
        mode=cell[0].mode,
        temperature=cell[0].temperature,
        requests=len(cell),
        decode_tokens_per_s=rate(amounts),
        decode_interval=interval(amounts, rate),
        stream_tokens_per_s=rate([decode_amount([record]) for record in cell]),
        end_to_end_tokens_per_s=rate([end_to_end_amount(unit) for unit in units.values()]),
        ratio=against_plain(decode_amount),
        end_to_end_ratio=against_plain(end_to_end_amount),
        tokens_per_step=sum(r.tokens for r in later) / len(later) if later else 0.0,
        acceptance=sum(r.accepted for r in later) / drafted if drafted else None,
        after_rejection=after_rejection,
        after_full_acceptance=after_full,
        after_no_proposal=after_none,
        causes=dict(Counter(r.cause for r in later if r.cause)),
        target_step_s=median(s for _, s in target_steps) if target_steps else None,
        draft_step_s=median(s for _, s in draft_steps) if draft_steps else None,
        draft_step_nodes=sum(w for w, _ in draft_steps) / len(draft_steps) if draft_steps else None,
        identical=Share(sum(claims), len(claims)) if claims else None,
    )


def best_of(summaries: Sequence[Summary], mode: str, temperature: float) -> Summary | None:
    """The fastest method of a mode at a temperature, by decode tokens/s; None if it was not measured."""
    of_mode = [s for s in summaries if s.mode == mode and s.temperature == temperature]
    return max(of_mode, key=lambda s: s.decode_tokens_per_s, default=None)


def one_token_steps(records: Sequence[RequestRecord]) -> tuple[float | None, float | None]:
    """Median seconds of a one-token target step (plain decoding) and of a one-node draft step (sequential)."""
    target = [s for r in records if r.mode == "plain" for w, s in r.target_steps if w == 1]
    draft = [s for r in records if r.mode == "sequential" for w, s in r.draft_steps if w == 1]
    return (median(target) if target else None), (median(draft) if draft else None)
