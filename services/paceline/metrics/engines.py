"""The counters of targets, drafts and routers by their fields, and the declaration of any metric name. An undeclared
counter of an engine gets a generic declaration.
"""

from __future__ import annotations

import re

from paceline.metrics.catalogue import PREEMPTIONS
from paceline.metrics.declaration import CATALOGUE, Kind, Metric, counter

ENGINE_COUNTERS: dict[tuple[str, str], Metric] = {
    ("target", "preemptions"): PREEMPTIONS,
    ("router", "cpu_s"): counter("paceline_router_cpu_seconds_total", "seconds", "CPU time of routers."),
    ("draft", "step_s"): counter(
        "paceline_draft_step_seconds_total", "seconds", "Time that drafts have spent inside tree steps."
    ),
    ("draft", "path_s"): counter(
        "paceline_draft_path_seconds_total",
        "seconds",
        "Part of the step seconds in steps that drafted a path by one call.",
    ),
    ("target", "step_s"): counter(
        "paceline_target_step_seconds_total",
        "seconds",
        "Time in steps of targets, from the choice of sessions to their outcomes.",
    ),
    ("target", "wait_s"): counter(
        "paceline_target_wait_seconds_total",
        "seconds",
        "Time between two steps of a target in which every session waited for its draft.",
    ),
    ("target", "bubble_s"): counter(
        "paceline_verify_bubble_seconds_total",
        "seconds",
        "Time between the end of a step and the next forward although a session could step at once.",
    ),
    ("target", "bubble_steps"): counter(
        "paceline_verify_bubble_steps_total", "steps", "Steps before which the bubble seconds were measured."
    ),
    ("target", "head_s"): counter(
        "paceline_target_head_seconds_total", "seconds", "Time that targets spent asking heads for tokens."
    ),
    ("target", "hit_bubble_s"): counter(
        "paceline_verify_hit_bubble_seconds_total",
        "seconds",
        "Bubble seconds before forwards whose proposals were all ready when the last step ended.",
    ),
    ("target", "hit_bubble_steps"): counter(
        "paceline_verify_hit_bubble_steps_total", "steps", "Steps before which the hit bubble seconds were measured."
    ),
}
"""The metric of each counter of an engine, by kind and field name. For all others see ``engine_counter``."""

