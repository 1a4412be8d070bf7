"""Every document against the schema of its kind, strictly: unknown fields and wrong types are errors."""

import copy
import functools
import json
import sys
import warnings

import jsonschema
import pytest
from tests.k8s import operator_rules
from tests.k8s.support import (
    COMPONENTS,
    OVERLAYS,
    SETTINGS,
    SOURCES,
    TESTBED,
    VALUES,
    compose,
    needs_helm,
    needs_testbed,
    overlay,
    render,
    service_of,
    values_of,
)
from tests.k8s.test_manifests import check_confinement

pytestmark = [needs_helm, needs_testbed, pytest.mark.slow]


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


NAMED = {"type": "array", "items": {"type": "string"}}


def some(**properties):
    """The schema of a list of objects that have all of these fields and no others."""
    return {"type": "array", "minItems": 1, "items": closed(list(properties), **properties)}


def gateway_api(kind, **spec):
    """The part of a kind of the Gateway API, version 1, that is used."""
    of = {
        "apiVersion": {"const": "gateway.networking.k8s.io/v1"},
        "kind": {"const": kind},
        "metadata": {"type": "object"},
    }
    return closed([*of, "spec"], **of, spec=closed([name for name in spec if name != "hostnames"], **spec))


TEXT, PORT = {"type": "string"}, {"type": "integer"}
PARENT = some(name=TEXT, sectionName=TEXT)
BACKEND = some(name=TEXT, port=PORT)
PREFIX = closed(["type", "value"], type={"const": "PathPrefix"}, value=TEXT)
GATEWAY_API = {
    "Gateway": gateway_api(
        "Gateway",
        gatewayClassName=TEXT,
        listeners={
            "type": "array",
            "items": closed(
                ["name", "port", "protocol"],
                name=TEXT,
                port=PORT,
                protocol={"enum": ["HTTP", "HTTPS"]},
                tls=closed(["mode", "certificateRefs"], mode={"const": "Terminate"}, certificateRefs=some(name=TEXT)),
            ),
        },
    ),
    "GRPCRoute": gateway_api(
        "GRPCRoute",
        parentRefs=PARENT,
        hostnames=NAMED,
        rules=some(matches=some(method=closed(["service"], service=TEXT)), backendRefs=BACKEND),
    ),
    "HTTPRoute": gateway_api(
        "HTTPRoute",
        parentRefs=PARENT,
        hostnames=NAMED,
        rules=some(matches=some(path=PREFIX), timeouts=closed(["request"], request=DURATION), backendRefs=BACKEND),
    ),
}
CILIUM = closed(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "cilium.io/v2"},
    kind={"const": "CiliumNetworkPolicy"},
    metadata={"type": "object"},
    spec=closed(
        ["endpointSelector", "egress"],
        endpointSelector=closed([], matchLabels={"type": "object"}),
        egress=some(
            toEntities={"type": "array", "items": {"enum": ["kube-apiserver", "host", "remote-node"]}},
            toPorts=some(ports=some(port=TEXT, protocol={"enum": ["TCP", "UDP"]})),
        ),
    ),
)
"""The part of a CiliumNetworkPolicy that is used."""


@functools.cache
def _validate():
    pytest.importorskip("kubernetes_validate", reason="kubernetes-validate has the schemas of the core kinds")
    sys.path.insert(0, str(TESTBED / "k8s"))
    try:
        import validate
    finally:
        sys.path.remove(str(TESTBED / "k8s"))
    return validate


@functools.cache
def known():
    """The schemas of kinds that are not of the core."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it leaves files to be closed by the interpreter
        crds = _validate().load_crds(str(TESTBED / "crds"))
    crds["gateway.envoyproxy.io/v1alpha1", "BackendTrafficPolicy"] = jsonschema.Draft202012Validator(TRAFFIC)
    crds["cilium.io/v2", "CiliumNetworkPolicy"] = jsonschema.Draft202012Validator(CILIUM)
    for kind, schema in GATEWAY_API.items():
        crds["gateway.networking.k8s.io/v1", kind] = jsonschema.Draft202012Validator(schema)
    return crds


@functools.cache
def _problems(text):
    """Of one document, as JSON. Renderings share most of theirs, and a RayService takes most of a second."""
    return _validate().check(json.loads(text), known())


def problems(document):
    """What its schema says against a document, strictly."""
    return _problems(json.dumps(document))


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_documents_of_an_overlay_are_valid(name):
    for document in overlay(name):
        assert problems(document) == [], (document["kind"], document["metadata"]["name"])


@pytest.mark.parametrize("source", SOURCES)
def test_the_documents_of_all_components_together_are_valid(source):
    for document in compose("gpu", (*COMPONENTS, source)):
        assert problems(document) == [], (document["kind"], document["metadata"]["name"])


FILES = {path.stem: (path,) for path in sorted(VALUES.glob("*.yaml")) if path.stem not in OVERLAYS}
APART = ("gateway", "own-redis")
"""Choices that others exclude."""
TOGETHER = [name for name in SETTINGS if name not in (*APART, *SOURCES, "incremental-upgrade", "ha", "monitoring")]
MATRIX = (
    FILES
    | {name: SETTINGS[name] for name in APART}
    | {"all other choices": tuple(setting for name in TOGETHER for setting in SETTINGS[name])}
)
"""Every other file of values, and what a cluster may choose, over those of gpu."""


@pytest.mark.parametrize("name", MATRIX)
def test_the_documents_of_all_values_are_valid(name):
    """To their schemas, to the operator, and to the restricted Pod Security Standard."""
    documents = render(*values_of("gpu"), *MATRIX[name])
    check_confinement(documents)
    assert operator_rules.problems(service_of(documents)) == []
    for document in documents:
        assert problems(document) == [], (document["kind"], document["metadata"]["name"])


def test_the_check_sees_what_is_wrong():
    service = service_of(overlay("gpu"))
    group = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][1]
    assert problems(service) == []
    for change in (
        lambda g: g.update(idleTimeoutSecond=1),
        lambda g: g.update(maxReplicas="many"),
        lambda g: g["template"]["spec"]["containers"][0].update(readyProbe={}),
        lambda g: g["template"]["spec"]["containers"][0]["securityContext"].update(runAsNonRoot="yes"),
        lambda g: g.pop("groupName"),
    ):
        mutant = copy.deepcopy(service)
        change(mutant["spec"]["rayClusterConfig"]["workerGroupSpecs"][1])
        assert problems(mutant), group["groupName"]
    policy = next(doc for doc in overlay("gpu") if doc["kind"] == "NetworkPolicy")
    policy["spec"]["podSelectors"] = {}
    assert problems(policy)
