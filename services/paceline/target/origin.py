"""A digest of everything that decides the bits of KV pages: code, device, configuration, and all bytes of the weights.

Targets exchange pages only if their digests are equal. A thread of the lowest priority reads each weight file once. The
digest of a file is kept in the cache of compiled models. It is computed again if the file's size, time, device or inode
has changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from paceline.checkpoint.files import Checkpoint
from paceline.config.environment import cache_dir
from paceline.config.installed import installed_version
from paceline.model.loading import LoadedModel

_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
_BLOCK_BYTES = 1 << 20
_LOWEST_PRIORITY = 19
log = logging.getLogger(__name__)


class Origin:
    """The digest of some facts and files. A thread computes it."""

    def __init__(self, facts: bytes, files: Sequence[Path]) -> None:
        """Starts the thread that reads the files."""
        self._facts, self._files = facts, files
        self._digest: bytes | None = None
        self._thread = threading.Thread(target=self._read, name="paceline-digest", daemon=True)
        self._thread.start()

    @property
    def numerics(self) -> str:
        """Digest of the facts, in hex."""
        return hashlib.blake2b(self._facts, digest_size=8).hexdigest()

    @property
    def digest(self) -> bytes | None:
        """The 16 bytes of the digest; None: the thread still reads, or could not read a file."""
        return self._digest

    def wait(self) -> None:
        """Blocks until the thread has ended."""
        self._thread.join()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # of this thread alone
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        digest = hashlib.blake2b(self._facts, digest_size=16)
        try:
            for path in self._files:
                digest.update(f"{path.name} {file_digest(path)}".encode())
        except OSError as error:
            log.warning("KV pages are not exchanged with other targets: %s", error)
        else:
            self._digest = digest.digest()


def origin_of(checkpoint: Checkpoint, model: LoadedModel, options: Sequence[object] = ()) -> Origin:
    """Starts to compute the origin of a target's pages. ``options``: of the target, that decide bits.

    The configuration is part of it since no probe shows all of it: a sliding window may be longer than a probe.
    """
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else platform.machine()
    code = installed_version(), torch.__version__, torch.backends.cpu.get_cpu_capability(), device
    how = model.kernel, str(model.dtype), model.quantization, checkpoint.quantization
    config = json.dumps(dict(checkpoint.config), sort_keys=True, default=str)
    return Origin(repr((code, how, *options, config)).encode(), _weights(checkpoint.folder))


def file_digest(path: Path) -> str:
    """Returns the digest of all bytes of a file in hex, from the cache if the file has not changed.

    Raises:
        OSError: the file cannot be read.
    """
    state = _state(path)
    kept = cache_dir() / "digests" / hashlib.blake2b(str(path.resolve()).encode(), digest_size=16).hexdigest()
    with contextlib.suppress(OSError, ValueError):
        of, found = kept.read_text().split("\n")
        if of == state:
            return found
    digest, block = hashlib.blake2b(digest_size=16), bytearray(_BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(memoryview(block)[:count])
    if _state(path) == state:
        with contextlib.suppress(OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            part = kept.with_suffix(f".{os.getpid()}")
            part.write_text(f"{state}\n{digest.hexdigest()}")
            part.replace(kept)
    return digest.hexdigest()


def _state(path: Path) -> str:
    found = path.stat()
    return f"{found.st_size} {found.st_mtime_ns} {found.st_dev} {found.st_ino}"


def _weights(folder: Path | None) -> list[Path]:
    if folder is None:
        return []
    found = [folder] if folder.is_file() else sorted(folder.iterdir())
    return [path for path in found if path.suffix in _WEIGHTS and path.is_file()]
