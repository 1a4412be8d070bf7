"""Configuration: parsed once, frozen, handed down by the slice. A misspelt key is an error that names itself.

Each module knows those before it: base, devices, options, loading; policies, autoscaling, deployments; pools, which
join both rows; files, security, tracing; service, which is the whole tree. ``local`` needs the options alone.
``environment`` is the only module that reads or sets environment variables.
"""

from paceline.config.autoscaling import (
    DOWNSCALE_DELAY_S,
    MONITOR_SCALING,
    UPSCALE_DELAY_S,
    AutoscalingConfig,
    DraftAutoscaling,
    RouterAutoscaling,
    TargetAutoscaling,
)
from paceline.config.deployments import DeploymentConfig, RayActorOptions
from paceline.config.devices import Device
from paceline.config.environment import (
    apply_cublas_environment,
    apply_worker_environment,
    cache_dir,
    show_gpus,
    visible_gpus,
    wants_color,
    worker_environment,
)
from paceline.config.loading import EMBEDDED_DRAFT, EMBEDDED_TARGET, SMALL_CHAT_MODEL, ModelLoadingConfig
from paceline.config.local import DraftModel, LocalConfig, TargetModel
from paceline.config.options import (
    CascadeOptions,
    DraftOptions,
    DraftSetup,
    DType,
    Growing,
    HeadDraftOptions,
    HeadOptions,
    HintOptions,
    LookaheadOptions,
    ModellessOptions,
    ModelOptions,
    NgramOptions,
    PluginOptions,
    Quantization,
    SuffixMatching,
    SuffixOptions,
    TargetOptions,
    TargetSetup,
)
from paceline.config.policies import DraftPolicy, PolicyFunction, RouterPolicy, ScalingPolicy, TargetPolicy
from paceline.config.pools import (
    CascadeDraftConfig,
    HeadDraftConfig,
    ModelDraftConfig,
    NgramDraftConfig,
    PluginDraftConfig,
    RouterConfig,
    SuffixDraftConfig,
    TargetConfig,
)
from paceline.config.security import InternalTls, ServerTls
from paceline.config.service import LogConfig, ServerConfig, ServiceConfig
from paceline.config.tracing import TracingConfig

__all__ = [
    "DOWNSCALE_DELAY_S",
    "EMBEDDED_DRAFT",
    "EMBEDDED_TARGET",
    "MONITOR_SCALING",
    "SMALL_CHAT_MODEL",
    "UPSCALE_DELAY_S",
    "AutoscalingConfig",
    "CascadeDraftConfig",
    "CascadeOptions",
    "DType",
    "DeploymentConfig",
    "Device",
    "DraftAutoscaling",
    "DraftModel",
    "DraftOptions",
    "DraftPolicy",
    "DraftSetup",
    "Growing",
    "HeadDraftConfig",
    "HeadDraftOptions",
    "HeadOptions",
    "HintOptions",
    "InternalTls",
    "LocalConfig",
    "LogConfig",
    "LookaheadOptions",
    "ModelDraftConfig",
    "ModelLoadingConfig",
    "ModelOptions",
    "ModellessOptions",
    "NgramDraftConfig",
    "NgramOptions",
    "PluginDraftConfig",
    "PluginOptions",
    "PolicyFunction",
    "Quantization",
    "RayActorOptions",
    "RouterAutoscaling",
    "RouterConfig",
    "RouterPolicy",
    "ScalingPolicy",
    "ServerConfig",
    "ServerTls",
    "ServiceConfig",
    "SuffixDraftConfig",
    "SuffixMatching",
    "SuffixOptions",
    "TargetAutoscaling",
    "TargetConfig",
    "TargetModel",
    "TargetOptions",
    "TargetPolicy",
    "TargetSetup",
    "TracingConfig",
    "apply_cublas_environment",
    "apply_worker_environment",
    "cache_dir",
    "show_gpus",
    "visible_gpus",
    "wants_color",
    "worker_environment",
]
