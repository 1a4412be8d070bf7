"""Native functions and their reference implementations in Python: one switch, one comparison, inputs for both."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from paceline.core import native_tree, rows
from paceline.drafters import calibration, parts
from paceline.model import layout

_T = TypeVar("_T")
_OFF: dict[Any, tuple[str, Any]] = {
    rows: ("usable", False),
    calibration: ("load_library", None),
    native_tree: ("native_module", None),
    parts: ("native_module", None),
    layout: ("native_module", None),
}
"""What says that there is native code, by its module, and what it says without a compiler."""


@contextlib.contextmanager
def references(*modules: Any) -> Iterator[None]:
    """The reference implementations serve in the place of these modules' native functions."""
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            name, value = _OFF[module]
            patch.setattr(module, name, lambda *_, value=value: value)
        yield


def agree(call: Callable[[], _T], *modules: Any, rtol: float = 0.0, atol: float = 0.0) -> _T:
    """Returns what ``call`` gives by native functions. Raises AssertionError if the references give something else."""
    for module in modules:
        assert getattr(module, "load_library" if module is rows else _OFF[module][0])() is not None, (
            "it does not compile"
        )
    native = call()
    with references(*modules):
        assert_alike(native, call(), rtol, atol)
    return native


def assert_alike(found: Any, expected: Any, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Raises AssertionError unless both are the same; numbers but for the tolerances, and NaN is NaN."""
    if isinstance(found, Tensor):
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, equal_nan=True)
    elif isinstance(found, float):
        both_nan = math.isnan(found) and math.isnan(expected)
        assert both_nan or found == expected or math.isclose(found, expected, rel_tol=rtol, abs_tol=atol)
    elif isinstance(found, Sequence) and not isinstance(found, str | bytes):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_alike(one, other, rtol, atol)
    else:
        assert found == expected


# -- rows of logits --------------------------------------------------------------------------------------------------


def adversarial(seed: int, num_rows: int, size: int, spread: float, shape: str) -> Tensor:
    """[num_rows, size] float32."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, size, generator=generator) * spread
    if shape in ("ascending", "descending"):
        x = x.sort(-1, descending=shape == "descending").values
    elif shape == "many ties":
        x = x.round()
    elif shape == "one token":
        x.fill_(-math.inf)[:, size // 2] = -3.5
    elif shape == "negative zeros":
        x = torch.where(x > 0, 0.0, -0.0)
    if shape == "as drawn":
        x[torch.rand(num_rows, size, generator=generator) < 0.3] = -math.inf
        x[:, 0].clamp_(min=-10)
    return x


def keys_of(seed: int, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Seeds, positions and nonces of rows."""
    generator = torch.Generator().manual_seed(seed + 1)
    seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator)
    nonces = torch.randint(0, 2**32, (num_rows,), generator=generator)
    return seeds, torch.arange(num_rows) * 2**33 + seed % 1000, nonces
