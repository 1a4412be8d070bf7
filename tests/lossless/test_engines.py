"""The central promise, through both real engines and the real session: speculation never changes the text.

References, from strong to strongest: the engine alone, one token at a time; ``core/reference.py`` over transformers'
own forward of the whole text; transformers' ``generate``.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter

import pytest
import torch
from tests.lossless.test_reference import accepts_one_more, model_of
from tests.support.models import EOS, LOSSLESS_FAMILIES, VOCAB, pair, prompt, random_model
from tests.support.mutants import mutant
from tests.support.pump import Pump, Request, assert_same, in_mode, plain_reference, requests_for
from tests.support.rings import nightly, pairs_first, slow

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.tokenizer import load_tokenizer
from paceline.core.processors import Row, SamplerState
from paceline.core.reference import Model, speculative_decode
from paceline.core.sampling import process
from paceline.embedded import DRAFT_DIR, TARGET_DIR
from paceline.model import kv_cache
from paceline.model.loading import load_pretrained, prepare
from paceline.model.selftest import check_invariance
from paceline.target import session as target_session
from paceline.target.control.allocation import Allocation
from paceline.target.control.session_gate import Judgement, SessionGate
from paceline.target.scheduler import Scheduled
from paceline.target.session import TargetSession
from paceline.types import PAGE_SIZE, Acceptance, Cause, Mode, Result, SamplingParams, SpeculationParams, noise_key

TEMPERATURES = (0.0, 0.7, 1.0)
SPECULATING = (Mode.OVERLAPPED, Mode.SEQUENTIAL)
MAX_TOKENS = 20

PROCESSORS: dict[str, dict] = {
    "none": {},
    "allowed_token_ids": {"allowed_token_ids": (*range(12, 100, 3), EOS)},
    "logit_bias": {"logit_bias": {11: 4.0, 12: -100.0, 40: 2.5}},
    "bad_words": {"bad_words": tuple((a,) for a in range(20, 60)) + tuple((a, a + 1) for a in range(60, 298))},
    "min_tokens": {"min_tokens": 12, "logit_bias": {EOS: 6.0}},
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.2},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "eos": {"logit_bias": {EOS: 6.0}},
    "stop_id": {"stop_token_ids": tuple(range(100, 200))},
    "all": {
        "allowed_token_ids": tuple(range(200)),
        "logit_bias": {15: 1.5},
        "bad_words": ((30,), (31, 32)),
        "min_tokens": 4,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0.01,
    },
}
_PREFIX = prompt(999, 70)


def mixed_batch(temperature: float, max_tokens: int = MAX_TOKENS) -> dict[str, Request]:
    """16 sessions: every processor, prompts of 1 to 150 tokens, a prefix that every third shares, every K."""
    requests = {}
    for i, name in zip(range(16), itertools.cycle(PROCESSORS), strict=False):
        tokens = [*_PREFIX, *prompt(i, 3)] if i % 3 == 0 else prompt(i, 1 + 37 * i % 150)
        requests[f"{name}-{i}"] = Request(
            tokens,
            SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=1000 + i, **PROCESSORS[name]),
            SpeculationParams(max_draft_tokens=(8, 3, 1, 32)[i % 4]),
            eos_token_ids=(EOS,),
        )
    return requests


@functools.cache
def mixed_reference(family: str, temperature: float) -> dict[str, Result]:
    """The results of ``mixed_batch`` by plain decoding of each session alone."""
    return plain_reference(pair(family)[0], mixed_batch(temperature))


def _matrix(family: str, temperature: float) -> None:
    target, draft = pair(family)
    requests, reference = mixed_batch(temperature), mixed_reference(family, temperature)
    assert len({len(r.token_ids) for r in reference.values()}) > 1, "some session stops early"
    preemptions = 0
    for seed, mode in enumerate(Mode):
        # 9 pages of 64 tokens hold few of the 16 sessions of up to 170: some are preempted.
        pump = Pump(target, draft, seed=seed, pages=9, draft_pages=40, max_step_tokens=48)
        compared = assert_same(pump.run(in_mode(requests, mode)), reference)
        assert compared > 150
        preemptions += pump.target.stats.preemptions
        assert pump.target.stats.cached_tokens > 0
        accepted = sum(r.speculation.accepted for r in pump.results.values())
        assert (accepted > 30) == (mode is not Mode.PLAIN)
    assert preemptions > 0


_MIXED = [("llama", 1.0), ("llama", 0.0), ("gemma3", 0.7), ("gpt2", 1.0)]


@pytest.mark.parametrize(("family", "temperature"), [_MIXED[0], *slow(_MIXED[1:])])
def test_modes_give_identical_tokens_in_mixed_batches(family: str, temperature: float) -> None:
    """Every mode, 16 sessions with every processor, arrivals, preemption, prefix sharing: the tokens of plain."""
    _matrix(family, temperature)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "temperature"),
    [c for c in itertools.product(LOSSLESS_FAMILIES, TEMPERATURES) if c not in _MIXED],
)
def test_modes_give_identical_tokens_in_mixed_batches_everywhere(family: str, temperature: float) -> None:
    """The rest of the matrix."""
    _matrix(family, temperature)


@pytest.mark.parametrize("mode", SPECULATING)
@pytest.mark.parametrize("processor", ["none", "bad_words", "all"])
def test_alone(processor: str, mode: Mode) -> None:
    """One session at a time."""
    _alone("qwen3", processor, 1.0, mode)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "processor", "temperature", "mode"),
    pairs_first(LOSSLESS_FAMILIES, list(PROCESSORS), TEMPERATURES, SPECULATING),
)
def test_alone_everywhere(family: str, processor: str, temperature: float, mode: Mode) -> None:
    """The rest of the matrix."""
    _alone(family, processor, temperature, mode)


def _alone(family: str, processor: str, temperature: float, mode: Mode) -> None:
    target, draft = pair(family)
    sampling = SamplingParams(temperature=temperature, max_tokens=40, seed=3, **PROCESSORS[processor])
    requests = {"s": Request(prompt(5, 60), sampling, eos_token_ids=(EOS,))}
    pump = Pump(target, draft, seed=2)
    assert_same(pump.run(in_mode(requests, mode)), plain_reference(target, requests))


@pytest.mark.parametrize("family", ["llama", *slow(LOSSLESS_FAMILIES[1:])])
def test_greedy_equals_generate(family: str) -> None:
    """All modes at temperature 0 against transformers' own ``generate``."""
    target, draft = pair(family)
    model = random_model(family)
    requests = {
        f"s{n}": Request(prompt(n, n), SamplingParams(max_tokens=24), SpeculationParams(max_draft_tokens=5))
        for n in (1, 9, 64, 100)
    }
    expected = {}
    for name, request in requests.items():
        ids = torch.tensor([list(request.prompt)])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, pad_token_id=0
        )
        expected[name] = tuple(out[0, ids.shape[1] :].tolist())
    for mode in Mode:
        results = Pump(target, draft, seed=1).run(in_mode(requests, mode))
        assert {name: r.token_ids for name, r in results.items()} == expected


