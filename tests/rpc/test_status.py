"""Errors to gRPC statuses and back."""

import grpc
import pytest

from paceline import errors
from paceline.errors import (
    ConfigError,
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    NotFoundError,
    PacelineError,
    PoisonRequestError,
    PromptTooLongError,
    RanksLostError,
    RequestCancelledError,
    RequestInProgressError,
    ResourceExhaustedError,
    RouterStoppedError,
    TokenizerMismatchError,
    UnauthenticatedError,
)
from paceline.rpc.status import ERROR_TRAILER, MAX_DETAILS_BYTES, RETRY_TRAILER, from_rpc_error, is_ours, to_status

Code = grpc.StatusCode


class Failed(grpc.RpcError):
    """A status as the client gets it."""

    def __init__(self, code, details="", trailers=()):
        super().__init__()
        self._status = code, details, trailers

    def code(self):
        return self._status[0]

    def details(self):
        return self._status[1]

    def trailing_metadata(self):
        return self._status[2]


def round_trip(error):
    return from_rpc_error(Failed(*to_status(error)))


OURS = [
    (InvalidRequestError, Code.INVALID_ARGUMENT),
    (PromptTooLongError, Code.INVALID_ARGUMENT),
    (RequestInProgressError, Code.INVALID_ARGUMENT),
    (UnauthenticatedError, Code.UNAUTHENTICATED),
    (ConfigError, Code.FAILED_PRECONDITION),
    (TokenizerMismatchError, Code.FAILED_PRECONDITION),
    (NotFoundError, Code.NOT_FOUND),
    (ResourceExhaustedError, Code.RESOURCE_EXHAUSTED),
    (DeadlineExceededError, Code.DEADLINE_EXCEEDED),
    (RequestCancelledError, Code.CANCELLED),
    (EngineError, Code.UNAVAILABLE),
    (PoisonRequestError, Code.INTERNAL),
    (RanksLostError, Code.UNAVAILABLE),
    (RouterStoppedError, Code.UNAVAILABLE),
]


def test_the_table_of_errors_is_complete():
    kinds = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, PacelineError)}
    assert kinds - {PacelineError} == {kind for kind, _ in OURS}


@pytest.mark.parametrize(("kind", "code"), OURS)
def test_every_error_has_a_code_and_comes_back_as_itself(kind, code):
    status, details, trailers = to_status(kind("top_p is 2: at most 1 is allowed"))
    assert (status, details) == (code, "top_p is 2: at most 1 is allowed")
    assert (ERROR_TRAILER, kind.__name__) in trailers
    back = from_rpc_error(Failed(status, details, trailers))
    assert type(back) is kind
    assert str(back) == "top_p is 2: at most 1 is allowed"
    assert is_ours(Failed(status, details, trailers))


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (Code.INVALID_ARGUMENT, InvalidRequestError),
        (Code.OUT_OF_RANGE, InvalidRequestError),
        (Code.ALREADY_EXISTS, InvalidRequestError),
        (Code.UNAUTHENTICATED, UnauthenticatedError),
        (Code.PERMISSION_DENIED, InvalidRequestError),
        (Code.FAILED_PRECONDITION, ConfigError),
        (Code.UNIMPLEMENTED, ConfigError),
        (Code.NOT_FOUND, NotFoundError),
        (Code.RESOURCE_EXHAUSTED, ResourceExhaustedError),
        (Code.DEADLINE_EXCEEDED, DeadlineExceededError),
        (Code.CANCELLED, RequestCancelledError),
        (Code.UNAVAILABLE, EngineError),
        (Code.INTERNAL, EngineError),
        (Code.UNKNOWN, EngineError),
        (Code.ABORTED, EngineError),
        (Code.DATA_LOSS, EngineError),
    ],
)
def test_codes_of_other_servers(code, kind):
    back = from_rpc_error(Failed(code, "as it is"))
    assert type(back) is kind
    assert str(back) == "as it is"
    assert not is_ours(Failed(code, "as it is"))
    assert str(from_rpc_error(Failed(code))) == f"the service answered {code.name} without a reason"


def test_every_code_is_covered():
    for code in set(Code) - {Code.OK}:
        assert isinstance(from_rpc_error(Failed(code, "x", None)), PacelineError)


@pytest.mark.parametrize(
    "error", [ValueError("/home/me/secret"), KeyError("x"), PacelineError("base"), SystemExit(3), KeyboardInterrupt()]
)
def test_anything_else_is_internal_and_shows_nothing(error):
    assert to_status(error) == (Code.INTERNAL, "internal error; the server's log says more", ())


def test_the_retry_hint():
    assert (RETRY_TRAILER, "251") in to_status(ResourceExhaustedError("full", 0.2501))[2]
    assert round_trip(ResourceExhaustedError("full", 1.5)).retry_after_s == 1.5
    assert RETRY_TRAILER not in dict(to_status(ResourceExhaustedError("full"))[2])
    for hint in ("-1", "soon", ""):
        assert from_rpc_error(Failed(Code.RESOURCE_EXHAUSTED, "full", ((RETRY_TRAILER, hint),))).retry_after_s == 0.0


def test_a_trailer_cannot_name_what_does_not_fit_the_code():
    for name in ("EngineError", "PacelineError", "object", "no such", "__name__"):
        assert type(from_rpc_error(Failed(Code.NOT_FOUND, "x", ((ERROR_TRAILER, name),)))) is NotFoundError


@pytest.mark.parametrize("unit", ["x", "%", "é", "木", "😀", "a\n"])
def test_long_texts_are_cut_to_what_a_header_holds(unit):
    short = unit * 20
    assert to_status(InvalidRequestError(short))[1] == short
    details = to_status(InvalidRequestError(unit * 10_000))[1]
    escaped = sum(1 if " " <= c <= "~" and c != "%" else 3 * len(c.encode()) for c in details)
    assert MAX_DETAILS_BYTES - 16 < escaped <= MAX_DETAILS_BYTES
    assert details.endswith("...")


def test_a_text_with_an_unpaired_surrogate():
    assert to_status(InvalidRequestError("stop is '\udce9'"))[1] == "stop is '?'"
