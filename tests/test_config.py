"""The configuration: its defaults, its refusals by the sentence, YAML there and back, and KV pages by memory."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import yaml
from tests.support import pair

from paceline.config import (
    AutoscalingConfig,
    DeploymentConfig,
    DraftModelConfig,
    LocalConfig,
    ModelConfig,
    NgramConfig,
    PairConfig,
    RayActorOptions,
    ServiceConfig,
)
from paceline.embedded import DRAFT_DIR, TARGET_DIR
from paceline.errors import ConfigError
from paceline.estimate import CODE_BYTES, target_estimate
from paceline.memory import PAGE_SIZE, available_bytes, draft_pages, fraction_pages, session_pages, target_pages
from paceline.types import MAX_DRAFT_TOKENS

needs_ray = pytest.mark.filterwarnings("ignore::DeprecationWarning")
"""Ray's own modules use what pydantic has deprecated."""
CLUSTER = Path(__file__).parent.parent / "cluster"
GIB = 1 << 30


def nested(key, value):
    """{"a": {"b": value}} for "a.b"."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def refusal(args):
    with pytest.raises(ConfigError) as caught:
        ServiceConfig.parse(args)
    message = str(caught.value)
    assert "\n" not in message
    return message


# -- defaults ----------------------------------------------------------------------------------------------


def test_the_default_is_the_embedded_pair_with_one_replica_of_each():
    config = ServiceConfig()
    assert config.pair() == PairConfig(
        target=ModelConfig(path=str(TARGET_DIR)), draft=DraftModelConfig(path=str(DRAFT_DIR))
    )
    assert config == ServiceConfig.parse({})
    parts = (config.target_config, config.draft_config, config.router_config)
    options = [part.deployment_options() for part in parts]
    assert [o["num_replicas"] for o in options] == [1, 1, 1]
    assert sum(o["ray_actor_options"]["num_cpus"] for o in options) <= 2.0, "two cores hold all of it"
    for each in options:
        assert each["graceful_shutdown_timeout_s"] == 600
        assert 0.1 <= each["graceful_shutdown_wait_loop_s"] <= 0.5
        assert each["health_check_period_s"] == 1
        assert each["max_ongoing_requests"] >= 1024
    assert (config.server.host, config.server.grpc_port, config.server.http_port) == ("0.0.0.0", 9000, 8000)
    assert not config.log.prompts
    router = config.router_config
    assert (router.max_queued_requests, router.recovery_timeout_s) == (64, 30)
    assert (router.draft_timeout_s, router.target_timeout_s, router.request_timeout_s) == (1.0, 5.0, None)


def test_model_source_and_tokenizer_source_default_to_the_model():
    loading = ServiceConfig.parse(
        {
            "target_config": {"model_loading_config": {"model_id": "org/large"}},
            "draft_config": {"model_loading_config": {"model_id": "s", "model_source": "/s", "tokenizer_source": "/t"}},
        }
    )
    target = loading.target_config.model_loading_config
    draft = loading.draft_config.model_loading_config
    assert (target.source, target.tokenizer) == ("org/large", "org/large")
    assert (draft.source, draft.tokenizer) == ("/s", "/t")
    assert loading.pair().target.path == "org/large"
    assert loading.pair().draft.path == "/s"


def test_pair_carries_every_engine_setting():
    config = ServiceConfig.parse(
        {
            "target_config": {
                "engine_kwargs": {
                    "dtype": "float32",
                    "compile": False,
                    "device": "cpu",
                    "max_sessions": 3,
                    "max_model_len": 512,
                    "max_step_tokens": 64,
                    "adaptive": False,
                    "kv_fraction": 0.5,
                }
            },
            "draft_config": {
                "engine_kwargs": {
                    "dtype": "bfloat16",
                    "compile": True,
                    "device": "cpu",
                    "max_sessions": 6,
                    "tree_budget": 32,
                    "tree_step_tokens": 4,
                    "fan_out": 2,
                    "draft_top_m": 16,
                }
            },
        }
    )
    assert config.pair() == PairConfig(
        target=ModelConfig(path=str(TARGET_DIR), dtype="float32", compile=False, device="cpu"),
        draft=DraftModelConfig(path=str(DRAFT_DIR), dtype="bfloat16", compile=True, device="cpu"),
        max_sessions=3,
        draft_max_sessions=6,
        max_model_len=512,
        max_step_tokens=64,
        adaptive=False,
        kv_fraction=0.5,
        tree_budget=32,
        tree_step_tokens=4,
        fan_out=2,
        draft_top_m=16,
    )


def test_ngram_and_no_draft():
    ngram = ServiceConfig.parse({"draft_config": {"kind": "ngram", "engine_kwargs": {"max_match": 6, "fan_out": 3}}})
    assert ngram.pair().draft == NgramConfig(max_match=6)
    assert ngram.pair().fan_out == 3
    plain = ServiceConfig.parse({"draft_config": None})
    assert plain.pair() == PairConfig(target=ModelConfig(path=str(TARGET_DIR)))


def test_local_config_is_a_pair():
    config = LocalConfig(target=ModelConfig(path="x"), worker="thread", pin_cores=False, kv_pages=3)
    assert isinstance(config, PairConfig)
    with pytest.raises(ValueError, match=r"kv_fraction is 0.5 while kv_pages is 3"):
        LocalConfig(target=ModelConfig(path="x"), kv_pages=3, kv_fraction=0.5)


# -- refusals ----------------------------------------------------------------------------------------------

REFUSALS = [
    ("target_config.engine_kwargs.max_sessions", 0, "at least 1 and at most 1024"),
    ("target_config.engine_kwargs.max_sessions", 5000, "at least 1 and at most 1024"),
    ("target_config.engine_kwargs.max_sessions", True, "a whole number"),
    ("target_config.engine_kwargs.max_sessions", "16", "a whole number"),
    ("target_config.engine_kwargs.dtype", "float16", "'auto', 'float32' or 'bfloat16'"),
    ("target_config.engine_kwargs.compile", "maybe", "true or false or 'auto'"),
    ("target_config.engine_kwargs.device", "tpu", "'auto', 'cpu' or 'cuda'"),
    ("target_config.engine_kwargs.max_model_len", 1, "at least 2"),
    ("target_config.engine_kwargs.max_step_tokens", 8, "at least 32 and at most 65536"),
    ("target_config.engine_kwargs.kv_pages", 0, "at least 1"),
    ("target_config.engine_kwargs.kv_fraction", 1.5, "more than 0 and at most 1"),
    ("target_config.model_loading_config.model_id", "", "at least one character"),
    ("target_config.placement_group_config", {}, "bundles is missing"),
    ("target_config.placement_group_config.bundles", [], "at least one entry"),
    ("target_config.placement_group_config", {"bundles": [{"GPU": "one"}]}, "bundles[0].GPU is 'one'"),
    ("target_config.deployment_config.num_replicas", 0, "at least 1"),
    ("target_config.deployment_config.num_replicas", "many", "a whole number or 'auto'"),
    ("target_config.deployment_config.max_ongoing_requests", 0, "at least 1"),
    ("target_config.deployment_config.health_check_period_s", 0, "more than 0"),
    ("target_config.deployment_config.graceful_shutdown_timeout_s", -1, "at least 0"),
    ("target_config.deployment_config.ray_actor_options.num_gpus", -1, "at least 0"),
    ("target_config.deployment_config.ray_actor_options.resources", {"tpu": "x"}, "resources.tpu is 'x'"),
    ("target_config.deployment_config.autoscaling_config.max_replicas", 0, "at least 1"),
    ("draft_config.kind", "medusa", "'model' or 'ngram'"),
    ("draft_config", "small", "a mapping of keys"),
    ("draft_config.engine_kwargs.fan_out", 33, "at least 1 and at most 32"),
    ("draft_config.engine_kwargs.tree_budget", 0, "at least 1 and at most 4096"),
    ("draft_config.engine_kwargs.tree_step_tokens", 0, "at least 1 and at most 1024"),
    ("draft_config.engine_kwargs.draft_top_m", 0, "at least 1 and at most 65536"),
    ("router_config.max_queued_requests", -1, "at least 0"),
    ("router_config.recovery_timeout_s", 0, "more than 0"),
    ("router_config.draft_timeout_s", "soon", "a number"),
    ("router_config.target_timeout_s", None, "a number"),
    ("router_config.request_timeout_s", 0, "more than 0"),
    ("server.host", 1, "text"),
    ("server.grpc_port", 65536, "at least 1 and at most 65535"),
    ("server.http_port", 0, "at least 1 and at most 65535"),
    ("log.level", "debug", "'DEBUG', 'INFO', 'WARNING' or 'ERROR'"),
    ("log.json", "no", "true or false"),
    ("log.prompts", 1, "true or false"),
    ("target_config", None, "a mapping of keys"),
]


@pytest.mark.parametrize(("key", "value", "allowed"), REFUSALS, ids=lambda v: str(v)[:40])
def test_a_value_that_is_not_allowed_is_named_with_its_key(key, value, allowed):
    message = refusal(nested(key, value))
    assert message.startswith(key), message
    assert allowed in message
    if not isinstance(value, dict):
        shown = {None: "null", True: "true"}.get(value, repr(value)) if not isinstance(value, list) else "[]"
        assert f"{key} is {shown}:" in message or value == 1


MISSPELT = [
    ("target_config.engine_kwargs.max_sesions", "did you mean max_sessions?"),
    ("target_confg", "did you mean target_config?"),
    ("target_config.engine_kwargs.kv_fractions", "did you mean kv_fraction?"),
    ("draft_config.engine_kwargs.fanout", "did you mean fan_out?"),
    ("router_config.max_queued_request", "did you mean max_queued_requests?"),
    ("log.jsn", "did you mean json?"),
    ("server.port", "allowed are grpc_port, host, http_port"),
    ("target_config.deployment_config.num_replica", "did you mean num_replicas?"),
    ("target_config.deployment_config.ray_actor_options.num_gpu", "did you mean num_gpus?"),
    ("target_config.deployment_config.autoscaling_config.max_replica", "did you mean max_replicas?"),
    ("target_config.deployment_config.placement_group_bundles", "use placement_group_config.bundles"),
    ("target_config.deployment_config.name", "allowed are autoscaling_config"),
    ("router_config.placement_group_config", "did you mean target_config.placement_group_config or draft_config."),
    ("grpc_port", "did you mean server.grpc_port?"),
    ("target_config.engine_kwargs.fan_out", "did you mean draft_config.engine_kwargs.fan_out?"),
]


@pytest.mark.parametrize(("key", "advice"), MISSPELT, ids=[key for key, _ in MISSPELT])
def test_a_misspelt_key_is_named_with_the_one_that_was_meant(key, advice):
    message = refusal(nested(key, 3))
    assert message.startswith(f"{key} is 3, but there is no such key: ")
    assert advice in message


def test_an_unknown_key_is_reported_before_what_follows_from_it():
    message = refusal({"target_config": {"placement_group_config": {"bundle": [{"GPU": 1}]}}})
    assert message.startswith("target_config.placement_group_config.bundle is [{'GPU': 1}], but there is no such key")


def test_a_key_of_the_other_kind_of_draft():
    message = refusal({"draft_config": {"kind": "ngram", "model_loading_config": {"model_id": "x"}}})
    assert message.startswith("draft_config.model_loading_config is")
    assert "belongs to another kind" in message


AUTOSCALING = "target_config.deployment_config.autoscaling_config"
CONTRADICTIONS = {
    "target_config.engine_kwargs.kv_fraction is 0.5 while kv_pages is 8: give one of them": {
        "target_config": {"engine_kwargs": {"kv_pages": 8, "kv_fraction": 0.5}}
    },
    "draft_config.engine_kwargs.min_match is 5: it must be at most max_match, which is 4": {
        "draft_config": {"kind": "ngram", "engine_kwargs": {"min_match": 5}}
    },
    "router_config.deployment_config.num_replicas is 2 beside an autoscaling_config: give one of them": {
        "router_config": {"deployment_config": {"num_replicas": 2, "autoscaling_config": {}}}
    },
    f"{AUTOSCALING}.min_replicas is 3: it must be at most max_replicas, which is 2": nested(
        AUTOSCALING, {"min_replicas": 3, "max_replicas": 2}
    ),
    "target_config.deployment_config.max_replicas_per_node is 1 beside a placement_group_config: "
    "Ray Serve takes one of them": {
        "target_config": {
            "placement_group_config": {"bundles": [{"CPU": 1}]},
            "deployment_config": {"max_replicas_per_node": 1},
        }
    },
    "server.http_port is 8000, which is grpc_port too: they must differ": {"server": {"grpc_port": 8000}},
    "draft_config names no model while target_config names 'org/large': name a draft model, or set draft_config to "
    "{kind: ngram}, or to null for plain decoding": {
        "target_config": {"model_loading_config": {"model_id": "org/large"}}
    },
}


@pytest.mark.parametrize("message", CONTRADICTIONS, ids=lambda message: message.split()[0])
def test_settings_that_contradict_each_other(message):
    assert refusal(CONTRADICTIONS[message]) == message


def test_the_configuration_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        ServiceConfig().server.grpc_port = 1


# -- deployment options ------------------------------------------------------------------------------------


@needs_ray
def test_deployment_options_are_those_of_ray_serve():
    from ray import serve
    from ray.serve.config import AutoscalingConfig as ServeAutoscalingConfig

    theirs = set(inspect.signature(serve.deployment).parameters)
    decided_by_the_service = {
        "_func_or_class",
        "name",
        "version",
        "user_config",
        "request_router_config",
        "placement_group_bundles",
        "placement_group_strategy",
        "placement_group_bundle_label_selector",
        "gang_scheduling_config",
        "deployment_actors",
    }
    assert set(DeploymentConfig.model_fields) == theirs - decided_by_the_service
    deprecated = {"smoothing_factor", "upscale_smoothing_factor", "downscale_smoothing_factor"}
    assert set(AutoscalingConfig.model_fields) == set(ServeAutoscalingConfig.model_fields) - deprecated


@needs_ray
def test_ray_serve_takes_the_deployment_options():
    from ray import serve

    config = ServiceConfig.parse(
        {
            "target_config": {
                "accelerator_type": "L4",
                "placement_group_config": {"bundles": [{"CPU": 1, "GPU": 1}] * 2, "strategy": "STRICT_PACK"},
                "deployment_config": {"autoscaling_config": {"min_replicas": 1, "max_replicas": 3}},
            },
            "draft_config": {
                "accelerator_type": "L4",
                "deployment_config": {
                    "num_replicas": 2,
                    "max_replicas_per_node": 1,
                    "ray_actor_options": {"num_gpus": 0.5, "label_selector": {"zone": "a"}},
                },
            },
        }
    )
    target = serve.deployment(**config.target_config.deployment_options())(type("Target", (), {}))
    draft = serve.deployment(**config.draft_config.deployment_options())(type("Draft", (), {}))
    router = serve.deployment(**config.router_config.deployment_options())(type("Router", (), {}))
    assert target._replica_config.placement_group_bundles == [{"CPU": 1.0, "GPU": 1.0}] * 2
    assert draft.num_replicas == 2
    options = draft.ray_actor_options
    assert (options["num_cpus"], options["num_gpus"], options["accelerator_type"]) == (0.9, 0.5, "L4")
    assert options["label_selector"] == {"zone": "a"}
    assert router._deployment_config.graceful_shutdown_timeout_s == 600
    assert config.target_config.deployment_options()["placement_group_bundle_label_selector"] == [
        {"ray.io/accelerator-type": "L4"}
    ]
    assert "num_replicas" not in config.target_config.deployment_options()


def test_a_gpu_is_reserved_where_one_is_asked_for():
    assert "num_gpus" not in ServiceConfig().target_config.deployment_options()["ray_actor_options"]
    config = ServiceConfig.parse({"target_config": {"engine_kwargs": {"device": "cuda"}}})
    assert config.target_config.deployment_options()["ray_actor_options"]["num_gpus"] == 1
    config = config.with_overrides(["target_config.deployment_config.ray_actor_options.num_gpus=0.25"])
    assert config.target_config.deployment_options()["ray_actor_options"] == {"num_cpus": 0.9, "num_gpus": 0.25}


@needs_ray
def test_every_ray_actor_option_is_known_to_ray():
    from ray.serve.schema import RayActorOptionsSchema

    ours = set(RayActorOptions.model_fields)
    assert ours - {"fallback_strategy"} <= set(RayActorOptionsSchema.model_fields)


# -- files and overrides -----------------------------------------------------------------------------------

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
        ("a: [1\n", "is no YAML: expected"),
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
    with pytest.raises(ConfigError, match=r"none.yaml' cannot be read: No such file"):
        ServiceConfig.from_file(tmp_path / "none.yaml")
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert ServiceConfig.from_file(tmp_path / "empty.yaml") == ServiceConfig()
    (tmp_path / "bytes.yaml").write_bytes(b"a: \xff\xfe\n")
    with pytest.raises(ConfigError, match=r"bytes.yaml' is not UTF-8 text"):
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
    assert config.pair().draft == DraftModelConfig(path=str(DRAFT_DIR)), "what was not named is left as it was"
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
    assert ngram.pair().draft == NgramConfig()
    assert ngram.with_overrides(["draft_config.engine_kwargs.max_match=8"]).pair().draft == NgramConfig(max_match=8)
    built = ServiceConfig(draft_config=type(ngram.draft_config)())
    assert built.with_overrides(["log.json=true"]).pair().draft == NgramConfig()
    with pytest.raises(ConfigError, match=r"^draft_config names no model while target_config names 'org/large'"):
        ServiceConfig().with_overrides(["target_config.model_loading_config.model_id=org/large"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("target_config", "'target_config' is no setting: it must be KEY=VALUE with a dotted key"),
        ("=3", "'=3' is no setting"),
        ("log.json={", "log.json is '{', which is no YAML"),
        ("target_config.engine_kwargs.max_sesions=3", "max_sesions is 3, but there is no such key: did you mean"),
        ("target_config.engine_kwargs.max_sessions=many", "max_sessions is 'many': it must be a whole number"),
        ("server.grpc_port=8000", "server.http_port is 8000, which is grpc_port too"),
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
    assert config.pair() == ServiceConfig().pair()
    assert ServiceConfig.from_file(file) == config
    assert schema.grpc_options.port == config.server.grpc_port
    assert schema.http_options.port == config.server.http_port
    assert schema.grpc_options.grpc_servicer_functions == [
        "paceline.v1.generation_pb2_grpc.add_GenerationServiceServicer_to_server",
        "grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server",
    ]


# -- KV pages ----------------------------------------------------------------------------------------------


def pair_config(**options):
    return PairConfig(target=ModelConfig(path="x"), **options)


def test_pages_where_nothing_is_configured():
    per_session = -(-(1024 + MAX_DRAFT_TOKENS) // PAGE_SIZE)
    assert target_pages(pair_config(), 2048) == 16 * per_session
    assert target_pages(pair_config(max_sessions=1), 1 << 16) == session_pages(1 << 16), "one session of full length"
    assert target_pages(pair_config(kv_pages=5), 2048) == 5
    assert draft_pages(pair_config(), 2048) == 16 * ((256 + 1024) // PAGE_SIZE + 1)
    assert draft_pages(pair_config(draft_max_sessions=48), 2048) == 3 * draft_pages(pair_config(), 2048)
    assert draft_pages(pair_config(tree_budget=64), 100) == 16 * (-(-164 // PAGE_SIZE) + 1)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_page_bytes_are_what_a_page_of_the_cache_takes(family):
    model, _ = pair(family)
    cache = model.runner(7).cache
    allocated = sum(pool.numel() * pool.element_size() for pool in (*cache.keys, *cache.values))
    assert allocated == 8 * model.facts.page_bytes


def test_a_share_of_the_memory_becomes_pages():
    page = 1 << 20
    assert fraction_pages(0.5, 1024, page, GIB) == 511, "half of 1024 pages, one of them scratch"
    assert fraction_pages(1.0, 1024, page, GIB) == 1023
    needed = session_pages(1024)
    assert fraction_pages(1.0, 1024, page, (needed + 1) * page) == needed


def test_a_share_too_small_for_one_session_is_refused_with_the_numbers():
    page, needed = 1 << 20, session_pages(4096)
    with pytest.raises(ConfigError) as caught:
        fraction_pages(0.05, 4096, page, GIB)
    message = str(caught.value)
    assert message.startswith("kv_fraction is 0.05: that share of the 1.00 GiB left beside weights and workspace holds")
    assert f"50 KV pages of {page} bytes, but one session of 4096 tokens needs {needed}" in message
    longest = 50 * PAGE_SIZE - MAX_DRAFT_TOKENS
    assert message.endswith(f"raise kv_fraction to at least 0.065 or lower max_model_len to at most {longest}")
    assert fraction_pages(0.065, 4096, page, GIB) >= needed
    assert fraction_pages(0.05, longest, page, GIB) == 50
    with pytest.raises(ConfigError, match=r"the model needs a machine with more memory$"):
        fraction_pages(0.5, 4096, page, 2 * page)


def test_build_sizes_the_cache_by_the_memory_left(tmp_path, monkeypatch):
    from paceline import preflight
    from paceline.target import build

    model, _ = pair("llama")
    page = model.facts.page_bytes
    monkeypatch.setattr(build, "load_model", lambda config, group: model)
    config = pair_config(kv_fraction=0.5)
    reserved = target_estimate(config, model.facts, model.max_len).reserved_bytes
    assert reserved > CODE_BYTES, "and what the largest step allocates"
    monkeypatch.setattr(preflight, "available_bytes", lambda: reserved + 200 * page)
    engine = build.build_target_engine(config, lambda events: None)
    assert engine.runner.cache.num_pages == 99
    monkeypatch.setattr(preflight, "available_bytes", lambda: reserved + 20 * page)
    with pytest.raises(ConfigError, match=r"^kv_fraction is 0.5: that share of the 0.00 GiB left"):
        build.build_target_engine(pair_config(kv_fraction=0.5), lambda events: None)


def machine(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal:       4194304 kB\nMemFree:         100 kB\nMemAvailable:   3145728 kB\n"


def test_memory_without_a_limit(tmp_path):
    root = machine(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/user\n"})
    assert available_bytes(root) == 3 * GIB
    machine(root, {"sys/fs/cgroup/user/memory.max": "max\n", "sys/fs/cgroup/user/memory.current": "5\n"})
    assert available_bytes(root) == 3 * GIB


def test_memory_within_a_control_group(tmp_path):
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/pod/box\n",
        "sys/fs/cgroup/pod/memory.max": str(2 * GIB),
        "sys/fs/cgroup/pod/memory.current": str(GIB),
        "sys/fs/cgroup/pod/memory.stat": f"anon 1\ninactive_file {GIB // 2}\n",
        "sys/fs/cgroup/pod/box/memory.max": "max",
        "sys/fs/cgroup/pod/box/memory.current": "1",
    }
    root = machine(tmp_path, files)
    assert available_bytes(root) == 2 * GIB - GIB // 2
    machine(root, {"sys/fs/cgroup/pod/memory.current": str(3 * GIB)})
    assert available_bytes(root) == 0, "above the limit"


def test_memory_within_a_control_group_of_the_first_version(tmp_path):
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "9:name=systemd:/\n4:memory:/docker/abc\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(GIB),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB // 4),
    }
    root = machine(tmp_path, files)
    assert available_bytes(root) == GIB - GIB // 4
    machine(root, {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"})
    assert available_bytes(root) == 3 * GIB


def test_this_machine_has_memory(tmp_path):
    assert available_bytes() > 0
    with pytest.raises(ConfigError, match="give kv_pages, not kv_fraction"):
        available_bytes(tmp_path)


def ranks(num_ranks, **target):
    """The Serve options of a target of several ranks."""
    kwargs = target.pop("engine_kwargs", {}) | {"tensor_parallel_size": num_ranks}
    return ServiceConfig.parse(
        {"target_config": {"engine_kwargs": kwargs, **target}}
    ).target_config.deployment_options()


def test_every_rank_has_a_bundle_and_the_replica_takes_the_first():
    options = ranks(2)
    assert options["placement_group_bundles"] == [{"CPU": 0.9}] * 2
    assert options["placement_group_strategy"] == "STRICT_PACK"
    assert options["ray_actor_options"] == {"num_cpus": 0.9}
    options = ranks(4, accelerator_type="H100")
    assert options["placement_group_bundles"] == [{"CPU": 0.9, "GPU": 1.0}] * 4
    assert options["ray_actor_options"] == {"num_cpus": 0.9, "num_gpus": 1.0}
    assert options["placement_group_bundle_label_selector"] == [{"ray.io/accelerator-type": "H100"}]
    own = {"num_cpus": 2, "resources": {"big": 1}}
    options = ranks(2, deployment_config={"ray_actor_options": own})
    assert options["placement_group_bundles"] == [{"CPU": 2, "big": 1}] * 2
    options = ranks(2, placement_group_config={"bundles": [{"CPU": 1}, {"CPU": 1}], "strategy": "SPREAD"})
    assert options["placement_group_strategy"] == "SPREAD"
    assert "placement_group_bundles" not in ranks(1)


def test_labels_of_a_replica_with_bundles_are_those_of_its_bundles():
    pool = {"deployment_config": {"ray_actor_options": {"label_selector": {"paceline/pool": "target"}}}}
    assert ranks(1, **pool)["ray_actor_options"]["label_selector"] == {"paceline/pool": "target"}
    options = ranks(2, **pool)
    assert "label_selector" not in options["ray_actor_options"]
    assert options["placement_group_bundle_label_selector"] == [{"paceline/pool": "target"}]
    both = {"ray.io/accelerator-type": "H100", "paceline/pool": "target"}
    assert ranks(2, accelerator_type="H100", **pool)["placement_group_bundle_label_selector"] == [both]


@pytest.mark.parametrize(
    ("target", "parts"),
    [
        ({"placement_group_config": {"bundles": [{"CPU": 1}]}}, ["placement_group_config.bundles has 1", "is 2"]),
        ({"deployment_config": {"max_replicas_per_node": 1}}, ["max_replicas_per_node is 1", "tensor_parallel_size 2"]),
        ({"deployment_config": {"ray_actor_options": {"num_cpus": 0}}}, ["reserves nothing", "tensor_parallel_size 2"]),
        ({"engine_kwargs": {"rank_timeout_s": 0}}, ["rank_timeout_s is 0"]),
    ],
)
def test_ranks_without_a_place_are_refused(target, parts):
    with pytest.raises(ConfigError) as refused:
        ranks(2, **target)
    for part in parts:
        assert part in str(refused.value)
