"""Every native function compiles where there is a compiler, and its reference serves where there is none.

Tests of what native functions compute need not ask.
"""

import sysconfig
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tests.support.compilers import needs_attention, needs_products
from tests.support.native import references

from paceline.core import native_tree, rows
from paceline.core.tree import SpeculationTree
from paceline.drafters import calibration, parts
from paceline.drafters.protocol import Leaf
from paceline.model import layer_callback, layout
from paceline.model.attention import native as attention
from paceline.model.compiled import linear, package
from paceline.model.parallel import shared_memory
from paceline.model.step_plan import SequenceStep, StepPlan

EXTENSIONS = [layout, native_tree, parts]


@pytest.mark.compiler
@pytest.mark.parametrize("module", EXTENSIONS)
def test_extensions_compile(module: ModuleType) -> None:
    assert module.native_module() is not None


@pytest.mark.compiler
@pytest.mark.parametrize(
    "module",
    [calibration, layer_callback, package, rows, shared_memory, pytest.param(linear, marks=needs_products)],
)
def test_libraries_compile(module: ModuleType) -> None:
    assert module.load_library() is not None


@needs_attention
def test_the_attention_compiles() -> None:
    assert attention.unavailable() is None


def _no_headers(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(sysconfig, "get_path", lambda name: str(folder))


def _no_cache(patch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "file").write_text("")
    patch.setenv("PACELINE_CACHE", str(folder / "file"))


@pytest.mark.parametrize("lacking", [_no_headers, _no_cache])
@pytest.mark.parametrize("module", EXTENSIONS)
def test_extensions_are_left_to_python_where_they_cannot_be_made(module, lacking, tmp_path, monkeypatch) -> None:
    lacking(monkeypatch, tmp_path)
    assert module.native_module.__wrapped__() is None  # apart from what this process has loaded


def test_what_calls_them_goes_on_by_python() -> None:
    step = SequenceStep([1, 2], range(2), range(2), [0], num_logits=2)
    expected = StepPlan.of([step], 640).buffer
    with references(*EXTENSIONS):
        assert type(native_tree.new_tree(3, 5, rejection=False)) is SpeculationTree
        assert native_tree.grow_each([], [], 0.01, 1) is None
        assert parts.parts_of([Leaf("s", 0, (), ())], {}, None) is None  # type: ignore[arg-type]
        assert layout.gather([step]) is None
        assert torch.equal(StepPlan.of([step], 640).buffer, expected)
