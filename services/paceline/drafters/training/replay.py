"""Acceptance of a head, replayed offline: text that the target has continued, and the head's guesses all along it.

A round drafts K tokens from where the last one ended. While all that it has drafted was right, the head has seen the
true tokens and its own states: exactly a row of ``HeadModule.unroll``. So one teacher-forced pass answers every round
that could begin at any position, and a recurrence over the positions weighs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

Unroll = Callable[[Tensor, Tensor, int], Iterator[Tensor]]
"""(states [B, T, .], token_ids [B, T + depths], depths) -> logits [B, T, vocabulary] of each depth."""


def coupled_agreement(log_p: Tensor, log_q: Tensor, token_ids: Tensor) -> Tensor:
    """Probability that a draft with the target's Gumbel noise proposes the token that the target has drawn.

    Target and draft take ``argmax_v(log p_v + g_v)`` and ``argmax_v(log q_v + g_v)`` of the same noise. Both are x with
    probability 1 / sum_v max(p_v / p_x, q_v / q_x) (the minimum of exponential variables), the target's is with p_x.

    Args:
        log_p: [..., vocabulary] of the target, in nats.
        log_q: the same of the draft; -inf: it never proposes the token.
        token_ids: [...] int64, what the target has drawn.

    Returns:
        [...] float.
    """
    index = token_ids[..., None]
    ratio = log_p.gather(-1, index) - log_q.gather(-1, index)
    sums = torch.maximum(log_p, log_q + ratio).exp().sum(-1)
    return torch.where(torch.isinf(ratio[..., 0]), torch.zeros_like(sums), (1.0 / sums).clamp(max=1.0))


@dataclass(frozen=True, slots=True)
class Agreement:
    """Probability that the head drafts the target's token, everywhere in some rows of text.

    Row t of a text stands for a round after the token at t + 1: depth d drafts the token at t + 2 + d.
    """

    probability: Tensor
    """[rows, T, depths] float: given that all shallower ones were right. Of greedy text 0 or 1."""
    start: Tensor
    """[rows] int64: the first round's t, its state the last one of the prompt."""
    end: Tensor
    """[rows] int64: rounds begin at t < end, so that every depth has a token to compare with."""

    def inside(self) -> Tensor:
        """[rows, T] bool: where a round may begin."""
        t = torch.arange(self.probability.shape[1])
        return (t >= self.start[:, None]) & (t < self.end[:, None])

    def by_depth(self) -> list[float]:
        """Mean agreement of each depth over all positions."""
        found: list[float] = self.probability[self.inside()].mean(0).tolist()
        return found

    def given_prefix(self) -> list[float]:
        """Agreement of each depth where the head has agreed at all shallower ones."""
        reached = self.probability[self.inside()].cumprod(-1)
        before = torch.cat([torch.ones(1), reached.sum(0)[:-1] / len(reached)])
        found: list[float] = (reached.mean(0) / before.clamp(min=1e-9)).tolist()
        return found

    def accepted_per_round(self, depths: int) -> float:
        """Mean accepted tokens of rounds of ``depths`` drafted tokens, each begun where the last one ended."""
        accepted, rounds = self.totals(depths)
        return float(accepted.sum() / rounds.sum().clamp(min=1e-9))

    def totals(self, depths: int) -> tuple[Tensor, Tensor]:
        """Expected accepted tokens and rounds of each row, [rows] both."""
        reach = self.probability[..., :depths].double().cumprod(-1)  # of at least 1, 2, .. tokens
        one = torch.ones_like(reach[..., :1])
        exactly = torch.cat([one, reach], -1) - torch.cat([reach, torch.zeros_like(one)], -1)
        num_rows, num_positions = self.probability.shape[:2]
        begins = torch.zeros(num_rows, num_positions + depths + 1, dtype=torch.float64)
        begins.scatter_(1, self.start[:, None], 1.0)
        accepted, rounds = torch.zeros(num_rows, dtype=torch.float64), torch.zeros(num_rows, dtype=torch.float64)
        for t in range(num_positions):
            weight = begins[:, t] * (t < self.end)
            rounds += weight
            accepted += weight * reach[:, t].sum(-1)
            begins[:, t + 1 : t + depths + 2] += weight[:, None] * exactly[:, t]
        return accepted, rounds

    def standard_error(self, depths: int) -> float:
        """Standard error of ``accepted_per_round`` over the choice of texts (a ratio estimate, rows independent)."""
        accepted, rounds = self.totals(depths)
        residual = accepted - accepted.sum() / rounds.sum() * rounds
        return float(residual.square().sum().sqrt() / rounds.sum())


@torch.no_grad()
def agreement(
    unroll: Unroll,
    log_p: Tensor,
    token_ids: Tensor,
    states: Tensor,
    num_prompt: Tensor,
    num_tokens: Tensor,
    depths: int,
    *,
    greedy: bool,
    target_ids: Tensor | None = None,
    states_ahead: int = 0,
) -> Agreement:
    """The agreement of a head along rows of text.

    Args:
        unroll: of the head.
        log_p: [B, length, vocabulary] log probabilities of the target after each token.
        token_ids: [B, length].
        states: [B, length, width] as the head takes them.
        num_prompt: [B], num_tokens: [B]: tokens of the prompt, and of the whole row.
        depths: most tokens of a round.
        greedy: the target has taken its likeliest token each time; else it was drawn at temperature 1.
        target_ids: the target's id of each logit; None: the same.
        states_ahead: states that ``unroll`` takes beyond the last position where a round begins (``HeadModule.exits``).
    """
    num_positions = token_ids.shape[1] - depths - 1
    parts = []
    for depth, logits in enumerate(unroll(states[:, : num_positions + states_ahead], token_ids, depths)):
        wanted = token_ids[:, 2 + depth : 2 + depth + num_positions]
        log_q = logits.float().log_softmax(-1)
        if greedy:
            best = log_q.argmax(-1)
            parts.append(((best if target_ids is None else target_ids[best]) == wanted).float())
            continue
        theirs = log_p[:, 1 + depth : 1 + depth + num_positions]
        if target_ids is not None:
            whole = torch.full_like(theirs, float("-inf"))
            whole[..., target_ids] = log_q
            log_q = whole
        parts.append(coupled_agreement(theirs, log_q, wanted))
    return Agreement(
        torch.stack(parts, -1).cpu(),
        (num_prompt.long() - 1).clamp(max=num_positions - 1).cpu(),
        (num_tokens.long() - depths - 1).clamp(min=0).cpu(),
    )


def joined(parts: list[Agreement]) -> Agreement:
    """All rows of several."""
    return Agreement(*(torch.cat([getattr(part, name) for part in parts]) for name in ("probability", "start", "end")))
