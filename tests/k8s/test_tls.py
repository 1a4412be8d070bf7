"""The component that mounts certificates and keys."""

import json

import pytest
from tests.k8s.support import compose, groups_of, needs_helm, needs_testbed, of_kind, service_of
from tests.k8s.test_schemas import problems

from paceline.config import InternalTls, ServerTls
from paceline.security.haproxy import PROGRAM, SETTINGS

pytestmark = [needs_helm, needs_testbed, pytest.mark.slow]

BASES = ("small", "gpu", "gpu-two-hosts")


@pytest.mark.parametrize("base", BASES)
def test_every_pod_has_the_files_that_haproxy_is_told_of(base):
    documents = compose(base, ("tls",))
    for document in documents:
        assert problems(document) == [], (document["kind"], document["metadata"]["name"])
    (environment,) = (
        found["data"] for name, found in of_kind(documents, "ConfigMap").items() if SETTINGS in found.get("data", {})
    )
    assert environment["RAY_SERVE_HAPROXY_BINARY_PATH"].endswith(f"/{PROGRAM}")
    assert environment["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    settings = json.loads(environment[SETTINGS])
    server, internal = ServerTls(**settings["server"]), InternalTls(**settings["internal"])
    assert not server.http  # probes and Prometheus speak HTTP
    folders = {path.rpartition("/")[0] for path in (server.certificate, server.key, internal.certificate, internal.ca)}
    service = service_of(documents)
    cluster = service["spec"]["rayClusterConfig"]
    for pod in (cluster["headGroupSpec"], *groups_of(service).values()):
        spec = pod["template"]["spec"]
        secrets = {volume["name"]: volume["secret"] for volume in spec["volumes"] if "secret" in volume}
        mounts = {mount["mountPath"]: mount for mount in spec["containers"][0]["volumeMounts"]}
        assert folders | {"/etc/paceline/keys"} <= set(mounts)
        for folder in folders | {"/etc/paceline/keys"}:
            assert mounts[folder]["readOnly"]
            assert secrets[mounts[folder]["name"]]["defaultMode"] == 0o440


def test_without_the_component_nothing_is_encrypted():
    documents = compose("small", ())
    assert not any(SETTINGS in found.get("data", {}) for found in of_kind(documents, "ConfigMap").values())
