"""Both engines against the algorithm in fifty lines (``core/reference.py``): identical tokens, whatever is proposed."""

import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from tests.support.models import EOS, VOCAB, noisy_copy, prompt, random_model
from tests.support.mutants import mutant
from tests.support.pump import Pump, Request
from torch import Tensor
from transformers import PreTrainedModel

from paceline.core import reference
from paceline.core.processors import Row
from paceline.core.reference import Model, speculative_decode
from paceline.model.loading import LoadedModel, prepare
from paceline.target import engine as target_engine
from paceline.types import Mode, SamplingParams, SpeculationParams

LENGTHS = (0, 1, 4, 8)
OPTIONS = {
    "plain": {},
    "processed": {"top_p": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "stops": {"min_tokens": 5, "logit_bias": {EOS: 5.0}, "stop_token_ids": tuple(range(100, 130))},
}
CASES = tuple(itertools.product((0.0, 1.0), OPTIONS))


@functools.cache
def _target() -> PreTrainedModel:
    return random_model("llama")


DRAFTS: dict[str, Callable[[], PreTrainedModel]] = {
    "good": functools.cache(lambda: noisy_copy(_target(), 0.05)),
    "random": functools.cache(lambda: random_model("llama", seed=77)),
}


def model_of(pretrained: PreTrainedModel) -> Model:
    """The whole text through transformers' own forward, at every call."""

    def logits(token_ids: Sequence[int]) -> Tensor:
        with torch.no_grad():
            return pretrained(torch.tensor([list(token_ids)]), use_cache=False).logits[0]

    return logits


def request_of(temperature: float, options: str, k: int = 0) -> Request:
    """One request of each case; its prompt does not depend on ``k``."""
    i = CASES.index((temperature, options))
    sampling = SamplingParams(temperature=temperature, max_tokens=16, seed=40 + i, **OPTIONS[options])
    return Request(prompt(i, 5 + 11 * i), sampling, SpeculationParams(max_draft_tokens=k), eos_token_ids=(EOS,))


def decode(request: Request, draft: Model, k: int) -> tuple[int, ...]:
    """The reference's answer to a request."""
    sampling, target = request.sampling, model_of(_target())
    return tuple(
        speculative_decode(
            target,
            draft,
            request.prompt,
            sampling,
            seed=sampling.seed,
            k=k,
            vocab_size=VOCAB,
            eos_token_ids=request.eos_token_ids,
        )
    )


@functools.cache
def plain_tokens() -> dict[tuple[float, str], tuple[int, ...]]:
    """The reference without drafts: one token per forward of the target."""
    return {case: decode(request_of(*case), model_of(_target()), 0) for case in CASES}


@functools.cache
def loaded(name: str) -> LoadedModel:
    """The target or a draft, as the engines run it."""
    return prepare(copy.deepcopy(_target() if name == "target" else DRAFTS[name]()), compile=False)


def differing(mode: Mode, draft: str) -> list[str]:
    """The sessions, one of each case and length, to which the engines give other tokens than the reference."""
    requests = {}
    for (temperature, options), k in itertools.product(CASES, LENGTHS):
        request = request_of(temperature, options, k)
        speculation = request.speculation.model_copy(update={"mode": mode})
        name = f"T={temperature} {options} K={k}"
        requests[name] = Request(request.prompt, request.sampling, speculation, request.eos_token_ids)
    pump = Pump(loaded("target"), loaded(draft), seed=3, max_sessions=32, pages=96, draft_pages=96)
    results = pump.run(requests)
    if mode is not Mode.PLAIN and draft == "good":
        assert pump.target.stats.nodes_used > 30, "speculation took place"
    expected = plain_tokens()
    cases = [case for case in CASES for _ in LENGTHS]
    return [name for name, case in zip(requests, cases, strict=True) if results[name].token_ids != expected[case]]


def test_the_cases_are_not_trivial() -> None:
    texts = plain_tokens()
    assert len(set(texts.values())) == len(CASES)
    assert len({len(text) for text in texts.values()}) > 1, "some text ends with a stop token"


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("k", LENGTHS[1:])
def test_the_reference_is_the_same_for_every_draft_and_length(draft: str, k: int) -> None:
    guess = model_of(DRAFTS[draft]())
    for case in CASES:
        assert decode(request_of(*case), guess, k) == plain_tokens()[case], case


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("mode", Mode)
def test_both_engines_equal_the_reference(mode: Mode, draft: str) -> None:
    """Plain decoding, sequential and overlapped speculation; temperatures 0 and 1; K = 0, 1, 4 and 8."""
    assert differing(mode, draft) == []


# -- mutants: each must be caught by the comparison above ---------------------------------------------------------


def _noise_of_another_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise of every row is that of the place before it."""
    position = Row.position.fget
    monkeypatch.setattr(Row, "position", property(lambda row: position(row) - 1))


@mutant(target_engine, "decide")
def accepts_one_more(decide, logits, rows, proposals, rules):
    """The first draft token that the target would not have drawn is emitted."""
    verdicts = decide(logits, rows, proposals, rules)
    return [
        replace(v, token_ids=(*v.token_ids[:-1], p.token_ids[v.num_accepted])) if v.num_accepted < len(p) else v
        for v, p in zip(verdicts, proposals, strict=True)
    ]


@pytest.mark.parametrize(
    "mutant", [_noise_of_another_position, accepts_one_more], ids=lambda mutant: mutant.__name__.strip("_")
)
def test_mutants_of_the_engines_are_caught(mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_tokens()  # computed before anything is wrong
    mutant(monkeypatch)
    assert differing(Mode.OVERLAPPED, "good")


def test_a_reference_that_accepts_one_more_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other way round: the comparison of drafts and lengths notices a wrong reference."""
    expected = plain_tokens()
    monkeypatch.setattr(reference, "next", lambda found, default: min(next(found, default) + 1, default), raising=False)
    request = request_of(1.0, "plain")
    guess = model_of(DRAFTS["random"]())
    assert decode(request, guess, 4) != expected[1.0, "plain"]
