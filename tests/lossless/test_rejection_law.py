"""The rejection rule through both engines: whatever drafts, the law of the text is that of plain sampling.

Each row of ``DRAFTERS`` is a way to draft; a mistake in a q, or in what is proposed, must be seen in its law.
"""

import copy
import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from scipy import stats
from tests.lossless.power import detectable_tv
from tests.support.models import noisy_copy, random_model
from tests.support.mutants import mutant
from tests.support.pump import Pump, Request
from tests.support.rings import nightly, slow
from transformers import LlamaConfig, PreTrainedModel

from paceline.drafters.cascade import VerticalDrafter
from paceline.drafters.colocated import DraftModelHead
from paceline.drafters.growing import grower
from paceline.drafters.heads.block import BlockForm, BlockHead
from paceline.drafters.heads.drafter import HeadDrafter
from paceline.drafters.heads.layers import eagle_config
from paceline.drafters.model import ModelDrafter
from paceline.drafters.parallel import ParallelDrafter
from paceline.drafters.protocol import Drafter, Features
from paceline.drafters.suffix import ngram_drafter
from paceline.drafters.translation import Translation
from paceline.messages import Nodes, SparseDistribution
from paceline.model.loading import LoadedModel, prepare
from paceline.target.control.allocation import Allocation
from paceline.target.control.session_gate import SessionGate
from paceline.target.heads.grower import HeadGrower
from paceline.target.heads.mounted import MountedHead
from paceline.target.mount import bind_heads
from paceline.types import Acceptance, Mode, Result, SamplingParams, SpeculationParams

VOCAB = 4
FALSE_ALARM = 1e-8
"""Probability that a correct implementation fails one of these tests, were the seeds not fixed."""
NUM, TV = 2000, 0.16
"""Sessions, and the total variation that would be seen in their texts with probability 0.99 (``power.py``). The same
code without engines is held to 0.03 and, every night, to 0.01 in ``test_statistical.py``."""
MANY, LITTLE = 50_000, 0.036
SIZES = {"max_leaves": 128, "max_prefill_tokens": 256, "top_m": VOCAB}


class Pair(NamedTuple):
    """A target over four tokens, as transformers runs it and as we do, and a draft that disagrees considerably."""

    model: PreTrainedModel
    target: LoadedModel
    draft: LoadedModel


@pytest.fixture(scope="module")
def pair() -> Pair:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=16,
        initializer_range=0.3,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model, own = (random_model(config, seed=4, peak=1.0) for _ in range(2))
    return Pair(model, prepare(own, compile=False), prepare(noisy_copy(model, 0.8, seed=2), compile=False))


# -- ways to draft ---------------------------------------------------------------------------------------------------


class _Halves:
    """A vocabulary of which only the tokens below 3 are shared, in another order."""

    draft_ids = {0: 2, 1: 0, 2: 1}  # noqa: RUF012

    def encode(self, token_ids, *, start=True):
        return [{**self.draft_ids, 3: 3}[token_id] for token_id in token_ids]


def draft_model(pair: Pair) -> Drafter:
    return ModelDrafter(pair.draft.runner(128), **SIZES)


def pard(pair: Pair) -> Drafter:
    return ParallelDrafter(pair.draft.runner(128), pard_token=3, tokens_per_leaf=3, **SIZES)


def vertical(pair: Pair) -> Drafter:
    return VerticalDrafter(pair.draft.runner(128), guesser=ngram_drafter(), num_guesses=2, **SIZES)


def shared_vocabulary(pair: Pair) -> Drafter:
    return ModelDrafter(pair.draft.runner(128), translation=Translation(_Halves(), VOCAB, VOCAB), **SIZES)  # type: ignore[arg-type]


def colocated(pair: Pair) -> tuple[LoadedModel, MountedHead]:
    """The target, and its draft as a head of it."""
    return pair.target, MountedHead("draft_model", DraftModelHead(pair.draft.runner(128), **SIZES), num_tokens=3)


