"""The caller's trace, handed on to the service (W3C Trace Context)."""

from __future__ import annotations

import sys


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """``traceparent`` and ``tracestate`` of the caller's current span, for the metadata of a call; () if it has none.

    OpenTelemetry is never loaded for it: who has a span has loaded it.
    """
    if "opentelemetry.trace" not in sys.modules:
        return ()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return tuple(carrier.items())
