"""The cache of native passes where it cannot be written: a full disk, a file in its place."""

import errno
from pathlib import Path

import pytest

from paceline.core import native
from paceline.core.native import compiled
from paceline.errors import EngineError

SOURCE = Path(native.__file__).with_name("tree.cpp")


@pytest.mark.parametrize("call", ["mkdir", "open"])
def test_a_cache_that_cannot_be_written_is_an_error_of_the_engine(call, tmp_path, monkeypatch) -> None:
    """Which the callers know: they go on by the reference implementation in Python, as without a compiler."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    monkeypatch.setattr(Path, call, full)
    with pytest.raises(EngineError, match=r"the cache .* cannot be written: No space left on device"):
        compiled(SOURCE, "0", (), "nothing")
