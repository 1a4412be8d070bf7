"""Attention of a head's rows to keys and values on the target's pages and of undecided nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.checkpoint.kv_scales import KVScales
from paceline.drafters.heads.module import Attend
from paceline.model.kv_cache import KVCache, flat_rows, from_pages
from paceline.types import PAGE_SIZE, pages_for

_FEW = 16
"""Sessions with at most this number of rows in a call are attended to in one padded batch, others one by one."""


@dataclass(slots=True)
class Branches:
    """Keys and values of a session's speculated nodes in one layer of a head; row i belongs to ``nodes[i]``."""

    nodes: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    keys: Tensor | None = None
    """[nodes, num_kv_heads, key_dim]."""
    values: Tensor | None = None

    def append(self, nodes: Sequence[int], positions: Sequence[int], keys: Tensor, values: Tensor) -> None:
        """Adds the rows of new nodes."""
        self.nodes.extend(nodes)
        self.positions.extend(positions)
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys])
        self.values = values if self.values is None else torch.cat([self.values, values])

    def keep(self, nodes: set[int]) -> None:
        """Drops the rows of all other nodes."""
        if self.keys is None or self.values is None or nodes.issuperset(self.nodes):
            return
        index = [i for i, node in enumerate(self.nodes) if node in nodes]
        at = torch.tensor(index, dtype=torch.long, device=self.keys.device)
        self.keys, self.values = self.keys[at], self.values[at]
        self.nodes, self.positions = [self.nodes[i] for i in index], [self.positions[i] for i in index]


@dataclass(slots=True)
class Part:
    """One session's rows of a call: the rows [start, stop) of its tokens."""

    start: int
    stop: int
    positions: list[int]
    """Position of each row."""
    pages: Sequence[int]
    first_row: int
    """The first row on the pages that holds anything; row 0 never does."""
    num_rows: int
    """Rows [first_row, num_rows) on the pages may be seen, except ``holes``."""
    holes: tuple[range, ...] = ()
    """Rows on the pages that may not be seen."""
    write: bool = False
    """True: the rows' own keys and values go to the pages, each to the row of its position."""
    alone: bool = False
    """True: the rows see only the pages, not each other or themselves, and have no keys and values."""
    above: list[list[int]] = field(default_factory=list)
    """If not ``alone``, for each row: the nodes that it sees in addition to itself."""
    chain: bool = False
    """True: each row also sees the earlier rows of this part."""
    bidirectional: frozenset[int] = frozenset()
    """Layers in which each row also sees the later rows of this part."""
    branches: dict[int, Branches] = field(default_factory=dict)
    """The session's nodes by layer; they are read only."""
    made: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Keys and values ``[rows, num_kv_heads, dim]`` that each layer has made of the part's rows, if not written."""


