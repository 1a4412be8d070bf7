"""The image: its Dockerfile, and the wheel that it installs."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import zipfile

import pytest
from tests.k8s.support import REPOSITORY

DOCKERFILE = REPOSITORY / "k8s" / "image" / "Dockerfile"


def stages():
    """Instructions of each stage, the arguments before the first one under None."""
    parser = pytest.importorskip("dockerfile_parse", reason="dockerfile-parse reads Dockerfiles")
    found = {None: []}
    name = None
    structure = parser.DockerfileParser(fileobj=io.BytesIO(DOCKERFILE.read_bytes())).structure
    for entry in structure:
        instruction, value = entry["instruction"], entry["value"]
        if instruction == "COMMENT":
            continue
        if instruction == "FROM":
            name = value.split(" AS ")[-1] if " AS " in value else "final"
            found[name] = []
        found[name].append((instruction, value))
    return found


def values(stage, instruction):
    """Of one instruction."""
    return [value for name, value in stage if name == instruction]


def test_the_base_images_are_pinned_and_ray_is_the_version_of_the_manifests():
    found = stages()
    arguments = dict(value.split("=", 1) for value in values(found[None], "ARG"))
    manifest = (REPOSITORY / "k8s" / "base" / "rayservice.yaml").read_text()
    assert f"rayVersion: {arguments['RAY_VERSION']}\n" in manifest
    constraints = (REPOSITORY / "constraints.txt").read_text()
    assert f"ray=={arguments['RAY_VERSION']}\n" in constraints
    own = dict(value.split("=", 1) for value in values(found["dependencies"], "ARG"))
    assert f"torch=={own['TORCH_VERSION']}\n" in constraints
    assert f"-ray{arguments['RAY_VERSION']}" in (REPOSITORY / "k8s" / "base" / "kustomization.yaml").read_text()
    for stage, instructions in found.items():
        for value in values(instructions, "FROM"):
            image = value.split(" AS ")[0]
            for name, default in arguments.items():
                image = image.replace(f"${{{name}}}", default)
            assert re.fullmatch(r"(python:3\.11-slim-bookworm|rayproject/ray:2\.60\.0-py311-cpu)", image), (
                stage,
                image,
            )


def test_the_final_stage_is_no_root_and_has_no_compiler():
    final = stages()["final"]
    assert values(final, "USER")[-1] == "1000:100"
    assert not any(re.match(r"(CMD|ENTRYPOINT)$", name) for name, _ in final)  # KubeRay's
    environment = " ".join(values(final, "ENV"))
    assert "PYTHONPATH=/opt/paceline/lib/python3.11/site-packages" in environment  # Ray's workers run another Python
    (run,) = (value for value in values(final, "RUN") if "apt-get" in value)
    purged = re.search(r"apt-get purge ([^&]+)", run)[1].split()
    assert {"gcc", "g++", "build-essential"} <= set(purged)
    assert all(f"! command -v {name}" in run for name in ("gcc", "g++", "cc")), "the build does not check it"
    installed = re.search(r"apt-get install ([^&]+)", run)[1].split()
    assert "wget" in installed  # the probes
    assert not {"gcc", "g++", "build-essential", "clang"} & set(installed)
    assert not any("pip install" in value for value in values(final, "RUN"))
    assert [value.split()[0] for value in values(final, "COPY")] == ["--from=dependencies"]


def test_what_the_build_copies_is_there_and_not_ignored():
    ignored = (REPOSITORY / ".dockerignore").read_text().splitlines()
    for name in ("wheel", "dependencies"):
        for value in values(stages()[name], "COPY"):
            if value.startswith("--from"):
                continue
            for source in value.split()[:-1]:
                assert (REPOSITORY / source).exists(), source
                assert f"!{source}" in ignored, source
    assert ignored[0] == "*"


@pytest.mark.slow
def test_the_wheel_has_models_protos_and_sources_and_runs_where_it_is_installed(tmp_path):
    """Into a fresh environment that sees this one's dependencies, and not this checkout."""
    wheels = tmp_path / "wheels"
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(wheels), str(REPOSITORY)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (wheel,) = wheels.glob("paceline-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    package = REPOSITORY / "services" / "paceline"
    for path in package.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            assert f"paceline/{path.relative_to(package)}" in names
    for expected in (
        "paceline/py.typed",
        "paceline/cluster/drain.py",
        "paceline/embedded/target/model.safetensors",
        "paceline/embedded/draft/model.safetensors",
        "paceline/model/parallel/shared_memory.cpp",
        "paceline_bench/cli.py",
        "paceline/v1/generation_pb2.py",
        "paceline/v1/generation_pb2_grpc.py",
        "paceline/v1/generation_pb2.pyi",
    ):
        assert expected in names
    place = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True, timeout=120)
    python = place / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, timeout=120)
    site = next((place / "lib").glob("python3*/site-packages"))
    here = next(path for path in map(str, sys.path) if path.endswith("site-packages"))
    (site / "dependencies.pth").write_text(here + "\n")
    code = (
        "import json, paceline, paceline.cluster.drain, paceline.app; from paceline.config import ServiceConfig\n"
        "from paceline.embedded import TARGET_DIR; import paceline.v1.generation_pb2_grpc as g\n"
        "print(json.dumps([paceline.__file__, str(TARGET_DIR), TARGET_DIR.is_dir()]))"
    )
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, timeout=180, cwd=tmp_path, env=alone
    )
    assert ran.returncode == 0, ran.stderr
    module, target, there = json.loads(ran.stdout.splitlines()[-1])
    assert module.startswith(str(site))
    assert target.startswith(str(site))
    assert there
    helped = subprocess.run(
        [str(place / "bin" / "paceline"), "--help"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env=alone,
    )
    assert helped.returncode == 0, helped.stderr
    assert "serve" in helped.stdout
