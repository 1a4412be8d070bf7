"""Alerts and dashboard: every metric is one that the service exports, and each alert fires when it should."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import ray
import yaml
from tests.k8s.support import K8S, REPOSITORY, generate, needs_helm, of_kind, overlay

from paceline.config import ServerConfig
from paceline.metrics import catalogue, engines  # noqa: F401  # engines declares the counters of engines
from paceline.metrics.declaration import CATALOGUE, Kind
from paceline.types import Cause

pytestmark = needs_helm

PROMTOOL = shutil.which("promtool") or shutil.which("promtool", path=REPOSITORY / "build/prometheus/usr/bin")
_MONITOR_ONLY = {catalogue.REPLICAS_UP.name}
"""Made by the monitor for its page: no process mirrors it to Ray."""
_ANYWHERE = {"namespace", "ray_io_cluster", "ReplicaId", "le"}
"""Labels of every series: the scrape's, and the one that each process adds."""


def exported():
    """Series of Ray's exporters -> labels of their own."""
    series = {}
    for name, metric in CATALOGUE.items():
        if name in _MONITOR_ONLY:
            continue
        ray = "ray_" + re.sub("[^a-zA-Z0-9_]", "_", name)
        endings = ("_bucket", "_sum", "_count") if metric.kind is Kind.HISTOGRAM else ("",)
        series.update((ray + ending, set(metric.labels)) for ending in endings)
    return series


FOREIGN = {
    "up": {"job", "endpoint", "pool", "pod"},  # Prometheus' own
    "autoscaler_active_nodes": set(),  # Ray's autoscaler, which says no ray_
    "autoscaler_pending_nodes": set(),
    "autoscaler_recently_failed_nodes": set(),
    "autoscaler_update_loop_exceptions": set(),
    "ray_serve_num_ongoing_grpc_requests": set(),  # Serve's, of its proxies
    "ray_serve_num_grpc_error_requests_total": set(),
    "ray_serve_haproxy_target_mismatch": set(),
    "ray_gcs_storage_operation_latency_ms_bucket": set(),  # Ray's control store
    "kube_pod_status_phase": {"pod", "phase"},  # kube-state-metrics
    "kube_statefulset_status_replicas_ready": {"statefulset"},
    "kubelet_volume_stats_used_bytes": {"persistentvolumeclaim"},
    "kubelet_volume_stats_capacity_bytes": {"persistentvolumeclaim"},
    "kuberay_service_condition_ready": {"name", "condition"},  # KubeRay's operator
}
"""Series of others -> their labels."""


def test_series_of_ray_are_those_of_the_installed_version():
    package = Path(ray.__file__).parent
    sources = {
        "autoscaler_": package / "autoscaler/_private/prom_metrics.py",
        "ray_serve_num": package / "dashboard/modules/metrics/dashboards/serve_dashboard_panels.py",
        "ray_serve_haproxy": package / "serve/_private/haproxy_metrics.py",
        "ray_gcs": package / "core/src/ray/gcs/gcs_server",
    }
    for name in FOREIGN:
        for prefix, source in sources.items():
            if name.startswith(prefix):
                own = re.sub("^(autoscaler_|ray_)|(_total|_bucket)$", "", name)
                assert own.encode() in source.read_bytes(), (name, source.name)


def rules():
    """The groups of the PrometheusRule."""
    return of_kind(overlay("monitoring"), "PrometheusRule")["paceline"]["spec"]["groups"]


def alerts():
    """By name."""
    return {rule["alert"]: rule for group in rules() for rule in group["rules"] if "alert" in rule}


def dashboard():
    """As the ConfigMap has it."""
    return json.loads(of_kind(overlay("monitoring"), "ConfigMap")["paceline-dashboard"]["data"]["paceline.json"])


def panels():
    """Those that show something."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def queries():
    """Every expression of the dashboard, Grafana's variables replaced."""
    for panel in panels():
        for target in panel["targets"]:
            text = target["expr"].replace("$__rate_interval", "1m").replace("$namespace", "paceline")
            yield text.replace("$cluster", ".*")


def selectors(expression):
    """The vector selectors of an expression."""
    parser = pytest.importorskip("promql_parser", reason="promql-parser reads PromQL")
    found = []

    def walk(node):
        if isinstance(node, parser.VectorSelector):
            found.append(node)
        elif isinstance(node, parser.MatrixSelector):
            walk(node.vector_selector if hasattr(node, "vector_selector") else node.vs)
        for name in ("expr", "lhs", "rhs", "param"):
            child = getattr(node, name, None)
            if isinstance(child, parser.Expr):
                walk(child)
        for child in getattr(node, "args", None) or ():
            walk(child)

    walk(parser.parse(expression))
    return found


def check(expression, known):
    """Every series is known, and every label of a matcher is one of its own."""
    found = selectors(expression)
    assert found, expression
    for selector in found:
        assert selector.name in known, f"{selector.name} is not exported: {expression}"
        for matcher in selector.matchers.matchers:
            assert matcher.name in known[selector.name] | _ANYWHERE, (selector.name, matcher.name)
            if matcher.name == "cause":
                causes = {cause.value for cause in Cause}
                assert set(matcher.value.split("|")) <= causes, matcher.value
            if matcher.name == "kind":
                assert matcher.value in ("target", "draft")
            if matcher.name == "state":
                assert matcher.value in ("waiting", "running", "homeless")


