"""Traces, before anything starts: what sends the spans is installed."""

from __future__ import annotations

import importlib.util

from paceline.config import ServiceConfig
from paceline.errors import ConfigError
from paceline.preflight.findings import Finding, Severity

_EXPORTERS = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http",
}


def check_tracing(config: ServiceConfig) -> list[Finding]:
    """An error if traces are asked for and cannot be sent."""
    if config.tracing is None:
        return []
    try:
        module = _EXPORTERS[config.tracing.arguments["protocol"]]
    except ConfigError as error:
        return [Finding(Severity.ERROR, "tracing.protocol", str(error))]
    if all(is_installed(name) for name in ("opentelemetry.sdk.trace", module)):
        return []
    return [Finding.error("tracing", f"is set, which needs {module}: pip install 'paceline[tracing]' adds it")]


def is_installed(module: str) -> bool:
    """True if a module, or a package's module, can be imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package that holds it
        return False
