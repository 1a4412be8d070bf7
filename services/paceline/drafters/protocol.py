"""The interface of a drafter: a draft model, an n-gram index, a head, or anything else that ranks next tokens.

The engine owns the trees and decides which nodes to expand. A drafter only turns nodes into candidates, for many
sessions in one forward, and keeps its caches (of a model: one KV row per expanded node). A session's life::

    open ─▶ prefill .. prefill ─▶ ready ─▶ expand, advance, expand, expand, advance, .. ─▶ close

    open("s", [5, 8, 2], sampler)         context 5 8 2; the anchor is node 0, token 2
    expand([Leaf("s", 0, (), ())])        candidates for the token after 2; the engine makes nodes 1 and 2 of the best
    expand([Leaf("s", 1, (1,), (7,))])    candidates after 2 7
    advance("s", [7, 4], [1, 9], [])      the target has decided 7 (node 1) and 4 (node 9, never expanded): anchor 9

A drafter without state per node, such as ``suffix.py``, needs only the context (``open``, ``advance``) and each leaf's
``path``. Wrong candidates cost time, never correctness: the target verifies every token.

A drafter that keeps a row per node relies on this contract, by which every node costs one row, computed once::

    context[0 : c]   expanded below the anchor
    ├── cached ──┤├ pending ┤       a leaf's row attends to the context and to the rows of ``path`` before it
                        anchor ──▶ a ──▶ b(leaf)

- A committed token is *cached* if its node was expanded and *pending* otherwise; pending tokens are the last
  ones of the context, at least none. Expanding the anchor computes all pending tokens in one forward. So a miss costs
  only the row of the missed token (and of an unexpanded outcome before it).
- A leaf other than the anchor has only expanded nodes above it, up to and including the anchor: one row per
  leaf.
- No leaf of a call is above another leaf of it.
- The drafter alone knows which rows it holds. If it had no room for an expanded node, that node counts as pending when
it is committed.

A drafter of several tokens per leaf (``tokens_per_leaf``) also gives candidates for the tokens after the leaf. From one
call, the engine makes children of the leaf, of one of these children, and so on. All these nodes count as expanded,
even if the drafter holds no rows of them. So nodes without rows may be above a leaf, and the drafter has to compute
them.

A *head* (``Head``) is a drafter inside the target replica. After every step of the target it is fed the step's hidden
states and the tokens that follow them. One call feeds all sessions, prefill chunks included::

    position          P            P+1          P+2
    state of       h[P]         h[P+1]                     of the target, which has computed these positions
    token          t[P]         t[P+1]       t[P+2]        committed; the last one is the anchor, not computed yet
    fed                 (h[P], t[P+1])   (h[P+1], t[P+2])
    predicted                                      t[P+3]: what ``expand`` of the anchor answers

So the state of P and the token at P+1 predict the token at P+2; the last row of a prefill chunk gets the next *prompt*
token. A head that attends to earlier positions keeps their keys and values on the session's own pages of the target's
cache, in layers of its own (``Head.layers``): of (h[P], t[P+1]) in **row P+1**, with rotary position P+1. A page then
depends on tokens of the prefix only and is shared by prefix, like the target's pages. Row 0 is never written and must
be masked. A prompt whose first pages are cached lacks the state of the last cached position. The target keeps it with
the page and feeds it first. A paused head is not fed, which costs nothing. The next feeding names the rows that it has
missed (``Fed.holes``), and these are masked as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from paceline.core.processors import SamplerState
from paceline.core.tree import Proposal
from paceline.errors import EngineError, RanksLostError
from paceline.model.chain import Ranked, Stop
from paceline.model.features import OUT, Features
from paceline.model.kv_cache import KVCache, LayerSpec

__all__ = [
    "FATAL",
    "OUT",
    "Candidates",
    "Chainer",
    "Drafter",
    "DrafterSessionError",
    "Features",
    "Fed",
    "Head",
    "Leaf",
    "OfSessions",
    "Plain",
    "Ranker",
    "Rider",
    "Stateless",
    "StatesDrafter",
]

Held = TypeVar("Held")
"""State of a drafter for each open session."""

FATAL = (torch.AcceleratorError, RanksLostError)
"""Errors after which no call can succeed: they are the engine's own, not a session's."""


class DrafterSessionError(EngineError):
    """A drafter cannot continue one session; the others are unharmed."""

    def __init__(self, session_id: str, message: str) -> None:
        super().__init__(f"session {session_id}: {message}")
        self.session_id = session_id


class Leaf(NamedTuple):
    """A node to expand: the drafter is asked for candidates of the token after it."""

    session_id: str
    node_id: int
    path_ids: tuple[int, ...]
    """Nodes from the anchor (exclusive) to this one (inclusive); () for the anchor itself."""
    path: tuple[int, ...]
    """Tokens of these nodes: the next token follows the context and them."""


class Candidates(NamedTuple):
    """The likely next tokens after each leaf; both tensors are on one device."""

    token_ids: Tensor
    """[num_leaves, m] int64, most likely first, distinct within a row. Of a drafter with ``tokens_per_leaf`` K > 1:
    [num_leaves, K, m], the candidates of the K tokens after the leaf."""
    log_q: Tensor
    """The shape of ``token_ids``, float: log probabilities (nats) after the session's processors; -inf: no candidate.
    The probabilities of a row may sum to less than 1; a row of nothing but -inf is normal (no match, no room)."""
    guesses: tuple[tuple[int, ...], ...] = ()
    """Per leaf the guessed tokens, at most K - 1, that its candidates after the first depth follow; (): none were
    guessed, and the candidates of a depth do not depend on the token before."""
    ranked: Ranked | None = None
    """Best candidates of each leaf in the order of ``ranking.rank``, and their scores; then ``token_ids`` and
    ``log_q`` are [num_leaves, 0]. None: candidates are not ranked yet."""
    unread: tuple[Tensor, Sequence[int], int] | None = None
    """Logits [n, vocab] before the sessions' processors, the leaf of each row, and the number of candidates to find in
    each row. Then ``token_ids`` and ``log_q`` are [num_leaves, 0]. None: they are found already."""

    @classmethod
    def of_some(cls, num_leaves: int, found: Sequence[tuple[Sequence[int], Tensor, Tensor]]) -> Candidates:
        """None for a call's leaves, except ``found``: indices of leaves, and their token ids and log q [leaves, m]."""
        if len(found) == 1 and len(found[0][0]) == num_leaves and [*found[0][0]] == [*range(num_leaves)]:
            return cls(*found[0][1:])
        shape = num_leaves, max([ids.shape[1] for _, ids, _ in found], default=1)
        token_ids, log_q = torch.zeros(shape, dtype=torch.long), torch.full(shape, float("-inf"))
        for at, ids, scores in found:
            token_ids[at, : ids.shape[1]], log_q[at, : ids.shape[1]] = ids, scores
        return cls(token_ids, log_q)


