"""Runs of the faulty pump with their oracle, and what must have been counted after each fault."""

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.faults.pump import RATES, FaultyPump
from tests.support.models import EOS, pair, prompt
from tests.support.pump import Request, assert_same

from paceline.router.session import MAX_DRAFT_RETRIES, Session
from paceline.types import Mode, Result, SamplingParams, SpeculationParams


def requests(num: int = 4, max_tokens: int = 24, **speculation: Any) -> dict[str, Request]:
    """Greedy and sampled, with and without processors, both speculating modes, short and long proposals."""
    sampling = [
        {"temperature": 1.0},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {
            "temperature": 0.8,
            "top_k": 40,
            "frequency_penalty": 0.4,
            "min_tokens": 3,
            "allowed_token_ids": (*range(10, 200), EOS),
        },
        {"temperature": 1.0, "bad_words": ((20,), (21, 22)), "logit_bias": {EOS: 4.0}},
    ]
    return {
        f"s{i}": Request(
            prompt(i, 1 + 23 * i),
            SamplingParams(max_tokens=max_tokens, seed=100 + i, **sampling[i % 4]),
            SpeculationParams(
                **{"mode": (Mode.OVERLAPPED, Mode.SEQUENTIAL)[i == 1], "max_draft_tokens": (6, 4, 8, 3)[i % 4]}
                | speculation
            ),
            eos_token_ids=(EOS,),
        )
        for i in range(num)
    }


def run(
    reference: dict[str, Result], seed: int, faults: dict[tuple[str, str], float], prepare: Any = None, **options: Any
) -> FaultyPump:
    """One run and its oracle."""
    target, draft = pair("llama")
    pump = FaultyPump(target, draft, seed=seed, faults=faults, **options)
    if prepare is not None:
        prepare(pump)
    wanted = requests(len(reference))
    assert_same(pump.run(wanted), reference)
    for name, result in reference.items():
        assert tuple(pump.chunks[name]) == result.token_ids, "a token was emitted twice, or never"
    assert not pump.failures
    return pump


def accepted(pump: FaultyPump) -> int:
    """Draft tokens that were of use."""
    return sum(result.speculation.accepted for result in pump.results.values())


NOTICED = {
    ("to_target", "drop"): ("trees_lost",),
    ("to_target", "duplicate"): ("nodes_invalid",),
    ("to_target", "reorder"): ("trees_lost", "draft_reopens"),
    ("to_target", "delay"): ("trees_lost", "draft_reopens"),
    ("to_target", "corrupt"): ("nodes_invalid", "messages_stale"),
    ("to_target", "replay"): ("nodes_invalid",),
    ("from_target", "drop"): ("early", "targets_lost", "target_reopens"),
    ("from_target", "duplicate"): ("repeated",),
    ("from_target", "reorder"): ("early", "repeated", "target_reopens"),
    ("from_target", "delay"): ("early", "stale", "target_reopens"),
    ("from_target", "corrupt"): ("malformed", "stale", "target_reopens"),
    ("from_target", "replay"): ("repeated",),
    ("to_draft", "drop"): ("lost_commits", "unknown_messages", "drafts_lost", "draft_reopens"),
    ("to_draft", "duplicate"): ("stale_messages",),
    ("to_draft", "reorder"): ("lost_commits", "drafts_lost", "draft_reopens"),
    ("to_draft", "delay"): ("lost_commits", "stale_messages", "draft_reopens"),
    ("to_draft", "corrupt"): ("invalid_messages", "failed_sessions", "draft_reopens"),
    ("to_draft", "replay"): ("stale_messages",),
    ("from_draft", "drop"): ("trees_lost", "draft_reopens"),
    ("from_draft", "duplicate"): ("nodes_invalid",),
    ("from_draft", "reorder"): ("trees_lost", "draft_reopens"),
    ("from_draft", "delay"): ("trees_lost", "draft_reopens"),
    ("from_draft", "corrupt"): ("nodes_invalid", "malformed"),
    ("from_draft", "replay"): ("nodes_invalid",),
}
"""What must have been counted after each fault."""

LOSSES = ("trees_lost", "drafts_lost", "lost_commits", "failed_sessions")
STALLS = ("stalls", "targets_lost", "target_reopens")


def one_fault(reference: dict[str, Result], link: str, kind: str, prepare: Any = None, least: int = 1) -> Counter[str]:
    """Runs with one kind of fault on one link, and what must and must not have been counted after them.

    There are at least ``least`` runs; up to three if fewer have not shown all of it.
    """
    total: Counter[str] = Counter()
    injected = useful = 0
    for seed in range(max(3, least)):
        if seed >= least and min(injected, useful) > 10 and all(total[name] for name in NOTICED[link, kind]):
            break
        pump = run(reference, seed, {(link, kind): RATES[kind]}, prepare)
        total += pump.counts
        injected += pump.injected[link, kind]
        useful += accepted(pump)
    assert injected > 10
    assert useful > 10, "drafting goes on after a fault"
    for name in NOTICED[link, kind]:
        assert total[name] > 0, name
    if kind in ("duplicate", "replay"):
        for name in LOSSES:
            assert total[name] == 0, f"{name}: nothing was lost"
    if prepare is None and (link.endswith("draft") or kind in ("duplicate", "replay")):
        for name in STALLS:
            assert total[name] == 0, f"{name}: the target was never in doubt"
    return total


def _at_outcome(number: int, action: Callable[[FaultyPump], None]) -> Callable[[FaultyPump], None]:
    """Prepares a pump to do it once, between that outcome and its digest."""

    def prepare(pump: FaultyPump) -> None:
        count = itertools.count(1)

        def on_outcome(_: Session) -> None:
            if next(count) == number:
                action(pump)

        pump.on_outcome = on_outcome

    return prepare


def _refuse(pump: FaultyPump) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no room")

    pump.drafter.open = refuse


def _draft_refuses(reference: dict[str, Result]) -> None:
    pump = run(reference, 1, {}, _refuse)
    assert pump.counts["drafts_lost"] == len(reference) * (1 + MAX_DRAFT_RETRIES)
    assert pump.counts["draft_reopens"] == len(reference) * MAX_DRAFT_RETRIES
    assert accepted(pump) == 0
