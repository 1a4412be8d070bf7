"""Triton's interpreter, without what it does again and again."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np


@functools.cache
def hasten() -> None:
    """Patches triton's language for the rest of the process, not at each launch and at each call within it, and keeps
    the dtypes of numpy that stand for triton's: a third of the time of kernels."""
    import triton.language as tl
    from triton.runtime import interpreter

    interpreter._patch_lang(SimpleNamespace(__globals__={"language": tl, "core": tl.core}))
    interpreter._patch_lang = lambda _: interpreter._LangPatchScope()
    of_element = functools.cache(interpreter._get_np_dtype)

    def dtype(of: Any) -> np.dtype[Any]:
        element = of.element_ty if isinstance(of, tl.block_type) else of
        found: np.dtype[Any] = np.dtype(np.uint64) if isinstance(element, tl.pointer_type) else of_element(element)
        return found

    interpreter._get_np_dtype = dtype
