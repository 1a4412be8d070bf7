"""``paceline check``: the table, the findings and the exit status, without loading anything."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.model.attention.test_latent import DEEPSEEK_V3
from tests.support.models import FAMILIES, letters_tokenizer, random_model, save_pair

from paceline.checkpoint.files import Checkpoint
from paceline.cli.main import main
from paceline.cluster.ports import free_ports
from paceline.config import ServiceConfig
from paceline.errors import ConfigError
from paceline.preflight import service as checks
from paceline.preflight.estimate import (
    ENGINE_PROCESS_BYTES,
    RAY_BYTES,
    ROUTER_PROCESS_BYTES,
    draft_estimate,
    target_estimate,
)

GIB, MIB = 1 << 30, 1 << 20
MAX_LEN = 2048


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Flags that name a target and a draft."""
    folder = save_pair(tmp_path_factory.mktemp("models"))
    return ["--target", str(folder / "target"), "--draft", str(folder / "draft")]


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    """Sets what this machine has left: at first enough for everything."""

    def have(num_bytes):
        monkeypatch.setattr(checks, "available_bytes", lambda: num_bytes)

    have(64 * GIB)
    return have


def check(capsys, *flags, ports=None):
    """Exit status and what is printed."""
    grpc_port, http_port = ports or free_ports(2)
    status = main(
        ["check", "--host", "127.0.0.1", "--grpc-port", f"{grpc_port}", "--http-port", f"{http_port}", *flags]
    )
    captured = capsys.readouterr()
    assert captured.err == ""
    return status, captured.out


def check_json(capsys, *flags):
    status, out = check(capsys, "--json", *flags)
    return status, json.loads(out)


def rows_of(out):
    """The cells of the table by pool."""
    lines = [line.split() for line in out.partition("\n\n")[0].splitlines()]
    assert lines[0] == ["MiB", "replicas", "ranks", "process", "weights", "KV", "trees", "workspace", "each", "all"]
    return {cells[0]: dict(zip(lines[0][1:], cells[1:], strict=True)) for cells in lines[1:]}


def mib(num_bytes):
    return f"{-(-num_bytes // MIB):,}"


def test_a_service_that_may_start(capsys, models):
    status, out = check(capsys, *models, "--targets", "2", "--no-compile")
    assert status == 0
    rows = rows_of(out)
    assert list(rows) == ["target_config", "draft_config", "router_config"]
    setup = ServiceConfig().target_setup()
    target = target_estimate(setup, Checkpoint.find(models[1]).size(), MAX_LEN)
    assert rows["target_config"]["replicas"] == "2"
    assert rows["target_config"]["process"] == mib(ENGINE_PROCESS_BYTES)
    assert rows["target_config"]["KV"] == mib(target.kv_bytes)
    assert rows["target_config"]["workspace"] == mib(target.workspace_bytes)
    assert int(rows["target_config"]["all"].replace(",", "")) >= 2 * int(rows["target_config"]["each"]) - 1
    assert rows["router_config"]["each"] == mib(ROUTER_PROCESS_BYTES)
    assert "272 KV pages of 64 tokens, 17,408 tokens: 16 sessions of 1,024 tokens, 8 of the longest, 2,048." in out
    assert "this machine has 64.00 GiB left." in out
    assert out.endswith("\nThe service may start.\n")


