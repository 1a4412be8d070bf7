"""Machines to fail: network and process namespaces of this host, each with its own sshd, home and Ray.

The machines come from the testbed's ``hosts.sh``, whose folder is PACELINE_TESTBED (default: ../shared/testbed beside
the repository); it needs root, sshd, rsync and iproute2. What is shipped to them is what users ship: the wheel,
installed by ``cluster/setup.sh``. Their dependencies are this environment's own, by a link, as they have no network.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

REPOSITORY = Path(__file__).resolve().parents[2]
LAUNCHER = "l"
"""The machine that commands are given on: no part of the cluster."""


def testbed() -> Path:
    """The folder of hosts.sh. Ends the program, saying what is missing, where it cannot run."""
    folder = Path(os.environ.get("PACELINE_TESTBED", REPOSITORY.parent / "shared" / "testbed"))
    missing = [name for name in ("sshd", "rsync", "ip", "nsenter", "bc") if shutil.which(name, path=_PATH) is None]
    if not (folder / "hosts.sh").is_file():
        sys.exit(f"no testbed: {folder / 'hosts.sh'} is absent (set PACELINE_TESTBED)")
    if os.geteuid() != 0:
        sys.exit("the testbed makes network namespaces: it needs root")
    if missing:
        sys.exit(f"the testbed needs {', '.join(missing)}: apt-get install openssh-server rsync iproute2 util-linux bc")
    return folder


_PATH = "/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/bin"


def say(text: str) -> None:
    """One line with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


