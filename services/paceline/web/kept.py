"""Responses kept in memory: a later request can continue one by its id, or read it again."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAX_RESPONSES = 4096
"""Most responses of one API key that are kept."""
LOCAL_BYTES = 64 << 20
"""Bytes of the responses of one API key where one process answers all requests, unless the configuration says it."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A response and the conversation that it ends."""

    response: dict[str, Any]
    """The whole answer."""
    items: list[dict[str, Any]]
    """All items so far: of earlier responses, the input, and the output."""


class ResponseStore:
    """The last responses of each API key, up to a number of bytes; no key sees another key's. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        """``max_bytes``: size of the JSON text of all responses of one key."""
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._by_owner: dict[str, OrderedDict[str, bytes]] = {}

    def put(self, owner: str, response: dict[str, Any], items: Sequence[dict[str, Any]]) -> bool:
        """Keeps a response by its id, and drops the oldest ones beyond the bounds. False: it is too large itself."""
        data = json.dumps({"response": response, "items": items}).encode()
        if len(data) > self._max_bytes:
            return False
        with self._lock:
            kept = self._by_owner.setdefault(owner, OrderedDict())
            kept.pop(response["id"], None)
            kept[response["id"]] = data
            size = sum(map(len, kept.values()))
            while size > self._max_bytes or len(kept) > MAX_RESPONSES:
                size -= len(kept.popitem(last=False)[1])
        return True

    def get(self, owner: str, response_id: str) -> Kept | None:
        """The response of this id. None: it is not kept, or it is another key's."""
        with self._lock:
            kept = self._by_owner.get(owner)
            data = None if kept is None else kept.get(response_id)
        return None if data is None else Kept(**json.loads(data))

    def delete(self, owner: str, response_id: str) -> bool:
        """Forgets a response; False if there was none."""
        with self._lock:
            kept = self._by_owner.get(owner)
            return kept is not None and kept.pop(response_id, None) is not None
