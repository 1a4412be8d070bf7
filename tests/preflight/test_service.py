"""What is refused before anything is loaded: models that do not fit each other, the machine, or the ports."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.model.families import small_config
from tests.support.models import FAMILIES, VOCAB, letters_tokenizer, pair, random_model
from tests.support.packed import CONFIG, FORMATS, write_packed
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.folder import local_folder
from paceline.checkpoint.packing import count_by_config
from paceline.config import ServiceConfig
from paceline.embedded import DRAFT_DIR, TARGET_DIR
from paceline.errors import ConfigError
from paceline.preflight import service as checks
from paceline.preflight.estimate import PROCESS_BYTES, RAY_BYTES, ROUTER_PROCESS_BYTES, draft_estimate, target_estimate
from paceline.preflight.findings import Severity
from paceline.preflight.host_memory import draft_pages, session_pages, target_pages
from paceline.preflight.service import check_service, counted, require_service

MAX_LEN = 2048
GIB = 1 << 30
ERROR, WARNING = Severity.ERROR, Severity.WARNING


def save(folder, model, *, tokens=VOCAB, shards="5GB"):
    model.save_pretrained(folder, max_shard_size=shards)
    letters_tokenizer(tokens).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Checkpoints that fit each other, and some that do not."""
    base = tmp_path_factory.mktemp("models")
    save(base / "target", random_model("llama"))
    save(base / "draft", random_model("llama", seed=1))
    save(base / "other_tokens", random_model("llama"), tokens=VOCAB - 20)
    small = FAMILIES["llama"]().to_dict()
    save(base / "short", random_model(LlamaConfig(**{**small, "max_position_embeddings": 512})))
    save(base / "few_tokens", random_model(LlamaConfig(**{**small, "vocab_size": 120})))
    save(base / "learned", random_model(GPT2Config(**{**FAMILIES["gpt2"]().to_dict(), "n_positions": 256})))
    save(base / "shards", random_model("llama"), shards="80KB")
    return base


