"""The device and the dtype of a model: resolved once, where its options leave them to the machine, and handed on."""

from __future__ import annotations

from typing import NamedTuple

import torch

from paceline.config import ModelOptions
from paceline.errors import ConfigError


class Placement(NamedTuple):
    """The device of a model, and the dtype of its weights."""

    device: torch.device
    dtype: torch.dtype

    @property
    def dtype_name(self) -> str:
        """``float32`` or ``bfloat16``."""
        return str(self.dtype).removeprefix("torch.")


def resolve(options: ModelOptions, device: torch.device | None = None) -> Placement:
    """The placement that the options ask for. ``device``: a rank's own, which is chosen already.

    Raises:
        ConfigError: cuda was asked for and there is none.
    """
    device = device or torch.device(resolve_device(options.device))
    return Placement(device, resolve_dtype(options.dtype, device))


def resolve_device(name: str) -> str:
    """The device type of a setting: ``auto`` is CUDA where there is a device, else the CPU.

    Raises:
        ConfigError: cuda was asked for and there is none.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda' but no CUDA device was found: use 'cpu' or 'auto'")
    return name


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of a setting: ``auto`` is bfloat16 where the device multiplies it natively, else float32."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
