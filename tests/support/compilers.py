"""The mark ``compiler``: what tests of native code and of compiled models need of the machine.

``tests/conftest.py`` skips all of them where there is no compiler, in one line of the summary. Where there is one, what
does not compile fails.
"""

import ctypes
import functools
import shutil
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from paceline.core import native
from paceline.model.compiled import linear as cpu_linear

NEEDED = "needs a C++ compiler and Python's headers"
_INSTRUCTIONS = {"AVX-512": native.has_avx512, "AVX512-BF16": native.packs_bfloat16}

needs_attention = pytest.mark.compiler(instructions="AVX-512")
"""Of the native attention."""
needs_products = pytest.mark.compiler(instructions="AVX512-BF16")
"""Of the native products by packed weights."""


def lacking(item: pytest.Item) -> str | None:
    """What a test needs by its marks and this machine does not have; None: nothing."""
    marks = [*item.iter_markers("compiler")]
    if marks and not has_compiler():
        return NEEDED
    wanted = (mark.kwargs["instructions"] for mark in marks if mark.kwargs)
    return next((f"needs {name}" for name in wanted if not _INSTRUCTIONS[name]()), None)


def products_with(folder: Path, faults: Mapping[str, tuple[str, str]]) -> ctypes.CDLL:
    """The library of native products, with one text of some source files replaced by another."""
    kept, copies = cpu_linear.SOURCE.parent, folder / "products" / "compiled"
    copies.mkdir(parents=True)
    for path in (*kept.glob("*.h"), kept / "../exponential.h", cpu_linear.SOURCE):
        shutil.copy(path, copies / path.relative_to(kept))
    for name, (right, wrong) in faults.items():
        source = (copies / name).read_text(encoding="utf-8")
        assert source.count(right) == 1, right
        (copies / name).write_text(source.replace(right, wrong), encoding="utf-8")
    return cpu_linear.load(copies / cpu_linear.SOURCE.name)


_SWITCH = """
#include <cstdlib>
static bool fault(int number) {
  const char* set = std::getenv("FAULT");
  return set != nullptr && std::atoi(set) == number;
}
"""


def with_faults(source: Path, faults: Iterable[tuple[str, str]]) -> str:
    """A source with some texts replaced. In it ``fault(n)`` is true while the variable FAULT is n, so that many faults
    are compiled at once."""
    text = source.read_text(encoding="utf-8")
    for right, wrong in faults:
        assert right in text, right
        text = text.replace(right, wrong)
    return _SWITCH + text


@functools.cache
def has_compiler() -> bool:
    """True if this machine should be able to compile the native passes."""
    return native.find_compiler() is not None and Path(sysconfig.get_path("include"), "Python.h").exists()
