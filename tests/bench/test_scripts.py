"""Every script of ``benchmarks/`` imports, and what those of clusters deploy is valid: no change breaks one unseen."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from benchmarks import gpu, kuberay_autoscaling
from benchmarks.clusters import aws, failures
from ray.autoscaler._private.util import prepare_config, validate_config
from tests.support import flashinfer
from tests.support.models import random_model

from paceline.config import ServiceConfig
from paceline.errors import ConfigError
from paceline.model.compiled import backend
from paceline.types import PAGE_SIZE

ROOT = Path(__file__).parents[2]
PATHS = (ROOT / "services", ROOT, ROOT / "benchmarks")  # a script finds its neighbors in its own folder
IMPORT_ALL = """
import ast, importlib, sys, traceback
from pathlib import Path

failed = []
for path in map(Path, sys.argv[1:]):
    try:
        if path.parent.name == "benchmarks":
            importlib.import_module(f"benchmarks.{path.stem}")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0].startswith("paceline"):
                module = importlib.import_module(node.module)
                for alias in node.names:
                    if not hasattr(module, alias.name):
                        importlib.import_module(f"{node.module}.{alias.name}")
    except Exception:
        failed.append(f"{path}: {traceback.format_exc(limit=-1)}")
print("\\n".join(failed))
"""
"""Imports scripts of our own without running them, and resolves each name that they import from the packages, in
functions too."""


def import_all(paths: list[Path]) -> str:
    """Imports the scripts in a process of their own. Returns what failed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, PATHS))}
    command = [sys.executable, "-c", IMPORT_ALL, *map(str, paths)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr  # libraries may warn there
    return done.stdout.strip()


def test_every_script_imports() -> None:
    scripts = sorted((ROOT / "benchmarks").rglob("*.py"))
    assert len(scripts) > 20
    assert import_all(scripts) == ""


def test_a_name_that_is_gone_is_found(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("def main():\n    from paceline.errors import ConfigError, GoneError\n", encoding="utf-8")
    assert "GoneError" in import_all([script])


def test_prompts_are_timed_by_our_kernels_and_by_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stub: the script itself needs a GPU."""
    monkeypatch.setattr(gpu, "CHUNK", 2 * PAGE_SIZE)
    Wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper
    model = flashinfer.loaded(random_model("llama"), Wrapper, 2 * PAGE_SIZE, monkeypatch)
    spans: list[int] = []
    plan = backend.DeviceBackend.run
    monkeypatch.setattr(
        backend.DeviceBackend, "run", lambda own, step, of: spans.append(len(of.by_library)) or plan(own, step, of)
    )
    clock = SimpleNamespace(seconds=lambda call, repeats: len(call()) * 0.25)
    lines = [*gpu.prompt_lines(model, 4 * PAGE_SIZE, clock, 1)]
    assert [line.split()[6:] for line in lines] == [
        [str(after), "our", "kernels:", "250.000", "FlashInfer:", "250.000"] for after in (0, 2 * PAGE_SIZE)
    ]
    assert spans == [0, 1] * 2


SCRIPTS = ("aws", "failures", "kuberay")
"""The scripts that deploy a configuration of their own."""


def deployed(script: str, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The configurations that a script deploys, by kind: of Serve, and of Ray's launcher."""
    machines: Any = SimpleNamespace(folder=folder, key=folder / "key", dist=folder / "dist")
    if script == "kuberay":
        documents = yaml.safe_load_all((ROOT / "k8s/overlays/small/rendered.yaml").read_text(encoding="utf-8"))
        service = next(each for each in documents if each["kind"] == "RayService")
        yield "serve", kuberay_autoscaling.deployed(service)
        return
    cluster = aws.write_configs(machines) if script == "aws" else failures.write_configs(machines, 6)[0]
    yield "launcher", yaml.safe_load(cluster.read_text(encoding="utf-8"))
    yield "serve", yaml.safe_load((folder / "serve.yaml").read_text(encoding="utf-8"))


def check(kind: str, config: dict[str, Any]) -> None:
    """By the schema of who reads it. Raises ConfigError, or Ray's error."""
    if kind == "launcher":
        validate_config(prepare_config(config))
    else:
        ServiceConfig.parse(config["applications"][0]["args"])


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_a_script_deploys_is_valid(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # its paths are relative to it
    for kind, config in deployed(script, tmp_path):
        check(kind, config)


def test_no_script_of_clusters_is_left_out() -> None:
    scripts = [*(ROOT / "benchmarks/clusters").glob("*.py"), ROOT / "benchmarks/kuberay_autoscaling.py"]
    deploying = {path.stem.removesuffix("_autoscaling") for path in scripts if '"applications"' in path.read_text()}
    assert deploying == {*SCRIPTS}


def test_a_key_that_the_schema_refuses_is_found(tmp_path: Path) -> None:
    """A setting of Serve's own policy beside the project's, as one script had it."""
    config = dict(deployed("kuberay", tmp_path))["serve"]
    pool = config["applications"][0]["args"]["target_config"]["deployment_config"]
    pool["autoscaling_config"] = pool["autoscaling_config"] | {"metrics_interval_s": 1.0}
    with pytest.raises(ConfigError, match=r"metrics_interval_s is 1\.0"):
        check("serve", config)
