"""What a head brought in the rounds of an engine, and what the trainer's replay says of the same texts."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.core import rows as native
from paceline.drafters.heads.drafter import TOP_M
from paceline.drafters.heads.module import HeadModule
from paceline.drafters.training.features import states
from paceline.drafters.training.replay import Agreement, agreement
from paceline.messages import Outcome

Rounds = list[list[list[int]]]
"""The tokens of each round of each session."""


def rounds_of(sent: Iterable[object], names: Iterable[str]) -> Rounds:
    """The rounds of these sessions among what an engine has sent."""
    outcomes = [message for message in sent if isinstance(message, Outcome)]
    return [[[*each.token_ids] for each in outcomes if each.session_id == name] for name in names]


def texts_of(rounds: Rounds) -> list[list[int]]:
    return [[*itertools.chain(*parts)] for parts in rounds]


def replayed(
    model: Any,
    module: HeadModule,
    boundaries: tuple[int, ...],
    prompts: Sequence[Sequence[int]],
    rounds: Rounds,
    depths: int,
    temperature: float,
) -> Agreement:
    """What the trainer says of these texts, with as many candidates as the engine has: a native pass draws from all
    tokens, others from the likeliest ones. ``prompts`` and texts are of one length."""
    token_ids = torch.tensor([[*ids, *text] for ids, text in zip(prompts, texts_of(rounds), strict=True)])

    def unroll(*arguments: Any) -> Iterator[Tensor]:
        for logits in module.unroll(*arguments):
            if native.usable(logits.flatten(0, -2), torch.float32):
                yield logits
                continue
            yield logits.masked_fill(logits < logits.topk(TOP_M).values[..., -1:], float("-inf"))

    with torch.no_grad():
        log_p = model(token_ids, use_cache=False).logits.log_softmax(-1)
    return agreement(
        unroll,
        log_p,
        token_ids,
        torch.cat(states(model, token_ids, boundaries), -1).float(),
        torch.full((len(prompts),), len(prompts[0])),
        torch.full((len(prompts),), token_ids.shape[1] - 1),  # the last is no draft's: a proposal stops before it
        depths,
        greedy=temperature == 0,
        target_ids=module.target_ids,
        states_ahead=depths if module.exits else 0,
    )


def brought(rounds: Rounds, expected: Agreement, num_prompt: int, depths: int) -> tuple[float, float]:
    """Accepted tokens of a round, of the rounds that the replay counts, and the standard error of their difference from
    it: of the choice of texts and of what the noise lets a draft propose, which is certain at temperature 0."""
    accepted, num_rounds, variance = 0, 0, 0.0
    weights = torch.arange(1, 2 * depths, 2)  # of P(at least k are accepted) in the mean square
    for row, parts in enumerate(rounds):
        t = num_prompt - 1  # the first outcome is the prompt's own
        for part in parts[1:]:
            if t < int(expected.end[row]):
                accepted, num_rounds = accepted + len(part) - 1, num_rounds + 1
                reach = expected.probability[row, t].double().cumprod(-1)
                variance += float((weights * reach).sum() - reach.sum() ** 2)
            t += len(part)
    assert num_rounds > 50
    return accepted / num_rounds, math.hypot(expected.standard_error(depths), math.sqrt(variance) / num_rounds)
