"""The law of the emitted text by chi-square over many sessions with production noise, and acceptance rates.

Seeds are fixed, so a pass stays a pass; for new seeds each comparison would fail a correct implementation with
probability ``FALSE_ALARM``. With ``SESSIONS`` sessions and 25 cells (two tokens, V = 5) a total variation of 0.03 is
detected with probability 0.99, and every night, with ten times as many, one of 0.01 (``power.py``). ``law_p_value`` is
the check, and each mutant below must make it fail.
"""

import math
import sys
import zlib
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from scipy import stats
from tests.lossless.power import detectable_tv
from tests.support.noise import gumbel_at
from tests.support.rings import nightly

from paceline.core import rows as native
from paceline.core import verification
from paceline.core.noise import Stream, gumbel, gumbel_argmax
from paceline.core.processors import Row, SamplerState
from paceline.core.sampling import ProcessedRows, rank_coupled
from paceline.core.tree import Proposal
from paceline.core.verification import KeyedChoices, decide, sample_draft, verify
from paceline.messages import SparseDistribution
from paceline.types import Acceptance, SamplingParams

FALSE_ALARM = 1e-8
COUPLED, REJECTION = Acceptance.COUPLED, Acceptance.REJECTION
V = 5
SESSIONS = 32_000


def table(seed, scale=1.5, vocab_size=V):
    """log probs of a first-order model: [last token, next token]."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(vocab_size, vocab_size, generator=generator) * scale).log_softmax(-1)


P, Q = table(1), table(2)
OPPOSITE = (-P).log_softmax(-1)


def draft_coupled(log_q, seeds, positions):
    ids = torch.arange(log_q.shape[-1]).expand_as(log_q)
    ranked, _ = rank_coupled(ids, log_q, seeds, positions, torch.zeros(len(seeds), dtype=torch.bool))
    return ranked[:, 0].tolist()


def text_key(text):
    return zlib.crc32(bytes(text))


def draft_rejection(log_q, seeds, positions, nonces, saguaro=1.0):
    sorted_q, ids = log_q.sort(-1, descending=True)
    samples = sample_draft(ids, sorted_q, seeds, positions, nonces, [saguaro] * len(ids), [2] * len(ids))
    return [sample.token_id for sample in samples], [sample.q for sample in samples]


def simulate(
    rule,
    log_p,
    log_q,
    num_drafted,
    *,
    sessions=SESSIONS,
    num_tokens=2,
    first_seed=0,
    draft=None,
    saguaro=1.0,
    reset=False,
    leaves_out=None,
    at_once=False,
):
    """Sessions that start after token 0 and run to ``num_tokens``: texts and first-round verdicts.

    ``at_once``: they are decided from logits, by one native pass.
    ``leaves_out``: says of each drafted token, from log q, keys, positions and the texts before, whether it and those
    behind it are not proposed.
    """
    params = SamplingParams(temperature=1.0)
    seeds = torch.arange(first_seed, first_seed + sessions) * 0x9E3779B97F4A7C15 % 2**62
    texts, verdicts_of_first = [(0,)] * sessions, []
    active, nonce = list(range(sessions)), 0
    while active:
        keys = seeds[active]
        length = torch.tensor([0 if reset else len(texts[i]) for i in active])
        drafted: list[tuple[int, ...]] = [()] * len(active)
        qs: list[tuple[SparseDistribution, ...]] = [()] * len(active)
        kept = [num_drafted] * len(active)
        for j in range(num_drafted):
            nonce += 1
            last = [(texts[i] + d)[-1] for i, d in zip(active, drafted, strict=True)]
            nonces = torch.full((len(active),), nonce)
            if rule is COUPLED:
                tokens = draft_coupled(log_q[last], keys, length + j)
            else:
                tokens, q = (draft or draft_rejection)(log_q[last], keys, length + j, nonces, saguaro)
                qs = [(*old, new) for old, new in zip(qs, q, strict=True)]
            before = [texts[i] + d for i, d in zip(active, drafted, strict=True)]
            drafted = [(*d, token) for d, token in zip(drafted, tokens, strict=True)]
            for at in leaves_out(log_q[last], keys, length + j, before) if leaves_out else ():
                kept[at] = min(kept[at], j)
        drafted = [d[:n] for d, n in zip(drafted, kept, strict=True)]
        qs = [q[:n] for q, n in zip(qs, kept, strict=True)]
        before = [texts[i] + d[:j] for i, d in zip(active, drafted, strict=True) for j in range(len(d) + 1)]
        rows = [text[-1] for text in before]
        processed = ProcessedRows(
            torch.zeros(len(rows), dtype=torch.bool),
            keys.repeat_interleave(torch.tensor(kept) + 1),
            torch.cat([first + torch.arange(n + 1) for first, n in zip(length.tolist(), kept, strict=True)]),
            0,
            scores=log_p[rows],
            rows=[SimpleNamespace(text_key=text_key(text)) for text in before],
        )
        proposals = [Proposal(d, q if rule is REJECTION else ()) for d, q in zip(drafted, qs, strict=True)]
        if at_once:
            states = [
                SamplerState(params, key, texts[i], vocab_size=log_p.shape[-1])
                for i, key in zip(active, keys.tolist(), strict=True)
            ]
            own = [Row(state, d[:j]) for state, d in zip(states, drafted, strict=True) for j in range(len(d) + 1)]
            verdicts = decide(log_p[rows], own, proposals, [rule] * len(active))
        else:
            verdicts = verify(processed, proposals, [rule] * len(active))
        verdicts_of_first = verdicts_of_first or verdicts
        for i, verdict in zip(active, verdicts, strict=True):
            texts[i] += verdict.token_ids
        active = [i for i in active if len(texts[i]) <= num_tokens]
    return [text[1 : num_tokens + 1] for text in texts], verdicts_of_first


def p_value(observed, expected):
    """Chi-square of counts against expected counts; cells that expect fewer than 5 are merged into one."""
    small = [cell for cell, count in expected.items() if count < 5]
    f_obs = [observed.get(cell, 0) for cell in expected if cell not in small]
    f_exp = [count for cell, count in expected.items() if cell not in small]
    impossible = sum(count for cell, count in observed.items() if expected.get(cell, 0) == 0)
    if impossible:
        return 0.0
    if small:
        f_obs.append(sum(observed.get(cell, 0) for cell in small))
        f_exp.append(sum(expected[cell] for cell in small))
    scale = sum(f_obs) / sum(f_exp)
    return float(stats.chisquare(f_obs, [value * scale for value in f_exp]).pvalue)


def law_p_value(rule, log_p, log_q, num_drafted, parts=1, sessions=SESSIONS, **options):
    """Of the joint law of the first two tokens of ``parts`` times as many sessions."""
    texts = []
    for part in range(parts):
        texts += simulate(rule, log_p, log_q, num_drafted, first_seed=part * sessions, sessions=sessions, **options)[0]
    p = log_p.double().exp()
    size = log_p.shape[-1]
    expected = {(a, b): len(texts) * float(p[0, a] * p[a, b]) for a in range(size) for b in range(size)}
    return p_value(Counter(texts), expected)


def breaks_the_law(*given, **options):
    """A quarter of the sessions shows it: all of them show it more clearly."""
    return law_p_value(*given, sessions=SESSIONS // 4, **options) < FALSE_ALARM


@pytest.mark.parametrize("num_drafted", [0, 2, *nightly([1, 3])])
@pytest.mark.parametrize("rule", list(Acceptance))
def test_the_joint_law_of_two_tokens_is_that_of_p(rule, num_drafted):
    assert law_p_value(rule, P, Q, num_drafted) > FALSE_ALARM


def test_there_are_sessions_enough_for_the_differences_that_are_stated():
    """In all 25 cells, none of which expects so few that it is merged with others."""
    p = P.double().exp()
    assert float((p[0][:, None] * p).min()) * SESSIONS > 5
    assert detectable_tv(SESSIONS, V * V, FALSE_ALARM) <= 0.03
    assert detectable_tv(10 * SESSIONS, V * V, FALSE_ALARM) <= 0.01


def test_a_law_at_the_least_difference_that_is_stated_is_seen():
    """That moves a little of every text to another one: 100 samples of it, all of which must fail."""
    generator = torch.Generator().manual_seed(5)
    p = torch.full((V * V,), 1 / V**2, dtype=torch.float64)
    tv = detectable_tv(SESSIONS, V * V, FALSE_ALARM)
    other = p + tv * 2 / V**2 * torch.tensor([1.0, -1.0] * (V * V // 2) + [0.0], dtype=torch.float64) * 25 / 24
    assert float((other - p).abs().sum() / 2) == pytest.approx(tv)
    seen = 0
    for _ in range(100):
        drawn = torch.multinomial(other, SESSIONS, replacement=True, generator=generator)
        counts = Counter(drawn.tolist())
        seen += p_value(counts, {v: SESSIONS * float(p[v]) for v in range(V * V)}) < FALSE_ALARM
    assert seen >= 90  # of 99 that are expected: fewer have a chance of 1e-7


@pytest.mark.nightly
@pytest.mark.parametrize("rule", list(Acceptance))
@pytest.mark.parametrize("log_q", [Q, OPPOSITE], ids=["other", "opposite"])
def test_the_joint_law_to_a_hundredth(rule, log_q):
    assert law_p_value(rule, P, log_q, 2, parts=10) > FALSE_ALARM


@pytest.mark.parametrize("rule", list(Acceptance))
def test_the_joint_law_with_the_opposite_draft(rule):
    assert law_p_value(rule, P, OPPOSITE, 1) > FALSE_ALARM


def test_the_joint_law_with_saguaro():
    assert law_p_value(REJECTION, P, Q, 1, saguaro=0.25) > FALSE_ALARM


@pytest.fixture
def alone(monkeypatch):
    """The general path is out of reach."""
    assert native.usable(torch.zeros(1, 1), torch.float32), "its library does not compile"
    monkeypatch.setattr(verification, "process", None)


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("log_q", "num_drafted", "saguaro"), [(Q, 2, 0.25), *nightly([(Q, 1, 1.0), (OPPOSITE, 1, 1.0)])]
)
def test_the_joint_law_of_what_one_pass_decides(alone, log_q, num_drafted, saguaro):
    assert law_p_value(REJECTION, P, log_q, num_drafted, saguaro=saguaro, at_once=True) > FALSE_ALARM


@pytest.mark.compiler
def test_mutant_one_pass_with_a_q_that_the_token_was_not_drawn_from(alone, monkeypatch):
    original = native.verify

    def other_q(*args, qs, **options):
        turned = [(ids, b"".join(probs[i : i + 8] for i in range(len(probs) - 8, -8, -8))) for ids, probs in qs]
        return original(*args, qs=turned, **options)

    monkeypatch.setattr(native, "verify", other_q)
    assert breaks_the_law(REJECTION, P, Q, 1, at_once=True)


@pytest.mark.compiler
def test_mutant_one_pass_that_draws_from_p_where_a_token_was_rejected(alone, monkeypatch):
    original = native.verify

    def from_p(*args, starts, qs, **options):
        accepted, _, rejected, _ = original(*args, starts=starts, qs=qs, **options)
        cut = {start + n for start, n, was in zip(starts, accepted, rejected, strict=False) if was}
        left = [(b"", b"") if row in cut else q for row, q in enumerate(qs)]
        return original(*args, starts=starts, qs=left, **options)

    monkeypatch.setattr(native, "verify", from_p)
    assert breaks_the_law(REJECTION, P, Q, 1, at_once=True)


def test_the_law_of_a_large_vocabulary_in_its_sparse_and_dense_form():
    n, size = 40_000, 1000
    for spread in (1.0, 12.0):
        log_p = (torch.randn(size, generator=torch.Generator().manual_seed(4)) * spread).log_softmax(-1)
        positions = torch.arange(n) + 2**32 - n // 2
        counts = Counter()
        for part in positions.split(5000):
            drawn = gumbel_argmax(log_p.expand(len(part), -1), torch.full_like(part, -5), part, Stream.COUPLED)
            counts.update(drawn.tolist())
        assert p_value(counts, {v: n * float(log_p[v].double().exp()) for v in range(size)}) > FALSE_ALARM


def test_the_law_given_acceptance_is_the_derived_one():
    """Given that the first token was accepted, its law is min(p, q) / sum min(p, q), not p."""
    texts, verdicts = simulate(REJECTION, P, Q, 1, num_tokens=1, first_seed=10**6)
    accepted = Counter(text[0] for text, verdict in zip(texts, verdicts, strict=True) if verdict.num_accepted)
    overlap = torch.minimum(P[0].double().exp(), Q[0].double().exp())
    total = accepted.total()
    assert p_value(accepted, {v: total * float(overlap[v] / overlap.sum()) for v in range(V)}) > FALSE_ALARM


def binomial_p_value(rule, log_p, log_q, expected, **options):
    _, verdicts = simulate(rule, log_p, log_q, 1, num_tokens=1, **options)
    return stats.binomtest(sum(verdict.num_accepted for verdict in verdicts), len(verdicts), expected).pvalue


def test_rejection_accepts_as_often_as_p_and_q_overlap():
    expected = float(torch.minimum(P[0].double().exp(), Q[0].double().exp()).sum())
    assert binomial_p_value(REJECTION, P, Q, expected) > FALSE_ALARM


def test_coupling_accepts_as_often_as_derived():
    """P(same argmax) = sum_v 1 / sum_w max(p_w / p_v, q_w / q_v), from the race of exponentials."""
    p, q = P[0].double().exp(), Q[0].double().exp()
    expected = float((1 / torch.maximum(p / p[:, None], q / q[:, None]).sum(-1)).sum())
    assert binomial_p_value(COUPLED, P, Q, expected) > FALSE_ALARM
    # It is at least (1 - tv) / (1 + tv) (Daliri, Musco, Suresh 2408.07978).
    tv = float((p - q).abs().sum() / 2)
    assert expected >= (1 - tv) / (1 + tv)


@pytest.mark.parametrize("rule", list(Acceptance))
def test_a_draft_equal_to_the_target_is_always_accepted(rule):
    _, verdicts = simulate(rule, P, P, 3, num_tokens=1, sessions=3000)
    assert all(verdict.num_accepted == 3 for verdict in verdicts)


# Mutants: dependence and wrong keys must be visible to the checks above.


def test_mutant_one_uniform_for_proposal_and_acceptance(monkeypatch):
    """The draft draws by inverting its distribution at the very uniform that the target compares with p/q."""
    original = verification.uniform

    def inverse(log_q, seeds, positions, nonces, saguaro):
        u = original(seeds, positions, Stream.ACCEPT)
        tokens = (log_q.double().exp().cumsum(-1) < u[:, None]).sum(-1).clamp(max=V - 1).tolist()
        return tokens, [SparseDistribution.of(tuple(range(V)), tuple(row)) for row in log_q.double().exp().tolist()]

    assert breaks_the_law(REJECTION, P, Q, 1, draft=inverse)
    # With a uniform of its own the same draft is lawful.
    monkeypatch.setattr(verification, "uniform", lambda seeds, positions, stream: original(seeds, positions, stream, 7))
    assert law_p_value(REJECTION, P, Q, 1, draft=inverse) > FALSE_ALARM


@pytest.fixture
def blind(monkeypatch):
    """Noise of recovered and bonus tokens that knows nothing of the text before them."""
    monkeypatch.setattr(sys.modules[__name__], "text_key", lambda text: 0)


def test_mutant_one_noise_for_proposal_and_recovery(blind):
    def shared(log_q, seeds, positions, nonces, saguaro):
        tokens = gumbel_argmax(log_q, seeds, positions, Stream.RECOVER).tolist()
        return tokens, [SparseDistribution.of(tuple(range(V)), tuple(row)) for row in log_q.double().exp().tolist()]

    assert breaks_the_law(REJECTION, P, OPPOSITE, 1, draft=shared)


def guessed(log_q, seeds, positions, texts):
    """The token that a draft guesses the target to draw after each text."""
    keys = torch.tensor([text_key(text) for text in texts])
    return gumbel_argmax(log_q, seeds, positions, Stream.RECOVER, keys).tolist()


@pytest.mark.parametrize("num_drafted", [2, *nightly([1, 3])])
def test_proposals_may_depend_on_what_was_guessed_after_other_texts(num_drafted):
    """A draft prepares what follows its guesses, so whether a token is proposed in time depends on the noise of the
    target's draws after other texts: one of the same length here, and the one before."""

    def elsewhere(log_q, seeds, positions, texts):
        of_other = guessed(log_q, seeds, positions, [(*text[:-1], text[-1] + V) for text in texts])
        of_shorter = guessed(log_q, seeds, positions - 1, [text[:-1] for text in texts])
        return [i for i, both in enumerate(zip(of_other, of_shorter, strict=True)) if 2 in both]

    assert law_p_value(REJECTION, P, Q, num_drafted, leaves_out=elsewhere) > FALSE_ALARM


def test_mutant_a_proposal_that_depends_on_the_guess_after_its_own_text():
    def own(log_q, seeds, positions, texts):
        return [i for i, guess in enumerate(guessed(log_q, seeds, positions, texts)) if guess == 2]

    assert breaks_the_law(REJECTION, P, Q, 1, leaves_out=own)


def test_mutant_recovery_by_noise_that_knows_no_text(blind):
    """Then a guess after another text of the same length is one after this text."""

    def elsewhere(log_q, seeds, positions, texts):
        return [i for i, guess in enumerate(guessed(log_q, seeds, positions, [()] * len(texts))) if guess == 2]

    assert law_p_value(REJECTION, P, Q, 1, leaves_out=elsewhere) < FALSE_ALARM


def test_a_draft_equal_to_the_target_foresees_what_is_recovered():
    """After a proposal that is accepted whole, the bonus token is always the draft's first guess."""
    texts, verdicts = simulate(REJECTION, P, P, 2, num_tokens=3, sessions=3000)
    seeds = torch.arange(3000) * 0x9E3779B97F4A7C15 % 2**62
    before = [(0, *text[:2]) for text in texts]
    found = guessed(P[[text[-1] for text in before]], seeds, torch.full((3000,), 3), before)
    assert all(verdict.num_accepted == 2 for verdict in verdicts)
    assert found == [verdict.token_ids[-1] for verdict in verdicts]


def test_mutant_coupled_noise_under_the_rejection_rule(monkeypatch):
    """Acceptance decided by the noise that chose the token."""

    def shared(log_q, seeds, positions, nonces, saguaro):
        tokens = gumbel_argmax(log_q, seeds, positions, Stream.COUPLED)
        chosen.append(gumbel_at(seeds, positions, Stream.COUPLED, tokens[:, None]).squeeze(-1))
        return tokens.tolist(), [
            SparseDistribution.of(tuple(range(V)), tuple(row)) for row in log_q.double().exp().tolist()
        ]

    def uniforms(seeds, positions, stream):
        u = torch.zeros(len(seeds), dtype=torch.float64)
        u[::2] = (-(-chosen[-1].double()).exp()).exp()
        return u

    chosen = []
    monkeypatch.setattr(verification, "uniform", uniforms)
    assert breaks_the_law(REJECTION, P, Q, 1, draft=shared)


@pytest.mark.parametrize("rule", list(Acceptance))
def test_mutant_noise_reset_every_round(rule, blind):
    """Positions counted from the start of the round: the second round repeats the first one's noise."""
    assert breaks_the_law(rule, P, Q, 0, reset=True)


def test_any_draft_gives_the_same_texts_under_the_coupled_rule():
    right, _ = simulate(COUPLED, P, Q, 2, sessions=2000)
    wrong, _ = simulate(COUPLED, P, OPPOSITE, 3, sessions=2000)
    assert right == wrong == simulate(COUPLED, P, Q, 0, sessions=2000)[0]


def test_mutant_less_or_equal(monkeypatch):
    """Uniforms of few bits hit 0 often; ``<=`` then accepts what p forbids, ``<`` never does."""
    original = verification.uniform
    monkeypatch.setattr(verification, "uniform", lambda *key: (original(*key) * 16).floor() / 16)
    forbids = P.clone()
    forbids[:, 3] = -math.inf
    forbids = forbids.log_softmax(-1)
    texts, _ = simulate(REJECTION, forbids, OPPOSITE, 1, sessions=3000)
    assert all(3 not in text for text in texts)
    monkeypatch.setattr(KeyedChoices, "accept", lambda self, row, probability: self._uniforms[row] <= probability)
    texts, _ = simulate(REJECTION, forbids, OPPOSITE, 1, sessions=3000)
    assert any(3 in text for text in texts)


def test_noise_of_neighbouring_keys_is_independent():
    """Correlation of Gumbel values that differ in one part of the key; 6 sigma is exceeded once in 5e8."""
    n = 40_000
    seeds, positions = torch.arange(n), torch.arange(n) % 100
    base = gumbel(seeds, positions, Stream.COUPLED, 4)
    others = {
        "position": gumbel(seeds, positions + 1, Stream.COUPLED, 4),
        "seed": gumbel(seeds + 1, positions, Stream.COUPLED, 4),
        "stream": gumbel(seeds, positions, Stream.DRAFT, 4),
        "token": base.roll(1, -1),
    }
    for name, other in others.items():
        correlation = float(torch.corrcoef(torch.stack((base.flatten(), other.flatten())))[0, 1])
        assert abs(correlation) < 6 / math.sqrt(4 * n), name
