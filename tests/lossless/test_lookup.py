"""Proposals from a session's own text change no text: identity with plain decoding, and mutants that break it."""

from dataclasses import replace

import pytest
from tests.support.models import pair, prompt
from tests.support.mutants import mutant
from tests.support.pump import Pump, Request, assert_same, plain_reference

from paceline.target import engine as target_engine
from paceline.target.control.step_meter import TargetStats
from paceline.target.scheduler import Scheduled
from paceline.types import Acceptance, Mode, Result, SamplingParams, SpeculationParams

_PROCESSED = {"repetition_penalty": 1.1, "top_k": 40, "logit_bias": {15: 1.5}}


def _requests(temperature: float, **speculation) -> dict[str, Request]:
    """Prompts that repeat themselves, so that there is always something to propose, and often it is wrong."""
    requests = {}
    for i in range(6):
        text = prompt(i, 12) * 3
        sampling = SamplingParams(temperature=temperature, max_tokens=32, seed=i, **(_PROCESSED if i % 2 else {}))
        requests[f"s{i}"] = Request(text, sampling, SpeculationParams(max_draft_tokens=5, **speculation))
    return requests


def _run(requests: dict[str, Request], *, with_draft: bool = False, **options) -> tuple[dict[str, Result], TargetStats]:
    target, draft = pair("llama")
    pump = Pump(target, draft if with_draft else None, seed=1, **options)
    return pump.run(requests), pump.target.stats


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("with_draft", [False, True])
def test_identity(temperature: float, with_draft: bool) -> None:
    """Without a draft, and beside one that is late: the tokens of plain decoding, some of them predicted."""
    target, _ = pair("llama")
    requests = _requests(temperature)
    results, stats = _run(requests, with_draft=with_draft, late=0.5)
    assert_same(results, plain_reference(target, requests))
    assert stats.lookup_rows > stats.lookup_rows_used > 0, "some were accepted, and some were not"
    if not with_draft:
        assert sum(r.speculation.accepted for r in results.values()) == stats.lookup_rows_used


def test_pages_and_steps_too_small_for_all() -> None:
    """Preemption and steps that are full, with such proposals in them."""
    target, _ = pair("llama")
    requests = _requests(1.0)
    results, stats = _run(requests, pages=3, max_step_tokens=32)
    assert_same(results, plain_reference(target, requests))
    assert stats.preemptions > 0
    assert stats.lookup_rows > 0


@pytest.mark.parametrize(
    ("temperature", "speculation"),
    [(1.0, {"acceptance": Acceptance.REJECTION}), (0.0, {"mode": Mode.SEQUENTIAL}), (0.0, {"mode": Mode.PLAIN})],
)
def test_not_where_it_has_no_place(temperature: float, speculation: dict) -> None:
    """The rejection rule's law allows none (``lookup.py``), sequential mode stays comparable, and plain is plain."""
    _, stats = _run(_requests(temperature, **speculation))
    assert stats.rounds > 100
    assert stats.lookup_rounds == 0


# -- mutants --------------------------------------------------------------------------------------------------------


@mutant(target_engine, "decide")
def _takes_it_at_its_word(decide, logits, rows, proposals, rules):
    """The first token of a proposal from the text is accepted without verification."""
    verdicts = decide(logits, rows, proposals, rules)
    return [
        replace(v, num_accepted=1, token_ids=(p.token_ids[0], v.token_ids[0]), logprobs=v.logprobs[:1] * 2)
        if len(p) and not p.node_ids and not v.num_accepted
        else v
        for v, p in zip(verdicts, proposals, strict=True)
    ]


@mutant(Scheduled, "sequence_steps")
def _verifies_another(sequence_steps, part):
    """The forward gets other tokens than those that are compared."""
    steps, drafted = sequence_steps(part), part.proposal.token_ids
    if drafted and not part.proposal.node_ids:
        start = len(steps[0].token_ids) - len(drafted)
        token_ids = [*steps[0].token_ids[:start], *((t + 1) % 64 for t in drafted)]
        return [replace(steps[0], token_ids=token_ids)]
    return steps


@pytest.mark.parametrize("mutant", [_takes_it_at_its_word, _verifies_another], ids=lambda m: m.__name__.strip("_"))
def test_mutants_are_caught(mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """The identity above can fail."""
    target, _ = pair("llama")
    requests = _requests(0.0)
    reference = plain_reference(target, requests)
    mutant(monkeypatch)
    results, _ = _run(requests)
    assert any(results[name].token_ids != r.token_ids for name, r in reference.items())