def _reference(model: Model, request: Request) -> tuple[tuple[int, ...], list[float]]:
    """Decoding without any engine: the tokens of ``core/reference.py``, and their log probabilities."""
    params = request.sampling
    options = {"eos_token_ids": request.eos_token_ids, "vocab_size": VOCAB}
    tokens = tuple(speculative_decode(model, model, request.prompt, params, seed=params.seed, k=0, **options))
    key = noise_key(params.seed, params.seed_scope, request.prompt)
    state = SamplerState(params, key, request.prompt, **options)
    logits = model([*request.prompt, *tokens])[-len(tokens) - 1 : -1]
    log_probs = process(logits, [Row(state, tokens[:i]) for i in range(len(tokens))]).log_probs
    return tokens, log_probs[range(len(tokens)), tokens].tolist()


@pytest.mark.parametrize(
    ("family", "temperature"),
    [
        ("mistral", 0.7),
        *slow([("llama", 1.0), ("gpt2", 1.0)]),
        *nightly((f, 1.0) for f in LOSSLESS_FAMILIES if f not in ("llama", "gpt2")),
    ],
)
def test_overlapped_equals_the_reference_without_engine(family: str, temperature: float) -> None:
    """Tokens and log probabilities of every processor against transformers' forward over the whole text."""
    target, draft = pair(family)
    model = model_of(random_model(family))
    requests = mixed_batch(temperature)
    for name, result in Pump(target, draft, seed=5).run(requests).items():
        token_ids, logprobs = _reference(model, requests[name])
        assert result.token_ids == token_ids, name
        assert result.logprobs == pytest.approx(logprobs, abs=1e-4), name


