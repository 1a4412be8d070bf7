"""The decision about each call of a client: whose key it carries, and whether that key's limits leave room for it.

    call ─▶ identify: the name of its key ─▶ enter: requests at once, tokens of the last minute ─▶ tokens are charged

Each router counts only its own requests of a key. One event loop owns everything.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from paceline.errors import ConfigError, InvalidRequestError, ResourceExhaustedError, UnauthenticatedError
from paceline.security.haproxy_config import TLS_HEADER
from paceline.security.keys import ApiKey, KeyRing
from paceline.types import Usage

ANYONE = ""
"""The name of every caller while the service has no keys."""

METRICS_OF_KEYS = "paceline_key_"
"""Begins the names of all metrics with the label ``key``, and of no others."""

_PLAIN = "this connection is not encrypted: connect by TLS"
_MISSING = "the API key is missing or wrong: send one as `authorization: Bearer KEY`"
_RECENT_S = 60.0


class AccessMetrics(Protocol):
    """Counters about callers. Names come from the key file, so they are few."""

    def unauthenticated(self) -> None:
        """A call came without a key, or with a wrong one."""

    def running(self, name: str, num_requests: int) -> None:
        """Sets how many requests a key has in progress."""

    def refused(self, name: str, limit: str) -> None:
        """A request was refused because of a limit: ``requests`` or ``tokens``."""

    def tokens(self, name: str, prompt: int, completion: int) -> None:
        """Tokens were charged to a key."""


class _Usage:
    """The present use of one key. The tokens are a bucket that holds a minute's worth, and may be overdrawn."""

    def __init__(self, now: float) -> None:
        self.num_running = 0
        self.finished_s: deque[float] = deque(maxlen=32)  # when its latest requests ended
        self._spent = 0.0  # tokens that no time has paid for yet
        self._at = now

    def deficit(self, limit: int, now: float) -> float:
        """Tokens spent beyond the last minute's allowance; negative: tokens that are left."""
        self._spent = max(0.0, self._spent - (now - self._at) * limit / 60)
        self._at = now
        return self._spent - limit

    def spend(self, num_tokens: int) -> None:
        self._spent += num_tokens


class Charge:
    """The tokens of one request, charged to its key as they are known."""

    def __init__(self, spend: Callable[[int], None] | None, count: Callable[[int, int], None]) -> None:
        self._spend, self._count = spend, count
        self._prompt = self._completion = 0

    def note(self, usage: Usage) -> None:
        """Charges the increase of the request's totals."""
        prompt = max(0, usage.prompt_tokens - self._prompt)
        completion = max(0, usage.completion_tokens - self._completion)
        self._prompt += prompt
        self._completion += completion
        if prompt or completion:
            if self._spend is not None:
                self._spend(prompt + completion)
            self._count(prompt, completion)


