"""The store in which the ranks of a replica find each other."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from paceline.errors import EngineError
from paceline.types import Rendezvous


def open_store(rendezvous: Rendezvous, purpose: str = "") -> Store:
    """Opens the store of a rendezvous. The ranks must open it once for each purpose, as a file ends with its last user.

    Raises:
        EngineError: the store cannot be reached within ``start_timeout_s``.
    """
    kind, _, where = rendezvous.store.partition(":")
    limit = timedelta(seconds=rendezvous.start_timeout_s)
    store: Any
    try:
        if kind == "file":
            store = FileStore(f"{where}.{purpose}" if purpose else where, rendezvous.degree)
        else:
            host, _, port = where.rpartition(":")
            store = TCPStore(host, int(port), None, is_master=False, timeout=limit)
            store = PrefixStore(purpose, store) if purpose else store
    except RuntimeError as error:
        raise EngineError(f"rank {rendezvous.rank} could not reach {rendezvous.store}: {error}") from error
    store.set_timeout(limit)
    return cast(Store, store)
