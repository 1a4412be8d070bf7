"""Sessions to test, and the outcomes that their target sends."""

from collections import deque

from paceline.messages import Outcome
from paceline.router.session import Session
from paceline.types import Cause, FinishReason, Mode, Round, SamplingParams, SpeculationParams

PROMPT = (1, 2, 3)


def decode(token_ids):
    """Tokens are bytes."""
    return bytes(token_ids).decode("utf-8", "replace")


def outcome(session, tokens, accepted=0, finish=None, epoch=None, cause=Cause.HIT, at=None, maker="draft"):
    """At the end of the session's history unless ``at`` says otherwise. ``maker``: draft, lookup or head."""
    made = {} if maker == "draft" else {f"{maker}_drafted": accepted, f"{maker}_accepted": accepted}
    return Outcome(
        session.session_id,
        session.target_epoch if epoch is None else epoch,
        len(session.history) if at is None else at,
        tuple(tokens),
        tuple(-0.5 for _ in tokens),
        Round(accepted, accepted, cause, **made),
        finish,
    )


def make(mode=Mode.OVERLAPPED, stop=(), clock=lambda: 0.0, **sampling):
    return Session(
        "s",
        PROMPT,
        SamplingParams(**sampling),
        SpeculationParams(mode=mode),
        decode=decode,
        stop=stop,
        eos_token_ids=(0,),
        clock=clock,
    )


def feed(session, text, sizes=None, finish=FinishReason.LENGTH, maker="draft"):
    """Delivers ``text`` as outcomes of the given sizes, all but their last tokens drafted by ``maker``; the last one
    finishes. Returns the chunks."""
    data = deque(text.encode())
    chunks = []
    sizes = deque(sizes or [1] * len(data))
    while data and not session.finished:
        size = max(1, sizes.popleft()) if sizes else 1
        tokens = [data.popleft() for _ in range(min(size, len(data)))]
        session.on_target(outcome(session, tokens, len(tokens) - 1, None if data else finish, maker=maker))
        chunks += session.digest().chunks
    return chunks
