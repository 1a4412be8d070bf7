"""The simulation with whole trees: against the engines' constants, exact cases, and what must hold of any of them."""

import math
from dataclasses import replace
from typing import Any

import pytest

from paceline.plan.closed_form import Load, Requests, System, plain
from paceline.plan.outcomes import Outcomes, expected_tokens
from paceline.plan.results import Result
from paceline.plan.times import StepTable
from paceline.plan.trees import Tree, TreeSimulation, simulate
from paceline.types import Cause, Mode

ONE, EIGHT = Load(1, 1, 1), Load(8, 1, 1)


def system(*, coupled: bool = True, acceptance: float = 0.8, draft_ms: float = 1.0, **options: Any) -> System:
    outcomes = Outcomes.derived(acceptance, coupled=coupled)
    draft = StepTable.affine(draft_ms / 1e3, draft_ms / 1e6)
    return System(
        StepTable.affine(0.02, 0.02 / 295),
        draft,
        outcomes,
        **({"trees": True, "fan_out": 3, "tree_budget": 1024} | options),
    )


def run(some: System, load: Load = ONE, k: int = 4, seconds: float = 20.0, **options: Any) -> Result:
    return simulate(some, load, Mode.OVERLAPPED, k, seconds=seconds, **options)


@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize("k", [1, 4, 8])
def test_free_drafts_that_are_always_right_give_k_and_one_tokens_a_step(k: int, coupled: bool) -> None:
    outcomes = Outcomes(1.0, 1.0, None if coupled else 12.0)
    some = replace(system(draft_ms=1e-3), outcomes=outcomes, target=StepTable.affine(0.02, 0.0))
    result = run(some, k=k, seconds=4.0)
    assert result.tokens_per_round == pytest.approx(k + 1, rel=0.02)
    assert result.tokens_per_s == pytest.approx((k + 1) / 0.02, rel=0.02)


def test_drafts_that_are_never_right_cost_nothing() -> None:
    some = replace(system(), outcomes=Outcomes(0.0, 0.05))
    assert run(replace(some, fan_out=1)).tokens_per_s == pytest.approx(plain(some, ONE).tokens_per_s, rel=0.01)


def test_without_siblings_a_tree_is_a_chain() -> None:
    """Under the rejection rule, where no sibling is verified, with time for everything: as the chains' simulation, but
    for waits, which are decided message by message here."""
    for load in (ONE, EIGHT):
        some = system(coupled=False, draft_ms=0.4)
        chains, whole = (run(replace(some, trees=t), load).tokens_per_s for t in (False, True))
        assert whole == pytest.approx(chains, rel=0.06)


def test_siblings_are_verified_under_the_coupled_rule_alone() -> None:
    most = expected_tokens(0.8, 4)
    assert run(system(draft_ms=0.4)).tokens_per_round > 1.05 * most
    assert run(system(draft_ms=0.4, coupled=False)).tokens_per_round < 1.02 * most
    assert run(system(draft_ms=0.4, branch_s=1.0)).tokens_per_round < 1.02 * most
    sure = replace(system(draft_ms=0.2), outcomes=Outcomes(0.8, 0.0).with_siblings(1.0, 3))
    assert run(sure).tokens_per_round > 4.0


def test_a_branch_that_costs_too_much_for_many_sessions_is_verified_for_one() -> None:
    free, costly, dear = (system(draft_ms=0.4, branch_s=s) for s in (0.0, 0.0003, 1.0))
    assert run(costly).tokens_per_round > 1.05 * run(dear).tokens_per_round
    assert run(free, EIGHT).tokens_per_round > 1.02 * run(dear, EIGHT).tokens_per_round
    assert run(costly, EIGHT).tokens_per_round < 1.01 * run(dear, EIGHT).tokens_per_round


def test_lookups_are_verified_where_more_is_expected_of_them_than_of_the_draft() -> None:
    some = system()
    alone = run(some)
    assert run(replace(some, lookup_share=1.0, lookup_acceptance=1.0)).tokens_per_round == pytest.approx(5.0, abs=0.01)
    half = run(replace(some, lookup_share=0.5, lookup_acceptance=0.95))
    assert alone.tokens_per_round + 0.2 < half.tokens_per_round < 4.9
    assert half.causes[Cause.K.value] > 0.05 * sum(half.causes.values()) > alone.causes.get(Cause.K.value, 0)
    assert run(replace(some, lookup_share=1.0, lookup_acceptance=0.3)) == alone
    late = replace(system(draft_ms=60.0), lookup_share=0.5, lookup_acceptance=0.95)
    assert run(late).tokens_per_round > 2.5 * run(replace(late, lookup_share=0.0)).tokens_per_round
    chain = system(coupled=False)
    assert run(replace(chain, lookup_share=1.0, lookup_acceptance=1.0)) == run(chain), "no lookups under this rule"


