"""The interface of a drafter: a draft model, an n-gram index, a head, or anything else that ranks next tokens.

The engine owns the trees and decides which nodes to expand; a drafter only turns nodes into candidates, many sessions
in one forward, and keeps whatever makes that cheap (for a model: one KV row per expanded node). The life of a session::

    open ─▶ prefill .. prefill ─▶ ready ─▶ expand, advance, expand, expand, advance, .. ─▶ close

    open("s", [5, 8, 2], sampler)         context 5 8 2; the anchor is node 0, token 2
    expand([Leaf("s", 0, (), ())])        candidates for the token after 2; the engine makes nodes 1 and 2 of the best
    expand([Leaf("s", 1, (1,), (7,))])    candidates after 2 7
    advance("s", [7, 4], [1, 9], [])      the target has decided 7 (node 1) and 4 (node 9, never expanded): anchor 9

A drafter without state per node, such as ``ngram.py``, needs only the context (``open``, ``advance``) and each leaf's
``path``. Wrong candidates cost time, never correctness: the target verifies every token.

For a drafter that keeps a row per node, this is the contract that makes every node cost one row and no row twice::

    context[0 : c]   expanded below the anchor
    ├── cached ──┤├ pending ┤       a leaf's row attends to the context and to the rows of ``path`` before it
                        anchor ──▶ a ──▶ b(leaf)

- A committed token is *cached* if its node was expanded and *pending* otherwise; pending tokens are the last
  ones of the context, at least none. Expanding the anchor computes all pending tokens in one forward, so a
  miss costs the row of the token that was missed (and of an unexpanded outcome before it), nothing else.
- A leaf other than the anchor has only expanded nodes above it, up to and including the anchor: one row per
  leaf.
- No leaf of a call is above another leaf of it.
- The drafter alone knows which rows it holds: a node for which it had no room counts as pending when it is
  committed, although the engine has expanded it.

A drafter of several tokens per leaf (``tokens_per_leaf``) answers for the tokens after the leaf, too: the engine makes
children of the leaf, of one of these children, and so on, by one call. All these nodes count as expanded, whether the
drafter holds rows of them or not; those that it does not hold may be above a leaf, and are its to compute.

A *head* (``Head``) is a drafter inside the target replica. After every step of the target it is fed with the hidden
states of the step and the tokens that follow them, in one call for all sessions, prefill chunks included::

    position          P            P+1          P+2
    state of       h[P]         h[P+1]                     of the target, which has computed these positions
    token          t[P]         t[P+1]       t[P+2]        committed; the last one is the anchor, not computed yet
    fed                 (h[P], t[P+1])   (h[P+1], t[P+2])
    predicted                                      t[P+3]: what ``expand`` of the anchor answers

So the state of P and the token at P+1 predict the token at P+2; the last row of a prefill chunk gets the next *prompt*
token. A head that attends to earlier positions keeps their keys and values on the session's own pages of the target's
cache, in layers of its own (``Head.layers``): those of (h[P], t[P+1]) in **row P+1**, with rotary position P+1. A page
then depends on tokens of the prefix only, and is shared by prefix as the target's pages are; row 0 is never written
and must be masked. A prompt whose first pages are cached lacks one state, that of the last cached position: the target
keeps it beside the page and feeds it first. While a head is paused it is fed with nothing, which costs nothing; what it
is fed with afterwards names the rows that it has missed (``Fed.holes``), and these are masked as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.core.processors import SamplerState
from paceline.core.tree import Proposal
from paceline.errors import EngineError, RanksLostError
from paceline.messages import record
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
    "Ranker",
    "Rider",
    "Stateless",
    "StatesDrafter",
]

FATAL = (torch.AcceleratorError, RanksLostError)
"""Errors after which no call can succeed: they are the engine's own, not a session's."""


class DrafterSessionError(EngineError):
    """A drafter cannot continue one session; the others are unharmed."""

    def __init__(self, session_id: str, message: str) -> None:
        super().__init__(f"session {session_id}: {message}")
        self.session_id = session_id


@record
class Leaf:
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
    """Per leaf the tokens that its candidates after the first ones follow, at most K - 1; (): none were guessed,
    and those of a depth are the same for whatever token comes before."""
    beyond: tuple[Tensor, Tensor] | None = None
    """Rejection rule: tokens that are never drawn here, and that the target may draw itself (``sampling.unlisted``)."""
    ranked: Ranked | None = None
    """Of each leaf its best candidates in the order of ``ranking.rank``, and their scores; then ``token_ids`` and
    ``log_q`` are [num_leaves, 0]. None: they are not ranked yet."""
    unread: tuple[Tensor, int] | None = None
    """Rejection rule: logits [num_leaves, vocab] before the sessions' processors, and the number of candidates that are
    to be found in each row; then ``token_ids`` and ``log_q`` are [num_leaves, 0]. None: they are found already."""


class Drafter(Protocol):
    """Source of candidates for the nodes of many sessions' trees, called by one thread.

    The head of this module shows the order of the calls and what they may rely on. To add a drafter, implement this
    protocol in a module of this package, and construct it in ``draft/build.py``.
    """

    kind: str
    """Name of the drafter in the configuration: "model", "ngram", ..."""
    max_leaves: int
    """The most leaves that one call of ``expand`` takes."""
    tokens_per_leaf: int
    """Tokens after a leaf that one ``expand`` predicts: 1, or K of a drafter that predicts them all at once."""
    conditional: bool
    """True: candidates depend on the path to the leaf. False: those of a depth are the same below every path
    (Medusa)."""

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
            Exception: for any other error (but ``FATAL``) the engine tries each session alone and ends those that
                fail. In either case the sessions must be as they were before the call.
        """
        ...

    def advance(self, session_id: str, token_ids: Sequence[int], node_ids: Sequence[int], kept: Sequence[int]) -> None:
        """Extends the context by committed tokens: the anchor is now the last of ``node_ids``.

        May come before the session is ready: then all of it is pending.

        Args:
            token_ids: the committed tokens, at least one.
            node_ids: their nodes, in order. Those that were expanded become cached context, the others pending.
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
    """Rows below position + 1 that were never written for this context, in ascending order; row 0 apart."""


class Head(Drafter, Protocol):
    """A drafter inside the target replica, fed with the target's hidden states; the head of this module says how.

    What is fed begins at position 0, or after the prefix that the session found in the cache, and has no gap but
    ``Fed.holes``; with ``Features.every_position`` False it is the last state alone. It comes again from the start when
    the session was preempted. A session may be opened long before its first states; it is ``ready`` once ``feed`` has
    covered the position before its anchor. ``prefill`` has nothing to do for a head that lives of its states.

    ``expand`` of an anchor answers from what ``feed`` computed. Deeper leaves use the head's own recycled state and
    keys and values of their own, which are never written to the pages: what the target decides is fed, and only that
    is kept.
    """

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
        """Gives the head its layers: ``cache.keys[first_layer:][: len(layers)]``, and the values alike. Called once,
        before anything is opened."""
        ...

    def feed(self, fed: Sequence[Fed]) -> None:
        """Takes the states of one step of the target, for all sessions together, after ``advance`` of its tokens.

        Raises:
            DrafterSessionError: this session ends on the head, the others are fed again without it.
            Exception: any other error switches the head off.
        """
        ...


class StatesDrafter(Drafter, Protocol):
    """A head outside the target replica. The states of committed positions are sent to it, fused already
    (``HeadModule.fuse``), behind the commits that they belong to: they may come late, or never.

    It is ``ready`` once the states before the anchor of its opening have come, but for those that are lost. Of tokens
    behind the last state it has only states of its own making, as of nodes that nobody has decided on, until better
    ones come; a state that never comes leaves a hole in the context, which it does not look at.
    """

    width: int
    """Numbers of one state."""

    def feed(self, session_id: str, position: int, states: Tensor) -> int:
        """Takes the states ``[n, width]`` of positions [position, position + n).

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


