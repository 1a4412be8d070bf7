"""The configuration: its defaults, and its refusals by the sentence."""

from __future__ import annotations

import json
import pickle

import pytest
import yaml
from pydantic import ValidationError

from paceline.config import (
    CascadeOptions,
    DraftModel,
    DraftOptions,
    DraftSetup,
    HeadOptions,
    LocalConfig,
    NgramOptions,
    PluginOptions,
    ServiceConfig,
    SuffixOptions,
    TargetModel,
    TargetOptions,
    TargetSetup,
)
from paceline.embedded import DRAFT_DIR, TARGET_DIR
from paceline.errors import ConfigError


def test_the_default_is_the_embedded_pair_with_one_replica_of_each():
    config = ServiceConfig()
    assert config.target_setup() == TargetSetup(str(TARGET_DIR), TargetOptions(), tree_budget=256)
    assert config.draft_setup() == DraftSetup(str(DRAFT_DIR), DraftOptions(), str(TARGET_DIR), 16, None, 256)
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
    assert (config.server.host, config.server.grpc_port, config.server.http_port) == ("127.0.0.1", 9000, 8000)
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
    assert loading.target_setup().source == "org/large"
    assert (loading.draft_setup().source, loading.draft_setup().target_source) == ("/s", "org/large")


TARGET_VALUES = {
    "dtype": "float32", "compile": False, "background_compilation": False, "device": "cpu", "quantization": "int8",
    "tensor_parallel_size": 2,
    "rank_timeout_s": 3.0, "cuda_graphs": False, "max_cuda_graphs": 9, "attention": "sdpa", "max_sessions": 3,
    "kv_cache_dtype": "fp8", "kv_transfer_backend": "host",
    "max_model_len": 512, "max_step_tokens": 64, "adaptive": False, "tree_verification": "off", "mtp_modules": "off",
    "kv_pages": 20, "state_slots": 40,
    "kv_fraction": None, "cpu_threads": 1, "hints": None,
    "trust_remote_code": True, "batch_invariant": "require",
    "heads": [{
        "method": "draft_model", "model": "h", "boundaries": None, "num_speculative_tokens": 3, "probe": True,
            "lookahead": None,
            "suffix": None,
        "probe_file": None,
    }],
}  # fmt: skip
MODEL_VALUES = {name: TARGET_VALUES[name] for name in DraftOptions.model_fields if name in TARGET_VALUES}
GROWING_VALUES = {"tree_budget": 32, "tree_step_tokens": 4, "fan_out": 2, "min_path_prob": 0.01}
DRAFT_VALUES = MODEL_VALUES | GROWING_VALUES | {
    "max_sessions": 6, "draft_top_m": 16, "parallel_tokens": 3, "vocabulary": "shared", "placement": "apart",
}  # fmt: skip
NGRAM_VALUES = GROWING_VALUES | {"min_match": 2, "max_match": 6}
SUFFIX_VALUES = GROWING_VALUES | {
    "max_tree_depth": 9, "min_match": 2, "max_spec_factor": 1.5, "min_token_prob": 0.2, "shared_tokens": 50,
    "corpus": ["a.txt"],
}  # fmt: skip
PLUGIN_VALUES = GROWING_VALUES | {"drafter": "mine", "options": {"width": 3}}
CASCADE_VALUES = GROWING_VALUES | {
    "drafters": [{"kind": "model", "model": "m", "options": {}}, {"kind": "ngram", "model": None, "options": {}}],
    "lengths": [3],
}  # fmt: skip
MODELLESS = {NgramOptions: "ngram", SuffixOptions: "suffix", PluginOptions: "plugin", CascadeOptions: "cascade"}


@pytest.mark.parametrize(
    ("options", "values"),
    [
        (TargetOptions, TARGET_VALUES),
        (DraftOptions, DRAFT_VALUES),
        (NgramOptions, NGRAM_VALUES),
        (SuffixOptions, SUFFIX_VALUES),
        (PluginOptions, PLUGIN_VALUES),
        (CascadeOptions, CASCADE_VALUES),
    ],
)
def test_every_option_goes_from_yaml_and_from_a_local_config_to_the_builder(options, values, tmp_path):
    """By one declaration: a field that is added to the class must be reachable everywhere without another edit."""
    assert not values.keys() ^ options.model_fields.keys(), "each option has a value here that is not its default"
    changed = {name: value for name, value in values.items() if value is not None}
    refused_beside_others = ("cpu_threads", "placement")
    others = {name: value for name, value in changed.items() if name not in refused_beside_others}
    assert all(value != options.model_fields[name].default for name, value in others.items())
    part = "target_config" if options is TargetOptions else "draft_config"
    kind = {"kind": MODELLESS[options]} if options in MODELLESS else {}
    file = tmp_path / "service.yaml"
    file.write_text(yaml.safe_dump({part: {**kind, "engine_kwargs": changed}}))
    target = TargetModel(path="t", **(changed if options is TargetOptions else {}))
    draft = None if options is TargetOptions else DraftModel if options is DraftOptions else options
    path = {"path": "d"} if options is DraftOptions else {}
    for config in (
        ServiceConfig.from_file(file),
        ServiceConfig().with_overrides(
            ([f"draft_config={json.dumps(kind)}"] if kind else [])
            + [f"{part}.engine_kwargs.{name}={json.dumps(value)}" for name, value in changed.items()]
        ),
        LocalConfig(target=target, draft=None if draft is None else draft(**path, **changed)),
    ):
        setup = config.target_setup() if options is TargetOptions else config.draft_setup()
        assert isinstance(setup.options, options)
        assert setup.options.model_dump(include=values.keys()) == values
        assert pickle.loads(pickle.dumps(setup)) == setup, "what travels to a replica"


