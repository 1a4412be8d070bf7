"""Traces over HTTP: the caller's context is taken up, tokens are the same, and nothing of the text is told."""

import socket

import pytest
from opentelemetry.trace import StatusCode
from tests.support.spans import REQUEST, SPAN_ID, TRACE_ID, TRACEPARENT, Recorded, tree, values
from tests.web.support import call, events, served

from paceline.cli.local_service import local_edge
from paceline.config import ServerConfig, TracingConfig
from paceline.metrics.tracing import Tracing
from paceline.types import MAX_SEED

BODY = {"prompt": "lazyfox", "max_tokens": 12, "seed": 3, "temperature": 1.0, "stop": ["zzzz"], "ignore_eos": True}
MALFORMED = [
    "",
    "nonsense",
    TRACEPARENT.upper(),
    TRACEPARENT[:-1],
    TRACEPARENT.replace("00-", "ff-", 1),
    f"00-{'0' * 32}-{SPAN_ID}-01",
    f"00-{TRACE_ID}-{'0' * 16}-01",
    f"00-{TRACE_ID[:-1]}-{SPAN_ID}-01",
    f"{TRACEPARENT}-more",
]


@pytest.fixture(scope="module")
def recorded():
    return Recorded(first_rounds=1)


@pytest.fixture(scope="module")
def traced(pipeline, recorded):
    with served(local_edge(pipeline, ServerConfig(), "one", tracing=recorded.tracing)) as at:
        yield at


@pytest.fixture(autouse=True)
def _forgotten(recorded):
    recorded.clear()


def test_tokens_are_those_of_a_service_without_traces(url, traced, recorded):
    body = BODY | {"return_token_ids": True}
    plain, ours = (call(f"{at}/v1/completions", body)[2]["choices"][0]["token_ids"] for at in (url, traced))
    assert plain == ours
    assert len(ours) == 12
    assert len(recorded.named(REQUEST)) == 1


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_collector_that_is_not_there_changes_nothing(monkeypatch, pipeline, url, protocol):
    """Its port is taken, and nobody listens."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        config = TracingConfig(endpoint=f"http://127.0.0.1:{nobody.getsockname()[1]}", protocol=protocol)
        tracing = Tracing.open("one", **config.arguments)
        with served(local_edge(pipeline, ServerConfig(), "one", tracing=tracing)) as at:
            bodies = [BODY | {"seed": seed, "return_token_ids": True} for seed in range(6)]
            for body in bodies:
                plain, ours = (call(f"{each}/v1/completions", body)[2]["choices"][0] for each in (url, at))
                assert plain["token_ids"] == ours["token_ids"]
        tracing.close()


def test_a_request_is_part_of_its_caller_s_trace_and_tells_its_figures(traced, recorded):
    headers = {"traceparent": TRACEPARENT, "tracestate": "theirs=1", "x-request-id": "mine"}
    status, _, answer = call(f"{traced}/v1/completions", BODY, headers)
    assert status == 200
    (own,) = recorded.named(REQUEST)
    assert (f"{own.context.trace_id:032x}", f"{own.parent.span_id:016x}") == (TRACE_ID, SPAN_ID)
    assert own.parent.is_remote
    assert own.context.trace_state.to_header() == "theirs=1"
    ((_, below),) = tree(recorded.spans).items()
    assert below == ["queue", "prefill", *["round"] * (len(below) - 2)]
    usage = answer["usage"]
    assert (
        own.attributes.items()
        >= {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.request.model": "one",
            "gen_ai.request.max_tokens": 12,
            "gen_ai.request.seed": 3,
            "gen_ai.request.temperature": 1.0,
            "gen_ai.usage.input_tokens": usage["prompt_tokens"],
            "gen_ai.usage.output_tokens": 12,
            "paceline.accepted": usage["completion_tokens_details"]["accepted_prediction_tokens"],
            "paceline.mode": "overlapped",
        }.items()
    )
    names = ("in_queue", "in_model_prefill", "to_first_token")
    queue_s, prefill_s, first_s = (own.attributes[f"gen_ai.latency.time_{name}"] for name in names)
    assert queue_s + prefill_s == pytest.approx(first_s)
    assert "gen_ai.request.top_p" not in own.attributes, "the request left it open"


def test_nothing_that_was_said_is_told(traced, recorded):
    _, _, answer = call(f"{traced}/v1/completions", BODY | {"return_token_ids": True})
    choice = answer["choices"][0]
    told = values(recorded.spans)
    said = {BODY["prompt"], *BODY["stop"], choice["text"]}
    assert not {text for text in map(str, told) if any(each in text for each in said)}
    assert len(choice["text"]) > 3, "short texts stand in many others"


def test_streams_and_choices_leave_traces_as_well(traced, recorded):
    assert events(f"{traced}/v1/completions", BODY | {"stream": True, "n": 2})[-1] == "[DONE]"
    assert len(tree(recorded.spans)) == 2


@pytest.mark.parametrize("header", MALFORMED)
def test_a_malformed_context_begins_a_trace_of_its_own(traced, recorded, header):
    status, _, _ = call(f"{traced}/v1/completions", BODY | {"max_tokens": 1}, {"traceparent": header})
    assert status == 200
    (own,) = recorded.named(REQUEST)
    assert own.parent is None
    assert f"{own.context.trace_id:032x}" != TRACE_ID


def test_a_caller_who_is_not_sampled_leaves_no_spans(traced, recorded):
    header = TRACEPARENT.removesuffix("01") + "00"
    assert call(f"{traced}/v1/completions", BODY, {"traceparent": header})[0] == 200
    assert recorded.spans == []


def test_a_seed_beyond_what_spans_can_hold_is_left_out(traced, recorded):
    assert call(f"{traced}/v1/completions", BODY | {"seed": MAX_SEED})[0] == 200
    (own,) = recorded.named(REQUEST)
    assert "gen_ai.request.seed" not in own.attributes


def test_a_request_that_fails_says_so(traced, recorded):
    status, _, _ = call(f"{traced}/v1/completions", BODY | {"logit_bias": {"99999": 1.0}})
    assert status == 400
    (own,) = recorded.named(REQUEST)
    assert own.status.status_code is StatusCode.ERROR
    assert own.attributes["error.type"] == "InvalidRequestError"
    assert own.status.description is None


MUTANTS = {
    "the caller's trace is not taken up": ("paceline.cli.local_service.trace_headers", lambda headers: ()),
    "queue and prefill have no end": ("paceline.metrics.tracing.RequestSpans.end_phase", lambda *_: None),
    "the result is not told": ("paceline.metrics.tracing.result_attributes", lambda result: {}),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_what_is_not_told_is_noticed(monkeypatch, pipeline, recorded, mutant):
    monkeypatch.setattr(*MUTANTS[mutant])
    edge, noticed = (
        local_edge(pipeline, ServerConfig(), "one", tracing=recorded.tracing),
        (AssertionError, AttributeError),
    )
    with served(edge) as at, pytest.raises(noticed):
        test_a_request_is_part_of_its_caller_s_trace_and_tells_its_figures(at, recorded)
