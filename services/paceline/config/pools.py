"""The three pools: targets, drafts and routers. Each joins a model, its engine's arguments and its deployment."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from paceline.config.base import Strict
from paceline.config.deployments import RouterDeployment, TargetDeployment
from paceline.config.heads import POOL
from paceline.config.loading import EMBEDDED_TARGET, ModelLoadingConfig
from paceline.config.replicas import Drafts, ModelReplicas
from paceline.config.targets import TargetOptions
from paceline.types import RequestLimits

_ROUTER_CPUS = 0.2
"""Cores that Ray reserves for a router."""


class TargetConfig(ModelReplicas):
    """The pool of targets."""

    model_loading_config: ModelLoadingConfig = ModelLoadingConfig(model_id=EMBEDDED_TARGET)
    engine_kwargs: TargetOptions = TargetOptions()
    deployment_config: TargetDeployment = TargetDeployment()

    @property
    def _engine(self) -> TargetOptions:
        return self.engine_kwargs


def _kind(value: Any) -> str | None:
    """``model`` by default."""
    if isinstance(value, dict):
        return str(value.get("kind", "model"))
    return getattr(value, "kind", None)


if TYPE_CHECKING:
    DraftConfig = Drafts
else:  # of each method
    _EACH = [Annotated[entry.config, Tag(entry.kind)] for entry in POOL.values()]
    DraftConfig = Annotated[reduce(or_, _EACH), Discriminator(_kind)]


class RouterConfig(Strict):
    """The routers between clients and both pools."""

    max_queued_requests: int = Field(default=64, ge=0)
    """Sequences that one router lets wait for a target; further ones are refused with RESOURCE_EXHAUSTED. When that
    many wait, each of k API keys may still have a k-th of them waiting."""
    recovery_timeout_s: float = Field(default=30.0, gt=0)
    """Longest time without any target, after which orphaned sessions and queued requests end with UNAVAILABLE. While a
    target is up, only full, they wait for room."""
    cold_start_timeout_s: float = Field(default=900.0, gt=0)
    """Longest time that queued requests wait for the first target of a pool that is scaled to zero (``min_replicas``
    0), instead of ``recovery_timeout_s``: a machine, an image and a model."""
    draft_timeout_s: float = Field(default=1.0, gt=0)
    """Silence after which a draft counts as hung: sessions go on by plain decoding."""
    target_timeout_s: float = Field(default=5.0, gt=0)
    """Silence after which a target counts as hung: sessions move to another."""
    page_move_timeout_s: float = Field(default=30.0, ge=0, le=3600)
    """Longest time that a session which leaves a draining target waits for its KV pages from there. Missing pages are
    then computed again; 0: all of them."""
    chunk_window_s: float = Field(default=0.005, ge=0, le=1)
    """Longest time that tokens wait for later ones of their stream, so that both leave in one chunk. Only streams with
    more than two rounds in this time wait, and never for the first or the last tokens. 0: each round is a chunk of its
    own."""
    request_timeout_s: float | None = Field(default=None, gt=0)
    """Longest time of a request, waiting included; it ends with DEADLINE_EXCEEDED. None: as the client says."""
    generation_config: Literal["auto", "none"] = "auto"
    """Source of the sampling parameters that a request leaves out. ``auto``: temperature, ``top_k``, ``top_p``,
    ``min_p``, ``repetition_penalty`` and ``max_new_tokens`` of the target's generation_config.json, if it has them.
    ``none``: the documented defaults."""
    limits: RequestLimits = RequestLimits()
    deployment_config: RouterDeployment = RouterDeployment()

    def deployment_options(self) -> dict[str, Any]:
        """Keyword arguments of ``serve.deployment``."""
        return self.deployment_config.options(_ROUTER_CPUS)
