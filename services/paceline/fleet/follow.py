"""Scaling policies that Ray Serve runs in its controller. They follow the monitor's decisions (``autoscaler.py``).

The monitor's own deployment always has one replica. Its policy, ``post``, receives the decisions as that replica's
statistics, and keeps them for the policies of the other pools. So a decision about an empty pool arrives, too.

Serve pickles these functions by value, together with module-level names, so shared state must be imported.
"""

from __future__ import annotations

from typing import Any

WANTED_AT, WANTED = "wanted_at", "wanted_"
"""Statistics of the monitor: when it decided, in seconds of the epoch, and with a pool's name how many replicas."""

STALE_S = 15.0
"""An older decision is ignored: the pool keeps its size."""

_POOLS = ("target", "draft", "router")


def post(context: Any) -> tuple[int, dict[str, Any]]:
    """Policy of the monitor's deployment: keeps the decision. ``context``: Serve's AutoscalingContext."""
    from paceline.fleet.board import BOARD

    metrics = context.raw_metrics or {}
    times = {replica: series[-1].value for replica, series in metrics.get(WANTED_AT, {}).items() if series}
    if times:
        newest = max(times, key=lambda replica: times[replica])
        wanted = {pool: metrics.get(WANTED + pool, {}).get(newest) for pool in _POOLS}
        BOARD[context.app_name] = (
            times[newest],
            {pool: int(series[-1].value) for pool, series in wanted.items() if series},
        )
    return int(context.target_num_replicas), {}


def follow_target(context: Any) -> tuple[int, dict[str, Any]]:
    """Policy of the target pool: the decided size, or the present one without a fresh decision."""
    return _follow("target", context)


def follow_draft(context: Any) -> tuple[int, dict[str, Any]]:
    """Policy of the draft pool: the decided size, or the present one without a fresh decision."""
    return _follow("draft", context)


def follow_router(context: Any) -> tuple[int, dict[str, Any]]:
    """Policy of the router pool: the decided size, or the present one without a fresh decision."""
    return _follow("router", context)


def _follow(pool: str, context: Any) -> tuple[int, dict[str, Any]]:
    from paceline.fleet.board import BOARD

    at, wanted = BOARD.get(context.app_name, (float("-inf"), {}))
    if pool in wanted and context.current_time - at <= STALE_S:
        return wanted[pool], {}
    return int(context.target_num_replicas), {}
