"""The view of the fleet that clients get: how the service is, not where it runs."""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import replace

from paceline.types import ReplicaStatus, ServerInfo, Startup

_PATH = re.compile(r"(?<![\w./])~?(/[\w.@+~-]+)+/?")


def public(info: ServerInfo, secret: str) -> ServerInfo:
    """The overview without process ids, addresses of nodes and paths of files.

    Nodes become names that say which replicas share one; only who has ``secret`` can tell which node that is.
    """

    def name(node: str) -> str:
        return node and "node-" + hmac.new(secret.encode(), node.encode(), hashlib.sha256).hexdigest()[:6]

    def status(of: ReplicaStatus) -> ReplicaStatus:
        return replace(of, pid=0, node=name(of.node), controller=_without_paths(of.controller))

    def startup(of: Startup) -> Startup:
        return replace(of, node=name(of.node), doing=_without_paths(of.doing))

    return replace(
        info,
        pools={kind: tuple(map(status, statuses)) for kind, statuses in info.pools.items()},
        starting=tuple(map(startup, info.starting)),
    )


def _without_paths(text: str) -> str:
    return _PATH.sub("...", text)
