"""Log probabilities that choosing tokens does not compute: the model's own, of the likeliest tokens, and of a prompt's
tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.deferred import upload
from paceline.core.processors import Row
from paceline.core.sampling import process
from paceline.errors import EngineError
from paceline.types import SamplingParams, TokenLogprob, TopLogprobs

SCORED_TOGETHER = 32
"""Rows of logits that are turned into log probabilities at once."""


def logprobs_at(
    logits: Tensor, rows: Sequence[Row], decided: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> list[tuple[tuple[float, ...], tuple[TopLogprobs, ...]]]:
    """The log probabilities of tokens, and the likeliest tokens in their places, as their sessions ask for them.

    A row is looked at by itself, so the values do not depend on the proposal around it.

    Args:
        logits, rows: as ``decide`` is given them, [rows, vocab] and one per row.
        decided: of each session the indices of the rows that decided its tokens, at least one, and these tokens.
    """
    found: list[tuple[tuple[float, ...], tuple[TopLogprobs, ...]]] = [((), ())] * len(decided)
    states = [rows[places[0]].state for places, _ in decided]
    for raw in (True, False):
        sessions = [i for i, state in enumerate(states) if state.raw_logprobs is raw]
        if not sessions:
            continue
        places = [row for i in sessions for row in decided[i][0]]
        chosen = logits[upload(places, logits.device)]  # [tokens, vocab]
        scores = chosen.to(torch.float32) if raw else process(chosen, [rows[row] for row in places]).scores
        log_probs, end = torch.log_softmax(scores, -1), 0
        for i in sessions:
            token_ids, params = decided[i][1], states[i].params
            begin, end = end, end + len(token_ids)
            of_session = log_probs[begin:end]
            values = of_session.gather(-1, upload(list(token_ids), logits.device)[:, None]).squeeze(-1).tolist()
            found[i] = tuple(values), _tops(of_session, token_ids, params)
    return found


def _tops(log_probs: Tensor, token_ids: Sequence[int], params: SamplingParams) -> tuple[TopLogprobs, ...]:
    """Further tokens to report with each token; () if none. ``log_probs``: [tokens, vocab], at each position."""
    if params.logprob_token_ids:
        wanted = [list(dict.fromkeys((token_id, *params.logprob_token_ids))) for token_id in token_ids]
        values = [row[upload(ids, row.device)].tolist() for row, ids in zip(log_probs, wanted, strict=True)]
        return tuple(tuple(zip(ids, of_row, strict=True)) for ids, of_row in zip(wanted, values, strict=True))
    return tuple(likeliest(place, params.top_logprobs) for place in log_probs) if params.top_logprobs else ()


def score(logits: Tensor, token_ids: Sequence[int], count: int) -> tuple[TokenLogprob, ...]:
    """The log probabilities of given tokens by the model's own distribution, each with the ``count`` likeliest.

    Each row is processed by itself, so its values do not depend on the number of rows.

    Args:
        logits: [tokens, vocab], a row at the position of each token.
        token_ids: one per row.
        count: likeliest tokens of each row.

    Raises:
        EngineError: a row has no distribution.
    """
    found: list[TokenLogprob] = []
    for start in range(0, len(token_ids), SCORED_TOGETHER):
        part = token_ids[start : start + SCORED_TOGETHER]
        found += _scored(logits[start : start + len(part)], part, count)
    return tuple(found)


def _scored(logits: Tensor, token_ids: Sequence[int], count: int) -> list[TokenLogprob]:
    log_probs = torch.log_softmax(logits.to(torch.float32), -1)  # [tokens, vocab]
    chosen = upload(list(token_ids), logits.device)[:, None]
    own = log_probs.gather(-1, chosen)
    before = torch.arange(log_probs.shape[-1], device=logits.device) < chosen
    ranks = 1 + (log_probs > own).sum(-1) + ((log_probs == own) & before).sum(-1)
    values = own.squeeze(-1).tolist()
    if any(map(math.isnan, values)):
        raise EngineError("the logits of the prompt are not finite")
    tops = _likeliest_of_rows(log_probs, count) if count else [()] * len(values)
    return list(map(TokenLogprob, values, ranks.tolist(), tops))


def _likeliest_of_rows(log_probs: Tensor, count: int) -> list[TopLogprobs]:
    """``likeliest`` of each row, by one call for all whose last place is not a tie."""
    if count >= log_probs.shape[-1]:
        return [likeliest(row, count) for row in log_probs]
    values, ids = log_probs.topk(count + 1)
    clear = ((values[:, -1] < values[:, -2]) & values[:, -2].isfinite()).tolist()
    found: list[TopLogprobs] = []
    for i, (own, of_row) in enumerate(zip(values[:, :-1].tolist(), ids[:, :-1].tolist(), strict=True)):
        pairs = sorted(zip(of_row, own, strict=True), key=lambda pair: (-pair[1], pair[0]))
        found.append(tuple(pairs) if clear[i] else likeliest(log_probs[i], count))
    return found


def likeliest(log_probs: Tensor, count: int) -> TopLogprobs:
    """The ``count`` likeliest tokens of log probabilities [vocab], equal ones by their ids.

    ``topk`` alone leaves open which of several equal tokens it takes, and so would differ between batches.
    """
    least = log_probs.topk(min(count, len(log_probs))).values[-1].item()
    if least == -math.inf:
        token_ids = (log_probs > least).nonzero().squeeze(-1)
    else:
        token_ids = (log_probs >= least).nonzero().squeeze(-1)
    pairs = zip(token_ids.tolist(), log_probs[token_ids].tolist(), strict=True)
    return tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:count])
