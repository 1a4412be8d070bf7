"""The rejection rule's law by exact enumeration: every choice of draft and target, with its probability.

No sampling noise. The production functions decide; only their random choices are replaced. ``law_error`` and
``session_error`` are the checks, and each mutant below must make them fail.
"""

import itertools
import math
from collections import defaultdict
from fractions import Fraction

import pytest
import torch

from paceline.core import verification
from paceline.core.processors import Row, SamplerState
from paceline.core.sampling import ProcessedRows, process
from paceline.core.tree import Proposal
from paceline.core.verification import draft_distributions, verify
from paceline.messages import SparseDistribution
from paceline.types import Acceptance, SamplingParams

REJECTION = Acceptance.REJECTION
FLOAT64 = 1e-12
FLOAT32 = 2e-6  # where the processors, which end in float32, are part of what is checked


class Path:
    """One sequence of choices: follows a prefix, then takes first branches and notes the others."""

    def __init__(self, prefix):
        self.prefix, self.taken, self.weight, self.untaken = prefix, [], 1.0, []

    def choose(self, probs):
        depth = len(self.taken)
        if depth < len(self.prefix):
            index = self.prefix[depth]
        else:
            index, *others = [i for i, prob in enumerate(probs) if prob > 0]
            self.untaken += [(*self.taken, i) for i in others]
        self.taken.append(index)
        self.weight *= probs[index]
        return index


def enumerate_choices(program):
    """The law of ``program(choose)`` as {result: probability}; ``choose(probs)`` returns an index."""
    law, todo = defaultdict(float), [()]
    while todo:
        path = Path(todo.pop())
        result = program(path.choose)
        law[result] += path.weight
        todo += path.untaken
    return law


class Enumerated:
    """Choices that branch."""

    def __init__(self, choose):
        self.choose = choose

    def accept(self, row, probability):
        return self.choose([probability, 1 - probability]) == 0

    def draw(self, rows, weights):
        return [self.choose((each / each.sum()).tolist()) for each in weights]


def random_model(vocab_size, seed, zeros=0.0):
    """Context -> logits, float64."""

    def logits(context):
        generator = torch.Generator().manual_seed(hash((seed, *context)) % 2**31)
        values = torch.randn(vocab_size, generator=generator, dtype=torch.float64) * 1.5
        values[1:][torch.rand(vocab_size - 1, generator=generator) < zeros] = -math.inf
        return values

    return logits


def plain_law(log_p, num_tokens, vocab_size):
    law = {}
    for text in itertools.product(range(vocab_size), repeat=num_tokens):
        law[text] = math.exp(sum(float(log_p(text[:i])[v]) for i, v in enumerate(text)))
    return law


def distance(law, expected):
    assert abs(sum(law.values()) - 1) < 1e-5
    return max(abs(law.get(text, 0.0) - expected.get(text, 0.0)) for text in {*law, *expected})


def honest_draft(choose, log_q, saguaro, num_predicted):
    """Draws a token from the production draft distribution and reports it."""
    order = log_q.argsort(descending=True)
    probs = draft_distributions(log_q[order][None], [saguaro], [num_predicted])[0]
    support = probs > 0
    q = SparseDistribution.of(tuple(order[support].tolist()), tuple(probs[support].tolist()))
    return q.token_ids[choose(q.probs)], q


def law_error(
    vocab_size,
    num_drafted,
    *,
    seed=0,
    zeros=0.0,
    saguaro=1.0,
    draft=honest_draft,
    draft_model=None,
    top_m=None,
):
    """Greatest difference between the joint law of one round, continued plainly, and p's, over all texts."""
    p_model, q_model = (
        random_model(vocab_size, seed, zeros),
        draft_model or random_model(vocab_size, seed + 1, zeros),
    )

    def log_p(context):
        return p_model(context).log_softmax(-1)

    def round_(choose):
        drafted, qs = (), ()
        for _ in range(num_drafted):
            logits = q_model(drafted)
            if top_m:
                logits[logits < logits.topk(top_m).values[-1]] = -math.inf
            token, q = draft(choose, logits.log_softmax(-1), saguaro, 2)
            drafted, qs = (*drafted, token), (*qs, q)
        n = num_drafted + 1
        rows = torch.stack([log_p(drafted[:j]) for j in range(n)])
        processed = ProcessedRows(torch.zeros(n).bool(), torch.zeros(n).long(), torch.arange(n), 0, scores=rows)
        return verify(processed, [Proposal(drafted, qs)], [REJECTION], Enumerated(choose))[0].token_ids

    expected = plain_law(log_p, num_drafted + 1, vocab_size)
    law = defaultdict(float)
    for emitted, weight in enumerate_choices(round_).items():
        for rest in itertools.product(range(vocab_size), repeat=num_drafted + 1 - len(emitted)):
            text = (*emitted, *rest)
            tail = sum(float(log_p(text[:i])[text[i]]) for i in range(len(emitted), len(text)))
            law[text] += weight * math.exp(tail)
    return distance(law, expected)


@pytest.mark.parametrize(("vocab_size", "num_drafted"), [(3, 0), (3, 1), (3, 2), (3, 3), (4, 2), (5, 1), (5, 2)])
def test_the_joint_law_of_a_round_is_that_of_p(vocab_size, num_drafted):
    assert law_error(vocab_size, num_drafted) < FLOAT64


@pytest.mark.parametrize("seed", range(4))
def test_supports_that_differ_either_way(seed):
    assert law_error(4, 2, seed=10 * seed, zeros=0.5) < FLOAT64


def test_truncated_q():
    assert law_error(5, 2, top_m=2) < FLOAT64
    assert law_error(5, 2, top_m=1) < FLOAT64


@pytest.mark.parametrize("saguaro", [0.9, 0.25, 1e-3])
def test_saguaro_rescaled_q(saguaro):
    assert law_error(4, 2, saguaro=saguaro) < FLOAT64


@pytest.mark.parametrize("sign", [1, -1])
def test_drafts_equal_to_the_target_and_to_its_opposite(sign):
    model = random_model(4, 0)
    assert law_error(4, 2, draft_model=lambda context: sign * model(context)) < FLOAT64


def test_an_untrusted_q_keeps_the_law():
    """The draft's record of q is damaged half of the time, independently of the token."""

    def damaged(choose, log_q, saguaro, num_predicted):
        token, q = honest_draft(choose, log_q, saguaro, num_predicted)
        if choose([0.5, 0.5]):
            q = SparseDistribution.of(q.token_ids, tuple(2 * prob for prob in q.probs))
        return token, q

    assert law_error(3, 2, draft=damaged) < FLOAT64


