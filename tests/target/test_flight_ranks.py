"""Steps of several ranks that are launched ahead: no rank waits for a device, and texts are those of serial steps.

Ranks are processes, and their device is the CPU in virtual time (``tests/support/late.py``). Mutants: a follower
computes the tokens of the step before, the first rank sends those of two steps ago or of other sessions, and a step is
committed although a rank did not come.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tests.model.parallel.ranks import Ranks
from tests.support.hybrids import hybrid_model
from tests.support.models import save_pair
from tests.support.pump import Request, assert_same
from tests.target.flight_ranks import serve, storm
from tests.target.test_flight import requests

pytestmark = pytest.mark.slow
"""Ranks are processes, which take seconds to begin."""

Served = tuple[dict[str, Any], int, dict[str, list[int]]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_pair(tmp_path_factory.mktemp("models")) / "target")


@pytest.fixture(scope="module")
def serial(two: Ranks, path: str) -> Served:
    """Results of sessions whose tokens ranks sample, and of sessions whose rows the first one gathers."""
    served: Served = two.run(serve, path, asked(), False)[0]
    assert served[1] == 0
    return served


def asked() -> dict[str, Request]:
    return requests(0)


def ahead(two: Ranks, path: str, first: tuple[str, ...] = (), second: tuple[str, ...] = ()) -> Served:
    served: Served = two.run(serve, path, asked(), True, (first, second))[0]
    return served


def test_texts_are_those_of_serial_steps(two: Ranks, path: str, serial: Served) -> None:
    """With prompts that come in the middle and stop tokens; of tokens that ranks sample and of gathered rows."""
    results, num_ahead, _ = ahead(two, path)
    assert_same(results, serial[0])
    assert num_ahead > 30


def test_a_storm_with_drafts(two: Ranks, path: str, serial: Served) -> None:
    """Sessions leave, drafts die and come back, pages are few; with drafts, steps are settled behind the next launch,
    without them the next one is launched ahead."""
    total: Counter[str] = Counter()
    for seed in range(2):
        results, counts = two.run(storm, path, asked(), seed)[0]
        assert_same(results, serial[0])
        total += counts
    assert all(total[name] > 0 for name in ("nodes_used", "steps_ahead", "preemptions"))


def test_linear_layers_of_two_ranks(two: Ranks, tmp_path: Any) -> None:
    """With too few pages: sessions are preempted, and lose states on all ranks. The mutant computes old tokens."""
    hybrid_model("lfm2").save_pretrained(tmp_path)

    def served(is_ahead: bool, pages: int, *second: str) -> Served:
        found: Served = two.run(serve, str(tmp_path), asked(), is_ahead, ((), second), pages)[0]
        return found

    serial, (results, num_ahead, _) = served(False, 60)[0], served(True, 7)
    assert_same(results, serial)
    assert num_ahead > 10
    with pytest.raises(AssertionError):
        assert_same(served(True, 7, "stale_follower")[0], serial)


def test_a_rank_without_memory_for_the_step_ahead_takes_it_later(two: Ranks, path: str, serial: Served) -> None:
    """All ranks drop the step before any of them begins it, while the one in front is in flight."""
    results, num_ahead, _ = ahead(two, path, second=("without_room",))
    assert_same(results, serial[0])
    assert num_ahead > 10


@pytest.mark.parametrize(
    ("first", "second"), [((), ("stale_follower",)), (("stale_leader",), ()), (("tokens_of_others",), ())]
)
def test_tokens_of_another_step_or_session_are_caught(
    two: Ranks, path: str, serial: Served, first: tuple[str, ...], second: tuple[str, ...]
) -> None:
    with pytest.raises(AssertionError):
        assert_same(ahead(two, path, first, second)[0], serial[0])


def test_no_token_of_a_step_without_one_of_its_ranks_is_committed(two: Ranks, path: str, serial: Served) -> None:
    """A rank does not come on the device, with two steps in flight. The mutant does not ask before it commits."""
    for wrong in ((), ("unchecked",)):
        results, num_ahead, tokens = ahead(two, path, ("broken", *wrong))
        assert not results
        assert num_ahead > 5
        begun = [serial[2][name][: len(found)] == found for name, found in tokens.items()]
        assert all(begun) is (wrong == ())


def test_a_rank_that_dies_while_two_steps_are_in_flight(tmp_path: Any, path: str, serial: Served) -> None:
    """The first one is told when it launches the next step; what it has sent is the beginning of the texts."""
    with Ranks(2, tmp_path) as ranks:
        ranks.start(serve, path, asked(), True, ((), ("mortal",)))
        results, num_ahead, tokens = ranks.result(0)
    assert not results
    assert num_ahead > 5
    assert any(tokens.values())
    assert all(serial[2][name][: len(found)] == found for name, found in tokens.items())
