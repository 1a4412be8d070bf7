"""Configuration: parsed once, frozen, handed down by the slice.

The only module that reads or sets environment variables. A misspelt key is an error that names itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TextIO

import yaml
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator

from paceline.embedded import DRAFT_DIR, TARGET_DIR
from paceline.errors import ConfigError
from paceline.explain import Fault, explain, shown

DType = Literal["auto", "float32", "bfloat16"]
"""``auto``: bfloat16 where the device multiplies it natively (AMX, AVX512-BF16, CUDA), else float32."""

Device = Literal["auto", "cpu", "cuda"]
"""``auto``: CUDA where there is a device, else the CPU."""

Quantization = Literal["int8"]
"""``int8``: the weights of linear layers as 8-bit integers with one scale for each output, rounded while they are
loaded; activations keep the dtype."""

WORKER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""What a worker process sets before it imports torch: a multi-threaded region stalls whenever anything else
wants one of its cores, so parallelism comes from processes."""


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelSettings(_Config):
    """How a model is run."""

    dtype: DType = "auto"
    compile: bool | Literal["auto"] = "auto"
    """Compile ahead of time, once per machine and checkpoint (half a minute to two). ``auto``: on CPU."""
    device: Device = "auto"
    quantization: Quantization | None = None
    """None: the weights as they are in the checkpoint, which may come quantised."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    """Ranks that share the weights and the KV cache, each a process with a core or an accelerator of its own."""
    rank_timeout_s: float = Field(default=10.0, gt=0)
    """How much later than another a rank may come to an exchange before it counts as hung, and the engine as dead."""
    cuda_graphs: bool | Literal["auto"] = "auto"
    """Record decoding and verification at start-up and replay them. ``auto``: on CUDA, where the model allows it."""
    max_cuda_graphs: int = Field(default=64, ge=1, le=1024)
    """Step shapes that are recorded, as far as the memory reaches; steps beyond run eagerly."""
    attention: Literal["auto", "sdpa", "native", "triton"] = "auto"
    """The attention kernel (``model/kernels.py``). ``auto``: native on CPUs that have it, else sdpa."""


class ModelConfig(ModelSettings):
    """A causal language model and how to run it."""

    path: str = Field(min_length=1)
    """Directory of a checkpoint, or an id that transformers resolves (cache, then hub)."""


class DraftModelConfig(ModelConfig):
    """A smaller model with the target's tokenizer."""

    kind: Literal["model"] = "model"


class NgramConfig(_Config):
    """Continuations copied from earlier occurrences of the last tokens in the session's own context."""

    kind: Literal["ngram"] = "ngram"
    min_match: int = Field(default=1, ge=1, le=16)
    """The shortest suffix that is looked up, in tokens."""
    max_match: int = Field(default=4, ge=1, le=16)
    """The longest suffix that is looked up, in tokens; longer ones are tried first."""


DrafterConfig = Annotated[DraftModelConfig | NgramConfig, Field(discriminator="kind")]


class PairConfig(_Config):
    """One target and at most one draft, and their limits: what the builders of both engines are given."""

    target: ModelConfig
    draft: DrafterConfig | None = None
    """None: plain decoding only."""

    max_sessions: int = Field(default=16, ge=1, le=1024)
    """Sessions that are in progress at once; further ones wait."""
    draft_max_sessions: int | None = Field(default=None, ge=1, le=16384)
    """Sessions that the draft's KV pages are sized for. None: max_sessions."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest context in tokens. None: what the target was trained for."""
    max_step_tokens: int = Field(default=256, ge=32, le=65536)
    """Tokens of one target forward, prefill chunks and proposals together."""
    adaptive: bool = True
    """As many draft tokens per step as pay by measured times, and no draft where none do. False: as many as a request
    allows, always."""
    kv_pages: int | None = Field(default=None, ge=1)
    """KV pages of the target. None: enough for max_sessions at 1024 positions, or one at max_model_len."""
    kv_fraction: float | None = Field(default=None, gt=0, le=1)
    """Instead of kv_pages: the share of the memory left beside weights and workspace that becomes KV pages."""

    tree_budget: int = Field(default=256, ge=1, le=4096)
    """Nodes that the draft keeps per session beyond the context."""
    tree_step_tokens: int | None = Field(default=None, ge=1, le=1024)
    """Tree nodes that the draft evaluates in one forward, all sessions together. None: as many as cost a draft
    model little more than one, measured at start-up."""
    fan_out: int = Field(default=6, ge=1, le=32)
    """F, alternative next tokens prepared at a position."""
    draft_top_m: int = Field(default=256, ge=1, le=65536)
    """Candidates of the draft's distribution that are ranked; the rest of its tail is never proposed."""

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        _require_one_size(self.kv_pages, self.kv_fraction)
        return self

    @property
    def num_draft_sessions(self) -> int:
        """Sessions that the draft is made for."""
        return self.draft_max_sessions or self.max_sessions


