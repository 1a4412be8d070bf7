"""Reports of a process to the monitor."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.metrics.declaration import Samples
from paceline.metrics.registry import Registry
from paceline.types import ReplicaStatus, RouterView, restored


@dataclass(frozen=True, slots=True)
class Report:
    """State of one process at one moment. Picklable."""

    __setstate__ = restored

    source_id: str
    kind: str
    """``router``, ``target`` or ``draft``."""
    status: ReplicaStatus
    samples: Samples
    """Totals since this incarnation began, and gauges."""
    sequence: int = 0
    """Grows with every report of one incarnation; an older one that arrives late is ignored."""
    view: RouterView | None = None
    """The replicas and sessions that a router sees; None: the report is not from a router."""


class Reporter:
    """Makes the reports of one process, and mirrors its metrics to Ray with each of them."""

    def __init__(self, source_id: str, kind: str, registry: Registry) -> None:
        self._source_id, self._kind, self._registry = source_id, kind, registry
        self._sequence = 0

    def report(self, status: ReplicaStatus, view: RouterView | None = None) -> Report:
        """Makes the report of this moment; to be called about once a second. ``view``: given by routers."""
        self._sequence += 1
        samples = self._registry.samples()
        self._registry.mirror(samples)
        return Report(self._source_id, self._kind, status, samples, self._sequence, view)
