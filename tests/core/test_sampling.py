import math
from collections import Counter
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.noise import gumbel_at

from paceline.core import processors
from paceline.core.deferred import DeferredChecks
from paceline.core.noise import Stream, gumbel, seed_bits
from paceline.core.processors import Row, SamplerState
from paceline.core.sampling import (
    GREEDY_CANDIDATES,
    best_coupled,
    best_recovered,
    draft_candidates,
    process,
    rank_coupled,
    row_keys,
    sample_coupled,
)
from paceline.core.verification import KeyedChoices
from paceline.errors import EngineError, InvalidRequestError
from paceline.types import SamplingParams

INF = math.inf


def reference(logits, params, prompt, output, eos=()):
    """The distribution after every processor, one token at a time in Python floats. Returns log probs."""
    x = [float(value) for value in logits]
    everything, vocab = [*prompt, *output], range(len(x))
    if params.allowed_token_ids is not None:
        x = [value if v in params.allowed_token_ids else -INF for v, value in enumerate(x)]
    for v, bias in params.logit_bias.items():
        x[v] += bias
    for words in params.bad_words:
        n = len(words) - 1
        if n == 0 or (len(everything) >= n and tuple(everything[-n:]) == words[:-1]):
            x[words[-1]] = -INF
    if len(output) < params.min_tokens:
        for v in {*params.stop_token_ids, *(() if params.ignore_eos else eos)}:
            x[v] = -INF
    for v in set(everything):
        x[v] = x[v] / params.repetition_penalty if x[v] > 0 else x[v] * params.repetition_penalty
    for v, count in Counter(output).items():
        x[v] -= params.frequency_penalty * count + params.presence_penalty
    if params.temperature > 0:
        x = [value / params.temperature for value in x]
        ranking = sorted(vocab, key=lambda v: (-x[v], v))
        if params.top_k:
            last = x[ranking[min(params.top_k, len(x)) - 1]]
            ranking = [v for v in ranking if x[v] >= last]
        weights = {v: math.exp(x[v] - x[ranking[0]]) for v in ranking}
        total, before, kept = sum(weights.values()), 0.0, []
        for v in ranking:
            if kept and params.top_p < 1 and before >= params.top_p * total:
                break
            kept.append(v)
            before += weights[v]
        kept = {v for v in kept if weights[v] >= params.min_p}
        x = [x[v] if v in kept else -INF for v in vocab]
    top = max(x)
    normalizer = top + math.log(sum(math.exp(value - top) for value in x))
    return [value - normalizer for value in x]


def assert_same_distribution(log_probs, expected):
    expected = torch.tensor(expected)
    assert torch.equal(log_probs.isinf(), expected.isinf())
    torch.testing.assert_close(log_probs, expected, rtol=1e-5, atol=2e-5)


def state(params, prompt=(1, 2), output=(), *, vocab_size=12, seed=7, eos=(), num_ranked=0):
    return SamplerState(params, seed, prompt, output, eos_token_ids=eos, vocab_size=vocab_size, num_ranked=num_ranked)


TOKEN = st.integers(0, 11)
# Values on a grid: ties are common, and float32 against float64 does not move a boundary.
PARAMS = st.builds(
    SamplingParams,
    allowed_token_ids=st.none() | st.sets(TOKEN, max_size=4).map(lambda others: tuple({*range(12)} - others)),
    logit_bias=st.dictionaries(TOKEN, st.sampled_from([-3.0, -0.5, 0.75, 4.0]), max_size=3),
    bad_words=st.lists(st.lists(TOKEN, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    min_tokens=st.integers(0, 6),
    stop_token_ids=st.lists(TOKEN, max_size=2).map(tuple),
    ignore_eos=st.booleans(),
    repetition_penalty=st.sampled_from([1.0, 2.0, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.5]),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 8, 50]),
    top_p=st.sampled_from([1.0, 0.9137, 0.5231, 0.1011]),
    min_p=st.sampled_from([0.0, 0.0513, 0.4177, 1.0]),
)
SESSION = st.tuples(
    PARAMS,
    st.lists(TOKEN, min_size=1, max_size=4),
    st.lists(TOKEN, max_size=4),
    st.lists(TOKEN, max_size=4),
)


