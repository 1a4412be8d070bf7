"""Chooses the attention kernel that runs a model, by what the device and the model allow. Said in the log at start-up.

``native``   our own operator, which reads pages in place in fixed blocks (``native.py``): CPUs with AVX-512, of
             bfloat16 and float32. What ``auto`` is there, if it has been compiled or can be.
``sdpa``     torch's scaled_dot_product_attention over gathered copies of the pages: everywhere, all dtypes.
``triton``   our own kernels, which read and write pages in place in fixed tiles (``triton.py``): CUDA from compute
             capability 8.0. What ``auto`` is there, if this machine can build them.
``flashinfer``  as ``triton``, and whole blocks of prompts by an installed kernel library (``flashinfer.py``).

All take additive masks, so sliding windows and trees are nothing special to them, and softcap. Flash attention has
no such masks; FlexAttention would compile its block mask for every shape of a tree.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import torch

from paceline.core.cuda import LEAST_CAPABILITY, triton_unavailable
from paceline.errors import ConfigError
from paceline.model.attention import flashinfer
from paceline.model.attention import native as cpu_attention
from paceline.model.attention.schedule import MOST_KEY_DIM, MOST_VALUE_DIM
from paceline.model.kv_cache import NO_KV, LayerSpec

Attention = Literal["auto", "sdpa", "native", "triton", "flashinfer"]
Kernel = Literal["sdpa", "native", "triton"]

_TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def choose_kernel(
    wanted: Attention,
    *,
    device_type: str,
    capability: tuple[int, int] | None,
    dtype: torch.dtype,
    layers: Sequence[LayerSpec],
    indexed: bool,
    no_triton: str | None,
    no_native: str | None,
    no_library: str | None = None,
) -> Kernel:
    """Chooses the attention kernel; of ``flashinfer`` the one for all other tokens.

    ``capability``: compute capability of the CUDA device, if it is one. ``indexed``: an indexer chooses the keys of a
    layer. ``no_triton``, ``no_native``: the reason why this machine cannot build that kernel; None: it can.
    ``no_library``: the reason why FlashInfer cannot serve this model here; None: nothing is known to keep it from that.

    Raises:
        ConfigError: ``wanted`` cannot run; the message gives the reason in one sentence.
    """
    if wanted == "sdpa":
        return "sdpa"
    if wanted in ("triton", "flashinfer") or (wanted == "auto" and device_type == "cuda"):
        kernel: Kernel = "triton"
        reason = _no_triton(device_type, capability, dtype, layers, indexed) or no_triton
        reason = reason or (no_library if wanted == "flashinfer" else None)
    else:
        kernel, reason = "native", _no_native(device_type, dtype) or no_native
    if reason is None:
        return kernel
    if wanted == "auto":
        return "sdpa"
    raise ConfigError(f"attention is {wanted!r}, which {reason}: use 'auto' or 'sdpa'")


def no_library(
    dtype: torch.dtype,
    layers: Sequence[LayerSpec],
    window: int | None,
    further: Collection[str],
    *,
    is_here: bool = True,
) -> str | None:
    """Says why FlashInfer cannot attend to blocks of a model's prompts, as a clause; None: nothing known keeps it.

    ``window``: of a layer that has one. ``further``: names of what attention has in addition (``Probe.further``).
    ``is_here``: False: it would be on another machine, which has it.
    """
    if dtype not in flashinfer.DTYPES:
        return f"takes float16 and bfloat16, and the model has {_name(dtype)}"
    for layer in layers:
        if layer == NO_KV:
            continue
        if not layer.value_dim:
            return "attends to keys and values, and the model keeps latents"
        if layer.is_fp8:
            return "reads pages in the model's dtype, and kv_cache_dtype is 'fp8'"
        if layer.key_dim != layer.value_dim or layer.key_dim not in flashinfer.HEAD_DIMS:
            allowed = ", ".join(map(str, flashinfer.HEAD_DIMS))
            return f"takes heads of {allowed} numbers, and the model has {layer.key_dim} and {layer.value_dim}"
    if window is not None:
        return "attends to the whole context, and the model has layers with windows or chunks"
    if further:
        return f"computes a plain softmax, and the model has {' and '.join(sorted(further))}"
    return flashinfer.unavailable() if is_here else None


def kernel_for(
    wanted: Attention,
    device: torch.device,
    dtype: torch.dtype,
    layers: Sequence[LayerSpec],
    *,
    indexed: bool,
    window: int | None = None,
    further: Collection[str] = (),
) -> Kernel:
    """Runs ``choose_kernel`` for this machine. Loads the native operator if it may be chosen. Raises ConfigError.

    ``window``, ``further``: see ``no_library``.
    """
    asked = wanted in ("auto", "native") and device.type == "cpu" and dtype in cpu_attention.DTYPES
    return choose_kernel(
        wanted,
        device_type=device.type,
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        dtype=dtype,
        layers=layers,
        indexed=indexed,
        no_triton=triton_unavailable() if wanted not in ("sdpa", "native") and device.type == "cuda" else None,
        no_native=cpu_attention.unavailable() if asked else None,
        no_library=no_library(dtype, layers, window, further) if wanted == "flashinfer" else None,
    )


def _no_native(device_type: str, dtype: torch.dtype) -> str | None:
    if device_type != "cpu":
        return f"runs on the CPU only, and the model is on device {device_type!r}"
    if dtype not in cpu_attention.DTYPES:
        return f"takes float32 and bfloat16, and the model has {_name(dtype)}"
    return None


def _no_triton(
    device_type: str,
    capability: tuple[int, int] | None,
    dtype: torch.dtype,
    layers: Sequence[LayerSpec],
    indexed: bool,
) -> str | None:
    if device_type != "cuda" or capability is None:
        return f"runs on CUDA only, and the model is on device {device_type!r}"
    if capability < LEAST_CAPABILITY:
        return f"needs compute capability {_dotted(LEAST_CAPABILITY)}, and the device has {_dotted(capability)}"
    if dtype not in _TRITON_DTYPES:
        return f"takes float32, float16 and bfloat16, and the model has {_name(dtype)}"
    if indexed:
        return "attends to all keys, and an indexer of the model chooses some"
    for name, dims, most in (
        ("keys", [layer.key_dim for layer in layers], MOST_KEY_DIM),
        ("values", [layer.value_dim for layer in layers], MOST_VALUE_DIM),
    ):
        if max(dims, default=0) > most:
            return f"takes {name} of up to {most} numbers, and the model has {max(dims)}"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
