"""Whether drafting ahead of outcomes pays, by the share of accepted tokens that is left then."""

import pytest

from paceline.draft.overlap import Overlap


def measured(
    ahead: float, after: float, depth_s: float, verify_s: float = 0.01, k: int = 5, rounds: int = 64
) -> Overlap:
    """Rounds of both kinds with so many accepted tokens of K, and these times."""
    overlap = Overlap()
    for _ in range(rounds):
        for is_ahead, accepted in ((True, ahead), (False, after)):
            overlap.observe(ahead=is_ahead, num_proposed=5, num_accepted=accepted, verify_s=0.01)
        overlap.depth_s.add(depth_s)
    return overlap


@pytest.mark.parametrize(
    ("ahead", "after", "depth_s", "needed", "pays"),
    [
        (2, 4, 0.001, 1 / 1.5, False),  # R = 0.5 < 0.67
        (3, 4, 0.001, 1 / 1.5, True),  # R = 0.75 > 0.67
        (3, 4, 0.0002, 1 / 1.1, False),  # a head so cheap must keep 91 %
        (2, 4, 0.003, 1 / 2.5, True),
    ],
)
def test_it_pays_where_more_is_kept_than_the_time_is_worth(ahead, after, depth_s, needed, pays) -> None:
    overlap = measured(ahead, after, depth_s)
    assert overlap.kept == pytest.approx(ahead / after)
    assert overlap.needed == pytest.approx(needed)
    assert overlap.pays is pays
    begun = [overlap.begin() for _ in range(16)]
    assert begun.count(pays) == 14, "one in eight measures the other kind"
    assert f"keep {ahead / after:.0%} of their accepted tokens, and more than {needed:.0%} pays" in str(overlap)
    assert str(overlap).startswith("drafting ahead of" if pays else "drafting after")


def test_before_enough_rounds_both_kinds_are_begun_in_turn() -> None:
    overlap = measured(3, 4, 0.001, rounds=63)
    assert [overlap.begin() for _ in range(4)] == [False, True, False, True]
    assert overlap.kept is None
    assert not overlap.pays
    assert "63 ahead, 63 after of 64 rounds each" in str(overlap)


@pytest.mark.parametrize("forced", [True, False])
def test_a_configured_choice_is_not_measured(forced: bool) -> None:
    overlap = Overlap(forced)
    assert [overlap.begin() for _ in range(3)] == [forced] * 3
    assert "as configured" in str(overlap)


def test_a_head_that_brings_nothing_is_not_drafted_with_ahead() -> None:
    assert not measured(0, 0, 0.001).pays
