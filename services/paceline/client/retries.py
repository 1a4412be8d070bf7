"""Decides if a request whose call failed is sent again, and after which pause. Knows no connections and does not wait.

A request without tokens is sent at most three times, and only if the service was unavailable. A client that has been
answered before keeps trying for REACH_TIMEOUT_S, since the service may be restarting a router or a proxy. A stream that
broke after its first token is *resumed*: sent again with the tokens so far, for up to RESUME_TIMEOUT_S. Neither can
give a token twice: a request keeps its id and seed, and the service continues after ``generated_token_ids``
(generation.proto).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import grpc

from paceline.errors import RequestInProgressError, ResourceExhaustedError
from paceline.rpc.status import from_rpc_error, is_lost, pushback_s

RESUME_TIMEOUT_S = 60.0
"""Time after which a broken stream fails."""
REACH_TIMEOUT_S = 20.0
"""Time after which a request without tokens fails, if the service has answered before."""
_MAX_TRIES = 3
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0


class Retries:
    """The failures of one request since it last made progress."""

    def __init__(
        self,
        resume: bool,
        *,
        answered: bool = False,
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        """``resume``: continue a stream that has begun. ``answered``: the service has answered this client before, so
        waiting for it is useful. ``uniform`` spreads the pauses of many clients."""
        self._resume, self._patient, self._clock, self._uniform = resume, resume and answered, clock, uniform
        self._num_tokens = 0
        self._num_failures = 0
        self._since_s = 0.0

    def pause_s(self, error: grpc.RpcError, num_tokens: int) -> float | None:
        """Seconds until a request with ``num_tokens`` received tokens is sent again; None: it ends with the error."""
        now = self._clock()
        if num_tokens > self._num_tokens or not self._num_failures:
            self._num_tokens, self._num_failures, self._since_s = num_tokens, 0, now
        self._num_failures += 1
        hint_s = pushback_s(error)
        if hint_s is None:
            most_s = min(_FIRST_PAUSE_S * 2 ** (self._num_failures - 1), _LONGEST_PAUSE_S)
            hint_s = self._uniform(most_s / 2, most_s)
        if num_tokens:
            again = self._resume and _may_go_on(error) and now + hint_s <= self._since_s + RESUME_TIMEOUT_S
        else:
            lost = is_lost(error)
            unavailable = lost or error.code() is grpc.StatusCode.UNAVAILABLE
            again = unavailable and self._num_failures < _MAX_TRIES and hint_s <= RESUME_TIMEOUT_S
            again = again or (self._patient and lost and now + hint_s <= self._since_s + REACH_TIMEOUT_S)
        return hint_s if again else None


def _may_go_on(error: grpc.RpcError) -> bool:
    """True if the stream may go on elsewhere or later: one that has begun waits for room, and for its own end here."""
    return is_lost(error) or isinstance(from_rpc_error(error), ResourceExhaustedError | RequestInProgressError)