class LocalConfig(PairConfig):
    """A pair on one machine (``local.py``)."""

    worker: Literal["process", "thread"] = "process"
    """Where the engines run. ``thread`` shares one interpreter lock between both: for debugging and tests."""
    pin_cores: bool = True
    """Give each engine a core of its own where there are at least two."""


def _require_one_size(kv_pages: int | None, kv_fraction: float | None) -> None:
    if kv_pages is not None and kv_fraction is not None:
        raise Fault("kv_fraction", f"is {kv_fraction} while kv_pages is {kv_pages}: give one of them")


EMBEDDED_TARGET, EMBEDDED_DRAFT = "paceline/embedded-target", "paceline/embedded-draft"
"""Model ids of the pair that comes with the package: they stand for its directories on every node."""

_ENGINE_CPUS, _ROUTER_CPUS = 0.9, 0.2
"""Cores that Ray reserves: two cores hold one target, one draft and one router."""


class _Strict(_Config):
    """Takes a value only as what it is: ``"32"`` is no number, and ``yes`` is none either."""

    model_config = ConfigDict(strict=True)


class ModelLoadingConfig(_Strict):
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
        return _resolve(self.model_source or self.model_id)

    @property
    def tokenizer(self) -> str:
        """Where the tokenizer is."""
        return self.source if self.tokenizer_source is None else _resolve(self.tokenizer_source)


class TargetEngineKwargs(ModelSettings, _Strict):
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
        _require_one_size(self.kv_pages, self.kv_fraction)
        return self


class DraftEngineKwargs(ModelSettings, _Strict):
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


class NgramEngineKwargs(_Strict):
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


class PlacementGroupConfig(_Strict):
    """Where the processes of one replica go together."""

    bundles: list[dict[str, float]] = Field(min_length=1)
    """Resources of each bundle, such as ``{"CPU": 1, "GPU": 1}``; the replica itself takes the first, and each of its
    other ranks (tensor_parallel_size) one of the others."""
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "STRICT_PACK"
    """STRICT_PACK: all on one host, where ranks exchange fastest."""


class RayActorOptions(_Strict):
    """What Ray reserves for a replica. None: Ray's default."""

    num_cpus: float | None = Field(default=None, ge=0)
    """Cores. None: 0.9 for an engine, 0.2 for a router."""
    num_gpus: float | None = Field(default=None, ge=0)
    """GPUs. None: one for an engine with device cuda or an accelerator_type, unless its bundles say it."""
    memory: float | None = Field(default=None, ge=0)
    """Bytes."""
    resources: dict[str, float] | None = None
    accelerator_type: str | None = None
    runtime_env: dict[str, Any] | None = None
    label_selector: dict[str, str] | None = None
    """Labels of the node, by name; of a replica with bundles, of the nodes of all its bundles."""
    fallback_strategy: list[dict[str, Any]] | None = None


class PolicyFunction(_Strict):
    """A policy of Ray Serve or of the user's, as Serve takes it."""

    policy_function: str = Field(min_length=1)
    """``module:function`` or ``module.function``; every node has to be able to import it."""
    policy_kwargs: dict[str, Any] = {}


