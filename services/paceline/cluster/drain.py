"""Removes this Ray node from the cluster without a client noticing: a pod runs it before it stops.

    python -m paceline.cluster.drain --graceful-s 1830 --cold-start-s 900

    node drains ──▶ Serve starts successors elsewhere ──▶ sessions move or end ──▶ the proxy is idle ──▶ Ray leaves

Serve stops a replica of a node that drains ``graceful_shutdown_timeout_s`` before the node's deadline, whether its
successor runs or not. So the deadline is that time and the cold start of a successor: ``--graceful-s`` and
``--cold-start-s``, or their sum as ``--timeout-s``.

Returns when Ray has left the node, when the cluster is gone and no replica here serves a stream any more, or after the
time-out. Exit status: 0 the node is out or there is nothing to drain, 1 it is not.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from paceline.cluster import local_streams

log = logging.getLogger(__name__)

_POLL_S = 1.0
_GONE_AFTER_S = 15.0
"""Seconds without an answer after which the cluster is considered gone."""
_GRACEFUL_S, _COLD_START_S = 600.0, 900.0
_RPC_TIMEOUT_S = 5.0


class Cluster(Protocol):
    """The part of Ray's ``GcsClient`` that is used."""

    def get_all_node_info(self, timeout: float) -> Mapping[Any, Any]:
        """Every node that ever joined, by id."""

    def drain_node(self, node_id: str, reason: int, message: str, deadline_ms: int) -> tuple[bool, str]:
        """Asks Ray to drain the node: (whether it drains from now on, the reason if it does not)."""


def drain(
    cluster: Cluster | None,
    address: str,
    timeout_s: float,
    *,
    num_streams: Callable[[], int] = local_streams.count,
    clock: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Drains the node at an IP address; True if it has left or there is none, and nothing here serves a stream.

    Tells Ray that the node ends ``timeout_s`` from now, by the ``wall`` clock. Until then the node takes nothing new,
    and Serve replaces its replicas before it stops them. A cluster that is gone (None: from the beginning) drains
    nothing: what runs here only ends.
    """
    until, answered = clock() + timeout_s, clock()
    asked = waiting = False
    while clock() < until:
        gone = cluster is None
        if cluster is not None:
            try:
                node_id = _alive(cluster, address)
                gone = node_id is None
                if node_id is not None and not asked:
                    asked = _ask(cluster, node_id, wall() + until - clock())
                answered = clock()
            except Exception as error:  # whatever Ray's client raises without an answer
                log.info("the cluster does not answer: %s", error)
                gone = clock() - answered > _GONE_AFTER_S
        if gone and not num_streams():
            return True
        if gone and not waiting:
            waiting = True
            log.info("the cluster is gone, and %d streams still run here: they are waited for", num_streams())
        sleep(_POLL_S)
    return False


def _alive(cluster: Cluster, address: str) -> str | None:
    from ray.core.generated.gcs_pb2 import GcsNodeInfo

    for node_id, node in cluster.get_all_node_info(timeout=_RPC_TIMEOUT_S).items():
        if node.node_manager_address == address and node.state == GcsNodeInfo.GcsNodeState.ALIVE:
            return str(node_id.hex())
    return None


def _ask(cluster: Cluster, node_id: str, until_s: float) -> bool:
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")  # the other reason is refused while anything runs
    accepted, why_not = cluster.drain_node(node_id, reason, "the machine is about to stop", int(until_s * 1000))
    if not accepted:
        log.warning("node %s does not drain yet: %s", node_id, why_not)
    return accepted


def main(arguments: list[str] | None = None) -> int:
    """Runs the command that the module's docstring describes."""
    parser = argparse.ArgumentParser(prog="python -m paceline.cluster.drain", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--graceful-s",
        type=float,
        default=_GRACEFUL_S,
        help=f"longest graceful_shutdown_timeout_s of the replicas here (default {_GRACEFUL_S:g})",
    )
    parser.add_argument(
        "--cold-start-s",
        type=float,
        default=_COLD_START_S,
        help=f"time that a successor needs until it serves (default {_COLD_START_S:g})",
    )
    parser.add_argument("--timeout-s", type=float, help="longest wait (default: the sum of the two above)")
    parser.add_argument("--address", default="auto", help="of Ray's control store (default: RAY_ADDRESS, or found)")
    args = parser.parse_args(arguments)
    for name in ("graceful_s", "cold_start_s"):
        if not getattr(args, name) >= 0:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name):g}: it must be at least 0")
    timeout_s = args.graceful_s + args.cold_start_s if args.timeout_s is None else args.timeout_s
    if not timeout_s > 0:
        parser.error(f"--timeout-s is {timeout_s:g}: it must be more than 0")
    logging.basicConfig(level=logging.INFO, format="paceline: %(message)s", stream=sys.stderr)
    import ray
    from ray._private.services import canonicalize_bootstrap_address_or_die
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled, without stubs

    started = time.monotonic()
    cluster, address = None, "this node"
    try:
        cluster = GcsClient(address=canonicalize_bootstrap_address_or_die(args.address))
        address = ray.util.get_node_ip_address()
    except Exception as error:  # Ray is not running here any more, or its head is gone
        log.info("no cluster to leave: %s", error)
    out = drain(cluster, address, timeout_s)
    log.info("%s %s after %.0f s", address, "has left" if out else "has not left", time.monotonic() - started)
    return 0 if out else 1


if __name__ == "__main__":
    raise SystemExit(main())
