"""Passes over vocabulary rows on the CPU, in ``rows.cpp``: each replaces dozens of torch operators or a sort.

Each function has a reference implementation in torch (``noise.py``, ``sampling.py``, ``processors.py``) with the same
bits where bits matter. It serves other devices, other dtypes, and machines without a compiler: see ``usable``. Calls
hold no interpreter lock.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from operator import lt, sub
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.native import Library

_OPTIONS = ("-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
LIBRARY = Library(Path(__file__).with_suffix(".cpp"), "the passes over vocabulary rows", _OPTIONS, of_torch=False)
_KINDS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}
_MAX_TOKENS, _MAX_CHILDREN = 2**31, 2**16
Masks = NDArray[np.uint8]
"""[rows, bytes]: bit v % 8 of byte v // 8 is set if token v of the row may be taken; others count as -inf."""


def usable(x: Tensor, *dtypes: torch.dtype) -> bool:
    """True if a function below accepts ``x`` [rows, tokens]; ``dtypes``: the ones that it accepts."""
    return (
        x.device.type == "cpu"
        and x.dtype in dtypes
        and x.dim() == 2
        and 0 < x.shape[1] < _MAX_TOKENS
        and (x.stride(1) == 1 or x.shape[1] == 1)
        and load_library() is not None
    )


def prepare() -> None:
    """Compiles or loads the library now, so that no step has to wait for it."""
    load_library()


def addresses(*names: str) -> list[int] | None:
    """Addresses of functions of ``rows.cpp``, for other native code; None: there is no library here."""
    library = load_library()
    if library is None:
        return None
    return [ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names]


def gumbel_max(x: Tensor, keys: Sequence[int], stream: int, first: int) -> tuple[Tensor, Tensor]:
    """``noise.gumbel_max``: token ids [rows] int64 and scores [rows] float64.

    ``keys``: seed bits, position and nonce of each row, flat. ``first``: the token id of column 0.
    """
    rows = len(x)
    ids = torch.empty(rows, dtype=torch.int64)
    scores = torch.empty(rows, dtype=torch.float64)
    _call(
        "paceline_gumbel_max", *_rows(x), _int64s("keys", keys, 3 * rows), stream, _size(first), _at(ids), _at(scores)
    )
    return ids, scores


def pick(
    x: Tensor,
    temperatures: Sequence[float],
    keys: Sequence[int],
    stream: int,
    *,
    masks: Masks | None = None,
    top_k: Sequence[int] | None = None,
    floors: Sequence[float] | None = None,
    num_best: int = 1,
    behind: tuple[Sequence[int], Sequence[int]] | None = None,
) -> tuple[Tensor, Tensor]:
    """The tokens of each row with the largest (x - max x) / temperature + noise, and their log-probabilities.

    Temperature 0: the largest x alone, at temperature 1. Token -1: there are fewer, or the row has NaN or +inf, or
    nothing but -inf. Token -2: the row is not reached.

    Args:
        x: [rows, tokens].
        temperatures: one per row.
        keys: seed bits, position and nonce of each row, flat.
        stream: of the noise.
        masks: allowed tokens; None: all. Maximum and log-probability are over the allowed tokens; NaN and +inf
            elsewhere do not matter.
        top_k: keeps the k largest and all that equal the k-th; None: all.
        floors: drops tokens below them after the temperature; None: none.
        num_best: number of tokens to return for each row; 1 with ``behind``.
        behind: the draft token that each row follows, and the earlier row that this one follows, -1 for a row that
            follows a context. A row is reached if the row before its draft token picks that token. None: all are.

    Returns:
        [rows, num_best] int64 and float32, the largest sum first.
    """
    rows = len(x)
    _limited("num_best", [num_best], 1, _MAX_TOKENS)
    links: list[object] = [_size(num_best)]
    if behind is not None:
        tokens, before = behind
        links = [_int64s("tokens", tokens, rows), _int64s("rows before", before, rows)]
        _limited("a row before", [*map(sub, before, range(rows))], -rows, -1)
    ids, logprobs = torch.empty(rows, num_best, dtype=torch.int64), torch.empty(rows, num_best, dtype=torch.float32)
    _call(
        "paceline_pick" if behind is None else "paceline_follow",
        *_drawn(x, temperatures, keys, stream, masks, top_k, floors),
        *links,
        _at(ids),
        _at(logprobs),
    )
    return ids, logprobs