def test_what_a_token_takes_is_said(capsys, tmp_path):
    """Of DeepSeek-V3 by its published configuration: 61 latents of 512 + 64 numbers."""
    save_pair(tmp_path)
    capsys.readouterr()  # transformers shows its progress
    target = tmp_path / "target"
    (target / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    _, out = check(capsys, "--target", str(target), "--draft", str(tmp_path / "draft"), "--no-compile")
    assert "target_config: a token takes 68.6 KiB of KV in each process." in out
    assert "draft_config: a token takes " in out


def test_json_has_the_same_estimate_and_adds_up(capsys, models):
    surge = "target_config.deployment_config.max_surge_percent"
    status, found = check_json(capsys, *models)
    assert (status, found["may_start"]) == (0, True)
    (finding,) = found["findings"]
    assert (finding["severity"], finding["key"]) == ("warning", surge)
    _, surging = check_json(capsys, *models, "--set", f"{surge}=100")
    assert surging == found | {"findings": [], "left_bytes": surging["left_bytes"]}
    setup = ServiceConfig().target_setup()
    target, draft, router = found["pools"]
    for pool, estimate in (
        (
            target,
            target_estimate(setup, Checkpoint.find(models[1]).size(), MAX_LEN, left_bytes=64 * GIB),
        ),
        (
            draft,
            draft_estimate(ServiceConfig().draft_setup(), Checkpoint.find(models[3]).size(), MAX_LEN),
        ),
    ):
        parts = pool["estimate"]
        assert parts["packed_bytes"] == parts["weights_bytes"] > 0
        assert parts["total_bytes"] == estimate.total_bytes
        assert parts["least_bytes"] == estimate.least_bytes < estimate.total_bytes
        names = ("process", "weights", "packed", "kv", "tree", "workspace")
        assert sum(parts[f"{name}_bytes"] for name in names) == parts["total_bytes"]
    assert (target["model_id"], target["num_replicas"], target["on_gpu"]) == ("target", 1, False)
    needed = sum(pool["estimate"]["total_bytes"] for pool in (target, draft, router))
    assert found["needed_bytes"] == RAY_BYTES + needed
    assert found["left_bytes"] == 64 * GIB


def test_it_is_the_start_up_check(capsys, models, memory):
    """What ``serve`` would refuse is printed first, with a value that it takes."""
    memory(300 * MIB)
    sessions = ["--set", "target_config.engine_kwargs.max_sessions=1024", "--set"]
    flags = [*models, *sessions, "draft_config.engine_kwargs.max_sessions=1"]
    status, out = check(capsys, *flags)
    assert status == 1
    lines = out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(("error: ", "warning: ")))
    assert lines[first].startswith("error: target_config.engine_kwargs.max_sessions is 1024: it needs 17408 KV pages")
    assert lines[-1] == "The service would not start."
    _, found = check_json(capsys, *flags)
    assert found["may_start"] is False
    assert [finding["severity"] for finding in found["findings"]] == ["error", "warning", "warning"]
    config = ServiceConfig.parse(
        {
            "target_config": {
                "model_loading_config": {"model_id": models[1]},
                "engine_kwargs": {"max_sessions": 1024},
            },
            "draft_config": {"model_loading_config": {"model_id": models[3]}, "engine_kwargs": {"max_sessions": 1}},
        }
    )
    with pytest.raises(ConfigError) as refused:
        checks.require_service(config, cores=False, ports=False)
    assert str(refused.value) == found["findings"][0]["message"] == lines[first].removeprefix("error: ")
    fitting = re.search(r"set it to at most (\d+)$", lines[first])[1]
    status, _ = check(capsys, *flags, "--set", f"target_config.engine_kwargs.max_sessions={fitting}")
    assert status == 0
    status, _ = check(capsys, *flags, "--set", f"target_config.engine_kwargs.max_sessions={int(fitting) + 1}")
    assert status == 1


def test_a_port_in_use_is_an_error(capsys, models):
    with contextlib.closing(socket.socket()) as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        taken = server.getsockname()[1]
        status, out = check(capsys, *models, ports=(taken, free_ports(1)[0]))
    assert status == 1
    assert f"error: server.grpc_port is {taken}, and another process listens there: --grpc-port " in out
    status, out = check(capsys, *models, "--address", "auto", ports=(taken, taken + 1))
    assert (status, "grpc_port" in out, "this machine" in out) == (0, False, False), "other machines listen there"


def test_a_model_that_is_not_here_is_not_guessed(capsys, models, monkeypatch):
    monkeypatch.setattr("paceline.preflight.service.why_not_fetched", lambda: None)
    flags = ["--target", "org/not-here", *models[2:]]
    status, out = check(capsys, *flags)
    assert status == 0
    assert set(rows_of(out)["target_config"].values()) == {"1", "?"}
    assert "target_config: nothing is known of 'org/not-here'" in out
    assert "warning: target_config.model_loading_config.model_id 'org/not-here' is neither a directory nor" in out
    _, found = check_json(capsys, *flags)
    assert found["pools"][0]["estimate"] is None
    assert found["pools"][1]["estimate"] is not None


