"""Directories that are made once from other files, by whichever process comes first."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from paceline.errors import ConfigError


def made_once(folder: Path, write: Callable[[Path], None]) -> Path:
    """The directory ``folder``, which ``write`` fills if there is none yet.

    Raises:
        ConfigError: its place cannot be written.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".making-"))
    except OSError as error:
        raise ConfigError(f"the cache {str(folder.parent)!r} cannot be written: {error.strerror or error}") from error
    try:
        write(draft)
        try:
            draft.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process was faster
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder
