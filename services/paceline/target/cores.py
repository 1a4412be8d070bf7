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
    """The cores of the creating thread, which steps the target: first its own cores, then shared ones of drafts."""

    def __init__(self, num_own: int, num_lent: int) -> None:
        self._cores = sorted(os.sched_getaffinity(0))[: num_own + num_lent]
        self._num_own = num_own
        self.lent = False
        """The drafts' cores are in use."""
        self.use(lent=False)

    @classmethod
    def of(cls, num_own: int, num_lent: int, model: LoadedModel) -> TargetCores | None:
        """Returns this thread's cores; None if no draft shares any, or ``model``'s products cannot be (logged)."""
        if num_lent == 0:
            return None
        if reason := why_not_shared(num_own + num_lent, model):
            log.info("the target does not share its products with cores of its draft: %s", reason)
            return None
        return cls(num_own, num_lent)

    @property
    def num(self) -> int:
        """Cores that share the products now."""
        return len(self._cores) if self.lent else self._num_own

    @property
    def most(self) -> int:
        """Cores that share them while no session has a draft."""
        return len(self._cores)

    def use(self, *, lent: bool) -> None:
        """Starts or ends using the drafts' cores."""
        self.lent = lent
        share_products(1)  # ends the earlier threads, so that this one has all of its cores again
        os.sched_setaffinity(0, self._cores[: self.num])
        share_products(self.num)
