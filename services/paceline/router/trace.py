"""Trace of a session's rounds: the time of each verification, and the nodes that the draft sent during it.

Only sessions whose request asks for it have a tracer. It keeps messages as they arrive, which costs engines no time;
texts of tokens are made along with the chunks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.checkpoint.token_text import Decode
from paceline.messages import InFlight, Nodes, RelayedNodes
from paceline.rpc.streams import unpacked
from paceline.types import Trace, TracedNode, TracedStep


@dataclass(slots=True)
class _Round:
    """A round so far; its nodes as they came."""

    began_s: float
    ended_s: float = 0.0
    in_flight: tuple[int, ...] = ()
    arrived: list[tuple[float, Nodes | RelayedNodes]] = field(default_factory=list)
    draft_opened_at: int | None = None


class Tracer:
    """The rounds of one session, by its clock. The session calls ``on_*`` as it is called itself."""

    def __init__(self, decode: Decode, num_prompt_tokens: int, clock: Callable[[], float]) -> None:
        self._decode, self._num_prompt_tokens, self._clock = decode, num_prompt_tokens, clock
        self._opened_s: float | None = None
        self._round = _Round(0.0)
        self._done: deque[_Round] = deque()

    def _now(self) -> float:
        if self._opened_s is None:
            self._opened_s = self._clock()
        return self._clock() - self._opened_s

    def on_open(self, context_len: int) -> None:
        """The session is opened on an engine, with a context of this length: a tree that was there is no more."""
        self._now()
        self._round.arrived.clear()
        self._round.draft_opened_at = context_len - self._num_prompt_tokens

    def on_in_flight(self, event: InFlight) -> None:
        """The target verifies these nodes from now on."""
        self._round.began_s, self._round.in_flight = self._now(), event.node_ids

    def on_nodes(self, event: Nodes | RelayedNodes) -> None:
        """Nodes of the draft have arrived."""
        self._round.arrived.append((self._now(), event))

    def on_outcome(self) -> None:
        """The round has ended."""
        self._round.ended_s = now = self._now()
        self._done.append(self._round)
        self._round = _Round(now)

    def take(self) -> Trace:
        """The oldest round that has ended and was not taken. Raises IndexError if there is none."""
        ended = self._done.popleft()
        steps = tuple(self._step(at_s, message) for at_s, message in ended.arrived)
        return Trace(ended.began_s, ended.ended_s, ended.in_flight, steps, ended.draft_opened_at)

    def _step(self, at_s: float, message: Nodes | RelayedNodes) -> TracedStep:
        opened = unpacked(message) if isinstance(message, RelayedNodes) else message
        if opened is None:  # the target refuses them, too
            return TracedStep(at_s, 0.0, ())
        nodes = [
            TracedNode(node.node_id, node.parent_id, node.token_id, self._decode((node.token_id,)), node.prob)
            for node in opened.nodes
        ]
        return TracedStep(at_s, opened.step_s, tuple(nodes))
