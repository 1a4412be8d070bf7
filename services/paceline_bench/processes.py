"""A ``paceline serve`` of one's own, and the resources of its processes, from ``/proc``. Linux only.

paceline serve ─▶ raylet ─▶ ray::ServeReplica:paceline:Target:... ─▶ ...       everything below it is its own
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from paceline.cluster.ports import free_ports
from paceline.config import ServiceConfig
from paceline.config.environment import without_settings
from paceline.errors import EngineError

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_START_TIMEOUT_S = 600.0
"""The first start on a machine compiles the models."""
_STOP_TIMEOUT_S = 60.0
_POLL_S = 0.1
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)

ROLES = ("target", "draft", "router", "monitor", "haproxy", "ray")
"""Roles of a service's processes; ``ray`` is all of Ray and Serve that runs no code of ours."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process at one moment."""

    pid: int
    started: int
    """Clock ticks since boot; together with ``pid`` it identifies an incarnation."""
    parent: int
    command: str
    cpu_s: float
    """User and system time of all its threads."""
    rss_bytes: int
    threads: int

    @property
    def role(self) -> str:
        """Role of the process, one of ``ROLES``."""
        for name, role in (("Target:", "target"), ("Draft:", "draft"), ("Router", "router"), ("Monitor", "monitor")):
            if self.command.startswith(f"ray::ServeReplica:paceline:{name}"):
                return role
        return "haproxy" if "/haproxy " in self.command else "ray"


def read_process(pid: int) -> Process | None:
    """Reads a process; None if it has ended, zombies included."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    if fields[0] == "Z":
        return None
    # Fields of proc(5) after the command, so that field n of the manual is fields[n - 3].
    return Process(
        pid,
        started=int(fields[19]),
        parent=int(fields[1]),
        command=command,
        cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS_PER_S,
        rss_bytes=int(fields[21]) * _PAGE_BYTES,
        threads=int(fields[17]),
    )


def num_descriptors(pid: int) -> int | None:
    """Number of open file descriptors; None if the process has ended."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None


def family(root: int) -> list[Process]:
    """A process and all of its descendants."""
    found = {int(name): read_process(int(name)) for name in os.listdir("/proc") if name.isdecimal()}
    children: dict[int, list[Process]] = {}
    for process in found.values():
        if process is not None:
            children.setdefault(process.parent, []).append(process)
    first = found.get(root)
    members = [] if first is None else [first]
    for process in members:  # grows while it is walked
        members += children.get(process.pid, [])
    return members


def cpu_by_role(before: list[Process], after: list[Process]) -> dict[str, float]:
    """CPU seconds between two readings, by role. Processes that started in between count from their start; ended ones
    do not count."""
    earlier = {(p.pid, p.started): p.cpu_s for p in before}
    spent = dict.fromkeys(ROLES, 0.0)
    for process in after:
        spent[process.role] += process.cpu_s - earlier.get((process.pid, process.started), 0.0)
    return spent


def _end_with_parent() -> None:
    """Asks in the child for a SIGTERM when the parent dies, for whatever reason."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class ServiceProcess:
    """A real ``paceline serve`` on ports of its own, as a child of this process. A context manager."""

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        server: Mapping[str, Any] | None = None,
        timeout_s: float = _START_TIMEOUT_S,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """``config``: a ServiceConfig without ``server``; ``server``: that section without address and ports.
        ``say`` gets the output of the service while it starts.

        Raises:
            ConfigError: ``config`` is wrong.
        """
        grpc_port, http_port = free_ports(2)
        places = {"host": "127.0.0.1", "grpc_port": grpc_port, "http_port": http_port}
        self.config = ServiceConfig.parse({**config, "server": {**(server or {}), **places}})
        self.address = f"127.0.0.1:{grpc_port}"
        scheme = "http" if self.config.server.tls is None else "https"
        self.metrics_url = f"{scheme}://127.0.0.1:{http_port}/metrics"
        self._timeout_s, self._say = timeout_s, say
        self._folder = Path(tempfile.mkdtemp(prefix="paceline-"))
        self._log = self._folder / "serve.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Process id of ``paceline serve`` itself."""
        assert self._process is not None
        return self._process.pid

    @property
    def text(self) -> str:
        """Everything that it has printed."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def family(self) -> list[Process]:
        """The service's processes now."""
        return family(self.pid)

    def check(self) -> None:
        """Checks that it runs.

        Raises:
            EngineError: it has ended by itself.
        """
        if self._process is not None and self._process.poll() is not None:
            raise EngineError(f"paceline serve ended with status {self._process.returncode}: {self._last_lines()}")

    def stop(self) -> None:
        """Ends it by SIGTERM, and waits until its processes are gone. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            members = family(process.pid)
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _wait_gone(members)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        file = self._folder / "service.yaml"
        file.write_text(self.config.to_yaml(), encoding="utf-8")
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "paceline", "serve", "--config", str(file)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
                env=without_settings(),  # the file says everything
            )
        end, said = time.monotonic() + self._timeout_s, 0
        while True:
            lines = self.text.splitlines(keepends=True)
            for line in lines[said:]:
                if self._say is not None and line.endswith("\n"):
                    self._say(line.rstrip())
            said = sum(line.endswith("\n") for line in lines)
            if "ready\n" in lines:
                return
            self.check()
            if time.monotonic() > end:
                raise EngineError(f"paceline serve was not ready within {self._timeout_s:g} s: {self._last_lines()}")
            time.sleep(_POLL_S)

    def _last_lines(self) -> str:
        return " | ".join(self.text.splitlines()[-3:])


def _wait_gone(members: list[Process]) -> None:
    """Waits until no member runs; kills the ones that stay."""
    end = time.monotonic() + _STOP_TIMEOUT_S / 4
    while left := [p for p in members if _same(p)]:
        if time.monotonic() > end:
            for process in left:
                with contextlib.suppress(OSError):
                    os.kill(process.pid, signal.SIGKILL)
            return
        time.sleep(_POLL_S)


def _same(process: Process) -> bool:
    now = read_process(process.pid)
    return now is not None and now.started == process.started