def test_the_theorem_in_rationals():
    """The two lines of the theorem, without rounding."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        p, q = (
            [Fraction(int(n), int(counts.sum())) for n in counts]
            for counts in torch.randint(0, 9, (2, 5), generator=generator) + torch.tensor([1, 0, 0, 0, 0])
        )
        accepted = [q[v] * verification.acceptance_probability(p[v], q[v]) if q[v] else Fraction(0) for v in range(5)]
        # Fractions with min(1.0, .) mix exactly only through Fraction(1.0).
        accepted = [Fraction(value) for value in accepted]
        left = [max(p[v] - q[v], Fraction(0)) for v in range(5)]
        total = sum(left) or Fraction(1)
        for v in range(5):
            exact = min(p[v], q[v]) + (1 - sum(map(min, p, q))) * left[v] / total
            assert exact == p[v]
            assert abs(accepted[v] - min(p[v], q[v])) < Fraction(1, 10**15)


# Several rounds of sessions with processors.

PROCESSORS = {
    "temperature": SamplingParams(temperature=0.6),
    "top_k": SamplingParams(temperature=1.0, top_k=2),
    "top_p": SamplingParams(temperature=1.0, top_p=0.7),
    "min_p": SamplingParams(temperature=1.0, min_p=0.3),
    "allowed_token_ids": SamplingParams(temperature=1.0, allowed_token_ids=(2, 0)),
    "logit_bias": SamplingParams(temperature=1.0, logit_bias={0: 1.5, 2: -1.0}),
    "bad_words": SamplingParams(temperature=1.0, bad_words=((1, 2), (0, 0, 1))),
    "min_tokens": SamplingParams(temperature=1.0, min_tokens=2),
    "repetition": SamplingParams(temperature=1.0, repetition_penalty=1.8),
    "presence_frequency": SamplingParams(temperature=0.8, presence_penalty=0.9, frequency_penalty=0.6),
    "all": SamplingParams(
        temperature=0.8,
        top_p=0.95,
        min_p=0.02,
        presence_penalty=0.5,
        repetition_penalty=1.3,
        bad_words=((1, 2),),
    ),
}


def session_error(params, *, frozen=False, greedy_misses=False, report_temperature=True):
    """The same over whole rounds: processors, adaptive lengths, hits, misses and one-hot proposals."""
    vocab_size, num_tokens, prompt = 3, 3, (0,)
    p_model, q_model = random_model(vocab_size, 5), random_model(vocab_size, 6)

    def new_state(output=()):
        return SamplerState(params, 1, prompt, output, eos_token_ids=(2,), vocab_size=vocab_size)

    def log_p(output):
        return process(p_model((*prompt, *output))[None], [Row(new_state(output))]).log_probs[0].double()

    def program(choose):
        state, output, k = new_state(), (), 2
        while len(output) < num_tokens:
            drafted, qs = (), ()
            if len(output) < 2:  # the last position is not worth a branch
                kind = choose([0.5, 0.25, 0.25])  # a hit; a miss; a miss with a proposal by an n-gram drafter
                for _ in range((k, 0, 1)[kind]):
                    q = (q_model((*prompt, *output, *drafted)) / (params.temperature)).softmax(-1)
                    if kind == 2:
                        token, reported = len(output) % 3, SparseDistribution.of((len(output) % 3,), (1.0,))
                    else:
                        token = choose(q.tolist())
                        if not report_temperature:
                            q = q_model((*prompt, *output, *drafted)).softmax(-1)
                        reported = SparseDistribution.of(tuple(range(vocab_size)), tuple(q.tolist()))
                    drafted, qs = (*drafted, token), (*qs, reported)
            rows = [Row(state, () if frozen else drafted[:j]) for j in range(len(drafted) + 1)]
            logits = torch.stack([p_model((*prompt, *output, *drafted[:j])) for j in range(len(rows))])
            processed = process(logits, rows)
            if greedy_misses and not drafted:
                emitted = (int(processed.log_probs[0].argmax()),)
            else:
                emitted = verify(processed, [Proposal(drafted, qs)], [REJECTION], Enumerated(choose))[0].token_ids
            state.append(emitted)
            output = (*output, *emitted)
            k = 1 if len(emitted) == 1 else 2  # adaptive: looks at outcomes only
        return output[:num_tokens]

    return distance(enumerate_choices(program), plain_law(log_p, num_tokens, vocab_size))


@pytest.mark.parametrize("name", PROCESSORS)
def test_the_law_over_several_rounds_with_every_processor(name):
    assert session_error(PROCESSORS[name]) < FLOAT32


# Mutants: what goes wrong in practice must be visible to the checks above.

VISIBLE = 1e-3


def test_mutant_residual_from_p(monkeypatch):
    monkeypatch.setattr(verification, "residual", lambda p, q: p)
    assert law_error(3, 1) > VISIBLE


def test_mutant_bonus_from_q(monkeypatch):
    original = verification.subtract_

    def bonus_from_q(weights, rejected):
        original(weights, rejected)
        for i, q in enumerate(rejected):
            if q is None:
                weights[i] = torch.tensor([0.2, 0.2, 0.6], dtype=weights.dtype)

    monkeypatch.setattr(verification, "subtract_", bonus_from_q)
    assert law_error(3, 1) > VISIBLE


def test_mutant_acceptance_without_ratio(monkeypatch):
    monkeypatch.setattr(verification, "acceptance_probability", lambda p, q: min(1.0, p))
    assert law_error(3, 1) > VISIBLE


def test_mutant_q_before_the_temperature():
    assert session_error(PROCESSORS["temperature"], report_temperature=False) > VISIBLE


def test_mutant_saguaro_without_rescaled_q():
    def unscaled(choose, log_q, saguaro, num_predicted):
        token, _ = honest_draft(choose, log_q, saguaro, num_predicted)
        return token, SparseDistribution.of(tuple(range(len(log_q))), tuple(log_q.exp().tolist()))

    assert law_error(3, 2, saguaro=0.25) < FLOAT64
    assert law_error(3, 2, saguaro=0.25, draft=unscaled) > VISIBLE


def test_mutant_choice_among_sampled_siblings():
    """A tree of sampled siblings, of which the likeliest is offered."""

    def certain(choose, log_q, saguaro, num_predicted):
        token, _ = honest_draft(choose, log_q, saguaro, num_predicted)
        return token, SparseDistribution.of((token,), (1.0,))

    # A single sampled token reported as certain wastes acceptance, but is lawful: given the token, it is ...
    assert law_error(3, 1, draft=certain) < FLOAT64

    def best_of_two(choose, log_q, saguaro, num_predicted):
        tokens = [honest_draft(choose, log_q, saguaro, num_predicted)[0] for _ in range(2)]
        return max(tokens, key=lambda v: float(log_q[v])), honest_draft(lambda _: 0, log_q, 1.0, 0)[1]

    # ... while a choice among siblings, reported with the q of one draw, is not.
    assert law_error(3, 1, draft=best_of_two) > VISIBLE


def test_mutant_penalties_frozen_at_the_start_of_the_round():
    assert session_error(PROCESSORS["presence_frequency"], frozen=True) > VISIBLE


def test_mutant_greedy_misses():
    assert session_error(PROCESSORS["temperature"], greedy_misses=True) > VISIBLE
