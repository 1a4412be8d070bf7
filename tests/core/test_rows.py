"""Every pass of ``rows.cpp`` against its twin in torch: the same tokens and the same bits."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.native import adversarial, agree, keys_of, references
from tests.support.noise import gumbel_at
from torch import Tensor

from paceline.core import noise, rows, sampling, sparse, verification
from paceline.core.noise import Stream, gumbel, gumbel_argmax, gumbel_max
from paceline.core.processors import Row, SamplerState
from paceline.core.sampling import (
    best_coupled,
    best_unprocessed,
    draft_candidates,
    pick,
    pick_unprocessed,
    process,
    rank_coupled,
)
from paceline.core.tree import Proposal
from paceline.core.verification import decide, sample_draft, verify
from paceline.drafters import ranking
from paceline.drafters.calibration import ACCEPTANCE
from paceline.drafters.protocol import Candidates
from paceline.drafters.ranking import RankingRow, Rule, Siblings, guess_siblings, rank
from paceline.errors import EngineError
from paceline.messages import SparseDistribution
from paceline.types import Acceptance, SamplingParams, StructuredOutput

pytestmark = pytest.mark.compiler

SIZES = st.sampled_from([1, 3, 16, 127, 128, 129, 1001, 5000])
SPREADS = st.sampled_from([0.0, 0.5, 5.0, 30.0, 200.0, 1e6])
SHAPES = st.sampled_from(["as drawn", "ascending", "descending", "many ties", "one token", "negative zeros"])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
CUTS: tuple[dict[str, Any], ...] = ({}, {"top_k": 3}, {"min_p": 0.05}, {"top_k": 40, "min_p": 1e-3})


@given(st.integers(0, 2**32), st.integers(1, 4), SIZES, SPREADS, SHAPES, st.sampled_from([0, 1, 4, 4095]))
@settings(max_examples=120, deadline=None)
def test_the_largest_score_and_its_bits_are_those_of_the_dense_definition(seed, num_rows, size, spread, shape, first):
    x = adversarial(seed, num_rows, size, spread, shape)
    seeds, positions, nonces = keys_of(seed, num_rows)
    exact = gumbel(seeds, positions, Stream.RECOVER, first + size, nonces)[:, first:].double()
    flat = torch.stack((seeds, positions, nonces), -1).flatten().tolist()
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        weights = x.to(dtype)
        scores, ids = (weights.double() + exact).max(-1)
        found, best = rows.gumbel_max(weights, flat, Stream.RECOVER, first)
        assert torch.equal(found, ids + first)
        assert torch.equal(best, scores)


@given(st.integers(0, 2**32), st.integers(1, 4), SIZES, SPREADS, SHAPES, DTYPES)
@settings(max_examples=80, deadline=None)
def test_picked_tokens_are_those_of_the_whole_pipeline(seed, num_rows, size, spread, shape, dtype):
    """In one pass from the logits, from processed rows, and by torch alone."""
    logits = adversarial(seed, num_rows, size, spread, shape).to(dtype)
    for temperature in (0.0, 1e-30, 0.7, 1.0, 50.0):
        params = SamplingParams(temperature=temperature)
        states = [SamplerState(params, seed + i, (0,) * (i + 1), vocab_size=size) for i in range(num_rows)]
        batch = [Row(state) for state in states]
        processed = process(logits, batch)
        picked = pick_unprocessed(logits, batch)
        assert picked == pick(processed)
        seeds, positions = processed.seeds, processed.positions
        exact = gumbel(seeds, positions, Stream.COUPLED, size).double() * (temperature > 0)
        expected = (processed.scores.double() + exact).argmax(-1)
        assert picked[0] == expected.tolist()
        logprobs = processed.log_probs.gather(-1, expected[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(picked[1]), logprobs, rtol=2e-6, atol=5e-6)


def proposed(draw: random.Random, own: Sequence[int], size: int, *, chain: bool) -> Proposal:
    """A proposal whose rows pick ``own`` where they are reached: many of its tokens are accepted."""
    tokens: list[int] = []
    parents: list[int] = []
    for i in range(len(own) - 1):
        parent = i - 1 if chain else draw.randrange(-1, i)
        taken = {token for token, other in zip(tokens, parents, strict=True) if other == parent}
        token = own[parent + 1] if draw.random() < 0.8 else draw.randrange(size)
        while token in taken:
            token = (token + 1) % size
        tokens.append(token)
        parents.append(parent)
    return Proposal(tuple(tokens), parents=() if chain else tuple(parents))


def followed(seed: int, sizes: Sequence[int], vocab: int, temperature: float, dtype: torch.dtype, **cuts) -> list[bool]:
    """Of each row whether its token was picked; asserts that proposals are followed as if all of them were."""
    draw, num_rows = random.Random(seed), sum(sizes)
    logits = adversarial(seed, num_rows, vocab, 3.0, "as drawn").nan_to_num(neginf=-9.0).to(dtype)
    params = SamplingParams(temperature=temperature, **cuts)
    batch: list[Row] = []
    for i, rows_of in enumerate(sizes):
        state = SamplerState(params, seed + i, (0,) * (i + 1), vocab_size=vocab)
        batch += [Row(state, (1,) * draw.randrange(3)) for _ in range(rows_of)]
    whole = pick_unprocessed(logits, batch)
    assert whole is not None
    proposals, reached, start = [], [], 0
    for rows_of in sizes:
        own = whole[0][start : start + rows_of]
        proposals.append(proposed(draw, own, vocab, chain=draw.random() < 0.4))
        path = proposals[-1].follow(own)
        reached += [at in {-1, *path} for at in range(-1, rows_of - 1)]
        start += rows_of
    logits[[not at for at in reached]] = math.nan  # nobody looks at them
    picked = pick_unprocessed(logits, batch, proposals)
    assert picked is not None
    expected = [token if at else -2 for token, at in zip(whole[0], reached, strict=True)]
    assert picked[0] == expected
    assert [x for x in picked[1] if x > -math.inf] == [x for x, at in zip(whole[1], reached, strict=True) if at]
    return [token >= 0 for token in picked[0]]


@given(
    st.integers(0, 2**32),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.sampled_from([16, 129, 1001, 5000]),
    DTYPES,
    st.sampled_from(CUTS),
)
@settings(max_examples=80, deadline=None)
def test_only_what_a_proposal_is_followed_to_is_picked(seed, sizes, vocab, dtype, cuts):
    for temperature in (0.0, 0.7, 1.0):
        followed(seed, sizes, vocab, temperature, dtype, **cuts)


@pytest.mark.parametrize("mutant", ["of another row", "of another token", "of another session"])
def test_proposals_that_are_followed_wrongly_are_caught(mutant, monkeypatch):
    """The check above, over rows that follow something else."""
    right = sampling.rows_followed

    def wrong(proposals):
        tokens, parents = right(proposals)
        if mutant == "of another row":
            return tokens, [parent - 1 if parent > 0 else parent for parent in parents]
        if mutant == "of another token":
            return [token + 1 for token in tokens], parents
        return tokens, [0 if parent >= 0 else parent for parent in parents]

    assert any(followed(5, (7, 5, 6), 900, 1.0, torch.float32)[1:7]), "a token is accepted"
    monkeypatch.setattr(sampling, "rows_followed", wrong)
    with pytest.raises(AssertionError):
        followed(5, (7, 5, 6), 900, 1.0, torch.float32)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_without_a_distribution_is_left_to_the_pipeline(bad):
    logits = torch.zeros(3, 300)
    logits[1] = bad if bad == -math.inf else 0.0
    logits[1, 299] = bad
    state = SamplerState(SamplingParams(temperature=1.0), 1, (0,), vocab_size=300)
    assert pick_unprocessed(logits, [Row(state)] * 3) is None
    ids, _ = rows.pick(logits, [1.0, 1.0, 0.0], [1, 2, 0] * 3, Stream.COUPLED)
    assert [row == [-1] for row in ids.tolist()] == [False, True, False]


def test_other_processors_are_left_to_the_pipeline():
    plain = SamplerState(SamplingParams(temperature=1.0), 1, (0,), vocab_size=9)
    others = ({"top_p": 0.5}, {"logit_bias": {1: 1.0}}, {"presence_penalty": 0.1}, {"bad_words": ((1,),)})
    for options in (*others, {"allowed_token_ids": (1,)}):
        other = SamplerState(SamplingParams(temperature=1.0, **options), 1, (0,), vocab_size=9)
        assert pick_unprocessed(torch.zeros(2, 9), [Row(plain), Row(other)]) is None
    assert pick_unprocessed(torch.zeros(1, 9, dtype=torch.float16), [Row(plain)]) is None


class Allowing:
    """A grammar whose masks are random, each of the kind that a row is given."""

    failure = ""

    def __init__(self, seed: int, size: int, kinds: Sequence[str]) -> None:
        self.tables: dict[tuple[int, ...], torch.Tensor] = {}
        self._seed, self._size, self._kinds = seed, size, kinds

    def append(self, token_ids: Sequence[int]) -> bool:
        raise AssertionError("nothing is committed here")

    def ready(self) -> bool:
        return True

    def allowed(self, suffix: tuple[int, ...]) -> torch.Tensor:
        """[size] bool."""
        if suffix not in self.tables:
            generator = torch.Generator().manual_seed(hash((self._seed, suffix)) % 2**31)
            kind, size = self._kinds[len(suffix) % len(self._kinds)], self._size
            some = int(torch.randint(size, (), generator=generator))
            table = torch.rand(size, generator=generator) < {"few": 0.01, "half": 0.5}.get(kind, 2.0)
            if kind in ("one", "few", "half"):
                table = torch.zeros(size, dtype=torch.bool) if kind == "one" else table
                table[some] = True
            elif kind == "all but one":
                table[some] = size == 1
            elif kind == "none":
                table[:] = False
            self.tables[suffix] = table
        return self.tables[suffix]

    def masks(self, suffixes: Sequence[tuple[int, ...]]) -> np.ndarray:
        bits = torch.stack([self.allowed(suffix) for suffix in suffixes]).numpy()
        return np.packbits(bits, axis=-1, bitorder="little")


KINDS = ("few", "half", "one", "all but one", "all")


def bound_rows(
    seed: int, num_rows: int, size: int, temperature: float, kinds: Sequence[str], **cuts: Any
) -> tuple[list[Row], Allowing]:
    """Rows of a session behind one another."""
    grammar = Allowing(seed, size, [kinds[(seed + i) % len(kinds)] for i in range(len(kinds))])
    form = StructuredOutput(json_object=True)
    params = SamplingParams(temperature=temperature, structured_output=form, **cuts)
    state = SamplerState(params, seed, (0,), vocab_size=size, grammar=grammar)
    return [Row(state, tuple(range(i))) for i in range(num_rows)], grammar


def masked_first(logits: torch.Tensor, batch: Sequence[Row], grammar: Allowing) -> tuple[list[int], list[float]]:
    """Picks by definition: the mask, then everything else."""
    allowed = torch.stack([grammar.allowed(row.suffix) for row in batch])
    state = batch[0].state
    params = state.params.model_copy(update={"structured_output": None})
    free = SamplerState(params, state.seed, (0,), vocab_size=state.vocab_size)
    processed = process(logits.float().masked_fill(~allowed, -math.inf), [Row(free, row.suffix) for row in batch])
    noise = gumbel(processed.seeds, processed.positions, Stream.COUPLED, state.vocab_size).double()
    expected = (processed.scores.double() + noise * (not state.greedy)).argmax(-1)
    return expected.tolist(), processed.log_probs.gather(-1, expected[:, None])[:, 0].tolist()


@given(st.integers(0, 2**32), st.integers(1, 5), SIZES, SPREADS, SHAPES, DTYPES, st.sampled_from(CUTS))
@settings(max_examples=60, deadline=None)
def test_a_masked_pick_is_that_of_masked_logits(seed, num_rows, size, spread, shape, dtype, cuts):
    """What is forbidden does not matter, be it no number; top-k and min-p see what the mask has left."""
    logits = adversarial(seed, num_rows, size, spread, shape).to(dtype)
    for temperature in (0.0, 0.7, 1.0):
        batch, grammar = bound_rows(seed, num_rows, size, temperature, KINDS, **cuts)
        allowed = torch.stack([grammar.allowed(row.suffix) for row in batch])
        given_logits = logits.masked_fill(~allowed, (math.nan, math.inf, 3e38)[seed % 3])
        if not given_logits.masked_fill(~allowed, -math.inf).amax(-1).isfinite().all():
            assert pick_unprocessed(given_logits, batch) is None
            continue
        picked = pick_unprocessed(given_logits, batch)
        assert picked is not None
        expected = masked_first(given_logits, batch, grammar)
        assert picked[0] == expected[0]
        torch.testing.assert_close(torch.tensor(picked[1]), torch.tensor(expected[1]), rtol=2e-6, atol=5e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_an_allowed_token_is_left_to_the_pipeline(dtype, temperature):
    batch, _ = bound_rows(1, 2, 300, temperature, ["all", "none"])
    logits = torch.zeros(2, 300, dtype=dtype)
    assert pick_unprocessed(logits, batch) is None
    assert pick_unprocessed(logits[:1], batch[:1]) is not None or pick_unprocessed(logits[1:], batch[1:]) is not None


@pytest.mark.parametrize("mutant", ["inverted", "shifted by a token", "shifted by a byte", "of another row"])
def test_wrong_masks_are_caught(mutant, monkeypatch):
    """The check above, over masks that are wrong."""
    right = Allowing.masks

    def wrong(self, suffixes):
        masks = right(self, suffixes)
        if mutant == "inverted":
            return ~masks
        if mutant == "of another row":
            return np.roll(masks, 1, axis=0)
        if mutant == "shifted by a byte":
            return np.roll(masks, 1, axis=1)
        return np.packbits(np.roll(np.unpackbits(masks, axis=-1), 1, axis=-1), axis=-1)

    monkeypatch.setattr(Allowing, "masks", wrong)
    for dtype in (torch.float32, torch.bfloat16):
        for temperature in (0.0, 1.0):
            logits = adversarial(7, 4, 5000, 5.0, "as drawn").nan_to_num(neginf=-9.0).to(dtype)
            batch, grammar = bound_rows(7, 4, 5000, temperature, ["few", "half"])
            picked = pick_unprocessed(logits, batch)
            assert picked is None or picked[0] != masked_first(logits, batch, grammar)[0]


def test_sessions_with_and_without_a_form_are_picked_together():
    logits = adversarial(3, 6, 1001, 3.0, "as drawn")
    bound, grammar = bound_rows(3, 3, 1001, 1.0, ["half", "few"])
    free = SamplerState(SamplingParams(temperature=0.9, top_k=5), 8, (0,), vocab_size=1001)
    batch = [bound[0], Row(free), bound[1], bound[2], Row(free, (4,)), Row(free, (4, 5))]
    picked = pick_unprocessed(logits, batch)
    assert picked is not None
    at = [0, 2, 3]
    assert [picked[0][i] for i in at] == masked_first(logits[at], bound, grammar)[0]
    others = [1, 4, 5]
    assert [picked[0][i] for i in others] == pick(process(logits[others], [batch[i] for i in others]))[0]


@given(st.integers(0, 2**32), SIZES, st.sampled_from(["chain", "tree"]))
@settings(max_examples=40, deadline=None)
def test_a_session_with_a_form_is_decided_as_by_the_pipeline(seed, size, shape):
    """Row by row as far as its tokens were proposed, beside another session; what nobody asks for is not masked."""
    asked: list[tuple[int, ...]] = []
    batch, grammar = bound_rows(seed, 1, size, 1.0, KINDS)
    state, proposal, own = batch[0].state, Proposal(), []
    for _ in range(4):  # what is proposed is right but for the last token
        rows = [Row(state, suffix) for suffix in proposal.suffixes()]
        logits = torch.stack([adversarial(hash((seed, row.suffix)) % 2**31, 1, size, 3.0, "")[0] for row in rows])
        own = pick(process(logits, rows))[0]
        path = proposal.follow(own)
        last, token = (path[-1] if path else -1), own[path[-1] + 1 if path else 0]
        parents = (*map(proposal.parent, range(len(proposal))), last)
        token_ids = (*proposal.token_ids, token)
        if shape == "tree" and size > 1:
            token_ids, parents = (*token_ids[:-1], (token + 1) % size, token), (*parents, last)
        chain = all(parent == i - 1 for i, parent in enumerate(parents))
        proposal = Proposal(token_ids, parents=() if chain else parents)
    token_ids = (*proposal.token_ids[:-1], (proposal.token_ids[-1] + 1) % size)
    if shape == "chain":
        proposal = Proposal(token_ids)
    rows = [Row(state, suffix) for suffix in proposal.suffixes()]
    logits = torch.stack([adversarial(hash((seed, row.suffix)) % 2**31, 1, size, 3.0, "")[0] for row in rows])
    other = Row(SamplerState(SamplingParams(temperature=1.0), 1, (0,), vocab_size=size))
    logits, rows, proposals = torch.cat((logits, logits[:1])), [*rows, other], [proposal, Proposal()]
    rules = [Acceptance.COUPLED] * 2
    expected = verify(process(logits, rows), proposals, rules)
    right = Allowing.masks
    grammar.masks = lambda suffixes: (asked.extend(suffixes), right(grammar, suffixes))[1]  # type: ignore[method-assign]
    found = decide(logits, rows, proposals, rules)
    for verdict, one in zip(found, expected, strict=True):
        assert (verdict.num_accepted, verdict.token_ids) == (one.num_accepted, one.token_ids)
        torch.testing.assert_close(torch.tensor(verdict.logprobs), torch.tensor(one.logprobs), rtol=2e-6, atol=5e-6)
    assert asked == [found[0].token_ids[:i] for i in range(len(found[0].token_ids))]
    assert found[0].num_accepted >= 3


def untrusted(q: SparseDistribution, token_id: int, size: int, rng: random.Random) -> SparseDistribution | None:
    """A q that cannot have yielded the token."""
    ids, probs = list(q.token_ids), list(q.probs)
    kind = rng.randrange(6)
    if kind == 0:
        return None
    if kind == 1:
        probs[0] = math.nan
    elif kind == 2:
        ids[0] = rng.choice([-1, size])
    elif kind == 3:
        probs[ids.index(token_id)] = 0.0
    elif kind == 4:
        return SparseDistribution(q.packed_ids, q.packed_probs[:-1])
    else:
        probs = [2 * p for p in probs]
    return SparseDistribution.of(ids, probs)


@given(st.integers(0, 2**32), SIZES, st.sampled_from([0.5, 3.0]), SHAPES, DTYPES, st.sampled_from(CUTS))
@settings(max_examples=150, deadline=None)
def test_one_pass_decides_by_the_rejection_rule_as_the_pipeline_does(seed, size, spread, shape, dtype, cuts):
    """Drafts near the target's distribution and far from it, each token really drawn from its q, but for some that no q
    can have yielded; rows without a distribution among them."""
    rng, logits, batch, proposals = random.Random(seed), [], [], []
    for session in range(4):
        state = state_of(size, seed + session, temperature=rng.choice([0.4, 1.0]), **cuts)
        num_drafted = rng.randint(0, 4)
        own = adversarial(seed + session, num_drafted + 1, size, spread, shape)
        drafts = own + rng.choice([0.0, 0.3, 3.0]) * torch.randn(
            own.shape, generator=torch.Generator().manual_seed(seed)
        )
        if rng.random() < 0.15:
            own[rng.randrange(len(own)), rng.randrange(size)] = rng.choice([math.nan, math.inf])
        token_ids: tuple[int, ...] = ()
        qs: tuple[SparseDistribution | None, ...] = ()
        for i in range(num_drafted):
            ids, log_q = draft_candidates(drafts[i : i + 1], [Row(state, token_ids)], min(40, size))
            (sample,) = sample_draft(ids, log_q, *keys_of(seed + i, 1), [1.0], [1])
            bad = rng.random() < 0.1
            qs = (*qs, untrusted(sample.q, sample.token_id, size, rng) if bad else sample.q)
            token_ids = (*token_ids, sample.token_id)
        batch += [Row(state, token_ids[:i]) for i in range(num_drafted + 1)]
        proposals.append(Proposal(token_ids, qs))
        logits.append(own)
    x, rules = torch.cat(logits).to(dtype), [Acceptance.REJECTION] * 4
    try:
        expected = verify(process(x, batch), proposals, rules)
    except EngineError:
        with pytest.raises(EngineError, match="not finite"):
            decide(x, batch, proposals, rules)
        return
    for found, wanted in zip(decide(x, batch, proposals, rules), expected, strict=True):
        assert replace(found, logprobs=()) == replace(wanted, logprobs=())
        assert found.logprobs == pytest.approx(wanted.logprobs, abs=1e-4, rel=1e-5)


def test_the_rejection_rule_alone_is_decided_at_once(monkeypatch):
    """Whatever else is in a batch takes all of it to the general path, and the same comes of it."""
    general = []
    monkeypatch.setattr(verification, "process", lambda *a: (general.append(1), process(*a))[1])
    logits, at_once, rejection = torch.randn(2, 50), [Row(state_of(50, 1))], Acceptance.REJECTION
    decide(logits[:1], at_once, [Proposal()], [rejection])
    assert not general
    for options in ({"top_p": 0.9}, {"repetition_penalty": 1.1}):
        decide(logits[:1], [Row(state_of(50, 1, **options))], [Proposal()], [rejection])
    decide(logits, at_once * 2, [Proposal()] * 2, [rejection, Acceptance.COUPLED])
    decide(logits, [*at_once, Row(state_of(50, 1, temperature=0.0))], [Proposal()] * 2, [rejection] * 2)
    decide(logits[:1].double(), at_once, [Proposal()], [rejection])
    assert len(general) == 5


MOST = st.sampled_from([1, 5, 130, 256, 700, 5000])


@given(st.integers(0, 2**32), st.integers(1, 4), SIZES, SPREADS, SHAPES, DTYPES, MOST)
@settings(max_examples=100, deadline=None)
def test_the_largest_values_are_a_stable_sorts(seed, num_rows, size, spread, shape, dtype, m):
    x, m = adversarial(seed, num_rows, size, spread, shape).to(dtype), min(m, size)
    expected = x.float().sort(dim=-1, descending=True, stable=True)
    values, ids = rows.largest(x, m)
    assert torch.equal(values, expected.values[:, :m])
    assert torch.equal(ids, expected.indices[:, :m])
    batch, grammar = bound_rows(seed, num_rows, size, 1.0, KINDS)
    allowed = torch.stack([grammar.allowed(row.suffix) for row in batch])
    expected = x.float().masked_fill(~allowed, -math.inf).sort(dim=-1, descending=True, stable=True)
    values, ids = rows.largest(x, m, grammar.masks([row.suffix for row in batch]))
    assert torch.equal(values, expected.values[:, :m])
    assert torch.equal(ids, expected.indices[:, :m])


def test_what_is_no_number_comes_last():
    values, ids = rows.largest(torch.tensor([[math.nan, 1.0, -math.inf, 2.0]]), 4)
    assert ids.tolist() == [[3, 1, 0, 2]]
    assert values.tolist() == [[2.0, 1.0, -math.inf, -math.inf]]


def listed(ids: Sequence[Sequence[int]], scores: Sequence[Sequence[float]]) -> list[list[tuple[int, float]]]:
    """Ranked tokens of each row, with by how much their scores are behind the first one's."""
    rows_of = zip(ids, scores, strict=True)
    return [[(i, row[0] - x) for i, x in zip(of, row, strict=True) if x > -math.inf] for of, row in rows_of]


