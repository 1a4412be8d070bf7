"""The children of all leaves of a step by one native function, ``publish.cpp``: probabilities, nodes, their order.

It does the work of ``DraftGrower.publish`` for ranked candidates. From the first leaf on that is not the common case
(a hint), leaves are left to that; so are all leaves if the function cannot be compiled, which needs a C++ compiler and
Python's headers.
"""

from __future__ import annotations

import functools
import heapq
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.core import native_tree, rows
from paceline.core.native import extension
from paceline.core.sparse import TOLERANCE
from paceline.core.tree import TreeNode
from paceline.draft.growth import BestFirst, Frontier
from paceline.draft.session import DraftSession
from paceline.drafters import calibration
from paceline.drafters.growing.session import END_SHARE
from paceline.drafters.ranking import Ranking
from paceline.errors import EngineError
from paceline.model.chain import Ranked

_SOURCE = Path(__file__).with_suffix(".cpp")
log = logging.getLogger(__name__)


def prepare() -> None:
    """Compiles or loads the native functions of this module and of ``calibration.py``, so that no step waits
    for them.
    """
    _passes()


def publish(
    leaves: Sequence[tuple[DraftSession, TreeNode]], ranked: Ranked | list[Ranking], least_prob: float
) -> tuple[int, int]:
    """Publishes the ranked candidates of leaves as their children, without those less likely than ``least_prob``.

    Returns:
        the number of nodes, and the number of leading leaves that were published.
    """
    passes = _passes()
    if passes is None:
        return 0, 0
    done: tuple[int, int] = passes.publish(leaves, ranked, least_prob)
    return done


@functools.cache
def _passes() -> Any:
    """The compiled pass; None if it cannot be compiled or loaded here, for a reason that is logged once."""
    if not (expect := calibration.expect_address()) or (trees := native_tree._passes()) is None:
        return None
    try:
        passes = extension(_SOURCE, "paceline_publish", "the pass over the leaves of a step")
        types = trees.TreeNode, trees.SpeculationTree, DraftSession, Frontier, BestFirst, Ranking
        probability = (rows.addresses("paceline_probability") or [0])[0]
        passes.prepare(*types, expect, probability, TOLERANCE, END_SHARE, heapq.heappush)
    except (EngineError, ImportError, TypeError) as error:
        log.warning("nodes are published by Python, which is slower: %s", error)
        return None
    return passes
