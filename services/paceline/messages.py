"""The messages between routers and replicas. Plain data: no tensors, no Ray, no protobuf.

In the direction in which they flow (the session relays them, see ``router/session.py``)::

    open ──▶ target                     open ──▶ draft
             target ── Outcome ──▶ session ── Commit ──▶ draft
             target ◀── Nodes ─── session ◀── Nodes ─── draft

Nodes are pushed ahead of the target's needs; a hit costs no message on the critical path.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from paceline.types import FinishReason, Round, SamplingParams, SpeculationParams


@dataclass(frozen=True, slots=True)
class SparseDistribution:
    """A distribution with few tokens of non-zero mass. ``probs`` sum to 1 (float64), ids are distinct."""

    token_ids: tuple[int, ...]
    probs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """One token of a speculation tree.

    ``node_id`` is unique within (session, epoch) and larger than ``parent_id``; 0 is the last prompt token.
    """

    node_id: int
    parent_id: int
    token_id: int
    prob: float
    """Calibrated probability that the target's text takes this token, given that it reaches the parent."""
    sampled: bool = True
    """May be proposed. False: a predicted next token of the rejection rule, useful as an outcome only."""
    q: SparseDistribution | None = None
    """Rejection rule: the distribution this token was drawn from, given its parent. None otherwise."""


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Starts, or after a failure restarts, a session on an engine."""

    session_id: str
    epoch: int
    token_ids: tuple[int, ...] = field(repr=False)
    """The context: the prompt, and when re-opened what has been emitted since."""
    num_prompt_tokens: int
    """How many of ``token_ids`` are the prompt (penalties and min_tokens tell them apart)."""
    seed: int
    sampling: SamplingParams
    speculation: SpeculationParams
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Commit:
    """To the draft: what the target decided, and what it verifies now."""

    session_id: str
    epoch: int
    context_len: int
    """Length of the context before ``token_ids``: a commit that is missing or comes twice shows."""
    token_ids: tuple[int, ...]
    """The accepted tokens and the next token, in order."""
    in_flight: tuple[int, ...] = ()
    """Node ids of the proposal being verified now, root side first."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """To the target: new nodes of a session's tree, parents before children."""

    session_id: str
    epoch: int
    context_len: int
    """Length of the context at the draft when it sent this."""
    nodes: tuple[Node, ...]
    idle: bool = False
    """The draft will send nothing more before the next commit."""
    step_s: float = 0.0
    """Seconds that the draft's tree step took; 0 if these nodes came without one."""


@dataclass(frozen=True, slots=True)
class CloseSession:
    """Ends a session on an engine and frees what it holds."""

    session_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class DraftState:
    """To the target: whether a draft serves the session now."""

    session_id: str
    epoch: int
    available: bool
    draft_epoch: int = 0
    """available: the epoch under which the session was opened on the draft; its nodes carry it."""
    context_len: int = 0
    """available: length of the context that it was opened with; node 0 is its last token."""


@dataclass(frozen=True, slots=True)
class Echo:
    """To a replica, which sends it back at once: what the way there and back takes. Of no session."""

    sent_ns: int
    """By the sender's own clock."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """From the target, once per round and session, before its next forward starts."""

    session_id: str
    epoch: int
    context_len: int
    """Length of the context before ``token_ids``: an outcome that is missing or comes twice shows."""
    token_ids: tuple[int, ...]
    """Accepted tokens, then the next token, cut at the end of the session if it finished."""
    logprobs: tuple[float, ...]
    """Of each token, under the target's distribution after all processors."""
    round: Round
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    """Prompt tokens whose KV was shared with an earlier session (first outcome only)."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """From the target: the proposal whose verification starts now (sent before the forward)."""

    session_id: str
    epoch: int
    context_len: int
    """Length of the context that the proposal continues."""
    node_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TreeLost:
    """From the target: nodes of this session are missing for good; it has to be re-opened on a draft."""

    session_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class SpeculationWanted:
    """From the target: whether drafts for this session are worth their cost now; told when it changes."""

    session_id: str
    epoch: int
    wanted: bool
    """False: it runs plain rounds until it asks again, so the draft may forget the session."""


@dataclass(frozen=True, slots=True)
class SessionFailed:
    """From an engine: this session cannot go on there."""

    session_id: str
    epoch: int
    message: str


class RelayedNodes(Protocol):
    """Nodes on their way from draft to target: ``types.Nodes``, or a form of them that nobody here unpacks."""

    @property
    def session_id(self) -> str:
        """Whose they are."""
        ...

    @property
    def epoch(self) -> int:
        """The draft's."""
        ...

    @property
    def context_len(self) -> int:
        """Length of the context at the draft when it sent them."""
        ...


ToTarget = OpenSession | CloseSession | DraftState | RelayedNodes


ToDraft = OpenSession | CloseSession | Commit


FromTarget = Outcome | InFlight | TreeLost | SpeculationWanted | SessionFailed


FromDraft = RelayedNodes | SessionFailed
