"""A service from nothing to "ready" and back: Ray, Serve and the application.

    Ray ─▶ Serve ─▶ replicas load ─▶ "ready" ─▶ watch ─▶ stop

It stops everything that it started: its own Ray entirely, or, on a cluster that it joined, only its application.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, Self

from paceline.cluster import janitor
from paceline.cluster.encryption import tls_settings
from paceline.cluster.environment import local_environment, serve_environment, socket_folder
from paceline.cluster.first_node import start_ray
from paceline.cluster.private import protect_token, session_folder
from paceline.cluster.ray_output import divert
from paceline.cluster.watch import StatusSource, Watch, first_line, gist, tell
from paceline.config import ServiceConfig
from paceline.errors import ConfigError, EngineError, PacelineError
from paceline.rpc.loopback import LOOPBACK
from paceline.security import haproxy

log = logging.getLogger(__name__)

_POLL_S, _READY_POLL_S = 0.5, 3.0
_GOODBYE_S = 10.0
_OBJECT_STORE_BYTES = 80 << 20
_MANY = 16


def reserved_cpus(config: ServiceConfig) -> int:
    """Cores that the maximum number of replicas reserves, at most 16 of a kind."""
    reserved = config.reserved_cpus(lambda deployment: min(deployment.most_replicas, _MANY))
    return max(1, math.ceil(reserved - 1e-9))


class Service:
    """Ray, Serve and the application, from nothing to "ready" and back. A context manager."""

    def __init__(
        self,
        config: ServiceConfig,
        *,
        address: str | None = None,
        dashboard: bool = False,
        verbose: bool = False,
        ray_options: dict[str, Any] | None = None,
        show: Callable[[str, str], None] | None = None,
        on_ready: Callable[[], None] | None = None,
    ) -> None:
        """``address``: of the Ray cluster to join; None starts one. ``ray_options``: more for ``ray.init``. ``show``
        receives the progress of the start (``watch.Watch``). ``on_ready`` is called after "ready" is printed.
        """
        self.config = config
        self._address, self._dashboard, self._verbose = address, dashboard, verbose
        self._ray_options = ray_options or {}
        self._show, self._on_ready = show, on_ready
        self._folder = socket_folder()
        self._janitor: subprocess.Popen[bytes] | None = None
        self._signals: list[int] = []
        self._deployed = self._announced = False
        self._stopping: asyncio.Event | None = None
        self._status = StatusSource()

    # -- life ----------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Starts Ray and Serve, and deploys, without waiting for the replicas. Raises ConfigError or EngineError."""
        self._janitor = subprocess.Popen(
            [sys.executable, "-I", "-S", janitor.__file__, str(self._folder)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        local, server = self._address is None, self.config.server
        if local:
            environment = local_environment(self._folder, server)
        else:
            environment = serve_environment(self._folder, server.max_message_bytes)
        environment |= haproxy.tls_environment(*tls_settings(self.config))
        os.environ.update(environment)
        signal.signal(signal.SIGTERM, self._interrupt)
        import ray

        with _environment("RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP", "1"):  # here handles outlive the loop of ``run``
            from ray import serve
        from ray.serve.config import gRPCOptions

        from paceline.cluster.app import APPLICATION, GRPC_SERVICES, build

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        logs_folder = session_folder().parent
        if not self._verbose:
            divert(logs_folder)
        options: dict[str, Any] = {"log_to_driver": self._verbose, "logging_level": logging.WARNING}
        if not local:  # the processes of a cluster that runs have not been started with it
            options["runtime_env"] = {"env_vars": environment}
        else:
            options |= {
                "include_dashboard": self._dashboard,
                "num_cpus": reserved_cpus(self.config),
                "object_store_memory": _OBJECT_STORE_BYTES,
                "_node_ip_address": LOOPBACK,
                "_temp_dir": str(session_folder()),
                "runtime_env": {"worker_process_setup_hook": "paceline.rpc.loopback.keep_local"},
            }
        if local:
            protect_token()
        tell("starting Ray on this machine" if local else f"joining the Ray cluster at {self._address}")
        tell(f"what Ray and Serve log is in {logs_folder}")
        try:
            options |= self._ray_options
            if local:
                start_ray(**options)
            else:
                ray.init(address=self._address, **options)
        except Exception as error:
            if local:
                raise EngineError(f"Ray could not be started on this machine: {gist(str(error))}") from error
            raise ConfigError(
                f"--address {self._address}: no Ray cluster answers there ({first_line(error)})"
            ) from error
        signal.signal(signal.SIGTERM, self._interrupt)  # Ray has set its own
        try:
            serve.start(
                proxy_location="HeadOnly" if local else "EveryNode",
                http_options={"host": LOOPBACK if local else server.host, "port": server.http_port},
                grpc_options=gRPCOptions(port=server.grpc_port, grpc_servicer_functions=GRPC_SERVICES),
            )
            self._deployed = True
            serve.run_many(
                [serve.RunTarget(target=build(self.config), name=APPLICATION, route_prefix="/")],
                wait_for_ingress_deployment_creation=False,
                wait_for_applications_running=False,
            )
        except PacelineError:
            raise
        except Exception as error:
            raise EngineError(f"Ray Serve could not be started: {gist(str(error))}") from error

    def run(self) -> signal.Signals:
        """Serves until a signal arrives, and returns it. Raises ConfigError or EngineError if it cannot go on."""
        with asyncio.Runner() as runner:
            runner.run(self._run())
        return signal.SIGINT if signal.SIGINT in self._signals else signal.SIGTERM

    def stop(self) -> None:
        """Removes what ``start`` has started. Idempotent. A second interrupt does without a goodbye."""
        import ray

        if ray.is_initialized():
            tell("stopping")
            with _quiet(), contextlib.suppress(KeyboardInterrupt):
                self._drain()
                self._stop_serve()
            with _quiet():
                ray.shutdown()
        if self._janitor is not None:
            self._janitor.communicate(b"x")
            self._janitor = None

    def _drain(self) -> None:
        """Waits until the requests in progress have ended. Routers refuse new ones during that time."""
        from ray import serve

        from paceline.cluster.app import APPLICATION

        if not self._announced:
            return
        timeout_s = self.config.server.drain_timeout_s
        try:
            routers = serve.get_app_handle(APPLICATION).broadcast("drain", timeout_s)
            routers.results(timeout_s=timeout_s + _GOODBYE_S, return_exceptions=True)
        except Exception as error:  # Ray may be gone
            log.info("the requests in progress could not be waited for: %s", error)

    def _stop_serve(self) -> None:
        from ray import serve

        from paceline.cluster.app import APPLICATION

        try:
            if self._address is None or not set(self._status.ask().result(_GOODBYE_S).applications) - {APPLICATION}:
                serve.shutdown()
            elif self._deployed:
                serve.delete(APPLICATION)
        except Exception as error:  # Ray may be gone
            log.info("Serve could not be stopped: %s", error)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)
        if self._stopping is None or len(self._signals) > 1:
            raise KeyboardInterrupt
        self._stopping.set()

    # -- from deployment to ready, and after ---------------------------------------------------------------

    async def _run(self) -> None:
        from paceline.cluster.app import APPLICATION

        self._stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupt, number, None)
        try:
            watch = Watch(APPLICATION, self._status.ask, show=self._show)
            while not self._stopping.is_set():
                await watch.poll()
                if watch.became_ready():
                    self._announce()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), _READY_POLL_S if watch.is_ready else _POLL_S)
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
                signal.signal(number, self._interrupt)

    def _announce(self) -> None:
        self._announced = True
        server = self.config.server
        print(f"gRPC     {server.host}:{server.grpc_port}  paceline.v1.GenerationService, reflection, health")
        scheme = "https" if server.tls is not None and server.tls.http else "http"
        print(f"HTTP     {scheme}://{server.host}:{server.http_port}/v1  OpenAI-compatible; /metrics, /health")
        print("ready", flush=True)
        if self._on_ready is not None:
            self._on_ready()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Ray reports the end of its own processes as errors, some of them on standard output."""
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        yield


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Sets a variable in this process for the block. Processes that are started later do not see it."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