def largest(x: Tensor, m: int, masks: Masks | None = None) -> tuple[Tensor, Tensor]:
    """The m largest values of each row [rows, m] float32, descending, and their ids int64; of equal ones the lower id.

    NaN counts as -inf, and so does what ``masks`` do not allow.
    """
    _limited("m", [m], 1, x.shape[1])
    values = torch.empty(len(x), m, dtype=torch.float32)
    ids = torch.empty(len(x), m, dtype=torch.int64)
    _call("paceline_largest", *_rows(x), *_masks(masks, x), _size(m), _at(values), _at(ids))
    return values, ids


def rank(
    token_ids: Tensor, log_q: Tensor, keys: Sequence[int], greedy: Sequence[bool], stream: int, num_best: int
) -> tuple[list[list[int]], list[list[float]]]:
    """The first ``num_best`` of ``sampling.rank_coupled`` in each row, with the exact noise: ids and scores.

    Candidates whose log q is not finite have the score -inf.
    """
    rows, m = token_ids.shape
    token_ids, log_q = token_ids.contiguous(), log_q.contiguous()
    ids, scores = (ctypes.c_int64 * (rows * num_best))(), (ctypes.c_double * (rows * num_best))()
    flags = (ctypes.c_uint8 * rows)(*greedy)
    _same(token_ids, log_q)
    _limited("num_best", [num_best], 1, m)
    _call(
        "paceline_rank",
        _at(token_ids),
        _at(log_q),
        _size(rows),
        _size(m),
        _int64s("keys", keys, 3 * rows),
        flags,
        stream,
        _size(num_best),
        ids,
        scores,
    )
    return _listed(ids, rows, num_best), _listed(scores, rows, num_best)


def best(
    x: Tensor,
    temperatures: Sequence[float],
    keys: Sequence[int],
    stream: int,
    *,
    masks: Masks | None = None,
    top_k: Sequence[int] | None = None,
    floors: Sequence[float] | None = None,
    num_best: int,
) -> tuple[list[list[int]], list[list[float]]]:
    """``rank`` of the ``num_best`` tokens that ``pick`` picks, at temperature 0 of the largest x: ids and scores.

    At temperature 0 the scores are x. Score -inf: there are fewer tokens, or the row has +inf or nothing but -inf (with
    noise also NaN).
    """
    rows = len(x)
    _limited("num_best", [num_best], 1, _MAX_TOKENS)
    ids, scores = (ctypes.c_int64 * (rows * num_best))(), (ctypes.c_double * (rows * num_best))()
    _call("paceline_best", *_drawn(x, temperatures, keys, stream, masks, top_k, floors), _size(num_best), ids, scores)
    return _listed(ids, rows, num_best), _listed(scores, rows, num_best)


def sample(
    token_ids: Tensor,
    log_q: Tensor,
    keys: Sequence[int],
    stream: int,
    scales: Sequence[float],
    num_scaled: Sequence[int],
) -> list[tuple[int, bytes, bytes]]:
    """Draws a token from each row's q, exp(log q) [rows, m] with its first ``num_scaled`` values scaled, normalized.

    Returns:
        of each row the token, and the packed columns of q (``sparse.py``), without what it cannot yield.
    """
    rows, m = token_ids.shape
    token_ids, log_q = token_ids.contiguous(), log_q.contiguous()
    tokens, sizes = (ctypes.c_int64 * rows)(), (ctypes.c_int64 * rows)()
    ids, probs = np.empty((rows, m), np.int32), np.empty((rows, m), np.float64)
    _same(token_ids, log_q)
    _limited("num_scaled", num_scaled, 0, _MAX_TOKENS)
    scale, scaled = (ctypes.c_double * rows)(*scales), _int64s("num_scaled", num_scaled, rows)
    given = _at(token_ids), _at(log_q), _size(rows), _size(m), _int64s("keys", keys, 3 * rows), stream, scale, scaled
    _call("paceline_sample", *given, tokens, _place(ids), _place(probs), sizes)
    return [(token, *q) for token, q in zip(tokens, _packed(ids, probs, sizes), strict=True)]