@pytest.mark.slow
def test_draft_kind_and_settings_never_matter() -> None:
    """A useless draft, a perfect one, one that has no room, one candidate only: always the same tokens."""
    target, draft = pair("llama")
    requests, reference = mixed_batch(1.0), mixed_reference("llama", 1.0)
    useless = prepare(random_model("llama", seed=77), compile=False)
    for drafter, options in (
        (useless, {}),
        (target, {"late": 0.0}),
        (draft, {"draft_pages": 6}),
        (draft, {"top_m": 1, "tree_budget": 4, "max_leaves": 1}),
        (draft, {"late": 0.9}),
        (None, {}),
    ):
        assert_same(Pump(target, drafter, **options).run(requests), reference)


def test_hits_and_misses_both_occur() -> None:
    """The identity above is not vacuous: rounds of many causes, most draft tokens of the overlapped mode useful."""
    target, draft = pair("llama")
    causes: Counter[Cause] = Counter()
    for seed in range(2):
        for result in Pump(target, draft, seed=seed, late=0.3).run(mixed_batch(1.0)).values():
            causes.update(result.speculation.causes)
    assert causes[Cause.HIT] > 20
    assert causes[Cause.TOKEN] + causes[Cause.K] > 5
    assert causes[Cause.LATE] > 5


