"""Children are ranked row by row, whatever else is in the batch."""

from __future__ import annotations

import math

import pytest
import torch
from tests.support.noise import gumbel_at

from paceline.core.noise import Stream
from paceline.core.processors import Row, SamplerState
from paceline.drafters.protocol import Candidates
from paceline.drafters.ranking import RankingRow, Rule, rank
from paceline.types import SamplingParams

VOCAB, M = 40, 16


def batch(rules: list[Rule]) -> tuple[Candidates, list[RankingRow]]:
    generator = torch.Generator().manual_seed(4)
    logits = (2 * torch.randn(len(rules), VOCAB, generator=generator)).round(decimals=0)  # many ties
    log_q, token_ids = logits.log_softmax(-1).topk(M)
    rows = []
    for i, rule in enumerate(rules):
        params = SamplingParams(temperature=0.0 if rule is Rule.GREEDY else 1.0)
        state = SamplerState(params, i, [1, 2], vocab_size=VOCAB)
        saguaro = 0.5 if i % 2 else 1.0
        rows.append(RankingRow(Row(state, (3,) * i), rule, fan_out=2 + i % 3, saguaro=saguaro, nonce=i))
    return Candidates(token_ids, log_q), rows


@pytest.mark.parametrize("rules", [[Rule.COUPLED] * 3, [Rule.GREEDY] * 3, [Rule.REJECTION] * 3, list(Rule) * 3])
def test_batch_equals_single_rows_and_the_definition(rules: list[Rule]) -> None:
    candidates, rows = batch(rules)
    together = rank(candidates, rows)
    for i, row in enumerate(rows):
        alone = Candidates(candidates.token_ids[i : i + 1], candidates.log_q[i : i + 1])
        assert rank(alone, [row]) == [together[i]]
        ids = candidates.token_ids[i].tolist()
        scores = dict(zip(ids, candidates.log_q[i].tolist(), strict=True))
        found = together[i]
        if row.rule is Rule.REJECTION:
            assert found.q is not None
            assert math.fsum(found.q.probs) == pytest.approx(1)
            assert found.token_ids[0] in found.q.token_ids
            key = [torch.tensor([value]) for value in (i, row.row.position, row.row.text_key)]
            noise = gumbel_at(key[0], key[1], Stream.RECOVER, candidates.token_ids[i : i + 1], key[2])[0]
            drawn_by = {t: s + g for (t, s), g in zip(scores.items(), noise.tolist(), strict=True)}
            by = (drawn_by if row.saguaro == 1 else scores), drawn_by
            orders = [sorted(ids, key=lambda t, by=by: -by[t]) for by in by]
            in_turn = dict.fromkeys(t for pair in zip(*orders, strict=True) for t in pair if t != found.token_ids[0])
            siblings = [*in_turn][: row.fan_out - 1]
            assert sorted(found.token_ids[1:]) == sorted(siblings)
            assert found.gaps[1:] == tuple(sorted(found.gaps[1:]))
            best = max(drawn_by.values())
            behind = [best - drawn_by[t] for t in found.token_ids]
            assert [gap for gap in found.bonus if gap < math.inf] == pytest.approx(
                [gap for gap, own in zip(behind, found.bonus, strict=True) if own < math.inf], abs=1e-5
            )
            continue
        if row.rule is Rule.COUPLED:
            seeds, positions = torch.tensor([i]), torch.tensor([row.row.position])
            noise = gumbel_at(seeds, positions, Stream.COUPLED, candidates.token_ids[i : i + 1])[0]
            scores = {t: s + g for (t, s), g in zip(scores.items(), noise.tolist(), strict=True)}
            assert list(found.token_ids) == sorted(ids, key=lambda t: -scores[t])[: row.fan_out]
        else:
            best = sorted(scores.values(), reverse=True)[: row.fan_out]
            assert [scores[t] for t in found.token_ids] == best
            assert found.q is None


@pytest.mark.parametrize("rule", list(Rule))
def test_rows_with_few_no_or_broken_candidates(rule: Rule) -> None:
    candidates, rows = batch([rule] * 4)
    log_q = candidates.log_q.clone()
    log_q[0] = -math.inf
    log_q[1] = math.nan
    log_q[2, 1:] = -math.inf
    log_q[3, 0] = math.nan
    rankings = rank(Candidates(candidates.token_ids, log_q), rows)
    assert [len(r.token_ids) for r in rankings[:3]] == [0, 0, 1]
    assert rankings[2].token_ids[0] == candidates.token_ids[2, 0]
    assert candidates.token_ids[3, 0] not in rankings[3].token_ids
    for ranking in rankings:
        assert len(ranking.gaps) == len(ranking.token_ids)
