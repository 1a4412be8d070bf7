"""Arguments of the engines of a service (``engine_kwargs``), and where the models are that they run: the fields of
``models.py`` by replica, in the shapes of Ray Serve LLM.
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from paceline.config.base import Strict
from paceline.config.models import ModelSettings, require_one_size
from paceline.embedded import DRAFT_DIR, TARGET_DIR
from paceline.refusals import Fault

EMBEDDED_TARGET, EMBEDDED_DRAFT = "paceline/embedded-target", "paceline/embedded-draft"
"""Model ids of the pair that comes with the package: they stand for its directories on every node."""


class ModelLoadingConfig(Strict):
    """Which model, and from where."""

    model_id: str = Field(min_length=1)
    """The name that clients see."""
    model_source: str | None = Field(default=None, min_length=1)
    """Directory of a checkpoint, or an id that transformers resolves. None: model_id."""
    tokenizer_source: str | None = Field(default=None, min_length=1)
    """The same for its tokenizer. None: where the model is."""

    @property
    def source(self) -> str:
        """Where the checkpoint is."""
        return resolve(self.model_source or self.model_id)

    @property
    def tokenizer(self) -> str:
        """Where the tokenizer is."""
        return self.source if self.tokenizer_source is None else resolve(self.tokenizer_source)


class TargetEngineKwargs(ModelSettings, Strict):
    """How a target replica runs; the fields are those of ModelSettings and PairConfig."""

    max_sessions: int = Field(default=16, ge=1, le=1024)
    """Sessions that are in progress at once on one replica; further ones wait."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest context in tokens. None: what the target was trained for."""
    max_step_tokens: int = Field(default=256, ge=32, le=65536)
    """Tokens of one forward, prefill chunks and proposals together."""
    adaptive: bool = True
    """As many draft tokens per step as pay by measured times, and no draft where none do. False: as many as a request
    allows, always."""
    kv_pages: int | None = Field(default=None, ge=1)
    """KV pages of 64 tokens. None: kv_fraction, else enough for max_sessions at 1024 positions."""
    kv_fraction: float | None = Field(default=None, gt=0, le=1)
    """Instead of kv_pages: the share of the memory left beside weights and workspace that becomes KV pages."""

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        require_one_size(self.kv_pages, self.kv_fraction)
        return self


class DraftEngineKwargs(ModelSettings, Strict):
    """How a draft replica runs; the fields are those of ModelSettings and PairConfig."""

    max_sessions: int | None = Field(default=None, ge=1, le=16384)
    """Sessions that the KV pages are sized for; one draft may serve several targets. None: as many as a target."""
    tree_budget: int = Field(default=256, ge=1, le=4096)
    """Nodes kept per session beyond the context."""
    tree_step_tokens: int | None = Field(default=None, ge=1, le=1024)
    """Tree nodes in one forward, all sessions together. None: as many as cost little more than one, measured."""
    fan_out: int = Field(default=6, ge=1, le=32)
    """F, alternative next tokens prepared at a position."""
    draft_top_m: int = Field(default=256, ge=1, le=65536)
    """Candidates of the distribution that are ranked."""


class NgramEngineKwargs(Strict):
    """How an n-gram replica runs; the fields are those of NgramConfig and PairConfig."""

    min_match: int = Field(default=1, ge=1, le=16)
    """The shortest suffix that is looked up, in tokens."""
    max_match: int = Field(default=4, ge=1, le=16)
    """The longest suffix that is looked up, in tokens; longer ones are tried first."""
    tree_budget: int = Field(default=256, ge=1, le=4096)
    """Nodes kept per session beyond the context."""
    tree_step_tokens: int | None = Field(default=None, ge=1, le=1024)
    """Tree nodes in one step, all sessions together. None: 64."""
    fan_out: int = Field(default=6, ge=1, le=32)
    """F, alternative next tokens prepared at a position."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_match > self.max_match:
            raise Fault("min_match", f"is {self.min_match}: it must be at most max_match, which is {self.max_match}")
        return self


def resolve(name: str) -> str:
    """A model id as a place: the embedded pair's directories, or the name itself."""
    return {EMBEDDED_TARGET: str(TARGET_DIR), EMBEDDED_DRAFT: str(DRAFT_DIR)}.get(name, name)
