"""From a drafter's candidates to the children of a node: their order, and the evidence for their probabilities.

Coupled and greedy: by log q + g with the target's own noise (none at temperature 0); the first is the draft's token.
Rejection: first a token drawn from q, which may be proposed; then guesses, which may only be outcomes. They guess the
target's own draw if it rejects the first (a recovered token) or has nothing to verify there (a bonus token). They are
ranked by log q + g with the noise of that draw. They may lie beyond the candidates, which hold all of q. With Saguaro
sampling a recovered token is one of the likeliest, on which it puts the residual.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core import rows as native
from paceline.core.deferred import download
from paceline.core.noise import Stream
from paceline.core.processors import Row, masks_of
from paceline.core.sampling import best_coupled, best_recovered, draft_candidates, row_keys
from paceline.core.verification import sample_draft
from paceline.drafters.calibration import ACCEPTANCE, ranked_gaps, sampled_gaps
from paceline.drafters.protocol import Candidates
from paceline.messages import SparseDistribution, record
from paceline.model.chain import Ranked

_GREEDY_TIES = 4
_SHIFT = math.log(1.0 - ACCEPTANCE)
"""Shift of a candidate's weight as a recovered token, where there are tokens that the draft never draws (nats)."""


class Rule(enum.Enum):
    """Rule by which a session's children are ranked; each rule has its own calibration."""

    GREEDY = "greedy"
    COUPLED = "coupled"
    REJECTION = "rejection"


@record
class RankingRow:
    """Parameters for ranking the candidates of one node."""

    row: Row
    rule: Rule
    fan_out: int
    """Number of requested children."""
    saguaro: float = 1.0
    """Rejection rule: q of the predicted next tokens is scaled by this before sampling."""
    nonce: int = 0
    """Rejection rule: differs for every node that is ever expanded at this position."""


@record
class Ranking:
    """Children of one node, best first; under the rejection rule the sampled one first."""

    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]
    """Score gaps, the evidence on the children (``calibration.evidence_of``)."""
    q: SparseDistribution | None = None
    """Rejection rule: the distribution that the first was drawn from."""
    bonus: tuple[float, ...] = ()
    """Rejection rule: by how much each one's score as a guess of the bonus token is below the best, in nats."""


def rank(candidates: Candidates, rows: Sequence[RankingRow]) -> list[Ranking]:
    """The children of each row's node. Candidates whose log q is not finite are left out."""
    if candidates.ranked is not None:
        return rankings_of(candidates.ranked, [row.fan_out for row in rows])
    if candidates.unread is not None:
        return _read(*candidates.unread, rows)
    token_ids, log_q = candidates.token_ids, candidates.log_q
    rules = [row.rule for row in rows]
    if rows and rules.count(rules[0]) == len(rules):
        return _rank_alike(token_ids, log_q, rows)
    by_rule: dict[Rule, list[int]] = {}
    for i, rule in enumerate(rules):
        by_rule.setdefault(rule, []).append(i)
    rankings: dict[int, Ranking] = {}
    for indices in by_rule.values():
        at = torch.tensor(indices, dtype=torch.int64, device=log_q.device)
        of_rule = _rank_alike(token_ids[at], log_q[at], [rows[i] for i in indices])
        rankings |= dict(zip(indices, of_rule, strict=True))
    return [rankings[i] for i in range(len(rows))]


def _read(logits: Tensor, at: Sequence[int], m: int, rows: Sequence[RankingRow]) -> list[Ranking]:
    """Ranks by logits [n, vocab]: one pass draws by the rejection rule, as far as it has the sessions' processors.

    ``at``: the row of ``rows`` that each of the logits is of.
    """
    rankings = [Ranking((), ())] * len(rows)
    at_once = [rows[i].rule is Rule.REJECTION and rows[i].row.state.picks_at_once for i in at]
    for draws in dict.fromkeys(at_once):
        indices = [index for index, each in enumerate(at_once) if each is draws]
        some, own = logits if len(indices) == len(at) else logits[indices], [rows[at[index]] for index in indices]
        if draws:
            made = _drawn(some, m, own)
        else:
            made = rank(Candidates(*draft_candidates(some, [row.row for row in own], m)), own)
        for index, ranking in zip(indices, made, strict=True):
            rankings[at[index]] = ranking
    return rankings


def _rank_alike(token_ids: Tensor, log_q: Tensor, rows: Sequence[RankingRow]) -> list[Ranking]:
    """Ranks rows of one rule; the tensors are [rows, m]."""
    if rows[0].rule is Rule.REJECTION:
        token_ids, log_q = download(token_ids, log_q)  # every q is sent whole: one wait, and the rest on the host
        log_q = log_q.nan_to_num(nan=-math.inf, posinf=-math.inf, neginf=-math.inf)
        return _by_sampling(token_ids, log_q, rows)
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
    return Ranking(tuple(token_ids[:num]), ranked_gaps(scores[:num]))


def rankings_of(ranked: Ranked, fan_outs: Sequence[int]) -> list[Ranking]:
    """``ranking_of`` the first ``fan_out`` of each row."""
    return [ranking_of(ids[:n], scores[:n]) for (ids, scores), n in zip(ranked, fan_outs, strict=True)]


