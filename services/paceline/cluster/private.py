"""Files of Ray that only their owner may read: the token that lets one into the cluster, and the session's folder."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from paceline.cluster.watch import say
from paceline.errors import ConfigError


def protect_token() -> None:
    """Creates Ray's token file (mode 0600) before Ray does (mode 0644), or removes others' rights to an existing one.

    A reader of the file can run code in the cluster. Does nothing if Ray's token is elsewhere, or not required.
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


def session_folder() -> Path:
    """Folder in which a Ray of our own keeps logs and sockets: private to its owner, below the temporary folder.

    Ray repeatedly makes everything below it readable and writable for all. Raises ConfigError if another user owns the
    folder.
    """
    folder = Path("/tmp") / f"paceline-{os.getuid()}"  # short: paths of sockets have 107 characters at most
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{folder} is not a folder of this user: remove it, Ray's logs and sockets are kept there")
    folder.chmod(0o700)
    return folder / "ray"