class ScalingPolicy(_Strict):
    """What the sizes of all pools are decided by; each pool adds its own signals (``docs/scaling.md``)."""

    window_s: float = Field(default=5.0, ge=2, le=600)
    """Shares and percentiles are those of so many seconds."""
    hysteresis: float = Field(default=0.2, ge=0.05, le=0.9)
    """A replica goes when the others would be less than full by this share of their goal. Noise of a signal up to
    hysteresis / (2 - hysteresis) of its mean changes nothing to and fro."""
    max_step_up: float = Field(default=2.0, gt=1)
    """The pool grows to at most so many times its size in one decision, and by one replica at least."""
    max_step_down: float = Field(default=0.5, gt=0, lt=1)
    """The pool shrinks to at least this share of its size in one decision, and by one replica at least."""


class TargetPolicy(ScalingPolicy):
    """By sessions, KV memory and the time to the first token."""

    occupancy: float = Field(default=0.8, gt=0, le=1)
    """The share of ``max_sessions`` of a target that is full enough; waiting requests count as sessions."""
    kv_usage: float = Field(default=0.85, gt=0, le=1)
    """The share of a target's KV pages that is full enough."""
    ttft_s: float | None = Field(default=None, gt=0)
    """Nine of ten first tokens shall come within it. None: no matter."""


class DraftPolicy(ScalingPolicy):
    """By the time inside tree steps, late misses, and what the model of time recommends."""

    utilization: float = Field(default=0.75, gt=0, le=1)
    """The share of its time that a draft spends inside tree steps when it is busy enough."""
    late: float = Field(default=0.05, ge=0, lt=1)
    """The share of rounds whose continuation may come too late; while it is less, busy drafts keep up."""
    drafts_per_target: float | Literal["auto"] | None = "auto"
    """More drafts than this for each target are no use. ``auto``: by the model of time, from measured times."""
    probe_interval_s: float = Field(default=300.0, gt=0)
    """Speculation that did not pay is tried again after it, then after 2, 4 and 8 times as long."""
    probe_s: float = Field(default=90.0, gt=0)
    """How long it is tried: targets try by themselves every 64 s at the latest."""

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
    """By sessions and CPU time."""

    sessions_per_replica: int = Field(default=200, ge=1)
    """Sessions, waiting ones included, that are enough for one router."""
    cpu: float = Field(default=0.7, gt=0, le=1)
    """The share of one core that is enough for one router, whose event loop has no more."""


UPSCALE_DELAY_S, DOWNSCALE_DELAY_S = 15.0, 300.0
"""Of our own policies, where nothing is configured."""

_FOLLOW = "paceline.scaling.follow:"
_OF_SERVE = (
    "metrics_interval_s",
    "look_back_period_s",
    "aggregation_function",
    "upscaling_factor",
    "downscaling_factor",
)
"""Settings of Serve's own policy that ours knows nothing of."""


_PROMPT = {"metrics_interval_s": 1.0, "look_back_period_s": 2.0, "upscale_delay_s": 0.0, "downscale_delay_s": 0.0}

MONITOR_SCALING = _PROMPT | {"min_replicas": 1, "max_replicas": 1, "policy": {"policy_function": f"{_FOLLOW}post"}}
"""Of the monitor's deployment: it brings the decisions to Serve's controller, and stays one."""


def _names_function(policy: Any) -> bool:
    return "policy_function" in policy if isinstance(policy, dict) else isinstance(policy, PolicyFunction)


def _function_or(ours: str) -> Discriminator:
    """Tells a policy that names a function from ours by that key; tags are names of classes (``explain``)."""
    return Discriminator(lambda policy: "PolicyFunction" if _names_function(policy) else ours)


