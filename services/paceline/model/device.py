"""The device and the dtype of a model: resolved once, where its options leave them to the machine, and handed on."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from typing import NamedTuple

import torch

from paceline.config import HeadDraftOptions, ModelOptions, apply_cublas_environment, visible_gpus
from paceline.config.devices import choose_gpus
from paceline.errors import ConfigError, reason_of

_TOOL_S = 10.0
_LEAST_DRIVERS = {"11": "450.80.02", "12": "525.60.13", "13": "580.65.06"}
"""Drivers of Linux by the major version of CUDA, whose minor versions all run on it."""


class Placement(NamedTuple):
    """The device of a model, and the dtype of its weights."""

    device: torch.device
    dtype: torch.dtype

    @property
    def dtype_name(self) -> str:
        """``float32`` or ``bfloat16``."""
        return str(self.dtype).removeprefix("torch.")


def resolve(options: ModelOptions | HeadDraftOptions, device: torch.device | None = None) -> Placement:
    """The placement that the options ask for. ``device``: chosen already (``occupy``, or by a rank).

    Raises:
        ConfigError: the device that was asked for is not there.
    """
    device = device or resolve_devices(options.device)[0]
    return Placement(device, resolve_dtype(options.dtype, device))


def occupy(options: ModelOptions | HeadDraftOptions, taken: Sequence[int] = ()) -> torch.device:
    """Chooses the device of an engine that is one rank, and makes it this thread's current one. Raises as ``resolve``.

    ``taken``: GPUs of another engine, which are chosen last.
    """
    return make_current(resolve_devices(options.device, taken=taken)[0])


def make_current(device: torch.device) -> torch.device:
    """Makes a GPU this thread's current device: Triton launches its kernels there, wherever their tensors are."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def resolve_devices(name: str, num_ranks: int = 1, taken: Sequence[int] = ()) -> list[torch.device]:
    """The device of each rank of an engine. Raises as ``resolve``.

    Args:
        name: the setting.
        num_ranks: ranks of the engine. On CPUs they share one device.
        taken: GPUs of another engine.
    """
    if resolve_device(name) == "cpu":
        return [torch.device("cpu")] * num_ranks
    numbers = choose_gpus(name, torch.cuda.device_count(), num_ranks, taken)
    return [torch.device("cuda", number) for number in numbers]


def resolve_device(name: str) -> str:
    """The device type of a setting: ``auto`` is CUDA where there is a device, else the CPU.

    Raises:
        ConfigError: cuda was asked for and there is none, or ``auto`` would leave a GPU that is there to nobody.
    """
    if name == "cpu" or torch.cuda.is_available():
        return "cpu" if name == "cpu" else "cuda"
    seen = _gpu_without_torch()
    if name == "auto" and seen is None:
        return "cpu"
    found = f"{seen}, but torch {torch.__version__} cannot use it" if seen else "no CUDA device was found"
    raise ConfigError(
        f"device is {name!r} and {found} ({_why_no_cuda()}): set it to 'cpu', or mend the driver or torch"
    )


def _gpu_without_torch() -> str | None:
    """The sign of a GPU that was given to this process, or is in this machine; None: there is none, or it is hidden."""
    given = visible_gpus()
    if given is not None:  # set by Ray for what it has reserved, or by hand
        return f"CUDA_VISIBLE_DEVICES is {','.join(given)!r}" if given else None
    if (tool := shutil.which("nvidia-smi")) is None:
        return None
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=_TOOL_S, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    gpus = [line for line in listed.splitlines() if line.startswith("GPU ")]
    return f"nvidia-smi lists {gpus[0].partition(' (UUID')[0]}" if gpus else None


def _why_no_cuda() -> str:
    """Torch's own reason, and the least driver that its CUDA runs on."""
    version = torch.version.cuda
    if version is None:
        return "this torch is built without CUDA"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        reason = "it finds none"
    except Exception as error:  # torch raises several kinds
        reason = reason_of(error)
    least = _LEAST_DRIVERS.get(version.partition(".")[0])
    return f"{reason}; its CUDA {version} needs driver {least} or newer" if least else reason


def keep_bits() -> None:
    """Makes the bits of a row in CUDA's 16-bit matrix products independent of the number of rows (``shapes.py``).

    cuBLASLt chooses its kernels by the number of rows. A row's bits change where several blocks share a sum, so this
    setting forbids that. With 16 bits nothing else was found to change them (H100, CUDA 13, 1 to 2,048 rows). Float32
    products have no such setting. Call this before the process' first product on a GPU.
    """
    apply_cublas_environment()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    products = torch.backends.cuda.matmul
    products.allow_bf16_reduced_precision_reduction = (False, False)
    products.allow_fp16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.enable_cudnn_sdp(False)  # its sums are split by the shape of a step


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of a setting: ``auto`` is bfloat16 where the device multiplies it natively, else float32."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
