"""The JSON Schema of configuration files: it takes what the configuration takes, and refuses the rest."""

import jsonschema
import pytest
import yaml
from tests.config.test_environment import ROOT

from paceline.config import ServiceConfig
from paceline.config.schema import file_schema

VALIDATOR = jsonschema.Draft202012Validator(file_schema())
HINT = "# yaml-language-server: $schema=../docs/configuration.schema.json\n"


def faults(data):
    return [error.message for error in VALIDATOR.iter_errors(data)]


def test_it_is_a_schema():
    jsonschema.Draft202012Validator.check_schema(file_schema())


@pytest.mark.parametrize("name", ["embedded", "serve-gpu", "serve-onprem", "serve-small"])
def test_shipped_files_name_it_and_are_right_by_it(name):
    path = ROOT / "cluster" / f"{name}.yaml"
    text = path.read_text(encoding="utf-8")
    assert text.startswith(HINT)
    assert (path.parent / HINT.split("=")[1].strip()).exists()
    data = yaml.safe_load(text)
    assert faults(data) == []
    data["applications"][0]["args"]["target_confi"] = {}
    assert any("target_confi" in message for message in faults(data))


@pytest.mark.parametrize(
    "data",
    [
        {},
        ServiceConfig().to_dict(),
        {"draft_config": None},
        {"draft_config": {"engine_kwargs": {"tree_budget": 32}}},
        {"draft_config": {"kind": "ngram"}},
        {"log": {"json": True}},
        {"target_config": {"engine_kwargs": {"heads": [{"method": "early_exit", "boundaries": [4]}]}}},
    ],
)
def test_it_takes_what_the_configuration_takes(data):
    ServiceConfig.parse(data)
    assert faults(data) == []


@pytest.mark.parametrize(
    "data",
    [
        {"sever": {}},
        {"server": {"grpc_prot": 1}},
        {"server": {"grpc_port": 0}},
        {"server": {"grpc_port": "9000"}},
        {"log": {"level": "LOUD"}},
        {"draft_config": {"kind": "nothing"}},
        {"target_config": {"engine_kwargs": {"max_sessions": None}}},
    ],
)
def test_it_refuses_what_the_configuration_refuses(data):
    with pytest.raises(ValueError):
        ServiceConfig.parse(data)
    assert faults(data)


def test_a_description_speaks_yaml():
    keys = file_schema()["$defs"]["ServiceConfig"]["properties"]
    assert keys["draft_config"]["description"] == "null: plain decoding."
    assert "title" not in keys["server"]
