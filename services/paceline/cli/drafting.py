"""The way of drafting that a command takes where none is named: what the target's own files bring, else suffixes."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.mtp import mtp_modules, weight_names
from paceline.checkpoint.size import size_of
from paceline.config import EMBEDDED_TARGET, HeadOptions
from paceline.config.loading import resolve

_OTHERS = "name a draft model with --draft for more"


@dataclass(frozen=True, slots=True)
class Chosen:
    """Heads of a target that has no draft, and the line that says how it drafts."""

    heads: list[HeadOptions]
    line: str


def is_embedded(target: str | None) -> bool:
    """True for the embedded target, which has a draft of its own."""
    return target is None or resolve(target) == resolve(EMBEDDED_TARGET)


def choose(target: str) -> Chosen:
    """The best way at hand to draft for a target. Raises ConfigError for a path that holds no model."""
    checkpoint = Checkpoint.find(target)
    num = 0
    if checkpoint is not None and checkpoint.folder is not None:
        num_layers = size_of(checkpoint.config, 0, 1).num_layers
        num = len(mtp_modules(weight_names(checkpoint.folder), num_layers))
    if num:
        modules = "MTP module" if num == 1 else "MTP modules"
        return Chosen([], f"drafting by the {num} {modules} in the model's files, and by prompt lookup; {_OTHERS}")
    return Chosen([HeadOptions(method="suffix")], f"drafting by suffix decoding and prompt lookup; {_OTHERS}")
