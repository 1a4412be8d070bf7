"""The simulation with whole trees: drafts expand and targets verify node by node, as the engines choose them.

``simulation.py`` only knows how far the chain below each outcome was grown. Here every session has a tree of its own. A
step of a draft expands the likeliest nodes of all its sessions (``draft/growth.py``), including siblings. A target
verifies each session's nodes with positive expected gain (``target/control/allocation.py``), including siblings under
the coupled rule, or waits while all of its sessions would (``target/control/waiting.py``). Probabilities are the means
of ``Outcomes``. A node's first child is the next token of the text with probability a; the others share the rest. A
draft sends the nodes of several steps together. Sometimes a target finds tokens in a session's own text
(``System.lookup_share``), and verifies these if it expects more of them than of the draft's tokens.

A path by one call (``System.path``) is left out: each token takes a step.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

from paceline.core.ranking import Ranked, Ranking
from paceline.core.statistics import Ewma
from paceline.draft import growth
from paceline.draft.growth import HOLD_ROUNDS, MIN_PROB, Reach
from paceline.plan.closed_form import Load, System
from paceline.plan.outcomes import expected_tokens
from paceline.plan.results import Result
from paceline.plan.simulation import DRAFT_ENDS, DRAFT_WAKES, READY, Simulation
from paceline.plan.states import Draft, Session, Target
from paceline.target.control.allocation import allocate_draft_tokens
from paceline.target.control.subtree import MAX_TREE_TOKENS, SubtreeOffer
from paceline.target.control.waiting import GIVE_UP, ROUND_WEIGHT, worth_now, worth_waiting
from paceline.types import Cause, Mode

_NO_RANK = 1 << 30


class Node:
    """A token of a tree."""

    __slots__ = ("ahead", "arrives", "children", "in_flight", "log", "position")

    def __init__(self, position: int = 0, log: float = 0.0, ahead: int = 0) -> None:
        self.position, self.log, self.ahead = position, log, ahead
        """Tokens below the last miss; -log of its path probability below the anchor; tokens after those in flight."""
        self.children: tuple[Node, ...] = ()  # by rank; none before it is expanded
        self.arrives = math.inf  # at the target
        self.in_flight = False  # it is being verified

    def known(self, now: float) -> tuple[Node, ...]:
        """Returns its children if the target has them, else ()."""
        return self.children if self.children and self.children[0].arrives <= now else ()


class Arrived(Ranking):
    """The nodes of a session that have arrived at the target, as it ranks them."""

    def __init__(self, anchor: Any, depth: int, branch_tokens: float, probs: list[float], now: float) -> None:
        """``probs``: of the children that may be verified, by rank."""
        self._each, self._now = probs, now
        super().__init__(anchor, depth, 1.0, branch_tokens, MAX_TREE_TOKENS)

    def children_of(self, node: Any) -> list[tuple[float, Any]]:
        return [*zip(self._each, node.known(self._now), strict=False)]


class Offer(SubtreeOffer):
    """Nodes of the simulation as an offer to a step."""

    __slots__ = ("_each", "_now")

    def __init__(self, anchor: Node, depth: int, probs: list[float], now: float) -> None:
        """``probs``: see ``Arrived``."""
        super().__init__(anchor, depth, 1.0)  # type: ignore[arg-type]  # of a node it takes no more than there is
        self._each, self._now = probs, now

    def ranked(self, branch_tokens: float) -> Iterator[Ranked]:
        self._ranking = Arrived(self._anchor, self._depth, branch_tokens, self._each, self._now)
        return self._ranking

    def first(self, num_nodes: int) -> list[Any]:
        """The first nodes of the last order."""
        if self._ranking is None or num_nodes > len(self._ranking):
            for _ in islice(self.ranked(0.0), num_nodes):
                pass
        assert self._ranking is not None
        return [*self._ranking.nodes[:num_nodes]]


class Tree:
    """A session's tree at its draft. The target has only the nodes that have arrived."""

    def __init__(self, system: System, k: int) -> None:
        """Makes a tree with only an anchor, which is not expanded yet."""
        outcomes = system.outcomes
        usual = [p for p in outcomes.children(system.fan_out) if p >= MIN_PROB]
        bonus = outcomes.children(len(usual), bonus=True)
        self._k, self._budget, self._min_log = k, system.tree_budget, math.log(system.min_path_prob)
        self._usual, self._bonus = ([math.log(max(p, MIN_PROB)) for p in each] for each in (usual, bonus))
        self._verified = usual if outcomes.bonus_power is None else usual[:1]
        self.anchor = Node()
        self.place: Node | None = self.anchor
        """The target's node at the end of the text; None: it has no node for it."""
        self.proposal: list[Node] = []
        """The nodes in flight, parents first."""
        self.decided_at = self.heard_from = -math.inf
        """Times of the last outcome and of the last nodes at the target."""
        self.chosen: list[Node] = []
        """The nodes that the step under way expands."""
        self._outcomes: list[tuple[float, tuple[int, ...]]] = []  # when the draft hears of them; ranks of their tokens
        self._reach = Reach(k)
        self._unsent: list[Node] = []
        self._hold_until = 0.0
        self._round_s, self._followed_at = Ewma(growth.ROUND_WEIGHT), math.nan
        self._heap: list[tuple[float, int, Node]] = []  # likely enough to expand, if ``_sorted``
        self._sorted = False
        self._serial, self._size = count(), 1

    # the draft

    def follow(self, now: float) -> None:
        """Moves the anchor along the outcomes that the draft has heard of."""
        while self._outcomes and self._outcomes[0][0] <= now:
            at, ranks = self._outcomes.pop(0)
            hit = True
            for rank in ranks:
                children = self.anchor.children
                hit = hit and rank < len(children)
                self.anchor = children[rank] if rank < len(children) else Node()
            self._hold_until = now if hit else math.inf
            if not math.isnan(self._followed_at):
                self._round_s.add(at - self._followed_at)
            self._followed_at, self._sorted = at, False
            if self.place is None and not self._outcomes:
                self.place = self.anchor

    def next_leaf(self) -> float | None:
        """-log probability of the node to expand next; None: none is likely enough."""
        if not self._sorted:
            self._sort()
        planned = len(self.chosen) * len(self._usual)
        if not self._heap or (self._size + planned >= self._budget and self._heap[0][2] is not self.anchor):
            return None
        return self._heap[0][0]

    def choose(self) -> None:
        """Moves the next leaf to the coming step."""
        self.chosen.append(heapq.heappop(self._heap)[2])

    def grow(self, now: float, arrives: float) -> bool:
        """The step ends: its nodes have children, which are sent now, to arrive then, or later. Returns if some are."""
        for node in self.chosen:
            node.children = tuple([Node(node.position + 1, node.log + p, node.ahead + 1) for p in self._logs(node)])
            self._size += len(node.children)
            self._unsent += node.children
            for child in node.children:
                self._push(child)
        self.chosen = []
        if now < self._hold_until < math.inf:
            return False
        if self._hold_until < math.inf:
            self._hold_until = now + HOLD_ROUNDS * self._round_s.get(0.0)
        return self.send(arrives)

    def send(self, arrives: float) -> bool:
        """Sends the nodes that are held back, as a draft does that has no more to expand. Returns if there are any."""
        for child in self._unsent:
            child.arrives = arrives
        sent, self._unsent = bool(self._unsent), []
        self.heard_from = arrives if sent else self.heard_from
        return sent

    @property
    def idle(self) -> bool:
        """The draft has nothing to expand or to send before the next outcome."""
        return self._sorted and not (self._heap or self.chosen or self._unsent or self._outcomes)

    def _logs(self, node: Node) -> list[float]:
        return self._bonus if self.proposal and node is self.proposal[-1] else self._usual

    def _push(self, node: Node) -> None:
        if node.ahead <= self._reach.tokens and node.log >= self._min_log:
            heapq.heappush(self._heap, (-node.log, next(self._serial), node))

    def _sort(self) -> None:
        """Recomputes the place of all nodes, relative to the anchor and to the tokens in flight."""
        self._heap, self._size, self._sorted = [], 0, True
        self.anchor.log, self.anchor.ahead = 0.0, 0
        stack = [self.anchor]
        while stack:
            node = stack.pop()
            self._size += 1
            if not node.children:
                self._push(node)
                continue
            for child, log in zip(node.children, self._logs(node), strict=True):
                child.log, child.ahead = node.log + log, 0 if child.in_flight else node.ahead + 1
                stack.append(child)

    # the target

    def offer(self, now: float) -> Offer:
        """Returns the nodes that may be verified."""
        return Offer(self.place or Node(), self._k, self._verified, now)

    def chain(self, now: float) -> int:
        """Length of the chain of first children that the target has, at most K."""
        length, node = 0, self.place
        while node is not None and length < self._k and (children := node.known(now)):
            length, node = length + 1, children[0]
        return length

    def verify(self, nodes: list[Node]) -> None:
        """Records that a step verifies ``nodes`` from now on."""
        start = self.place.position if self.place is not None else 0
        self.proposal, self._sorted = nodes, False
        for node in nodes:
            node.in_flight = True
        self._reach.observe(max((node.position for node in nodes), default=start) - start)

    def decided(self, ranks: tuple[int, ...], now: float, hears_at: float) -> Cause:
        """The target continues along tokens of these ranks. Returns a hit, or the cause of the miss."""
        for node in self.proposal:
            node.in_flight = False
        self.proposal, self._sorted, self.decided_at = [], False, now
        self._outcomes.append((hears_at, ranks))
        place, cause = self.place, Cause.LATE
        for rank in ranks:
            if place is None:
                break
            children = place.known(now)
            cause = Cause.LATE if rank < len(children) else Cause.TOKEN if children else Cause.K
            place = children[rank] if rank < len(children) else None
        self.place = place
        return Cause.HIT if place is not None and place.known(now) else cause


