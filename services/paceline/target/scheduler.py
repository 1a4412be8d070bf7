"""Choice of the sessions of the next step, and of how many tokens each has computed.

Order of service: sessions that decode, then prefill chunks of admitted sessions, then admission from the queue.
Draft tokens are allocated for the whole step (``control/allocation.py``).
A step never exceeds its token budget; where no page is free a session is preempted, the youngest first, and recomputed
later from its tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

from paceline.checkpoint.grammar_work import POLL_S
from paceline.checkpoint.linear import CHUNK
from paceline.core.experiment import LEAST
from paceline.core.native_tree import rows_of
from paceline.core.processors import Row
from paceline.core.tree import NO_PROPOSAL, Producer, Proposal
from paceline.errors import ResourceExhaustedError
from paceline.model.kv_cache import KVCache
from paceline.model.linear.plan import NONE
from paceline.model.step_plan import SequenceStep
from paceline.target.branches import branches_of, page_tables, riding_steps, riding_tables, sequence_steps
from paceline.target.control.allocation import Allocation, Offer, blind_offer, expected_tokens, offer
from paceline.target.control.subtree import SubtreeOffer
from paceline.target.control.waiting import WaitPolicy
from paceline.target.heads.driver import Heads
from paceline.target.session import TargetSession
from paceline.types import Mode, pages_for

_RESTING_SESSIONS = 2 * LEAST
"""Back-off of prompt lookups, which cost time per session. After 4 consecutive steps without a lookup they pause for
one step, after the next for two, ..: at most 7, and at most one step per 8 sessions, or any number of sessions where
the steps without them are launched ahead."""
_UNKNOWN = 0
"""Stands for a token that is still being sampled on the device."""


@dataclass(slots=True, eq=False)
class Scheduled:
    """One session's part in a step: context tokens [start, stop), then the proposal, whose tokens follow at stop.

    Never changed once it is made; not frozen because freezing triples the time to make one. Of a part that is scheduled
    ahead, the token at ``start`` is still being sampled on the device.
    """

    session: TargetSession
    start: int
    stop: int
    proposal: Proposal
    num_trimmed: int = 0
    """Draft tokens that were available beyond the proposal."""
    tables: tuple[Sequence[int], ...] = ()
    """Page table of each branch of the proposal; () for a chain, which has the session's."""
    guesses: Proposal = NO_PROPOSAL
    """Tokens of a head that are computed with the session's own (``Heads.guesses``)."""
    guess_tables: tuple[Sequence[int], ...] = ()
    """Page table of each branch of these."""
    scores: bool = False
    """True for a part of a prompt that is told the log probability of the next token after each of its own. Such parts
    come last in a step, and never verify."""
    num_drafted: int = field(init=False)
    """Tokens of the proposal."""
    verifies: bool = field(init=False)
    """True if the step reaches the end of the context, so that it yields tokens."""

    def __post_init__(self) -> None:
        self.num_drafted = len(self.proposal.token_ids)
        self.verifies = self.stop >= len(self.session.tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes for the session."""
        return self.stop - self.start + self.num_drafted

    @property
    def is_ahead(self) -> bool:
        """True until the host knows the token that the part computes."""
        return self.stop > len(self.session.tokens)

    @property
    def num_logits(self) -> int:
        """Rows of logits that the step computes for the session's own tokens."""
        if self.verifies:
            return self.num_drafted + 1
        return self.stop - self.start if self.scores else 0

    @property
    def num_branches(self) -> int:
        """Branches of the proposal beyond the first."""
        return max(0, len(self.tables) - 1)

    def sequence_steps(self) -> list[SequenceStep]:
        """The tokens, positions and KV rows for the model's forward, one sequence for each branch.

        Their tokens are the context's and then the proposal's, in order. If the part verifies, they have logits after
        the context and after each draft token.
        """
        context, proposal = self.session.tokens[self.start : self.stop] or [_UNKNOWN], self.proposal
        num_by_library = 0
        if self.session.num_by_library > self.start:
            num_by_library = min(self.stop, self.session.num_by_library) - self.start
        if self.tables:
            steps = sequence_steps(context, self.start, proposal, self.tables)
            steps[0].num_by_library = num_by_library
            return steps
        context += proposal.token_ids
        rows = range(self.start, self.stop + self.num_drafted)  # a token's KV row is its position
        pages, num_logits = self.session.pages, self.num_logits
        return [
            SequenceStep(context, rows, rows, pages, num_logits, num_by_library=num_by_library, committed=self.stop)
        ]

    def riding_steps(self, own: SequenceStep) -> list[SequenceStep]:
        """One sequence for each branch of the guesses, each with the logits after its last token. ``own``: the first
        of ``sequence_steps``, which is changed to serve them."""
        if not self.guess_tables:
            return []
        return riding_steps(own, self.start, self.stop, self.guesses, self.guess_tables)

    def rows(self) -> list[Row]:
        """The positions to decide: after the context, and after each token of the proposal."""
        if self.is_ahead:
            return [Row(self.session.sampler, (_UNKNOWN,))]
        return rows_of(self.session.sampler, self.proposal)


class Scheduler:
    """Queue and running set of one target engine."""

    def __init__(
        self,
        cache: KVCache,
        policy: WaitPolicy,
        *,
        max_sessions: int,
        max_step_tokens: int,
        max_scored_rows: int,
        allocation: Allocation | None = None,
        trial_rows: Callable[[TargetSession], int] = lambda session: 0,
        heads: Heads | None = None,
    ) -> None:
        """Makes a scheduler without sessions.

        Args:
            max_scored_rows: rows of a step that return log probabilities of prompts.
            trial_rows: returns a session's draft tokens that are verified even if ``allocation`` allots none.
            heads: proposes tokens for sessions whose draft has none; None: there are no heads.
        """
        self._cache = cache
        self._policy = policy
        self._allocation = allocation or Allocation(adaptive=False)
        self._trial_rows = trial_rows
        self._heads = heads
        self._max_sessions = max_sessions
        self._max_step_tokens = max_step_tokens
        self._max_scored_rows = max_scored_rows
        self.waiting: deque[TargetSession] = deque()
        self.running: list[TargetSession] = []  # oldest first
        self.num_preemptions = 0
        self._proposals: dict[int, Proposal] = {}  # of all sessions that the choice for this step was about, by ``id``
        self._subtrees: dict[int, SubtreeOffer] = {}  # of some of them
        self._num_vain = 0  # steps in a row in which prompt lookups alone were asked and brought nothing
        self._num_rests = 0  # steps in which they are not asked
        self.wait_until: float | None = None
        """Time at which the first waiting session stops waiting for its draft; None if none waits."""

    def add(self, session: TargetSession) -> None:
        """Queues a new session."""
        self.waiting.append(session)

    def remove(self, session: TargetSession) -> None:
        """Removes a session and frees its pages."""
        if session in self.running:
            self.running.remove(session)
        else:
            self.waiting.remove(session)
        session.release(self._cache)

    def schedule(self, now: float, *, overlaps: bool = False) -> list[Scheduled]:
        """Chooses the parts of the next step; none if every session waits for a draft or there is no session.

        ``overlaps``: the steps after it may be launched ahead.
        """
        self.wait_until = None
        self._proposals.clear()
        self._subtrees.clear()
        self._admit()
        decoding = [s for s in self.running if s.num_computed == len(s.tokens) - 1]
        prefilling = [s for s in self.running if s.num_computed < len(s.tokens) - 1]
        unmasked = [s for s in decoding if s.awaits_mask()]
        if unmasked:
            decoding = [s for s in decoding if s not in unmasked]
            self.wait_until = now + POLL_S
        ready = self._not_waiting(decoding, now, others_ready=bool(prefilling))
        adaptive = self._allocation.adaptive
        trees = self._allocation.offers_trees()
        if self._heads:
            self._heads.propose(ready, len(ready) + len(prefilling), trees=trees)
        budget, scored_budget = self._max_step_tokens, self._max_scored_rows
        wanted = self._allocate(ready, prefilling, trees=trees, overlaps=overlaps) if adaptive else {}
        parts: list[Scheduled] = []
        before = self.num_preemptions  # of a session that runs no longer there is nothing to take
        with self._cache.clearing_at_once:
            for session in ready:
                if budget > 0 and (self.num_preemptions == before or session in self.running):
                    budget -= self._take(parts, session, len(session.tokens), budget, wanted)
            for session in prefilling:
                if budget > 0 and (self.num_preemptions == before or session in self.running):
                    stop, scores = session.next_chunk(budget, scored_budget)
                    if stop == len(session.tokens) and session.awaits_mask():
                        stop -= 1
                    if stop == session.num_computed:  # others are scored in this step
                        continue
                    num_taken = self._take(parts, session, stop, budget, wanted, scores=scores)
                    budget -= num_taken
                    scored_budget -= num_taken if scores else 0
        parts.sort(key=attrgetter("scores"))
        return self._with_guesses(parts, budget) if self._heads and parts else parts

    def schedule_ahead(self, in_flight: Sequence[Scheduled]) -> list[Scheduled]:
        """Chooses the parts of the step after the one ``in_flight``, as if no session ended with that; ``in_flight``
        verifies no draft tokens. None if more than the sampled tokens must be known first (``flight.py``).

        First come parts for the next token of sessions in flight, then prefill chunks. No session is preempted. What
        the step in flight computes belongs to the contexts: its sessions hold the states of linear layers after it.
        """
        self._admit()
        running = self.running
        if not all(s.samples_ahead and not s.draft_available and not s.scores_prompt for s in running):
            return []
        if self._may_look_up():
            if not self._num_rests:
                return []
            self._num_rests -= 1
        budget, parts, verifying = self._max_step_tokens, [], set()
        try:
            with self._cache.clearing_at_once:
                for part in in_flight:
                    session, stop = part.session, part.stop + 1
                    if not part.verifies:
                        continue
                    verifying.add(session)
                    session.hold_state(self._cache, part.stop)
                    if stop < session.max_tokens and budget > 0:
                        self._promise(session, stop, 0, NO_PROPOSAL)
                        session.reserve(self._cache, stop)
                        parts.append(Scheduled(session, part.stop, stop, NO_PROPOSAL))
                        budget -= 1
                for session in running:
                    if budget > 0 and session not in verifying:
                        stop, _ = session.next_chunk(budget, 0)
                        self._promise(session, stop, 0, NO_PROPOSAL)
                        session.reserve(self._cache, stop)
                        parts.append(Scheduled(session, session.num_computed, stop, NO_PROPOSAL))
                        budget -= stop - session.num_computed
        except ResourceExhaustedError:
            if self._cache.linear is not None:
                self._cache.linear.abandon()
            return []
        return parts

    def _may_look_up(self) -> bool:
        """True if the next step may verify the proposal of a prompt lookup."""
        most = max([session.k for session in self.running if session.lookup is not None], default=0)
        return most > 0 and not self._allocation.none_pays(len(self.running), most)

    def _not_waiting(self, decoding: list[TargetSession], now: float, *, others_ready: bool) -> list[TargetSession]:
        """The sessions that step now; sets ``wait_until`` for the others. ``others_ready``: others step in any case."""
        policy = self._policy
        if not others_ready:
            for session in decoding:
                if not policy.may_wait(session, others_ready=False) or session.num_ahead() >= session.max_draft():
                    others_ready = True
                    break
        may_wait = decoding
        if others_ready:
            may_wait = [s for s in decoding if s.mode is Mode.SEQUENTIAL and policy.may_wait(s, others_ready=True)]
        if not may_wait:
            return decoding
        wanted: dict[int, int] = {}
        row_s = 0.0
        if self._allocation.adaptive:
            wanted = self._allocate_if_sent(decoding)
            at = sum(1 + min(s.num_ahead(), wanted[id(s)]) for s in decoding)
            # one token more delays all of them
            row_s = len(decoding) * (self._allocation.cost.seconds(at + 1) - self._allocation.cost.seconds(at))

        rate, num_sessions = policy.rate(), len(decoding)

        def until_of(session: TargetSession) -> float | None:
            has_tokens = session.tree.anchor.best is not None
            fallback, fallback_s = ((), 0.0) if has_tokens else self._expected_fallback(session, num_sessions)
            return policy.until(
                session,
                now,
                rate,
                others_ready=others_ready,
                wanted=wanted.get(id(session)),
                row_s=row_s,
                fallback=fallback,
                fallback_s=fallback_s,
            )

        waits: dict[int, float | None] = {}
        steps = False  # one of them does not wait
        for session in may_wait:
            if steps and session.mode is not Mode.SEQUENTIAL and session.tree.anchor.best is not None:
                continue  # it does not wait either, and where there are tokens the policy learns nothing
            waits[id(session)] = until = until_of(session)
            steps = steps or until is None
        others_ready = others_ready or steps
        ready = []
        for session in decoding:
            until = waits.get(id(session))
            if until is not None and others_ready:  # asked again: now a wait would cost a whole step
                until = until_of(session) if policy.may_wait(session, others_ready=True) else None
            if until is None:
                ready.append(session)
                continue
            self.wait_until = until if self.wait_until is None else min(self.wait_until, until)
            if session.waiting_since is None:
                session.waiting_since = now
        return ready

    def _expected_fallback(self, session: TargetSession, num_sessions: int) -> tuple[Sequence[float], float]:
        """Probabilities of the tokens that a session would propose without its draft, and the seconds to make them."""
        if session.lookup is None and not self._heads:
            return (), 0.0
        looked_up = session.looked_up(session.k).probs
        headed, seconds = self._heads.expected(session, num_sessions) if self._heads else ([], 0.0)
        return (headed, seconds) if expected_tokens(headed) > expected_tokens(looked_up) else (looked_up, 0.0)

    def _allocate(
        self, ready: list[TargetSession], prefilling: list[TargetSession], *, trees: bool, overlaps: bool
    ) -> dict[int, int]:
        """Draft tokens for a step of these sessions, by ``id`` of the session; ``trees``: siblings may be verified;
        ``overlaps``: of ``schedule``."""
        spent_s = self._heads.took_s if self._heads else 0.0
        only_decodes = ready and not prefilling and not spent_s
        if only_decodes and self._allocation.none_pays(len(ready), max(session.k for session in ready)):
            return {id(session): self._trial_rows(session) for session in ready}  # no draft token can have gain
        only_lookups = not any(s.head_offer is not None or (s.draft_available and s.draft_heard) for s in self.running)
        if only_lookups and self._num_rests:
            self._num_rests -= 1
            return {id(session): 0 for session in self.running}
        budget = self._max_step_tokens - len(ready)
        num_context = len(ready)
        sessions = list(ready)
        for session in prefilling:
            missing = session.num_tokens - session.num_computed
            if missing <= budget and not session.scores_prompt:
                sessions.append(session)  # this step ends its prefill, so that it may verify a proposal
            num_context += min(missing, budget)
            budget -= min(missing, budget)
        self._proposals = proposals = {id(session): session.proposal(session.k) for session in sessions}
        offers = [offer_of(s, proposals[id(s)], trees=trees) for s in sessions]
        counts = self._allocation.allocate_draft_tokens(
            offers,
            num_sessions=len(ready) + len(prefilling),
            num_context=num_context,
            limit=self._max_step_tokens - len(ready),
            spent_s=spent_s,
        )
        wanted: dict[int, int] = {}
        for session, offered, count in zip(sessions, offers, counts, strict=True):
            wanted[id(session)] = max(count, self._trial_rows(session))
            if isinstance(offered, SubtreeOffer) and wanted[id(session)] == count:
                self._subtrees[id(session)] = offered
        if only_lookups:
            self._num_vain = 0 if any(counts) else self._num_vain + 1
            longest = _RESTING_SESSIONS - 1
            longest = longest if overlaps else min(longest, len(sessions) // _RESTING_SESSIONS)
            self._num_rests = min(max(0, self._num_vain - LEAST + 1), longest)
        return wanted

    def _allocate_if_sent(self, decoding: list[TargetSession]) -> dict[int, int]:
        """Draft tokens for a step of decoding sessions, as if their drafts had sent all that they may."""
        offers = [
            sent_offer_of(s) if s.draft_available and not s.idle else offer_of(s, s.proposal(s.k)) for s in decoding
        ]
        num_sessions = len(decoding)
        counts = self._allocation.allocate_draft_tokens(
            offers,
            num_sessions=num_sessions,
            num_context=num_sessions,
            limit=max(0, self._max_step_tokens - num_sessions),
        )
        return {id(s): max(count, self._trial_rows(s)) for s, count in zip(decoding, counts, strict=True)}

    def _take(
        self,
        parts: list[Scheduled],
        session: TargetSession,
        stop: int,
        budget: int,
        wanted: dict[int, int],
        *,
        scores: bool = False,
    ) -> int:
        """Adds the part of one session, preempting younger sessions for its pages.

        Args:
            stop: the end of the context tokens [session.num_computed, stop) to compute.
            budget: tokens that the step may still compute.
            wanted: allocated draft tokens by ``id`` of the session; K for those without an entry.
            scores: log probabilities of the prompt are requested (``Scheduled.scores``).

        Returns:
            The number of tokens that the part uses.
        """
        num_context = stop - session.num_computed
        proposal, num_drafted, num_trimmed, num_reserved = NO_PROPOSAL, 0, 0, 0
        spare = self._heads.reserves if self._heads else 0
        if session.k > 0 and stop == len(session.tokens):
            limit = min(budget - num_context, wanted.get(id(session), session.k))
            known = self._proposals.get(id(session)) if limit > 0 and self._proposals else None
            if known is not None:
                available = known
            else:
                available = session.proposal(session.k) if limit > 0 else session.drafted(session.k)
            offered = self._subtrees.get(id(session)) if self._subtrees else None
            proposal = available.first(limit) if offered is None else offered.proposal(limit)
            num_reserved = num_drafted = len(proposal.token_ids)
            if available.producer is Producer.DRAFT:
                num_trimmed = max(0, len(available.token_ids) - num_drafted)
            if session.rejection and num_drafted:
                # Rows [stop, stop + num_reserved) are for the proposal. Under the rejection rule whether pages suffice
                # must not depend on how long the proposal is.
                num_reserved = min(limit, session.max_draft())
        tables: tuple[Sequence[int], ...] = ()
        while True:
            try:
                self._promise(session, stop, num_reserved, proposal)
                if not proposal.parents:
                    session.reserve(self._cache, stop + num_reserved + spare)
                else:
                    tables = self._fork(session, stop, proposal, spare)
                break
            except ResourceExhaustedError:
                if not proposal.is_chain:
                    proposal = proposal.first(branches_of(proposal)[0].stop)
                    num_reserved = len(proposal)
                    continue
                if num_reserved:
                    proposal, num_reserved = NO_PROPOSAL, 0
                    continue
                victim = self.running[-1]
                self.preempt(victim, parts)
                if victim is session:
                    return 0
        part = Scheduled(session, session.num_computed, stop, proposal, num_trimmed, tables, scores=scores)
        parts.append(part)
        return num_context + part.num_drafted

    def _with_guesses(self, parts: list[Scheduled], budget: int) -> list[Scheduled]:
        """Adds guesses of heads to the parts, as far as tokens and free pages reach."""
        assert self._heads is not None
        riding = []
        for part in parts:
            decodes = part.verifies and part.stop - part.start == 1
            guesses = self._heads.guesses(part.session, budget) if decodes else NO_PROPOSAL
            if len(guesses):
                branches = branches_of(guesses)
                try:
                    behind = self._cache.num_behind(part.session.pages, part.start)
                    chunks = sum(branch.num_chunks(part.stop) + behind for branch in branches)
                    self._cache.promise((part.session, "guesses"), chunks)
                    private = part.session.fork(self._cache, [branch.num_pages(part.stop) for branch in branches])
                except ResourceExhaustedError:
                    self._heads.forget_guesses(part.session, guesses)
                else:
                    tables = riding_tables(part.session.pages, private, branches, part.stop)
                    part = replace(part, guesses=guesses, guess_tables=tuple(tables))
                    budget -= len(guesses)
            riding.append(part)
        return riding

    def _promise(self, session: TargetSession, stop: int, num_reserved: int, proposal: Proposal) -> None:
        """Reserves chunks of rows of linear layers for a part: from the end of the context on, for each branch."""
        if self._cache.linear is None:
            return
        chunks = (stop + num_reserved) // CHUNK - stop // CHUNK + 1
        if proposal.parents:
            behind = self._cache.num_behind(session.pages, session.num_computed)
            chunks += sum(branch.num_chunks(stop) + behind for branch in branches_of(proposal)[1:])
        self._cache.promise(session, chunks)

    def _fork(self, session: TargetSession, stop: int, proposal: Proposal, spare: int) -> tuple[Sequence[int], ...]:
        """Holds pages for all branches, each with ``spare`` rows more; returns their page tables.

        Raises as ``TargetSession.reserve``.
        """
        first, *others = branches = branches_of(proposal)
        session.reserve(self._cache, stop + first.stop + spare)
        private = session.fork(self._cache, [branch.num_pages(stop, spare) for branch in others])
        return tuple(page_tables(session.pages, private, branches, stop))

    def preempt(self, session: TargetSession, parts: list[Scheduled]) -> None:
        """Takes a running session's pages and parts of the step; it waits and is prefilled again."""
        assert len(self.running) > 1 or session.pages, "a lone session always fits: checked when it was opened"
        self.running.remove(session)
        session.give_way(self._cache)
        self.waiting.appendleft(session)
        self.num_preemptions += 1
        parts[:] = [p for p in parts if p.session is not session]

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self._max_sessions:
            session = self.waiting[0]
            session.attach_prefix(self._cache)
            needed = pages_for(session.num_tokens + session.k + 1) - len(session.pages)
            if needed > self._cache.num_available and self.running:
                session.release(self._cache)
                return
            session.cached_tokens = 0 if session.scores_prompt else session.num_computed
            self.running.append(self.waiting.popleft())

    def check_integrity(self, sessions: Sequence[TargetSession], kept: Sequence[int] = ()) -> None:
        """Asserts that every session is queued or running exactly once, and the pages add up.

        ``kept``: pages that no session holds any more and a step in flight may write to.
        """
        assert len(self.running) <= self._max_sessions
        known = [*self.waiting, *self.running]
        assert {id(s) for s in known} == {id(s) for s in sessions}
        assert len(known) == len(sessions)
        assert not any(s.pages for s in self.waiting), "a waiting session holds no pages"
        states = [s.held_state for s in known if s.held_state != NONE]
        self._cache.check_integrity([kept, *([*s.pages, *s.private_pages] for s in known)], states)


def offer_of(session: TargetSession, proposal: Proposal, *, trees: bool = False) -> Offer:
    """Returns the draft tokens that a session may verify now: acceptance probabilities, each given its ancestors.

    ``proposal``: the session's own of at most K tokens. ``trees``: siblings may be among them.
    """
    if not session.k:
        return ()
    if proposal.producer is Producer.LOOKUP:
        return proposal.probs
    drafted = len(proposal.token_ids) > 0 and proposal.producer is Producer.DRAFT
    headed = None if drafted else session.head_offer
    if headed is None and not drafted:
        return ()
    hits, most = session.hits if headed is None else headed.hits, session.max_draft()
    if session.rejection:
        # Nothing here depends on a drawn token: the existence of a first token is decided before it is drawn.
        return blind_offer(most if headed is None else min(headed.depth, most), hits)
    if trees and (headed is None or headed.anchor is not None):
        return session.subtree()
    return offer(proposal, most, hits)


def sent_offer_of(session: TargetSession) -> Offer:
    """Returns what ``offer_of`` would if the session's draft had sent its maximum, as a chain."""
    most = session.max_draft()
    if session.rejection:
        return blind_offer(most, session.hits)
    return offer(session.drafted(session.k), most, session.hits, extend=True)
