"""The controller's choices and their reasons, as text and as gauges: from its measurements alone.

Other threads call this while the engine runs. So collections are copied before they are read, and two numbers of one
answer may be from consecutive steps.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from paceline.messages import STATE_BYTES
from paceline.target.control.allocation import AcceptanceHistory
from paceline.target.control.load_trials import LARGEST_K, Standing

if TYPE_CHECKING:
    from paceline.target.engine import TargetEngine

_VALID_S = 1.0


class TargetReport:
    """What a target's status says of its engine. The controller's part is renewed once a second at most."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._made_at = -math.inf
        self._made: Mapping[str, Any] = {}

    def __call__(self, engine: TargetEngine) -> Mapping[str, Any]:
        """Returns fields of ReplicaStatus."""
        if self._clock() - self._made_at >= _VALID_S:
            self._made = {"controller": explain(engine), "measures": measures(engine)}
            self._made_at = self._clock()
        cache = engine.runner.cache
        counters = asdict(engine.stats) | engine.step_sizes.counters()
        counters["trials"] = engine.gate.trials.num_trials
        counters["head_holes"] = sum(mounted.stats.holes for mounted in engine.heads.mounted)
        counters["steps_unrecorded"] = engine.runner.backend.num_unrecorded
        return {
            "num_sessions": engine.num_sessions,
            "num_waiting": engine.num_waiting,
            "kv_pages_used": cache.num_pages - cache.num_available,
            "kv_pages": cache.num_pages,
            "counters": counters,
            "batch_invariant": engine.batch_invariant,
            "execution": engine.execution,
            "numerics": engine.numerics,
            **self._made,
        }


def explain(engine: TargetEngine) -> str:
    """Sentences about drafting at this load, lengths of proposals, seconds of steps, and paused sessions."""
    allocation, gate = engine.allocation, engine.gate
    if not allocation.adaptive:
        fixed = "fixed: every session has the most draft tokens that its request allows (adaptive is false)"
        return "; ".join([fixed, *_inside(engine)])
    num_sessions = engine.num_running
    if num_sessions == 0:
        trials = _number(gate.trials.num_trials, "trial")
        idle = f"no session is running; {trials} of drafting or of plain decoding so far"
        return "; ".join([idle, *_inside(engine)])
    without = "plain" if gate.trials.only_plain else "without"
    parts = [_standing(gate.trials.standing(num_sessions), num_sessions, without)]
    lengths = allocation.lengths.shares()
    if lengths:
        listed = ", ".join(f"{k}: {share:.0%}" for k, share in sorted(lengths.items()))
        accepted = acceptance(allocation.coupled, allocation.rejection)
        parts.append(
            f"proposals of {allocation.lengths.mean():.1f} tokens on average (of length {listed}), "
            f"{accepted:.0%} of a draft's tokens are expected to be accepted"
        )
    if allocation.cost.known:
        sizes = dict.fromkeys((num_sessions, 2 * num_sessions, 4 * num_sessions))
        listed = ", ".join(f"{size}: {1e3 * allocation.cost.seconds(size):.3g} ms" for size in sizes)
        parts.append(f"a step by its tokens {listed}")
    reasons = Counter(gate.reasons())
    parts += [f"{count} of {num_sessions} sessions without a draft: {why}" for why, count in sorted(reasons.items())]
    stats = engine.stats
    if stats.lookup_rounds:
        parts.append(
            f"{stats.lookup_rounds / max(stats.rounds, 1):.0%} of rounds had a proposal from their own text, "
            f"{stats.lookup_rows_used / max(stats.lookup_rows, 1):.0%} of it accepted"
        )
    return "; ".join([*parts, *_inside(engine)])