class AutoscalingConfig(_Strict):
    """Ray Serve's settings of the same names; None: Serve's default, or that of our policy."""

    min_replicas: int | None = Field(default=None, ge=0)
    initial_replicas: int | None = Field(default=None, ge=0)
    max_replicas: int | None = Field(default=None, ge=1)
    target_ongoing_requests: float | None = Field(default=None, gt=0)
    """Asks for Serve's own policy: replicas in proportion to requests."""
    metrics_interval_s: float | None = Field(default=None, gt=0)
    look_back_period_s: float | None = Field(default=None, gt=0)
    upscaling_factor: float | None = Field(default=None, gt=0)
    downscaling_factor: float | None = Field(default=None, gt=0)
    upscale_delay_s: float | None = Field(default=None, ge=0)
    """How long there must be too few replicas. None: 15 s."""
    downscale_delay_s: float | None = Field(default=None, ge=0)
    """How long there must be too many. None: 300 s."""
    downscale_to_zero_delay_s: float | None = Field(default=None, ge=0)
    """How long there must be no need of any. None: downscale_delay_s."""
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
                f"is {self.target_ongoing_requests:g} beside a policy that goes by other signals: give one of them",
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
        """Whether the pool's size is decided by the monitor (``paceline.scaling``)."""
        if self.policy is None:
            return self.target_ongoing_requests is None
        return not _names_function(self.policy)

    def for_serve(self, pool: str) -> dict[str, Any]:
        """As ``serve.deployment`` takes it. With our policy Serve follows what is decided, without delays of its own.

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
    """Of the targets."""

    policy: (
        Annotated[
            Annotated[PolicyFunction, Tag("PolicyFunction")] | Annotated[TargetPolicy, Tag("TargetPolicy")],
            _function_or("TargetPolicy"),
        ]
        | None
    ) = None


class DraftAutoscaling(AutoscalingConfig):
    """Of the drafts."""

    policy: (
        Annotated[
            Annotated[PolicyFunction, Tag("PolicyFunction")] | Annotated[DraftPolicy, Tag("DraftPolicy")],
            _function_or("DraftPolicy"),
        ]
        | None
    ) = None


class RouterAutoscaling(AutoscalingConfig):
    """Of the routers."""

    policy: (
        Annotated[
            Annotated[PolicyFunction, Tag("PolicyFunction")] | Annotated[RouterPolicy, Tag("RouterPolicy")],
            _function_or("RouterPolicy"),
        ]
        | None
    ) = None

    @model_validator(mode="after")
    def _somebody(self) -> Self:
        if self.min_replicas == 0:
            raise Fault("min_replicas", "is 0: without a router nobody answers, and nothing wakes the others")
        return self


class DeploymentConfig(_Strict):
    """Options of a Serve deployment, by Serve's names; None: Serve's default."""

    _pool: ClassVar = ""
    num_replicas: int | Literal["auto"] | None = Field(default=None, ge=1)
    """None: one, or what autoscaling_config says."""
    autoscaling_config: AutoscalingConfig | None = None
    max_ongoing_requests: int = Field(default=4096, ge=1)
    """A session is one long call on each pool. This is no more than a guard: the engines queue what they cannot run,
    and the router refuses what is too much."""
    max_queued_requests: int | None = Field(default=None, ge=-1)
    backpressure_config: dict[str, Any] | None = None
    graceful_shutdown_timeout_s: float = Field(default=600.0, ge=0)
    """How long a replica that is taken away may finish its sessions."""
    graceful_shutdown_wait_loop_s: float = Field(default=0.2, gt=0)
    """How often it looks whether they are finished."""
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
            raise Fault("num_replicas", f"is {self.num_replicas} beside an autoscaling_config: give one of them")
        return self

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
    """Of the targets."""

    _pool: ClassVar = "target"
    autoscaling_config: TargetAutoscaling | None = None


class DraftDeployment(DeploymentConfig):
    """Of the drafts."""

    _pool: ClassVar = "draft"
    autoscaling_config: DraftAutoscaling | None = None


class RouterDeployment(DeploymentConfig):
    """Of the routers."""

    _pool: ClassVar = "router"
    autoscaling_config: RouterAutoscaling | None = None


class _Replicas(_Strict):
    """Replicas of an engine, and where they run."""

    placement_group_config: PlacementGroupConfig | None = None
    deployment_config: DeploymentConfig = DeploymentConfig()

    @model_validator(mode="after")
    def _one_placement(self) -> Self:
        limit = self.deployment_config.max_replicas_per_node
        if limit is not None and self.placement_group_config is not None:
            raise Fault(
                "deployment_config.max_replicas_per_node",
                f"is {limit} beside a placement_group_config: Ray Serve takes one of them",
            )
        return self

    def deployment_options(self) -> dict[str, Any]:
        """Keyword arguments of ``serve.deployment``."""
        return self._options(None, wants_gpu=False)

    def _options(self, accelerator_type: str | None, *, wants_gpu: bool, num_ranks: int = 1) -> dict[str, Any]:
        group = self.placement_group_config
        if group is None and num_ranks > 1:
            group = PlacementGroupConfig(bundles=[self._rank_bundle(wants_gpu)] * num_ranks)
        alone = group is None
        if group is None:
            options = self.deployment_config.options(_ENGINE_CPUS, 1.0 if wants_gpu else 0.0)
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
        """What one rank takes: what is said of the replica, which is the first."""
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
                f"reserves nothing beside tensor_parallel_size {num_ranks}: a rank's bundle needs some resource",
            )
        if self.deployment_config.max_replicas_per_node is not None:
            raise Fault(
                "deployment_config.max_replicas_per_node",
                f"is {self.deployment_config.max_replicas_per_node} beside tensor_parallel_size {num_ranks}, whose "
                "ranks are placed as a group: Ray Serve takes one of them",
            )
        group = self.placement_group_config
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
    def _engine(self) -> TargetEngineKwargs | DraftEngineKwargs:
        raise NotImplementedError

    @property
    def _wants_gpu(self) -> bool:
        return self.accelerator_type is not None or self._engine.device == "cuda"

    @model_validator(mode="after")
    def _bundle_for_each_rank(self) -> Self:
        self._check_bundles(self._engine.tensor_parallel_size, wants_gpu=self._wants_gpu)
        return self


class TargetConfig(_ModelReplicas):
    """The pool of targets."""

    model_loading_config: ModelLoadingConfig = ModelLoadingConfig(model_id=EMBEDDED_TARGET)
    engine_kwargs: TargetEngineKwargs = TargetEngineKwargs()
    deployment_config: TargetDeployment = TargetDeployment()

    @property
    def _engine(self) -> TargetEngineKwargs:
        return self.engine_kwargs


class ModelDraftConfig(_ModelReplicas):
    """The pool of drafts: a smaller model with the target's tokenizer."""

    kind: Literal["model"] = "model"
    model_loading_config: ModelLoadingConfig = ModelLoadingConfig(model_id=EMBEDDED_DRAFT)
    engine_kwargs: DraftEngineKwargs = DraftEngineKwargs()
    deployment_config: DraftDeployment = DraftDeployment()

    @property
    def _engine(self) -> DraftEngineKwargs:
        return self.engine_kwargs


