"""``paceline plan``: flags in, a fleet and its cost out. Loads nothing.

Exit status: 0 there is a fleet that keeps the limit, 1 there is none; 2 as in ``exit.py``.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from paceline.cli.exit import EXIT_DONE, EXIT_FAILED
from paceline.cli.numbers import POSITIVE, integer, number
from paceline.cli.plan_report import HIT_K, as_json, report, same_devices
from paceline.cli.table import working
from paceline.errors import ConfigError
from paceline.plan import measured
from paceline.plan.closed_form import Requests, System
from paceline.plan.devices import Devices, Way, ways
from paceline.plan.outcomes import LEAST_PATH_PROB, Outcomes
from paceline.plan.search import (
    MOST_FAN_OUT,
    MOST_TARGET_SESSIONS,
    MOST_TREE_BUDGET,
    Objective,
    Prices,
    Wish,
    cheapest,
    cheapest_plain,
    concurrency,
    whole,
)
from paceline.plan.times import StepTable

_RIDGE = 295
"""Tokens of a bf16 step whose arithmetic takes as long as reading the weights on an H100: 989 TFLOP/s over 3.35 TB/s,
with 2 FLOP and 2 bytes for each weight."""
_BANDWIDTH_GB_S = 3350
_DEVICE_COST = 2.5
_OUTPUT_TOKENS = 256
_TARGET_DEVICES, _DRAFT_DEVICES = 4, 1


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``paceline plan``."""
    parser.description = (
        "Computes how many targets and drafts serve a load within a limit, with which K, and what a million tokens "
        "cost against plain decoding: by a closed form of a round, confirmed by a discrete-event simulation."
    )
    group = parser.add_argument_group("measured times, in ms")
    group.add_argument("--target-step-ms", type=POSITIVE, metavar="MS", help="of one token")
    group.add_argument(
        "--target-row-ms",
        type=number(0),
        metavar="MS",
        help=f"each further token (default: 1/{_RIDGE} of a step, an H100 in bf16)",
    )
    group.add_argument("--draft-step-ms", type=POSITIVE, metavar="MS", help="tree step of one node")
    group.add_argument(
        "--draft-row-ms", type=number(0), metavar="MS", help=f"each further node (default: 1/{_RIDGE} of a step)"
    )
    help_ = "each further token of a path by one call, as on a CPU (default: each token takes a step)"
    group.add_argument("--draft-path-ms", type=number(0), metavar="MS", help=help_)
    group.add_argument("--link-ms", type=number(0), metavar="MS", help="target to draft, one way (default 0.2)")
    group = parser.add_argument_group("measured statistics")
    group.add_argument(
        "--acceptance",
        type=number(0, 1, open_high=True),
        metavar="A",
        help="probability that a draft token is accepted, given those before it",
    )
    group.add_argument(
        "--hit-rate",
        type=number(0, 1, open_high=True),
        metavar="H",
        help=f"of a draft that is never late, at K={HIT_K} (default: as measured at such an acceptance)",
    )
    group.add_argument(
        "--siblings",
        type=number(0, 1, open_high=True),
        metavar="H",
        help="or of the tokens that a draft's first choice misses, the share that the F - 1 next ones hold",
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
    group.add_argument("--at-temperature", type=number(0), metavar="T", help="which of FILE (default: its first)")
    group.add_argument(
        "--sharing",
        type=number(1),
        default=1.0,
        metavar="F",
        help="factor by which overlapped steps take longer, for cores or memory that both kinds share (default 1)",
    )
    group = parser.add_argument_group("whole trees, as the service has them, in the simulation of overlapped decoding")
    help_ = "simulate every node of a tree, not only the chain below each outcome; takes several times as long"
    group.add_argument("--trees", action="store_true", default=None, help=help_)
    help_ = "that a branch of siblings adds to a target's step beyond its tokens (default 0)"
    group.add_argument("--branch-ms", type=number(0), metavar="MS", help=help_)
    help_ = "rounds in which tokens that the target finds in a session's own text are accepted (default 0)"
    group.add_argument("--lookup-share", type=number(0, 1), metavar="P", help=help_)
    help_ = "probability that such a token is accepted there, given those before it"
    group.add_argument("--lookup-acceptance", type=number(0, 1), metavar="A", help=help_)
    group = parser.add_argument_group("keys and values that each step reads, for requests")
    group.add_argument("--target-kv-kib", type=number(0), metavar="KIB", help="of a token, in one rank (default 0)")
    group.add_argument("--draft-kv-kib", type=number(0), metavar="KIB", help="the same of the draft (default 0)")
    group.add_argument(
        "--bandwidth-gb-s",
        type=POSITIVE,
        metavar="GB/S",
        help=f"at which they are read (default {_BANDWIDTH_GB_S}: an H100)",
    )
    group = parser.add_argument_group("load")
    group.add_argument("--sessions", type=integer(), metavar="N", help="at once")
    group.add_argument("--requests-per-s", type=POSITIVE, metavar="R", help="or Poisson arrivals")
    group.add_argument(
        "--prompt-tokens",
        type=integer(),
        metavar="N",
        help="of a request; with --sessions, one request follows the other (default: no prompts)",
    )
    group.add_argument(
        "--tokens-per-request",
        type=integer(),
        metavar="N",
        help="output (default 256; with --sessions alone they have no end)",
    )
    group.add_argument(
        "--length-spread",
        type=number(0, 4),
        metavar="C",
        help="standard deviation over mean of both lengths, gamma-distributed (default 0)",
    )
    group.add_argument("--slo-itl-ms", type=POSITIVE, metavar="MS", help="the limit (needed)")
    group.add_argument("--slo-ttft-ms", type=POSITIVE, metavar="MS", help="of the time to a request's first tokens")
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
        type=integer(1, MOST_TARGET_SESSIONS),
        default=64,
        metavar="N",
        help="of a target, by its KV memory (default 64)",
    )
    group.add_argument(
        "--max-step-tokens",
        type=integer(),
        default=256,
        metavar="N",
        help="of a step, prompt chunks and proposals together (default 256)",
    )
    group.add_argument(
        "--draft-width", type=integer(), default=64, metavar="N", help="nodes of a tree step at most (default 64)"
    )
    group.add_argument("--fan-out", type=integer(1, MOST_FAN_OUT), default=6, metavar="F", help="default 6")
    group.add_argument(
        "--tree-budget",
        type=integer(1, MOST_TREE_BUDGET),
        default=256,
        metavar="N",
        help="nodes per session (default 256)",
    )
    help_ = f"of a node that a draft expands, at least (default {LEAST_PATH_PROB})"
    group.add_argument("--min-path-prob", type=number(0, 1, open_low=True), metavar="P", help=help_)
    help_ = f"of a target (default {_TARGET_DEVICES})"
    group.add_argument("--target-devices", type=integer(), metavar="N", help=help_)
    group.add_argument("--draft-devices", type=integer(), metavar="N", help=f"of a draft (default {_DRAFT_DEVICES})")
    help_ = "drafts run on cores of the targets' hosts, at most one for each target, and cost nothing more"
    group.add_argument("--draft-on-target-nodes", action="store_const", const=1, help=help_)
    group.add_argument(
        "--target-cost-per-hour", type=number(0), metavar="C", help="default 2.50 for each of its devices"
    )
    group.add_argument("--draft-cost-per-hour", type=number(0), metavar="C", help="default 2.50 for each")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the simulation (default 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run_plan)