def _inside(engine: TargetEngine) -> list[str]:
    """Clauses about its heads, about the states that it sends to one in the draft pool, and about its hints."""
    parts = [mounted.report(max(engine.stats.rounds, 1)) for mounted in engine.heads.mounted]
    if (cores := engine.cores) is not None:
        parts.append(f"{cores.num} of {cores.most} cores share its steps, a draft has the others")
    if (link := engine.link) is not None:
        sent = f"{link.num_sent} states of {STATE_BYTES * link.width} bytes were sent to drafts"
        tokens = engine.stats.tokens_emitted
        parts.append(sent + (f", {link.num_bytes / tokens:.0f} bytes for each token emitted" if tokens else ""))
    if (hints := engine.hints) is not None:
        at = f"hints from boundary {hints.options.boundary} for {hints.num_sent} places were sent to drafts"
        parts.append(at + (f", {hints.num_bytes / hints.num_sent:.0f} bytes each" if hints.num_sent else ""))
    return parts


def _standing(standing: Standing, num_sessions: int, without: str) -> str:
    drafting, plain = (standing.tokens_per_s[wanted] for wanted in (True, False))
    state = f"drafting is {'on' if standing.drafting else 'off'} with {_number(num_sessions, 'session')} running"
    measured = " against ".join(
        f"{rate:.0f} tokens/s {how}" for how, rate in (("with drafts", drafting), (without, plain)) if rate > 0
    )
    if standing.on_trial:
        why = f"on trial, {measured}" if measured else "on trial"
    elif measured:
        why = f"{measured}"
    else:
        why = f"by the cost of a step an ideal draft is expected to make it {standing.ideal_gain:.2f} times as fast"
    trials = f"{_number(standing.num_trials, 'trial')} so far"
    if standing.next_trial_s is not None and not standing.on_trial:
        other = "drafting"
        if standing.drafting:
            other = "plain decoding" if without == "plain" else "decoding without drafts"
        when = f"after {standing.next_trial_s:.0f} s of decoding" if standing.next_trial_s >= 0.5 else "now"
        trials += f"; {other} is tried next {when}"
    return f"{state} ({why}; {trials})"


def _number(count: int, of: str) -> str:
    return f"{count} {of}{'' if count == 1 else 's'}"


def measures(engine: TargetEngine) -> Mapping[str, float]:
    """Gauges by the names of ``metrics/catalogue.py``; a label follows a colon."""
    allocation, gate, num_sessions = engine.allocation, engine.gate, engine.num_running
    found: dict[str, float] = {"acceptance": acceptance(allocation.coupled, allocation.rejection)}
    found["sessions_paused"] = float(len(list(gate.reasons())))
    lengths = allocation.lengths.shares()
    found["mean_draft_tokens"] = allocation.lengths.mean()
    for k in range(LARGEST_K + 1):
        share = sum(s for length, s in lengths.items() if min(length, LARGEST_K) == k)
        found[f"draft_tokens_share:{k}"] = share
    if allocation.cost.known:
        found |= {f"step_seconds:{size}": allocation.cost.seconds(size) for size in (1, 4, 16, 64)}
    for label, mounted in engine.heads.labeled().items():
        found[f"head_on:{label}"] = float(engine.heads.is_on(mounted, num_sessions))
        found[f"head_acceptance:{label}"] = acceptance(mounted.coupled, mounted.rejection)
        if (depth_s := mounted.gate.depth_s(1, first=True)) is not None:
            found[f"head_seconds:{label}"] = depth_s
    if (linear := engine.runner.cache.linear) is not None:
        found["state_slots"], found["state_slots_used"] = float(linear.slots.states), float(linear.num_used)
        found["prefix_states"] = float(linear.num_prefixes)
    if allocation.adaptive and num_sessions:
        standing = gate.trials.standing(num_sessions)
        found["drafting"] = float(standing.drafting)
        for wanted, rate in standing.tokens_per_s.items():
            found[f"tokens_per_second:{'drafting' if wanted else 'plain'}"] = rate
    return found


def acceptance(*known: AcceptanceHistory) -> float:
    """Acceptance rate of draft tokens given that their ancestors were accepted: of the rule with more trials."""
    return max(known, key=lambda hits: hits.trials).rate()
