"""The versions of the protocol between routers and replicas: compatible pairs, and the features that older peers lack.

Both sides of a stream state their version when it begins: the router in its metadata, the replica in its first status.
A peer may be one version older or newer, so that a running service can be replaced process by process. A change that
such a peer would misread takes a new version (``VERSION``); its messages go to peers of that version alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from paceline.types import PROTOCOL_VERSION as VERSION
from paceline.types import UNSTATED_PROTOCOL, SamplingParams

__all__ = ["KEY", "SINCE", "VERSION", "needed", "refusal", "stated", "unknown_fields"]

KEY = "paceline-protocol"
"""Name of the metadata that hold a router's version."""

SINCE: Mapping[str, int] = {"logprob_token_ids": 2}
"""Sampling parameters that the version before does not know, with the version that brought each."""


def refusal(version: int) -> str:
    """Why a peer of this version is not talked to; empty: it is."""
    if abs(version - VERSION) <= 1:
        return ""
    spoken = f"{VERSION} is spoken here, and {VERSION - 1} to {VERSION + 1} are accepted"
    return f"{KEY} is {version}: {spoken}; upgrade by one version after the other"


def stated(metadata: Any) -> int:
    """The version of a router by the metadata of its call. Raises ValueError for one that is no number."""
    value = dict(metadata or ()).get(KEY)
    if value is None:
        return UNSTATED_PROTOCOL
    if not (isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 10):
        raise ValueError(f"{KEY} is {value!r}: a whole number is needed")
    return int(value)


def needed(sampling: SamplingParams) -> int:
    """The oldest version whose targets know all that these parameters ask for."""
    return max((since for name, since in SINCE.items() if getattr(sampling, name)), default=VERSION - 1)


def unknown_fields(message: Message, path: str = "") -> Iterator[str]:
    """Yields fields that this version does not know, of a message and of messages in it, by name and number."""
    for field in cast(Any, UnknownFieldSet(message)):
        yield f"{path}{field.field_number}"
    for descriptor, value in message.ListFields():
        if descriptor.message_type is None or descriptor.message_type.GetOptions().map_entry:
            continue
        for each in value if descriptor.is_repeated else (value,):
            yield from unknown_fields(cast(Message, each), f"{path}{descriptor.name}.")
