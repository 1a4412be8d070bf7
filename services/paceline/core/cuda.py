"""Checks if this machine can compile kernels for CUDA devices; imports no triton."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import shutil
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

LEAST_CAPABILITY = (8, 0)
"""Compute capability from which our kernels are compiled."""
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
log = logging.getLogger(__name__)


def usable(x: Tensor) -> bool:
    """True if ``cuda_rows.py`` can take ``x`` [rows, tokens]."""
    return x.is_cuda and x.dtype in _DTYPES and x.dim() == 2 and x.shape[1] > 0 and compiles(x.device)


def prepare(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compiles the kernels now, for logits of that kind, so that no step has to wait for it."""
    logits = torch.zeros(1, vocab_size, dtype=dtype, device=device)
    if not usable(logits):
        return
    from paceline.core import cuda_rows  # imports triton

    keys = torch.zeros(1, 3, dtype=torch.int64, device=device)
    seed, position, nonce = keys.unbind(-1)
    cuda_rows.pick(logits, keys, 0)
    cuda_rows.gumbel_max(logits.float(), seed, position, None, 0, 0)
    cuda_rows.gumbel_max(logits.double(), seed, position, nonce, 0, 0)  # by the rejection rule


@functools.cache
def compiles(device: torch.device) -> bool:
    reason = triton_unavailable()
    if reason is None and torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        reason = f"needs compute capability {'.'.join(map(str, LEAST_CAPABILITY))}"
    if reason is not None:
        log.warning("tokens are drawn on %s by torch's operators, which takes longer: our kernel %s", device, reason)
    return reason is None


def triton_unavailable() -> str | None:
    """Says why triton cannot compile a kernel on this machine; None if nothing is known to keep it from that.

    It builds its launcher with a C compiler and Python's headers when a kernel first runs.
    """
    if importlib.util.find_spec("triton") is None:
        return "needs the package triton, which is not installed"
    compiler = os.environ.get("CC")
    if not any(map(shutil.which, [compiler] if compiler else ["cc", "gcc", "clang"])):
        return f"needs a C compiler, and there is none ({compiler or 'cc, gcc, clang'})"
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        return f"needs Python's headers, and {headers} has no Python.h (Debian: python3-dev)"
    return None
