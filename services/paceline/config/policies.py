"""Policies that decide the sizes of the pools: one of ours for each pool, or a function of Ray Serve or of the
user's. The decisions themselves are in ``paceline.fleet``.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from paceline.config.base import Strict
from paceline.errors.refusals import Fault


class PolicyFunction(Strict):
    """A policy of Ray Serve or of the user's, as Serve takes it."""

    policy_function: str = Field(min_length=1)
    """``module:function`` or ``module.function``; every node has to be able to import it."""
    policy_kwargs: dict[str, Any] = Field(default={})


class ScalingPolicy(Strict):
    """The settings that the policies of all pools share; each pool adds its own signals (``docs/scaling.md``)."""

    window_s: float = Field(default=5.0, ge=2, le=600)
    """Seconds over which shares and percentiles are taken."""
    hysteresis: float = Field(default=0.2, ge=0.05, le=0.9)
    """A replica is removed when the others would stay below their goal by this share. Noise of a signal up to
    hysteresis / (2 - hysteresis) of its mean does not make the number go up and down."""
    max_step_up: float = Field(default=2.0, gt=1)
    """Maximum growth factor of the pool in one decision; it may always grow by one replica."""
    max_step_down: float = Field(default=0.5, gt=0, lt=1)
    """The pool shrinks to at least this share of its size in one decision, and by one replica at least."""


class TargetPolicy(ScalingPolicy):
    """Sizes the targets by sessions, KV memory and latency goals."""

    occupancy: float = Field(default=0.8, gt=0, le=1)
    """The share of ``max_sessions`` of a target that is full enough; waiting requests count as sessions."""
    kv_usage: float = Field(default=0.85, gt=0, le=1)
    """The share of a target's KV pages that is full enough."""
    ttft_s: float | None = Field(default=None, gt=0)
    """Seconds within which nine of ten first tokens should come. None: no goal."""
    itl_s: float | None = Field(default=None, gt=0)
    """Seconds within which nine of ten further rounds of a session should come (inter-token latency; a round brings
    one token or more). None: no goal."""
    queue_drain_s: float = Field(default=300.0, ge=1, le=86400)
    """Seconds within which waiting requests should get a place. A smaller value asks for more targets."""
    burst_window_s: float | Literal["auto"] | None = "auto"
    """Seconds, 1 to 86400, within which bursts shorter than ``upscale_delay_s`` count together. If requests waited for
    that delay in total, in at least two bursts, the pool is sized for the load of these moments. ``auto``: twice
    ``downscale_delay_s``. None: each burst counts by itself."""

    @model_validator(mode="after")
    def _window(self) -> Self:
        if isinstance(self.burst_window_s, float) and not 1 <= self.burst_window_s <= 86400:
            raise Fault("burst_window_s", f"is {self.burst_window_s:g}: 1 to 86400, auto or null are allowed")
        return self


class DraftPolicy(ScalingPolicy):
    """Sizes the draft pool by the time in tree steps, late misses, and the recommendation of the model of time."""

    utilization: float = Field(default=0.75, gt=0, le=1)
    """The share of its time that a draft spends inside tree steps when it is busy enough."""
    late: float = Field(default=0.05, ge=0, lt=1)
    """The share of rounds whose continuation may come too late; while it is less, busy drafts keep up."""
    drafts_per_target: float | Literal["auto"] | None = "auto"
    """The most drafts for each target. ``auto``: by the model of time, from measured times."""
    probe_interval_s: float = Field(default=300.0, gt=0)
    """Speculation without gain is tried again after this time, then after 2, 4 and 8 times as long."""
    probe_s: float = Field(default=90.0, gt=0)
    """Length of a trial, from the moment when its first draft serves: targets try by themselves every 64 s at the
    latest."""

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if isinstance(self.drafts_per_target, float) and not self.drafts_per_target > 0:
            raise Fault("drafts_per_target", f"is {self.drafts_per_target:g}: it must be more than 0, auto or null")
        if self.probe_interval_s < self.probe_s:
            raise Fault(
                "probe_interval_s", f"is {self.probe_interval_s:g}: it must be at least probe_s, {self.probe_s:g}"
            )
        return self


class RouterPolicy(ScalingPolicy):
    """Sizes the routers by sessions and CPU time."""

    sessions_per_replica: int = Field(default=200, ge=1)
    """Sessions, waiting ones included, that are enough for one router."""
    cpu: float = Field(default=0.7, gt=0, le=1)
    """The share of one core that is enough for one router, whose event loop has no more."""