class Drafter(Protocol):
    """Source of candidates for the nodes of many sessions' trees, called by one thread.

    The head of this module shows the order of the calls and what they may rely on. A drafter implements this
    protocol, and an entry in ``config/methods`` names the function that makes it.
    """

    kind: str
    """Name of the drafter in the configuration: "model", "ngram", ..."""
    max_leaves: int
    """The most leaves that one call of ``expand`` takes."""
    tokens_per_leaf: int
    """Tokens after a leaf that one ``expand`` predicts: 1, or K of a drafter that predicts them all at once."""
    conditional: bool
    """True: candidates depend on the path to the leaf. False: the candidates of a depth are the same below every
    path (Medusa)."""

    @property
    def chainer(self) -> Chainer | None:
        """The drafter, if it can draft a path by one call."""
        ...

    @property
    def ranker(self) -> Ranker | None:
        """The drafter, if it can rank its candidates."""
        ...

    @property
    def states(self) -> StatesDrafter | None:
        """The drafter, if it reads states that a target sends it."""
        ...

    def open(self, session_id: str, token_ids: Sequence[int], sampler: SamplerState, salt: str = "") -> None:
        """Begins a session whose context is ``token_ids`` (not empty); node 0, the anchor, is its last token.

        The anchor is pending, the rest is prefilled by ``prefill``. ``sampler`` belongs to the engine, which appends
        committed tokens to it before it calls ``advance``. Sessions of different salts must learn nothing of each
        other.

        Raises:
            PacelineError: the session cannot be taken; ``close`` is called for it.
        """
        ...

    def prefill(self) -> bool:
        """Does one chunk of outstanding prefill of some sessions. False if nothing could be done.

        Raises:
            DrafterSessionError: this session ends.
            Exception: any other error (but ``FATAL``) ends all sessions that are not ready.
        """
        ...

    def ready(self, session_id: str) -> bool:
        """True once the session's prefill is done, so that its nodes can be expanded."""
        ...

    def expand(self, leaves: Sequence[Leaf]) -> Candidates:
        """Candidates of leaves of many ready sessions, 1 <= num_leaves <= max_leaves, by one batched forward.

        Raises:
            DrafterSessionError: this session ends, the others are tried again without it.
            Exception: for any other error (but ``FATAL``) the engine tries each session alone and ends the
                failing ones. In either case the sessions must be as they were before the call.
        """
        ...

    def advance(self, session_id: str, token_ids: Sequence[int], node_ids: Sequence[int], kept: Sequence[int]) -> None:
        """Extends the context by committed tokens: the anchor is now the last of ``node_ids``.

        May come before the session is ready: then all of it is pending.

        Args:
            token_ids: the committed tokens, at least one.
            node_ids: their nodes, in order. Expanded ones become cached context, the others pending.
            kept: the expanded nodes below the new anchor: their rows stay as they are. Rows of any other node are
                dropped.
        """
        ...

    def close(self, session_id: str) -> None:
        """Frees everything the session holds; does nothing for an unknown session."""
        ...

    def check_integrity(self) -> None:
        """Asserts the drafter's own invariants, for example that free and held rows are all rows."""
        ...

    def shutdown(self) -> None:
        """Releases resources outside this process. Idempotent; the last call."""
        ...


