"""Every native pass compiles where it can: its own tests are skipped where it does not."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

from paceline.core import native, native_tree, rows
from paceline.draft import publish
from paceline.drafters import calibration, parts
from paceline.model import columns

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, native._COMPILERS)), reason="needs a C++ compiler")
needs_headers = pytest.mark.skipif(
    not Path(sysconfig.get_path("include"), "Python.h").exists(), reason="needs Python's headers"
)


@needs_compiler
@needs_headers
@pytest.mark.parametrize("module", [columns, native_tree, parts, publish])
def test_extensions_compile(module: ModuleType) -> None:
    assert module._passes() is not None


@needs_compiler
@pytest.mark.parametrize("module", [calibration, rows])
def test_libraries_compile(module: ModuleType) -> None:
    assert module._library() is not None
