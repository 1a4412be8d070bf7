"""The two sets of rotary factors of LongRoPE (Ding et al. 2024, arXiv:2402.13753), and which of them a service uses.

transformers changes from the short factors to the long ones when a sequence grows longer than the context that the
model was trained for first. Keys that were written before then have other angles, and a batch has one set. A service
uses one set for all sessions: the long one if a session may exceed the original context.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.checkpoint.folder import text_config

LONGROPE = "longrope"
_NAMES = (LONGROPE, "su")
"""``su`` is what the first files of Phi-3 say."""


def longrope_limit(config: Mapping[str, Any]) -> int | None:
    """The longest context in tokens of the short factors; None: the model has one set of factors, or none."""
    text = text_config(config)
    for part in longrope_parts(text.get("rope_parameters") or text.get("rope_scaling")):
        names = ("original_max_position_embeddings", "max_position_embeddings")
        for value in (text.get(names[0]), part.get(names[0]), text.get(names[1])):  # as transformers does
            if isinstance(value, int):
                return value
    return None


def longrope_parts(rope: Any) -> Iterator[Any]:
    """The settings of rotary embeddings, of all layers or by their types, that have two sets of factors."""
    if isinstance(rope, Mapping):
        for part in (rope, *(one for one in rope.values() if isinstance(one, Mapping))):
            if part.get("rope_type", part.get("type")) in _NAMES:
                yield part


def factors_in_use(config: Mapping[str, Any], max_model_len: int) -> str | None:
    """A clause that names the set of factors for contexts of up to ``max_model_len`` tokens; None: there is one set."""
    if (limit := longrope_limit(config)) is None:
        return None
    side, than = ("long", "more than") if max_model_len > limit else ("short", "at most")
    return f"the {side} rotary factors, as max_model_len is {max_model_len}, {than} {limit}"
