"""Every value of the chart says something: another one renders other manifests."""

import copy

import pytest
import yaml
from tests.k8s.support import K8S, VALUES, generate, needs_helm

pytestmark = [needs_helm, pytest.mark.slow]

DEFAULTS = yaml.safe_load((K8S / "chart" / "values.yaml").read_text())
OTHERS = {
    "accessMode": "ReadOnlyMany",
    "address": "s3://other",
    "apiServer": ["10.0.0.1/32"],
    "autoscaler": "karpenter",
    "clients": {"team": "a"},
    "config": {"log": {"level": "DEBUG"}},
    "deployment": {"max_ongoing_requests": 77},
    "digest": "sha256:" + "0" * 64,
    "engine": {"max_sessions": 7},
    "environment": {"NAME": "value"},
    "fabric": {"example.com/rdma": 2},
    "fill.from": "gs",
    "hostnames": ["llm.example.com"],
    "identity": {"example.com/role": "reader"},
    "kinds": ["t4"],
    "models.from": "download",
    "nodeSelector": {"example.com/rack": "1"},
    "podsPerReplica": 4,
    "priority": 3,
    "pullPolicy": "Always",
    "pullSecrets": ["registry"],
    "rayVersion": "2.61.0",
    "redisAddress": "redis://example.com:6379",
    "resources": {"requests": {"cpu": "9", "memory": "9Gi"}, "limits": {"cpu": "9", "memory": "9Gi"}},
    "selectors": ["true"],
    "sharedMemory": "7Gi",
    "size": "7Gi",
    "storageClass": {"provisioner": "example.com/nfs"},
    "storageClassName": "fast",
    "tolerations": [{"operator": "Exists"}],
    "volume": {"nfs": {"server": "nfs.example.com", "path": "/models"}},
    "zones": ["a"],
}
"""Last name of a value, or its last two -> another one; else numbers are two more, texts longer, choices the other."""
CLAIMED = {"gpu": {"resource": "", "deviceClass": "gpu.nvidia.com", "kinds": []}}
EVERYTHING = {
    **{
        name: {"enabled": True} for name in ("apiKeys", "gateway", "ha", "logs", "monitoring", "priorityClasses", "tls")
    },
    "models": {"fill": {"from": "s3", "address": "s3://models"}},
    "networkPolicies": {"cilium": True},
    "nodes": {"autoscaler": "gke"},
    "target": {"podsPerReplica": 2, "maxPods": 200},
}
BASES = {
    "everything": EVERYTHING,
    "an incremental upgrade": {"upgrade": {"incremental": True}},
    "downloads": {"models": {"from": "download"}},
    "claimed GPUs": {"target": CLAIMED, "draft": CLAIMED},
    "drafts beside targets": {"draft": {"gpu": {"resource": "", "kinds": []}, "resources": None, "engine": {}}},
    "sizes from outside": {
        pool: {"deployment": {"autoscaling_config": None, "num_replicas": 1}} for pool in ("target", "draft")
    },
    "Cloud Storage": {"models": {"fill": {"from": "gs", "address": "gs://models"}}},
}
"""What else is chosen where a value is looked at: the first in which it matters."""


def leaves(values, path=()):
    for name, value in values.items():
        if isinstance(value, dict) and value and name not in OTHERS:
            yield from leaves(value, (*path, name))
        else:
            yield (*path, name), value


def other(path, default):
    for name in (".".join(path[-2:]), path[-1]):
        if name in OTHERS:
            return OTHERS[name]
    if isinstance(default, bool):
        return not default
    return default + 2 if isinstance(default, int) else default + "x"


def changed(values, path, value):
    values = copy.deepcopy(values)
    place = values
    for name in path[:-1]:
        place = place.setdefault(name, {})
    place[path[-1]] = value
    return values


def test_no_value_is_ignored(tmp_path):
    own = tmp_path / "values.yaml"

    def rendered(values):
        own.write_text(yaml.safe_dump(values))
        return generate.template(VALUES / "gpu.yaml", own)

    before = {name: rendered(values) for name, values in BASES.items()}

    def matters(path, value):
        for name, values in BASES.items():
            try:
                if rendered(changed(values, path, value)) != before[name]:
                    return True
            except ValueError:  # these two exclude each other
                continue
        return False

    found = {".".join(path) for path, default in leaves(DEFAULTS) if not matters(path, other(path, default))}
    assert found == set()
