"""Every native pass compiles where there is a compiler: the tests of what it computes need not ask."""

from __future__ import annotations

from types import ModuleType

import pytest
from tests.support.compilers import needs_attention, needs_products

from paceline.core import native_tree, rows
from paceline.drafters import calibration, parts
from paceline.model import layer_callback, layout
from paceline.model.attention import native as attention
from paceline.model.compiled import linear, package
from paceline.model.parallel import shared_memory

pytestmark = pytest.mark.compiler


@pytest.mark.parametrize("module", [layout, native_tree, parts])
def test_extensions_compile(module: ModuleType) -> None:
    assert module._passes() is not None


@pytest.mark.parametrize(
    "module",
    [calibration, layer_callback, package, rows, shared_memory, pytest.param(linear, marks=needs_products)],
)
def test_libraries_compile(module: ModuleType) -> None:
    assert module._library() is not None


@needs_attention
def test_the_attention_compiles() -> None:
    assert attention.unavailable() is None