@pytest.fixture(autouse=True)
def large_machine(monkeypatch):
    """Memory and cores for everything, whatever this machine has."""
    monkeypatch.setattr(checks, "available_bytes", lambda: 64 * GIB)
    monkeypatch.setattr(checks, "why_not_fetched", lambda: None)
    monkeypatch.setattr(checks, "num_gpus", lambda: None)
    monkeypatch.setattr(checks, "torch_has_gpus", lambda: True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


def service(folders, target="target", draft="draft", *settings):
    args = {
        "target_config": {"model_loading_config": {"model_id": "t", "model_source": str(folders / target)}},
        "draft_config": draft and {"model_loading_config": {"model_id": "d", "model_source": str(folders / draft)}},
    }
    return ServiceConfig.parse(args).with_overrides(settings)


def found(config, **options):
    """(severity, key) of every finding."""
    return [(finding.severity, finding.key) for finding in check_service(config, ports=False, **options)]


def one(config, **options):
    (finding,) = check_service(config, ports=False, **options)
    assert finding.message.startswith(finding.key)
    assert "\n" not in finding.message
    return finding


# -- models ------------------------------------------------------------------------------------------------


def test_nothing_is_wrong_with_the_embedded_pair_and_a_fitting_one(folders):
    assert found(ServiceConfig()) == []
    assert found(service(folders)) == []
    assert found(service(folders, "shards")) == []
    assert found(service(folders, "target", None)) == []
    assert found(ServiceConfig.parse({"draft_config": {"kind": "ngram"}})) == []
    require_service(service(folders), ports=False)


def test_a_change_in_place_that_leaves_no_target_is_a_warning(folders, caplog):
    """Not of a service that ends with its command (``surge``), nor where another target or a successor serves."""
    key = "target_config.deployment_config.max_surge_percent"
    finding = one(service(folders), surge=True)
    assert (finding.severity, finding.key) == (WARNING, key)
    assert finding.message == (
        f"{key} is null: a change in place stops the only target before its successor serves;"
        " set it to 100 and have room for one more"
    )
    assert one(service(folders, "target", "draft", f"{key}=0"), surge=True).message.startswith(f"{key} is 0: ")
    scaled = "target_config.deployment_config.autoscaling_config"
    one(service(folders, "target", "draft", f"{scaled}={{min_replicas: 1, max_replicas: 4}}"), surge=True)
    for more in (
        f"{key}=25",
        "target_config.deployment_config.num_replicas=2",
        f"{scaled}={{min_replicas: 2, max_replicas: 4}}",
    ):
        assert found(service(folders, "target", "draft", more), surge=True) == []
    with caplog.at_level(logging.WARNING, logger="paceline"):
        require_service(service(folders), ports=False, surge=True)
    assert finding.message in caplog.text


def test_the_checks_need_neither_torch_nor_ray():
    code = (
        "import sys; from paceline.preflight.service import check_service; from paceline.config import ServiceConfig; "
        "check_service(ServiceConfig(), ports=False); "
        "print(sorted({'torch', 'ray', 'transformers', 'grpc'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "[]"


def test_what_is_wrong_with_both_is_said_of_both(folders):
    config = service(folders, "none", "nothing")
    with pytest.raises(ConfigError) as caught:
        require_service(config, ports=False)
    assert "target_config.model_loading_config.model_source" in str(caught.value)
    assert "; draft_config.model_loading_config.model_source" in str(caught.value)


def test_a_model_id_that_is_not_here_yet_is_a_warning(folders, monkeypatch, caplog):
    config = ServiceConfig.parse(
        {"target_config": {"model_loading_config": {"model_id": "org/not-here"}}, "draft_config": None}
    )
    finding = one(config)
    assert (finding.severity, finding.key) == (WARNING, "target_config.model_loading_config.model_id")
    assert "'org/not-here'" in finding.message
    with caplog.at_level(logging.WARNING, logger="paceline"):
        require_service(config, ports=False)
    assert finding.message in caplog.text


def test_a_model_id_in_the_cache_is_checked_there(folders, monkeypatch):
    cached = {"org/model": str(folders / "target" / "config.json")}
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda repo, file: cached.get(repo))
    assert local_folder("org/model") == folders / "target"
    config = ServiceConfig.parse(
        {
            "target_config": {
                "model_loading_config": {"model_id": "org/model"},
                "engine_kwargs": {"max_model_len": 4096},
            },
            "draft_config": None,
        }
    )
    assert one(config).key == "target_config.engine_kwargs.max_model_len"


def test_what_is_neither_a_directory_nor_an_id():
    with pytest.raises(ConfigError, match=r"'no id!' is neither a directory nor a model id"):
        local_folder("no id!")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("config.json", "holds no config.json"),
        ("model.safetensors", "holds no weights: model.safetensors or its index is needed"),
        ("cut", "is cut short"),
        ("header", "is not a safetensors file, or cut short"),
        ("tokenizer", "no tokenizer could be loaded"),
        ("unreadable", "cannot be read"),
    ],
)
def test_a_damaged_checkpoint(folders, tmp_path, monkeypatch, damage, message):
    folder = tmp_path / "target"
    shutil.copytree(folders / "target", folder)
    weights = folder / "model.safetensors"
    key = "target_config.model_loading_config.model_source"
    if damage in ("config.json", "model.safetensors"):
        (folder / damage).unlink()
    elif damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "header":
        weights.write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{}")
    elif damage == "unreadable":
        weights.unlink()
        weights.mkdir()  # even root cannot read it
    else:
        for file in folder.glob("tokenizer*"):
            file.unlink()
        key = "target_config.model_loading_config.tokenizer_source"
    finding = one(service(tmp_path, "target", None))
    assert (finding.severity, finding.key) == (ERROR, key)
    assert message in finding.message


def test_a_missing_shard(folders, tmp_path):
    folder = tmp_path / "target"
    shutil.copytree(folders / "shards", folder)
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    shards[0].unlink()
    finding = one(service(tmp_path, "target", None))
    assert shards[0].name in finding.message
    assert "cannot be read: No such file" in finding.message


