"""``paceline serve`` from its flags to its processes: what it refuses, how it starts, and that nothing stays."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from tests.cluster.ray.conftest import START_S
from tests.cluster.ray.secured import HOST, Secured
from tests.support.listening import listening_sockets
from tests.support.rings import nightly

from paceline.cli import serve
from paceline.cli.main import build_parser
from paceline.client import Client
from paceline.cluster.launch import reserved_cpus
from paceline.cluster.ports import free_ports
from paceline.cluster.watch import reason_of
from paceline.errors import ConfigError, EngineError
from paceline.types import Mode, SpeculationParams
from paceline_bench import processes

REPOSITORY = Path(__file__).parents[3]


def parsed(*argv):
    return build_parser("serve").parse_args(["serve", *argv])


def test_flags_win_over_the_file(tmp_path):
    file = tmp_path / "service.yaml"
    file.write_text("server: {grpc_port: 9100, http_port: 9101}\nrouter_config: {max_queued_requests: 3}\n")
    (tmp_path / "big").mkdir()
    (tmp_path / "small").mkdir()
    args = ["--config", str(file), "--set", "router_config.max_queued_requests=5", "--grpc-port", "9200"]
    models = ["--target", str(tmp_path / "big"), "--draft", str(tmp_path / "small"), "--dtype", "float32"]
    config = serve.read_config(parsed(*args, *models, "--no-compile", "--targets", "2", "--drafts", "3"))
    assert (config.server.grpc_port, config.server.http_port) == (9200, 9101)
    assert config.router_config.max_queued_requests == 5
    target, draft = config.target_config, config.draft_config
    assert (target.model_loading_config.model_id, target.deployment_config.num_replicas) == ("big", 2)
    assert target.model_loading_config.source == str(tmp_path / "big")
    assert (draft.model_loading_config.model_id, draft.deployment_config.num_replicas) == ("small", 3)
    assert target.engine_kwargs.dtype == draft.engine_kwargs.dtype == "float32"
    assert target.engine_kwargs.compile is draft.engine_kwargs.compile is False
    assert reserved_cpus(config) == 5  # 2 x 0.9 + 3 x 0.9 + 0.2


def test_the_embedded_pair_keeps_its_draft_when_a_flag_changes_it():
    config = serve.read_config(parsed("--no-compile", "--drafts", "2"))
    assert config.draft_config.model_loading_config.model_id == "paceline/embedded-draft"
    assert config.draft_config.engine_kwargs.compile is False
    assert serve.read_config(parsed("--drafter", "ngram", "--dtype", "float32")).draft_config.kind == "ngram"
    cascade = serve.read_config(parsed("--drafter", "vertical=a/b:1,suffix", "--dtype", "float32")).draft_config
    assert (cascade.kind, cascade.engine_kwargs.lengths) == ("cascade", [1])
    assert cascade.engine_kwargs.drafters[0].options == {"dtype": "float32"}
    assert serve.read_config(parsed("--drafter", "none")).draft_config is None
    assert serve.read_config(parsed("--drafts", "0")).draft_config is None


def test_a_flag_that_names_a_draft_keeps_what_else_is_set_of_it(tmp_path):
    file = tmp_path / "service.yaml"
    file.write_text("draft_config: {model_loading_config: {model_id: a/b}, engine_kwargs: {fan_out: 3}}\n")
    settings = ["--set", "draft_config.engine_kwargs.max_sessions=2"]
    draft = serve.read_config(parsed("--config", str(file), *settings, "--draft", "c/d")).draft_config
    assert draft.model_loading_config.model_id == "c/d"
    assert (draft.engine_kwargs.fan_out, draft.engine_kwargs.max_sessions) == (3, 2)
    ngram = ["--drafter", "ngram", "--set", "draft_config.engine_kwargs.max_match=7"]
    assert serve.read_config(parsed(*ngram)).draft_config.engine_kwargs.max_match == 7
    file.write_text("draft_config: {kind: ngram}\n")
    assert serve.read_config(parsed("--config", str(file), "--draft", "c/d")).draft_config.kind == "model"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--draft", "x", "--drafter", "ngram"], "--draft x is given with --drafter ngram"),
        (["--target", ""], "--target is empty"),
        (["--target", "models/some"], "model path 'models/some' does not exist"),
        (["--targets", "-1"], "num_replicas is -1"),
        (["--set", "router_config.nonsense=1"], "no such key"),
        (["--config", "/nowhere.yaml"], "cannot be read"),
    ],
)
def test_mistakes_are_named(argv, message):
    with pytest.raises(ConfigError, match=message):
        serve.read_config(parsed(*argv))


def test_the_reason_of_a_failed_start_is_found_in_what_serve_says():
    trace = "The deployment failed to start 3 times in a row ...\nTraceback:\n  File x\n"
    error = reason_of(trace + "paceline.errors.ConfigError: no weights there\n")
    assert type(error) is ConfigError
    assert str(error) == "no weights there"
    error = reason_of(trace + "RuntimeError: out of luck\n")
    assert type(error) is EngineError
    assert str(error) == "RuntimeError: out of luck"


class Running:
    """A ``paceline serve`` in a session of its own."""

    def __init__(self, pair: Path, folder: Path, *more: str) -> None:
        self.grpc_port, self.http_port = free_ports(2)
        self.log = folder / "serve.log"
        self._out = self.log.open("w")
        models = ["--target", str(pair / "target"), "--draft", str(pair / "draft"), "--dtype", "float32"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        ports = ["--host", HOST, "--grpc-port", str(self.grpc_port), "--http-port", str(self.http_port)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "paceline", "serve", *models, "--no-compile", *ports, *more],
            stdout=self._out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment | {"RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"},
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._out.close()

    def text(self) -> str:
        return self.log.read_text()

    def wait_for(self, line: str, timeout_s: float = START_S) -> None:
        end = time.monotonic() + timeout_s
        while line not in self.text():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < end, f"no {line!r} within {timeout_s} s: {self.text()}"
            time.sleep(0.1)


def descendants(pid: int) -> set[int]:
    """A process and those below it."""
    return {found.pid for found in processes.family(pid)}


def command_line(pid):
    return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")


def listening(pids):
    """What the processes listen on: (kind of the process as the documents name it, address, port)."""
    return {(kind_of(pid), address, port) for pid, address, port in listening_sockets(pids)}


def kind_of(pid):
    """``raylet``, ``ray::ServeReplica``, ``haproxy``, ...: how the table in the documents names a process."""
    line = command_line(pid)
    if actor := re.match(r"ray::\w+", line[0]):
        return actor[0]
    return Path(next((part for part in line if part.endswith(".py")), line[0])).name


def table_of_ports():
    """The table of ``docs/operations.md``: kind of process -> where ``paceline serve`` lets it listen."""
    text = (
        (REPOSITORY / "docs" / "operations.md").read_text().partition("## What listens where")[2].partition("\n## ")[0]
    )
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    table = {}
    for kinds, _, where, *_ in rows[2:]:
        for kind in re.findall(r"`([^`]+)`", kinds):
            table.setdefault(kind, set()).add(where.strip("`"))
    return table


RAYS_METRICS = {"dashboard.py", "monitor.py"}
"""Processes of Ray that do without their ports for metrics where somebody else has taken them first."""


def require_table(running):
    """Every socket is where the table says, and everything that the table lists is there. Returns all processes."""
    places = {"127.0.0.1": "127.0.0.1", HOST: "--host"}
    end, table = time.monotonic() + 60, table_of_ports()
    while True:
        found, pids = {}, descendants(running.process.pid)
        for kind, address, port in listening(pids):
            public = port in (running.grpc_port, running.http_port) and kind == "haproxy"
            assert public == (address == HOST), (kind, address, port)
            found.setdefault(kind, set()).add(places.get(address, address))
        required = {kind: table[kind] for kind in table if kind not in RAYS_METRICS or kind in found}
        if found.keys() >= required.keys() or time.monotonic() > end:  # some of Ray's come after the service
            assert found == required
            return pids
        time.sleep(0.5)


def require_streams_without_a_controller(running, pids, secured):
    """While Serve's controller is paused for longer than any patience, streams go on, and the silence is told."""
    (controller,) = (pid for pid in pids if kind_of(pid) == "ray::ServeController")
    os.kill(controller, signal.SIGSTOP)
    try:
        running.wait_for("Serve's controller has not answered for 1", 60)
        with secured.client(running.grpc_port, "alice") as client:
            assert client.generate("hello", max_tokens=20, ignore_eos=True).result.usage.completion_tokens == 20
            end = time.monotonic() + 60
            while client.server_info().serve_silent_s <= 10:  # the monitor counts for itself
                assert time.monotonic() < end
                time.sleep(0.2)
    finally:
        os.kill(controller, signal.SIGCONT)
    running.wait_for("Serve's controller answers again", 60)
    assert "stopping" not in running.text()