@given(st.lists(SESSION, min_size=1, max_size=4), st.integers(0, 2**32 - 1), st.sampled_from([0.5, 2.0, 6.0]))
@settings(max_examples=150, deadline=None)
def test_every_position_of_ragged_batches_equals_the_reference(sessions, seed, spread):
    generator = torch.Generator().manual_seed(seed)
    rows, expected, alone, logits = [], [], [], []
    for params, prompt, output, draft in sessions:
        incremental = SamplerState(params, 1, prompt, (), eos_token_ids=(3,), vocab_size=12)
        incremental.append(output[:1])
        incremental.append(output[1:])
        for j in range(len(draft) + 1):
            suffix = tuple(draft[:j])
            row_logits = (torch.randn(12, generator=generator) * spread * 8).round() / 8
            row_logits[11] = 7.0  # sessions below forbid at most a few tokens: never all
            plain = SamplerState(params, 1, prompt, [*output, *suffix], eos_token_ids=(3,), vocab_size=12)
            rows.append(Row(incremental, suffix))
            alone.append(process(row_logits[None], [Row(plain)]))
            expected.append(reference(row_logits, params, prompt, [*output, *suffix], eos=(3,)))
            logits.append(row_logits)
    processed = process(torch.stack(logits), rows)
    for i in range(len(rows)):
        assert_same_distribution(processed.log_probs[i], expected[i])
        # Bit for bit what plain decoding computes from the same logits, whatever the batch.
        assert torch.equal(processed.log_probs[i], alone[i].log_probs[0])
        assert processed.positions[i] == alone[i].positions[0]
    assert processed.num_greedy == int(processed.greedy.sum())
    # Grouping is an optimisation: interleaved rows give the same.
    order = torch.randperm(len(rows), generator=generator)
    shuffled = process(torch.stack(logits)[order], [rows[i] for i in order.tolist()])
    assert torch.equal(shuffled.log_probs, processed.log_probs[order])


def test_logits_are_left_alone_and_any_float_dtype_is_taken():
    params = SamplingParams(temperature=0.5, top_k=2, repetition_penalty=2.0)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        logits = torch.arange(12).to(dtype)[None]
        before = logits.clone()
        assert process(logits, [Row(state(params))]).log_probs.dtype is torch.float32
        assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("temperature", SamplingParams(temperature=0.7)),
        ("top_k", SamplingParams(temperature=1.0, top_k=5)),
        ("top_p", SamplingParams(temperature=1.0, top_p=0.8)),
        ("min_p", SamplingParams(temperature=1.0, min_p=0.1)),
        ("repetition", SamplingParams(temperature=1.0, repetition_penalty=1.3)),
        ("bad_words", SamplingParams(temperature=1.0, bad_words=((4,), (1, 5), (2, 1, 6)))),
        ("min_tokens", SamplingParams(temperature=1.0, min_tokens=3)),
        (
            "everything",
            SamplingParams(temperature=0.7, top_k=9, top_p=0.9, min_p=0.02, repetition_penalty=1.3),
        ),
    ],
)
def test_processors_equal_those_of_transformers(name, params):
    transformers = pytest.importorskip("transformers")
    prompt, output = [1, 2, 9], [3, 2, 1]
    steps = {
        "repetition": transformers.RepetitionPenaltyLogitsProcessor(params.repetition_penalty),
        "bad_words": transformers.NoBadWordsLogitsProcessor([[4], [1, 5], [2, 1, 6]], eos_token_id=None),
        "min_tokens": transformers.MinNewTokensLengthLogitsProcessor(3, 3, 0, device="cpu"),
        "temperature": transformers.TemperatureLogitsWarper(params.temperature),
        "top_k": transformers.TopKLogitsWarper(params.top_k or 1),
        "top_p": transformers.TopPLogitsWarper(params.top_p),
        "min_p": transformers.MinPLogitsWarper(params.min_p),
    }
    everything = ("repetition", "temperature", "top_k", "top_p", "min_p")
    generator = torch.Generator().manual_seed(1)
    for trial in range(40):
        logits = torch.randn(1, 12, generator=generator) * 3
        emitted = output[: trial % 4]
        expected = logits.clone()
        for step in everything if name == "everything" else (name,):
            expected = steps[step](torch.tensor([[*prompt, *emitted]]), expected)
        session = SamplerState(params, 1, prompt, emitted[:1], eos_token_ids=(0,), vocab_size=12)
        log_probs = process(logits, [Row(session, tuple(emitted[1:]))]).log_probs[0]
        assert_same_distribution(log_probs, expected.log_softmax(-1)[0].tolist())


