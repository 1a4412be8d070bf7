"""Converts errors to gRPC statuses and back: the only place that knows both.

A status of ours carries two trailers: ``paceline-error``, the name of the error's class, and where a later try can
succeed ``grpc-retry-pushback-ms``. A status without the first comes from a layer between client and service: gRPC
itself, a proxy, Ray Serve.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import cast

import grpc

from paceline.errors import (
    ConfigError,
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    NotFoundError,
    PacelineError,
    PoisonRequestError,
    RequestCancelledError,
    ResourceExhaustedError,
    RouterStoppedError,
    UnauthenticatedError,
    by_name,
)

ERROR_TRAILER = "paceline-error"
RETRY_TRAILER = "grpc-retry-pushback-ms"
"""When to try again, in whole milliseconds; gRPC clients that retry this code honor it themselves."""

MAX_DETAILS_BYTES = 4096
"""Longest error text as it is sent (percent-encoded): peers refuse a status whose header is longer than 8 KiB."""

_TOO_LONG = "message larger than max"
"""Part of the text with which gRPC itself refuses a message that is longer than its receiver takes."""

_INTERNAL_TEXT = "internal error; the server's log says more"

_CODES: dict[type[PacelineError], grpc.StatusCode] = {
    InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
    NotFoundError: grpc.StatusCode.NOT_FOUND,
    ResourceExhaustedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    DeadlineExceededError: grpc.StatusCode.DEADLINE_EXCEEDED,
    RequestCancelledError: grpc.StatusCode.CANCELLED,
    PoisonRequestError: grpc.StatusCode.INTERNAL,
    EngineError: grpc.StatusCode.UNAVAILABLE,
}

_LOST = r"Stream removed|RST_STREAM|http2 header with status: 5\d\d"
"""Texts of gRPC's own about a stream that its connection, or a proxy, gave up."""

_NO_ROUTE = "RayServeAPIService/ListApplications"
"""Part of the text with which Serve's proxy answers, as NOT_FOUND, while it has not been told its routes yet."""

_ERRORS: dict[grpc.StatusCode, type[PacelineError]] = {
    **{code: kind for kind, code in _CODES.items() if kind is not PoisonRequestError},  # which proxies do not mean
    # codes that Paceline does not send, but a proxy, Ray Serve or another server may
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequestError,
    grpc.StatusCode.ALREADY_EXISTS: InvalidRequestError,
    grpc.StatusCode.PERMISSION_DENIED: InvalidRequestError,
    grpc.StatusCode.UNIMPLEMENTED: ConfigError,
}
"""Everything else (INTERNAL, UNKNOWN, ABORTED, DATA_LOSS) is an EngineError."""


def to_status(error: BaseException) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """Returns the status code, details and trailing metadata of an error.

    Any other than a PacelineError becomes INTERNAL with a text that shows nothing of it: log it where it is caught.
    """
    for kind in type(error).__mro__:
        code = _CODES.get(kind)
        if code is not None:
            break
    else:
        return grpc.StatusCode.INTERNAL, _INTERNAL_TEXT, ()
    trailers = [(ERROR_TRAILER, type(error).__name__)]
    if isinstance(error, PacelineError) and error.retry_after_s > 0:
        trailers.append((RETRY_TRAILER, str(math.ceil(error.retry_after_s * 1000))))
    return code, _shortened(str(error)), tuple(trailers)


def from_rpc_error(error: grpc.RpcError) -> PacelineError:
    """Returns the error of a failed call: the one that ``to_status`` was given, if the server is ours."""
    code, message, trailers = error.code(), error.details() or "", _trailers(error)
    kind = by_name(trailers.get(ERROR_TRAILER, ""), _ERRORS.get(code, EngineError))
    if not is_ours(error) and _TOO_LONG in message:  # gRPC's own word for it is RESOURCE_EXHAUSTED
        return InvalidRequestError(f"the request is longer than the service accepts: {message}")
    message = message or f"the service answered {code.name} without a reason"
    failure = kind(message)
    if is_ours(error):
        failure.retry_after_s = _retry_after_s(trailers.get(RETRY_TRAILER))
    return failure


def is_lost(error: grpc.RpcError) -> bool:
    """Returns True if the server of the call went away, so that another server may continue it.

    A connection that ends takes its streams with it as UNAVAILABLE. A proxy that loses its server resets each stream
    (CANCELLED or INTERNAL) or answers with an HTTP status (UNKNOWN). A restarted proxy knows no server for a while
    (NOT_FOUND). A call that was cancelled here looks the same.
    """
    if is_ours(error):
        return isinstance(from_rpc_error(error), RouterStoppedError)
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return True
    details = error.details() or ""
    if error.code() is grpc.StatusCode.NOT_FOUND:
        return _NO_ROUTE in details
    unnamed = error.code() in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
    return unnamed and re.search(_LOST, details) is not None


def is_ours(error: grpc.RpcError) -> bool:
    """Returns True if a Paceline server sent this status, rather than gRPC or a proxy."""
    return ERROR_TRAILER in _trailers(error)


def pushback_s(error: grpc.RpcError) -> float | None:
    """Returns the server's hint when to try again, in seconds: infinity for never; None if it gives none."""
    try:
        value = int(_trailers(error)[RETRY_TRAILER])
    except (KeyError, ValueError):
        return None
    return value / 1000 if value >= 0 else math.inf


def _trailers(error: grpc.RpcError) -> dict[str, str]:
    pairs = cast(Iterable[tuple[str, str | bytes]], error.trailing_metadata() or ())  # the stubs know no pairs
    return {key: value for key, value in pairs if isinstance(value, str)}


def _retry_after_s(value: str | None) -> float:
    """Returns the hint in seconds; 0.0 if it is absent, negative (gRPC's "do not retry") or not a number."""
    try:
        return max(int(value or "0"), 0) / 1000
    except ValueError:
        return 0.0


def _shortened(text: str) -> str:
    """Returns text that fits a header; an unpaired surrogate, which no header can carry, becomes a question mark."""
    text = text.encode("utf-8", "replace").decode()
    if 3 * len(text.encode()) <= MAX_DETAILS_BYTES:  # the quick case: even if every byte were escaped
        return text
    size = 0
    kept: list[str] = []
    for char in text:
        size += 1 if " " <= char <= "~" and char != "%" else 3 * len(char.encode())
        if size > MAX_DETAILS_BYTES - 3:
            return "".join(kept) + "..."
        kept.append(char)
    return text