def require_heads(running, secured):
    """Tokens of a head are told by rounds, results, HTTP, the metrics and ``paceline status``, and change no text.

    Its draft has something for most rounds, so it takes a few requests until the head has had its turn.
    """
    end, seed = time.monotonic() + 60, 0
    with secured.client(running.grpc_port, "alice") as client:
        while True:
            assert time.monotonic() < end, "no token of the head was accepted"
            seed += 1
            sampling = {"max_tokens": 40, "ignore_eos": True, "temperature": 1.0, "seed": seed}
            stream = client.generate("hello", **sampling)
            rounds = [chunk.round for chunk in stream if chunk.round is not None]
            result = stream.result
            assert sum(each.head_drafted for each in rounds) == result.speculation.head_drafted
            assert sum(each.head_accepted for each in rounds) == result.speculation.head_accepted
            if result.speculation.head_accepted:
                break
        plain = client.generate("hello", speculation=SpeculationParams(mode=Mode.PLAIN), **sampling).result
        assert plain.token_ids == result.token_ids
        assert plain.speculation.drafted == 0
    secured.metrics(running.http_port, 'paceline_controller_head_on{head="draft_model"')
    secured.metrics(running.http_port, "paceline_target_head_rows_used_total", result.speculation.head_accepted)
    end = time.monotonic() + 60
    while True:  # the same request over HTTP, which the draft may have answered this time
        (choice,) = secured.completion(running.http_port, sampling | {"return_token_ids": True})["choices"]
        assert choice["token_ids"] == list(result.token_ids)
        if choice["speculation"]["head_accepted"]:
            break
        assert time.monotonic() < end
    flags = ["--address", f"{HOST}:{running.grpc_port}", "--tls-ca", str(secured.public.ca)]
    command = [sys.executable, "-m", "paceline", "status", *flags, "--api-key", "key-of-alice"]
    line = re.compile(r"head draft_model .*: [1-9]\d*% of rounds had its proposal, \d+% of it accepted")
    end = time.monotonic() + 60
    while not line.search(subprocess.run(command, capture_output=True, text=True, check=True).stdout):
        assert time.monotonic() < end, "the status does not name what the head did"


