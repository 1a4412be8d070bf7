"""The worker groups of ``k8s/overlays/small`` under load: which of them KubeRay's autoscaler grows, and their return.

    PACELINE_TESTBED=... python benchmarks/kuberay_autoscaling.py > benchmarks/results/kuberay-autoscaling.txt

Real: the manifest as kustomize builds it, Ray's own KubeRay autoscaler (``ray kuberay-autoscaler``), token
authentication, Serve, routers, engines, streams, and the pods' security context: their user, no capability, a read-only
root. Stood in for: the API server, which keeps the RayCluster and checks each write against KubeRay's schema, and the
operator, which turns pods into machines: namespaces of their own for network, processes and files on one host
(``hosts.sh`` of the testbed). Needs root, about 6 GB and six minutes.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from paceline.config.environment import cache_dir

REPOSITORY = Path(__file__).resolve().parent.parent
TESTBED = Path(os.environ.get("PACELINE_TESTBED", REPOSITORY.parent / "shared" / "testbed")).resolve()
ROOT, NAMESPACE, NETWORK = Path("/tmp/paceline-kuberay"), "paceline", "10.83.0"
HEAD, SWITCH = f"{NETWORK}.10", f"{NETWORK}.1"
TOKEN = "a-token-for-this-run-only-0123456789"
CLUSTERS, PODS = ("ray.io", "v1", "rayclusters"), ("", "v1", "pods")
NAME = "paceline"

QUICK = {"min_replicas": 1, "max_replicas": 2, "upscale_delay_s": 4, "downscale_delay_s": 8}
POLICIES = {
    "target_config": QUICK | {"policy": {"window_s": 4}},
    "draft_config": QUICK
    | {"downscale_to_zero_delay_s": 120, "policy": {"window_s": 4, "late": 0.01, "drafts_per_target": 2}},
}
"""The policies of the service, with delays of seconds. A target of 16 sessions is enough for 12.8, so that 8 want one
and 20 want two; of drafts the first load wants two if one is busy and late, the second none, which leaves the least."""
IDLE_S = 12

STOP = ROOT / "stop"
"""Ends the load."""

PROMPT, NUM_TOKENS = "def read_file(path):", 400


# -- load: `--load` runs in a machine of its own ---------------------------------------------------------------------


async def load(address: str, sessions: int, mode: str, seconds: float) -> None:
    """Keeps ``sessions`` streams open for a while; prints what they saw as one JSON object."""
    from paceline import AsyncClient
    from paceline.types import Mode, SpeculationParams

    seen: Counter[str] = Counter()
    texts: Counter[tuple[int, ...]] = Counter()
    gaps: list[float] = []
    until = time.monotonic() + seconds
    async with AsyncClient(address) as client:

        async def session() -> None:
            while time.monotonic() < until and not STOP.exists():
                last = time.monotonic()
                try:
                    sampling = {"max_tokens": NUM_TOKENS, "seed": 7, "temperature": 1.0, "ignore_eos": True}
                    speculation = SpeculationParams(mode=Mode(mode))
                    stream = client.generate(PROMPT, speculation=speculation, timeout_s=240, **sampling)
                    tokens: list[int] = []
                    async for chunk in stream:
                        tokens += chunk.token_ids
                        gaps.append(time.monotonic() - last)
                        last = time.monotonic()
                    seen["completed"] += 1
                    texts[tuple(tokens)] += 1
                except Exception as error:
                    seen[f"{type(error).__name__}: {error}"[:160]] += 1

        await asyncio.gather(*(session() for _ in range(sessions)))
    print(json.dumps({"seen": seen, "different": len(texts), "longest_gap_s": round(max(gaps, default=0.0), 2)}))


# -- the security context of the manifest --------------------------------------------------------------------------


def confinement(service: dict[str, Any]) -> tuple[str, str]:
    """Options that make a machine like the manifest's pods, and the command that runs something there as their user."""
    template = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]
    pod, container = template["securityContext"], template["containers"][0]["securityContext"]
    assert container["readOnlyRootFilesystem"]
    assert not container["allowPrivilegeEscalation"]
    assert container["capabilities"] == {"drop": ["ALL"]}
    user, group = pod["runAsUser"], pod["runAsGroup"]
    compiled = cache_dir() / "operators"  # native passes, which each pod of this host would compile alike
    script = f"set -e; chmod 1777 /tmp /dev/shm; mkdir -p /tmp/cache/paceline; cp -r {compiled} /tmp/cache/paceline/; "
    script += f"chown -R {user}:{group} /tmp/cache; "
    base = Path(sys.base_prefix)
    if base.is_relative_to("/root"):  # where that user may not look
        script += (
            f"mkdir -p /tmp/.python; mount --bind {base} /tmp/.python; mount -t tmpfs -o mode=755 tmpfs /root; "
            f"mkdir -p {base}; mount --bind /tmp/.python {base}; "
        )
    drop = "--clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all"
    return script + "mount -o remount,bind,ro /", f"setpriv --reuid={user} --regid={group} {drop}"