@dataclass(frozen=True, slots=True)
class Fed:
    """Result of one step of the target for one session: n >= 1 consecutive positions of its committed context."""

    session_id: str
    position: int
    """The first of the positions [position, position + n)."""
    token_ids: tuple[int, ...]
    """The n committed tokens *after* these positions, at [position + 1, position + n + 1)."""
    states: Tensor
    """[n, len(boundaries) * hidden] of these positions, in the order of ``Features.boundaries``."""
    pages: Sequence[int]
    """The session's page table on the target, with a page for row position + n."""
    holes: tuple[range, ...] = ()
    """Rows below position + 1 that were never written for this context, in ascending order; without row 0."""


_MOST_HOLES = 4
"""Most holes of a session that are kept. When there is one more, the first two are merged, with the rows
between them.
"""


def with_hole(holes: tuple[range, ...], rows: range) -> tuple[range, ...]:
    """``Fed.holes`` after some more rows, above the others, were missed."""
    first, *others = *holes, rows
    if len(others) < _MOST_HOLES:
        return (first, *others)
    return (range(first.start, others[0].stop), *others[1:])


class Head(Drafter, Protocol):
    """A drafter inside the target replica, fed with the target's hidden states; the head of this module says how.

    Fed states begin at position 0, or after the prefix that the session found in the cache, without gaps except
    ``Fed.holes``. With ``Features.every_position`` False only the last state is fed. It comes again from the start when
    the session was preempted. A session may be opened long before its first states; it is ``ready`` once ``feed`` has
    covered the position before its anchor. ``prefill`` has nothing to do for a head that lives of its states.

    ``expand`` of an anchor answers from what ``feed`` computed. Deeper leaves use the head's own recycled state, and
    keys and values that are never written to the pages. Only fed states, of tokens that the target decided, are kept.
    """

    @property
    def rider(self) -> Rider | None:
        """The head, if it has extra rows in the target's steps."""
        ...

    @property
    def features(self) -> Features | None:
        """The states that ``feed`` takes; None: none, and ``feed`` is never called (a co-located draft model)."""
        ...

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """Keys and values per token that it keeps on the target's pages, by layer; () for Medusa, MLP, a draft
        model."""
        ...

    def bind(self, cache: KVCache, first_layer: int) -> None:
        """Binds the head to its layers: ``cache.keys[first_layer:][: len(layers)]``, and the same of the values. Called
        once, before any session is opened."""
        ...

    def feed(self, fed: Sequence[Fed]) -> None:
        """Processes the states of one step of the target, for all sessions together, after ``advance`` of its tokens.

        Raises:
            DrafterSessionError: this session ends on the head, the others are fed again without it.
            Exception: any other error switches the head off.
        """
        ...


