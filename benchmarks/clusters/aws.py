"""cluster/aws.yaml for real, as far as that goes without a cloud: Ray's launcher and autoscaler, EC2 by a stand-in.

    PACELINE_TESTBED=... PACELINE_MOTO=.../bin/moto_server python benchmarks/clusters/aws.py [--output FILE]

moto (``pip install 'moto[server]'``, an environment of its own will do) plays EC2 and IAM on a machine of the testbed,
and namespace machines wait at the private addresses that it gives to instances. `ray up` then makes the head, and
Ray's autoscaler the rest, each of the type that its pool has in the file:

1. `serve deploy`: routers and a target, and no draft, as nobody asks for one yet;
2. more sessions than a draft is to have: two draft nodes, and no other;
3. the sessions end: back to the nodes of the beginning;
4. `ray down`: every instance is terminated.

What differs from the file: addresses, key, image, user and shell paths; 8 and 4 cores for the 192 and 8 of the types;
shorter times to scale and to be idle; no models to fetch. From cluster/serve-gpu.yaml: the embedded pair on the CPU in
place of the models, with the resources of theirs: eight GPUs on one node for a target, one for a draft. The GPUs exist
in Ray's books alone. Exit status 1 if a pool did not do what it should.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import time
from collections import Counter
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.clusters.failures import ended_by_signals, keep, versions
from benchmarks.clusters.testbed import LAUNCHER, REPOSITORY, Machines, derived, merged, say, table, wait_until

HEAD = "172.31.0.4"  # moto counts from here in its first subnet
CLOUD = "172.31.255.2"
NODES = 6
ADDRESSES = {LAUNCHER: CLOUD} | {f"n{number}": f"172.31.0.{number}" for number in range(4, 4 + NODES)}
CLOUD_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-west-2",
    "AWS_ENDPOINT_URL": f"http://{CLOUD}:5055",
    "AWS_EC2_METADATA_DISABLED": "true",
    "RAY_enable_worker_prestart": "0",  # a worker for each core that Ray believes in
    "RAY_prestart_worker_first_driver": "0",
    "RAY_AUTH_MODE": "token",
}
IMAGE = "ami-12c6146b"  # one that moto knows
FEWER_CORES = {"head": 0, "router": 4, "draft": 8, "target": 8}
SESSIONS = 6


def moto() -> str:
    """moto's server. Ends the program where there is none."""
    program = os.environ.get("PACELINE_MOTO") or shutil.which("moto_server")
    if program is None or not Path(program).is_file():
        sys.exit(
            "no moto_server: pip install 'moto[server]' boto3 somewhere, and set PACELINE_MOTO to its bin/moto_server"
        )
    return program


def write_configs(machines: Machines) -> Path:
    """The two files of users, with what must differ here."""
    source = REPOSITORY / "cluster" / "aws.yaml"
    config = derived(source, machines, {"provider": {"use_internal_ips": True}})
    for name, node in config["available_node_types"].items():
        node["node_config"] |= {"ImageId": IMAGE, "KeyName": "paceline"}
        node["resources"]["CPU"] = FEWER_CORES[name]
        node.pop("worker_setup_commands", None)
        if "idle_timeout_s" in node:
            node["idle_timeout_s"] = 15
    config["available_node_types"]["router"]["min_workers"] = 1
    config["head_setup_commands"] = []  # boto3 is there
    config["file_mounts"]["~/paceline/serve.yaml"] = str(machines.folder / "serve.yaml")
    path = machines.folder / "aws.yaml"
    path.write_text(yaml.safe_dump(config))

    serve = yaml.safe_load((REPOSITORY / "cluster" / "serve-gpu.yaml").read_text())
    application = serve["applications"][0]
    cpu = {"device": "cpu", "compile": False, "max_sessions": 8}
    quick = {"upscale_delay_s": 1.0, "downscale_delay_s": 10.0}
    serves_own = {"metrics_interval_s": 1.0, "look_back_period_s": 4.0, "target_ongoing_requests": 3}
    changes = {
        "target_config": {
            "model_loading_config": {"model_id": "paceline/embedded-target"},
            "engine_kwargs": cpu | {"tensor_parallel_size": 1, "kv_fraction": None, "adaptive": False},
            "deployment_config": {
                "autoscaling_config": quick | {"policy": {"window_s": 4}},
                "ray_actor_options": {"num_gpus": 8},
                "graceful_shutdown_timeout_s": 10.0,
            },
        },
        "draft_config": {
            "model_loading_config": {"model_id": "paceline/embedded-draft"},
            "engine_kwargs": cpu,
            "deployment_config": {
                "autoscaling_config": quick | serves_own | {"max_replicas": 2},
                "graceful_shutdown_timeout_s": 10.0,
            },
        },
        "router_config": {"deployment_config": {"num_replicas": 1}},
    }
    application["args"] = merged(application["args"], changes)
    (machines.folder / "serve.yaml").write_text(yaml.safe_dump(serve))
    return path


def instances(machines: Machines) -> list[dict[str, str]]:
    """Instances that run or have run, as the cloud reports them: type, state, pool, address."""
    script = Path(__file__).with_name("instances.py")
    rows: list[dict[str, str]] = json.loads(machines.run(LAUNCHER, f"python {script}").splitlines()[-1])
    return rows


def running(machines: Machines) -> Counter[str]:
    """Running instances of each pool."""
    with contextlib.suppress(RuntimeError, ValueError, IndexError):
        return Counter(row["pool"] for row in instances(machines) if row["state"] == "running")
    return Counter()