# -- control: whatever it decides, the text is the same ---------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, *slow([0.0])])
def test_any_budget_gives_identical_tokens(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random numbers of draft tokens in every step; sessions whose drafts are paused and resumed at random."""
    rng = random.Random(0)
    requests, reference = mixed_batch(temperature), mixed_reference("llama", temperature)

    def any_number(self, offers, **options):
        return [rng.randint(0, len(o)) for o in offers]

    def any_pause(self, session, num_sessions):
        if rng.random() < 0.1:
            self.pause(session, Judgement.NO_GAIN, num_sessions)

    def any_resumption(self, now, num_running, sessions):
        for pause in list(self.paused.values()):
            if rng.random() < 0.3:
                self.resume(pause.session, now, forget=rng.random() < 0.5)

    monkeypatch.setattr(Allocation, "allocate_draft_tokens", any_number)
    monkeypatch.setattr(SessionGate, "review", any_pause)
    monkeypatch.setattr(SessionGate, "tick", any_resumption)
    target, draft = pair("llama")
    for mode in SPECULATING:
        pump = Pump(target, draft, seed=4, pages=9, draft_pages=40, max_step_tokens=48)
        assert_same(pump.run(in_mode(requests, mode)), reference)
        stats = pump.target.stats
        assert min(stats.draft_rows_trimmed, stats.drafts_paused, stats.drafts_resumed) > 4
        assert stats.nodes_used > 10


@pytest.mark.parametrize("adaptive", [True, *slow([False])])
def test_measured_control_gives_identical_tokens(adaptive: bool) -> None:
    """Steps that take time by their size, so that waiting and pauses act as they do in service."""
    target, draft = pair("qwen3")
    requests = mixed_batch(1.0, max_tokens=60)
    reference = plain_reference(target, requests)
    pump = Pump(target, draft, seed=6, adaptive=adaptive, step_s=lambda n: 0.004 * max(32, n))
    assert_same(pump.run(requests), reference)
    stats = pump.target.stats
    assert (stats.drafts_paused > 0) == adaptive
    assert stats.bubble_s > 0


# -- mutants: each must be caught by the identity above -------------------------------------------------------------


def _frozen_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties and positions do not see the draft tokens before their row."""
    rows = Scheduled.rows
    monkeypatch.setattr(Scheduled, "rows", lambda part: [Row(row.state, ()) for row in rows(part)])


@mutant(TargetSession, "commit_rows")
def _skips_a_row(commit, self, cache, num_computed):
    """Every prefill chunk claims the KV of one token more than it computed."""
    commit(self, cache, min(num_computed + 1, len(self.tokens) - 1, len(self.pages) * PAGE_SIZE))


def _noise_forgets_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """The position of the noise starts again in every round."""
    monkeypatch.setattr(Row, "position", property(lambda row: len(row.suffix)))


def _stale_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are matched by their number, not by their content."""
    for module in (kv_cache, target_session):
        monkeypatch.setattr(module, "page_hash", lambda previous, tokens, **_: previous + b"x")


@pytest.mark.parametrize(
    "mutant",
    [_frozen_processors, _skips_a_row, accepts_one_more, _noise_forgets_the_history, _stale_pages],
    ids=lambda mutant: mutant.__name__.strip("_"),
)
def test_mutants_of_the_target_are_caught(mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison of modes can fail: each of these faults makes it do so."""
    target, draft = pair("llama")
    requests, reference = mixed_batch(1.0), mixed_reference("llama", 1.0)
    mutant(monkeypatch)
    results = Pump(target, draft, late=0.1, pages=16).run(requests)
    assert any(results[name].token_ids != r.token_ids for name, r in reference.items())


# -- bf16 ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def embedded_bf16():
    """The embedded pair in bf16 as the eager engine runs it, and what the self-test says about this machine."""
    target = prepare(load_pretrained(Checkpoint.open(str(TARGET_DIR)), torch.bfloat16), compile=False)
    draft = prepare(load_pretrained(Checkpoint.open(str(DRAFT_DIR)), torch.bfloat16), compile=False)
    return target, draft, check_invariance(target.runner(8))


_TEXTS = (
    "import os\n\nclass Foo:\n    def __init__(self, ",
    "def main():\n    parser = argparse.Arg",
    "    for i in range(",
    "# " + "a long line of a comment " * 20 + "\n\ndef ",
)


def _embedded_requests(temperature: float, max_tokens: int) -> dict[str, Request]:
    tokenizer = load_tokenizer(str(TARGET_DIR))
    options = {"temperature": temperature, "max_tokens": max_tokens, "ignore_eos": True}
    return requests_for(map(tokenizer.encode, _TEXTS), **options, max_draft_tokens=6)


def _embedded(pair_and_report, temperature: float, max_tokens: int) -> None:
    target, draft, report = pair_and_report
    if not report.holds:
        assert "NOT batch-invariant" in str(report)
        return
    requests = _embedded_requests(temperature, max_tokens)
    reference = plain_reference(target, requests)
    for seed, mode in enumerate(Mode):
        results = Pump(target, draft, seed=seed).run(in_mode(requests, mode))
        assert {n: r.token_ids for n, r in results.items()} == {n: r.token_ids for n, r in reference.items()}
        assert {n: r.logprobs for n, r in results.items()} == {n: r.logprobs for n, r in reference.items()}


@pytest.mark.slow
def test_embedded_pair_bf16_is_identical_bit_for_bit(embedded_bf16) -> None:
    """Tokens and log probabilities equal in every bit, or the self-test says that this platform cannot."""
    _embedded(embedded_bf16, 1.0, 24)


@pytest.mark.nightly
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_embedded_pair_bf16_is_identical_bit_for_bit_everywhere(embedded_bf16, temperature: float) -> None:
    """Longer."""
    _embedded(embedded_bf16, temperature, 96)


@pytest.mark.parametrize("temperature", [*slow([1.0]), *nightly([0.0, 0.7])])
def test_embedded_pair_fp32(temperature: float) -> None:
    """fp32: the same identity."""
    target = prepare(load_pretrained(Checkpoint.open(str(TARGET_DIR)), torch.float32), compile=False)
    draft = prepare(load_pretrained(Checkpoint.open(str(DRAFT_DIR)), torch.float32), compile=False)
    requests = _embedded_requests(temperature, 48)
    reference = plain_reference(target, requests)
    for seed, mode in enumerate(Mode):
        assert_same(Pump(target, draft, seed=seed).run(in_mode(requests, mode)), reference)


_RANDOM_BF16 = [("llama", 1.0), ("gpt2", 0.0), ("gemma3", 1.0)]


@pytest.mark.parametrize(
    ("family", "temperature"),
    [
        _RANDOM_BF16[0],
        *slow(_RANDOM_BF16[1:]),
        *nightly(c for c in itertools.product(LOSSLESS_FAMILIES, (1.0, 0.0)) if c not in _RANDOM_BF16),
    ],
)
def test_random_checkpoints_bf16_are_identical_bit_for_bit(family: str, temperature: float) -> None:
    """bf16 has exact ties and coarse logits; identity holds all the same, or the self-test says it cannot."""
    target, draft = pair(family, torch.bfloat16)
    report = check_invariance(target.runner(8))
    if not report.holds:
        assert "NOT batch-invariant" in str(report)
        return
    requests = mixed_batch(temperature)
    reference = plain_reference(target, requests)
    for seed, mode in enumerate(SPECULATING):
        results = Pump(target, draft, seed=seed, pages=9, max_step_tokens=48).run(in_mode(requests, mode))
        for name, result in results.items():
            assert result.token_ids == reference[name].token_ids, name
            assert result.logprobs == reference[name].logprobs, name


# -- the rejection rule --------------------------------------------------------------------------------------------


def test_rejection_rule_logprobs_and_repeatability() -> None:
    """Log probabilities are those of the target for the emitted text; the same run twice is the same text."""
    target, draft = pair("llama")
    model = random_model("llama")
    speculation = SpeculationParams(acceptance=Acceptance.REJECTION, saguaro=0.5)
    requests = {
        f"s{i}": Request(prompt(i, 10 + i), SamplingParams(temperature=0.8, max_tokens=24, seed=i), speculation)
        for i in range(6)
    }
    results = Pump(target, draft, seed=3).run(requests)
    again = Pump(target, draft, seed=3).run(requests)
    for name, result in results.items():
        assert result.token_ids == again[name].token_ids
        text = [*requests[name].prompt, *result.token_ids]
        with torch.no_grad():
            log_p = (model(torch.tensor([text]), use_cache=False).logits[0] / 0.8).log_softmax(-1)
        at = len(requests[name].prompt) - 1
        expected = [log_p[at + i, t].item() for i, t in enumerate(result.token_ids)]
        assert result.logprobs == pytest.approx(expected, abs=1e-4)
    assert sum(r.speculation.accepted for r in results.values()) > 20


def test_rejection_rule_at_temperature_zero_is_greedy_matching() -> None:
    """Both rules are the same there."""
    target, draft = pair("llama")
    requests = {
        "s": Request(prompt(1, 20), SamplingParams(max_tokens=30), SpeculationParams(acceptance=Acceptance.REJECTION))
    }
    assert_same(Pump(target, draft).run(requests), plain_reference(target, requests))
