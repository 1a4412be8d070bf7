"""Probability that the target's next token is the draft's rank-r candidate, learned while serving.

A draft's own probabilities are over- or under-confident, and under the coupled rule the ranking includes noise, so
neither is the chance of a hit. It is counted instead: by rank, and by a bin of the *gap* that separates the candidate
from the best one. The engine-wide table is the prior of a session's table, and a softmax of the scores is the prior of
the engine-wide one. Each prior weighs a few observations; old observations fade.

Under the rejection rule rank 0 is the sampled token and its probability is that of being accepted. It depends on q,
never on which token was drawn, so that no decision made by it can bias the output.

``calibration.cpp`` computes the functions here for all leaves of a step, with the same bits. Without a compiler these
functions are used instead.
"""

from __future__ import annotations

import ctypes
import functools
import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path

from paceline.core.native import Library
from paceline.messages import record

_EDGES = tuple(0.03 * 2.0**i for i in range(10))
"""Edges between the bins of the gap, in nats: 0.03 to 15."""
_NUM_BINS = len(_EDGES) + 1

_RANKED_MASS = 0.95
_WEIGHT = 8.0
"""Observations that a parent, or the prior, counts as."""
ACCEPTANCE = 0.75
"""Share of draft tokens that the target is taken to accept before any was tried."""

LIBRARY = Library(
    Path(__file__).with_suffix(".cpp"), "the calibration of drafts", ("-ffp-contract=off",), of_torch=False
)


@record
class Evidence:
    """Evidence on the candidates of one expansion before the target decides; one entry per rank."""

    gaps: tuple[float, ...]
    """Nats >= 0. Rank 0: to the second best, inf without one. Others: from the best."""
    priors: tuple[float, ...]
    """Probabilities to use before anything was observed."""


def ranked(scores: Sequence[float]) -> Evidence:
    """Evidence under the coupled rule and greedy decoding, from the candidates' scores, best first."""
    return evidence_of(ranked_gaps(scores), sampled=False)


def ranked_gaps(scores: Sequence[float]) -> tuple[float, ...]:
    """The gaps of ``ranked``."""
    if not scores:
        return ()
    best = scores[0]
    gaps = [best - score for score in scores]
    gaps[0] = gaps[1] if len(gaps) > 1 else math.inf
    return tuple(gaps)


def sampled_gaps(log_q: Sequence[float], behind: Sequence[float]) -> tuple[float, ...]:
    """The gaps under the rejection rule.

    Args:
        log_q: the two largest of all tokens, in nats.
        behind: how far the score of each guessed sibling is below the best one, in nats.
    """
    return (log_q[0] - log_q[1] if len(log_q) > 1 else math.inf, *behind)


def evidence_of(gaps: tuple[float, ...], *, sampled: bool) -> Evidence:
    """The evidence that the gaps of one expansion are; ``sampled``: under the rejection rule."""
    if not gaps:
        return Evidence((), ())
    weights = [math.exp(-gap) for gap in gaps[1:]]
    if sampled:
        scale = (1.0 - ACCEPTANCE) / max(_sum(weights), 1.0)
        return Evidence(gaps, (ACCEPTANCE, *[weight * scale for weight in weights]))
    weights.insert(0, 1.0)
    scale = _RANKED_MASS / _sum(weights)
    return Evidence(gaps, tuple([weight * scale for weight in weights]))


def guessed(behind: Sequence[float]) -> Evidence:
    """Evidence on a bonus token, which the target draws with nothing to verify: the sampled token is a guess like any.

    Args:
        behind: how far each guess's score is below the best one, in nats, in ascending order.
    """
    if not behind:
        return Evidence((), ())
    weights = [math.exp(-gap) for gap in behind]
    scale = _RANKED_MASS / max(_sum(weights), 1.0)
    first = behind[1] - behind[0] if len(behind) > 1 and behind[0] < math.inf else math.inf
    return Evidence((first, *behind[1:]), tuple([weight * scale for weight in weights]))


