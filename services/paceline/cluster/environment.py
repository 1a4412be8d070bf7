"""Environment variables that every process of a Ray cluster must have before it imports Serve."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.cluster.ports import BLOCK, free_block, free_ports
from paceline.config.service import ServerConfig
from paceline.rpc.loopback import LOOPBACK
from paceline.security import haproxy

LONGEST_STREAM_S = 24 * 3600
"""Streams that are older than this may be cut when routers come or go."""

_DRAIN_S = 2.0
_NUM_PORTS = 4


def local_environment(folder: Path, server: ServerConfig) -> dict[str, str]:
    """The variables of ``serve_environment`` for a Ray that this machine alone reaches.

    Serve is told to open its public ports on the loopback like all others; HAProxy opens them on ``server.host``.
    """
    public = "*" if server.host in ("0.0.0.0", "::") else server.host
    monitor_port, dashboard_port, *serves = free_ports(2 + _NUM_PORTS, taken=(server.grpc_port, server.http_port))
    binds = dict.fromkeys((server.grpc_port, server.http_port), public)
    return serve_environment(folder, server.max_message_bytes, binds, serves) | {
        "AUTOSCALER_METRIC_PORT": str(monitor_port),  # by default fixed: the second Ray of a machine does without
        "DASHBOARD_METRIC_PORT": str(dashboard_port),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # the node's address is the loopback
        "GLOO_SOCKET_IFNAME": "lo",  # ranks
        "NCCL_SOCKET_IFNAME": "lo",
    }


def serve_environment(
    folder: Path,
    max_message_bytes: int = ServerConfig().max_message_bytes,
    binds: Mapping[int, str] = {},
    ports: Sequence[int] = (),
) -> dict[str, str]:
    """Environment variables that every process of the cluster needs, this one included, before it imports Serve.

    ``folder``: directory for HAProxy's files. ``max_message_bytes``: bound of gRPC messages on the public ports.
    ``binds``: addresses of public ports that differ from Serve's. ``ports``: ``_NUM_PORTS`` free ports for Serve's own
    use; drawn if empty. Set only variables that the user has not set.
    """
    stats_port, metrics_port, fallback_http_port, fallback_grpc_port = ports or free_ports(_NUM_PORTS)
    # Routers listen with SO_REUSEPORT on the first port of Serve's range: two clusters of one machine would share it,
    # and each get some of the other's requests.
    router_ports = free_block()
    middle = router_ports + BLOCK // 2
    wanted = {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",  # Serve's Python proxy loses some cancellations
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",  # user code, Serve's code and both gRPC servers on one loop
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(LONGEST_STREAM_S),
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(LONGEST_STREAM_S),
        "RAY_SERVE_HAPROXY_H2_FE_MAX_CONCURRENT_STREAMS": "1000",
        "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(max_message_bytes),
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
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(router_ports + BLOCK - 1),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_http_port),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(fallback_grpc_port),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(_DRAIN_S),
        "RAY_SERVE_PORT_QUARANTINE_S": "0",  # all routers belong to one application
        # A proxy is restarted after three of these: at 10 s, its default, no client is served for half a minute.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",
        # Work that never rests, on the cores that the engines need: by default ten times a second in every process.
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
        "RAY_worker_niceness": "0",  # 15 by default: anything else on the machine would come before the engines
        "RAY_USAGE_STATS_ENABLED": "0",
        "MALLOC_ARENA_MAX": "2",  # by default every thread comes to hold some tens of MB that others cannot use
    }
    environment = {name: value for name, value in wanted.items() if name not in os.environ}
    settings = wanted | dict(os.environ)
    # Statistics and metrics have no credentials; Serve reads them by sockets.
    pages = {int(settings[f"RAY_SERVE_HAPROXY_{page}_PORT"]): LOOPBACK for page in ("STATS", "METRICS")}
    return environment | haproxy.environment(folder, pages | dict(binds))


def socket_folder() -> Path:
    """A new folder for sockets, whose paths must be short: HAProxy takes 97 characters, of which Serve adds 70."""
    base = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="paceline-", dir=base if len(base) <= 8 else "/tmp"))
