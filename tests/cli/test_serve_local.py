"""``paceline serve --local``: the HTTP port over both engines, from the flags to the signal that ends it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys

import openai
import pytest
from tests.security.conftest import digest, write_keys

from paceline.cli.main import main
from paceline.cluster.ports import free_ports

REFUSED = [
    (("--grpc-port", "9000"), "--grpc-port is given with --local"),
    (("--set", "server.http_port=9000"), "--set is given with --local"),
    (("--targets", "2"), "--targets is given with --local"),
    (("--address", "auto"), "--address is given with --local"),
    (("--tls-client-ca", "ca.pem"), "--tls-client-ca is given with --local"),
    (("--print-environment",), "--print-environment is given with --local"),
    (("--http-port", "70000"), "server.http_port is 70000"),
    (("--api-keys", "nowhere.yaml"), "it cannot be read"),
    (("--tls-certificate", "nowhere.pem", "--tls-key", "nowhere.pem"), "there is no such file"),
    (("--target", "somewhere"), "--target is given without --draft"),
]


@pytest.mark.parametrize(("flags", "sentence"), REFUSED)
def test_flags_of_what_is_not_there_are_refused(capsys, flags, sentence):
    port = () if "--http-port" in flags else ("--http-port", str(free_ports(1)[0]))
    assert main(["serve", "--local", *port, *flags]) == 2
    assert sentence in capsys.readouterr().err


def test_a_port_that_is_taken_is_refused_before_a_model_is_loaded(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--local", "--http-port", str(port)]) == 2
    assert f"server.http_port is {port}: it cannot be used" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_it_serves_until_a_signal(tmp_path, number, status):
    keys = write_keys(tmp_path / "keys.yaml", {"name": "alice", "sha256": digest("key-of-alice")})
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "paceline", "serve", "--local", "--no-compile", "--http-port", str(port)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with subprocess.Popen(
        [*command, "--api-keys", str(keys)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as server:
        try:
            lines = [server.stdout.readline() for _ in range(2)]
            assert lines == [
                f"HTTP     http://127.0.0.1:{port}/v1  OpenAI-compatible\n",
                "ready\n",
            ], server.stderr.read() if server.poll() is not None else lines
            tried, page = (server.stdout.readline() for _ in range(2))
            assert tried.startswith(f"try      curl http://127.0.0.1:{port}/v1/completions -H")
            assert page == f"page     http://127.0.0.1:{port}/\n"
            with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="key-of-alice") as client:
                (model,) = client.models.list().data
                answer = client.completions.create(model=model.id, prompt="def read", max_tokens=8)
                assert answer.usage.completion_tokens >= 1
                with pytest.raises(openai.AuthenticationError):
                    client.with_options(api_key="wrong").models.list()
        finally:
            os.killpg(server.pid, number)
            assert server.wait(60) == status
        told = server.stderr.read()
        assert "Traceback" not in told
        for stage in ("target: loading", "draft: loading", "target: testing that decoding"):
            assert re.search(rf"^paceline: {stage}.* \(\d+\.\d s\)$", told, re.MULTILINE), told
        assert re.search(r"^paceline: ready after \d+\.\d s$", told, re.MULTILINE), told