LOADING, ENGINE = "model_loading_config", "target_config.engine_kwargs."
MISFITS = [
    ("none", "draft", "", ERROR, f"target_config.{LOADING}.model_source", "none' does not exist"),
    ("target", "none", "", ERROR, f"draft_config.{LOADING}.model_source"),
    ("target", "other_tokens", "", ERROR, f"draft_config.{LOADING}", "300 tokens", "280 tokens"),
    (
        "target",
        "few_tokens",
        "",
        ERROR,
        f"draft_config.{LOADING}.tokenizer_source",
        "300 tokens and its model only 120",
    ),
    ("few_tokens", "draft", "", ERROR, f"target_config.{LOADING}.tokenizer_source"),
    (
        "target",
        "learned",
        "",
        ERROR,
        f"draft_config.{LOADING}",
        "256 tokens, and contexts may have 2048, where it fails",
    ),
    (
        "target",
        "draft",
        "max_model_len=4096",
        ERROR,
        f"{ENGINE}max_model_len",
        "is 4096: the target",
        "at most 2048",
    ),
    ("target", "short", "", WARNING, f"draft_config.{LOADING}", "may have 2048", f"set {ENGINE}max_model_len to 512"),
    ("target", "draft", "kv_pages=4", WARNING, f"{ENGINE}kv_pages", f"{MAX_LEN} need {session_pages(MAX_LEN)}"),
    (
        "target",
        "draft",
        "hints.boundary=2",
        ERROR,
        f"{ENGINE}hints",
        "hints.boundary is 2: the target ",
        " so 1 to 1 are",
    ),
]
"""Target, draft, a setting, what is found, and parts of the message."""


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_named(folders, case):
    target, draft, setting, severity, key, *parts = case
    finding = one(service(folders, target, draft, *([ENGINE + setting] if setting else [])))
    assert (finding.severity, finding.key) == (severity, key)
    assert all(part in finding.message for part in parts), finding.message


def test_settings_that_make_them_fit(folders):
    source = f"draft_config.model_loading_config.tokenizer_source={folders / 'target'}"
    assert found(service(folders, "target", "other_tokens", source)) == []
    assert found(service(folders, "target", "short", f"{ENGINE}max_model_len=512")) == []
    assert found(service(folders, "target", "draft", f"{ENGINE}hints.boundary=1")) == []


