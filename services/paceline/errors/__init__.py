"""The tree of errors, ordered by the remedy of the caller.

    PacelineError
    ├── InvalidRequestError      the request is at fault: change it (gRPC INVALID_ARGUMENT)
    │   ├── PromptTooLongError   shorten the prompt or lower max_tokens
    │   ├── RequestInProgressError   choose another request id, or wait until the other request has ended
    │   └── UnauthenticatedError send the service's API key (UNAUTHENTICATED)
    ├── ConfigError              the deployment is at fault: change models or settings (FAILED_PRECONDITION)
    │   └── TokenizerMismatchError   draft and target do not speak the same tokens
    ├── NotFoundError            no such request, model or replica (NOT_FOUND)
    ├── ResourceExhaustedError   try again later, or elsewhere (RESOURCE_EXHAUSTED)
    ├── DeadlineExceededError    the caller's deadline has passed (DEADLINE_EXCEEDED)
    ├── RequestCancelledError    the request was cancelled (CANCELLED)
    └── EngineError              an engine died or broke an invariant (UNAVAILABLE)
        ├── PoisonRequestError   do not send it again: targets hung or died under it (INTERNAL)
        ├── RanksLostError       a rank of a tensor-parallel model has failed
        └── RouterStoppedError   another router can serve the request, or continue its stream

Every message names the given value and the allowed ones.
"""

from __future__ import annotations

from collections.abc import Iterable


def reason_of(error: BaseException) -> str:
    """What an error of another library says, in one line: its first one, with the next where that ends in a colon."""
    said = f"KeyError: {error}" if isinstance(error, KeyError) else str(error)
    lines = [line.strip() for line in said.splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


class PacelineError(Exception):
    """Base class of every error that Paceline raises on purpose."""

    retry_after_s: float = 0.0
    """Time after which the same request may be sent again, in seconds; 0: unknown, or never."""


class InvalidRequestError(PacelineError, ValueError):
    """The request cannot be served as it is; the message says what to change."""


class PromptTooLongError(InvalidRequestError):
    """Prompt plus requested tokens do not fit the model's context."""


class RequestInProgressError(InvalidRequestError):
    """Another request of the same id is in progress."""


class UnauthenticatedError(InvalidRequestError):
    """The call carries no API key, or a wrong one."""


class ConfigError(PacelineError, ValueError):
    """Models or settings that cannot work together."""


class TokenizerMismatchError(ConfigError):
    """Draft and target tokenizers differ in content."""


class NotFoundError(PacelineError, LookupError):
    """The named request, model or replica does not exist here."""


class ResourceExhaustedError(PacelineError, RuntimeError):
    """No room now (queue or KV cache); a later try can succeed."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceededError(PacelineError, TimeoutError):
    """The caller's deadline has passed."""


class RequestCancelledError(PacelineError):
    """The request was cancelled before it was finished."""


class EngineError(PacelineError, RuntimeError):
    """An engine stopped or reported a broken invariant."""

    retry_after_s = 0.2


class PoisonRequestError(EngineError):
    """One target after another hung or died while it served the request, which no further target is given."""

    retry_after_s = 0.0


class RanksLostError(EngineError):
    """A rank of a tensor-parallel model is gone or hangs, so that no other rank can take another step."""


class RouterStoppedError(EngineError):
    """The service or this router is being stopped; another router, or its successor, can serve the request."""

    def __init__(self, message: str, retry_after_s: float = 0.1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def by_name(name: str, base: type[PacelineError] = PacelineError) -> type[PacelineError]:
    """Returns the error of this name if it is a kind of ``base``, else ``base``.

    For receivers of an error as text: from another process, over gRPC, out of a traceback.
    """
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, base) else base


def as_paceline_error(error: BaseException) -> PacelineError:
    """Returns an error of Paceline as it is, and an EngineError with type and message of any other."""
    return error if isinstance(error, PacelineError) else EngineError(f"{type(error).__name__}: {error}")


def named(names: Iterable[str]) -> str:
    """The first three names, and how many there are beyond them."""
    listed = [*names]
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")
