"""The files under cluster/: what Ray, Serve and the clouds' own models say of them, and that they belong together."""

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import botocore.session
import pytest
import yaml
from botocore.validate import ParamValidator
from cluster.onprem_down import commands
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig, NodeTypeConfig
from ray.autoscaler.v2.scheduler import ResourceRequestSource, SchedulingNode, SchedulingNodeStatus
from ray.autoscaler.v2.utils import ResourceRequestUtil
from ray.core.generated.instance_manager_pb2 import NodeKind

from paceline.cluster.environment import LONGEST_STREAM_S, serve_environment
from paceline.config import ServiceConfig
from paceline.security.haproxy import BINDS

CLUSTER = Path(__file__).parents[2] / "cluster"
CLUSTERS = ["local.yaml", "onprem.yaml", "aws.yaml", "gcp.yaml"]
CLOUDS = ["aws.yaml", "gcp.yaml"]
SERVES = ["embedded.yaml", "serve-onprem.yaml", "serve-gpu.yaml"]
POOLS = ["target", "draft", "router"]
LABEL = "paceline/pool"

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((CLUSTER / name).read_text(encoding="utf-8"))


def prepared(name: str) -> dict[str, Any]:
    """As `ray up` completes it, without asking a cloud."""
    config = prepare_config(read(name))
    validate_config(config)
    return config


def bundles(config: ServiceConfig, pool: str) -> tuple[list[dict[str, float]], dict[str, str]]:
    """What one replica asks for on one node, and the labels of that node."""
    options = getattr(config, f"{pool}_config").deployment_options()
    if "placement_group_bundles" in options:
        assert options["placement_group_strategy"] == "STRICT_PACK"
        (selector,) = options["placement_group_bundle_label_selector"]
        return options["placement_group_bundles"], selector
    actor = options["ray_actor_options"]
    resources = {"CPU": actor["num_cpus"], "GPU": actor.get("num_gpus", 0.0)} | (actor.get("resources") or {})
    return [{name: amount for name, amount in resources.items() if amount}], actor.get("label_selector", {})


def fits(node_type: Any, wanted: list[dict[str, float]], selector: dict[str, str]) -> bool:
    """Whether Ray's autoscaler would place all of it on one empty node of this type."""
    node = SchedulingNode.from_node_config(node_type, SchedulingNodeStatus.TO_LAUNCH, NodeKind.WORKER)
    constraint = [(key, _IN, [value]) for key, value in selector.items()]
    requests = [ResourceRequestUtil.make(bundle, label_selectors=[constraint]) for bundle in wanted]
    left, _ = node.try_schedule(requests, ResourceRequestSource.PENDING_DEMAND)
    return not left


_IN = 1  # LABEL_OPERATOR_IN


@pytest.mark.parametrize("name", CLUSTERS)
def test_ray_takes_the_cluster(name):
    config = prepared(name)
    assert config["cluster_name"] == "paceline"
    for local in config["file_mounts"].values():  # what is shipped exists, or is made as the documentation says
        assert local == "dist" or local.startswith("~") or (CLUSTER.parent / local).is_file()
    head = config["head_start_ray_commands"]
    assert any("ray start --head" in command and "--autoscaling-config" in command for command in head)
    for command in head + config["worker_start_ray_commands"]:
        first = re.search(r"ray start|stop_ray", command)
        assert first is not None
        assert command.index(". ~/paceline/environment.sh") < first.start()


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_misspelt_key_is_refused(name):
    config = read(name) | {"max_wrokers": 3}
    with pytest.raises(Exception, match="max_wrokers"):
        validate_config(prepare_config(config))


@pytest.mark.parametrize("name", SERVES)
def test_serve_takes_the_application(name):
    from ray.serve.schema import ServeDeploySchema  # warns while it is imported

    from paceline.cluster.app import APPLICATION, GRPC_SERVICES

    data = read(name)
    deploy = ServeDeploySchema.model_validate(data)
    assert deploy.grpc_options.grpc_servicer_functions == GRPC_SERVICES
    (application,) = deploy.applications
    assert (application.name, application.import_path) == (APPLICATION, "paceline.app:build")
    config = ServiceConfig.from_file(CLUSTER / name)
    assert config.server.grpc_port == deploy.grpc_options.port == 9000
    for pool in POOLS:
        assert getattr(config, f"{pool}_config").deployment_options()["ray_actor_options"]["num_cpus"] > 0