@pytest.mark.parametrize(
    ("family", "setting", "said"),
    [
        (
            "llama4_text",
            "compile=true",
            "compile is true, but Llama 4's layers are not compiled on the CPU: set compile",
        ),
        ("deepseek_v32", "compile=true", "compile is true, but layers with indexers are not compiled: set compile to"),
        ("deepseek_v32", "quantization=int8", "is 'int8' and the model has indexed attention layers, which run with"),
        ("deepseek_v32", 'heads=[{"method":"mtp"}]', "its modules have indexers of their own, as the target's layers"),
    ],
)
def test_what_does_not_run_with_the_layers_of_a_target(tmp_path, family, setting, said):
    save(tmp_path / "target", AutoModelForCausalLM.from_config(small_config(family)))
    finding = one(service(tmp_path, "target", None, f"target_config.engine_kwargs.{setting}"))
    assert finding.severity == ERROR
    assert said in finding.message


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, None),
        ({"quant_method": "gptq", "bits": 3}, "is 2 and model '{0}' is quantized by 'gptq' with bits 3: one process"),
        (
            {"quant_method": "torchao"},
            "is 2 and model '{0}' is quantized by 'torchao': one process runs quantized weig",
        ),
    ],
)
def test_ranks_of_a_quantized_checkpoint(tmp_path, stored, said):
    """They run what is dequantized; of anything else ``paceline check`` tells before a replica does."""
    folder = tmp_path / "target"
    save(folder, random_model("llama"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": stored}))
    config = service(tmp_path, "target", None, "target_config.engine_kwargs.tensor_parallel_size=2")
    findings = check_service(config, cores=False, ports=False)
    told = [f for f in findings if f.key == "target_config.engine_kwargs.tensor_parallel_size"]
    assert [f.severity for f in told] == ([] if said is None else [ERROR])
    for finding in told:
        assert said.format(folder) in finding.message


@pytest.mark.parametrize(("format", "are_told"), [("gptq, 8 bits", True), ("fp8, blocks", False)])
def test_weights_that_a_gpu_runs_dequantized_are_told(tmp_path, format, are_told):
    save(tmp_path / "target", random_model(CONFIG))
    write_packed(tmp_path / "target", format)
    gpu = "target_config.deployment_config.ray_actor_options={num_gpus: 1}"
    config = service(tmp_path, "target", None, gpu, "target_config.engine_kwargs.device=cuda")
    found = [f for f in check_service(config, cores=False, ports=False) if "that GPUs run dequantized" in f.message]
    assert [f.severity for f in found] == [WARNING] * are_told


@pytest.mark.parametrize(
    ("format", "model"),
    [
        *((name, CONFIG) for name in sorted(FORMATS)),
        ("fp8, blocks", small_config("qwen3_moe")),
        ("pack-quantized", small_config("qwen3_moe")),
    ],
)
def test_a_quantized_configuration_alone_has_the_size_of_its_files(tmp_path, format, model):
    write_packed(tmp_path, format, model)
    whole = Checkpoint.open(str(tmp_path))
    alone = counted(whole)
    for on_gpu in (False, True):
        found, want = alone.size(on_gpu=on_gpu), whole.size(on_gpu=on_gpu)
        assert found.weights_bytes == pytest.approx(want.weights_bytes, rel=0.03), "scales may have another type"
        assert found.dequantized_bytes == want.dequantized_bytes


def test_a_configuration_alone_has_the_layers_that_it_leaves_plain():
    names = ["model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight", "lm_head.weight"]
    shapes = dict.fromkeys(names, (256, 128))
    for ignored in ("model.layers.0", "re:.*layers[.]0[.]", "layers.0.mlp.down_proj", "model.layers.0.*"):
        config = FORMATS["fp8, blocks"][0] | {"modules_to_not_convert": [ignored]}
        assert count_by_config(shapes, config, "llama") == (256 * 128, 256 * 128 + 4 * 256, 0, 256 * 128)
    for is_quantized in (False, True):
        config = FORMATS["gptq"][0] | {"lm_head": is_quantized}
        assert count_by_config(shapes, config, "llama")[0] == (2 + is_quantized) * 256 * 128


# -- memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "mistral", "gpt2", "phi3", "qwen3_moe"])
def test_the_estimate_is_what_the_loaded_model_takes(tmp_path, family):
    model = random_model(family)
    model.save_pretrained(tmp_path)
    facts = Checkpoint.open(str(tmp_path)).size("float32")
    loaded, _ = pair(family)
    assert facts.num_parameters == loaded.size.num_parameters
    assert facts.weights_bytes == sum(p.numel() * p.element_size() for p in model.parameters())
    assert replace(facts, expert_share=0.0) == loaded.size, "which does not count what experts take"


def test_shards_and_pickled_weights(folders, tmp_path):
    facts = Checkpoint.open(str(folders / "target")).size()
    assert Checkpoint.open(str(folders / "shards")).size() == facts
    shutil.copy(folders / "target" / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(4 * facts.num_parameters))
    assert Checkpoint.open(str(tmp_path)).size() == replace(facts, num_whole=0), (
        "these files do not say what is a matrix"
    )
    assert facts.weights_bytes == 2 * facts.num_parameters
    assert Checkpoint.open(str(folders / "target")).size("float32").weights_bytes == 4 * facts.num_parameters


def test_an_attention_that_keeps_something_else_has_no_estimate(folders, tmp_path):
    config = json.loads((folders / "target" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "kv_lora_rank": 8}))
    shutil.copy(folders / "target" / "model.safetensors", tmp_path)
    facts = Checkpoint.open(str(tmp_path)).size()
    assert (facts.kv_values, facts.page_bytes) == (None, 0)
    assert facts.kv_bytes(1000) == 0


def replica_bytes(facts, num_pages):
    """What a replica with as many pages takes at least before its first step."""
    return PROCESS_BYTES + facts.weights_bytes + facts.kv_bytes(num_pages)


def target_workspace(config, facts, max_len=MAX_LEN, **changes):
    setup = config.target_setup()
    setup = replace(setup, options=setup.options.model_copy(update=changes))
    return target_estimate(setup, facts, max_len).workspace_bytes


def draft_workspace(config, facts, max_len=MAX_LEN, *, num_sessions, tree_budget=256):
    setup = config.draft_setup()
    options = setup.options.model_copy(update={"tree_budget": tree_budget})
    setup = replace(setup, options=options, num_sessions=num_sessions)
    return draft_estimate(setup, facts, max_len).workspace_bytes


def refusals(config):
    """(key, message) of every error; warnings of what load may bring are left out."""
    findings = check_service(config, ports=False)
    return [(finding.key, finding.message) for finding in findings if finding.severity is ERROR]


def with_memory(monkeypatch, num_bytes):
    monkeypatch.setattr(checks, "available_bytes", lambda: num_bytes)


def nearest(message):
    """The value that a refusal proposes."""
    return float(message.rpartition(" ")[2])


def test_a_target_whose_weights_do_not_fit(folders, monkeypatch):
    facts = Checkpoint.open(str(folders / "target")).size("float32")
    config = service(folders, "target", None, "target_config.engine_kwargs.dtype=float32")
    step = target_workspace(config, facts, 2, max_sessions=1)
    with_memory(monkeypatch, PROCESS_BYTES + facts.weights_bytes + step - 1)
    finding = one(config)
    assert (finding.severity, finding.key) == (ERROR, "target_config.model_loading_config")
    assert f"{facts.num_parameters:,} parameters" in finding.message
    assert "set dtype to bfloat16, or choose a smaller model" in finding.message
    largest = int(re.search(r"of at most ([\d,]+) parameters", finding.message)[1].replace(",", ""))
    assert largest == facts.num_parameters - facts.kv_bytes(1) // 4 - 1, "one page and one byte do not fit"
    assert found(config, memory=False) == []


def test_bytes_that_each_rank_lacks_are_parameters_of_all_ranks(folders, monkeypatch):
    """The mutant: what one rank lacks is taken for what the model has too many."""
    more = ("target_config.engine_kwargs.dtype=float32", "target_config.engine_kwargs.tensor_parallel_size=2")
    config = service(folders, "target", None, *more)
    facts = Checkpoint.open(str(folders / "target")).size("float32")
    step = target_workspace(config, facts, 2, max_sessions=1)
    there = 2 * (PROCESS_BYTES + facts.of_rank(2).weights_bytes + step)

    def largest(num_bytes):
        with_memory(monkeypatch, num_bytes)
        return int(re.search(r"of at most ([\d,]+) parameters", one(config).message)[1].replace(",", ""))

    assert largest(there) - largest(there - 4096) == 4096 // 4


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ([], "max_sessions"),
        (["target_config.engine_kwargs.kv_pages=600"], "kv_pages"),
        (["target_config.engine_kwargs.max_sessions=1"], "max_model_len"),
    ],
)
def test_the_nearest_setting_that_fits_is_named_and_fits(folders, monkeypatch, settings, key):
    facts = Checkpoint.open(str(folders / "target")).size()
    room = 100 if key != "max_model_len" else 20
    config = service(folders, "target", None, *settings)
    with_memory(monkeypatch, replica_bytes(facts, room) + target_workspace(config, facts) + 10)
    ((refused, message),) = refusals(config)
    assert refused == f"target_config.engine_kwargs.{key}"
    value = int(nearest(message))
    fitting = config.with_overrides([f"target_config.engine_kwargs.{key}={value}"])
    assert refusals(fitting) == [], "what is proposed is accepted"
    larger = config.with_overrides(
        [f"target_config.engine_kwargs.{key}={value + (64 if key == 'max_model_len' else 1)}"]
    )
    assert [key for key, _ in refusals(larger)] == [refused], "and nothing larger"


