"""Machines of a real cluster fail or are replaced under streams: what do clients see, and until when?

    PACELINE_TESTBED=... python benchmarks/clusters/failures.py [FAILURE ...] [--repeats N] [--streams N]

``ray up`` of cluster/onprem.yaml on namespace machines (see testbed.py; only addresses, user and key are replaced): a
head, a router, a draft, two targets. ``serve deploy`` of cluster/serve-onprem.yaml; clients stream from a sixth
machine. Then one failure after another, each healed before the next:

- draft-power, target-power, head-power: the machine loses power, and is switched on again after OFF_S seconds (of the
  targets one after the other);
- draft-cable, target-cable, head-cable: its cable is pulled, and plugged in again after as long;
- draft-raylet, target-raylet: Ray's own process on the machine is killed, which takes the replica with it; nobody but
  the autoscaler does anything about it;
- head-gcs: the head's process of the cluster's state is killed; after as long ``ray up --restart-only``;
- draft-change, target-change: ``serve deploy`` with another option of the engine, which replaces every replica of the
  pool;
- target-upgrade: what a new image takes of a machine: it is drained (``paceline.cluster.drain``), switched off, and
  comes back after as long;
- draft-wheel, target-wheel, router-wheel: a step of the rolling upgrade of docs/operations.md: the machine is drained,
  Ray on it is stopped, ``setup.sh`` installs another wheel of this version, and the head starts Ray there again. The
  replicas that come must state that wheel.

Every stream of every client must have the tokens that plain decoding gave before. In the end
cluster/onprem_down.py must leave nothing running on any machine. Exit status 1 if a stream broke or differed, if
something did not recover, or if something was left.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.clusters.testbed import LAUNCHER, REPOSITORY, Machines, derived, merged, say, table, wait_until

from paceline.config.installed import wheel_digest

ADDRESSES = {
    LAUNCHER: "10.77.0.2",
    "head": "10.77.0.10",
    "router": "10.77.0.11",
    "draft": "10.77.0.12",
    "target": "10.77.0.13",
    "spare": "10.77.0.14",
}
POOL = {"router": "router", "draft": "draft", "target": "target", "spare": "target"}
CORE = {"target": 0, "spare": 0, "draft": 1, "router": 1, "head": None}
"""Where the machines' processes run; None: anywhere, as Ray gives a head that starts again 15 s for each part."""
FAILURES = [
    *("draft-power", "draft-cable", "target-power", "target-cable", "head-power", "head-cable"),
    *("draft-raylet", "target-raylet", "head-gcs"),
    *("draft-change", "target-change", "target-upgrade"),
    *("draft-wheel", "target-wheel", "router-wheel"),
]
WHOLE = {"router": 1, "draft": 1, "target": 2}
AUTOGROUPS = Path("/proc/sys/kernel/sched_autogroup_enabled")
PROCESSES = {"raylet": "raylet", "gcs": "gcs_server"}
"""Names of the processes that a failure kills."""
BEFORE_S, OFF_S, AFTER_S, RECOVERY_S, DOWN_S = 6.0, 12.0, 6.0, 240.0, 120.0
CHANGE_S, DRAIN_S = 300.0, 180.0
COUNT = "import ray; ray.init('auto', logging_level='ERROR'); print(sum(node['Alive'] for node in ray.nodes()))"
UP = "RAY_UP_enable_autoscaler_v2=0 RAY_AUTH_MODE=token ray up --yes --no-config-cache"