def test_expressions_name_only_what_is_exported():
    known, recorded = exported(), {}
    for group in rules():
        for rule in group["rules"]:
            if "record" in rule:
                recorded[rule["record"]] = {"cause"}
    expressions = [rule["expr"] for group in rules() for rule in group["rules"]]
    for expression in (*expressions, *queries()):
        check(expression, known | recorded | FOREIGN)


def test_the_total_outage_is_not_told_by_the_series_that_end_with_it():
    """Each of the group's alerts looks at what others say of the service, or at the absence of its own."""
    (outage,) = (group for group in rules() if group["name"] == "paceline.outage")
    for rule in outage["rules"]:
        assert not any(selector.name in exported() for selector in selectors(rule["expr"])), rule["alert"]
    namespace = {"paceline"}
    monitors = of_kind(overlay("monitoring"), "PodMonitor")
    for rule in outage["rules"]:
        for selector in selectors(rule["expr"]):
            found = {matcher.name: matcher.value for matcher in selector.matchers.matchers}
            if selector.name != "up":
                assert found.get("namespace", "paceline") in namespace
                continue
            place, _, monitor = found["job"].partition("/")  # as the Prometheus operator calls it
            assert place in namespace
            endpoints = {endpoint["port"] for endpoint in monitors[monitor]["spec"]["podMetricsEndpoints"]}
            assert found.get("endpoint", "metrics") in endpoints


def test_the_check_of_names_sees_a_wrong_one():
    known = exported()
    check('rate(ray_paceline_rounds_total{cause="hit"}[5m])', known)
    for wrong in (
        "rate(ray_paceline_round_total[5m])",
        'ray_paceline_rounds_total{why="hit"}',
        'sum(rate(ray_paceline_rounds_total{cause="hits"}[5m])) / 2',
        "max(ray_paceline_replicas_up)",
        "histogram_quantile(0.5, sum by (le) (rate(ray_paceline_draft_link_seconds[1m])))",
    ):
        with pytest.raises(AssertionError):
            check(wrong, known)


def test_both_pools_and_what_users_see_are_on_the_dashboard():
    model = dashboard()
    assert [panel["title"] for panel in model["panels"] if panel["type"] == "row"] == [
        "What users see",
        "Speculation",
        "Sizes of the pools",
        "Target pool",
        "Draft pool",
        "Ray and Kubernetes",
    ]
    assert len({panel["id"] for panel in model["panels"]}) == len(model["panels"])
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels()}
    assert len(places) == len(panels())
    for panel in panels():
        assert panel["targets"], panel["title"]
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
    text = "\n".join(queries())
    for kind in ("target", "draft"):
        assert f'kind="{kind}"' in text
        for number in ("wanted", "actual", "demand"):
            assert re.search(rf'ray_paceline_scaling_{number}_replicas{{[^}}]*pool="{kind}"}}', text), (kind, number)


def of_the_page():
    """Series of the service's own page of metrics -> their labels."""
    known = {}
    for name, metric in CATALOGUE.items():
        endings = ("_bucket", "_sum", "_count") if metric.kind is Kind.HISTOGRAM else ("",)
        labels = {"job", *metric.labels, *(["replica_id"] if metric.per_replica else [])}
        known.update((name + ending, labels) for ending in endings)
    return known


def test_one_address_shows_what_the_fleet_shows_by_the_names_of_its_own_page():
    board = json.loads((REPOSITORY / "cluster" / "grafana.json").read_text())
    fleet = [panel["title"] for panel in dashboard()["panels"]]
    own = [panel["title"] for panel in board["panels"]]
    assert own == fleet[: fleet.index("Ray and Kubernetes")]
    known = of_the_page()
    asked = [target["expr"] for panel in board["panels"] if panel["type"] != "row" for target in panel["targets"]]
    assert len(asked) > 40
    for expression in asked:
        assert "ray_" not in expression
        assert "ReplicaId" not in expression
        check(expression.replace("$__rate_interval", "1m").replace("$job", "paceline"), known)
    assert [variable["name"] for variable in board["templating"]["list"]] == ["datasource", "job"]
    scraped = yaml.safe_load((REPOSITORY / "cluster" / "prometheus.yml").read_text())["scrape_configs"]
    assert [(job["job_name"], job["static_configs"][0]["targets"]) for job in scraped] == [
        ("paceline", [f"127.0.0.1:{ServerConfig().http_port}"])
    ]


