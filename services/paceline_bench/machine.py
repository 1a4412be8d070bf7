"""The machine, its load, the versions and the command that a figure depends on, and how fast one core reads memory.

floor of a step = (weights + KV of all sessions) in bytes / bytes per second of one core that reads
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from paceline.checkpoint.files import Checkpoint
from paceline.config import apply_worker_environment
from paceline.runtime.workers import available_cores, pin

_FLAGS = (
    *("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8"),
    *("asimd", "bf16", "i8mm", "sve"),
)
"""CPU flags that the arithmetic of the engines depends on."""
_PACKAGES = ("torch", "transformers", "ray", "grpcio", "numpy")
CLIENT = ("cpu", "cores", "memory_bytes", "system", "python", "load_average", "command", "taken")
"""Keys of ``environment`` that are true of a client of any server."""
_BYTES = 1 << 30
_PASSES = 4


def environment() -> dict[str, Any]:
    """The machine, its load and the versions that the figures depend on."""
    cpu, flags = _cpu()
    return {
        "cpu": cpu,
        "cpu_flags": flags,
        "cores": len(available_cores()) or None,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
        **_versions(),
        "commit": _commit(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "threads_per_engine": 1,
        "command": shlex.join(["paceline", *sys.argv[1:]]),
        "taken": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _versions() -> dict[str, str]:
    """Versions of the packages that are installed."""
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _cpu() -> tuple[str, list[str]]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    found: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    flags = set(found.get("flags", found.get("Features", "")).split())
    name = found.get("model name") or platform.processor() or platform.machine()
    return name, [flag for flag in _FLAGS if flag in flags]


def _commit() -> str | None:
    """Commit of this module's working tree, with ``-dirty`` if a tracked file differs; None if it is installed."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Memory bandwidth of one core with one thread over 1 GiB, the best of some passes."""

    read_bytes_per_s: float
    """Bytes read by the fastest of a sum, a maximum and a dot product, which write nothing."""
    copy_bytes_per_s: float
    """Bytes read plus bytes written by a copy."""


def bandwidth(core: int | None, num_bytes: int = _BYTES) -> Bandwidth:
    """Measures in a process of its own on ``core``. The machine should be idle."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=apply_worker_environment) as pool:
        return pool.submit(_bandwidth, core, num_bytes).result()


def _bandwidth(core: int | None, num_bytes: int) -> Bandwidth:
    import numpy as np

    pin(() if core is None else (core,))
    data = np.ones(num_bytes // 4, np.float32)
    words, half = data.view(np.int64), data.size // 2
    readers = (lambda: words.sum(), lambda: words.max(), lambda: np.dot(data[:half], data[half:]))
    read_s = min(_seconds(reader) for reader in readers)
    copy = np.empty(half, np.float32)
    copy_s = _seconds(lambda: np.copyto(copy, data[:half]))
    return Bandwidth(num_bytes / read_s, num_bytes / copy_s)


def _seconds(work: Any) -> float:
    best = float("inf")
    for _ in range(_PASSES):
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best


def step_bytes(path: str, dtype: str) -> dict[str, int | None]:
    """Bytes of a checkpoint that a step reads: all weights but an input embedding that is not the output layer too, and
    the KV of a token. Empty if ``path`` is not a directory with a checkpoint."""
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        return {}
    checkpoint = Checkpoint.open(path)
    size = checkpoint.size(dtype)
    if size is None:
        return {}
    tied = bool(checkpoint.config.get("tie_word_embeddings"))
    weights = size.num_parameters - (0 if tied else size.vocab_size * size.hidden_size)
    return {
        "weight_bytes": weights * size.item_bytes,
        "kv_bytes_per_token": None if size.kv_values is None else size.kv_values * size.item_bytes,
    }


def measure_floor(target: str, draft: str, dtype: str) -> dict[str, Any]:
    """Measures the ``floor`` of a report: bandwidth of the target's core, and the bytes that a step reads. ``draft``:
    empty if there is no draft model."""
    cores = available_cores()
    found = bandwidth(cores[0] if len(cores) >= 2 else None)
    roles = {"target": target, "draft": draft}
    return {**asdict(found), **{role: step_bytes(path, dtype) for role, path in roles.items() if path}}


def floor_s(floor: Mapping[str, Any], role: str, tokens: float) -> float | None:
    """Least seconds of a one-token step of ``role`` over ``tokens`` KV positions of all its sessions together, by the
    ``floor`` of a report; None if that lacks the figures."""
    read = floor.get(role) or {}
    if not read.get("weight_bytes") or not floor.get("read_bytes_per_s"):
        return None
    kv = (read.get("kv_bytes_per_token") or 0) * tokens
    return float((read["weight_bytes"] + kv) / floor["read_bytes_per_s"])