def test_where_shorter_contexts_alone_are_not_enough_fewer_sessions_are_named_too(folders, monkeypatch):
    facts = Checkpoint.open(str(folders / "target")).size()
    config = service(folders, "target", None)
    with_memory(monkeypatch, replica_bytes(facts, 20) + target_workspace(config, facts, max_sessions=1))
    ((key, message),) = refusals(config)
    assert key == "target_config.engine_kwargs.max_model_len"
    length, sessions = re.search(r"set it to at most (\d+) and max_sessions to at most (\d+)$", message).groups()
    fitting = [f"{key}={length}", f"target_config.engine_kwargs.max_sessions={sessions}"]
    assert refusals(config.with_overrides(fitting)) == []
    assert refusals(config.with_overrides(fitting[:1])) != []


def test_what_load_may_bring_is_a_warning_with_the_nearest_setting(folders, monkeypatch):
    config = service(folders, "target", None, "target_config.engine_kwargs.max_sessions=64")
    pool = checks.examine(config, ports=False).pools[0]
    with_memory(monkeypatch, pool.estimate.total_bytes - 1)
    finding = one(config)
    assert (finding.severity, finding.key) == (WARNING, "target_config.engine_kwargs.max_sessions")
    assert nearest(finding.message) == 63
    fewer = checks.examine(config.with_overrides([f"{finding.key}=63"]), ports=False)
    assert finding.key not in [f.key for f in fewer.findings]


