"""The state of each simulated session, target and draft. Times in seconds, lengths in tokens."""

from __future__ import annotations

import math

from paceline.plan.closed_form import Subtree


class Session:
    """A request, or a session without end."""

    __slots__ = (
        "arrivals",
        "arrived_at",
        "chain",
        "context",
        "draft",
        "draft_prompt",
        "fresh",
        "in_flight",
        "known_at",
        "last_at",
        "left",
        "looked_up",
        "need",
        "prompt",
        "ranks",
        "seconds",
        "share",
        "target",
        "tokens",
    )

    def __init__(
        self, target: Target, draft: Draft | None, arrived_at: float, prompt: int, left: int, context: int
    ) -> None:
        self.target, self.draft, self.arrived_at = target, draft, arrived_at
        self.prompt = self.draft_prompt = prompt  # what either side has yet to prefill
        self.context, self.left = context, left  # known to the target; output tokens to come
        self.chain = self.in_flight = 0
        self.known_at = 0.0  # when the draft hears of the outcome that it grows for
        self.fresh = True  # the draft had not predicted the outcome: a step begun earlier is wasted
        self.arrivals: list[float] = []  # when the nodes of each of its steps since then arrive at the target
        self.share = 0  # nodes of such a step, the last one's
        self.need = 0  # draft tokens that are waited for
        self.looked_up = 0  # tokens of the session's own text that are being verified
        self.ranks: tuple[int, ...] = ()  # of the tokens of the last outcome, among the children of a tree's nodes
        self.last_at = math.nan  # of its last tokens; nan: there were none
        self.tokens, self.seconds = 0, 0.0  # counted ones, and the gaps before them


class Target:
    """``ready``: will be in the next step; ``batch``: are in this one; ``prefilling``: in order of arrival."""

    __slots__ = ("batch", "busy", "number", "prefilled", "prefilling", "ready", "size", "tree")

    def __init__(self, number: int) -> None:
        self.number, self.size = number, 0
        self.ready: list[Session] = []
        self.batch: list[Session] = []
        self.prefilling: list[Session] = []
        self.prefilled: list[Session] = []  # the step under way ends their prompts
        self.tree = Subtree(0, ())  # that the step under way verifies of each session, if its draft is co-located
        self.busy = False


class Draft:
    """``stepping``: the sessions of the tree step under way."""

    __slots__ = (
        "began",
        "busy",
        "next",
        "number",
        "path",
        "prefill_next",
        "prefilling",
        "sessions",
        "share",
        "size",
        "stepping",
    )

    def __init__(self, number: int) -> None:
        self.number, self.size = number, 0
        self.sessions: dict[Session, None] = {}  # ordered
        self.stepping: list[Session] = []
        self.prefilling: list[Session] = []
        self.busy, self.prefill_next = False, True
        self.began, self.share, self.next = 0.0, 1, 0
        self.path = 0  # tokens of the path that the step under way drafts by one call; 0: it is a step
