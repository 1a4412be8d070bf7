"""Distributions of draft tokens under the rejection rule, in packed columns. They are read and checked without an
object for each of their hundreds of tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.core import rows
from paceline.messages import SparseDistribution

TOLERANCE = 1e-6
"""Largest distance from 1 of the sum of a distribution's probabilities."""
_ID, _PROB = np.dtype("<i4"), np.dtype("<f8")

Columns = tuple[NDArray[np.int32], NDArray[np.float64]]
"""Token ids and their probabilities, [n] each."""


def packed(token_ids: NDArray[np.integer], probs: NDArray[np.float64]) -> SparseDistribution:
    """The distribution with these columns, [n] each."""
    return SparseDistribution(token_ids.astype(_ID, copy=False).tobytes(), probs.astype(_PROB, copy=False).tobytes())


def columns(q: SparseDistribution) -> Columns | None:
    """Views of the columns; None if they are not of equal length."""
    if not paired(q):
        return None
    return np.frombuffer(q.packed_ids, _ID), np.frombuffer(q.packed_probs, _PROB)


def paired(q: SparseDistribution) -> bool:
    """True if its columns are of equal length."""
    size, rest = divmod(len(q.packed_ids), _ID.itemsize)
    return not rest and len(q.packed_probs) == size * _PROB.itemsize


def drawable(q: SparseDistribution, token_id: int, vocab_size: int) -> bool:
    """True if q is a distribution over distinct tokens of the vocabulary that can yield the token."""
    return probability(q, token_id, vocab_size) > 0.0


def probability(q: SparseDistribution, token_id: int, vocab_size: int) -> float:
    """Probability of the token by q, which is normalized; 0 if q is no distribution over distinct tokens of the
    vocabulary, or cannot yield the token.

    Both engines ask for every node under the rejection rule: numpy takes five times as long as a native function.
    """
    if not paired(q):
        return 0.0
    native = rows.probability(q.packed_ids, q.packed_probs, token_id, vocab_size, TOLERANCE)
    return _probability(q, token_id, vocab_size) if native is None else native


def _probability(q: SparseDistribution, token_id: int, vocab_size: int) -> float:
    found = columns(q)
    assert found is not None, "columns of unequal length have no probabilities"
    ids, probs = found
    at = np.flatnonzero(ids == token_id)
    if len(at) != 1 or not (probs.min() >= 0.0 and probs.max() <= 1.0):  # False for NaN; the sum cannot overflow
        return 0.0
    total = _total(probs)
    ordered = np.sort(ids)
    valid = abs(total - 1.0) <= TOLERANCE and ordered[0] >= 0 and ordered[-1] < vocab_size
    return float(probs[at[0]] / total) if valid and (ordered[1:] != ordered[:-1]).all() else 0.0


def normalized(q: SparseDistribution) -> Columns:
    """Columns of ``q``, which must be drawable, with probabilities that sum to 1 within float precision."""
    found = columns(q)
    assert found is not None, "columns of unequal length are not drawable"
    ids, probs = found
    return ids, probs / _total(probs)


def _total(probs: NDArray[np.float64]) -> float:
    """The sum from the first to the last, as native code takes it: numpy's own sums in pairs."""
    return float(np.add.accumulate(probs)[-1])
