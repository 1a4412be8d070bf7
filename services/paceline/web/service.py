"""Who answers: the one interface that the edge speaks to, and the values that the application is made of."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from paceline import __version__
from paceline.checkpoint.chat import ChatTemplate
from paceline.router.admission import TargetInfo as TargetInfo
from paceline.security.access import Access
from paceline.types import Chunk, Request, RequestLimits, Result, ServerInfo, Usage
from paceline.web.response_store import ResponseStore

MAX_BODY_BYTES = 16 << 20
"""Longest body of a request unless the configuration says otherwise."""


def fingerprint_of(*parts: str) -> str:
    """Returns OpenAI's ``system_fingerprint`` of a version and its configuration."""
    digest = hashlib.blake2b("\0".join((__version__, *parts)).encode(), digest_size=5).hexdigest()
    return f"fp_{digest}"


class Service(Protocol):
    """Serves requests: ``router.service.GenerationService``, which also serves gRPC."""

    @property
    def info(self) -> TargetInfo:
        """The target model."""

    @property
    def limits(self) -> RequestLimits:
        """Bounds of the lists of a request."""

    @property
    def ready(self) -> bool:
        """True if a request would be served now."""

    @property
    def trouble(self) -> str:
        """Why no request would be served now; empty if one would be."""

    def run(
        self, request: Request, owner: str = "", on_usage: Callable[[Usage], None] = ...
    ) -> AsyncGenerator[Chunk | Result, None]:
        """Yields the chunks of a request, then its result. Raises PacelineError; leaving the generator cancels it."""


@dataclass(frozen=True, slots=True)
class Edge:
    """Parts that the application is made of."""

    model_id: str
    service: Service
    access: Access
    max_body_bytes: int = MAX_BODY_BYTES
    metrics: Callable[[], Awaitable[str]] | None = None
    """Makes the page for Prometheus, where there is one."""
    chat: ChatTemplate | None = None
    """None: the model is no chat model."""
    status: Callable[[], Awaitable[ServerInfo]] | None = None
    """Describes the state of the whole service, where it is known. Raises EngineError."""
    aliases: tuple[str, ...] = ()
    """Further names of the model."""
    system_fingerprint: str | None = None
    """Names the configuration that answers come from; clients compare it."""
    cors_origins: tuple[str, ...] | None = None
    """Origins of pages that may call, ``*`` for any. None: pages of this machine, where there are no keys."""
    allowed_hosts: tuple[str, ...] | None = None
    """Names allowed in the header ``Host`` in addition to this machine's; ``*.`` before a name: all names below it.
    None: any name."""
    force_include_usage: bool = False
    """Streams tell their token counts in every event and at the end, unless their options say otherwise."""
    strict_fields: bool = False
    """Refuse fields of bodies that are not known, which are ignored else."""
    playground: bool = True
    """Serve the page at ``/``."""
    responses: ResponseStore | None = None
    """Keeps the responses of ``/v1/responses``. None: none is kept."""
    trace_headers: Callable[[Iterable[tuple[str, str]]], tuple[tuple[str, str], ...]] | None = None
    """Picks the trace that a request is part of out of its headers. None: requests leave no traces."""
