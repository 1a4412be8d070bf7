"""Environment variables that every process of a Ray cluster must have before it imports Serve."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from paceline.cluster.ports import BLOCK, free_block, free_ports
from paceline.config.service import ServerConfig

LONGEST_STREAM_S = 24 * 3600
"""Streams that are older than this may be cut when routers come or go."""

_DRAIN_S = 2.0


def serve_environment(folder: Path, max_message_bytes: int = ServerConfig().max_message_bytes) -> dict[str, str]:
    """Environment variables that every process of the cluster needs, this one included, before it imports Serve.

    ``folder`` takes what HAProxy keeps on disk. ``max_message_bytes`` bounds gRPC messages on the public ports.
    Only set what the user has not set.
    """
    stats_port, metrics_port, fallback_http_port, fallback_grpc_port = free_ports(4)
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
        # Work that never rests, on the cores that the engines need: by default ten times a second in every process.
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
        "RAY_worker_niceness": "0",  # 15 by default: anything else on the machine would come before the engines
        "RAY_USAGE_STATS_ENABLED": "0",
        "MALLOC_ARENA_MAX": "2",  # by default every thread comes to hold some tens of MB that others cannot use
    }
    return {name: value for name, value in wanted.items() if name not in os.environ}


def socket_folder() -> Path:
    """A new folder for sockets, whose paths must be short: HAProxy takes 97 characters, of which Serve adds 70."""
    base = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="paceline-", dir=base if len(base) <= 8 else "/tmp"))
