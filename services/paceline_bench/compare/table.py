"""The tables of a comparison, and its JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from paceline.cli.table import table
from paceline_bench.arithmetic import Amount, Ratio, decode_amount, rate, ratio
from paceline_bench.compare.run import Found, Load, Results
from paceline_bench.compare.spec import Spec
from paceline_bench.records import RequestRecord


def speeds(units: Sequence[Sequence[RequestRecord]]) -> list[Amount]:
    """Decoded tokens and seconds of each unit."""
    return [decode_amount(unit) for unit in units]


def over_baseline(found: Found) -> Ratio | None:
    """Tokens per second over the baseline's in the same turns; None: there are none."""
    return ratio(speeds(found.units), speeds(found.baseline)) if found.baseline else None


def counts(found: Found) -> list[tuple[int, int, int, int]]:
    """(drafted, accepted, tokens, steps) of each request, the first step left out."""
    requests = [record for unit in found.units for record in unit]
    later = [record.rounds[1:] for record in requests]
    return [
        (sum(r.drafted for r in rounds), sum(r.accepted for r in rounds), sum(r.tokens for r in rounds), len(rounds))
        for rounds in later
    ]


def quotient(pairs: Sequence[tuple[float, float]]) -> str:
    """Sum of the first numbers over that of the second, and its standard error over the pairs."""
    over = sum(below for _, below in pairs)
    if not over:
        return "-"
    value, n = sum(above for above, _ in pairs) / over, len(pairs)
    if n == 1:
        return f"{value:.3f}"
    squares = sum((above - value * below) ** 2 for above, below in pairs)
    return f"{value:.3f} +- {math.sqrt(n / (n - 1) * squares) / over:.3f}"


def shown(value: Ratio | None) -> str:
    """With its interval."""
    return "-" if value is None else f"{value.value:.3f} ({value.low:.3f}-{value.high:.3f})"


def rows_of(found: Sequence[Found], spec: Spec) -> list[tuple[str, ...]]:
    """A line for each arm that has answered."""
    rows = []
    for one in found:
        name, counted = one.arm.name, counts(one)
        if one.failure or not one.units:
            rows.append((name, *"-----", *("-" if not spec.cached else ())))
            continue
        share = quotient([(accepted, drafted) for drafted, accepted, _, _ in counted])
        per_step = quotient([(tokens, steps) for _, _, tokens, steps in counted])
        prefills = [record.prefill_s for unit in one.units for record in unit]
        prefill = () if spec.cached else (f"{1e3 * sum(prefills) / len(prefills):.0f}",)
        against = "1" if name == spec.baseline else shown(over_baseline(one))
        rows.append((name, f"{rate(speeds(one.units)):.1f}", against, share, per_step, str(len(one.units)), *prefill))
    return rows


def text(load: Load, found: Sequence[Found], spec: Spec) -> list[str]:
    """The table of one load, and what it has not room for."""
    title = f"temperature {load.temperature:g}, {load.sessions} at once"
    head = (title, "tokens/s", f"/ {spec.baseline}", "accepted/drafted", "tokens/step", "units")
    lines = table([(*head, *(() if spec.cached else ("prefill ms",))), *rows_of(found, spec)])
    if (best := over_best(found, spec)) is not None:
        lines.append(f"{spec.best_of} / the best of the others, {best[0]}: {shown(best[1])}")
    lines += [f"{one.arm.name}: {one.failure}" for one in found if one.failure]
    lines += [f"{one.arm.name}: {one.different} texts differ from {spec.baseline}'s" for one in found if one.different]
    return lines


def over_best(found: Sequence[Found], spec: Spec) -> tuple[str, Ratio | None] | None:
    """The fastest arm but ``best_of``, and how many times as fast that is; None: it is not asked for."""
    own = [one for one in found if one.arm.name == spec.best_of and one.units]
    others = [one for one in found if one.arm.name != spec.best_of and one.units]
    if not own or not others:
        return None
    best = max(others, key=lambda one: rate(speeds(one.units)))
    return best.arm.name, ratio(speeds(own[0].units), speeds(best.units))


def joined(results: Results, spec: Spec) -> Results:
    """With one row of the baseline, which every group has."""
    whole: Results = {}
    for load, found in results.items():
        own = [one for one in found if one.arm.name == spec.baseline]
        first = Found(own[0].arm, [unit for one in own for unit in one.units])
        whole[load] = [first, *(one for one in found if one.arm.name != spec.baseline)]
    return whole


def is_wrong(results: Results) -> bool:
    """True if a text differs, or an arm failed that must not."""
    return any(one.different or (one.failure and one.arm.is_ours) for found in results.values() for one in found)


def as_json(results: Results) -> list[dict[str, Any]]:
    """Plain data of each load and arm."""
    return [
        {
            **asdict(load),
            "arm": one.arm.name,
            "tokens_per_s": rate(speeds(one.units)) if one.units else None,
            "over_baseline": None if (found_ratio := over_baseline(one)) is None else asdict(found_ratio),
            "units": [asdict(amount) for amount in speeds(one.units)],
            "requests": counts(one),
            "different": one.different,
            "failure": one.failure,
        }
        for load, found in results.items()
        for one in found
    ]
