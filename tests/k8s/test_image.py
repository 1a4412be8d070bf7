"""The image: its Dockerfile. The wheel that it installs: tests/cli/test_distributions.py."""

import io
import re
from importlib.metadata import requires

import pytest
import yaml
from tests.k8s.support import K8S, REPOSITORY

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
    chart = yaml.safe_load((K8S / "chart" / "values.yaml").read_text())
    assert chart["rayVersion"] == arguments["RAY_VERSION"]
    constraints = (REPOSITORY / "constraints.txt").read_text()
    assert f"ray=={arguments['RAY_VERSION']}\n" in constraints
    own = dict(value.split("=", 1) for value in values(found["dependencies"], "ARG") if "=" in value)
    assert f"torch=={own['TORCH_VERSION']}\n" in constraints
    assert chart["image"]["tag"].endswith(f"-ray{arguments['RAY_VERSION']}")
    overlays = yaml.safe_load((K8S / "overlays" / "image" / "kustomization.yaml").read_text())
    assert overlays["images"] == [{"name": chart["image"]["repository"], "newTag": chart["image"]["tag"]}]
    images = {}
    for stage, instructions in found.items():
        for value in values(instructions, "FROM"):
            image = value.split(" AS ")[0]
            for _ in range(2):  # an argument's default may name another
                for name, default in arguments.items():
                    image = image.replace(f"${{{name}}}", default)
            images[stage] = image
    ray = f"rayproject/ray:{arguments['RAY_VERSION']}-py311-cpu"
    assert images == {
        "wheel": "python:3.11-slim-bookworm",
        "dependencies": ray,
        "base-cpu": ray,
        "base-cuda": "base-cpu",  # torch brings its own CUDA: one of the base image could only differ from it
        "final": "base-cpu",
    }


def test_cuda_is_that_of_the_torch_that_is_installed_and_its_driver_is_named():
    """The wheels of PyPI for this version of torch require CUDA 13, which drivers from 580 on run."""
    (install,) = (value for value in values(stages()["dependencies"], "RUN") if "torch==" in value)
    assert "cuda) index=https://pypi.org/simple cuda=13 ;;" in install
    assert "torch.version.cuda" in install  # the build checks what it got
    required = [line for line in requires("torch") or () if line.startswith(("cuda-toolkit", "nvidia-nccl"))]
    if required:  # a torch of PyPI, not of the index for CPUs
        assert any(line.startswith("cuda-toolkit") and "==13." in line for line in required), required
        assert any(line.startswith("nvidia-nccl-cu13") for line in required), required
    for page in (DOCKERFILE, REPOSITORY / "docs" / "kubernetes.md"):
        assert re.search(r"driver\s+(#\s+)?of\s+580\s+or\s+newer", page.read_text()), page.name


def test_both_images_have_what_the_first_start_compiles_with():
    found = stages()
    (run,) = (value for value in values(found["base-cpu"], "RUN") if "apt-get" in value)
    installed = re.search(r"apt-get install ([^&]+)", run)[1].split()
    assert {"g++", "libc6-dev"} <= set(installed)
    assert "wget" in installed  # the probes
    assert "purge" not in run
    for name in ("command -v g++", "command -v gcc", "/Python.h"):
        assert name in run, "the build does not check it"
    assert not values(found["base-cuda"], "RUN")  # the same, and what it asks of NVIDIA's runtime
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in " ".join(values(found["base-cuda"], "ENV"))


def test_the_final_stage_is_no_root():
    final = stages()["final"]
    assert values(final, "USER")[-1] == "1000:100"
    assert not any(re.match(r"(CMD|ENTRYPOINT)$", name) for name, _ in final)  # KubeRay's
    environment = " ".join(values(final, "ENV"))
    assert "PYTHONPATH=/opt/paceline/lib/python3.11/site-packages" in environment  # Ray's workers run another Python
    assert not any("pip install" in value for value in values(final, "RUN"))
    assert [value.split()[0] for value in values(final, "COPY")] == ["--from=dependencies"]


def test_the_image_installs_the_service():
    (install,) = (value for value in values(stages()["dependencies"], "RUN") if "torch==" in value)
    assert '--no-index "$(ls /tmp/wheels/*.whl)[serve,tracing]"' in install


def test_the_image_takes_every_package_but_torch_by_its_hash():
    """What pip may fetch at all: torch from the index that fits the device, and what the locked file names."""
    (install,) = (value for value in values(stages()["dependencies"], "RUN") if "torch==" in value)
    torch, packages, wheel = re.findall(r"pip install --no-cache-dir ([^&]+)|pip install (--no-index [^&]+)", install)
    assert torch[0].split() == ["--index-url", "${index}", "torch==${TORCH_VERSION}"]
    assert packages[0].split() == ["--require-hashes", "--no-deps", "-r", "/tmp/requirements.txt"]
    assert wheel[1].startswith("--no-index")
    assert "k8s/image/requirements.txt /tmp/requirements.txt" in values(stages()["dependencies"], "COPY")


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
