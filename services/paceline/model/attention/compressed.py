"""Compressed attention: a query sees the keys of a window, and before it entries that stand for several tokens each.

In layers of DeepSeek V4 a *compressor* makes one entry of each window of ``rate`` positions, counted from the beginning
of the context. The entry is the mean of its tokens' parts, weighted number by number by the softmax of their gates.
Windows of sparse layers overlap by half, and an indexer chooses ``index_topk`` entries for a query (``indexed.py``).
Keys are values, of one head.

An entry depends on the tokens of its window alone, and is stored on the page of the last of them. The parts and gates
of each token are stored on its page, too. Both are further layers of the KV cache. So a branch has its own entries on
its own pages, a rejected token is overwritten together with the entry that it ended, and a cached prefix includes all
of its entries. When a token that ends a window is written, the entry is made from the rows of its sequence, in one
order of sums. So tokens of this step and of earlier ones give the same bits.

Attention goes over pages: before each ``rate`` pages of keys comes one of the 64 entries that stand for them. The
place of a key depends on its position alone, and so does the order of sums.

While a step is exported, no size depends on the values of a tensor. An entry is made for each written token, and stored
on the scratch page if the token ends no window. A query row copies the pages that its window can span.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from paceline.checkpoint.compressed import HEAVY, SPARSE, Entries
from paceline.errors import ConfigError
from paceline.model.attention.indexed import IndexedStep
from paceline.model.kv_cache import LayerSpec
from paceline.model.shapes import MIN_TOKENS
from paceline.types import PAGE_SIZE

COMPRESSED = {SPARSE, HEAVY}
"""The names of such layers in configurations."""
_ATTENTION = "DeepseekV4Attention"
_LANES = 64
"""Numbers that elementwise kernels take at a time (``tails.py``)."""


class Compressor(NamedTuple):
    """A compressor of transformers, or the one in an indexer, and where its rows and entries are."""

    module: Any
    entries: Entries
    pool: int
    """The layer of the cache that holds parts and gates ``[pages, page_size, 1, row_values]``; the next one holds
    entries ``[pages, page_size, 1, entry_values]``."""


@dataclass(frozen=True, slots=True)
class _Step:
    """Inputs of compressors in a step: see ``paged_attention``."""

    keys: Sequence[Tensor]
    write_rows: Tensor
    write_tokens: Tensor
    page_table: Tensor
    gather_index: Tensor
    scatter_index: Tensor
    masks: list[Tensor]
    positions: Tensor
    """[T]"""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> _Step:
        """By the arguments of an attention."""
        names = ("keys", "write_rows", "write_tokens", "page_table", "gather_index", "scatter_index", "masks")
        return cls(**{name: given[name] for name in names}, positions=given["token_positions"][0])


def replace_compressors(model: PreTrainedModel, first: int, name: str) -> list[LayerSpec]:
    """Replaces the forward of each layer with a compressor by one over pages. Returns what the compressors keep.

    These are layers of the KV cache from ``first`` on.

    Raises:
        ConfigError: windows of some number of tokens do not end with pages.
    """
    specs: list[LayerSpec] = []
    for module in model.modules():
        layer: Any = module
        if not shares_keys(layer) or layer.compressor is None:
            continue
        found = [_compressor(layer.compressor, first + len(specs), layer.layer_type, name)]
        specs += _kept(found[0])
        if layer.layer_type == SPARSE:
            found.append(_compressor(layer.compressor.indexer, first + len(specs), SPARSE, name))
            specs += _kept(found[1])
        layer.forward = partial(_forward, layer, found)
    return specs


def shares_keys(module: Any) -> bool:
    """True for a layer whose values are its keys."""
    return type(module).__name__ == _ATTENTION


def _compressor(module: Any, pool: int, kind: str, name: str) -> Compressor:
    rate = int(module.compress_rate)
    if rate < 1 or (PAGE_SIZE % rate and rate % PAGE_SIZE):
        raise ConfigError(
            f"{name} has compress_rates {rate} of {kind} layers: a divisor or a multiple of {PAGE_SIZE} is allowed"
        )
    return Compressor(module, Entries(rate, module.head_dim, overlaps=kind == SPARSE), pool)


def _kept(compressor: Compressor) -> list[LayerSpec]:
    entries = compressor.entries
    return [LayerSpec(1, entries.row_values, 0), LayerSpec(1, entries.entry_values, 0)]


def _forward(
    layer: Any,
    compressors: Sequence[Compressor],
    hidden_states: Tensor,
    position_embeddings: Mapping[str, tuple[Tensor, Tensor]],
    attention_mask: Tensor | None = None,
    **given: Any,
) -> tuple[Tensor, None]:
    """The forward of ``DeepseekV4Attention``, over pages. ``given``: the arguments of ``paged_attention``."""
    cos, sin = position_embeddings[layer.rope_layer_type]
    rotate, heads = _rotation(layer), (*hidden_states.shape[:-1], -1, layer.head_dim)
    residual = layer.q_a_norm(layer.q_a_proj(hidden_states))
    query = rotate(layer.q_b_norm(layer.q_b_proj(residual).view(heads).transpose(1, 2)), cos, sin)
    keys = rotate(layer.kv_norm(layer.kv_proj(hidden_states)).view(heads).transpose(1, 2), cos, sin)
    if given["page_table"] is not None:  # None: layers are probed
        step = _Step.of(given)
        _write(step.keys[layer.layer_idx], step, keys[0, 0])
        for compressor in compressors:
            _compress(compressor, hidden_states[0], step)
        chosen = _choose(layer, compressors, hidden_states, residual, (cos, sin), step)
        given |= _over(compressors[0], step, layer, chosen)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(layer.config._attn_implementation, _forward)
    window = layer.sliding_window if given["page_table"] is None else None
    given |= {"scaling": layer.scaling, "sliding_window": window, "s_aux": layer.sinks}
    out, _ = attend(layer, query, keys, keys, None, **given)
    out = rotate(out.transpose(1, 2), cos, -sin).transpose(1, 2)
    groups = out.reshape(*hidden_states.shape[:-1], layer.config.o_groups, -1)
    return layer.o_b_proj(layer.o_a_proj(groups).flatten(2)), None


def _rotation(module: Any) -> Any:
    """The function by which the class of a module rotates the end of each head."""
    return sys.modules[type(module).__module__].apply_rotary_pos_emb


def _write(pages: Tensor, step: _Step, rows: Tensor) -> None:
    """Writes rows ``[T, dim]`` of a step's tokens."""
    written = rows.index_select(0, step.write_tokens).to(pages.dtype)
    pages.view(-1, pages.shape[-1]).index_put_((step.write_rows,), written)


