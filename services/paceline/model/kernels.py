"""Which attention kernel runs a model, by what the device and the model allow. Said in the log at start-up.

``sdpa``     torch's scaled_dot_product_attention over gathered copies of the pages: everywhere, all dtypes.
``triton``   our own kernel, which reads pages in place in fixed tiles (``triton_attention.py``): CUDA from compute
             capability 8.0. Chosen on request only: it has been compared with ``sdpa`` in triton's interpreter, but
             not been timed on a GPU.

Both take additive masks, so sliding windows and trees are nothing special to them, and softcap. Flash attention has
no such masks; FlexAttention would compile its block mask for every shape of a tree.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Literal

import torch

from paceline.errors import ConfigError
from paceline.model.kv_cache import LayerSpec

Attention = Literal["auto", "sdpa", "triton"]
Kernel = Literal["sdpa", "triton"]

_LEAST_CAPABILITY = (8, 0)
_MOST_HEAD_DIM = 256
_TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def choose_kernel(
    wanted: Attention,
    *,
    device_type: str,
    capability: tuple[int, int] | None,
    dtype: torch.dtype,
    layers: Sequence[LayerSpec],
    has_triton: bool,
) -> Kernel:
    """The kernel to run; ``capability``: of the CUDA device, if it is one.

    Raises:
        ConfigError: ``wanted`` cannot run; the reason in one sentence.
    """
    if wanted != "triton":
        return "sdpa"
    head_dim = max((max(layer.key_dim, layer.value_dim) for layer in layers), default=0)
    if device_type != "cuda" or capability is None:
        reason = f"runs on CUDA only, and the model is on device {device_type!r}"
    elif capability < _LEAST_CAPABILITY:
        reason = f"needs compute capability {_dotted(_LEAST_CAPABILITY)}, and the device has {_dotted(capability)}"
    elif dtype not in _TRITON_DTYPES:
        reason = f"takes float32, float16 and bfloat16, and the model has {str(dtype).removeprefix('torch.')}"
    elif head_dim > _MOST_HEAD_DIM:
        reason = f"takes head dimensions up to {_MOST_HEAD_DIM}, and the model has {head_dim}"
    elif not has_triton:
        reason = "needs the package triton, which is not installed"
    else:
        return "triton"
    raise ConfigError(f"attention is 'triton', which {reason}: use 'auto' or 'sdpa'")


def kernel_for(wanted: Attention, device: torch.device, dtype: torch.dtype, layers: Sequence[LayerSpec]) -> Kernel:
    """``choose_kernel`` for this machine. Raises ConfigError."""
    return choose_kernel(
        wanted,
        device_type=device.type,
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        dtype=dtype,
        layers=layers,
        has_triton=importlib.util.find_spec("triton") is not None,
    )


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
