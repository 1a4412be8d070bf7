"""``paceline plan``: flags in, a fleet and its cost out. Loads nothing.

Exit status: 0 there is a fleet that keeps the limit, 1 there is none; 2 as in ``exit.py``.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from paceline.cli.exit import EXIT_DONE, EXIT_FAILED
from paceline.cli.table import table, working
from paceline.errors import ConfigError
from paceline.plan import measured
from paceline.plan.closed_form import Requests, System
from paceline.plan.devices import Devices, HeadTimes, Way, ways
from paceline.plan.outcomes import Outcomes
from paceline.plan.search import (
    MOST_FAN_OUT,
    MOST_TARGET_SESSIONS,
    MOST_TREE_BUDGET,
    Fleet,
    Objective,
    Prices,
    Wish,
    cheapest,
    cheapest_plain,
    concurrency,
    pays,
    settings_of,
    whole,
)
from paceline.plan.times import StepTable
from paceline.types import MAX_DRAFT_TOKENS

_RIDGE = 295
"""Tokens of a bf16 step whose arithmetic takes as long as reading the weights on an H100: 989 TFLOP/s over 3.35 TB/s,
with 2 FLOP and 2 bytes for each weight."""
_BANDWIDTH_GB_S = 3350
_DEVICE_COST = 2.5
_OUTPUT_TOKENS = 256
_HEAD_TOKENS = 4
_HIT_K = 4
"""--hit-rate is that of so many draft tokens."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``paceline plan``."""
    parser.description = (
        "Computes how many targets and drafts serve a load within a limit, with which K, and what a million tokens "
        "cost against plain decoding: by a closed form of a round, confirmed by a discrete-event simulation."
    )
    group = parser.add_argument_group("measured times, in ms")
    group.add_argument("--target-step-ms", type=_number(0, open_low=True), metavar="MS", help="of one token")
    group.add_argument(
        "--target-row-ms",
        type=_number(0),
        metavar="MS",
        help=f"each further token (default: 1/{_RIDGE} of a step, an H100 in bf16)",
    )
    group.add_argument("--draft-step-ms", type=_number(0, open_low=True), metavar="MS", help="tree step of one node")
    group.add_argument(
        "--draft-row-ms", type=_number(0), metavar="MS", help=f"each further node (default: 1/{_RIDGE} of a step)"
    )
    group.add_argument("--link-ms", type=_number(0), metavar="MS", help="target to draft, one way (default 0.2)")
    group = parser.add_argument_group("measured statistics")
    group.add_argument(
        "--acceptance",
        type=_number(0, 1, open_high=True),
        metavar="A",
        help="probability that a draft token is accepted, given those before it",
    )
    group.add_argument(
        "--hit-rate",
        type=_number(0, 1, open_high=True),
        metavar="H",
        help=f"of a draft that is never late, at K={_HIT_K} (default: as measured at such an acceptance)",
    )
    group.add_argument(
        "--rule", choices=["coupled", "rejection"], default="coupled", help="acceptance rule, for that default"
    )
    group.add_argument(
        "--from",
        type=Path,
        dest="source",
        metavar="FILE",
        help="take times and statistics that are not given from a JSON of paceline bench local",
    )
    group.add_argument("--at-temperature", type=_number(0), metavar="T", help="which of FILE (default: its first)")
    group.add_argument(
        "--sharing",
        type=_number(1),
        default=1.0,
        metavar="F",
        help="overlapped steps take so many times as long: cores or memory that both kinds share (default 1)",
    )
    group = parser.add_argument_group("a head of the target, in the place of a draft")
    help_ = "one depth of one session, as paceline status says; being fed is part of the target's step"
    group.add_argument("--head-step-ms", type=_number(0, open_low=True), metavar="MS", help=help_)
    help_ = f"each further session (default: 1/{_RIDGE} of that)"
    group.add_argument("--head-row-ms", type=_number(0), metavar="MS", help=help_)
    help_ = "probability that one of its tokens is accepted, given those before it"
    group.add_argument("--head-acceptance", type=_number(0, 1, open_high=True), metavar="A", help=help_)
    help_ = f"the most that it proposes at once (default {_HEAD_TOKENS})"
    group.add_argument("--head-tokens", type=_count_to(MAX_DRAFT_TOKENS), metavar="N", help=help_)
    group = parser.add_argument_group("keys and values that each step reads, for requests")
    group.add_argument("--target-kv-kib", type=_number(0), metavar="KIB", help="of a token, in one rank (default 0)")
    group.add_argument("--draft-kv-kib", type=_number(0), metavar="KIB", help="the same of the draft (default 0)")
    group.add_argument(
        "--bandwidth-gb-s",
        type=_number(0, open_low=True),
        metavar="GB/S",
        help=f"at which they are read (default {_BANDWIDTH_GB_S}: an H100)",
    )
    group = parser.add_argument_group("load")
    group.add_argument("--sessions", type=_count, metavar="N", help="at once")
    group.add_argument("--requests-per-s", type=_number(0, open_low=True), metavar="R", help="or Poisson arrivals")
    group.add_argument(
        "--prompt-tokens",
        type=_count,
        metavar="N",
        help="of a request; with --sessions, one request follows the other (default: no prompts)",
    )
    group.add_argument(
        "--tokens-per-request",
        type=_count,
        metavar="N",
        help="output (default 256; with --sessions alone they have no end)",
    )
    group.add_argument(
        "--length-spread",
        type=_number(0, 4),
        metavar="C",
        help="standard deviation over mean of both lengths, gamma-distributed (default 0)",
    )
    group.add_argument("--slo-itl-ms", type=_number(0, open_low=True), required=True, metavar="MS", help="the limit")
    group.add_argument(
        "--slo-ttft-ms", type=_number(0, open_low=True), metavar="MS", help="of the time to a request's first tokens"
    )
    group.add_argument(
        "--slo",
        choices=[o.value for o in Objective],
        default=Objective.MEAN.value,
        help="of what: mean time per token, or the 99th percentile between two messages to a client; mean or 99th "
        "percentile of the time to the first tokens (default mean)",
    )
    group = parser.add_argument_group("replicas")
    group.add_argument(
        "--max-sessions",
        type=_count_to(MOST_TARGET_SESSIONS),
        default=64,
        metavar="N",
        help="of a target, by its KV memory (default 64)",
    )
    group.add_argument(
        "--max-step-tokens",
        type=_count,
        default=256,
        metavar="N",
        help="of a step, prompt chunks and proposals together (default 256)",
    )
    group.add_argument(
        "--draft-width", type=_count, default=64, metavar="N", help="nodes of a tree step at most (default 64)"
    )
    group.add_argument("--fan-out", type=_count_to(MOST_FAN_OUT), default=6, metavar="F", help="default 6")
    group.add_argument(
        "--tree-budget",
        type=_count_to(MOST_TREE_BUDGET),
        default=256,
        metavar="N",
        help="nodes per session (default 256)",
    )
    group.add_argument("--target-devices", type=_count, default=4, metavar="N", help="of a target (default 4)")
    group.add_argument("--draft-devices", type=_count, default=1, metavar="N", help="of a draft (default 1)")
    group.add_argument(
        "--target-cost-per-hour", type=_number(0), metavar="C", help="default 2.50 for each of its devices"
    )
    group.add_argument("--draft-cost-per-hour", type=_number(0), metavar="C", help="default 2.50 for each")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the simulation (default 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run_plan)


