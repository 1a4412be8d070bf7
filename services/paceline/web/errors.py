"""Errors as HTTP statuses with OpenAI's bodies."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from paceline.errors import (
    ConfigError,
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    NotFoundError,
    PacelineError,
    PoisonRequestError,
    PromptTooLongError,
    RequestCancelledError,
    ResourceExhaustedError,
    UnauthenticatedError,
)


class ClientLeftError(RequestCancelledError):
    """The client has closed its connection."""


class PreviousResponseError(InvalidRequestError):
    """A request follows a response that is not kept."""


class UnknownResponseError(NotFoundError):
    """A response is asked for that is not kept."""


_CODES: dict[type[PacelineError], tuple[int, str, str | None]] = {
    PromptTooLongError: (400, "invalid_request_error", "context_length_exceeded"),
    PreviousResponseError: (400, "invalid_request_error", "previous_response_not_found"),
    InvalidRequestError: (400, "invalid_request_error", None),
    UnauthenticatedError: (401, "authentication_error", "invalid_api_key"),
    ConfigError: (403, "permission_error", None),
    UnknownResponseError: (404, "not_found_error", None),
    NotFoundError: (404, "not_found_error", "model_not_found"),
    ResourceExhaustedError: (429, "rate_limit_error", "rate_limit_exceeded"),
    PoisonRequestError: (422, "invalid_request_error", "poison_request"),
    RequestCancelledError: (499, "request_cancelled", None),
    EngineError: (503, "server_error", "unavailable"),
    DeadlineExceededError: (504, "timeout_error", None),
}
"""Error -> status, and OpenAI's ``type`` and ``code``."""

_INTERNAL = "internal error; the server's log says more"


def to_http(
    error: BaseException, names: Collection[str] = (), spelling: Mapping[str, str] = MappingProxyType({})
) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Returns the status, body and headers of an error.

    ``names``: parameters of the request; ``param`` is the one that the message begins with. ``spelling``: our names of
    parameters -> the request's names, which replace ours at the beginning of the message. An error that is not a
    PacelineError becomes a 500 with a fixed text: log the error where it is caught.
    """
    status, kind, code = next(
        (_CODES[base] for base in type(error).__mro__ if base in _CODES), (500, "server_error", None)
    )
    message = str(error) if isinstance(error, PacelineError) else _INTERNAL
    for ours, theirs in spelling.items():
        if re.match(rf"{re.escape(ours)}(?![a-z_])", message):
            message = theirs + message[len(ours) :]
            break
    found = re.match(r"[a-z_]+", message)
    param = found.group() if found is not None and found.group() in names else None
    headers = {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, PacelineError) and error.retry_after_s > 0:
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
        headers["retry-after-ms"] = str(math.ceil(error.retry_after_s * 1000))
    return status, body_of(message, kind, param, code), headers


def body_of(
    message: str, kind: str = "invalid_request_error", param: str | None = None, code: str | None = None
) -> Any:
    """Returns OpenAI's body of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
