"""The compressed attention of DeepSeek V4, from its configuration: what its layers keep per token. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from paceline.checkpoint.folder import text_config
from paceline.types import PAGE_SIZE

_FAMILY = "deepseek_v4"
SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
"""The names of its layers in configurations: a window alone, and two ways to see what lies before it."""
_RATES = {SPARSE: ("compress_rate_csa", 4), HEAVY: ("compress_rate_hca", 128)}
"""Older names of the tokens of an entry, and their usual numbers."""


class Entries(NamedTuple):
    """The entries of one compressor, each of which stands for ``rate`` tokens.

    An entry lies on the page of its last token. What it is made of is kept for each token, too.
    """

    rate: int
    dim: int
    """Numbers of an entry."""
    overlaps: bool
    """True: an entry is made of the tokens of the entry before it, too, which have other keys for that."""

    @property
    def width(self) -> int:
        """Tokens that an entry is made of."""
        return 2 * self.rate if self.overlaps else self.rate

    @property
    def row_values(self) -> int:
        """Numbers kept for a token: its part of each entry that holds it, and the same number of gates."""
        return (4 if self.overlaps else 2) * self.dim

    @property
    def slots(self) -> int:
        """Entries that a page has room for."""
        return max(1, PAGE_SIZE // self.rate)

    @property
    def entry_values(self) -> int:
        """Numbers per token that make this room."""
        return -(-self.slots * self.dim // PAGE_SIZE)


def compressors(config: Mapping[str, Any]) -> list[Entries]:
    """The entries of each compressor of a configuration, by layer, an indexer's last; other models have none."""
    text = text_config(config)
    if text.get("model_type") != _FAMILY:
        return []
    dim, index_dim = int(text.get("head_dim") or 512), int(text.get("index_head_dim") or 128)
    found = []
    for kind in _layer_types(text):
        if kind != SLIDING:
            found.append(Entries(_rate(text, kind), dim, overlaps=kind == SPARSE))
        if kind == SPARSE:
            found.append(Entries(_rate(text, kind), index_dim, overlaps=True))
    return found


def compressed_values(config: Mapping[str, Any]) -> int | None:
    """Numbers that all compressors of a configuration keep per token; None: of another model."""
    if text_config(config).get("model_type") != _FAMILY:
        return None
    return sum(each.row_values + each.entry_values for each in compressors(config))


def num_streams(config: Mapping[str, Any]) -> int:
    """States of a token between two layers: 1, but of this family (``hc_mult``)."""
    text = text_config(config)
    return int(text.get("hc_mult") or 4) if text.get("model_type") == _FAMILY else 1


def num_shared(config: Mapping[str, Any]) -> int:
    """Numbers of the weights that ranks share among them: experts and tables. Attention is whole on each."""
    text = text_config(config)
    hidden, inner = int(text.get("hidden_size") or 4096), int(text.get("moe_intermediate_size") or 2048)
    experts = int(text.get("n_routed_experts") or 256) + int(text.get("n_shared_experts") or 1)
    tables = (1 if config.get("tie_word_embeddings") else 2) * int(text.get("vocab_size") or 129280) * hidden
    return int(text.get("num_hidden_layers") or 43) * experts * 3 * hidden * inner + tables


def _layer_types(text: Mapping[str, Any]) -> list[str]:
    """Of published configurations by the tokens of an entry, 0 of a layer without; saved ones have names."""
    num = int(text.get("num_hidden_layers") or 0)
    if kinds := text.get("layer_types"):
        return [*kinds][:num]
    if rates := text.get("compress_ratios"):
        return [SPARSE if rate == 4 else HEAVY if rate else SLIDING for rate in rates][:num]
    return [SPARSE if i > 1 and i % 2 else HEAVY for i in range(num)]


def _rate(text: Mapping[str, Any], kind: str) -> int:
    name, usual = _RATES[kind]
    return int(text.get(name) or (text.get("compress_rates") or {}).get(kind) or usual)
