"""Attention in place without triton: what the kernel's arguments mean, in torch."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.checkpoint.kv_scales import UNSCALED, KVScales
from paceline.model.attention.schedule import SPLIT, Seen, num_splits, sum_bytes
from paceline.types import PAGE_SIZE

PROGRAMS = 0
"""Programs that walk a row; 0: none is walked."""


def seen_through(mask: Tensor) -> Seen:
    """``Seen`` of an additive mask [B, 1, n, keys] whose rows are full."""
    num_rows, _, row_len, num_keys = mask.shape
    first = torch.zeros(num_rows, row_len, dtype=torch.int32, device=mask.device)
    sizes = [row_len] * num_rows, [num_splits(num_keys // PAGE_SIZE)] * num_rows
    places = torch.full((num_rows,), row_len, device=mask.device)
    return Seen(first, torch.full_like(first, num_keys), places, mask, sizes)


def mask_of(seen: Seen, num_keys: int) -> Tensor:
    """The additive mask [B, 1, n, keys] that ``seen`` stands for."""
    key = torch.arange(num_keys)
    hidden = (key < seen.first[:, None, :, None]) | (key >= seen.stop[:, None, :, None])
    mask = torch.zeros(1) if seen.mask is None else seen.mask.float()
    return mask.masked_fill(hidden, -math.inf)


def attend_in_place(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    gather_index: Tensor,
    scatter_index: Tensor,
    seen: Seen,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    value_scale: float = 1.0,
) -> Tensor:
    """The kernel's reference, for models without sinks and softcap. Fails if the work leaves out a token or a key."""
    assert sinks is None
    assert softcap is None
    assert value_scale == 1
    row_len = gather_index.shape[1]
    num_heads, groups = query.shape[1], query.shape[1] // key_pages.shape[2]
    mask = mask_of(seen, page_table.shape[1] * PAGE_SIZE)
    result = torch.full((query.shape[2], num_heads, value_pages.shape[3]), torch.nan)
    todo, ends = seen.work(sum_bytes(num_heads, value_pages.shape[3]), query.shape[2], PROGRAMS)
    walked = torch.zeros(1) if ends is None else ends.diff(prepend=torch.zeros(1, dtype=torch.int32))

    def attended(token: int, row: int, used: Tensor) -> Tensor:
        numbers = page_table[row]
        keys, values = (pool[numbers].flatten(0, 1)[used].transpose(0, 1) for pool in (key_pages, value_pages))
        keys, values = (each.repeat_interleave(groups, 0) for each in (keys, values))
        return F.scaled_dot_product_attention(query[0, :, token, None], keys, values, scale=scale)[:, 0]

    if walked.any():
        for token, place in enumerate(scatter_index.tolist()):
            if walked[place // row_len]:
                result[token] = attended(
                    token, place // row_len, mask[place // row_len, 0, place % row_len] > -math.inf
                )
    for call, work in todo:
        first_split, places, ends, sums = work.long()
        splits = ends.diff(prepend=torch.zeros(1, dtype=torch.int64))
        assert int(sums[-1]) <= call.num_sums, "sums beyond the scratch"
        for token, place in enumerate(scatter_index.tolist()):
            row, at = place // row_len - call.first_row, place % row_len - call.first_place
            if not (0 <= row < len(places) and 0 <= at < places[row]):
                continue
            known = torch.arange(len(mask[0, 0, 0])) // (SPLIT * PAGE_SIZE)
            known = (known >= first_split[row]) & (known < first_split[row] + splits[row])
            own = mask[row + call.first_row, 0, at + call.first_place]
            assert not (own[~known] == 0).any(), "a key that is seen is in no split"
            result[token] = attended(token, row + call.first_row, own > -math.inf)
    if seen.by_library is not None:  # its tokens are the library's
        return result.nan_to_num()[None]
    assert not result.isnan().any(), "a token is in no call"
    return result[None]


def write_in_place(
    key: Tensor,
    value: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    write_rows: Tensor,
    write_tokens: Tensor,
    scales: KVScales = UNSCALED,
) -> None:
    """The reference of the kernel that writes, for pages without scales."""
    assert scales == UNSCALED
    for new, pages in ((key, key_pages), (value, value_pages)):
        pages.flatten(0, 1)[write_rows] = new[0].transpose(0, 1)[write_tokens]