@given(st.integers(0, 2**32), st.integers(1, 5), SIZES, SPREADS, SHAPES, DTYPES, st.sampled_from(CUTS))
@settings(max_examples=100, deadline=None)
def test_the_best_in_one_pass_are_the_best_of_the_candidates(seed, num_rows, size, spread, shape, dtype, cuts):
    """With noise and without, after the cuts, sessions with a structured output beside others."""
    x = adversarial(seed, num_rows, size, spread, shape).to(dtype)
    params = [SamplingParams(**cuts, temperature=t) for t in (0.0, 0.7, 1.0)]
    states = [SamplerState(p, seed + i, (0,) * (i + 1), vocab_size=size, num_ranked=5) for i, p in enumerate(params)]
    for state in states[:2]:
        state.grammar = bound_rows(seed, 1, size, 1.0, KINDS)[0][0].state.grammar
    batch = [Row(states[i % 3], (i,) if i % 3 == 2 else ()) for i in range(num_rows)]
    found = best_unprocessed(x, batch)
    assert found is not None
    assert {len(row) for part in found for row in part} == {min(5, size)}
    expected = best_coupled(*draft_candidates(x, batch, 256), batch, 5)
    for own, other in zip(listed(*found), listed(*expected), strict=True):
        assert [token for token, _ in own] == [token for token, _ in other]
        behind = torch.tensor([[gap for _, gap in row] for row in (own, other)], dtype=torch.float64)
        torch.testing.assert_close(behind[0], behind[1], rtol=1e-5, atol=1e-5)


