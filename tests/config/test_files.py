"""The configuration as YAML there and back, in Serve config files, and with overrides."""

from __future__ import annotations

import pytest
import yaml
from tests.config.support import CLUSTER, needs_ray

from paceline.config import NgramOptions, ServiceConfig
from paceline.embedded import DRAFT_DIR
from paceline.errors import ConfigError

EXAMPLE = {
    "target_config": {
        "model_loading_config": {"model_id": "large", "model_source": "/models/large"},
        "engine_kwargs": {"max_sessions": 32, "kv_fraction": 0.8},
        "accelerator_type": "H100",
        "placement_group_config": {"bundles": [{"CPU": 1, "GPU": 1}]},
        "deployment_config": {"autoscaling_config": {"min_replicas": 1, "max_replicas": 4}},
    },
    "draft_config": {"kind": "ngram", "engine_kwargs": {"max_match": 6}},
    "router_config": {"request_timeout_s": 60, "deployment_config": {"num_replicas": 2}},
    "log": {"json": True, "level": "WARNING"},
}


@pytest.mark.parametrize("args", [{}, EXAMPLE, {"draft_config": None}], ids=["defaults", "example", "plain"])
def test_yaml_there_and_back(tmp_path, args):
    config = ServiceConfig.parse(args)
    file = tmp_path / "service.yaml"
    file.write_text(config.to_yaml())
    again = ServiceConfig.from_file(file)
    assert again == config
    assert again.to_yaml() == config.to_yaml()
    file.write_text(yaml.safe_dump(args))
    assert ServiceConfig.from_file(file) == config


def test_a_serve_config_file_gives_the_arguments_of_its_application(tmp_path):
    file = tmp_path / "serve.yaml"
    serve = {"applications": [{"name": "paceline", "import_path": "paceline.app:build", "args": EXAMPLE}]}
    file.write_text(yaml.safe_dump(serve))
    assert ServiceConfig.from_file(file) == ServiceConfig.parse(EXAMPLE)
    file.write_text(yaml.safe_dump(serve | {"grpc_options": {"port": 9100}, "http_options": {"port": 8100}}))
    server = ServiceConfig.from_file(file).server
    assert (server.grpc_port, server.http_port) == (9100, 8100)
    serve["applications"][0]["args"] = {"server": {"grpc_port": 9000}}
    file.write_text(yaml.safe_dump(serve | {"grpc_options": {"port": 9100}}))
    with pytest.raises(
        ConfigError, match=r"^server.grpc_port is 9000 while grpc_options.port of the same file is 9100"
    ):
        ServiceConfig.from_file(file)
    del serve["applications"][0]["args"]
    file.write_text(yaml.safe_dump(serve))
    assert ServiceConfig.from_file(file) == ServiceConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1\n", "holds [1]: a mapping of keys is needed"),
        ("a: [1\n", "is not valid YAML: expected"),
        ("applications: []\n", "applications is [] in"),
        ("applications: [{args: 3}]\n", "applications[0].args is 3 in"),
        ("applications: [{args: {server: 3}}]\nhttp_options: {port: 1}\n", "server is 3: it must be a mapping"),
        ("applications: [{args: {log: {as_json: true}}}]\n", "log.as_json is true, but there is no such key"),
        ("log: {levl: INFO}\n", "log.levl is 'INFO', but there is no such key: did you mean level?"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path, text, message):
    file = tmp_path / "service.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        ServiceConfig.from_file(file)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_and_one_that_is_empty(tmp_path):
    with pytest.raises(ConfigError, match=r"none.yaml': it cannot be read \(No such file"):
        ServiceConfig.from_file(tmp_path / "none.yaml")
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert ServiceConfig.from_file(tmp_path / "empty.yaml") == ServiceConfig()
    (tmp_path / "bytes.yaml").write_bytes(b"a: \xff\xfe\n")
    with pytest.raises(ConfigError, match=r"bytes.yaml': it is not UTF-8 text"):
        ServiceConfig.from_file(tmp_path / "bytes.yaml")


def test_overrides_change_single_keys():
    config = ServiceConfig().with_overrides(
        [
            "target_config.engine_kwargs.max_sessions=32",
            "draft_config.engine_kwargs.fan_out=3",
            "router_config.request_timeout_s=2.5",
            "log.json=true",
            "server.host=::1",
            "target_config.deployment_config.ray_actor_options={num_gpus: 1}",
        ]
    )
    assert config.target_config.engine_kwargs.max_sessions == 32
    assert config.draft_config.engine_kwargs.fan_out == 3
    assert config.draft_setup().source == str(DRAFT_DIR), "what was not named is left as it was"
    assert config.router_config.request_timeout_s == 2.5
    assert config.log.as_json
    assert config.server.host == "::1"
    assert config.target_config.deployment_config.ray_actor_options.num_gpus == 1
    again = config.with_overrides(["target_config.engine_kwargs.max_sessions=8"])
    assert again.target_config.engine_kwargs.max_sessions == 8
    assert again.log.as_json


def test_overrides_of_the_draft():
    assert ServiceConfig().with_overrides(["draft_config=null"]).draft_config is None
    ngram = ServiceConfig().with_overrides(["draft_config.kind=ngram"])
    assert ngram.draft_setup().options == NgramOptions()
    assert ngram.with_overrides(["draft_config.engine_kwargs.max_match=8"]).draft_setup().options == NgramOptions(
        max_match=8
    )
    built = ServiceConfig(draft_config=type(ngram.draft_config)())
    assert built.with_overrides(["log.json=true"]).draft_setup().options == NgramOptions()
    with pytest.raises(ConfigError, match=r"^draft_config names no model while target_config names 'org/large'"):
        ServiceConfig().with_overrides(["target_config.model_loading_config.model_id=org/large"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("target_config", "'target_config' is not a setting: it must be KEY=VALUE with a dotted key"),
        ("=3", "'=3' is not a setting"),
        ("log.json={", "log.json is '{', which is not valid YAML"),
    ],
)
def test_an_override_that_cannot_be_used(override, message):
    with pytest.raises(ConfigError) as caught:
        ServiceConfig().with_overrides([override])
    assert message in str(caught.value)


def test_an_override_inside_what_is_no_mapping():
    with pytest.raises(ConfigError, match=r"^draft_config.engine_kwargs.fan_out cannot be set: draft_config is null"):
        ServiceConfig.parse({"draft_config": None}).with_overrides(["draft_config.engine_kwargs.fan_out=3"])


@needs_ray
def test_the_embedded_serve_config_file_validates():
    from ray.serve.schema import ServeDeploySchema

    file = CLUSTER / "embedded.yaml"
    schema = ServeDeploySchema.model_validate(yaml.safe_load(file.read_text()))
    (application,) = schema.applications
    assert (application.name, application.route_prefix) == ("paceline", "/")
    assert application.import_path == "paceline.app:build"
    config = ServiceConfig.parse(application.args)
    assert (config.target_setup(), config.draft_setup()) == (
        ServiceConfig().target_setup(),
        ServiceConfig().draft_setup(),
    )
    assert ServiceConfig.from_file(file) == config
    assert schema.grpc_options.port == config.server.grpc_port
    assert schema.http_options.port == config.server.http_port
    assert schema.grpc_options.grpc_servicer_functions == [
        "paceline.rpc.services.add_generation",
        "paceline.rpc.services.add_health",
        "paceline.rpc.services.add_reflection",
    ]
