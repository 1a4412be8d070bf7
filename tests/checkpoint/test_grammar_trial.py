"""Forms that cost too much are refused by a process that can be killed; sessions have a budget in their grammar."""

from __future__ import annotations

import asyncio
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.support.models import EOS, VOCAB
from tests.support.schemas import json_grammars, json_tokenizer

from paceline.checkpoint import grammar, grammar_trial
from paceline.checkpoint.grammar import Grammars
from paceline.checkpoint.grammar_trial import GrammarTrials, Verdict
from paceline.errors import EngineError, InvalidRequestError, ResourceExhaustedError
from paceline.types import StructuredOutput

CHEAP = StructuredOutput(regex="a(bc)*")


@pytest.fixture(scope="module")
def trials() -> Iterator[GrammarTrials]:
    found = GrammarTrials(json_grammars())
    yield found
    found.close()


COSTLY: dict[str, dict[str, Any]] = {
    "optional properties": {"json_schema": {"properties": {f"p{i}": {} for i in range(4500)}}},
    "optional symbols": {"grammar": f'start: {" ".join(["x?"] * 4000)}\nx: "a" | "b"'},
    "multiples": {"json_schema": {"allOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967)]}},
    "rules of GBNF": {"grammar": "\n".join(["root ::= r0", *(f'r{i} ::= "a" r{i + 1}' for i in range(2400))])},
}


@pytest.mark.parametrize("name", COSTLY)
def test_a_costly_form_is_refused_with_the_reason_and_others_are_not(trials: GrammarTrials, name: str) -> None:
    form = StructuredOutput(**COSTLY[name])
    with pytest.raises(InvalidRequestError, match=f"structured_output.{form.kind} ") as caught:
        trials.check(form)
    assert len(str(caught.value)) < 600
    trials.check(CHEAP)


@pytest.mark.parametrize(
    "form",
    [
        {"choice": tuple(f"c{i}" for i in range(3000))},
        {"json_object": True},
        {"regex": "(a|b){0,60000}"},
        {"regex": "((a{1000}){1000}){1000}"},
    ],
)
def test_a_form_that_is_not_costly_is_accepted(trials: GrammarTrials, form: dict[str, Any]) -> None:
    trials.check(StructuredOutput(**form))


def test_a_form_is_tried_once(trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = StructuredOutput(regex="(tried")
    trials.check(CHEAP)
    with pytest.raises(InvalidRequestError, match="regex cannot be compiled"):
        trials.check(bad)
    monkeypatch.setattr(trials, "ask", lambda form: pytest.fail("it is tried again"))
    trials.check(CHEAP)
    with pytest.raises(InvalidRequestError, match="regex cannot be compiled"):
        trials.check(bad)


def test_a_verdict_is_kept_for_one_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    found, asked = GrammarTrials(json_grammars()), []
    monkeypatch.setattr(found, "ask", lambda form: asked.append(form) or Verdict())
    for salt in ("", "key", "other", "key", ""):
        found.check(CHEAP, salt)
        asyncio.run(found.checked(CHEAP, salt))
    assert len(asked) == 3


def test_a_process_that_was_killed_fails_one_request(trials: GrammarTrials) -> None:
    trials.check(CHEAP)
    assert trials._process is not None
    trials._process.kill()
    with pytest.raises(EngineError, match="its process ended"):
        trials.check(StructuredOutput(regex="killed"))
    trials.check(StructuredOutput(regex="killed"))


class _Ends:
    """Grammars whose compiler ends as told."""

    def __init__(self, way: str) -> None:
        self._way = way

    def matcher(self, form: StructuredOutput) -> Any:
        if self._way == "memory":
            try:  # not from what the process has freed before, which is within the limit
                return mmap.mmap(-1, grammar_trial.MAX_ADDRESS_BYTES + (64 << 20))
            except OSError as error:
                raise MemoryError from error
        if self._way == "refused memory":
            raise MemoryError
        if self._way == "abort":
            os.abort()
        while self._way == "loop":
            pass
        return time.sleep(60)


def _addresses_are_limited() -> bool:
    """False on a platform that takes a limit of address space and does not keep it."""
    code = "import mmap, resource as r; r.setrlimit(r.RLIMIT_AS, (1 << 30, 1 << 30)); mmap.mmap(-1, 2 << 30)"
    return subprocess.run([sys.executable, "-c", code], check=False, stderr=subprocess.DEVNULL).returncode != 0


@pytest.mark.parametrize(
    ("way", "reason"),
    [("memory", "MiB"), ("refused memory", "MiB"), ("abort", "nests too deep"), ("loop", "ms to compile")],
)
def test_whatever_ends_a_trial_is_the_reason(way: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "memory" and not _addresses_are_limited():
        pytest.skip("this platform does not limit address space")
    if way != "loop":  # whose time is not what ends it, however slow the machine is
        monkeypatch.setattr(grammar_trial, "MAX_CPU_S", 60.0)
        monkeypatch.setattr(grammar_trial, "MAX_WALL_S", 60.0)
    assert reason in grammar_trial.try_in_child(_Ends(way), CHEAP).reason  # type: ignore[arg-type]


def test_a_machine_without_time_says_nothing_about_a_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_trial, "MAX_WALL_S", 0.05)
    assert grammar_trial.try_in_child(_Ends("sleep"), CHEAP) == Verdict(in_time=False)  # type: ignore[arg-type]
    found = GrammarTrials(json_grammars())
    answers = iter([Verdict(in_time=False), Verdict()])
    monkeypatch.setattr(found, "ask", lambda form: next(answers))
    with pytest.raises(ResourceExhaustedError, match="could not be compiled within"):
        found.check(CHEAP)
    found.check(CHEAP)


@pytest.mark.parametrize("within_a_loop", [True, False])
def test_so_many_forms_wait_and_no_more(within_a_loop: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_trial, "MAX_WAITING", 1)
    found, asked, answer = GrammarTrials(json_grammars()), threading.Event(), threading.Event()

    def wait(form: StructuredOutput) -> Verdict:
        asked.set()
        answer.wait(60)
        return Verdict()

    monkeypatch.setattr(found, "ask", wait)

    def check(form: StructuredOutput) -> None:
        asyncio.run(found.checked(form)) if within_a_loop else found.check(form)

    first = threading.Thread(target=check, args=(CHEAP,))
    first.start()
    assert asked.wait(60)
    with pytest.raises(ResourceExhaustedError, match="at most 1 may wait"):
        check(StructuredOutput(regex="b"))
    answer.set()
    first.join()
    found.check(StructuredOutput(regex="b"))


# -- the budget of a session -----------------------------------------------------------------------------------


def allows(mask: np.ndarray) -> int:
    return int(np.unpackbits(mask).sum())


def test_a_session_beyond_its_budget_fails_with_the_reason(tick: list[float]) -> None:
    state, (z,) = json_grammars().matcher(StructuredOutput(regex="z*")), json_tokenizer().encode("z")
    tick[0] = 0.02
    lengths = 0
    while allows(state.masks([()])[0]):
        assert state.append((z,))
        assert (lengths := lengths + 1) < 50
    assert 3 < lengths < 10, "0.04 s for each token: 0.15 s and 0.005 s each are allowed"
    assert state.failure == (
        f"its masks take {40 * lengths} ms of work for {lengths} tokens: at most 150 ms and 5 ms a token are allowed"
    )


def test_cheap_masks_never_exceed_the_budget(tick: list[float]) -> None:
    state, (z,) = json_grammars().matcher(StructuredOutput(regex="z*")), json_tokenizer().encode("z")
    tick[0] = 0.002
    for _ in range(500):
        assert allows(state.masks([()])[0])
        assert state.append((z,))


@pytest.mark.parametrize("lenient", [False, True])
def test_costly_drafted_tokens_are_no_longer_looked_at(tick: list[float], lenient: bool) -> None:
    """The session itself goes on as plain decoding does: its committed tokens have cost no more."""
    state = json_grammars().matcher(StructuredOutput(regex="z*"), lenient=lenient)
    (z,) = json_tokenizer().encode("z")
    tick[0] = 0.02
    masks = state.masks([(z,) * length for length in range(20)])
    assert allows(masks[0]) == allows(masks[1]) == 2
    assert allows(masks[-1]) == (8 * masks.shape[1] if lenient else 0)
    assert state.append((z,))
    assert allows(state.masks([()])[0]) == 2
    assert not state.failure


def test_compiled_grammars_are_kept_as_far_as_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    resident = [0]

    def grow() -> int:
        resident[0] += 25 << 20
        return resident[0]

    monkeypatch.setattr(grammar, "resident_bytes", grow)
    grammars = Grammars(json_tokenizer(), VOCAB, (EOS,))
    for regex in "abcd":
        grammars.compile(StructuredOutput(regex=regex))
    assert [form.regex for _, form in grammars._compiled] == ["c", "d"]
