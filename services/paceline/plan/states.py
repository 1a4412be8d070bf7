"""The state of each simulated session, target and draft. Times in seconds, lengths in tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from paceline.plan.closed_form import Subtree


@dataclass(slots=True, eq=False)
class Session:
    """A request, or a session without end."""

    target: Target
    draft: Draft | None
    arrived_at: float
    prompt: int
    """What the target has yet to prefill."""
    left: int
    """Output tokens to come."""
    context: int
    """Known to the target."""
    draft_prompt: int = field(init=False)
    """What the draft has yet to prefill."""
    chain: int = 0
    in_flight: int = 0
    known_at: float = 0.0
    """When the draft hears of the outcome that it grows for."""
    fresh: bool = True
    """The draft had not predicted the outcome: a step begun earlier is wasted."""
    arrivals: list[float] = field(default_factory=list)
    """When the nodes of each of its steps since then arrive at the target."""
    share: int = 0
    """Nodes of such a step, the last one's."""
    need: int = 0
    """Draft tokens that are waited for."""
    looked_up: int = 0
    """Tokens of the session's own text that are being verified."""
    ranks: tuple[int, ...] = ()
    """Of the tokens of the last outcome, among the children of a tree's nodes."""
    last_at: float = math.nan
    """Time of its last tokens; nan: there were none."""
    tokens: int = 0
    seconds: float = 0.0
    """Counted tokens, and the gaps before them."""

    def __post_init__(self) -> None:
        self.draft_prompt = self.prompt


@dataclass(slots=True, eq=False)
class Target:
    """A target, which is in a step or waits."""

    number: int
    size: int = 0
    ready: list[Session] = field(default_factory=list)
    """Will be in the next step."""
    batch: list[Session] = field(default_factory=list)
    """Are in this one."""
    prefilling: list[Session] = field(default_factory=list)
    """In order of arrival."""
    prefilled: list[Session] = field(default_factory=list)
    """The step under way ends their prompts."""
    tree: Subtree = field(default_factory=lambda: Subtree(0, ()))
    """What the step under way verifies of each session, if its draft is co-located."""
    busy: bool = False


@dataclass(slots=True, eq=False)
class Draft:
    """A draft, which is in a tree step or waits."""

    number: int
    size: int = 0
    sessions: dict[Session, None] = field(default_factory=dict)
    stepping: list[Session] = field(default_factory=list)
    """The sessions of the tree step under way."""
    prefilling: list[Session] = field(default_factory=list)
    busy: bool = False
    prefill_next: bool = True
    began: float = 0.0
    share: int = 1
    next: int = 0
    path: int = 0
    """Tokens of the path that the step under way drafts by one call; 0: it is a step."""
