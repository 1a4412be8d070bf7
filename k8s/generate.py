"""Writes the manifests that have their source elsewhere: the Serve configs of ``cluster/`` as patches of overlays, what
pods fetch of the models that these name, the shapes of targets, and the Grafana dashboards.

    python k8s/generate.py            writes            --check   exit status 1 if a file is not what would be written
    python k8s/generate.py --target FOLDER --tensor-parallel-size 16 --gpus-per-pod 8    a new overlay, see --help
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent))
from dashboard import ONE_ADDRESS, dashboard_json
from shapes import SHAPES, TargetShape
from weights import Models, fetch_patch, fill_jobs, node_cache, wait_patch

HERE = Path(__file__).parent
SERVE_CONFIGS = {"small": "serve-small.yaml", "gpu": "serve-gpu.yaml"}
"""Overlay -> file in ``cluster/``."""


_DRAFTS = "            min_replicas: 0  # without a draft the targets decode plainly\n            initial_replicas: 1\n"
_TWO_DRAFTS = "            min_replicas: 2\n"


def serve_config(name: str) -> str:
    """A Serve config of ``cluster/``, without the line for editors."""
    text = (HERE.parent / "cluster" / name).read_text(encoding="utf-8")
    return text[text.index("\n") + 1 :] if text.startswith("# yaml-language-server:") else text


def serve_patch(name: str, change: Callable[[str], str] = str) -> str:
    """The Serve config of ``cluster/``, word for word but for ``change``, as a patch of the RayService."""
    text = change(serve_config(name))
    indented = "".join(f"    {line}" if line.strip() else line for line in text.splitlines(keepends=True))
    return (
        f"# Written by k8s/generate.py from cluster/{name}.\n"
        "apiVersion: ray.io/v1\nkind: RayService\nmetadata: {name: paceline}\nspec:\n  serveConfigV2: |\n" + indented
    )


def redundant(text: str) -> str:
    """The Serve config of the overlay ``ha``: two targets and two drafts at least."""
    for old, new in (("            min_replicas: 1\n", "            min_replicas: 2\n"), (_DRAFTS, _TWO_DRAFTS)):
        if text.count(old) != 1:
            raise ValueError(f"{old!r} is {text.count(old)} times in the Serve config: it must be once")
        text = text.replace(old, new)
    return text


def models_of(name: str) -> Models:
    """The models that a Serve config of ``cluster/`` names."""
    args: dict[str, Any] = yaml.safe_load(serve_config(name))["applications"][0]["args"]
    return Models.of(args)


def shaped(folder: Path, shape: TargetShape) -> dict[Path, str]:
    """The files of an overlay that is ``gpu`` with targets of another shape."""
    base = os.path.relpath(HERE / "overlays" / "gpu", folder.resolve())
    patch = serve_patch(SERVE_CONFIGS["gpu"], shape.serve_config)
    return {
        folder / "kustomization.yaml": shape.kustomization(base),
        folder / "serve.yaml": patch,
        folder / "target.yaml": shape.group_patch(serve_config(SERVE_CONFIGS["gpu"])),
    }


def generated() -> dict[Path, str]:
    """What each file has to hold."""
    overlays, components = HERE / "overlays", HERE / "components"
    files = {overlays / overlay / "serve.yaml": serve_patch(name) for overlay, name in SERVE_CONFIGS.items()}
    files[overlays / "ha" / "serve.yaml"] = serve_patch(SERVE_CONFIGS["gpu"], redundant)
    for name, shape in SHAPES.items():
        files |= shaped(overlays / name, shape)
    models = models_of(SERVE_CONFIGS["gpu"])
    files[components / "model-download" / "fetch.yaml"] = fetch_patch(models)
    files |= {components / name / "job.yaml": text for name, text in fill_jobs(models).items()}
    files[HERE / "node-cache" / "daemonsets.yaml"] = node_cache(models)
    files[components / "node-cache" / "wait.yaml"] = wait_patch(models)
    files[components / "monitoring" / "paceline.json"] = dashboard_json()
    files[HERE.parent / "cluster" / "grafana.json"] = dashboard_json(ONE_ADDRESS)
    return files


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
    shape = parser.add_argument_group("an overlay of your own: gpu with targets of another shape")
    shape.add_argument("--target", type=Path, metavar="FOLDER", help="the overlay's folder, which is written")
    shape.add_argument("--tensor-parallel-size", type=int, default=8, help="ranks of a target (default 8)")
    shape.add_argument("--gpus-per-pod", type=int, default=8, help="GPUs of a pod; fewer than ranks: several pods")
    shape.add_argument("--product", help="node label nvidia.com/gpu.product (default: that of gpu)")
    shape.add_argument("--interface", default="eth0", help="network interface of NCCL between pods (default eth0)")
    shape.add_argument("--fabric", metavar="NAME=N", help="device of a fast network, such as vpc.amazonaws.com/efa=32")
    args = parser.parse_args(arguments)
    if args.target is None:
        return write(generated(), args.check)
    try:
        made = TargetShape(args.tensor_parallel_size, args.gpus_per_pod, args.product, args.interface, args.fabric)
    except ValueError as error:
        parser.error(str(error))
    return write(shaped(args.target, made), args.check)


if __name__ == "__main__":
    sys.exit(main())
