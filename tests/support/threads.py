"""The threads of this process, as the system lists them."""

from __future__ import annotations

import os
import time


def thread_ids() -> set[str]:
    """Ids of the threads of this process."""
    return set(os.listdir("/proc/self/task"))


def has_more_threads(known: set[str], num_more: int) -> bool:
    """True once there are so many beside the ``known`` ones: the system ends a thread a little after it is joined."""
    for _ in range(6000):  # at most a minute
        if len(thread_ids() - known) == num_more:
            return True
        time.sleep(0.01)
    return False
