"""Heads as modules: what one step of all of them promises, whatever it computes."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.drafters.heads.block import BlockForm, BlockHead
from paceline.drafters.heads.eagle import Eagle, Eagle3, PEagle
from paceline.drafters.heads.layers import eagle_config
from paceline.drafters.heads.medusa import Medusa
from paceline.drafters.heads.mlp import MLPSpeculator
from paceline.drafters.heads.module import HeadModule
from paceline.drafters.heads.mtp import Mtp

VOCAB, SIZE, DRAFT_VOCAB, DEPTHS = 61, 32, 23, 3
VALUES = {
    "hidden_size": SIZE,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
}

KINDS = ["medusa", "mlp", "eagle", "eagle3", "peagle", "mtp", "mtp2", "dflash", "dspark", "jetspec"]


def heads() -> dict[str, tuple[HeadModule, int]]:
    """One head of each kind, and the width of the states that it takes."""
    torch.manual_seed(1)
    target = LlamaForCausalLM(LlamaConfig(**(VALUES | {"num_hidden_layers": 2})))
    embed, lm_head = target.get_input_embeddings(), target.lm_head
    ids = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
    made = {
        "medusa": (Medusa(SIZE, DEPTHS, lm_head=lm_head), SIZE),
        "mlp": (MLPSpeculator(VOCAB, SIZE, DEPTHS, 16, tie_weights=True), SIZE),
        "eagle": (Eagle(eagle_config(VALUES), embed=embed, lm_head=lm_head), SIZE),
        "eagle3": (Eagle3(eagle_config(VALUES), draft_vocab_size=DRAFT_VOCAB, embed=embed, target_ids=ids), 3 * SIZE),
        "peagle": (
            PEagle(
                eagle_config(VALUES),
                draft_vocab_size=None,
                embed=embed,
                lm_head=lm_head,
                mask_token_id=3,
                depths=DEPTHS,
            ),
            3 * SIZE,
        ),
        "mtp": (Mtp(target.config, target.model, 1, embed=embed, lm_head=lm_head), SIZE),
        "mtp2": (Mtp(target.config, target.model, 2, embed=embed, lm_head=lm_head), SIZE),
    }
    config = eagle_config(VALUES | {"model_type": "qwen3", "head_dim": 8, "num_hidden_layers": 2})
    form = BlockForm(3 * SIZE, 3, DEPTHS, 1, windows=(None, None), causal=(False, False))
    of_target = {"vocab_size": VOCAB, "embed": embed, "lm_head": lm_head}
    for kind, changes in {
        "dflash": {},
        "dspark": {"first_row": 0, "markov": 7, "gated": True, "convolution": (2, 8)},
        "jetspec": {"causal": (True, True), "windows": (20, None)},
    }.items():
        head = BlockHead(config, replace(form, **changes), draft_vocab_size=None, **of_target)
        made[kind] = (head, 3 * SIZE)
    for head, _ in made.values():
        for parameter in head.parameters():
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return made


def unrolled(head: HeadModule, states: Tensor, tokens: Tensor) -> Tensor:
    """[depths, B, T, vocabulary]."""
    return torch.stack(list(head.unroll(states, tokens, DEPTHS)))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_a_row_depend_on_nothing_behind_it_and_all_that_is_not_the_targets_learns(kind: str) -> None:
    head, width = heads()[kind]
    states, tokens = torch.randn(2, 9, width), torch.randint(VOCAB, (2, 9 + DEPTHS))
    before = unrolled(head, states, tokens)
    before.square().sum().backward()
    states[:, 6:] += 1
    tokens[:, 6 + DEPTHS :] = (tokens[:, 6 + DEPTHS :] + 1) % VOCAB
    after = unrolled(head, states, tokens)
    torch.testing.assert_close(before[:, :, :6], after[:, :, :6])
    assert not torch.allclose(before[:, :, 6], after[:, :, 6])
    assert all(parameter.grad is not None for parameter in head.parameters())
    assert not any("_embed" in name or "_lm_head" in name for name in head.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_only_conditional_heads_see_the_tokens_that_they_have_drafted(kind: str) -> None:
    head, width = heads()[kind]
    states, tokens = torch.randn(1, 1, width), torch.randint(VOCAB, (1, 1 + DEPTHS))
    before = unrolled(head, states, tokens)
    tokens[:, 2] = (tokens[:, 2] + 1) % VOCAB  # the first drafted one
    after = unrolled(head, states, tokens)
    torch.testing.assert_close(before[0], after[0])
    assert torch.allclose(before[1], after[1]) != head.conditional


def test_a_medusa_head_has_the_logits_of_all_depths_at_once() -> None:
    head, width = heads()["medusa"]
    states = torch.randn(2, 5, width)
    assert torch.equal(head(states), torch.stack([head.logits(states, depth) for depth in range(DEPTHS)]))