def test_a_model_that_cannot_be_used(capsys, models, tmp_path):
    status, out = check(capsys, "--target", str(tmp_path), *models[2:])
    assert status == 1
    assert "error: target_config.model_loading_config.model_source cannot be used: " in out
    assert rows_of(out)["target_config"]["KV"] == "?"


def test_a_configuration_alone_is_sized(capsys, models, tmp_path):
    (tmp_path / "config.json").write_text((Path(models[1]) / "config.json").read_text())
    _, whole = check_json(capsys, *models, "--address", "auto")
    flags = ["--target", str(tmp_path), *models[2:]]
    status, lone = check_json(capsys, *flags, "--address", "auto")
    assert status == 0
    assert [pool["estimate"] for pool in lone["pools"]] == [pool["estimate"] for pool in whole["pools"]]
    keys = [f"target_config.model_loading_config.{name}" for name in ("model_source", "tokenizer_source")]
    assert [finding["key"] for finding in lone["findings"][:2]] == keys
    assert "which holds no weights: the sizes are computed from its config.json" in lone["findings"][0]["message"]
    _, out = check(capsys, *flags, "--address", "auto", "--kv-cache-dtype", "fp8")
    assert (
        "target_config: keys and values in FP8 have the scales that the weights bring, else 1: they are not here" in out
    )
    status, here = check_json(capsys, *flags)
    assert (status, here["pools"][0]["estimate"] is None) == (1, False), "it cannot start here, and is sized"


def test_a_gpu_service_is_sized_by_the_memory_of_its_gpus(capsys, models):
    """No GPU, driver or CUDA build of torch is needed here; the draft without a GPU is said to run on cores."""
    gpu = ["--device", "cuda", "--set", "target_config.engine_kwargs.kv_fraction=0.5"]
    status, found = check_json(capsys, *models, *gpu, "--device-memory-gib", "2")
    assert (status, found["left_bytes"], found["gpu_bytes"]) == (0, None, 2 * GIB)
    parts = found["pools"][0]["estimate"]
    others = sum(parts[f"{name}_bytes"] for name in ("weights", "workspace"))
    assert parts["kv_bytes"] == pytest.approx(0.5 * (2 * GIB - others), rel=0.01)
    _, out = check(capsys, *models, *gpu, "--device-memory-gib", "2")
    assert re.search(r"target_config: weights, KV and workspace are in the memory of a GPU: 1\.\d\d GiB of its 2", out)
    assert "FlashInfer" not in out
    library = ["--set", "target_config.engine_kwargs.attention=flashinfer"]
    _, out = check(capsys, *models, *gpu, *library, "--device-memory-gib", "2")
    assert "target_config: FlashInfer attends to whole blocks of prompts. A replica does not start" in out
    _, out = check(capsys, *models, *gpu, "--device-memory-gib", "0.001")
    assert "GPU has 0.00 GiB: choose a smaller model or more or larger GPUs (tensor_parallel_size)" in out
    assert "draft_config: it runs on CPU cores, as it reserves no GPU: accelerator_type or --draft-device cuda" in out
    status, out = check(capsys, *models, *gpu, "--device-memory-gib", "0.001")
    assert status == 1
    assert "and a GPU has 0.00 GiB" in out


def test_the_memory_of_gpus_is_not_claimed_to_be_known(capsys, models, memory, monkeypatch):
    monkeypatch.setattr("paceline.preflight.service.num_gpus", lambda: None)
    monkeypatch.setattr("paceline.preflight.service.torch_has_gpus", lambda: True)
    memory(3 * GIB)
    gpu = ["--set", "target_config.deployment_config.ray_actor_options.num_gpus=1"]
    share = ["--set", "target_config.engine_kwargs.kv_fraction=0.9"]
    status, out = check(capsys, *models, *gpu, *share)
    assert status == 0
    assert "target_config: weights, KV and workspace are in the memory of a GPU, which is read when the" in out
    assert "kv_fraction decides then how many pages there are." in out
    _, found = check_json(capsys, *models, *gpu, *share)
    target, draft, router = (pool["estimate"] for pool in found["pools"])
    assert target["packed_bytes"] == 0
    host = target["process_bytes"] + target["tree_bytes"]
    assert found["needed_bytes"] == RAY_BYTES + host + draft["total_bytes"] + router["total_bytes"]


