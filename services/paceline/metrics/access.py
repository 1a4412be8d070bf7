"""Metrics of callers and of what identifies them: API keys by their names, certificates by their use."""

from __future__ import annotations

from paceline.metrics.catalogue import (
    CERTIFICATE_EXPIRY,
    KEY_REFUSED,
    KEY_RUNNING,
    KEY_TOKENS,
    RELOAD_FAILURES,
    UNAUTHENTICATED,
)
from paceline.metrics.registry import Registry


class AccessMetrics:
    """One method per event. A key's name comes from the file of keys, so there is one label per entry."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._reload_failures: dict[str, int] = {}
        self._unauthenticated = registry.counter(UNAUTHENTICATED)

    def unauthenticated(self) -> None:
        """A call came without a key, or with a wrong one."""
        self._unauthenticated.inc()

    def running(self, name: str, num_requests: int) -> None:
        """Sets how many requests a key has in progress."""
        self._registry.gauge(KEY_RUNNING, name).set(num_requests)

    def refused(self, name: str, limit: str) -> None:
        """A request was refused because of a limit: ``requests`` or ``tokens``."""
        self._registry.counter(KEY_REFUSED, name, limit).inc()

    def tokens(self, name: str, prompt: int, completion: int) -> None:
        """Tokens were charged to a key."""
        self._registry.counter(KEY_TOKENS, name, "prompt").inc(prompt)
        self._registry.counter(KEY_TOKENS, name, "completion").inc(completion)

    def certificate(self, use: str, expires_at: float) -> None:
        """Sets when the certificate that is in use expires, in Unix time; ``use`` is ``server`` or ``internal``."""
        self._registry.gauge(CERTIFICATE_EXPIRY, use).set(expires_at)

    def reload_failures(self, file: str, total: int) -> None:
        """Sets the number of versions of a file that could not be used so far."""
        counter = self._registry.counter(RELOAD_FAILURES, file)
        counter.inc(total - self._reload_failures.get(file, 0))
        self._reload_failures[file] = total
