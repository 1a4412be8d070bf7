"""A GPU that torch cannot use is no reason to run on the CPU in silence."""

import subprocess
from types import SimpleNamespace

import pytest
import torch

from paceline.errors import ConfigError
from paceline.model import device
from paceline.model.device import resolve_device, resolve_dtype

OLD = "The NVIDIA driver on your system is too old (found version 11040)."


@pytest.fixture(autouse=True)
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError(OLD + "\nPlease update")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(device.shutil, "which", lambda name: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def lists(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(device.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(device.subprocess, "run", lambda *a, **k: SimpleNamespace(stdout=text))


def test_a_machine_without_a_gpu_computes_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so does a process from which all are hidden, as Ray hides them from actors that reserve none."""
    assert resolve_device("auto") == "cpu"
    lists(monkeypatch, "No devices found.\n")
    assert resolve_device("auto") == "cpu"
    lists(monkeypatch, "GPU 0: NVIDIA L4 (UUID: GPU-1)\n")
    for hidden in ("", "-1", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert resolve_device("auto") == "cpu"


def test_a_tool_that_hangs_or_fails_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*args: object, **options: object) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", 10)

    lists(monkeypatch, "")
    monkeypatch.setattr(device.subprocess, "run", hang)
    assert resolve_device("auto") == "cpu"


def test_a_reserved_gpu_that_torch_cannot_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's own reason and the least driver; ``cpu`` runs all the same."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ConfigError) as caught:
        resolve_device("auto")
    assert str(caught.value) == (
        f"device is 'auto' and CUDA_VISIBLE_DEVICES is '0', but torch {torch.__version__} cannot use it "
        f"({OLD}; its CUDA 13.0 needs driver 580.65.06 or newer): set it to 'cpu', or mend the driver or torch"
    )
    assert resolve_device("cpu") == "cpu"


def test_a_gpu_of_the_machine_that_torch_cannot_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    lists(monkeypatch, "GPU 0: NVIDIA L4 (UUID: GPU-1)\nGPU 1: NVIDIA L4 (UUID: GPU-2)\n")
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(
        ConfigError, match=r"nvidia-smi lists GPU 0: NVIDIA L4, .* \(this torch is built without CUDA\)"
    ):
        resolve_device("auto")
    with pytest.raises(ConfigError, match="device is 'cuda' and nvidia-smi lists GPU 0"):
        resolve_device("cuda")


def test_cuda_where_there_is_none() -> None:
    with pytest.raises(ConfigError, match="device is 'cuda' and no CUDA device was found"):
        resolve_device("cuda")


def test_emulated_bfloat16_is_not_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices before Ampere multiply it by way of float32, more slowly."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert resolve_dtype("auto", torch.device("cuda")) is torch.float32
