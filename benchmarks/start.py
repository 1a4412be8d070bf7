"""Seconds from a command to its first token, with nothing compiled on the machine and with everything.

    python benchmarks/start.py [--runs 3] [--target PATH --draft PATH]

Each of ``paceline generate`` and ``paceline serve --local`` is started in turn

    waits   with an empty cache and --compile: models are compiled before the first token
    cold    with an empty cache: they serve eagerly meanwhile
    warm    with the cache that *waits* has left

and killed after its first token. A cache is empty of compiled models and of compiled operators; files of Python, torch
and the checkpoints are in the page cache from the second run on. CPU seconds are those of all its processes, compilers
included: where other work shares the machine, they say more than those of the clock. Medians of the runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from paceline.cluster.ports import free_ports

PROMPT = "def read_file(path):"
WAYS = ("waits", "cold", "warm")
_LIMIT_S = 1800.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--target")
    parser.add_argument("--draft")
    args = parser.parse_args()
    models = [f"--{role}={path}" for role in ("target", "draft") if (path := getattr(args, role))]
    print(f"{'command':22}{'cache':8}{'first token s':>14}{'CPU s':>8}")
    for name, first_token in (("generate", generate), ("serve --local", serve)):
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for _ in range(args.runs):
            with tempfile.TemporaryDirectory() as full, tempfile.TemporaryDirectory() as empty:
                for way in WAYS:
                    flags = [*models, *(["--compile"] if way == "waits" else [])]
                    found[way].append(first_token(flags, Path(empty if way == "cold" else full)))
        for way, times in found.items():
            wall_s, cpu_s = (statistics.median(column) for column in zip(*times, strict=True))
            print(f"{name:22}{way:8}{wall_s:14.1f}{cpu_s:8.1f}", flush=True)


def generate(flags: list[str], cache: Path) -> tuple[float, float]:
    """Seconds until the first byte of text, and CPU seconds until then."""
    with _command(["generate", PROMPT, "--max-tokens", "400", "--ignore-eos", *flags], cache) as (process, started):
        assert process.stdout is not None
        if not process.stdout.read(1):
            raise SystemExit("the command ended without a token")
        return time.perf_counter() - started, _cpu_s(cache)


def serve(flags: list[str], cache: Path) -> tuple[float, float]:
    """Seconds until the first token of a request that is sent once the command is ready, and CPU seconds until then."""
    (port,) = free_ports(1)
    with _command(["serve", "--local", "--http-port", str(port), *flags], cache) as (process, started):
        assert process.stdout is not None
        while process.stdout.readline().strip() != b"ready":
            if process.poll() is not None:
                raise SystemExit("the command ended without getting ready")
        body = json.dumps({"prompt": PROMPT, "max_tokens": 1}).encode()
        url = f"http://127.0.0.1:{port}/v1/completions"
        while True:
            request = urllib.request.Request(url, body, {"content-type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=_LIMIT_S) as reply:
                    assert json.load(reply)["usage"]["completion_tokens"] == 1
                return time.perf_counter() - started, _cpu_s(cache)
            except OSError:
                time.sleep(0.01)


@contextlib.contextmanager
def _command(arguments: list[str], cache: Path) -> Iterator[tuple[subprocess.Popen[bytes], float]]:
    """A command of Paceline with a cache of its own, and when it was started; ended with all its processes."""
    environment = {**os.environ, "PACELINE_CACHE": str(cache), "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor")}
    started = time.perf_counter()
    pipes: dict[str, int] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    command = [sys.executable, "-m", "paceline", *arguments]
    process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
    try:
        yield process, started
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        process.communicate()
        deadline = time.monotonic() + 60
        while _processes(cache) and time.monotonic() < deadline:
            time.sleep(0.05)


def _processes(cache: Path) -> list[Path]:
    """The processes of a command, by their cache."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"PACELINE_CACHE={cache}\0".encode() in (folder / "environ").read_bytes():
                found.append(folder)
    return found


def _cpu_s(cache: Path) -> float:
    """CPU seconds of a command's processes and of those that they have waited for."""
    ticks = 0
    for folder in _processes(cache):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))  # user and system time, its own and its children's
    return ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
