"""Cores for each engine of a machine, shared out by lock files. Death gives them back."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from paceline.runtime.workers import available_cores

_QUOTAS = ("/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/cpu/cpu.cfs_quota_us")  # version 2, version 1


def has_cpu_quota(files: Sequence[str] = _QUOTAS) -> bool:
    """True if this process is in a container that gets a share of all cores: two of them would take the same core."""
    for file in files:
        with contextlib.suppress(OSError):
            return Path(file).read_text(encoding="ascii").split()[0] not in ("max", "-1")
    return False


class CoreClaim:
    """Cores that no other engine of this machine is pinned to. Held until ``release`` or the end of the process."""

    def __init__(self, cores: Sequence[int], descriptors: Sequence[int]) -> None:
        self.cores = cores
        self._descriptors = [*descriptors]

    @classmethod
    def take(cls, folder: Path | None = None, count: int = 1) -> Self | None:
        """Locks the first ``count`` free cores; None: there is only one, too few are free, locks cannot be kept here,
        or containers whose locks are not visible here share the cores.

        ``folder`` holds one lock file per core. It must be the same for all engines of the machine.
        """
        folder = folder or Path(tempfile.gettempdir()) / "paceline-cores"
        cores = available_cores()
        if len(cores) < 2 or (len(cores) == os.cpu_count() and has_cpu_quota()):
            return None
        claim = cls([], [])
        for core in cores:
            with contextlib.suppress(OSError):  # taken, or another user's folder
                folder.mkdir(mode=0o777, parents=True, exist_ok=True)
                descriptor = os.open(folder / f"{core}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    os.close(descriptor)
                    raise
                claim = cls([*claim.cores, core], [*claim._descriptors, descriptor])
                if len(claim.cores) == count:
                    return claim
        claim.release()
        return None

    def release(self) -> None:
        """Releases the cores. Idempotent."""
        while self._descriptors:
            os.close(self._descriptors.pop())