def test_a_draft_follows_four_values_of_its_target_and_is_given_no_more():
    config = ServiceConfig.parse(
        {
            "target_config": {"engine_kwargs": {"max_sessions": 3, "max_model_len": 512, "max_step_tokens": 64}},
            "draft_config": {"engine_kwargs": {"max_sessions": 6}},
        }
    )
    expected = DraftSetup(str(DRAFT_DIR), DraftOptions(max_sessions=6), str(TARGET_DIR), 6, 512, 64)
    assert config.draft_setup() == expected
    as_many = config.with_overrides(["draft_config.engine_kwargs.max_sessions=null"]).draft_setup()
    assert as_many.num_sessions == 3, "as many as the target"


def test_ngram_and_no_draft():
    ngram = ServiceConfig.parse({"draft_config": {"kind": "ngram", "engine_kwargs": {"max_match": 6, "fan_out": 3}}})
    assert ngram.draft_setup().options == NgramOptions(max_match=6, fan_out=3)
    assert ngram.draft_setup().source is None
    assert ngram.target_setup().tree_budget == 256
    plain = ServiceConfig.parse({"draft_config": None})
    assert plain.draft_setup() is None
    assert plain.target_setup() == TargetSetup(str(TARGET_DIR))


def test_a_local_config_has_the_setups_of_a_service():
    config = LocalConfig(target=TargetModel(path="x", kv_pages=3), draft=NgramOptions(), worker="thread")
    assert config.target_setup() == TargetSetup("x", config.target, tree_budget=256)
    assert config.draft_setup() == DraftSetup(None, NgramOptions(), "x", 16, None, 256)
    assert LocalConfig.model_validate_json(config.model_dump_json()) == config
    assert LocalConfig(target=TargetModel(path="x")).draft_setup() is None
    with pytest.raises(ValueError, match=r"kv_fraction is 0.5 while kv_pages is 3"):
        TargetModel(path="x", kv_pages=3, kv_fraction=0.5)


def test_a_draft_that_may_serve_in_either_place_is_a_head_of_its_target_too():
    draft = {"path": "d", "placement": "auto"}
    local = LocalConfig(target=TargetModel(path="t", heads=[HeadOptions(method="suffix")]), draft=draft)
    service = ServiceConfig.parse(
        {
            "target_config": {
                "model_loading_config": {"model_id": "t"},
                "engine_kwargs": {"heads": [{"method": "suffix"}]},
            },
            "draft_config": {"model_loading_config": {"model_id": "d"}, "engine_kwargs": {"placement": "auto"}},
        }
    )
    for config in (local, service):
        setup = config.target_setup()
        assert [(head.method, head.model) for head in setup.options.heads] == [("suffix", None), ("draft_model", "d")]
        assert (setup.tree_budget, setup.shared_cores) == (256, 0), "what lends cores knows the machine"
        assert config.draft_setup().source == "d"
    apart = LocalConfig(target=TargetModel(path="t"), draft={"path": "d"})
    assert apart.target_setup().options.heads == []


@pytest.mark.parametrize(
    ("target", "draft", "sentence"),
    [
        ({"adaptive": False}, {}, "is 'auto' while the target's adaptive is false"),
        ({"heads": [{"method": "draft_model", "model": "m"}]}, {}, "is 'auto' with a head of method 'draft_model'"),
        ({}, {"vocabulary": "shared"}, "is 'auto' with vocabulary 'shared'"),
    ],
)
def test_a_draft_that_cannot_serve_in_either_place_is_refused(target, draft, sentence):
    with pytest.raises(ConfigError, match=f"draft_config.engine_kwargs.placement {sentence}"):
        ServiceConfig.parse(
            {
                "target_config": {"engine_kwargs": target},
                "draft_config": {"kind": "model", "engine_kwargs": {"placement": "auto", **draft}},
            }
        )
    with pytest.raises(ValidationError, match=sentence):
        LocalConfig.model_validate(
            {"target": {"path": "t", **target}, "draft": {"path": "d", "placement": "auto", **draft}}
        )


def test_the_configuration_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        ServiceConfig().server.grpc_port = 1


@pytest.mark.parametrize(
    ("devices", "num_gpus"), [(("cuda", "cpu"), 1.0), (("cpu", "cuda"), 1.0), (("cpu", "auto"), None)]
)
def test_a_cascade_reserves_a_gpu_for_its_drafters(devices: tuple[str, str], num_gpus: float | None) -> None:
    """One, which they share; what is reserved by hand stays."""
    drafters = [{"kind": "model", "model": "/a", "options": {"device": device}} for device in devices]
    config = {"kind": "cascade", "engine_kwargs": {"drafters": drafters}}
    draft = ServiceConfig.parse({"draft_config": config}).draft_config
    assert draft is not None
    assert draft.deployment_options()["ray_actor_options"].get("num_gpus") == num_gpus
    by_hand = {**config, "deployment_config": {"ray_actor_options": {"num_gpus": 0.5}}}
    draft = ServiceConfig.parse({"draft_config": by_hand}).draft_config
    assert draft is not None
    assert draft.deployment_options()["ray_actor_options"]["num_gpus"] == 0.5
