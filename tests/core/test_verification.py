import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.noise import Stream, uniform
from paceline.core.processors import Row, SamplerState
from paceline.core.sampling import ProcessedRows, draft_candidates, process, rank_coupled, row_keys, sample_coupled
from paceline.core.tree import Proposal
from paceline.core.verification import (
    acceptance_probability,
    draft_distributions,
    residual,
    sample_draft,
    verify,
)
from paceline.errors import InvalidRequestError
from paceline.messages import SparseDistribution
from paceline.types import Acceptance, SamplingParams

COUPLED, REJECTION = Acceptance.COUPLED, Acceptance.REJECTION
V = 6


def rows_of(log_probs, seed=1, start=10, greedy=False):
    n = len(log_probs)
    return ProcessedRows(
        torch.full((n,), greedy),
        torch.full((n,), seed),
        torch.arange(start, start + n),
        n * greedy,
        scores=log_probs,
        rows=[SimpleNamespace(text_key=seed + i) for i in range(n)],
    )


def random_rows(n, seed=0, greedy=False):
    logits = torch.randn(n, V, generator=torch.Generator().manual_seed(seed))
    return rows_of(logits.log_softmax(-1), seed=seed, greedy=greedy)


def join(*parts):
    columns = [
        torch.cat([getattr(part, name) for part in parts]) for name in ("greedy", "seeds", "positions", "scores")
    ]
    rows = [row for part in parts for row in part.rows]
    return ProcessedRows(*columns[:3], sum(part.num_greedy for part in parts), scores=columns[3], rows=rows)


def one_hot(v):
    return SparseDistribution.of((v,), (1.0,))


def dense(probs):
    return SparseDistribution.of(tuple(range(len(probs))), tuple(probs))


def test_theorem_lines():
    assert acceptance_probability(0.2, 0.4) == 0.5
    assert acceptance_probability(0.4, 0.2) == 1.0
    p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.25, 0.0, 0.75])
    assert residual(p, q).tolist() == [0.25, 0.5, 0.0]


@pytest.mark.parametrize("rule", [COUPLED, REJECTION])
def test_an_empty_proposal_is_plain_decoding(rule):
    processed = random_rows(1)
    (verdict,) = verify(processed, [Proposal()], [rule])
    assert verdict.num_accepted == verdict.num_invalid == 0
    assert verdict.logprobs == (processed.log_probs[0, verdict.token_ids[0]].item(),)


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("wrong_at", [None, 0, 1, 2])
def test_matching_accepts_up_to_the_first_difference(greedy, wrong_at):
    processed = random_rows(4, greedy=greedy)
    own = sample_coupled(processed).tolist()
    drafted = own[:3]
    if wrong_at is not None:
        drafted[wrong_at] = (drafted[wrong_at] + 1) % V
    num_accepted = 3 if wrong_at is None else wrong_at
    for rule in (COUPLED, REJECTION) if greedy else (COUPLED,):
        (verdict,) = verify(processed, [Proposal(tuple(drafted))], [rule])
        assert verdict.num_accepted == num_accepted
        assert verdict.token_ids == tuple(own[: num_accepted + 1])
        assert verdict.logprobs == tuple(processed.log_probs[j, own[j]].item() for j in range(num_accepted + 1))


def test_tokens_outside_the_vocabulary_are_never_accepted():
    for rule in Acceptance:
        (verdict,) = verify(random_rows(2), [Proposal((V,), (one_hot(V),))], [rule])
        assert verdict.num_accepted == 0
        assert 0 <= verdict.token_ids[0] < V


@given(
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from(list(Acceptance)), st.booleans()), max_size=6),
    st.integers(0, 1000),
)
@settings(max_examples=80, deadline=None)
def test_ragged_mixed_batches_equal_session_by_session(sessions, seed):
    parts, proposals = [], []
    generator = torch.Generator().manual_seed(seed)
    for i, (k, _, greedy) in enumerate(sessions):
        part = random_rows(k + 1, seed=seed + i, greedy=greedy)
        q = torch.rand(k, V, generator=generator).double()
        q /= q.sum(-1, keepdim=True)
        tokens = torch.randint(V, (k,), generator=generator).tolist()
        parts.append(part)
        proposals.append(Proposal(tuple(tokens), tuple(dense(each) for each in q.tolist())))
    rules = [rule for _, rule, _ in sessions]
    expected = [verify(part, [p], [r])[0] for part, p, r in zip(parts, proposals, rules, strict=True)]
    if parts:
        assert verify(join(*parts), proposals, rules) == expected
        assert verify(join(*parts), proposals, rules) == expected


INVALID_Q = {
    "missing": None,
    "unknown": None,
    "nan": SparseDistribution.of((0, 1), (math.nan, 1.0)),
    "negative": SparseDistribution.of((0, 1, 2), (0.5, -0.5, 1.0)),
    "infinite": SparseDistribution.of((0, 1), (math.inf, 0.0)),
    "short": SparseDistribution.of((0, 1), (0.5, 0.499)),
    "long": SparseDistribution.of((0, 1), (0.9, 0.9)),
    "repeated": SparseDistribution.of((0, 0), (0.5, 0.5)),
    "lengths": SparseDistribution.of((0, 1), (1.0,)),
    "not in support": SparseDistribution.of((1, 2), (0.5, 0.5)),
    "no mass": SparseDistribution.of((0, 1), (0.0, 1.0)),
    "outside": SparseDistribution.of((0, V), (0.5, 0.5)),
    "empty": SparseDistribution.of((), ()),
}


@pytest.mark.parametrize("name", INVALID_Q)
@pytest.mark.parametrize("at", [0, 1])
def test_a_proposal_is_cut_before_a_q_that_cannot_be_trusted(name, at):
    processed = rows_of(torch.full((4, V), -math.log(V)))
    processed.scores[:at] = torch.tensor([0.0] + [-math.inf] * (V - 1))  # certain acceptance before
    q = INVALID_Q[name]
    qs = (one_hot(0),) * at if name == "missing" else (*(one_hot(0),) * at, q, one_hot(0))
    (verdict,) = verify(processed, [Proposal((0, 0, 0), qs)], [REJECTION])
    assert verdict.num_invalid == 3 - at
    assert verdict.num_accepted == at
    # The next token is what an honest proposal of that length would have got.
    (shorter,) = verify(rows_of(processed.log_probs[: at + 1]), [Proposal((0,) * at, (one_hot(0),) * at)], [REJECTION])
    assert verdict.token_ids == shorter.token_ids


def test_a_rejection_before_an_invalid_q_is_not_its_fault():
    processed = rows_of(torch.tensor([[0.0, -math.inf]] * 3))
    (verdict,) = verify(processed, [Proposal((1, 0), (one_hot(1), INVALID_Q["nan"]))], [REJECTION])
    assert (verdict.num_accepted, verdict.token_ids, verdict.num_invalid) == (0, (0,), 0)


def test_tiny_q_is_not_rounded_away():
    """q(x) = 1e-12 against p(x) = 1e-13: accepted one time in ten, as exactly as any other ratio."""
    log_p = torch.tensor([1 - 1e-13, 1e-13], dtype=torch.float64).log().expand(2, 2)
    q = SparseDistribution.of((0, 1), (1 - 1e-12, 1e-12))
    n = 2000
    processed = join(*(rows_of(log_p, seed) for seed in range(n)))
    verdicts = verify(processed, [Proposal((1,), (q,))] * n, [REJECTION] * n)
    accepted = sum(verdict.num_accepted for verdict in verdicts)
    assert abs(accepted - n * 0.1) < 6 * math.sqrt(n * 0.09)  # fails by chance once in 500 million


def test_decisions_use_the_stated_uniforms():
    n = 300
    processed = join(*(rows_of(torch.tensor([[0.3, 0.7]] * 2).log(), seed) for seed in range(n)))
    verdicts = verify(processed, [Proposal((0,), (one_hot(0),))] * n, [REJECTION] * n)
    u = uniform(processed.seeds, processed.positions, Stream.ACCEPT)[::2]
    assert [verdict.num_accepted == 1 for verdict in verdicts] == (u < processed.log_probs[0, 0].exp()).tolist()


def draft_inputs(n, m, seed=0):
    log_q = (
        torch.randn(n, m, generator=torch.Generator().manual_seed(seed))
        .log_softmax(-1)
        .sort(-1, descending=True)
        .values
    )
    return torch.arange(m).flip(0).expand(n, m) * 3, log_q, torch.arange(n), torch.full((n,), 5)


def test_sample_draft_reports_what_it_drew_from():
    token_ids, log_q, seeds, positions = draft_inputs(4, 5)
    log_q[2, 3:] = -math.inf
    samples = sample_draft(token_ids, log_q, seeds, positions, torch.arange(4), [1.0, 0.25, 1.0, 0.25], [0, 2, 3, 5])
    for i, (sample, scale, top) in enumerate(zip(samples, [1.0, 0.25, 1.0, 0.25], [0, 2, 3, 5], strict=True)):
        weights = log_q[i].double().exp()
        weights[:top] *= scale
        support = weights > 0
        assert sample.q.token_ids == tuple(token_ids[i, support].tolist())
        expected = (weights / weights.sum())[support]
        torch.testing.assert_close(torch.tensor(sample.q.probs, dtype=torch.float64), expected)
        assert sample.token_id in sample.q.token_ids


def test_a_position_that_is_drafted_again_gets_new_values():
    token_ids, log_q, seeds, positions = draft_inputs(200, 20)
    first, again, other = (
        [s.token_id for s in sample_draft(token_ids, log_q, seeds, positions, nonces, [1.0] * 200, [0] * 200)]
        for nonces in (torch.full((200,), 1), torch.full((200,), 1), torch.full((200,), 2))
    )
    assert first == again
    assert first != other


def test_saguaro_off_leaves_q_alone():
    log_q = torch.tensor([[0.75, 0.25], [0.75, 0.25]], dtype=torch.float64).log()
    off, on = draft_distributions(log_q, [1.0, 1 / 3], [1, 1]).tolist()
    assert off == pytest.approx([0.75, 0.25], abs=1e-15)
    assert on == pytest.approx([0.5, 0.5], abs=1e-15)


def model(context, vocab_size=12):
    """A deterministic next-token model with coarse logits: ties happen."""
    generator = torch.Generator().manual_seed(hash(context) % 2**31)
    return (torch.randn(vocab_size, generator=generator) * 6).round() / 2


PARAMS = st.sampled_from(
    [
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.6, top_k=5, top_p=0.9),
        SamplingParams(temperature=1.3, min_p=0.05, presence_penalty=0.7, frequency_penalty=0.3),
        SamplingParams(temperature=1.0, repetition_penalty=1.4, bad_words=((3,), (1, 2), (2, 4, 5)), min_tokens=6),
        SamplingParams(repetition_penalty=1.4, logit_bias={2: 3.0}, min_tokens=4),
    ]
)


def decode(params, seed, num_tokens, proposals, *, reopen_at=None, position_shift=0):
    """The production functions in a loop: tokens and logprobs. proposals: output so far -> draft tokens."""
    prompt, output, logprobs = (1, 2, 3), [], []
    state = SamplerState(params, seed, prompt, eos_token_ids=(0,), vocab_size=12)
    while len(output) < num_tokens:
        if reopen_at is not None and len(output) >= reopen_at:
            state = SamplerState(params, seed, prompt, output, eos_token_ids=(0,), vocab_size=12)
            state.num_tokens += position_shift
            reopen_at = None
        drafted = proposals(tuple(output))
        proposal = drafted if isinstance(drafted, Proposal) else Proposal(tuple(drafted))
        rows = [Row(state, suffix) for suffix in proposal.suffixes()]
        logits = torch.stack([model((*prompt, *output, *row.suffix)) for row in rows])
        (verdict,) = verify(process(logits, rows), [proposal], [COUPLED])
        state.append(verdict.token_ids)
        output += verdict.token_ids
        logprobs += verdict.logprobs
    return output[:num_tokens], logprobs[:num_tokens]


@given(PARAMS, st.integers(0, 2**64 - 1), st.randoms(use_true_random=False), st.integers(0, 8), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_coupled_text_and_logprobs_do_not_depend_on_the_proposals(params, seed, random, k, reopen_at):
    plain = decode(params, seed, 10, lambda _: ())

    def proposals(output):
        """Right for a while, then anything: also tokens that stop, repeat or are forbidden."""
        right = plain[0][len(output) : len(output) + random.randint(0, k)]
        return [*right, *(random.randrange(12) for _ in range(k - len(right)))]

    assert decode(params, seed, 10, proposals) == plain
    assert decode(params, seed, 10, proposals, reopen_at=reopen_at) == plain


def random_subtree(random, right, size):
    """A subtree of ``size`` tokens that holds, somewhere, a path that is right for a while."""
    parents, children = [-1], {-1: [right[0] if right else 0], 0: []}
    tokens, depth_right = [children[-1][0]], {0: 1} if right else {}
    while len(tokens) < size:
        parent = len(tokens) - 1 if random.random() < 0.5 else random.choice([*{-1, *_ends(parents)}])
        depth = depth_right.get(parent, 0 if parent == -1 else None)
        wanted = right[depth] if depth is not None and depth < len(right) and random.random() < 0.7 else None
        token = random.randrange(12) if wanted is None else wanted
        if token in children[parent]:
            continue
        children[parent].append(token)
        if depth is not None and depth < len(right) and token == right[depth]:
            depth_right[len(tokens)] = depth + 1
        children[len(tokens)] = []
        parents.append(parent)
        tokens.append(token)
    return Proposal(tuple(tokens), parents=tuple(parents))


def _ends(parents):
    """Tokens on the path to the last one, behind which a branch may begin and keep the order."""
    at, path = len(parents) - 1, []
    while at >= 0:
        path.append(at)
        at = parents[at]
    return path


@given(PARAMS, st.integers(0, 2**64 - 1), st.randoms(use_true_random=False), st.integers(1, 10))
@settings(max_examples=60, deadline=None)
def test_text_and_logprobs_do_not_depend_on_subtrees(params, seed, random, size):
    plain = decode(params, seed, 10, lambda _: ())

    def subtree(output):
        return random_subtree(random, plain[0][len(output) :], size)

    assert decode(params, seed, 10, subtree) == plain


def test_following_the_first_branch_whatever_its_siblings_say_is_caught(monkeypatch):
    params = SamplingParams(temperature=1.0)
    plain = decode(params, 3, 10, lambda _: ())

    def subtree(output):
        right = plain[0][len(output) :]
        wrong = (right[0] + 1) % 12 if right else 0
        return Proposal((wrong, *right[:2]), parents=(-1, -1, 1)[: 1 + len(right[:2])])

    assert decode(params, 3, 10, subtree) == plain
    monkeypatch.setattr(Proposal, "parent", lambda self, index: index - 1 if index != 1 else -1)
    monkeypatch.setattr(Proposal, "follow", lambda self, own: [i for i, t in enumerate(self.token_ids) if t == own[i]])
    assert decode(params, 3, 10, subtree) != plain


def test_a_position_key_off_by_one_after_preemption_is_caught():
    params = SamplingParams(temperature=1.5)
    plain = [decode(params, seed, 10, lambda _: ()) for seed in range(5)]
    assert [decode(params, seed, 10, lambda _: (), reopen_at=4) for seed in range(5)] == plain
    assert [decode(params, seed, 10, lambda _: (), reopen_at=4, position_shift=1) for seed in range(5)] != plain


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
def test_a_model_that_drafts_for_itself_is_always_accepted(temperature):
    params = SamplingParams(temperature=temperature)

    def self_draft(seed):
        def propose(output):
            drafted = ()
            while len(drafted) < 5:
                state = SamplerState(params, seed, (1, 2, 3), output, vocab_size=12)
                row = [Row(state, drafted)]
                token_ids, log_q = draft_candidates(model((1, 2, 3, *output, *drafted))[None], row, 12)
                keys = row_keys(row)
                ranked, _ = rank_coupled(token_ids, log_q, keys.seeds, keys.positions, keys.greedy)
                drafted = (*drafted, int(ranked[0, 0]))
            lengths.append(len(output))
            return drafted

        return propose

    for seed in range(5):
        lengths: list[int] = []
        decode(params, seed, 24, self_draft(seed))
        assert lengths == [0, 6, 12, 18]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", list(Acceptance))
def test_a_dead_end_is_met_only_where_the_text_reaches_it(rule, temperature):
    """After token 1 every token is forbidden. Proposals that run into it do no harm; the text that does, ends there."""
    params = SamplingParams(
        temperature=temperature,
        logit_bias={v: -math.inf for v in range(12) if v not in (1, 2)} | {2: 2.0},
        bad_words=((1, 1), (1, 2)),
    )
    failures = []
    for seed in range(12):
        texts = []
        for drafted in ((), (1, 2), (2, 1, 2), (2, 2, 2, 1)):
            q = tuple(SparseDistribution.of((v,), (1.0,)) for v in drafted)
            state, output = SamplerState(params, seed, (3,), vocab_size=12), []
            try:
                while len(output) < 12:
                    rows = [Row(state, drafted[:j]) for j in range(len(drafted) + 1)]
                    logits = torch.stack([model((*output, *row.suffix)) / 8 for row in rows])
                    (verdict,) = verify(process(logits, rows), [Proposal(drafted, q)], [rule])
                    assert len(verdict.token_ids) == len(verdict.logprobs) == verdict.num_accepted + 1
                    state.append(verdict.token_ids)
                    output += verdict.token_ids
            except InvalidRequestError as error:
                failures.append((str(error), output[-1]))
            assert 1 not in output[:-1]
            texts.append(output[:12])
        if rule is COUPLED or temperature == 0:
            assert texts == texts[:1] * 4
    assert failures or temperature == 0
    assert all("logit_bias and bad_words" in message and last == 1 for message, last in failures)