def is_ours(pid):
    """Whether a process is a replica, the proxy before them, or what watches over that."""
    with contextlib.suppress(OSError):
        return any(name in " ".join(command_line(pid)) for name in ("ServeReplica", "haproxy", "janitor.py"))
    return False


def wait_gone(pids, timeout_s=60):
    end = time.monotonic() + timeout_s
    while left := [found.command[:90] for pid in pids if (found := processes.read_process(pid))]:
        assert time.monotonic() < end, left
        time.sleep(0.1)


@pytest.mark.ray
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), *nightly([(signal.SIGKILL, -9)])])
def test_it_serves_until_it_is_told_to_stop_and_leaves_nothing(pair, tmp_path, number, status):
    secured = Secured(tmp_path)
    head = ["--head", f"draft_model={pair / 'draft'},3", "--set", "target_config.engine_kwargs.adaptive=false"]
    with Running(pair, tmp_path, *secured.flags, *head) as running:
        running.wait_for("ready\n")
        secured.check(running.grpc_port, running.http_port)
        require_heads(running, secured)
        family = require_table(running)
        assert len(family) > 6
        secured.check_inside({port for kind, _, port in listening(family) if kind == "ray::ServeReplica"})
        sockets_of_ray = (part for pid in family for part in command_line(pid) if "/sockets/" in part)
        of_ray = Path(next(sockets_of_ray).rpartition("=")[2]).parents
        assert any(folder.stat().st_mode & 0o077 == 0 and folder.stat().st_uid == os.getuid() for folder in of_ray)
        if number == signal.SIGINT:
            require_streams_without_a_controller(running, family, secured)
        ours = {pid for pid in family if is_ours(pid)}
        assert len(ours) > 4
        (sockets,) = (line[-1] for pid in family if (line := command_line(pid))[-2:][0].endswith("janitor.py"))
        assert Path(sockets).exists()
        if number == signal.SIGINT:  # as a terminal does: the whole group hears it
            os.killpg(running.process.pid, number)
        else:
            running.process.kill()
        assert running.process.wait(300) == status
        # of a Ray whose driver was killed the last agents end in their own time: what is ours must be gone
        wait_gone(family if number == signal.SIGINT else ours)
        assert not Path(sockets).exists()
    for port in (running.grpc_port, running.http_port):
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have ended are no listener
            free.bind((HOST, port))
            free.listen()


