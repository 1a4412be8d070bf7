"""Two ranks for the tests of a module."""

from __future__ import annotations

from tests.model.conftest import two

__all__ = ["two"]
