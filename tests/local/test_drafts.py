"""When the one-process pipeline gives a session a draft, takes it away and tries again: scripted engines in threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from tests.support.fakes import Scripted
from tests.support.letters import Letters

from paceline.checkpoint.files import Checkpoint
from paceline.config import LocalConfig, TargetModel
from paceline.local import LocalPipeline
from paceline.messages import (
    CloseSession,
    Commit,
    DraftState,
    OpenSession,
    Outcome,
    SpeculationWanted,
)
from paceline.types import Cause, FinishReason, Result, Round, SamplingParams

TIMEOUT_S = 60


def serve(
    target: Callable[[Any], Sequence[Any]],
    draft: Callable[[Any], Sequence[Any]],
    to_draft: int,
) -> tuple[Result, list[Any], list[Any]]:
    """The result of a request, and what target and draft were sent for it: the draft as many messages as said."""
    engines: dict[str, Scripted] = {}

    def factory(name: str, answer: Callable[[Any], Sequence[Any]]) -> Any:
        def build(emit: Any) -> Any:
            engines[name] = Scripted(emit, answer)
            return engines[name]

        return build

    pipeline = LocalPipeline(
        LocalConfig(target=TargetModel(path="scripted"), worker="thread", pin_cores=False),
        target_factory=factory("target", target),
        draft_factory=factory("draft", draft),
        tokenizer=Letters(),  # type: ignore[arg-type]
        checkpoint=Checkpoint("scripted", 64, (), 128),
    )
    with pipeline:
        generation = pipeline.submit("abc", SamplingParams(max_tokens=8, seed=1))
        result = generation.result
        deadline = time.monotonic() + TIMEOUT_S
        while len(engines["draft"].received) < to_draft and time.monotonic() < deadline:
            time.sleep(0.001)
    assert len(engines["draft"].received) == to_draft
    return result, engines["target"].received, engines["draft"].received


def token(message: Any, at: int, *, last: bool = False) -> Outcome:
    """The next letter."""
    finish_reason = FinishReason.LENGTH if last else None
    return Outcome(
        message.session_id, 0, 3 + at, (100 + at,), (0.0,), Round(0, 0, Cause.DISABLED), finish_reason
    )  # fmt: skip


def nothing(_: Any) -> Sequence[Any]:
    return ()


def test_a_target_that_wants_no_drafts_for_a_while() -> None:
    """The session leaves the draft, goes on without, and comes back with its whole history."""

    def target(message: Any) -> Sequence[Any]:
        if isinstance(message, OpenSession):
            return token(message, 0), SpeculationWanted(message.session_id, 0, False), token(message, 1)
        if isinstance(message, DraftState) and not message.available:
            return (SpeculationWanted(message.session_id, 0, True),)
        if isinstance(message, DraftState):
            return (token(message, 2, last=True),)
        return ()

    result, to_target, to_draft = serve(target, nothing, 5)
    assert result.text == "def"
    kinds = [(type(m), m.epoch) for m in to_draft]
    assert kinds == [(OpenSession, 0), (Commit, 0), (CloseSession, 0), (OpenSession, 1), (CloseSession, 1)]
    assert to_draft[3].token_ids == tuple(b"abcde")
    assert [m.available for m in to_target if isinstance(m, DraftState)] == [False, True]
