"""Seeds: the noise of one seed for many prompts, the keys that a session keeps, and what the same seed promises."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from scipy import stats
from tests.router.sessions import decode, outcome
from tests.support.models import VOCAB, pair, prompt, random_model
from tests.support.pump import Pump, Request, in_mode, requests_for
from torch import Tensor

from paceline.core import reference
from paceline.core.reference import speculative_decode
from paceline.messages import OpenSession
from paceline.router import session as router_session
from paceline.router.session import Session
from paceline.types import Acceptance, Mode, SamplingParams, SeedScope, SpeculationParams, noise_key

NUM_PROMPTS, NUM_TOKENS = 400, 4
FALSE_ALARM = 1e-8
"""Probability of each comparison to fail for a correct implementation, had its seeds been drawn at random."""


def _near_uniform(token_ids: Sequence[int]) -> Tensor:
    """Logits over 4 tokens that hardly differ, whatever the text."""
    return torch.tensor([0.0, 0.01, -0.01, 0.005]).repeat(len(token_ids), 1)


def _texts(seed: int, scope: SeedScope) -> list[tuple[int, ...]]:
    """What 400 prompts of one length answer, all with one seed: two tokens each."""
    params = SamplingParams(temperature=1.0, max_tokens=2, seed_scope=scope)
    prompts = itertools.islice(itertools.product(range(NUM_TOKENS), repeat=5), NUM_PROMPTS)
    return [
        tuple(speculative_decode(_near_uniform, _near_uniform, p, params, seed=seed, k=0, vocab_size=NUM_TOKENS))
        for p in prompts
    ]


def _p_value(texts: Sequence[tuple[int, ...]], length: int) -> float:
    """Probability of shares at least as uneven as those of the texts' first ``length`` tokens."""
    seen = Counter(text[:length] for text in texts)
    p = _near_uniform([0])[0].double().softmax(-1)
    cells = list(itertools.product(range(NUM_TOKENS), repeat=length))
    expected = [len(texts) * float(torch.stack([p[token] for token in cell]).prod()) for cell in cells]
    return float(stats.chisquare([seen[cell] for cell in cells], expected).pvalue)


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_one_seed_for_many_prompts_gives_independent_samples(seed: int) -> None:
    """First tokens, pairs of tokens, and first tokens of two prompts have their right shares."""
    texts = _texts(seed, SeedScope.PROMPT)
    assert _p_value(texts, 1) > FALSE_ALARM
    assert _p_value(texts, 2) > FALSE_ALARM
    half = NUM_PROMPTS // 2
    neighbors = [(one[0], other[0]) for one, other in zip(texts[:half], texts[half:], strict=True)]
    assert _p_value(neighbors, 2) > FALSE_ALARM


def test_keys_of_the_seed_alone_are_caught() -> None:
    """The mutant of the test above, and the reason for the digest: with the seed as the key all draw one token."""
    texts = _texts(1, SeedScope.GLOBAL)
    assert len(set(texts)) == 1
    assert _p_value(texts, 1) < FALSE_ALARM


def _model(token_ids: Sequence[int]) -> Tensor:
    place, last = torch.arange(len(token_ids))[:, None], torch.tensor(list(token_ids))[:, None]
    return ((last * 7 + torch.arange(64)[None] * 13 + place * 5) % 29).float() / 8


@pytest.mark.parametrize(
    ("seed", "prompt_ids", "expected"),
    [
        (0, [1, 2, 3], [8, 3, 30, 33, 20, 22, 5, 45, 16, 55, 5, 19]),
        (2**64 - 1, [5], [17, 37, 28, 48, 26, 4, 40, 0, 43, 20, 44, 32]),
        (7, [*range(20)], [60, 62, 1, 60, 9, 28, 37, 23, 46, 51, 0, 21]),
    ],
)
def test_the_global_scope_gives_the_tokens_of_keys_without_a_digest(seed, prompt_ids, expected) -> None:
    """Recorded before the prompt was part of the key."""
    params = SamplingParams(temperature=1.0, max_tokens=12, seed_scope=SeedScope.GLOBAL)
    for k in (0, 3):
        assert speculative_decode(_model, _model, prompt_ids, params, seed=seed, k=k, vocab_size=64) == expected
    params = params.model_copy(update={"seed_scope": SeedScope.PROMPT})
    assert speculative_decode(_model, _model, prompt_ids, params, seed=seed, k=0, vocab_size=64) != expected


def test_keys_are_recorded() -> None:
    """The digest is part of the protocol: a router of another version has to make the same key of a request."""
    assert noise_key(7, SeedScope.GLOBAL, (1, 2, 3)) == 7
    assert noise_key(7, SeedScope.PROMPT, (1, 2, 3)) == 0x98A2DB7165BED9DF
    near = [(7, (1, 2, 3)), (8, (1, 2, 3)), (7, (1, 2)), (7, (1, 2, 3, 0)), (7, (3, 2, 1)), (7, (2**32 - 1,))]
    keys = {noise_key(seed, SeedScope.PROMPT, prompt_ids) for seed, prompt_ids in near}
    assert len(keys) == len(near)
    assert all(0 <= key < 2**64 for key in keys)


