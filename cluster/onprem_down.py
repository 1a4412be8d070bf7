"""Stops a cluster of Ray's local provider on every machine: ``python cluster/onprem_down.py cluster/onprem.yaml``.

``ray down`` stops the head of such a cluster and nothing else; its workers wait for it for ten minutes. This stops
them too, and removes the state that the head keeps on disk, so that the next ``ray up`` begins from nothing.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

STOP = ". ~/paceline/environment.sh; stop_ray --grace-period 10"
FORGET = "; rm -rf ~/paceline/gcs"
_SSH = ["ssh", "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"]
_TIMEOUT = ["-o", "ConnectTimeout=10"]


def commands(config: Mapping[str, Any]) -> dict[str, list[str]]:
    """The command for each machine, by address, the head's first."""
    auth, provider = config["auth"], config["provider"]
    key = ["-i", str(Path(auth["ssh_private_key"]).expanduser())] if "ssh_private_key" in auth else []

    def at(address: str, command: str) -> list[str]:
        return [*_SSH, *_TIMEOUT, *key, f"{auth['ssh_user']}@{address}", f"bash -lc {shlex.quote(command)}"]

    head = provider["head_ip"]
    return {head: at(head, STOP + FORGET)} | {address: at(address, STOP) for address in provider["worker_ips"]}


def main(path: str) -> int:
    """0: Ray runs on none of the machines any more; 1: some could not be reached, which are named."""
    config = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    if config["provider"]["type"] != "local":
        print(f"{path} is of the provider {config['provider']['type']!r}: `ray down` ends those", file=sys.stderr)
        return 2
    subprocess.run(["ray", "down", "--yes", path], check=True)  # first: the head would start its workers again
    wanted = commands(config)
    with ThreadPoolExecutor(len(wanted)) as pool:
        results = pool.map(lambda command: subprocess.run(command, check=False).returncode, wanted.values())
    failed = [address for address, status in zip(wanted, results, strict=True) if status]
    for address in failed:
        print(f"{address}: not stopped", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: onprem_down.py CLUSTER.yaml")
    sys.exit(main(sys.argv[1]))
