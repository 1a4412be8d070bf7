"""The policies that Ray Serve runs in its controller: they follow what the monitor has decided (``autoscaler.py``).

The monitor's own deployment always has one replica; its policy, ``post``, is there to receive the decisions, which come
as that replica's statistics, and to keep them for the policies of the other pools. That way a decision needs no replica
of the pool that it is about: an empty pool has none.

Serve pickles these functions by value, with what they name at module level: what they share they have to import.
"""

from __future__ import annotations

from typing import Any

WANTED_AT, WANTED = "wanted_at", "wanted_"
"""Statistics of the monitor: when it decided, in seconds of the epoch, and with a pool's name how many replicas."""

STALE_S = 15.0
"""A decision that is older counts for nothing: the pool keeps its size."""

_POOLS = ("target", "draft", "router")


def post(context: Any) -> tuple[int, dict[str, Any]]:
    """The policy of the monitor's deployment. ``context``: Serve's AutoscalingContext, as below."""
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
    """Of the targets: the size that was decided last; without a fresh decision, the size that there shall be now."""
    return _follow("target", context)


def follow_draft(context: Any) -> tuple[int, dict[str, Any]]:
    """The same of the drafts."""
    return _follow("draft", context)


def follow_router(context: Any) -> tuple[int, dict[str, Any]]:
    """The same of the routers."""
    return _follow("router", context)


def _follow(pool: str, context: Any) -> tuple[int, dict[str, Any]]:
    from paceline.fleet.board import BOARD

    at, wanted = BOARD.get(context.app_name, (float("-inf"), {}))
    if pool in wanted and context.current_time - at <= STALE_S:
        return wanted[pool], {}
    return int(context.target_num_replicas), {}
