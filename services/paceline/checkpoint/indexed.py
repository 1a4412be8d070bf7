"""The indexers of a model, from its configuration: their memory, and the options that they exclude. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.checkpoint.compressed import compressors
from paceline.checkpoint.folder import text_config

INDEXED = "indexed_attention"
"""The name of layers with indexers in configurations."""
DOTS = {"dots3_note", "dots3_note_text"}
_FULL_EACH = {"axk2": 1, "deepseek_v32": 1, "glm_moe_dsa": 1, "hy_v4": 4} | dict.fromkeys(DOTS, 1)
"""Model types whose indexers work. From the second layer on, each n-th layer has one, unless the configuration says
otherwise; the layers between use its choice."""
_LLAMA4 = {"llama4", "llama4_text"}


def num_indexers(config: Mapping[str, Any]) -> int:
    """Layers of a configuration with an indexer of their own; 0 for model types whose indexers do not work."""
    text = text_config(config)
    kind, num_layers = str(text.get("model_type")), int(text.get("num_hidden_layers") or 0)
    if kind not in _FULL_EACH:
        return 0
    if kinds := text.get("indexer_types") or text.get("index_topk_pattern"):
        return sum(each in ("full", "F") for each in kinds)
    if kind in DOTS:
        return len(indexed_layers(text))
    each, offset = max(1, text.get("index_topk_freq") or _FULL_EACH[kind]), text.get("index_skip_topk_offset", 2)
    return sum(max(i - offset + 1, 0) % each == 0 for i in range(num_layers))


def indexed_layers(text: Mapping[str, Any]) -> list[int]:
    """Indices of the layers of dots3 that have an indexer; the others have a window, and latents of another size."""
    num_layers = int(text.get("num_hidden_layers") or 0)
    kinds = text.get("layer_types") or [INDEXED if i < 2 or i % 4 == 1 else "" for i in range(num_layers)]
    return [i for i, each in enumerate(kinds) if each in (INDEXED, "full_attention")]


def index_values(config: Mapping[str, Any]) -> int:
    """Numbers of index keys that all indexers keep per token."""
    return num_indexers(config) * int(text_config(config).get("index_head_dim") or 128)


def why_eager(config: Mapping[str, Any], *, demanded: bool = False) -> str | None:
    """Says why a model of a configuration is not compiled on the CPU, as a clause; None: nothing in it says so.

    ``demanded``: compile is true, not auto.
    """
    if compressors(config) and not demanded:
        return "layers with compressors take about a minute each to compile, and are where compile is true"
    if num_indexers(config):
        return "layers with indexers are not compiled"
    # torch.export does not find that their shapes hold for any number of tokens.
    return "Llama 4's layers are not compiled on the CPU" if text_config(config).get("model_type") in _LLAMA4 else None
