"""What stands around the application: errors that nobody expected, and HEAD."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline import logs
from paceline.web.errors import to_http

log = logging.getLogger(__name__)

Refuse = Callable[[Request, int, dict[str, Any], dict[str, str]], Response]
"""Makes the answer of a status, OpenAI's body of an error, and headers."""


class Guard:
    """Answers requests whose error nobody expected, and logs its frames. HEAD is answered as GET, without a body."""

    def __init__(self, app: ASGIApp, refuse: Refuse) -> None:
        self._app, self._refuse = app, refuse

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
        try:
            await self._app(inner, receive, tell)
        except Exception as error:
            logs.unexpected(log, error)
            if begun:
                raise
            await self._refuse(Request(inner), *to_http(error))(inner, receive, tell)