class Seen(list):
    """Counts the tokens that are looked at from its end."""

    num = 0

    def __reversed__(self):
        for token in super().__reversed__():
            self.num += 1
            yield token


@pytest.mark.parametrize("num_sequences", [10, 1000])
def test_what_bad_words_cost_a_row_is_its_longest_match_however_many_there_are(num_sequences):
    bad_words = processors.BadWords([(i % 50, 3, 3, 3, i) for i in range(num_sequences)], "cpu")
    logits, tail = torch.zeros(1, num_sequences), Seen([7] * 1000 + [3, 3])
    bad_words.forbid_(logits, [tail])
    assert tail.num == 3
    assert not logits.isinf().any()
    bad_words.forbid_(logits, [[5, 3, 3, 3]])
    assert logits[0].isinf().nonzero().flatten().tolist() == list(range(5, num_sequences, 50))


def test_bad_words_span_the_committed_and_the_draft_tokens():
    session = state(SamplingParams(bad_words=((5, 6, 7),)), prompt=(5,))
    processed = process(torch.zeros(3, 12), [Row(session), Row(session, (6,)), Row(session, (6, 8))])
    assert processed.log_probs[:, 7].isinf().tolist() == [False, True, False]


def test_all_that_tie_with_the_kth_survive_top_k():
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0, 2.0, 1.0]])
    session = SamplerState(SamplingParams(temperature=1.0, top_k=3), 1, [0], vocab_size=6)
    assert process(logits, [Row(session)]).log_probs[0].isfinite().nonzero().flatten().tolist() == [1, 2, 3, 4, 5]


def test_of_ties_at_top_p_the_lower_ids_survive():
    """Four equal tokens behind top-k, of which two hold half of the mass."""
    logits = torch.tensor([[1.0, 0.0, 1.0, 1.0, -1.0, 1.0]])
    session = SamplerState(SamplingParams(temperature=1.0, top_k=1, top_p=0.5), 1, [0], vocab_size=6)
    assert process(logits, [Row(session)]).log_probs[0].isfinite().nonzero().flatten().tolist() == [0, 2]


def tied_rows(vocab_size, spread, generator):
    """Rows with many ties: rounded to bfloat16, to quarters and to integers, and one without."""
    x = torch.randn(8, vocab_size, generator=generator) * spread
    return torch.cat([x[:1], x[1:4].bfloat16().float(), x[4:7].mul(4).round().div(4), x[7:].round()])


TRUNCATIONS = [  # no share of mass is a fraction of two small numbers, at which float32 sums would decide
    SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
    for t in (1.0, 0.7)
    for k in (0, 1, 5, 50)
    for p in (1.0, 0.9513, 0.8071, 0.3137)
    for m in (0.0, 0.0513)
    if k or p < 1
]


