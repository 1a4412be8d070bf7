"""One cluster and one application for all tests here: a tiny fp32 pair, two routers, no compiling."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.models import save_pair
from tests.support.spans import collector

from paceline.cluster.environment import serve_environment
from paceline.cluster.ports import free_ports

ON_RAY = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
"""The marks of tests that start a cluster, whose packages warn."""
START_S = 600
"""Generous: on a loaded machine of two cores every process needs seconds to import torch."""


def config_for(pair: Path, **changes):
    """A ServiceConfig as plain data; ``changes`` by top-level key."""
    grpc_port, http_port = free_ports(2)
    engine = {"dtype": "float32", "compile": False}
    deployment = {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0.0}, "graceful_shutdown_timeout_s": 60.0}
    return {
        "target_config": {
            "model_loading_config": {"model_id": "tests/target.v1", "model_source": str(pair / "target")},
            # What one test makes of its draft is no lesson for the next.
            "engine_kwargs": engine | {"max_sessions": 24, "adaptive": False, "batch_invariant": "off"},
            "deployment_config": deployment,
        },
        "draft_config": {
            "model_loading_config": {"model_id": "tests/draft", "model_source": str(pair / "draft")},
            "engine_kwargs": engine,
            "deployment_config": deployment,
        },
        "router_config": {"deployment_config": deployment | {"num_replicas": 2}, "max_queued_requests": 256},
        "server": {
            "host": "127.0.0.1",
            "grpc_port": grpc_port,
            "http_port": http_port,
            "grpc_max_connection_age_s": 3.0,
        },
    } | changes


@dataclass
class App:
    """The running application, for tests: its endpoints, and a look behind them."""

    config: dict
    pair: Path
    exported: list
    """Messages that routers and replicas have sent to the collector of traces."""

    TARGET = "Target:tests--target_v1"
    DRAFT = "Draft:tests--draft"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.config['server']['grpc_port']}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.config['server']['http_port']}"

    async def ask(self, deployment: str, method: str, *args):
        """What every replica of a deployment answers."""
        from ray import serve

        handle = serve.get_deployment_handle(deployment, "paceline")
        handle = handle.options()  # starts its request router
        return await handle.broadcast(method, *args).results_async(timeout_s=60)

    async def scale(self, deployment: str, num_replicas: int) -> None:
        """As the dashboard's scaling API does."""
        from ray.serve._private.common import DeploymentID
        from ray.serve.context import _get_global_client

        controller = _get_global_client()._controller
        await controller.update_deployment_replicas.remote(DeploymentID(deployment, "paceline"), num_replicas)

    async def states(self, deployment: str) -> dict[str, int]:
        """How many of its replicas are in each state."""
        from ray import serve

        application = (await asyncio.to_thread(serve.status)).applications["paceline"]
        states = application.deployments[deployment].replica_states
        return {str(getattr(state, "value", state)): count for state, count in states.items() if count}


async def until(condition, timeout_s: float = 60.0, what: str = ""):
    """Waits until ``condition``, a function or coroutine function, is true; returns what it gave."""
    end = time.monotonic() + timeout_s
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        assert time.monotonic() < end, f"not within {timeout_s} s: {what or condition}"
        await asyncio.sleep(0.05)


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def app(pair):
    """The application on a cluster of its own, ready."""
    folder = Path(tempfile.mkdtemp(prefix="pl-"))  # sockets need short paths
    with pytest.MonkeyPatch.context() as patch:  # in this process handles outlive the loop of a test
        patch.setenv("RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP", "1")
        from ray import serve
    own = {**serve_environment(folder), "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    own["RAY_gcs_server_port_wait_time_s"] = str(START_S)  # Ray's own wait of 30 s may pass on a machine that is busy
    import ray

    from paceline.cluster.app import APPLICATION, GRPC_SERVICES, build
    from paceline.cluster.first_node import start_ray

    stack = ExitStack()
    url, exported = stack.enter_context(collector())
    # traces of requests whose callers ask for them, and of no others
    config = config_for(pair, tracing={"endpoint": url, "protocol": "grpc", "sample_ratio": 0.0, "first_rounds": 1})
    server = config["server"]
    try:
        with pytest.MonkeyPatch.context() as patch:  # what tests start later must not take the ports of this one
            for name, value in own.items():
                patch.setenv(name, value)
            start_ray(
                include_dashboard=False,
                num_cpus=1,
                num_gpus=4,  # counted, not there
                object_store_memory=80 << 20,
                log_to_driver=False,
                _temp_dir=str(folder / "ray"),
            )
            serve.start(
                proxy_location="HeadOnly",
                http_options={"host": server["host"], "port": server["http_port"]},
                grpc_options={"port": server["grpc_port"], "grpc_servicer_functions": GRPC_SERVICES},
            )
        serve.run_many(
            [serve.RunTarget(build(config), name=APPLICATION, route_prefix="/", external_scaler_enabled=True)],
            wait_for_applications_running=False,
        )
        running = App(config, pair, exported)
        asyncio.run(_ready(running))
        yield running
    finally:
        serve.shutdown()
        ray.shutdown()
        stack.close()
        shutil.rmtree(folder, ignore_errors=True)


async def _ready(app: App) -> None:
    from ray import serve

    async def all_ready():
        application = (await asyncio.to_thread(serve.status)).applications["paceline"]
        assert application.status != "DEPLOY_FAILED", application.message
        if application.status != "RUNNING":
            return False
        return all(seen.get("target") and seen.get("draft") for seen in await app.ask("Router", "statuses"))

    await until(all_ready, START_S, "the application is ready")


def letters(count: int, start: int = 0) -> str:
    """A prompt of ``count`` letters."""
    return "".join(itertools.islice(itertools.cycle("thequickbrownfoxjumpsoverthelazydog"), start, start + count))
