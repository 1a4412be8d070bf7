"""The drafter of a draft replica and what it has brought, as text: from counted events, nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.draft.engine import DraftEngine


def explain(engine: DraftEngine) -> str:
    """The field ``controller`` of a draft's ReplicaStatus: the drafter, nodes of a forward, and tokens known before.

    A node is a candidate token, siblings included. A token is known before if its node was sent before the target's
    decision came.
    """
    stats, parts = engine.stats, [engine.description or "a drafter"]
    if stats.forwards:
        parts.append(f"{stats.nodes_published / stats.forwards:.3g} nodes a forward")
    if decided := stats.nodes_used + stats.nodes_missed:
        parts.append(f"{stats.nodes_used / decided:.0%} of {decided} decided tokens were among its nodes")
    return "; ".join(parts)
