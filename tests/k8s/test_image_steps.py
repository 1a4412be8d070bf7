"""The steps of the image's Dockerfile, executed without containers: the root of a stage is a folder.

Absolute paths of a step become paths below that folder. Nothing is fetched: the base images have the packages that are
installed here, so pip installs the wheel alone, and checks the locked versions and the extras against them. The build
frontend, which would fetch hatchling, and chown, which is for root, are stand-ins. The steps of ``base-cpu`` and
``base-cuda`` change Debian's packages: test_image.py reads them.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml
from tests.k8s.support import K8S, REPOSITORY, service_of, templates_of
from tests.k8s.test_image import stages, values

from paceline import __version__
from paceline.cluster.ports import free_ports

BASE = "home/ray/anaconda3/bin"
"""Where Ray's image has its interpreter and its programs."""
ABSOLUTE = re.compile(r"(?<![\w/.}-])/(?=(?:src|wheels|tmp|opt|cache|models|home)\b)")
"""The first character of a path that a step names; URLs have none."""
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
PROGRAMS = {
    "pip": '#!/bin/sh\nexec python -m pip "$@"\n',
    "chown": '#!/bin/sh\necho "chown $@"\n',
}
FRONTEND = """
import subprocess, sys
_, wheel, outdir, folder, tree = sys.argv
assert (wheel, outdir, tree) == ("--wheel", "--outdir", "."), sys.argv
sys.exit(subprocess.call([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]))
"""


