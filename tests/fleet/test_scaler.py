"""A pool's size follows its load, and stays put: what is promised of it holds for whatever is measured."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.fleet.scaler import Demand, Pace, Scaler

PACE = Pace(
    least=1, most=8, up_delay_s=5, down_delay_s=20, zero_delay_s=20, hysteresis=0.2, max_step_up=2.0, max_step_down=0.5
)


def pace(**changes):
    return Pace(**{name: getattr(PACE, name) for name in Pace.__slots__} | changes)


def run(scaler, demands, actual=1):
    """One measurement a second; (second, change) of those that changed something."""
    changes = []
    for second, demand in enumerate(demands):
        change = scaler.see(Demand(demand, "") if isinstance(demand, int | float) else demand, actual, float(second))
        if change is not None:
            changes.append((second, change))
    return changes


def test_it_grows_when_load_lasts_and_not_before():
    changes = run(Scaler(PACE, wanted=1), [1.5] * 5)
    assert changes == []
    changes = run(Scaler(PACE, wanted=1), [1.5] * 7)
    assert [(second, c.before, c.after) for second, c in changes] == [(5, 1, 2)]
    assert run(Scaler(PACE, wanted=1), [1.5, 1.5, 1.5, 0.9, 1.5, 1.5, 1.5, 1.5]) == []


def test_it_shrinks_late_and_with_room_to_spare():
    changes = run(Scaler(PACE, wanted=3), [1.5] * 25)
    assert [(second, c.after) for second, c in changes] == [(20, 2)]
    assert run(Scaler(PACE, wanted=3), [1.7] * 60) == []  # 1.7 of 2 leaves less than a fifth
    assert run(Scaler(PACE, wanted=3), [1.5] * 15 + [2.9] + [1.5] * 19) == []


def test_steps_and_bounds_limit_a_change():
    changes = run(Scaler(PACE, wanted=1), [20.0] * 40)
    assert [c.after for _, c in changes] == [2, 4, 8]
    assert all(later - earlier >= 5 for (earlier, _), (later, _) in itertools.pairwise(changes))
    changes = run(Scaler(PACE, wanted=8), [0.0] * 100)
    assert [c.after for _, c in changes] == [4, 2, 1]


def test_a_pool_is_emptied_last_and_filled_at_once():
    scaler = Scaler(pace(least=0, zero_delay_s=40), wanted=2)
    changes = run(scaler, [0.0] * 70 + [0.3])
    assert [(second, c.before, c.after) for second, c in changes] == [(20, 2, 1), (61, 1, 0), (70, 0, 1)]
    assert run(Scaler(pace(least=0), wanted=1), [0.01] * 60) == []
    known = Demand(0.0, "does not pay", at_once=True)
    assert [(s, c.after, c.reason) for s, c in run(Scaler(pace(least=0), wanted=3), [known])] == [(0, 0, known.reason)]
    assert run(Scaler(pace(least=0), wanted=3), [Demand(0.0, "", complete=False, at_once=True)]) == []


def test_missing_signals_hold():
    assert run(Scaler(PACE, wanted=4), [None] * 100) == []
    assert run(Scaler(PACE, wanted=4), [0.5] * 15 + [None] + [0.5] * 19) == []
    stale = Demand(0.5, "", complete=False)
    assert run(Scaler(PACE, wanted=4), [stale] * 100) == []
    assert [c.after for _, c in run(Scaler(PACE, wanted=4), [Demand(5.0, "", complete=False)] * 10)] == [5]


def test_at_first_it_takes_what_is_there():
    scaler = Scaler(PACE)
    assert run(scaler, [2.5] * 20, actual=3) == []
    assert scaler.wanted is None  # nothing to be said yet: the pool keeps its size
    assert run(scaler, [2.5] * 30, actual=3) == []
    assert scaler.wanted == 3
    assert [(c.before, c.after) for _, c in run(Scaler(PACE), [4.5] * 7, actual=3)] == [(3, 5)]


def test_new_bounds_count_at_once():
    scaler = Scaler(PACE, wanted=6)
    scaler.rebound(pace(most=4))
    assert scaler.see(None, 6, 0.0).after == 4
    scaler.rebound(pace(least=5, most=9))
    assert scaler.see(Demand(1.0, ""), 4, 1.0).after == 5


paces = st.builds(
    Pace,
    least=st.integers(0, 2),
    most=st.integers(2, 9),
    up_delay_s=st.integers(0, 6),
    down_delay_s=st.integers(0, 12),
    zero_delay_s=st.integers(0, 12),
    hysteresis=st.floats(0.05, 0.5),
    max_step_up=st.floats(1.1, 4.0),
    max_step_down=st.floats(0.1, 0.9),
)
measurements = st.one_of(
    st.none(),
    st.builds(Demand, st.floats(0, 12), st.just(""), st.booleans()),
)


@settings(max_examples=200, deadline=None)
@given(paces, st.integers(0, 9), st.lists(measurements, max_size=120))
def test_whatever_is_measured_it_stays_bounded_and_slow(of, start, demands):
    scaler = Scaler(of, wanted=min(max(start, of.least), of.most))
    changes = run(scaler, demands)
    size, last = min(max(start, of.least), of.most), None
    for second, change in changes:
        assert change.before == size != change.after
        assert of.least <= change.after <= of.most
        if change.after > size:
            assert change.after <= max(size + 1, size * of.max_step_up + 1e-6)
            delay_s = of.up_delay_s if size else 0
        else:
            assert change.after >= min(size - 1, size * of.max_step_down - 1e-6)
            delay_s = of.down_delay_s if change.after else of.zero_delay_s
        assert last is None or second - last >= delay_s
        heard = demands[max(0, second - int(delay_s)) : second + 1]
        assert len(heard) == delay_s + 1, "the whole delay was measured"
        assert all(d is not None and (d.complete or change.after > size) for d in heard)
        size, last = change.after, second


@settings(max_examples=200, deadline=None)
@given(
    st.floats(0.2, 8.0),
    st.floats(0.05, 0.5),
    st.integers(1, 9),
    st.integers(0, 3),
    st.lists(st.floats(-1, 1), min_size=60, max_size=150),
)
def test_noise_within_the_bound_never_goes_to_and_fro(mean, hysteresis, start, delay_s, noise):
    bound = hysteresis / (2 - hysteresis)
    of = pace(hysteresis=hysteresis, most=12, up_delay_s=delay_s, down_delay_s=delay_s)
    changes = run(Scaler(of, wanted=start), [mean * (1 + bound * 0.999 * e) for e in noise])
    directions = {c.after > c.before for _, c in changes}
    assert len(directions) <= 1


@pytest.mark.parametrize("period_s", [4, 10, 24, 40, 120])
def test_swings_of_any_period_cost_at_most_two_changes_in_both_delays(period_s):
    """Load that swings between one and four replicas: twenty minutes."""
    demands = [0.9 if second % period_s < period_s / 2 else 3.9 for second in range(1200)]
    changes = run(Scaler(pace(max_step_up=8.0, max_step_down=0.1), wanted=1), demands)
    assert len(changes) <= 2 * (1200 / (PACE.up_delay_s + PACE.down_delay_s) + 1)
    if period_s <= 2 * PACE.up_delay_s:
        assert changes == []  # too short to count
    elif period_s < 2 * PACE.down_delay_s:
        assert [c.after for _, c in changes] == [4]  # up, and not down again
