"""Paceline: lossless speculative decoding that drafts while the target verifies.

Importing this package loads neither torch, transformers nor gRPC: worker processes set their thread limits first,
and a client is loaded at first use.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.client import AsyncClient, Client

__version__ = "0.1.0"
__all__ = ["AsyncClient", "Client", "__version__"]

if not TYPE_CHECKING:  # a type checker would take every name for one of ours

    def __getattr__(name):
        if name in ("AsyncClient", "Client"):
            from paceline import client

            return getattr(client, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
