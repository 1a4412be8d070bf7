"""Bodies of requests on their way in: what they cost is bounded before anything is made of them.

bytes: by their number and the time they take ──▶ JSON: by the number of its values ──▶ parsed
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from paceline.errors import InvalidRequestError, ResourceExhaustedError
from paceline.router.admission import TargetInfo
from paceline.web.errors import ClientLeftError
from paceline.web.json_text import parse

BODY_S = 60.0
"""Longest time from the headers of a request to the end of its body."""
_ESCAPED = 2
"""Allowed bytes of JSON for a byte of text. Non-ASCII text may take six bytes for three, a line break two for one."""
_ALLOWANCE_BYTES, _ALLOWANCE_VALUES = 4 << 20, 1 << 18
"""Allowance for everything but the prompt, such as tools and schemas, and for several prompts in one request."""
_VALUES_PER_TOKEN = 4
_TOGETHER = 4
"""Bodies of the longest kind that may be on their way at once."""
_LEAST_TOGETHER = 64 << 20
_MOST_UNREAD = 64 << 20
"""Bytes of a body that are read and dropped before it is refused: most clients read no answer while they send."""


@dataclass(frozen=True, slots=True)
class BodyBounds:
    """Bounds of a body, which follow from the context of the model."""

    max_bytes: int
    max_values: int

    @classmethod
    def of(cls, info: TargetInfo, max_message_bytes: int) -> BodyBounds:
        """The bounds for a model. ``max_message_bytes``: the configured one, which is never passed."""
        longest_prompt = _ESCAPED * info.max_model_len * info.tokenizer.max_token_bytes
        return cls(
            min(max_message_bytes, _ALLOWANCE_BYTES + longest_prompt),
            _ALLOWANCE_VALUES + _VALUES_PER_TOKEN * info.max_model_len,
        )


class Bodies:
    """Receives the bodies of one application."""

    def __init__(self, bounds: BodyBounds) -> None:
        self.bounds = bounds
        self._num_bytes = 0  # of all bodies that have not come to their end
        self.most_bytes = max(_LEAST_TOGETHER, _TOGETHER * bounds.max_bytes)

    async def receive(self, request: Request) -> bytes:
        """The body of a request.

        Raises:
            HTTPException: it is too long, or takes too long.
            ResourceExhaustedError: too much is on its way in other requests.
            ClientLeftError: the client disconnects before its end.
        """
        given = request.headers.get("content-length", "")
        if given.isdecimal() and (len(given) > 18 or int(given) > _MOST_UNREAD):
            raise self._too_long()
        parts: list[bytes] = []
        length = size = 0  # what has come, and what of it was kept
        try:
            async with asyncio.timeout(BODY_S):
                async for part in request.stream():
                    length += len(part)
                    if length > self.bounds.max_bytes:
                        parts.clear()
                        if length > _MOST_UNREAD:
                            break
                        continue
                    parts.append(part)
                    size += len(part)
                    self._num_bytes += len(part)
                    if self._num_bytes > self.most_bytes:
                        raise ResourceExhaustedError(
                            f"bodies of more than {self.most_bytes} bytes are on their way: no more are taken at once",
                            retry_after_s=1.0,
                        )
        except ClientDisconnect:
            raise ClientLeftError("the client has left before the end of its request") from None
        except TimeoutError:
            raise HTTPException(408, f"the body did not come within {BODY_S:g} s") from None
        finally:
            self._num_bytes -= size
        if length > self.bounds.max_bytes:
            raise self._too_long()
        return b"".join(parts)

    def parse(self, data: bytes) -> Any:
        """The value of a body. Raises InvalidRequestError for one that is no JSON, or holds too many values."""
        try:
            return parse(data, self.bounds.max_values)
        except ValueError as error:
            raise InvalidRequestError(f"the body {error}") from None

    def _too_long(self) -> HTTPException:
        return HTTPException(413, f"the body has more than {self.bounds.max_bytes} bytes, which is the limit")