@pytest.mark.parametrize("name", CLOUDS)
@pytest.mark.parametrize("pool", POOLS)
def test_a_replica_fits_the_nodes_of_its_pool_and_no_other(name, pool):
    nodes = AutoscalingConfig(prepared(name), skip_content_hash=True).get_node_type_configs()
    wanted, selector = bundles(ServiceConfig.from_file(CLUSTER / "serve-gpu.yaml"), pool)
    assert {node for node, node_type in nodes.items() if fits(node_type, wanted, selector)} == {pool}
    assert fits(nodes["target"], wanted, {}), "the label keeps it away from targets, not the size"


@pytest.mark.parametrize("name", CLOUDS)
def test_a_target_takes_all_gpus_of_its_host(name):
    node = prepared(name)["available_node_types"]["target"]
    wanted, _ = bundles(ServiceConfig.from_file(CLUSTER / "serve-gpu.yaml"), "target")
    assert sum(bundle["GPU"] for bundle in wanted) == node["resources"]["GPU"] == 8


@pytest.mark.parametrize("name", CLOUDS)
def test_pools_have_limits_of_their_own(name):
    config = prepared(name)
    serve = ServiceConfig.from_file(CLUSTER / "serve-gpu.yaml")
    nodes = config["available_node_types"]
    assert config["head_node_type"] == "head"
    assert nodes["head"]["resources"] == {"CPU": 0}
    for pool in ("draft", "target"):
        scaling = getattr(serve, f"{pool}_config").deployment_config.autoscaling_config
        assert nodes[pool]["max_workers"] == scaling.max_replicas + (pool == "target")  # one replica on a node
        assert nodes[pool]["min_workers"] == scaling.min_replicas
        assert nodes[pool]["labels"] == {LABEL: pool}
    assert nodes["draft"]["idle_timeout_s"] < nodes["target"]["idle_timeout_s"]
    assert nodes["router"]["min_workers"] == serve.router_config.deployment_config.num_replicas
    assert config["max_workers"] == sum(nodes[pool]["max_workers"] for pool in POOLS)


@pytest.mark.parametrize("name", ["serve-gpu.yaml", "serve-small.yaml", "serve-onprem.yaml"])
def test_a_pool_of_one_keeps_its_replica_until_the_successor_serves(name):
    """Ray stops the old replica first where ``max_surge_percent`` is 0: targets and routers cannot be without one."""
    config = ServiceConfig.from_file(CLUSTER / name)
    for pool in ("target", "router"):
        options = getattr(config, f"{pool}_config").deployment_config
        assert options.max_surge_percent or options.first_replicas > 1, pool


