"""What the command line loads, and what it needs to be installed."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.fake_service import WORDS, FakeService

import paceline

ONLY = """
import sys

INSTALLED = {"google", "grpc", "grpc_health", "yaml", "annotated_types", "typing_extensions", "typing_inspection"}
INSTALLED |= {"httpx2", "httpcore2", "h11", "idna", "anyio", "truststore", "shtab"}
INSTALLED |= {"pydantic", "pydantic_core", "rich", "markdown_it", "mdurl", "pygments"}  # with what they depend on
INSTALLED |= {"paceline", "paceline_bench", *sys.stdlib_module_names}


class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in INSTALLED and not name.startswith("_"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Refuse())
"""
"""Refuses every library but those that are installed without an extra."""

HEAVY = {"torch", "transformers", "ray", "numpy", "tokenizers", "safetensors"}


def run(script, *arguments):
    return subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=300)


def paceline_alone(*arguments):
    """The command line where nothing but the libraries of a client is installed."""
    return run(f"{ONLY}\nfrom paceline.cli.main import main\nsys.exit(main(sys.argv[1:]))", *arguments)


def test_the_hook_refuses_what_is_installed_here():
    done = run(f"{ONLY}\nimport numpy")
    assert done.returncode == 1
    assert "No module named 'numpy'" in done.stderr


def test_a_client_needs_few_libraries():
    with FakeService() as service:
        done = paceline_alone("generate", "hello", "--address", service.address)
        assert (done.returncode, done.stdout) == (0, "".join(WORDS) + "\n"), done.stderr
        done = paceline_alone("status", "--address", service.address)
        assert done.returncode == 0, done.stderr
        assert "target" in done.stdout
        script = f"{ONLY}\nfrom paceline import Client\nprint(Client(sys.argv[1]).generate('hello').result.text)"
        done = run(script, service.address)
        assert (done.returncode, done.stdout) == (0, "".join(WORDS) + "\n"), done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["generate", "--help"], ["config", "--markdown"]])
def test_help_needs_no_more_than_a_client(arguments):
    done = paceline_alone(*arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_parsing_a_command_loads_nothing_heavy():
    script = """
import json, sys
from paceline.cli.main import build_parser
loaded = {}
for command in sys.argv[1:]:
    build_parser(command)
    loaded[command] = [*{name.partition(".")[0] for name in sys.modules}]
print(json.dumps(loaded))
"""
    done = run(script, "generate", "serve", "status", "check", "config", "plan", "demo", "train-head")
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout)
    assert {command: HEAVY & {*names} for command, names in loaded.items() if HEAVY & {*names}} == {}
    assert len(loaded) == 8


def test_the_help_of_all_commands_loads_none_of_them():
    script = "import json, sys; from paceline.cli.main import build_parser; build_parser(''); "
    done = run(f"{script}print(json.dumps(sorted(sys.modules)))")
    loaded = set(json.loads(done.stdout))
    commands = {f"paceline.cli.{path.stem}" for path in (Path(paceline.__file__).parent / "cli").glob("*.py")}
    assert loaded & commands <= {f"paceline.cli.{name}" for name in ("main", "exit", "extras", "flags")}
    assert not loaded & (HEAVY | {"grpc", "paceline_bench"})


def test_a_library_that_is_missing_is_named():
    done = paceline_alone("bench", "--help")
    assert (done.returncode, done.stdout) == (2, "")
    said = r"paceline: bench needs \w+, which is not installed: pip install 'paceline\[bench\]'\n"
    assert re.fullmatch(said, done.stderr)
