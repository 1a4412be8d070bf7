"""Proposals from a session's own text: what they are, and what they are thought to be worth."""

import pytest
from tests.target.simulation import Simulation, gpu_cost

from paceline.core.tree import Proposal
from paceline.target.lookup import LONGEST, SHORTEST, Lookup, new_shares
from paceline.target.session import TargetSession


def lookup(tokens: list[int], share: int = 95) -> Lookup:
    """Of an engine whose texts were right in so many percent of the cases."""
    known = new_shares()
    for each in known:
        each.add(share, 100, 100)
    return Lookup(tokens, known)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], ()),
        ([1, 2], ()),
        ([1, 2, 3, 4], ()),
        ([1, 2, 3, 4, 5, 1, 2], (3, 4, 5, 1)),
        ([1, 2, 3, 1, 2, 4, 1, 2], (4, 1, 2, 4)),
        ([7, 7, 7], (7, 7, 7, 7)),
        ([1, 2, 3, 1, 2], (3, 1, 2, 3)),
    ],
)
def test_what_followed_the_last_pair_comes_again(tokens: list[int], expected: tuple[int, ...]) -> None:
    """The last time it occurred; beyond the end of the text it goes on with what it has predicted."""
    proposal = lookup(tokens).proposal(4)
    assert proposal.token_ids == expected
    assert proposal.node_ids == ()
    assert len(proposal.probs) == len(proposal.qs) == len(expected)


def test_a_proposal_is_as_long_as_it_may_be() -> None:
    """None at a length of 0; and not beyond where it is next to certain to be wrong."""
    found = lookup([1, 2, 3, 1, 2])
    assert [len(found.proposal(k)) for k in (-1, 0, 1, 7, 3)] == [0, 0, 1, 7, 3]
    assert [len(lookup([1, 2, 3, 1, 2], share).proposal(7)) for share in (50, 25, 0)] == [5, 2, 0]


def test_probabilities_are_learned_from_what_was_not_proposed() -> None:
    """By the length of the match: the pair 1, 2 is always followed by something new, longer matches are right."""
    known = new_shares()
    tokens: list[int] = []
    found = Lookup(tokens, known)

    def append(*token_ids: int) -> None:
        for token_id in token_ids:
            tokens.append(token_id)
            found.proposal(1)

    for i in range(200):
        append(1, 2, 1000 + i)
    assert known[0].value(0.2) < 0.1
    for _ in range(40):
        append(10, 11, 12, 13, 14, 15)
    assert known[0].value(0.2) < 0.1
    assert known[LONGEST - SHORTEST].value(0.2) > 0.9
    assert found.proposal(2).probs[0] > 0.9


def test_a_text_that_was_not_looked_at_for_long_is_followed_when_it_is() -> None:
    """The prediction of before is scored up to the first token that it did not have, and the end has a new match."""
    known = new_shares()
    tokens = [1, 2, 3, 4, 5, 6, 1, 2]
    found = Lookup(tokens, known)
    assert found.proposal(2).token_ids == (3, 4)
    tokens += [3, 4, 9, 9, 5, 6]
    assert found.proposal(2).token_ids == (1, 2)
    assert [share.whole for share in known[:3]] == pytest.approx([1, 1, 1])
    assert [share.part for share in known[:3]] == pytest.approx([1, 1, 0])


def test_all_of_a_long_prompt_is_indexed_a_part_at_a_time() -> None:
    """Until then there is no proposal."""
    tokens = [*range(9000)]
    found = lookup(tokens)
    lengths = []
    for token_id in range(3):
        tokens.append(token_id)
        lengths.append(len(found.proposal(3)))
    assert lengths == [0, 0, 3]
    assert found.proposal(3).token_ids == (3, 4, 5)


def test_the_match_is_at_most_so_long() -> None:
    """Longer ones count as the longest."""
    text = list(range(50)) * 2
    found = lookup(text)
    assert found.proposal(8).token_ids == tuple(range(8))
    assert len(set(found.proposal(8).probs)) == 1


# -- throughput, on a virtual time line -----------------------------------------------------------------------------


