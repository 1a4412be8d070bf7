"""What deploying a configuration over a running one replaces: the statements of docs/operations.md, computed."""

import http.server
import json
import threading
import warnings

import pytest
import yaml

from paceline.config import ServiceConfig
from paceline.errors import ConfigError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about Ray's own models
    from ray.serve._private.version import DeploymentVersion

    from paceline.cluster.changes import compare, running_config

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray's own models

TARGET, DRAFT = "Target:paceline--embedded-target", "Draft:paceline--embedded-draft"


def outcomes(*overrides, before=()):
    """Deployments that do not stay as they are."""
    running = ServiceConfig().with_overrides(before)
    changes = compare(running, running.with_overrides(overrides)).changes
    return {change.deployment: change.outcome for change in changes if change.outcome != "kept"}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("draft_config.engine_kwargs.tree_budget=9", {DRAFT: "replaced"}),
        ("draft_config={kind: ngram}", {"Router": "replaced", DRAFT: "removed", "Draft:ngram": "added"}),
        ("draft_config=null", {"Router": "replaced", DRAFT: "removed"}),
        (
            "target_config.engine_kwargs.max_sessions=5",
            {"Router": "replaced", TARGET: "replaced", DRAFT: "replaced", "Monitor": "changed in place"},
        ),
        ("router_config.max_queued_requests=7", {"Router": "replaced"}),
        ("tracing={sample_ratio: 0.5}", {"Router": "replaced", TARGET: "replaced", DRAFT: "replaced"}),
        ("target_config.deployment_config.num_replicas=3", {TARGET: "resized"}),
        ("target_config.deployment_config.graceful_shutdown_timeout_s=7", {TARGET: "changed in place"}),
        ("target_config.deployment_config.ray_actor_options.num_cpus=2", {TARGET: "replaced"}),
        ("log.level=DEBUG", {"Router": "replaced", TARGET: "replaced", DRAFT: "replaced", "Monitor": "replaced"}),
    ],
)
def test_what_a_change_replaces(override, expected):
    assert outcomes(override) == expected


def test_the_same_configuration_changes_nothing():
    found = compare(ServiceConfig(), ServiceConfig())
    assert found.keys == ()
    assert {change.outcome for change in found.changes} == {"kept"}


def test_serve_itself_is_asked_what_needs_a_restart(monkeypatch):
    monkeypatch.setattr(DeploymentVersion, "requires_actor_restart", lambda self, new: False)
    assert set(outcomes("router_config.max_queued_requests=7").values()) == {"changed in place"}


def test_keys_are_named():
    running = ServiceConfig()
    wanted = running.with_overrides(
        ["router_config.max_queued_requests=7", "target_config.engine_kwargs.max_sessions=5"]
    )
    assert compare(running, wanted).keys == (
        "router_config.max_queued_requests",
        "target_config.engine_kwargs.max_sessions",
    )


def meanwhile(pool, *overrides):
    running = ServiceConfig().with_overrides(overrides)
    wanted = running.with_overrides(["target_config.engine_kwargs.max_sessions=5"])
    return next(change.how for change in compare(running, wanted).changes if change.deployment.startswith(pool))


def test_what_sessions_see_meanwhile():
    assert meanwhile("Draft") == "plain decoding until its successor serves"
    assert meanwhile("Target").startswith(
        "the only one stops before its successor serves: set max_surge_percent to 100"
    )
    surge = "target_config.deployment_config.max_surge_percent=25"
    assert meanwhile("Target", surge).startswith("successors start first, with room for 1 more")
    five = "target_config.deployment_config.num_replicas=5"
    assert meanwhile("Target", surge, five).startswith("successors start first, with room for 2 more")
    assert meanwhile("Target", five) == "one after the other; sessions continue on the other replicas"


@pytest.fixture
def dashboard():
    """An address that answers as the dashboard of a cluster does, and what it answers."""
    answer = {"applications": {}}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = json.dumps({"version": "4", "ray_version": "2.60.0"} if "version" in self.path else answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", answer
        server.shutdown()


def test_a_running_service_is_asked_for_its_configuration(dashboard):
    address, answer = dashboard
    args = {"router_config": {"max_queued_requests": 7}}
    answer["applications"] = {"paceline": {"deployed_app_config": {"import_path": "paceline.app:build", "args": args}}}
    assert running_config(address) == ServiceConfig.parse(args)


def test_an_address_that_does_not_tell(dashboard):
    address, answer = dashboard
    with pytest.raises(ConfigError, match="runs no application 'paceline'; its applications: none"):
        running_config(address)
    answer["applications"] = {"paceline": {"deployed_app_config": None}}
    with pytest.raises(ConfigError, match="was not deployed from a file: give the file"):
        running_config(address)
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:1 does not say what it runs: "):
        running_config("http://127.0.0.1:1")


def test_a_file_that_was_deployed(tmp_path):
    args = {"router_config": {"max_queued_requests": 7}}
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump({"applications": [{"import_path": "paceline.app:build", "args": args}]}))
    assert running_config(str(path)) == ServiceConfig.parse(args)
