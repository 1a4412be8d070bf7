"""Arrivals of open loads, and what loads do with requests. All draws are seeded: a test fails always or never. Each
statistical bound would fail a right generator with probability ``FALSE_ALARM``."""

import asyncio

import numpy as np
import pytest
from scipy import stats

from paceline.errors import EngineError, ResourceExhaustedError
from paceline_bench.load import Load, arrivals_s, drive

FALSE_ALARM = 1e-8


@pytest.mark.parametrize("shape", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_gaps_follow_the_gamma_distribution(shape: float, seed: int) -> None:
    times = arrivals_s(Load(rate=5.0, burstiness=shape), 4001, seed)
    gaps = np.diff(times)
    assert times[0] == 0.0
    assert stats.kstest(gaps, stats.gamma(shape, scale=1 / (5.0 * shape)).cdf).pvalue > FALSE_ALARM
    # The mean of n gaps has the standard deviation 1 / (rate sqrt(shape n)).
    bound = stats.norm.isf(FALSE_ALARM / 2) / (5.0 * np.sqrt(shape * 4000))
    assert abs(gaps.mean() - 0.2) < bound
    assert arrivals_s(Load(rate=5.0, burstiness=shape), 4001, seed) == times


def test_poisson_counts_have_the_variance_of_their_mean_and_bursty_ones_more() -> None:
    def dispersion(shape: float) -> float:
        counts = np.bincount(np.array(arrivals_s(Load(rate=10.0, burstiness=shape), 20_001, 7)).astype(int))[:-1]
        return float(counts.var(ddof=1) / counts.mean())

    num = 1990
    low, high = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], num) / num
    assert low < dispersion(1.0) < high
    assert dispersion(0.25) > high
    assert dispersion(4.0) < low


def test_a_closed_load_keeps_as_many_in_progress_and_a_refusal_is_an_answer() -> None:
    in_progress, most = 0, 0

    async def send(number: int) -> int:
        nonlocal in_progress, most
        in_progress += 1
        most = max(most, in_progress)
        await asyncio.sleep(0.002)
        in_progress -= 1
        if number == 4:
            raise ResourceExhaustedError("full")
        return number

    done = asyncio.run(drive(Load(sessions=3), 9, 0, send))
    assert most == 3
    assert [s.reply for s in done if isinstance(s.reply, int)] == [0, 1, 2, 3, 5, 6, 7, 8]
    assert isinstance(done[4].reply, ResourceExhaustedError)
    assert done[8].submitted_s >= done[0].submitted_s + 0.004


def test_an_open_load_does_not_wait_for_answers() -> None:
    load = Load(rate=200.0)
    in_progress, all_are = [], asyncio.Event()

    async def send(number: int) -> None:
        in_progress.append(number)
        if len(in_progress) == 12:
            all_are.set()
        await asyncio.wait_for(all_are.wait(), 60)

    done = asyncio.run(drive(load, 12, 3, send))
    assert all(sent.submitted_s >= at_s for sent, at_s in zip(done, arrivals_s(load, 12, 3), strict=True))


def test_any_other_error_ends_the_load() -> None:
    async def send(number: int) -> int:
        raise ZeroDivisionError

    with pytest.raises(ExceptionGroup):
        asyncio.run(drive(Load(sessions=2), 4, 0, send))
    assert issubclass(EngineError, Exception)


def test_names() -> None:
    assert Load(4).name == "4 at once"
    assert Load(rate=2.5).name == "2.5/s, Poisson"
    assert Load(rate=2.0, burstiness=0.5).name == "2/s, gamma of shape 0.5"
