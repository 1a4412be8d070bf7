"""``paceline status``: the pools of a running service, their replicas, how well drafting goes, and who decides what.

Asks GetServerInfo of any router. Exit status: 0 the service answers and a target is up, 1 it does not answer or none is
up; the others as in ``exit.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator

from rich.console import Console

from paceline.cli.exit import EXIT_DONE, EXIT_FAILED
from paceline.cli.flags import add_tls_flags, check_positive, connection_of
from paceline.cli.table import table
from paceline.client import Client
from paceline.errors import PacelineError
from paceline.types import PoolScaling, ReplicaStatus, ServerInfo

DEFAULT_ADDRESS = "localhost:9000"

_ORDER = ("router", "target", "draft")
_HEADER = ("pool", "replica", "state", "sessions", "waiting", "KV", "busy", "node", "model")
_INVARIANCE = {
    "yes": "batch-invariant: verification and decoding give the same bits",
    "no": "NOT batch-invariant: tokens may differ from plain decoding at near-ties",
    "untested": "not tested for batch invariance: tokens may differ from plain decoding at near-ties",
}
"""Phrases by the value in a target's status."""
_EXECUTION = {
    "compiling": "eager until it is compiled, which is done in the background",
    "failed": "eager, as it could not be compiled: its log says why",
}
"""Value in a replica's status -> a phrase, for the values that need one."""
_CLEAR = "\x1b[H\x1b[2J"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``paceline status``."""
    parser.description = (
        "Reports which replicas a running service has, how well drafting goes, and how pools are sized."
    )
    parser.add_argument("--address", metavar="HOST:PORT", default=DEFAULT_ADDRESS, help=f"default {DEFAULT_ADDRESS}")
    parser.add_argument("--json", action="store_true", help="print one JSON object; with --watch one in each line")
    parser.add_argument(
        "--watch", type=float, nargs="?", const=2.0, metavar="SECONDS", help="again and again (default every 2 s)"
    )
    parser.add_argument("--timeout", type=float, default=5.0, metavar="SECONDS", help="for an answer (default 5)")
    add_tls_flags(parser)
    parser.set_defaults(run=run_status)


def run_status(args: argparse.Namespace) -> int:
    """Runs ``paceline status``."""
    check_positive("--timeout", args.timeout)
    check_positive("--watch", args.watch)
    shows = args.watch is not None and not args.json and sys.stdout.isatty()
    screen = Console().screen(hide_cursor=False) if shows else contextlib.nullcontext()  # and back at the end
    with screen, Client(args.address, **connection_of(args)) as client:
        if args.watch is None:
            info = client.server_info(timeout_s=args.timeout)
            _print(info, args)
            return EXIT_DONE if _target_up(info) else EXIT_FAILED
        while True:
            try:
                _print(client.server_info(timeout_s=args.timeout), args)
            except PacelineError as error:
                print(f"paceline: {error}", file=sys.stderr, flush=True)
            time.sleep(args.watch)


def _print(info: ServerInfo, args: argparse.Namespace) -> None:
    if args.json:
        print(json.dumps(info.as_json(), indent=None if args.watch is not None else 2), flush=True)
        return
    clear = _CLEAR if args.watch is not None and sys.stdout.isatty() else ""
    print(clear + "\n".join(report(info)), flush=True)
    if args.watch is not None and not clear:
        print(flush=True)


def _target_up(info: ServerInfo) -> bool:
    return any(not status.draining for status in info.pools.get("target", ()))


def report(info: ServerInfo) -> Iterator[str]:
    """The lines that are printed."""
    up = "" if _target_up(info) else "; no target is up"
    yield f"Paceline {info.version}, up {_duration(info.uptime_s)}{up}"
    yield ""
    yield from table([_HEADER, *_rows(info)], sys.stdout)
    yield ""
    yield f"sessions: {info.sessions_running} running, {info.sessions_queued} waiting"
    if info.serve_silent_s:
        silence = _duration(info.serve_silent_s)
        yield f"Ray Serve's controller has not answered for {silence}: nothing is replaced or scaled until it does"
    yield _speculation(info)
    yield from _versions(info)
    yield from _invariance(info)
    yield from _executions(info)
    yield from _controllers(info)
    yield from _layouts(info)
    if info.scaling:
        yield ""
        yield from table([_SCALING_HEADER, *map(_scaling_row, info.scaling)], sys.stdout)
        for pool in info.scaling:
            yield from _reasons(pool)


def _rows(info: ServerInfo) -> Iterator[tuple[str, ...]]:
    for kind in sorted({*info.pools, *(s.kind for s in info.starting)}, key=_rank):
        for status in info.pools.get(kind, ()):
            yield _row(kind, status)
        for startup in info.starting:
            if startup.kind == kind:
                doing = f"{startup.doing} ({startup.elapsed_s:.0f} s)"
                yield (kind, startup.replica_id, "starting", "", "", "", "", startup.node, doing)


def _rank(kind: str) -> tuple[int, str]:
    return (_ORDER.index(kind) if kind in _ORDER else len(_ORDER), kind)


def _row(kind: str, status: ReplicaStatus) -> tuple[str, ...]:
    engine = kind != "router"
    sessions = f"{status.num_sessions}/{status.max_sessions}" if engine else str(status.num_sessions)
    kv = f"{status.kv_pages_used / status.kv_pages:.0%}" if status.kv_pages else ""
    busy = f"{status.busy_share:.0%}" if engine else ""
    state = "draining" if status.draining else "up"
    return (kind, status.replica_id, state, sessions, str(status.num_waiting), kv, busy, status.node, status.model)


def _speculation(info: ServerInfo) -> str:
    """The speculation that the targets' controllers choose, and its rates."""
    may, have = info.sessions_speculating, info.sessions_drafting
    if not info.pools.get("draft"):
        chosen = "no draft pool; heads and prompt lookup draft in the targets"
    elif not may:
        chosen = "no running session requests a draft" if info.sessions_running else "no session is running"
    elif have == 0:
        chosen = f"off: the targets request no draft for any of the {may} sessions that may have one"
    else:
        chosen = f"on for {have} of {may} sessions that may have a draft"
    if info.acceptance_length <= 1.0 and not info.acceptance_rate:
        return f"speculation: {chosen}; no draft token has been verified"
    rates = f"accepted {info.acceptance_rate:.0%}, mean acceptance length {info.acceptance_length:.2f}"
    if info.pools.get("draft") or info.hit_rate:
        rates += f", hits {info.hit_rate:.0%}"
    return f"speculation: {chosen}; since the start {rates}"


def _versions(info: ServerInfo) -> Iterator[str]:
    """Replicas of another version than what answers: an upgrade is under way."""
    statuses = [status for pool in info.pools.values() for status in pool]
    if any(status.version for status in statuses):
        for status in statuses:
            if status.version != info.version:
                other = status.version or "of a version that it does not state"
                yield f"{status.kind} {status.replica_id}: Paceline {other}"


def _invariance(info: ServerInfo) -> Iterator[str]:
    """The findings of the targets' self-tests."""
    for status in info.pools.get("target", ()):
        if words := _INVARIANCE.get(status.batch_invariant):
            yield f"target {status.replica_id}: {words}"


def _executions(info: ServerInfo) -> Iterator[str]:
    """Replicas whose models are eager and were not meant to be."""
    for kind in ("target", "draft"):
        for status in info.pools.get(kind, ()):
            if words := _EXECUTION.get(status.execution):
                yield f"{kind} {status.replica_id}: {words}"


def _controllers(info: ServerInfo) -> Iterator[str]:
    """Choices of the running targets' controllers since they started, by session and step, and the drafts' drafters."""
    for kind in ("target", "draft"):
        for status in info.pools.get(kind, ()):
            if words := status.controller:
                yield f"{kind} {status.replica_id}: {words}"
    counted: dict[str, float] = {}
    for status in info.pools.get("target", ()):
        for name, value in status.counters.items():
            counted[name] = counted.get(name, 0.0) + value
    rounds = counted.get("rounds", 0.0)
    if not rounds or not info.sessions_speculating + counted.get("draft_rows", 0.0):
        return
    verified, trimmed = (counted.get(name, 0.0) / rounds for name in ("draft_rows", "draft_rows_trimmed"))
    paused, resumed = (counted.get(name, 0.0) for name in ("drafts_paused", "drafts_resumed"))
    yield (
        f"controllers: {verified:.2f} draft tokens verified per round, {trimmed:.2f} not worth verifying; "
        f"drafting of a session was paused {paused:.0f} times and resumed {resumed:.0f} times"
    )


def _layouts(info: ServerInfo) -> Iterator[str]:
    """The yield of the same devices with drafts elsewhere, or without."""
    if not info.pools.get("draft"):
        return  # before the planner is imported
    from paceline.plan.standing import APART, layouts_now

    predicted = layouts_now(info)
    if not predicted:
        return
    now = predicted[APART]
    others = ", ".join(f"{name} {rate / now:.2f}" for name, rate in predicted.items() if name != APART)
    best = max(predicted, key=lambda name: predicted[name])
    advice = "" if best == APART else f"; {best} is faster: `paceline advise` writes its configuration"
    running = f"{info.sessions_running} session{'s' if info.sessions_running > 1 else ''}"
    yield (
        f"layout: with the times measured here, {running} on the same devices would have, "
        f"times the speed that they have with a separate draft: {others}{advice}"
    )


_SCALING_HEADER = ("pool", "wanted", "actual", "least", "most", "needed")


def _scaling_row(pool: PoolScaling) -> tuple[str, ...]:
    wanted = "-" if pool.wanted is None else str(pool.wanted)
    needed = "?" if pool.demand is None else f"{pool.demand:.2f}"
    return (pool.name, wanted, str(pool.actual), str(pool.least), str(pool.most), needed)


def _reasons(pool: PoolScaling) -> Iterator[str]:
    if pool.signal:
        yield f"{pool.name}: {pool.signal}"
    if pool.changed_s is not None:
        yield f"{pool.name}: changed {_duration(pool.changed_s)} ago: {pool.reason}"


def _duration(seconds: float) -> str:
    """Two units at most: ``1 d 2 h``, ``3 min 5 s``."""
    whole = max(0, round(seconds))
    for size, name, part, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {name} {whole % size // part} {small}"
    return f"{whole} s"
