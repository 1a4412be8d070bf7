"""Statistics in which old measurements fade, each against its definition."""

import math
import random
import statistics

import pytest

from paceline.core.statistics import (
    DecayingHistogram,
    DecayingMax,
    DecayingRatio,
    Ewma,
    RateEstimate,
    RateSample,
)


def test_an_average_is_the_first_value_and_then_moves_by_its_weight() -> None:
    average = Ewma(0.25)
    assert average.get(7.0) == 7.0
    for value in (4.0, 8.0, 8.0):
        average.add(value)
    assert average.get(7.0) == pytest.approx(4.0 * 0.75**2 + 8.0 * (1 - 0.75**2))


def test_a_maximum_rises_at_once_and_falls_slowly() -> None:
    largest = DecayingMax(0.5, 8.0)
    found = []
    for value in (0.0, 3.0, 1.0, 10.0, 0.0):
        largest.add(value)
        found.append(largest.value)
    assert found == [4.0, 3.0, 1.5, 10.0, 5.0]


def test_a_ratio_leans_on_its_parent_and_both_on_the_prior() -> None:
    parent = DecayingRatio(keep=0.9, weight=8.0)
    child, other = (DecayingRatio(keep=0.5, weight=2.0, parent=parent) for _ in range(2))
    assert child.value(0.7) == parent.value(0.7) == 0.7
    child.add(3.0, 4.0, 4)
    child.add(1.0, 2.0, 2)
    part, whole = 0.9**2 * 3.0 + 1.0, 0.9**2 * 4.0 + 2.0
    assert parent.value(0.7) == pytest.approx((part + 8.0 * 0.7) / (whole + 8.0))
    assert other.value(0.7) == parent.value(0.7), "what one child has seen, the others lean on"
    part, whole = 0.5**2 * 3.0 + 1.0, 0.5**2 * 4.0 + 2.0
    assert child.value(0.7) == pytest.approx((part + 2.0 * parent.value(0.7)) / (whole + 2.0))
    child.fade(0.0)
    assert child.value(0.7) == parent.value(0.7)


def test_a_rate_halves_the_weight_of_what_is_a_half_life_old() -> None:
    rate = RateEstimate(half_life_s=2.0)
    assert rate.per_s() == 0.0
    rate.add(100.0, 1.0)
    rate.add(10.0, 2.0)
    assert rate.per_s() == pytest.approx((50.0 + 10.0) / (0.5 + 2.0))


def test_the_error_of_a_rate_is_that_of_many_repetitions() -> None:
    rng = random.Random(0)
    rates, errors = [], []
    for _ in range(2000):
        sample = RateSample()
        for _ in range(20):
            seconds = rng.uniform(0.5, 1.5)
            sample.add(30.0 * seconds + rng.gauss(0.0, 6.0), seconds)
        rates.append(sample.amount / sample.seconds)
        errors.append(sample.standard_error())
    assert statistics.mean(errors) == pytest.approx(statistics.stdev(rates), rel=0.05)
    assert RateSample().standard_error() == math.inf


def test_shares_of_a_histogram_follow_what_changes() -> None:
    histogram = DecayingHistogram(capacity=64.0)
    assert histogram.shares() == {}
    assert histogram.mean() == 0.0
    for value in [2] * 40 + [4] * 10:
        histogram.add(value)
    assert histogram.shares() == {2: 0.8, 4: 0.2}
    assert histogram.mean() == pytest.approx(2.4)
    for _ in range(500):
        histogram.add(4)
    assert histogram.mean() == pytest.approx(4.0, abs=0.05)