def test_what_one_pass_cannot_rank_is_left_to_others():
    x = torch.zeros(2, 9)
    ranks = SamplerState(SamplingParams(temperature=1.0), 1, (0,), vocab_size=9, num_ranked=3)
    assert best_unprocessed(x, [Row(ranks)] * 2) is not None
    assert best_unprocessed(x.double(), [Row(ranks)] * 2) is None
    for options, num in (({}, 0), ({"top_p": 0.5}, 3), ({"logit_bias": {1: 1.0}}, 3)):
        other = SamplerState(SamplingParams(temperature=1.0, **options), 1, (0,), vocab_size=9, num_ranked=num)
        assert best_unprocessed(x, [Row(ranks), Row(other)]) is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_distribution_has_nothing_to_rank(temperature):
    x = torch.zeros(4, 20)
    x[1, 7], x[2], x[3, 5:] = math.inf, -math.inf, -math.inf
    state = SamplerState(SamplingParams(temperature=temperature), 1, (0,), vocab_size=20, num_ranked=6)
    found = best_unprocessed(x, [Row(state)] * 4)
    assert found is not None
    assert [sum(score > -math.inf for score in row) for row in found[1]] == [6, 0, 0, 5]
    assert all(0 <= token < 20 for row in found[0] for token in row)


@given(st.integers(0, 2**32), st.integers(1, 5), SIZES, SPREADS, SHAPES)
@settings(max_examples=80, deadline=None)
def test_candidates_are_ranked_as_by_the_dense_noise(seed, num_rows, size, spread, shape):
    logits = adversarial(seed, num_rows, size, spread, shape)
    params = [SamplingParams(temperature=float(i % 2)) for i in range(num_rows)]
    states = [SamplerState(p, seed + i, (0,), vocab_size=size) for i, p in enumerate(params)]
    batch = [Row(state) for state in states]
    token_ids, log_q = draft_candidates(logits, batch, 64)
    found, scores = best_coupled(token_ids, log_q, batch, 6)
    seeds, positions = (
        torch.tensor(part) for part in zip(*((r.state.seed_bits, r.position) for r in batch), strict=True)
    )
    exact = gumbel_at(seeds, positions, Stream.COUPLED, token_ids).double()
    exact = exact * torch.tensor([[float(i % 2)] for i in range(num_rows)])
    for row in range(num_rows):
        ranked = sorted(zip((-(exact[row] + log_q[row].double())).tolist(), token_ids[row].tolist(), strict=True))[
            : len(found[row])
        ]
        assert scores[row] == [-score for score, _ in ranked]
        finite = [token for score, token in ranked if score < math.inf]
        assert found[row][: len(finite)] == finite


