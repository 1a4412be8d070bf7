"""The queue of requests: whose turn is next, and who may still wait. Pure.

Requests that belong together have a *share*: the requests of one API key or, in a service without keys, the sequences
of one request. A place goes to the share that holds the fewest; equal shares take turns. Nothing is kept free: a share
has all places and the whole queue while no other waits.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """Requests that wait, in order of arrival within each share."""

    def __init__(self) -> None:
        # ascending by turn: a share that is served, or begins to wait, comes last
        self._shares: OrderedDict[str, deque[Item]] = OrderedDict()
        self._first: dict[str, deque[Item]] = {}  # by share: requests that precede its others

    def __len__(self) -> int:
        return sum(map(len, self._shares.values())) + sum(map(len, self._first.values()))

    def __iter__(self) -> Iterator[Item]:
        """Yields all requests, grouped by share."""
        for share, waiting in self._shares.items():
            yield from self._first.get(share, ())
            yield from waiting

    def add(self, item: Item, share: str, *, first: bool = False) -> None:
        """Queues a request; ``first``: before the others of its share."""
        waiting = self._shares.setdefault(share, deque())
        (self._first.setdefault(share, deque()) if first else waiting).append(item)

    def remove(self, item: Item, share: str) -> bool:
        """Removes a request; returns False if it does not wait."""
        for waiting in (self._shares.get(share), self._first.get(share)):
            if waiting is not None and item in waiting:
                waiting.remove(item)
                self._tidy(share)
                return True
        return False

    def pop(self, held: Mapping[str, int]) -> Item:
        """Removes the request whose turn it is, and returns it; ``held``: the places of each share.

        The queue must not be empty.
        """
        share = min(self._shares, key=lambda share: (held.get(share, 0), share not in self._first))
        item = (self._first.get(share) or self._shares[share]).popleft()
        self._shares.move_to_end(share)
        self._tidy(share)
        return item

    def may_wait(self, share: str, limit: int) -> bool:
        """True if one more request of a share may wait, where ``limit`` may wait in all.

        A full queue has room for a share that has less than its part, so that no other can shut it out. With n shares
        it holds at most the sum of limit / i for i from 1 to n, and at most limit of one share.
        """
        if len(self) < limit:
            return True
        own = len(self._shares.get(share, ())) + len(self._first.get(share, ()))
        return own < limit // len(self._shares.keys() | {share})

    def _tidy(self, share: str) -> None:
        if not self._first.get(share):
            self._first.pop(share, None)
            if not self._shares[share]:
                del self._shares[share]
