"""Traces of requests for OpenTelemetry: a span for each request, and child spans for its parts.

    request ─┬─ queue        from its arrival until it is opened on a target
             ├─ prefill      until its first tokens
             ├─ round ...    one target step each, for the configured rounds
             └─ migration    from the loss of its target to the first tokens of another

Spans of the replicas that serve it are its children, too (``engine_tracing.py``).

Without traces a service's ``Tracing`` is None, and so are the ``RequestSpans`` of a request that is not sampled. Then
OpenTelemetry is neither imported nor called. A thread of the SDK sends the spans, and drops them if the collector is
too slow. No prompt, text, token, stop string or error message becomes part of a span.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Self

from paceline import __version__
from paceline.errors import ConfigError
from paceline.types import Cause, FinishReason, Request, Result, Round

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

TRACE_HEADERS = ("traceparent", "tracestate")
"""W3C Trace Context, in HTTP headers and in the metadata of gRPC."""

_CLOSE_S = 2.0
_MAX_INT = 2**63 - 1
"""OTLP's integers have 64 bits with a sign."""
_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed")
"""Sampling parameters that have a name in the conventions and are numbers."""


def trace_headers(headers: Iterable[tuple[str, str | bytes]]) -> tuple[tuple[str, str], ...]:
    """The trace context among the headers, or the metadata, of a call; headers of other meanings are left out."""
    return tuple((name, value) for name, value in headers if name in TRACE_HEADERS and isinstance(value, str))