def test_ranking_agrees_with_its_reference():
    generator = torch.Generator().manual_seed(3)
    token_ids = torch.stack([torch.randperm(500, generator=generator)[:40] for _ in range(20)])
    log_q = torch.log_softmax(torch.randn(20, 40, generator=generator) * 3, -1)
    log_q[3, 5], log_q[4, 0] = math.nan, -math.inf
    states = [SamplerState(SamplingParams(temperature=1.0), i, (0,), vocab_size=500) for i in range(20)]
    batch = [Row(state) for state in states]
    found, _ = agree(lambda: best_coupled(token_ids, log_q, batch, 6), rows, atol=4e-6)
    greedy = torch.zeros(1, dtype=torch.bool)
    with references(rows):
        ranked, _ = rank_coupled(token_ids[:1], log_q[:1], torch.tensor([0]), torch.tensor([1]), greedy)
    assert ranked[0, :6].tolist() == found[0]


def state_of(size: int, seed: int, num_guessed: int = 4, num_ranked: int = 0, **options: Any) -> SamplerState:
    params = SamplingParams(**{"temperature": 1.0} | options)
    return SamplerState(params, seed, (0,), vocab_size=size, num_guessed=num_guessed, num_ranked=num_ranked)


def sessions(num_rows: int, size: int, num_guessed: int = 4, **options: Any) -> list[Row]:
    return [Row(state_of(size, i, num_guessed, **options), (i, 1)) for i in range(num_rows)]


def test_drawing_draft_tokens_agrees_with_its_reference():
    """The same tokens, and the q that each was drawn from."""
    num_rows = 200
    logits = torch.randn(num_rows, 300, generator=torch.Generator().manual_seed(3)) * 3
    token_ids, log_q = draft_candidates(logits, sessions(num_rows, 300), 70)
    log_q[::7, 3:] = -math.inf
    saguaro, most = [1.0, 0.25] * (num_rows // 2), [2, 3, 70, 0] * 50
    found = agree(
        lambda: [
            (each.token_id, list(each.q.token_ids), list(each.q.probs))
            for each in sample_draft(token_ids, log_q, *keys_of(5, num_rows), saguaro, most)
        ],
        rows,
        rtol=1e-12,
    )
    assert all(dict(zip(ids, probs, strict=True))[token_id] > 0 for token_id, ids, probs in found)
    assert len({token_id for token_id, *_ in found}) > num_rows / 4, "tokens are drawn at random"


@pytest.mark.parametrize("saguaro", [1.0, 0.5])
def test_guessing_siblings_agrees_with_its_reference(saguaro):
    logits = 2 * torch.randn(60, 500, generator=torch.Generator().manual_seed(2))
    batch = sessions(60, 500)
    token_ids, log_q = draft_candidates(logits, batch, 40)
    log_q[4, 5:], log_q[5, 1:] = -math.inf, -math.inf
    wanted = [RankingRow(row, Rule.REJECTION, 1 + i % 6, saguaro) for i, row in enumerate(batch)]
    drawn = token_ids[:, 1].tolist()
    found = agree(lambda: guess_siblings(token_ids, log_q, drawn, wanted), rows, atol=4e-6)
    for i, (ids, _, bonus) in enumerate(found):
        assert drawn[i] not in ids
        assert len(bonus) == 1 + len(ids) <= 1 + i % 6


def siblings_of(logits: Tensor, token_ids: Tensor, log_q: Tensor, drawn: int, it: RankingRow) -> Siblings:
    """Guesses of the target's own token by the dense noise: among the candidates [m] of a row, and the best others."""
    state, (m, size) = it.row.state, (len(token_ids), len(logits))
    key = (torch.tensor([part]) for part in (state.seed_bits, it.row.position))
    noise = gumbel(*key, Stream.RECOVER, size, torch.tensor([it.row.text_key]))[0].double()
    weights = (logits.float() - logits.float().max()) / state.temperature
    weights[weights < state.log_min_p] = -math.inf
    weights[token_ids] = -math.inf
    num_others = state.num_guessed if m < min(state.top_k, size) else 0
    others = (weights.double() + noise).argsort(descending=True)[:num_others]
    others = others[weights[others] > -math.inf]
    ids = torch.cat((token_ids, others))

    def best(of_candidates: Tensor) -> list[tuple[int, float]]:
        scores = torch.cat((of_candidates.double(), weights[others].double() + log_q[0])) + noise[ids]
        return [(int(ids[i]), float(scores[i])) for i in scores.argsort(descending=True) if scores[i] > -math.inf]

    listed = [pair for pair in zip(token_ids.tolist(), log_q.tolist(), strict=True) if pair[1] > -math.inf]
    recovered = listed if it.saguaro != 1.0 else best(log_q + math.log(1 - ACCEPTANCE))
    return ranking._siblings(drawn, recovered, best(log_q), it.fan_out)


@given(st.integers(0, 2**32), SIZES, SPREADS, SHAPES, DTYPES, st.sampled_from(CUTS), st.integers(1, 70))
@settings(max_examples=150, deadline=None)
def test_a_draft_draws_and_guesses_by_one_pass_as_by_several(seed, size, spread, shape, dtype, cuts, m):
    """Tokens and the q that each was drawn from; siblings, also others than candidates, and the gaps of all."""
    rng, num_rows, m = random.Random(seed), 5, min(m, size)
    logits = adversarial(seed, num_rows, size, spread, shape).to(dtype)
    if rng.random() < 0.3:
        logits[rng.randrange(num_rows)] = rng.choice([-math.inf, math.inf, math.nan])
    most = rng.choice([1, 5])
    batch = [
        Row(
            state_of(size, seed + i, num_guessed=rng.choice([0, most]), temperature=rng.choice([0.3, 1.0]), **cuts),
            (i,),
        )
        for i in range(num_rows)
    ]
    wanted = [
        RankingRow(row, Rule.REJECTION, rng.randint(1, most), rng.choice([1.0, 0.5]), rng.randrange(2**32))
        for row in batch
    ]
    nothing = torch.zeros(num_rows, 0)
    found = rank(Candidates(nothing.long(), nothing, unread=(logits, range(num_rows), m)), wanted)
    token_ids, log_q = draft_candidates(logits, batch, m)
    by_several = rank(Candidates(token_ids, log_q), wanted)
    for i, (quick, slow) in enumerate(zip(found, by_several, strict=True)):
        assert quick.token_ids[:1] == slow.token_ids[:1]
        assert (quick.q is None) == (slow.q is None)
        if quick.token_ids:
            siblings, behind, bonus = siblings_of(logits[i], token_ids[i], log_q[i], quick.token_ids[0], wanted[i])
            assert quick.token_ids[1:] == (*siblings,)
            assert quick.gaps == pytest.approx((slow.gaps[0], *behind), abs=1e-4, rel=1e-6)
            assert most == 1 or quick.bonus == pytest.approx(bonus, abs=1e-4, rel=1e-6)
        if quick.q is not None and slow.q is not None:
            assert quick.q.token_ids == slow.q.token_ids
            assert quick.q.probs == pytest.approx(slow.q.probs, rel=1e-4)
            assert sparse.probability(quick.q, quick.token_ids[0], size) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_draws_what_a_form_allows(kind):
    grammar = Allowing(3, 500, [kind])
    params = SamplingParams(temperature=1.0, structured_output=StructuredOutput(json_object=True))
    state = SamplerState(params, 3, (0,), vocab_size=500, grammar=grammar, num_guessed=4)
    wanted = [RankingRow(Row(state, (i,)), Rule.REJECTION, 4, nonce=i) for i in range(6)]
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(1))
    nothing = torch.zeros(6, 0)
    for row, ranked in zip(
        wanted, rank(Candidates(nothing.long(), nothing, unread=(logits, range(6), 10)), wanted), strict=True
    ):
        allowed = grammar.allowed(row.row.suffix)
        assert len(ranked.token_ids) == min(4, int(allowed.sum()))
        assert bool(allowed[list(ranked.token_ids)].all())