class Image:
    """A build in progress. The root of the stage that is built is always at the same path, as it is in a container."""

    def __init__(self, place: Path, **arguments: str) -> None:
        """``arguments``: values of ARG, as of ``docker build --build-arg``."""
        self.place, self._stage, self.root = place, "", place / "root"
        self._programs, self._packages = place / "programs", place / "packages"
        declared = dict(value.split("=", 1) for value in values(stages()[None], "ARG"))
        self.arguments = declared | arguments
        self.environment: dict[str, str] = {}
        """What the ENV of the stage says."""
        self.output = ""
        """What the steps of the stage have printed."""
        self.user = ""
        self._workdir = self.root
        self._make_base()

    def _make_base(self) -> None:
        """What the base images have: an interpreter, and all packages that are here but our own."""
        self._programs.mkdir()
        (self._programs / "python").symlink_to(sys._base_executable)
        (self._programs / "ray").symlink_to(Path(sys.executable).parent / "ray")
        for name, script in PROGRAMS.items():
            (self._programs / name).write_text(script)
            (self._programs / name).chmod(0o755)
        self._packages.mkdir()
        for folder in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
            for path in Path(folder).iterdir():
                if path.suffix != ".pth" and not path.name.startswith(("paceline", "__")):
                    (self._packages / path.name).symlink_to(path)
        (install,) = values(stages()["wheel"], "RUN")[:1]
        version = re.fullmatch(r"pip install --no-cache-dir build==(\S+)", install)[1]
        for name, file, text in (
            ("build", "__main__.py", FRONTEND),
            (f"build-{version}.dist-info", "METADATA", f"Metadata-Version: 2.1\nName: build\nVersion: {version}\n"),
        ):
            shutil.rmtree(self._packages / name, ignore_errors=True)
            (self._packages / name).unlink(missing_ok=True)
            (self._packages / name).mkdir()
            (self._packages / name / file).write_text(text)

    def build(self, stage: str, instructions: list[tuple[str, str]]) -> None:
        """Executes a stage. Raises AssertionError with what a step that fails has printed."""
        if self.root.exists():
            self.root.rename(self.place / self._stage)
        self._stage, self.environment, self.output, self._workdir = stage, {}, "", self.root
        (self.root / "tmp").mkdir(parents=True)
        (self.root / BASE).parent.mkdir(parents=True)
        (self.root / BASE).symlink_to(self._programs)
        for instruction, value in instructions:
            if instruction == "ARG":
                name, _, default = value.partition("=")
                self.arguments.setdefault(name, default)
            elif instruction == "ENV":
                names = re.findall(r"(?:^|\s)(\w+)=", value)
                told = self.shell(f"export {value}; exec env -0", self.root)
                found = dict(line.split("=", 1) for line in told.split("\0") if "=" in line)
                self.environment |= {name: found[name] for name in names}
            elif instruction == "WORKDIR":
                self._workdir = Path(self._here(value))
                self._workdir.mkdir(parents=True, exist_ok=True)
            elif instruction == "COPY":
                self._copy(value)
            elif instruction == "RUN":
                self.output += self.shell(value, self._workdir)
            elif instruction == "USER":
                self.user = value

    def shell(self, command: str, folder: Path | None = None) -> str:
        """What a command prints, run as a step or by whoever starts a container. Raises AssertionError."""
        ours = ("PYTHON", "PACELINE_", "PIP_", "VIRTUAL_ENV")
        own = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        own |= {"PIP_NO_INDEX": "1", "PIP_NO_COMPILE": "1", "PATH": f"{self._programs}:/usr/local/bin:/usr/bin:/bin"}
        own |= self.arguments | self.environment
        own["PYTHONPATH"] = ":".join([*filter(None, [own.get("PYTHONPATH")]), str(self._packages)])
        done = subprocess.run(
            ["/bin/sh", "-c", self._here(command)],
            cwd=folder or self._workdir,
            env=own,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    def _here(self, text: str) -> str:
        return ABSOLUTE.sub(f"{self.root}/", text).replace("python3.11", PYTHON)

    def _copy(self, value: str) -> None:
        words = value.split()
        flags = dict(word[2:].split("=", 1) for word in words if word.startswith("--"))
        *sources, target = (word for word in words if not word.startswith("--"))
        tree = self.place / flags["from"] if "from" in flags else REPOSITORY
        into = self._workdir / self._here(target)
        for source in sources:
            found = tree / source.lstrip("/")
            if found.is_dir():
                shutil.copytree(
                    found, into, symlinks=True, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
                )
            else:
                (into if target.endswith("/") else into.parent).mkdir(parents=True, exist_ok=True)
                shutil.copy(found, into)


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """The image, built for the accelerator of the torch that is installed here."""
    torch = pytest.importorskip("torch")
    accelerator = "cpu" if torch.version.cuda is None else "cuda"
    built = Image(tmp_path_factory.mktemp("image"), ACCELERATOR=accelerator)
    for name in ("wheel", "dependencies", "final"):
        built.build(name, stages()[name])
    return built


def test_every_step_succeeds_and_pip_installs_the_wheel_alone(image):
    site = image.root / "opt" / "paceline" / "lib" / PYTHON / "site-packages"
    assert image.environment["PYTHONPATH"] == str(site)
    theirs = {"pip", "setuptools", "wheel"}
    installed = {path.name.partition("-")[0] for path in site.glob("*.dist-info")} - theirs
    assert installed == {"paceline"}, "the others have the locked versions as they are"
    assert image.shell("paceline --version").split() == ["paceline", __version__]


def test_its_user_is_given_the_caches_and_is_no_root(image):
    assert image.user == "1000:100"
    (given,) = re.findall(r"^chown (\S+) (.+)$", image.output, re.MULTILINE)
    assert given == (image.user, f"{image.root}/cache {image.root}/models")
    assert image.environment["PACELINE_CACHE"].startswith(f"{image.root}/cache/")
    assert (image.root / "models").is_dir()


def test_it_has_what_the_manifests_ask_for(image):
    """It has no entrypoint and names no ports: KubeRay starts `ray`, whose processes import what Serve is told to."""
    assert not {name for name, _ in stages()["final"]} & {"ENTRYPOINT", "CMD", "EXPOSE"}
    documents = yaml.safe_load_all((K8S / "overlays" / "small" / "rendered.yaml").read_text())
    service = service_of(list(documents))
    told = service["spec"]["serveConfigV2"]
    config = yaml.safe_load(told)
    (application,) = config["applications"]
    wanted = [application["import_path"].replace(":", "."), *config["grpc_options"]["grpc_servicer_functions"]]
    code = f"import ray.serve, pydoc; print(*[callable(pydoc.locate(name)) for name in {wanted}])"
    assert image.shell(f'/{BASE}/python -c "{code}"').split() == ["True"] * len(wanted)
    (image.root / "tmp" / "serve.yaml").write_text(told)
    settings = yaml.safe_load(image.shell("paceline config --config /tmp/serve.yaml"))
    assert settings["server"]["http_port"] == config["http_options"]["port"]
    head = templates_of(service)["head"]
    ports = {port["name"]: port["containerPort"] for port in head["spec"]["containers"][0]["ports"]}
    assert ports["serve"] == config["http_options"]["port"]
    assert ports["serve-grpc"] == config["grpc_options"]["port"]


def test_its_service_may_start(image):
    http_port, grpc_port = free_ports(2)
    ports = f"--set server.http_port={http_port} --set server.grpc_port={grpc_port}"
    assert "The service may start." in image.shell(f"paceline check {ports}")


MUTANTS = {
    "a file that the wheel needs is not copied": ("wheel", "COPY", "README.md ", "", "README.md"),
    "a source that is not there": ("wheel", "COPY", "services services", "servers services", "servers"),
    "the packages are elsewhere": ("final", "ENV", "lib/python3.11/", "lib/", "No module named 'paceline'"),
    "programs are elsewhere": ("final", "ENV", "PATH=/opt/paceline/bin:", "PATH=/opt/bin:", "paceline: not found"),
}
"""Stage, instruction, what is replaced in it, and what a build then says."""


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_step_that_is_wrong_is_noticed(image, tmp_path, mutant):
    stage, instruction, old, new, said = MUTANTS[mutant]
    changed = [(name, value.replace(old, new) if name == instruction else value) for name, value in stages()[stage]]
    assert changed != stages()[stage]
    other = Image(tmp_path, **image.arguments)
    (other.place / "dependencies").symlink_to(image.place / "dependencies")
    with pytest.raises((AssertionError, FileNotFoundError), match=re.escape(said)):
        other.build(stage, changed)
