"""What a check of this machine must not let through: no tokenizer, no way to fetch a model, no GPU."""

import shutil

import pytest
from tests.support.models import save_pair

from paceline.checkpoint import hub
from paceline.checkpoint.tokenizer import load_tokenizer
from paceline.config import ServiceConfig
from paceline.errors import ConfigError
from paceline.preflight import gpus
from paceline.preflight import service as checks
from paceline.preflight.findings import Severity


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A large one, without GPUs, with a torch that could use some, and with the hub at hand."""
    monkeypatch.setattr(checks, "available_bytes", lambda: 1 << 40)
    monkeypatch.setattr(checks, "num_gpus", lambda: 0)
    monkeypatch.setattr(checks, "torch_has_gpus", lambda: True)
    monkeypatch.setattr(checks, "why_not_fetched", lambda: None)


def config(pair, *overrides):
    models = {
        f"{name}_config": {"model_loading_config": {"model_id": name, "model_source": str(pair / name)}}
        for name in ("target", "draft")
    }
    return ServiceConfig.parse(models).with_overrides(overrides)


def errors(config, **options):
    found = checks.check_service(config, cores=False, ports=False, **options)
    return [finding.message for finding in found if finding.severity is Severity.ERROR]


def test_the_pair_itself_may_start(pair):
    assert errors(config(pair)) == []


@pytest.mark.parametrize("pool", ["target", "draft"])
def test_a_checkpoint_without_a_tokenizer(pair, tmp_path, pool):
    bare = tmp_path / "bare"
    shutil.copytree(pair / pool, bare, ignore=shutil.ignore_patterns("token*", "special*", "vocab*", "merges*"))
    source = f"{pool}_config.model_loading_config.model_source={bare}"
    (message,) = errors(config(pair, source))
    assert message.startswith(f"{pool}_config.model_loading_config.tokenizer_source cannot be used: no tokenizer")
    assert "tokenizer.json" in message
    other = f"{pool}_config.model_loading_config.tokenizer_source={pair / 'target'}"
    assert errors(config(pair, source, other)) == []
    with pytest.raises(ConfigError, match="no tokenizer could be loaded"):
        load_tokenizer(str(bare))


def test_a_model_that_cannot_be_fetched(pair, monkeypatch):
    absent = config(pair, "target_config.model_loading_config={model_id: org/not-here}")
    assert errors(absent) == []
    monkeypatch.setattr(checks, "why_not_fetched", lambda: "HF_HUB_OFFLINE is set")
    (message,) = errors(absent)
    assert "'org/not-here' is neither a directory nor in the Hugging Face cache, and cannot be fetched" in message
    assert "HF_HUB_OFFLINE is set" in message
    assert errors(absent, memory=False) == [], "other machines run the replicas, and may reach the hub"


def test_why_nothing_can_be_fetched(monkeypatch):
    class Session:
        def head(self, url, timeout):
            raise OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: True)
    assert hub.why_not_fetched() == "HF_HUB_OFFLINE is set"
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: False)
    monkeypatch.setattr("huggingface_hub.get_session", Session)
    assert "does not answer (no route to host)" in hub.why_not_fetched()
    monkeypatch.setattr(Session, "head", lambda self, url, timeout: None)
    assert hub.why_not_fetched() is None


@pytest.mark.parametrize("pool", ["target_config", "draft_config"])
@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("accelerator_type=H100", "accelerator_type: H100"),
        ("engine_kwargs.device=cuda", "a GPU"),
        ("deployment_config.ray_actor_options={num_gpus: 0.5}", "a GPU"),
    ],
)
def test_a_gpu_where_there_is_none(pair, pool, setting, said):
    asks = config(pair, f"{pool}.{setting}")
    (message,) = errors(asks)
    assert message.startswith(f"{pool} asks for {said}, and no NVIDIA driver on this machine shows a GPU")
    assert errors(asks, memory=False) == [], "other machines run the replicas"


def test_fewer_gpus_than_are_reserved(pair, monkeypatch):
    asks = config(pair, "target_config.accelerator_type=H100", "target_config.engine_kwargs.tensor_parallel_size=2")
    monkeypatch.setattr(checks, "num_gpus", lambda: 1)
    assert ["reserve 2 GPUs, and this machine has 1" in message for message in errors(asks)] == [True]
    for enough in (2, None):
        monkeypatch.setattr(checks, "num_gpus", lambda enough=enough: enough)
        assert errors(asks) == []


def test_cuda_with_a_torch_for_cpus(pair, monkeypatch):
    monkeypatch.setattr(checks, "num_gpus", lambda: 8)
    monkeypatch.setattr(checks, "torch_has_gpus", lambda: False)
    (message,) = errors(config(pair, "draft_config.engine_kwargs.device=cuda"))
    assert message.startswith("draft_config.engine_kwargs.device is 'cuda', and the torch that is installed is one for")


def test_gpus_that_ray_would_not_give(pair, monkeypatch):
    """Ray chooses the GPUs of each replica, and ranks of one model exchange between whole ones."""
    monkeypatch.setattr(checks, "num_gpus", lambda: 8)
    monkeypatch.setattr(checks, "torch_has_gpus", lambda: True)
    for pool in ("target_config", "draft_config"):
        asks = config(pair, f"{pool}.engine_kwargs.device='cuda:1'")
        problem = "is 'cuda:1': Ray Serve chooses the GPUs of each replica, so 'auto', 'cpu' and 'cuda' are allowed"
        assert errors(asks) == errors(asks, memory=False) == [f"{pool}.engine_kwargs.device {problem}"]
    several = ("target_config.engine_kwargs.device=cuda", "target_config.engine_kwargs.tensor_parallel_size=2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b")
    problem = "is 2 and GPU MIG-a is a MIG slice: slices cannot exchange, so only 1 is allowed"
    assert errors(config(pair, *several)) == [f"target_config.engine_kwargs.tensor_parallel_size {problem}"]
    assert errors(config(pair, several[0])) == []


def test_gpus_are_counted_by_what_the_driver_and_the_user_show(monkeypatch, tmp_path):
    monkeypatch.setattr(gpus, "OTHER_DEVICES", ())
    monkeypatch.setattr(gpus, "DRIVER", tmp_path / "gpus")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus.num_gpus() == 0
    for name in ("a", "b"):
        (tmp_path / "gpus" / name).mkdir(parents=True)
    assert gpus.num_gpus() == 2
    for visible, count in {"": 0, "-1": 0, "1": 1, "0,1,2,3": 2}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert gpus.num_gpus() == count
    monkeypatch.setattr(gpus, "OTHER_DEVICES", (tmp_path,))
    assert gpus.num_gpus() is None


def test_what_torch_was_built_for_is_known_without_loading_it():
    import torch

    assert gpus.torch_has_gpus() is (torch.version.cuda is not None or torch.version.hip is not None)


@pytest.mark.parametrize(
    ("method", "said"), [("eagle3", "hidden_size"), ("medusa", "by config.json and the target it must be [64]")]
)
def test_a_head_of_another_target(pair, method, said):
    """What loading would refuse is known from the headers of its files."""
    head = f"[{{method: {method}, model: paceline/embedded-{method}}}]"
    given = config(pair, f"target_config.engine_kwargs.heads={head}")
    found = checks.examine(given, cores=False, ports=False, forms=True).findings
    (message,) = [finding.message for finding in found if finding.severity is Severity.ERROR]
    assert message.startswith(
        f"target_config.engine_kwargs.heads[0] is {method} paceline/embedded-{method}, which does"
    )
    assert said in message
    fitting = ServiceConfig.parse({}).with_overrides([f"target_config.engine_kwargs.heads={head}"])
    found = checks.examine(fitting, cores=False, ports=False, forms=True).findings
    assert not [finding for finding in found if finding.severity is Severity.ERROR]