@dataclass
class Seen:
    """Records of the clients and the head so far, read from the file that they write."""

    path: Path
    messages: list[dict[str, Any]] = field(default_factory=list)
    ends: list[dict[str, Any]] = field(default_factory=list)
    pools: list[dict[str, Any]] = field(default_factory=list)
    nodes: list[dict[str, Any]] = field(default_factory=list)
    begun: bool = False
    _offset: int = 0

    def read(self) -> None:
        """Takes what is new."""
        if not self.path.exists():
            return
        with self.path.open() as file:
            file.seek(self._offset)
            while (line := file.readline()).endswith("\n"):
                self._offset = file.tell()
                event = json.loads(line)
                kinds = {"message": self.messages, "end": self.ends, "pools": self.pools, "nodes": self.nodes}
                self.begun |= event["kind"] == "begin"
                kinds.get(event["kind"], []).append(event)

    def whole(self) -> bool:
        """True if every replica reports and the head sees every node alive."""
        self.read()
        pools = {name: self.pools[-1]["counts"].get(name, 0) for name in WHOLE} if self.pools else {}
        states = self.nodes[-1]["states"] if self.nodes else {}
        lives = [address for address, state in states.items() if state == "ALIVE"]
        return pools == WHOLE and len(lives) == len(CORE)

    def ids(self, pool: str) -> set[str]:
        """Ids of the ready replicas of a pool."""
        self.read()
        return set(self.pools[-1]["ids"].get(pool, ())) if self.pools else set()

    def sessions(self) -> dict[str, int]:
        """Number of sessions of the target on each machine, by the name that clients get instead of its address."""
        self.read()
        return self.pools[-1]["sessions"] if self.pools else {}

    def lost(self, before: dict[str, int], since: float) -> int:
        """How many sessions the first machine had that has no target any more."""
        gone = (set(before) - set(event["sessions"]) for event in self.pools if event["t"] >= since)
        return sum(before[name] for name in next((names for names in gone if names), ()))

    def drafting(self, since: float) -> bool:
        """True if a draft token was proposed since then."""
        self.read()
        return any(event["drafted"] for event in self.messages if event["t"] > since)

    def longest_gap(self, begin: float, end: float) -> float:
        """The longest time without a message for any one client, in seconds, streams' starts included."""
        longest = 0.0
        for client in {event["client"] for event in self.messages}:
            times = [event["t"] for event in self.messages if event["client"] == client]
            inside = [t for t in times if begin <= t <= end]
            before = [t for t in times if t < begin][-1:] or [begin]
            gaps = [after - earlier for earlier, after in zip(before + inside, [*inside, end], strict=True)]
            longest = max(longest, *gaps)
        return longest

    def first(self, events: list[dict[str, Any]], since: float, matches: Any) -> float | None:
        """Seconds from ``since`` to the first such event."""
        return next((event["t"] - since for event in events if event["t"] >= since and matches(event)), None)


def launch(machines: Machines, config: Path, serve: Path, streams: int) -> Seen:
    """The cluster, the application, the clients: returns when all of them run."""
    machines.run(LAUNCHER, "RAY_AUTH_MODE=token ray get-auth-token --generate")
    started = time.time()
    machines.run(LAUNCHER, f"{UP} {config}", timeout_s=180)
    say(f"ray up: {time.time() - started:.0f} s")
    count = f'. ~/paceline/environment.sh; python -c "{COUNT}"'
    counted = functools.partial(machines.run, "head", count, check=False)
    wait_until("all nodes", lambda: counted().strip().endswith(str(len(CORE))), timeout_s=270)
    say(f"{len(CORE)} nodes: {time.time() - started:.0f} s after the start of ray up")
    deploy(machines, serve)
    stop, output = machines.folder / "stop", machines.folder / "traffic.jsonl"
    traffic = Path(__file__).with_name("traffic.py")
    script = f"{traffic} {ADDRESSES['router']}:9000 {ADDRESSES['head']} {output} {stop} --streams {streams}"
    script = f"taskset -pc 1 $$ > /dev/null; renice -n 10 $$ > /dev/null; PYTHONPATH=services {sys.executable} {script}"
    machines.start(LAUNCHER, script, machines.folder / "traffic.log")
    seen = Seen(output)

    def streaming() -> bool:
        seen.read()
        return seen.begun

    wait_until("streams", streaming, timeout_s=240 + 10 * streams)
    wait_until("all replicas", seen.whole, timeout_s=150)
    say(f"streaming: {time.time() - started:.0f} s after the start of ray up")
    return seen


def deploy(machines: Machines, serve: Path) -> None:
    """``serve deploy`` from outside, once without the token to see it refused."""
    address = f"http://{ADDRESSES['head']}:8265"
    command = f"serve deploy -a {address} {serve}"
    refused = machines.run(LAUNCHER, f"RAY_AUTH_MODE=disabled {command} && echo taken", check=False)
    if "taken" in refused:
        raise RuntimeError("serve deploy was taken without the token")
    machines.run(LAUNCHER, f"RAY_AUTH_MODE=token {command}")
    say(f"serve deploy: taken with the token, refused without: {refused.strip().splitlines()[-1][:120]}")