def guess(
    token_ids: Tensor,
    log_q: Tensor,
    keys: Sequence[int],
    stream: int,
    drawn: Sequence[int],
    fan_outs: Sequence[int],
    likeliest: Sequence[bool],
) -> list[tuple[list[int], list[float], list[float]]]:
    """The siblings of the tokens ``drawn`` (``ranking.py``), from [rows, m] candidates.

    Returns:
        for each row: the siblings; how far each scores below the best as a recovered token; and how far the drawn
        token and each sibling score below it as a bonus token; in nats.
    """
    rows, m = token_ids.shape
    token_ids, log_q = token_ids.contiguous(), log_q.contiguous()
    _same(token_ids, log_q)
    _limited("fan_outs", fan_outs, 1, _MAX_CHILDREN)
    width = max(fan_outs) - 1
    found, counts = (ctypes.c_int64 * (rows * width))(), (ctypes.c_int64 * rows)()
    behind, bonus = (ctypes.c_double * (rows * width))(), (ctypes.c_double * (rows * (width + 1)))()
    candidates = _at(token_ids), _at(log_q), _size(rows), _size(m), _size(m), ctypes.c_float(0.0)
    flags = (ctypes.c_uint8 * rows)(*likeliest)
    wanted = _int64s("keys", keys, 3 * rows), stream, _int64s("drawn", drawn, rows)
    limits = _int64s("fan_outs", fan_outs, rows), flags, _size(width)
    _call("paceline_guess", *candidates, *wanted, *limits, found, counts, behind, bonus)
    listed = []
    for row, count in enumerate(counts):
        at, own = row * width, row * (width + 1)
        listed.append((found[at : at + count], behind[at : at + count], bonus[own : own + 1 + count]))
    return listed


def draft(
    x: Tensor,
    temperatures: Sequence[float],
    drawing: Sequence[int],
    guessing: Sequence[int],
    *,
    masks: Masks | None,
    top_k: Sequence[int],
    floors: Sequence[float],
    m: int,
    unlisted: Sequence[bool],
    num_best: int,
    shift: float,
    scales: Sequence[float],
    fan_outs: Sequence[int],
    streams: tuple[int, int],
) -> list[tuple[int, bytes, bytes, float, list[int], list[float], list[float]]]:
    """Draws a token of each row by the rejection rule, as a draft does, and guesses the target's, in one pass.

    That is ``largest`` of the row, ``sample`` of these, and ``guess`` of these and of the likeliest others.

    Args:
        x: [rows, tokens] logits.
        temperatures, masks, top_k, floors: as of ``pick``; top-k and floors act within the ``m`` likeliest.
        drawing, guessing: keys of the noise for the one and for the other, three numbers per row, flat.
        m: candidates of each row, all that it may draw.
        unlisted: True for a row whose guesses may be other tokens: the ``num_best`` with the largest weight + noise.
        shift: of the weight of candidates as recovered tokens, in nats.
        scales, fan_outs: as of ``sample`` and ``guess``: a row whose scale is not 1 guesses the likeliest.
        streams: of the noise for drawing and for guessing.

    Returns:
        of each row the token (-1: there is none, and nothing else), the packed columns of the q that it was drawn from,
        the distance of its two largest log q in nats, and what ``guess`` returns.
    """
    _limited("fan_outs", fan_outs, 1, _MAX_CHILDREN)
    _limited("m", [m], 1, x.shape[1])
    _limited("num_best", [num_best], 0, _MAX_TOKENS)
    rows, width = len(x), max(fan_outs) - 1
    tokens, sizes, counts = ((ctypes.c_int64 * rows)() for _ in range(3))
    q_ids, q_probs = np.empty((rows, m), np.int32), np.empty((rows, m), np.float64)
    gaps, found = (ctypes.c_double * rows)(), (ctypes.c_int64 * (rows * width))()
    behind, bonus = (ctypes.c_double * (rows * width))(), (ctypes.c_double * (rows * (width + 1)))()
    flags, likeliest = (ctypes.c_uint8 * rows)(*unlisted), (ctypes.c_uint8 * rows)(*[scale != 1.0 for scale in scales])
    _call(
        "paceline_draft",
        *_drawn(x, temperatures, drawing, streams[0], masks, top_k, floors),
        _int64s("guessing", guessing, 3 * rows),
        streams[1],
        *(_size(m), flags, _size(num_best), ctypes.c_float(shift)),
        *((ctypes.c_double * rows)(*scales), _int64s("fan_outs", fan_outs, rows), likeliest, _size(width)),
        *(tokens, _place(q_ids), _place(q_probs), sizes, gaps, found, counts, behind, bonus),
    )
    drawn, at, own = [], 0, 0
    siblings, distances, distances_bonus = found[:], behind[:], bonus[:]
    for token, q, gap, count in zip(tokens, _packed(q_ids, q_probs, sizes), gaps, counts, strict=True):
        guesses = siblings[at : at + count], distances[at : at + count], distances_bonus[own : own + 1 + count]
        drawn.append((token, *q, gap, *guesses))
        at, own = at + width, own + width + 1
    return drawn


