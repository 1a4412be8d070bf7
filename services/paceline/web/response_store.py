"""Responses kept in memory: a later request can continue one by its id, or read it again."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.web.sending import pieces

MAX_RESPONSES = 4096
"""Most responses of one API key that are kept."""
LOCAL_BYTES = 64 << 20
"""Bytes of the responses of one API key where one process answers all requests, unless the configuration says it."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A response and the conversation that it ends, as JSON. Kept as bytes, so that it is sent again without
    parsing.
    """

    data: bytes
    """The whole answer."""
    item_data: bytes

    @property
    def response(self) -> dict[str, Any]:
        """The whole answer."""
        found: dict[str, Any] = json.loads(self.data)
        return found

    @property
    def items(self) -> list[dict[str, Any]]:
        """All items so far: of earlier responses, the input, and the output."""
        found: list[dict[str, Any]] = json.loads(self.item_data)
        return found

    @property
    def num_bytes(self) -> int:
        """Size of both."""
        return len(self.data) + len(self.item_data)


class ResponseStore:
    """The last responses of each API key, up to a number of bytes; no key sees another key's. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        """``max_bytes``: size of the JSON text of all responses of one key."""
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._by_owner: dict[str, OrderedDict[str, Kept]] = {}

    def put(self, owner: str, response: dict[str, Any], items: Sequence[dict[str, Any]]) -> bool:
        """Keeps a response by its id, and drops the oldest ones beyond the bounds. False: it is too large itself."""
        one = Kept(_dumps(response), _dumps(items))
        if one.num_bytes > self._max_bytes:
            return False
        with self._lock:
            kept = self._by_owner.setdefault(owner, OrderedDict())
            kept.pop(response["id"], None)
            kept[response["id"]] = one
            size = sum(each.num_bytes for each in kept.values())
            while size > self._max_bytes or len(kept) > MAX_RESPONSES:
                size -= kept.popitem(last=False)[1].num_bytes
        return True

    def get(self, owner: str, response_id: str) -> Kept | None:
        """The response of this id. None: it is not kept, or it is another key's."""
        with self._lock:
            kept = self._by_owner.get(owner)
            return None if kept is None else kept.get(response_id)

    def delete(self, owner: str, response_id: str) -> bool:
        """Forgets a response; False if there was none."""
        with self._lock:
            kept = self._by_owner.get(owner)
            return kept is not None and kept.pop(response_id, None) is not None


def _dumps(content: Any) -> bytes:
    return "".join(pieces(content)).encode("utf-8", "replace")
