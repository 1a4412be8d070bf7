"""Scales of keys and values that a checkpoint brings for a KV cache in FP8. Free of torch.

A number is stored as ``number / scale``, rounded to FP8, and read as the stored value times the scale. Checkpoints
calibrated for vLLM, such as those of compressed-tensors and NVIDIA's Model Optimizer, store two scales per layer: one
for keys and one for values. They are found in the attention or in its projections.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Collection, Mapping
from typing import NamedTuple

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.folder import local_folder, text_config
from paceline.checkpoint.latent import latent_values
from paceline.checkpoint.size import Entry, headers
from paceline.errors import ConfigError

_NAME = re.compile(
    r"(?:^|\.)layers\.(?P<layer>\d+)\.\w+\.(?:attn\.)?"
    r"(?:(?:(?:[kv]|qkv)_proj\.)?(?P<of>[kv]|kv)_scale|(?P<projection>[kv])_proj\.output_scale)$"
)
"""Name of a scale: its layer, and whether it is for keys (``k``), values (``v``) or both."""
_OTHERS = ("mtp.", "vision", "visual", "audio", "encoder")
"""Parts of the names of tensors that belong to other layers than the model's own."""
_STORED = {"F64": "<d", "F32": "<f", "F16": "<e", "BF16": "<f"}
"""How a number is stored, as ``struct`` names it; of bfloat16 with two bytes of zeros before it."""


class KVScales(NamedTuple):
    """The scales of a layer's keys and of its values."""

    keys: float
    values: float


UNSCALED = KVScales(1.0, 1.0)


def kv_scales(checkpoint: Checkpoint) -> dict[int, KVScales]:
    """The scales of a checkpoint that is on this machine, by layer; a layer that is missing has scale 1.

    Raises:
        ConfigError: a scale is not one positive number, or another one under another name, or a weight file cannot be
            read.
    """
    folder = checkpoint.folder or local_folder(checkpoint.path)
    if folder is None or why_no_kv_scales(checkpoint) is not None:
        return {}
    found: dict[tuple[int, str], tuple[str, float]] = {}
    num_layers = text_config(checkpoint.config).get("num_hidden_layers") or math.inf
    try:
        for path, entries in headers(folder).items():
            names = _names(entries)
            with path.open("rb") as file:
                for name, (layer, of) in names.items():
                    if layer < num_layers:  # layers of multi-token prediction come after the model's
                        file.seek(entries[name].first_byte)
                        scale = _number(entries[name], file.read(entries[name].num_bytes), name, checkpoint.path)
                        for part in of:
                            known = found.setdefault((layer, part), (name, scale))
                            _require_equal(known, (name, scale), checkpoint.path)
    except OSError as error:
        raise ConfigError(f"{error.filename or str(folder)!r} cannot be read: {error.strerror or error}") from error
    scales: dict[int, KVScales] = {}
    for (layer, part), (_, scale) in found.items():
        scales[layer] = scales.get(layer, UNSCALED)._replace(**{part: scale})
    return scales


def why_no_kv_scales(checkpoint: Checkpoint) -> str | None:
    """Says why scales of a checkpoint are not used, as a clause; None: those that it has are."""
    config, quantization = checkpoint.config, checkpoint.quantization or {}
    if latent_values(text_config(config), 1) is not None:
        return "its layers keep latents, which no scale was measured of"
    scheme = quantization.get("kv_cache_scheme")
    if isinstance(scheme, Mapping) and (scheme.get("type", "float"), scheme.get("num_bits", 8)) != ("float", 8):
        return f"those of its kv_cache_scheme are for {scheme.get('type')} of {scheme.get('num_bits')} bits"
    algorithm = quantization.get("kv_cache_quant_algo") or "FP8"
    return None if algorithm == "FP8" else f"those of its kv_cache_quant_algo are for {algorithm}"


def described(checkpoint: Checkpoint) -> str:
    """Says which scales a KV cache in FP8 has, as a clause. Raises as ``kv_scales``."""
    if (reason := why_no_kv_scales(checkpoint)) is not None:
        return f"keys and values in FP8 have scale 1: {reason}"
    if not (found := kv_scales(checkpoint)):
        if not checkpoint.has_weights:
            return "keys and values in FP8 have the scales that the weights bring, else 1: they are not here"
        return "keys and values in FP8 have scale 1: the checkpoint brings none"
    every = [scale for scales in found.values() for scale in scales]
    of = f"{len(found)} layers" if len(found) > 1 else "1 layer"
    return f"keys and values in FP8 have the checkpoint's scales in {of}: {min(every):.3g} to {max(every):.3g}"


def _names(entries: Collection[str]) -> dict[str, tuple[int, tuple[str, ...]]]:
    """The scales among tensors: name -> (layer, field of ``KVScales``)."""
    found = {}
    for name in entries:
        if (match := _NAME.search(name)) is not None and not any(part in name for part in _OTHERS):
            of = match["of"] or match["projection"]
            parts = tuple({"k": "keys", "v": "values"}[letter] for letter in of)
            found[name] = int(match["layer"]), parts
    return found


def _number(entry: Entry, stored: bytes, name: str, path: str) -> float:
    """Raises ConfigError if a tensor is not one positive number."""
    if math.prod(entry.shape) != 1 or entry.dtype not in _STORED:
        kind = f"{entry.dtype} of shape {list(entry.shape)}"
        raise ConfigError(
            f"model {path!r} stores {name} as {kind}, and one scale of a layer is read: set kv_cache_dtype to 'auto'"
        )
    (scale,) = struct.unpack(_STORED[entry.dtype], bytes(2 * (entry.dtype == "BF16")) + stored)
    if not 0 < scale < math.inf:
        raise ConfigError(f"model {path!r} stores {name} as {scale}: positive numbers are allowed")
    return float(scale)


def _require_equal(known: tuple[str, float], other: tuple[str, float], path: str) -> None:
    """Raises ConfigError if a scale has another number under another name."""
    if known[1] != other[1]:
        stored = " and ".join(f"{name} as {scale}" for name, scale in sorted((known, other)))
        raise ConfigError(
            f"model {path!r} stores {stored}, and one scale of a layer is read: set kv_cache_dtype to 'auto'"
        )
