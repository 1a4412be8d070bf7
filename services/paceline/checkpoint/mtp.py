"""MTP modules in the files of a target, by the names of its weights. Free of torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from paceline.checkpoint.folder import read_json
from paceline.checkpoint.gguf.described import gguf_weights

MTP_LAYER = re.compile(r"(?:model\.)?(?:language_model\.)?layers\.(\d+)\.(.+)")
"""Names of weights of a layer: MTP modules may be layers after the last one."""


def mtp_modules(names: Iterable[str], num_layers: int) -> set[int]:
    """The MTP modules that names in a target's files belong to, counted from 0."""
    found = set()
    for name in names:
        if name.startswith("mtp."):
            layer = re.match(r"mtp\.layers\.(\d+)\.", name)
            found.add(int(layer[1]) if layer else 0)
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
