"""A stream that broke anywhere and was resumed from its tokens, through both real engines: the rest is the same."""

import random
from dataclasses import replace

import pytest
from tests.lossless.test_engines import mixed_batch
from tests.support.models import pair
from tests.support.pump import Pump, Request, in_mode, plain_reference

from paceline.router.session import Session
from paceline.types import Mode, Result


def resumed(requests: dict[str, Request], unbroken: dict[str, Result], mistake: int = 0) -> dict[str, Request]:
    """Each request with a part of its output, cut where chance says. ``mistake``: tokens that are left out."""
    rng = random.Random(3)
    cut = {name: rng.randrange(1, max(2, len(result.token_ids))) for name, result in unbroken.items()}
    return {
        name: replace(request, generated=unbroken[name].token_ids[: cut[name]][: cut[name] - mistake])
        for name, request in requests.items()
        if len(unbroken[name].token_ids) > 1
    }


def differ(requests: dict[str, Request], rest: dict[str, Result], unbroken: dict[str, Result], shift: int = 0) -> int:
    """Number of streams that are not the unbroken ones, in tokens, probabilities, text, end or totals."""
    wrong = 0
    for name, result in rest.items():
        whole, num = unbroken[name], len(requests[name].generated) + shift
        same = (result.token_ids, result.text) == (whole.token_ids[num:], whole.text[num:])
        same = same and all(abs(a - b) < 1e-4 for a, b in zip(result.logprobs, whole.logprobs[num:], strict=True))
        ends = [(r.finish_reason, r.matched_stop, r.seed, r.usage.completion_tokens) for r in (result, whole)]
        wrong += not same or ends[0] != ends[1]
    return wrong


@pytest.mark.parametrize("temperature", [1.0, pytest.param(0.0, marks=pytest.mark.slow)])
def test_the_rest_of_a_resumed_stream_is_that_of_the_unbroken_one(temperature, monkeypatch):
    target, draft = pair("llama")
    requests = mixed_batch(temperature)
    unbroken = plain_reference(target, requests)
    again = resumed(requests, unbroken)
    assert len(again) > 10

    def rest(requests):
        pump = Pump(target, draft, seed=1, pages=40, draft_pages=40, max_step_tokens=48)
        return pump.run(in_mode(requests, Mode.OVERLAPPED))

    assert differ(again, rest(again), unbroken) == 0
    # what a mistake would do: a token that is forgotten comes twice, positions are off by one ...
    off = resumed(requests, unbroken, mistake=1)
    assert differ(off, rest(off), unbroken, shift=1) == len(off)
    # ... and output that is taken for prompt counts for other penalties and limits
    monkeypatch.setattr(Session, "open_message", _all_prompt(Session.open_message))
    assert differ(again, rest(again), unbroken) > 3


def _all_prompt(original):
    return lambda session: replace(original(session), num_prompt_tokens=len(session.history))
