"""Every document against the schema of its kind, strictly: unknown fields and wrong types are errors."""

from __future__ import annotations

import copy
import functools
import sys
import warnings

import jsonschema
import pytest
import yaml
from tests.k8s.support import (
    COMPONENTS,
    K8S,
    OVERLAYS,
    SOURCES,
    TESTBED,
    build,
    compose,
    needs_kubectl,
    needs_testbed,
    overlay,
    service_of,
)

pytestmark = [needs_kubectl, needs_testbed, pytest.mark.slow]


DURATION = {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}


def closed(required, **properties):
    """The schema of an object that has these fields and no others."""
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


TRAFFIC = closed(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "gateway.envoyproxy.io/v1alpha1"},
    kind={"const": "BackendTrafficPolicy"},
    metadata={"type": "object"},
    spec=closed(
        ["targetRefs"],
        targetRefs={
            "type": "array",
            "items": closed(
                ["group", "kind", "name"],
                group={"const": "gateway.networking.k8s.io"},
                kind={"enum": ["Gateway", "HTTPRoute", "GRPCRoute"]},
                name={"type": "string"},
            ),
        },
        useClientProtocol={"type": "boolean"},
        timeout=closed(
            [], http=closed([], requestTimeout=DURATION, maxStreamDuration=DURATION, streamIdleTimeout=DURATION)
        ),
    ),
)
"""The part of Envoy Gateway's BackendTrafficPolicy that is used."""


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
    crds["gateway.envoyproxy.io/v1alpha1", "BackendTrafficPolicy"] = jsonschema.Draft202012Validator(TRAFFIC)
    return lambda document: validate.check(document, crds)


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_documents_of_an_overlay_are_valid(name):
    for document in overlay(name):
        assert checker()(document) == [], (document["kind"], document["metadata"]["name"])


@pytest.mark.parametrize("source", SOURCES)
def test_the_documents_of_all_components_together_are_valid(tmp_path, source):
    for document in compose(tmp_path, "gpu", (*COMPONENTS, source)):
        assert checker()(document) == [], (document["kind"], document["metadata"]["name"])


def test_the_documents_of_the_node_cache_and_of_storage_are_valid():
    documents = build(K8S / "node-cache")
    for path in (K8S / "storage").glob("*/volume.yaml"):
        documents += yaml.safe_load_all(path.read_text())
    for document in documents:
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