def versions_of(machines: Machines) -> dict[str, list[str]]:
    """What the replicas of each pool say that they run."""
    said = machines.run(LAUNCHER, f"paceline status --address {ADDRESSES['router']}:9000 --json")
    pools = json.loads(said[said.index("{") :])["pools"]
    return {pool: [replica["version"] for replica in replicas] for pool, replicas in pools.items()}


def wheel_of(machines: Machines) -> str:
    """The end of the version of the other wheel."""
    with zipfile.ZipFile(machines.other_wheel()) as wheel:
        (record,) = [name for name in wheel.namelist() if name.endswith(".dist-info/RECORD")]
        return "+" + wheel_digest(wheel.read(record).decode().splitlines())


def change(machines: Machines, serve: Path, pool: str) -> None:
    """Deploys the application again with room for one session less in each engine of the pool."""
    config = yaml.safe_load(serve.read_text())
    config["applications"][0]["args"][f"{pool}_config"]["engine_kwargs"]["max_sessions"] -= 1
    serve.write_text(yaml.safe_dump(config))
    machines.run(LAUNCHER, f"RAY_AUTH_MODE=token serve deploy -a http://{ADDRESSES['head']}:8265 {serve}")


def disturb(machines: Machines, seen: Seen, failure: str, name: str, config: Path, serve: Path) -> float:
    """Makes the failure happen and heals it; returns the time at which it was healed."""
    pool, what = failure.split("-")
    if what == "change":
        before = seen.ids(pool)
        change(machines, serve, pool)
        with contextlib.suppress(TimeoutError):
            took = wait_until("successors", lambda: not before & seen.ids(pool) and seen.whole(), timeout_s=CHANGE_S)
            say(f"{failure}: every replica is another after {took:.1f} s")
        return time.time()
    if what in ("upgrade", "wheel"):
        drain = ". ~/paceline/environment.sh; python -m paceline.cluster.drain --graceful-s 1830 --cold-start-s 0"
        drain += f" --timeout-s {DRAIN_S:.0f}"
        say(machines.run(name, drain, timeout_s=DRAIN_S + 30.0, check=False).strip()[-300:])
    if what == "wheel":
        install = f"rm ~/paceline/dist/*.whl; cp {machines.other_wheel()} ~/paceline/dist; bash ~/paceline/setup.sh"
        machines.run(name, f". ~/paceline/environment.sh; stop_ray; {install}")
        say(f"{failure}: {name} has another wheel, and no Ray")
        return time.time()
    if what in PROCESSES:
        machines.run(name, f"pkill -KILL -x {PROCESSES[what]}")
        # Ray's dashboard spins until its GCS is back: on a head of its own that takes no core from the others
        machines.run(name, "pgrep -f ^ray-dashboard | xargs -r renice -n 19 -p", check=False)
    else:
        machines.host("cut" if what == "cable" else "kill", name)
    say(f"{failure}: {name} is gone")
    if what == "raylet":
        return time.time()
    time.sleep(OFF_S)
    if what not in PROCESSES:
        machines.host("heal" if what == "cable" else "boot", name)
    back = time.time()
    if pool == "head" and what != "cable":
        tries = f"for i in 1 2 3; do {UP} --restart-only {config} > up.log 2>&1 && echo $i times && break; done"
        said = machines.run(LAUNCHER, f"cd {machines.folder}; {tries}", timeout_s=400)
        say(f"{failure}: ray up again, {said.strip() or 'in vain'}, {time.time() - back:.1f} s")
    return back


