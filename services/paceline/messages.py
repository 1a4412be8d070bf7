"""Messages between routers and replicas. Plain data: no tensors, no Ray, no protobuf.

The session relays them (``router/session.py``)::

    open ──▶ target                     open ──▶ draft
             target ── Outcome ──▶ session ── Commit ──▶ draft
             target ── States ───▶ session ── States ──▶ draft       only where the draft is a head
             target ── Hint ─────▶ session ── Hint ────▶ draft       only where the target is to send any
             target ◀── Nodes ─── session ◀── Nodes ─── draft

Nodes are pushed ahead of the target's needs; a hit costs no message on the critical path.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import ClassVar, TypeVar, dataclass_transform, overload

from paceline.types import FinishReason, PromptLogprobs, Round, SamplingParams, SpeculationParams, TopLogprobs

_T = TypeVar("_T")

STATE_BYTES = 2
"""Bytes per number of a state in transit: bfloat16 for models of any dtype."""
HINT_BYTES = 8
"""Bytes of a token of a hint: an id and a log probability."""
MAX_STEP_S = 3600.0
"""Longest tree step that a draft may report, in seconds: the target averages them, and one absurd value would stay."""


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(kind: type[_T]) -> type[_T]:
    """Declares immutable data that is made many times in a step.

    A frozen dataclass with slots to type checkers, which refuse to assign to its fields. At run time nothing else
    guards them: the guard makes an instance four times as expensive.
    """
    return dataclass(slots=True, unsafe_hash=True)(kind)


@record
class SparseDistribution:
    """A probability distribution with few tokens of non-zero mass: distinct ids, probabilities that sum to 1.

    In packed columns, as it travels: a draft under the rejection rule sends one with every node.
    ``core/sparse.py`` reads them as arrays.
    """

    packed_ids: bytes
    """int32, little-endian."""
    packed_probs: bytes
    """float64, little-endian."""

    @staticmethod
    def of(token_ids: Sequence[int], probs: Sequence[float]) -> SparseDistribution:
        """Packs two columns. Raises struct.error for an id that is no int32."""
        ids = struct.pack(f"<{len(token_ids)}i", *token_ids)
        return SparseDistribution(ids, struct.pack(f"<{len(probs)}d", *probs))

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids, unpacked."""
        return struct.unpack(f"<{len(self.packed_ids) // 4}i", self.packed_ids)

    @property
    def probs(self) -> tuple[float, ...]:
        """The probabilities, unpacked."""
        return struct.unpack(f"<{len(self.packed_probs) // 8}d", self.packed_probs)


@record
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
    """False: a predicted next token of the rejection rule, useful as an outcome only and never proposed."""
    q: SparseDistribution | None = None
    """Rejection rule: the distribution that this token was drawn from, given its parent. None with the coupled rule."""


Columns = tuple[
    Sequence[int],
    Sequence[int],
    Sequence[int],
    Sequence[float],
    Sequence[bool],
    Sequence[SparseDistribution | None],
]
"""Nodes as columns of equal length, in the order of the fields of ``Node``. No ``sampled``: every node is; no ``q``: no
node has one."""
_FIELDS = attrgetter("node_id", "parent_id", "token_id", "prob", "sampled", "q")


