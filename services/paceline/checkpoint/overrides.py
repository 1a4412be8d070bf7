"""Other rotary embeddings than a checkpoint's own: a directory of links to its files, with a changed config.json."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.checkpoint.folder import local_folder
from paceline.checkpoint.made_once import made_once
from paceline.errors import ConfigError

_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Kinds of rotary embeddings, and the numbers that each needs."""
_KEPT = ("rope_theta", "partial_rotary_factor")
"""Parameters that another kind keeps."""


def with_rope(source: str, rope: Mapping[str, Any], max_position_embeddings: int | None, folder: Path) -> Path:
    """A directory below ``folder`` with a checkpoint's files, whose config.json has other rotary embeddings.

    ``rope``: replaces the checkpoint's parameters; ``rope_theta`` stays unless ``rope`` names it.

    Raises:
        ConfigError: the checkpoint is not on this machine, or its embeddings cannot be replaced so.
    """
    original = local_folder(source)
    if original is None:
        raise ConfigError(
            f"{source!r} is not on this machine: fetch it by `hf download {source}` before its rope changes"
        )
    config = json.loads((original / "config.json").read_text(encoding="utf-8"))
    part = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    if rope:
        _replace(part, rope)
    if max_position_embeddings is not None:
        part["max_position_embeddings"] = max_position_embeddings
    text = json.dumps(config, indent=2)
    digest = hashlib.blake2b(f"{original.resolve()}\n{text}".encode(), digest_size=8).hexdigest()
    made = folder / digest / original.resolve().name

    def write(draft: Path) -> None:
        (inner := draft / made.name).mkdir()
        for one in original.resolve().iterdir():
            if one.name != "config.json":
                (inner / one.name).symlink_to(one)
        (inner / "config.json").write_text(text, encoding="utf-8")

    made_once(made.parent, write)
    return made


def _replace(config: dict[str, Any], rope: Mapping[str, Any]) -> None:
    old = config.get("rope_parameters") or {}
    if any(isinstance(one, dict) for one in old.values()):
        raise ConfigError("this model has rotary embeddings for each type of layer: write them into its config.json")
    given = {("rope_type" if key == "type" else key): value for key, value in rope.items()}
    kept = {key: value for key in _KEPT if (value := old.get(key, config.get(key))) is not None}
    kind = given.get("rope_type")
    if kind is None:  # single numbers of the kind that it has
        kept = {**(config.get("rope_scaling") or {}), **old, **kept}
    elif kind not in _NEEDED:
        raise ConfigError(f"rope_type is {kind!r}: {', '.join(_NEEDED)} are allowed")
    config.pop("rope_scaling", None)
    config["rope_parameters"] = found = {**kept, **given}
    if kind == "yarn" and "max_position_embeddings" in config:
        found.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    for key in _NEEDED.get(str(kind), ()):
        value = found.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ConfigError(f"{key} is {value!r} with rope_type {kind!r}: a number above 0 is needed")
