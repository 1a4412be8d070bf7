"""The service as a Ray Serve application: plain classes, wrapped once.

    clients ──▶ HAProxy ──▶ Router ══ internal streams ══▶ Target:<model>, Draft:<model>
                              │  └── leases (handles) ──▶       │
                              └─────── reports ──▶ Monitor ◀────┘

Serve places, watches, replaces and scales the replicas. The messages of sessions do not pass through Serve. The router
is in ``ingress.py``, the other deployments are in ``replicas.py``.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, cast

from pydantic import BaseModel
from ray import serve
from ray.serve import Application

from paceline.cluster.ingress import IngressReplica
from paceline.cluster.replicas import Draft, MonitorReplica, Target
from paceline.config import MONITOR_SCALING, ModelDraftConfig, ServiceConfig
from paceline.config.installed import installed_version
from paceline.errors import ConfigError

APPLICATION = "paceline"
"""Name of the Serve application."""

GRPC_SERVICES = [
    "paceline.rpc.services.add_generation",
    "paceline.rpc.services.add_health",
    "paceline.rpc.services.add_reflection",
]
"""Values of Serve's ``grpc_options.grpc_servicer_functions``."""

_CONSTRUCTOR_TRIES = 3


def build(args: Mapping[str, Any] | ServiceConfig) -> Application:
    """Builds the whole service. The import path in a Serve config file is ``paceline.app:build``.

    Raises:
        ConfigError: ``args`` is refused.
    """
    config = args if isinstance(args, ServiceConfig) else ServiceConfig.parse(args)
    for key, problem in config.numbered_gpus():
        raise ConfigError(f"{key} {problem}")
    actor: dict[str, Any] = {"num_cpus": 0}
    if labels := config.router_config.deployment_config.ray_actor_options.label_selector:
        actor["label_selector"] = labels  # on a router's node: other pools come and go
    monitor_options = {
        "ray_actor_options": actor,
        "autoscaling_config": MONITOR_SCALING,
        "user_config": config.scaling(),
    }
    monitor = _deployment(MonitorReplica, config, monitor_options, "Monitor", ())
    bound = monitor.bind()
    targets = build_target_deployment(config, bind_kwargs={"monitor": bound})
    drafts = None if config.draft_config is None else build_draft_deployment(config, bind_kwargs={"monitor": bound})
    names = (config.target_config.model_loading_config, config.draft_config and config.draft_config.drafter_name)
    parts = (config.target_config.engine_kwargs, config.router_config, config.server, config.internal_tls)
    needs = (*names, *parts, config.tracing)
    router = _deployment(IngressReplica, config, config.router_config.deployment_options(), "Router", needs)
    return cast(Application, router.bind(config, targets, drafts, bound))


def build_target_deployment(
    config: ServiceConfig,
    *,
    bind_kwargs: Mapping[str, Any] | None = None,
    deployment_cls: type = Target,
) -> Application:
    """Builds the pool of targets.

    Args:
        config: of the whole service.
        bind_kwargs: more arguments of ``deployment_cls``.
        deployment_cls: class of the replicas.
    """
    options = config.target_config.deployment_options() | _POOL_OPTIONS
    needs = (config.target_config, config.internal_tls, config.tracing)
    model_id = config.target_config.model_loading_config.model_id
    return cast(
        Application,
        _deployment(deployment_cls, config, options, f"Target:{deployment_name(model_id)}", needs).bind(
            config.target_setup(),
            model=model_id,
            log_config=config.log,
            internal_tls=config.internal_tls,
            tracing=config.tracing,
            **(bind_kwargs or {}),
        ),
    )


def build_draft_deployment(
    config: ServiceConfig,
    *,
    bind_kwargs: Mapping[str, Any] | None = None,
    deployment_cls: type = Draft,
) -> Application:
    """Builds the pool of drafts, with the arguments of ``build_target_deployment``.

    Raises:
        ConfigError: no draft is configured.
    """
    if config.draft_config is None:
        raise ConfigError("draft_config is null: there is no draft to deploy")
    options = config.draft_options() | _POOL_OPTIONS
    target = config.target_config
    needs = (
        config.draft_config,
        target.model_loading_config,
        target.engine_kwargs,
        config.internal_tls,
        config.tracing,
    )
    model = config.draft_config.drafter_name
    pools = (target, config.draft_config) if isinstance(config.draft_config, ModelDraftConfig) else ()
    tokenizers = [(pool.model_loading_config.tokenizer, pool.engine_kwargs.trust_remote_code) for pool in pools]
    return cast(
        Application,
        _deployment(deployment_cls, config, options, f"Draft:{deployment_name(model)}", needs).bind(
            config.draft_setup(),
            model=model,
            log_config=config.log,
            internal_tls=config.internal_tls,
            tracing=config.tracing,
            tokenizers=tokenizers,
            **(bind_kwargs or {}),
        ),
    )


_POOL_OPTIONS = {"request_router_config": {"request_router_class": "paceline.cluster.placement.PoolRequestRouter"}}


def deployment_name(model_id: str) -> str:
    """Returns a model's name in the form that a deployment's name may contain."""
    return model_id.replace("/", "--").replace(".", "_")


def _deployment(cls: type, config: ServiceConfig, options: Mapping[str, Any], name: str, needs: Sequence[Any]) -> Any:
    """Makes a deployment whose replicas Serve replaces only if a part of the configuration in ``needs`` has changed.

    So a new draft leaves the targets as they are. Serve applies changes of other options without a restart.
    """
    defaults = {
        "max_ongoing_requests": 4096,
        "max_constructor_retry_count": _CONSTRUCTOR_TRIES,
        "logging_config": {"enable_access_log": False, "log_level": config.log.level},
    }
    parts = [part.model_dump(exclude={"deployment_config"}) if isinstance(part, BaseModel) else part for part in needs]
    content = json.dumps([installed_version(), config.log.model_dump(), parts], sort_keys=True, default=str)
    version = hashlib.sha256(content.encode()).hexdigest()[:12]
    with warnings.catch_warnings():
        # About metrics_interval_s: nothing in Ray 2.60 reads the environment variables that should replace it.
        warnings.filterwarnings("ignore", "The `metrics_interval_s` field", DeprecationWarning)
        return serve.deployment(name=name, **(defaults | dict(options)))(cls).options(version=version, _internal=True)
