"""A target and at most one draft on one machine, as ``paceline.local`` wires them."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from paceline.config.base import Strict
from paceline.config.devices import preferred_gpus
from paceline.config.engines import Growing
from paceline.config.heads import POOL
from paceline.config.methods.model import DraftOptions
from paceline.config.options import DraftSetup, TargetSetup, require_placement
from paceline.config.targets import TargetOptions
from paceline.errors.refusals import Fault


class TargetModel(TargetOptions):
    """A target, and how it runs."""

    path: str = Field(min_length=1)
    """Directory of a checkpoint, or an id that transformers resolves (cache, then hub)."""


class DraftModel(DraftOptions):
    """A smaller model with the target's tokenizer, and how it runs."""

    path: str = Field(min_length=1)
    """Directory of a checkpoint, or an id that transformers resolves (cache, then hub)."""


if TYPE_CHECKING:
    ModellessOptions = Growing
else:
    ModellessOptions = reduce(or_, (entry.options for entry in POOL.values() if entry.options is not DraftOptions))
"""Options of a drafter that is not a draft model alone."""


class LocalConfig(Strict):
    """A pair on one machine."""

    target: TargetModel
    draft: DraftModel | ModellessOptions | None = None
    """None: plain decoding only."""
    generation_config: Literal["auto", "none"] = "auto"
    """Source of the sampling parameters that a request leaves out. ``auto``: the target's generation_config.json,
    if it has them. ``none``: the documented defaults."""
    target_timeout_s: float = Field(default=30.0, gt=0)
    """A target whose step takes longer counts as hung until the step ends: its requests fail, new ones are refused."""
    draft_timeout_s: float = Field(default=10.0, gt=0)
    """A draft whose step takes longer counts as dead, and is started again."""
    worker: Literal["process", "thread"] = "process"
    """The kind of worker that runs an engine. ``thread``: both share one interpreter lock, for debugging and tests."""
    pin_cores: bool = True
    """Give each engine a core of its own where there are at least two."""

    @model_validator(mode="after")
    def _hints_reach_a_draft(self) -> Self:
        if self.target.hints is not None and self.draft is None:
            raise Fault("target.hints", "is set while draft is null: hints need a draft")
        return self

    @model_validator(mode="after")
    def _draft_has_a_place(self) -> Self:
        require_placement(self.target, self.draft, "draft.placement")
        return self

    def target_setup(self) -> TargetSetup:
        """The slice that the target engine is built from."""
        return TargetSetup.with_draft(self.target.path, self.target, self.draft, getattr(self.draft, "path", None))

    def draft_setup(self) -> DraftSetup | None:
        """The slice that the draft engine is built from. None: there is no draft."""
        if self.draft is None:
            return None
        setup = DraftSetup.for_target(self.target_setup(), getattr(self.draft, "path", None), self.draft)
        gpus = preferred_gpus(self.target.device, self.target.tensor_parallel_size)
        return replace(setup, target_gpus=gpus) if setup.runs_model else setup