class Paged:
    """``Attend`` of a batch ``[1, T]`` of rows of many sessions, over gathered pages."""

    def __init__(self, cache: KVCache | None, first_layer: int, parts: Sequence[Part]) -> None:
        """``first_layer``: of the head's own layers in the cache."""
        self._cache, self._first, self._parts = cache, first_layer, parts

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Implements ``Attend``: [1, heads, T, dim] -> [1, T, heads, value_dim]."""
        keys, values = self._pools(layer)
        if values.shape[-1] == 0:  # they are the beginning of the keys
            values = keys[..., : value.shape[-1]]
        self.keep(layer, key, value)
        key, value = key[0].transpose(0, 1), value[0].transpose(0, 1)  # [T, kv heads, dim]
        out = query.new_empty(query.shape[2], query.shape[1], value.shape[-1])
        few = [part for part in self._parts if part.stop - part.start <= _FEW]
        for group in [few, *([part] for part in self._parts if part.stop - part.start > _FEW)]:
            if group:
                self._group(
                    layer, group, query[0].transpose(0, 1), key, value, keys, values, scaling, window, sinks, out
                )
        return out[None]

    def with_sinks(self, sinks: Tensor) -> Attend:
        """Implements ``AttendSinks``."""
        return partial(self, sinks=sinks)

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Writes the rows of parts that are written: [1, kv heads, T, dim]."""
        written = [(row, at) for part in self._parts if part.write for row, at in rows_to_write(part)]
        if written:
            keys, values = self._pools(layer)
            rows, at = (torch.tensor(numbers, device=key.device) for numbers in zip(*written, strict=True))
            keys[rows] = key[0].transpose(0, 1)[at].to(keys.dtype)
            values[rows] = value[0, ..., : values.shape[-1]].transpose(0, 1)[at].to(values.dtype)

    def _pools(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer of the head, by flat rows; of latents no values."""
        assert self._cache is not None, "the head is bound to a cache before it attends"
        index = self._first + layer
        return self._cache.keys[index].flatten(0, 1), self._cache.values[index].flatten(0, 1)

    def _scales(self, layer: int) -> KVScales:
        assert self._cache is not None, "the head is bound to a cache before it attends"
        return self._cache.scales[self._first + layer]

    def _group(
        self,
        layer: int,
        parts: Sequence[Part],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Tensor,
        values: Tensor,
        scaling: float,
        window: int | None,
        sinks: Tensor | None,
        out: Tensor,
    ) -> None:
        """One padded attention of several sessions; writes ``out[start:stop]`` of each."""
        device, count = query.device, len(parts)
        most = max(part.stop - part.start for part in parts)
        context = max(part.num_rows for part in parts)
        others = [_others(part, layer, key, value) for part in parts]
        extra = max(len(positions) for _, _, positions, _ in others)
        rows = torch.zeros(count, context, dtype=torch.long)
        seen = torch.zeros(count, most, context + extra, dtype=torch.bool)
        q = query.new_zeros(count, most, *query.shape[1:])
        k_extra = key.new_zeros(count, extra, *key.shape[1:])
        v_extra = value.new_zeros(count, extra, *value.shape[1:])
        for index, (part, (more_k, more_v, positions, sees)) in enumerate(zip(parts, others, strict=True)):
            n = part.stop - part.start
            q[index, :n] = query[part.start : part.stop]
            rows[index, : part.num_rows] = _rows(part)
            at = torch.arange(context + extra)
            at[context : context + len(positions)] = torch.tensor(positions, dtype=torch.long)
            own = torch.tensor(part.positions)[:, None]
            visible = (at <= own) | (layer in part.bidirectional)
            if window is not None:
                visible &= at > own - window
            visible[:, : part.first_row] = False
            for hole in part.holes:
                visible[:, hole.start : hole.stop] = False
            visible[:, part.num_rows : context] = False
            visible[:, context : context + len(positions)] &= sees
            visible[:, context + len(positions) :] = False
            seen[index, :n] = visible
            if more_k is not None and more_v is not None:
                k_extra[index, : len(positions)], v_extra[index, : len(positions)] = more_k, more_v
        rows = rows.to(device)
        scales = self._scales(layer)
        k = torch.cat([from_pages(keys[rows], key.dtype, scales.keys), k_extra], 1).transpose(1, 2)
        v = torch.cat([from_pages(values[rows], value.dtype, scales.values), v_extra], 1).transpose(1, 2)
        # Heads that share keys are more rows of them, so that the context is not copied for each.
        kv_heads, groups = key.shape[1], query.shape[1] // key.shape[1]
        q = q.view(count, most, kv_heads, groups, -1).permute(0, 2, 3, 1, 4).flatten(2, 3)
        mask = seen.repeat(1, groups, 1).to(device)[:, None]
        if sinks is not None:  # one key more, of zeros: its score is the mask's
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
            scores = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, float("-inf"))
            own = sinks.to(q.dtype).view(kv_heads, groups).repeat_interleave(most, 1)[None, ..., None]
            mask = torch.cat([scores.expand(-1, kv_heads, -1, -1), own.expand(count, -1, -1, -1)], -1)
        attended = F.scaled_dot_product_attention(q, k, v, mask, scale=scaling)
        attended = attended.view(count, kv_heads, groups, most, -1).permute(0, 3, 1, 2, 4).flatten(2, 3)
        for index, part in enumerate(parts):
            out[part.start : part.stop] = attended[index, : part.stop - part.start]


def _rows(part: Part) -> Tensor:
    """[num_rows] flat rows of the session's pages."""
    pages = torch.tensor(part.pages[: pages_for(part.num_rows)], dtype=torch.long)
    return (pages[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten()[: part.num_rows]


def rows_to_write(part: Part) -> list[tuple[int, int]]:
    """(flat row on the pages, row of the call) of each row that is written."""
    return [
        (flat_rows(part.pages, position, position + 1)[0], at)
        for position, at in zip(part.positions, range(part.start, part.stop), strict=True)
    ]


def _others(
    part: Part, layer: int, key: Tensor, value: Tensor
) -> tuple[Tensor | None, Tensor | None, list[int], Tensor]:
    """For all that a part sees in addition to its pages: keys, values, positions, and bool ``[rows, others]``, which
    row sees which.
    """
    n = part.stop - part.start
    if part.write or part.alone:
        return None, None, [], torch.zeros(n, 0, dtype=torch.bool)
    own = key[part.start : part.stop], value[part.start : part.stop]
    part.made[layer] = own
    held = part.branches.get(layer, Branches())
    among = torch.ones(n, n, dtype=torch.bool) if part.chain else torch.eye(n, dtype=torch.bool)
    if layer not in part.bidirectional:
        among = among.tril()
    before = torch.zeros(n, len(held.nodes), dtype=torch.bool)
    if part.above:
        index = {node: i for i, node in enumerate(held.nodes)}
        for row, nodes in enumerate(part.above):
            before[row, [index[node] for node in nodes if node in index]] = True
    k, v = own
    if held.keys is not None and held.values is not None:
        k, v = torch.cat([held.keys, k]), torch.cat([held.values, v])
    return k, v, [*held.positions, *part.positions], torch.cat([before, among], 1)
