"""Middleware around the application: allowed hosts and origins, unexpected errors, and HEAD."""

from __future__ import annotations

import ipaddress
import logging
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline import logs
from paceline.web.errors import body_of, to_http

log = logging.getLogger(__name__)

Refuse = Callable[[Request, int, dict[str, Any], dict[str, str]], Response]
"""Makes the answer of a status, OpenAI's body of an error, and headers."""


@dataclass(slots=True)
class Load:
    """Requests in progress."""

    num_requests: int = 0


class Guard:
    """Refuses requests that were not meant for this service. Answers an unexpected error with 500 and logs its frames.
    HEAD is answered as GET, without a body."""

    def __init__(self, app: ASGIApp, refuse: Refuse, load: Load, origins: Origins, hosts: Sequence[str] | None) -> None:
        """``hosts``: see ``Edge.allowed_hosts``."""
        self._app, self._refuse, self._load = app, refuse, load
        self._origins, self._hosts = origins, hosts

    def _why_not(self, scope: Scope) -> tuple[int, str] | None:
        """The status and the reason of a request that is not answered."""
        headers = Headers(scope=scope)
        if self._hosts is not None and (host := headers.get("host")) is not None and not names_us(host, self._hosts):
            return (
                403,
                "the header Host names another service: addresses, names without a dot and allowed_hosts are allowed",
            )
        if scope["method"] == "POST" and sent_unasked(headers, self._origins):
            return 415, "content-type is not application/json: web pages of other origins may send nothing else"
        return None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if (refused := self._why_not(scope)) is not None:
            status, message = refused
            await self._refuse(Request(scope), status, body_of(message), {})(scope, receive, send)
            return
        begun, bare = False, scope["method"] == "HEAD"

        async def tell(message: Message) -> None:
            nonlocal begun
            begun = True
            if bare and message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        inner = {**scope, "method": "GET"} if bare else scope
        counts = scope["method"] == "POST" and scope["path"].startswith("/v1/")
        self._load.num_requests += counts
        try:
            await self._app(inner, receive, tell)
        except Exception as error:
            logs.unexpected(log, error)
            if begun:
                raise
            await self._refuse(Request(inner), *to_http(error))(inner, receive, tell)
        finally:
            self._load.num_requests -= counts


_HERE = re.compile(r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?|app://.*|vscode-webview://.*")
"""Origins of pages of this machine."""
_SHOWN = ("x-request-id", "x-paceline-ignored-fields", "retry-after", "retry-after-ms")


@dataclass(frozen=True, slots=True)
class Origins:
    """The origins of web pages that may call."""

    given: Sequence[str] | None
    """None: pages of this machine, and with keys no page at all."""
    has_keys: bool

    def permit(self, origin: str) -> bool:
        """True if pages of an origin may call."""
        if self.given is None:
            return not self.has_keys and _HERE.fullmatch(origin) is not None
        return "*" in self.given or origin in self.given


def allow_cors(app: FastAPI, origins: Origins) -> None:
    """Allows calls from web pages of these origins."""
    if origins.given is None and origins.has_keys:
        return
    app.add_middleware(
        CORSMiddleware,
        allow_origins=list(origins.given or ()),
        allow_origin_regex=_HERE.pattern if origins.given is None else None,
        allow_methods=["GET", "HEAD", "POST", "OPTIONS"],
        allow_headers=["*"],
        expose_headers=list(_SHOWN),
    )


def sent_unasked(headers: Headers, origins: Origins) -> bool:
    """True for a body that a web page of a strange origin sends without that its browser has asked for leave.

    Browsers ask before they send JSON, and not before forms and plain text.
    """
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return False
    origin = headers.get("origin")
    if origin is None:
        return headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
    return not origins.permit(origin) and origin.partition("://")[2] != headers.get("host")


_HERE_NAMES = ("*.localhost", "host.docker.internal", socket.gethostname().lower())
"""Names of this machine. Docker's name is the host's, as its containers see it."""


def names_us(host: str, names: Sequence[str]) -> bool:
    """True if the header ``Host`` names this service: by an address, as this machine, or by one of ``names``.

    After DNS rebinding, a page sends its own name, which has a dot: no public name has a single label. Names of local
    networks, such as ``localhost``, have one label and are accepted.
    """
    name = host.rpartition(":")[0] if re.search(r":\d*$", host) and not host.endswith("]") else host
    name = name.lower().removesuffix(".")
    try:
        ipaddress.ip_address(name[1:-1] if name.startswith("[") and name.endswith("]") else name)
        return True
    except ValueError:
        return (name != "" and "." not in name) or any(
            one in ("*", name) or (one.startswith("*.") and name.endswith(one[1:])) for one in (*_HERE_NAMES, *names)
        )