class NgramDraftConfig(_Replicas):
    """The pool of drafts: continuations copied from the session's own context."""

    kind: Literal["ngram"] = "ngram"
    engine_kwargs: NgramEngineKwargs = NgramEngineKwargs()
    deployment_config: DraftDeployment = DraftDeployment()


def _kind(value: Any) -> str | None:
    """``model`` where nothing is said."""
    if isinstance(value, dict):
        return str(value.get("kind", "model"))
    return getattr(value, "kind", None)


DraftConfig = Annotated[
    Annotated[ModelDraftConfig, Tag("model")] | Annotated[NgramDraftConfig, Tag("ngram")], Discriminator(_kind)
]


class RouterConfig(_Strict):
    """The routers between clients and both pools."""

    max_queued_requests: int = Field(default=64, ge=0)
    """Requests that one router lets wait for a target; further ones are refused with RESOURCE_EXHAUSTED."""
    recovery_timeout_s: float = Field(default=30.0, gt=0)
    """How long a session waits for another target when it has lost its own, before it ends with UNAVAILABLE."""
    draft_timeout_s: float = Field(default=1.0, gt=0)
    """Silence after which a draft counts as hung: sessions go on by plain decoding."""
    target_timeout_s: float = Field(default=5.0, gt=0)
    """Silence after which a target counts as hung: sessions move to another."""
    request_timeout_s: float | None = Field(default=None, gt=0)
    """Longest time of a request, waiting included; it ends with DEADLINE_EXCEEDED. None: as the client says."""
    draft_link_delay_s: float = Field(default=0.0, ge=0, le=10)
    """For experiments with slow networks: added to each way between router and drafts."""
    deployment_config: RouterDeployment = RouterDeployment()

    def deployment_options(self) -> dict[str, Any]:
        """Keyword arguments of ``serve.deployment``."""
        return self.deployment_config.options(_ROUTER_CPUS)


