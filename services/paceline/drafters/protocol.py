"""What grows a speculation tree: a draft model, an n-gram index, or anything else that ranks next tokens.

The engine owns the trees and decides what to expand; a drafter only turns nodes into candidates, many
sessions in one forward, and keeps whatever makes that cheap (for a model: one KV row per expanded node).

Rows, the contract that makes every node cost one row and nothing twice::

    context[0 : c]   expanded below the anchor
    ├── cached ──┤├ pending ┤       a leaf's row attends to the context and to the rows of `path` before it
                        anchor ──▶ a ──▶ b(leaf)

- A committed token is *cached* if its node was expanded and *pending* otherwise; pending tokens are the last
  ones of the context, at least none. Expanding the anchor computes all pending tokens in one forward, so a
  miss costs the row of the token that was missed (and of an unexpanded outcome before it), nothing else.
- A leaf other than the anchor has only expanded nodes above it, up to and including the anchor: one row per
  leaf.
- No leaf of a call is above another leaf of it.
- What is held is the drafter's own knowledge: a node for which it could not keep a row (no room) counts as
  pending when it is committed, whatever the engine believes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.core.processors import SamplerState
from paceline.errors import EngineError, RanksLostError

FATAL = (torch.AcceleratorError, RanksLostError)
"""Errors after which no call can succeed: they are the engine's own, not a session's."""


class DrafterSessionError(EngineError):
    """A drafter cannot go on with one session; the others are unharmed."""

    def __init__(self, session_id: str, message: str) -> None:
        super().__init__(f"session {session_id}: {message}")
        self.session_id = session_id


@dataclass(frozen=True, slots=True)
class Leaf:
    """A node to be expanded: the candidates for the token after it are wanted."""

    session_id: str
    node_id: int
    path_ids: tuple[int, ...]
    """Nodes from the anchor (exclusive) to this one (inclusive); () for the anchor itself."""
    path: tuple[int, ...]
    """Their tokens: together with the context, what the next token follows."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The likely next tokens after each leaf, of one device."""

    token_ids: Tensor
    """[num_leaves, m] int64, most likely first, distinct within a row."""
    log_q: Tensor
    """[num_leaves, m] float: their log probabilities after the session's processors; -inf: no candidate. A
    row may sum to less than 1; a row of nothing but -inf is normal (no match, no room)."""


class Drafter(Protocol):
    """See the module's head for what the calls may rely on. One thread."""

    kind: str
    """As in the configuration: "model", "ngram", ..."""
    max_leaves: int
    """The most leaves one call of `expand` takes."""

    def open(self, session_id: str, token_ids: Sequence[int], sampler: SamplerState) -> None:
        """Begins a session whose context is `token_ids` (not empty); node 0, the anchor, is its last token.

        The anchor is pending, the rest is prefilled by `prefill`. `sampler` belongs to the engine, which
        appends committed tokens to it before it calls `advance`. Raises PacelineError if the session cannot
        be taken.
        """
        ...

    def prefill(self) -> bool:
        """Does one chunk of outstanding prefill of some sessions. False if nothing was outstanding."""
        ...

    def ready(self, session_id: str) -> bool:
        """Whether the session's prefill is done, so that its nodes can be expanded."""
        ...

    def expand(self, leaves: Sequence[Leaf]) -> Candidates:
        """One batched forward for leaves of many ready sessions, 1 <= num_leaves <= max_leaves.

        An exception must leave the sessions as they were: the engine tries again leaf by leaf of each session
        to find the one at fault, unless it is a DrafterSessionError.
        """
        ...

    def advance(self, session_id: str, token_ids: Sequence[int], node_ids: Sequence[int], kept: Sequence[int]) -> None:
        """Tokens were committed: the anchor is now the last of `node_ids`.

        `node_ids` are the nodes of `token_ids`, in order. Those of them that are expanded become cached
        context, the others pending. `kept` are the expanded nodes below the new anchor: their rows stay as
        they are; rows of any other node are dropped. May come before the session is ready: then everything is
        pending.
        """
        ...

    def close(self, session_id: str) -> None:
        """Frees everything the session holds. An unknown session is no error."""
        ...

    def check_integrity(self) -> None:
        """Asserts the drafter's own invariants (rows free + held = all, ...)."""
        ...

    def shutdown(self) -> None:
        """Gives up what is held outside this process. Idempotent; the last call."""
        ...
