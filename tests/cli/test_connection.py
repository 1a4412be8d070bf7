"""TLS and the API key of ``paceline generate`` and ``paceline status``, against a server that asks for both."""

import grpc
import pytest
from tests.security.conftest import Mounted
from tests.support.fake_service import FakeService

from paceline.cli.main import main


@pytest.fixture
def mounted(tmp_path):
    return Mounted(tmp_path, names=("paceline.test",))


@pytest.fixture
def server(mounted):
    pair = [(mounted.key.read_bytes(), mounted.certificate.read_bytes())]
    with FakeService(credentials=grpc.ssl_server_credentials(pair, mounted.ca.read_bytes(), True)) as server:
        yield server


def flags(mounted, server):
    files = {"--tls-ca": mounted.ca, "--tls-certificate": mounted.certificate, "--tls-key": mounted.key}
    own = [str(part) for pair in files.items() for part in pair]
    return [*own, "--tls-server-name", "paceline.test", "--address", server.address]


def test_generate_and_status_show_certificate_and_key(mounted, server, monkeypatch, capsys):
    monkeypatch.setenv("PACELINE_API_KEY", "of-the-environment")
    assert main(["generate", "hi", *flags(mounted, server)]) == 0
    assert main(["status", *flags(mounted, server), "--api-key", "given"]) in (0, 1)
    assert "of-the-environment" not in "".join(capsys.readouterr())
    sent = [dict(metadata)["authorization"] for metadata in server.metadata]
    assert sent == ["Bearer of-the-environment", "Bearer given"]


def test_without_a_certificate_of_its_own_the_client_is_refused(mounted, server, capsys):
    for arguments in (["--tls-ca", str(mounted.ca), "--tls-server-name", "paceline.test"], []):
        assert main(["status", "--address", server.address, *arguments]) == 1
        assert "cannot be reached" in capsys.readouterr().err
    assert server.metadata == []
