"""The effect of ``serve deploy`` on a running service: computed as Serve does it, before anything is touched."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ray.dashboard.modules.serve.sdk import ServeSubmissionClient
from ray.serve._private.build_app import build_app
from ray.serve._private.version import DeploymentVersion
from ray.serve.deployment import Deployment

from paceline.cluster.app import APPLICATION, build
from paceline.config import ServiceConfig
from paceline.errors import ConfigError

Outcome = Literal["kept", "resized", "changed in place", "replaced", "added", "removed"]
"""``kept``: nothing happens to the replicas. ``resized``: their number or bounds change. ``changed in place``: their
processes stay and take new settings. ``replaced``: each one stops, and a new process loads."""


@dataclass(frozen=True, slots=True)
class Change:
    """The fate of one deployment."""

    deployment: str
    outcome: Outcome
    how: str
    """The part of the change that sessions notice; empty if they notice nothing."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The difference of two configurations, and the effect of deploying the second over the first."""

    keys: tuple[str, ...]
    """Dotted keys whose values differ, sorted."""
    changes: tuple[Change, ...]
    """One for each deployment of either: routers, targets, drafts, the monitor."""


def running_config(where: str) -> ServiceConfig:
    """Returns the configuration of a running service.

    Args:
        where: A file that was deployed, or the address of a cluster's dashboard (``http://HEAD:8265``), which is asked
            with the token of ``RAY_AUTH_MODE=token``.

    Raises:
        ConfigError: it cannot be read, or nothing of Paceline was deployed there from a file.
    """
    if not where.startswith(("http://", "https://")):
        return ServiceConfig.from_file(where)
    try:
        details = ServeSubmissionClient(where).get_serve_details()
    except Exception as error:  # its transports raise errors of their own kinds
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{where} does not say what it runs: {reason}") from error
    application = details.get("applications", {}).get(APPLICATION)
    if application is None:
        names = ", ".join(sorted(details.get("applications", {}))) or "none"
        raise ConfigError(f"{where} runs no application {APPLICATION!r}; its applications: {names}")
    deployed = application.get("deployed_app_config")
    if deployed is None:
        raise ConfigError(f"{where} was not deployed from a file: give the file of its configuration instead")
    return ServiceConfig.parse(deployed.get("args") or {})


def compare(running: ServiceConfig, wanted: ServiceConfig) -> Comparison:
    """Returns the effect of deploying ``wanted`` over ``running``.

    Both are assumed to run this version of Paceline: another version replaces every process.
    """
    before, after = _deployments(running), _deployments(wanted)
    names = sorted({**before, **after}, key=_order)
    changes = tuple(_change(name, before.get(name), after.get(name)) for name in names)
    return Comparison(_changed_keys(running, wanted), changes)


def _changed_keys(running: ServiceConfig, wanted: ServiceConfig) -> tuple[str, ...]:
    before, after = (dict(_flat(config.model_dump(mode="json"))) for config in (running, wanted))
    missing = object()
    keys = {**before, **after}
    return tuple(sorted(key for key in keys if before.get(key, missing) != after.get(key, missing)))


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def _deployments(config: ServiceConfig) -> dict[str, Deployment]:
    built = build_app(build(config), name=APPLICATION, make_deployment_handle=lambda deployment, name: None)
    return {deployment.name: deployment for deployment in built.deployments}


def _order(name: str) -> tuple[int, str]:
    kinds = ("Router", "Target", "Draft", "Monitor")
    return kinds.index(name.partition(":")[0]), name


def _change(name: str, before: Deployment | None, after: Deployment | None) -> Change:
    if before is None:
        return Change(name, "added", "sessions use it as soon as its replicas serve")
    if after is None:
        return Change(name, "removed", "its sessions go on without it, with the same tokens")
    old, new = _version(before), _version(after)
    if old.requires_actor_restart(new):
        return Change(name, "replaced", _how(name, after))
    if old != new or old.requires_long_poll_broadcast(new):
        return Change(name, "changed in place", "")
    same = before._deployment_config == after._deployment_config
    return Change(name, "kept" if same else "resized", "")


def _version(deployment: Deployment) -> DeploymentVersion:
    """Returns what Serve's controller compares to tell a replacement from a change in place."""
    replica = deployment._replica_config
    return DeploymentVersion(
        deployment.version,
        deployment_config=deployment._deployment_config,
        ray_actor_options=replica.ray_actor_options,
        placement_group_bundles=replica.placement_group_bundles,
        placement_group_strategy=replica.placement_group_strategy,
        max_replicas_per_node=replica.max_replicas_per_node,
        placement_group_bundle_label_selector=replica.placement_group_bundle_label_selector,
        placement_group_fallback_strategy=replica.placement_group_fallback_strategy,
    )


def _how(name: str, after: Deployment) -> str:
    """Returns what sessions see while all replicas of a pool are replaced."""
    kind, options = name.partition(":")[0], after._deployment_config
    scaling = options.autoscaling_config
    count = options.num_replicas or 1 if scaling is None else scaling.initial_replicas or scaling.min_replicas or 1
    surge = math.ceil(options.max_surge_percent * count / 100)
    if kind == "Monitor":
        return "metrics and sizes of the pools pause for a moment"
    if surge:
        return f"successors start first, with room for {surge} more at a time; then the old ones finish their sessions"
    if count > 1:
        return "one after the other; sessions continue on the other replicas"
    if kind == "Draft":
        return "plain decoding until its successor serves"
    return "the only one stops before its successor serves: set max_surge_percent to 100 and have room for one more"