def _by_sampling(token_ids: Tensor, log_q: Tensor, rows: Sequence[RankingRow]) -> list[Ranking]:
    """Draws a token from each row's q, and guesses the target's; the tensors are [rows, m]."""
    rankings = [Ranking((), ())] * len(rows)
    with_candidates = log_q.isfinite().any(-1).nonzero().squeeze(-1)
    indices: list[int] = with_candidates.tolist()
    if not indices:
        return rankings
    if len(indices) < len(rows):
        token_ids, log_q = token_ids[with_candidates], log_q[with_candidates]
        rows = [rows[i] for i in indices]
    keys = row_keys([row.row for row in rows])
    nonces = torch.tensor([row.nonce for row in rows], dtype=torch.int64)
    saguaro, fan_outs = [row.saguaro for row in rows], [row.fan_out for row in rows]
    samples = sample_draft(token_ids, log_q, keys.seeds, keys.positions, nonces, saguaro, fan_outs)
    best_two: list[list[float]] = log_q[:, :2].tolist()
    guessed = guess_siblings(token_ids, log_q, [sample.token_id for sample in samples], rows)
    for i, sample, top, (siblings, behind, bonus) in zip(indices, samples, best_two, guessed, strict=True):
        gaps = sampled_gaps([value for value in top if value > -math.inf], behind)
        rankings[i] = Ranking((sample.token_id, *siblings), gaps, sample.q, tuple(bonus))
    return rankings


def _drawn(logits: Tensor, m: int, rows: Sequence[RankingRow]) -> list[Ranking]:
    """``_by_sampling`` of ``draft_candidates`` in one pass over the logits [rows, vocab], whose guesses may be other
    tokens, too: a draft token is drawn from the candidates alone, so the target itself draws all of its probability
    elsewhere."""
    drawing: list[int] = []
    guessing: list[int] = []
    for row in rows:
        seed, position = row.row.state.seed_bits, row.row.position
        drawing += (seed, position, row.nonce)
        guessing += (seed, position, row.row.text_key)
    states = [row.row.state for row in rows]
    drawn = native.draft(
        logits,
        [state.temperature for state in states],
        drawing,
        guessing,
        masks=masks_of([row.row for row in rows], logits.shape[1]),
        top_k=[state.top_k for state in states],
        floors=[state.log_min_p for state in states],
        m=m,
        unlisted=[state.num_guessed > 0 and m < state.top_k for state in states],
        num_best=max(state.num_guessed for state in states),
        shift=_SHIFT,
        scales=[row.saguaro for row in rows],
        fan_outs=[row.fan_out for row in rows],
        streams=(Stream.DRAFT, Stream.RECOVER),
    )
    rankings = []
    for token, ids, probs, gap, siblings, behind, bonus in drawn:
        if token < 0:
            rankings.append(Ranking((), ()))
            continue
        q = SparseDistribution(ids, probs)
        rankings.append(Ranking((token, *siblings), (gap, *behind), q, tuple(bonus)))
    return rankings


Siblings = tuple[list[int], list[float], list[float]]
"""Guesses of the target's own token; how far each scores below the best as a recovered token; and how far the drawn
token and each guess score below the best as a bonus token (nats)."""


def guess_siblings(
    token_ids: Tensor, log_q: Tensor, drawn: Sequence[int], rows: Sequence[RankingRow]
) -> list[Siblings]:
    """Guesses the recovered and the bonus tokens of each row, ``fan_out`` - 1 of both together.

    With Saguaro sampling a recovered token is one of the likeliest.

    Args:
        token_ids, log_q: [rows, m] on the CPU.
        drawn: the sampled token of each row.
    """
    fan_outs = [row.fan_out for row in rows]
    if max(fan_outs) == 1:
        return [([], [], [math.inf])] * len(rows)
    likeliest = [row.saguaro != 1.0 for row in rows]
    if native.usable(log_q, torch.float32) and native.usable(token_ids, torch.int64):
        keys = [part for row in rows for part in (row.row.state.seed_bits, row.row.position, row.row.text_key)]
        return native.guess(token_ids, log_q, keys, Stream.RECOVER, drawn, fan_outs, likeliest)
    most = 2 * max(fan_outs)
    bonus = _scored(*best_recovered(token_ids, log_q, [row.row for row in rows], most))
    listed = _scored(token_ids[:, :most].tolist(), log_q[:, :most].tolist())
    recovered = [top if flag else r for flag, top, r in zip(likeliest, listed, bonus, strict=True)]
    return [_siblings(*row) for row in zip(drawn, recovered, bonus, fan_outs, strict=True)]


Scores = list[tuple[int, float]]
"""Tokens and their scores, best first."""


def _scored(token_ids: list[list[int]], scores: list[list[float]]) -> list[Scores]:
    rows = zip(token_ids, scores, strict=True)
    return [[pair for pair in zip(*row, strict=True) if pair[1] > -math.inf] for row in rows]


def _siblings(drawn: int, recovered: Scores, bonus: Scores, fan_out: int) -> Siblings:
    """Returns the best of both alternately: one guess for each child other than the drawn token."""
    recovered, bonus = recovered[: 2 * fan_out], bonus[: 2 * fan_out]
    in_turn = [pair[0] for both in itertools.zip_longest(recovered, bonus) for pair in both if pair is not None]
    of_recovered, of_bonus = dict(recovered), dict(bonus)
    chosen = [token for token in dict.fromkeys(in_turn) if token != drawn][: fan_out - 1]
    chosen.sort(key=lambda token: of_recovered.get(token, -math.inf), reverse=True)
    best, best_bonus = (next(iter(scores.values()), 0.0) for scores in (of_recovered, of_bonus))
    behind = [best - of_recovered.get(token, -math.inf) for token in chosen]
    return chosen, behind, [best_bonus - of_bonus.get(token, -math.inf) for token in (drawn, *chosen)]
