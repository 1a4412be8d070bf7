"""Environment variables as configuration: what they set, what wins over them, and what is refused."""

import re
from pathlib import Path

import pytest
import yaml

from paceline.cli.main import main
from paceline.config import ServiceConfig
from paceline.config.environment import OTHER_VARIABLES, settings, variable_of, without_settings
from paceline.errors import ConfigError
from paceline.errors.refusals import keys_of

ROOT = Path(__file__).parents[2]
KEYS = list(keys_of(ServiceConfig))


def printed(capsys, *flags):
    assert main(["config", *flags]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_flags_win_over_the_environment_and_that_over_the_file(capsys, tmp_path, monkeypatch):
    file = tmp_path / "paceline.yaml"
    file.write_text("server: {grpc_port: 9100, http_port: 8100, host: 10.0.0.1}")
    monkeypatch.setenv("PACELINE_SERVER__HTTP_PORT", "8200")
    monkeypatch.setenv("PACELINE_SERVER__HOST", "10.0.0.2")
    found = printed(capsys, "--config", str(file), "--host", "10.0.0.3")["server"]
    assert (found["grpc_port"], found["http_port"], found["host"]) == (9100, 8200, "10.0.0.3")
    assert printed(capsys, "--set", "server.http_port=8300")["server"]["http_port"] == 8300
    assert printed(capsys)["server"]["grpc_port"] == ServiceConfig().server.grpc_port


def test_sections_come_before_the_keys_in_them(monkeypatch):
    monkeypatch.setenv("PACELINE_TARGET_CONFIG__ENGINE_KWARGS__MAX_SESSIONS", "3")
    monkeypatch.setenv("PACELINE_TARGET_CONFIG__ENGINE_KWARGS", "{dtype: float32, max_sessions: 4}")
    monkeypatch.setenv("PACELINE_DRAFT_CONFIG", "null")
    config = ServiceConfig().with_environment()
    assert config.target_config.engine_kwargs.max_sessions == 3
    assert config.target_config.engine_kwargs.dtype == "float32"
    assert config.draft_config is None


def test_every_key_has_a_variable_of_its_own():
    names = [variable_of(key) for key in dict.fromkeys(KEYS)]
    assert len({*names}) == len(names)
    assert not OTHER_VARIABLES & {*names}


@pytest.mark.parametrize(
    ("name", "near"),
    [("PACELINE_SERVER__GRPC_PROT", "PACELINE_SERVER__GRPC_PORT"), ("PACELINE_API_KEYS", "PACELINE_API_KEY")],
)
def test_an_unknown_variable_is_refused_by_the_near_name_without_its_value(capsys, monkeypatch, name, near):
    monkeypatch.setenv(name, "sk-very-secret")
    assert main(["config"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"paceline: {name} is set, but there is no such key of the configuration: did you mean {near}?\n"


def test_a_wrong_value_names_key_and_variable(monkeypatch):
    monkeypatch.setenv("PACELINE_SERVER__GRPC_PORT", "many")
    monkeypatch.setenv("PACELINE_SERVER__HOST", "10.0.0.1")
    said = "server.grpc_port is 'many': it must be a whole number (set by PACELINE_SERVER__GRPC_PORT)"
    with pytest.raises(ConfigError, match=re.escape(said)):
        ServiceConfig().with_environment()


def test_what_kubernetes_adds_for_services_is_left_alone(monkeypatch):
    for name in ("PORT", "SERVICE_HOST", "SERVICE_PORT_GRPC", "PORT_9000_TCP", "HEAD_SVC_PORT_8265_TCP_ADDR"):
        monkeypatch.setenv(f"PACELINE_{name}", "tcp://10.0.0.1:9000")
    monkeypatch.setenv("PACELINE_CACHE", "/somewhere")
    assert settings(KEYS) == {}
    monkeypatch.setenv("PACELINE_SERVER__PORT", "9000")  # no link of Kubernetes: it has two underscores
    with pytest.raises(ConfigError, match="PACELINE_SERVER__PORT is set"):
        settings(KEYS)


def test_a_process_that_is_told_everything_sees_no_setting(monkeypatch):
    monkeypatch.setenv("PACELINE_SERVER__GRPC_PORT", "9100")
    monkeypatch.setenv("PACELINE_DRAFT_CONFIG", "null")
    monkeypatch.setenv("PACELINE_CACHE", "/somewhere")
    names = {name for name in without_settings() if name.startswith("PACELINE_")}
    assert "PACELINE_CACHE" in names
    assert names <= OTHER_VARIABLES


def test_a_local_service_refuses_what_it_has_not(capsys, monkeypatch):
    monkeypatch.setenv("PACELINE_ROUTER_CONFIG__RECOVERY_TIMEOUT_S", "3")
    assert main(["serve", "--local"]) == 2
    assert "paceline: router_config.recovery_timeout_s is set with --local" in capsys.readouterr().err


def test_every_other_variable_of_the_tree_is_known():
    """Else a command that reads the configuration would refuse a variable that a script of ours sets."""
    found = set()
    for folder in ("services", "cluster", "k8s", "tests", "benchmarks", ".ci"):
        for path in (ROOT / folder).rglob("*"):
            if (
                path.suffix in (".py", ".sh", ".yaml", ".env", "")
                and path.is_file()
                and path.name != Path(__file__).name
            ):
                found |= {*re.findall(r"\bPACELINE_[A-Z]\w*", path.read_text(encoding="utf-8", errors="replace"))}
    variables = {variable_of(key) for key in KEYS}
    assert found - variables <= OTHER_VARIABLES
    assert found | {"PACELINE_CLONES", "PACELINE_MOTO"} >= OTHER_VARIABLES