@pytest.mark.parametrize(("drafter", "pools"), [("ngram", 3), ("none", 2)])
def test_drafts_without_a_model(capsys, models, drafter, pools):
    status, found = check_json(capsys, *models[:2], "--drafter", drafter)
    assert status == 0
    assert len(found["pools"]) == pools
    if drafter == "ngram":
        parts = found["pools"][1]["estimate"]
        assert parts["weights_bytes"] == parts["kv_bytes"] == 0 < parts["tree_bytes"]
    else:
        assert found["pools"][0]["estimate"]["tree_bytes"] == 0, "no draft sends trees"


def test_it_needs_neither_torch_nor_ray():
    grpc_port, http_port = free_ports(2)
    code = (
        "import sys; from paceline.cli.main import main; "
        f"main(['check', '--grpc-port', '{grpc_port}', '--http-port', '{http_port}']); "
        "print(sorted({'torch', 'ray', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "target_config" in done.stdout


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # about Ray's own models
def test_what_deploying_it_would_replace(capsys, models, tmp_path):
    running = tmp_path / "running.yaml"
    running.write_text("router_config: {max_queued_requests: 5}\ndraft_config: null\n")
    flags = ["--set", "router_config.max_queued_requests=7", "--drafter", "none", "--against", str(running)]
    status, out = check(capsys, *flags)
    assert status == 0
    lines = out.splitlines()
    first = next(i for i, line in enumerate(lines) if re.fullmatch(rf"Against {running}: \d keys differ.", line))
    assert "  router_config.max_queued_requests" in lines[first:]
    assert any(re.match(r"Router +replaced: the only one stops", line) for line in lines[first:])
    assert any(re.match(r"Target:\S+ +kept$", line) for line in lines[first:])
    status, out = check(capsys, *flags, "--json")
    assert "router_config.max_queued_requests" in json.loads(out)["against"]["keys"]


def test_the_set_of_rotary_factors_is_named(capsys, models, tmp_path):
    """Of a model with two sets, by the longest context of the service."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    config = FAMILIES["phi3"]()
    config.update({"rope_parameters": config.rope_parameters | rope, "original_max_position_embeddings": 512})
    random_model(config).save_pretrained(tmp_path)
    letters_tokenizer().save_pretrained(tmp_path)
    capsys.readouterr()
    short = ("--max-model-len", "512")
    for flags, side in (((), f"long rotary factors, as max_model_len is {MAX_LEN}, more than 512"),
                        (short, "short rotary factors, as max_model_len is 512, at most 512")):  # fmt: skip
        _, out = check(capsys, "--target", str(tmp_path), *models[2:], "--no-compile", *flags)
        assert f"target_config: the {side}, the context that these were trained for." in out


def test_scales_of_keys_and_values_are_named(capsys, models, tmp_path):
    """Where the cache is in FP8; a wrong one keeps the service from starting."""
    tensors = load_file(f"{models[1]}/model.safetensors")
    shutil.copytree(models[1], tmp_path, dirs_exist_ok=True)
    capsys.readouterr()
    engine = "target_config.engine_kwargs"
    named = "target_config: keys and values in FP8 have the checkpoint's scales in 1 layer: 0.25 to 1."
    for scale, said in ((0.25, named), (-1.0, "cannot be used")):
        own = {"model.layers.0.self_attn.k_scale": torch.tensor(scale)}
        save_file(tensors | own, tmp_path / "model.safetensors", {"format": "pt"})
        status, out = check(capsys, "--target", str(tmp_path), *models[2:], "--set", f"{engine}.kv_cache_dtype=fp8")
        assert said in out
        assert status == int(scale < 0)
