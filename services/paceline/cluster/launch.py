"""``paceline serve``: the service on this machine, or on a Ray cluster that runs already, until it is told to stop.

    flags, file ─▶ configuration ─▶ checks ─▶ Ray ─▶ Serve ─▶ replicas load ─▶ "ready" ─▶ watch ─▶ stop

What it started it stops: with a Ray of its own nothing is left running, on a cluster that it joined only its
application is removed. Exit status: 0 stopped by SIGTERM, 130 by Ctrl-C; the others as in ``cli.py``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import logging
import math
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from paceline.cluster import janitor
from paceline.config import EMBEDDED_DRAFT, ModelDraftConfig, NgramDraftConfig, ServiceConfig
from paceline.errors import ConfigError, EngineError, PacelineError
from paceline.preflight.service import require_service

if TYPE_CHECKING:
    from paceline.types import Startup

log = logging.getLogger(__name__)

LONGEST_STREAM_S = 24 * 3600
"""Streams that are older than this may be cut when routers come or go."""

_EXIT_INTERRUPTED = 130
_POLL_S, _READY_POLL_S, _REPEAT_S = 0.5, 3.0, 10.0
_GONE_AFTER_S = 10.0
"""Without an answer for so long Ray is taken for dead."""
_OBJECT_STORE_BYTES = 80 << 20
_DRAIN_S = 2.0
_MANY = 16
_PORTS, _BLOCK_PORTS, _BLOCK = (26000, 32000), (10000, 26000), 64


def add_parser(commands: Any) -> None:
    """Adds ``serve`` to the commands."""
    parser = commands.add_parser(
        "serve",
        help="run the service",
        description="Runs the service on this machine, or on a Ray cluster, until it is interrupted.",
    )
    add_config_flags(parser)
    group = parser.add_argument_group("Ray")
    group.add_argument("--address", metavar="RAY_ADDRESS", help="join this Ray cluster (default: start one here)")
    group.add_argument("--dashboard", action="store_true", help="also start Ray's dashboard")
    group.add_argument(
        "--print-environment",
        action="store_true",
        help="print, for a shell, what the processes of a Ray cluster need for `serve deploy`, and end",
    )
    parser.add_argument("--verbose", action="store_true", help="print what the replicas log")
    parser.set_defaults(run=run_serve)


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """Adds what ``read_config`` reads."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML: the configuration, or a Serve config file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change one key of it (repeatable)"
    )
    group = parser.add_argument_group("models")
    group.add_argument("--target", metavar="ID_OR_PATH", help="target model (default: the embedded one)")
    group.add_argument("--draft", metavar="ID_OR_PATH", help="draft model (default: the embedded one)")
    group.add_argument("--drafter", choices=["model", "ngram", "none"], help="what proposes tokens")
    group.add_argument("--dtype", choices=["auto", "float32", "bfloat16"])
    group.add_argument("--compile", action=argparse.BooleanOptionalAction, help="compile the models (default: on CPUs)")
    group.add_argument("--tensor-parallel-size", type=int, metavar="N", help="ranks of a target replica (default 1)")
    group = parser.add_argument_group("replicas")
    for pool in ("target", "draft", "router"):
        text = f"{pool} replicas, or bounds within which their number follows the load (default 1)"
        group.add_argument(f"--{pool}s", type=_size, metavar="N|MIN:MAX", help=text)
    group = parser.add_argument_group("where")
    group.add_argument("--host", metavar="ADDRESS", help="address to listen on (default 0.0.0.0)")
    group.add_argument("--grpc-port", type=int, metavar="N", help="default 9000")
    group.add_argument("--http-port", type=int, metavar="N", help="metrics and health; default 8000")


def _size(text: str) -> int | tuple[int, int]:
    """Of a pool: a number of replicas, or the fewest and the most. Raises ArgumentTypeError."""
    try:
        least, separator, most = text.partition(":")
        return (int(least), int(most)) if separator else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: a number is needed, or two such as 1:3") from None


def _sized(pool: str, size: int | tuple[int, int] | None) -> dict[str, Any]:
    """Settings of a pool's deployment. A number takes the place of bounds in the file, and bounds that of a number."""
    if size is None:
        return {}
    key = f"{pool}_config.deployment_config."
    if isinstance(size, int):
        return {key + "autoscaling_config": None, key + "num_replicas": size}
    least, most = size
    bounds = {"min_replicas": least, "max_replicas": most}
    return {key + "num_replicas": None} | {f"{key}autoscaling_config.{name}": value for name, value in bounds.items()}


