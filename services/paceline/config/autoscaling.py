"""Bounds, delays and policy of an autoscaled pool (``autoscaling_config``), and the part of them that Ray Serve gets.
With a policy of ours Ray Serve only applies our numbers.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from paceline.config.base import Strict
from paceline.config.policies import DraftPolicy, PolicyFunction, RouterPolicy, TargetPolicy
from paceline.errors.refusals import Fault, shown

UPSCALE_DELAY_S, DOWNSCALE_DELAY_S = 15.0, 300.0
"""Delays of our own policies where nothing is configured."""

_FOLLOW = "paceline.fleet.follow:"
_OF_SERVE = (
    "metrics_interval_s",
    "look_back_period_s",
    "aggregation_function",
    "upscaling_factor",
    "downscaling_factor",
)
"""Settings of Serve's own policy that ours does not have."""

_PROMPT = {"metrics_interval_s": 1.0, "look_back_period_s": 2.0, "upscale_delay_s": 0.0, "downscale_delay_s": 0.0}

MONITOR_SCALING = _PROMPT | {"min_replicas": 1, "max_replicas": 1, "policy": {"policy_function": f"{_FOLLOW}post"}}
"""Autoscaling of the monitor's deployment, which brings the decisions to Serve's controller and stays one."""


def _names_function(policy: Any) -> bool:
    return "policy_function" in policy if isinstance(policy, dict) else isinstance(policy, PolicyFunction)


def _function_or(ours: str) -> Discriminator:
    """Tells a policy that names a function from ours by that key; tags are names of classes (``errors.refusals``)."""
    return Discriminator(lambda policy: "PolicyFunction" if _names_function(policy) else ours)


class AutoscalingConfig(Strict):
    """Ray Serve's settings of the same names; None: Serve's default, or that of our policy."""

    min_replicas: int | None = Field(default=None, ge=0)
    initial_replicas: int | None = Field(default=None, ge=0)
    max_replicas: int | None = Field(default=None, ge=1)
    target_ongoing_requests: float | None = Field(default=None, gt=0)
    """Selects Serve's own policy: replicas in proportion to requests."""
    metrics_interval_s: float | None = Field(default=None, gt=0)
    look_back_period_s: float | None = Field(default=None, gt=0)
    upscaling_factor: float | None = Field(default=None, gt=0)
    downscaling_factor: float | None = Field(default=None, gt=0)
    upscale_delay_s: float | None = Field(default=None, ge=0)
    """Time for which there must be too few replicas. None: 15 s."""
    downscale_delay_s: float | None = Field(default=None, ge=0)
    """Time for which there must be too many replicas. None: 300 s."""
    downscale_to_zero_delay_s: float | None = Field(default=None, ge=0)
    """Time for which no replica must be needed. None: downscale_delay_s."""
    aggregation_function: Literal["mean", "max", "min"] | None = None
    policy: Any = None
    """None: ours, by what the engines report, unless target_ongoing_requests is given. Each pool has its own."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        least, most = self.min_replicas, self.max_replicas
        if least is not None and most is not None and least > most:
            raise Fault("min_replicas", f"is {least}: it must be at most max_replicas, which is {most}")
        first, (low, high) = self.initial_replicas, self.bounds
        if first is not None and not low <= first <= max(low, high):
            raise Fault(
                "initial_replicas", f"is {first}: it must be from min_replicas to max_replicas, {low} to {high}"
            )
        if self.policy is not None and self.target_ongoing_requests is not None and not _names_function(self.policy):
            raise Fault(
                "target_ongoing_requests",
                f"is {self.target_ongoing_requests:g} with a policy that uses other signals: give one of them",
            )
        if self.is_ours:
            for name in _OF_SERVE:
                if (value := getattr(self, name)) is not None:
                    raise Fault(
                        name,
                        f"is {shown(value)}, which only Ray Serve's own policy knows: leave it out (policy.window_s, "
                        "policy.max_step_up and policy.max_step_down are ours), or set target_ongoing_requests too",
                    )
        return self

    @property
    def bounds(self) -> tuple[int, int]:
        """The fewest and the most replicas."""
        least = 1 if self.min_replicas is None else self.min_replicas
        return least, max(least, self.max_replicas or 1)

    @property
    def is_ours(self) -> bool:
        """True if the monitor decides the pool's size (``paceline.fleet``)."""
        if self.policy is None:
            return self.target_ongoing_requests is None
        return not _names_function(self.policy)

    def for_serve(self, pool: str) -> dict[str, Any]:
        """The settings as ``serve.deployment`` takes them. With our policy Serve follows the decisions without a delay.

        A short look-back: Serve wakes an empty pool while any request for it was waiting within that time.
        """
        if not self.is_ours:
            return self.model_dump(exclude_none=True)
        own = {name: getattr(self, name) for name in ("min_replicas", "max_replicas", "initial_replicas")}
        return {name: value for name, value in own.items() if value is not None} | {
            **_PROMPT,
            "policy": {"policy_function": f"{_FOLLOW}follow_{pool}"},
        }


class TargetAutoscaling(AutoscalingConfig):
    """Autoscaling of the targets."""

    policy: (
        Annotated[
            Annotated[PolicyFunction, Tag("PolicyFunction")] | Annotated[TargetPolicy, Tag("TargetPolicy")],
            _function_or("TargetPolicy"),
        ]
        | None
    ) = None


class DraftAutoscaling(AutoscalingConfig):
    """Autoscaling of the drafts."""

    policy: (
        Annotated[
            Annotated[PolicyFunction, Tag("PolicyFunction")] | Annotated[DraftPolicy, Tag("DraftPolicy")],
            _function_or("DraftPolicy"),
        ]
        | None
    ) = None


class RouterAutoscaling(AutoscalingConfig):
    """Autoscaling of the routers."""

    policy: (
        Annotated[
            Annotated[PolicyFunction, Tag("PolicyFunction")] | Annotated[RouterPolicy, Tag("RouterPolicy")],
            _function_or("RouterPolicy"),
        ]
        | None
    ) = None

    @model_validator(mode="after")
    def _at_least_one(self) -> Self:
        if self.min_replicas == 0:
            raise Fault("min_replicas", "is 0: without a router nobody answers, and nothing wakes the others")
        return self
