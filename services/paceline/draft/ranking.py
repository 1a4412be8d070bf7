"""From a drafter's candidates to the children of a node: the order in which they are expected, and on what
evidence.

Coupled and greedy: by log q + g with the target's own noise (none at temperature 0); the first is the draft's
token. Rejection: one token drawn from q, which may be proposed, then the likeliest others, which may only be
outcomes.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.draft.calibration import Evidence, ranked
from paceline.draft.drafter import Candidates
from paceline.processors import Row
from paceline.sampling import rank_coupled, row_keys
from paceline.types import SparseDistribution


class Rule(enum.Enum):
    """How a session's children are ranked; what is learned of one rule says nothing about another."""

    GREEDY = "greedy"
    COUPLED = "coupled"
    REJECTION = "rejection"


@dataclass(frozen=True, slots=True)
class RankingRow:
    """Whose candidates they are."""

    row: Row
    rule: Rule
    fan_out: int
    """Children wanted."""
    saguaro: float = 1.0
    """Rejection rule: q of the predicted next tokens is scaled by this before sampling."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """Children of one node, best first; under the rejection rule the sampled one first."""

    token_ids: tuple[int, ...]
    evidence: Evidence
    q: SparseDistribution | None = None
    """Rejection rule: what the first was drawn from."""


def rank(candidates: Candidates, rows: Sequence[RankingRow]) -> list[Ranking]:
    """The children of each row's node. Candidates whose log q is not finite are left out."""
    keys = row_keys([row.row for row in rows], candidates.log_q.device)
    token_ids, scores = rank_coupled(
        candidates.token_ids, candidates.log_q, keys.seeds, keys.positions, keys.greedy
    )
    rankings = []
    most = max(row.fan_out for row in rows)
    listed = zip(rows, token_ids[:, :most].tolist(), scores[:, :most].tolist(), strict=True)
    for row, ids, values in listed:
        kept = [(t, value) for t, value in zip(ids, values, strict=True) if math.isfinite(value)][
            : row.fan_out
        ]
        rankings.append(Ranking(tuple(t for t, _ in kept), ranked([value for _, value in kept])))
    return rankings
