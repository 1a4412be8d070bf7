"""Measurements of ``paceline bench --json``: the inputs of the model, and the rows that test its predictions."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.errors.files import read_text
from paceline.plan.closed_form import MOST_LEAVES, RANKED, Load, Prediction, System, colocated, plain, predict
from paceline.plan.outcomes import MOST_POWER, Outcomes, crossing
from paceline.plan.results import Result
from paceline.plan.times import StepTable
from paceline.plan.trees import simulate
from paceline.types import Mode

_FAN_OUT = 6
_MOST_HITS = 0.995
_HALVINGS = 12
_FEWEST_SIBLINGS, _LEAST_POWER = 100, 0.1


@dataclass(frozen=True, slots=True)
class Row:
    """One measured configuration."""

    name: str
    temperature: float
    mode: Mode
    k: int
    sessions: int
    tokens_per_s: float
    tokens_per_round: float
    hit_rate: float | None


class Drafting(StrEnum):
    """Where a target whose products some cores share gets its drafts."""

    PLAIN = "plain"
    COLOCATED = "co-located"


@dataclass(frozen=True, slots=True)
class CoreTimes:
    """Times of a target with its products shared among cores, from ``paceline bench local --cpu-threads``."""

    target: StepTable
    """Seconds of its step by tokens."""
    draft: StepTable
    """Seconds of a depth of a draft model in its process, whose products the same cores share, by leaves."""
    gap_s: float
    """Between two steps."""

    @property
    def period(self) -> StepTable:
        """Seconds from one step to the next, by tokens."""
        return StepTable(tuple((tokens, seconds + self.gap_s) for tokens, seconds in self.target.points))


@dataclass(frozen=True, slots=True)
class CoreRow:
    """Measured decoding of a target whose products some cores share."""

    drafting: Drafting
    cores: int
    k: int
    sessions: int
    tokens_per_s: float

    def predicted(self, measured: Measurements) -> Prediction:
        """The closed form with the times of the same run."""
        times, load = measured.cores[self.cores], Load(self.sessions, 1)
        system = replace(measured.system, target=times.target, gap_s=times.gap_s)
        if self.drafting is Drafting.PLAIN:
            return plain(system, load)
        inside = replace(system, draft=times.draft, path=None, colocated=True, ranked=RANKED, most_leaves=MOST_LEAVES)
        return colocated(inside, load, self.k)


@dataclass(frozen=True, slots=True)
class Measurements:
    """One temperature of a run."""

    temperature: float
    system: System
    rows: tuple[Row, ...]
    cores: Mapping[int, CoreTimes] = field(default_factory=dict)
    """Keyed by the cores that share a target's products; empty: not measured."""
    core_rows: tuple[CoreRow, ...] = ()
    """Tokens per second of the core times."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A measured row with the predictions of the closed form and of the simulation for it."""

    row: Row
    predicted: Prediction
    simulated: Result
    possible: Result
    """Simulated with the measured hit rate; the same as ``simulated`` if not overlapped."""

    @property
    def error(self) -> float:
        """Predicted over measured tokens per second, less 1."""
        return self.predicted.tokens_per_s / self.row.tokens_per_s - 1.0

    @property
    def reached(self) -> float:
        """Measured tokens per second over the simulated ones at the measured acceptance and hit rate."""
        return self.row.tokens_per_s / self.possible.tokens_per_s


def read(path: Path) -> list[Measurements]:
    """One for each temperature of a ``bench local`` file. Raises ConfigError if it is none."""
    data = _load(path)
    if "requests" not in data or "summaries" not in data:
        raise ConfigError(f"{path} has no requests and summaries: it must come from paceline bench local --json")
    try:
        temperatures = dict.fromkeys(float(r["temperature"]) for r in data["requests"])
        return [_of_temperature(path, data, temperature) for temperature in temperatures]
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not what paceline bench local --json writes: {error!r}") from error