class _Table(ctypes.Structure):
    """A calibration as ``calibration.cpp`` reads it."""

    _fields_ = (
        ("parent", ctypes.c_void_p),
        ("cells", ctypes.c_void_p),
        ("num_ranks", ctypes.c_int64),
        ("keep", ctypes.c_double),
        ("weight", ctypes.c_double),
    )


class Calibration:
    """Share of hits by rank and bin of the gap, leaning on ``parent`` or, without one, on the prior.

    ``horizon``: observations of a bin that are remembered. A parent has none itself; it also records every observation.
    A rank that only one has is its own.
    """

    def __init__(self, num_ranks: int, parent: Calibration | None = None, *, horizon: float = 512.0) -> None:
        assert parent is None or parent._parent is None, "a parent has none itself"
        self._parent: Calibration | None = parent
        self._keep = 1.0 - 1.0 / horizon
        # [rank][bin][2]: fading sums of hits and of observations. Native code has their address.
        self.cells = array("d", bytes(2 * 8 * num_ranks * _NUM_BINS))
        cells = self.cells.buffer_info()[0]
        above = None if parent is None else parent.address
        self._table = _Table(above, cells, num_ranks, self._keep, _WEIGHT)
        self.address: int = ctypes.addressof(self._table)
        """Address at which native code reads the table, while this object lives."""

    def probabilities(self, evidence: Evidence) -> list[float]:
        """Probability that the target takes each candidate: non-increasing in rank, of sum at most 1.

        The value of rank 0 depends on its own gap and prior only.
        """
        pairs = zip(evidence.gaps, evidence.priors, strict=True)
        probs = [self._value(rank, bisect_right(_EDGES, gap), prior) for rank, (gap, prior) in enumerate(pairs)]
        least = math.inf
        for rank, prob in enumerate(probs):
            if prob > least:
                probs[rank] = least
            else:
                least = prob
        rest = _sum(probs[1:])
        if probs and rest > 1.0 - probs[0]:
            scale = (1.0 - probs[0]) / rest
            probs[1:] = [prob * scale for prob in probs[1:]]
        return probs

    def first(self) -> tuple[tuple[float, ...], list[float], list[float], float]:
        """The edges of the bins, and the probability of rank 0 in each as ``constants[bin] + slopes[bin] * prior``; the
        prior is its share of the last number, the mass of what ``ranked`` takes."""
        constants = [self._value(0, at, 0.0) for at in range(_NUM_BINS)]
        slopes = [self._value(0, at, 1.0) - constant for at, constant in enumerate(constants)]
        return _EDGES, constants, slopes, _RANKED_MASS

    def observe(self, gaps: Sequence[float], rank: int | None) -> None:
        """Records the rank of the candidate that the target took (None: none of them), here and in the parent."""
        if (library := load_library()) is not None:
            seen, taken = array("d", gaps), -1 if rank is None else rank
            library.paceline_observe(self.address, len(seen), seen.buffer_info()[0], taken)
            return
        for r, gap in enumerate(gaps):
            at = 2 * (r * _NUM_BINS + bisect_right(_EDGES, gap))
            self._add(at, 1.0 if r == rank else 0.0)
            if self._parent is not None:
                self._parent._add(at, 1.0 if r == rank else 0.0)

    def _add(self, at: int, hit: float) -> None:
        cells, keep = self.cells, self._keep
        if at < len(cells):
            cells[at] = keep * cells[at] + hit
            cells[at + 1] = keep * cells[at + 1] + 1.0

    def _value(self, rank: int, of_bin: int, prior: float) -> float:
        """Probability of a rank whose gap is in a bin; the prior, if neither this table nor its parent has the rank."""
        at = 2 * (rank * _NUM_BINS + of_bin)
        for table in (self._parent, self):
            if table is not None and at < len(table.cells):
                prior = (table.cells[at] + _WEIGHT * prior) / (table.cells[at + 1] + _WEIGHT)
        return prior