def num_unlike_transformers():
    """Rows (and their number) in which other values survive than with transformers' warpers.

    Values, not ids: which of equal tokens stay at top-p is left to an unstable sort there.
    """
    warpers = pytest.importorskip("transformers.generation.logits_process")
    generator = torch.Generator().manual_seed(4)
    different = total = 0
    for vocab_size, spread in ((40, 0.3), (40, 3.0), (300, 1.0), (2000, 0.3), (2000, 2.0)):
        for params in TRUNCATIONS:
            logits = tied_rows(vocab_size, spread, generator)
            steps = [warpers.TemperatureLogitsWarper(params.temperature)]
            steps += [warpers.TopKLogitsWarper(params.top_k)] if params.top_k else []
            steps += [warpers.TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
            steps += [warpers.MinPLogitsWarper(params.min_p)] if params.min_p else []
            expected = logits.clone()
            for step in steps:
                expected = step(torch.zeros(len(logits), 1, dtype=torch.int64), expected)
            session = SamplerState(params, 1, [0], vocab_size=vocab_size)
            own = process(logits, [Row(session)] * len(logits)).scores
            kept = [logits.masked_fill(x == -INF, -INF).sort(-1).values for x in (own, expected)]
            different += int((kept[0] != kept[1]).any(-1).sum())
            total += len(logits)
    return different, total


def test_no_row_of_ties_keeps_other_values_than_with_transformers():
    different, total = num_unlike_transformers()
    assert total > 2000
    assert different == 0


def test_top_k_of_exactly_k_tokens_is_caught(monkeypatch):
    """A mutant: of those that tie with the k-th only as many stay as make k."""
    keep_prefix = processors.keep_prefix_

    def exactly(x, top_k, top_p, check, least=0):
        for row, k in zip(x, top_k, strict=True):
            row[row.argsort(stable=True, descending=True)[k:]] = -INF
        keep_prefix(x, top_k, top_p, check, least)

    monkeypatch.setattr(processors, "keep_prefix_", exactly)
    assert num_unlike_transformers()[0] > 50


@pytest.mark.parametrize("vocab_size", [7, 300, 2000])
def test_rows_of_ties_are_truncated_alike_alone_in_batches_natively_in_torch_and_with_one_wait(monkeypatch, vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.cat([tied_rows(vocab_size, spread, generator) for spread in (0.3, 0.3, 1.0, 3.0)])
    params = [TRUNCATIONS[7 * i % len(TRUNCATIONS)] for i in range(len(logits))]
    rows = [Row(SamplerState(each, 1, [0], vocab_size=vocab_size)) for each in params]
    expected = process(logits, rows).scores
    for i, row in enumerate(rows):
        assert torch.equal(process(logits[i : i + 1], [row]).scores[0], expected[i])
        checks = DeferredChecks()
        at_once = process(logits[i : i + 1], [row], checks).scores[0]
        assert torch.equal(at_once, expected[i]) or bool(checks.any_failed(logits.device))
    monkeypatch.setattr(processors.native, "usable", lambda *_: False)
    assert torch.equal(process(logits, rows).scores, expected)


@pytest.mark.parametrize("candidates", [1, 2, 7, 10_000])
def test_top_p_does_not_depend_on_how_many_values_it_looks_at_first(monkeypatch, candidates):
    logits = torch.randn(6, 400, generator=torch.Generator().manual_seed(0)).mul(8).round().div(8)
    params = [SamplingParams(temperature=1.5, top_p=p, top_k=k) for p in (0.3, 0.9, 0.999) for k in (0, 40)]
    rows = [Row(SamplerState(each, 1, [0], vocab_size=400)) for each in params]
    expected = process(logits, rows).log_probs
    monkeypatch.setattr(processors, "TOP_P_CANDIDATES", candidates)
    assert torch.equal(process(logits, rows).log_probs, expected)
    for i, each in enumerate(params):
        assert_same_distribution(expected[i], reference(logits[i], each, [0], []))


@pytest.mark.parametrize("width", [10, 15])
@pytest.mark.parametrize(
    "options",
    [
        {"allowed_token_ids": (1, 8, 11)},
        {"logit_bias": {11: 2.0, 3: 1.0}},
        {"stop_token_ids": (4, 11), "min_tokens": 9},
        {"bad_words": ((11,), (1, 4))},
        {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    ],
)
def test_a_draft_padded_to_another_size_has_the_candidates_of_the_common_tokens(options, width):
    """Qwen2.5 of 0.5 B has rows for 151,936 tokens, and that of 72 B for 152,064."""
    logits = torch.randn(2, 12, generator=torch.Generator().manual_seed(3))
    logits[:, width:] = -INF
    ours = torch.cat([logits, torch.full((2, 3), 50.0)], 1)[:, :width]
    session = state(SamplingParams(**options), prompt=(1, 2, 11))
    rows = [Row(session), Row(session, (11,))]
    expected, found = (draft_candidates(each, rows, 4) for each in (logits, ours))
    assert torch.equal(found[1], expected[1])
    known = expected[1].isfinite()
    assert torch.equal(found[0][known], expected[0][known])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(allowed_token_ids=(1, 12)),
        SamplingParams(logit_bias={12: 1.0}),
        SamplingParams(stop_token_ids=(12,)),
        SamplingParams(bad_words=((1, 12),)),
    ],
)
def test_options_outside_the_vocabulary_are_refused(params):
    with pytest.raises(InvalidRequestError, match="holds token id 12"):
        state(params)
    with pytest.raises(InvalidRequestError, match="the prompt holds token id 40"):
        state(SamplingParams(), prompt=(1, 40))


@pytest.mark.parametrize("bias", [math.nan, INF, 1e30, -1e30])
def test_a_bias_that_no_logit_survives_is_refused(bias):
    with pytest.raises(ValueError, match=r"logit_bias\[1\] is .* at most 10000 either way"):
        SamplingParams(logit_bias={1: bias})


def test_options_that_forbid_every_token_are_named():
    session = state(SamplingParams(logit_bias=dict.fromkeys(range(11), -INF), bad_words=((11,),)))
    with pytest.raises(InvalidRequestError, match="logit_bias and bad_words forbid every token at position 2"):
        process(torch.zeros(1, 12), [Row(session)])
    session = state(SamplingParams(allowed_token_ids=(3, 4), bad_words=((3,), (4,))))
    with pytest.raises(InvalidRequestError, match="allowed_token_ids and bad_words forbid every token at position 2"):
        process(torch.zeros(1, 12), [Row(session)])


def test_no_token_at_all_cannot_be_allowed():
    with pytest.raises(ValueError, match="allowed_token_ids is empty: at least one token id is needed"):
        SamplingParams(allowed_token_ids=())


@pytest.mark.parametrize("value", [math.nan, INF])
def test_logits_that_are_not_numbers_are_reported_with_their_row(value):
    logits = torch.zeros(3, 12)
    logits[1, 4] = value
    for temperature in (0.0, 1.0):
        with pytest.raises(EngineError, match="row 1"):
            process(logits, [Row(state(SamplingParams(temperature=temperature)))] * 3)


def test_extreme_temperatures_and_logits_are_harmless():
    logits = torch.tensor([[3e38, 1.0, -3e38, 0.0]]).expand(3, 4)
    rows = [Row(SamplerState(SamplingParams(temperature=t), 1, [0], vocab_size=4)) for t in (1e-300, 1e-30, 100)]
    assert process(logits, rows).log_probs[:, 0].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1.0])