class ServerConfig(_Strict):
    """Where clients reach the service."""

    host: str = Field(default="0.0.0.0", min_length=1)
    grpc_port: int = Field(default=9000, ge=1, le=65535)
    http_port: int = Field(default=8000, ge=1, le=65535)
    """Metrics and health."""

    @model_validator(mode="after")
    def _two_ports(self) -> Self:
        if self.grpc_port == self.http_port:
            raise Fault("http_port", f"is {self.http_port}, which is grpc_port too: they must differ")
        return self


class LogConfig(_Strict):
    """What is logged, and how."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    as_json: bool = Field(default=False, alias="json")
    """One JSON object per line."""
    prompts: bool = False
    """Log prompts and texts too. They are the clients' own: only for debugging."""


class ServiceConfig(_Strict):
    """The whole service. ``ServiceConfig()`` is the embedded pair with one replica each."""

    target_config: TargetConfig = TargetConfig()
    draft_config: DraftConfig | None = ModelDraftConfig()
    """None: plain decoding."""
    router_config: RouterConfig = RouterConfig()
    server: ServerConfig = ServerConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _draft_of_this_target(self) -> Self:
        target, draft = self.target_config.model_loading_config, self.draft_config
        unnamed = isinstance(draft, ModelDraftConfig) and "model_loading_config" not in draft.model_fields_set
        if unnamed and target.source != _resolve(EMBEDDED_TARGET):
            raise Fault(
                "draft_config",
                f"names no model while target_config names {target.model_id!r}: "
                "name a draft model, or set draft_config to {kind: ngram}, or to null for plain decoding",
            )
        return self

    @classmethod
    def parse(cls, args: Mapping[str, Any]) -> Self:
        """From plain data, such as the ``args`` of a Serve application. Raises ConfigError in one sentence."""
        try:
            return cls.model_validate(dict(args))
        except ValidationError as error:
            raise ConfigError(explain(error, cls, _ELSEWHERE)) from None

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """From YAML: the configuration itself, or a Serve config file, whose application's ``args`` it is.

        Raises:
            ConfigError: the file cannot be read, or what it says is refused.
        """
        data = _read_yaml(path)
        return cls.parse(_args_of_application(data, path) if "applications" in data else data)

    def with_overrides(self, overrides: Sequence[str]) -> Self:
        """This configuration with some keys changed, each ``dotted.key=VALUE`` with the value in YAML.

        Raises:
            ConfigError: an override is malformed, or what it says is refused.
        """
        data = self.model_dump(by_alias=True, exclude_unset=True)  # what was left open follows what is set now
        if self.draft_config is not None and "draft_config" in data:
            data["draft_config"].setdefault("kind", self.draft_config.kind)
        for override in overrides:
            key, separator, text = override.partition("=")
            if not separator or not key.strip():
                raise ConfigError(f"{override!r} is no setting: it must be KEY=VALUE with a dotted key")
            try:
                value = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ConfigError(f"{key} is {text!r}, which is no YAML: {_first_line(error)}") from error
            _set(data, key.strip().split("."), value)
        return self.parse(data)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that ``parse`` takes: every key, defaults included."""
        return self.model_dump(by_alias=True)

    def to_yaml(self) -> str:
        """YAML that ``from_file`` takes: every key, defaults included."""
        text: str = yaml.safe_dump(self.to_dict(), sort_keys=False)
        return text

    def scaling(self) -> dict[str, Any]:
        """Plain data for the monitor: the pools whose sizes it decides, how many sessions a target serves, and how it
        logs."""
        parts = {"target": self.target_config, "draft": self.draft_config, "router": self.router_config}
        pools = {}
        for kind, part in parts.items():
            scaling = None if part is None else part.deployment_config.autoscaling_config
            if scaling is not None and scaling.is_ours:
                pools[kind] = scaling.model_dump()
        max_sessions = self.target_config.engine_kwargs.max_sessions
        return {"pools": pools, "max_sessions": max_sessions, "log": self.log.model_dump(by_alias=True)}

    def pair(self) -> PairConfig:
        """What the engine builders are given."""
        target, draft = self.target_config, self.draft_config
        engine = target.engine_kwargs.model_dump()
        tree: dict[str, Any] = {}
        drafter: DrafterConfig | None = None
        if draft is not None:
            tree = draft.engine_kwargs.model_dump()
        if isinstance(draft, ModelDraftConfig):
            tree["draft_max_sessions"] = tree.pop("max_sessions")
            drafter = DraftModelConfig(path=draft.model_loading_config.source, **_take(tree, _MODEL_KEYS))
        elif isinstance(draft, NgramDraftConfig):
            drafter = NgramConfig(**_take(tree, ("min_match", "max_match")))
        model = ModelConfig(path=target.model_loading_config.source, **_take(engine, _MODEL_KEYS))
        return PairConfig(target=model, draft=drafter, **engine, **tree)


_MODEL_KEYS = tuple(ModelSettings.model_fields)

_ELSEWHERE = {
    "placement_group_bundles": "placement_group_config.bundles",
    "placement_group_strategy": "placement_group_config.strategy",
    "placement_group_bundle_label_selector": "accelerator_type beside placement_group_config",
    "gang_scheduling_config": "placement_group_config: the processes of one replica are no gang",
}
"""Options of Ray Serve that have another name here."""


def _resolve(name: str) -> str:
    return {EMBEDDED_TARGET: str(TARGET_DIR), EMBEDDED_DRAFT: str(DRAFT_DIR)}.get(name, name)


def _take(data: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: data.pop(key) for key in keys}


def _set(data: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for depth, name in enumerate(path[:-1], start=1):
        inner = data.setdefault(name, {})
        if not isinstance(inner, dict):
            key = ".".join(path[:depth])
            raise ConfigError(f"{'.'.join(path)} cannot be set: {key} is {shown(inner)}, so set {key} itself")
        data = inner
    data[path[-1]] = value


def _read_yaml(path: str | Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{str(path)!r} is not UTF-8 text: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{str(path)!r} is no YAML: {_first_line(error)}") from error
    if not isinstance(data, dict | None):
        raise ConfigError(f"{str(path)!r} holds {shown(data)}: a mapping of keys is needed")
    return data or {}


def _args_of_application(data: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """The arguments of our application, with the ports that the Serve config file itself sets."""
    applications = data["applications"]
    if not isinstance(applications, list) or not applications or not isinstance(applications[0], dict):
        raise ConfigError(f"applications is {shown(applications)} in {str(path)!r}: a list of applications is needed")
    args = applications[0].get("args") or {}
    if not isinstance(args, dict):
        raise ConfigError(f"applications[0].args is {shown(args)} in {str(path)!r}: a mapping of keys is needed")
    server = args.get("server", {})
    for key, outer, inner in (
        ("grpc_port", "grpc_options", "port"),
        ("http_port", "http_options", "port"),
        ("host", "http_options", "host"),
    ):
        options = data.get(outer)
        theirs = options.get(inner) if isinstance(options, dict) else None
        if theirs is None or not isinstance(server, dict):
            continue
        ours = server.get(key, theirs)
        if ours != theirs:
            where = f"{outer}.{inner} of the same file is {shown(theirs)}"
            raise ConfigError(f"server.{key} is {shown(ours)} while {where}: they must be equal")
        server = {**server, key: theirs}
    return {**args, "server": server}


def _first_line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"{problem} in line {mark.line + 1}" if mark is not None else problem


def cache_dir() -> Path:
    """Where compiled models are kept: PACELINE_CACHE, else the user's cache directory."""
    own = os.environ.get("PACELINE_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(own).expanduser() if own else Path(base).expanduser() / "paceline"


def apply_worker_environment() -> None:
    """Sets ``WORKER_ENVIRONMENT`` for this process. Must run before torch is imported to take full effect."""
    os.environ.update(WORKER_ENVIRONMENT)


def wants_colour(stream: TextIO) -> bool:
    """True if ``stream`` is a terminal whose user did not ask for plain text (NO_COLOR, TERM=dumb)."""
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