def block_head(pair: Pair) -> tuple[LoadedModel, MountedHead]:
    """The target with a block head of random weights, whose confidence in a token hangs on the one before it."""
    model, size, features = copy.deepcopy(pair.model), 16, Features((1,), every_position=True)
    sizes = {"hidden_size": size, "intermediate_size": size, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = eagle_config({**sizes, "num_hidden_layers": 1, "vocab_size": VOCAB, "max_position_embeddings": 64})
    form = BlockForm(size, VOCAB - 1, 3, 0, windows=(None,), causal=(False,), markov=4, confidence=True)
    tables = {"embed": model.get_input_embeddings(), "lm_head": model.lm_head}
    torch.manual_seed(3)
    module = BlockHead(config, form, vocab_size=VOCAB, draft_vocab_size=None, **tables)
    torch.nn.init.zeros_(module.confidence_head.proj.weight)
    torch.nn.init.normal_(module.markov_head.markov_w1.weight, std=0.3)
    module.confidence_head.proj.weight.data[0, size:] = 1
    module.confidence_head.proj.bias.data.fill_(2)
    module.markov_head.markov_w1.weight.data[1] = -3  # behind this token none is expected
    head = HeadDrafter(module, kind="dspark", features=features, vocab_size=VOCAB, max_leaves=128)
    return prepare(model, compile=False, features=features), MountedHead("dspark", head, num_tokens=3)


IN_POOL = (draft_model, pard, vertical, shared_vocabulary)


class Sample(NamedTuple):
    """Texts of four tokens, how many tokens were drafted and accepted, and the q of all nodes of a draft."""

    counts: Counter[tuple[int, ...]]
    drafted: int
    accepted: int
    qs: list[SparseDistribution]


def sample(
    pair: Pair, make: Callable[[Pair], Any], num: int, mode: Mode = Mode.OVERLAPPED, tamper: Any = None, **options: Any
) -> Sample:
    """Serves ``num`` sessions of one prompt, 128 at a time."""
    qs: list[SparseDistribution] = []

    def seen(message: Any) -> list[Any]:
        if isinstance(message, Nodes):
            qs.extend(node.q for node in message.nodes if node.q is not None)
        return [message] if tamper is None else tamper(message)

    made, target = make(pair), pair.target
    if make in IN_POOL:
        options |= {"drafter": made, "tamper": seen}
    else:
        target, mounted = made
        options["heads"] = [mounted]
    sizes = {"pages": 128, "max_sessions": 128, "max_step_tokens": 512, "max_model_len": 64}
    pump = Pump(target, None, late=0.1, **sizes, **options)
    bind_heads(options.get("heads", []), pump.target.runner.cache)
    speculation = SpeculationParams(mode=mode, acceptance=Acceptance.REJECTION, max_draft_tokens=3)
    results: list[Result] = []
    for first in range(0, num, 128):
        for seed in range(first, min(num, first + 128)):
            sampling = SamplingParams(temperature=1.0, max_tokens=4, seed=seed)
            pump.submit(f"s{seed}", Request([1, 2, 3], sampling, speculation))
        results += pump.run({}).values()
        pump.sessions.clear()
        pump.results = {}
    drafted = sum(r.speculation.drafted for r in results)
    return Sample(Counter(r.token_ids for r in results), drafted, sum(r.speculation.accepted for r in results), qs)


# -- the law ---------------------------------------------------------------------------------------------------------


def law_of(model: PreTrainedModel, start: tuple[int, ...] = (1, 2, 3), length: int = 4) -> dict[tuple[int, ...], float]:
    """The exact joint law of the next tokens by plain sampling at temperature 1."""
    texts = list(itertools.product(range(VOCAB), repeat=length))
    with torch.no_grad():
        logits = model(torch.tensor([[*start, *t] for t in texts]), use_cache=False).logits.double()
    log_p = logits.log_softmax(-1)
    law = {
        t: math.exp(sum(log_p[i, len(start) - 1 + j, t[j]].item() for j in range(length))) for i, t in enumerate(texts)
    }
    assert sum(law.values()) == pytest.approx(1)
    return law


def cells(law: dict[tuple[int, ...], float], num: int) -> list[tuple[int, ...]]:
    """The texts that are counted one by one; the others expect fewer than five of ``num`` and are merged."""
    return [text for text, p in law.items() if num * p >= 5]


def p_value(counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """Chi-square goodness of fit; cells that expect fewer than five are merged."""
    num = counts.total()
    single = cells(law, num)
    observed, expected = [counts[text] for text in single], [num * law[text] for text in single]
    rest = num * (1 - sum(law[text] for text in single))
    if len(single) < len(law):
        observed.append(num - sum(observed))
        expected.append(rest)
    total = sum(expected)
    return float(stats.chisquare(observed, [e * num / total for e in expected]).pvalue)


def assert_kept(law: dict[tuple[int, ...], float], found: Sample, tv: float = TV) -> None:
    """Raises AssertionError if the texts are not of the law; a total variation of ``tv`` would be seen."""
    num = found.counts.total()
    assert detectable_tv(num, len(cells(law, num)) + 1, FALSE_ALARM) <= tv
    assert p_value(found.counts, law) > FALSE_ALARM


@pytest.mark.parametrize(
    ("make", "num", "tv", "options"),
    [
        (draft_model, NUM, TV, {"mode": Mode.SEQUENTIAL}),
        (colocated, NUM, TV, {}),
        *slow(
            [
                (draft_model, NUM, TV, {}),
                (pard, NUM, TV, {}),
                (colocated, NUM, TV, {"adaptive": False}),
                (block_head, NUM, TV, {"adaptive": False}),
            ]
        ),
        *nightly(
            [
                (draft_model, MANY, LITTLE, {"mode": Mode.SEQUENTIAL}),
                (draft_model, MANY, LITTLE, {}),
                (colocated, MANY, LITTLE, {}),
                (vertical, NUM, TV, {}),
                (shared_vocabulary, NUM, TV, {}),
            ]
        ),
    ],
)
def test_the_law_is_kept(pair: Pair, make: Any, num: int, tv: float, options: dict[str, Any]) -> None:
    """Each token is drawn from its q, which is stated, and nothing is chosen by what was drawn."""
    found = sample(pair, make, num, **options)
    assert_kept(law_of(pair.model), found, tv)
    assert found.drafted > (0.4 if make in IN_POOL else 1) * num
    assert 0.2 * found.drafted < found.accepted < 0.95 * found.drafted
    assert all(sum(q.probs) == pytest.approx(1, abs=1e-5) for q in found.qs)
    if make is shared_vocabulary:
        assert {token_id for q in found.qs for token_id in q.token_ids} == {0, 1, 2}, "the fourth is not shared"


def _only_the_unlikely(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget that lets a chain through only if its first token is not too likely (earlier rounds say 0.7 or less)."""

    def unlikely_only(self: Allocation, offers: Any, **options: Any) -> list[int]:
        return [len(o) if o and o[0] < 0.75 else 0 for o in offers]

    monkeypatch.setattr(Allocation, "allocate_draft_tokens", unlikely_only)
    monkeypatch.setattr(SessionGate, "review", lambda *args: None)


def _changed_nodes(message: Any, change: Callable[[Any], Any]) -> list[Any]:
    """A message whose nodes that have a q are others."""
    if not isinstance(message, Nodes):
        return [message]
    return [replace(message, nodes=tuple(node if node.q is None else change(node) for node in message.nodes))]


def _tells_what_was_drawn(message: Any) -> list[Any]:
    """A draft that gives each node the probability with which its token was drawn."""
    return _changed_nodes(message, lambda n: replace(n, prob=n.q.probs[n.q.token_ids.index(n.token_id)]))


@pytest.mark.slow
def test_the_law_is_kept_under_any_budget(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget that would choose chains by the probabilities of their nodes gets to see none of them."""
    _only_the_unlikely(monkeypatch)
    found = sample(pair, draft_model, 1280, tamper=_tells_what_was_drawn)
    assert_kept(law_of(pair.model), found, 0.2)
    assert found.drafted > 400


# -- mistakes --------------------------------------------------------------------------------------------------------


def _flat(q: SparseDistribution) -> SparseDistribution:
    return SparseDistribution.of(q.token_ids, (1 / len(q.token_ids),) * len(q.token_ids))


def _wrong_q_of_a_draft(message: Any) -> list[Any]:
    """A q that is valid in itself but not what the token was drawn from."""
    return _changed_nodes(message, lambda node: replace(node, q=_flat(node.q)))


@pytest.mark.parametrize("make", [draft_model, *slow([pard])])
def test_a_wrong_q_is_caught(pair: Pair, make: Any) -> None:
    found = sample(pair, make, NUM, Mode.SEQUENTIAL, tamper=_wrong_q_of_a_draft)
    assert p_value(found.counts, law_of(pair.model)) < FALSE_ALARM


@mutant(HeadGrower, "offer")
def _wrong_q(offer: Any, self: HeadGrower, followed: Any) -> None:
    """The same of a head."""
    offer(self, followed)
    if (offered := followed.session.head_offer) is not None:
        qs = tuple(q and _flat(q) for q in offered.proposal.qs)
        followed.session.head_offer = replace(offered, proposal=replace(offered.proposal, qs=qs))


@mutant(grower, "rank")
def _likeliest_token(rank: Any, candidates: Any, rows: Any) -> Any:
    """Under the rejection rule, too, the token is the likeliest one, as if it had been drawn from q."""
    rankings = rank(candidates, rows)
    return [replace(r, token_ids=(max(zip(r.q.probs, r.q.token_ids, strict=True))[1],)) if r.q else r for r in rankings]


@mutant(HeadGrower, "offer")
def _dropped_by_what_was_drawn(offer: Any, self: HeadGrower, followed: Any) -> None:
    """A proposal is withheld where its first token is a likely one. A head's confidence may end a proposal before a
    token is drawn, never because of it."""
    offer(self, followed)
    offered = followed.session.head_offer
    if offered is not None and offered.proposal.token_ids[0] in (0, 1):
        followed.session.head_offer = None


@pytest.mark.parametrize(
    ("change", "make"),
    [
        (_likeliest_token, colocated),
        *slow((change, colocated) for change in (_wrong_q, _dropped_by_what_was_drawn)),
        *slow([(_dropped_by_what_was_drawn, block_head)]),
    ],
)
def test_mistakes_of_a_head_are_seen(pair: Pair, change: Any, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch)
    found = sample(pair, make, NUM, adaptive=make is colocated)
    assert p_value(found.counts, law_of(pair.model)) < FALSE_ALARM
