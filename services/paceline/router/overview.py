"""The state of a service without a monitor: one target, at most one draft, and the sessions of one owner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from paceline import __version__
from paceline.router.session import Session
from paceline.types import ReplicaStatus, ServerInfo, SpeculationStats, Startup


class Overview:
    """Counts the sessions that have ended, and describes the service. The owner serializes the calls."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started_s = clock()
        self._ended: Counter[str] = Counter()  # events of the sessions that have ended

    def count(self, session: Session) -> None:
        """Adds the counts of a session that has ended."""
        self._ended += _counts(session.stats)

    def server_info(
        self,
        running: Sequence[Session],
        num_waiting: int,
        pools: Mapping[str, tuple[ReplicaStatus, ...]],
        starting: tuple[Startup, ...] = (),
    ) -> ServerInfo:
        """The state now. ``running``: the sessions that are open; ``pools``: status of each replica that is up."""
        counts = sum((_counts(session.stats) for session in running), self._ended)
        speculating = [session for session in running if session.speculates and not session.finished]
        return ServerInfo(
            version=__version__,
            uptime_s=self._clock() - self._started_s,
            pools=pools,
            sessions_running=len(running),
            sessions_queued=num_waiting,
            acceptance_rate=_ratio(counts["accepted"], counts["drafted"]),
            acceptance_length=1.0 + _ratio(counts["accepted"], counts["verified"]),
            hit_rate=_ratio(counts["hits"], counts["hits"] + counts["misses"]),
            sessions_speculating=len(speculating),
            sessions_drafting=sum(session.draft_available or session.wants_draft for session in speculating),
            starting=starting,
        )


def _counts(stats: SpeculationStats) -> Counter[str]:
    """Events of a session."""
    verified = sum(stats.acceptance_histogram.values())
    return Counter(
        drafted=stats.drafted, accepted=stats.accepted, verified=verified, hits=stats.hits, misses=stats.misses
    )


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def drafting(sessions: Iterable[Session]) -> int:
    """Number of sessions that are open on a draft."""
    return sum(session.draft_available for session in sessions)
