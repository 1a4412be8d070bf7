"""Heads of a target: drafters in its own process, fed with every step and asked where a session's draft has nothing.

    forward ─▶ verify ─▶ commit ─▶ send ─▶ advance, feed          the heads of all sessions, in one call each
                                                │
    settle ─▶ choose who steps ─▶ expand, expand, .. ─▶ allocate ─▶ forward

A session's head has a tree of its own, as a draft's engine has, so the ranking by the target's noise, the calibration
and what a drafter may rely on are the same. Its best path, and the tokens beside it, are offered when the session is
about to step and its draft has sent nothing for this place; it needs no message and no wait. Only the target decides
what becomes text.

Every rule is served. Coupled and greedy sessions are offered the path that is likeliest to be the target's own choice.
Under the rejection rule each token is drawn from the head's distribution q, which is stated: whether the head is asked
depends on the context and on averages, never on a token that was drawn, nor does the depth, so p is exact (see
``core/verification.py``). Sequential sessions have proposals of a head only if they have no draft, so that they stay
comparable; plain ones have none.

A head that raises is switched off and named in the status; its sessions go on without it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.core.processors import Row
from paceline.core.tree import Producer, Proposal, SpeculationTree, TreeNode
from paceline.drafters.calibration import Calibration
from paceline.drafters.protocol import (
    FATAL,
    Candidates,
    DrafterSessionError,
    Features,
    Fed,
    Head,
    Leaf,
)
from paceline.drafters.ranking import Ranking, RankingRow, Rule, rank
from paceline.errors import PacelineError
from paceline.messages import Node
from paceline.model.kv_cache import KVCache
from paceline.target.control.allocation import AcceptanceHistory, Allocation, expected_tokens
from paceline.target.control.compared import compare
from paceline.target.control.head_gate import HeadGate
from paceline.target.control.subtree import SubtreeOffer
from paceline.target.session import TargetSession
from paceline.types import PAGE_SIZE, Mode

log = logging.getLogger(__name__)

_FAN_OUT = 3
"""Candidates ranked at each place; the gap to the second says how certain the first is."""
_LEAST_PATH = 0.02
_NONCES = 1 << 31
"""Draws of heads under the rejection rule use nonces from here, which a draft's own do not share at one length of the
context."""


@dataclass(frozen=True, slots=True)
class Computed:
    """Rows that a step has computed for one session, after its outcome was committed."""

    session: TargetSession
    start: int
    """The first position computed; positions [start, session.num_computed) belong to committed tokens."""
    row: int
    """Row of its first token among all tokens of the step."""
    logits_row: int
    """Its first row among those with logits; -1: a prefill chunk, without any."""
    num_accepted: int
    """Draft tokens accepted: the state behind them is at ``logits_row + num_accepted``."""


@dataclass(slots=True)
class HeadStats:
    """Counted events of one head since the engine started."""

    rounds: int = 0
    """Rounds with a proposal of this head."""
    rows: int = 0
    """Tokens of these proposals."""
    rows_used: int = 0
    """Tokens of these proposals that were accepted."""
    depths: int = 0
    """Calls of ``expand``: one for each depth of a step."""
    seconds: float = 0.0
    """Inside the head: being fed and asked."""
    sessions_failed: int = 0
    """Sessions that it could not follow."""


class _Followed:
    """One session at one head: the head's tree below the session's last token."""

    __slots__ = (
        "attachment",
        "calibration",
        "hits",
        "in_flight",
        "next_node_id",
        "num_fed",
        "rule",
        "session",
        "tree",
        "vocab_size",
    )

    def __init__(self, session: TargetSession, vocab_size: int, mounted: MountedHead) -> None:
        self.session = session
        self.rule = Rule.GREEDY if session.sampler.greedy else Rule.REJECTION if session.rejection else Rule.COUPLED
        self.vocab_size = vocab_size
        self.tree = SpeculationTree(vocab_size, session.num_tokens, rejection=session.rejection)
        self.calibration = Calibration(_FAN_OUT, mounted.calibrations[self.rule])
        self.hits = AcceptanceHistory(mounted.rejection if session.rejection else mounted.coupled)
        self.next_node_id: int = Producer.HEAD.first_id
        self.in_flight: frozenset[int] = frozenset()
        """Nodes of the proposal that is being verified."""
        self.num_fed = 0
        """Positions [0, num_fed) have been fed since ``attachment``, or the last of them to a head that wants no
        more."""
        self.attachment = 0
        """The session's pages that it was fed for (``TargetSession.attachment``)."""

    def add(self, parent: TreeNode, ranking: Ranking) -> TreeNode | None:
        """Attaches the children of an expanded node; returns the one that a proposal takes."""
        parent.gaps = ranking.evidence.gaps
        probs = self.calibration.probabilities(ranking.evidence)
        for r, (token_id, prob) in enumerate(zip(ranking.token_ids, probs, strict=True)):
            first = r == 0
            node = Node(self.next_node_id, parent.node_id, token_id, prob, True, ranking.q if first else None)
            self.next_node_id += 1
            self.tree.add((node,), Producer.HEAD)
        return parent.best

    def walk(self, token_ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Follows committed tokens: their nodes, and the expanded nodes that are still below the anchor."""
        self._observe(token_ids)
        walk = self.tree.walk(token_ids)
        node_ids = list(walk.node_ids)
        for token_id in walk.unresolved:
            node = Node(self.next_node_id, self.tree.anchor.node_id, token_id, 1.0, False)
            self.next_node_id += 1
            self.tree.add((node,), Producer.HEAD)
            node_ids.append(node.node_id)
        self.in_flight = frozenset()
        return node_ids, [n.node_id for n in self.tree.nodes() if n.expanded and n is not self.tree.anchor]

    def _observe(self, token_ids: Sequence[int]) -> None:
        node = self.tree.anchor
        for token_id in token_ids:
            child = node.children.get(token_id)
            if node.gaps:
                tried = self.rule is not Rule.REJECTION or (
                    node.best is not None and node.best.node_id in self.in_flight
                )
                self.calibration.observe(node.gaps, child.rank if child else None, 0 if tried else 1)
            if child is None:
                return
            node = child

    def restart(self) -> None:
        """Drops everything below the anchor: it was predicted from the head's own states, and better ones have come."""
        self.tree = SpeculationTree(self.vocab_size, self.session.num_tokens, rejection=self.session.rejection)

    def deepest(self) -> TreeNode:
        """The end of the best path below the anchor: the node to expand next, unless nothing came of it before.

        Below an anchor that was predicted there may be a path already: its tokens were not all verified.
        """
        node = self.tree.anchor
        while node.expanded and node.best is not None:
            node = node.best
        return node

    def probability(self, node: TreeNode) -> float:
        """Probability that the tokens down to ``node`` are all accepted; under the rejection rule by averages alone."""
        path = self.path(node)
        if self.rule is Rule.REJECTION:
            return self.hits.rate() ** len(path)
        correction = self.hits.correction()
        return math.prod(min(1.0, correction * each.prob) for each in path)

    def path(self, node: TreeNode) -> list[TreeNode]:
        """The nodes from the anchor (exclusive) to ``node`` (inclusive)."""
        path = []
        at: TreeNode | None = node
        while at is not None and at is not self.tree.anchor:
            path.append(at)
            at = at.parent
        return path[::-1]


class MountedHead:
    """One head in its target: the sessions that it follows, its acceptance and times, and whether it is on."""

    def __init__(self, name: str, head: Head, *, num_tokens: int, max_len: int | None = None) -> None:
        """``name``: for status and metrics. ``num_tokens``: the most that it proposes at once. ``max_len``: tokens of
        the longest context that it can follow; None: any."""
        self.name = name
        self.head = head
        self.num_tokens = num_tokens
        self.max_len = max_len
        self.stats = HeadStats()
        self.gate = HeadGate()
        self.coupled, self.rejection = AcceptanceHistory(), AcceptanceHistory()
        """Acceptance of its tokens in all sessions, by rule."""
        self.calibrations = {rule: Calibration(_FAN_OUT) for rule in Rule}
        self.sessions: dict[str, _Followed] = {}
        self.failure = ""
        """Why it was switched off; empty: it is on."""
        self.columns: tuple[int, ...] = ()
        """Its boundaries among those that the target's steps return."""
        self.prefilling: set[str] = set()
        """Sessions that it is not ready for."""
        self.pages: set[int] = set()
        """Full pages of the target that it was fed with from end to end."""
        self.accepted, self.spent_s = 0, 0.0
        """Its accepted tokens, and the seconds that it took, since they were last booked."""

    def report(self, num_rounds: int) -> str:
        """A clause for the status. ``num_rounds``: those of all sessions so far."""
        if self.failure:
            return f"head {self.name} is switched off: {self.failure}"
        stats, depth_s = self.stats, self.gate.depth_s(1, first=True)
        text = f"head {self.name}: {stats.rounds / num_rounds:.0%} of rounds had its proposal, "
        text += f"{stats.rows_used / max(stats.rows, 1):.0%} of it accepted"
        if depth_s is not None:
            text += f", {1e3 * depth_s:.3g} ms a depth of one session"
        return text + (f", paused {self.gate.num_pauses} times" if self.gate.num_pauses else "")

    def spend(self, seconds: float) -> None:
        """Takes time that the head took."""
        self.stats.seconds += seconds
        self.spent_s += seconds

    @property
    def reads_states(self) -> bool:
        """True if it lives of the target's hidden states."""
        return self.head.features is not None

    @property
    def every_position(self) -> bool:
        """True if it is fed with all positions, without a gap."""
        return self.head.features is not None and self.head.features.every_position


@dataclass(slots=True)
class _Offer:
    """The proposal of a head for the coming round of a session."""

    mounted: MountedHead
    followed: _Followed
    proposal: Proposal
    node_ids: tuple[int, ...]


class HeadSubtree(SubtreeOffer):
    """The nodes of a head's own tree: its best path, and the tokens beside it that it made in the same forwards."""

    __slots__ = ()

    def proposal(self, num_tokens: int) -> Proposal:
        """As ``SubtreeOffer.proposal``; a draft knows none of its nodes."""
        return _without_nodes(super().proposal(num_tokens))


def _without_nodes(proposal: Proposal) -> Proposal:
    return replace(proposal, node_ids=(), producer=Producer.HEAD)


def _full_pages(computed: Computed) -> list[int]:
    """The pages that a step has filled up for a session."""
    session = computed.session
    return session.pages[computed.start // PAGE_SIZE : session.num_computed // PAGE_SIZE]


def union(several: Iterable[Features | None]) -> Features | None:
    """The states that several heads read together; None: none."""
    wanted = [features for features in several if features is not None]
    if not wanted:
        return None
    boundaries = tuple(sorted({b for features in wanted for b in features.boundaries}))
    return Features(boundaries, any(features.every_position for features in wanted))


class Heads:
    """The heads of one target engine. Owned by the engine's thread."""

    def __init__(
        self,
        mounted: Sequence[MountedHead],
        cache: KVCache,
        *,
        vocab_size: int,
        allocation: Allocation,
        clock: Callable[[], float],
        states: Features | None = None,
    ) -> None:
        """``states``: what the target's runner returns, at least the ``union`` of what the heads read."""
        self.mounted = list(mounted)
        self.took_s = 0.0
        """Seconds that the heads were asked for since ``take_s``."""
        self._features = states
        self._vocab_size = vocab_size
        self._allocation = allocation
        self._clock = clock
        self._cache = cache
        self._offers: dict[str, _Offer] = {}
        self._page_states: Tensor | None = None
        """[num_pages, width]: of the last position of each full page. A session that shares a page lacks this state."""
        for each in self.mounted:
            each.gate.adaptive = allocation.adaptive
            if (features := each.head.features) is not None:
                assert states is not None
                assert states.every_position or not features.every_position
                each.columns = tuple(states.boundaries.index(b) for b in features.boundaries)

    def __bool__(self) -> bool:
        return bool(self.mounted)

    def wants_states(self, num_sessions: int) -> bool:
        """True if a head will be fed with the step that comes."""
        now = self._clock()
        return any(m.reads_states and self._on(m, num_sessions, now) for m in self.mounted)

    def labeled(self) -> dict[str, MountedHead]:
        """The heads by their methods, numbered from the second one of a method on."""
        found: dict[str, MountedHead] = {}
        for mounted in self.mounted:
            method = mounted.name.partition(" ")[0]
            same = sum(label.partition("_#")[0] == method for label in found)
            found[f"{method}_#{same + 1}" if same else method] = mounted
        return found

    def asks(self, mounted: MountedHead, num_sessions: int) -> bool:
        """True if a head is neither switched off nor paused at this concurrency."""
        return self._on(mounted, num_sessions, self._clock())

    def take_s(self) -> float:
        """Seconds that the heads were asked for since the last call."""
        took_s, self.took_s = self.took_s, 0.0
        return took_s

    @property
    def reserves(self) -> int:
        """Rows beyond those of a step for which a session must hold pages: a head's last row is one further."""
        return int(any(m.head.layers and not m.failure for m in self.mounted))

    def open(self, session: TargetSession) -> None:
        """Begins a session on every head that can serve it."""
        session.headed, session.head_subtree = Proposal(), None
        if session.k == 0:
            return
        for mounted in self.mounted:
            if mounted.failure or (mounted.max_len is not None and session.num_tokens >= mounted.max_len):
                continue
            self._guarded(mounted, lambda m=mounted: self._open(m, session))  # type: ignore[misc]

    def _open(self, mounted: MountedHead, session: TargetSession) -> None:
        try:
            mounted.head.open(session.session_id, session.tokens, session.sampler, session.cache_salt)
        except PacelineError as error:
            mounted.head.close(session.session_id)
            mounted.stats.sessions_failed += 1
            log.warning("head %s cannot follow session %s: %s", mounted.name, session.session_id, error)
            return
        mounted.sessions[session.session_id] = _Followed(session, self._vocab_size, mounted)
        mounted.prefilling.add(session.session_id)

    def close(self, session_id: str) -> None:
        """Ends a session on all heads."""
        self._offers.pop(session_id, None)
        for mounted in self.mounted:
            self._drop(mounted, session_id)

    def _drop(self, mounted: MountedHead, session_id: str) -> None:
        if mounted.sessions.pop(session_id, None) is not None:
            mounted.prefilling.discard(session_id)
            self._guarded(mounted, lambda: mounted.head.close(session_id))

    # -- what the target has decided -----------------------------------------------------------------------------------

    def observe(self, session: TargetSession, proposal: Proposal, accepted: Sequence[int], row_s: float) -> None:
        """Takes the verdict on a session's proposal, before it is committed.

        Args:
            accepted: the tokens of the proposal that were accepted.
            row_s: seconds of the proposal's rows.
        """
        offer = self._offers.pop(session.session_id, None)
        session.headed, session.head_subtree = Proposal(), None
        if offer is None or proposal.producer is not Producer.HEAD or not len(proposal):
            return
        mounted, followed = offer.mounted, offer.followed
        result, num_accepted = compare(proposal, proposal.along(accepted), Producer.HEAD), len(accepted)
        followed.hits.add(result.places, result.predicted, result.first, result.any)
        followed.in_flight = frozenset(offer.node_ids[: len(proposal)])  # of a chain, under the rejection rule
        mounted.stats.rounds += 1
        mounted.stats.rows += len(proposal)
        mounted.stats.rows_used += num_accepted
        mounted.accepted += num_accepted
        mounted.spent_s += row_s

    def advance(self, session: TargetSession, token_ids: Sequence[int]) -> None:
        """Takes the tokens that were committed for a session that goes on."""
        for mounted in self.mounted:
            followed = mounted.sessions.get(session.session_id)
            if followed is None:
                continue
            if mounted.max_len is not None and session.num_tokens >= mounted.max_len:
                self._drop(mounted, session.session_id)
                continue
            node_ids, kept = followed.walk(token_ids)
            if mounted.reads_states:
                followed.restart()
                kept = []
            self._guarded(
                mounted,
                lambda m=mounted, n=node_ids, k=kept: m.head.advance(  # type: ignore[misc]
                    session.session_id, token_ids, n, k
                ),
                session.session_id,
            )

    def feed(self, computed: Sequence[Computed], states: Tensor | None, num_sessions: int) -> None:
        """Feeds the heads with a step, after its outcomes were committed. ``states``: None if none were wanted."""
        if states is not None:
            self._keep_page_states(computed, states)
        for mounted in self.mounted:
            if not mounted.reads_states or mounted.failure:
                continue
            started = self._clock()
            fed: list[Fed] = []
            if states is not None and self._on(mounted, num_sessions, started):
                fed = [item for each in computed if (item := self._fed(mounted, each, states)) is not None]
            served = self._feed(mounted, fed)
            if mounted.every_position:
                for each in computed:
                    full = _full_pages(each)
                    keep = (
                        mounted.pages.update if each.session.session_id in served else mounted.pages.difference_update
                    )
                    keep(full)
            if fed:
                mounted.spend(self._clock() - started)

    def _feed(self, mounted: MountedHead, fed: Sequence[Fed]) -> set[str]:
        """Feeds one head; returns the sessions that it has taken."""
        while fed:
            try:
                mounted.head.feed(fed)
            except FATAL:
                raise
            except DrafterSessionError as error:
                self._lose(mounted, error)
                fed = [item for item in fed if item.session_id in mounted.sessions]
                continue
            except Exception as error:
                self._switch_off(mounted, error)
                return set()
            for item in fed:
                mounted.sessions[item.session_id].num_fed = item.position + len(item.token_ids)
            return {item.session_id for item in fed}
        return set()

    def _fed(self, mounted: MountedHead, computed: Computed, states: Tensor) -> Fed | None:
        """Input of a head from one session; None: nothing, or it has missed something before."""
        session, start, stop = computed.session, computed.start, computed.session.num_computed
        followed = mounted.sessions.get(session.session_id)
        if followed is None:
            return None
        assert self._features is not None
        if not mounted.every_position:
            if computed.logits_row < 0:
                return None
            every = self._features.every_position
            last = computed.row + stop - 1 - start if every else computed.logits_row + computed.num_accepted
            rows = self._columns(mounted, states[last : last + 1])
            return Fed(session.session_id, stop - 1, (session.tokens[stop],), rows, session.pages)
        if followed.attachment != session.attachment:
            followed.attachment, followed.num_fed = session.attachment, 0
        rows = self._columns(mounted, states[computed.row : computed.row + stop - start])
        if start == session.num_attached > 0:  # the session that computed these pages had the state that is missing
            page = session.pages[start // PAGE_SIZE - 1]
            if self._page_states is None or not mounted.pages.issuperset(session.pages[: start // PAGE_SIZE]):
                return None
            rows = torch.cat((self._columns(mounted, self._page_states[page : page + 1]), rows))
            start -= 1
        elif start != followed.num_fed:
            return None
        return Fed(session.session_id, start, tuple(session.tokens[start + 1 : stop + 1]), rows, session.pages)

    def _columns(self, mounted: MountedHead, states: Tensor) -> Tensor:
        assert self._features is not None
        num = len(self._features.boundaries)
        if mounted.columns == tuple(range(num)):
            return states
        parts = states.chunk(num, dim=-1)
        return torch.cat([parts[i] for i in mounted.columns], dim=-1)

    def _keep_page_states(self, computed: Sequence[Computed], states: Tensor) -> None:
        """Copies the states of the last positions of pages that have become full."""
        assert self._features is not None
        if not self._features.every_position:
            return
        if self._page_states is None:
            self._page_states = states.new_zeros(self._cache.num_pages, states.shape[1])
        for each in computed:
            first = each.start // PAGE_SIZE
            for index, page in enumerate(_full_pages(each), first):
                self._page_states[page] = states[each.row + (index + 1) * PAGE_SIZE - 1 - each.start]

    # -- what is proposed ----------------------------------------------------------------------------------------------

    def expected(self, session: TargetSession, num_sessions: int) -> tuple[list[float], float]:
        """Probabilities of the tokens that a head would propose for a session, and the seconds that asking it takes."""
        now = self._clock()
        for mounted in self.mounted:
            followed = mounted.sessions.get(session.session_id)
            if followed is not None and self._on(mounted, num_sessions, now) and self._ready(mounted, followed):
                depth = min(mounted.num_tokens, session.max_draft())
                first_s, next_s = (mounted.gate.depth_s(1, first=first) or 0.0 for first in (True, False))
                return [followed.hits.rate()] * depth, first_s + next_s * max(0, depth - 1)
        return [], 0.0

    def propose(self, ready: Sequence[TargetSession]) -> None:
        """Asks the heads for tokens of the sessions that are about to step and have none of their drafts."""
        started = self._clock()
        self._prefill(len(ready), started)
        asked: dict[int, list[_Followed]] = {}
        for session in ready:
            session.headed, session.head_subtree = Proposal(), None
            self._offers.pop(session.session_id, None)
            if not session.decoding or session.max_draft() == 0 or len(session.drafted(1)):
                continue
            if session.mode is Mode.SEQUENTIAL and session.draft_available:
                continue
            for i, mounted in enumerate(self.mounted):
                followed = mounted.sessions.get(session.session_id)
                if followed is not None and self._on(mounted, len(ready), started) and self._ready(mounted, followed):
                    asked.setdefault(i, []).append(followed)
                    break
        rate = self._tokens_per_s(len(ready))
        for i, sessions in asked.items():
            mounted = self.mounted[i]
            before = self._clock()
            self._ask(mounted, sessions, rate)
            mounted.spend(self._clock() - before)
        self.took_s += self._clock() - started

    def book(self, num_sessions: int) -> None:
        """Books a step in the accounts of the heads, and pauses those that have cost more than they have brought."""
        now, rate = self._clock(), self._tokens_per_s(num_sessions)
        for mounted in self.mounted:
            accepted, spent_s = mounted.accepted, mounted.spent_s
            mounted.accepted, mounted.spent_s = 0, 0.0
            if mounted.failure or not (accepted or spent_s):
                continue
            if mounted.gate.observe_step(num_sessions, accepted, spent_s, rate, now):
                log.debug("head %s is paused at concurrency %d", mounted.name, num_sessions)
                mounted.coupled.forget()  # the record must not be held against the next trial
                mounted.rejection.forget()

    def _tokens_per_s(self, num_sessions: int) -> float:
        """Tokens per second of plain decoding; 0 before any step was measured."""
        plain_s = self._allocation.plain_s(num_sessions) if self._allocation.cost.known else 0.0
        return num_sessions / plain_s if plain_s > 0 else 0.0

    def _on(self, mounted: MountedHead, num_sessions: int, now: float) -> bool:
        return not mounted.failure and mounted.gate.wanted(max(1, num_sessions), now)

    def _ready(self, mounted: MountedHead, followed: _Followed) -> bool:
        session = followed.session
        if mounted.reads_states and (followed.num_fed != session.num_tokens - 1 or session.num_tokens < 2):
            return False
        if session.session_id in mounted.prefilling:
            if not mounted.head.ready(session.session_id):
                return False
            mounted.prefilling.discard(session.session_id)
        return True

    def _prefill(self, num_sessions: int, now: float) -> None:
        """One chunk of prompts, for heads that compute those themselves."""
        for mounted in self.mounted:
            if mounted.reads_states or not mounted.prefilling or not self._on(mounted, num_sessions, now):
                continue
            mounted.prefilling = {s for s in mounted.prefilling if not mounted.head.ready(s)}
            if mounted.prefilling:
                started = self._clock()
                self._guarded(mounted, mounted.head.prefill)
                mounted.spend(self._clock() - started)

    def _ask(self, mounted: MountedHead, sessions: list[_Followed], tokens_per_s: float) -> None:
        """Expands the anchors of some sessions and the best path below each, depth by depth while that pays."""
        gate, now = mounted.gate, self._clock()
        gains = [self._gain(mounted, f) for f in sessions]
        if gate.adaptive:
            if gate.pays(sum(max(0.0, gain) for gain in gains), len(sessions), tokens_per_s, first=True):
                gate.paid()
            elif not gate.try_anyway(now):
                for followed in sessions:
                    followed.hits.fade()
                return
            sessions = [f for f, gain in zip(sessions, gains, strict=True) if gain > 0.0 or f.rule is Rule.REJECTION]
        at = [(f, f.deepest()) for f in sessions]
        at = [(f, node) for f, node in at if not node.expanded and self._wants_more(mounted, f, node)]
        first = True
        while at and (
            first or gate.pays(sum(f.probability(node) for f, node in at), len(at), tokens_per_s, first=False)
        ):
            started, num_leaves = self._clock(), len(at)
            below: list[tuple[_Followed, TreeNode]] = []
            while at:
                batch, at = at[: mounted.head.max_leaves], at[mounted.head.max_leaves :]
                below += [item for item in self._expand(mounted, batch) if self._wants_more(mounted, *item)]
                if mounted.failure:
                    return
            gate.observe_depth(num_leaves, self._clock() - started, first=first)
            mounted.stats.depths += 1
            at, first = below, False
        for followed in sessions:
            if mounted.sessions.get(followed.session.session_id) is followed:
                self._offer(mounted, followed)

    def _wants_more(self, mounted: MountedHead, followed: _Followed, node: TreeNode) -> bool:
        """True if tokens below a node may be proposed, and are not too unlikely to be. Rejection rule: whatever they
        are."""
        depth = node.position - followed.tree.anchor.position
        if depth >= min(mounted.num_tokens, followed.session.max_draft()):
            return False
        blind = followed.rule is Rule.REJECTION or not mounted.gate.adaptive
        return blind or followed.probability(node) >= _LEAST_PATH

    def _gain(self, mounted: MountedHead, followed: _Followed) -> float:
        """Tokens that a proposal of the head is expected to bring beyond the one that is there without it."""
        session = followed.session
        depth = min(mounted.num_tokens, session.max_draft())
        return expected_tokens([followed.hits.rate()] * depth) - expected_tokens(session.looked_up(session.k).probs)

    def _offer(self, mounted: MountedHead, followed: _Followed) -> None:
        session = followed.session
        path = followed.tree.proposal(min(mounted.num_tokens, session.max_draft()))
        if len(path):
            proposal = _without_nodes(path)
            session.headed, session.head_hits = proposal, followed.hits
            session.head_depth = mounted.num_tokens
            session.head_subtree = None
            if followed.rule is not Rule.REJECTION:
                most = min(mounted.num_tokens, session.max_draft())
                factors = (followed.hits.correction(),) * len(Producer)
                session.head_subtree = HeadSubtree(followed.tree.anchor, most, factors)
            self._offers[session.session_id] = _Offer(mounted, followed, proposal, path.node_ids)

    def _expand(
        self, mounted: MountedHead, batch: Sequence[tuple[_Followed, TreeNode]]
    ) -> list[tuple[_Followed, TreeNode]]:
        """Expands one node of each session: the likeliest new node of each that has one."""
        leaves = []
        for followed, node in batch:
            path = followed.path(node)
            ids, token_ids = tuple(n.node_id for n in path), tuple(n.token_id for n in path)
            leaves.append(Leaf(followed.session.session_id, node.node_id, ids, token_ids))
        try:
            candidates = mounted.head.expand(leaves)
        except FATAL:
            raise
        except DrafterSessionError as error:
            self._lose(mounted, error)
            rest = [item for item in batch if item[0].session.session_id != error.session_id]
            return self._expand(mounted, rest) if rest and len(rest) < len(batch) else []
        except Exception as error:
            self._switch_off(mounted, error)
            return []
        tokens, log_q = candidates.token_ids, candidates.log_q
        if mounted.head.tokens_per_leaf == 1:
            tokens, log_q = tokens[:, None], log_q[:, None]
        for _, node in batch:
            node.expanded = True
        at = list(enumerate(batch))  # with the leaf of each
        for i in range(min(mounted.head.tokens_per_leaf, mounted.num_tokens)):
            if not at:
                break
            rows = [self._ranking_row(followed, node) for _, (followed, node) in at]
            index = torch.tensor([leaf for leaf, _ in at], device=log_q.device)
            rankings = rank(Candidates(tokens[index, i], log_q[index, i]), rows)
            further = []
            for (leaf, (followed, node)), ranking in zip(at, rankings, strict=True):
                best = followed.add(node, ranking) if ranking.token_ids else None
                if best is not None:
                    further.append((leaf, (followed, best)))
            at = further
        return [item for _, item in at]

    def _ranking_row(self, followed: _Followed, node: TreeNode) -> RankingRow:
        path = tuple(n.token_id for n in followed.path(node))
        fan_out = 1 if followed.rule is Rule.REJECTION else _FAN_OUT
        nonce = _NONCES | followed.session.num_tokens
        return RankingRow(Row(followed.session.sampler, path), followed.rule, fan_out, nonce=nonce)

    # -- what may fail -------------------------------------------------------------------------------------------------

    def _guarded(self, mounted: MountedHead, call: Callable[[], object], session_id: str = "") -> None:
        """Calls the head; an error ends the session that it names, or switches the head off."""
        try:
            call()
        except FATAL:
            raise
        except DrafterSessionError as error:
            self._lose(mounted, error)
        except Exception as error:
            self._switch_off(mounted, error)

    def _lose(self, mounted: MountedHead, error: DrafterSessionError) -> None:
        """Ends one session on a head."""
        log.warning("head %s has given up a session: %s", mounted.name, error, extra={"session_id": error.session_id})
        mounted.stats.sessions_failed += 1
        self._drop(mounted, error.session_id)

    def _switch_off(self, mounted: MountedHead, error: Exception) -> None:
        """Switches a head off for good; its sessions go on without it."""
        if mounted.failure:
            return
        mounted.failure = f"{type(error).__name__}: {error}"
        log.error("head %s is switched off: %s", mounted.name, mounted.failure, exc_info=error)
        for session_id in list(mounted.sessions):
            self._drop(mounted, session_id)

    def check_integrity(self, sessions: Sequence[TargetSession]) -> None:
        """Asserts that heads follow open sessions only, to the end of their context."""
        known = {s.session_id: s for s in sessions}
        for mounted in self.mounted:
            assert mounted.sessions.keys() <= known.keys()
            assert mounted.prefilling <= mounted.sessions.keys()
            for session_id, followed in mounted.sessions.items():
                assert followed.session is known[session_id]
                followed.tree.check_integrity()
                assert followed.tree.context_len == followed.session.num_tokens
                assert not followed.tree.lost
                assert followed.num_fed <= followed.session.num_tokens
            if not mounted.failure:
                mounted.head.check_integrity()

    def shutdown(self) -> None:
        """Releases what the heads hold outside this process. Idempotent."""
        for mounted in self.mounted:
            mounted.head.shutdown()