@pytest.mark.parametrize("draft", [{"acceptance": 0.0}, {"draft_step_s": 5.0}])
def test_a_text_that_repeats_is_fast_with_a_draft_that_is_not(draft: dict[str, float]) -> None:
    """More than twice plain decoding with a draft that is useless or dead."""
    load = lambda now: 1  # noqa: E731
    adaptive = Simulation(load=load, period=24, **draft).run(8.0)
    plain = Simulation(k=0, load=load, period=24).run(8.0)
    assert adaptive.tokens_per_s(2.0, 8.0) > 2.0 * plain.tokens_per_s(2.0, 8.0)
    stats = adaptive.target.stats
    assert stats.lookup_rounds > 50
    assert stats.lookup_rows_used > 0.8 * stats.lookup_rows


@pytest.mark.parametrize(("first", "period"), [("drafted", 100), ("looked_up", None)])
def test_the_proposal_that_is_expected_to_bring_more_is_verified(first, period, monkeypatch) -> None:
    """The draft is right with probability 0.7: of a text that repeats lookups bring more, of another one the draft.

    Both mutants always take one of them first."""
    options = {"cost": gpu_cost, "trees": True, "branch_s": 2e-4, "calibrate": True, "period": period}
    chosen = Simulation(**options).run(6.0).target.stats.tokens_emitted
    proposal = TargetSession.proposal

    def mutant(session: TargetSession, limit: int) -> Proposal:
        found = getattr(session, first)(limit)
        return found if found.token_ids else proposal(session, limit)

    monkeypatch.setattr(TargetSession, "proposal", mutant)
    assert chosen > 1.04 * Simulation(**options).run(6.0).target.stats.tokens_emitted


@pytest.mark.parametrize(("cost", "looked"), [(lambda n: 0.001 * max(4, n), False), (lambda n: 0.016 + 1e-5 * n, True)])
def test_nothing_is_looked_up_where_no_token_could_pay(cost, looked: bool, monkeypatch) -> None:
    """Steps of sixteen sessions that take 1 ms per token, and such as wait 16 ms for the weights."""
    asked: list[float] = []
    proposal = Lookup.proposal
    simulation = Simulation(
        load=lambda now: 16,
        cost=cost,
        acceptance=0.0,
        period=24,
        calibrate=True,
    )

    def noted(found: Lookup, num_tokens: int):
        asked.append(simulation.now)
        return proposal(found, num_tokens)

    monkeypatch.setattr(Lookup, "proposal", noted)
    simulation.run(4.0)
    late = [at for at in asked if at > 2.0]
    assert bool(late) is looked
    assert (simulation.target.stats.lookup_rows > 100) is looked


@pytest.mark.parametrize(
    ("num_sessions", "period", "head", "least", "most"),
    [
        (4, 0, None, 0.9, 1.0),
        (16, 0, None, 0.3, 0.7),
        (16, 0, (0.0, 0.004), 0.3, 0.7),
        (64, 0, None, 0.1, 0.45),
        (64, 24, None, 0.9, 1.0),
    ],
)
def test_lookups_of_many_sessions_in_vain_are_asked_in_few_steps(
    num_sessions: int, period: int, head: tuple[float, float] | None, least: float, most: float, monkeypatch
) -> None:
    """The share of the steps that look for continuations, where drafts never come, of texts that repeat or do not, and
    where a head is there but paused."""
    simulation = Simulation(
        load=lambda now: num_sessions,
        cost=lambda n: 0.016 + 1e-5 * n,
        draft_step_s=50.0,
        max_tokens=4000,
        period=period,
        head=head,
        calibrate=True,
    )
    asked: set[float] = set()
    proposal = Lookup.proposal

    def noted(found: Lookup, num_tokens: int):
        asked.add(simulation.target.stats.steps)
        return proposal(found, num_tokens)

    monkeypatch.setattr(Lookup, "proposal", noted)
    simulation.run(2.0)
    before = simulation.target.stats.steps
    simulation.run(5.0)
    late = [step for step in asked if step >= before]
    assert least < len(late) / (simulation.target.stats.steps - before) <= most


@pytest.mark.slow
def test_a_text_that_does_not_repeat_is_proposed_next_to_nothing() -> None:
    """Nor is any of it where the draft has something, nor with a fixed K."""
    adaptive = Simulation(acceptance=0.8).run(5.0)
    stats = adaptive.target.stats
    assert stats.lookup_rows_used < 0.05 * stats.tokens_emitted
    fixed = Simulation(k=4, acceptance=0.0, period=24).run(5.0)
    assert fixed.target.stats.lookup_rounds == 0
