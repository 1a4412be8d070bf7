"""KV pages on their way between two targets: one stream of bytes, cut into parts, and put together again."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

from paceline.v1 import target_pb2

PART_BYTES = 1 << 20
"""Longest part, far below any limit of messages: flow control acts between parts."""


def parts_of(contents: Sequence[bytes]) -> Iterator[target_pb2.PagesPart]:
    """Yields the parts of some pages."""
    for content in contents:
        for start in range(0, len(content), PART_BYTES):
            data = content[start : start + PART_BYTES]
            yield target_pb2.PagesPart(data=data, crc32=zlib.crc32(data))


class Joined:
    """Puts pages of a known size together again."""

    def __init__(self, page_bytes: int, num_pages: int) -> None:
        """``num_pages``: the most that may come."""
        self._page_bytes, self._left = page_bytes, page_bytes * num_pages
        self._buffer = bytearray()

    def add(self, part: target_pb2.PagesPart) -> list[bytes]:
        """Adds the next part; returns the pages that it completes.

        Raises ValueError for a part that is empty, too long, or not as it was sent.
        """
        data = part.data
        if not 0 < len(data) <= min(self._left, PART_BYTES):
            raise ValueError(f"a part of pages has {len(data)} bytes: 1 to {min(self._left, PART_BYTES)} are expected")
        if zlib.crc32(data) != part.crc32:
            raise ValueError("a part of pages is not as it was sent: its checksum is another")
        self._left -= len(data)
        self._buffer += data
        end = len(self._buffer) - len(self._buffer) % self._page_bytes
        pages = [bytes(self._buffer[start : start + self._page_bytes]) for start in range(0, end, self._page_bytes)]
        del self._buffer[:end]
        return pages