def _given(args: argparse.Namespace, flag: str) -> Any:
    """The value of a flag; None: it is not given."""
    return getattr(args, flag[2:].replace("-", "_"))


def _require_all(args: argparse.Namespace) -> None:
    """Raises one ConfigError that names all missing flags."""
    lacking = []
    if not args.source:
        times = [flag for flag in ("--target-step-ms", "--draft-step-ms", "--acceptance") if _given(args, flag) is None]
        lacking += [f"{', '.join(times)} (or --from FILE)"] if times else []
    if args.sessions is None and args.requests_per_s is None:
        lacking.append("--sessions or --requests-per-s")
    if args.slo_itl_ms is None:
        lacking.append("--slo-itl-ms")
    if lacking:
        raise ConfigError(f"flags are missing: {'; '.join(lacking)}")


def system_of(args: argparse.Namespace) -> System:
    """Reads the flags, and fills in missing values from the file. Raises ConfigError."""
    known = measured.read_one(args.source, args.at_temperature, "--at-temperature").system if args.source else None
    if known is None and args.at_temperature is not None:
        raise ConfigError(f"--at-temperature {args.at_temperature:g} is given without --from")
    target = _steps(args.target_step_ms, args.target_row_ms, known.target if known else None, "--target")
    draft = _steps(args.draft_step_ms, args.draft_row_ms, known.draft if known else None, "--draft")
    path = known.path if known and args.draft_step_ms is None and args.rule == "coupled" else None
    if args.draft_path_ms is not None:
        if args.rule != "coupled":
            raise ConfigError(
                f"--draft-path-ms {args.draft_path_ms:g} is given with --rule {args.rule}, under which no path is "
                "drafted by one call: leave one out"
            )
        path = StepTable.affine(draft.seconds(1), args.draft_path_ms / 1e3)
    outcomes = known.outcomes if known else Outcomes.derived(0.0)
    if args.acceptance is not None:
        outcomes = Outcomes.derived(args.acceptance, coupled=args.rule == "coupled")
    if args.hit_rate is not None:
        outcomes = Outcomes.of_hit_rate(outcomes.acceptance, args.hit_rate, HIT_K, args.fan_out)
    if args.siblings is not None:
        if args.hit_rate is not None:
            raise ConfigError(
                f"--siblings {args.siblings:g} is given with --hit-rate {args.hit_rate:g}, which says the same in "
                "another way: leave one out"
            )
        outcomes = outcomes.with_siblings(args.siblings, args.fan_out)
    kv_s = 1024 / 1e9 / (args.bandwidth_gb_s or _BANDWIDTH_GB_S)
    link_s = args.link_ms / 1e3 if args.link_ms is not None else known.link_s if known else 0.0002
    return System(
        target,
        draft,
        outcomes,
        path=path,
        link_s=link_s,
        gap_s=known.gap_s if known and args.target_step_ms is None else 0.0,
        fan_out=args.fan_out,
        tree_budget=args.tree_budget,
        min_path_prob=args.min_path_prob or LEAST_PATH_PROB,
        draft_width=args.draft_width,
        max_step_tokens=args.max_step_tokens,
        target_kv_s=(args.target_kv_kib or 0.0) * kv_s,
        draft_kv_s=(args.draft_kv_kib or 0.0) * kv_s,
        sharing=args.sharing,
        **_trees_of(args),
    )


