"""A chain of steps of one token each, of which each computes the token that the one before it ranks first.

A small draft model's step takes less time than the interpreter needs to prepare it, so a backend may run the whole
chain by one call (``CompiledPackage.run_chain``). Nothing in it depends on how it is run: the same tokens come of one
step after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.model.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class Draw:
    """How the next tokens are ranked: by their logits at temperature 0, else by log q + the target's noise."""

    seed_bits: int
    position: int
    """Position of the first token that is ranked, in tokens."""
    temperature: float
    """0: by the logits alone."""
    top_k: int
    log_min_p: float
    """Tokens whose log probability is further below the largest are left out; -inf: none."""
    fan_out: int
    """Tokens that are ranked at each place."""


@dataclass(frozen=True, slots=True)
class Stop:
    """When a chain ends: after the token whose path is less likely than ``least``.

    That of a first token is ``constants[b] + slopes[b] * prior``: b is the bin of the gap to the second one, in nats,
    between ``edges``, and prior its share of ``mass`` among those that are ranked.
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
    """The steps, and what is done between them. All of one session."""

    first: StepPlan
    """The first step: one row of logits."""
    then: StepPlan
    """The others: one token with rows of its own. It is changed from step to step."""
    rows: Sequence[int]
    """Row of the session of each token that is computed in the others."""
    writes: Sequence[int]
    """Row of the cache of each of them."""
    draw: Draw
    stop: Stop


Ranked = list[tuple[list[int], list[float]]]
"""The tokens that were ranked at each place, best first, and their scores; -inf: there are no more."""
