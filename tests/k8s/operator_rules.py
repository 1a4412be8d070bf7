"""What KubeRay 1.7's operator checks of a RayService beyond its schema, and refuses to act on."""

import re
from collections.abc import Iterator
from typing import Any

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_DURATION = re.compile(r"(\d+(\.\d+)?(h|m|s|ms|us|ns))+|\d+")
_IN_PARAMETERS = ("num-cpus", "num-gpus", "memory", "resources")


def problems(service: dict[str, Any]) -> list[str]:
    """Every rule that is broken, in words; []: the operator takes it."""
    return [*_service(service), *_cluster(service["spec"]["rayClusterConfig"])]


def _service(service: dict[str, Any]) -> Iterator[str]:
    name, spec = service["metadata"]["name"], service["spec"]
    if len(name) > 47:
        yield f"the name has {len(name)} characters: at most 47"
    if not _NAME.fullmatch(name):
        yield f"the name {name!r} is no DNS-1035 label"
    timeout = (service["metadata"].get("annotations") or {}).get("ray.io/initializing-timeout", "1m")
    if not _DURATION.fullmatch(timeout) or not re.search("[1-9]", timeout):
        yield f"ray.io/initializing-timeout is {timeout!r}: a duration"
    head = spec["rayClusterConfig"]["headGroupSpec"]
    if ((head.get("headService") or {}).get("metadata") or {}).get("name"):
        yield "headService has a name"
    strategy = spec.get("upgradeStrategy") or {}
    kind = strategy.get("type", "NewCluster")
    if kind not in ("NewCluster", "NewClusterWithIncrementalUpgrade", "None"):
        yield f"upgradeStrategy.type is {kind!r}"
    if kind == "NewClusterWithIncrementalUpgrade":
        yield from _incremental(strategy.get("clusterUpgradeOptions"), spec["rayClusterConfig"])
    if spec.get("rayClusterDeletionDelaySeconds", 0) < 0:
        yield "rayClusterDeletionDelaySeconds is negative"


def _incremental(options: dict[str, Any] | None, cluster: dict[str, Any]) -> Iterator[str]:
    if not cluster.get("enableInTreeAutoscaling"):
        yield "an incremental upgrade needs the autoscaler"
    if options is None:
        yield "an incremental upgrade needs clusterUpgradeOptions"
        return
    surge, step = options.get("maxSurgePercent", 100), options.get("stepSizePercent")
    if not 0 <= surge <= 100:
        yield f"maxSurgePercent is {surge}: 0 to 100"
    if step is None or not 0 <= step <= 100 or step > surge:
        yield f"stepSizePercent is {step}: 0 to maxSurgePercent, which is {surge}"
    if not (options.get("intervalSeconds") or 0) > 0:
        yield "intervalSeconds must be more than 0"
    if not options.get("gatewayClassName"):
        yield "gatewayClassName is missing"


def _cluster(cluster: dict[str, Any]) -> Iterator[str]:
    head, workers = cluster["headGroupSpec"], cluster.get("workerGroupSpecs") or []
    version = tuple(int(part) for part in (cluster.get("rayVersion") or "0").split("."))
    for name, group in [("head", head), *((g["groupName"], g) for g in workers)]:
        yield from _group(name, group)
    names = [group["groupName"] for group in workers]
    if len(set(names)) < len(names):
        yield f"worker groups share a name: {names}"
    for group in workers:
        if group["minReplicas"] > group["maxReplicas"]:
            yield f"{group['groupName']}: minReplicas is more than maxReplicas"
        if group.get("suspend"):
            yield f"{group['groupName']}: suspend beside the autoscaler"
    yield from _autoscaling(cluster, version)
    auth = cluster.get("authOptions") or {}
    if auth.get("mode") == "token" and version < (2, 52):
        yield "token authentication needs rayVersion 2.52"
    if auth.get("enableK8sTokenAuth"):
        yield "authentication by Kubernetes tokens is refused for a RayService"
    yield from _fault_tolerance(cluster)


def _group(name: str, group: dict[str, Any]) -> Iterator[str]:
    if not group["template"]["spec"].get("containers"):
        yield f"{name}: no container"
    parameters = group.get("rayStartParams") or {}
    if group.get("resources") and any(parameters.get(key) for key in _IN_PARAMETERS):
        yield f"{name}: resources both in rayStartParams and in resources"
    if "labels" in parameters:
        yield f"{name}: labels in rayStartParams"
    for key, value in (group.get("labels") or {}).items():
        if not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
            yield f"{name}: {key}: {value} is no label"


def _autoscaling(cluster: dict[str, Any], version: tuple[int, ...]) -> Iterator[str]:
    options = cluster.get("autoscalerOptions") or {}
    second = bool(cluster.get("enableInTreeAutoscaling")) and options.get("version") == "v2"
    groups = [("head", cluster["headGroupSpec"]), *((g["groupName"], g) for g in cluster["workerGroupSpecs"])]
    for name, group in groups:
        if second and group["template"]["spec"].get("restartPolicy", "Never") != "Never":
            yield f"{name}: restartPolicy is not Never beside autoscaler v2"
        if group.get("idleTimeoutSeconds") is not None and not second:
            yield f"{name}: idleTimeoutSeconds without autoscaler v2"
        if group.get("priority") is not None and (not second or version < (2, 56)):
            yield f"{name}: priority needs autoscaler v2 and rayVersion 2.56"
    environment = _environment(cluster["headGroupSpec"])
    if options.get("version") and "RAY_enable_autoscaler_v2" in environment:
        yield "RAY_enable_autoscaler_v2 beside autoscalerOptions.version"
    if not cluster.get("enableInTreeAutoscaling") and environment.get("RAY_enable_autoscaler_v2") in ("1", "true"):
        yield "RAY_enable_autoscaler_v2 without the autoscaler"


def _fault_tolerance(cluster: dict[str, Any]) -> Iterator[str]:
    options = cluster.get("gcsFaultToleranceOptions")
    head = cluster["headGroupSpec"]
    environment, parameters = _environment(head), head.get("rayStartParams") or {}
    if options is None:
        if "RAY_REDIS_ADDRESS" in environment:
            yield "RAY_REDIS_ADDRESS without gcsFaultToleranceOptions"
    else:
        for name in ("REDIS_PASSWORD", "RAY_REDIS_ADDRESS"):
            if name in environment:
                yield f"{name} beside gcsFaultToleranceOptions"
        if parameters.get("redis-password"):
            yield "redis-password in rayStartParams beside gcsFaultToleranceOptions"
    if parameters.get("redis-username") or "REDIS_USERNAME" in environment:
        yield "the user of Redis outside gcsFaultToleranceOptions"


def _environment(group: dict[str, Any]) -> dict[str, Any]:
    container = group["template"]["spec"]["containers"][0]
    return {entry["name"]: entry.get("value") for entry in container.get("env") or []}
