"""What every overlay must hold: placement, the Serve config, confinement, networks, draining."""

import ipaddress
import itertools
import math
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import yaml
from tests.k8s.support import (
    COMPONENTS,
    K8S,
    OVERLAYS,
    POOLS,
    REPOSITORY,
    SOURCES,
    compose,
    generate,
    groups_of,
    needs_helm,
    needs_kubectl,
    of_kind,
    overlay,
    render,
    serve_config_of,
    service_of,
    templates_of,
    values_of,
)

from paceline.cluster.environment import LONGEST_STREAM_S, serve_environment
from paceline.config import ServiceConfig
from paceline.security.haproxy import PROGRAM

pytestmark = [needs_helm, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # of Ray's own models


def args_of(service):
    """Our configuration in a RayService."""
    return ServiceConfig.parse(serve_config_of(service)["applications"][0]["args"])


# -- where replicas go -----------------------------------------------------------------------------------------------


def node_types(service):
    """What Ray's own KubeRay autoscaler believes of each group."""
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr as derive
    from ray.autoscaler._private.util import prepare_config, validate_config

    resource = {"metadata": {"name": "p", "namespace": "p", "labels": {}}, "spec": service["spec"]["rayClusterConfig"]}
    config = derive(resource)
    validate_config(prepare_config(dict(config)))
    return config["available_node_types"]


def fits(node_type, demand, selector, times=1):
    """Whether so many replicas fit an empty node of the type."""
    room = node_type["resources"]
    labels = all(node_type["labels"].get(key) == value for key, value in selector.items())
    return labels and all(room.get(name, 0) >= times * amount for name, amount in demand.items() if amount)


def demand_of(options, pods=1):
    """Resources that a replica takes of each of its pods, all their bundles together, and the labels it asks for."""
    actor = options["ray_actor_options"]
    if bundles := options.get("placement_group_bundles"):
        assert options["placement_group_strategy"] == ("STRICT_PACK" if pods == 1 else "PACK")
        assert len(bundles) % pods == 0
        bundles = bundles[: len(bundles) // pods]
        (selector,) = options["placement_group_bundle_label_selector"]
        return {name: sum(bundle.get(name, 0) for bundle in bundles) for bundle in bundles for name in bundle}, selector
    demand = {"CPU": actor["num_cpus"], "GPU": actor.get("num_gpus", 0)}
    return demand | (actor.get("resources") or {}), actor["label_selector"]


PODS_OF_A_TARGET = {"gpu-two-hosts": 2}


@pytest.mark.parametrize("name", OVERLAYS)
def test_each_replica_fits_its_own_group_and_fills_the_node(name):
    service = service_of(overlay(name))
    config, types = args_of(service), node_types(service)
    parts = {"router": config.router_config, "draft": config.draft_config, "target": config.target_config}
    for pool, part in parts.items():
        pods = PODS_OF_A_TARGET.get(name, 1) if pool == "target" else 1
        demand, selector = demand_of(part.deployment_options(), pods)
        assert [kind for kind, node_type in types.items() if fits(node_type, demand, selector)] == [pool]
        assert not fits(types[pool], demand, selector, times=2), f"two {pool}s would share a node"


@pytest.mark.parametrize("name", OVERLAYS)
def test_groups_have_room_for_as_many_replicas_as_serve_may_want(name):
    service = service_of(overlay(name))
    config, groups = args_of(service), groups_of(service)
    for pool, part in (
        ("router", config.router_config),
        ("draft", config.draft_config),
        ("target", config.target_config),
    ):
        deployment, group = part.deployment_config, groups[pool]
        scaling = deployment.autoscaling_config
        least = deployment.num_replicas if scaling is None else scaling.min_replicas
        most = deployment.num_replicas if scaling is None else scaling.max_replicas
        if pool == "target":  # a router's successor finds room in the group, or waits for its old one's pod
            most += math.ceil(most * (deployment.max_surge_percent or 0) / 100)
        pods = PODS_OF_A_TARGET.get(name, 1) if pool == "target" else 1
        assert group["minReplicas"] == 0, "Serve alone decides"
        assert group["replicas"] == least * pods
        assert 4 * most * pods <= group["maxReplicas"], "room for what max_replicas may become while the cluster runs"


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_autoscaler_gets_times_of_each_group(name):
    types = node_types(service_of(overlay(name)))
    idle = {pool: types[pool]["idle_timeout_s"] for pool in POOLS}
    assert (
        idle["draft"] < idle["router"] < idle["target"]
    )  # the cheaper to lose and to get, the sooner it is given back
    assert types["headgroup"]["resources"]["CPU"] == 0


@pytest.mark.parametrize(("name", "gpus"), [("gpu", 8), ("gpu-tp4", 4), ("gpu-two-hosts", 4)])
def test_gpus_are_requested_where_the_engines_want_them(name, gpus):
    groups = groups_of(service_of(overlay(name)))
    limits = {n: g["template"]["spec"]["containers"][0]["resources"]["limits"] for n, g in groups.items()}
    assert {name: limit.get("nvidia.com/gpu") for name, limit in limits.items()} == {
        "router": None,
        "draft": 1,
        "target": gpus,
    }
    for name in ("draft", "target"):
        resources = groups[name]["template"]["spec"]["containers"][0]["resources"]
        room = {"ephemeral-storage": resources["requests"]["ephemeral-storage"]}
        assert resources["requests"] == resources["limits"] | room
        assert groups[name]["template"]["spec"]["tolerations"]
        assert groups[name]["template"]["spec"]["affinity"]


# -- Serve -----------------------------------------------------------------------------------------------------------


SHAPED = {"gpu-tp4": (4, 1), "gpu-two-hosts": (8, 2)}
"""Overlays with other targets -> ranks and pods of one."""


def expected_config(name):
    """What ``cluster/`` says, with what an overlay changes."""
    expected = yaml.safe_load(
        (REPOSITORY / "cluster" / f"serve-{'small' if name == 'small' else 'gpu'}.yaml").read_text()
    )
    args = expected["applications"][0]["args"]
    if name in SHAPED:
        ranks, pods = SHAPED[name]
        args["target_config"]["engine_kwargs"]["tensor_parallel_size"] = ranks
        if pods > 1:
            bundles = [{"CPU": 4, "GPU": 1}] * ranks
            args["target_config"]["placement_group_config"] = {"strategy": "PACK", "bundles": bundles}
    if name == "ha":
        for pool in ("target_config", "draft_config"):
            args[pool]["deployment_config"]["autoscaling_config"]["min_replicas"] = 2
    return expected


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_serve_config_is_that_of_the_cluster_folder(name):
    """Two roads to a cluster, one service: values say for the pods what files of ``cluster`` say for ``ray up``."""
    assert serve_config_of(service_of(overlay(name))) == expected_config(name)


@pytest.mark.parametrize("name", OVERLAYS)
def test_ray_serve_takes_the_config(name):
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(serve_config_of(service_of(overlay(name))))
    assert [application.import_path for application in schema.applications] == ["paceline.app:build"]


def test_written_files_are_what_their_sources_say():
    assert generate.main(["--check"]) == 0


@needs_kubectl
@pytest.mark.parametrize("name", generate.OVERLAYS)
def test_kubectl_applies_what_helm_renders(name, tmp_path):
    """A digest of one's own, given once, is in every container that runs our image, and nothing else differs."""
    digest = "sha256:" + "0123456789abcdef" * 4
    shutil.copytree(K8S / "overlays", tmp_path / "overlays")
    image = tmp_path / "overlays" / "image" / "kustomization.yaml"
    kustomization = yaml.safe_load(image.read_text())
    kustomization["images"] = [{"name": "registry.example.com/paceline", "newName": "own/paceline", "digest": digest}]
    image.write_text(yaml.safe_dump(kustomization))
    folder = tmp_path / "overlays" / name
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=300)
    assert not done.stderr
    built = {(doc["kind"], doc["metadata"]["name"]): doc for doc in yaml.load_all(done.stdout, yaml.CSafeLoader)}
    own = ("image.repository=own/paceline", f"image.digest={digest}")
    documents = render(*values_of(name), *own)
    assert len(built) == len(documents)
    assert done.stdout.count(f"own/paceline@{digest}") == str(documents).count(f"own/paceline@{digest}")
    for document in documents:
        other = built[document["kind"], document["metadata"]["name"]]
        assert document["kind"] in ("Namespace", "PersistentVolume") or other["metadata"].pop("namespace") == "paceline"
        if document["kind"] == "RayService":
            for one in (document, other):
                one["spec"]["serveConfigV2"] = yaml.safe_load(one["spec"]["serveConfigV2"])
        assert other == document


def test_targets_of_another_shape_are_placed_where_they_fit():
    """A target of 16 ranks on two hosts, with the device of a fast network, fills its pods and nothing else."""
    values = ("target.tensorParallelSize=16", "target.podsPerReplica=2", "target.interface=ens5")
    documents = render(*values_of("gpu"), *values, r"target.fabric.vpc\.amazonaws\.com/efa=32")
    service = service_of(documents)
    options = args_of(service).target_config.deployment_options()
    assert len(options["placement_group_bundles"]) == 16
    demand, selector = demand_of(options, pods=2)
    kinds = node_types(service)
    assert [kind for kind, node_type in kinds.items() if fits(node_type, demand, selector)] == ["target"]
    assert not fits(kinds["target"], demand, selector, times=2)
    group = groups_of(service)["target"]
    assert group["replicas"] == 2
    assert group["template"]["spec"]["containers"][0]["resources"]["limits"]["vpc.amazonaws.com/efa"] == 32
    (data,) = (doc["data"] for name, doc in of_kind(documents, "ConfigMap").items() if "environment" in name)
    assert data["NCCL_SOCKET_IFNAME"] == data["GLOO_SOCKET_IFNAME"] == "ens5"


def test_the_environment_is_what_the_service_needs(tmp_path):
    """Ports and paths are a pod's own; all else that `paceline serve` sets is set."""
    data = next(iter(of_kind(overlay("small"), "ConfigMap").values()))["data"]
    own = ("_PORT", "_LOC", "_PATH", "_BASE", "_FILE", "_BINDS")
    wanted = {name: value for name, value in serve_environment(tmp_path).items() if not name.endswith(own)}
    assert wanted
    assert {name: data.get(name) for name in wanted} == wanted
    assert int(data["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]) == LONGEST_STREAM_S
    assert data["RAY_SERVE_HAPROXY_BINARY_PATH"].endswith(f"/{PROGRAM}")
    for template in templates_of(service_of(overlay("gpu"))).values():
        (source,) = template["spec"]["containers"][0]["envFrom"]
        assert source["configMapRef"]["name"] in of_kind(overlay("gpu"), "ConfigMap")
    (other,) = of_kind(overlay("gpu"), "ConfigMap").values()
    assert other["metadata"]["name"] not in of_kind(overlay("small"), "ConfigMap")
    assert other["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}  # for pods of the cluster before


# -- what pods may do ------------------------------------------------------------------------------------------------


def confined(container, pod):
    context = container["securityContext"]
    assert context["allowPrivilegeEscalation"] is False
    assert context["privileged"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert context["readOnlyRootFilesystem"] is True
    assert (context | pod)["runAsNonRoot"] is True
    assert (context | pod)["seccompProfile"] == {"type": "RuntimeDefault"}


def pod_specs(documents):
    service = service_of(documents)
    yield from ((name, template["spec"]) for name, template in templates_of(service).items())
    for kind in ("StatefulSet", "Job"):
        yield from ((name, doc["spec"]["template"]["spec"]) for name, doc in of_kind(documents, kind).items())


def check_confinement(documents):
    for _, spec in pod_specs(documents):
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["runAsGroup"] > 0
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert not any("hostPath" in volume for volume in spec.get("volumes", ()))
        for container in (*spec["containers"], *spec.get("initContainers", ())):
            confined(container, spec["securityContext"])
            assert container["resources"]["limits"].keys() >= {"cpu", "memory"}
            assert ":" in container["image"]
            assert not container["image"].endswith(":latest")
            mounts = {mount["name"] for mount in container["volumeMounts"]}
            claims = {"data"} if container["name"] == "redis" else set()
            assert mounts - claims <= {volume["name"] for volume in spec.get("volumes", ())}
    options = service_of(documents)["spec"]["rayClusterConfig"]["autoscalerOptions"]
    confined(options, {})
    head = templates_of(service_of(documents))["head"]["spec"]
    assert {m["name"] for m in options["volumeMounts"]} <= {volume["name"] for volume in head["volumes"]}
    for name, template in templates_of(service_of(documents)).items():
        if name != "head":
            assert template["spec"]["automountServiceAccountToken"] is False


@pytest.mark.parametrize("name", OVERLAYS)
def test_pods_are_confined(name):
    check_confinement(overlay(name))


@pytest.mark.parametrize("name", OVERLAYS)
def test_pods_have_probes_a_token_and_the_serve_ports(name):
    service = service_of(overlay(name))
    cluster = service["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["autoscalerOptions"]["version"] == "v2"
    assert cluster["enableInTreeAutoscaling"] is True
    for group, template in templates_of(service).items():
        container = template["spec"]["containers"][0]
        liveness, readiness = (" ".join(container[p]["exec"]["command"]) for p in ("livenessProbe", "readinessProbe"))
        assert "52365/api/local_raylet_healthz" in liveness
        assert "52365/api/local_raylet_healthz" in readiness
        assert ("8265/api/gcs_healthz" in readiness) is (group == "head")
        assert ("8000/-/healthz" in readiness) is (group != "head")
    config = args_of(service)
    ports = {p["name"]: p for p in service["spec"]["serveService"]["spec"]["ports"]}
    numbers = {port["port"]: port for port in ports.values()}
    assert numbers.keys() == {config.server.grpc_port, config.server.http_port}
    assert numbers[config.server.grpc_port]["appProtocol"] == "kubernetes.io/h2c"
    for group, template in templates_of(service).items():
        own = {p["name"]: p["containerPort"] for p in template["spec"]["containers"][0]["ports"]}
        serving = {name: number for name, number in own.items() if name.startswith("serve")}
        expected = {port["name"]: port["port"] for port in ports.values()} if group in ("head", "router") else {}
        assert serving == expected
        assert all(port["targetPort"] == port["name"] for port in ports.values())


def check_streams_are_kept_whole(documents, gateway="paceline-gateway"):
    """Envoy ends a stream after 15 s by default; KubeRay calls its Gateway after the RayService."""
    (policy,) = of_kind(documents, "BackendTrafficPolicy").values()
    spec, service = policy["spec"], service_of(documents)
    assert spec["targetRefs"] == [{"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": gateway}]
    assert spec["useClientProtocol"] is True  # or gRPC would go on as HTTP/1.1
    limits = spec["timeout"]["http"]
    assert limits["requestTimeout"] == limits["maxStreamDuration"] == "0s"
    longest = args_of(service).router_config.request_timeout_s
    assert float(limits["streamIdleTimeout"].removesuffix("s")) > longest


@pytest.mark.parametrize("left_out", [None, "requestTimeout", "maxStreamDuration", "streamIdleTimeout"])
def test_a_gateway_that_would_end_streams_is_noticed(left_out):
    documents = overlay("incremental-upgrade")
    if left_out is None:
        check_streams_are_kept_whole(documents)
        return
    (policy,) = of_kind(documents, "BackendTrafficPolicy").values()
    policy["spec"]["timeout"]["http"][left_out] = "15s"
    with pytest.raises(AssertionError):
        check_streams_are_kept_whole(documents)


def test_an_incremental_upgrade_routes_grpc():
    """KubeRay 1.7's route leads to the port that is called `serve`, whatever it is."""
    service = service_of(overlay("incremental-upgrade"))
    (port,) = (p for p in service["spec"]["serveService"]["spec"]["ports"] if p["name"] == "serve")
    assert port["port"] == args_of(service).server.grpc_port


# -- leaving ---------------------------------------------------------------------------------------------------------


COLD_START_S = 900
"""A machine, an image and a model: what a successor may take."""


def stopped_by_serve(at_s, deadline_s, graceful_s):
    """Whether Serve stops a replica of a draining node at a time though no other runs yet: Ray's own rule."""
    from ray.serve._private import deployment_state

    replica = SimpleNamespace(actor_node_id="node", _actor=SimpleNamespace(graceful_shutdown_timeout_s=graceful_s))
    rule = deployment_state.DeploymentState
    state = SimpleNamespace(
        _group_effective_deadline=rule._group_effective_deadline,
        _group_shutdown_timeout_ms=rule._group_shutdown_timeout_ms,
    )
    with mock.patch.object(deployment_state.time, "time", return_value=at_s):
        stopped, _ = rule._partition_groups_to_stop(state, [[replica]], {"node": deadline_s * 1000}, 0)
    return bool(stopped)


def check_order_of_leaving(service):
    """Evicted at 0: successor up, then the old replica stops, its sessions end, Ray leaves, the pod is killed."""
    config = args_of(service)
    longest = config.router_config.request_timeout_s
    assert longest is not None
    for pool, part in (
        ("router", config.router_config),
        ("draft", config.draft_config),
        ("target", config.target_config),
    ):
        spec = groups_of(service)[pool]["template"]["spec"]
        command = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert command[:3] == ["python", "-m", "paceline.cluster.drain"]
        options = dict(zip(command[3::2], command[4::2], strict=True))
        graceful = part.deployment_config.graceful_shutdown_timeout_s
        assert float(options["--graceful-s"]) == graceful > longest
        deadline = graceful + float(options["--cold-start-s"])
        assert not stopped_by_serve(COLD_START_S, deadline, graceful), (pool, "nothing runs while its successor starts")
        assert stopped_by_serve(deadline - graceful, deadline, graceful)
        assert deadline < spec["terminationGracePeriodSeconds"]
    kept = service["spec"]["rayClusterDeletionDelaySeconds"]
    assert kept >= COLD_START_S + longest, "clients that have not come over yet begin streams that are cut"


@pytest.mark.parametrize("name", OVERLAYS)
def test_a_pod_leaves_after_its_successor_serves_and_its_sessions_have_ended(name):
    check_order_of_leaving(service_of(overlay(name)))


@pytest.mark.parametrize("mutant", ["a deadline of a session", "a pod killed first", "an early deletion"])
def test_another_order_of_leaving_is_noticed(mutant):
    service = service_of(overlay("gpu"))
    target = groups_of(service)["target"]["template"]["spec"]
    if mutant == "a deadline of a session":
        target["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1] = "30"
    elif mutant == "a pod killed first":
        target["terminationGracePeriodSeconds"] = 2700
    else:
        service["spec"]["rayClusterDeletionDelaySeconds"] = 1860
    with pytest.raises(AssertionError):
        check_order_of_leaving(service)


def test_drafts_on_machines_that_may_be_taken_back_do_not_wait_for_them():
    service = service_of(compose("gpu", ("spot-drafts",)))
    spec = groups_of(service)["draft"]["template"]["spec"]
    keys = {toleration["key"] for toleration in spec["tolerations"]}
    assert {"cloud.google.com/gke-spot", "karpenter.sh/capacity-type", "kubernetes.azure.com/scalesetpriority"} < keys
    command = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert float(command[4]) < spec["terminationGracePeriodSeconds"] <= 120  # no notice is longer
    for pool in ("router", "target"):
        assert groups_of(service)[pool]["template"]["spec"]["terminationGracePeriodSeconds"] > 1830
        assert len(groups_of(service)[pool]["template"]["spec"].get("tolerations", ())) <= 1


@pytest.mark.parametrize("name", OVERLAYS)
def test_machines_are_not_emptied_to_save_them(name):
    for template in templates_of(service_of(overlay(name))).values():
        annotations = template["metadata"]["annotations"]
        assert annotations["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
        assert annotations["karpenter.sh/do-not-disrupt"] == "true"


@pytest.mark.parametrize("name", OVERLAYS)
def test_budgets_keep_whole_replicas_and_no_machine_waits_for_a_draft(name):
    documents = overlay(name)
    budgets = of_kind(documents, "PodDisruptionBudget")
    assert set(budgets) == {"router", "target"} | ({"head"} if name != "ha" else {"redis"})
    args = args_of(service_of(documents))
    for pool, budget in budgets.items():
        if pool == "redis":
            assert budget["spec"]["selector"] == {"matchLabels": REDIS}
            continue
        kept = budget["spec"]["minAvailable"]
        assert isinstance(kept, int)  # a RayCluster has no scale for a percentage
        assert budget["spec"]["selector"] == {"matchLabels": {"paceline/pool": pool}}
        if pool == "target":
            pods = PODS_OF_A_TARGET.get(name, 1)
            least = args.target_config.deployment_config.autoscaling_config.min_replicas
            # of the last replica no pod; of several one pod at a time, and so one replica
            assert kept == (pods if least == 1 else least * pods - 1)


def test_high_availability_keeps_two_of_everything_and_its_state_outside():
    service = service_of(overlay("ha"))
    options = service["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    assert options["redisAddress"] == "redis://paceline-redis:6379"
    assert "paceline-redis" in of_kind(overlay("ha"), "Service")
    assert all(group["replicas"] >= 2 for group in groups_of(service).values())
    (spread,) = groups_of(service)["router"]["template"]["spec"]["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == ("kubernetes.io/hostname", "DoNotSchedule")
    config = args_of(service)
    assert config.router_config.deployment_config.num_replicas == 2
    assert config.target_config.deployment_config.autoscaling_config.min_replicas == 2


def test_the_password_of_redis_is_no_argument_of_a_process(tmp_path):
    (container,) = of_kind(overlay("ha"), "StatefulSet")["paceline-redis"]["spec"]["template"]["spec"]["containers"]
    server = tmp_path / "redis-server"
    server.write_text('#!/bin/sh\necho "$$ $*"\ncat\n')
    server.chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    started = subprocess.Popen(
        [*container["command"], *container["args"]],
        env={"REDIS_PASSWORD": "s3cret", "PATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    printed = started.communicate(timeout=300)[0].splitlines()
    assert printed[0] == f"{started.pid} -"  # the server itself, which signals reach
    assert printed[1:] == ["dir /data", "appendonly yes", 'requirepass "s3cret"']


# -- a Service for routers -------------------------------------------------------------------------------------------


def labels_of_pods(service):
    """Labels of each group's pods as KubeRay 1.7 makes them; of the head's ``ray.io/serve`` it keeps at false."""
    cluster = service["spec"]["rayClusterConfig"]
    groups = {"head": cluster["headGroupSpec"]} | groups_of(service)
    for name, group in groups.items():
        kind = "head" if name == "head" else "worker"
        yield (
            name,
            group["template"]["metadata"]["labels"]
            | group["labels"]
            | {"ray.io/cluster": "paceline-x", "ray.io/node-type": kind, "ray.io/group": name}
            | {"ray.io/serve": "false" if kind == "head" else "true"},
        )


@pytest.mark.parametrize("name", OVERLAYS)
def test_a_service_selects_routers_alone_and_each_of_them_has_its_ports(name):
    documents = overlay(name)
    service = service_of(documents)
    spec = of_kind(documents, "Service")["paceline-routers"]["spec"]
    assert [pool for pool, labels in labels_of_pods(service) if spec["selector"].items() <= labels.items()] == [
        "router"
    ]
    container = groups_of(service)["router"]["template"]["spec"]["containers"][0]
    ports = {port["containerPort"] for port in container["ports"]}
    config = args_of(service)
    assert {port["port"]: port["targetPort"] for port in spec["ports"]} == {
        config.server.http_port: config.server.http_port,
        config.server.grpc_port: config.server.grpc_port,
    }
    assert {port["targetPort"] for port in spec["ports"]} <= ports
    of_kuberay = {"ray.io/cluster": "paceline-x", "ray.io/serve": "true"}  # what it has for paceline-serve-svc
    assert sum(of_kuberay.items() <= labels.items() for _, labels in labels_of_pods(service)) == 3


def test_ports_are_forwarded_to_services_whose_every_pod_has_them():
    pages = [*(REPOSITORY / "docs").rglob("*.md"), REPOSITORY / "README.md", *(K8S.rglob("*.yaml"))]
    found = [name for page in pages for name in re.findall(r"port-forward (?:svc|service)/([-a-z]+)", page.read_text())]
    assert found
    assert set(found) == {"paceline-routers"}


# -- networks --------------------------------------------------------------------------------------------------------


def selects(selector, labels):
    matches = all(labels.get(k) == v for k, v in selector.get("matchLabels", {}).items())
    return matches and all(labels.get(e["key"]) in e["values"] for e in selector.get("matchExpressions", ()))


def admitted(documents, direction, own, peer, port, namespace=None):
    """Whether a policy admits a connection. ``peer``: labels of a pod; ``namespace``: of its namespace, if another."""
    kind, side = ("ingress", "from") if direction == "in" else ("egress", "to")
    for policy in of_kind(documents, "NetworkPolicy").values():
        if not selects(policy["spec"]["podSelector"], own):
            continue
        for rule in policy["spec"].get(kind, ()):
            if "ports" in rule and port not in {p["port"] for p in rule["ports"]}:
                continue
            for entry in rule[side]:
                if "ipBlock" in entry:
                    continue
                foreign = "namespaceSelector" in entry
                if foreign != (namespace is not None) or (
                    foreign and not selects(entry["namespaceSelector"], namespace)
                ):
                    continue
                if selects(entry.get("podSelector", {}), peer):
                    return True
    return False


def admitted_to(documents, own, address, port, protocol):
    """Whether a policy lets a pod with these labels connect to an address outside the pods' network."""
    address = ipaddress.ip_address(address)
    for policy in of_kind(documents, "NetworkPolicy").values():
        if not selects(policy["spec"]["podSelector"], own):
            continue
        for rule in policy["spec"].get("egress", ()):
            if "ports" in rule and (protocol, port) not in {(p["protocol"], p["port"]) for p in rule["ports"]}:
                continue
            for block in (entry["ipBlock"] for entry in rule["to"] if "ipBlock" in entry):
                excluded = any(address in ipaddress.ip_network(cidr) for cidr in block.get("except", ()))
                if address in ipaddress.ip_network(block["cidr"]) and not excluded:
                    return True
    return False


PODS = {pool: {"paceline/pool": pool, "app.kubernetes.io/part-of": "paceline"} for pool in ("head", *POOLS)}
OPERATOR = ({"app.kubernetes.io/name": "kuberay-operator"}, {"kubernetes.io/metadata.name": "kuberay-system"})
PROMETHEUS = ({"app.kubernetes.io/name": "prometheus"}, {"kubernetes.io/metadata.name": "monitoring"})
CLIENT = ({}, {"paceline/clients": "allowed"})
STRANGER = ({"app": "x"}, {"kubernetes.io/metadata.name": "default"})
REDIS = {"app.kubernetes.io/name": "paceline-redis"}


@pytest.mark.parametrize("name", OVERLAYS)
def test_networks_admit_what_is_needed_and_nothing_else(name):
    documents = overlay(name)
    policies = of_kind(documents, "NetworkPolicy")
    assert policies["deny-all"]["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    for one, other in itertools.product(PODS, repeat=2):
        assert admitted(documents, "in", PODS[one], PODS[other], 10002)
        assert admitted(documents, "out", PODS[one], PODS[other], 10002)
    for port in (8265, 8000):
        assert admitted(documents, "in", PODS["head"], OPERATOR[0], port, OPERATOR[1])
    assert not admitted(documents, "in", PODS["head"], OPERATOR[0], 10001, OPERATOR[1])
    for pool, port in itertools.product(PODS, (8000, 9000, 8265, 6379, 10001, 8080)):
        serves = pool != "head" and port in (8000, 9000)
        assert admitted(documents, "in", PODS[pool], CLIENT[0], port, CLIENT[1]) is serves
        assert not admitted(documents, "in", PODS[pool], STRANGER[0], port, STRANGER[1])
        assert not admitted(documents, "in", PODS[pool], {"app": "x"}, port)  # of the same namespace
        scraped = name == "monitoring" and port == 8080
        assert admitted(documents, "in", PODS[pool], PROMETHEUS[0], port, PROMETHEUS[1]) is scraped
    blocks = {
        policy: {
            entry["ipBlock"]["cidr"]
            for rule in doc["spec"].get("egress", ())
            for entry in rule["to"]
            if "ipBlock" in entry
        }
        for policy, doc in policies.items()
    }
    assert {policy for policy, cidrs in blocks.items() if cidrs} == {"api-server", "dns"}
    assert policies["api-server"]["spec"]["podSelector"] == {"matchLabels": {"paceline/pool": "head"}}
    if name == "ha":
        assert admitted(documents, "out", PODS["head"], REDIS, 6379)
        assert admitted(documents, "in", REDIS, PODS["head"], 6379)
        assert not admitted(documents, "in", REDIS, PODS["target"], 6379)
        assert not admitted(documents, "out", PODS["target"], REDIS, 6379)


SYSTEM = {"kubernetes.io/metadata.name": "kube-system"}
CACHES = ("169.254.20.10", "169.254.169.254")


def check_names_are_resolved(documents, pods):
    for own in pods:
        for name in ("kube-dns", "node-local-dns"):
            assert admitted(documents, "out", own, {"k8s-app": name}, 53, SYSTEM), name
        for address, protocol in itertools.product(CACHES, ("UDP", "TCP")):
            assert admitted_to(documents, own, address, 53, protocol), (address, protocol)


@pytest.mark.parametrize("name", OVERLAYS)
def test_pods_resolve_names_wherever_the_cluster_answers_them(name):
    """Pods of kube-dns and CoreDNS, NodeLocal DNSCache on the machine, Cloud DNS; not the metadata at its address."""
    documents = overlay(name)
    check_names_are_resolved(documents, (*PODS.values(), REDIS))
    for own, port in itertools.product(PODS.values(), (80, 443, 988)):
        assert not admitted_to(documents, own, "169.254.169.254", port, "TCP")
    assert not admitted(documents, "out", PODS["target"], {"k8s-app": "metrics-server"}, 53, SYSTEM)


@pytest.mark.parametrize("mutant", ["no cache", "no Cloud DNS", "no pods of the cache", "no TCP"])
def test_a_policy_without_one_of_them_is_noticed(mutant):
    documents = overlay("small")
    (rule,) = of_kind(documents, "NetworkPolicy")["dns"]["spec"]["egress"]
    pods, cache, cloud = rule["to"]
    change = {
        "no cache": lambda: rule["to"].remove(cache),
        "no Cloud DNS": lambda: rule["to"].remove(cloud),
        "no pods of the cache": lambda: pods["podSelector"]["matchExpressions"][0]["values"].remove("node-local-dns"),
        "no TCP": lambda: rule["ports"].pop(),
    }
    change[mutant]()
    with pytest.raises(AssertionError):
        check_names_are_resolved(documents, PODS.values())


def test_models_are_downloaded_only_where_that_is_chosen():
    documents = compose("gpu", ("model-download",))
    policy = of_kind(documents, "NetworkPolicy")["model-download"]["spec"]
    assert policy["policyTypes"] == ["Egress"]
    assert policy["egress"][0]["ports"] == [{"protocol": "TCP", "port": 443}]
    (block,) = policy["egress"][0]["to"]
    assert "169.254.0.0/16" in block["ipBlock"]["except"]  # the machines' own credentials
    assert not of_kind(documents, "PersistentVolumeClaim")
    check_confinement(documents)
    for group in groups_of(service_of(documents)).values():
        assert not any("persistentVolumeClaim" in volume for volume in group["template"]["spec"]["volumes"])


COMBINATIONS = [
    *(("small", chosen) for size in (1, 2, 4) for chosen in itertools.combinations(COMPONENTS, size)),
    *(("gpu", chosen) for chosen in ((), COMPONENTS)),
    *(("gpu", (*COMPONENTS, source)) for source in SOURCES),
    ("gpu-two-hosts", (*COMPONENTS, "model-download")),
]
"""Every pair of components, all of them, and all with each source of models."""


@pytest.mark.parametrize(("base", "components"), COMBINATIONS, ids=str)
@pytest.mark.slow
def test_components_combine(base, components):
    from tests.k8s.operator_rules import problems

    documents = compose(base, components)
    service = service_of(documents)
    assert problems(service) == []
    check_confinement(documents)
    assert bool(of_kind(documents, "PrometheusRule")) is ("monitoring" in components)
    assert bool(of_kind(documents, "StatefulSet")) is ("ha" in components)
    assert ("gcsFaultToleranceOptions" in service["spec"]["rayClusterConfig"]) is ("ha" in components)
    incremental = service["spec"]["upgradeStrategy"]["type"] == "NewClusterWithIncrementalUpgrade"
    assert incremental is ("incremental-upgrade" in components)
    names = [(doc["kind"], doc["metadata"]["name"]) for doc in documents]
    assert len(set(names)) == len(names)


@pytest.mark.slow
def test_components_of_clusters_of_ones_own_do_what_they_say():
    chosen = ("one-zone", "pull-secret", "priority", "runtime-class-nvidia")
    documents = compose("gpu", chosen)
    classes = of_kind(documents, "PriorityClass")
    values = {}
    for name, template in templates_of(service_of(documents)).items():
        spec = template["spec"]
        assert spec["imagePullSecrets"] == [{"name": "paceline-registry"}]
        values[name] = classes[spec["priorityClassName"]]["value"]
        assert (spec.get("runtimeClassName") == "nvidia") is (name in ("draft", "target"))
        if name != "head":
            (term,) = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
                "nodeSelectorTerms"
            ]
            assert term["matchExpressions"][0]["key"] == "topology.kubernetes.io/zone"
    assert values["draft"] < values["head"] == values["router"] == values["target"]
    check_confinement(documents)


def test_a_driver_that_is_too_old_is_said_before_ray_starts():
    for name, gpus in (("gpu", 8), ("gpu-tp4", 4), ("gpu-two-hosts", 4)):
        service = service_of(overlay(name))
        for pool, number in (("draft", 1), ("target", gpus)):
            (check,) = groups_of(service)[pool]["template"]["spec"]["initContainers"]
            assert check["resources"]["limits"]["nvidia.com/gpu"] == number  # no more than the pod has anyway
            assert check["image"] == groups_of(service)[pool]["template"]["spec"]["containers"][0]["image"]
    done = subprocess.run([sys.executable, *check["command"][1:]], capture_output=True, text=True, timeout=300)
    if not torch.cuda.is_available():  # as with a driver that torch cannot use
        assert done.returncode != 0
        assert "NVIDIA" in done.stderr or "CUDA" in done.stderr


def test_nothing_is_placed_outside_the_namespace():
    for name in OVERLAYS:
        for doc in overlay(name):
            assert "namespace" not in doc["metadata"]  # helm's
    labels = of_kind(overlay("small"), "Namespace")["paceline"]["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
