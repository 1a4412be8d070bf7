"""Log probabilities that the choice of tokens does not tell: the model's own, and those of the likeliest tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.deferred import upload
from paceline.core.processors import Row
from paceline.core.sampling import process
from paceline.types import TopLogprobs


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
            token_ids, count = decided[i][1], states[i].params.top_logprobs
            begin, end = end, end + len(token_ids)
            of_session = log_probs[begin:end]
            values = of_session.gather(-1, upload(list(token_ids), logits.device)[:, None]).squeeze(-1).tolist()
            found[i] = tuple(values), tuple(likeliest(place, count) for place in of_session) if count else ()
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