def test_kv_fraction_of_several_ranks_counts_the_pages_of_one(folders):
    """The least memory of a GPU that the estimate takes is enough, and a hundredth less is not."""
    engine = "target_config.engine_kwargs"
    config = service(folders, "target", None, f"{engine}.kv_fraction=1.0", f"{engine}.device=cuda").with_overrides(
        [f"{engine}.tensor_parallel_size=2"]
    )
    how = {"memory": False, "cores": False, "ports": False}
    of_rank = checks.examine(config, **how).pools[0].estimate
    assert of_rank.num_ranks == 2
    enough = of_rank.device_bytes
    assert [f for f in checks.examine(config, **how, gpu_bytes=enough).findings if f.severity == "error"] == []
    (finding,) = checks.examine(config, **how, gpu_bytes=enough * 99 // 100).findings
    assert finding.key.startswith(engine)


def test_kv_fraction_needs_one_session(folders, monkeypatch):
    facts = Checkpoint.open(str(folders / "target")).size()
    settings = ["target_config.engine_kwargs.kv_fraction=1.0", "target_config.engine_kwargs.max_step_tokens=33"]
    config = service(folders, "target", None, *settings)
    one_session = replica_bytes(facts, session_pages(MAX_LEN))
    reserved = target_estimate(config.target_setup(), facts, MAX_LEN).reserved_bytes
    with_memory(monkeypatch, one_session + reserved)
    assert [key for key, _ in refusals(config)] == ["target_config"], "it fits, and the router does not beside it"
    with_memory(monkeypatch, one_session + reserved - 1)
    ((key, message),) = refusals(config)
    assert key == "target_config.engine_kwargs.kv_fraction"
    assert "lower max_model_len to at most 20" in message, "one page less"
    with_memory(monkeypatch, one_session - 1)
    assert [key for key, _ in refusals(config)] == ["target_config.engine_kwargs.max_model_len"]


def test_a_share_that_holds_no_session_is_refused_as_the_replica_would(folders, monkeypatch):
    facts = Checkpoint.open(str(folders / "target")).size()
    config = service(folders, "target", None, "target_config.engine_kwargs.kv_fraction=0.5")
    reserved = target_estimate(config.target_setup(), facts, MAX_LEN).reserved_bytes
    with_memory(monkeypatch, replica_bytes(facts, session_pages(MAX_LEN)) + reserved)
    ((key, message),) = refusals(config)
    assert key == "target_config.engine_kwargs.kv_fraction"
    assert message.startswith(f"{key} is 0.5: that share of")
    assert "raise kv_fraction to at least 1 or lower max_model_len to at most" in message


def test_a_share_of_everything_leaves_room_for_steps_but_not_for_the_other_pools(folders, monkeypatch):
    with_memory(monkeypatch, 4 * GIB)
    config = service(folders, "target", "draft", "target_config.engine_kwargs.kv_fraction=1.0")
    target = checks.examine(config, ports=False).pools[0].estimate
    assert 4 * GIB - 2 * Checkpoint.open(str(folders / "target")).size().page_bytes < target.total_bytes <= 4 * GIB
    finding = one(config)
    assert (finding.severity, finding.key) == (WARNING, "target_config")
    share = float(re.search(r"set target_config.engine_kwargs.kv_fraction to at most ([\d.]+), or", finding.message)[1])
    assert 0.3 < share < 1
    assert found(config.with_overrides([f"target_config.engine_kwargs.kv_fraction={share}"])) == []
    assert found(config.with_overrides([f"target_config.engine_kwargs.kv_fraction={share + 0.002}"])) != []


def test_a_draft_that_does_not_fit(folders, monkeypatch):
    facts = Checkpoint.open(str(folders / "draft")).size()
    config = service(folders, "target", "draft", "target_config.engine_kwargs.max_sessions=1")
    config = config.with_overrides(["draft_config.engine_kwargs.max_sessions=64"])
    per_session = draft_pages(config.draft_setup(), MAX_LEN) // 64
    target = replica_bytes(
        Checkpoint.open(str(folders / "target")).size(), target_pages(config.target_config.engine_kwargs, MAX_LEN)
    )
    step = draft_workspace(config, facts, num_sessions=5)
    with_memory(monkeypatch, replica_bytes(facts, 5 * per_session + 3) + step)
    assert target < replica_bytes(facts, 5 * per_session)
    ((key, message),) = refusals(config)
    assert key == "draft_config.engine_kwargs.max_sessions"
    assert nearest(message) == 5
    config = config.with_overrides(["target_config.engine_kwargs.max_model_len=100"])
    step = max(target_workspace(config, facts, 100), draft_workspace(config, facts, 100, num_sessions=3))
    with_memory(monkeypatch, replica_bytes(facts, per_session) + step - 1)
    ((_, message),) = refusals(config)
    assert nearest(message) > 1, "shorter contexts need fewer pages"


def test_a_draft_of_which_not_one_session_fits_takes_smaller_trees(folders, monkeypatch):
    facts = Checkpoint.open(str(folders / "draft")).size()
    settings = ["target_config.engine_kwargs.max_model_len=100", "draft_config.engine_kwargs.tree_budget=4000"]
    settings += ["target_config.engine_kwargs.max_step_tokens=33"]
    config = service(folders, "target", "draft", "target_config.engine_kwargs.max_sessions=1", *settings)
    step = draft_workspace(config, facts, 100, num_sessions=1, tree_budget=19 * 64 - 100)
    with_memory(monkeypatch, replica_bytes(facts, 20) + step)
    ((key, message),) = refusals(config)
    assert key == "draft_config.engine_kwargs.tree_budget"
    nodes = int(re.search(r"at most (\d+) and max_sessions to at most 1$", message)[1])
    assert nodes == 19 * 64 - 100
    assert refusals(config.with_overrides([f"{key}={nodes}"])) == []
    with_memory(monkeypatch, replica_bytes(facts, 1))
    assert "draft_config.model_loading_config" in [key for key, _ in refusals(config)]


def test_replicas_that_fit_alone_but_not_together(folders, monkeypatch):
    config = service(folders, "target", "draft", "target_config.deployment_config.num_replicas=3")
    facts = Checkpoint.open(str(folders / "target")).size()
    alone = replica_bytes(facts, target_pages(config.target_config.engine_kwargs, MAX_LEN))
    with_memory(monkeypatch, 3 * alone)
    finding = one(config)
    assert (finding.severity, finding.key) == (ERROR, "target_config")
    assert "together" in finding.message
    with_memory(monkeypatch, 6 * alone)
    finding = one(config)
    assert (finding.severity, finding.key) == (WARNING, "target_config"), "from below they fit"


def test_how_many_replicas_fit_together_is_named(folders, monkeypatch):
    config = service(folders, "target", "draft", "target_config.deployment_config.num_replicas=9")
    target, draft, router = checks.examine(config, ports=False, cores=False).pools
    others = RAY_BYTES + draft.machine_bytes + router.machine_bytes
    with_memory(monkeypatch, others + 4 * target.estimate.total_bytes)
    finding = one(config, cores=False)
    assert "set target_config.deployment_config.num_replicas to at most 4, or other machines" in finding.message
    fitting = config.with_overrides(["target_config.deployment_config.num_replicas=4"])
    assert found(fitting, cores=False) == []


def test_replicas_with_gpus_are_not_measured_here(folders, monkeypatch):
    with_memory(monkeypatch, ROUTER_PROCESS_BYTES)
    gpu = "target_config.deployment_config.ray_actor_options.num_gpus=1"
    assert refusals(service(folders, "target", None, gpu)) == []
    bundles = "target_config.placement_group_config.bundles=[{CPU: 1, GPU: 1}]"
    assert refusals(service(folders, "target", None, bundles)) == []
    cpu = "target_config.engine_kwargs.device=cpu"
    assert found(service(folders, "target", None, gpu, cpu)) == [(ERROR, "target_config.model_loading_config")]
    with_memory(monkeypatch, 2 * GIB)
    assert found(service(folders, "target", None, gpu)) == [], "its process is all that it takes of this machine"


def test_more_cores_reserved_than_there_are(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert found(ServiceConfig()) == []
    finding = one(ServiceConfig().with_overrides(["target_config.deployment_config.num_replicas=2"]))
    assert (finding.severity, finding.key) == (WARNING, "target_config")
    assert "reserve 2.9 cores, and this machine has 2" in finding.message
    several = ServiceConfig().with_overrides(["target_config.deployment_config.num_replicas=2"])
    assert found(several, cores=False) == []
    scaled = {"target_config": {"deployment_config": {"autoscaling_config": {"min_replicas": 2, "max_replicas": 9}}}}
    assert "reserve 2.9 cores" in one(ServiceConfig.parse(scaled)).message
    bundles = {"draft_config": {"placement_group_config": {"bundles": [{"CPU": 1}, {"CPU": 1}]}}}
    assert "reserve 3.1 cores" in one(ServiceConfig.parse(bundles)).message


# -- ports -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def listening():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def on(host="127.0.0.1", **ports):
    with contextlib.ExitStack() as stack:
        free = [stack.enter_context(listening()) for _ in range(2)]
    return ServiceConfig.parse({"server": {"host": host, "grpc_port": free[0], "http_port": free[1], **ports}})


def test_free_ports():
    assert check_service(on()) == []


@pytest.mark.parametrize("name", ["grpc_port", "http_port"])
def test_a_port_in_use_is_named_with_a_free_one(name):
    with listening() as port:
        config = on(**{name: port})
        (finding,) = check_service(config)
        assert (finding.severity, finding.key) == (ERROR, f"server.{name}")
        assert finding.message.startswith(f"server.{name} is {port}, and another process listens there: ")
        assert found(config) == []
        proposed = int(finding.message.split()[-3])
        assert proposed not in (port, config.server.grpc_port, config.server.http_port)
    with pytest.raises(ConfigError, match=f"server.{name} is"), listening() as port:
        require_service(on(**{name: port}))


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_of_another_machine(host):
    (finding,) = check_service(on(host))
    assert (finding.severity, finding.key) == (ERROR, "server.host")
    assert f"server.host is {host!r}" in finding.message


def test_the_embedded_pair_is_where_it_is_said_to_be():
    assert local_folder(ServiceConfig().target_setup().source) == Path(TARGET_DIR)
    assert (
        Checkpoint.open(str(DRAFT_DIR)).size().num_parameters
        < Checkpoint.open(str(TARGET_DIR)).size().num_parameters / 4
    )
