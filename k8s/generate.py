"""Writes what has its source elsewhere: the manifests of ``k8s/overlays``, which are renderings of the chart, the
schema of the chart's values, and the Grafana dashboards.

    python k8s/generate.py            writes            --check   exit status 1 if a file is not what would be written

Needs helm: ``make helm``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent))
from dashboard import ONE_ADDRESS, dashboard_json, of_one_address

HERE = Path(__file__).parent
CHART = HERE / "chart"
OVERLAYS = {
    "small": ("small",),
    "gpu": ("gpu",),
    "gpu-two-hosts": ("gpu", "gpu-two-hosts"),
    "ha": ("gpu", "ha"),
}
"""Overlay -> its files of ``k8s/values``, the later ones over the earlier."""


def helm() -> str | None:
    """The program, of the machine or of ``make helm``."""
    return shutil.which("helm") or shutil.which("helm", path=HERE.parent / "build" / "helm")


def template(*values: Path | str, release: str = "paceline", namespace: str = "paceline") -> str:
    """The chart's rendering with files of values and settings of ``--set``. Raises ValueError with helm's refusal."""
    program = helm()
    if program is None:
        raise ValueError("helm is missing: make helm")
    command = [program, "template", release, str(CHART), "--namespace", namespace]
    for value in values:
        command += ["--values", str(value)] if isinstance(value, Path) else ["--set", value]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise ValueError(done.stderr)
    return done.stdout


def values_of(overlay: str) -> list[Path]:
    """The files of values that make an overlay."""
    return [path for name in OVERLAYS[overlay] if (path := HERE / "values" / f"{name}.yaml").exists()]


class _Manifest(yaml.SafeDumper):
    """Short: what fits on a line is on one, several lines of text stay as they are, nothing is twice by reference."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def serialize(self, node: yaml.Node) -> None:
        _fold(node, 0, 0)
        super().serialize(node)


_WIDTH = 124


def _fold(node: yaml.Node, indent: int, column: int) -> float:
    """Chooses the style of a node, which is at ``column``, and of those in it. Returns its length on one line."""
    if isinstance(node, yaml.ScalarNode):
        return math.inf if "\n" in node.value else len(node.value) + 2 * (node.style is not None)
    if isinstance(node, yaml.MappingNode):
        keys = [len(key.value) + 2 for key, _ in node.value]
        lengths = [
            key + _fold(value, indent + 2, indent + key) for key, (_, value) in zip(keys, node.value, strict=True)
        ]
    else:
        lengths = [_fold(value, indent + 2, indent + 2) for value in node.value]
    length = sum(lengths) + 2 * len(lengths)
    node.flow_style = not lengths or (column + length <= _WIDTH and indent > 0)
    return length


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Manifest.add_representer(str, _text)


def dump(documents: list[Any]) -> str:
    """As YAML, as short as it can be read."""
    text: str = yaml.dump_all(documents, Dumper=_Manifest, width=_WIDTH + 10, sort_keys=False)
    return text


