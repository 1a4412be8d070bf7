"""The spans of a replica's sessions, from the messages of its engine alone."""

import pytest
from opentelemetry.trace import StatusCode
from tests.support.spans import SPAN_ID, TRACE_ID, TRACEPARENT, Recorded, values

from paceline.messages import CloseSession, Commit, InFlight, Node, Nodes, OpenSession, Outcome, SessionFailed
from paceline.metrics.engine_tracing import EngineSpans
from paceline.types import Cause, FinishReason, Round, SamplingParams, SpeculationParams


class Engine:
    """The queue of a target."""

    def __init__(self):
        self.waiting = set()

    def is_waiting(self, session_id):
        return session_id in self.waiting


def opened(name="s", epoch=0, traceparent=TRACEPARENT):
    return OpenSession(name, epoch, (1, 2, 3), 3, 0, SamplingParams(), SpeculationParams(), traceparent=traceparent)


def decided(context_len, epoch=0, cause=Cause.HIT, finish=None):
    return Outcome("s", epoch, context_len, (7,), (-0.5,), Round(2, 1, cause), finish, cached_tokens=2)


def nodes(count, epoch=0):
    return Nodes("s", epoch, 3, tuple(Node(i + 1, i, 7, 0.5) for i in range(count)))


def commit(context_len, *token_ids):
    return Commit("s", 0, context_len, token_ids)


def spans_of(kind, first_rounds=8):
    """What is recorded, and the spans of a replica of this kind."""
    recorded = Recorded(first_rounds=first_rounds)
    return recorded, EngineSpans(recorded.tracing, kind, f"{kind}-0")


def names(recorded):
    return [span.name for span in recorded.spans]


def test_a_target_s_session_waits_is_prefilled_and_has_rounds():
    recorded, spans = spans_of("target", first_rounds=2)
    engine = Engine()
    engine.waiting.add("s")
    spans.received([opened()])
    for _ in range(2):
        spans.stepping(engine)
    assert names(recorded) == []
    engine.waiting.clear()  # in the second step
    spans.stepping(engine)
    assert names(recorded) == ["queue"]
    spans.sent([decided(3, cause=Cause.START)])
    for context_len in range(4, 8):
        spans.stepping(engine)
        spans.sent([InFlight("s", 0, context_len, ()), decided(context_len)])
    spans.stepping(engine)
    spans.sent([decided(8, finish=FinishReason.STOP)])
    assert names(recorded) == ["target", "queue", "prefill", "round", "round"]
    own, queue, prefill, *rounds = recorded.spans
    assert (f"{own.context.trace_id:032x}", f"{own.parent.span_id:016x}") == (TRACE_ID, SPAN_ID)
    assert {span.parent.span_id for span in (queue, prefill, *rounds)} == {own.context.span_id}
    assert dict(own.attributes) == {
        "gen_ai.request.model": "one",
        "paceline.target": "target-0",
        "paceline.context_tokens": 3,
        "paceline.rounds": 6,
    }
    assert dict(prefill.attributes) == {"paceline.cached_tokens": 2}
    assert [span.attributes["paceline.round.index"] for span in rounds] == [1, 2]
    assert rounds[0].attributes["paceline.round.accepted"] == 1
    assert prefill.end_time <= rounds[0].start_time < rounds[0].end_time <= rounds[1].start_time


def test_a_draft_s_session_is_prefilled_and_grows_from_the_tokens_that_were_decided():
    recorded, spans = spans_of("draft")
    spans.received([opened(), commit(3, 7)])  # decided before the draft has read the prompt
    spans.stepping(None)
    spans.sent([nodes(3)])
    spans.received([commit(4, 7)])
    spans.received([Commit("s", 0, 5, (), (1, 2))])  # what is in flight begins no round
    spans.sent([nodes(2), nodes(1), nodes(0)])
    spans.received([commit(5, 7)])  # a round in which it has nothing to add
    spans.received([commit(6, 7, 7)])
    spans.sent([nodes(1)])
    spans.received([CloseSession("s", 0)])
    spans.sent([nodes(1)])
    assert names(recorded) == ["draft", "prefill", "round", "round"]
    own, prefill, *rounds = recorded.spans
    assert own.attributes.items() >= {"paceline.draft": "draft-0", "paceline.rounds": 4}.items()
    told = [(span.attributes["paceline.round.index"], span.attributes["paceline.round.nodes"]) for span in rounds]
    assert told == [(2, 3), (4, 1)]
    assert prefill.end_time <= rounds[0].start_time < rounds[0].end_time <= rounds[1].start_time
    assert rounds[1].end_time <= own.end_time


def test_a_session_that_is_opened_again_has_a_span_for_each_time():
    recorded, spans = spans_of("draft")
    spans.received([opened(epoch=1)])
    spans.received([opened(epoch=1), opened(epoch=0)])  # repeated, and late
    spans.sent([nodes(1, epoch=0)])
    assert names(recorded) == []
    spans.received([opened(epoch=2), CloseSession("s", 1)])
    assert sorted(names(recorded)) == ["draft", "prefill"]
    spans.sent([nodes(1, epoch=2)])
    spans.received([CloseSession("s", 2)])
    assert sorted(names(recorded)) == ["draft", "draft", "prefill", "prefill"]


@pytest.mark.parametrize("kind", ["target", "draft"])
def test_a_session_that_fails_says_so_and_not_why(kind):
    recorded, spans = spans_of(kind)
    spans.received([opened()])
    spans.sent([SessionFailed("s", 0, "no room for secret")])
    (own,) = recorded.named(kind)
    assert own.status.status_code is StatusCode.ERROR
    assert not any("secret" in str(value) for value in values(recorded.spans))


def test_an_engine_that_ends_ends_the_spans_of_its_sessions():
    recorded, spans = spans_of("target")
    spans.received([opened("a"), opened("b")])
    spans.closed()
    spans.closed()
    assert sorted(names(recorded)) == ["queue", "queue", "target", "target"]


@pytest.mark.parametrize("traceparent", ["", "nonsense", TRACEPARENT[:-1], TRACEPARENT.removesuffix("01") + "00"])
def test_requests_without_a_trace_have_no_spans(traceparent):
    recorded, spans = spans_of("target")
    spans.received([opened(traceparent=traceparent)])
    spans.stepping(Engine())
    spans.sent([decided(3)])
    spans.received([CloseSession("s", 0)])
    spans.closed()
    assert recorded.spans == []


MUTANTS = {
    "every round has a span": ("paceline.metrics.tracing.Tracing.has_span", lambda *_: True),
    "the trace is another": ("paceline.metrics.tracing.Tracing.context", lambda *_: None),
    "the prefill has no end": ("paceline.metrics.engine_tracing.TargetSpans.end_phase", lambda *_: None),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_spans_that_are_wrong_are_noticed(monkeypatch, mutant):
    monkeypatch.setattr(*MUTANTS[mutant])
    with pytest.raises((AssertionError, ValueError)):
        test_a_target_s_session_waits_is_prefilled_and_has_rounds()
