"""The drafter of a draft replica and what it has brought, as text: from counted events, nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.draft.engine import DraftEngine
    from paceline.draft.stats import DraftStats


def describe(engine: DraftEngine) -> Mapping[str, Any]:
    """Returns fields of ReplicaStatus. Any thread may ask while the engine runs."""
    return {
        "num_sessions": engine.num_sessions,
        "counters": asdict(engine.stats) | {"steps_unrecorded": engine.num_unrecorded},
        "controller": explain(engine),
        "execution": engine.execution,
    }


def explain(engine: DraftEngine) -> str:
    """The field ``controller`` of a draft's ReplicaStatus: the drafter, nodes of a forward, and tokens known before.

    A node is a candidate token, siblings included. A token is known before if its node was sent before the target's
    decision came.
    """
    stats, parts = engine.stats, [engine.description or "a drafter"]
    if engine.overlap is not None:
        parts.append(str(engine.overlap))
        parts.append(_states(stats))
    if stats.hints or stats.hints_late:
        parts.append(f"{stats.hints} hints of a target have come in time, {stats.hints_late} too late")
    if stats.forwards:
        parts.append(f"{stats.nodes_published / stats.forwards:.3g} nodes a forward")
    if decided := stats.nodes_used + stats.nodes_missed:
        parts.append(f"{stats.nodes_used / decided:.0%} of {decided} decided tokens were among its nodes")
    return "; ".join(parts)


def _states(stats: DraftStats) -> str:
    """Counts of the target's states that have come."""
    if not stats.states:
        return "no states have come from a target"
    text = f"{stats.states} states have come, {stats.states_bytes / stats.states:.0f} bytes each"
    lost = [
        (stats.states_missing, "were lost"),
        (stats.states_dropped, "messages with states came late or twice"),
        (stats.states_late, "tokens were expanded before their states had come"),
    ]
    return ", ".join([text, *(f"{count} {what}" for count, what in lost if count)])