def read_config(args: argparse.Namespace) -> ServiceConfig:
    """What file and flags say together; flags win. Raises ConfigError."""
    config = ServiceConfig() if args.config is None else ServiceConfig.from_file(args.config)
    if args.draft is not None and args.drafter not in (None, "model"):
        raise ConfigError(f"--draft {args.draft} is given with --drafter {args.drafter}, which needs no model")
    overrides, draft = list(args.set), config.draft_config
    if args.drafter == "ngram" and not isinstance(draft, NgramDraftConfig):
        overrides.insert(0, _override("draft_config", {"kind": "ngram"}))
    elif args.draft is not None and not isinstance(draft, ModelDraftConfig):
        overrides.insert(0, _override("draft_config", {"kind": "model"}))
    if args.target is not None:
        overrides.append(_override("target_config.model_loading_config", _loading("--target", args.target)))
    if args.drafter == "none" or args.drafts == 0:
        overrides.append(_override("draft_config", None))
    elif args.draft is not None:
        overrides.append(_override("draft_config.model_loading_config", _loading("--draft", args.draft)))
    config = config.with_overrides(overrides)
    return config.with_overrides(_further(args, config))


def _further(args: argparse.Namespace, config: ServiceConfig) -> list[str]:
    """Overrides that depend on what there is to override."""
    values: dict[str, Any] = {
        "target_config.engine_kwargs.dtype": args.dtype,
        "target_config.engine_kwargs.compile": args.compile,
        "target_config.engine_kwargs.tensor_parallel_size": args.tensor_parallel_size,
        "server.host": args.host,
        "server.grpc_port": args.grpc_port,
        "server.http_port": args.http_port,
    }
    draft = config.draft_config
    if isinstance(draft, ModelDraftConfig):
        values["draft_config.engine_kwargs.dtype"] = args.dtype
        values["draft_config.engine_kwargs.compile"] = args.compile
    given = {key: value for key, value in values.items() if value is not None}
    given |= _sized("target", args.targets) | _sized("router", args.routers)
    given |= {} if draft is None else _sized("draft", args.drafts)
    if any(key.startswith("draft_config.") for key in given) and "draft_config" not in config.model_fields_set:
        given = {"draft_config.model_loading_config": {"model_id": EMBEDDED_DRAFT}} | given
    return [_override(key, value) for key, value in given.items()]


def _override(key: str, value: Any) -> str:
    return f"{key}={json.dumps(value)}"


def _loading(flag: str, value: str) -> dict[str, str]:
    """A directory is known to clients by its last part."""
    if not value:
        raise ConfigError(f"{flag} is empty: a model id or a directory is needed")
    folder = Path(value).expanduser()
    return {"model_id": folder.resolve().name, "model_source": str(folder)} if folder.is_dir() else {"model_id": value}


def run_serve(args: argparse.Namespace) -> int:
    """``paceline serve``."""
    if args.print_environment:
        for name, value in serve_environment(_socket_folder()).items():
            print(f"export {name}={shlex.quote(value)}")
        return 0
    config = read_config(args)
    local = args.address is None
    require_service(config, memory=local, cores=False, ports=local)  # our own Ray is told of as many cores as it takes
    with Service(config, address=args.address, dashboard=args.dashboard, verbose=args.verbose) as service:
        return service.run()


# -- Ray and Serve --------------------------------------------------------------------------------------------------


def serve_environment(folder: Path) -> dict[str, str]:
    """What every process of the cluster has to be started with, this one included, before it imports Serve.

    ``folder`` takes what HAProxy keeps on disk. Only set what the user has not set.
    """
    stats_port, metrics_port, fallback_http_port, fallback_grpc_port = free_ports(4)
    # Routers listen with SO_REUSEPORT on the first port of Serve's range: two clusters of one machine would share it,
    # and each get some of the other's requests.
    router_ports = _free_block()
    middle = router_ports + _BLOCK // 2
    wanted = {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",  # Serve's Python proxy loses some cancellations
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",  # user code, Serve's code and both gRPC servers on one loop
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(LONGEST_STREAM_S),
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(LONGEST_STREAM_S),
        "RAY_SERVE_HAPROXY_H2_FE_MAX_CONCURRENT_STREAMS": "1000",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats_port),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics_port),
        "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(router_ports),
        "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(middle - 1),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(middle),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(router_ports + _BLOCK - 1),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_http_port),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(fallback_grpc_port),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(_DRAIN_S),
        "RAY_SERVE_PORT_QUARANTINE_S": "0",  # all routers belong to one application
        # Work that never rests, on the cores that the engines need: by default ten times a second in every process.
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
        "RAY_worker_niceness": "0",  # 15 by default: anything else on the machine would come before the engines
        "RAY_USAGE_STATS_ENABLED": "0",
        "MALLOC_ARENA_MAX": "2",  # by default every thread comes to hold some tens of MB that others cannot use
    }
    return {name: value for name, value in wanted.items() if name not in os.environ}


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Sets a variable for the block, in this process alone: what is started later does not see it."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _socket_folder() -> Path:
    """A new folder for sockets, whose paths must be short: HAProxy takes 97 characters, of which Serve adds 70."""
    base = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="paceline-", dir=base if len(base) <= 8 else "/tmp"))


