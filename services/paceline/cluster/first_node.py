"""Starts a Ray on this machine, also where it is so busy that Ray's own time for that is over before a node is up."""

from __future__ import annotations

import logging
import traceback
from typing import Any

log = logging.getLogger(__name__)

_ATTEMPTS = 3
_TOO_SLOW = "timed out during startup"
"""Ray's words for a node that was not up within its fixed 30 seconds."""


def start_ray(**options: Any) -> Any:
    """``ray.init`` of a Ray of its own; tried again, twice, if its node was not up in time. ``options``: for that.

    Returns and raises what ``ray.init`` does. Of an attempt that fails no process is left.
    """
    import ray

    for num_left in reversed(range(_ATTEMPTS)):
        try:
            return ray.init(address="local", **options)
        except Exception as error:
            _end_node(error)
            if not num_left or _TOO_SLOW not in str(error):
                raise
            log.warning("Ray was not up in time, and is started again: %s", error)
    raise AssertionError("unreachable")


def _end_node(error: BaseException) -> None:
    """Ends the processes of the node whose start raised the error; only the error refers to the node."""
    from ray._private.node import Node

    for frame, _ in traceback.walk_tb(error.__traceback__):
        node = frame.f_locals.get("self")
        if isinstance(node, Node):
            node.kill_all_processes(check_alive=False, allow_graceful=False)
            return
