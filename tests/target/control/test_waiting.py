"""Decisions of the wait policy with numbers worked out by hand (times in seconds)."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core.experiment import WINDOW
from paceline.messages import Node, Nodes, OpenSession
from paceline.target.control.waiting import DRAFT_TIMEOUT_S, WaitPolicy
from paceline.target.session import TargetSession
from paceline.types import Mode, SamplingParams, SpeculationParams


def session(mode: Mode = Mode.OVERLAPPED, k: int = 4, max_tokens: int = 100) -> TargetSession:
    message = OpenSession(
        "s", 1, (1, 2), 2, 0, SamplingParams(max_tokens=max_tokens), SpeculationParams(mode=mode, max_draft_tokens=k)
    )
    made = TargetSession(message, vocab_size=100, max_len=1000, device="cpu", now=0.0)
    made.num_computed = 1  # decoding
    return made


def policy(**values: float) -> WaitPolicy:
    """All measurements given: a target step of 20 ms, a draft step of 4 ms, 2 tokens per round of 40 ms."""
    made = WaitPolicy()
    defaults = {
        "step_s": 0.02,
        "draft_step_s": 0.004,
        "link_s": 0.0,
        "first_acceptance": 0.7,
        "acceptance": 0.7,
        "tokens_per_round": 2.0,
        "round_s": 0.04,
    }
    for name, value in (defaults | values).items():
        getattr(made, name).value = value
    return made


def with_chain(made: TargetSession, *probs: float) -> TargetSession:
    made.tree.add(Node(i + 1, i, 10 + i, p) for i, p in enumerate(probs))
    return made


def asked(made: WaitPolicy, of: TargetSession, now: float, *, others_ready: bool, **more: Any) -> float | None:
    """Until when the scheduler has a session wait; None: it steps."""
    may = made.may_wait(of, others_ready=others_ready)
    return made.until(of, now, made.rate(), others_ready=others_ready, **more) if may else None


def test_wait_after_a_miss_while_the_gain_exceeds_the_cost() -> None:
    """Rate 2 / 0.04 = 50 tokens/s; the answer takes 1.5 * 4 ms = 6 ms, so waiting costs 0.3 tokens against 0.7."""
    assert asked(policy(), session(), 0.0, others_ready=False) == pytest.approx(3 * 0.006)
    # With a link of 10 ms the cost is 50 * 16 ms = 0.8 tokens.
    assert asked(policy(link_s=0.01), session(), 0.0, others_ready=False) is None
    # ... unless the first draft token is nearly sure: 0.85.
    assert asked(policy(link_s=0.01, first_acceptance=0.85), session(), 0.0, others_ready=False) is not None


def test_a_wait_is_worth_all_that_such_waits_have_brought() -> None:
    """Waits that brought 1.7 tokens in 24 ms: 1 token more than the first, for 8 ms more, which is 0.4 tokens."""
    known = policy(link_s=0.01, answer_tokens=1.7, answer_wait_s=0.024)
    assert asked(known, session(), 0.0, others_ready=False) == pytest.approx(3 * 0.016)
    # A gain of 1.3 tokens against 0.8 of the wait, and what a proposal at hand is worth: 0.3, or 0.7.
    for prob, waits in ((0.3, True), (0.7, False)):
        until = asked(known, session(), 0.0, others_ready=False, fallback=(prob,))
        assert (until is not None) is waits
    longer = policy(link_s=0.01, answer_tokens=1.7, answer_wait_s=0.04)  # 24 ms more: 1.2 tokens
    assert asked(longer, session(), 0.0, others_ready=False) is None


def test_a_wait_counts_what_it_does_to_the_next_round() -> None:
    """Waiting costs 0.8 tokens for 0.7: it pays if the next such wait, worth as much, is spared half as often again."""
    for hits_after_draft, waits in ((0.9, True), (0.5, False), (0.1, False)):
        known = policy(link_s=0.01)
        for after_draft, share in ((True, hits_after_draft), (False, 0.5)):
            known.observe_hit(after_draft=after_draft, hit=True)
            known.hits[after_draft].value = share
        assert (asked(known, session(), 0.0, others_ready=False) is not None) is waits
    sure = policy(link_s=0.005)  # 0.55 tokens for 0.7, and 0.4 * 0.55 for the waits that stepping at once would spare
    assert asked(sure, session(), 0.0, others_ready=False) is not None
    sure.hits[True].value, sure.hits[False].value = 0.5, 0.9
    assert asked(sure, session(), 0.0, others_ready=False) is None


def test_before_the_first_wait_an_answer_is_worth_what_drafts_bring() -> None:
    """A round with draft tokens brings 1.7: a wait for 0.8 tokens is tried, and what it brings counts from then on."""
    new = policy(link_s=0.01, draft_tokens=1.7)
    assert asked(new, session(), 0.0, others_ready=False) is not None
    new.observe_answer(0, 0.016)
    assert asked(new, session(), 0.0, others_ready=False) is None
    for _ in range(60):  # bad luck fades
        new.observe_rounds([(0, 0, 1, 0.02, 0.0)])
        new.link_s.value, new.tokens_per_round.value, new.round_s.value = 0.01, 2.0, 0.04
    assert new.answer_tokens.get(0.0) == pytest.approx(1.7 * (1 - 0.98**60))
    assert asked(new, session(), 0.0, others_ready=False) is not None


def test_what_has_been_waited_already_is_sunk() -> None:
    """After 5 of 16 ms the rest costs 50 * 11 ms = 0.55 tokens; past three times the expected delay: give up."""
    slow = policy(link_s=0.01)
    assert asked(slow, session(), 0.005, others_ready=False) == pytest.approx(3 * 0.016)
    assert asked(slow, session(), 0.048, others_ready=False) is None


def test_waiting_in_vain_is_remembered() -> None:
    """The link is then at least as slow as what was waited: the next miss does not wait."""
    slow = policy()
    assert asked(slow, session(), 0.019, others_ready=False) is None
    assert slow.link_s.get(0.0) == pytest.approx(0.0019)
    for _ in range(30):
        asked(slow, session(), 0.05, others_ready=False)
    assert asked(slow, session(), 0.0, others_ready=False) is None


def test_a_slow_spell_does_not_end_waiting_for_good() -> None:
    """Rounds without a draft let the link's estimate decay: 2 % each."""
    slow = policy(link_s=0.02)
    assert asked(slow, session(), 0.0, others_ready=False) is None
    for _ in range(60):
        slow.observe_rounds([(0, 0, 1, 0.02, 0.0)])
    slow.tokens_per_round.value, slow.round_s.value = 2.0, 0.04
    assert slow.link_s.get(0.0) == pytest.approx(0.02 * 0.98**60)
    # 0.02 * 0.98^60 = 5.95 ms: the answer takes 11.95 ms, 0.6 tokens at 50 a second, less than 0.7
    assert asked(slow, session(), 0.0, others_ready=False) is not None


def test_wait_for_a_longer_proposal() -> None:
    """One more token of a chain 0.9 * 0.8: 0.7 * 0.72 = 0.504 tokens against 50 * 4 ms = 0.2."""
    assert asked(policy(), with_chain(session(), 0.9, 0.8), 0.0, others_ready=False) == pytest.approx(0.012)
    # 0.9 * 0.8 * 0.35: 0.176
    assert asked(policy(), with_chain(session(), 0.9, 0.8, 0.35), 0.0, others_ready=False) is None


def test_never_wait() -> None:
    """Complete, plain, at the end, no draft, idle draft, prefill outstanding, or others that are ready."""
    ready = policy()
    assert asked(ready, with_chain(session(k=2), 0.9, 0.9), 0.0, others_ready=False) is None
    assert asked(ready, session(Mode.PLAIN), 0.0, others_ready=False) is None
    assert asked(ready, session(max_tokens=1), 0.0, others_ready=False) is None
    assert asked(ready, session(), 0.0, others_ready=True) is None
    for attribute, value in (("draft_available", False), ("idle_context_len", 2), ("num_computed", 0)):
        made = session()
        setattr(made, attribute, value)
        assert asked(ready, made, 0.0, others_ready=False) is None


def test_never_wait_for_what_would_not_be_verified() -> None:
    """The budget wants none, or no more than there are; and its own time counts against a token waited for."""
    ready = policy()
    assert asked(ready, session(), 0.0, others_ready=False, wanted=0) is None
    assert asked(ready, with_chain(session(), 0.9, 0.8), 0.0, others_ready=False, wanted=2) is None
    assert asked(ready, with_chain(session(), 0.9, 0.8), 0.0, others_ready=False, wanted=3) is not None
    assert asked(ready, session(Mode.SEQUENTIAL), 0.0, others_ready=False, wanted=0) is None
    # 0.504 tokens against 50 * (4 + 7) ms = 0.55.
    assert asked(ready, with_chain(session(), 0.9, 0.8), 0.0, others_ready=False, row_s=0.007) is None


def test_sequential_mode_waits_for_its_draft_up_to_the_timeout() -> None:
    """Even beside others that are ready; a draft that was silent is not waited for again until it sends."""
    made = session(Mode.SEQUENTIAL)
    assert asked(policy(), made, 0.5, others_ready=True) == pytest.approx(DRAFT_TIMEOUT_S)
    assert asked(policy(), made, DRAFT_TIMEOUT_S, others_ready=True) is None
    made.outcome_at = 2.0
    assert asked(policy(), made, 2.0, others_ready=True) is None
    made.draft_silent = False
    assert asked(policy(), made, 2.0, others_ready=True) == pytest.approx(2.0 + DRAFT_TIMEOUT_S)


def test_what_is_learned_of_a_round() -> None:
    """Acceptance counts tokens up to the first rejection; a first token counts apart."""
    made = policy(acceptance=0.5, first_acceptance=0.5)
    made.observe_rounds([(4, 1, 2, 0.04, 0.0)])
    after_accept = 0.5 + 0.5 / WINDOW
    assert made.first_acceptance.get(0) == pytest.approx(after_accept)
    assert made.acceptance.get(0) == pytest.approx(after_accept * (1 - 1 / WINDOW))
    assert made.tokens_per_round.get(0) == pytest.approx(2.0)


def test_what_is_learned_of_nodes() -> None:
    """The draft's own step time, and what the first answer took beyond it."""
    made = policy(draft_step_s=0.004)
    waiting = session()
    made.observe_nodes(waiting, Nodes("s", 1, 2, (), False, 0.014), 0.03, resolved=True)
    assert made.draft_step_s.get(0) == pytest.approx(0.005)
    assert made.link_s.get(0) == pytest.approx(0.1 * (0.03 - 1.5 * 0.005))
    made.observe_nodes(waiting, Nodes("s", 1, 1, (), False, 0.0), 0.9, resolved=True)  # of an older context
    assert made.link_s.get(0) == pytest.approx(0.1 * (0.03 - 1.5 * 0.005))