@pytest.mark.parametrize("name", CLOUDS)
def test_there_are_machines_for_the_successors_of_a_full_pool(name):
    nodes, config = prepared(name)["available_node_types"], ServiceConfig.from_file(CLUSTER / "serve-gpu.yaml")
    for pool in ("target", "router"):
        options = getattr(config, f"{pool}_config").deployment_config
        surge = -(-options.max_surge_percent * options.most_replicas // 100)
        assert nodes[pool]["max_workers"] >= options.most_replicas + surge, pool


def test_each_pool_of_machines_takes_its_replicas():
    """On-premises: any machine is one of a pool by its label alone."""
    config = ServiceConfig.from_file(CLUSTER / "serve-onprem.yaml")
    resources = {"CPU": 2.0}
    for pool in POOLS:
        wanted, selector = bundles(config, pool)
        assert selector == {LABEL: pool}
        nodes = [NodeTypeConfig(name, 0, 1, resources=resources, labels={LABEL: name}) for name in ["head", *POOLS]]
        assert [node.name for node in nodes if fits(node, wanted, selector)] == [pool]
        assert config.target_config.deployment_config.max_replicas_per_node == 1


def test_models_that_a_pool_needs_are_fetched_where_it_runs():
    serve = ServiceConfig.from_file(CLUSTER / "serve-gpu.yaml")
    target, draft = (getattr(serve, f"{pool}_config").model_loading_config.source for pool in ("target", "draft"))
    for name in CLOUDS:
        nodes = prepared(name)["available_node_types"]
        arguments = {pool: nodes[pool]["worker_setup_commands"][0].partition("setup.sh ")[2] for pool in POOLS}
        assert arguments == {
            "target": target,
            "draft": f"{draft} --without-weights {target}",  # whose tokenizer must be the target's
            "router": f"--without-weights {target}",
        }


def test_ec2_knows_every_field():
    shape = botocore.session.get_session().get_service_model("ec2").operation_model("RunInstances").input_shape
    known = shape.members["InstanceType"].enum
    config = read("aws.yaml")
    for name, node in config["available_node_types"].items():
        report = ParamValidator().validate({"MinCount": 1, "MaxCount": 1, **node["node_config"]}, shape)
        assert not report.has_errors(), f"{name}: {report.generate_report()}"
        assert node["node_config"]["InstanceType"] in known
    wrong = {"MinCount": 1, "MaxCount": 1, "InstanceTypo": "p5.48xlarge"}
    assert ParamValidator().validate(wrong, shape).has_errors()
    assert config["available_node_types"]["draft"]["node_config"]["InstanceType"].startswith("g6.")
    assert config["available_node_types"]["target"]["node_config"]["InstanceType"] == "p5.48xlarge"


def test_machines_with_gpus_are_not_to_be_moved():
    nodes = read("gcp.yaml")["available_node_types"]
    for pool, machine in (("draft", "g2-standard-8"), ("target", "a3-highgpu-8g")):
        node = nodes[pool]["node_config"]
        assert node["machineType"] == machine
        scheduling = {key: value for entry in node["scheduling"] for key, value in entry.items()}
        assert scheduling["onHostMaintenance"] == "TERMINATE"
        assert "guestAccelerators" not in node  # these machines bring theirs
    assert "scheduling" not in nodes["head"]["node_config"]


def shell(command: str, **environment: str) -> str:
    result = subprocess.run(
        ["bash", "-c", command],
        env={"PATH": os.environ["PATH"], "HOME": "/home/one"} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout


def test_the_environment_is_that_of_the_command(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("RAY_") or name == "MALLOC_ARENA_MAX"]:
        monkeypatch.delenv(name)
    lines = shell(f". {CLUSTER / 'environment.sh'}; env").splitlines()
    theirs = dict(line.split("=", 1) for line in lines if "=" in line)
    ours = serve_environment(tmp_path)
    on_disk = {name for name, value in ours.items() if value.startswith(str(tmp_path))}  # Serve's own defaults there
    own = on_disk | {BINDS, "RAY_SERVE_HAPROXY_BINARY_PATH"}
    assert set(ours) - own <= set(theirs)
    for name in set(ours) - own:
        assert theirs[name] == ours[name] or re.search("_PORT$", name)
    assert int(theirs["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]) == LONGEST_STREAM_S
    assert "RAY_SERVE_HAPROXY_BINARY_PATH" in theirs
    ports = [int(value) for name, value in theirs.items() if re.fullmatch("RAY_SERVE.*_PORT", name)]
    assert len(set(ports)) == len(ports)
    assert all(not 10002 <= port <= 19999 and port < 32768 for port in ports)  # Ray's workers, the system's own


def test_what_is_set_already_stays():
    source = f". {CLUSTER / 'environment.sh'}; echo $RAY_AUTH_MODE $RAY_gcs_storage_path $HF_HOME"
    assert shell(source).split() == ["token", "/home/one/paceline/gcs", "/home/one/paceline/huggingface"]
    assert shell(source, RAY_AUTH_MODE="disabled", HF_HOME="/models").split()[::2] == ["disabled", "/models"]


def test_a_lost_node_is_noticed_soon_but_not_by_a_head_that_stands_still_for_some_seconds():
    """Both roads to a cluster: a pause of the head of less than 10 s must not end its nodes, each with its replicas."""
    names = ["initial_delay_ms", "period_ms", "timeout_ms", "failure_threshold"]
    values = shell(f". {CLUSTER / 'environment.sh'}; echo {' '.join(f'$RAY_health_check_{name}' for name in names)}")
    _, period_ms, timeout_ms, threshold = map(int, values.split())
    assert threshold * min(period_ms, timeout_ms) >= 10_000
    assert threshold * (period_ms + timeout_ms) <= 20_000
    lines = (CLUSTER.parent / "k8s/chart/files/environment.env").read_text().splitlines()
    theirs = dict(line.split("=", 1) for line in lines if line.startswith("RAY_health_check_"))
    assert [theirs[f"RAY_health_check_{name}"] for name in names] == values.split()


def test_a_haproxy_that_nobody_keeps_ends_with_ray(tmp_path):
    """Those of a service on this machine, which are not in Serve's own folder, stay."""
    running = {}
    for folder in ("haproxy-serve/5ec1", "paceline-1"):
        config = tmp_path / folder / "haproxy.cfg"
        running[folder] = subprocess.Popen(
            ["bash", "-c", "read -r line", "haproxy", "-f", str(config)], stdin=subprocess.PIPE
        )
    (tmp_path / "ray").write_text("#!/bin/sh\necho $1; exit 3\n")
    (tmp_path / "ray").chmod(0o755)
    own = f'PATH={tmp_path}:$PATH; pkill() {{ command pkill -P {os.getpid()} "$@"; }}'  # of this test's alone
    try:
        assert shell(f". {CLUSTER / 'environment.sh'}; {own}; stop_ray; echo $?").split() == ["stop", "3"]
        assert running["haproxy-serve/5ec1"].wait(60) == -signal.SIGKILL
        assert running["paceline-1"].poll() is None
    finally:
        for process in running.values():
            process.kill()
            process.communicate()


def test_every_machine_is_stopped():
    config = read("onprem.yaml")
    wanted = commands(config)
    assert list(wanted) == [config["provider"]["head_ip"], *config["provider"]["worker_ips"]]
    assert all(config["auth"]["ssh_user"] in command[-2] and "stop_ray" in command[-1] for command in wanted.values())
    assert ["gcs" in command[-1] for command in wanted.values()] == [True, False, False, False, False]


@pytest.fixture
def node(tmp_path):
    """A node's ~/paceline as `ray up` leaves it, with a virtual environment that says what it is asked."""
    folder = tmp_path / "paceline"
    (folder / "dist").mkdir(parents=True)
    (folder / "dist" / "paceline-0.1.0-py3-none-any.whl").write_text("one")
    (folder / "environment.sh").write_text((CLUSTER / "environment.sh").read_text())
    (folder / "venv" / "bin").mkdir(parents=True)
    for name in ("python", "pip", "hf"):
        program = folder / "venv" / "bin" / name
        program.write_text(f'#!/bin/sh\necho {name} "$@"\n')
        program.chmod(0o755)
    return tmp_path


@pytest.fixture
def worker(node, tmp_path):
    """Runs the start command of a worker there: with the ``ray`` and ``pgrep`` of a node that says what it is asked."""
    for name, body in (("ray", 'echo ray "$@"'), ("pgrep", 'exit "${RAYLET:-1}"'), ("pkill", "exit 1")):
        program = node / "paceline" / "venv" / "bin" / name
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)

    def start(name: str, **environment: str) -> list[str]:
        (command,) = read(name)["worker_start_ray_commands"]
        path = f"{node}/paceline/venv/bin:{os.environ['PATH']}"
        return shell(command, HOME=str(node), PATH=path, RAY_HEAD_IP="192.0.2.10", **environment).splitlines()

    return start


@pytest.mark.parametrize("name", ["onprem.yaml", *CLOUDS])
def test_a_worker_joins_its_head_unless_it_has(worker, name):
    stopped, started = worker(name, PACELINE_POOL="draft")
    assert stopped.startswith("ray stop")
    assert "--address=192.0.2.10:6379" in started
    assert ("--labels=paceline/pool=draft" in started) == (name == "onprem.yaml")  # clouds say it by the node type
    assert worker(name, PACELINE_POOL="draft", RAYLET="0") == []


def test_a_machine_that_does_not_say_its_pool_is_not_started(worker):
    with pytest.raises(subprocess.CalledProcessError) as refused:
        worker("onprem.yaml")
    assert "PACELINE_POOL: is not set in ~/.bashrc" in refused.value.stderr


def setup(node: Path, *arguments: str, **environment: str) -> list[str]:
    return shell(f"bash {CLUSTER / 'setup.sh'} {' '.join(arguments)}", HOME=str(node), **environment).splitlines()


def test_a_wheel_is_installed_once_and_again_when_it_is_another(node):
    (first,) = setup(node)
    assert first.startswith("pip install")
    assert first.endswith(".whl[serve]")
    assert "constraints.txt" in first
    assert setup(node) == []
    (node / "paceline" / "venv" / "lib" / "python3.12" / "site-packages" / "paceline").mkdir(parents=True)
    (node / "paceline" / "dist" / "paceline-0.1.0-py3-none-any.whl").write_text("two")
    resolved, replaced = setup(node)
    assert "constraints.txt" in resolved
    assert "--force-reinstall --no-deps" in replaced


def test_two_wheels_are_refused(node):
    (node / "paceline" / "dist" / "paceline-0.2.0-py3-none-any.whl").write_text("one")
    with pytest.raises(subprocess.CalledProcessError) as refused:
        setup(node)
    assert "one wheel is needed" in refused.value.stderr


def test_models_come_from_the_hub_or_from_a_store(node, tmp_path):
    assert setup(node, "org/name")[-1] == "hf download --quiet org/name"
    whole, tokenizer = setup(node, "org/draft", "--without-weights", "org/target")
    assert whole == "hf download --quiet org/draft"
    assert tokenizer.startswith("hf download --quiet org/target --exclude=*.safetensors --exclude=*.bin")
    snapshot = tmp_path / "store" / "hub" / "models--org--name" / "snapshots" / "1"
    blobs = tmp_path / "store" / "hub" / "models--org--name" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "0").write_text("weights")
    (snapshot / "model.safetensors").symlink_to(blobs / "0")
    (snapshot / "tokenizer.json").write_text("tokens")
    setup(node, "--without-weights", "org/name", PACELINE_MODELS=str(tmp_path / "store"))
    copied = node / "paceline" / "huggingface" / "hub" / "models--org--name"
    assert [path.name for path in (copied / "snapshots" / "1").iterdir()] == ["tokenizer.json"]
    setup(node, "org/name", PACELINE_MODELS=str(tmp_path / "store"))
    assert (copied / "snapshots" / "1" / "model.safetensors").read_text() == "weights"
    assert not (copied / "blobs").exists()


@pytest.mark.parametrize("tool", ["aws", "gcloud"])
def test_a_bucket_is_asked_for_everything_but_the_weights(node, tool):
    program = node / "paceline" / "venv" / "bin" / tool
    program.write_text(f'#!/bin/sh\necho {tool} "$@"\n')
    program.chmod(0o755)
    store = {"aws": "s3://bucket", "gcloud": "gs://bucket"}[tool]
    installed, whole, partial = setup(node, "org/draft", "--without-weights", "org/target", PACELINE_MODELS=store)
    assert installed.startswith("pip")
    assert f"{store}/hub/models--org--draft" in whole
    assert "safetensors" not in whole
    assert f"{store}/hub/models--org--target" in partial
    if tool == "aws":
        assert {"--exclude=blobs/*", "--exclude=*.safetensors", "--exclude=*.gguf"} <= set(partial.split())
        return
    (pattern,) = re.findall(r"--exclude=(\S+)", partial)
    names = ["blobs/0", "snapshots/1/model-00001.safetensors", "snapshots/1/tokenizer.json", "snapshots/1/bin/a.txt"]
    assert [bool(re.search(pattern, name)) for name in names] == [True, True, False, False]
