"""The replay of acceptance against rounds that are played one by one."""

import itertools

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.drafters.heads.eagle import Eagle3
from paceline.drafters.heads.layers import eagle_config
from paceline.drafters.heads.module import HeadModule
from paceline.drafters.heads.mtp import Mtp
from paceline.drafters.training.replay import Agreement, agreement, coupled_agreement

VOCAB, SIZE, LENGTH, DEPTHS = 12, 16, 40, 3
VALUES = {
    "hidden_size": SIZE,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
}


def played(probability: Tensor, start: int, end: int) -> tuple[int, int]:
    """Accepted tokens and rounds of one row of zeros and ones, round by round."""
    accepted = rounds = 0
    t = start
    while t < end:
        run = 0
        while run < probability.shape[1] and probability[t, run]:
            run += 1
        accepted, rounds, t = accepted + run, rounds + 1, t + run + 1
    return accepted, rounds


def test_rounds_of_certain_agreement_are_those_played_one_by_one() -> None:
    probability = torch.bernoulli(torch.full((20, 30, 4), 0.7), generator=torch.Generator().manual_seed(0))
    start, end = torch.randint(0, 5, (20,)), torch.randint(20, 31, (20,))
    accepted, rounds = Agreement(probability, start, end).totals(4)
    for row in range(20):
        assert (accepted[row], rounds[row]) == played(probability[row], int(start[row]), int(end[row]))


def test_rounds_of_uncertain_agreement_are_the_mean_over_all_that_can_happen() -> None:
    probability = torch.rand(1, 5, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    accepted = rounds = 0.0
    for outcome in itertools.product((0, 1), repeat=10):
        happened = torch.tensor(outcome, dtype=torch.float64).view(5, 2)
        weight = float(torch.where(happened > 0, probability[0], 1 - probability[0]).prod())
        one = played(happened, 1, 5)
        accepted, rounds = accepted + weight * one[0], rounds + weight * one[1]
    found = Agreement(probability, torch.tensor([1]), torch.tensor([5])).totals(2)
    assert [float(x) for x in found] == pytest.approx([accepted, rounds])


def test_agreement_under_one_noise_is_that_of_many_draws() -> None:
    """Five standard errors: a false alarm of 6e-7."""
    generator = torch.Generator().manual_seed(2)
    log_p, log_q = (torch.randn(VOCAB, generator=generator).mul(1.5).log_softmax(-1) for _ in range(2))
    log_q[3] = float("-inf")
    uniform = torch.rand(200_000, VOCAB, generator=generator, dtype=torch.float64).clamp(min=1e-300)
    noise = -(-uniform.log()).log()
    ours, theirs = (log_p + noise).argmax(-1), (log_q + noise).argmax(-1)
    for token in range(VOCAB):
        drawn = ours == token
        share, count = float((theirs[drawn] == token).float().mean()), int(drawn.sum())
        expected = float(coupled_agreement(log_p, log_q, torch.tensor(token)))
        assert abs(share - expected) <= 5 * (expected * (1 - expected) / count) ** 0.5


def make(kind: str) -> tuple[HeadModule, Tensor | None, int]:
    """A random head, its vocabulary, and the width of its states."""
    torch.manual_seed(3)
    target = LlamaForCausalLM(LlamaConfig(**(VALUES | {"num_hidden_layers": 2})))
    ids = torch.tensor([0, 2, 3, 5, 6, 7, 8, 9, 11])
    if kind == "mtp":
        head: HeadModule = Mtp(target.config, target.model, 1, embed=target.model.embed_tokens, lm_head=target.lm_head)
    else:
        embed = target.model.embed_tokens
        head = Eagle3(eagle_config(VALUES), draft_vocab_size=len(ids), embed=embed, target_ids=ids)
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=0.4)
    return head.eval(), head.target_ids, SIZE * (1 if kind == "mtp" else 3)


@torch.no_grad()
def drafted(head: HeadModule, target_ids: Tensor | None, states: Tensor, token_ids: Tensor, t: int) -> list[int]:
    """What the head drafts after the token at t + 1, from its own tokens and states."""
    context = token_ids[: t + 2].tolist()
    for depth in range(DEPTHS):
        padded = torch.tensor([context + [0] * DEPTHS])
        *_, logits = head.unroll(states[None, : t + 1], padded, depth + 1)
        best = int(logits[0, t].argmax())
        context.append(best if target_ids is None else int(target_ids[best]))
    return context[t + 2 :]


@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_the_replay_of_a_head_is_its_rounds_played_with_its_own_tokens(kind: str) -> None:
    head, target_ids, width = make(kind)
    generator = torch.Generator().manual_seed(4)
    states = torch.randn(2, LENGTH, width, generator=generator)
    token_ids = torch.randint(VOCAB, (2, LENGTH), generator=generator)
    num_prompt, num_tokens = torch.tensor([5, 8]), torch.tensor([LENGTH, LENGTH - 4])
    for row in range(2):  # text that the head often drafts right, as a target's own
        for t in range(int(num_prompt[row]) - 1, LENGTH - DEPTHS - 2):
            if torch.rand((), generator=generator) < 0.7:
                token_ids[row, t + 2] = drafted(head, target_ids, states[row], token_ids[row], t)[0]
    found = agreement(
        head.unroll,
        torch.zeros(2, LENGTH, VOCAB),
        token_ids,
        states,
        num_prompt,
        num_tokens,
        DEPTHS,
        greedy=True,
        target_ids=target_ids,
    )
    accepted, rounds = found.totals(DEPTHS)
    assert float(accepted.sum()) > 10
    for row in range(2):
        hits = played_rounds(head, target_ids, states[row], token_ids[row], int(num_prompt[row]), int(num_tokens[row]))
        assert (float(accepted[row]), float(rounds[row])) == hits


def played_rounds(
    head: HeadModule, target_ids: Tensor | None, states: Tensor, token_ids: Tensor, num_prompt: int, num_tokens: int
) -> tuple[float, float]:
    """Accepted tokens and rounds of real rounds after the first token of the continuation."""
    accepted = rounds = 0
    t = num_prompt - 1
    while t + 2 + DEPTHS - 1 < num_tokens:
        run = 0
        for token in drafted(head, target_ids, states, token_ids, t):
            if token != int(token_ids[t + 2 + run]):
                break
            run += 1
        accepted, rounds, t = accepted + run, rounds + 1, t + run + 1
    return float(accepted), float(rounds)