def free_ports(count: int) -> list[int]:
    """Different ports that nobody uses now, below those that systems hand out to outgoing connections by themselves:
    what is free there stays free while Ray starts and takes dozens."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.randrange(*_PORTS)
        if port not in ports and _is_free(port):
            ports.append(port)
    return ports


def _free_block() -> int:
    """The first of _BLOCK ports in a row that nobody uses now."""
    while True:
        first = random.randrange(*_BLOCK_PORTS, _BLOCK)
        if all(_is_free(port) for port in range(first, first + _BLOCK)):
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        try:
            one.bind(("", port))
        except OSError:
            return False
    return True


def reserved_cpus(config: ServiceConfig) -> int:
    """Cores that the replicas reserve when there are as many as there may be, at most 16 of a kind."""
    total = 0.0
    for part in (config.target_config, config.draft_config, config.router_config):
        if part is None:
            continue
        options, scaling = part.deployment_options(), part.deployment_config.autoscaling_config
        bundles = options.get("placement_group_bundles")
        cpus = sum(b.get("CPU", 0.0) for b in bundles) if bundles else options["ray_actor_options"]["num_cpus"]
        replicas = part.deployment_config.num_replicas
        most = (scaling.max_replicas or 1) if scaling is not None else replicas if isinstance(replicas, int) else 1
        total += cpus * min(most, _MANY)
    return max(1, math.ceil(total - 1e-9))


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
    ) -> None:
        """``address``: of the Ray cluster to join; None starts one. ``ray_options``: more for ``ray.init``."""
        self.config = config
        self._address, self._dashboard, self._verbose = address, dashboard, verbose
        self._ray_options = ray_options or {}
        self._folder = _socket_folder()
        self._janitor: subprocess.Popen[bytes] | None = None
        self._signals: list[int] = []
        self._deployed = False
        self._stopping: asyncio.Event | None = None

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
        environment = serve_environment(self._folder)
        os.environ.update(environment)
        signal.signal(signal.SIGTERM, self._interrupt)
        import ray

        with _environment("RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP", "1"):  # here handles outlive the loop of ``run``
            from ray import serve
        from ray.serve.config import gRPCOptions

        from paceline.cluster.app import APPLICATION, GRPC_SERVICES, build

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        local = self._address is None
        options: dict[str, Any] = {"log_to_driver": self._verbose, "logging_level": logging.WARNING}
        if not local:  # the processes of a cluster that runs have not been started with it
            options["runtime_env"] = {"env_vars": environment}
        else:
            options |= {
                "include_dashboard": self._dashboard,
                "num_cpus": reserved_cpus(self.config),
                "object_store_memory": _OBJECT_STORE_BYTES,
            }
        _say("starting Ray on this machine" if local else f"joining the Ray cluster at {self._address}")
        try:
            ray.init(address=self._address or "local", **(options | self._ray_options))
        except ConnectionError as error:
            raise ConfigError(f"--address {self._address}: no Ray cluster answers there ({_first(error)})") from error
        signal.signal(signal.SIGTERM, self._interrupt)  # Ray has set its own
        server = self.config.server
        try:
            serve.start(
                proxy_location="HeadOnly" if local else "EveryNode",
                http_options={"host": server.host, "port": server.http_port},
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
            raise EngineError(f"Ray Serve could not be started: {_gist(str(error))}") from error

    def run(self) -> int:
        """Until it is interrupted; returns the exit status. Raises ConfigError or EngineError if it cannot go on."""
        with asyncio.Runner() as runner:
            runner.run(self._run())
        return _EXIT_INTERRUPTED if signal.SIGINT in self._signals else 0

    def stop(self) -> None:
        """Removes what ``start`` has started. Idempotent. A second interrupt does without a goodbye."""
        import ray

        if ray.is_initialized():
            _say("stopping")
            with _quiet(), contextlib.suppress(KeyboardInterrupt):
                self._stop_serve()
            with _quiet():
                ray.shutdown()
        if self._janitor is not None:
            self._janitor.communicate(b"x")
            self._janitor = None

    def _stop_serve(self) -> None:
        from ray import serve

        from paceline.cluster.app import APPLICATION

        try:
            others = set(serve.status().applications) - {APPLICATION}
            if self._address is None or not others:
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
        self._stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupt, number, None)
        try:
            watch = _Watch()
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
        server = self.config.server
        print(f"gRPC     {server.host}:{server.grpc_port}  paceline.v1.GenerationService, reflection, health")
        print(f"metrics  http://{server.host}:{server.http_port}/metrics")
        print("ready", flush=True)


class _Watch:
    """Asks Serve and the monitor how things are, and says what has changed."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self.is_ready = self._announced = False
        self._running: dict[str, tuple[int, int]] = {}
        self._said: dict[str, tuple[str, float]] = {}
        self._answered = time.monotonic()

    def became_ready(self) -> bool:
        """True once."""
        first, self._announced = self.is_ready and not self._announced, self.is_ready
        return first

    async def poll(self) -> None:
        """One round of questions. Raises ConfigError or EngineError if the service cannot come up or is gone."""
        from ray import serve

        from paceline.cluster.app import APPLICATION

        try:
            status = await asyncio.wait_for(asyncio.to_thread(serve.status), 10)
            self._answered = time.monotonic()
        except Exception as error:
            if time.monotonic() - self._answered > _GONE_AFTER_S:
                raise EngineError(f"Ray does not answer any more: {_first(error)}") from error
            return
        application = status.applications.get(APPLICATION)
        if application is None:
            return
        for name, deployment in application.deployments.items():
            self._look_at(name, deployment)
        if _name(application.status) == "DEPLOY_FAILED":
            messages = [d.message for d in application.deployments.values() if _name(d.status) == "DEPLOY_FAILED"]
            raise reason_of("\n".join([application.message, *messages]))
        if not self.is_ready:
            await self._look_at_start(application)

    def _look_at(self, name: str, deployment: Any) -> None:
        states = {_name(state): count for state, count in deployment.replica_states.items()}
        running = states.get("RUNNING", 0)
        now = (running, sum(count for state, count in states.items() if state != "STOPPING"))
        before, self._running[name] = self._running.get(name), now
        if before is not None and before != now and name != "Monitor":
            fewer = " (a replica has ended)" if running < before[0] and now[1] >= before[1] else ""
            _say(f"{name}: {running} of {now[1]} running{fewer}")
        message = deployment.message
        if not self.is_ready and "ConfigError" in message:  # a further try would fail like the first
            raise reason_of(message)
        if message and (running < now[1]):
            self._say_once(name, _gist(message))

    async def _look_at_start(self, application: Any) -> None:
        from ray import serve

        from paceline.cluster.app import APPLICATION

        if self._running.get("Monitor", (0, 0))[0]:
            monitor = serve.get_deployment_handle("Monitor", APPLICATION)
            with contextlib.suppress(Exception):
                starting: list[Startup] = await asyncio.wait_for(monitor.starting.remote(), 2)
                for startup in starting:
                    self._say_once(startup.replica_id, f"{startup.kind} {startup.replica_id}: {startup.doing}")
        if _name(application.status) == "RUNNING":
            router = serve.get_deployment_handle("Router", APPLICATION)
            with contextlib.suppress(Exception):
                self.is_ready = await asyncio.wait_for(router.is_ready.remote(), 2)

    def _say_once(self, key: str, text: str) -> None:
        """Again after a while, with the time since the start: a user wants to see that it is alive."""
        said, when = self._said.get(key, ("", 0.0))
        now = time.monotonic()
        if text and (text != said or now - when > _REPEAT_S):
            self._said[key] = (text, now)
            _say(f"{text} ({now - self._started:.0f} s)")


def reason_of(message: str) -> PacelineError:
    """The error of ours in a traceback as Serve reports it, else its last line as an EngineError."""
    found = re.findall(r"paceline\.errors\.(\w+): (.+)", message)
    if found:
        name, text = found[-1]
        return ConfigError(text) if name in ("ConfigError", "TokenizerMismatchError") else EngineError(text)
    return EngineError(_gist(message) or "the application could not be deployed, and Serve does not say why")


def _gist(message: str) -> str:
    """The line of a message from Serve that says most: the last one of a traceback, else the first."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if not lines:
        return ""
    errors = [line for line in lines if re.match(r"([\w.]+(Error|Exception): |\[ALERT\])", line)]
    return errors[-1] if errors else lines[0]


def _name(state: Any) -> str:
    return str(getattr(state, "value", state))


def _first(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _say(text: str) -> None:
    print(f"paceline: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Ray reports the end of its own processes as errors."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield
