"""Traces of requests for OpenTelemetry: where spans go, and how many there are."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from paceline.config.base import Strict
from paceline.config.environment import otlp_protocol
from paceline.errors.refusals import Fault, is_http_url


class TracingConfig(Strict):
    """Traces of requests, which go to a collector by OTLP. Needs the extra ``tracing``."""

    endpoint: str | None = None
    """URL of the collector, such as ``http://localhost:4317``. None: as OTEL_EXPORTER_OTLP_ENDPOINT says, which is this
    machine by default."""
    protocol: Literal["grpc", "http/protobuf"] | None = None
    """None: as OTEL_EXPORTER_OTLP_PROTOCOL says, which is ``grpc`` by default."""
    sample_ratio: float | None = Field(default=None, ge=0, le=1)
    """Share of the requests that are traced where the caller has not decided. None: as OTEL_TRACES_SAMPLER says, which
    is all by default."""
    first_rounds: int = Field(default=8, ge=0)
    """The first rounds after the prefill have a span each: of a request, and of its session on each replica."""
    round_every: int = Field(default=0, ge=0)
    """Every n-th later round has a span. 0: none."""

    @model_validator(mode="after")
    def _names_a_collector(self) -> Self:
        if self.endpoint is not None and not is_http_url(self.endpoint):
            raise Fault("endpoint", f"is {self.endpoint!r}: it must be a URL, such as http://localhost:4317")
        return self

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of ``metrics.tracing.Tracing.open``. Raises ConfigError for a protocol that is not served."""
        return self.model_dump() | {"protocol": self.protocol or otlp_protocol()}