def _number(
    low: float, high: float = math.inf, *, open_low: bool = False, open_high: bool = False
) -> Callable[[str], float]:
    """An argument in a range; the message says which."""
    left = f"above {low:g}" if open_low else f"at least {low:g}"
    right = "" if high == math.inf else f" and below {high:g}" if open_high else f" and at most {high:g}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        inside = (value > low if open_low else value >= low) and (value < high if open_high else value <= high)
        if not inside or math.isinf(value):
            raise argparse.ArgumentTypeError(f"{text!r}: a number {left}{right} is needed")
        return value

    return parse


def _count_to(most: int) -> Callable[[str], int]:
    """A whole number from 1; the message says up to which."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r}: a whole number from 1 to {most} is needed")
        return int(text)

    return parse


_count = _count_to(1_000_000)


def system_of(args: argparse.Namespace) -> System:
    """The flags, and for what they leave open the file. Raises ConfigError."""
    known = _from_file(args.source, args.at_temperature) if args.source else None
    if known is None:
        missing = [
            flag
            for flag in ("--target-step-ms", "--draft-step-ms", "--acceptance")
            if getattr(args, flag[2:].replace("-", "_")) is None
        ]
        if missing:
            raise ConfigError(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} needed, or --from FILE")
        if args.at_temperature is not None:
            raise ConfigError(f"--at-temperature {args.at_temperature:g} is given without --from")
    target = _steps(args.target_step_ms, args.target_row_ms, known.target if known else None, "--target")
    draft = _steps(args.draft_step_ms, args.draft_row_ms, known.draft if known else None, "--draft")
    outcomes = known.outcomes if known else Outcomes.derived(0.0)
    if args.acceptance is not None:
        outcomes = Outcomes.derived(args.acceptance, coupled=args.rule == "coupled")
    if args.hit_rate is not None:
        outcomes = Outcomes.of_hit_rate(outcomes.acceptance, args.hit_rate, _HIT_K, args.fan_out)
    kv_s = 1024 / 1e9 / (args.bandwidth_gb_s or _BANDWIDTH_GB_S)
    link_s = args.link_ms / 1e3 if args.link_ms is not None else known.link_s if known else 0.0002
    return System(
        target,
        draft,
        outcomes,
        link_s=link_s,
        gap_s=known.gap_s if known and args.target_step_ms is None else 0.0,
        fan_out=args.fan_out,
        tree_budget=args.tree_budget,
        draft_width=args.draft_width,
        max_step_tokens=args.max_step_tokens,
        target_kv_s=(args.target_kv_kib or 0.0) * kv_s,
        draft_kv_s=(args.draft_kv_kib or 0.0) * kv_s,
        sharing=args.sharing,
    )


def head_of(args: argparse.Namespace) -> HeadTimes | None:
    """The head that the flags describe; None: none. Raises ConfigError."""
    given = {
        flag: getattr(args, flag[2:].replace("-", "_"))
        for flag in ("--head-step-ms", "--head-acceptance", "--head-row-ms", "--head-tokens")
    }
    if all(value is None for value in given.values()):
        return None
    for flag in ("--head-step-ms", "--head-acceptance"):
        if given[flag] is None:
            other, value = next((name, value) for name, value in given.items() if value is not None)
            raise ConfigError(f"{other} {value:g} is given without {flag}: a head needs its time and its acceptance")
    depth = _steps(args.head_step_ms, args.head_row_ms, None, "--head")
    return HeadTimes(depth, args.head_acceptance, args.head_tokens or _HEAD_TOKENS)


def _steps(step_ms: float | None, row_ms: float | None, known: StepTable | None, flag: str) -> StepTable:
    if step_ms is not None:
        return StepTable.affine(step_ms / 1e3, (step_ms / _RIDGE if row_ms is None else row_ms) / 1e3)
    assert known is not None, "one of both was asked for"
    if row_ms is not None:
        raise ConfigError(f"{flag}-row-ms {row_ms:g} is given without {flag}-step-ms: --from has a table of both")
    return known


def _from_file(path: Path, temperature: float | None) -> System:
    found = measured.read(path)
    for of_temperature in found:
        if temperature is None or of_temperature.temperature == temperature:
            return of_temperature.system
    there = ", ".join(f"{m.temperature:g}" for m in found)
    raise ConfigError(f"--at-temperature {temperature:g} is not in {path}, which has {there}")


def wish_of(args: argparse.Namespace) -> Wish:
    """The load and its limit. Raises ConfigError."""
    if (args.sessions is None) == (args.requests_per_s is None):
        raise ConfigError("one of --sessions and --requests-per-s is needed, and not both")
    if args.max_sessions > args.max_step_tokens:
        raise ConfigError(
            f"--max-sessions {args.max_sessions} is above --max-step-tokens {args.max_step_tokens}: "
            "a step has at least a token of each session"
        )
    requests, sessions = requests_of(args), args.sessions
    limit_s, ttft_limit_s = args.slo_itl_ms / 1e3, math.inf
    if args.slo_ttft_ms is not None:
        ttft_limit_s = args.slo_ttft_ms / 1e3
    if requests is not None and requests.per_s is not None:
        sessions = concurrency(requests, limit_s, min(ttft_limit_s, requests.output_tokens * limit_s))
    return Wish(sessions, limit_s, Objective(args.slo), args.max_sessions, requests, ttft_limit_s)


def requests_of(args: argparse.Namespace) -> Requests | None:
    """The requests of the sessions; None: sessions have neither prompt nor end. Raises ConfigError."""
    if args.bandwidth_gb_s is not None and args.target_kv_kib is None and args.draft_kv_kib is None:
        raise ConfigError(
            f"--bandwidth-gb-s {args.bandwidth_gb_s:g} is given without --target-kv-kib or --draft-kv-kib"
        )
    if args.requests_per_s is None and args.prompt_tokens is None and args.tokens_per_request is None:
        for flag in ("--length-spread", "--slo-ttft-ms", "--target-kv-kib", "--draft-kv-kib"):
            value = getattr(args, flag[2:].replace("-", "_"))
            if value is not None:
                raise ConfigError(
                    f"{flag} {value:g} is given for sessions without requests: add --prompt-tokens, "
                    "--tokens-per-request or --requests-per-s"
                )
        return None
    return Requests(
        args.tokens_per_request or _OUTPUT_TOKENS,
        args.prompt_tokens or 0,
        args.length_spread or 0.0,
        args.requests_per_s,
    )


def prices_of(args: argparse.Namespace, devices: Devices) -> Prices:
    """Prices of a target and a draft; the default is that of their devices."""
    target, draft = args.target_cost_per_hour, args.draft_cost_per_hour
    return Prices(
        devices.target * _DEVICE_COST if target is None else target,
        devices.draft * _DEVICE_COST if draft is None else draft,
    )


def run_plan(args: argparse.Namespace) -> int:
    """Runs ``paceline plan``."""
    system, wish, head = system_of(args), wish_of(args), head_of(args)
    devices = Devices(args.target_devices, args.draft_devices)
    prices = prices_of(args, devices)
    same: list[Way] = []
    with working("simulating fleets"):
        plain = cheapest_plain(system, wish, prices, seed=args.seed)
        overlapped = cheapest(system, wish, prices, seed=args.seed)
        plain = plain and whole(system, wish, plain, seed=args.seed)
        overlapped = overlapped and whole(system, wish, overlapped, seed=args.seed)
        if overlapped is not None:
            k = overlapped.predicted.k
            same = list(ways(system, overlapped.load, k, devices, head=head, seed=args.seed))
    if args.json:
        print(json.dumps(as_json(system, wish, prices, plain, overlapped, same, head), indent=2))
    else:
        print("\n".join(report(system, wish, prices, plain, overlapped)))
        if same:
            print("\n".join(("", *same_devices(devices, same))))
        if head is not None:
            print("\n".join(("", *about_head(system, head, same))))
    return EXIT_DONE if plain or overlapped else EXIT_FAILED


def as_json(
    system: System,
    wish: Wish,
    prices: Prices,
    plain: Fleet | None,
    overlapped: Fleet | None,
    same: Sequence[Way],
    head: HeadTimes | None = None,
) -> dict[str, Any]:
    """The object that ``--json`` prints; null where no fleet keeps the limit, and for what there is none of."""
    found = {
        "assumptions": _without_none(asdict(system)) | {"prices": asdict(prices)},
        "wish": asdict(wish),
        "plain": asdict(plain) if plain else None,
        "overlapped": asdict(overlapped) if overlapped else None,
        "config": settings_of(system, overlapped) if overlapped else None,
        "speculation_pays": pays(plain, overlapped),
        "same_devices": [asdict(way) for way in same],
        "head": asdict(head) | {"accepted": head.accepted, "share": head.share(system.target)} if head else None,
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


def _without_none(tree: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in tree.items() if not key.startswith("_")}


def report(system: System, wish: Wish, prices: Prices, plain: Fleet | None, overlapped: Fleet | None) -> Iterator[str]:
    """The lines that are printed."""
    yield from _assumptions(system, wish, prices)
    yield ""
    rows: list[tuple[str, ...]] = [_HEADER]
    rows += [_row("plain", plain)] if plain else []
    rows += [_row("overlapped", overlapped)] if overlapped else []
    if len(rows) > 1:
        yield from table(rows, sys.stdout)
        yield from _slices(plain, overlapped)
        yield ""
    limit = f"{wish.limit_s * 1e3:g} ms"
    if wish.ttft_limit_s < math.inf:
        limit += f" and {wish.ttft_limit_s * 1e3:g} ms to the first tokens"
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
    for key, value in settings_of(system, overlapped).items():
        *folders, name = key.split(".")
        functools.reduce(lambda part, folder: part.setdefault(folder, {}), folders, tree)[name] = value
    yield f"# of a service (--config); each request: --draft-tokens {overlapped.predicted.k}"
    yield from yaml.safe_dump(tree, sort_keys=False).splitlines()


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


def about_head(system: System, head: HeadTimes, same: Sequence[Way]) -> Iterator[str]:
    """Cost and yield of a head, alone and in the place of drafts."""
    yield (
        f"head: {head.depth.seconds(1) * 1e3:.3g} ms a depth of one session, acceptance {head.acceptance:.3g}: its "
        f"{_number_of(head.num_tokens, 'token')} take {head.share(system.target):.0%} of a step, and "
        f"{head.accepted:.2f} of them are accepted"
    )
    of = {way.name: way for way in same}
    if "head" not in of:
        yield "No fleet with drafts keeps the limit, so there is none of whose devices a head could make another use."
        return
    headed, plainly, drafted = (of[name].per_device for name in ("head", "plain", "overlapped"))
    k = _number_of(of["head"].simulated.k, "token")
    yield (
        f"In the place of the drafts, with at most {k} at once, it yields {headed / plainly:.2f} times what "
        f"plain decoding does on each device, and {headed / drafted:.2f} times what overlapped decoding does."
    )


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


def _assumptions(system: System, wish: Wish, prices: Prices) -> Iterator[str]:
    for name, steps, unit in (("target", system.target, "token"), ("draft", system.draft, "node")):
        first, further = steps.seconds(1), steps.seconds(65) - steps.seconds(1)
        yield f"{name} step: {first * 1e3:.4g} ms, and {further / 64 * 1e3:.3g} ms for each further {unit}"
    a, link = system.outcomes.acceptance, system.link_s * 1e3
    hits = system.outcomes.ideal_hit_rate(_HIT_K, system.fan_out)
    yield (
        f"acceptance {a:.3g}; hit rate {hits:.2f} at K={_HIT_K}, F={system.fan_out} with a draft that is never late; "
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
    yield f"a target costs {prices.target:g} an hour, a draft {prices.draft:g}"


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