# -- the key of a session is made once and kept ------------------------------------------------------------------


def _session(prompt_ids: Sequence[int] = (1, 2, 3), given: dict[str, Any] | None = None, **options: object) -> Session:
    sampling = SamplingParams(seed=9, temperature=1.0, **options)
    return Session("s", prompt_ids, sampling, SpeculationParams(), decode=decode, eos_token_ids=(0,), **given or {})


def _keys_of_a_life() -> list[int]:
    """The keys of every message that opens a session: at first, at another draft, at another target, and when a client
    continues its broken stream at another router."""
    session = _session()
    actions = [session.open()]
    session.on_target(outcome(session, [65, 66], 1))
    actions += [session.on_draft_down(), session.on_draft_up(), session.reopen_target()]
    session.on_target(outcome(session, [67]))
    actions += [session.reopen_target()]
    actions += [_session(given={"generated_token_ids": (65, 66, 67)}).open()]
    messages = [m for each in actions for m in (*each.to_target, *each.to_draft) if isinstance(m, OpenSession)]
    assert {len(m.token_ids) for m in messages} == {3, 5, 6}
    assert len(messages) == 9
    return [m.seed for m in messages]


def test_a_session_keeps_its_key_wherever_it_goes_on() -> None:
    assert set(_keys_of_a_life()) == {noise_key(9, SeedScope.PROMPT, (1, 2, 3))}
    assert _session(seed_scope="global").noise_key == 9
    assert _session().seed == 9, "results name the request's seed"


def test_a_key_of_the_whole_history_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: the digest of what has been decided so far, too."""
    monkeypatch.setattr(
        router_session.Session,
        "noise_key",
        property(lambda self: noise_key(self.seed, SeedScope.PROMPT, self.history), lambda self, key: None),
        raising=False,
    )
    assert len(set(_keys_of_a_life())) > 1


# -- one seed through both engines ---------------------------------------------------------------------------------


def _requests(seed: int, rule: Acceptance, **sampling: object) -> dict[str, Request]:
    """Eight prompts of one length, every one with the same seed."""
    options = {"temperature": 1.0, "max_tokens": 16, "seed": seed, "acceptance": rule, "max_draft_tokens": 4}
    return requests_for([prompt(i, 12) for i in range(8)], **options | sampling)


def _tokens(requests: dict[str, Request], mode: Mode, timing: int) -> dict[str, tuple[int, ...]]:
    """What the engines answer; ``timing`` decides how late drafts are."""
    pump = Pump(*pair("llama"), seed=timing, late=0.5)
    return {name: result.token_ids for name, result in pump.run(in_mode(requests, mode)).items()}


@pytest.mark.parametrize("scope", SeedScope)
def test_the_same_seed_gives_the_same_tokens_under_the_coupled_rule(scope: SeedScope) -> None:
    """In every mode, at every timing of the draft: the tokens of plain decoding."""
    requests = _requests(5, Acceptance.COUPLED, seed_scope=scope)
    expected = _tokens(requests, Mode.PLAIN, 0)
    for mode, timing in ((Mode.PLAIN, 1), (Mode.SEQUENTIAL, 2), (Mode.OVERLAPPED, 3), (Mode.OVERLAPPED, 4)):
        assert _tokens(requests, mode, timing) == expected, mode
    assert len(set(expected.values())) == len(expected)


def test_the_same_seed_may_give_other_tokens_under_the_rejection_rule() -> None:
    """What the interface excepts: which draft tokens arrive in time decides which noise is used."""
    requests = _requests(5, Acceptance.REJECTION)
    runs = [_tokens(requests, Mode.OVERLAPPED, timing) for timing in range(3)]
    assert any(run != runs[0] for run in runs)
    plain = [_tokens(requests, Mode.PLAIN, timing) for timing in range(2)]
    assert plain[0] == plain[1], "without a draft there is nothing to be late"


def test_engines_that_get_the_bare_seed_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: the router forgets the digest, so the engines part from the reference."""
    request = _requests(5, Acceptance.COUPLED)["s0"]
    expected = {"s0": tuple(_reference(request))}
    assert _tokens({"s0": request}, Mode.OVERLAPPED, 0) == expected
    monkeypatch.setattr(router_session, "noise_key", lambda seed, scope, prompt_ids: seed)
    assert _tokens({"s0": request}, Mode.OVERLAPPED, 0) != expected


def _reference(request: Request) -> list[int]:
    pretrained = random_model("llama")

    def model(token_ids: Sequence[int]) -> Tensor:
        with torch.no_grad():
            return pretrained(torch.tensor([list(token_ids)]), use_cache=False).logits[0]

    params = request.sampling
    assert params.seed is not None
    return speculative_decode(model, model, request.prompt, params, seed=params.seed, k=0, vocab_size=VOCAB)


def test_a_reference_without_the_digest_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    request = _requests(5, Acceptance.COUPLED)["s0"]
    expected = _reference(request)
    monkeypatch.setattr(reference, "noise_key", lambda seed, scope, prompt_ids: seed)
    assert _reference(request) != expected