def test_every_alert_has_a_page_that_says_what_to_do():
    pages = {path.stem for path in (REPOSITORY / "docs" / "runbook").glob("*.md")} - {"README"}
    linked = {rule["annotations"]["runbook_url"].rsplit("/", 1)[1] for rule in alerts().values()}
    assert linked == pages
    index = (REPOSITORY / "docs" / "runbook" / "README.md").read_text()
    for name, rule in alerts().items():
        page = rule["annotations"]["runbook_url"].rsplit("/", 1)[1]
        text = (REPOSITORY / "docs" / "runbook" / f"{page}.md").read_text()
        assert text.startswith(f"# {name}\n"), page
        for section in ("## What it means", "## What users see", "## First look", "## Causes", "## What to do"):
            assert section in text, (page, section)
        assert f"({page}.md)" in index
        assert name in index
        assert {"summary", "description"} <= rule["annotations"].keys()
        assert rule["labels"]["severity"] in ("info", "warning", "critical")


def test_pages_name_only_metrics_that_are_exported():
    known = {name.removeprefix("ray_") for name in exported()} | set(exported())
    recorded = {rule["record"] for group in rules() for rule in group["rules"] if "record" in rule}
    for path in (REPOSITORY / "docs" / "runbook").glob("*.md"):
        for name in re.findall(r"`((?:ray_)?(?:vllm|paceline)[:_][a-z0-9_:]+)", path.read_text()):
            assert name in known | set(CATALOGUE) | recorded, (path.name, name)


def test_pods_are_scraped_by_ports_that_they_have():
    from tests.k8s.support import service_of, templates_of

    templates = templates_of(service_of(overlay("monitoring")))
    monitors = of_kind(overlay("monitoring"), "PodMonitor")
    for name, groups in (("paceline-head", ["head"]), ("paceline-workers", ["router", "draft", "target"])):
        ports = {endpoint["port"] for endpoint in monitors[name]["spec"]["podMetricsEndpoints"]}
        for group in groups:
            template = templates[group]
            assert ports <= {port["name"] for port in template["spec"]["containers"][0]["ports"]}
            own = monitors[name]["spec"]["selector"]["matchLabels"]
            added = {"ray.io/node-type": "head" if group == "head" else "worker"}  # by KubeRay
            assert own.items() <= (template["metadata"]["labels"] | added).items()


@pytest.mark.slow
@pytest.mark.skipif(PROMTOOL is None, reason="promtool is missing: make promtool")
def test_alerts_fire_when_they_should_and_only_then(tmp_path):
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": rules()}))
    tests = (K8S / "rules_test.yaml").read_text()
    (tmp_path / "rules_test.yaml").write_text(tests)
    for command in (["check", "rules", "rules.yaml"], ["test", "rules", "rules_test.yaml"]):
        done = subprocess.run([PROMTOOL, *command], cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
    tested = {case["alertname"] for test in yaml.safe_load(tests)["tests"] for case in test["alert_rule_test"]}
    assert tested == set(alerts())


OF_PODS_AND_RAY = {"PacelineHeadDown", "PacelineAutoscalerDown", "PacelinePodsPending", "PacelineNotReady"}


def test_alerts_without_kubernetes_name_what_the_page_of_one_service_has():
    groups = yaml.safe_load((REPOSITORY / "cluster" / "rules.yaml").read_text())["groups"]
    found = [rule for group in groups for rule in group["rules"]]
    assert {rule["alert"] for rule in found if "alert" in rule} == set(alerts()) - OF_PODS_AND_RAY
    known = of_the_page() | {"up": {"job"}} | {rule["record"]: {"cause"} for rule in found if "record" in rule}
    for rule in found:
        check(rule["expr"], known)
        assert not re.search(r"namespace|ray_|ReplicaId", str(rule)), rule
    scraped = yaml.safe_load((REPOSITORY / "cluster" / "prometheus.yml").read_text())
    assert scraped["rule_files"] == ["rules.yaml"]


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is missing: make promtool")
def test_alerts_without_kubernetes_fire_as_those_of_the_chart(tmp_path):
    """The chart's own tests, by the names and labels of one service."""
    shutil.copy(REPOSITORY / "cluster" / "rules.yaml", tmp_path)
    text = generate.of_one_address((K8S / "rules_test.yaml").read_text())
    text = re.sub(r'namespace="paceline", ray_io_cluster="([\w-]+)"', r'job="\1"', text)
    text = re.sub(r"namespace: paceline, ray_io_cluster: ([\w-]+)", r"job: \1", text)
    tests = yaml.safe_load(re.sub(r"(?m)^( +values: )([^#\n]+)", r'\1"\2"', text))  # 0x120 is a number else
    names = [{case["alertname"] for case in test["alert_rule_test"]} for test in tests["tests"]]
    kept = [
        not those & OF_PODS_AND_RAY and "namespace" not in str(test)
        for those, test in zip(names, tests["tests"], strict=True)
    ]
    tests["tests"] = [test for test, keep in zip(tests["tests"], kept, strict=True) if keep]
    assert {case["alertname"] for test in tests["tests"] for case in test["alert_rule_test"]} >= {
        *("PacelineAcceptanceCollapse", "PacelineDraftPoolDown", "PacelineErrorBudget", "PacelineKVPressure"),
        *("PacelineQueueGrowth", "PacelineSlowFirstToken", "PacelineTargetPoolDown"),
    }
    (tmp_path / "rules_test.yaml").write_text(yaml.safe_dump(tests))
    done = subprocess.run(
        [PROMTOOL, "test", "rules", "rules_test.yaml"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
