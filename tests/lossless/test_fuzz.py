"""The differential fuzzer finds no difference; a mistake is found, and shrunk to the sessions that show it."""

import dataclasses
from typing import Any

import pytest
from tests.lossless import fuzz
from tests.lossless.fuzz import COMPILED, EAGER, RANKS, Ask, Case, Found, check, search
from tests.support.mutants import mutant
from tests.support.rings import slow

from paceline.router.session import Session
from paceline.target import engine as target_engine
from paceline.types import Acceptance, Mode


@pytest.mark.parametrize(("num_cases", "longest"), [(4, 16), *slow([(25, fuzz.LONGEST_RUN)])])
def test_random_sessions_have_the_tokens_of_plain_decoding(num_cases: int, longest: int) -> None:
    """Of float32, bfloat16 and int8 targets; with faults, deaths, heads, subtrees and structured outputs."""
    totals = search(num_cases, 11, longest=longest)
    assert totals.cases >= num_cases
    assert totals.sessions > 2 * num_cases


PARTS = {
    f"{name}-{part}": (targets, num_sessions, 1000 * (1 + part))
    for name, targets, num_sessions, num_parts in (
        ("eager", EAGER, 1000, 14),
        ("compiled", COMPILED, 500, 8),
        ("ranks", RANKS, 250, 8),
    )
    for part in range(num_parts)
}
"""20,000 sessions, in parts of some minutes each: targets, sessions and the first number of a search."""


@pytest.mark.compiler
@pytest.mark.nightly
@pytest.mark.usefixtures("compiled_steps")
@pytest.mark.parametrize("part", PARTS)
def test_many_random_sessions_have_the_tokens_of_plain_decoding(part: str) -> None:
    targets, num_sessions, number = PARTS[part]
    totals = fuzz.Totals()
    while totals.sessions < num_sessions:
        search(20, number, targets, totals)
        number += 1
    assert all(totals.by_target[target] for target in targets)


@mutant(target_engine, "decide")
def _accepts_anything(decide: Any, logits: Any, rows: Any, proposals: Any, rules: Any) -> Any:
    """The first token of a proposal is accepted as it is."""
    return [
        dataclasses.replace(
            verdict,
            num_accepted=1,
            token_ids=(proposal.token_ids[0], verdict.token_ids[0]),
            logprobs=verdict.logprobs[:1] * 2,
        )
        if len(proposal) and not verdict.num_accepted
        else verdict
        for verdict, proposal in zip(decide(logits, rows, proposals, rules), proposals, strict=True)
    ]


@mutant(Session, "reopen_target")
def _migrates_without_its_last_token(reopen_target: Any, session: Session) -> Any:
    """A session that moves to another target loses a token on the way."""
    if len(session.history) > len(session.prompt):
        session.history.pop()
    return reopen_target(session)


@pytest.mark.slow
def test_a_mistake_is_noticed_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """To a session or two; the message holds the command that runs it again, and without the mistake it passes."""
    with monkeypatch.context() as patch:
        _accepts_anything(patch)
        with pytest.raises(Found) as caught:
            search(300, 3, ("llama",), most=2, longest=5)
        case = caught.value.case
        with pytest.raises(AssertionError):
            check(case)
    assert sum(ask.choices for ask in case.asks) <= 2
    assert (case.faults, case.target_dies) == ((), ())
    command = str(caught.value).splitlines()[-1]
    assert fuzz.main(["--case", command.partition("--case ")[2].strip("'")]) == 0


def test_a_session_that_is_opened_again_after_its_end_changes_no_text() -> None:
    """The repeated message arrives when the target has ended the session and its last outcomes are on their way."""
    long = Ask(3, 106, 40, 1.0, 49, 2, "top_k", mode=Mode.PLAIN, acceptance=Acceptance.REJECTION, resumed=4)
    others = (
        Ask(0, 18, resumed=13),
        Ask(0, 4, 45, seed=11, mode=Mode.SEQUENTIAL, resumed=13),
        Ask(0, 84, 2, seed=48),
        Ask(0, 90, 15, 1.6, 47, processor="min_p", mode=Mode.SEQUENTIAL, acceptance=Acceptance.REJECTION),
        Ask(0, 10, 1, max_draft_tokens=1),
    )
    faults = (("to_target", "replay"), ("to_draft", "reorder"))
    case = Case(
        "llama", (long, *others), seed=5896, max_step_tokens=48, adaptive=False, faults=faults, draft_dies=(45,)
    )
    assert check(case) == 4


def test_a_token_that_is_lost_in_a_migration_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One ask is several sessions; those without one text are left aside."""
    rejected = Ask(1, 20, 8, 1.0, acceptance=Acceptance.REJECTION)
    case = Case(asks=(Ask(max_tokens=8, choices=8, temperature=1.0, mode=Mode.PLAIN), rejected), target_dies=(12, 20))
    assert check(case) == 8
    _migrates_without_its_last_token(monkeypatch)
    with pytest.raises(AssertionError, match=r"^session 0\.\d: token \d is \d+ and in plain decoding \d+"):
        check(case)
