"""Logs of replicas reach ``kubectl logs``, and the commands of the pages name containers that there are."""

import fnmatch
import re

import pytest
from tests.k8s.support import REPOSITORY, compose, needs_helm, of_kind, service_of, templates_of
from tests.k8s.test_manifests import check_confinement

pytestmark = needs_helm

WRITTEN = (
    "/tmp/ray/session_latest/logs/worker-0a1b-01000000-1234.err",  # what paceline.logs writes to standard error
    "/tmp/ray/session_latest/logs/serve/controller_77.log",
    "/tmp/ray/session_latest/logs/serve/replica_paceline_Router_x.log",
    "/tmp/ray/session_latest/logs/gcs_server.out",
    "/tmp/ray/session_latest/logs/raylet.err",
)
OF_KUBERAY = {"autoscaler", "wait-gcs-ready"}


def inputs(text):
    """The ``[INPUT]`` sections of a configuration of Fluent Bit, as dictionaries of lower-case names."""
    sections = re.split(r"^\[(\w+)\]\n", text, flags=re.MULTILINE)[1:]
    for name, body in zip(sections[::2], sections[1::2], strict=True):
        if name == "INPUT":
            lines = (line.split(None, 1) for line in body.splitlines() if line.strip() and not line.startswith("#"))
            yield {key.lower(): value for key, value in lines}


def test_a_container_beside_each_pod_shows_what_is_written_to_files():
    documents = compose("gpu", ("logs",))
    maps = of_kind(documents, "ConfigMap")
    tail, udp = inputs(maps["paceline-logs"]["data"]["fluent-bit.conf"])
    patterns = tail["path"].split(",")
    for name in WRITTEN:
        assert any(fnmatch.fnmatch(name, pattern) for pattern in patterns), name
    (environment,) = (doc["data"] for name, doc in maps.items() if name.startswith("paceline-environment"))
    assert environment["RAY_SERVE_HAPROXY_LOG_TARGET"] == f"{udp['listen']}:{udp['port']}"
    assert int(udp["port"]) > 1023  # the container is nobody special
    for template in templates_of(service_of(documents)).values():
        (ray,) = template["spec"]["containers"]
        logs = template["spec"]["initContainers"][0]  # before all others, and after Ray's end: nothing goes unsaid
        assert (logs["name"], logs["restartPolicy"]) == ("logs", "Always")
        shared = {mount["name"]: mount["mountPath"] for mount in logs["volumeMounts"]}
        assert shared["tmp"] == "/tmp"
        assert {"name": "tmp", "mountPath": "/tmp"} in ray["volumeMounts"]
        assert logs["args"] == [f"--config={shared['logs']}/fluent-bit.conf"]
    check_confinement(documents)


FOLDER = "/tmp/ray/session_latest/logs"


def volumes_of_logs(service):
    """Container of a pod of the head -> the volume that holds its logs, once KubeRay 1.7 has made the pod.

    It mounts an emptyDir of its own at /tmp/ray into Ray's container and the autoscaler's, if nothing is there yet.
    """
    cluster = service["spec"]["rayClusterConfig"]
    spec = cluster["headGroupSpec"]["template"]["spec"]
    mounts = {c["name"]: list(c["volumeMounts"]) for c in (*spec["containers"], *spec.get("initContainers", ()))}
    mounts["autoscaler"] = list(cluster["autoscalerOptions"]["volumeMounts"])
    for name in ("ray-head", "autoscaler"):
        if not any(mount["mountPath"] == "/tmp/ray" for mount in mounts[name]):
            mounts[name].append({"name": "ray-logs", "mountPath": "/tmp/ray"})
    return {
        name: max((m for m in found if FOLDER.startswith(m["mountPath"] + "/")), key=lambda m: len(m["mountPath"]))[
            "name"
        ]
        for name, found in mounts.items()
    }


@pytest.mark.parametrize("mutant", [None, "ray-head", "autoscaler", "logs"])
def test_the_logs_of_the_head_are_where_the_container_reads_them(mutant):
    service = service_of(compose("small", ("logs",)))
    cluster = service["spec"]["rayClusterConfig"]
    spec = cluster["headGroupSpec"]["template"]["spec"]
    if mutant is not None:
        (container,) = (
            c
            for c in (
                *spec["containers"],
                *spec["initContainers"],
                cluster["autoscalerOptions"] | {"name": "autoscaler"},
            )
            if c["name"] == mutant
        )
        container["volumeMounts"][:] = [m for m in container["volumeMounts"] if m["mountPath"] != "/tmp/ray"]
    volumes = volumes_of_logs(service)
    assert set(volumes) == {"ray-head", "autoscaler", "logs"}
    assert (len(set(volumes.values())) == 1) is (mutant is None), volumes


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray's own models
def test_haproxy_takes_the_address_of_the_logs():
    from ray.serve._private import constants, haproxy_templates

    assert constants.RAY_SERVE_HAPROXY_LOG_TARGET == "127.0.0.1:514"  # the default, where nobody listens
    assert "log {{ config.log_target }} local0" in str(vars(haproxy_templates))


@pytest.mark.parametrize("page", ["kubernetes.md", "runbook"])
def test_commands_of_the_pages_name_containers_that_there_are(page):
    containers = set(OF_KUBERAY)
    for source in ("model-download", "node-cache"):
        service = service_of(compose("gpu", ("logs", source)))
        for template in templates_of(service).values():
            spec = template["spec"]
            containers |= {c["name"] for c in (*spec["containers"], *spec.get("initContainers", ()))}
    path = REPOSITORY / "docs" / page
    for file in [path] if path.is_file() else path.glob("*.md"):
        for command in re.findall(r"kubectl [^`\n]* logs [^`\n]*", file.read_text()):
            assert "--previous" not in command, (file.name, "no container is started again: restartPolicy Never")
            if "deploy/kuberay-operator" in command or "job/" in command:
                continue
            named = re.search(r" -c ([-a-z]+)", command)
            assert named, (file.name, command, "Ray's own container prints nothing of a replica")
            assert named[1] in containers, (file.name, command)
