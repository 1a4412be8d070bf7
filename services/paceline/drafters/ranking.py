"""From a drafter's candidates to the children of a node: their order, and the evidence for their probabilities.

Coupled and greedy: by log q + g with the target's own noise (none at temperature 0); the first is the draft's
token. Rejection: one token drawn from q, which may be proposed, then others, which may only be outcomes: guesses of the
token that the target draws if it rejects the first or has nothing to verify there, by log q + g with the noise of that
draw. With Saguaro sampling they are the likeliest ones, on which it puts the residual.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.deferred import download
from paceline.core.processors import Row
from paceline.core.sampling import RowKeys, best_coupled, best_recovered, row_keys
from paceline.core.verification import sample_draft
from paceline.drafters.calibration import Evidence, ranked, sampled
from paceline.drafters.protocol import Candidates
from paceline.messages import SparseDistribution, record

_GREEDY_TIES = 4


class Rule(enum.Enum):
    """Rule by which a session's children are ranked; calibrations are kept apart by it."""

    GREEDY = "greedy"
    COUPLED = "coupled"
    REJECTION = "rejection"


@record
class RankingRow:
    """Parameters for ranking the candidates of one node."""

    row: Row
    rule: Rule
    fan_out: int
    """Number of children wanted."""
    saguaro: float = 1.0
    """Rejection rule: q of the predicted next tokens is scaled by this before sampling."""
    nonce: int = 0
    """Rejection rule: differs for every node that is ever expanded at this position."""


@record
class Ranking:
    """Children of one node, best first; under the rejection rule the sampled one first."""

    token_ids: tuple[int, ...]
    evidence: Evidence
    q: SparseDistribution | None = None
    """Rejection rule: the distribution that the first was drawn from."""


def rank(candidates: Candidates, rows: Sequence[RankingRow]) -> list[Ranking]:
    """The children of each row's node. Candidates whose log q is not finite are left out."""
    token_ids, log_q = candidates.token_ids, candidates.log_q
    by_rule: dict[Rule, list[int]] = {}
    for i, row in enumerate(rows):
        by_rule.setdefault(row.rule, []).append(i)
    if len(by_rule) == 1:
        return _rank_alike(token_ids, log_q, rows)
    rankings: dict[int, Ranking] = {}
    for indices in by_rule.values():
        at = torch.tensor(indices, dtype=torch.int64, device=log_q.device)
        of_rule = _rank_alike(token_ids[at], log_q[at], [rows[i] for i in indices])
        rankings |= dict(zip(indices, of_rule, strict=True))
    return [rankings[i] for i in range(len(rows))]


def _rank_alike(token_ids: Tensor, log_q: Tensor, rows: Sequence[RankingRow]) -> list[Ranking]:
    """Ranks rows of one rule; the tensors are [rows, m]."""
    if rows[0].rule is Rule.REJECTION:
        token_ids, log_q = download(token_ids, log_q)  # every q is sent whole: one wait, and the rest on the host
        log_q = log_q.nan_to_num(nan=-math.inf, posinf=-math.inf, neginf=-math.inf)
        return _by_sampling(token_ids, log_q, row_keys([row.row for row in rows], log_q.device), rows)
    most = max(row.fan_out for row in rows)
    if rows[0].rule is Rule.GREEDY:
        # Without noise the first candidates stay the first; a few more, so that equal ones are put in order.
        token_ids, log_q = token_ids[:, : most + _GREEDY_TIES], log_q[:, : most + _GREEDY_TIES]
    rankings = []
    listed = zip(rows, *best_coupled(token_ids, log_q, [row.row for row in rows], most), strict=True)
    for row, ids, values in listed:
        rankings.append(ranking_of(ids[: row.fan_out], values[: row.fan_out]))
    return rankings


def ranking_of(token_ids: Sequence[int], scores: Sequence[float]) -> Ranking:
    """The children by their scores under the coupled rule or at temperature 0, best first; -inf: there is none."""
    num = len(scores)
    while num and scores[num - 1] == -math.inf:
        num -= 1
    return Ranking(tuple(token_ids[:num]), ranked(scores[:num]))


def _by_sampling(token_ids: Tensor, log_q: Tensor, keys: RowKeys, rows: Sequence[RankingRow]) -> list[Ranking]:
    """Draws a token from each row's q; the tensors are [rows, m], the keys [rows]."""
    rankings = [Ranking((), ranked(()))] * len(rows)
    with_candidates = log_q.isfinite().any(-1).nonzero().squeeze(-1)
    indices: list[int] = with_candidates.tolist()
    if not indices:
        return rankings
    nonces = torch.tensor([rows[i].nonce for i in indices], dtype=torch.int64, device=log_q.device)
    token_ids, log_q = token_ids[with_candidates], log_q[with_candidates]
    samples = sample_draft(
        token_ids,
        log_q,
        keys.seeds[with_candidates],
        keys.positions[with_candidates],
        nonces,
        [rows[i].saguaro for i in indices],
        [rows[i].fan_out for i in indices],
    )
    top = max(rows[i].fan_out for i in indices) + 1
    likeliest, values = token_ids[:, :top].tolist(), log_q[:, :top].tolist()
    guessed, scores = best_recovered(token_ids, log_q, [rows[i].row for i in indices], top)
    for at, (i, sample) in enumerate(zip(indices, samples, strict=True)):
        ids, found = (guessed, scores) if rows[i].saguaro == 1.0 else (likeliest, values)
        score_of = {v: score for v, score in zip(ids[at], found[at], strict=True) if score > -math.inf}
        best = max(score_of.values(), default=0.0)
        siblings = [v for v in score_of if v != sample.token_id][: rows[i].fan_out - 1]
        best_two = [value for value in values[at][:2] if value > -math.inf]
        evidence = sampled(best_two, [best - score_of[sibling] for sibling in siblings])
        rankings[i] = Ranking((sample.token_id, *siblings), evidence, sample.q)
    return rankings