@pytest.mark.parametrize(
    "worse", [{"draft_width": 4}, {"min_path_prob": 0.3}, {"tree_budget": 8}, {"link_s": 0.01}, {"fan_out": 1}]
)
def test_what_a_tree_lacks_costs_tokens(worse: dict[str, Any]) -> None:
    some = system(draft_ms=2.0)
    assert run(replace(some, **worse), EIGHT).tokens_per_s < 0.97 * run(some, EIGHT).tokens_per_s


def test_a_draft_that_is_late_is_waited_for_where_that_pays() -> None:
    """A step of 20 ms against an answer in 3 ms, and in 60 ms: then the target has no pause."""
    fast, slow = (run(system(draft_ms=ms, acceptance=0.9)) for ms in (2.0, 40.0))
    assert fast.target_use < 0.99
    assert slow.target_use > 0.999


def test_the_same_seed_gives_the_same_run() -> None:
    some = system(link_s=0.001)
    first, again, other = (run(some, EIGHT, seconds=1.0, seed=seed, link_spread=0.5) for seed in (3, 3, 4))
    assert first == again != other


def test_requests_take_their_trees_with_them() -> None:
    load = Load(8, 2, 1, Requests(64, 100, spread=0.5))
    simulation = TreeSimulation(system(), load, Mode.OVERLAPPED, 4, seconds=20.0)
    result = simulation.run()
    assert len(simulation._of) == 8
    assert result.tokens_per_s < run(system(), Load(8, 2, 1)).tokens_per_s


def test_a_draft_expands_the_likeliest_first_and_sends_several_steps_at_once() -> None:
    tree = Tree(system(), k=4)
    paths = []
    for _ in range(5):
        worth = tree.next_leaf()
        assert worth is not None
        paths.append(math.exp(-worth))
        tree.choose()
        tree.grow(0.0, 0.0)
    assert paths == pytest.approx([1.0, 0.8, 0.64, 0.512, 0.4096])
    assert (tree.chain(0.0), tree.chain(-1.0)) == (4, 0)
    tree.decided((0,), 0.02, 0.02)
    tree.follow(0.02)
    tree.decided((0,), 0.04, 0.04)
    tree.follow(0.04)
    sent = []
    for now in (0.041, 0.043, 0.0452):
        assert tree.next_leaf() is not None
        tree.choose()
        sent.append(tree.grow(now, now))
    assert sent == [True, False, True]  # a fifth of a round of 20 ms lies between two messages
    tree.decided((2, 0, 0, 0, 0, 7), 0.05, 0.05)
    tree.follow(0.05)
    assert tree.next_leaf() == 0.0  # nobody foresaw it
    assert tree.chain(0.05) == 0
    for now in (0.051, 0.052):
        tree.choose()
        assert tree.grow(now, now)  # the target may wait for each
        assert tree.next_leaf() is not None


def test_behind_a_proposal_under_the_rejection_rule_any_child_may_be_next() -> None:
    """A token that nothing was verified for is the drawn one as often as ``bonus_power`` says, not with a."""
    tree = Tree(replace(system(), outcomes=Outcomes(0.5, 1.0, 3.0)), k=2)
    for _ in range(2):
        assert tree.next_leaf() is not None
        tree.choose()
        tree.grow(0.0, 0.0)
    assert len(tree.offer(0.0).first(9)) == 2  # a sibling is a guess, which nothing verifies
    tree.verify(tree.offer(0.0).first(1))
    for path in (1.0 * 0.5 * (1 - 2**-3.0), 0.5 * 0.5):  # below the proposal's end; the first sibling beside it
        worth = tree.next_leaf()
        assert worth is not None
        assert math.exp(-worth) == pytest.approx(path)
        tree.choose()


@pytest.mark.parametrize(
    ("ranks", "cause"),
    [((0,), Cause.HIT), ((0, 2), Cause.LATE), ((0, 3), Cause.TOKEN), ((0, 1, 0), Cause.K)],
)
def test_why_a_round_has_no_tokens(ranks: tuple[int, ...], cause: Cause) -> None:
    tree = Tree(system(), k=4)
    for _ in range(2):
        assert tree.next_leaf() is not None
        tree.choose()
        tree.grow(0.0, 0.0)
    assert tree.decided(ranks, 0.0, 0.0) is cause