@pytest.mark.nightly
@pytest.mark.ray
def test_a_replica_that_cannot_start_ends_it_with_the_reason(pair, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in (pair / "target").iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"model_type": "nobody-knows"}))
    with Running(pair, tmp_path, "--target", str(broken)) as running:
        family = set()
        while running.process.poll() is None:
            family |= descendants(running.process.pid)
            time.sleep(0.5)
        assert running.process.returncode == 2, running.text()
        assert "broken" in running.text().splitlines()[-1]
        wait_gone(family)


# -- on a cluster that runs -----------------------------------------------------------------------------------------

_CLUSTER = """
import sys
from paceline.cluster.first_node import start_ray
context = start_ray(num_cpus=4, object_store_memory=80 << 20, log_to_driver=False, **{options})
print(context.address_info["gcs_address"], flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def cluster(folder: Path, environment: dict[str, str], **options):
    """A Ray cluster of another process; yields it and its address."""
    before = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with (folder / "cluster.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", _CLUSTER.replace("{options}", repr(options))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
            env=before | environment | {"RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"},
        )
        try:
            address = process.stdout.readline().strip()
            assert address, (folder / "cluster.log").read_text()
            yield process, address
        finally:
            process.communicate()


@pytest.mark.nightly
@pytest.mark.ray
def test_it_joins_a_cluster_and_leaves_it_as_it_was(pair, tmp_path):
    with cluster(tmp_path, {}, include_dashboard=False) as (ray, address):
        with Running(pair, tmp_path, "--address", address) as running:
            running.wait_for("ready\n")
            replicas = {pid for pid in descendants(ray.pid) if is_ours(pid)}
            names = " ".join(" ".join(command_line(pid)) for pid in replicas)
            assert all(name in names for name in ("Target:", "Draft:", "Router", "haproxy")), names
            with Client(f"{HOST}:{running.grpc_port}") as client:
                assert client.generate("hello", max_tokens=20).result.usage.completion_tokens > 0
            running.process.send_signal(signal.SIGINT)
            assert running.process.wait(300) == 130
        wait_gone(replicas)
        assert ray.poll() is None


@pytest.mark.nightly
@pytest.mark.ray
def test_the_cluster_file_is_deployed_by_serve_itself(tmp_path):
    """On a cluster that was started with the environment that is printed for it."""
    printed = subprocess.run(
        [sys.executable, "-m", "paceline", "serve", "--print-environment"], capture_output=True, text=True, check=True
    ).stdout
    environment = dict(shlex.split(line)[1].split("=", 1) for line in printed.splitlines())
    assert environment["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    dashboard, grpc_port, http_port = free_ports(3)
    text = (REPOSITORY / "cluster" / "embedded.yaml").read_text().replace("0.0.0.0", "127.0.0.1")
    config = yaml.safe_load(text.replace("9000", str(grpc_port)).replace("8000", str(http_port)))
    for pool in ("target_config", "draft_config"):
        config["applications"][0]["args"][pool].setdefault("engine_kwargs", {})["compile"] = False
    file = tmp_path / "embedded.yaml"
    file.write_text(yaml.safe_dump(config))
    folder = Path(environment["RAY_SERVE_HAPROXY_SERVER_STATE_BASE"])
    try:
        with cluster(tmp_path, environment, include_dashboard=True, dashboard_port=dashboard):
            command = [str(Path(sys.executable).with_name("serve")), "deploy", "--address"]
            subprocess.run([*command, f"http://127.0.0.1:{dashboard}", str(file)], check=True, capture_output=True)
            with Client(f"127.0.0.1:{grpc_port}") as client:
                client.wait_ready(START_S)
                assert client.generate("def f(", max_tokens=20, ignore_eos=True).result.usage.completion_tokens == 20
    finally:
        shutil.rmtree(folder)
