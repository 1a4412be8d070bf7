"""Noise of single tokens, as tests look it up."""

from __future__ import annotations

import torch

from paceline.core.noise import Stream, gumbel


def gumbel_at(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    stream: Stream,
    token_ids: torch.Tensor,
    nonces: torch.Tensor | None = None,
) -> torch.Tensor:
    """``gumbel`` at ``token_ids`` [rows, m], as [rows, m] float32."""
    noise = gumbel(seeds, positions, stream, int(token_ids.max()) + 1, nonces)
    return noise.gather(1, token_ids.expand(len(noise), -1))
