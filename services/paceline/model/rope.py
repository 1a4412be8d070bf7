"""Rotary embeddings whose angles are a function of the position alone, for all sessions of a service.

transformers chooses the frequencies of two kinds of rotary embeddings by the longest sequence of a call. Of
``longrope`` one of its two sets is chosen for good here. ``dynamic`` has one set up to the context that the model was
trained for, which is the longest that is served.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from paceline.checkpoint.rope import LONGROPE, factors_in_use, longrope_limit, longrope_parts
from paceline.errors import ConfigError

log = logging.getLogger(__name__)


def settle_rope(model: PreTrainedModel, max_model_len: int, name: str) -> None:
    """Makes all positions of a model's contexts use the angles of one set of factors. A second call changes nothing.

    The configuration is changed, too, so that models built from it have the same angles.

    Raises:
        ConfigError: the angles of a position would still depend on the longest sequence of a call.
    """
    config = model.config.get_text_config()
    limit = longrope_limit(config.to_dict())
    modules = [*_rotary_modules(model)]
    if not modules:  # code of a checkpoint's own may choose without saying so
        rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
        if (kind := str(rope.get("rope_type", rope.get("type")))) in ("dynamic", LONGROPE):
            raise _refusal(name, kind)
    for module, kind in modules:
        if module.rope_type == "dynamic" and max_model_len <= getattr(module, "original_max_seq_len", 0):
            module.rope_type = module.config.rope_parameters["rope_type"] = "default"
        elif "dynamic" in kind or (LONGROPE in kind and (limit is None or kind != LONGROPE)):
            raise _refusal(name, kind)
        if kind == LONGROPE:
            assert limit is not None
            settle_factors(module, long=max_model_len > limit)
            if _depends_on_others(module, limit):
                raise _refusal(name, kind)
            log.info("%s has %s", name, factors_in_use(config.to_dict(), max_model_len))


def _refusal(name: str, kind: str) -> ConfigError:
    return ConfigError(
        f"{name} has rope_type {kind!r}, whose angles depend on the longest sequence of the batch: its output would "
        "depend on its neighbours"
    )


def _rotary_modules(model: PreTrainedModel) -> Iterator[tuple[Any, str]]:
    """The rotary embeddings of a model and the kinds that their forwards go by; several kinds are one text."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict):
            yield module, ", ".join(sorted({*map(str, kind.values())}))
        elif isinstance(kind, str):
            yield module, kind


def settle_factors(module: Any, *, long: bool) -> None:
    """Leaves a rotary embedding one set of factors and the forward that does not choose."""
    for part in longrope_parts(module.config.rope_parameters):
        chosen = part["long_factor" if long else "short_factor"]
        part["long_factor"] = part["short_factor"] = chosen
    frequencies, _ = ROPE_INIT_FUNCTIONS[LONGROPE](module.config, module.inv_freq.device)
    module.inv_freq.copy_(frequencies)
    module.original_inv_freq.copy_(frequencies)
    module.rope_type = "default"


def _depends_on_others(module: nn.Module, limit: int) -> bool:
    """True if the angles of position 1 are others in a call that has a position beyond ``limit``, too; of a model
    without values this is not known."""
    if next(module.buffers()).is_meta:
        return False
    near, both = torch.tensor([[1]]), torch.tensor([[1, limit + 1]])
    device = next(module.buffers()).device
    x = torch.zeros(1, 1, 1, device=device)
    alone, mixed = (module(x, positions.to(device)) for positions in (near, both))
    return any(not torch.equal(a[:, :1], b[:, :1]) for a, b in zip(alone, mixed, strict=True))