class Stateless:
    """The part of ``Head`` that concerns hidden states, for heads that read none and keep nothing on the target's
    pages."""

    features: Features | None = None
    layers: tuple[LayerSpec, ...] = ()

    def bind(self, cache: KVCache, first_layer: int) -> None:
        """Takes nothing of the target's cache."""

    def feed(self, fed: Sequence[Fed]) -> None:
        """Is never called: it has no ``features``."""
        raise AssertionError(f"{type(self).__name__} reads no hidden states")


class Chainer(Drafter, Protocol):
    """A drafter that may expand a leaf, its best candidate, that one's, .. by one call."""

    def chains(self, session_id: str) -> bool:
        """True if ``chain`` may be called for a session."""
        ...

    def chain(self, leaf: Leaf, most: int, fan_out: int, stop: Stop) -> Ranked:
        """The ``fan_out`` best candidates of the leaf, of the first of these, .. ``most`` times at most; () if there is
        no room. ``keep`` comes next, with the nodes that were made of those that were computed, without the leaf."""
        ...

    def keep(self, session_id: str, node_ids: Sequence[int]) -> None:
        """Takes the nodes of a chain, all of which count as expanded; what it has computed beyond them is dropped."""
        ...


class Ranker(Drafter, Protocol):
    """A drafter that may rank its candidates by the pass that finds them."""

    def expand_best(self, leaves: Sequence[Leaf]) -> Candidates:
        """``expand``, with ``Candidates.ranked`` or ``Candidates.unread`` where the sessions' processors and the device
        allow it."""
        ...


class Rider(Head, Protocol):
    """A head with rows of its own in the target's steps: what it guesses is computed behind a session's context, on
    pages that no committed row sees, and what the target would say there is told to it. Nothing of that binds."""

    @property
    def num_guesses(self) -> int:
        """The most tokens that ride beside one session."""
        ...

    def guesses(self, session_id: str) -> Proposal:
        """The tree of tokens that ride in the coming step of a session; ``learn`` follows, unless it is closed."""
        ...

    def learn(self, session_id: str, token_ids: Sequence[int]) -> None:
        """Takes the target's likeliest token after each branch of ``guesses``, in their order; (): there was no room,
        and none was computed. Comes after ``advance`` of the step's tokens."""
        ...