for _engine, _field, _unit, _help in (
    ("target", "steps", "steps", "Forwards of targets."),
    ("target", "steps_ahead", "steps", "Forwards of targets that were launched before the one in front was done."),
    ("target", "steps_unrecorded", "steps", "Forwards of targets that no CUDA graph covered, though there are some."),
    ("target", "tokens_computed", "tokens", "Rows computed by targets: prompt, context and draft tokens."),
    ("target", "rounds", "rounds", "Rounds of targets, including abandoned epochs."),
    ("target", "tokens_emitted", "tokens", "Tokens decided by targets, including abandoned epochs."),
    ("target", "cached_tokens", "tokens", "Prompt tokens whose KV was shared with an earlier session."),
    ("target", "nodes_added", "nodes", "Nodes that arrived at targets and joined a tree."),
    ("target", "nodes_stale", "nodes", "Nodes that arrived below an abandoned branch."),
    ("target", "nodes_invalid", "nodes", "Nodes that targets refused."),
    ("target", "nodes_dropped", "nodes", "Nodes dropped because a tree was full."),
    ("target", "trees_lost", "trees", "Trees that missed nodes for good."),
    ("target", "proposals_invalid", "proposals", "Draft tokens that could not be verified."),
    ("target", "messages_stale", "messages", "Messages of an unknown session or an older epoch."),
    ("target", "messages_foreign", "messages", "Messages for a session that another router opened."),
    ("target", "messages_malformed", "messages", "Messages that targets could not read."),
    ("target", "pages_moved", "pages", "KV pages that came with sessions from draining targets."),
    ("target", "page_bytes_moved", "bytes", "Bytes of KV pages that came with sessions from draining targets."),
    (
        "target",
        "page_bytes_by_nixl",
        "bytes",
        "Bytes of moved KV pages that NIXL read; the rest came through host memory.",
    ),
    (
        "target",
        "nixl_failed",
        "sessions",
        "Sessions whose KV pages NIXL did not read, and that came another way or not.",
    ),
    ("target", "moves_failed", "sessions", "Sessions whose KV pages, or some of them, did not come from a target."),
    ("target", "waits", "steps", "Steps before which every session of a target waited for its draft."),
    ("target", "ahead_depth", "nodes", "Nodes on the best paths, at most the lookahead each, when steps ended."),
    ("target", "ahead_rounds", "rounds", "Rounds that the nodes of ahead_depth were counted for."),
    ("target", "draft_rows", "tokens", "Draft tokens verified."),
    ("target", "draft_rows_trimmed", "tokens", "Draft tokens left out because the step was shorter without them."),
    ("target", "nodes_used", "nodes", "Draft tokens accepted."),
    ("target", "drafts_paused", "sessions", "Times that drafting was paused for a session."),
    ("target", "branches", "branches", "Branches of verified subtrees, beyond the first of each."),
    ("target", "branches_used", "rounds", "Rounds whose accepted tokens end in a branch beyond the first."),
    ("target", "lookup_rounds", "rounds", "Rounds with a proposal from the session's own text."),
    ("target", "lookup_rows", "tokens", "Verified tokens of proposals from sessions' own text."),
    ("target", "lookup_rows_used", "tokens", "Accepted tokens of proposals from sessions' own text."),
    ("target", "head_rounds", "rounds", "Rounds with a proposal of a head of the target, since the draft had none."),
    ("target", "head_rows", "tokens", "Verified tokens of proposals from heads."),
    ("target", "head_rows_used", "tokens", "Accepted tokens of proposals from heads."),
    (
        "target",
        "head_holes",
        "sessions",
        "Times that a head resumed a session of which it had missed tokens in a pause.",
    ),
    ("target", "guesses", "tokens", "Extra tokens of lookahead that were computed in sessions' steps."),
    ("target", "states_sent", "tokens", "Tokens whose hidden states were sent to drafts, including repeats."),
    ("target", "states_bytes", "bytes", "Bytes of hidden states that were sent to drafts."),
    ("target", "hints_sent", "places", "Positions of steps for which drafts were sent a hint."),
    ("target", "hints_bytes", "bytes", "Bytes of hints that were sent to drafts."),
    ("target", "trials", "trials", "Trials of drafting or plain decoding, whichever a target had not chosen."),
    ("target", "drafts_resumed", "sessions", "Times that drafting was resumed for a session."),
    ("draft", "nodes_published", "nodes", "Nodes shipped by drafts."),
    ("draft", "nodes_used", "nodes", "Committed tokens whose node had been shipped before."),
    ("draft", "nodes_missed", "nodes", "Committed tokens that no node had predicted."),
    ("draft", "stale_messages", "messages", "Messages of an older epoch."),
    ("draft", "unknown_messages", "messages", "Messages for a session that is not open."),
    ("draft", "messages_foreign", "messages", "Messages for a session that another router opened."),
    ("draft", "messages_malformed", "messages", "Messages that drafts could not read."),
    ("draft", "invalid_messages", "messages", "Opens and commits that no router sends."),
    ("draft", "lost_commits", "messages", "Commits that arrived without the previous one."),
    ("draft", "refused_sessions", "sessions", "Sessions refused for lack of room."),
    ("draft", "failed_sessions", "sessions", "Sessions that drafts had to end."),
    ("draft", "prefill_chunks", "steps", "Prefill steps of drafts."),
    ("draft", "steps_unrecorded", "steps", "Steps of drafts that no CUDA graph covered, though there are some."),
    ("draft", "tree_steps", "steps", "Tree steps of drafts."),
    ("draft", "paths", "steps", "Tree steps that drafted the path of one session by one call."),
    ("draft", "path_tokens", "nodes", "Nodes expanded by one call for a session's path."),
    ("draft", "forwards", "steps", "Forwards of tree steps, retries included."),
    ("draft", "leaves", "nodes", "Nodes expanded."),
    ("draft", "states", "tokens", "Tokens whose hidden states drafts received."),
    ("draft", "states_bytes", "bytes", "Bytes of hidden states that drafts received."),
    ("draft", "states_missing", "tokens", "Tokens whose hidden states were lost: later ones arrived without them."),
    ("draft", "states_dropped", "messages", "Messages with states that came late, twice or early."),
    ("draft", "states_late", "nodes", "Last tokens of contexts that were expanded before their states arrived."),
    ("draft", "hints", "messages", "Hints that drafts received while the target's step ran."),
    ("draft", "hints_bytes", "bytes", "Bytes of hints that drafts received."),
    ("draft", "hints_late", "messages", "Hints for another step than the running one."),
    ("draft", "hints_invalid", "messages", "Hints that no target sends."),
    ("draft", "hints_nodes", "nodes", "Nodes for tokens that only a hint predicted."),
    ("draft", "messages", "messages", "Messages of drafts, one per session and step at most."),
):
    ENGINE_COUNTERS[_engine, _field] = counter(f"paceline_{_engine}_{_field}_total", _unit, _help)

ENGINE_COUNTER_NAME = re.compile(r"paceline_(target|draft|router)_([a-z][a-z0-9_]*)_total")


def engine_counter(kind: str, field: str) -> Metric:
    """The counter for a field of an engine's stats; a field unknown here becomes ``paceline_<kind>_<field>_total``."""
    field = re.sub(r"[^a-z0-9_]", "_", field.lower().removesuffix("_total"))
    return ENGINE_COUNTERS.get((kind, field)) or _other_engine_counter(kind, field)


def _other_engine_counter(kind: str, field: str) -> Metric:
    return Metric(f"paceline_{kind}_{field}_total", Kind.COUNTER, "events", f"Counter {field} of a {kind} engine.")


def declared(name: str) -> Metric | None:
    """The declaration of a name, also of an engine's counter that is unknown here; None: no metric of ours."""
    metric = CATALOGUE.get(name)
    if metric is None and (match := ENGINE_COUNTER_NAME.fullmatch(name)):
        return _other_engine_counter(match[1], match[2])
    return metric