class NodeColumns(Sequence[Node]):
    """The nodes of one message as they arrive, in columns. Compares equal to the tuple of its nodes, which are made on
    access. Never changed."""

    __slots__ = ("columns",)

    def __init__(
        self,
        node_ids: Sequence[int],
        parent_ids: Sequence[int],
        token_ids: Sequence[int],
        probs: Sequence[float],
        sampled: Sequence[bool] = (),
        qs: Sequence[SparseDistribution | None] = (),
    ) -> None:
        self.columns: Columns = node_ids, parent_ids, token_ids, probs, sampled, qs

    @staticmethod
    def of(nodes: Sequence[object]) -> NodeColumns:
        """Nodes of a message or of a tree, in columns."""
        if not nodes:
            return NodeColumns((), (), (), ())
        node_ids, parent_ids, token_ids, probs, sampled, qs = zip(*map(_FIELDS, nodes), strict=True)
        return NodeColumns(
            node_ids, parent_ids, token_ids, probs, () if all(sampled) else sampled, qs if any(qs) else ()
        )

    def __len__(self) -> int:
        return len(self.columns[0])

    @overload
    def __getitem__(self, index: int) -> Node: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Node, ...]: ...
    def __getitem__(self, index: int | slice) -> Node | tuple[Node, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        node_ids, parent_ids, token_ids, probs, sampled, qs = self.columns
        return Node(
            node_ids[index],
            parent_ids[index],
            token_ids[index],
            probs[index],
            sampled[index] if sampled else True,
            qs[index] if qs else None,
        )

    def __iter__(self) -> Iterator[Node]:
        return map(self.__getitem__, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (NodeColumns, tuple)) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Starts, or after a failure restarts, a session on an engine."""

    session_id: str
    epoch: int
    token_ids: tuple[int, ...] = field(repr=False)
    """The context: the prompt, and after a failure the tokens decided so far."""
    num_prompt_tokens: int
    """Number of leading ``token_ids`` that are the prompt, which penalties and min_tokens treat differently."""
    seed: int
    """Key of the session's noise (``types.noise_key``), the same on every engine and in every epoch."""
    sampling: SamplingParams
    speculation: SpeculationParams
    eos_token_ids: tuple[int, ...] = ()
    cache_salt: str = field(default="", repr=False)
    """Sessions of different salts share nothing."""
    traceparent: str = ""
    """W3C trace context of the request's span, below which the engine's spans are; empty if it is not traced."""
    suspected_s: float = 0.0
    """Targets were lost under the session: for this long, or until its next token, a target takes no second such
    session. 0: none were."""
    pages_from: str = ""
    """Address of a target that lives and has computed the context: its KV pages are there. Empty: there is none."""
    pages_timeout_s: float = 0.0
    """Seconds that the session waits for them at most."""


@record
class Commit:
    """Message to the draft: the tokens that the target decided, and the proposal that it verifies now."""

    session_id: str
    epoch: int
    context_len: int
    """Length of the context before ``token_ids``, by which missing and repeated commits are noticed."""
    token_ids: tuple[int, ...]
    """The accepted tokens and the next token, in order."""
    in_flight: tuple[int, ...] = ()
    """Node ids of the proposal being verified now, root side first."""


Packable = tuple[Columns, bool, float]
"""What a message of nodes packs: their columns, ``idle`` and ``step_s``."""
ReadNodes = Callable[[list[bytes]], Sequence[Packable | None]]
"""Reads nodes in wire form."""
WriteNodes = Callable[[list[Packable | None]], Sequence[bytes | None]]
"""Writes nodes in wire form."""


@record
class Nodes:
    """Message to the target: new nodes of a session's tree, parents before children."""

    read_plain: ClassVar[ReadNodes] = staticmethod(lambda packed: [None] * len(packed))
    """A native reader where ``core/native_tree.py`` has been prepared. None: protobuf has to read that message, or it
    is malformed."""
    write_plain: ClassVar[WriteNodes] = staticmethod(lambda messages: [None] * len(messages))
    """A native writer there, which returns None for None. None: protobuf has to write that message."""

    session_id: str
    epoch: int
    context_len: int
    """Length of the context at the draft when it sent this."""
    nodes: Sequence[Node]
    """Immutable: a tuple, or ``NodeColumns``."""
    idle: bool = False
    """True if the draft will send nothing more before the next commit."""
    step_s: float = 0.0
    """Duration of the draft's tree step in seconds; 0 if these nodes came without one."""


@dataclass(frozen=True, slots=True)
class CloseSession:
    """Ends a session on an engine and frees its resources."""

    session_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class DraftState:
    """Message to the target: states whether a draft serves the session now."""

    session_id: str
    epoch: int
    available: bool
    draft_epoch: int = 0
    """Epoch under which the session was opened on the draft, which its nodes carry; 0 unless ``available``."""
    context_len: int = 0
    """Length of the context that the draft was opened with, whose last token is node 0; 0 unless ``available``."""


@dataclass(frozen=True, slots=True)
class Echo:
    """Message to a replica, which sends it back at once: measures the round trip. Belongs to no session."""

    sent_ns: int
    """Sending time by the sender's own clock, in nanoseconds."""


@record
class Outcome:
    """Message from the target, once per round and session, before its next forward starts."""

    session_id: str
    epoch: int
    context_len: int
    """Length of the context before ``token_ids``, by which missing and repeated outcomes are noticed."""
    token_ids: tuple[int, ...]
    """Accepted tokens, then the next token, cut at the end of the session if it finished."""
    logprobs: tuple[float, ...]
    """Log probability of each token, by the ``logprobs_mode`` of the session."""
    round: Round
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    """Prompt tokens whose KV was shared with an earlier session; set in the first outcome only."""
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """Likeliest tokens at the position of each token, if the session asks for them."""


@record
class PromptScores:
    """Message from the target: log probabilities of prompt tokens that a step has computed. All of them come before the
    first outcome. A target on which the session was re-opened sends them again from the first."""

    session_id: str
    epoch: int
    logprobs: PromptLogprobs


@record
class InFlight:
    """Message from the target: the proposal whose verification starts now (sent before the forward)."""

    session_id: str
    epoch: int
    context_len: int
    """Length of the context that the proposal continues."""
    node_ids: tuple[int, ...]


@record
class States:
    """Message from the target to a draft that is a head: hidden states of committed tokens, fused as the head reads
    them. Sent after the outcome that they belong to, so that no token waits for them; a lost or late message costs only
    acceptance."""

    session_id: str
    epoch: int
    """Epoch under which the session was opened on the draft, as in ``Nodes``."""
    position: int
    """Position of the first state; the others follow without a gap."""
    width: int
    """Numbers of one state."""
    packed: bytes
    """[positions, width] bfloat16, little-endian."""

    @property
    def num_positions(self) -> int:
        """Number of states."""
        return len(self.packed) // (STATE_BYTES * self.width)


@record
class Hint:
    """Message from the target to a draft while its upper layers run: the tokens that a lower layer predicts at the
    positions of the step. One that is lost, or comes late, costs nothing but its use."""

    session_id: str
    epoch: int
    """Epoch under which the session was opened on the draft, as in ``Nodes``."""
    context_len: int
    """Length of the context that the step continues."""
    node_ids: tuple[int, ...]
    """The nodes that the tokens may follow, 0 for the last token of the context; distinct."""
    weight: float
    """Weight of the hint relative to the draft's own ranking, in (0, 1]."""
    packed: bytes
    """[nodes, tokens] int32 token ids, then their float32 log probabilities, -inf where there is no token;
    little-endian."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens for each node."""
        return len(self.packed) // (HINT_BYTES * len(self.node_ids))


@dataclass(frozen=True, slots=True)
class TreeLost:
    """Message from the target: nodes of this session are missing for good; it has to be re-opened on a draft."""

    session_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class SpeculationWanted:
    """Message from the target: requests drafting for this session, or ends it; sent when that changes."""

    session_id: str
    epoch: int
    wanted: bool
    """False: the session runs plain rounds until the target asks again, so the draft may forget it."""
    most_sessions: int | None = None
    """The most sessions of the target for which it wants drafts now; None: any number of them."""


@dataclass(frozen=True, slots=True)
class SessionFailed:
    """Message from an engine: this session cannot go on there."""

    session_id: str
    epoch: int
    message: str
    request_at_fault: bool = False
    """True if no other engine could go on with it either: the request is to be refused."""
    turned_away: bool = False
    """True if the session is suspected, and another suspected one is served there: nothing was lost under it."""


@record
class RelayedNodes:
    """Nodes on their way through a router, which relays them without unpacking them."""

    session_id: str
    epoch: int
    context_len: int
    """Length of the context at the draft when it sent them."""
    packed: bytes
    """The nodes in wire form, as the draft sent them; only ``rpc/streams.py`` looks inside."""


ToTarget = OpenSession | CloseSession | DraftState | Nodes | RelayedNodes
ToDraft = OpenSession | CloseSession | Commit | States | Hint
FromTarget = Outcome | PromptScores | InFlight | States | Hint | TreeLost | SpeculationWanted | SessionFailed
FromDraft = Nodes | RelayedNodes | SessionFailed