def fail(machines: Machines, seen: Seen, failure: str, name: str, config: Path, serve: Path) -> list[str]:
    """One failure, from a quiet time before to a whole cluster after; returns its row."""
    pool = failure.split("-")[0]
    time.sleep(BEFORE_S)
    before, began = seen.sessions(), time.time()
    back = disturb(machines, seen, failure, name, config, serve)
    say(f"{failure}: back after {back - began:.1f} s")
    recovered: float | None = None
    if failure.endswith("raylet"):
        with contextlib.suppress(TimeoutError):  # whoever watches has to notice first
            wait_until("noticed", lambda: not seen.whole(), timeout_s=30.0)
    with contextlib.suppress(TimeoutError):
        time.sleep(1.0)
        wait_until("whole", lambda: seen.whole() and seen.drafting(time.time() - 2.0), timeout_s=RECOVERY_S)
        recovered = time.time() - began
    say(f"{failure}: " + ("NOT WHOLE AGAIN" if recovered is None else f"whole again after {recovered:.1f} s"))
    if failure.endswith("wheel"):
        found = versions_of(machines)
        say(f"{failure}: versions {found}")
        if not any(version.endswith(wheel_of(machines)) for version in found[pool]):
            recovered = None
    time.sleep(AFTER_S)
    seen.read()
    end = time.time()
    address = ADDRESSES[name]
    dead = seen.first(seen.nodes, began, lambda event: event["states"].get(address) == "DEAD")
    ends = [event for event in seen.ends if event["t"] >= began]
    broken = [event for event in ends if "error" in event]
    for event in broken:
        say(f"{failure}: client {event['client']} at {event['t'] - began:.1f} s: {event['error']}")
    plain = off_for(seen, began, end)
    return [
        failure,
        f"{seen.lost(before, began)} of {sum(before.values())}" if pool == "target" else "-",
        "-" if dead is None else f"{dead:.1f}",
        f"{seen.longest_gap(began - BEFORE_S, began):.2f}",
        f"{seen.longest_gap(began, end):.2f}",
        str(len(ends)),
        str(sum(event.get("identical", False) for event in ends)),
        str(len(broken)),
        plain,
        "never" if recovered is None else f"{recovered:.1f}",
        "never" if recovered is None else f"{recovered - (back - began):.1f}",
        f"{os.getloadavg()[1]:.0f}",
    ]


def off_for(seen: Seen, begin: float, end: float) -> str:
    """The longest time without a draft token, in seconds."""
    times = [begin, *(event["t"] for event in seen.messages if begin <= event["t"] <= end and event["drafted"]), end]
    return f"{max(after - before for before, after in itertools.pairwise(times)):.1f}"


HEAD = [
    *("failure", "sessions there", "node dead s", "gap before s", "gap s", "streams ended", "identical", "broken"),
    *("without drafts s", "whole again s", "after it was back s", "host's load, 5 min"),
]
SUMMARY = ["failure", "times", *HEAD[5:8], "gap median s", "longest", "whole median s", "last"]


def summary(rows: list[list[str]]) -> list[list[str]]:
    """A row for each failure: sums over its repeats, medians and the worst of the times."""
    found = []
    for failure in dict.fromkeys(row[0] for row in rows):
        of = [dict(zip(HEAD, row, strict=True)) for row in rows if row[0] == failure]
        sums = [str(sum(int(row[column]) for row in of)) for column in ("streams ended", "identical", "broken")]
        gaps = sorted(float(row["gap s"]) for row in of)
        whole = sorted(float("inf" if row["whole again s"] == "never" else row["whole again s"]) for row in of)
        times = [f"{value:.1f}" for one in (gaps, whole) for value in (statistics.median(one), one[-1])]
        found.append([failure, str(len(of)), *sums, *times])
    return found


