"""The three pools: targets, drafts (a model, or a drafter without one) and routers. Each joins a model, its engine's
arguments and its deployment, and says what ``serve.deployment`` is given, bundles of ranks and kinds of GPU included.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from paceline.config.base import Strict
from paceline.config.deployments import (
    DeploymentConfig,
    DraftDeployment,
    PlacementGroupConfig,
    RouterDeployment,
    TargetDeployment,
)
from paceline.config.devices import needs_gpu
from paceline.config.loading import EMBEDDED_DRAFT, EMBEDDED_TARGET, ModelLoadingConfig
from paceline.config.options import (
    CascadeOptions,
    DraftOptions,
    HeadDraftOptions,
    ModelOptions,
    NgramOptions,
    PluginOptions,
    SuffixOptions,
    TargetOptions,
)
from paceline.errors.refusals import Fault
from paceline.types import RequestLimits

_ENGINE_CPUS, _ROUTER_CPUS = 0.9, 0.2
"""Cores that Ray reserves: two cores hold one target, one draft and one router."""


class _Replicas(Strict):
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
        """Cores that Ray reserves for an engine where nothing is said."""
        return _ENGINE_CPUS

    @property
    def _wants_gpu(self) -> bool:
        """True if Ray reserves a GPU for each rank where nothing is said."""
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


class _ModelReplicas(_Replicas):
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


class TargetConfig(_ModelReplicas):
    """The pool of targets."""

    model_loading_config: ModelLoadingConfig = ModelLoadingConfig(model_id=EMBEDDED_TARGET)
    engine_kwargs: TargetOptions = TargetOptions()
    deployment_config: TargetDeployment = TargetDeployment()

    @property
    def _engine(self) -> TargetOptions:
        return self.engine_kwargs


class ModelDraftConfig(_ModelReplicas):
    """The pool of drafts: a smaller model with the target's tokenizer."""

    kind: Literal["model"] = "model"
    model_loading_config: ModelLoadingConfig = ModelLoadingConfig(model_id=EMBEDDED_DRAFT)
    engine_kwargs: DraftOptions = DraftOptions()
    deployment_config: DraftDeployment = DraftDeployment()

    @property
    def _engine(self) -> DraftOptions:
        return self.engine_kwargs


class NgramDraftConfig(_Replicas):
    """The pool of drafts: continuations copied from the session's own context."""

    kind: Literal["ngram"] = "ngram"
    engine_kwargs: NgramOptions = NgramOptions()
    deployment_config: DraftDeployment = DraftDeployment()


class SuffixDraftConfig(_Replicas):
    """The pool of drafts: continuations of the longest end of the text that has occurred before."""

    kind: Literal["suffix"] = "suffix"
    engine_kwargs: SuffixOptions = SuffixOptions()
    deployment_config: DraftDeployment = DraftDeployment()


class CascadeDraftConfig(_Replicas):
    """The pool of drafts: several drafters that draft together in each replica."""

    kind: Literal["cascade"] = "cascade"
    engine_kwargs: CascadeOptions
    deployment_config: DraftDeployment = DraftDeployment()

    @property
    def _wants_gpu(self) -> bool:
        """True if a drafter of the cascade needs a GPU; all share one."""
        options = [drafter.full_options(self.engine_kwargs) for drafter in self.engine_kwargs.drafters]
        return any(needs_gpu(getattr(one, "device", "cpu")) for one in options)


class HeadDraftConfig(_Replicas):
    """The pool of drafts: a head that reads the hidden states which the targets send it."""

    kind: Literal["head"] = "head"
    engine_kwargs: HeadDraftOptions
    accelerator_type: str | None = Field(default=None, min_length=1)
    """Kind of GPU by Ray's name, such as ``L4``."""
    deployment_config: DraftDeployment = DraftDeployment()

    def deployment_options(self) -> dict[str, Any]:
        """Keyword arguments of ``serve.deployment``."""
        wants_gpu = self.accelerator_type is not None or needs_gpu(self.engine_kwargs.device)
        return self._options(self.accelerator_type, wants_gpu=wants_gpu)


class PluginDraftConfig(_Replicas):
    """The pool of drafts: a drafter of an installed package."""

    kind: Literal["plugin"] = "plugin"
    engine_kwargs: PluginOptions
    deployment_config: DraftDeployment = DraftDeployment()


def _kind(value: Any) -> str | None:
    """``model`` where nothing is said."""
    if isinstance(value, dict):
        return str(value.get("kind", "model"))
    return getattr(value, "kind", None)


DraftConfig = Annotated[
    Annotated[ModelDraftConfig, Tag("model")]
    | Annotated[NgramDraftConfig, Tag("ngram")]
    | Annotated[SuffixDraftConfig, Tag("suffix")]
    | Annotated[CascadeDraftConfig, Tag("cascade")]
    | Annotated[PluginDraftConfig, Tag("plugin")]
    | Annotated[HeadDraftConfig, Tag("head")],
    Discriminator(_kind),
]


def draft_name(config: DraftConfig) -> str:
    """Returns the name of the drafter: a model's name, the kind of one without a model, or a plugin's name."""
    if isinstance(config, ModelDraftConfig):
        return config.model_loading_config.model_id
    if isinstance(config, HeadDraftConfig):
        return str(config.engine_kwargs.head)
    return config.engine_kwargs.drafter if isinstance(config, PluginDraftConfig) else config.kind


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
