"""A chain of steps of one token each, of which each computes the token that the one before it ranks first.

A small draft model's step takes less time than the interpreter needs to prepare it. So a backend may run the whole
chain by one call (``CompiledPackage.run_chain``). Nothing in it depends on how it is run: the same tokens come of one
step after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.model.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class Draw:
    """Ranking of the next tokens: by their logits at temperature 0, else by log q + the target's noise."""

    seed_bits: int
    position: int
    """Position of the first token that is ranked, in tokens."""
    temperature: float
    """0: tokens are ranked by the logits alone."""
    top_k: int
    log_min_p: float
    """Tokens whose log probability is further below the largest are left out; -inf: none."""
    fan_out: int
    """Number of tokens that are ranked at each position."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Rule that ends a chain: after the token whose path is less likely than ``least``.

    The probability of a first token is ``constants[b] + slopes[b] * prior``. b is the bin between ``edges`` of the gap
    to the second token, in nats. prior is the first token's share of the ``mass`` of all ranked tokens.
    """

    edges: Sequence[float]
    constants: Sequence[float]
    slopes: Sequence[float]
    mass: float
    correction: float
    """Factor on each of these probabilities."""
    path: float
    """Probability of the path to the first token."""
    least: float


@dataclass(frozen=True, slots=True)
class Chain:
    """The steps of one session's chain, and how the token between two steps is chosen."""

    first: StepPlan
    """The first step: one row of logits."""
    then: StepPlan
    """The further steps: one token, which sees rows of its own. The object changes from step to step."""
    rows: Sequence[int]
    """Row of the session of each token that the further steps compute."""
    writes: Sequence[int]
    """Row of the cache of each token that the further steps compute."""
    draw: Draw
    stop: Stop


Ranked = list[tuple[list[int], list[float]]]
"""The tokens that were ranked at each place, best first, and their scores; -inf: there are no more."""
