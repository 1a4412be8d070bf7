"""Latency as clients see it, against numpy on times written down by hand."""

import numpy as np
import pytest

from paceline_bench.latency import METRICS, PERCENTILES, latencies, meets, percentiles, times
from paceline_bench.records import RequestRecord, RoundRecord


def record(arrivals: list[tuple[float, int]], counted: int | None = None) -> RequestRecord:
    rounds = tuple(RoundRecord(0, 0, tokens, "", at) for at, tokens in arrivals)
    token_ids = tuple(range(sum(tokens for _, tokens in arrivals)))
    return RequestRecord("m", "plain", 0, 0.0, 0, 0, "p", 3, token_ids, 0.0, 0.0, rounds, num_counted=counted)


BURSTS = record([(0.5, 1), (0.7, 3), (1.3, 2)])


def test_a_burst_is_one_gap_and_a_zero_for_each_further_token() -> None:
    found = times(BURSTS)
    assert found is not None
    assert found.gap_s == pytest.approx((0.2, 0.6))
    assert found.itl_s == pytest.approx((0.2, 0.0, 0.0, 0.6, 0.0))
    assert sum(found.itl_s or ()) == pytest.approx(sum(found.gap_s))
    assert (found.ttft_s, found.e2el_s) == (0.5, 1.3)
    assert found.tpot_s == pytest.approx(0.8 / 5)


def test_percentiles_are_numpy_s() -> None:
    rng = np.random.default_rng(1)
    values = rng.exponential(1.0, 137).tolist()
    assert percentiles(values) == {p: pytest.approx(np.percentile(values, p)) for p in PERCENTILES}
    assert percentiles([]) == dict.fromkeys(PERCENTILES)
    requests = [record([(at, 1), (at + gap, 2)]) for at, gap in rng.random((40, 2)).tolist()]
    found = latencies(requests)
    assert set(found) == set(METRICS)
    firsts, gaps = ([r.rounds[0].at_s for r in requests], [r.rounds[1].at_s - r.rounds[0].at_s for r in requests])
    for p in PERCENTILES:
        assert found["ttft"][p] == pytest.approx(np.percentile(firsts, p))
        assert found["gap"][p] == pytest.approx(np.percentile(gaps, p))
        assert found["itl"][p] == pytest.approx(np.percentile([v for gap in gaps for v in (gap, 0.0)], p))
        assert found["tpot"][p] == pytest.approx(np.percentile(np.array(gaps) / 2, p))
        assert found["e2el"][p] == pytest.approx(np.percentile(np.add(firsts, gaps), p))


def test_what_is_not_known_is_not_reported() -> None:
    unknown = record([(0.5, 0), (0.9, 0)], counted=4)
    found = latencies([BURSTS, unknown])
    assert found["itl"] == dict.fromkeys(PERCENTILES), "one request without it is enough"
    assert found["gap"][99] is not None
    assert times(record([])) is None
    assert latencies([record([])])["ttft"] == dict.fromkeys(PERCENTILES)


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({"ttft": 500}, True),
        ({"ttft": 499}, False),
        ({"tpot": 160.1}, True),
        ({"tpot": 159.9}, False),
        ({"itl": 590}, True),  # the 99 % lies between 0.2 and 0.6 s
        ({"itl": 580}, False),
        ({"e2el": 1300, "ttft": 500}, True),
        ({"e2el": 1300, "ttft": 400}, False),
        ({}, True),
    ],
)
def test_goodput_takes_requests_that_keep_every_limit(limits: dict[str, float], kept: bool) -> None:
    assert meets(BURSTS, limits) is kept


def test_goodput_of_odd_requests() -> None:
    assert not meets(record([]), {"ttft": 1e9}), "it has got nothing"
    assert meets(record([(0.1, 1)]), {"tpot": 1, "itl": 1}), "one token has none between"
    assert not meets(record([(0.5, 0), (0.9, 0)], counted=4), {"itl": 1e9}), "unknown is not kept"
