"""The chart's renderings, each made once, and where helm and the testbed are."""

import functools
import importlib.util
import json
import os
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
K8S = REPOSITORY / "k8s"
VALUES = K8S / "values"
TESTBED = Path(os.environ.get("PACELINE_TESTBED", REPOSITORY.parent / "shared" / "testbed")).resolve()


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, K8S / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = _module("generate")

OVERLAYS = ("small", "gpu", "gpu-tp4", "gpu-two-hosts", "monitoring", "incremental-upgrade", "ha")
"""``k8s/overlays``, which are checked in, and three more that tests look at as closely."""
COMPONENTS = ("monitoring", "incremental-upgrade", "ha", "logs")
SOURCES = ("model-download", "model-fill", "model-fill-s3", "model-fill-gs", "node-cache")
"""Ways of models to the pods of a target on GPUs: one of them at a time."""
SETTINGS = {
    "monitoring": ("monitoring.enabled=true",),
    "incremental-upgrade": ("upgrade.incremental=true",),
    "ha": ("ha.enabled=true",),
    "own-redis": ("ha.enabled=true", "ha.redisAddress=rediss://redis.example.com:6380"),
    "logs": ("logs.enabled=true",),
    "tls": ("tls.enabled=true", "apiKeys.enabled=true"),
    "model-download": ("models.from=download",),
    "model-fill": ("models.fill.from=hub",),
    "model-fill-s3": ("models.fill.from=s3", "models.fill.address=s3://bucket/models"),
    "model-fill-gs": ("models.fill.from=gs", "models.fill.address=gs://bucket/models"),
    "node-cache": ("models.from=node-cache",),
    "one-zone": ("nodes.zones={ZONE}",),
    "spot-drafts": ("draft.spot=true",),
    "pull-secret": ("image.pullSecrets={paceline-registry}",),
    "priority": ("priorityClasses.enabled=true",),
    "runtime-class-nvidia": ("target.runtimeClassName=nvidia", "draft.runtimeClassName=nvidia"),
    "gateway": ("gateway.enabled=true",),
    "cilium": ("networkPolicies.cilium=true",),
}
"""What a cluster has chosen -> the values that say so."""
POOLS = ("router", "draft", "target")

needs_helm = pytest.mark.skipif(generate.helm() is None, reason="helm is missing: make helm")
needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl, which builds with kustomize, is missing"
)
needs_testbed = pytest.mark.skipif(
    not (TESTBED / "crds").is_dir(), reason=f"the CRDs are not at {TESTBED}: set PACELINE_TESTBED"
)

Document = dict[str, Any]


@functools.cache
def _text(values: tuple[Path | str, ...]) -> str:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return json.dumps(list(filter(None, yaml.load_all(generate.template(*values), Loader=loader))))


def render(*values: Path | str) -> list[Document]:
    """The documents of the chart with values: files, and settings as ``--set`` takes them. Fresh copies."""
    documents: list[Document] = json.loads(_text(values))
    return documents


def values_of(name: str) -> tuple[Path | str, ...]:
    """The values that make an overlay."""
    if name == "gpu-tp4":
        return (*values_of("gpu"), "target.tensorParallelSize=4")
    if name in ("monitoring", "incremental-upgrade"):
        return (*values_of("gpu"), *SETTINGS[name])
    return (*generate.values_of(name), "namespace.create=true")


def overlay(name: str) -> list[Document]:
    """The documents of an overlay."""
    return render(*values_of(name))


def compose(base: str, chosen: tuple[str, ...] = ()) -> list[Document]:
    """An overlay with more of ``SETTINGS``, or with values themselves."""
    return render(*values_of(base), *(setting for name in chosen for setting in SETTINGS.get(name, (name,))))


def service_of(documents: list[Document]) -> Document:
    """The one RayService."""
    (service,) = (doc for doc in documents if doc["kind"] == "RayService")
    return service


def of_kind(documents: list[Document], kind: str) -> dict[str, Document]:
    """By name."""
    return {doc["metadata"]["name"]: doc for doc in documents if doc["kind"] == kind}


def groups_of(service: Document) -> dict[str, Document]:
    """The worker groups, by name."""
    return {group["groupName"]: group for group in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]}


def templates_of(service: Document) -> dict[str, Document]:
    """The pod templates, by group; the head's is ``head``."""
    config = service["spec"]["rayClusterConfig"]
    return {"head": config["headGroupSpec"]["template"]} | {n: g["template"] for n, g in groups_of(service).items()}


def serve_config_of(service: Document) -> Document:
    """What Serve is told."""
    config: Document = yaml.safe_load(service["spec"]["serveConfigV2"])
    return config
