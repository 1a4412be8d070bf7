"""Attention that reads pages in place, for the CPU: no gathered copy of the keys, and bits that no neighbour changes.

Every query takes its keys in blocks of one page, in the order of its rows, by operations that do not depend on the
other queries of a block. So a token has the bits of being decoded alone in any chunk, padding or batch. Masked keys
contribute nothing, not even NaN; a block that is hidden whole costs nothing. The operator is in ``native.cpp``: float32
sums, called by compiled models without the interpreter's lock. Threads that help the one that calls it take query rows
and KV heads of their own (``share_by``).

It needs AVX-512, and is compiled once for each machine's instruction set. Without AVX512-BF16 a bfloat16 product takes
two instructions instead of one, and rounds differently. As with other hardware, replicas with different instruction
sets can differ at near-ties. A session that moves between them is lossless only in distribution.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.core.native import Library
from paceline.errors import EngineError
from paceline.types import PAGE_SIZE

DTYPES = (torch.bfloat16, torch.float32)
SOURCE = Path(__file__).with_suffix(".cpp")
LIBRARY = Library(
    SOURCE,
    "the attention over pages",
    ("-march=native", "-ffp-contract=off", "-fno-math-errno"),
    (SOURCE.with_name("lanes.h"), SOURCE.parents[1] / "exponential.h"),
)
_PAGE_SIZE = 64
log = logging.getLogger(__name__)


@functools.cache
def unavailable() -> str | None:
    """Says why this machine cannot run the operator, also in the log; None if it can. May compile it; loads it."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return "needs AVX-512, which this machine does not have"
    assert PAGE_SIZE == _PAGE_SIZE, "a page is the block of the operator"
    try:
        load_operator()
    except EngineError as error:
        log.warning("attention is computed by torch, which is slower: %s", error)
        return f"could not be built: {error}"
    return None


def is_built() -> bool:
    """True if ``unavailable`` would compile nothing: the library is in the cache, or this machine cannot run it."""
    return torch.backends.cpu.get_cpu_capability() != "AVX512" or LIBRARY.is_compiled


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    gather_index: Tensor,
    scatter_index: Tensor,
    mask: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Attention over pages; ``unavailable`` comes first.

    Args:
        query: [1, num_heads, T, key_dim]. keys, values: [num_pages, page_size, num_kv_heads, dim], of its dtype or in
            FP8 (``kv_cache.py``). page_table: [B, pages]. gather_index: [B, n] the token at each place.
        scatter_index: [T] each token's place among B * n; other places are not computed.
        mask: additive [B, 1, n, pages * page_size]. sinks: [num_heads].

    Returns:
        [1, T, num_heads, value_dim]; zeros for a token that sees no key.
    """
    out: Tensor = torch.ops.paceline.attend_pages(
        query, keys, values, page_table, gather_index, scatter_index, mask, sinks, scale, softcap or 0.0
    )
    return out


def round_to_fp8(x: Tensor) -> Tensor:
    """``kv_cache.to_fp8`` of float32 or bfloat16, with its bits, for pages that ``attend`` reads."""
    out: Tensor = torch.ops.paceline.round_to_fp8(x)
    return out


def score_index(
    queries: Tensor, keys: Tensor, weights: Tensor, page_table: Tensor, gather_index: Tensor, seen: Tensor
) -> Tensor:
    """Scores of index keys (``indexed.py``), of the same bits as ``indexed.index_scores``; ``unavailable`` comes first.

    Args:
        queries: [T, heads, dim]. keys: [num_pages, page_size, dim]. weights: [T, heads].
        page_table: [B, pages]. gather_index: [B, n] the token at each place.
        seen: bool [B, n, pages * page_size].

    Returns:
        float32 [B, n, pages * page_size]; -inf at keys that are not seen.
    """
    out: Tensor = torch.ops.paceline.score_pages(queries, keys, weights, page_table, gather_index, seen)
    return out


def share_by(share: ctypes.c_void_p) -> None:
    """Makes attention ask ``share`` for helping threads from now on. Call ``unavailable`` first.

    ``share`` is a C function that runs pieces of work (``linear.sharer``). A query's result is the same in any thread.
    """
    load_operator().paceline_attention_share(share)


def compiled_shims() -> dict[Any, list[str]]:
    """C functions that compiled models call instead of the Python operator, by operator (AOTInductor shims)."""
    tensors = ("query", "keys", "values", "page_table", "gather_index", "scatter_index", "mask")
    arguments = [f"AtenTensorHandle {name}" for name in tensors]
    arguments += ["AtenTensorHandle* sinks", "double scale", "double softcap", "AtenTensorHandle* out"]
    declaration = f"AOTITorchError aoti_torch_cpu_attend_pages({', '.join(arguments)})"
    rounding = "AOTITorchError aoti_torch_cpu_round_to_fp8(AtenTensorHandle x, AtenTensorHandle* out)"
    scored = ("queries", "keys", "weights", "page_table", "gather_index", "seen")
    arguments = [*(f"AtenTensorHandle {name}" for name in scored), "AtenTensorHandle* out"]
    scoring = f"AOTITorchError aoti_torch_cpu_score_pages({', '.join(arguments)})"
    operators = torch.ops.paceline
    return {
        operators.attend_pages.default: [declaration],
        operators.round_to_fp8.default: [rounding],
        operators.score_pages.default: [scoring],
    }


@functools.cache
def load_operator() -> ctypes.CDLL:
    """The library, whose operators are registered. Raises EngineError as ``Library.load``."""
    library = LIBRARY.load(ctypes.RTLD_GLOBAL)
    library.paceline_attention_share.restype = None
    return library
