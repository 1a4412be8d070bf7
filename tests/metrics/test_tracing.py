"""Spans on their way to a collector, over real sockets; one that is not there is nobody's trouble."""

import socket
import subprocess
import sys

import pytest
from tests.config.support import refusal
from tests.metrics.test_metrics import result
from tests.support.spans import MODEL, REQUEST, collector

from paceline import __version__
from paceline.client.tracing import trace_metadata
from paceline.config import ServiceConfig, TracingConfig
from paceline.errors import ConfigError
from paceline.metrics.tracing import Tracing, trace_headers
from paceline.preflight.tracing import check_tracing
from paceline.types import Cause, Request, Round, SamplingParams

EXPORTER = "opentelemetry.exporter.otlp.proto.{}.trace_exporter"


@pytest.fixture(autouse=True)
def _variables(monkeypatch):
    for name in ("OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "30")


def one_request(tracing):
    """Leaves the trace of one request."""
    spans = tracing.begin(Request("mine", "secret", SamplingParams(seed=2**64 - 1, stop_token_ids=(7,))))
    spans.opened("target-0")
    spans.round(Round(0, 0, Cause.START), 1)
    spans.round(Round(4, 3, Cause.HIT), 4)
    spans.finished(result())
    spans.end()


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_spans_arrive_at_a_collector(protocol):
    with collector(protocol) as (url, requests):
        config = TracingConfig(endpoint=url, protocol=protocol)
        tracing = Tracing.open(MODEL, instance_id="router-0", **config.arguments)
        one_request(tracing)
        assert tracing._provider.force_flush(60_000)
        (request,) = requests
        tracing.close()
    (resource,) = request.resource_spans
    told = {entry.key: entry.value.string_value for entry in resource.resource.attributes}
    wanted = {"service.name": "paceline", "service.version": __version__, "service.instance.id": "router-0"}
    assert told.items() >= wanted.items()
    spans = {span.name: span for scope in resource.scope_spans for span in scope.spans}
    assert set(spans) == {REQUEST, "queue", "prefill", "round"}
    assert {span.parent_span_id for name, span in spans.items() if name != REQUEST} == {spans[REQUEST].span_id}
    (accepted,) = [a.value.int_value for a in spans["round"].attributes if a.key == "paceline.round.accepted"]
    assert accepted == 3
    assert b"secret" not in request.SerializeToString()


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_collector_that_is_not_there_holds_nothing_up(monkeypatch, protocol):
    """Its port is taken and nobody listens; there are many more spans than the SDK keeps."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "64")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "16")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        tracing = Tracing.open(MODEL, **TracingConfig(endpoint=url, protocol=protocol).arguments)
        for _ in range(100):
            one_request(tracing)
        tracing.close()


def test_names_of_the_service_are_those_that_opentelemetry_is_given(monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
    tracing = Tracing.open(MODEL, **TracingConfig(endpoint="http://localhost:1").arguments)
    assert tracing._provider.resource.attributes["service.name"] == "ours"
    tracing.close()


def test_a_share_of_requests_is_traced():
    for ratio in (0, 1):
        tracing = Tracing.open(MODEL, **TracingConfig(sample_ratio=ratio).arguments)
        assert (tracing.begin(Request("a", "b")) is not None) == bool(ratio)
        tracing.close()


def test_only_the_trace_context_is_taken_from_headers():
    headers = [("traceparent", "a"), ("authorization", "Bearer secret"), ("tracestate", "b"), ("tracestate", b"c")]
    assert trace_headers(headers) == (("traceparent", "a"), ("tracestate", "b"))


def test_a_caller_without_a_span_hands_none_on():
    assert trace_metadata() == ()


def test_nothing_of_opentelemetry_is_loaded_before_it_is_wanted():
    code = (
        "import sys, paceline.metrics.engine_tracing; from paceline.client.tracing import trace_metadata\n"
        "assert trace_metadata() == ()\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"endpoint": "localhost:4317"}, "tracing.endpoint is 'localhost:4317': it must be a URL, such as http://"),
        ({"endpoint": "http://[::1"}, "tracing.endpoint is 'http://[::1': it must be a URL, such as http://"),
        ({"protocol": "http/json"}, "tracing.protocol is 'http/json': it must be 'grpc' or 'http/protobuf'"),
        ({"sample_ratio": 1.5}, "tracing.sample_ratio is 1.5: it must be at least 0 and at most 1"),
        ({"rounds": 1}, "tracing.rounds is 1, but there is no such key"),
    ],
)
def test_settings_that_cannot_be(settings, sentence):
    assert sentence in refusal({"tracing": settings})


def test_a_protocol_of_the_environment_that_cannot_be(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    sentence = "OTEL_EXPORTER_OTLP_PROTOCOL is 'http/json': 'grpc' and 'http/protobuf' are allowed"
    with pytest.raises(ConfigError, match=sentence):
        _ = TracingConfig().arguments
    (found,) = check_tracing(ServiceConfig(tracing=TracingConfig()))
    assert found.message == sentence
    assert TracingConfig(protocol="grpc").arguments["protocol"] == "grpc"


@pytest.mark.parametrize(("protocol", "name"), [("grpc", "grpc"), ("http/protobuf", "http")])
def test_a_missing_package_is_named_with_what_installs_it(monkeypatch, protocol, name):
    config = TracingConfig(protocol=protocol)
    assert check_tracing(ServiceConfig(tracing=config)) == check_tracing(ServiceConfig()) == []
    monkeypatch.setitem(sys.modules, EXPORTER.format(name), None)
    with pytest.raises(ConfigError, match=r"tracing is set, which needs .*: pip install 'paceline\[tracing\]' adds it"):
        Tracing.open(MODEL, **config.arguments)
    monkeypatch.setattr("paceline.preflight.tracing.is_installed", lambda module: "otlp" not in module)
    (found,) = check_tracing(ServiceConfig(tracing=config))
    assert f"needs opentelemetry.exporter.otlp.proto.{name}: pip install 'paceline[tracing]'" in found.message