class Tracing:
    """Makes the spans of requests, and carries their context. One for each process that makes spans."""

    def __init__(
        self,
        provider: TracerProvider,
        model_id: str,
        *,
        first_rounds: int = 0,
        round_every: int = 0,
        exporter: SpanExporter | None = None,
    ) -> None:
        """``first_rounds``: rounds after the prefill that get a span; ``round_every`` = n: later every n-th round; 0:
        none. ``exporter`` is shut down with the provider.
        """
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider, self.build_exporter, self.model_id = provider, exporter, model_id
        self._first_rounds, self._round_every = first_rounds, round_every
        self._propagator = TraceContextTextMapPropagator()
        self.tracer = provider.get_tracer("paceline", __version__)

    @classmethod
    def open(
        cls,
        model_id: str,
        *,
        endpoint: str | None,
        protocol: str,
        sample_ratio: float | None,
        first_rounds: int,
        round_every: int,
        instance_id: str = "",
    ) -> Self:
        """Opens a tracer whose spans go to a collector by OTLP; nothing is sent yet.

        OpenTelemetry's variables set the values that the arguments leave open (OTEL_EXPORTER_OTLP_*, OTEL_BSP_*,
        OTEL_TRACES_SAMPLER, OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES).

        Args:
            model_id: name of the model, for all spans.
            endpoint: URL of the collector. None: OpenTelemetry's variables, then port 4317 or 4318 of this machine.
            protocol: ``grpc`` or ``http/protobuf``.
            sample_ratio: share of the requests that are traced where the caller has not decided. None: OpenTelemetry's
                variables, then all.
            instance_id: name of this process within the service.

        Raises:
            ConfigError: the packages of the extra ``tracing`` are missing.
        """
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

            exporter = build_exporter(endpoint, protocol)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"tracing is set, which needs {error.name}: pip install 'paceline[tracing]' adds it"
            ) from None
        told = {"service.version": __version__} | ({"service.instance.id": instance_id} if instance_id else {})
        resource = Resource.create(told)
        if str(resource.attributes.get("service.name", "unknown_service")).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "paceline"}))
        sampler = None if sample_ratio is None else ParentBasedTraceIdRatio(sample_ratio)
        provider = TracerProvider(sampler, resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider, model_id, first_rounds=first_rounds, round_every=round_every, exporter=exporter)

    def begin(self, request: Request) -> RequestSpans | None:
        """The spans of a request that arrives now, below the caller's if it has sent its context. None: not sampled.

        A context that is malformed counts as none, as W3C's recommendation demands.
        """
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        carrier: dict[str, list[str]] = {}
        for name, value in request.trace_headers:
            carrier.setdefault(name, []).append(value)
        parent = self._propagator.extract(carrier, Context())
        clock = Clock()
        span = self.tracer.start_span(
            f"text_completion {self.model_id}",
            parent,
            SpanKind.SERVER,
            _request_attributes(request, self.model_id),
            start_time=clock.now_ns(),
        )
        return RequestSpans(self, span, clock) if span.is_recording() else None

    def context(self, traceparent: str) -> Context | None:
        """The context of a span of another process, by its ``traceparent``; None: it is malformed."""
        from opentelemetry.context import Context
        from opentelemetry.trace import get_current_span

        context = self._propagator.extract({"traceparent": traceparent}, Context())
        return context if get_current_span(context).get_span_context().is_valid else None

    def traceparent(self, context: Context) -> str:
        """The ``traceparent`` by which another process continues below the span of a context."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, context)
        return carrier["traceparent"]

    def has_span(self, index: int) -> bool:
        """True if this round of a request gets a span. The prefill is round 0."""
        return index <= self._first_rounds or (self._round_every > 0 and index % self._round_every == 0)

    def close(self) -> None:
        """Sends the remaining spans, within a short time: a collector that does not answer delays nothing."""
        thread = threading.Thread(target=self._provider.shutdown, name="paceline-spans", daemon=True)
        thread.start()
        thread.join(_CLOSE_S)
        if thread.is_alive() and self.build_exporter is not None:
            self.build_exporter.shutdown()  # it gives up what it is trying to send


class Spans:
    """A span, and below it the span of its current phase."""

    def __init__(self, tracing: Tracing, span: Span, clock: Clock, first_phase: str, begun_ns: int) -> None:
        """``begun_ns``: time at which the first phase began."""
        from opentelemetry.trace import set_span_in_context

        self._tracing, self._span, self._clock = tracing, span, clock
        self._context = set_span_in_context(span)
        self._last_ns = begun_ns
        self._num_rounds = 0
        self._phase: Span | None = self._child(first_phase, begun_ns)

    def _child(self, name: str, start_ns: int) -> Span:
        return self._tracing.tracer.start_span(name, self._context, start_time=start_ns)

    def end_phase(self, now_ns: int) -> None:
        """Ends the span of the phase in progress, if there is one, at ``now_ns``."""
        if self._phase is not None:
            self._phase.end(now_ns)
            self._phase = None


class RequestSpans(Spans):
    """The spans of one request that is sampled. Its owner calls one method per event, one thread at a time."""

    def __init__(self, tracing: Tracing, span: Span, clock: Clock) -> None:
        super().__init__(tracing, span, clock, "queue", clock.now_ns())
        self.traceparent = tracing.traceparent(self._context)
        """Context of the request's span, for its child spans."""
        self._lost_ns: int | None = None
        self._moving: Span | None = None
        self._told = self._ended = False  # how it ended, and that it has

    def opened(self, target: str = "") -> None:
        """Records that the request leaves the queue. ``target``: the replica on which it is opened, if there are
        several.
        """
        now = self._clock.now_ns()
        self.end_phase(now)
        self._phase = self._child("prefill", now)
        if target:
            self._phase.set_attribute("paceline.target", target)

    def round(self, stats: Round, num_tokens: int) -> None:
        """A target step has ended with ``num_tokens`` for it."""
        now, index = self._clock.now_ns(), self._num_rounds
        self._num_rounds += 1
        self._end_move(now)
        if index == 0:
            self.end_phase(now)
        elif self._tracing.has_span(index):
            span = self._child("round", self._last_ns)
            span.set_attributes(round_attributes(index, stats, num_tokens))
            span.end(now)
        self._last_ns = now

    def lost(self) -> None:
        """Records that the request's target failed; it waits for another."""
        if self._lost_ns is None:
            self._lost_ns = self._clock.now_ns()

    def moved(self, reason: str, target: str) -> None:
        """Records that the request is opened on another target. ``reason``: ``failover``, ``drain`` or
        ``session_failed``.
        """
        now = self._clock.now_ns()
        self._end_move(now)
        self._moving = self._child("migration", now if self._lost_ns is None else self._lost_ns)
        self._lost_ns = None
        self._moving.set_attributes({"paceline.migration.reason": reason, "paceline.target": target})

    def finished(self, result: Result) -> None:
        """Records the result of the request."""
        self._told = True
        self._span.set_attributes(result_attributes(result))

    def failed(self, error: BaseException) -> None:
        """Records that the request has failed: the error's class, but not its message, which may quote the request."""
        from opentelemetry.trace import StatusCode

        self._told = True
        self._span.set_status(StatusCode.ERROR)
        self._span.set_attribute("error.type", type(error).__name__)

    def end(self) -> None:
        """Ends the span: after a result or an error, or without either if the client has left. Idempotent."""
        if self._ended:
            return
        self._ended = True
        now = self._clock.now_ns()
        if self._lost_ns is not None:
            self._child("migration", self._lost_ns).end(now)
        self._end_move(now)
        self.end_phase(now)
        if not self._told:
            self._span.set_attribute("gen_ai.response.finish_reasons", [FinishReason.ABORT.value])
        self._span.end(now)

    def _end_move(self, now_ns: int) -> None:
        if self._moving is not None:
            self._moving.end(now_ns)
            self._moving = None