# -- machines and the API server -------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    """Arguments of ``hosts.sh``."""
    shared = [str(path) for path in (REPOSITORY, TESTBED) if path.is_relative_to("/tmp")]
    own = {"ROOT": str(ROOT), "PFX": "pkb", "GW": SWITCH, "LEN": "24", "VENV": sys.prefix, "SHM": "1g"}
    return os.environ | {f"CLU_{name}": value for name, value in {**own, "SHARE": ":".join(shared)}.items()}


def hosts(*arguments: str, timeout_s: float = 90.0) -> subprocess.CompletedProcess[str]:
    """``hosts.sh`` of the testbed."""
    command = [str(TESTBED / "hosts.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment(), check=False)


def shell(machine: str, script: str, variables: dict[str, str], timeout_s: float = 90.0) -> str:
    """A script's output on a machine. Raises RuntimeError with what it said if it fails."""
    exports = "".join(f"export {name}='{value}'; " for name, value in variables.items())
    done = hosts("run", machine, "bash", "-c", exports + script, timeout_s=timeout_s)
    if done.returncode:
        raise RuntimeError(f"{machine}: {script[:200]}: {done.stdout[-800:]} {done.stderr[-800:]}")
    return done.stdout


def listen_in(namespace: str, address: tuple[str, int]) -> socket.socket:
    """A listening socket of another network namespace."""
    made: list[socket.socket] = []

    def make() -> None:
        descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0x40000000):
            raise OSError(ctypes.get_errno(), "setns")
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(64)
        made.append(listener)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return made[0]


def manifest(overlay: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The RayService of an overlay, and the environment of its pods."""
    command = ["kubectl", "kustomize", str(REPOSITORY / "k8s" / "overlays" / overlay)]
    built = subprocess.run(command, capture_output=True, check=True).stdout
    kinds = {document["kind"]: document for document in yaml.safe_load_all(built)}
    # programs of the image are in this environment here
    data = kinds["ConfigMap"]["data"].items()
    return kinds["RayService"], {name: value.replace("/opt/paceline", sys.prefix) for name, value in data}


class Cluster:
    """A RayCluster in the API server, and machines for its pods."""

    def __init__(self, service: dict[str, Any], variables: dict[str, str]) -> None:
        sys.path.insert(0, str(TESTBED / "k8s"))
        import fake_apiserver

        self.fake = fake_apiserver
        self.started = time.monotonic()
        self.confine, self.as_user = confinement(service)
        self.spec = service["spec"]["rayClusterConfig"]
        for group in self.spec["workerGroupSpecs"]:
            group["idleTimeoutSeconds"] = IDLE_S
            if group["groupName"] == "draft":
                group["replicas"] = 0  # the autoscaler makes one for the replica's label
        self.variables = {name: value.replace("/cache", "/tmp/cache") for name, value in variables.items()} | {
            "PYTHONPATH": str(REPOSITORY / "services"),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": TOKEN,
            "RAY_CLUSTER_NAME": NAME,
            "RAY_USAGE_STATS_KUBERAY_IN_USE": "1",
            "RAY_enable_autoscaler_v2": "1",
            "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "2",  # Serve's own: 10
            "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "2",
        }
        self.machines: dict[str, str] = {}
        self.addresses: dict[str, str] = {}
        self.lock = threading.Lock()
        self.stopping = threading.Event()
        self.number = 20
        self.autoscaler: subprocess.Popen[bytes] | None = None

    def say(self, text: str) -> None:
        """A line with the time."""
        print(f"[{time.monotonic() - self.started:6.1f}s] {text}", flush=True)

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        time.sleep(2)
        if self.autoscaler is not None:
            self.autoscaler.terminate()
        hosts("down")

    def _start(self) -> None:
        hosts("down")
        ROOT.mkdir(parents=True, exist_ok=True)
        made = hosts("up", f"head={HEAD}", f"client={NETWORK}.5")
        if made.returncode:
            raise RuntimeError(made.stderr)
        certificate = [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=api"),
            *("-addext", f"subjectAltName=IP:{SWITCH}", "-keyout", str(ROOT / "tls.key"), "-out", str(ROOT / "ca.crt")),
        ]
        subprocess.run(certificate, check=True, capture_output=True)
        server = self.fake.serve(0, str(TESTBED / "crds"))
        self.api = server.RequestHandlerClass.api
        server.socket.close()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(ROOT / "ca.crt", ROOT / "tls.key")
        server.socket = context.wrap_socket(
            listen_in("pkb-sw", (SWITCH, 6443)), server_side=True, do_handshake_on_connect=False
        )
        threading.Thread(target=server.serve_forever, daemon=True).start()
        metadata = {"name": NAME, "namespace": NAMESPACE}
        cluster = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": metadata, "spec": self.spec}
        code, answer = self.api.put(CLUSTERS, NAME, NAMESPACE, cluster, True)
        if code != 201:
            raise RuntimeError(f"the API server refused the RayCluster: {answer}")
        self._pod("head-0", "headgroup", HEAD, "Running")
        folder = "/run/secrets/kubernetes.io/serviceaccount"
        secrets = f"mkdir -p {folder}; printf token > {folder}/token; cp {ROOT}/ca.crt {folder}/ca.crt"
        shell("head", secrets, {})
        self._ray("head", "head-0", "headgroup", f"--head --no-monitor --port=6379 --node-ip-address={HEAD}")
        self.say("the head is up")
        variables = self.variables | {
            "KUBERNETES_SERVICE_HOST": SWITCH,
            "KUBERNETES_SERVICE_PORT_HTTPS": "6443",
            "RAY_KUBERAY_CA_CERT_PATH": str(ROOT / "ca.crt"),
            "AUTOSCALER_UPDATE_INTERVAL_S": "2",
        }
        exports = " ".join(f"{name}='{value}'" for name, value in variables.items())
        autoscaler = f"ray kuberay-autoscaler --cluster-name {NAME} --cluster-namespace {NAMESPACE}"
        command = f"export {exports}; cd /tmp; exec {self.as_user} {autoscaler}"
        self.autoscaler = subprocess.Popen(
            [str(TESTBED / "hosts.sh"), "run", "head", "bash", "-c", command],
            env=environment(),
            stdout=(ROOT / "autoscaler.out").open("wb"),
            stderr=subprocess.STDOUT,
        )
        threading.Thread(target=self._operate, daemon=True).start()

    def _ray(self, machine: str, pod: str, group: str, flags: str) -> None:
        """``ray start`` as KubeRay calls it for a pod of the group."""
        from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr as derive

        resource = {"metadata": {"name": NAME, "namespace": NAMESPACE, "labels": {}}, "spec": self.spec}
        node_type = derive(resource)["available_node_types"][group]
        resources = dict(node_type["resources"])
        labels = ",".join(f"{key}={value}" for key, value in node_type["labels"].items())
        spec = self.spec["headGroupSpec"] if group == "headgroup" else self._group(group)
        parameters = {k: v for k, v in spec["rayStartParams"].items() if k != "num-cpus"}
        flags += "".join(f" --{key}={value}" for key, value in parameters.items())
        flags += f" --num-cpus={resources['CPU']} --memory={resources['memory']} --labels={labels}"
        flags += " --metrics-export-port=8080"
        names = {"RAY_CLOUD_INSTANCE_ID": pod, "RAY_NODE_TYPE_NAME": group}
        shell(machine, self.confine, {})
        shell(machine, f"cd /tmp; {self.as_user} ray start {flags}", self.variables | names)

    def _group(self, name: str) -> dict[str, Any]:
        groups: list[dict[str, Any]] = self._stored()["workerGroupSpecs"]
        return next(group for group in groups if group["groupName"] == name)

    def _stored(self) -> dict[str, Any]:
        spec: dict[str, Any] = self.api.store[CLUSTERS, NAMESPACE, NAME]["spec"]
        return spec

    def _pod(self, name: str, group: str, address: str, phase: str) -> None:
        kind = "head" if group == "headgroup" else "worker"
        labels = {"ray.io/cluster": NAME, "ray.io/group": group, "ray.io/node-type": kind, "ray.io/is-ray-node": "yes"}
        metadata = {"name": name, "namespace": NAMESPACE, "labels": labels}
        spec = {"containers": [{"name": "ray", "image": "paceline"}]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        if (PODS, NAMESPACE, name) not in self.api.store:
            self.api.put(PODS, name, NAMESPACE, pod, True)
        running = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
        state = running if phase == "Running" else {"waiting": {"reason": "ContainerCreating"}}
        container = {
            "name": "ray",
            "ready": True,
            "restartCount": 0,
            "image": "paceline",
            "imageID": "x",
            "state": state,
        }
        status = {"phase": phase, "podIP": address, "containerStatuses": [container]}
        self.api.store[PODS, NAMESPACE, name]["status"] = status

    def _operate(self) -> None:
        """The operator: as many pods of each group as the RayCluster says, without those that it names."""
        while not self.stopping.wait(1):
            for group in self._stored()["workerGroupSpecs"]:
                name = group["groupName"]
                for pod in (group.get("scaleStrategy") or {}).get("workersToDelete") or []:
                    if pod in self.machines:
                        self.say(f"operator: {pod} is deleted")
                        self.remove(pod)
                for _ in range(group["replicas"] - sum(g == name for g in self.machines.values())):
                    self.number += 1
                    pod, address = f"{name}-{self.number}", f"{NETWORK}.{self.number}"
                    self.machines[pod], self.addresses[pod] = name, address
                    self.say(f"operator: {pod} is created")
                    self._pod(pod, name, address, "Pending")
                    threading.Thread(target=self._boot, args=(pod, name, address), daemon=True).start()

    def _boot(self, pod: str, group: str, address: str) -> None:
        with self.lock:
            hosts("up", f"{pod}={address}")
        try:
            self._ray(pod, pod, group, f"--address={HEAD}:6379")
        except RuntimeError as error:
            self.say(f"{pod} did not start: {error}")
            return
        self._pod(pod, group, address, "Running")

    def remove(self, pod: str) -> None:
        """The machine of a pod is gone, and the pod with it."""
        with self.lock:
            hosts("rm", pod)
        self.machines.pop(pod, None)
        self.api.store.pop((PODS, NAMESPACE, pod), None)

    # -- what the run asks for, and sees ------------------------------------------------------------------------------

    def deploy(self, config: dict[str, Any]) -> None:
        """Gives the Serve config to the dashboard, as the operator does."""
        path = ROOT / "serve.json"
        path.write_text(json.dumps(config))
        url = f"http://{HEAD}:8265/api/serve/applications/"
        request = f"curl -sS --fail-with-body -m 60 -X PUT -H 'Content-Type: application/json' -d @{path}"
        for attempt in range(30):
            try:
                shell("head", f"{request} -H 'Authorization: Bearer {TOKEN}' {url}", {"NO_PROXY": "*"})
                return
            except RuntimeError as error:
                if attempt == 29:
                    raise
                last = str(error)[-160:]
                time.sleep(1)
                if attempt % 10 == 9:
                    self.say(f"not deployed yet: {last}")

    def replicas(self) -> tuple[str, dict[str, int]]:
        """State of the application, and running replicas of each pool; empty while nobody answers."""
        url = f"http://{HEAD}:8265/api/serve/applications/"
        try:
            text = shell("head", f"curl -s -m 8 -H 'Authorization: Bearer {TOKEN}' {url}", {}, timeout_s=20)
            application = json.loads(text)["applications"]["paceline"]
        except (RuntimeError, ValueError, KeyError, subprocess.TimeoutExpired):
            return "", {}
        pools = {}
        for name, deployment in application["deployments"].items():
            running = [replica for replica in deployment["replicas"] if replica["state"] == "RUNNING"]
            pools[name.split(":")[0].lower()] = len(running)
        return application["status"], pools

    def groups(self) -> dict[str, int]:
        """Replicas that the RayCluster asks for."""
        return {group["groupName"]: group["replicas"] for group in self._stored()["workerGroupSpecs"]}

    def wait(
        self, what: str, done: Callable[[str, dict[str, int], dict[str, int]], bool], timeout_s: float
    ) -> dict[str, int]:
        """Waits for ``done(state, replicas, groups)`` and prints each change; returns the most of each group."""
        until, last, most = time.monotonic() + timeout_s, "", dict.fromkeys(self.groups(), 0)
        while time.monotonic() < until:
            state, pools = self.replicas()
            groups = self.groups()
            most = {name: max(most[name], count) for name, count in groups.items()}
            pods = dict(Counter(self.machines.values()))
            shown = f"{state or 'no answer'}; replicas {pools}; RayCluster {groups}; pods {pods}"
            if shown != last:
                self.say(shown)
                last = shown
            if pools and done(state, pools, groups):
                return most
            time.sleep(1.5)
        raise TimeoutError(f"{what}: not within {timeout_s:.0f} s")

    def pods(self, group: str) -> list[str]:
        """Names of the pods of a group."""
        return sorted(pod for pod, name in self.machines.items() if name == group)

    def address(self, group: str) -> str:
        """Address of the first pod of a group."""
        return self.addresses[self.pods(group)[0]]


@contextmanager
def streams(cluster: Cluster, sessions: int, mode: str, seconds: float) -> Iterator[list[dict[str, Any]]]:
    """Load beside the block; what it saw is in the list afterwards."""
    address = f"{cluster.address('router')}:9000"
    command = f"{sys.prefix}/bin/python {Path(__file__).resolve()} --load {address} {sessions} {mode} {seconds}"
    results: list[dict[str, Any]] = []
    variables = {"PYTHONPATH": str(REPOSITORY / "services"), "OMP_NUM_THREADS": "1"}

    def run() -> None:
        try:
            results.append(json.loads(shell("client", command, variables, timeout_s=seconds + 260).splitlines()[-1]))
        except Exception as error:
            results.append({"failed": str(error)})

    STOP.unlink(missing_ok=True)
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield results
    finally:
        thread.join()
        cluster.say(f"streams: {results}")


def phase(cluster: Cluster, title: str, grows: str, sessions: int, mode: str, seconds: float) -> bool:
    """A load that one pool has to grow for; whether that one grew, alone, and returned."""
    cluster.say(f"== {title}: {sessions} sessions, {mode}")
    before, started = cluster.groups(), time.monotonic()
    with streams(cluster, sessions, mode, seconds) as results:
        try:
            most = cluster.wait(title, lambda state, pools, groups: pools.get(grows, 0) == 2, seconds)
        except TimeoutError as error:
            diagnose(cluster)
            cluster.say(f"NOT as wanted: {error}")
            STOP.touch()
            return False
        cluster.say(f"two {grows}s run, {time.monotonic() - started:.0f} s after the load began; it ends")
        STOP.touch()
    during = cluster.groups()
    back = cluster.wait("back again", lambda state, pools, groups: groups == before and pools.get(grows) == 1, 150)
    most = {name: max(most[name], during[name], back[name]) for name in most}
    alone = all((count > before[name]) is (name == grows) for name, count in most.items())
    only = f"{'only' if alone else 'NOT only'} {grows} grew and returned"
    cluster.say(f"at most {most}, now {cluster.groups()}: {only}")
    return alone and sound(results)


def sound(results: list[dict[str, Any]]) -> bool:
    """Whether all streams ended with the same tokens."""
    return set(results[0].get("seen", {"failed": 1})) == {"completed"} and results[0]["different"] == 1


def diagnose(cluster: Cluster) -> None:
    """Reports of Serve's controller and the routers."""
    logs = "/tmp/ray/session_latest/logs/serve"
    grep = f"grep -hiE 'autoscal|scal|ongoing' {logs}/controller*.log | tail -n 12; ls {logs}"
    cluster.say("the controller: " + hosts("run", "head", "bash", "-c", grep).stdout[-3000:])
    router = cluster.pods("router")[0]
    page = "curl -s -m 5 localhost:8000/metrics | grep -E '^(vllm:num_req|paceline_replica_sess|paceline_rounds)'"
    tail = f"for f in {logs}/replica*Router*.log; do tail -n 15 $f; done; {page}"
    cluster.say("the router: " + hosts("run", router, "bash", "-c", tail).stdout[-4000:])


def drained(cluster: Cluster) -> bool:
    """A draft's pod is evicted below running streams; whether they went on and a successor came."""
    pod = cluster.pods("draft")[0]
    cluster.say(f"== {pod} is evicted: its preStop hook runs while 6 sessions stream")
    (container,) = cluster.spec["workerGroupSpecs"][1]["template"]["spec"]["containers"]
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    with streams(cluster, 6, "overlapped", 60) as results:
        time.sleep(8)
        started = time.monotonic()
        cluster.machines[pod] = "terminating"  # it counts no longer: the operator makes its successor at once
        variables = [f"{k}={v}" for k, v in (cluster.variables | {"RAY_ADDRESS": f"{HEAD}:6379"}).items()]
        said = hosts("run", pod, "env", *variables, *cluster.as_user.split(), *command, timeout_s=150)
        took = f"after {time.monotonic() - started:.1f} s"
        cluster.say(f"preStop: status {said.returncode} {took}: {said.stderr.strip()[-300:]}")
        cluster.remove(pod)
        cluster.wait("a successor", lambda state, pools, groups: pools.get("draft") == 1 and state == "RUNNING", 90)
    return said.returncode == 0 and sound(results)


def deployed(service: dict[str, Any]) -> dict[str, Any]:
    """The Serve configuration of a RayService, with what must differ here."""
    config: dict[str, Any] = yaml.safe_load(service["spec"]["serveConfigV2"])
    args = config["applications"][0]["args"]
    for pool, settings in POLICIES.items():
        args[pool]["deployment_config"]["autoscaling_config"] = settings
        args[pool]["engine_kwargs"]["compile"] = False  # as in the image, which has no compiler
    # else targets that share their cores with drafts would soon do without them, and ask for none
    args["target_config"]["engine_kwargs"]["adaptive"] = False
    return config


def main() -> int:
    """Runs the benchmark. Exit status: 0 if each load grew its own pool alone, and both returned."""
    if not TESTBED.is_dir():
        print(f"{TESTBED} is not there: set PACELINE_TESTBED to the testbed's folder", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    service, variables = manifest("small")
    print(f"k8s/overlays/small, groups idle after {IDLE_S} s; {POLICIES}; eager, adaptive off")
    config = deployed(service)
    with Cluster(service, variables) as cluster:
        cluster.deploy(config)
        cluster.wait("the application", lambda state, pools, groups: state == "RUNNING", 400)
        cluster.say("the application runs, one replica of each")
        good = [
            phase(cluster, "load that needs drafts", "draft", 8, "overlapped", 170),
            phase(cluster, "load that needs targets", "target", 20, "plain", 170),
            drained(cluster),
        ]
        log = "grep -E 'Resized|Adding|Removing|Terminat|drain' /tmp/ray/session_latest/logs/monitor.log | tail -20"
        print("the autoscaler's own log:\n" + hosts("run", "head", "bash", "-c", log).stdout)
    print("all as wanted" if all(good) else f"NOT as wanted: {good}")
    return 0 if all(good) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--load"]:
        address, sessions, mode, seconds = sys.argv[2:]
        asyncio.run(load(address, int(sessions), mode, float(seconds)))
    else:
        sys.exit(main())
