"""The page at ``/``: a playground that shows what speculation does. Files of ``static/``, without a build step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib.resources import files

from fastapi import FastAPI, Request, Response

from paceline.security.access import Access

_PAGE = "index.html"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_HEADERS = {
    "cache-control": "no-cache",  # kept, and asked for again by its ETag: an upgrade is seen at once
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def add_playground(app: FastAPI, access: Access) -> None:
    """Serves the page and its files. They hold no secrets and need no key; the requests that the page sends
    need one.
    """
    static = files("paceline.web") / "static"
    for file in static.iterdir():
        kind = _TYPES.get(file.name.rpartition(".")[2])
        if kind is not None:
            path = "/" if file.name == _PAGE else f"/playground/{file.name}"
            handler = _answers(file.read_bytes(), kind, access)
            app.add_api_route(path, handler, methods=["GET", "HEAD"], include_in_schema=False)


def _answers(content: bytes, kind: str, access: Access) -> Callable[[Request], Response]:
    etag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
    headers = _HEADERS | {"content-type": kind, "etag": etag}

    def answer(request: Request) -> Response:
        access.require_encrypted(list(request.headers.items()))
        if etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers)

    return answer
