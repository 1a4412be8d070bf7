"""Servers of the chat checkpoint for clients, each a process as ``paceline serve --local`` starts it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.cluster.ports import free_ports

READY_S = 600


@contextlib.contextmanager
def serving(target: Path, *options: str, names: Sequence[str]) -> Iterator[str]:
    """The URL of a server of this checkpoint, by these names, while it runs; its log is next to the checkpoint.

    Raises RuntimeError if the server does not become ready.
    """
    port, grpc_port = free_ports(2)
    paceline = Path(sys.executable).with_name("paceline")
    command = [str(paceline), "serve", "--local", "--target", str(target), "--http-port", str(port), *options]
    command += ["--grpc-port", str(grpc_port)]
    command += ["--no-compile", "--dtype", "float32", "--served-model-name", *names]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    log = target.with_name(f"{target.name}.log")
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out, env=environment) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            _wait(process, url, log)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + READY_S
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(0.2)
    raise RuntimeError(f"the server is not ready: {log.read_text(errors='replace')[-2000:]}")