def rendered(overlay: str) -> str:
    """The manifests of an overlay, with the namespace that helm would make."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    documents = [one for one in yaml.load_all(template(*values_of(overlay), "namespace.create=true"), loader) if one]
    for document in documents:
        document["metadata"].setdefault("namespace", "paceline")
        if document["kind"] in ("Namespace", "PersistentVolume"):
            del document["metadata"]["namespace"]
        if document["kind"] == "RayService":
            spec = document["spec"]
            spec["serveConfigV2"] = dump([yaml.safe_load(spec["serveConfigV2"])])
    files = " ".join(f"-f k8s/values/{path.name}" for path in values_of(overlay))
    return (
        f"# Written by k8s/generate.py: helm template paceline k8s/chart -n paceline {files}".rstrip()
        + "\n"
        + dump(documents)
    )


def kustomization() -> str:
    """Of every overlay."""
    return (
        "# Written by k8s/generate.py. Patches of your own, and the image in ../image.\n"
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
        "resources: [rendered.yaml]\ncomponents: [../image]\n"
    )


# -- the schema of the values ----------------------------------------------------------------------------------------

_NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"}
_MAYBE_NAME = {"type": "string", "pattern": "^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$"}
_MODEL = {"type": "string", "pattern": "^[-A-Za-z0-9._/~@+]*$"}
_QUANTITY = {"type": "string", "pattern": "^([0-9.]+([kMGTPE]i?|m)?)?$"}
_SECONDS = {"type": "integer", "minimum": 1}
_FREE = {"type": "object"}
_STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
_OBJECTS = {"type": "array", "items": {"type": "object"}}
_RESOURCES = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        name: {"type": "object", "additionalProperties": {"type": ["string", "integer"]}}
        for name in ("requests", "limits")
    },
}
_COUNT = {"type": "integer", "minimum": 1}
RULES: dict[str, dict[str, Any]] = {
    "image.digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
    "image.pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
    "image.pullSecrets": {"type": "array", "items": _NAME},
    "rayVersion": {"type": "string", "pattern": r"^[0-9]+\.[0-9]+\.[0-9]+$"},
    "longestSessionSeconds": _SECONDS,
    "coldStartSeconds": _SECONDS,
    "idleTimeoutSeconds": _SECONDS,
    "intervalSeconds": _SECONDS,
    "model": _MODEL | {"minLength": 1},
    "source": _MODEL,
    "tokenizer": _MODEL,
    "target.engine": {"$ref": "#/$defs/TargetOptions"},
    "draft.engine": {"$ref": "#/$defs/DraftOptions"},
    "target.deployment": {"$ref": "#/$defs/TargetDeployment"},
    "draft.deployment": {"$ref": "#/$defs/DraftDeployment"},
    "router.deployment": {"$ref": "#/$defs/RouterDeployment"},
    "tensorParallelSize": _COUNT | {"maximum": 64},
    "podsPerReplica": _COUNT | {"maximum": 64},
    "cpus": _COUNT,
    "maxPods": _COUNT,
    "maxQueuedRequests": _COUNT,
    "fabric": {"type": "object", "additionalProperties": _COUNT},
    "priority": {"type": ["integer", "null"], "minimum": 0},
    "resources": _RESOURCES,
    "sharedMemory": _QUANTITY,
    "nodeSelector": _STRINGS,
    "tolerations": _OBJECTS,
    "config": _FREE,
    "environment": _STRINGS,
    "nodes.autoscaler": {"enum": ["", "karpenter", "gke", "eks"]},
    "models.from": {"enum": ["package", "volume", "download", "node-cache"]},
    "models.claim.accessMode": {"enum": ["ReadWriteMany", "ReadOnlyMany"]},
    "models.claim.storageClassName": {"type": ["string", "null"]},
    "models.claim.size": _QUANTITY,
    "models.storageClass": _FREE,
    "models.volume": _FREE,
    "models.fill.from": {"enum": ["", "hub", "s3", "gs"]},
    "models.fill.address": {"type": "string", "pattern": "^((s3|gs)://.+)?$"},
    "models.fill.identity": _STRINGS,
    "ha.redisAddress": {"type": "string", "pattern": "^(rediss?://.+)?$"},
    "stepSizePercent": _COUNT | {"maximum": 100},
    "maxSurgePercent": _COUNT | {"maximum": 100},
    "apiServer": {"type": "array", "items": {"type": "string", "pattern": "^[0-9a-f.:]+/[0-9]+$"}},
    "clients": _STRINGS,
    "secret": _NAME,
    "tlsSecret": _MAYBE_NAME,
}
"""Path of a value, or its last name, -> what it may be. All others may be what their default is, of the same type."""

SET_BY_THE_CHART = {
    "TargetOptions": ["tensor_parallel_size"],
    "TargetDeployment": ["graceful_shutdown_timeout_s", "ray_actor_options"],
    "DraftDeployment": ["graceful_shutdown_timeout_s", "ray_actor_options"],
    "RouterDeployment": ["graceful_shutdown_timeout_s", "ray_actor_options"],
}
"""Of the service's configuration: what values of the chart say for the pods and for Serve at once."""


def _schema_of(default: Any, path: str = "") -> dict[str, Any]:
    rule = RULES.get(path) or RULES.get(path.rpartition(".")[2])
    if rule is not None:
        return rule
    if isinstance(default, dict):
        properties = {name: _schema_of(value, f"{path}.{name}".removeprefix(".")) for name, value in default.items()}
        return {"type": "object", "additionalProperties": False, "properties": properties}
    if isinstance(default, list):
        return {"type": "array", "items": {"type": "string"}}
    kinds = {bool: "boolean", int: "integer", str: "string"}
    return {"type": kinds[type(default)]}


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield schema["$ref"].rpartition("/")[2]
        for value in schema.values():
            yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)