def read_one(path: Path, temperature: float | None, flag: str) -> Measurements:
    """The measurements of a temperature, by default the first of a file. Raises ConfigError as ``read``, and, naming
    ``flag``, if the file has none."""
    found = read(path)
    for of_temperature in found:
        if temperature is None or of_temperature.temperature == temperature:
            return of_temperature
    there = ", ".join(f"{m.temperature:g}" for m in found)
    raise ConfigError(f"{flag} {temperature:g} is not in {path}, which has {there}")


def _load(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(read_text(path, f"--from is {str(path)!r}"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{str(path)!r} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds no object: it must come from paceline bench local --json")
    return data


def _of_temperature(path: Path, data: Mapping[str, Any], temperature: float) -> Measurements:
    modes = {mode.value for mode in Mode}
    requests = [r for r in data["requests"] if r["temperature"] == temperature and r["mode"] in modes]
    of = {mode: [r for r in requests if r["mode"] == mode.value] for mode in Mode}
    sessions = int(data["settings"]["sessions"])
    if heads := data["settings"].get("heads"):
        raise ConfigError(
            f"{path} was measured with the head {heads[0]}: the times of its steps include the head's, so "
            "measure without --head; paceline advise --measured takes the head's own"
        )
    if (drafter := data["settings"].get("drafter", "model")) != "model":
        raise ConfigError(f"{path} was measured with --drafter {drafter}: a run with a draft model is needed")
    target = StepTable.measured(_steps(requests, "target_steps"))
    calls = sessions == 1 and any(width > 1 for width, _ in _steps(of[Mode.SEQUENTIAL], "draft_steps"))
    draft, by_call = _draft_times(of, calls=calls)
    widths = [width for width, _ in _steps(of[Mode.OVERLAPPED], "draft_steps")]
    if target is None or draft is None or not widths or not of[Mode.PLAIN]:
        raise ConfigError(
            f"{path} lacks step times at temperature {temperature:g}: plain and overlapped decoding are needed"
        )
    drafted = (*of[Mode.SEQUENTIAL], *of[Mode.OVERLAPPED])
    ranks = _ranks(drafted)
    trials, accepted = ranks[0] if ranks and ranks[0][0] else _chains(drafted)
    if not trials:
        raise ConfigError(f"{path} has no verified draft tokens at temperature {temperature:g}")
    summaries = [s for s in data["summaries"] if s["temperature"] == temperature and s["mode"] in modes]
    gap_s = _gap_s(of[Mode.PLAIN], sessions)
    coupled = data["settings"].get("acceptance", "coupled") == "coupled" or temperature == 0.0
    system = System(
        target=target,
        draft=draft,
        outcomes=_outcomes(accepted / trials, ranks[1:], summaries, coupled=coupled),
        link_s=_link_s(of[Mode.SEQUENTIAL], gap_s) if sessions == 1 else 0.0,
        gap_s=gap_s,
        fan_out=_FAN_OUT,
        draft_width=statistics.mode(widths) if calls else max(widths),
        path=by_call,
    )
    rows, shared = tuple(_row(s, sessions) for s in summaries), data.get("cores", ())
    cores = {int(one["cpu_threads"]): core_times(one) for one in shared}
    core_rows = tuple(row for one in shared for row in _core_rows(one, temperature, sessions))
    return Measurements(temperature, system, rows, cores, core_rows)


def core_times(one: Mapping[str, Any]) -> CoreTimes:
    """One entry of ``cores`` in such a file. Raises ConfigError if its draft was never asked."""
    if not one["draft_s"]:
        raise ConfigError(
            f"with a target of {one['cpu_threads']} threads the draft was never asked: "
            "more tokens are needed, for example --max-tokens 128"
        )
    target, draft = (
        tuple((int(size), float(seconds)) for size, seconds in one[key]) for key in ("target_s", "draft_s")
    )
    return CoreTimes(StepTable(target), StepTable(draft), float(one["gap_s"]))


def _core_rows(one: Mapping[str, Any], temperature: float, sessions: int) -> Iterator[CoreRow]:
    for rates in one["tokens_per_s"]:
        if rates["temperature"] == temperature:
            for drafting, k in ((Drafting.PLAIN, 0), (Drafting.COLOCATED, int(rates["k"]))):
                yield CoreRow(drafting, int(one["cpu_threads"]), k, sessions, float(rates[drafting.value]))


def read_service(path: Path, like: System) -> list[Measurements]:
    """Measurements of a ``bench serve`` file without added delay, one for each place: one process, and the service.

    Step times are plain decoding's at that concurrency. Drafts and statistics, which the file lacks, come from
    ``like``, a run of the same pair. Tokens per second are the streams', without prefill. Raises ConfigError for any
    other file.
    """
    data = _load(path)
    try:
        cells = [c for c in data["cells"] if c["temperature"] == 0.0]
        link_s = data["services"][0]["draft_link_s"] / 2
        found = []
        for place in dict.fromkeys(c["place"] for c in cells):
            of_place = [c for c in cells if c["place"] == place]
            plain = sorted((c for c in of_place if c["mode"] == Mode.PLAIN.value), key=lambda c: int(c["sessions"]))
            table = StepTable(tuple((int(c["sessions"]), float(c["step_s"])) for c in plain))
            gap_s = sum(float(c["gap_per_step_s"]) for c in plain) / len(plain)
            system = replace(like, target=table, gap_s=gap_s, link_s=link_s if place == "service" else like.link_s)
            rows = tuple(_service_row(c, data["settings"]["draft_tokens"]) for c in of_place)
            found.append(Measurements(0.0, system, rows))
        return found
    except (KeyError, TypeError, IndexError, ZeroDivisionError) as error:
        raise ConfigError(f"{path} is not what paceline bench serve --json writes: {error!r}") from error


def _service_row(cell: Mapping[str, Any], draft_tokens: int) -> Row:
    mode, sessions = Mode(cell["mode"]), int(cell["sessions"])
    hits, events = cell["hits"]["hits"], cell["hits"]["events"]
    return Row(
        name=f"{cell['configuration']} {sessions}",
        temperature=0.0,
        mode=mode,
        k=0 if mode is Mode.PLAIN else draft_tokens,
        sessions=sessions,
        tokens_per_s=cell["stream_tokens_per_s"] * sessions,
        tokens_per_round=cell["tokens_per_round"],
        hit_rate=hits / events if events else None,
    )


def _steps(requests: Iterable[Mapping[str, Any]], key: str) -> Iterator[tuple[int, float]]:
    for unit in _units(requests):
        yield from ((int(width), float(seconds)) for width, seconds in unit[key] if width > 0)


def _draft_times(
    of: Mapping[Mode, Iterable[Mapping[str, Any]]], *, calls: bool
) -> tuple[StepTable | None, StepTable | None]:
    """(steps of the draft by their nodes, paths by their tokens). ``calls``: several tokens in a step of one session in
    turn are a path by one call; else there are no paths."""
    in_turn, ahead = (list(_steps(of[mode], "draft_steps")) for mode in (Mode.SEQUENTIAL, Mode.OVERLAPPED))
    if not calls:
        return StepTable.measured((*in_turn, *ahead)), None
    ones = [step for step in in_turn if step[0] == 1]
    paths = [step for step in in_turn if step[0] > 1]
    return StepTable.measured((*ones, *ahead)), StepTable.measured((*ones, *(s for s in ahead if s[0] == 1), *paths))


def _units(requests: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The requests of one unit ran at once and list the same steps: one of them for each."""
    seen = set()
    for request in requests:
        unit = (request["method"], request["unit"], request["repeat"])
        if unit not in seen:
            seen.add(unit)
            yield request


def _gap_s(plain: list[Mapping[str, Any]], sessions: int) -> float:
    """Decoding time between the steps, per step."""
    if sessions > 1:
        return 0.0
    steps = [float(seconds) for r in plain for _, seconds in r["target_steps"]]
    return max(0.0, (sum(float(r["decode_s"]) for r in plain) - sum(steps)) / len(steps))


def _link_s(requests: list[Mapping[str, Any]], gap_s: float) -> float:
    """One way, from lock step: the rest of its time without the steps of both sides, per round."""
    left = rounds = 0.0
    for r in requests:
        left += r["decode_s"] - sum(s for _, s in r["target_steps"]) - sum(s for _, s in r["draft_steps"])
        rounds += len(r["rounds"]) - 1
    return max(0.0, (left / rounds - gap_s) / 2) if rounds else 0.0


def _chains(requests: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """(verified, accepted) tokens of a draft, by the rounds of a run whose ranks were not counted: it verified none but
    chains."""
    trials = accepted = 0
    for request in requests:
        for r in request["rounds"]:
            if r.get("producer") == "lookup":
                continue
            accepted += r["accepted"]
            trials += min(r["drafted"], r["accepted"] + 1)
    return trials, accepted


def _ranks(requests: Iterable[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """(verified, accepted) tokens of a draft by rank; empty if they were not counted."""
    units = _units(request for request in requests if request.get("ranks"))
    return [
        (sum(verified for verified, _ in counts), sum(accepted for _, accepted in counts))
        for counts in zip(*(unit["ranks"] for unit in units), strict=True)
    ]


def _outcomes(
    acceptance: float, siblings: list[tuple[int, int]], summaries: list[Mapping[str, Any]], *, coupled: bool
) -> Outcomes:
    """Estimates r from verified siblings: the first one misses with probability 2^-r. If they were few, it uses the
    hits after a rejection, which F - 1 alternatives miss with probability F^-r."""
    derived = Outcomes.derived(acceptance, coupled=coupled)
    verified, accepted = siblings[0] if siblings else (0, 0)
    if verified >= _FEWEST_SIBLINGS:
        power = -math.log2(1.0 - min(accepted / verified, _MOST_HITS))
        return Outcomes(acceptance, max(power, _LEAST_POWER), derived.bonus_power)
    hits = events = 0
    for s in summaries:
        if s["mode"] == Mode.OVERLAPPED.value:
            hits += s["after_rejection"]["hits"]
            events += s["after_rejection"]["events"]
    if not events or not hits:
        return derived
    power = -math.log(1.0 - min(hits / events, _MOST_HITS)) / math.log(_FAN_OUT)
    return Outcomes(acceptance, max(power, derived.power), derived.bonus_power)


def _row(summary: Mapping[str, Any], sessions: int) -> Row:
    _, _, k = str(summary["method"]).partition("K=")
    causes = summary["causes"]
    misses = sum(causes.get(cause, 0) for cause in ("token", "k", "late"))
    hits = causes.get("hit", 0)
    return Row(
        name=summary["method"],
        temperature=summary["temperature"],
        mode=Mode(summary["mode"]),
        k=int(k or 0),
        sessions=sessions,
        tokens_per_s=summary["decode_tokens_per_s"],
        tokens_per_round=summary["tokens_per_step"],
        hit_rate=hits / (hits + misses) if hits + misses else None,
    )


def compare(measured: Measurements, *, seconds: float = 20.0, seed: int = 0) -> list[Comparison]:
    """Compares every row with the closed form and with ``seconds`` of simulated time."""
    comparisons = []
    for row in measured.rows:
        load = Load(row.sessions, 1, 1)
        predicted = predict(measured.system, load, row.mode, row.k)
        simulated = possible = simulate(measured.system, load, row.mode, row.k, seconds=seconds, seed=seed)
        if row.mode is Mode.OVERLAPPED and row.hit_rate is not None:
            at_hits = at_hit_rate(measured.system, load, row.k, row.hit_rate)
            possible = simulate(at_hits, load, row.mode, row.k, seconds=seconds, seed=seed)
        comparisons.append(Comparison(row, predicted, simulated, possible))
    return comparisons


def at_hit_rate(system: System, load: Load, k: int, hit_rate: float) -> System:
    """The system with the r of ``Outcomes`` that gives overlapped decoding this hit rate in closed form.

    The nearest to it, where the draft's time allows no more or its first choices alone are more.
    """

    def with_power(power: float) -> System:
        return replace(system, outcomes=replace(system.outcomes, power=power))

    def is_below(power: float) -> bool:
        return (predict(with_power(power), load, Mode.OVERLAPPED, k).hit_rate or 1.0) < hit_rate

    return with_power(crossing(is_below, MOST_POWER, _HALVINGS))