@pytest.mark.parametrize("spread", [0.3, 3.0, 20.0])
@pytest.mark.parametrize("coarse", [False, True])
def test_truncation_agrees_with_its_reference(spread, coarse):
    """Flat rows whose nucleus is most of the vocabulary beside peaked ones, with ties and without."""
    generator = torch.Generator().manual_seed(int(10 * spread))
    logits = torch.randn(6, 3000, generator=generator) * spread
    logits = logits.bfloat16() if coarse else logits
    options = [
        {"top_k": 7},
        {"top_p": 0.9},
        {"top_p": 0.999, "min_p": 1e-4},
        {"top_k": 2000, "top_p": 0.95},
        {},
        {"min_p": 0.05, "temperature": 3.0},
    ]
    states = [SamplerState(SamplingParams(**{"temperature": 1.0, **o}), 1, (0,), vocab_size=3000) for o in options]
    batch = [Row(state) for state in states]
    native = agree(lambda: process(logits, batch).scores, rows)
    alone = torch.cat([process(logits[i : i + 1], [row]).scores for i, row in enumerate(batch)])
    assert torch.equal(native, alone)


def test_noise_agrees_with_its_reference():
    seeds, positions, nonces = keys_of(5, 40)
    x = adversarial(5, 40, 2000, 2.0, "as drawn")
    agree(lambda: gumbel_argmax(x, seeds, positions, Stream.DRAFT, nonces), rows)
    agree(lambda: gumbel_max(x, seeds, positions, Stream.COUPLED, 12), rows)


