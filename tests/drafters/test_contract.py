"""What an engine relies on holds for every drafter of the pool: a session says what a new one of its text says, learns
of no other salt, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.support.models import VOCAB, random_model

from paceline.core.processors import SamplerState
from paceline.drafters.cascade import VerticalDrafter
from paceline.drafters.model import ModelDrafter
from paceline.drafters.parallel import ParallelDrafter
from paceline.drafters.protocol import Candidates, Drafter, DrafterSessionError, Leaf
from paceline.drafters.suffix import SharedTexts, SuffixDrafter, ngram_drafter
from paceline.model.loading import prepare
from paceline.model.runner import ModelRunner
from paceline.types import SamplingParams

TEXT = [*range(20, 90)] * 20
"""Each token has one successor."""
SIZES = {"max_leaves": 8, "max_prefill_tokens": 48, "top_m": 12}


def _runner() -> ModelRunner:
    return prepare(random_model("llama"), compile=False).runner(12)


def _vertical() -> tuple[Drafter, list[ModelRunner]]:
    runners = [_runner(), _runner()]
    return VerticalDrafter(runners[0], guesser=ModelDrafter(runners[1], **SIZES), num_guesses=2, **SIZES), runners


def _of_one(drafter: type[ModelDrafter], **options: Any) -> tuple[Drafter, list[ModelRunner]]:
    runner = _runner()
    return drafter(runner, **SIZES, **options), [runner]


DRAFTERS: dict[str, tuple[Callable[[], tuple[Drafter, list[ModelRunner]]], int]] = {
    "ngram": (lambda: (ngram_drafter(), []), 1200),
    "suffix": (lambda: (SuffixDrafter(shared_tokens=4000), []), 1200),
    "model": (lambda: _of_one(ModelDrafter), 110),
    "parallel": (lambda: _of_one(ParallelDrafter, pard_token=9, tokens_per_leaf=3), 110),
    "vertical": (_vertical, 110),
}
"""How each is made, with the models that hold its pages, and the tokens of a prompt of several chunks."""
EACH = pytest.mark.parametrize("kind", DRAFTERS)


class Session:
    """A session and its sampler, as an engine keeps them."""

    def __init__(self, drafter: Drafter, name: str, text: Sequence[int], salt: str = "") -> None:
        self.drafter, self.name = drafter, name
        self.sampler = SamplerState(SamplingParams(temperature=1.0), 3, text, vocab_size=VOCAB)
        drafter.open(name, text, self.sampler, salt)

    def prefill(self) -> Session:
        while not self.drafter.ready(self.name):
            assert self.drafter.prefill()
            self.drafter.check_integrity()
        return self

    def commit(self, tokens: Sequence[int], nodes: Sequence[int]) -> None:
        self.sampler.append(tokens)
        self.drafter.advance(self.name, tokens, nodes, [])
        self.drafter.check_integrity()

    def leaf(self, node: int, *path: int) -> Leaf:
        """A node one below the anchor, or the anchor itself."""
        return Leaf(self.name, node, (node,) if path else (), path)


def expand(drafter: Drafter, *leaves: Leaf) -> list[tuple[list[Any], Any]]:
    """Token ids and log probabilities of each leaf."""
    found: Candidates = drafter.expand(leaves)
    drafter.check_integrity()
    return [(ids.tolist(), log_q) for ids, log_q in zip(found.token_ids, found.log_q, strict=True)]


def assert_as_new(kind: str, found: tuple[list[Any], Any], text: Sequence[int]) -> None:
    """A leaf's candidates are those of the anchor of a new drafter's only session."""
    drafter, _ = DRAFTERS[kind][0]()
    ((ids, log_q),) = expand(drafter, Session(drafter, "s", text).prefill().leaf(0))
    assert found[0] == ids
    torch.testing.assert_close(found[1], log_q, atol=2e-5, rtol=0)


def follows(kind: str) -> None:
    make, length = DRAFTERS[kind]
    drafter, _ = make()
    session = Session(drafter, "s", TEXT[:length])
    assert drafter.prefill()
    assert not drafter.ready("s")
    session.commit(TEXT[length : length + 2], [1, 2])  # it overtakes the prompt
    session.prefill()
    at = length + 2
    (found,) = expand(drafter, session.leaf(2))
    assert_as_new(kind, found, TEXT[:at])
    found, other = expand(drafter, session.leaf(3, TEXT[at]), session.leaf(4, 99))
    assert_as_new(kind, found, TEXT[: at + 1])
    assert_as_new(kind, other, [*TEXT[:at], 99])
    session.commit(TEXT[at : at + 3], [3, 5, 6])  # a hit, and what was never expanded
    (found,) = expand(drafter, session.leaf(6))
    assert_as_new(kind, found, TEXT[: at + 3])


@EACH
def test_a_session_says_what_a_new_one_of_its_text_says(kind: str) -> None:
    follows(kind)


def _stale(patch: pytest.MonkeyPatch, drafter: type[Drafter]) -> None:
    """Committed tokens are never read."""
    patch.setattr(drafter, "advance", lambda *_: None)


def _a_token_behind(patch: pytest.MonkeyPatch, drafter: type[Drafter]) -> None:
    """The last token of a path is not seen."""
    of = drafter.expand
    patch.setattr(
        drafter, "expand", lambda self, leaves: of(self, [leaf._replace(path=leaf.path[:-1]) for leaf in leaves])
    )


@EACH
@pytest.mark.parametrize("wrong", [_stale, _a_token_behind], ids=lambda wrong: wrong.__name__.strip("_"))
def test_a_drafter_that_does_not_follow_is_noticed(kind: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong(monkeypatch, type(DRAFTERS[kind][0]()[0]))
    with pytest.raises((AssertionError, RuntimeError, ValueError, IndexError)):
        follows(kind)


def learns_nothing(kind: str) -> None:
    make, length = DRAFTERS[kind]
    drafter, _ = make()
    first = Session(drafter, "a", TEXT[:length], "x").prefill()
    first.commit(TEXT[length : length + 9], range(1, 10))
    text = [*range(100, 160), *TEXT[length : length + 3]]
    second = Session(drafter, "b", text, "y").prefill()
    found = expand(drafter, first.leaf(9), second.leaf(0))
    assert_as_new(kind, found[0], TEXT[: length + 9])
    assert_as_new(kind, found[1], text)
    drafter.close("a")
    second.commit([100], [1])
    (last,) = expand(drafter, second.leaf(1))
    assert_as_new(kind, last, [*text, 100])


@EACH
def test_sessions_of_other_salts_in_one_call_say_what_each_says_alone(kind: str) -> None:
    learns_nothing(kind)


def test_outputs_of_another_salt_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    of, newest = SharedTexts.of, SharedTexts.newest
    monkeypatch.setattr(SharedTexts, "of", lambda self, salt: of(self, ""))
    monkeypatch.setattr(SharedTexts, "newest", lambda self, salt: newest(self, ""))
    with pytest.raises(AssertionError):
        learns_nothing("suffix")


@EACH
def test_a_session_that_is_closed_leaves_nothing_and_is_named(kind: str) -> None:
    """At any time: before its prompt is read, and with nodes."""
    make, length = DRAFTERS[kind]
    drafter, runners = make()
    session = Session(drafter, "s", TEXT[:length])
    drafter.prefill()
    Session(drafter, "early", TEXT[:length])
    drafter.close("early")
    session.prefill()
    expand(drafter, session.leaf(0))
    expand(drafter, session.leaf(1, TEXT[length]))
    for name in ("s", "s", "never open"):
        drafter.close(name)
        drafter.check_integrity()
    assert not drafter.prefill()
    assert [runner.cache.num_used for runner in runners] == [0] * len(runners)
    with pytest.raises(DrafterSessionError, match="session s: not open"):
        drafter.expand([session.leaf(0)])
    with pytest.raises(DrafterSessionError, match="session s: not open"):
        drafter.advance("s", [1], [1], [])
    drafter.shutdown()
    drafter.shutdown()
