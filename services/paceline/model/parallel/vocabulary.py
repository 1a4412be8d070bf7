"""Sampling from logits that are split over several ranks: ranks exchange some numbers of each row, not the row."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.noise import Stream, gumbel_max
from paceline.core.sampling import RowKeys
from paceline.model.parallel.collectives import Collectives


def sample_sharded(
    group: Collectives, logits: Tensor, first: int, keys: RowKeys, temperatures: Tensor, sampled: Tensor
) -> tuple[Tensor, Tensor]:
    """The tokens that ``process`` and ``sample_coupled`` draw from the whole rows, without any processor but the
    temperature: argmax_v(logits[v] / temperature + g[v]), g = 0 on greedy rows. Waits for no device.

    Args:
        logits: [rows, tokens] of any float dtype, this rank's of the tokens from ``first``. Not modified.
        keys: of all rows, the same on all ranks.
        temperatures: [rows] float32; 1 on greedy rows.
        sampled: [rows that are not greedy] int64, their numbers.

    Returns:
        Token ids [rows] int64 and their log-probabilities [rows] float32, on every rank. A log-probability that is
        not finite says that the row had NaN or +inf, or -inf only: its token means nothing.
    """
    x = logits.float()
    x = x - group.all_gather(x.amax(-1)).amax(0)[:, None]
    x = x / temperatures[:, None]
    most, ids = x.max(-1)
    scores, ids = most.double(), ids + first
    if keys.num_greedy < len(x):
        scores[sampled], ids[sampled] = gumbel_max(
            x[sampled], keys.seeds[sampled], keys.positions[sampled], Stream.COUPLED, first
        )
    chosen = x.gather(-1, (ids - first)[:, None]).squeeze(-1)
    mine = torch.stack([scores, ids.double(), chosen.double(), x.double().exp().sum(-1)])  # ids are exact in float64
    scores, all_ids, all_chosen, sums = group.all_gather(mine).unbind(1)  # each [degree, rows]
    best = scores.argmax(0, keepdim=True)  # the first of equals: ranks are in the order of their ids
    token_ids = all_ids.gather(0, best)[0].long()
    return token_ids, (all_chosen.gather(0, best)[0] - sums.sum(0).log()).float()
