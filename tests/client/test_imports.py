"""What importing and using a client loads, in an interpreter of its own."""

import json
import subprocess
import sys

import pytest

HEAVY = {"torch", "ray", "transformers", "numpy"}


def loaded_by(code):
    """Names of all modules that are loaded after ``code``."""
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], timeout=300, capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def ours(modules):
    return {name for name in modules if name.partition(".")[0] == "paceline"}


def test_importing_the_package_loads_no_library():
    loaded = loaded_by("import paceline; paceline.__version__")
    assert not loaded & {*HEAVY, "grpc", "pydantic"}
    assert ours(loaded) == {"paceline"}


def test_importing_the_client_loads_few_of_our_modules_and_nothing_heavy():
    loaded = loaded_by("import paceline.client")
    assert len(ours(loaded)) <= 10
    assert not loaded & HEAVY


@pytest.mark.parametrize("name", ["Client", "AsyncClient"])
def test_a_client_loads_the_public_protocol_alone(name):
    loaded = loaded_by(f"from paceline import {name}; {name}('localhost:1')")
    assert not loaded & HEAVY
    assert "grpc" in loaded
    written = {module for module in ours(loaded) if not module.startswith("paceline.v1")}
    folders = {"paceline.client", "paceline.rpc"}
    assert written - folders == {
        *("paceline", "paceline.errors", "paceline.errors.files", "paceline.errors.refusals", "paceline.types"),
        *("paceline.rpc.generation", "paceline.rpc.protocol", "paceline.rpc.status", "paceline.rpc.values"),
        *("paceline.client.connection", "paceline.client.retries", "paceline.client.tracing"),
        "paceline.client.transcript",
        "paceline.client.blocking" if name == "Client" else "paceline.client.aio",
    }


def test_a_name_that_the_package_does_not_have():
    import paceline
    import paceline.client

    for module in (paceline, paceline.client):
        with pytest.raises(AttributeError, match="NoSuchName"):
            _ = module.NoSuchName
