"""A discrete-event simulation of many sessions on many targets and drafts, for sizes that no test machine has.

Events are the ends of steps, arrivals of awaited messages, and requests. Targets batch continuously: a step has all
ready sessions of the target, each with tokens of its tree. The engine's own rule decides how many tokens it verifies at
that load (``closed_form.lookahead``). Drafts step over the trees of all their sessions, the width shared evenly, while
any node is likely enough. Outcomes are drawn from ``tree.Outcomes``. ``System.prepared`` gives the prepared
continuations, from the draft steps that ended with their nodes arriving in time. Waiting on a miss follows
``model.awaited``, the engine's criterion.

Prompts are prefilled in chunks, in order of arrival, in steps with decoding sessions, up to a step's tokens. Drafts
alternate prefills and tree steps. A session alone on its draft that waits for it after a miss gets a path by one call
where ``System.path`` allows. A new request goes to the replicas with the fewest sessions.

Not modeled: preemption, prefix caches, and interference on one machine beyond ``System.sharing``.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from paceline.plan.closed_form import (
    Load,
    Subtree,
    System,
    awaited,
    draft_step_s,
    drafting_s,
    lookahead,
    path_tokens,
    predict,
    subtree,
    worth_length,
)
from paceline.plan.outcomes import Prepared
from paceline.plan.results import Counts, Result
from paceline.plan.states import Draft, Session, Target
from paceline.types import Cause, Mode

_WARM_UP = 0.2
"""Share of the simulated time that is not counted."""
TARGET_ENDS, DRAFT_ENDS, DRAFT_WAKES, READY, REQUEST = range(5)
"""Kinds of events."""


class Simulation:
    """One run. The same arguments give the same result."""

    def __init__(
        self,
        system: System,
        load: Load,
        mode: Mode,
        k: int,
        *,
        seconds: float = 2.0,
        seed: int = 0,
        link_spread: float = 0.0,
    ) -> None:
        """``link_spread``: standard deviation of the log of a message's latency, whose mean stays ``link_s``.

        Where requests arrive, the sessions of ``load`` only say how many there may be at once; the others queue.
        """
        self._k = k
        self._mode = mode if k and (load.drafts or system.colocated) else Mode.PLAIN
        self._system = system = system.while_both_compute() if self._mode is Mode.OVERLAPPED else system
        self._colocated = system.colocated and self._mode is Mode.SEQUENTIAL
        self._seconds, self._counted_from = seconds, _WARM_UP * seconds
        self._random, self._spread = random.Random(seed), link_spread
        self._heap: list[tuple[float, int, int, object]] = []
        self._order = 0
        self._now = 0.0
        self._counts = Counts()
        num_drafts = 0 if self._mode is Mode.PLAIN or self._colocated else load.drafts
        self._targets = [Target(i) for i in range(load.targets)]
        self._drafts = [Draft(i) for i in range(num_drafts)]
        self._fewest_targets = [(0, i) for i in range(load.targets)]
        self._fewest_drafts = [(0, i) for i in range(num_drafts)]
        self._load, self._requests = load, load.requests
        self._live = 0
        self._queue: deque[float] = deque()  # arrivals
        alone = predict(system, replace(load, sessions=load.targets, requests=None), self._mode, k)
        self._alone_s = alone.round_s / alone.tokens_per_round
        self._most_nodes = system.most_expanded(k)
        self._trees: dict[tuple[int, int, int], Prepared] = {}
        self._lookahead: dict[int, int] = {}
        whole = [self._tree(i, k, self._most_nodes) for i in range(k + 1)]
        self._enough = [min(tree.num_candidates, self._most_nodes) for tree in whole]
        self._share = max(1, whole[-1].num_outcomes)
        self._log_a = math.log(system.outcomes.acceptance) if system.outcomes.acceptance > 0 else -math.inf
        self._coverage = system.outcomes.coverage

    def run(self) -> Result:
        """Runs to the end of the simulated time."""
        requests = self._requests
        if requests is None or requests.per_s is None:
            for i in range(self._load.sessions):
                target = self._targets[i % len(self._targets)]
                draft = self._drafts[i % len(self._drafts)] if self._drafts else None
                if requests is None:
                    self._open(Session(target, draft, 0.0, 0, 1 << 62, 0))
                else:  # somewhere in the middle: all at the beginning would stay in step
                    prompt, output = self._length(requests.prompt_tokens), self._length(requests.output_tokens)
                    done = self._random.randrange(output)
                    self._open(Session(target, draft, -1.0, 0, output - done, prompt + done))
        else:
            self._push(self._random.expovariate(requests.per_s), REQUEST, None)
        handlers = (self._target_ends, self._draft_ends, self._draft_wakes, self._ready, self._request)
        heap = self._heap
        while heap and heap[0][0] <= self._seconds:
            self._now, _, kind, what = heapq.heappop(heap)
            handlers[kind](what)
        return self._result()

    def _push(self, at: float, kind: int, what: object) -> None:
        self._order += 1
        heapq.heappush(self._heap, (at, self._order, kind, what))

    def _link_s(self) -> float:
        link_s = self._system.link_s
        if self._spread and link_s:
            return link_s * self._random.lognormvariate(-(self._spread**2) / 2, self._spread)
        return link_s

    def _tree(self, in_flight: int, steps: int, nodes: int) -> Prepared:
        """``System.prepared``, without hashing its constant arguments."""
        key = (in_flight, min(steps, self._k), min(nodes, self._most_nodes))
        tree = self._trees.get(key)
        if tree is None:
            tree = self._trees[key] = self._system.prepared(key[0], self._k, *key[1:])
        return tree

    def _most(self, batch: int) -> int:
        """``model.lookahead``, without hashing its constant arguments."""
        most = self._lookahead.get(batch)
        if most is None:
            most = self._lookahead[batch] = lookahead(self._system, max(1, batch), self._k)
        return most

    # requests

    def _length(self, mean: int) -> int:
        assert self._requests is not None
        spread = self._requests.spread
        if not spread or not mean:
            return mean
        return max(1, round(self._random.gammavariate(spread**-2, mean * spread**2)))

    def _request(self, _: object) -> None:
        assert self._requests is not None
        assert self._requests.per_s is not None
        self._push(self._now + self._random.expovariate(self._requests.per_s), REQUEST, None)
        self._queue.append(self._now)
        self._admit()

    def _admit(self) -> None:
        while self._queue and self._live < self._load.sessions:
            target = self._targets[_fewest(self._fewest_targets, self._targets)]
            draft = self._drafts[_fewest(self._fewest_drafts, self._drafts)] if self._drafts else None
            self._begin_request(target, draft, self._queue.popleft())

    def _begin_request(self, target: Target, draft: Draft | None, arrived_at: float) -> None:
        assert self._requests is not None
        prompt, output = self._length(self._requests.prompt_tokens), self._length(self._requests.output_tokens)
        self._open(Session(target, draft, arrived_at, prompt, output, prompt))

    def _open(self, session: Session) -> None:
        session.known_at = self._now
        target, draft = session.target, session.draft
        self._live += 1
        self._resized(target, self._fewest_targets, 1)
        (target.prefilling if session.prompt else target.ready).append(session)
        if draft is not None:
            self._resized(draft, self._fewest_drafts, 1)
            draft.sessions[session] = None
            if session.draft_prompt:
                draft.prefilling.append(session)
            self._push(self._now, DRAFT_WAKES, draft)
        if not target.busy:
            self._begin(target)

    def _close(self, session: Session) -> None:
        target, draft = session.target, session.draft
        self._live -= 1
        self._resized(target, self._fewest_targets, -1)
        if draft is not None:
            self._resized(draft, self._fewest_drafts, -1)
            del draft.sessions[session]
            if session.draft_prompt:
                draft.prefilling.remove(session)
        self._note_session(session)
        assert self._requests is not None
        if self._requests.per_s is None:
            self._begin_request(target, draft, self._now)
        else:
            self._admit()

    def _resized(self, replica: Target | Draft, fewest: list[tuple[int, int]], by: int) -> None:
        replica.size += by
        if self._requests is not None and self._requests.per_s is not None:
            heapq.heappush(fewest, (replica.size, replica.number))

    # targets

    def _begin(self, target: Target) -> None:
        """A step over all that are ready, and prompts as far as its tokens go."""
        batch, target.ready = target.ready, []
        target.batch = batch
        system, num_prompt = self._system, 0
        rows = len(batch) + self._propose(target)
        if target.prefilling:
            num_prompt = self._take_prompts(target, system.max_step_tokens - math.ceil(rows))
        target.busy = bool(batch or num_prompt)
        if not target.busy:
            return
        step_s = system.target.seconds(rows + num_prompt)
        if system.target_kv_s:
            step_s += system.target_kv_s * sum(session.context for session in batch)
        if self._colocated:
            step_s += self._draft_in_turn(batch, num_prompt, target.tree)
        if self._now >= self._counted_from:
            self._counts.target_s += min(step_s, self._seconds - self._now)
        self._push(self._now + step_s + system.gap_s, TARGET_ENDS, target)

    def _propose(self, target: Target) -> float:
        """Chooses the nodes that a step verifies for each session of its batch. Returns the rows of all."""
        batch = target.batch
        if self._colocated:
            target.tree = subtree(self._system, max(1, len(batch)), self._k)
            for session in batch:
                session.in_flight = self._k
            return len(batch) * target.tree.rows
        most = self._most(len(batch)) if self._mode is Mode.OVERLAPPED else self._k
        for session in batch:
            session.in_flight = min(session.chain, most)
        return sum(session.in_flight for session in batch)

    def _take_prompts(self, target: Target, room: int) -> int:
        """Removes tokens of prompts for a step, and completed prompts; returns the number of tokens."""
        num_prompt, done = 0, 0
        for session in target.prefilling:
            chunk = min(session.prompt, room - num_prompt)
            if chunk <= 0:
                break
            session.prompt -= chunk
            num_prompt += chunk
            done += session.prompt == 0
        target.prefilled, target.prefilling = target.prefilling[:done], target.prefilling[done:]
        return num_prompt

    def _draft_in_turn(self, batch: list[Session], num_prompt: int, tree: Subtree) -> float:
        """Returns the seconds that a co-located draft works before the target's step."""
        system = self._system
        kv_s = system.draft_kv_s * sum(session.context for session in batch)
        step_s = drafting_s(system, len(batch), self._k, tree.leaves) + self._k * kv_s if batch else 0.0
        return step_s + (system.draft.seconds(num_prompt) if num_prompt else 0.0)

    def _target_ends(self, what: object) -> None:
        assert isinstance(what, Target)
        batch, what.batch = what.batch, []  # busy until all are processed: a request that replaces one waits
        if what.prefilled:
            batch += what.prefilled
            what.prefilled = []
        waiting: list[Session] = []
        for session in batch:
            accepted = self._accept(session)
            self._emit(session, accepted + 1)
            if session.left <= 0:
                self._close(session)
            elif self._mode is Mode.PLAIN or self._colocated:
                what.ready.append(session)
            elif self._mode is Mode.SEQUENTIAL:
                self._grow(session, fresh=True)
                session.chain, session.need = 0, self._k
            else:
                hit = self._walk(session, accepted)
                (what.ready if hit and len(batch) > 1 else waiting).append(session)
        for session in waiting:  # it misses, or has its target to itself; all the others are known by now
            if what.ready or what.prefilling or len(waiting) > 1 or not self._wait(session):
                what.ready.append(session)
        self._begin(what)

    def _accept(self, session: Session) -> int:
        """Draws how many tokens of a session's proposal are accepted."""
        if not session.in_flight:
            return 0
        return (
            self._draw_from(session.target.tree) if self._colocated else min(session.in_flight, self._draw_accepted())
        )

    def _draw_from(self, tree: Subtree) -> int:
        uniform = self._random.random()
        return sum(uniform < reached for reached in tree.reached)  # they fall

    def _draw_accepted(self) -> int:
        if self._log_a == 0.0:
            return 1 << 30
        if self._log_a == -math.inf:
            return 0
        return int(math.log(1.0 - self._random.random()) / self._log_a)

    def _emit(self, session: Session, tokens: int) -> None:
        tokens = min(tokens, session.left)
        session.left -= tokens
        session.context += tokens
        now, last_at = self._now, session.last_at
        if now >= self._counted_from:
            counts = self._counts
            counts.tokens += tokens
            counts.rounds += 1
            if last_at >= self._counted_from:
                gap = now - last_at
                counts.gaps.append(gap)
                session.seconds += gap
                session.tokens += tokens
            elif last_at != last_at and session.arrived_at >= self._counted_from:
                counts.ttfts.append(now - session.arrived_at)
        session.last_at = now

    def _walk(self, session: Session, accepted: int) -> bool:
        """Returns whether the tree holds a continuation; the draft continues from the outcome either way."""
        full = accepted == session.in_flight
        rank = self._system.outcomes.rank(full=full, uniform=1.0 - self._random.random())
        steps, arrivals = len(session.arrivals), session.arrivals
        while steps and arrivals[steps - 1] > self._now:
            steps -= 1
        tree = self._tree(session.in_flight, steps, steps * session.share)
        length = tree.lengths.get((accepted, rank), 0)
        if length and self._coverage < 1.0 and self._random.random() >= self._coverage:
            length = 0
        session.chain = length
        if length:
            cause = Cause.HIT
            self._grow(session, fresh=False)
        elif steps == 0:
            cause = Cause.LATE
            self._grow(session, fresh=not self._predicted(session, accepted, rank))
        else:
            cause = Cause.TOKEN if accepted in tree.positions else Cause.K
            self._grow(session, fresh=True)
        if self._now >= self._counted_from:
            self._counts.causes[cause.value] += 1
        return length > 0

    def _predicted(self, session: Session, accepted: int, rank: int) -> bool:
        """Returns whether a tree whose nodes are still on their way holds the outcome: its steps go on counting."""
        return (accepted, rank) in self._tree(session.in_flight, self._k, self._most_nodes).lengths

    def _grow(self, session: Session, *, fresh: bool) -> None:
        """The draft begins below the outcome. Nodes in transit count if it had predicted the outcome."""
        session.need = 0
        draft = session.draft
        assert draft is not None
        if not fresh and not session.chain:  # nodes are on their way, or will be: it was predicted
            return
        session.known_at = self._now + self._link_s()
        session.fresh = fresh
        session.arrivals = []
        if not draft.busy:
            self._push(session.known_at, DRAFT_WAKES, draft)

    def _wait(self, session: Session) -> bool:
        draft = session.draft
        assert draft is not None
        active = max(1, draft.size)
        period_s = draft_step_s(self._system, active) + self._system.draft_kv_s * session.context * active
        most = self._most(1)
        if not most:
            return False
        rate = 1.0 / self._alone_s
        if session.chain:
            session.need = max(0, worth_length(self._system, period_s, rate, most) - session.chain)
        else:
            session.need, _ = awaited(self._system, period_s, rate, most, self._k if draft.size == 1 else 0)
        return session.need > 0

    def _ready(self, what: object) -> None:
        """The draft tokens that a session waited for have arrived."""
        assert isinstance(what, Session)
        target = what.target
        target.ready.append(what)
        if not target.busy:
            self._begin(target)

    # drafts

    def _draft_wakes(self, what: object) -> None:
        assert isinstance(what, Draft)
        if not what.busy:
            self._step(what)

    def _step(self, draft: Draft) -> None:
        """Runs a tree step over the sessions with likely nodes; they take turns if they exceed the width."""
        now, system = self._now, self._system
        k, enough = self._k, self._enough
        if draft.prefilling and draft.prefill_next:
            self._draft_prefills(draft)
            return
        draft.prefill_next = True
        if self._mode is Mode.SEQUENTIAL:
            active = [
                s for s in draft.sessions if len(s.arrivals) < s.need and s.known_at <= now and not s.draft_prompt
            ]
        else:
            active = [
                s
                for s in draft.sessions
                if (len(s.arrivals) < k or len(s.arrivals) * s.share < enough[s.in_flight])
                and (not s.fresh or s.known_at <= now)
                and not s.draft_prompt
            ]
        if not active and draft.prefilling:
            self._draft_prefills(draft)
            return
        draft.busy = bool(active)
        draft.stepping = active
        if not active:
            heard = min((s.known_at for s in draft.sessions if s.known_at > now), default=None)
            if heard is not None:
                self._push(heard, DRAFT_WAKES, draft)
            return
        width = system.draft_width
        if len(active) > width:
            start = draft.next % len(active)
            draft.next += width
            draft.stepping = active = (active + active)[start : start + width]
        draft.share = 1 if self._mode is Mode.SEQUENTIAL else max(1, min(width // len(active), self._share))
        draft.began, draft.path = now, 0
        step_s = system.draft.seconds(min(width, len(active) * draft.share))
        first = active[0]
        if system.path is not None and len(active) == 1 and first.fresh and first.need and not first.arrivals:
            draft.path = k if self._mode is Mode.SEQUENTIAL else path_tokens(system, k)
            step_s = system.path.seconds(draft.path)
        if system.draft_kv_s:
            step_s += system.draft_kv_s * sum(session.context for session in active) * max(1, draft.path)
        if now >= self._counted_from:
            self._counts.draft_s += min(step_s, self._seconds - now)
        self._push(now + step_s, DRAFT_ENDS, draft)

    def _draft_prefills(self, draft: Draft) -> None:
        """A chunk of the prompts of its sessions, in order of arrival."""
        room = self._system.max_step_tokens
        done = 0
        for session in draft.prefilling:
            chunk = min(session.draft_prompt, room)
            session.draft_prompt -= chunk
            room -= chunk
            done += session.draft_prompt == 0
            if not room:
                break
        del draft.prefilling[:done]
        draft.stepping, draft.busy, draft.prefill_next = [], True, False
        step_s = self._system.draft.seconds(self._system.max_step_tokens - room)
        if self._now >= self._counted_from:
            self._counts.draft_s += min(step_s, self._seconds - self._now)
        self._push(self._now + step_s, DRAFT_ENDS, draft)

    def _draft_ends(self, what: object) -> None:
        assert isinstance(what, Draft)
        now, share = self._now, what.share
        began, arrives = what.began, now + self._system.link_s
        for session in what.stepping:
            if session.known_at > (began if session.fresh else now):
                continue
            if self._spread:
                arrives = now + self._link_s()
            session.share = share
            if what.path and session.need:
                session.chain, session.need = what.path, 0
                self._push(arrives, READY, session)
                continue
            session.arrivals.append(arrives)
            if session.need and len(session.arrivals) == session.need:
                session.chain, session.need = session.chain + session.need, 0
                self._push(arrives, READY, session)
        self._step(what)

    # results

    def _note_session(self, session: Session) -> None:
        if session.tokens:
            self._counts.tpots.append(session.seconds / session.tokens)

    def _result(self) -> Result:
        seen = {id(s): s for t in self._targets for s in (*t.ready, *t.batch, *t.prefilling, *t.prefilled)}
        seen |= {id(s): s for d in self._drafts for s in d.sessions}
        for session in seen.values():
            self._note_session(session)
        arrived = [s.arrived_at for s in seen.values() if math.isnan(s.last_at)] if self._requests is not None else []
        for at in (*arrived, *self._queue):  # at least so long
            if at >= self._counted_from:
                self._counts.ttfts.append(self._seconds - at)
        return self._counts.result(
            self._mode, self._k, self._seconds - self._counted_from, len(self._targets), len(self._drafts), self._order
        )


def _fewest(heap: list[tuple[int, int]], replicas: Sequence[Target] | Sequence[Draft]) -> int:
    """Returns the number of the replica with the fewest sessions, and drops outdated entries of the heap."""
    while heap[0][0] != replicas[heap[0][1]].size:
        heapq.heappop(heap)
    return heap[0][1]
