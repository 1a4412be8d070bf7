"""The installed code: its version, and with a wheel what tells it from another wheel of the same version."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution

from paceline import __version__


@functools.cache
def installed_version() -> str:
    """The version of this process' code, such as ``0.1.0+3f2a91c0d4`` of a wheel; ``0.1.0`` of a source tree.

    Read once, so that it stays the version of the running code if another wheel is installed meanwhile.
    """
    try:
        record = distribution("paceline").read_text("RECORD") or ""
    except PackageNotFoundError:
        record = ""
    digest = wheel_digest(record.splitlines())
    return f"{__version__}+{digest}" if digest else __version__


def wheel_digest(record: Iterable[str]) -> str:
    """A digest of the modules that a RECORD lists with their hashes; "" where it lists none, as of a source tree."""
    modules = sorted(line for line in record if line.startswith("paceline/") and ",sha256=" in line)
    return hashlib.blake2b("\n".join(modules).encode(), digest_size=5).hexdigest() if modules else ""
