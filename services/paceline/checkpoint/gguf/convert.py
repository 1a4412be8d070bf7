"""GGUF files as a directory of transformers, in bfloat16."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.checkpoint.gguf.described import INDEX, gguf_weights
from paceline.checkpoint.gguf.weights import GgufWeights

_SHARD_BYTES = 4 << 30
_ITEM_BYTES = 2


def convert(described: Path, folder: Path, progress: Callable[[int, int], None]) -> int:
    """Writes the model that a directory of ``described.py`` describes to a new ``folder``. Returns its bytes.

    One file of weights is in memory at a time. ``progress`` is called with the bytes that are written and all bytes.
    """
    import torch
    from safetensors.torch import save_file

    weights = gguf_weights(described)
    assert weights is not None
    shards = [*_shards(weights)]
    total = sum(_ITEM_BYTES * math.prod(shape) for shape in weights.shapes.values())
    folder.mkdir(parents=True, exist_ok=True)
    done, places = 0, {}
    for index, names in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{index:05}-of-{len(shards):05}.safetensors"
        tensors = {name: weights.read(name, torch.bfloat16).to(torch.bfloat16) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(names, file))
        done += sum(tensor.nbytes for tensor in tensors.values())
        progress(done, total)
    if len(shards) > 1:
        index_content = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index_content, indent=2), encoding="utf-8")
    # The configuration is last: a directory without one is no checkpoint.
    shutil.copytree(described, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(INDEX))
    return total


def _shards(weights: GgufWeights) -> Iterator[list[str]]:
    """Names of the weights of each file."""
    names: list[str] = []
    size = 0
    for name, shape in weights.shapes.items():
        own = _ITEM_BYTES * math.prod(shape)
        if names and size + own > _SHARD_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += own
    yield names