class TreeSimulation(Simulation):
    """One run of overlapped decoding with whole trees. The same arguments give the same result."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Arguments as for ``Simulation``."""
        super().__init__(*arguments, **options)
        self._of: dict[Session, Tree] = {}
        self._rejection = self._system.outcomes.bonus_power is not None
        self._row_s = self._system.target.seconds(2) - self._system.target.seconds(1)
        self._tokens, self._round_s, self._accepted, self._draft_s = (Ewma(ROUND_WEIGHT) for _ in range(4))

    def _open(self, session: Session) -> None:
        self._of[session] = Tree(self._system, self._k)
        super()._open(session)

    def _close(self, session: Session) -> None:
        del self._of[session]
        super()._close(session)

    # targets

    def _begin(self, target: Target) -> None:
        if target.ready and not target.prefilling:
            until = [self._waits_until(session, len(target.ready)) for session in target.ready]
            if all(at > self._now for at in until):
                target.busy = False  # asked again when nodes arrive
                self._push(min(until), READY, target.ready[0])
                return
        super()._begin(target)

    def _ready(self, what: object) -> None:
        assert isinstance(what, Session)
        if not what.target.busy and what.target.ready:
            self._begin(what.target)

    def _wait(self, session: Session) -> bool:
        return False  # ``_begin`` asks all of them

    def _waits_until(self, session: Session, batch: int) -> float:
        """Time until which a session waits for further nodes, by the engine's criterion; -inf: it does not."""
        tree, now, system = self._of[session], self._now, self._system
        length = tree.chain(now)
        if length >= self._most(batch) or tree.idle:
            return -math.inf
        a, next_s = system.outcomes.acceptance, self._draft_s.get(system.draft.seconds(1))
        gain, expected, since = a ** (length + 1), next_s, max(tree.decided_at, tree.heard_from)
        if not length:
            gain = max(a, self._accepted.get(a))
            gain -= worth_now([system.lookup_acceptance] * session.looked_up, self._row_s, self._rate())
            expected, since = 1.5 * next_s + 2 * system.link_s, tree.decided_at
        cost_s = max(expected - (now - since), expected / 4) + batch * self._row_s
        return since + GIVE_UP * expected if worth_waiting(gain, cost_s, self._rate()) else -math.inf

    def _rate(self) -> float:
        """Tokens per second of a session so far, at least plain decoding's."""
        return max(self._tokens.get(1.0) / self._round_s.get(math.inf), 1.0 / self._system.target.seconds(1))

    def _propose(self, target: Target) -> float:
        now, system, batch = self._now, self._system, target.batch
        offers = [self._offer(session) for session in batch]
        if self._rejection or not system.adaptive:
            most = self._most(len(batch))
            counts = [min(self._of[session].chain(now), most) for session in batch]
        else:
            counts = allocate_draft_tokens(
                offers,
                system.target,
                num_sessions=len(batch),
                num_context=len(batch),
                limit=max(0, system.max_step_tokens - len(batch)),
                overhead_s=system.gap_s,
                branch_s=system.branch_s,
                tokens_per_s=len(batch) * self._rate(),
            )
        rows = 0.0
        for session, offer, number in zip(batch, offers, counts, strict=True):
            nodes = offer.first(number) if isinstance(offer, Offer) else []
            self._of[session].verify(nodes)
            session.in_flight, session.looked_up = len(nodes), number - len(nodes)
            rows += number
            if session.draft is not None and not session.draft.busy:  # there is more to expand now
                self._push(now + self._link_s(), DRAFT_WAKES, session.draft)
        return rows

    def _offer(self, session: Session) -> Offer | list[float]:
        """The draft's nodes, or the tokens that were looked up if these are expected to bring more."""
        system, tree, num_looked_up = self._system, self._of[session], session.looked_up
        drafted = expected_tokens(system.outcomes.acceptance, tree.chain(self._now))
        if expected_tokens(system.lookup_acceptance, num_looked_up) > drafted:
            return [system.lookup_acceptance] * num_looked_up
        return tree.offer(self._now)

    def _accept(self, session: Session) -> int:
        node, ranks = self._of[session].place, list[int]()
        while True:
            children = () if node is None else node.children
            rank = self._rank(verified=bool(children) and children[0].in_flight)
            ranks.append(rank)
            if rank >= len(children) or not children[rank].in_flight:
                break
            node = children[rank]
        accepted = len(ranks) - 1
        if session.looked_up:
            accepted = max(accepted, min(session.looked_up, self._looked_up()))
        session.ranks = (*ranks, *(self._rank(verified=False) for _ in range(accepted + 1 - len(ranks))))
        return accepted

    def _rank(self, *, verified: bool) -> int:
        """Rank of the text's next token among its siblings; ``verified``: the first of them is being verified."""
        outcomes, uniform = self._system.outcomes, 1.0 - self._random.random()
        if verified and self._rejection:
            accepted = uniform > 1.0 - outcomes.acceptance
            return 0 if accepted else outcomes.rank(full=False, uniform=1.0 - self._random.random())
        rank = outcomes.rank(full=True, uniform=uniform)
        return _NO_RANK if rank and self._coverage < 1.0 and self._random.random() >= self._coverage else rank

    def _looked_up(self) -> int:
        a = self._system.lookup_acceptance
        return int(math.log(1.0 - self._random.random()) / math.log(a)) if 0.0 < a < 1.0 else round(a) * self._k

    def _walk(self, session: Session, accepted: int) -> bool:
        tree, draft = self._of[session], session.draft
        assert draft is not None
        if tree.decided_at > -math.inf:
            self._tokens.add(accepted + 1.0)
            self._round_s.add(self._now - tree.decided_at)
        if session.in_flight:
            self._accepted.add(float(accepted))
        hears_at = self._now + self._link_s()
        cause = tree.decided(session.ranks, self._now, hears_at)
        looks_up = self._system.adaptive and not self._rejection
        session.looked_up = self._k if looks_up and self._random.random() < self._system.lookup_share else 0
        if self._now >= self._counted_from:
            self._counts.causes[cause.value] += 1
        if not draft.busy:
            self._push(hears_at, DRAFT_WAKES, draft)
        return cause is Cause.HIT

    # drafts

    def _step(self, draft: Draft) -> None:
        now, system = self._now, self._system
        trees = [(session, self._of[session]) for session in draft.sessions]
        for _, tree in trees:
            tree.follow(now)
        if draft.prefilling and draft.prefill_next:
            self._draft_prefills(draft)
            return
        draft.prefill_next = True
        heap = []
        for order, (session, tree) in enumerate(trees):
            if session.draft_prompt:
                continue
            if (worth := tree.next_leaf()) is not None:
                heap.append((worth, order, session, tree))
            elif tree.send(arrives := now + self._link_s()):
                self._push(arrives, READY, session)
        heapq.heapify(heap)
        stepping: dict[Session, None] = {}
        leaves = 0
        while heap and leaves < system.draft_width:
            _, order, session, tree = heap[0]
            tree.choose()
            stepping[session], leaves = None, leaves + 1
            if (worth := tree.next_leaf()) is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (worth, order, session, tree))
        draft.stepping, draft.busy = [*stepping], bool(leaves)
        if not leaves:
            if draft.prefilling:
                self._draft_prefills(draft)
            return
        step_s = system.draft.seconds(leaves) + system.draft_kv_s * sum(session.context for session in stepping)
        self._draft_s.add(step_s)
        if now >= self._counted_from:
            self._counts.draft_s += min(step_s, self._seconds - now)
        self._push(now + step_s, DRAFT_ENDS, draft)

    def _draft_ends(self, what: object) -> None:
        assert isinstance(what, Draft)
        for session in what.stepping:
            arrives = self._now + self._link_s()
            if (tree := self._of.get(session)) is not None and tree.grow(self._now, arrives):
                self._push(arrives, READY, session)
        self._step(what)


def simulate(
    system: System,
    load: Load,
    mode: Mode,
    k: int,
    *,
    seconds: float = 2.0,
    seed: int = 0,
    link_spread: float = 0.0,
) -> Result:
    """Simulates ``seconds`` of one load and returns its result.

    ``link_spread``: as of ``Simulation``. Overlapped decoding has whole trees where ``System.trees`` says so, else the
    chains below each outcome (``simulation.py``).
    """
    trees = system.trees and mode is Mode.OVERLAPPED and k > 0 and load.drafts > 0
    kind = TreeSimulation if trees else Simulation
    return kind(system, load, mode, k, seconds=seconds, seed=seed, link_spread=link_spread).run()
