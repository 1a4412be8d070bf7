"""Counts and times of the steps of one target engine, and what the controllers learn from each step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.statistics import Ewma
from paceline.core.tree import Producer
from paceline.core.verification import Verdict
from paceline.messages import record
from paceline.target.control.allocation import Allocation
from paceline.target.control.compared import RankCounts, compare
from paceline.target.control.session_gate import SessionGate
from paceline.target.control.waiting import FinishedRound, WaitPolicy
from paceline.target.scheduler import Scheduled
from paceline.target.session import TargetSession
from paceline.types import MISSES, Cause, FinishReason


@dataclass(slots=True)
class TargetStats:
    """Counted events since the engine started."""

    steps: int = 0
    tokens_computed: int = 0
    rounds: int = 0
    tokens_emitted: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    nodes_added: int = 0
    nodes_stale: int = 0
    nodes_invalid: int = 0
    nodes_dropped: int = 0
    trees_lost: int = 0
    proposals_invalid: int = 0
    messages_stale: int = 0
    step_s: float = 0.0
    """Seconds inside steps, from the choice of sessions to their outcomes."""
    bubble_s: float = 0.0
    """Seconds between the end of a step and the start of the next forward although a session was ready to step."""
    bubble_steps: int = 0
    hit_bubble_s: float = 0.0
    """Part of ``bubble_s`` before forwards that only verify proposals which were there when the last step ended."""
    hit_bubble_steps: int = 0
    wait_s: float = 0.0
    """Seconds between two steps in which every session waited for its draft."""
    waits: int = 0
    ahead_depth_total: int = 0
    """Lengths of the proposals that were there when a step ended, up to K each."""
    ahead_rounds: int = 0
    draft_rows: int = 0
    """Draft tokens verified."""
    draft_rows_trimmed: int = 0
    """Draft tokens that were there and were not verified, because the step was shorter without them."""
    nodes_used: int = 0
    """Draft tokens accepted."""
    branches: int = 0
    """Branches of the subtrees that were verified, beyond the first of each."""
    branches_used: int = 0
    """Rounds whose accepted tokens end in one of these."""
    lookup_rounds: int = 0
    """Rounds whose proposal was looked up in the session's own text."""
    lookup_rows: int = 0
    """Tokens of these proposals."""
    lookup_rows_used: int = 0
    """Tokens of these proposals that were accepted."""
    head_rounds: int = 0
    """Rounds whose proposal a head of the target made."""
    head_rows: int = 0
    """Tokens of these proposals."""
    head_rows_used: int = 0
    """Tokens of these proposals that were accepted."""
    guesses: int = 0
    """Lookahead's guesses, computed in addition to the sessions' tokens."""
    head_s: float = 0.0
    """Seconds that heads were asked for, before the forwards that verify their tokens."""
    states_sent: int = 0
    """Positions whose hidden states were sent to drafts."""
    states_bytes: int = 0
    """Bytes of the hidden states that were sent to drafts."""
    hints_sent: int = 0
    """Places of steps for which a hint was sent to a draft."""
    hints_bytes: int = 0
    """Bytes of the hints that were sent to drafts."""
    drafts_paused: int = 0
    """Times that drafting was paused for a session."""
    drafts_resumed: int = 0
    steps_ahead: int = 0
    """Steps that were launched before the step in front of them was done."""


STEP_SIZES = (1, *(2**n for n in range(3, 15)))
"""Upper bounds, in rows, of the buckets in which steps are counted; larger steps share one more bucket."""


class StepSizes:
    """Steps since the engine started by their rows: prompt, context and draft tokens."""

    def __init__(self) -> None:
        self._steps = [0] * (len(STEP_SIZES) + 1)
        self._tokens = [0] * (len(STEP_SIZES) + 1)

    def add(self, num_tokens: int) -> None:
        """Counts a step by its number of rows."""
        size = bisect_left(STEP_SIZES, num_tokens)
        self._steps[size] += 1
        self._tokens[size] += num_tokens

    def counters(self) -> dict[str, float]:
        """``steps_of:SIZE`` and ``step_tokens_of:SIZE``, the rows of these steps, for the sizes that there were."""
        found: dict[str, float] = {}
        for size, num_steps, num_tokens in zip((*STEP_SIZES, "inf"), self._steps, self._tokens, strict=True):
            if num_steps:
                found |= {f"steps_of:{size}": num_steps, f"step_tokens_of:{size}": num_tokens}
        return found


class StepTimes(NamedTuple):
    """Times of a step whose verdicts are known, in seconds."""

    started: float
    """Time before its sessions were chosen."""
    forward_at: float
    """Time when its forward began."""
    is_ahead: bool
    """True if the step was launched before the step in front of it was done."""
    decided_at: float
    """Time when its verdicts were known."""
    last_at: float
    """Time when the verdicts of the step before were known; 0: this step is the first one."""
    follows: bool
    """True if there was no pause since the step before."""