@contextlib.contextmanager
def priorities() -> Iterator[None]:
    """Niceness counts between the machines: with the kernel's groups of sessions each has as much of a core as another,
    and one process of the head that spins has half of that of the router."""
    before = AUTOGROUPS.read_text() if AUTOGROUPS.exists() else None
    with contextlib.ExitStack() as stack:
        if before is not None:
            AUTOGROUPS.write_text("0")
            stack.callback(AUTOGROUPS.write_text, before)
        yield


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """A signal ends it as an exception does, so that the machines are taken down."""

    def end(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def write_configs(machines: Machines, streams: int) -> tuple[Path, Path]:
    """The two files of users, with what must differ here."""
    workers = [ADDRESSES[name] for name in POOL]
    changes: dict[str, Any] = {"provider": {"head_ip": ADDRESSES["head"], "worker_ips": workers}}
    config = machines.folder / "onprem.yaml"
    config.write_text(yaml.safe_dump(derived(REPOSITORY / "cluster" / "onprem.yaml", machines, changes)))
    serve = yaml.safe_load((REPOSITORY / "cluster" / "serve-onprem.yaml").read_text())
    application = serve["applications"][0]
    # two cores for five machines: whether drafts pay is not what is asked here, nor how fast compiled models are. Each
    # target can hold all streams, so that the other is a spare
    engine = {"compile": False, "max_sessions": max(16, streams)}
    changes = {
        "target_config": {"engine_kwargs": {**engine, "adaptive": False}},
        "draft_config": {"engine_kwargs": {**engine, "max_sessions": 2 * engine["max_sessions"]}},
    }
    application["args"] = merged(application["args"], changes)
    path = machines.folder / "serve.yaml"
    path.write_text(yaml.safe_dump(serve))
    return config, path


def stop(machines: Machines, config: Path) -> dict[str, list[str]]:
    """Ends the cluster as documented; what still runs on each machine."""
    (machines.folder / "stop").touch()
    script = f"RAY_AUTH_MODE=token {sys.executable} cluster/onprem_down.py {config}"
    began = time.time()
    try:
        print(machines.run(LAUNCHER, script, check=False, timeout_s=DOWN_S))
        say(f"onprem_down.py: {time.time() - began:.0f} s")
    except subprocess.TimeoutExpired as error:
        say(f"onprem_down.py: not within {DOWN_S:.0f} s\n{(error.stdout or b'').decode()}")
        print("\n".join(machines.processes(LAUNCHER)))
    time.sleep(2.0)
    return {name: machines.processes(name) for name in CORE}


def versions() -> str:
    """Versions and machine of the run."""
    import ray

    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False).stdout.strip()
    return f"Ray {ray.__version__}, Python {platform.python_version()}, {commit}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("failures", nargs="*", default=FAILURES, metavar="FAILURE", help=", ".join(FAILURES))
    parser.add_argument("--output", type=Path, help="append the table to this file")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="copy the head's logs and what clients saw there")
    parser.add_argument("--misses", type=int, help="health checks that a node may miss, else as environment.sh says")
    parser.add_argument("--repeats", type=int, default=1, help="how often all of them happen")
    parser.add_argument("--streams", type=int, default=3, help="at once")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="no failure begins later than this")
    args = parser.parse_args()
    started = time.time()
    if unknown := set(args.failures) - set(FAILURES):
        parser.error(f"unknown failure {sorted(unknown)[0]!r}: one of {', '.join(FAILURES)}")
    rows, left = [HEAD], {}
    with ended_by_signals(), priorities(), Machines(ADDRESSES) as machines:
        for name, pool in POOL.items():
            machines.setenv(name, PACELINE_POOL=pool)
        for name, core in CORE.items():
            if core is not None:
                machines.pin(name, core)
            machines.setenv(name, RAY_worker_niceness="10")  # as if Ray's own processes had a core of their own
            if args.misses is not None:
                machines.setenv(name, RAY_health_check_failure_threshold=str(args.misses))
        config, serve = write_configs(machines, args.streams)
        try:
            seen = launch(machines, config, serve, args.streams)
            for number, failure in enumerate(args.failures * args.repeats):
                if time.time() - started > args.limit_s:
                    say(f"{failure}: no time for it")
                    continue
                candidates = [name for name in CORE if POOL.get(name, name) == failure.split("-")[0]]
                name = candidates[number // len(args.failures) % len(candidates)]
                rows.append(fail(machines, seen, failure, name, config, serve))
                print(table(rows), flush=True)
            left = stop(machines, config)
        finally:
            if args.keep is not None:
                keep(machines, args.keep, CORE)
    nothing = "left running after onprem_down.py: " + ("nothing" if not any(left.values()) else json.dumps(left))
    repeated = ["", table([SUMMARY, *summary(rows[1:])])] if args.repeats > 1 else []
    report = "\n".join([versions(), "", table(rows), *repeated, "", nothing])
    print(report)
    if args.output is not None:
        with args.output.open("a") as file:
            file.write(report + "\n\n")
    wrong = [row for row in rows[1:] if row[5] != row[6] or row[7] != "0" or "never" in row]
    return 1 if wrong or any(left.values()) else 0


def keep(machines: Machines, folder: Path, names: Iterable[str]) -> None:
    """Logs for whoever has to find out why."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("traffic.jsonl", "traffic.log", "moto.log"):
        subprocess.run(["cp", str(machines.folder / name), str(folder)], check=False, capture_output=True)
    for name in names:
        for logs in sorted((machines.root / name / "tmp" / "ray").glob("session_2*/logs")):
            subprocess.run(["cp", "-r", str(logs), str(folder / name)], check=False, capture_output=True)


if __name__ == "__main__":
    sys.exit(main())
