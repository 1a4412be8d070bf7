"""Configuration: parsed once, frozen, handed down by the slice. A misspelt key is an error that names itself.

Each module knows those before it: base, devices, loading, options; policies, autoscaling, deployments, replicas; the
methods, one module each; heads, targets, setups, pools; files, security, tracing; service, which is the whole tree.
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
from paceline.config.engines import DType, Growing, KVCacheDType, ModelOptions, Quantization
from paceline.config.environment import (
    apply_cublas_environment,
    apply_worker_environment,
    cache_dir,
    show_gpus,
    visible_gpus,
    wants_color,
    worker_environment,
)
from paceline.config.heads import HeadDraftConfig, HeadDraftOptions, HeadOptions
from paceline.config.loading import EMBEDDED_DRAFT, EMBEDDED_TARGET, SMALL_CHAT_MODEL, ModelLoadingConfig
from paceline.config.local import DraftModel, LocalConfig, ModellessOptions, TargetModel
from paceline.config.methods.lookahead import LookaheadOptions
from paceline.config.methods.model import DraftOptions, ModelDraftConfig
from paceline.config.methods.ngram import NgramDraftConfig, NgramOptions
from paceline.config.methods.plugin import PluginDraftConfig, PluginOptions
from paceline.config.methods.suffix import SuffixDraftConfig, SuffixMatching, SuffixOptions
from paceline.config.methods.vertical_cascade import CascadeDraftConfig, CascadeOptions
from paceline.config.options import DraftSetup, TargetSetup
from paceline.config.policies import DraftPolicy, PolicyFunction, RouterPolicy, ScalingPolicy, TargetPolicy
from paceline.config.pools import RouterConfig, TargetConfig
from paceline.config.replicas import Drafts
from paceline.config.security import InternalTls, ServerTls
from paceline.config.service import LogConfig, ServerConfig, ServiceConfig
from paceline.config.targets import HintOptions, TargetOptions
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
    "Drafts",
    "Growing",
    "HeadDraftConfig",
    "HeadDraftOptions",
    "HeadOptions",
    "HintOptions",
    "InternalTls",
    "KVCacheDType",
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
