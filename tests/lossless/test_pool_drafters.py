"""Drafters of the pool that are more than one model with the target's tokens: none changes the text of plain decoding.

Each runs in the draft's engine beside the real target, over prompts of the embedded pair. What its candidates must be
is tested in ``tests/drafters``; here, that they are accepted, and that the rejection rule keeps its law.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.lossless.power import detectable_tv
from tests.lossless.test_engines import (
    _TINY_VOCAB,
    FALSE_ALARM,
    _cells,
    _embedded_requests,
    _law,
    _p_value,
    _texts_of,
    _wrong_q,
    tiny_pair,
)
from tests.support.pump import Pump, Request, assert_same, in_mode, plain_reference
from tests.support.rings import nightly, slow
from tests.support.vocabularies import other_vocabulary

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.vocabulary import SharedVocabulary
from paceline.drafters.cascade import VerticalDrafter
from paceline.drafters.model import ModelDrafter
from paceline.drafters.parallel import ParallelDrafter
from paceline.drafters.protocol import Drafter
from paceline.drafters.suffix import ngram_drafter
from paceline.drafters.translation import Translation
from paceline.embedded import DRAFT_DIR, TARGET_DIR
from paceline.messages import Nodes
from paceline.model.loading import LoadedModel, load_pretrained, prepare
from paceline.types import Acceptance, Mode, Result, SamplingParams, SpeculationParams

assert tiny_pair  # a fixture

_SIZES = {"max_leaves": 32, "max_prefill_tokens": 64, "top_m": 64}
KINDS = ("shared vocabulary", "pard", "vertical")

_LEAST = {"shared vocabulary": 0.1, "pard": 0.01, "vertical": 0.1}
"""Share of the drafted tokens that is accepted; this PARD model was never taught what its pard token means."""


def _loaded(path: str) -> LoadedModel:
    return prepare(load_pretrained(Checkpoint.open(path), torch.float32), compile=False)


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return _loaded(str(TARGET_DIR))


@pytest.fixture(scope="module")
def plain_texts() -> dict[float, dict[str, Result]]:
    """By temperature, once they were made."""
    return {}


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[], Drafter]]:
    """Makers of one of each kind for the embedded target."""
    folder = str(other_vocabulary(tmp_path_factory.mktemp("other")))
    other = _loaded(folder)

    def shared() -> Drafter:
        shared = SharedVocabulary(Checkpoint.open(str(TARGET_DIR)).tokenizer, Checkpoint.open(folder).tokenizer)
        return ModelDrafter(other.runner(64), translation=Translation(shared, 4096, other.vocab_size), **_SIZES)

    draft = _loaded(str(DRAFT_DIR))

    def pard() -> Drafter:
        return ParallelDrafter(draft.runner(64), pard_token=1, tokens_per_leaf=3, **_SIZES)

    def vertical() -> Drafter:
        """The draft, for which n-grams guess."""
        return VerticalDrafter(draft.runner(64), guesser=ngram_drafter(), num_guesses=3, **_SIZES)

    return {"shared vocabulary": shared, "pard": pard, "vertical": vertical}


@pytest.mark.parametrize("kind", [*KINDS[:3], *slow(KINDS[3:])])
@pytest.mark.parametrize(
    ("temperature", "acceptance"),
    [(1.0, Acceptance.COUPLED), *slow([(0.0, Acceptance.COUPLED)]), *nightly([(0.0, Acceptance.REJECTION)])],
)
def test_the_text_is_that_of_plain_decoding(target, plain_texts, drafters, kind, temperature, acceptance) -> None:
    requests = {
        name: replace(request, speculation=request.speculation.model_copy(update={"acceptance": acceptance}))
        for name, request in _embedded_requests(temperature, 24).items()
    }
    if temperature not in plain_texts:
        plain_texts[temperature] = plain_reference(target, requests)
    reference = plain_texts[temperature]
    for seed, mode in enumerate((Mode.OVERLAPPED, Mode.SEQUENTIAL)):
        pump = Pump(target, None, drafter=drafters[kind](), seed=seed, late=0.1, draft_steps=(4, 12), adaptive=False)
        assert_same(pump.run(in_mode(requests, mode)), reference)
        pump.drafter.check_integrity()
        drafted = sum(r.speculation.drafted for r in pump.results.values())
        accepted = sum(r.speculation.accepted for r in pump.results.values())
        assert drafted > 20
        assert accepted > _LEAST[kind] * drafted


# -- the rejection rule ---------------------------------------------------------------------------------------------


class _Halves:
    """A vocabulary of which only the tokens below 3 are shared, in another order."""

    draft_ids = {0: 2, 1: 0, 2: 1}  # noqa: RUF012

    def encode(self, token_ids, *, start=True):
        return [{**self.draft_ids, 3: 3}[token_id] for token_id in token_ids]


def _tiny(kind: str, draft: LoadedModel) -> Drafter:
    sizes = {"max_leaves": 128, "max_prefill_tokens": 256, "top_m": _TINY_VOCAB}
    if kind == "pard":
        return ParallelDrafter(draft.runner(128), pard_token=3, tokens_per_leaf=3, **sizes)
    if kind == "vertical":
        return VerticalDrafter(draft.runner(128), guesser=ngram_drafter(), num_guesses=2, **sizes)
    return ModelDrafter(draft.runner(128), translation=Translation(_Halves(), _TINY_VOCAB, _TINY_VOCAB), **sizes)  # type: ignore[arg-type]


def _sample(tiny_pair, kind: str, num: int, mode: Mode, tamper=None) -> tuple[Counter, int, int, list]:
    """Texts of four tokens under the rejection rule, how many were drafted and accepted, and the q of all nodes."""
    _, target, draft = tiny_pair
    speculation = SpeculationParams(mode=mode, acceptance=Acceptance.REJECTION, max_draft_tokens=3)
    requests = {
        f"s{i}": Request([1, 2, 3], SamplingParams(temperature=1.0, max_tokens=4, seed=i), speculation)
        for i in range(num)
    }
    options = {"pages": 128, "max_sessions": 128, "max_step_tokens": 512, "max_model_len": 64}
    qs: list = []

    def seen(message):
        if isinstance(message, Nodes):
            qs.extend(node.q for node in message.nodes if node.q is not None)
        return [message] if tamper is None else tamper(message)

    pump = Pump(target, None, drafter=_tiny(kind, draft), late=0.1, tamper=seen, **options)
    return *_texts_of(pump, requests), qs


NUM, TV = 2000, 0.16


@pytest.mark.parametrize("kind", [*slow(["pard"]), *nightly(kind for kind in KINDS if kind != "pard")])
def test_the_rejection_rule_keeps_the_law(tiny_pair, kind: str) -> None:
    law = _law(tiny_pair[0], [1, 2, 3], 4)
    assert detectable_tv(NUM, len(_cells(law, NUM)) + 1, FALSE_ALARM) <= TV
    counts, drafted, accepted, qs = _sample(tiny_pair, kind, NUM, Mode.OVERLAPPED)
    assert 0.2 * drafted < accepted < 0.95 * drafted
    assert all(sum(q.probs) == pytest.approx(1, abs=1e-5) for q in qs)
    assert _p_value(counts, law) > FALSE_ALARM
    if kind == "shared vocabulary":
        assert {token_id for q in qs for token_id in q.token_ids} == {0, 1, 2}, "the fourth is not shared"


@pytest.mark.slow
def test_a_wrong_q_is_caught(tiny_pair) -> None:
    """The test above fails for it."""
    counts, *_ = _sample(tiny_pair, "pard", NUM, Mode.SEQUENTIAL, tamper=_wrong_q)
    assert _p_value(counts, _law(tiny_pair[0], [1, 2, 3], 4)) < FALSE_ALARM
