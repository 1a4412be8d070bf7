"""Lookahead decoding: n-grams that the target makes up on extra rows of its steps."""

from __future__ import annotations

from pydantic import Field

from paceline.config.base import Strict
from paceline.config.methods.entry import HeadMethod, Row


class LookaheadOptions(Strict):
    """Sizes of lookahead decoding, as W, N and G of its paper (Fu et al. 2024)."""

    window: int = Field(default=5, ge=1, le=32)
    """Columns of guesses, W: a step has W (N - 1) - 1 further tokens per session."""
    ngram: int = Field(default=4, ge=3, le=8)
    """Tokens of an n-gram, the one that it is found by included: at most N - 1 are proposed from one."""
    guesses: int = Field(default=5, ge=1, le=32)
    """N-grams kept for each first token; the least recently seen are dropped."""

    @property
    def num_tokens(self) -> int:
        """Further tokens that a step computes for one session."""
        return self.window * (self.ngram - 1) - 1


HEAD = HeadMethod(
    method="lookahead",
    model="none",
    probed=False,
    open="",
    load="paceline.target.mount:load_lookahead",
    memory="paceline.preflight.heads:size_of_nothing",
    examine="paceline.drafters.available:of_lookahead",
    acceptance={
        "chat": (0.28, "benchmarks/results/methods.txt: greedy text of the embedded target, 1.37 tokens a step")
    },
    rows=(
        Row(
            name="lookahead",
            source="lookahead decoding (2402.02057)",
            reads="",
            when="targets whose rows are nearly free, on greedy text that comes back to itself; no model, no training",
            options={"lookahead": {"window": 5, "ngram": 4, "guesses": 5}},
        ),
    ),
)
