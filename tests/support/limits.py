"""Limits of this process."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def limited(what: int, most: int) -> Iterator[None]:
    """This process takes no more of a resource, such as ``RLIMIT_NOFILE``."""
    before = resource.getrlimit(what)
    resource.setrlimit(what, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)
