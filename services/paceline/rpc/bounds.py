"""Bounds on the size of a client's message, checked on its bytes before protobuf makes objects of them.

The methods of the public services get the bytes of their requests (``services.py``). So a message that is too large or
malformed gets a status that says so, at no more cost than its transfer. Protobuf makes up to 32 bytes of one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from paceline.errors import InvalidRequestError, PromptTooLongError
from paceline.rpc.generation import request_from_proto
from paceline.types import MAX_LOGPROB_TOKEN_IDS, Request, RequestLimits
from paceline.v1.generation_pb2 import GenerateRequest

MAX_SMALL_BYTES = 65536
"""Longest message that is parsed without checks. Parsing takes a few milliseconds at worst."""

_MAX_FIELDS = 64
_SCALAR_BYTES = 4096
_MAX_VARINT_BYTES = 10
_FIELDS = {field.number: name for name, field in GenerateRequest.DESCRIPTOR.fields_by_name.items()}

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class RequestBounds:
    """Bounds of a GenerateRequest for one model."""

    limits: RequestLimits
    max_model_len: int
    """Length of the context."""
    max_token_bytes: int
    """Most bytes of text that one token stands for."""

    def read(self, data: bytes | GenerateRequest) -> tuple[Request, bool]:
        """Returns the request of a message, and whether it asks for log-probabilities.

        Raises InvalidRequestError for a message that is malformed or too large.
        """
        if isinstance(data, bytes) and len(data) > MAX_SMALL_BYTES:
            self._check_sizes(data)
        message = parse(GenerateRequest, data, max_bytes=self.max_message_bytes)
        return request_from_proto(message, self.limits, self.max_model_len), message.logprobs

    @property
    def max_message_bytes(self) -> int:
        """Length of the longest message that may be served."""
        return max(MAX_SMALL_BYTES, sum(self._sizes.values()))

    @property
    def _sizes(self) -> dict[str, int]:
        """Most bytes of each part of a message; other fields have ``_SCALAR_BYTES`` together."""
        limits = self.limits
        options = limits.max_stop_strings * (4 * limits.max_stop_chars + 8) + 24 * limits.max_logit_bias
        options += 12 * limits.max_bad_words
        options += 6 * (limits.max_stop_token_ids + limits.max_bad_words_tokens + limits.max_allowed_token_ids)
        options += 6 * MAX_LOGPROB_TOKEN_IDS
        return {
            "text": self.max_model_len * self.max_token_bytes,
            "tokenized": 6 * self.max_model_len + 16,  # a uint32 takes 5 bytes, and a tag where it is not packed
            "generated_token_ids": 6 * self.max_model_len,
            "sampling_params": options + _SCALAR_BYTES,
            "other fields": _SCALAR_BYTES,
        }

    def _check_sizes(self, data: bytes) -> None:
        limits = self._sizes
        sizes: Counter[str] = Counter()
        for number, size in field_sizes(data, GenerateRequest).items():
            name = _FIELDS.get(number, "")
            sizes[name if name in limits else "other fields"] += size
        for name, size in sizes.items():
            if size > limits[name]:
                kind, why = InvalidRequestError, ""
                if name in ("text", "tokenized", "generated_token_ids"):
                    kind, why = PromptTooLongError, f" can fit the model's context of {self.max_model_len} tokens"
                raise kind(f"{name} has {size} bytes: at most {limits[name]}{why or ' are allowed'}")


def parse(kind: type[M], data: bytes | M, max_bytes: int = MAX_SMALL_BYTES) -> M:
    """Parses a message; one that is parsed already is returned. Raises InvalidRequestError."""
    if not isinstance(data, bytes):
        return data
    if len(data) > max_bytes:
        raise InvalidRequestError(f"the request has {len(data)} bytes: at most {max_bytes} are allowed")
    try:
        return kind.FromString(data)
    except DecodeError:
        raise _malformed(data, kind) from None


def field_sizes(data: bytes, kind: type[Message]) -> Counter[int]:
    """Bytes of each field of a message, by its number, read off its tags alone. ``kind``: named by errors.

    Raises InvalidRequestError for bytes that are not protobuf, and for unreasonably many fields.
    """
    sizes: Counter[int] = Counter()
    at = num_fields = 0
    while at < len(data):
        if (num_fields := num_fields + 1) > _MAX_FIELDS:
            raise InvalidRequestError(f"the request has more than {_MAX_FIELDS} fields in {len(data)} bytes")
        tag, start = _varint(data, at, kind)
        match tag & 7:
            case 0:
                at = _varint(data, start, kind)[1]
            case 1:
                at = start + 8
            case 2:
                size, start = _varint(data, start, kind)
                at = start + size
            case 5:
                at = start + 4
            case _:
                raise _malformed(data, kind)
        if at > len(data):
            raise _malformed(data, kind)
        sizes[tag >> 3] += at - start
    return sizes


def _varint(data: bytes, at: int, kind: type[Message]) -> tuple[int, int]:
    """The number at ``at``, and where it ends."""
    value = 0
    for i, byte in enumerate(data[at : at + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            return value, at + i + 1
    raise _malformed(data, kind)


def _malformed(data: bytes, kind: type[Message]) -> InvalidRequestError:
    return InvalidRequestError(f"the request has {len(data)} bytes that are not a valid {kind.DESCRIPTOR.full_name}")
