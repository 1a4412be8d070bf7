"""Files of Ray that only their owner may read: the token that lets one into the cluster, and the session's folder."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from paceline.cluster.watch import say


def protect_token() -> None:
    """Makes Ray's token file (mode 0600) before Ray does (mode 0644), or takes others' rights to one that is there.

    Whoever reads it may run code in the cluster. Does nothing where Ray takes its token elsewhere, or asks for none.
    """
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token" or "RAY_AUTH_TOKEN" in os.environ:
        return
    given = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(given) if given else Path.home() / ".ray" / "auth_token"
    if not given and not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
    elif path.exists() and path.stat().st_mode & 0o077 and path.stat().st_uid == os.getuid():
        path.chmod(0o600)
        say(f"others could read {path}, which lets one into the Ray cluster: only its owner can now")


def protect_session() -> None:
    """Takes others' rights to the folder with logs and sockets of the Ray that this process has started."""
    from ray._private.worker import _global_node

    if _global_node is not None:
        os.chmod(_global_node.get_session_dir_path(), 0o700)