def _without_descriptions(schema: Any) -> Any:
    if isinstance(schema, dict):
        kept = {name: value for name, value in schema.items() if name != "description" or not isinstance(value, str)}
        return {name: _without_descriptions(value) for name, value in kept.items()}
    return [_without_descriptions(value) for value in schema] if isinstance(schema, list) else schema


def values_schema() -> str:
    """values.schema.json: the values, and of the service's configuration what they hold. A definition a line."""
    schema = _schema_of(yaml.safe_load((CHART / "values.yaml").read_text("utf-8")))
    schema["properties"]["global"] = _FREE  # Helm's own
    source = json.loads((HERE.parent / "docs" / "configuration.schema.json").read_text("utf-8"))["$defs"]
    definitions: dict[str, Any] = {}
    missing = set(_references(schema))
    while missing:
        for name in sorted(missing):
            definitions[name] = _without_descriptions(source[name])
            for option in SET_BY_THE_CHART.get(name, ()):
                del definitions[name]["properties"][option]
        missing = set(_references(definitions)) - definitions.keys()
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in schema["properties"].items()]
    more = [f"{json.dumps(name)}: {json.dumps(definitions[name])}" for name in sorted(definitions)]
    return (
        '{\n"$schema": "https://json-schema.org/draft/2020-12/schema",\n'
        '"type": "object", "additionalProperties": false,\n'
        '"properties": {\n' + ",\n".join(lines) + '\n},\n"$defs": {\n' + ",\n".join(more) + "\n}\n}\n"
    )


# -- alerts outside of Kubernetes -------------------------------------------------------------------------------------

_OF_KUBERNETES = re.compile(r"kube|autoscaler_|paceline-head|persistentvolumeclaim|ray_serve_|ray_gcs_|statefulset")
"""In expressions of alerts about pods, and about what Ray's own exporters report."""


def one_address_rules() -> str:
    """The chart's rules by the names of the service's own page of metrics, for one Prometheus beside it."""
    groups = yaml.safe_load((CHART / "files" / "rules.yaml").read_text("utf-8"))["groups"]
    for group in groups:
        group["rules"] = [rule for rule in group["rules"] if not _OF_KUBERNETES.search(rule["expr"])]
        for rule in group["rules"]:
            expression = of_one_address(rule["expr"]).replace("namespace, ray_io_cluster", "job")
            rule["expr"] = expression.replace('job="paceline/paceline-workers", pool="router"', 'job="paceline"')
            rule.get("labels", {}).pop("namespace", None)
            for name, text in rule.get("annotations", {}).items():
                rule["annotations"][name] = text.replace("$labels.ReplicaId", "$labels.replica_id")
    head = (
        "# Alerts by the metrics of one service, outside Kubernetes: what k8s/generate.py makes of the chart's rules.\n"
    )
    return head + dump([{"groups": [group for group in groups if group["rules"]]}])


# -- the files -------------------------------------------------------------------------------------------------------


def write(files: dict[Path, str], check: bool) -> int:
    """Writes what is not there yet; with ``check`` says so instead, and returns 1."""
    stale = [path for path, text in files.items() if not path.exists() or path.read_text("utf-8") != text]
    for path in stale:
        print(f"{os.path.relpath(path, HERE.parent)} {'is not what k8s/generate.py writes' if check else 'written'}")
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[path], encoding="utf-8")
    return 1 if check and stale else 0


def main(arguments: list[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(prog="python k8s/generate.py", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a file would change")
    check = parser.parse_args(arguments).check
    first = {
        CHART / "files" / "paceline.json": dashboard_json(),
        HERE.parent / "cluster" / "grafana.json": dashboard_json(ONE_ADDRESS),
        HERE.parent / "cluster" / "rules.yaml": one_address_rules(),
        CHART / "values.schema.json": values_schema(),
    }
    stale = write(first, check)  # helm reads the schema
    folders = {HERE / "overlays" / name: name for name in OVERLAYS}
    files = {folder / "rendered.yaml": rendered(name) for folder, name in folders.items()}
    files |= {folder / "kustomization.yaml": kustomization() for folder in folders}
    return write(files, check) | stale


if __name__ == "__main__":
    sys.exit(main())