@record
class MeasuredStep:
    """The cost of a step's draft tokens, in seconds."""

    row_s: float
    """Delay by one draft token, summed over the sessions of the step."""
    plain_s: float
    """Seconds from the start of a plain step of the same sessions to the start of the next."""
    guess_s: float
    """Seconds of lookahead's guesses in the step."""
    decoding: float
    """Share of the step's time, 0 to 1, that it would have taken without its prefill chunks."""


DecidedRound = tuple[Scheduled, Verdict, int, int, FinishReason | None, Cause, bool | None, float | None, float]
"""Outcome of one part of a step, and what its session was when it was decided: verdict; accepted and emitted tokens,
both cut at the session's end; the reason if the session ends here; its cause; True if its draft has sent nodes, None:
it had no draft; its ``waiting_since`` and ``outcome_at``."""


class StepMeter:
    """Measures the steps of one engine: ``begin`` or ``begin_ahead``, ``decided``, ``ended``. Then, or after
    the next step has begun, ``measure``, ``rounds``, ``compare`` and ``book`` account for it."""

    def __init__(
        self, clock: Callable[[], float], allocation: Allocation, wait_policy: WaitPolicy, gate: SessionGate
    ) -> None:
        self.stats = TargetStats()
        self.sizes = StepSizes()
        self.ranks = RankCounts()
        self._clock = clock
        self._allocation = allocation
        self._wait_policy = wait_policy
        self._gate = gate
        self._started = self.forward_at = 0.0
        """Time when the forward of the step in progress began."""
        self._is_ahead = False  # it was launched before the one in front of it was done
        self._ahead_s = Ewma()  # from the one to the other in steps without branches
        self._ended_at: float | None = None  # of the last step; None: there was nothing to do since
        self._decided_at = 0.0  # of the last step
        self._all_waited = False  # since the last step

    def idle(self, *, waiting: bool) -> None:
        """Records an attempt to step without a ready session; ``waiting``: all sessions, at least one, await drafts."""
        self._all_waited = waiting
        if not waiting:
            self._ended_at = None

    def begin(self, parts: Sequence[Scheduled], started: float, head_s: float = 0.0) -> None:
        """Records the start of a forward, and accounts for the time since the last step.

        ``head_s``: seconds of this time in heads. They count neither as a gap nor as part of the step, whose times
        describe plain decoding.
        """
        self._started, self.forward_at = started + head_s, self._clock()
        self.stats.head_s += head_s
        self._is_ahead = False
        if self._ended_at is None:
            return
        gap_s, stats = max(0.0, self.forward_at - self._ended_at - head_s), self.stats
        if self._all_waited:
            stats.wait_s += gap_s
            stats.waits += 1
            return
        stats.bubble_s += gap_s
        stats.bubble_steps += 1
        self._allocation.overhead_s.add(max(0.0, self.forward_at - self._decided_at - head_s))
        if all(p.verifies and p.session.cause is Cause.HIT for p in parts):
            stats.hit_bubble_s += gap_s
            stats.hit_bubble_steps += 1

    def begin_ahead(self) -> None:
        """Records that the next step was launched ahead. The device began it when the last one was decided, so there is
        no gap."""
        self._started = self.forward_at = self._decided_at
        self._is_ahead = True
        self.stats.steps_ahead += 1

    def decided(self) -> StepTimes:
        """Records the time at which the verdicts of the step are known."""
        now, last_at = self._clock(), self._decided_at
        self._decided_at = now
        return StepTimes(self._started, self.forward_at, self._is_ahead, now, last_at, self._ended_at is not None)

    def ended(self) -> None:
        """Records the end of a step: the time from now to the next forward is a bubble or a wait."""
        self._ended_at, self._all_waited = self._clock(), False

    def measure(self, parts: Sequence[Scheduled], times: StepTimes) -> MeasuredStep:
        """Records what a step of these parts took."""
        seconds, cost = times.decided_at - times.started, self._allocation.cost
        num_verifying = num_context = num_drafted = num_branches = num_guesses = num_guessed = 0
        for part in parts:
            num_verifying += part.verifies
            num_context += part.stop - part.start
            num_drafted += part.num_drafted
            if part.tables:
                num_branches += part.num_branches
            if part.guess_tables:
                num_guesses += len(part.guesses)
                num_guessed += len(part.guess_tables)
        num_tokens = num_context + num_drafted + num_guesses
        num_decoding = num_drafted + num_verifying + num_guesses  # the others belong to prefill chunks
        row_s = guess_s = 0.0
        if num_drafted:
            added_s = cost.seconds(num_tokens) - cost.seconds(num_tokens - num_drafted)
            row_s = (added_s + num_branches * self._allocation.branch_s) * num_verifying / num_drafted
        if num_guesses:
            guess_s = cost.seconds(num_tokens) - cost.seconds(num_tokens - num_guesses)
            guess_s += num_guessed * self._allocation.branch_s
        prefills = cost.known and num_decoding < num_tokens
        decoding = cost.seconds(num_decoding) / cost.seconds(num_tokens) if prefills else 1.0
        if any(part.scores for part in parts):  # whose logits cost more than the tokens of other steps
            decoding = 0.0
        plain_s = self._allocation.plain_s(num_verifying)
        step = MeasuredStep(row_s, plain_s, guess_s, decoding)
        if num_context == len(parts):  # one token each; the costs above do not include this step
            self._wait_policy.step_s.add(seconds)
            forward_s, ahead_s = times.decided_at - times.forward_at, times.forward_at - times.started
            if num_branches + num_guessed:  # pages of branches are forked before the forward
                forward_s += max(0.0, ahead_s - self._ahead_s.get(ahead_s))
                self._allocation.observe_branches(num_branches + num_guessed, num_tokens, forward_s)
            else:
                if not times.is_ahead:
                    self._ahead_s.add(ahead_s)
                if not num_drafted:
                    self._allocation.hidden.add(float(times.is_ahead))
                self._allocation.observe_step(num_tokens, forward_s)
        self.stats.steps += 1
        self.stats.step_s += seconds
        self.stats.tokens_computed += num_tokens
        self.sizes.add(num_tokens)
        self.stats.guesses += num_guesses
        return step

    def rounds(self, step: MeasuredStep, times: StepTimes, decided: Sequence[DecidedRound]) -> int:
        """Counts the outcomes of a step; returns the tokens that they emit."""
        stats, gate, lengths = self.stats, self._gate, self._allocation.lengths
        row_s, plain_s = step.row_s, step.plain_s
        num_rows = num_rows_used = num_rows_trimmed = num_all_emitted = 0
        finished: list[FinishedRound] = []
        for part, verdict, num_accepted, num_emitted, _, cause, heard, waiting_since, outcome_at in decided:
            session, proposal = part.session, part.proposal
            stats.proposals_invalid += verdict.num_invalid
            num_all_emitted += num_emitted
            num_nodes = num_used = num_tried = 0  # of the draft
            path: Sequence[int] = range(verdict.num_accepted)
            if part.tables:
                path = proposal.along(verdict.token_ids[: verdict.num_accepted])
                stats.branches += part.num_branches
                stats.branches_used += path != [*range(len(path))]
            result = compare(proposal, path)
            if proposal.producer is Producer.LOOKUP:
                stats.lookup_rounds += 1
                stats.lookup_rows += part.num_drafted
                stats.lookup_rows_used += num_accepted
            elif proposal.producer is Producer.HEAD:
                stats.head_rounds += 1
                stats.head_rows += part.num_drafted
                stats.head_rows_used += num_accepted
                self._allocation.heads.add(result.places, result.predicted, result.first, result.any)
            elif proposal.node_ids:
                num_nodes, num_used, num_tried = part.num_drafted, num_accepted, result.places
                session.hits.add(result.places, result.predicted, result.first, result.any)
                self.ranks.add(proposal, path)
            num_rows += num_nodes
            num_rows_used += num_used
            num_rows_trimmed += part.num_trimmed
            if session.k:
                lengths.add(part.num_drafted)
            if cause is Cause.START:
                stats.cached_tokens += session.cached_tokens
            else:
                waited_s = answer_s = 0.0
                if heard is not None:
                    if waiting_since is not None:
                        waited_s = times.started - waiting_since
                        if num_nodes and cause in MISSES:
                            answer_s = waited_s
                    lost_s = waited_s + row_s * num_nodes
                    lost = lost_s / plain_s if plain_s > 0 else 0.0
                    gate.observe(session, num_nodes, part.num_trimmed, num_used, lost, heard=heard)
                finished.append((num_tried, num_used, num_emitted, times.decided_at - outcome_at, answer_s))
            if not num_nodes and heard is not None:
                session.hits.fade()
        self._wait_policy.observe_rounds(finished)
        stats.rounds += len(decided)
        stats.tokens_emitted += num_all_emitted
        stats.draft_rows += num_rows
        stats.nodes_used += num_rows_used
        stats.draft_rows_trimmed += num_rows_trimmed
        return num_all_emitted

    def compare(
        self, step: MeasuredStep, times: StepTimes, num_parts: int, num_tokens: int, running: Sequence[TargetSession]
    ) -> None:
        """Records the tokens per second of a step for the choice between drafting and plain decoding at its load.

        Steps after a pause, of sessions that have all ended, where none may have a draft, or mostly of prefill do not
        count. ``num_parts``: of sessions that had not ended when it was decided; ``num_tokens``: that it emitted.
        """
        may = [s for s in running if s.k > 0]
        if not times.follows or not may or not num_parts or 2 * step.decoding < 1:
            return
        seconds = step.decoding * (times.decided_at - times.last_at)
        heard = sum(s.draft_available and s.draft_heard for s in may)
        if seconds > 0:
            self._allocation.tokens_per_s.add(num_tokens / seconds)
        self._gate.trials.measure(num_parts, num_tokens, seconds, drafting=2 * heard >= len(may))

    def book(self, times: StepTimes) -> None:
        """Adds the time of a step to the time of which trials may take a share."""
        self._allocation.budget.step(times.decided_at - (times.last_at or times.decided_at))
