"""The device and the dtype that the configuration leaves to the machine."""

from __future__ import annotations

import torch

from paceline.errors import ConfigError


def resolve_device(name: str) -> str:
    """``auto`` is CUDA where there is a device, else the CPU.

    Raises:
        ConfigError: cuda was asked for and there is none.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda' but no CUDA device was found: use 'cpu' or 'auto'")
    return name


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """``auto`` is bfloat16 where the device multiplies it natively, else float32."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
