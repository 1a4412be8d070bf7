"""States of the target that a head reads: the rows of the residual stream that leave the model with the logits.

Every convention of published heads is turned into one: the *boundary* b in 0..L, with L the number of layers::

    embeddings ──0──▶ layer 0 ──1──▶ layer 1 ──2──▶ .. ──▶ layer L-1 ──L──▶ final norm ──OUT──▶ LM head
"""

from __future__ import annotations

from dataclasses import dataclass

OUT = -1
"""The boundary after the final norm, whose states the LM head reads."""
STREAMS = -2
"""The boundary of the first residual stream after the last layer, in models with several (DeepSeek V4), which have no
one state between layers. The others' follow: -3, -4, ..."""


@dataclass(frozen=True, slots=True)
class Features:
    """The hidden states that a head is fed with."""

    boundaries: tuple[int, ...]
    """Boundary b in 0..L: the residual stream before layer b (L: after the last layer, before the final norm);
    ``OUT``: after the final norm; ``STREAMS - k``: stream k after the last layer. Their states are concatenated in this
    order."""
    every_position: bool
    """True: the states of all positions, prompts included (heads with attention). False: only of the positions whose
    logits are computed, for a head that reads the last state alone (Medusa, MLP)."""
