"""MTP modules in the files of a target, by the names of its weights. Free of torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.checkpoint.compressed import num_streams
from paceline.checkpoint.folder import read_json, text_config
from paceline.checkpoint.gguf.described import gguf_weights

MTP_LAYER = re.compile(r"(?:model\.)?(?:language_model\.)?layers\.(\d+)\.(.+)")
"""Names of weights of a layer: MTP modules may be layers after the last one."""


def mtp_parts(config: Mapping[str, Any]) -> list[str]:
    """Kinds of the layers of one MTP module of Nemotron-H, such as attention and experts; []: a module is one layer."""
    text = text_config(config)
    if text.get("model_type") != "nemotron_h":
        return []
    kinds = text.get("mtp_layers_block_type") or text.get("mtp_hybrid_override_pattern") or ("full_attention", "moe")
    return [{"*": "full_attention", "attention": "full_attention", "E": "moe"}.get(kind, kind) for kind in kinds]


def mtp_modules(names: Iterable[str], config: Mapping[str, Any], num_layers: int) -> set[int]:
    """The MTP modules that names in a target's files belong to, counted from 0."""
    found, num_parts = set(), len(mtp_parts(config)) or 1
    if num_streams(config) > 1:  # DeepSeek V4; DSpark's blocks have these names, but no projection of embeddings
        return {int(match[1]) for name in names if (match := re.fullmatch(r"mtp\.(\d+)\.e_proj\.weight", name))}
    for name in names:
        if name.startswith("mtp."):
            layer = re.match(r"mtp\.layers\.(\d+)\.", name)
            found.add(int(layer[1]) // num_parts if layer else 0)
        elif (layer := MTP_LAYER.fullmatch(name)) and int(layer[1]) >= num_layers:
            found.add(int(layer[1]) - num_layers)
    return found


def weight_names(folder: Path) -> set[str]:
    """Names of the weights of safetensors or GGUF files; none if there are no such files, or they cannot be read."""
    if (gguf := gguf_weights(folder)) is not None:
        return set(gguf)
    index = read_json(folder, "model.safetensors.index.json").get("weight_map")
    if isinstance(index, dict):
        return set(index)
    try:
        with (folder / "model.safetensors").open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            return set(json.loads(file.read(min(size, 1 << 28)))) - {"__metadata__"}
    except (OSError, ValueError):
        return set()
