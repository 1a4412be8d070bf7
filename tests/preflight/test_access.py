"""Certificates and keys before the service starts."""

import pytest
from tests.security.conftest import Mounted, digest, write_keys

from paceline.config import ServiceConfig
from paceline.preflight.access import check_access, check_exposure
from paceline.preflight.findings import Severity


@pytest.fixture
def mounted(tmp_path):
    return Mounted(tmp_path)


def config(mounted, **server):
    files = {"certificate": str(mounted.certificate), "key": str(mounted.key)}
    tls = files | {"client_ca": str(mounted.ca)}
    internal = files | {"ca": str(mounted.ca)}
    return ServiceConfig.parse({"server": {"host": "127.0.0.1", "tls": tls} | server, "internal_tls": internal})


def test_files_that_are_sound_are_no_finding(mounted, tmp_path):
    keys = write_keys(tmp_path / "keys.yaml", {"name": "a", "sha256": digest("x")})
    assert check_access(config(mounted, api_keys=str(keys))) == []
    assert check_access(ServiceConfig()) == []


def test_each_part_that_cannot_be_used_is_an_error(mounted, tmp_path):
    mounted.key.write_text("broken")
    found = check_access(config(mounted, api_keys=str(tmp_path / "none.yaml")))
    assert [finding.severity for finding in found] == [Severity.ERROR] * 3
    texts = [finding.message for finding in found]
    assert texts[0].startswith("server.tls.key is '")
    assert texts[1].startswith("internal_tls.key is '")
    assert texts[2].startswith("server.api_keys is '")
    assert "it cannot be read" in texts[2]


def test_a_service_that_strangers_reach_is_warned_about_in_one_line(mounted, tmp_path):
    assert check_exposure(config(mounted)) == []
    assert check_exposure(config(mounted, host="localhost", tls=None)) == []
    (finding,) = check_exposure(config(mounted, host="0.0.0.0", tls=None))
    assert finding.severity is Severity.WARNING
    assert finding.message == (
        "server.host is '0.0.0.0': the service listens beyond this machine without API keys and without TLS"
    )
    (finding,) = check_exposure(config(mounted, host="0.0.0.0"))
    assert finding.message.endswith("beyond this machine without API keys")
    assert check_exposure(config(mounted, host="0.0.0.0", api_keys="keys.yaml")) == []
