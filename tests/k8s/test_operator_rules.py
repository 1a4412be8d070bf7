"""Every overlay passes the operator's own checks, and each check refuses a mutant that breaks it alone."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.k8s.operator_rules import problems
from tests.k8s.support import OVERLAYS, needs_helm, overlay, service_of

pytestmark = needs_helm


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_operator_takes_the_overlay(name):
    assert problems(service_of(overlay(name))) == []


@pytest.mark.parametrize("name", OVERLAYS)
def test_nothing_makes_a_slow_start_final(name):
    """Past this time the operator deletes the cluster, and only a RayService that is made anew starts again."""
    assert "ray.io/initializing-timeout" not in (service_of(overlay(name))["metadata"].get("annotations") or {})


Service = dict[str, Any]


def _cluster(service: Service) -> dict[str, Any]:
    return service["spec"]["rayClusterConfig"]


def _head(service: Service) -> dict[str, Any]:
    return _cluster(service)["headGroupSpec"]


def _draft(service: Service) -> dict[str, Any]:
    return _cluster(service)["workerGroupSpecs"][1]


def _options(service: Service) -> dict[str, Any]:
    return service["spec"]["upgradeStrategy"]["clusterUpgradeOptions"]


def _set_env(service: Service, name: str, value: str = "1") -> None:
    _head(service)["template"]["spec"]["containers"][0]["env"] = [{"name": name, "value": value}]


MUTANTS: list[tuple[str, str, Callable[[Service], Any], str]] = [
    ("gpu", "a long name", lambda s: s["metadata"].update(name="p" * 48), "at most 47"),
    ("gpu", "a name that begins with a digit", lambda s: s["metadata"].update(name="1st"), "DNS-1035"),
    (
        "gpu",
        "a time-out that is no duration",
        lambda s: s["metadata"].update(annotations={"ray.io/initializing-timeout": "soon"}),
        "a duration",
    ),
    ("gpu", "a named head service", lambda s: _head(s).update(headService={"metadata": {"name": "x"}}), "headService"),
    (
        "gpu",
        "an unknown upgrade",
        lambda s: s["spec"]["upgradeStrategy"].update(type="Rolling"),
        "upgradeStrategy.type",
    ),
    ("gpu", "a negative delay", lambda s: s["spec"].update(rayClusterDeletionDelaySeconds=-1), "negative"),
    (
        "incremental-upgrade",
        "no autoscaler",
        lambda s: _cluster(s).update(enableInTreeAutoscaling=False),
        "needs the autoscaler",
    ),
    (
        "incremental-upgrade",
        "no options",
        lambda s: s["spec"]["upgradeStrategy"].pop("clusterUpgradeOptions"),
        "needs clusterUp",
    ),
    (
        "incremental-upgrade",
        "a step beyond the surge",
        lambda s: _options(s).update(stepSizePercent=41),
        "stepSizePercent",
    ),
    ("incremental-upgrade", "a surge beyond all", lambda s: _options(s).update(maxSurgePercent=101), "maxSurgePercent"),
    ("incremental-upgrade", "no interval", lambda s: _options(s).update(intervalSeconds=0), "intervalSeconds"),
    ("incremental-upgrade", "no gateway class", lambda s: _options(s).pop("gatewayClassName"), "gatewayClassName"),
    ("gpu", "no container", lambda s: _draft(s)["template"]["spec"].update(containers=[]), "no container"),
    ("gpu", "resources twice", lambda s: _draft(s).update(resources={"CPU": "4"}), "both in rayStartParams"),
    ("gpu", "labels among the parameters", lambda s: _draft(s)["rayStartParams"].update(labels="a=b"), "labels in ray"),
    ("gpu", "a label's value", lambda s: _draft(s)["labels"].update({"paceline/pool": "a b"}), "is no label"),
    ("gpu", "a label's name", lambda s: _draft(s)["labels"].update({"-pool": "draft"}), "is no label"),
    ("gpu", "two groups of one name", lambda s: _draft(s).update(groupName="target"), "share a name"),
    ("gpu", "more at least than at most", lambda s: _draft(s).update(minReplicas=99), "more than maxReplicas"),
    ("gpu", "a suspended group", lambda s: _draft(s).update(suspend=True), "suspend"),
    (
        "gpu",
        "a restart policy",
        lambda s: _draft(s)["template"]["spec"].update(restartPolicy="Always"),
        "restartPolicy",
    ),
    (
        "gpu",
        "the head's restart policy",
        lambda s: _head(s)["template"]["spec"].update(restartPolicy="Always"),
        "head: restart",
    ),
    (
        "small",
        "idle times with v1",
        lambda s: _cluster(s)["autoscalerOptions"].update(version="v1"),
        "idleTimeoutSeconds",
    ),
    ("gpu", "priority in an old Ray", lambda s: _cluster(s).update(rayVersion="2.55.0"), "priority needs"),
    ("small", "a token in an old Ray", lambda s: _cluster(s).update(rayVersion="2.51.0"), "rayVersion 2.52"),
    (
        "gpu",
        "tokens of Kubernetes",
        lambda s: _cluster(s)["authOptions"].update(enableK8sTokenAuth=True),
        "Kubernetes tokens",
    ),
    (
        "gpu",
        "the version of the autoscaler twice",
        lambda s: _set_env(s, "RAY_enable_autoscaler_v2"),
        "beside autoscalerOptions",
    ),
    ("gpu", "Redis by an environment variable", lambda s: _set_env(s, "RAY_REDIS_ADDRESS"), "without gcsFault"),
    ("ha", "the password of Redis twice", lambda s: _set_env(s, "REDIS_PASSWORD"), "REDIS_PASSWORD beside"),
    ("ha", "the address of Redis twice", lambda s: _set_env(s, "RAY_REDIS_ADDRESS"), "RAY_REDIS_ADDRESS beside"),
    ("ha", "the user of Redis", lambda s: _set_env(s, "REDIS_USERNAME"), "user of Redis"),
    (
        "ha",
        "a password among the parameters",
        lambda s: _head(s)["rayStartParams"].update({"redis-password": "x"}),
        "redis-password",
    ),
]


@pytest.mark.parametrize(("name", "mutant", "change", "refusal"), MUTANTS, ids=[f"{m[0]}: {m[1]}" for m in MUTANTS])
def test_a_mutant_is_refused(name, mutant, change, refusal):
    service = service_of(overlay(name))
    change(service)
    found = problems(service)
    assert any(refusal in problem for problem in found), found
