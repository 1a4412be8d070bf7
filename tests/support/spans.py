"""Traces that stay in memory, what is asked of them, and a collector for those that are sent."""

import contextlib
import threading
from collections.abc import Iterator
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from paceline.metrics.tracing import Tracing

MODEL = "one"
REQUEST = f"text_completion {MODEL}"
TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
"""The example of W3C's recommendation: a caller that is sampled."""


class Recorded:
    """A Tracing, and the spans that it has made."""

    def __init__(self, **rounds: int) -> None:
        self._exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.provider = provider
        self.tracing = Tracing(provider, MODEL, **rounds)

    @property
    def spans(self) -> list[ReadableSpan]:
        """Those that have ended, the earliest begin first."""
        return sorted(self._exporter.get_finished_spans(), key=lambda span: (span.start_time, -span.end_time))

    def named(self, name: str) -> list[ReadableSpan]:
        """Those of a name."""
        return [span for span in self.spans if span.name == name]

    def clear(self) -> None:
        """Forgets them."""
        self._exporter.clear()


def tree(spans: list[ReadableSpan]) -> dict[str, list[str]]:
    """The names of requests by their ids, each with those of the spans below it in the order of their begins."""
    requests = {span.context.span_id: span for span in spans if span.name == REQUEST}
    found: dict[str, list[str]] = {span.attributes["gen_ai.response.id"]: [] for span in requests.values()}
    for span in spans:
        if span.context.span_id not in requests:
            above = requests[span.parent.span_id]
            assert span.context.trace_id == above.context.trace_id
            assert above.start_time <= span.start_time <= span.end_time <= above.end_time
            found[above.attributes["gen_ai.response.id"]].append(span.name)
    return found


def values(spans: list[ReadableSpan]) -> set[Any]:
    """Everything that spans tell, but for the names of attributes."""
    found: set[Any] = set()
    for span in spans:
        found |= {span.name, span.status.description, *(event.name for event in span.events)}
        for value in (span.attributes or {}).values():
            found |= set(value) if isinstance(value, tuple) else {value}
    return found


class _Collector(otlp_grpc.TraceServiceServicer):
    def __init__(self, requests):
        self._requests = requests

    def Export(self, request, context):
        self._requests.append(request)
        return otlp.ExportTraceServiceResponse()


@contextlib.contextmanager
def collector(protocol: str = "grpc") -> Iterator[tuple[str, list[otlp.ExportTraceServiceRequest]]]:
    """A collector's URL, and the messages that it is sent."""
    requests = []
    if protocol == "grpc":
        server = grpc.server(futures.ThreadPoolExecutor(1))
        otlp_grpc.add_TraceServiceServicer_to_server(_Collector(requests), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"http://127.0.0.1:{port}", requests
        finally:
            server.stop(None).wait()
        return

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            requests.append(otlp.ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", requests
        server.shutdown()
        thread.join()
