"""Every document against the schema of its kind, strictly: unknown fields and wrong types are errors."""

from __future__ import annotations

import copy
import functools
import sys
import warnings

import pytest
from tests.k8s.support import COMPONENTS, OVERLAYS, TESTBED, compose, needs_kubectl, needs_testbed, overlay, service_of

pytestmark = [needs_kubectl, needs_testbed, pytest.mark.slow]


@functools.cache
def checker():
    """``check(document) -> [problem, ...]``, with KubeRay's and the Prometheus operator's CRDs."""
    pytest.importorskip("kubernetes_validate", reason="kubernetes-validate has the schemas of the core kinds")
    sys.path.insert(0, str(TESTBED / "k8s"))
    try:
        import validate
    finally:
        sys.path.remove(str(TESTBED / "k8s"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it leaves files to be closed by the interpreter
        crds = validate.load_crds(str(TESTBED / "crds"))
    return lambda document: validate.check(document, crds)


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_documents_of_an_overlay_are_valid(name):
    for document in overlay(name):
        assert checker()(document) == [], (document["kind"], document["metadata"]["name"])


def test_the_documents_of_all_components_together_are_valid(tmp_path):
    for document in compose(tmp_path, "gpu", COMPONENTS):
        assert checker()(document) == [], (document["kind"], document["metadata"]["name"])


def test_the_check_sees_what_is_wrong():
    service = service_of(overlay("gpu"))
    group = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][1]
    assert checker()(service) == []
    for change in (
        lambda g: g.update(idleTimeoutSecond=1),
        lambda g: g.update(maxReplicas="many"),
        lambda g: g["template"]["spec"]["containers"][0].update(readyProbe={}),
        lambda g: g["template"]["spec"]["containers"][0]["securityContext"].update(runAsNonRoot="yes"),
        lambda g: g.pop("groupName"),
    ):
        mutant = copy.deepcopy(service)
        change(mutant["spec"]["rayClusterConfig"]["workerGroupSpecs"][1])
        assert checker()(mutant), group["groupName"]
    policy = next(doc for doc in overlay("gpu") if doc["kind"] == "NetworkPolicy")
    policy["spec"]["podSelectors"] = {}
    assert checker()(policy)
