"""The wheel and the source distribution: what is in them, what they require, and what runs in a bare environment.

python -m tests.cli.test_distributions      prints the size of each extra with its dependencies
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import threading
import tomllib
import zipfile
from email.parser import Parser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.bench.fake_openai import FakeOpenAI
from tests.support.fake_service import WORDS, FakeService

import paceline
from paceline.cli.extras import MODULES
from paceline.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "transformers", "ray", "numpy", "tokenizers", "safetensors", "fastapi", "cryptography", "matplotlib"}


def distributions(lines: list[str], extra: str = "") -> dict[str, metadata.Distribution]:
    """What is installed for the requirements of a project, directly or not. Fails if a version does not fit.

    ``lines``: its ``Requires-Dist``. ``extra``: of the project, none for the base alone.
    """
    queue = [(line, extra) for line in lines]
    found: dict[str, metadata.Distribution] = {}
    seen = set()
    while queue:
        line, extra_of_owner = queue.pop()
        requirement = Requirement(line)
        key = line, extra_of_owner
        if key in seen or (requirement.marker and not requirement.marker.evaluate({"extra": extra_of_owner})):
            continue
        seen.add(key)
        name = canonicalize_name(requirement.name)
        if name == "paceline":
            theirs = lines
        else:
            found[name] = metadata.distribution(name)
            assert requirement.specifier.contains(found[name].version, prereleases=True), line
            theirs = found[name].requires or []
        queue += [(inner, wanted) for inner in theirs for wanted in requirement.extras or {""}]
    return found


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def declared() -> list[str]:
    """``Requires-Dist`` as ``pyproject.toml`` has it."""
    optional = project()["optional-dependencies"]
    return project()["dependencies"] + [f'{line} ; extra == "{e}"' for e, lines in optional.items() for line in lines]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The source distribution."""
    return _build("sdist", ROOT, tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory, source):
    """The wheel that the source distribution builds, with nothing of this checkout at hand."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(source) as archive:
        archive.extractall(folder, filter="data")
    return _build("wheel", folder / source.name.removesuffix(".tar.gz"), folder)


def _build(target: str, tree: Path, out: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (path,) = (path for path in out.glob("paceline-*") if path.is_file())
    return path


def environment(place: Path, wheel: Path) -> Path:
    """A virtual environment with the wheel alone, and nothing that it requires. Returns its site-packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True, timeout=300)
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(place),
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        str(wheel),
    ]
    done = subprocess.run(install, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (site,) = (place / "lib").glob("python3*/site-packages")
    return site


def run(place: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A program of the environment, away from this checkout."""
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PACELINE_"))}
    return subprocess.run(
        [str(place / "bin" / arguments[0]), *arguments[1:]],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=place,
        env=alone | variables,
    )


def linked(place: Path, wheel: Path, extra: str = "") -> Path:
    """An environment with the wheel and what it requires, by links, file by file, and nothing else."""
    site = environment(place, wheel)
    lines = Parser().parsestr(_member(wheel, "METADATA")).get_all("Requires-Dist")
    here = Path(sysconfig.get_path("purelib"))
    needed = distributions(lines) | (distributions(lines, extra) if extra else {})
    for distribution in needed.values():
        for file in distribution.files or ():
            source = Path(str(distribution.locate_file(file)))
            if ".." not in file.parts and "__pycache__" not in file.parts and source.is_relative_to(here):
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                (site / file).symlink_to(source)
    return place


@pytest.fixture(scope="module")
def client(tmp_path_factory, wheel):
    """The environment of ``pip install paceline``."""
    return linked(tmp_path_factory.mktemp("client"), wheel)


def _member(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (path for path in archive.namelist() if path.endswith(f".dist-info/{name}"))
        return archive.read(path).decode()


# -- what is required ----------------------------------------------------------------------------------------------


def test_a_client_requires_neither_torch_nor_ray():
    assert not HEAVY & set(distributions(declared()))


@pytest.mark.parametrize(
    ("extra", "with_", "without"),
    [
        ("embedded", {"torch", "transformers", "fastapi"}, {"ray", "matplotlib", "cryptography"}),
        ("serve", {"torch", "transformers", "fastapi", "ray", "cryptography"}, {"matplotlib"}),
        ("endpoint", {"aiohttp", "tokenizers", "numpy"}, {"torch", "transformers", "ray", "matplotlib"}),
        ("bench", {"torch", "transformers", "matplotlib", "aiohttp"}, {"ray"}),
        ("quant", {"torchao"}, {"ray"}),
        ("tracing", {"opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-grpc"}, {"torch", "ray"}),
    ],
)
def test_an_extra_resolves_to_what_is_installed_here(extra, with_, without):
    found = set(distributions(declared(), extra)) - set(distributions(declared()))
    assert with_ <= found
    assert not without & found


def test_local_is_another_name_of_the_extra_embedded():
    assert project()["optional-dependencies"]["local"] == ["paceline[embedded]"]
    assert distributions(declared(), "local").keys() == distributions(declared(), "embedded").keys()


def test_the_command_line_names_the_extra_that_brings_a_module():
    owners = metadata.packages_distributions()
    for extra, lines in project()["optional-dependencies"].items():
        # The packages of tracing share one namespace: tests/metrics. NIXL and FlashInfer are not installed:
        # runtime/server.py and model/attention/flashinfer.py name them.
        if extra in ("dev", "local", "tracing", "nixl", "flashinfer"):
            continue
        names = {canonicalize_name(Requirement(line).name) for line in lines} - {"paceline"}
        assert {canonicalize_name(owner) for module in MODULES[extra] for owner in owners[module]} == names


def test_the_version_stands_in_one_place_and_the_changelog_knows_it():
    assert project()["dynamic"] == ["version"]
    assert "version" not in project()
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert paceline.__version__ in headings or headings == ["Unreleased"]  # nothing is released yet


# -- what is in them -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for package in ("paceline", "paceline_bench"):
        folder = ROOT / "services" / package
        files = {path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
        assert {f"{package}/{path.relative_to(folder)}" for path in files} <= names
    for expected in (
        "paceline/py.typed",
        "paceline/embedded/target/model.safetensors",
        "paceline/embedded/draft/model.safetensors",
        "paceline/model/parallel/shared_memory.cpp",
        "paceline/v1/generation_pb2_grpc.py",
        "paceline/v1/generation_pb2.pyi",
    ):
        assert expected in names
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {"paceline", "paceline_bench"}
    assert re.search(rf"^Version: {re.escape(paceline.__version__)}$", _member(wheel, "METADATA"), re.MULTILINE)


@pytest.mark.slow
def test_the_source_distribution_holds_the_tree(source):
    with tarfile.open(source) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("services", "protos", "tests", "benchmarks", "cluster", "k8s", "docs", ".ci"):
        assert any(name.startswith(f"{folder}/") for name in held), folder
    assert {"CHANGELOG.md", "Makefile", "constraints.txt", "requirements.txt", "k8s/image/Dockerfile"} <= held
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split("\n")
    assert {name for name in tracked if name and (ROOT / name).is_file()} <= held  # of a checkout by git


# -- what runs -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_bare_environment_is_a_client(client):
    for arguments in (["--help"], ["--version"], ["config"], ["config", "--schema"], ["completion", "bash"]):
        done = run(client, "paceline", *arguments)
        assert done.returncode == 0, done.stderr
        assert done.stdout
    code = "import paceline.client, sys; print(paceline.client.__file__, sorted(sys.modules))"
    done = run(client, "python", "-c", code)
    assert done.stdout.startswith(str(client)), done.stderr
    with FakeService() as service:
        done = run(client, "paceline", "generate", "hello", "--address", service.address)
        assert (done.returncode, done.stdout) == (0, "".join(WORDS) + "\n"), done.stderr
        done = run(client, "paceline", "status", "--address", service.address)
        assert done.returncode == 0, done.stderr


class _Completions(BaseHTTPRequestHandler):
    """Answers every chat."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert self.path == "/v1/chat/completions"
        if asked.get("stream"):
            segment = {"text": "Hello!", "drafted": False}
            event = {"choices": [{"delta": {"content": "Hello!"}, "speculation": {"segments": [segment]}}]}
            body = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode()
        else:
            body = json.dumps({"id": "one", "choices": [{"message": {"content": "Hello!"}}]}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_) -> None:
        pass


@pytest.mark.slow
def test_a_bare_environment_chats_and_answers_batches_over_http(client, tmp_path):
    with ThreadingHTTPServer(("127.0.0.1", 0), _Completions) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        code = "import sys; from paceline.cli.main import main; sys.stdin = open('said'); sys.exit(main(sys.argv[1:]))"
        (client / "said").write_text("hello\n")
        done = run(client, "python", "-c", code, "chat", "--address", url)
        assert (done.returncode, done.stdout) == (0, "Hello!\n"), done.stderr
        request = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
        request["body"] = {"messages": [{"role": "user", "content": "hello"}]}
        (tmp_path / "in.jsonl").write_text(json.dumps(request) + "\n")
        files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
        done = run(client, "paceline", "batch", *files, "--address", url)
        assert done.returncode == 0, done.stderr
        assert "Hello!" in (tmp_path / "out.jsonl").read_text()
        server.shutdown()


@pytest.mark.slow
def test_an_endpoint_is_measured_without_torch(tmp_path, wheel):
    """``pip install 'paceline[endpoint]'``: held-out prompts, cut by the embedded tokenizer."""
    place = linked(tmp_path / "venv", wheel, "endpoint")
    with FakeOpenAI() as server:
        load = ["--prompts", "2", "--sessions", "1", "--repeats", "1", "--max-tokens", "6"]
        done = run(place, "paceline", "bench", "endpoint", server.url, *load, "--json", str(tmp_path / "run.json"))
        assert done.returncode == 0, done.stderr
        assert server.url in done.stdout
        asked = [request["max_tokens"] for request in server.requests]
    assert asked.count(6) == 2
    (unit,) = json.loads((tmp_path / "run.json").read_text())["units"]
    assert len(unit["requests"]) == 2
    done = run(place, "python", "-c", "import torch")
    assert "No module named 'torch'" in done.stderr


OTHERS = {"status", "config", "plan", "completion"}
"""Commands that a client runs as they are."""
ARGUMENTS = {
    "generate": ["hello"],
    "batch": ["-i", "in.jsonl", "-o", "out.jsonl"],
    "convert": ["model.gguf", "folder"],
    "train-head": ["medusa", "--out", "folder"],
    "train-draft": ["--out", "folder"],
    "write-corpus": ["--out", "folder"],
}


@pytest.mark.slow
def test_every_command_names_the_extra_that_it_lacks(client):
    serve = {"serve", "check", "demo"}
    for command in {*COMMANDS, "bench"} - OTHERS:
        extra = "serve" if command in serve else "bench" if command == "bench" else "embedded"
        done = run(client, "paceline", command, *ARGUMENTS.get(command, []))
        assert (done.returncode, done.stdout) == (2, ""), (command, done.stderr)
        said = rf"paceline: {command} needs \w+, which is not installed: pip install 'paceline\[{extra}\]'\n"
        assert re.fullmatch(said, done.stderr), done.stderr
    done = run(client, "paceline", "bench", "endpoint", "http://127.0.0.1:1")
    assert done.returncode == 2
    assert done.stderr.endswith("pip install 'paceline[endpoint]'\n")
    done = run(client, "paceline", "serve", "--local")
    assert done.returncode == 2
    assert done.stderr.endswith("pip install 'paceline[embedded]'\n")


@pytest.mark.slow
def test_the_wheel_serves_where_everything_is_installed(tmp_path, wheel):
    """In an environment that sees this one's dependencies, and not this checkout."""
    site = environment(tmp_path / "venv", wheel)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    code = (
        "import json, paceline, paceline.cluster.drain, paceline.app; from paceline.config import ServiceConfig\n"
        "from paceline.embedded import TARGET_DIR; import paceline.v1.generation_pb2_grpc as g\n"
        "print(json.dumps([paceline.__file__, str(TARGET_DIR), TARGET_DIR.is_dir()]))"
    )
    done = run(tmp_path / "venv", "python", "-c", code)
    assert done.returncode == 0, done.stderr
    module, target, there = json.loads(done.stdout.splitlines()[-1])
    assert module.startswith(str(site))
    assert target.startswith(str(site))
    assert there
    done = run(tmp_path / "venv", "paceline", "--help")
    assert done.returncode == 0, done.stderr
    assert "serve" in done.stdout


def size_of(found: dict[str, metadata.Distribution]) -> int:
    """Bytes of the files of distributions."""
    paths = {Path(str(found_.locate_file(file))) for found_ in found.values() for file in found_.files or ()}
    return sum(path.stat().st_size for path in paths if path.is_file())


if __name__ == "__main__":
    own = [path for name in ("paceline", "paceline_bench") for path in (ROOT / "services" / name).rglob("*.*")]
    package = sum(path.stat().st_size for path in own if path.is_file() and "__pycache__" not in path.parts)
    print(f"| extra | packages | MB |\n|---|---|---|\n| none: the package itself | 1 | {package / 1e6:.0f} |")
    for name in ("", "embedded", "serve", "endpoint", "bench"):
        needed = distributions(declared()) | (distributions(declared(), name) if name else {})
        print(f"| {name or 'none'} | {1 + len(needed)} | {(package + size_of(needed)) / 1e6:,.0f} |")