class Access:
    """The access of callers: who may call, and how much. Without keys: any caller, without limits."""

    def __init__(
        self,
        keys: KeyRing | None,
        metrics: AccessMetrics,
        *,
        require_tls: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``require_tls``: refuse calls that did not come through a proxy that encrypts."""
        self._require_tls = require_tls
        self._keys, self._metrics, self.clock = keys, metrics, clock
        self._usage: dict[str, _Usage] = {}

    @property
    def has_keys(self) -> bool:
        """True if callers need a key."""
        return self._keys is not None

    def require_encrypted(self, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        """Raises ConfigError if the connection is not encrypted, and must be."""
        if self._is_plain(metadata):
            raise ConfigError(_PLAIN)

    def _is_plain(self, metadata: Sequence[tuple[str, str | bytes]]) -> bool:
        return self._require_tls and (TLS_HEADER, "1") not in metadata

    def identify(self, metadata: Sequence[tuple[str, str | bytes]]) -> str:
        """The name of the key that a call carries.

        Raises:
            UnauthenticatedError: it carries none, or a wrong one; the text is the same for both.
            ConfigError: the connection is not encrypted, and must be.
        """
        self.require_encrypted(metadata)
        if self._keys is None:
            return ANYONE
        entry = self._keys.find(_key_in(metadata))
        if entry is None:
            self._metrics.unauthenticated()
            raise UnauthenticatedError(_MISSING)
        return entry.name

    def check_sequences(self, name: str, num: int) -> None:
        """Raises InvalidRequestError for a body with more sequences than its key may ever have in progress."""
        entry = None if self._keys is None else self._keys.keys.get(name)
        if entry is not None and entry.max_requests is not None and num > entry.max_requests:
            raise InvalidRequestError(
                f"n makes {num} sequences of the request: at most {entry.max_requests} of this API key run at once"
            )

    def visible(self, page: str, metadata: Sequence[tuple[str, str | bytes]]) -> str:
        """Returns a page of metrics as a caller may see it: names and amounts of keys need a key with ``metrics``."""
        if self.may_see_keys(metadata):
            return page
        hidden = (METRICS_OF_KEYS, f"# HELP {METRICS_OF_KEYS}", f"# TYPE {METRICS_OF_KEYS}")
        return "".join(line for line in page.splitlines(keepends=True) if not line.startswith(hidden))

    def may_see_keys(self, metadata: Sequence[tuple[str, str | bytes]]) -> bool:
        """True if the caller's key may list keys."""
        if self._keys is None or self._is_plain(metadata):
            return False
        entry = self._keys.find(_key_in(metadata))
        return entry is not None and entry.metrics

    @contextlib.contextmanager
    def enter(self, name: str) -> Iterator[Charge]:
        """One request of a key, from its arrival to its end.

        Raises:
            ResourceExhaustedError: the key has its maximum of requests in progress, or has used its tokens.
        """
        entry = None if self._keys is None else self._keys.keys.get(name)
        usage = self._usage.setdefault(name, _Usage(self.clock()))
        if entry is not None:
            self._check(entry, usage)
        usage.num_running += 1
        self._note_running(name, usage)
        try:
            limited = entry is not None and entry.tokens_per_minute is not None
            yield Charge(
                usage.spend if limited else None, lambda prompt, completion: self._note_tokens(name, prompt, completion)
            )
        finally:
            usage.num_running -= 1
            usage.finished_s.append(self.clock())
            self._note_running(name, usage)

    def _check(self, entry: ApiKey, usage: _Usage) -> None:
        now = self.clock()
        limit = entry.max_requests
        if limit is not None and usage.num_running >= limit:
            self._metrics.refused(entry.name, "requests")
            raise ResourceExhaustedError(
                f"{usage.num_running} requests of this API key are in progress: at most {limit} may be at once",
                retry_after_s=_expected_wait_s(usage.finished_s, now),
            )
        limit = entry.tokens_per_minute
        if limit is not None and (deficit := usage.deficit(limit, now)) >= 0:
            self._metrics.refused(entry.name, "tokens")
            raise ResourceExhaustedError(
                f"this API key has used its tokens: {limit} a minute are allowed, prompt and generated",
                retry_after_s=(deficit + 1) * 60 / limit,
            )

    def _note_running(self, name: str, usage: _Usage) -> None:
        if name != ANYONE:
            self._metrics.running(name, usage.num_running)

    def _note_tokens(self, name: str, prompt: int, completion: int) -> None:
        if name != ANYONE:
            self._metrics.tokens(name, prompt, completion)


def _key_in(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The key that a call carries; empty: none."""
    found = ""
    for name, value in metadata:
        if not isinstance(value, str):
            continue
        if name == "authorization":
            scheme, _, key = value.partition(" ")
            if scheme.lower() == "bearer":
                return key.strip()
        elif name == "x-api-key":
            found = value.strip()
    return found


def _expected_wait_s(finished_s: deque[float], now: float) -> float:
    """The mean time between the ends of the key's latest requests, after which a place is expected to be free."""
    if len(finished_s) < 2 or now - finished_s[0] > _RECENT_S:
        return 1.0
    return min(max((finished_s[-1] - finished_s[0]) / (len(finished_s) - 1), 0.05), 30.0)
