"""Log probabilities of prompts: those of transformers, however the prompt was computed."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests.faults.pump import RATES, FaultyPump
from tests.support.models import EOS, LOSSLESS_FAMILIES, VOCAB, pair, prompt, random_model
from tests.support.pump import Pump, Request, assert_same, plain_reference

from paceline.core import logprobs as scoring
from paceline.core.logprobs import likeliest, score
from paceline.errors import EngineError
from paceline.messages import PromptScores
from paceline.model.kv_cache import KVCache
from paceline.model.shapes import most_scored_rows
from paceline.target import engine as engine_module
from paceline.target import runners
from paceline.target.session import TargetSession
from paceline.types import (
    Acceptance,
    FinishReason,
    Mode,
    PromptLogprobs,
    Result,
    SamplingParams,
    SpeculationParams,
    TokenLogprob,
)

LENGTHS = (1, 2, 3, 40, 64, 65, 130)
TOP = (0, 1, 3, 20, 5, 2, 20)


def asked(top: int | None, max_tokens: int = 6, **options: object) -> SamplingParams:
    return SamplingParams(prompt_logprobs=top, max_tokens=max_tokens, seed=3, **options)


def requests(**options: object) -> dict[str, Request]:
    return {
        f"{length}": Request(prompt(length, length), asked(top, **options), eos_token_ids=(EOS,))
        for length, top in zip(LENGTHS, TOP, strict=True)
    }


@functools.cache
def log_probs(family: str, token_ids: tuple[int, ...]) -> torch.Tensor:
    """What transformers computes: [tokens, vocab]."""
    with torch.no_grad():
        logits: torch.Tensor = random_model(family)(torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits.float().log_softmax(-1)


def assert_right(scores: Sequence[TokenLogprob | None], request: Request, family: str = "llama") -> None:
    token_ids = tuple(request.prompt)
    assert len(scores) == len(token_ids)
    assert scores[0] is None
    for row, token_id, found in zip(log_probs(family, token_ids), token_ids[1:], scores[1:], strict=False):
        assert found is not None
        assert abs(found.logprob - row[token_id].item()) < 1e-4
        nearer = int((row > row[token_id] + 1e-4).sum()), int((row > row[token_id] - 1e-4).sum())
        assert nearer[0] < found.rank <= nearer[1]
        values = [value for _, value in found.top]
        assert values == sorted(values, reverse=True)
        assert values == pytest.approx(row.topk(len(values)).values.tolist(), abs=1e-4)
        assert all(abs(row[other].item() - value) < 1e-4 for other, value in found.top)
        assert len(values) == (request.sampling.prompt_logprobs or 0)
        if found.rank <= len(values):
            assert found.top[found.rank - 1] == (token_id, found.logprob)


def scores_of(results: dict[str, Result]) -> dict[str, tuple[TokenLogprob | None, ...]]:
    return {name: result.prompt_logprobs for name, result in results.items()}


@pytest.fixture(scope="module")
def expected() -> dict[str, Result]:
    return plain_reference(pair("llama")[0], requests())


@pytest.mark.parametrize("family", LOSSLESS_FAMILIES)
def test_they_are_those_of_transformers(family: str) -> None:
    """Of every family, with a draft, in chunks; and the tokens are those of a request that does not ask for them."""
    wanted = requests()
    pump = Pump(*pair(family), seed=1, max_step_tokens=48)
    results = pump.run(wanted)
    assert not pump.failures
    for name, request in wanted.items():
        assert_right(results[name].prompt_logprobs, request, family)
        assert results[name].usage.cached_tokens == 0
    unasked = {name: replace(one, sampling=asked(None)) for name, one in wanted.items()}
    plain = plain_reference(pair(family)[0], unasked)
    assert_same(results, plain)
    assert not any(one.prompt_logprobs for one in plain.values())


def test_they_have_the_same_bits_however_the_prompt_is_computed(expected, monkeypatch) -> None:
    """In any chunks, beside others, after preemptions, with a draft under either rule, with few rows to a step."""
    runs = {
        "beside others": Pump(*pair("llama"), seed=2),
        "in small chunks": Pump(*pair("llama"), seed=3, max_step_tokens=33),
        "preempted": Pump(*pair("llama"), seed=4, pages=6, draft_pages=40, max_step_tokens=32),
    }
    monkeypatch.setattr(engine_module, "most_scored_rows", lambda _: 16)
    runs["16 rows to a step"] = Pump(*pair("llama"), seed=5)
    by_ratio = SpeculationParams(acceptance=Acceptance.REJECTION)
    for name, pump in runs.items():
        wanted = {key: replace(one, speculation=by_ratio) for key, one in requests(temperature=0.7).items()}
        wanted |= {f"{key} greedy": one for key, one in requests().items()}
        found = scores_of(pump.run(wanted))
        assert not pump.failures
        assert found == {**scores_of(expected), **{f"{key} greedy": one for key, one in scores_of(expected).items()}}, (
            name
        )
    assert runs["preempted"].target.stats.preemptions > 2


def test_no_token_is_generated_where_none_is_asked_for(expected: dict[str, Result]) -> None:
    to_draft: list[object] = []
    pump = Pump(*pair("llama"), seed=6, tamper_draft=lambda message: to_draft.append(message) or [message])
    results = pump.run(requests(max_tokens=0))
    assert not pump.failures
    for name, result in results.items():
        assert result.prompt_logprobs == expected[name].prompt_logprobs
        assert (result.token_ids, result.text, result.finish_reason) == ((), "", FinishReason.LENGTH)
        assert (result.usage.completion_tokens, result.speculation.rounds) == (0, 0)
    assert not to_draft


def test_a_cached_prompt_is_computed_again_and_shared_by_others(expected: dict[str, Result]) -> None:
    """Of the one that asks no token is held; one that does not ask shares what that has computed."""
    longest = requests()["130"]
    plain = replace(longest, sampling=asked(None))
    pump = Pump(pair("llama")[0], None, late=0.0)
    for name, request in {"first": plain, "scored": longest, "again": longest, "last": plain}.items():
        pump.run({name: request})
    cached = {name: result.usage.cached_tokens for name, result in pump.results.items()}
    assert cached == {"first": 0, "scored": 0, "again": 0, "last": 128}
    for name in ("scored", "again"):
        assert pump.results[name].prompt_logprobs == expected["130"].prompt_logprobs
    assert pump.results["last"].token_ids == expected["130"].token_ids


@pytest.mark.parametrize("seed", range(4))
def test_whatever_goes_wrong_each_comes_once(seed: int, expected: dict[str, Result]) -> None:
    """Messages lost, doubled, late; targets that die. A preemption at each target besides."""
    faults = {("from_target", kind): RATES[kind] for kind in ("drop", "duplicate", "reorder", "delay", "replay")}
    pump = FaultyPump(*pair("llama"), seed=seed, faults=faults, pages=8, draft_pages=40, max_step_tokens=32)
    ticks = itertools.count(1)
    pump.each_tick = lambda: pump.kill_target(keeps_talking=False) if next(ticks) in (9, 30, 70) else None
    results = pump.run(requests())
    assert not pump.failures
    assert pump.counts["target_reopens"] > 2
    assert scores_of(results) == scores_of(expected)
    assert_same(results, expected)


def test_a_target_that_sends_none_is_left() -> None:
    """As one of an older version."""
    pump = Pump(pair("llama")[0], None, late=0.0)
    deliver = pump.on_target
    pump.on_target = lambda messages: deliver(  # type: ignore[method-assign]
        [message for message in messages if not isinstance(message, PromptScores)]
    )
    pump.run({"one": requests()["40"]})
    assert pump.failures == {"one": "the target sent no log probabilities of the prompt"}


def assert_right_beside_others(expected: dict[str, Result]) -> None:
    pump = Pump(pair("llama")[0], None, late=0.0, max_step_tokens=32)
    pump.submit("beside", Request(prompt(1, 9), SamplingParams(max_tokens=60)))
    for number in ("first", "second"):
        for name, request in requests().items():
            pump.submit(f"{number} {name}", request)
        pump.run({})
    assert not pump.failures
    found = scores_of(pump.results)
    for name, one in scores_of(expected).items():
        assert found[f"first {name}"] == found[f"second {name}"] == one


def test_they_are_right_beside_others(expected: dict[str, Result]) -> None:
    assert_right_beside_others(expected)


@pytest.mark.parametrize("mutant", ["shares a prefix", "one row late", "ties by chance", "order of parts"])
def test_mistakes_are_noticed(mutant: str, expected: dict[str, Result], monkeypatch: pytest.MonkeyPatch) -> None:
    match mutant:
        case "shares a prefix":
            attach, match_prefix = TargetSession.attach_prefix, KVCache.match_prefix

            def whole(session: TargetSession, cache: KVCache) -> None:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(KVCache, "match_prefix", lambda own, _, *by: match_prefix(own, session.tokens, *by))
                    attach(session, cache)

            monkeypatch.setattr(TargetSession, "attach_prefix", whole)
        case "one row late":
            right = engine_module.score
            monkeypatch.setattr(engine_module, "score", lambda rows, ids, top: right(rows.roll(1, 0), ids, top))
        case "ties by chance":
            monkeypatch.setattr(scoring, "SCORED_TOGETHER", 1)
            logits = torch.zeros(1, 40)
            assert score(logits, [7], 5)[0].top == likeliest(logits.log_softmax(-1)[0], 5)
            monkeypatch.setattr(scoring, "likeliest", lambda row, count: tuple(enumerate(row.tolist()))[-count:])
            assert score(logits, [7], 5)[0].top != likeliest(logits.log_softmax(-1)[0], 5)
            return
        case "order of parts":
            forward = runners.forward_parts
            monkeypatch.setattr(
                runners,
                "forward_parts",
                lambda runner, parts, **rest: forward(
                    runner, sorted(parts, key=lambda part: (not part.scores, part.verifies)), **rest
                ),
            )
    with pytest.raises((AssertionError, IndexError, ValueError)):
        assert_right_beside_others(expected)


def test_equal_tokens_rank_by_their_ids() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0, 2.0, -torch.inf]])
    for token_id, rank in ((1, 1), (2, 2), (4, 3), (3, 4), (0, 5), (5, 6)):
        (found,) = score(logits, [token_id], 2)
        assert found.rank == rank
        assert [other for other, _ in found.top] == [1, 2]
    (found,) = score(logits, [5], 20)
    assert [other for other, _ in found.top] == [1, 2, 4, 3, 0], "what cannot come is not likely"


def test_many_rows_at_once_are_the_rows_one_by_one() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(70, VOCAB, generator=generator).mul_(4).round_().div_(2)  # with many ties
    token_ids = torch.randint(0, VOCAB, (70,), generator=generator).tolist()
    rows = score(logits, token_ids, 20)
    for i, (row, token_id, found) in enumerate(zip(logits, token_ids, rows, strict=True)):
        one = row.log_softmax(-1)
        assert found.logprob == one[token_id].item()
        assert found.top == likeliest(one, 20)
        assert found.rank == 1 + sorted(range(VOCAB), key=lambda other: (-one[other], other)).index(token_id)
        assert (found,) == score(logits[i : i + 1], [token_id], 20)


def test_logits_without_a_distribution_fail_that_session_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match="the logits of the prompt are not finite"):
        score(torch.full((1, 5), torch.nan), [0], 0)
    right = engine_module.score

    def failing(rows: torch.Tensor, token_ids: Sequence[int], top: int) -> tuple[TokenLogprob, ...]:
        return right(rows * torch.nan if top == 20 else rows, token_ids, top)

    monkeypatch.setattr(engine_module, "score", failing)
    pump = Pump(pair("llama")[0], None, late=0.0)
    results = pump.run(requests())
    assert pump.failures == dict.fromkeys(("40", "130"), "the logits of the prompt are not finite")
    assert results.keys() == {"1", "2", "3", "64", "65"}


def test_the_logits_of_a_step_are_bounded_and_others_decode_beside() -> None:
    """However long the prompt: the rows of a step, and of those no more are turned into probabilities at once."""
    assert most_scored_rows(150_000) * 150_000 <= 2**24 < most_scored_rows(VOCAB) * (VOCAB + 1)
    assert most_scored_rows(10**9) == 16
    pump = Pump(pair("llama")[0], None, late=0.0, max_step_tokens=256)
    pump.target.scheduler._max_scored_rows = 16
    sizes: list[int] = []
    forward = pump.target.runner.forward

    def watched(steps: Sequence[object]) -> torch.Tensor:
        logits = forward(steps)  # type: ignore[arg-type]
        sizes.append(len(logits))
        return logits

    pump.target.runner.forward = watched  # type: ignore[method-assign]
    pump.submit("decodes", Request(prompt(1, 5), SamplingParams(max_tokens=60), SpeculationParams(mode=Mode.PLAIN)))
    pump.submit("scored", Request(prompt(2, 500), asked(3, max_tokens=0)))
    pump.submit("scored, too", Request(prompt(3, 200), asked(0, max_tokens=0)))
    pump.run({})
    assert max(sizes) == 18, "16 rows, and one of each session that decodes"
    assert len(sizes) < 75, "a token of the other session in each of these steps"


def test_a_stream_that_goes_on_does_not_repeat_them() -> None:
    whole = requests()["40"]
    (result,) = plain_reference(pair("llama")[0], {"one": whole}).values()
    resumed = replace(whole, generated=result.token_ids[:2])
    (rest,) = plain_reference(pair("llama")[0], {"one": resumed}).values()
    assert rest.token_ids == result.token_ids[2:]
    assert rest.prompt_logprobs == ()


def test_parts_of_a_block() -> None:
    block = PromptLogprobs(4, (TokenLogprob(-1.0, 1), TokenLogprob(-2.0, 2)))
    assert block.after(1) == block.after(4) == block
    assert block.after(5) == PromptLogprobs(5, block.tokens[1:])
    assert block.after(6) is block.after(9) is None