class StatesDrafter(Drafter, Protocol):
    """A head outside the target replica. The states of committed positions are sent to it, already fused
    (``HeadModule.fuse``), after the commits that they belong to: they may come late, or never.

    It is ``ready`` once the states before the anchor of its opening have come, except lost ones. For tokens after the
    last state, and for undecided nodes, it uses states of its own making until the target's come. A state that never
    comes leaves a hole in the context, which is masked.
    """

    width: int
    """Numbers of one state."""

    def feed(self, session_id: str, position: int, states: Tensor) -> int:
        """Records the states ``[n, width]`` of positions [position, position + n).

        Returns:
            Positions before these whose states are lost; -1: these are late, repeated or ahead of the commit that
            they belong to, and were dropped.

        Raises:
            DrafterSessionError: states of another width.
        """
        ...

    def awaits(self, session_id: str) -> bool:
        """True if states of committed positions are still to come."""
        ...


class Plain:
    """The base of drafters: none of what is optional, and no prompt to compute. A class that has some of it returns
    itself."""

    tokens_per_leaf = 1
    conditional = True

    def prefill(self) -> bool:
        """Does nothing: there is no prompt to compute."""
        return False

    def check_integrity(self) -> None:
        """Asserts nothing."""

    def shutdown(self) -> None:
        """Does nothing: there are no resources outside this process."""

    @property
    def chainer(self) -> Chainer | None:
        """None: each token of a path takes a call."""
        return None

    @property
    def ranker(self) -> Ranker | None:
        """None: the engine ranks its candidates."""
        return None

    @property
    def states(self) -> StatesDrafter | None:
        """None: it reads no states that a target sends."""
        return None

    @property
    def rider(self) -> Rider | None:
        """None: it has no rows in the target's steps."""
        return None


class OfSessions(Plain, Generic[Held]):
    """The base of drafters that hold something for each open session."""

    sessions: dict[str, Held]

    def close(self, session_id: str) -> None:
        """Drops the session."""
        self.sessions.pop(session_id, None)

    def ready(self, session_id: str) -> bool:
        """True for an open session, unless its own ``ready`` is not."""
        return bool(getattr(self._session(session_id), "ready", True))

    def _session(self, session_id: str) -> Held:
        try:
            return self.sessions[session_id]
        except KeyError:
            raise DrafterSessionError(session_id, "not open in this drafter") from None


class Stateless:
    """The part of ``Head`` that concerns hidden states, for heads that read none and keep nothing on the target's
    pages."""

    features: Features | None = None
    layers: tuple[LayerSpec, ...] = ()

    def bind(self, cache: KVCache, first_layer: int) -> None:
        """Ignores the target's cache."""

    def feed(self, fed: Sequence[Fed]) -> None:
        """Is never called: it has no ``features``."""
        raise AssertionError(f"{type(self).__name__} reads no hidden states")


class Chainer(Drafter, Protocol):
    """A drafter that may expand a leaf, its best candidate, that one's, .. by one call."""

    def chains(self, session_id: str) -> bool:
        """True if ``chain`` may be called for a session."""
        ...

    def chain(self, leaf: Leaf, most: int, fan_out: int, stop: Stop) -> Ranked:
        """Returns the ``fan_out`` best candidates of the leaf, of the best of these, .. at most ``most`` times; () if
        there is no room. ``keep`` must follow, with the nodes made of the computed tokens, without the leaf."""
        ...

    def keep(self, session_id: str, node_ids: Sequence[int]) -> None:
        """Assigns nodes to a chain's rows; all count as expanded. Drops further rows of the chain."""
        ...


class Ranker(Drafter, Protocol):
    """A drafter that may rank its candidates by the pass that finds them."""

    def expand_best(self, leaves: Sequence[Leaf]) -> Candidates:
        """``expand``, with ``Candidates.ranked`` or ``Candidates.unread`` where the sessions' processors and the device
        allow it."""
        ...


class Rider(Head, Protocol):
    """A head with extra rows in the target's steps. The target computes its guesses after a session's context, on pages
    that no committed row sees, and returns the likeliest tokens there. They decide nothing."""

    @property
    def num_guesses(self) -> int:
        """Maximum extra tokens for one session."""
        ...

    def guesses(self, session_id: str) -> Proposal:
        """The tree of extra tokens in a session's next step; ``learn`` follows, unless the session is closed."""
        ...

    def learn(self, session_id: str, token_ids: Sequence[int]) -> None:
        """Records the target's likeliest token after each branch of ``guesses``, in order; (): there was no room, and
        none was computed. Comes after ``advance`` of the step's tokens."""
        ...