@pytest.mark.parametrize("penalty", [5e-324, 1e-40, 100.0])
def test_extreme_repetition_penalties_are_harmless(penalty, temperature):
    params = SamplingParams(repetition_penalty=penalty, temperature=temperature)
    row = Row(SamplerState(params, 1, [2], vocab_size=4))
    processed = process(torch.tensor([[0.5, -0.5, 7.97, -1.0]]), [row])
    (token_id,) = sample_coupled(processed).tolist()
    assert processed.log_probs[0, token_id].isfinite()
    assert token_id == 2 or penalty > 1, "a token that is divided by almost nothing is the likeliest by far"


def test_draft_tokens_outside_the_vocabulary_do_not_break_the_batch():
    session = state(SamplingParams(temperature=1.0, repetition_penalty=1.2, presence_penalty=0.5))
    assert process(torch.zeros(2, 12), [Row(session), Row(session, (12,))]).log_probs.isfinite().all()


def test_no_rows():
    processed = process(torch.zeros(0, 12), [])
    assert sample_coupled(processed).tolist() == []


def test_sample_coupled_is_the_argmax_with_noise_and_without_it_on_greedy_rows():
    logits = torch.randn(30, 12, generator=torch.Generator().manual_seed(3))
    sessions = [state(SamplingParams(temperature=t), seed=2**63 + i) for i, t in enumerate((0.0, 1.0, 0.6))]
    rows = [Row(session, (1,) * j) for j in range(10) for session in sessions]
    processed = process(logits, rows)
    noise = gumbel(processed.seeds, processed.positions, Stream.COUPLED, 12)
    noise[processed.greedy] = 0
    assert torch.equal(sample_coupled(processed), (processed.log_probs.double() + noise.double()).argmax(-1))
    for session in sessions:
        own = [i for i, row in enumerate(rows) if row.state is session]
        part = process(logits[own], [rows[i] for i in own])
        assert torch.equal(sample_coupled(part), sample_coupled(processed)[own])
    assert rows[-1].position == 11
    assert processed.seeds[0] == seed_bits(2**63)


