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
    SessionFailed,
    SpeculationWanted,
)
from paceline.router.session import MAX_DRAFT_RETRIES
from paceline.types import Cause, FinishReason, Result, Round, SamplingParams, SpeculationParams

TIMEOUT_S = 60


def serve(
    target: Callable[[Any], Sequence[Any]],
    draft: Callable[[Any], Sequence[Any]],
    to_draft: int,
    num_requests: int = 1,
    **speculation: Any,
) -> tuple[Result, list[Any], list[Any]]:
    """The result of the last of requests that follow each other, and what target and draft were sent for them: the
    draft as many messages as said."""
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
        for _ in range(num_requests):
            generation = pipeline.submit("abc", SamplingParams(max_tokens=8, seed=1), SpeculationParams(**speculation))
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


def test_a_session_beyond_those_that_the_target_wants_drafts_for_has_none() -> None:
    """The first says that none is wanted for any; the second is not opened on the draft, nor later given one."""

    def target(message: Any) -> Sequence[Any]:
        if isinstance(message, OpenSession):
            opened.append(message)
            none = SpeculationWanted(message.session_id, 0, False, 0)
            return (token(message, 0), none) if len(opened) == 1 else (token(message, 0),)
        return (token(message, 1, last=True),) if isinstance(message, DraftState) else ()

    opened: list[OpenSession] = []
    result, to_target, to_draft = serve(target, nothing, 3, num_requests=2)
    assert result.text == "de"
    assert [type(m) for m in to_draft] == [OpenSession, Commit, CloseSession]
    assert [m.available for m in to_target if isinstance(m, DraftState)] == [False, False]


def test_a_session_that_the_draft_fails_is_tried_again_and_then_left_plain() -> None:
    def target(message: Any) -> Sequence[Any]:
        if isinstance(message, DraftState) and not message.available:
            failures.append(message)
            return (token(message, 0, last=True),) if len(failures) == 1 + MAX_DRAFT_RETRIES else ()
        return ()

    def draft(message: Any) -> Sequence[Any]:
        return (SessionFailed(message.session_id, message.epoch, "no"),) if isinstance(message, OpenSession) else ()

    failures: list[DraftState] = []
    result, _, to_draft = serve(target, draft, 1 + MAX_DRAFT_RETRIES)
    assert result.text == "d"
    assert [m.epoch for m in to_draft if isinstance(m, OpenSession)] == list(range(1 + MAX_DRAFT_RETRIES))