def _compress(compressor: Compressor, x: Tensor, step: _Step) -> None:
    """Writes parts and gates of a step's tokens ``[T, hidden]``, then the entry of each window that one of them ends.

    Wherever a token is written, on the pages of several branches perhaps, its entry is.
    """
    module, (rate, dim, _), pool = compressor
    _write(step.keys[pool], step, torch.cat([module.kv_proj(x), module.gate_proj(x)], -1))
    writes = window_ends(step, rate)
    tokens, rows = step.write_tokens[writes], step.write_rows[writes]
    if torch.compiler.is_exporting():
        ends = (step.positions.index_select(0, tokens) + 1) % rate == 0
        rows = torch.where(ends, rows, (step.keys[pool + 1].shape[0] - 1) * PAGE_SIZE)
    elif not tokens.shape[0]:
        return
    num_angles = int(getattr(module.rotary_emb, f"{module.rope_layer_type}_inv_freq").shape[0])
    spare = max(MIN_TOKENS, -(-2 * _LANES // dim), -(-_LANES // num_angles))
    made = _entries(compressor, step, torch.cat([tokens, tokens[:1].expand(spare)]))
    store_entries(step.keys[pool + 1], compressor.entries, rows, made[: tokens.shape[0]])


def window_ends(step: _Step, rate: int) -> Tensor:
    """Indices of the rows that are written whose tokens end a window; while a step is exported, of all."""
    if torch.compiler.is_exporting():
        return torch.arange(step.write_tokens.shape[0], device=step.write_tokens.device)
    return ((step.positions.index_select(0, step.write_tokens) + 1) % rate == 0).nonzero()[:, 0]


def store_entries(pages: Tensor, entries: Entries, rows: Tensor, made: Tensor) -> None:
    """Stores entries ``[n, dim]`` on the pages of ``rows``, their last tokens'."""
    slot = rows % PAGE_SIZE // entries.rate if entries.slots > 1 else torch.zeros_like(rows)
    columns = slot[:, None] * entries.dim + torch.arange(entries.dim, device=rows.device)
    pages.view(pages.shape[0], -1).index_put_(((rows // PAGE_SIZE)[:, None], columns), made.to(pages.dtype))


def _entries(compressor: Compressor, step: _Step, tokens: Tensor) -> Tensor:
    """The entries ``[n, dim]`` of the windows that ``tokens`` ``[n]`` end; with padding at the end."""
    module, entries, pool = compressor
    last = step.positions[tokens]
    parts, gates = _window(compressor, rows_before(step, entries.width, tokens, step.keys[pool]))
    before = last[:, None] - torch.arange(entries.width - 1, -1, -1, device=last.device) < 0
    gates = gates.masked_fill(before[..., None], -torch.inf)  # of the first entry, whose window has no other before it
    weights = torch.exp(gates - gates.amax(1, keepdim=True))
    mean = ordered_sum(weights * parts) / ordered_sum(weights)
    normed = module.kv_norm(mean.to(module.kv_proj.weight.dtype))
    positions = (last - (entries.rate - 1))[None]
    angles = module.rotary_emb(normed, position_ids=positions, layer_type=module.rope_layer_type)
    rotated: Tensor = _rotation(module)(normed[None, None], *angles)[0, 0]
    return rotated


def rows_before(step: _Step, width: int, tokens: Tensor, pages: Tensor) -> Tensor:
    """The last ``width`` rows up to each of ``tokens`` in its own sequence, float32 ``[n, width, row_values]``."""
    row_len = step.gather_index.shape[1]
    table = step.page_table.index_select(0, step.scatter_index[tokens] // row_len)
    rows = step.positions[tokens][:, None] - torch.arange(width - 1, -1, -1, device=tokens.device)
    rows = rows.clamp(min=0)
    flat = table.gather(1, rows // PAGE_SIZE) * PAGE_SIZE + rows % PAGE_SIZE
    found = pages.view(-1, pages.shape[-1]).index_select(0, flat.reshape(-1))
    return found.view(*flat.shape, -1).float()


def _window(compressor: Compressor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Parts and gates ``[n, width, dim]`` of ``rows``, the position's bias included."""
    module, (rate, dim, overlaps), _ = compressor
    bias = module.position_bias.float()
    if not overlaps:
        return rows[..., :dim], rows[..., dim:] + bias
    before, own = rows[:, :rate], rows[:, rate:]
    parts = torch.cat([before[..., :dim], own[..., dim : 2 * dim]], 1)
    gates = [before[..., 2 * dim : 3 * dim] + bias[:, :dim], own[..., 3 * dim :] + bias[:, dim:]]
    return parts, torch.cat(gates, 1)


def ordered_sum(x: Tensor) -> Tensor:
    """The sum of ``[n, width, dim]`` over the width, half by half: in one order, whatever n is."""
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        rest = x[:, 2 * half :]
        x = torch.cat([x[:, :half] + x[:, half : 2 * half], rest], 1)
    return x[:, 0]


def _choose(
    layer: Any,
    compressors: Sequence[Compressor],
    x: Tensor,
    residual: Tensor,
    angles: tuple[Tensor, Tensor],
    step: _Step,
) -> Tensor:
    """The mask of entries, additive ``[B, 1, n, groups * page_size]``: of those before the query, or chosen of them."""
    mask = _entry_mask(compressors[0].entries, step)
    if layer.layer_type != SPARSE:
        return mask
    own, indexer = compressors[1], layer.compressor.indexer
    queries = indexer.q_b_proj(residual).unflatten(-1, (-1, indexer.head_dim)).transpose(1, 2)
    queries = _rotation(indexer)(queries, *angles)[0].transpose(0, 1)
    scorer = indexer.scorer
    weights = scorer.weights_proj(x)[0].float() * (scorer.weights_scaling * scorer.softmax_scale)
    pages, table = _entry_pages(own, step)
    nothing = step.write_rows[:0]
    indexed = IndexedStep([pages], nothing, nothing, table, step.gather_index, mask)
    return indexed.choose(0, queries, queries[:, 0], weights, indexer.index_topk)


def _entry_mask(entries: Entries, step: _Step) -> Tensor:
    """Entries whose last token the query sees, additive ``[B, 1, n, groups * page_size]``."""
    seen = torch.nn.functional.pad(step.masks[0], (0, 1), value=-torch.inf)
    last = torch.arange(_num_groups(entries, step) * PAGE_SIZE, device=seen.device) * entries.rate + entries.rate - 1
    return seen.index_select(3, last.clamp(max=seen.shape[3] - 1))


def _num_groups(entries: Entries, step: _Step) -> int:
    """Pages of entries of a query row: one for each ``rate`` pages of keys, and one or two that none sees. torch.export
    makes constants of sizes that might be 1."""
    return step.page_table.shape[1] // entries.rate + 2


def _entry_pages(compressor: Compressor, step: _Step) -> tuple[Tensor, Tensor]:
    """Copies of entries ``[pages, page_size, 1, dim]``, and the copies of each query row ``[B, groups]``.

    Query rows next to each other may be of one sequence, and share them.
    """
    entries, pool = compressor.entries, step.keys[compressor.pool + 1]
    tables, which = step.page_table, torch.arange(step.page_table.shape[0], device=pool.device)
    if not torch.compiler.is_exporting():
        tables, which = torch.unique_consecutive(tables, dim=0, return_inverse=True)
    apart, num_groups = (
        max(1, entries.rate // PAGE_SIZE),
        _num_groups(entries, step),
    )  # one page of `apart` has an entry
    column = torch.arange(num_groups * PAGE_SIZE // entries.slots, device=pool.device) * apart + apart - 1
    tables = tables.index_select(1, column.clamp(max=tables.shape[1] - 1))
    of_pages = pool.view(pool.shape[0], -1)[:, : entries.slots * entries.dim]
    found = of_pages.index_select(0, tables.flatten()).view(tables.shape[0] * num_groups, PAGE_SIZE, 1, entries.dim)
    return found, which[:, None] * num_groups + torch.arange(num_groups, device=which.device)


def _seen_pages(step: _Step, layer: int, window: int) -> tuple[Tensor, Tensor]:
    """Copies of the pages of keys that a query row sees in its window ``[pages, page_size, 1, dim]``, and the pages
    of each row ``[B, pages]``. The first page is zeros and stands for all others."""
    table, pool = step.page_table, step.keys[layer]
    seen = (step.masks[-1][:, 0] == 0).view(table.shape[0], -1, table.shape[1], PAGE_SIZE).any(3).any(1)
    if torch.compiler.is_exporting():  # the tokens of a row follow each other
        most = (step.gather_index.shape[1] + window + 2 * PAGE_SIZE - 2) // PAGE_SIZE + 1
        first = torch.argsort(torch.nn.functional.pad(seen, (0, most)).long(), stable=True, dim=1, descending=True)[
            :, :most
        ]
        chosen = torch.nn.functional.pad(table, (0, most)).gather(1, first).flatten()
        place = torch.arange(table.shape[0], device=table.device)[:, None] * most + seen.long().cumsum(1)
    else:
        chosen, place = table[seen], seen.view(-1).cumsum(0).view(seen.shape)
    return torch.cat([torch.zeros_like(pool[:1]), pool.index_select(0, chosen)]), place * seen


def _over(compressor: Compressor, step: _Step, layer: Any, mask: Tensor) -> dict[str, Any]:
    """The arguments of ``paged_attention`` that attend over keys and entries, with nothing to write.

    ``mask``: of entries, as ``_choose`` returns it.
    """
    rate, num_pages = compressor.entries.rate, step.page_table.shape[1]
    keys, key_pages = _seen_pages(step, layer.layer_idx, layer.sliding_window)
    entries, entry_pages = _entry_pages(compressor, step)
    nobodys = torch.zeros_like(key_pages[:, :1])  # stands behind the last page, and is masked
    numbers = torch.cat([key_pages, nobodys, entry_pages + keys.shape[0]], 1)
    masks = torch.nn.functional.pad(step.masks[-1], (0, PAGE_SIZE), value=-torch.inf)
    at = torch.arange(num_pages + entry_pages.shape[1] - 1, device=keys.device)
    group, place = at // (rate + 1), at % (rate + 1)  # in a group the page of entries comes first
    order = torch.where(place == 0, num_pages + 1 + group, (group * rate + place - 1).clamp(max=num_pages))
    places = (order[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device=keys.device)).flatten()
    pages, nothing = torch.cat([keys, entries]), step.write_rows[:0]
    return {
        "keys": {layer.layer_idx: pages},
        "values": {layer.layer_idx: pages[..., :0]},
        "write_rows": nothing,
        "write_tokens": nothing,
        "page_table": numbers.index_select(1, order),
        "masks": [torch.cat([masks, mask], -1).index_select(3, places)],
    }