def _trees_of(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of a system with whole trees; none without ``--trees``. Raises ConfigError."""
    if not args.trees:
        for flag in ("--branch-ms", "--lookup-share", "--lookup-acceptance"):
            value = _given(args, flag)
            if value is not None:
                raise ConfigError(f"{flag} {value:g} is given without --trees, which alone know of it")
        return {}
    if (args.lookup_share is None) != (args.lookup_acceptance is None):
        raise ConfigError("--lookup-share and --lookup-acceptance: both or neither of them are needed")
    return {
        "trees": True,
        "branch_s": (args.branch_ms or 0.0) / 1e3,
        "lookup_share": args.lookup_share or 0.0,
        "lookup_acceptance": args.lookup_acceptance or 0.0,
    }


def _steps(step_ms: float | None, row_ms: float | None, known: StepTable | None, flag: str) -> StepTable:
    if step_ms is not None:
        return StepTable.affine(step_ms / 1e3, (step_ms / _RIDGE if row_ms is None else row_ms) / 1e3)
    assert known is not None, "one of both was asked for"
    if row_ms is not None:
        raise ConfigError(f"{flag}-row-ms {row_ms:g} is given without {flag}-step-ms: --from has a table of both")
    return known


def wish_of(args: argparse.Namespace) -> Wish:
    """The load and its limit. Raises ConfigError."""
    if args.sessions is not None and args.requests_per_s is not None:
        raise ConfigError(
            f"--sessions {args.sessions} is given with --requests-per-s {args.requests_per_s:g}: one of them is allowed"
        )
    if args.max_sessions > args.max_step_tokens:
        raise ConfigError(
            f"--max-sessions {args.max_sessions} is above --max-step-tokens {args.max_step_tokens}: "
            "a step has at least a token of each session"
        )
    requests, sessions = requests_of(args), args.sessions
    limit_s = args.slo_itl_ms / 1e3
    ttft_limit_s = math.inf if args.slo_ttft_ms is None else args.slo_ttft_ms / 1e3
    if requests is not None and requests.per_s is not None:
        sessions = concurrency(requests, limit_s, min(ttft_limit_s, requests.output_tokens * limit_s))
    near = args.draft_on_target_nodes is not None
    return Wish(sessions, limit_s, Objective(args.slo), args.max_sessions, requests, ttft_limit_s, near)


def requests_of(args: argparse.Namespace) -> Requests | None:
    """The requests of the sessions; None: sessions have neither prompt nor end. Raises ConfigError."""
    if args.bandwidth_gb_s is not None and args.target_kv_kib is None and args.draft_kv_kib is None:
        raise ConfigError(
            f"--bandwidth-gb-s {args.bandwidth_gb_s:g} is given without --target-kv-kib or --draft-kv-kib"
        )
    if args.requests_per_s is None and args.prompt_tokens is None and args.tokens_per_request is None:
        for flag in ("--length-spread", "--slo-ttft-ms", "--target-kv-kib", "--draft-kv-kib"):
            value = _given(args, flag)
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
    """Returns the prices of a target and a draft. The default is the price of their devices."""
    target, draft = args.target_cost_per_hour, args.draft_cost_per_hour
    return Prices(
        devices.target * _DEVICE_COST if target is None else target,
        devices.draft * _DEVICE_COST if draft is None else draft,
    )


def run_plan(args: argparse.Namespace) -> int:
    """Runs ``paceline plan``."""
    _require_all(args)
    system, wish = system_of(args), wish_of(args)
    devices = Devices(args.target_devices or _TARGET_DEVICES, _draft_devices(args))
    prices = prices_of(args, devices)
    same: list[Way] = []
    with working("simulating fleets"):
        plain = cheapest_plain(system, wish, prices, seed=args.seed)
        overlapped = cheapest(system, wish, prices, seed=args.seed)
        plain = plain and whole(system, wish, plain, seed=args.seed)
        overlapped = overlapped and whole(system, wish, overlapped, seed=args.seed)
        if overlapped is not None:
            k = overlapped.predicted.k
            same = list(ways(system, overlapped.load, k, devices, seed=args.seed))
    if args.json:
        print(json.dumps(as_json(system, wish, prices, plain, overlapped, same), indent=2))
    else:
        print("\n".join(report(system, wish, prices, plain, overlapped)))
        if same:
            print("\n".join(("", *same_devices(devices, same))))
    return EXIT_DONE if plain or overlapped else EXIT_FAILED


def _draft_devices(args: argparse.Namespace) -> int:
    """Devices of a draft; 0 on a target's node. Raises ConfigError for flags that contradict each other."""
    if args.draft_on_target_nodes is None:
        return args.draft_devices or _DRAFT_DEVICES
    for flag, value in (("--draft-devices", args.draft_devices), ("--draft-cost-per-hour", args.draft_cost_per_hour)):
        if value is not None:
            raise ConfigError(f"{flag} {value:g} is given with --draft-on-target-nodes: leave one out")
    return 0