@record
class Expansion:
    """Evidence from which the probabilities of one node's candidates follow."""

    gaps: tuple[float, ...]
    """Evidence on the candidates: of ``ranked``, or with ``bonus`` of ``sampled``."""
    calibration: Calibration
    bonus: tuple[float, ...] = ()
    """Rejection rule: the gaps of the same candidates as guesses of a bonus token, in the order of ``gaps``."""
    of_bonus: Calibration | None = None
    """Rejection rule: of such guesses."""
    share: float = 0.0
    """Rejection rule: how likely a bonus token follows the node."""


def expect(expansions: Sequence[Expansion], least: float) -> list[list[float]]:
    """Probabilities of the candidates of nodes, by ``Calibration.probabilities``. A node's trailing candidates below
    ``least`` are left out, a bonus token's by its share.

    A first candidate always stays.
    """
    library = load_library()
    if library is None:
        return [_expected(expansion, least) for expansion in expansions]
    sizes = array("q", [len(it.gaps) for it in expansions])
    tables = array("q", [it.calibration.address for it in expansions])
    gaps = array("d", [gap for it in expansions for gap in it.gaps])
    probs, kept = array("d", gaps), array("q", sizes)
    columns: list[array[int] | array[float]] = [sizes, tables, gaps, probs, kept]
    if any(it.bonus for it in expansions):
        columns.append(array("q", [0 if it.of_bonus is None else it.of_bonus.address for it in expansions]))
        columns.append(array("d", [it.share for it in expansions]))
        columns.append(array("d", [gap for it in expansions for gap in it.bonus or it.gaps]))
    given = [column.buffer_info()[0] for column in columns]
    library.paceline_expect(len(sizes), least, *given, *[None] * (8 - len(given)))
    values = probs.tolist()
    ends = accumulate(sizes)
    return [values[end - size : end - size + num] for end, size, num in zip(ends, sizes, kept, strict=True)]


def bonus_probs(calibration: Calibration, gaps: Sequence[float]) -> list[float]:
    """Probabilities that the target draws the candidates of an expansion as a bonus token, in their order.

    ``gaps``: by how much each one's score as a guess is below the best, in nats.
    """
    order = by_guess(gaps)
    probs = [0.0] * len(gaps)
    for rank, prob in zip(order, calibration.probabilities(guessed([gaps[r] for r in order])), strict=True):
        probs[rank] = prob
    return probs


def by_guess(gaps: Sequence[float]) -> list[int]:
    """Indices of the candidates of an expansion, the best guess of a bonus token first."""
    return sorted(range(len(gaps)), key=gaps.__getitem__)


def _expected(it: Expansion, least: float) -> list[float]:
    """``expect`` of one node: the reference implementation of ``paceline_expect``."""
    probs = it.calibration.probabilities(evidence_of(it.gaps, sampled=bool(it.bonus)))
    worth = probs
    if it.bonus:
        assert it.of_bonus is not None
        guesses = bonus_probs(it.of_bonus, it.bonus)
        worth = [max(prob, it.share * guess) for prob, guess in zip(probs, guesses, strict=True)]
    num = len(probs)
    while num > 1 and worth[num - 1] < least:
        num -= 1
    return probs[:num]


def _sum(values: Iterable[float]) -> float:
    """From the first to the last, each addition rounded: ``sum`` rounds otherwise from Python 3.12 on."""
    total = 0.0
    for value in values:
        total += value
    return total


def prepare() -> None:
    """Compiles or loads the native functions now, so that no step waits for them."""
    load_library()


@functools.cache
def expect_address() -> int:
    """Address of ``paceline_expect`` for other native code; 0: there is no library here."""
    library = load_library()
    return 0 if library is None else ctypes.cast(library.paceline_expect, ctypes.c_void_p).value or 0


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """The compiled library; None if it cannot be compiled or loaded here, for a reason that is logged once.

    Its calls take some microseconds and keep the interpreter lock.
    """
    library = LIBRARY.load_or_warn("probabilities of nodes are computed by Python", ctypes.PyDLL)
    if library is None:
        return None
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    library.paceline_expect.argtypes = [integer, ctypes.c_double, *[pointer] * 8]
    library.paceline_observe.argtypes = [pointer, integer, pointer, integer]
    library.paceline_expect.restype = library.paceline_observe.restype = None
    return library