FAULTS: dict[str, Any] = {
    "none": lambda ids, probs, at: None,
    "no mass": lambda ids, probs, at: probs.__setitem__(0, 0.0),
    "negative": lambda ids, probs, at: probs.__setitem__(at, -0.1),
    "above 1": lambda ids, probs, at: probs.__setitem__(at, 1.1),
    "NaN": lambda ids, probs, at: probs.__setitem__(at, math.nan),
    "infinite": lambda ids, probs, at: probs.__setitem__(at, math.inf),
    "sum": lambda ids, probs, at: probs.__setitem__(at, probs[at] + 1e-5 if probs[at] < 0.5 else probs[at] - 1e-5),
    "repeated": lambda ids, probs, at: ids.__setitem__(at, ids[at - 1]),
    "below": lambda ids, probs, at: ids.__setitem__(at, -1),
    "beyond": lambda ids, probs, at: ids.__setitem__(at, 600),
    "least": lambda ids, probs, at: ids.__setitem__(at, np.iinfo(np.int32).min),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_distribution_is_refused_for_the_same_faults_with_and_without_native_code(fault, monkeypatch):
    rng, drawable = np.random.default_rng(7), 0
    for size in (1, 2, 3, 256, 600):
        for _ in range(20):
            ids, probs = rng.permutation(600)[:size].astype(np.int32), rng.dirichlet(np.ones(size))
            FAULTS[fault](ids, probs, int(rng.integers(size)))
            q = sparse.packed(ids, probs)
            for token_id in (int(ids[0]), 601, -1):
                native = sparse.probability(q, token_id, 600)
                with monkeypatch.context() as patch:
                    patch.setattr(rows, "probability", lambda *_: None)
                    assert sparse.probability(q, token_id, 600) == native
                drawable += sparse.drawable(q, token_id, 600)
                if native and fault == "none":
                    normal_ids, normal = sparse.normalized(q)
                    assert native == normal[normal_ids == token_id][0]
    assert drawable == (100 if fault == "none" else 20 if fault == "repeated" else 0)


def test_columns_of_unequal_length_are_refused():
    assert not sparse.drawable(SparseDistribution(b"", b""), 0, 600)
    for ids, probs in ((b"1234", b""), (b"", b"12345678"), (b"12345", b"12345678"), (b"1234", b"123456789")):
        assert not sparse.drawable(SparseDistribution(ids, probs), 0, 600)


def test_without_a_compiler_torch_draws_and_says_so_once(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr("paceline.core.native.shutil.which", lambda name: None)
    monkeypatch.setattr(rows, "load_library", rows.load_library.__wrapped__)
    assert not rows.usable(torch.zeros(1, 4), torch.float32)
    assert "there is no C++ compiler" in caplog.text
    state = SamplerState(SamplingParams(temperature=1.0), 1, (0,), vocab_size=4)
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    assert pick_unprocessed(logits, [Row(state)]) is None
    scores = logits.double() - 3 + gumbel(torch.tensor([1]), torch.tensor([1]), Stream.COUPLED, 4).double()
    assert pick(process(logits, [Row(state)]))[0] == [int(scores.argmax())]


def test_the_bounds_of_the_noise_hold_for_the_kernel():
    """rows.cpp leaves out a block whose heaviest token cannot reach with the largest noise."""
    assert noise.MIN_GUMBEL > -3.14
    assert math.exp(noise.MAX_GUMBEL) < 2**33.5
