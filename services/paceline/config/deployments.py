"""Options of Ray Serve for the replicas of any pool: their number, queues and health, what Ray reserves for each and
how the processes of one replica are placed together.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from paceline.config.autoscaling import AutoscalingConfig, DraftAutoscaling, RouterAutoscaling, TargetAutoscaling
from paceline.config.base import Strict
from paceline.errors.refusals import Fault


class PlacementGroupConfig(Strict):
    """Placement of the processes of one replica as a group."""

    bundles: list[dict[str, float]] = Field(min_length=1)
    """Resources of each bundle, such as ``{"CPU": 1, "GPU": 1}``; the replica itself takes the first, and each of its
    other ranks (tensor_parallel_size) one of the others."""
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "STRICT_PACK"
    """STRICT_PACK: all on one host, where ranks exchange fastest."""


class RayActorOptions(Strict):
    """Resources that Ray reserves for a replica. None: Ray's default."""

    num_cpus: float | None = Field(default=None, ge=0)
    """Cores. None: 0.9 for an engine, 0.2 for a router."""
    num_gpus: float | None = Field(default=None, ge=0)
    """GPUs. None: one for an engine with device cuda or an accelerator_type, unless its bundles say it."""
    memory: float | None = Field(default=None, ge=0)
    """Memory in bytes."""
    resources: dict[str, float] | None = None
    accelerator_type: str | None = None
    runtime_env: dict[str, Any] | None = None
    label_selector: dict[str, str] | None = None
    """Labels of the node, by name; of a replica with bundles, of the nodes of all its bundles."""
    fallback_strategy: list[dict[str, Any]] | None = None


class DeploymentConfig(Strict):
    """Options of a Serve deployment, by Serve's names; None: Serve's default."""

    _pool: ClassVar = ""
    num_replicas: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    """None: one, or what autoscaling_config says."""
    autoscaling_config: AutoscalingConfig | None = None
    max_ongoing_requests: int = Field(default=4096, ge=1)
    """A session is one long call on each pool. This is only a guard: engines queue sessions beyond their capacity, and
    the router refuses requests beyond its queue."""
    max_queued_requests: int | None = Field(default=None, ge=-1)
    backpressure_config: dict[str, Any] | None = None
    graceful_shutdown_timeout_s: float = Field(default=600.0, ge=0)
    """Time that a replica which is stopped has to finish its sessions."""
    graceful_shutdown_wait_loop_s: float = Field(default=0.2, gt=0)
    """Interval at which a stopping replica checks whether its sessions are finished."""
    health_check_period_s: float = Field(default=1.0, gt=0)
    health_check_timeout_s: float = Field(default=10.0, gt=0)
    ray_actor_options: RayActorOptions = RayActorOptions()
    max_replicas_per_node: int | None = Field(default=None, ge=1)
    logging_config: dict[str, Any] | None = None
    max_constructor_retry_count: int | None = Field(default=None, ge=1)
    rolling_update_percentage: float | None = Field(default=None, gt=0, le=1)
    max_surge_percent: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _one_count(self) -> Self:
        if isinstance(self.num_replicas, int) and self.autoscaling_config is not None:
            raise Fault("num_replicas", f"is {self.num_replicas} with an autoscaling_config: give one of them")
        return self

    @property
    def first_replicas(self) -> int:
        """Replicas at the start."""
        scaling = self.autoscaling_config
        if scaling is not None:
            return scaling.initial_replicas or (1 if scaling.min_replicas is None else scaling.min_replicas)
        return self.num_replicas if isinstance(self.num_replicas, int) else 1

    @property
    def least_replicas(self) -> int:
        """Replicas at least."""
        return self.first_replicas if self.autoscaling_config is None else self.autoscaling_config.bounds[0]

    @property
    def most_replicas(self) -> int:
        """Replicas at most."""
        scaling = self.autoscaling_config
        return self.first_replicas if scaling is None else scaling.max_replicas or 1

    def options(self, num_cpus: float, num_gpus: float = 0.0) -> dict[str, Any]:
        """Keyword arguments of ``serve.deployment``, with these resources where none are configured."""
        options = self.model_dump(exclude_none=True)
        if self.autoscaling_config is None:
            options.setdefault("num_replicas", 1)
        else:
            options["autoscaling_config"] = self.autoscaling_config.for_serve(self._pool)
        actor = {"num_cpus": num_cpus} | ({"num_gpus": num_gpus} if num_gpus else {})
        options["ray_actor_options"] = actor | options["ray_actor_options"]
        return options


class TargetDeployment(DeploymentConfig):
    """Serve options of the targets."""

    _pool: ClassVar = "target"
    autoscaling_config: TargetAutoscaling | None = None


class DraftDeployment(DeploymentConfig):
    """Serve options of the drafts."""

    _pool: ClassVar = "draft"
    autoscaling_config: DraftAutoscaling | None = None
    on_target_nodes: bool = False
    """Drafts run on cores of the targets' nodes, at most one for each target: on the nodes that the targets'
    ``accelerator_type`` and ``label_selector`` name, which need ``num_cpus`` more."""

    def options(self, num_cpus: float, num_gpus: float = 0.0) -> dict[str, Any]:
        """As of any deployment; the labels of the targets' nodes are known to the whole configuration only."""
        options = super().options(num_cpus, num_gpus)
        del options["on_target_nodes"]
        return options


class RouterDeployment(DeploymentConfig):
    """Serve options of the routers."""

    _pool: ClassVar = "router"
    autoscaling_config: RouterAutoscaling | None = None