def keep_largest_(x: Tensor, limits: Sequence[float], rooms: Sequence[int]) -> None:
    """Keeps the values above their row's limit, and the first ``rooms`` values (by id) that equal it.

    Sets the rest to -inf; ``x`` is [rows, tokens] float32.
    """
    rows, tokens = x.shape
    given = (ctypes.c_float * rows)(*limits)
    _call(
        "paceline_keep_largest",
        _at(x),
        _size(rows),
        _size(tokens),
        _size(x.stride(0)),
        given,
        _int64s("rooms", rooms, rows),
    )


def cut_below_(x: Tensor, limits: Sequence[float]) -> None:
    """Sets the values below their row's limit to -inf; ``x`` is [rows, tokens] float32."""
    rows, tokens = x.shape
    given = (ctypes.c_float * rows)(*limits)
    _call("paceline_cut_below", _at(x), _size(rows), _size(tokens), _size(x.stride(0)), given)


def probability(ids: bytes, probs: bytes, token_id: int, vocab_size: int, tolerance: float) -> float | None:
    """``sparse.probability`` of packed columns of equal length, int32 and float64; None: there is no library here."""
    library = load_library()
    if library is None:
        return None
    if len(probs) != 2 * len(ids):
        raise ValueError(f"probs has {len(probs)} bytes: {2 * len(ids)} are allowed")
    _limited("vocab_size", [vocab_size], 0, _MAX_TOKENS)
    arguments = _size(len(ids) // 4), _size(token_id), _size(vocab_size), ctypes.c_double(tolerance)
    found: float = library.paceline_probability(ids, probs, *arguments)
    return found


def verify(
    x: Tensor,
    temperatures: Sequence[float],
    keys: Sequence[int],
    *,
    top_k: Sequence[int],
    floors: Sequence[float],
    starts: Sequence[int],
    drafted: Sequence[int],
    qs: Sequence[tuple[bytes, bytes]],
    tolerance: float,
    streams: tuple[int, int],
) -> tuple[list[int], list[int], list[int], list[float]] | None:
    """Decides chains of draft tokens by the rejection rule, as ``verification.verify`` does. None: a row that is
    reached has no distribution.

    Args:
        x: [rows, tokens] logits.
        temperatures, top_k, floors: as of ``pick``, one per row.
        keys: seed bits, position and digest of the text before each row, flat.
        starts: the first row of each session, and one more: their number.
        drafted: the draft token that each row decides; that of a session's last row is not looked at.
        qs: of each row the packed columns of the q that its token was drawn from, of equal length; empty: none.
        tolerance: of the sum of a q.
        streams: of the noise for accepting and for drawing.

    Returns:
        of each session the number of accepted tokens, the next token, and 1 if the draft token in its place was
        rejected; of each row the log-probability of the token that was decided there.
    """
    rows, sessions = len(x), len(starts) - 1
    accepted, following = (ctypes.c_int64 * sessions)(), (ctypes.c_int64 * sessions)()
    rejected, logprobs = (ctypes.c_uint8 * sessions)(), (ctypes.c_float * rows)()
    ids, probs = ((ctypes.c_char_p * rows)(*column) for column in zip(*qs, strict=True))
    given = ctypes.c_float * rows
    sizes = [len(q) // 4 for q, _ in qs]
    if [8 * size for size in sizes] != [len(p) for _, p in qs] or len(qs) != rows:
        raise ValueError("the columns of a q differ in length, or a row has none: equal lengths are allowed")
    if len(starts) < 2 or (starts[0], starts[-1]) != (0, rows) or not all(map(lt, starts, starts[1:])):
        raise ValueError(f"starts is {[*starts]}: ascending rows from 0 to {rows} are allowed")
    _limited("top_k", top_k, 1, 1 << 62)
    library = load_library()
    assert library is not None, "usable() comes first"
    decided = library.paceline_verify(
        *(_at(x), _KINDS[x.dtype], _size(x.shape[1]), _size(x.stride(0))),
        *(_int64s("top_k", top_k, rows), given(*floors), given(*temperatures), _size(sessions)),
        *(_int64s("starts", starts, sessions + 1), _int64s("drafted", drafted, rows)),
        *(ids, probs, _int64s("qs", sizes, rows), ctypes.c_double(tolerance)),
        *(_int64s("keys", keys, 3 * rows), *streams, accepted, following, rejected, logprobs),
    )
    return (accepted[:], following[:], rejected[:], logprobs[:]) if decided else None


def _drawn(
    x: Tensor,
    temperatures: Sequence[float],
    keys: Sequence[int],
    stream: int,
    masks: Masks | None,
    top_k: Sequence[int] | None,
    floors: Sequence[float] | None,
) -> tuple[object, ...]:
    """The arguments of passes that draw tokens of rows."""
    rows, tokens = x.shape
    _limited("top_k", top_k or (), 1, 1 << 62)
    given, lowest = ctypes.c_float * rows, floors or (-math.inf,) * rows
    cuts = *_masks(masks, x), _int64s("top_k", top_k or (tokens,) * rows, rows), given(*lowest)
    return *_rows(x), *cuts, given(*temperatures), _int64s("keys", keys, 3 * rows), stream


def _packed(
    ids: NDArray[np.int32], probs: NDArray[np.float64], sizes: ctypes.Array[ctypes.c_int64]
) -> list[tuple[bytes, bytes]]:
    """The first entries of each row of two columns, [rows, m] both."""
    m, all_ids, all_probs = ids.shape[1], ids.tobytes(), probs.tobytes()
    ends = [(row * m, row * m + size) for row, size in enumerate(sizes)]
    return [(all_ids[4 * start : 4 * end], all_probs[8 * start : 8 * end]) for start, end in ends]


def _listed(values: ctypes.Array[Any], rows: int, width: int) -> list[list[Any]]:
    return [values[i : i + width] for i in range(0, rows * width, width)]


def _rows(x: Tensor) -> tuple[object, ...]:
    rows, tokens = x.shape
    return _at(x), _KINDS[x.dtype], _size(rows), _size(tokens), _size(x.stride(0))


def _same(token_ids: Tensor, log_q: Tensor) -> None:
    """Refuses candidates with ids or weights that the native functions cannot read."""
    if token_ids.shape != log_q.shape or token_ids.dtype != torch.int64 or log_q.dtype != torch.float32:
        found = f"{token_ids.dtype} {[*token_ids.shape]} and {log_q.dtype} {[*log_q.shape]}"
        raise ValueError(f"candidates are {found}: int64 and float32 of one shape are allowed")


def _masks(masks: Masks | None, x: Tensor) -> tuple[object, ...]:
    """The masks' place and the bytes from one row to the next."""
    if masks is None:
        return None, _size(0)
    rows, tokens = x.shape
    count, num_bytes = masks.shape
    assert count == rows, f"{count} masks for {rows} rows"
    assert 8 * num_bytes >= tokens, f"masks of {num_bytes} bytes for {tokens} tokens"
    assert masks.strides == (num_bytes, 1), "a mask is bytes, row after row"
    return _place(masks), _size(num_bytes)


def _at(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


def _place(x: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.__array_interface__["data"][0])


_size = ctypes.c_int64


def _int64s(name: str, values: Sequence[int], count: int) -> ctypes.Array[ctypes.c_int64]:
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} numbers: {count} are allowed")
    return (ctypes.c_int64 * count)(*values)


def _limited(name: str, values: Sequence[int], least: int, most: int) -> None:
    """Refuses indices and sizes beyond what a function may reach."""
    for value in (min(values, default=least), max(values, default=least)):
        if not least <= value <= most:
            raise ValueError(f"{name} is {value}: {least} to {most} is allowed")


def _call(name: str, *arguments: object) -> None:
    library = load_library()
    assert library is not None, "usable() comes first"
    getattr(library, name)(*arguments)


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """The compiled library; None if it cannot be compiled or loaded here, for a reason that is logged once."""
    library = LIBRARY.load_or_warn("tokens are drawn by torch")
    if library is not None:
        library.paceline_probability.restype = ctypes.c_double
        library.paceline_verify.restype = ctypes.c_bool
    return library
