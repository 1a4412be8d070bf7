"""Copies of states of linear layers in host memory, of sessions that were preempted.

The pages of such a session stay cached, but are hit only up to a known state. States of running sessions take the slots
of copies that nobody holds. A copy belongs to a page's hash, so to all tokens before the state: it can be no older than
what it is restored for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from torch import Tensor

from paceline.model.linear.operator import LinearPools


class StateCopies:
    """States at ends of pages, with the inputs of convolutions before them, of a number of pages: those last used."""

    def __init__(self, pools: Iterable[LinearPools], most: int) -> None:
        """``pools``: memory of the states, of each layer. ``most``: number of copies."""
        self._pools: list[Tensor] = [pool for layer in pools for pool in (layer.states, layer.tails)]
        self._most = most
        self._copies: OrderedDict[bytes, Sequence[Tensor]] = OrderedDict()
        self.num_restored = 0
        """Copies that have been written back."""

    def __contains__(self, digest: bytes) -> bool:
        """True if there is a copy of the state at the end of the page with this hash."""
        return digest in self._copies

    def keep(self, digest: bytes, slot: int) -> None:
        """Copies the state in a slot, unless there is a copy."""
        if digest not in self._copies:
            self._copies[digest] = [pool[slot].to("cpu", copy=True) for pool in self._pools]
        self._copies.move_to_end(digest)
        if len(self._copies) > self._most:
            self._copies.popitem(last=False)

    def restore(self, digest: bytes, slot: int) -> None:
        """Writes a copy to a slot."""
        self._copies.move_to_end(digest)
        for pool, copy in zip(self._pools, self._copies[digest], strict=True):
            pool[slot] = copy.to(pool.device)
        self.num_restored += 1
