"""Cores that share a target's products on a CPU: its own, and idle drafts' while no session has a draft.

A draft that is not asked sleeps, and its core with it. Where drafts have no gain, the target uses that core: no bit
depends on the number of cores.
"""

from __future__ import annotations

import logging
import os

from paceline.model.compiled.linear import share_products
from paceline.model.loading import LoadedModel, why_not_shared

log = logging.getLogger(__name__)


class TargetCores:
    """The cores of the creating thread, which steps the target: its own, then the ones that it shares with drafts."""

    def __init__(self, num_own: int, num_shared: int) -> None:
        self._cores = sorted(os.sched_getaffinity(0))[: num_own + num_shared]
        self._num_own = num_own
        self.shared = False
        """The drafts' cores are in use."""
        self.use(shared=False)

    @classmethod
    def of(cls, num_own: int, num_shared: int, model: LoadedModel) -> TargetCores | None:
        """Returns this thread's cores; None if it shares no draft's, or cannot share ``model``'s products (logged)."""
        if num_shared == 0:
            return None
        if reason := why_not_shared(num_own + num_shared, model):
            log.info("the target does not share its products with cores of its draft: %s", reason)
            return None
        return cls(num_own, num_shared)

    @property
    def num(self) -> int:
        """Cores that share the products now."""
        return len(self._cores) if self.shared else self._num_own

    @property
    def most(self) -> int:
        """Cores that share them while no session has a draft."""
        return len(self._cores)

    def use(self, *, shared: bool) -> None:
        """Starts or ends using the drafts' cores."""
        self.shared = shared
        share_products(1)  # ends the earlier threads, so that this one has all of its cores again
        os.sched_setaffinity(0, self._cores[: self.num])
        share_products(self.num)
