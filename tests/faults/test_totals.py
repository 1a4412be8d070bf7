"""Drafts are configured away and back, links lose messages, engines die and targets are replaced, in many orders: every
stream has the tokens of plain decoding, and its totals are exactly the sums of its chunks.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.faults.pump import LONGEST, RATES, FaultyPump
from tests.faults.runs import requests
from tests.support.models import pair
from tests.support.mutants import mutant
from tests.support.pump import Request, assert_same

from paceline.messages import Outcome
from paceline.router.relay import Outbox
from paceline.router.session import Session
from paceline.rpc import generation as api
from paceline.target import engine
from paceline.types import Cause, Chunk, FinishReason, Mode, Result, Round, SpeculationStats

_LINKS = [(link, kind) for link in ("from_target", "to_target") for kind in ("drop", "duplicate", "replay")]


class Redeployed(FaultyPump):
    """A pump whose draft pool is emptied as by ``draft_config: null``: it drains, then it ends; and comes back."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.draining = False
        self.all_chunks: dict[str, list[Chunk]] = defaultdict(list)
        self.each_tick = self._redeploy

    def _redeploy(self) -> None:
        event = self.chaos.random()
        if self.now > LONGEST // 2:
            return
        if event < 0.01:
            self.counts["targets_replaced"] += 1
            self.kill_target(keeps_talking=self.chaos.random() < 0.5)
        elif event < 0.04:
            self.draining = not self.draft_dead
        elif event < 0.07 and self.draining:
            self.counts["drafts_away"] += 1
            self.kill_draft(keeps_talking=self.chaos.random() < 0.5)
            self.draining = False
        elif event < 0.10 and self.draining:  # as to another draft that has room, which then is gone, too
            for session in self.sessions.values():
                self.send(session.leave_draft())
        elif event < 0.13 and self.draft_dead:
            self.restart_draft()

    def _carry_out(self, outbox: Outbox) -> None:
        if self.draining:
            outbox.draft_wanted.clear()
        super()._carry_out(outbox)

    def reopen(self, session: Session) -> None:
        if self.draining:
            self.send(session.reopen_target())
        else:
            super().reopen(session)

    def send(self, actions: Any) -> None:
        for chunk in getattr(actions, "chunks", ()):
            self.all_chunks[self._name].append(chunk)
        super().send(actions)

    def digest(self, session: Session) -> None:
        self._name = session.session_id
        super().digest(session)


def wanted(num: int = 6) -> dict[str, Request]:
    """Requests of all modes; two of them have few words, which targets look up in the text when no draft is there."""
    all_of = requests(num, 24)
    plain = all_of["s3"].speculation.model_copy(update={"mode": Mode.PLAIN})
    all_of["s3"] = replace(all_of["s3"], speculation=plain)
    for name, words in (("s4", {20: 200.0}), ("s5", {20: 200.0, 21: 200.0})):
        sampling = all_of["s0"].sampling.model_copy(update={"logit_bias": words, "seed": 9, "max_tokens": 60})
        all_of[name] = replace(all_of[name], prompt=(20, 21) * 10, sampling=sampling)
    return all_of


def assert_totals(chunks: list[Chunk], result: Result, mode: Mode) -> None:
    """The totals of a stream are the sums of its chunks, and neither loses anything on its way to a client."""
    rounds = [chunk.round for chunk in chunks if chunk.round is not None]
    stats = SpeculationStats()
    for round_ in rounds:
        stats.add(round_)
    assert result.speculation == stats
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == result.token_ids
    assert result.usage.completion_tokens == len(result.token_ids)
    assert sum(sum(chunk.drafted) for chunk in chunks) == stats.accepted
    for chunk in chunks:
        if chunk.round is None:
            assert not chunk.token_ids
            continue
        accepted, num = chunk.round.num_accepted, len(chunk.token_ids)
        assert chunk.drafted == tuple(i < accepted for i in range(num))
        assert num == accepted + 1 or (chunk is chunks[-1] and num == accepted)
        assert accepted <= chunk.round.num_drafted
        if chunk.round.lookup:
            assert chunk.round.num_drafted
            assert chunk.round.cause is not Cause.SEQUENTIAL, "the draft's tokens alone"
        elif chunk.round.num_drafted:
            assert chunk.round.cause not in (Cause.DISABLED, Cause.DRAFT_DOWN), "no draft, and yet its tokens"
    assert sum(stats.causes.values()) == stats.rounds == len(rounds)
    histogram = stats.acceptance_histogram
    assert sum(histogram.values()) == sum(round_.num_drafted > 0 for round_ in rounds)
    assert sum(n * count for n, count in histogram.items()) == stats.accepted
    assert stats.hits + stats.misses <= stats.rounds
    assert stats.lookup_accepted <= stats.lookup_drafted <= stats.drafted
    assert stats.lookup_accepted <= stats.accepted
    if mode is Mode.PLAIN:
        assert (stats.rounds, stats.drafted, set(stats.causes)) == (
            len(result.token_ids), 0, set(stats.causes) & {Cause.DISABLED, Cause.START},
        )  # fmt: skip
    proto = api.complete_to_proto(result)
    assert (proto.spec_accepted_tokens, proto.spec_draft_tokens) == (stats.accepted, stats.drafted)
    assert api.complete_from_proto(proto, chunks) == result


