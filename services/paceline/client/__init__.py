"""The blocking and the asyncio client of the public gRPC API.

Importing the package loads neither of them, nor gRPC: each is loaded when it is first named.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.client.aio import AsyncClient, AsyncStream
    from paceline.client.blocking import Client, Stream
    from paceline.client.connection import Tls

_MODULES = {"AsyncClient": "aio", "AsyncStream": "aio", "Client": "blocking", "Stream": "blocking", "Tls": "connection"}
__all__ = ["AsyncClient", "AsyncStream", "Client", "Stream", "Tls"]

if not TYPE_CHECKING:  # a type checker would take every name for one of ours

    def __getattr__(name):
        if name in _MODULES:
            return getattr(import_module(f"paceline.client.{_MODULES[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
