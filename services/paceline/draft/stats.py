"""The counted events of a draft."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class DraftStats:
    """Counted events of the engine; rates are derived, never stored."""

    nodes_published: int = 0
    nodes_used: int = 0
    """Committed tokens whose node had been published before."""
    nodes_missed: int = 0
    """Committed tokens that no node had predicted."""
    stale_messages: int = 0
    """Messages of an older epoch, or for a context that has been passed: repeated ones."""
    unknown_messages: int = 0
    """Messages for a session that is not open in that epoch."""
    lost_commits: int = 0
    """Commits that came without the one before."""
    invalid_messages: int = 0
    """Opens and commits that no correct router sends."""
    refused_sessions: int = 0
    """Sessions for which there was no room, or none for a context as long as theirs."""
    failed_sessions: int = 0
    """Sessions ended by SessionFailed, for any reason."""
    prefill_chunks: int = 0
    tree_steps: int = 0
    forwards: int = 0
    """Calls of the drafter for candidates: one per tree step, and retries after an error."""
    leaves: int = 0
    """Nodes expanded; leaves / tree_steps is the mean batch."""
    step_s: float = 0.0
    """Seconds inside tree steps."""
    messages: int = 0
    """Messages sent to sessions."""
    states: int = 0
    """Positions whose hidden states have come."""
    states_bytes: int = 0
    """Bytes of the hidden states that have come."""
    states_missing: int = 0
    """Positions whose states were lost on the way: later ones came without them."""
    states_dropped: int = 0
    """Messages with states that were late, repeated or early."""
    hints: int = 0
    """Messages with hints of targets that were in time."""
    hints_bytes: int = 0
    """Bytes of the hints that have come."""
    hints_late: int = 0
    """Messages with hints about another step than the one that runs."""
    hints_invalid: int = 0
    """Messages with hints that no correct target sends."""
    hints_nodes: int = 0
    """Nodes published for tokens that only a hint had."""
    states_late: int = 0
    """Anchors that were expanded without the states of their context, which had not come in time."""
    paths: int = 0
    """Tree steps that drafted the path of one session by one call."""
    path_tokens: int = 0
    """Nodes expanded in tree steps that drafted a path by one call."""
    path_s: float = 0.0
    """Seconds of tree steps that drafted a path by one call."""
