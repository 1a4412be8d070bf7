"""Log probabilities of the likeliest tokens: whatever was proposed, those of plain decoding, to the bit."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.lossless.test_trees import any_subtrees
from tests.support.models import EOS, VOCAB, pair, prompt
from tests.support.pump import Pump, Request, assert_same, in_mode, plain_reference
from tests.support.schemas import json_grammars

from paceline.core import logprobs, verification
from paceline.core.logprobs import likeliest
from paceline.core.processors import Row, SamplerState
from paceline.core.tree import Proposal
from paceline.core.verification import decide
from paceline.types import Acceptance, LogprobsMode, Mode, Result, SamplingParams, SpeculationParams, StructuredOutput

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"top_logprobs": 5},
    "raw": {"top_logprobs": 20, "temperature": 0.8, "logprobs_mode": LogprobsMode.RAW},
    "processed": {"top_logprobs": 3, "temperature": 0.7, "top_p": 0.9, "frequency_penalty": 0.5},
    "few are allowed": {"top_logprobs": 20, "temperature": 1.0, "top_k": 4},
    "bound": {
        "top_logprobs": 8,
        "temperature": 1.0,
        "structured_output": StructuredOutput(regex="[a-f]{3,9}(-[0-9])+"),
    },
    "raw and bound": {
        "top_logprobs": 2,
        "logprobs_mode": LogprobsMode.RAW,
        "structured_output": StructuredOutput(json_object=True),
    },
    "listed": {"logprob_token_ids": (7, 3, 7, VOCAB - 1), "temperature": 0.8, "logprobs_mode": LogprobsMode.RAW},
    "listed, some forbidden": {"logprob_token_ids": (7, 3), "top_logprobs": 2, "temperature": 1.0, "top_k": 4},
    "none": {"temperature": 1.0},
    "only raw": {"temperature": 1.3, "logprobs_mode": LogprobsMode.RAW},
}


def requests() -> dict[str, Request]:
    return {
        name: Request(
            prompt(i, 4 + i),
            SamplingParams(max_tokens=24, seed=40 + i, **options),
            SpeculationParams(max_draft_tokens=(8, 4)[i % 2]),
            eos_token_ids=(EOS,),
        )
        for i, (name, options) in enumerate(OPTIONS.items())
    }


def differing(results: dict[str, Result], expected: dict[str, Result]) -> list[str]:
    """The sessions whose log probabilities are not those of plain decoding."""
    return [
        name
        for name, one in expected.items()
        if (results[name].top_logprobs, results[name].logprobs) != (one.top_logprobs, one.logprobs)
    ]


@pytest.fixture(scope="module")
def expected() -> dict[str, Result]:
    return plain_reference(pair("llama")[0], requests(), grammars=json_grammars())


def run(asked: dict[str, Request], seed: int) -> dict[str, Result]:
    pump = Pump(*pair("llama"), seed=seed, pages=24, draft_pages=40, grammars=json_grammars())
    results = pump.run(asked)
    assert not pump.failures
    assert sum(one.speculation.accepted for one in results.values()) > 20
    return results


def test_they_are_those_of_plain_decoding(expected: dict[str, Result], monkeypatch: pytest.MonkeyPatch) -> None:
    chains = run(requests(), 1)
    assert_same(chains, expected)
    assert not differing(chains, expected)
    assert not differing(run(in_mode(requests(), Mode.SEQUENTIAL), 3), expected)
    any_subtrees(monkeypatch)
    assert not differing(run(requests(), 2), expected)
    rows = verification.Verdict.rows
    monkeypatch.setattr(  # the mutant: the rows beside each other, not those of the path
        verification.Verdict, "rows", lambda self, proposal: [*range(len(rows(self, proposal)))]
    )
    assert differing(run(requests(), 2), expected)


def test_they_are_as_many_as_asked_for_and_the_chosen_token_has_its_own(expected: dict[str, Result]) -> None:
    for name, result in expected.items():
        if name.startswith("listed"):
            continue
        wanted = OPTIONS[name].get("top_logprobs", 0)
        assert len(result.top_logprobs) == (len(result.token_ids) if wanted else 0)
        for token_id, logprob, top in zip(result.token_ids, result.logprobs, result.top_logprobs, strict=False):
            values = [value for _, value in top]
            assert values == sorted(values, reverse=True)
            assert all(math.isfinite(value) for value in values)
            assert dict(top).get(token_id, logprob) == logprob
            assert len(top) <= wanted
            if name in ("greedy", "raw"):
                assert len(top) == wanted
            if name == "greedy":
                assert top[0] == (token_id, logprob)
    assert {len(top) for top in expected["few are allowed"].top_logprobs} == {4}


def test_listed_tokens_are_told_behind_the_token_itself(expected: dict[str, Result]) -> None:
    """In the order of the request and once, instead of the likeliest ones."""
    for name in ("listed", "listed, some forbidden"):
        result, listed = expected[name], OPTIONS[name]["logprob_token_ids"]
        assert len(result.top_logprobs) == len(result.token_ids)
        for token_id, logprob, top in zip(result.token_ids, result.logprobs, result.top_logprobs, strict=True):
            assert top[0] == (token_id, logprob)
            assert [one for one, _ in top] == list(dict.fromkeys((token_id, *listed)))
    assert all(value > -math.inf for top in expected["listed"].top_logprobs for _, value in top)
    assert any(value == -math.inf for top in expected["listed, some forbidden"].top_logprobs for _, value in top)


def test_rejection_reports_the_targets_distribution() -> None:
    """p of the place, whichever rule has drawn the token."""
    asked = {
        name: replace(one, speculation=SpeculationParams(acceptance=Acceptance.REJECTION))
        for name, one in requests().items()
    }
    results = run(asked, 5)
    for name, result in results.items():
        for token_id, logprob, top in zip(result.token_ids, result.logprobs, result.top_logprobs, strict=False):
            assert dict(top).get(token_id, logprob) == logprob, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_verdict_has_the_values_of_each_row(dtype: torch.dtype) -> None:
    """By the definition, row for row; with bfloat16 many are equal, and the lower ids come first."""
    torch.manual_seed(5)
    logits = torch.randn(4, VOCAB).to(dtype)
    params = SamplingParams(top_logprobs=20, temperature=0.5)
    state = SamplerState(params, 3, [1, 2], vocab_size=VOCAB)
    drafted = tuple(logits.argmax(-1)[:3].tolist())
    rows = [Row(state, drafted[:i]) for i in range(4)]
    (verdict,) = decide(logits, rows, [Proposal(drafted)], [Acceptance.COUPLED])
    for row, top in zip(logits, verdict.top_logprobs, strict=False):
        values = torch.log_softmax((row.float() - row.float().max()) / 0.5, -1).tolist()
        assert top == tuple(sorted(enumerate(values), key=lambda pair: (-pair[1], pair[0]))[:20])
    assert len(verdict.top_logprobs) == len(verdict.token_ids)
    listed = SamplerState(params.model_copy(update={"logprob_token_ids": (9, 4)}), 3, [1, 2], vocab_size=VOCAB)
    (one,) = decide(logits, [Row(listed, row.suffix) for row in rows], [Proposal(drafted)], [Acceptance.COUPLED])
    for row, token_id, top in zip(logits, one.token_ids, one.top_logprobs, strict=False):
        values = torch.log_softmax((row.float() - row.float().max()) / 0.5, -1).tolist()
        assert top == tuple((i, values[i]) for i in dict.fromkeys((token_id, 9, 4)))


def test_equal_ones_come_by_their_ids() -> None:
    place = torch.full((VOCAB,), -3.0)
    place[[7, 200]] = -1.0
    assert likeliest(place, 4) == ((7, -1.0), (200, -1.0), (0, -3.0), (1, -3.0))
    place[:] = -math.inf
    place[9] = 0.0
    assert likeliest(place, 4) == ((9, 0.0),)


def test_without_them_no_row_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("nothing was asked for")

    monkeypatch.setattr(verification, "with_logprobs", refuse)
    monkeypatch.setattr(logprobs, "process", refuse)
    asked = {name: one for name, one in requests().items() if name == "none"}
    pump = Pump(*pair("llama"), seed=1, grammars=json_grammars())
    assert len(pump.run(asked)["none"].token_ids)
    assert not pump.failures
