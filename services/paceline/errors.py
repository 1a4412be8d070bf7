"""What can go wrong, drawn as a tree by what the caller can do about it.

    PacelineError
    ├── InvalidRequestError      the request is at fault: change it (gRPC INVALID_ARGUMENT)
    │   └── PromptTooLongError   shorten the prompt or lower max_tokens
    ├── ConfigError              the deployment is at fault: change models or settings (FAILED_PRECONDITION)
    │   └── TokenizerMismatchError   draft and target do not speak the same tokens
    ├── NotFoundError            no such request, model or replica (NOT_FOUND)
    ├── ResourceExhaustedError   try again later, or elsewhere (RESOURCE_EXHAUSTED)
    ├── DeadlineExceededError    the caller's deadline has passed (DEADLINE_EXCEEDED)
    ├── RequestCancelledError    somebody cancelled the request (CANCELLED)
    └── EngineError              an engine died or broke an invariant (UNAVAILABLE)
        └── RanksLostError       its ranks have lost each other: it cannot go on

Every message names the value that was given and what is allowed.
"""


class PacelineError(Exception):
    """Base of every error that Paceline raises on purpose."""


class InvalidRequestError(PacelineError, ValueError):
    """The request cannot be served as it is; the message says what to change."""


class PromptTooLongError(InvalidRequestError):
    """Prompt plus requested tokens do not fit the model's context."""


class ConfigError(PacelineError, ValueError):
    """Models or settings that cannot work together."""


class TokenizerMismatchError(ConfigError):
    """Draft and target tokenizers differ in content."""


class NotFoundError(PacelineError, LookupError):
    """What the request names does not exist here."""


class ResourceExhaustedError(PacelineError, RuntimeError):
    """No room now (queue or KV cache); a later try can succeed."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """When to try again, in seconds; 0: not known."""


class DeadlineExceededError(PacelineError, TimeoutError):
    """The time that the caller gave is over."""


class RequestCancelledError(PacelineError):
    """The request was cancelled before it was finished."""


class EngineError(PacelineError, RuntimeError):
    """An engine stopped or reported a broken invariant."""


class RanksLostError(EngineError):
    """A rank of a tensor-parallel model is gone or hangs: no other rank can take another step."""
