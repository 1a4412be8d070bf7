"""What ``paceline serve`` keeps to its owner and to its machine, as far as it can be seen without Ray."""

import asyncio
import json

import pytest

from paceline.cluster.environment import local_environment, serve_environment
from paceline.cluster.private import protect_token
from paceline.config.service import ServerConfig
from paceline.rpc.loopback import local_address
from paceline.security.haproxy import BINDS


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def mode(path):
    return oct(path.stat().st_mode & 0o777)


def test_the_token_is_made_for_its_owner_alone(home):
    protect_token()
    file = home / ".ray" / "auth_token"
    assert (mode(file), mode(file.parent)) == ("0o600", "0o700")
    assert len(token := file.read_text()) >= 32
    protect_token()
    assert file.read_text() == token


def test_a_token_that_others_can_read_is_repaired_and_kept(home, capsys):
    file = home / ".ray" / "auth_token"
    file.parent.mkdir()
    file.write_text("abc")
    file.chmod(0o644)
    protect_token()
    assert (mode(file), file.read_text()) == ("0o600", "abc")
    assert str(file) in capsys.readouterr().err
    protect_token()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"])
def test_a_token_from_elsewhere_is_not_made_again(home, monkeypatch, name):
    monkeypatch.setenv(name, str(home / "absent"))
    protect_token()
    assert list(home.iterdir()) == []


def test_no_token_is_made_where_none_is_asked_for(home, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    protect_token()
    assert list(home.iterdir()) == []


@pytest.mark.parametrize(("host", "public"), [("127.0.0.2", "127.0.0.2"), ("0.0.0.0", "*")])
def test_of_a_ray_of_our_own_only_the_public_ports_are_where_it_is_asked(tmp_path, host, public):
    server = ServerConfig(host=host)
    binds = json.loads(local_environment(tmp_path, server)[BINDS])
    assert sorted(binds.values()) == sorted(["127.0.0.1"] * 2 + [public] * 2)
    assert binds[str(server.grpc_port)] == binds[str(server.http_port)] == public


def test_on_a_cluster_statistics_stay_on_the_node(tmp_path):
    environment = serve_environment(tmp_path)
    pages = [environment[f"RAY_SERVE_HAPROXY_{page}_PORT"] for page in ("STATS", "METRICS")]
    assert json.loads(environment[BINDS]) == dict.fromkeys(pages, "127.0.0.1")


def test_a_server_for_all_addresses_is_one_for_this_machine():
    assert local_address("[::]:5") == local_address("0.0.0.0:5") == "127.0.0.1:5"
    assert local_address("10.0.0.7:5") == "10.0.0.7:5"


async def test_the_hook_keeps_a_server_of_grpc_to_this_machine(monkeypatch):
    from grpc import aio
    from grpc.aio._server import Server

    from paceline.rpc.loopback import keep_local

    for name in ("add_insecure_port", "add_secure_port"):
        monkeypatch.setattr(Server, name, getattr(Server, name))
    keep_local()
    server = aio.server()
    port = server.add_insecure_port("[::]:0")
    await server.start()
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.2", port)
    finally:
        await server.stop(None)


def test_no_two_parts_of_a_service_are_given_one_port(tmp_path, monkeypatch):
    """Neither drawn twice, nor one that the service is about to open."""
    monkeypatch.setattr("paceline.cluster.ports.PORT_RANGE", (26000, 26008))
    names = ["AUTOSCALER_METRIC_PORT", "DASHBOARD_METRIC_PORT", "RAY_SERVE_HAPROXY_STATS_PORT"]
    names += [
        "RAY_SERVE_HAPROXY_METRICS_PORT",
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT",
    ]
    monkeypatch.setattr("paceline.cluster.ports.is_free", lambda port: True)
    environment = local_environment(tmp_path, ServerConfig(grpc_port=26003, http_port=26005))
    assert sorted(int(environment[name]) for name in names) == [26000, 26001, 26002, 26004, 26006, 26007]
