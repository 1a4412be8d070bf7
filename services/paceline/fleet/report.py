"""What a process tells the monitor about itself."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.metrics.declaration import Samples
from paceline.metrics.registry import Registry
from paceline.types import ReplicaStatus, RouterView


@dataclass(frozen=True, slots=True)
class Report:
    """What one process says of itself. Picklable."""

    source_id: str
    kind: str
    """``router``, ``target`` or ``draft``."""
    status: ReplicaStatus
    samples: Samples
    """Totals since this incarnation began, and gauges."""
    sequence: int = 0
    """Grows with every report of one incarnation; an older one that arrives late is ignored."""
    view: RouterView | None = None
    """Of a router."""


class Reporter:
    """Makes the reports of one process, and mirrors its metrics to Ray while at it."""

    def __init__(self, source_id: str, kind: str, registry: Registry) -> None:
        self._source_id, self._kind, self._registry = source_id, kind, registry
        self._sequence = 0

    def report(self, status: ReplicaStatus, view: RouterView | None = None) -> Report:
        """The report of this moment; call it about once a second. ``view``: of a router."""
        self._sequence += 1
        samples = self._registry.samples()
        self._registry.mirror(samples)
        return Report(self._source_id, self._kind, status, samples, self._sequence, view)