class Machines:
    """Namespace machines by name, from nothing to nothing. A context manager."""

    def __init__(
        self,
        addresses: Mapping[str, str],
        *,
        gateway: str = "10.77.0.1",
        bits: int = 24,
        shared: Sequence[Path] = (),
    ) -> None:
        """``addresses``: of all machines, the launcher's among them. ``shared``: more folders that they see."""
        self._hosts = testbed() / "hosts.sh"
        self.addresses = dict(addresses)
        self.folder = Path(tempfile.mkdtemp(prefix="paceline-testbed-", dir="/tmp"))
        self.root = self.folder / "machines"
        self.key = self.root / "key"
        self.dist = self.folder / "dist"
        self._site = self.folder / "site"
        self._environment = os.environ | {
            "CLU_ROOT": str(self.root),
            "CLU_PFX": f"pl{os.getpid()}",  # of the namespaces: several of these may run side by side
            "CLU_GW": gateway,
            "CLU_LEN": str(bits),
            "CLU_VENV": sys.prefix,
            "CLU_SHARE": ":".join(str(path) for path in (self.folder, REPOSITORY, *shared) if path.parts[1] == "tmp"),
        }

    def __enter__(self) -> Self:
        try:
            self.host("up", *(f"{name}={address}" for name, address in self.addresses.items()))
            self._pack()
            for name in self.addresses:
                self._furnish(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stops all machines and removes their files."""
        subprocess.run([self._hosts, "down"], env=self._environment, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    def host(self, *arguments: str) -> str:
        """A command of hosts.sh: up, kill, boot, cut, heal."""
        done = subprocess.run(
            [self._hosts, *arguments], env=self._environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"hosts.sh {' '.join(arguments)}: {done.stderr.strip()[-500:]}")
        return done.stdout

    def command(self, name: str, script: str) -> list[str]:
        """Command that runs a shell script on a machine, as if logged in."""
        return [str(self._hosts), "run", name, "bash", "-c", f". ~/.bashrc; cd {REPOSITORY}; {script}"]

    def run(self, name: str, script: str, *, timeout_s: float = 180.0, check: bool = True) -> str:
        """Runs it; returns what it printed. Raises RuntimeError with the end of it unless it succeeds."""
        done = subprocess.run(
            self.command(name, script),
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if check and done.returncode:
            raise RuntimeError(f"{name}: {script}: exit status {done.returncode}\n{done.stdout[-3000:]}")
        return done.stdout

    def start(self, name: str, script: str, output: Path) -> subprocess.Popen[bytes]:
        """Runs it in the background; its output goes to a file."""
        with output.open("wb") as file:
            return subprocess.Popen(
                self.command(name, script), env=self._environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )

    def home(self, name: str) -> Path:
        """A machine's home directory, seen from here."""
        return self.root / name / "home"

    def setenv(self, name: str, **variables: str) -> None:
        """Environment of a login shell of the machine."""
        lines = "".join(f"export {key}={value!r}\n" for key, value in variables.items())
        with (self.home(name) / ".node_env").open("a") as file:
            file.write(lines)

    def pin(self, name: str, core: int) -> None:
        """Everything on the machine runs on this core."""
        with (self.home(name) / ".node_env").open("a") as file:
            file.write(f"taskset -pc {core} $$ > /dev/null\n")

    def processes(self, name: str) -> list[str]:
        """Processes that run there, without the machine's own init and sshd."""
        lines = self.run(name, "ps -eo pid=,args=").splitlines()
        own = ("hosts.sh _init", "/usr/sbin/sshd", "sshd:", "ps -eo", "sleep 1", "bash -c . ~/.bashrc")
        return [line.strip() for line in lines if not any(mark in line for mark in own)]

    def _pack(self) -> None:
        """The wheel, and this environment's packages without any Paceline."""
        self.dist.mkdir()
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        subprocess.run([*pip, "wheel", "--no-deps", "-w", str(self.dist), str(REPOSITORY)], check=True)
        shutil.copy(REPOSITORY / "constraints.txt", self.dist)
        self._site.mkdir()
        packages = Path(sys.prefix) / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        for entry in packages.iterdir():
            if "paceline" not in entry.name and entry.name != "__pycache__":
                (self._site / entry.name).symlink_to(entry)

    def other_wheel(self) -> Path:
        """A wheel of the same version with a module that differs by a comment."""
        source, folder = self.folder / "source", self.folder / "other"
        if not folder.exists():
            shutil.copytree(REPOSITORY / "services", source / "services")
            for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
                shutil.copy(REPOSITORY / name, source)
            with (source / "services" / "paceline" / "app.py").open("a") as file:
                file.write("# another build\n")
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
            subprocess.run([*pip, "wheel", "--no-deps", "-w", str(folder), str(source)], check=True)
        (wheel,) = folder.iterdir()
        return wheel

    def _furnish(self, name: str) -> None:
        """Links an environment with the dependencies, which a machine with a network would install."""
        folder = self.home(name) / "paceline" / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        packages = next((folder / "lib").iterdir()) / "site-packages"
        (packages / "dependencies.pth").write_text(f"{self._site}\n")
        for program in ("ray", "serve", "pip"):
            lines = (Path(sys.prefix) / "bin" / program).read_text().splitlines(keepends=True)
            script = folder / "bin" / program
            script.write_text("".join([f"#!{folder}/bin/python\n", *lines[1:]]))
            script.chmod(0o755)
        cache = os.environ.get("PACELINE_CACHE", str(Path("~/.cache/paceline").expanduser()))
        self.setenv(
            name,
            PIP_NO_INDEX="1",
            PIP_NO_COMPILE="1",
            PIP_DISABLE_PIP_VERSION_CHECK="1",
            PACELINE_CACHE=cache,
            OMP_NUM_THREADS="1",
        )


def derived(path: Path, machines: Machines, changes: Mapping[str, Any]) -> dict[str, Any]:
    """A cluster file with what must differ here: paths from anywhere, the testbed's user and key, and ``changes``."""
    import yaml

    config: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    config["auth"] = {"ssh_user": "root", "ssh_private_key": str(machines.key)}
    for remote, local in config["file_mounts"].items():
        if local == "dist":
            config["file_mounts"][remote] = str(machines.dist)
        elif not local.startswith("~"):
            config["file_mounts"][remote] = str(REPOSITORY / local)
    return merged(config, changes)


def merged(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with ``changes``, key by key."""
    result = dict(config)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def wait_until(what: str, reached: Any, *, timeout_s: float, period_s: float = 0.5) -> float:
    """Seconds until ``reached()`` is true. Raises TimeoutError."""
    started = time.time()
    while not reached():
        if time.time() - started > timeout_s:
            raise TimeoutError(f"{what}: not within {timeout_s:.0f} s")
        time.sleep(period_s)
    return time.time() - started


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their longest cell; the first row is the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
