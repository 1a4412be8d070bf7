"""The chart: the values that it refuses, where its pods may run, what upgrades change, and a release at a server."""

import copy
import json
import os
import re
import subprocess

import pytest
import yaml
from tests.k8s.support import (
    K8S,
    REPOSITORY,
    VALUES,
    generate,
    groups_of,
    needs_helm,
    needs_testbed,
    of_kind,
    overlay,
    render,
    serve_config_of,
    service_of,
    templates_of,
    values_of,
)
from tests.k8s.test_manifests import (
    PODS,
    admitted,
    args_of,
    check_streams_are_kept_whole,
    demand_of,
    fits,
    node_types,
)

from paceline import __version__

pytestmark = [needs_helm, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # of Ray's own models

GPU = values_of("gpu")


def test_helm_finds_no_fault():
    command = [generate.helm(), "lint", "--strict", str(K8S / "chart"), "--values", str(VALUES / "gpu.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    chart = yaml.safe_load((K8S / "chart" / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == __version__


# -- values ----------------------------------------------------------------------------------------------------------

REFUSED = {
    "targets.model=x": "'targets'",
    "target.modell=x": "'modell'",
    "target.model=a b": "/target/model",
    "target.engine.max_session=16": "'max_session'",
    "target.engine.tensor_parallel_size=2": "'tensor_parallel_size'",
    "draft.deployment.autoscaling_config.max_replica=2": "'max_replica'",
    "router.deployment.graceful_shutdown_timeout_s=5": "'graceful_shutdown_timeout_s'",
    "target.tensorParallelSize=0": "/target/tensorParallelSize",
    "target.podsPerReplica=3": "target.podsPerReplica is 3: it must divide target.tensorParallelSize, which is 8",
    "target.maxPods=4": "target.maxPods is 4: 5 are needed",
    "target.gpu.kinds={b17}": "gpu.kinds has b17: with labels of discovery it may be a100-40gb, a100-80gb, a10g, h100",
    "nodes.autoscaler=borg": "/nodes/autoscaler",
    "models.from=nowhere": "/models/from",
    "models.fill.from=s3": "models.fill.address",
    "models.fill.address=http://x": "/models/fill/address",
    "image.digest=sha256:1": "/image/digest",
    "longestSessionSeconds=soon": "/longestSessionSeconds",
    "draft.resources.request.cpu=1": "'request'",
    "environment.A=1": "/environment/A",
    "ha.redisAddress=http://x": "/ha/redisAddress",
}
"""A value that is wrong -> how the refusal names it."""


@pytest.mark.parametrize("setting", REFUSED)
def test_a_wrong_value_is_refused_by_its_name(setting):
    with pytest.raises(ValueError, match=re.escape(REFUSED[setting])):
        generate.template(*GPU, setting)


def test_choices_that_exclude_each_other_are_refused():
    with pytest.raises(ValueError, match=r"gateway\.enabled with upgrade\.incremental"):
        generate.template("gateway.enabled=true", "upgrade.incremental=true")
    with pytest.raises(ValueError, match="a job fills a volume"):
        generate.template(*GPU, "models.fill.from=hub", "models.from=download")
    with pytest.raises(ValueError, match=r"target\.deployment\.autoscaling_config is set: with externalScaler"):
        generate.template("externalScaler=true")


def test_a_draft_on_its_targets_node_has_a_core_of_the_targets_pod():
    """By Ray's own readers: target and draft fit one node together, and a second draft does not."""
    before = service_of(render(*GPU))
    service = service_of(render(*GPU, VALUES / "draft-on-target-nodes.yaml"))
    assert set(groups_of(service)) == {"target", "router"}
    types, config = node_types(service), args_of(service)
    (target, labels), (draft, near) = (
        demand_of(config.target_config.deployment_options()),
        demand_of(config.draft_options()),
    )
    assert labels == near == {"paceline/pool": "target"}
    both = {name: target.get(name, 0) + draft.get(name, 0) for name in target | draft}
    assert fits(types["target"], both, near)
    assert not fits(node_types(before)["target"], both, near), "0.9 of a core more is what it takes"
    assert not fits(types["target"], {"CPU": both["CPU"] + draft["CPU"]}, near)
    cores = [
        int(groups_of(one)["target"]["template"]["spec"]["containers"][0]["resources"]["requests"]["cpu"])
        for one in (before, service)
    ]
    assert cores[1] == cores[0] + 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["draft.gpu.resource=nvidia.com/gpu"], "draft.onTargetNodes is true with a GPU of the draft"),
        (["draft.spot=true"], "draft.onTargetNodes is true with a GPU of the draft, or draft.spot"),
        (["target.podsPerReplica=2"], "target.podsPerReplica is 2: with draft.onTargetNodes only 1 is allowed"),
    ],
)
def test_a_draft_on_its_targets_node_has_nothing_of_its_own(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        generate.template(*GPU, VALUES / "draft-on-target-nodes.yaml", *settings)


def test_its_weights_are_fetched_where_it_runs():
    rendered = render(*GPU, VALUES / "draft-on-target-nodes.yaml", "models.from=download")
    (fetch,) = [
        one["command"][2]
        for one in groups_of(service_of(rendered))["target"]["template"]["spec"]["initContainers"]
        if one["name"] == "fetch-models"
    ]
    assert fetch.splitlines() == ["hf download Qwen/Qwen3-32B", "hf download Qwen/Qwen3-0.6B"]


def test_sizes_may_come_from_outside():
    from ray.serve.schema import ServeDeploySchema  # not before the warnings of its models are ignored

    pools = [
        f"{pool}.deployment.{value}"
        for pool in ("target", "draft")
        for value in ("autoscaling_config=null", "num_replicas=2")
    ]
    service = service_of(render("externalScaler=true", *pools))
    (application,) = ServeDeploySchema.model_validate(serve_config_of(service)).applications
    assert application.external_scaler_enabled
    assert args_of(service).scaling()["pools"] == {}


@pytest.mark.parametrize(
    "values",
    [
        ("target.tensorParallelSize=2",),
        ("target.cpus=3", "draft.cpus=2"),
        (*GPU, "target.cpus=9"),
        (*GPU, "target.podsPerReplica=4"),
    ],
    ids=lambda values: values[-1],
)
def test_a_pod_has_the_cores_that_ray_counts_on(values):
    for group in groups_of(service_of(render(*values))).values():
        resources = group["template"]["spec"]["containers"][0]["resources"]
        assert int(group["rayStartParams"]["num-cpus"]) <= int(resources["requests"]["cpu"])
        assert int(resources["requests"]["cpu"]) <= int(resources["limits"]["cpu"])


def test_one_value_moves_every_time_that_depends_on_it():
    service = service_of(render("longestSessionSeconds=600", "coldStartSeconds=300"))
    spec = groups_of(service)["target"]["template"]["spec"]
    command = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    args = args_of(service)
    assert (args.router_config.request_timeout_s, args.router_config.cold_start_timeout_s) == (600, 300)
    assert args.target_config.deployment_config.graceful_shutdown_timeout_s == 630
    assert command[3:] == ["--graceful-s", "630", "--cold-start-s", "300"]
    assert service["spec"]["rayClusterDeletionDelaySeconds"] == 930 < spec["terminationGracePeriodSeconds"]


def test_names_follow_the_release_and_its_namespace():
    documents = list(
        filter(
            None,
            yaml.safe_load_all(generate.template(*GPU, "monitoring.enabled=true", release="code", namespace="llm")),
        )
    )
    assert service_of(documents)["metadata"]["name"] == "code"
    assert "code-routers" in of_kind(documents, "Service")
    rules = json.dumps(of_kind(documents, "PrometheusRule")["code"]["spec"])
    assert 'job=\\"llm/code-head\\"' in rules
    assert "namespace: paceline" not in yaml.safe_dump(yaml.safe_load(rules))
    assert '\\"paceline\\"' not in rules


# -- nodes -----------------------------------------------------------------------------------------------------------

ZONE = "topology.kubernetes.io/zone"
FROM_ZERO = {
    # what Karpenter derives of an instance type that it may order
    "karpenter": {
        "h100": {"karpenter.k8s.aws/instance-gpu-name": "h100", "karpenter.sh/capacity-type": "on-demand"},
        "l4": {"karpenter.k8s.aws/instance-gpu-name": "l4", "karpenter.sh/capacity-type": "on-demand"},
        "l4 spot": {"karpenter.k8s.aws/instance-gpu-name": "l4", "karpenter.sh/capacity-type": "spot"},
        "a10g": {"karpenter.k8s.aws/instance-gpu-name": "a10g", "karpenter.sh/capacity-type": "on-demand"},
    },
    # what GKE's autoscaler reads of a node pool
    "gke": {
        "h100": {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"},
        "l4": {"cloud.google.com/gke-accelerator": "nvidia-l4"},
        "l4 spot": {"cloud.google.com/gke-accelerator": "nvidia-l4", "cloud.google.com/gke-spot": "true"},
        "t4": {"cloud.google.com/gke-accelerator": "nvidia-tesla-t4"},
    },
    # what cluster-autoscaler reads of the tags of an Auto Scaling Group
    "eks": {
        "h100": {"paceline/gpu": "h100"},
        "l4": {"paceline/gpu": "l4"},
        "l4 spot": {"paceline/gpu": "l4", "eks.amazonaws.com/capacityType": "SPOT"},
        "a10g": {"paceline/gpu": "a10g"},
    },
}
"""Node autoscaler -> machines that it could make -> the labels that it knows of them while there are none."""


def takes(spec, labels):
    """Whether the scheduler would place a pod on a node with these labels, as far as they go."""
    if not dict(spec.get("nodeSelector", {})).items() <= labels.items():
        return False
    required = spec.get("affinity", {}).get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution")
    if required is None:
        return True
    return any(
        all(labels.get(e["key"]) in e["values"] for e in term["matchExpressions"])
        for term in required["nodeSelectorTerms"]
    )


def places(autoscaler, pool, *values):
    """The machines on which a pool's pod would run once they were made."""
    chosen = (f"nodes.autoscaler={autoscaler}",) if autoscaler else ()
    spec = groups_of(service_of(render(*GPU, *chosen, *values)))[pool]["template"]["spec"]
    return {name for name, labels in FROM_ZERO[autoscaler or "karpenter"].items() if takes(spec, labels)}


@pytest.mark.parametrize("autoscaler", FROM_ZERO)
def test_an_autoscaler_knows_which_machine_to_make(autoscaler):
    assert places(autoscaler, "target") == {"h100"}
    assert places(autoscaler, "draft") == {"l4", "l4 spot"}
    assert places(autoscaler, "router") == FROM_ZERO[autoscaler].keys()
    other = "t4" if autoscaler == "gke" else "a10g"
    both = ("draft.spot=true", f"draft.gpu.kinds={{l4,{other}}}")
    assert places(autoscaler, "draft", *both) == {
        "l4",
        "l4 spot",
        other,
    }  # each of them, where another is not to be had


def test_labels_of_a_node_that_runs_make_none():
    """NVIDIA's feature discovery labels nodes that there are: with its labels, nothing grows from zero."""
    assert places("", "target") == places("", "draft") == set()


def test_spot_machines_come_first():
    spec = groups_of(service_of(render(*GPU, "nodes.autoscaler=gke", "draft.spot=true")))["draft"]["template"]["spec"]
    (preferred,) = spec["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    (expression,) = preferred["preference"]["matchExpressions"]
    assert FROM_ZERO["gke"]["l4 spot"][expression["key"]] in expression["values"]
    assert any(toleration["key"] == "cloud.google.com/gke-spot" for toleration in spec["tolerations"])


def test_zones_are_for_every_worker_and_every_kind():
    service = service_of(render(*GPU, "nodes.zones={a,b}", "draft.gpu.kinds={l4,t4}"))
    for pool, group in groups_of(service).items():
        affinity = group["template"]["spec"]["affinity"]["nodeAffinity"]
        terms = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        assert len(terms) == (2 if pool == "draft" else 1)
        for term in terms:
            assert {"key": ZONE, "operator": "In", "values": ["a", "b"]} in term["matchExpressions"]


def test_the_tag_of_an_auto_scaling_group_is_in_the_documentation():
    page = (REPOSITORY / "docs" / "kubernetes.md").read_text()
    assert "k8s.io/cluster-autoscaler/node-template/label/paceline/gpu" in page


# -- other ways to GPUs ----------------------------------------------------------------------------------------------


def test_a_part_of_a_gpu_is_a_gpu_to_ray():
    service = service_of(render(*GPU, VALUES / "mig.yaml"))
    container = groups_of(service)["draft"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/mig-1g.10gb"] == 1
    assert node_types(service)["draft"]["resources"]["GPU"] == 1


def test_gpus_of_a_claim_are_gpus_to_ray():
    documents = render(*GPU, VALUES / "dra.yaml")
    templates, service = of_kind(documents, "ResourceClaimTemplate"), service_of(documents)
    for pool, count in (("draft", 1), ("target", 8)):
        spec = groups_of(service)[pool]["template"]["spec"]
        (claim,) = spec["resourceClaims"]
        (request,) = templates[claim["resourceClaimTemplateName"]]["spec"]["spec"]["devices"]["requests"]
        assert (request["exactly"]["count"], request["exactly"]["deviceClassName"]) == (count, "gpu.nvidia.com")
        assert node_types(service)[pool]["resources"]["GPU"] == count
        for container in (spec["containers"][0], *spec["initContainers"]):
            assert container["resources"]["claims"] == [{"name": claim["name"]}]
            assert "nvidia.com/gpu" not in container["resources"]["limits"]


# -- changes ---------------------------------------------------------------------------------------------------------


def hashed(service):
    """What KubeRay 1.7 compares of a cluster: the numbers of pods, tolerations and scheduling gates are left out."""
    spec = copy.deepcopy(service["spec"]["rayClusterConfig"])
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        for name in ("replicas", "minReplicas", "maxReplicas", "scaleStrategy"):
            group.pop(name, None)
        for name in ("tolerations", "schedulingGates"):
            group["template"]["spec"].pop(name, None)
    return json.dumps(spec, sort_keys=True)


def change(*values):
    """What becomes of a running service of gpu: a new cluster, another Serve config in place, or nothing."""
    before, after = service_of(render(*GPU)), service_of(render(*GPU, *values))
    if hashed(before) != hashed(after):
        return "new cluster"
    return "nothing" if serve_config_of(before) == serve_config_of(after) else "in place"


BOUNDS = "target.deployment.autoscaling_config"


@pytest.mark.parametrize(
    ("values", "becomes"),
    [
        ((f"{BOUNDS}.max_replicas=12",), "in place"),
        ((f"{BOUNDS}.min_replicas=2", f"{BOUNDS}.max_replicas=12"), "in place"),
        (("draft.deployment.autoscaling_config.max_replicas=40",), "in place"),
        (("router.deployment.num_replicas=6",), "in place"),
        (("target.engine.max_sessions=32",), "in place"),
        (("config.target_config.engine_kwargs.kv_fraction=0.5",), "in place"),
        (("target.maxPods=100",), "nothing"),  # KubeRay carries it to no cluster that runs
        (("image.tag=new",), "new cluster"),
        (("longestSessionSeconds=600",), "new cluster"),
        (("logs.enabled=true",), "new cluster"),
        (("target.tensorParallelSize=4",), "new cluster"),
    ],
    ids=lambda found: " ".join(found) if isinstance(found, tuple) else found,
)
def test_what_an_upgrade_changes(values, becomes):
    """A bound that KubeRay would not carry to the pods must not be in the way of one that Serve takes at once."""
    assert change(*values) == becomes


def test_bounds_of_serve_take_effect_in_the_groups_as_they_are():
    before = groups_of(service_of(render(*GPU)))
    after = args_of(service_of(render(*GPU, f"{BOUNDS}.min_replicas=3", f"{BOUNDS}.max_replicas=12")))
    scaling = after.target_config.deployment_config.autoscaling_config
    assert before["target"]["minReplicas"] <= scaling.min_replicas <= scaling.max_replicas
    assert scaling.max_replicas * 1.25 <= before["target"]["maxReplicas"]


def test_an_incremental_upgrade_keeps_what_load_has_grown():
    """Serve takes initial_replicas for the least once KubeRay has set a target capacity."""
    for name in ("gpu", "ha", "incremental-upgrade"):
        assert "initial_replicas" not in service_of(overlay(name))["spec"]["serveConfigV2"]


# -- clients ---------------------------------------------------------------------------------------------------------


def test_clients_outside_have_a_gateway_whose_routes_lead_to_the_service():
    documents = render(*GPU, "gateway.enabled=true", "gateway.hostnames={llm.example.com}", "gateway.tlsSecret=llm")
    ((name, gateway),) = of_kind(documents, "Gateway").items()
    listeners = {listener["name"]: listener for listener in gateway["spec"]["listeners"]}
    service = service_of(documents)
    ports = {port["port"]: port for port in service["spec"]["serveService"]["spec"]["ports"]}
    for kind, listener, port in (("GRPCRoute", "grpc", 9000), ("HTTPRoute", "http", 8000)):
        (route,) = of_kind(documents, kind).values()
        # two listeners: the specification lets routes of both kinds share none with the same host names
        assert route["spec"]["parentRefs"] == [{"name": name, "sectionName": listener}]
        assert listeners[listener]["protocol"] == "HTTPS"
        assert route["spec"]["hostnames"] == ["llm.example.com"]
        (rule,) = route["spec"]["rules"]
        assert rule["backendRefs"] == [{"name": service["spec"]["serveService"]["metadata"]["name"], "port": port}]
        assert port in ports
    paths = {match["path"]["value"] for match in rule["matches"]}
    assert paths == {"/v1", "/health"}  # metrics are for those inside
    assert rule["timeouts"] == {"request": "0s"}
    (grpc,) = of_kind(documents, "GRPCRoute").values()
    from paceline.v1 import generation_pb2

    own = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
    assert own in {match["method"]["service"] for match in grpc["spec"]["rules"][0]["matches"]}
    check_streams_are_kept_whole(documents, name)
    proxies = {"kubernetes.io/metadata.name": "envoy-gateway-system"}
    assert admitted(documents, "in", PODS["router"], {}, 9000, proxies)
    assert not admitted(overlay("gpu"), "in", PODS["router"], {}, 9000, proxies)


def test_cilium_is_told_of_what_is_no_address_to_it():
    policies = of_kind(render("networkPolicies.cilium=true"), "CiliumNetworkPolicy")
    api, names = policies["api-server"]["spec"], policies["dns"]["spec"]
    assert api["endpointSelector"] == {"matchLabels": {"paceline/pool": "head"}}
    assert api["egress"][0]["toEntities"] == ["kube-apiserver"]
    assert names["endpointSelector"] == {}
    assert names["egress"][0]["toEntities"] == ["host"]  # where NodeLocal DNSCache listens
    assert {port["port"] for port in names["egress"][0]["toPorts"][0]["ports"]} == {"53"}


# -- a release -------------------------------------------------------------------------------------------------------


@needs_testbed
@pytest.mark.slow
def test_helm_installs_and_upgrades(tmp_path):
    """The command of the documentation; bounds change in place, and running pods keep the environment they have."""
    pytest.importorskip("kubernetes_validate", reason="kubernetes-validate has the schemas of the core kinds")
    from tests.k8s.api_server import api_server

    page = (REPOSITORY / "docs" / "kubernetes.md").read_text()
    (install,) = set(re.findall(r"^helm (install paceline .*)$", page, re.MULTILINE))
    with api_server(tmp_path) as (api, config):
        own = {f"HELM_{name}_HOME": str(tmp_path) for name in ("CACHE", "CONFIG", "DATA")}

        def run(*arguments):
            command = [generate.helm(), *arguments]
            environment = os.environ | {"KUBECONFIG": str(config)} | own
            done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=240)
            assert done.returncode == 0, done.stderr
            return done.stdout

        def held(plural):
            return {name: document for (key, _, name), document in api.store.items() if key[2] == plural}

        notes = run(*install.split())
        assert "port-forward svc/paceline-routers" in notes
        assert "namespaces" not in {key[2] for key, space, _ in api.store if space == "default"}
        first = held("rayservices")["paceline"]
        assert serve_config_of(first) == serve_config_of(service_of(render()))
        maps = set(held("configmaps"))

        run(
            *install.replace("install", "upgrade", 1).replace(" --create-namespace", "").split(),
            "--set",
            f"{BOUNDS}.max_replicas=9",
        )
        second = held("rayservices")["paceline"]
        assert hashed(second) == hashed(first)
        target = args_of(second).target_config.deployment_config
        assert target.autoscaling_config.max_replicas == 9
        assert set(held("configmaps")) == maps

        run("upgrade", "paceline", "k8s/chart", "-n", "paceline", "--set", "environment.PACELINE_LOG=debug")
        third = held("rayservices")["paceline"]
        assert hashed(third) != hashed(second)
        (named,) = {
            t["spec"]["containers"][0]["envFrom"][0]["configMapRef"]["name"] for t in templates_of(third).values()
        }
        assert set(held("configmaps")) == maps | {named}
        run("uninstall", "paceline", "-n", "paceline")
        assert not held("rayservices")