class Clock:
    """The time of day in nanoseconds since 1970, which never goes back within one request."""

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.perf_counter_ns()

    def now_ns(self) -> int:
        """The time now."""
        return self.at(time.perf_counter_ns())

    def at(self, counter_ns: int) -> int:
        """The time at which ``time.perf_counter_ns`` was this."""
        return self._offset_ns + counter_ns


def build_exporter(endpoint: str | None, protocol: str) -> SpanExporter:
    """Returns the exporter of a protocol, ``grpc`` or HTTP. Raises ModuleNotFoundError if its package is missing."""
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=endpoint)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(endpoint=endpoint and f"{endpoint.rstrip('/').removesuffix('/v1/traces')}/v1/traces")


_Attribute = str | bool | int | float | list[str]


def round_attributes(index: int, stats: Round, num_tokens: int) -> dict[str, str | bool | int]:
    """The figures of a round that decided ``num_tokens`` tokens."""
    return {
        "paceline.round.index": index,
        "paceline.round.tokens": num_tokens,
        "paceline.round.drafted": stats.num_drafted,
        "paceline.round.accepted": stats.num_accepted,
        "paceline.round.hit": stats.cause is Cause.HIT,
        "paceline.round.cause": stats.cause.value,
    }


def _request_attributes(request: Request, model_id: str) -> dict[str, _Attribute]:
    """Span attributes of a request, by the semantic conventions for generative AI; parameters left out have none."""
    sampling, speculation = request.sampling, request.speculation
    found: dict[str, _Attribute] = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "paceline",
        "gen_ai.request.model": model_id,
        "gen_ai.response.model": model_id,
        "gen_ai.response.id": request.request_id,
        "gen_ai.request.id": request.request_id,
        "paceline.mode": speculation.mode.value,
        "paceline.acceptance": speculation.acceptance.value,
        "paceline.max_draft_tokens": speculation.max_draft_tokens,
    }
    for name in _SAMPLING:
        value = getattr(sampling, name) if name in sampling.model_fields_set else None
        if value is not None and value <= _MAX_INT:
            found[f"gen_ai.request.{name}"] = value
    if request.generated_token_ids:
        found["paceline.resumed_tokens"] = len(request.generated_token_ids)
    return found


def result_attributes(result: Result) -> dict[str, _Attribute]:
    """The figures of a result: by the conventions, by vLLM's names for times and tokens, and our own."""
    usage, timing, stats = result.usage, result.timing, result.speculation
    first_s = timing.queue_s + timing.prefill_s
    return {
        "gen_ai.response.finish_reasons": [result.finish_reason.value],
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.usage.prompt_tokens": usage.prompt_tokens,
        "gen_ai.usage.completion_tokens": usage.completion_tokens,
        "gen_ai.latency.time_in_queue": timing.queue_s,
        "gen_ai.latency.time_to_first_token": first_s,
        "gen_ai.latency.e2e": first_s + timing.decode_s,
        "gen_ai.latency.time_in_model_prefill": timing.prefill_s,
        "gen_ai.latency.time_in_model_decode": timing.decode_s,
        "gen_ai.latency.time_in_model_inference": timing.prefill_s + timing.decode_s,
        "paceline.rounds": stats.rounds,
        "paceline.drafted": stats.drafted,
        "paceline.accepted": stats.accepted,
        "paceline.hits": stats.hits,
        "paceline.misses": stats.misses,
    }