class Log:
    """The rows of the report: what happened, when, and which instances there were then."""

    def __init__(self) -> None:
        self.started = time.time()
        self.rows = [["s", "event", "head", "router", "draft", "target"]]

    def note(self, what: str, pools: Counter[str]) -> None:
        counts = [str(pools[pool]) for pool in ("head", "router", "draft", "target")]
        self.rows.append([f"{time.time() - self.started:.0f}", what, *counts])
        say(f"{what}: {dict(pools)}")


def reach(machines: Machines, log: Log, what: str, pools: dict[str, int], *, timeout_s: float) -> None:
    """Waits until the cloud runs just these instances."""
    wanted = Counter(pools)
    try:
        wait_until(what, lambda: running(machines) == wanted, timeout_s=timeout_s, period_s=1.0)
    finally:
        log.note(what, running(machines))


def run(machines: Machines, log: Log) -> list[str]:
    """The whole road; returns the lines of the report beside the rows."""
    config = write_configs(machines)
    server = f"MOTO_IAM_LOAD_MANAGED_POLICIES=true exec {moto()} -H {CLOUD} -p 5055"
    machines.start(LAUNCHER, server, machines.folder / "moto.log")
    ready = f"curl -s -o /dev/null http://{CLOUD}:5055/moto-api/ && echo up"
    wait_until("moto", lambda: "up" in machines.run(LAUNCHER, ready, check=False), timeout_s=60)
    machines.run(LAUNCHER, "ray get-auth-token --generate")
    key = f"PublicKeyMaterial=open('{machines.key}.pub', 'rb').read()"
    machines.run(
        LAUNCHER, f"python -c \"import boto3; boto3.client('ec2').import_key_pair(KeyName='paceline', {key})\""
    )
    log.note("before ray up", running(machines))
    machines.run(LAUNCHER, f"ray up --yes --no-config-cache {config}", timeout_s=200)
    log.note("ray up has returned", running(machines))
    alone = {"head": 1, "router": 1, "target": 1}
    reach(machines, log, "the least of each pool", alone, timeout_s=150)
    machines.run(
        LAUNCHER, f"ray exec {config} '. ~/paceline/environment.sh; serve deploy ~/paceline/serve.yaml'", timeout_s=120
    )
    log.note("serve deploy", running(machines))
    router = next(
        row["address"] for row in instances(machines) if row["pool"] == "router" and row["state"] == "running"
    )
    output, stop = machines.folder / "traffic.jsonl", machines.folder / "stop"
    script = f"{Path(__file__).with_name('traffic.py')} {router}:9000 {HEAD} {output} {stop}"
    load = f"PYTHONPATH=services {sys.executable} {script} --streams {SESSIONS}"
    clients = machines.start(LAUNCHER, load, machines.folder / "traffic.log")
    wait_until("streams", lambda: output.exists() and '"begin"' in output.read_text(), timeout_s=200)
    log.note(f"{SESSIONS} sessions that never pause", running(machines))
    reach(machines, log, "two drafts", alone | {"draft": 2}, timeout_s=180)
    wait_until("two draft replicas", lambda: '"draft": 2' in output.read_text(), timeout_s=120)
    log.note("both drafts serve", running(machines))
    stop.touch()
    clients.wait(timeout=60)
    log.note("the sessions end", running(machines))
    reach(machines, log, "back to one draft or none", back(machines, alone), timeout_s=150)
    lines = [f"{row['address']:<13} {row['type']:<13} {row['pool']:<7} {row['state']}" for row in instances(machines)]
    events = [json.loads(line) for line in output.read_text().splitlines()]
    ends = [event for event in events if event["kind"] == "end"]
    same = sum(event.get("identical", False) for event in ends)
    machines.run(LAUNCHER, f"ray down --yes {config}", timeout_s=120)
    reach(machines, log, "ray down", {}, timeout_s=30)
    if same != len(ends):
        raise RuntimeError(f"{same} of {len(ends)} streams had the tokens of plain decoding")
    return ["instances before ray down:", *lines, "", f"streams: {len(ends)} ended, {same} identical to plain decoding"]


def back(machines: Machines, alone: dict[str, int]) -> dict[str, int]:
    """Waits until the second draft has gone; min_replicas of the drafts is 0, so the first may go as well."""
    wait_until("a draft goes", lambda: running(machines)["draft"] < 2, timeout_s=150, period_s=1.0)
    return alone | ({"draft": 1} if running(machines)["draft"] else {})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, help="append the report to this file")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="copy logs and what clients saw to it")
    args = parser.parse_args()
    server = Path(moto()).absolute()
    log, lines, failure = Log(), [], None
    with (
        ended_by_signals(),
        Machines(ADDRESSES, gateway="172.31.255.1", bits=16, shared=[server.parents[1]]) as machines,
    ):
        for name in ADDRESSES:
            machines.setenv(name, **CLOUD_ENVIRONMENT)
        try:
            lines = run(machines, log)
        except (RuntimeError, TimeoutError) as error:
            failure = str(error)
        finally:
            if args.keep is not None:
                keep(machines, args.keep, [name for name in ADDRESSES if name != LAUNCHER])
    report = "\n".join([versions(), "", table(log.rows), "", *lines, *([failure] if failure else [])])
    print(report)
    if args.output is not None and failure is None:
        with args.output.open("a") as file:
            file.write(report + "\n\n")
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())