@given(st.integers(0, 2**32 - 1), PARAMS, st.lists(TOKEN, max_size=3), st.sampled_from([3, 8, 12, 99]))
@settings(max_examples=60, deadline=None)
def test_draft_candidates_approximate_the_target_and_equal_it_with_the_whole_vocabulary(seed, params, suffix, m):
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(seed)) * 3
    logits[0, 11] = 7.0
    rows = [Row(state(params, (1, 2), (3,), eos=(0,)), tuple(suffix))]
    token_ids, log_q = draft_candidates(logits, rows, m)
    assert token_ids.shape == log_q.shape == (1, min(m, 12))
    assert (log_q.diff(dim=-1).nan_to_num(-1.0) <= 0).all()
    torch.testing.assert_close(log_q.exp().sum(-1), torch.ones(1))
    if m >= 12:
        expected = process(logits, rows).log_probs
        torch.testing.assert_close(torch.full((1, 12), -INF).scatter(1, token_ids, log_q), expected)


def test_the_first_of_the_ranking_is_the_targets_own_token():
    logits = torch.randn(40, 12, generator=torch.Generator().manual_seed(5))
    sessions = [state(SamplingParams(temperature=t, top_k=8), seed=i) for i, t in enumerate((0.0, 1.3))]
    rows = [Row(sessions[i % 2], (1,) * (i // 2)) for i in range(40)]
    token_ids, log_q = draft_candidates(logits, rows, 12)
    keys = row_keys(rows)
    ranked, scores = rank_coupled(token_ids, log_q, keys.seeds, keys.positions, keys.greedy)
    assert torch.equal(ranked[:, 0], sample_coupled(process(logits, rows)))
    assert (scores.diff(dim=-1).nan_to_num(-1.0) <= 0).all()
    assert torch.equal(ranked.sort(-1).values, token_ids.sort(-1).values)


FLAT = 700
"""Tokens of vocabularies of which the 256 likeliest hold a part only."""


def scores_with_noise(logits, rows):
    """What a draft's candidates are ranked by, over the whole vocabulary: [rows, tokens] float64."""
    processed = process(logits, rows)
    every = torch.arange(logits.shape[1]).expand(len(rows), -1)
    noise = gumbel_at(processed.seeds, processed.positions, Stream.COUPLED, every).double()
    return processed.scores.double() + noise, processed.log_probs


@pytest.mark.compiler
@pytest.mark.parametrize("options", [{}, {"top_k": 300}, {"min_p": 0.2}], ids=["all", "top-k", "min-p"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_candidates_that_share_noise_are_the_first_of_the_whole_vocabulary(options, dtype):
    logits = (torch.randn(60, FLAT, generator=torch.Generator().manual_seed(1)) / 2).to(dtype)
    sampler = state(SamplingParams(temperature=0.9, **options), seed=3, vocab_size=FLAT, num_ranked=5)
    rows = [Row(sampler, (1,) * i) for i in range(60)]
    token_ids, log_q = draft_candidates(logits, rows, 256)
    assert token_ids.shape == log_q.shape == (60, 5)
    scores, log_probs = scores_with_noise(logits, rows)
    first = scores.topk(5, -1).indices
    assert torch.equal(token_ids.sort(-1).values, first.sort(-1).values)
    torch.testing.assert_close(log_q, log_probs.gather(-1, token_ids), rtol=2e-6, atol=5e-6)
    assert (log_q.diff(dim=-1) <= 0).all()
    assert best_coupled(token_ids, log_q, rows, 5)[0] == first.tolist()


@pytest.mark.compiler
def test_the_likeliest_tokens_miss_the_targets_own_where_those_that_share_noise_do_not():
    logits = torch.randn(200, FLAT, generator=torch.Generator().manual_seed(2)) / 2
    shares = []
    for num_ranked in (0, 6):
        sampler = state(SamplingParams(temperature=1.0), seed=4, vocab_size=FLAT, num_ranked=num_ranked)
        rows = [Row(sampler, (1,) * i) for i in range(200)]
        own = sample_coupled(process(logits, rows)).tolist()
        ranked, _ = best_coupled(*draft_candidates(logits, rows, 256), rows, 6)
        shares.append(sum(first[0] == token for first, token in zip(ranked, own, strict=True)) / 200)
    assert shares[0] < 0.7
    assert shares[1] == 1.0


@pytest.mark.compiler
def test_sessions_that_share_noise_and_others_have_their_own_candidates_in_one_batch():
    logits = torch.randn(12, FLAT, generator=torch.Generator().manual_seed(6))
    options = [
        (SamplingParams(temperature=1.0), 4),
        (SamplingParams(temperature=1.0), 0),
        (SamplingParams(), 4),
        (SamplingParams(temperature=1.0, top_p=0.9), 4),
    ]
    samplers = [state(params, seed=i, vocab_size=FLAT, num_ranked=num) for i, (params, num) in enumerate(options)]
    rows = [Row(samplers[i % 4], (1,) * (i // 4)) for i in range(12)]
    token_ids, log_q = draft_candidates(logits, rows, 64)
    assert token_ids.shape == log_q.shape == (12, 64)
    for i in range(12):
        alone_ids, alone_log_q = draft_candidates(logits[i : i + 1], rows[i : i + 1], 64)
        width = alone_ids.shape[1]
        assert width == (4, 64, GREEDY_CANDIDATES, 64)[i % 4]
        assert torch.equal(token_ids[i, :width], alone_ids[0])
        assert torch.equal(log_q[i, :width], alone_log_q[0])
        assert (log_q[i, width:] == -INF).all()


@pytest.mark.compiler
@pytest.mark.parametrize("bad", [math.nan, INF])
def test_a_row_that_is_no_distribution_has_no_candidates(bad):
    logits = torch.zeros(2, FLAT)
    logits[1, 7] = bad
    sampler = state(SamplingParams(temperature=1.0), vocab_size=FLAT, num_ranked=4)
    token_ids, log_q = draft_candidates(logits, [Row(sampler), Row(sampler)], 64)
    assert log_q.isfinite().tolist() == [[True] * 4, [False] * 4]
    assert (token_ids >= 0).all()


def test_equal_scores_rank_by_id():
    token_ids, log_q = torch.tensor([[5, 3, 9, 1]]), torch.tensor([[-1.0, -1.0, -1.0, -2.0]])
    ranked, _ = rank_coupled(token_ids, log_q, torch.tensor([1]), torch.tensor([1]), torch.tensor([True]))
    assert ranked.tolist() == [[3, 5, 9, 1]]


def test_the_key_of_a_text_is_that_of_its_tokens():
    """However they were told: as prompt, as output, appended or as a suffix; and other texts have others."""

    def state(prompt, output=(), appended=()):
        made = SamplerState(SamplingParams(), 3, prompt, output, vocab_size=100)
        made.append(appended)
        return made

    told = [
        Row(state([1, 2, 3, 4])),
        Row(state([1, 2], [3, 4])),
        Row(state([1, 2], [3], [4])),
        Row(state([1], [], [2]), (3, 4)),
    ]
    assert len({row.text_key for row in told}) == 1
    texts = {tokens[:n] for tokens in permutations((1, 2, 3, 4)) for n in range(1, 5)}
    keys = {Row(state(text[:1]), text[1:]).text_key for text in texts}
    assert len(keys) == len(texts)
    assert all(0 <= key < 2**32 for key in keys)


@pytest.mark.parametrize("natively", [True, False])
def test_a_draft_with_the_targets_distribution_guesses_what_is_recovered(natively, monkeypatch):
    """Its first guess is the target's own draw, after each text by other noise; without a native pass as with one."""
    if not natively:
        monkeypatch.setattr(processors.native, "usable", lambda *_: False)
    state = SamplerState(SamplingParams(temperature=1.0), 7, [1, 2], vocab_size=64)
    rows = [Row(state, (i,)) for i in range(50)]
    logits = torch.randn(64, generator=torch.Generator().manual_seed(3)).repeat(50, 1)
    processed = process(logits, rows)
    drawn = KeyedChoices(processed).draw(range(50), processed.log_probs.double().exp())
    log_q, token_ids = processed.log_probs.sort(-1, descending=True)
    guesses, scores = best_recovered(token_ids, log_q, rows, 3)
    assert [guess[0] for guess in guesses] == drawn
    assert all(found == sorted(found, reverse=True) for found in scores)
    assert len(set(drawn)) > 10, "rows of one position and one distribution, after other texts"
