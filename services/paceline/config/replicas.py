"""Replicas of an engine and where they run: what ``serve.deployment`` is given, bundles of ranks and kinds of GPU
included."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, model_validator

from paceline.config.base import Strict
from paceline.config.deployments import DeploymentConfig, DraftDeployment, PlacementGroupConfig
from paceline.config.devices import needs_gpu
from paceline.config.engines import Growing, ModelOptions
from paceline.errors.refusals import Fault

_ENGINE_CPUS = 0.9
"""Cores that Ray reserves: with a router's, two cores hold one target, one draft and one router."""


class Replicas(Strict):
    """Replicas of an engine, and where they run."""

    placement_group_config: PlacementGroupConfig | None = None
    deployment_config: DeploymentConfig = DeploymentConfig()

    @model_validator(mode="after")
    def _one_placement(self) -> Self:
        limit = self.deployment_config.max_replicas_per_node
        if limit is not None and self.placement_group_config is not None:
            raise Fault(
                "deployment_config.max_replicas_per_node",
                f"is {limit} with a placement_group_config: Ray Serve takes one of them",
            )
        return self

    def deployment_options(self) -> dict[str, Any]:
        """Keyword arguments of ``serve.deployment``."""
        return self._options(None, wants_gpu=self._wants_gpu)

    @property
    def _engine_cpus(self) -> float:
        """Cores that Ray reserves for an engine by default."""
        return _ENGINE_CPUS

    @property
    def _wants_gpu(self) -> bool:
        """True if Ray reserves a GPU for each rank by default."""
        return False

    def _options(self, accelerator_type: str | None, *, wants_gpu: bool, num_ranks: int = 1) -> dict[str, Any]:
        group = self.placement_group_config
        if group is None and num_ranks > 1:
            group = PlacementGroupConfig(bundles=[self._rank_bundle(wants_gpu)] * num_ranks)
        alone = group is None
        if group is None:
            options = self.deployment_config.options(self._engine_cpus, 1.0 if wants_gpu else 0.0)
        else:
            first = group.bundles[0]
            options = self.deployment_config.options(first.get("CPU", 0.0), first.get("GPU", 0.0))
            options["placement_group_bundles"] = [dict(bundle) for bundle in group.bundles]
            options["placement_group_strategy"] = group.strategy
        if alone:
            if accelerator_type is not None:
                options["ray_actor_options"].setdefault("accelerator_type", accelerator_type)
            return options
        labels = options["ray_actor_options"].pop("label_selector", {})  # they are of its bundles
        if accelerator_type is not None:
            labels = {"ray.io/accelerator-type": accelerator_type} | labels
        if labels:
            options["placement_group_bundle_label_selector"] = [labels]  # Serve takes one for all
        return options

    def _rank_bundle(self, wants_gpu: bool) -> dict[str, float]:
        """The bundle of one rank: the resources that are configured for the replica, which is the first rank."""
        actor = self.deployment_config.ray_actor_options
        num_gpus = actor.num_gpus if actor.num_gpus is not None else float(wants_gpu)
        bundle = {"CPU": _ENGINE_CPUS if actor.num_cpus is None else actor.num_cpus, "GPU": num_gpus}
        return {name: amount for name, amount in (bundle | (actor.resources or {})).items() if amount}

    def _check_bundles(self, num_ranks: int, *, wants_gpu: bool) -> None:
        """Raises Fault unless every rank has a bundle."""
        if num_ranks == 1:
            return
        if self.placement_group_config is None and not self._rank_bundle(wants_gpu):
            raise Fault(
                "deployment_config.ray_actor_options",
                f"reserves nothing with tensor_parallel_size {num_ranks}: a rank's bundle needs some resource",
            )
        if self.deployment_config.max_replicas_per_node is not None:
            raise Fault(
                "deployment_config.max_replicas_per_node",
                f"is {self.deployment_config.max_replicas_per_node} with tensor_parallel_size {num_ranks}, whose "
                "ranks are placed as a group: Ray Serve takes one of them",
            )
        group = self.placement_group_config
        bundles = [self._rank_bundle(wants_gpu)] if group is None else group.bundles[:num_ranks]
        if shared := next((bundle["GPU"] for bundle in bundles if 0 < bundle.get("GPU", 0) < 1), None):
            key = "deployment_config.ray_actor_options.num_gpus" if group is None else "placement_group_config.bundles"
            raise Fault(
                key,
                f"gives a rank {shared:g} of a GPU while tensor_parallel_size is {num_ranks}: two ranks might be "
                "given the same one, which NCCL refuses; each needs a whole one",
            )
        if group is not None and len(group.bundles) < num_ranks:
            raise Fault(
                "placement_group_config.bundles",
                f"has {len(group.bundles)} while tensor_parallel_size is {num_ranks}: it needs one for each rank",
            )


class ModelReplicas(Replicas):
    """Replicas of an engine that runs a model."""

    accelerator_type: str | None = Field(default=None, min_length=1)
    """Kind of GPU by Ray's name, such as ``L4``."""

    def deployment_options(self) -> dict[str, Any]:
        """Keyword arguments of ``serve.deployment``."""
        num_ranks = self._engine.tensor_parallel_size
        return self._options(self.accelerator_type, wants_gpu=self._wants_gpu, num_ranks=num_ranks)

    @property
    def _engine(self) -> ModelOptions:
        raise NotImplementedError

    @property
    def _engine_cpus(self) -> float:
        return round(_ENGINE_CPUS * self._engine.cpu_threads, 6)

    @property
    def _wants_gpu(self) -> bool:
        return self.accelerator_type is not None or needs_gpu(self._engine.device)

    @model_validator(mode="after")
    def _bundle_for_each_rank(self) -> Self:
        self._check_bundles(self._engine.tensor_parallel_size, wants_gpu=self._wants_gpu)
        return self


class Drafts(Replicas):
    """The pool of drafts; each method has a class of its own with a ``kind``."""

    if TYPE_CHECKING:  # each method's own
        kind: str
        engine_kwargs: Growing
    deployment_config: DraftDeployment = DraftDeployment()

    @property
    def drafter_name(self) -> str:
        """The name of the drafter: a model's, a plug-in's, or the kind."""
        return self.kind

    @property
    def _wants_gpu(self) -> bool:
        return any(map(needs_gpu, self.engine_kwargs.devices))
