"""Environment variables that a process reads, and those that a worker sets. No other module of the configuration
reads or writes one.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TextIO

from paceline.errors import ConfigError

CUBLAS_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
"""Memory too small for products whose sums several blocks of a GPU share (``model/device.py``). cuBLAS then chooses
among kernels that need none; told only to share no sum, it takes some that are ten times slower."""
WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    **CUBLAS_ENVIRONMENT,
}
"""Variables that a worker process sets before it imports torch. A multi-threaded region stalls whenever another process
uses one of its cores, so parallelism comes from processes."""
_VISIBLE_GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""NVIDIA's variable, and AMD's: drivers read their own."""

OTHER_VARIABLES = frozenset(
    f"PACELINE_{name}"
    for name in (
        "API_KEY",
        "CACHE",
        "CLONES",
        "HAPROXY_BINARY",
        "HAPROXY_BINDS",
        "MODELS",
        "MOTO",
        "POOL",
        "PYTHON",
        "TESTBED",
        "TLS",
    )
)
"""Variables of ours that are no key of the configuration: what processes, scripts of ``cluster/`` and tests ask for."""
_SERVICE_LINK = re.compile(r"(\w+?_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)")
"""Variables that Kubernetes adds to containers for a service of the namespace whose name begins with ``paceline``."""


def variable_of(key: str) -> str:
    """The environment variable of a dotted key: ``server.grpc_port`` is ``PACELINE_SERVER__GRPC_PORT``."""
    return f"PACELINE_{key.replace('.', '__').upper()}"


def settings(keys: Collection[str]) -> dict[str, str]:
    """Returns the configuration keys that environment variables set -> their values as YAML text.

    ``keys``: every existing dotted key. Sections come before the keys in them, since a later setting wins. Variables
    of other programs and ``OTHER_VARIABLES`` do not count.

    Raises:
        ConfigError: a variable that begins with ``PACELINE_`` names no key. The message omits its value: it may be an
            API key in the wrong variable.
    """
    known = {variable_of(key): key for key in keys}
    found = {}
    for name in sorted(os.environ, key=lambda name: (name.count("__"), name)):
        text = name.removeprefix("PACELINE_")
        if text == name or name in OTHER_VARIABLES or ("__" not in text and _SERVICE_LINK.fullmatch(text)):
            continue
        if name not in known:
            close = difflib.get_close_matches(name, [*known, *OTHER_VARIABLES], n=1)
            hint = (
                f"did you mean {close[0]}?" if close else "PACELINE_SERVER__GRPC_PORT sets server.grpc_port, and so on"
            )
            raise ConfigError(f"{name} is set, but there is no such key of the configuration: {hint}")
        found[known[name]] = os.environ[name]
    return found


def without_settings() -> dict[str, str]:
    """The environment of a process that is configured by its arguments alone."""
    return {
        name: value for name, value in os.environ.items() if name in OTHER_VARIABLES or not name.startswith("PACELINE_")
    }


def cache_dir() -> Path:
    """Directory of the compiled models: PACELINE_CACHE, else the user's cache directory."""
    own = os.environ.get("PACELINE_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(own).expanduser() if own else Path(base).expanduser() / "paceline"


def otlp_protocol() -> str:
    """The protocol by which spans are sent, as OpenTelemetry's variables say. Raises ConfigError for another one."""
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if protocol := os.environ.get(name):
            if protocol not in ("grpc", "http/protobuf"):
                raise ConfigError(f"{name} is {protocol!r}: 'grpc' and 'http/protobuf' are allowed")
            return protocol
    return "grpc"


def worker_environment(**more: str) -> dict[str, str]:
    """The environment of a worker that is another program: this process' own, ``WORKER_ENVIRONMENT`` and ``more``."""
    return {**os.environ, **WORKER_ENVIRONMENT, **more}


def apply_worker_environment() -> None:
    """Sets ``WORKER_ENVIRONMENT`` for this process. Must run before torch is imported to take full effect."""
    os.environ.update(WORKER_ENVIRONMENT)


def apply_cublas_environment() -> None:
    """Sets the variables of ``CUBLAS_ENVIRONMENT`` that are not set. Must run before the process' first product on a
    GPU.
    """
    for name, value in CUBLAS_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def visible_gpus() -> list[str] | None:
    """Names of the GPUs that this process may use. None: it may use all GPUs of its machine."""
    names = os.environ.get(_VISIBLE_GPUS[0])
    if names is None:
        return None
    return [name for name in names.split(",") if name.strip() not in ("", "-1", "NoDevFiles")]


def show_gpus(names: Sequence[str]) -> None:
    """Restricts this process to these GPUs, in this order. Must run before torch or a driver counts GPUs.

    ``names``: indices, UUIDs or names of MIG slices.
    """
    for variable in _VISIBLE_GPUS:
        os.environ[variable] = ",".join(names)


def wants_color(stream: TextIO) -> bool:
    """True if ``stream`` is a terminal whose user did not ask for plain text (NO_COLOR, TERM=dumb)."""
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
