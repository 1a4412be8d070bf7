"""Heads under the rejection rule: the law of the text is that of plain sampling, and three mistakes are seen.

That heads change no text under the coupled rule: ``tests/target/test_heads.py``.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace

import pytest
import torch
from tests.lossless.power import detectable_tv
from tests.lossless.test_engines import _TINY_VOCAB, FALSE_ALARM, _cells, _law, _p_value, tiny_pair
from tests.support.mutants import mutant
from tests.support.pump import Pump, Request
from tests.support.rings import nightly, slow

from paceline.drafters.colocated import DraftModelHead
from paceline.drafters.growing import grower
from paceline.drafters.heads.block import BlockForm, BlockHead
from paceline.drafters.heads.drafter import HeadDrafter
from paceline.drafters.heads.layers import eagle_config
from paceline.drafters.protocol import Features
from paceline.messages import SparseDistribution
from paceline.model.loading import LoadedModel, prepare
from paceline.target.heads.grower import HeadGrower
from paceline.target.heads.mounted import MountedHead
from paceline.target.mount import bind_heads
from paceline.types import Acceptance, Result, SamplingParams, SpeculationParams

assert tiny_pair  # a fixture

NUM, TV = 2000, 0.16


def draft_model(pair) -> tuple[LoadedModel, MountedHead]:
    """The target, and its draft as a head of it."""
    _, target, draft = pair
    head = DraftModelHead(draft.runner(128), max_leaves=128, max_prefill_tokens=256, top_m=_TINY_VOCAB)
    return target, MountedHead("draft_model", head, num_tokens=3)


def block_head(pair) -> tuple[LoadedModel, MountedHead]:
    """The target with a block head of random weights, whose confidence in a token hangs on the one before it."""
    model, size, features = copy.deepcopy(pair[0]), 16, Features((1,), every_position=True)
    sizes = {"hidden_size": size, "intermediate_size": size, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = eagle_config({**sizes, "num_hidden_layers": 1, "vocab_size": _TINY_VOCAB, "max_position_embeddings": 64})
    form = BlockForm(size, _TINY_VOCAB - 1, 3, 0, windows=(None,), causal=(False,), markov=4, confidence=True)
    tables = {"embed": model.get_input_embeddings(), "lm_head": model.lm_head}
    torch.manual_seed(3)
    module = BlockHead(config, form, vocab_size=_TINY_VOCAB, draft_vocab_size=None, **tables)
    torch.nn.init.zeros_(module.confidence_head.proj.weight)
    torch.nn.init.normal_(module.markov_head.markov_w1.weight, std=0.3)
    module.confidence_head.proj.weight.data[0, size:] = 1
    module.confidence_head.proj.bias.data.fill_(2)
    module.markov_head.markov_w1.weight.data[1] = -3  # behind this token none is expected
    head = HeadDrafter(module, kind="dspark", features=features, vocab_size=_TINY_VOCAB, max_leaves=128)
    target = prepare(model, compile=False, features=features)
    return target, MountedHead("dspark", head, num_tokens=3)


def sample(pair, num: int, *, adaptive: bool = True, make=draft_model) -> tuple[Counter, int, int]:
    """Texts of four tokens, and how many tokens of the head were verified and accepted."""
    target, mounted = make(pair)
    speculation = SpeculationParams(acceptance=Acceptance.REJECTION, max_draft_tokens=3)
    requests = {
        f"s{i}": Request([1, 2, 3], SamplingParams(temperature=1.0, max_tokens=4, seed=i), speculation)
        for i in range(num)
    }
    options = {"pages": 128, "max_sessions": 128, "max_step_tokens": 512, "max_model_len": 64}
    pump = Pump(target, None, heads=[mounted], late=0.1, adaptive=adaptive, **options)
    bind_heads([mounted], pump.target.runner.cache)
    results: dict[str, Result] = {}
    names = list(requests)
    for first in range(0, num, 128):
        for name in names[first : first + 128]:
            pump.submit(name, requests[name])
        results |= pump.run({})
        pump.sessions.clear()
        pump.results = {}
    return Counter(r.token_ids for r in results.values()), mounted.stats.rows, mounted.stats.rows_used


@pytest.mark.parametrize(
    ("num", "tv", "adaptive", "make"),
    [
        (NUM, TV, True, draft_model),
        *slow([(NUM, TV, False, draft_model), (NUM, TV, False, block_head)]),
        *nightly([(50_000, 0.036, True, draft_model)]),
    ],
)
def test_the_rejection_rule_keeps_the_law(tiny_pair, num: int, tv: float, adaptive: bool, make) -> None:
    """Each token of the head is drawn from its q, which is stated, and nothing is chosen by what was drawn."""
    law = _law(tiny_pair[0], [1, 2, 3], 4)
    assert detectable_tv(num, len(_cells(law, num)) + 1, FALSE_ALARM) <= tv
    counts, drafted, accepted = sample(tiny_pair, num, adaptive=adaptive, make=make)
    assert drafted > num
    assert 0.2 * drafted < accepted < 0.95 * drafted
    assert _p_value(counts, law) > FALSE_ALARM


@mutant(HeadGrower, "_offer")
def _wrong_q(offer, self, followed):
    """A q that is valid in itself but not what the token was drawn from."""
    offer(self, followed)
    if (offered := followed.session.head_offer) is not None:
        listed = (q and q.token_ids for q in offered.proposal.qs)
        flat = tuple(ids and SparseDistribution.of(ids, (1 / len(ids),) * len(ids)) for ids in listed)
        followed.session.head_offer = replace(offered, proposal=replace(offered.proposal, qs=flat))


@mutant(grower, "rank")
def _likeliest_token(rank, candidates, rows):
    """Under the rejection rule, too, the token is the likeliest one, as if it had been drawn from q."""
    rankings = rank(candidates, rows)
    return [replace(r, token_ids=(max(zip(r.q.probs, r.q.token_ids, strict=True))[1],)) if r.q else r for r in rankings]


@mutant(HeadGrower, "_offer")
def _dropped_by_what_was_drawn(offer, self, followed):
    """A proposal is withheld where its first token is a likely one."""
    offer(self, followed)
    offered = followed.session.head_offer
    if offered is not None and offered.proposal.token_ids[0] in (0, 1):
        followed.session.head_offer = None


@pytest.mark.parametrize("mutate", [_likeliest_token, *slow([_wrong_q, _dropped_by_what_was_drawn])])
def test_mistakes_are_seen(tiny_pair, mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above fails for each."""
    mutate(monkeypatch)
    counts, _, _ = sample(tiny_pair, NUM)
    assert _p_value(counts, _law(tiny_pair[0], [1, 2, 3], 4)) < FALSE_ALARM


@pytest.mark.parametrize("mutate", slow([_dropped_by_what_was_drawn]))
def test_mistakes_are_seen_with_a_head_that_ends_its_proposals(tiny_pair, mutate, monkeypatch) -> None:
    """Its confidence may end a proposal before a token is drawn, never because of it."""
    mutate(monkeypatch)
    counts, _, _ = sample(tiny_pair, NUM, adaptive=False, make=block_head)
    assert _p_value(counts, _law(tiny_pair[0], [1, 2, 3], 4)) < FALSE_ALARM
