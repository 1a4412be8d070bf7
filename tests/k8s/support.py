"""The manifests as kustomize builds them, and where the testbed is."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
K8S = REPOSITORY / "k8s"
TESTBED = Path(os.environ.get("PACELINE_TESTBED", REPOSITORY.parent / "shared" / "testbed")).resolve()

OVERLAYS = ("small", "gpu", "gpu-tp4", "gpu-two-hosts", "monitoring", "incremental-upgrade", "ha")
COMPONENTS = ("monitoring", "incremental-upgrade", "ha", "logs")
SOURCES = ("model-download", "model-fill", "model-fill-s3", "model-fill-gs", "node-cache")
"""Components that bring models to the gpu overlays: one of them at a time."""
POOLS = ("router", "draft", "target")

needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl, which builds with kustomize, is missing"
)
needs_testbed = pytest.mark.skipif(
    not (TESTBED / "crds").is_dir(), reason=f"the CRDs are not at {TESTBED}: set PACELINE_TESTBED"
)

Document = dict[str, Any]


@functools.cache
def _text(folder: Path) -> str:
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr  # deprecated fields
    return done.stdout


def build(folder: Path) -> list[Document]:
    """The documents of a kustomization, fresh copies."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return list(yaml.load_all(_text(folder), Loader=loader))


def overlay(name: str) -> list[Document]:
    """The documents of an overlay."""
    return build(K8S / "overlays" / name)


def compose(folder: Path, base: str, components: tuple[str, ...]) -> list[Document]:
    """An overlay with components, as the documentation says to combine them; ``folder`` is written to."""
    lines = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(K8S / "overlays" / base, folder)],
        "components": [os.path.relpath(K8S / "components" / name, folder) for name in components],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(lines))
    return build(folder)


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
