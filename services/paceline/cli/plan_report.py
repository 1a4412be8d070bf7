"""The report of ``paceline plan``: the assumptions, the fleets it found, and the same devices used in other ways."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import yaml

from paceline.cli.table import table
from paceline.plan.closed_form import System
from paceline.plan.devices import Devices, Way
from paceline.plan.search import Fleet, Objective, Prices, Wish, pays, settings_of

HIT_K = 4
"""Draft tokens of a proposal for which a hit rate is stated."""


def as_json(
    system: System,
    wish: Wish,
    prices: Prices,
    plain: Fleet | None,
    overlapped: Fleet | None,
    same: Sequence[Way],
) -> dict[str, Any]:
    """The object that ``--json`` prints; null where no fleet keeps the limit, and for absent parts."""
    found = {
        "assumptions": asdict(system) | {"prices": asdict(prices)},
        "wish": asdict(wish),
        "plain": asdict(plain) if plain else None,
        "overlapped": asdict(overlapped) if overlapped else None,
        "config": settings_of(system, wish, overlapped) if overlapped else None,
        "speculation_pays": pays(plain, overlapped),
        "same_devices": [asdict(way) for way in same],
    }
    finite: dict[str, Any] = _finite(found)
    return finite


def _finite(tree: Any) -> Any:
    """JSON has neither nan nor infinity."""
    if isinstance(tree, dict):
        return {key: _finite(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_finite(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def report(system: System, wish: Wish, prices: Prices, plain: Fleet | None, overlapped: Fleet | None) -> Iterator[str]:
    """The lines that are printed."""
    yield from _assumptions(system, wish)
    yield f"a target costs {prices.target:g} an hour, a draft {prices.draft:g}"
    yield ""
    rows: list[tuple[str, ...]] = [_HEADER]
    rows += [_row("plain", plain)] if plain else []
    rows += [_row("overlapped", overlapped)] if overlapped else []
    if len(rows) > 1:
        yield from table(rows, sys.stdout)
        yield from _slices(plain, overlapped)
        yield ""
    limit = _limit(wish)
    if plain is None:
        yield f"Plain decoding does not keep {limit}, with however many targets."
    if overlapped is None:
        yield f"No fleet with drafts keeps {limit}." + (" Speculation does not pay here." if plain else "")
        return
    load, simulated = overlapped.load, overlapped.simulated
    if plain is not None and not pays(plain, overlapped):
        more = overlapped.per_million / plain.per_million - 1
        yield (
            f"Speculation does not pay: a million tokens would cost {more:.0%} more. "
            f"Run {_number_of(plain.load.targets, 'target')} without drafts."
        )
        return
    yield (
        f"Run {_number_of(load.targets, 'target')} and {_number_of(load.drafts, 'draft')}"
        f" ({load.drafts / load.targets:.2g} for each target), K={overlapped.predicted.k}."
    )
    if plain is not None:
        less = 1 - overlapped.per_million / plain.per_million
        faster = plain.simulated.mean_tpot_s / simulated.mean_tpot_s
        yield (
            f"A million tokens cost {less:.0%} less than by plain decoding, "
            f"and a session is {faster:.2f} times as fast."
        )
    error = overlapped.predicted.itl_s / simulated.mean_tpot_s - 1
    yield (
        f"In closed form: {overlapped.predicted.itl_s * 1e3:.2f} ms a token, {error:+.1%} of the simulation, "
        "which the table shows."
    )
    yield ""
    tree: dict[str, Any] = {}
    for key, value in settings_of(system, wish, overlapped).items():
        *folders, name = key.split(".")
        functools.reduce(lambda part, folder: part.setdefault(folder, {}), folders, tree)[name] = value
    yield f"# of a service (--config); each request: --draft-tokens {overlapped.predicted.k}"
    yield from yaml.safe_dump(tree, sort_keys=False).splitlines()


def _limit(wish: Wish) -> str:
    limits = [(wish.limit_s, ""), (wish.ttft_limit_s, " to the first tokens")]
    return " and ".join(f"{seconds * 1e3:g} ms{what}" for seconds, what in limits if seconds < math.inf)


def same_devices(devices: Devices, same: Sequence[Way]) -> Iterator[str]:
    """The table of per-device throughput."""
    yield (
        f"The same sessions on the same {devices.of(same[-1].load)} devices, {devices.target} for a target and "
        f"{devices.draft} for a draft:"
    )
    yield ""
    base = next(way for way in same if way.name == "co-located")
    rows: list[tuple[str, ...]] = [
        ("", "targets", "drafts", "K", "tokens/s", "per device", "x co-located", "TPOT p50/p99", "gap p99")
    ]
    rows += [
        (
            way.name,
            str(way.load.targets),
            str(way.load.drafts or "-"),
            str(way.simulated.k or "-"),
            f"{way.tokens_per_s:,.0f}",
            f"{way.per_device:,.1f}",
            f"{way.per_device / base.per_device:.2f}",
            _two(way.simulated.tpot_s),
            f"{way.simulated.gap_s[99] * 1e3:.1f}",
        )
        for way in same
    ]
    yield from table(rows, sys.stdout)


def _two(seconds: Mapping[int, float]) -> str:
    """50th and 99th percentile, in ms."""
    return f"{seconds[50] * 1e3:.1f}/{seconds[99] * 1e3:.1f}"


def _slices(*fleets: Fleet | None) -> Iterator[str]:
    for fleet in fleets:
        if fleet is not None and fleet.simulated_load != fleet.load:
            some = fleet.simulated_load
            yield (
                f"{fleet.predicted.mode.value}: simulated in part, {_number_of(some.targets, 'target')}, "
                f"{_number_of(some.drafts, 'draft')} and {_number_of(some.sessions, 'session')}"
            )


def _number_of(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _assumptions(system: System, wish: Wish) -> Iterator[str]:
    for name, steps, unit in (("target", system.target, "token"), ("draft", system.draft, "node")):
        first, further = steps.seconds(1), steps.seconds(65) - steps.seconds(1)
        yield f"{name} step: {first * 1e3:.4g} ms, and {further / 64 * 1e3:.3g} ms for each further {unit}"
    if system.path is not None:
        one_s, four_s = system.path.seconds(1), system.path.seconds(4)
        yield f"path of a draft by one call: {one_s * 1e3:.4g} ms of one token, {four_s * 1e3:.4g} ms of four"
    a, link = system.outcomes.acceptance, system.link_s * 1e3
    hits = system.outcomes.ideal_hit_rate(HIT_K, system.fan_out)
    yield (
        f"acceptance {a:.3g}; hit rate {hits:.2f} at K={HIT_K}, F={system.fan_out} with a draft that is never late; "
        f"link {link:.3g} ms one way"
    )
    what = "mean time per token" if wish.objective is Objective.MEAN else "99th percentile between two messages"
    load = f"{_number_of(wish.sessions, 'session')} at once"
    requests = wish.requests
    if requests is not None:
        load = f"{load}, of" if requests.per_s is None else f"{requests.per_s:g} requests/s of"
        load += f" {requests.prompt_tokens} + {requests.output_tokens} tokens"
        load += f" (spread {requests.spread:g})" if requests.spread else ""
    limit = f"{what} at most {wish.limit_s * 1e3:g} ms"
    if wish.ttft_limit_s < math.inf:
        kind = "mean" if wish.objective is Objective.MEAN else "99th percentile of the"
        limit += f", {kind} time to first tokens at most {wish.ttft_limit_s * 1e3:g} ms"
    yield f"{load}, at most {wish.max_sessions} on a target; {limit}"
    if system.target_kv_s or system.draft_kv_s:
        target_us, draft_us = system.target_kv_s * 1e9, system.draft_kv_s * 1e9
        yield f"1,000 tokens of context add {target_us:.3g} us to a target's step and {draft_us:.3g} us to a draft's"


_HEADER = (
    "",
    "targets",
    "drafts",
    "K",
    "sessions",
    "tokens/s",
    "tok/round",
    "ms/token",
    "TPOT p50/p99",
    "gap p50/p99",
    "TTFT p50/p99",
    "hits",
    "target use",
    "draft use",
    "cost/h",
    "cost/M tokens",
)


def _row(name: str, fleet: Fleet) -> tuple[str, ...]:
    simulated, load = fleet.simulated, fleet.load
    return (
        name,
        str(load.targets),
        str(load.drafts),
        str(simulated.k or "-"),
        str(load.sessions),
        f"{simulated.tokens_per_s * load.targets / fleet.simulated_load.targets:,.0f}",
        f"{simulated.tokens_per_round:.2f}",
        f"{simulated.mean_tpot_s * 1e3:.1f}",
        _two(simulated.tpot_s),
        _two(simulated.gap_s),
        _two(simulated.ttft_s) if load.requests is not None else "-",
        "-" if simulated.hit_rate is None else f"{simulated.hit_rate:.2f}",
        f"{simulated.target_use:.0%}",
        f"{simulated.draft_use:.0%}" if load.drafts else "-",
        f"{fleet.per_hour:,.2f}",
        f"{fleet.per_million:,.3f}",
    )
