"""What stands around the application: errors that nobody expected, and HEAD."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline import logs
from paceline.web.errors import to_http

log = logging.getLogger(__name__)

Refuse = Callable[[Request, int, dict[str, Any], dict[str, str]], Response]
"""Makes the answer of a status, OpenAI's body of an error, and headers."""


@dataclass(slots=True)
class Load:
    """Requests in progress."""

    num_requests: int = 0


class Guard:
    """Answers requests whose error nobody expected, and logs its frames. HEAD is answered as GET, without a body."""

    def __init__(self, app: ASGIApp, refuse: Refuse, load: Load) -> None:
        self._app, self._refuse, self._load = app, refuse, load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
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


_HERE = r"(https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?|app://.*|vscode-webview://.*)"
"""Origins of pages of this machine."""
_SHOWN = ("x-request-id", "x-paceline-ignored-fields", "retry-after", "retry-after-ms")


def allow_cors(app: FastAPI, origins: Sequence[str] | None, has_keys: bool) -> None:
    """Lets web pages of these origins call. None: pages of this machine, and with keys no page at all."""
    if origins is None and has_keys:
        return
    app.add_middleware(
        CORSMiddleware,
        allow_origins=list(origins or ()),
        allow_origin_regex=_HERE if origins is None else None,
        allow_methods=["GET", "HEAD", "POST", "OPTIONS"],
        allow_headers=["*"],
        expose_headers=list(_SHOWN),
    )
