"""The locked packages: each by hash, at the version that is tested, and none that the tree needs is missing."""

import re
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parents[1]
APART = {"torch"}
"""Which build of it is right depends on the device; ``make setup`` and the image take it from an index of its own."""


IMAGE = "k8s/image/requirements.txt"


def locked(file: str = "requirements.txt") -> dict[str, tuple[str, list[str]]]:
    """Name -> version and hashes, of a file."""
    text = (REPOSITORY / file).read_text().replace("\\\n", " ")
    found = {}
    for line in text.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            requirement = Requirement(line.split("--hash")[0].strip())
            (pin,) = requirement.specifier
            assert pin.operator == "==", line
            found[canonicalize_name(requirement.name)] = pin.version, re.findall(r"--hash=(\S+)", line)
    return found


def constrained() -> dict[str, str]:
    """Name -> version, of ``constraints.txt``."""
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pins = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {canonicalize_name(name): version.split(";")[0].strip() for name, version in pins}


def needed(extras: set[str]) -> set[str]:
    """Packages that are installed because the tree names them, directly or not."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    queue = [Requirement(line) for line in project["dependencies"]]
    queue += [Requirement(f"paceline[{','.join(extras)}]")]
    seen: set[tuple[str, frozenset[str]]] = set()
    while queue:
        requirement = queue.pop()
        key = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if key in seen or key[0] in APART:
            continue
        seen.add(key)
        if key[0] == "paceline":  # an extra that holds others
            queue += [Requirement(line) for extra in requirement.extras for line in optional[extra]]
            continue
        for line in metadata.requires(requirement.name) or ():
            further = Requirement(line)
            wanted = requirement.extras or {""}
            if further.marker is None or any(further.marker.evaluate({"extra": extra}) for extra in wanted):
                queue.append(further)
    return {name for name, _ in seen} - {"paceline"}


def test_every_package_is_locked_by_hash_at_the_version_that_is_tested():
    versions = constrained()
    for name, (version, hashes) in locked().items():
        assert hashes, name
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", value) for value in hashes), name
        assert versions.get(name) in (None, version), f"{name}: make lock"


def test_nothing_that_the_tree_needs_is_left_out():
    missing = needed({"serve", "quant", "tracing", "bench", "dev"}) - set(locked())
    assert not missing, f"{sorted(missing)}: make lock"


def test_the_image_installs_a_part_of_the_same_packages_that_leaves_nothing_out():
    everything, image = locked(), locked(IMAGE)
    assert {name: everything.get(name) for name in image} == image, "make lock"
    missing = needed({"serve", "tracing"}) - set(image)
    assert not missing, f"{sorted(missing)}: make lock"
    assert not {"pytest", "ruff", "mypy", "matplotlib"} & set(image)


def test_the_night_asks_for_known_weaknesses_and_cannot_pass_without_an_answer():
    def plan(target):
        done = subprocess.run(["make", "-n", target], cwd=REPOSITORY, capture_output=True, text=True, check=True)
        return done.stdout

    assert "pip-audit" in (audit := plan("audit"))
    assert "exit 1" in audit
    assert "make audit" in plan("test-nightly") or "pip-audit" in plan("test-nightly")
    assert "cyclonedx-py environment" in plan("sbom")
    assert plan("lock").count("--generate-hashes") == 2
    assert f"-o {IMAGE} " in plan("lock")