def redeployed(reference: dict[str, Result], seeds: range) -> Counter[str]:
    """Runs with other interleavings; what happened in them."""
    total: Counter[str] = Counter()
    target, draft = pair("llama")
    for seed in seeds:
        faults = {each: RATES[each[1]] * 0.2 for each in _LINKS if (seed + _LINKS.index(each)) % 3 == 0}
        pump = Redeployed(target, draft, seed=seed, faults=faults)
        asked = wanted()
        assert_same(pump.run(asked), reference)
        assert not pump.failures
        for name, result in pump.results.items():
            assert_totals(pump.all_chunks[name], result, asked[name].speculation.mode)
            opened = 1 + pump.sessions[name].relay_stats.target_reopens
            assert 1 <= result.speculation.causes[Cause.START] <= opened, "a first round that is none"
            total["accepted"] += result.speculation.accepted - result.speculation.lookup_accepted
            total["lookup_accepted"] += result.speculation.lookup_accepted
            for cause, count in result.speculation.causes.items():
                total[cause] += count
        total += pump.counts
    return total


@pytest.fixture(scope="module")
def reference() -> dict[str, Result]:
    """Plain decoding of each request alone."""
    from tests.support.pump import plain_reference

    return plain_reference(pair("llama")[0], wanted())


def _check(total: Counter[str]) -> None:
    for name in ("drafts_away", "targets_replaced", "target_reopens", "draft_reopens", "repeated", "accepted"):
        assert total[name] > 0, name
    assert total["lookup_accepted"] > 0
    assert total[Cause.HIT] > 0
    assert total[Cause.DRAFT_DOWN] > 0


def test_streams_keep_tokens_and_totals_while_drafts_are_configured_away(reference: dict[str, Result]) -> None:
    _check(redeployed(reference, range(5)))


@pytest.mark.nightly
def test_the_same_in_many_orders(reference: dict[str, Result]) -> None:
    _check(redeployed(reference, range(5, 100)))


@mutant(Session, "on_target")
def _every_outcome_counts(on_target: Any, session: Session, event: Any, *rest: Any) -> Any:
    """Rounds count when they arrive, repetitions and those of lost targets included."""
    rounds = len(session.undigested)
    actions = on_target(session, event, *rest)
    if isinstance(event, Outcome) and len(session.undigested) == rounds:
        session.stats.add(event.round)
    return actions


@mutant(Session, "reopen_target")
def _reopening_forgets(reopen_target: Any, session: Session) -> Any:
    """A session that is re-opened begins its totals again."""
    session.stats = SpeculationStats()
    return reopen_target(session)


def _lookups_pass_for_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target does not say that it looked a proposal up."""
    monkeypatch.setattr(engine, "round_of", lambda part, cause, num: Round(part.num_drafted, num, cause))


MUTANTS: list[Callable[[pytest.MonkeyPatch], None]] = [
    _every_outcome_counts,
    _reopening_forgets,
    _lookups_pass_for_drafts,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_is_caught(monkeypatch: pytest.MonkeyPatch, reference: dict[str, Result], mutant: Any) -> None:
    mutant(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017 - an engine that breaks is as good as a wrong total
        redeployed(reference, range(30))


def test_a_stop_string_cuts_what_a_round_accepted() -> None:
    """The client gets two of five accepted tokens: the totals say two."""
    from tests.router.sessions import make, outcome

    session = make(stop=("b",))
    session.open()
    session.on_target(outcome(session, b"abcdef", accepted=5, finish=None))
    actions = session.digest()
    assert actions.result is not None
    assert actions.result.finish_reason is FinishReason.STOP
    assert actions.result.speculation.acceptance_histogram == {2: 1}
    assert_totals(actions.chunks, actions.result, Mode.OVERLAPPED)
