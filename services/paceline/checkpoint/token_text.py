"""The text of tokens: the bytes of each, and the text of a growing sequence.

In most tokenizers a token is a fixed sequence of bytes, which may begin or end inside a character. A tokenizer whose
text of one token depends on its neighbors is decoded in windows instead.
"""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens left out."""

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_PROMPT_TAIL_TOKENS = 6
_MAX_UNDECIDED_TOKENS = 16
_CONTINUES = range(0x80, 0xC0)
"""Bytes of a character after its first."""
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_NEVER_IN_FIRST = 2**31


class TokenBytes:
    """The bytes of text that each token of a tokenizer stands for, by the decoder of its ``tokenizer.json``."""

    def __init__(
        self, decoder: dict[str, Any], token_of: Callable[[int], str | None], special_ids: Collection[int] = ()
    ) -> None:
        """Reads the decoder.

        Args:
            decoder: ``decoder`` of ``tokenizer.json``; {}: there is none.
            token_of: the token of an id as the tokenizer writes it; None for an id without one.
            special_ids: ids of the special tokens.
        """
        self.special_ids = frozenset(special_ids)
        self._token_of = token_of
        self._parts = list(_parts(decoder))
        self._kinds = {part["type"] for part in self._parts}
        self._replaced = [pair for part in self._parts if (pair := _replacement(part)) is not None]
        self.exact = bool(self._parts) and all(map(_is_local, self._parts))
        """True: the text of any tokens is that of their bytes, one after the other; False: an approximation."""
        self.num_stripped = max(map(_num_stripped, self._parts), default=0)
        """Most spaces that the first token of a text loses at its start."""
        self._known: dict[int, bytes] = {}

    def __call__(self, token_id: int) -> bytes:
        """The bytes of a token, a special one included; none for an id without a token."""
        if (found := self._known.get(token_id)) is None:
            token = self._token_of(token_id)
            found = self._known[token_id] = b"" if token is None else self.of(token)
        return found

    def of(self, token: str) -> bytes:
        """The bytes of a token as the tokenizer writes it."""
        if "ByteLevel" in self._kinds:
            alphabet = byte_alphabet()
            return bytes(alphabet[c] for c in token) if all(c in alphabet for c in token) else token.encode()
        if "ByteFallback" in self._kinds and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for part in self._parts:
            if part["type"] == "WordPiece":
                prefix = str(part.get("prefix", "##"))
                return (token.removeprefix(prefix) if token.startswith(prefix) else " " + token).encode()
        for pattern, content in self._replaced:
            token = token.replace(pattern, content)
        return token.encode("utf-8", "surrogatepass")

    def first(self, text: bytes) -> bytes:
        """The bytes of a token where they begin a text."""
        num_spaces = len(text) - len(text.lstrip(b" "))
        return text[min(num_spaces, self.num_stripped) :]


def _parts(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A decoder, or the decoders of a sequence."""
    if decoder.get("type") == "Sequence":
        for part in decoder["decoders"]:
            yield from _parts(part)
    elif decoder:
        yield decoder


def _replacement(part: dict[str, Any]) -> tuple[str, str] | None:
    """Returns (text that a decoder replaces in each token, replacement); None if it replaces nothing."""
    if part["type"] == "Metaspace":
        return str(part.get("replacement", "\u2581")), " "
    if part["type"] == "Replace" and "String" in part.get("pattern", {}):
        return str(part["pattern"]["String"]), str(part["content"])
    return None


def _num_stripped(part: dict[str, Any]) -> int:
    if part["type"] == "Metaspace":
        return 0 if part.get("prepend_scheme", "always") == "never" else _NEVER_IN_FIRST
    return int(part.get("start", 0)) if part["type"] == "Strip" else 0


def _is_local(part: dict[str, Any]) -> bool:
    """True for a decoder that turns each token into text by itself, but for spaces before the first."""
    match part["type"]:
        case "ByteLevel" | "ByteFallback" | "Fuse" | "Metaspace":
            return True
        case "Replace":
            return _replacement(part) is not None
        case "Strip":
            return part.get("content") == " " and not part.get("stop")
    return False


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """The byte that each character of byte-level tokens stands for (the alphabet of GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class Detokenizer(Protocol):
    """Incremental text of a growing token sequence. Text that was returned never changes."""

    num_chars: int
    """Characters returned so far."""

    def add(self, token_id: int) -> str:
        """Appends a token; returns the text that is decided now, possibly none."""
        ...

    def flush(self) -> str:
        """Returns the undecided text, without an incomplete last character."""
        ...

    def place(self, token_id: int) -> int:
        """Characters before the text of a token that would be added now: where it begins."""
        ...


class ByteDetokenizer:
    """The text of tokens by their bytes. Only the bytes of an incomplete character are withheld; at the end they are
    dropped. Bytes that are no UTF-8 become U+FFFD."""

    def __init__(self, token_bytes: TokenBytes, prompt_token_ids: Sequence[int] = (), *, special: bool = False) -> None:
        """``prompt_token_ids``: the tokens before the text. ``special``: special tokens are a part of it."""
        self._bytes = token_bytes
        self._hidden = frozenset() if special else token_bytes.special_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = any(map(self._own, reversed(prompt_token_ids)))
        for token_id in prompt_token_ids[-_MAX_UNDECIDED_TOKENS:]:
            self._decoder.decode(self._own(token_id))
        self.num_chars = 0

    def token(self, token_id: int) -> bytes:
        """Returns the bytes that a token would have as the next one; of a hidden token, too."""
        own = self._bytes(token_id)
        return own if self._begun or token_id in self._hidden else self._bytes.first(own)

    def add(self, token_id: int) -> str:
        """Appends a token (``Detokenizer.add``)."""
        own = self._own(token_id)
        if not self._begun and own:
            own, self._begun = self._bytes.first(own), True
        text = self._decoder.decode(own)
        self.num_chars += len(text)
        return text

    def flush(self) -> str:
        """Nothing: all whole characters have been returned (``Detokenizer.flush``)."""
        self._decoder.reset()
        return ""

    def place(self, token_id: int) -> int:
        """Position at which the text of a token would begin (``Detokenizer.place``); inside a character, that
        character's.
        """
        own, undecided = self._own(token_id), self._decoder.getstate()[0]
        if not undecided or not own or own[0] in _CONTINUES:
            return self.num_chars
        return self.num_chars + len(undecided.decode("utf-8", "replace"))

    def _own(self, token_id: int) -> bytes:
        return b"" if token_id in self._hidden else self._bytes(token_id)


class WindowDetokenizer:
    """The text of tokens by decoding the last of them again and again, for tokenizers that do not say their bytes.

    Windows, half open, over prompt tail and tokens::

        [prefix, read)   text already returned; decoded again because neighbours influence each other
        [read, end)      tokens whose text is undecided: their bytes end inside a character

    A character that never becomes complete is withheld for at most 16 tokens, and dropped at the end.
    """

    def __init__(self, decode: Decode, prompt_token_ids: Sequence[int] = ()) -> None:
        self.decode_last = decode
        self._ids = list(prompt_token_ids[-_PROMPT_TAIL_TOKENS:])
        self._read = len(self._ids)
        self._prefix_text = decode(self._ids) if self._ids else ""
        self.num_chars = 0

    def add(self, token_id: int) -> str:
        """Appends a token (``Detokenizer.add``)."""
        self._ids.append(token_id)
        text = self.decode_last(self._ids)
        undecided = len(self._ids) - self._read
        if text.endswith(_INCOMPLETE) and undecided <= _MAX_UNDECIDED_TOKENS:
            return ""
        return self._advance(text)

    def flush(self) -> str:
        """Returns the undecided text (``Detokenizer.flush``)."""
        if self._read == len(self._ids):
            return ""
        return self._advance(self.decode_last(self._ids)).rstrip(_INCOMPLETE)

    def place(self, token_id: int) -> int:
        """Position at which the text of a token would begin (``Detokenizer.place``)."""
        return self.num_chars

    def _advance(self, text: str) -> str:
        new_text = text[len(self._prefix_text) :]
        self.num_chars += len(new_text)
        newest = self.decode_last(self._ids[self._read :])
        if newest:  # tokens without text are no neighbours: what follows them is not the start of a text
            del self._ids[: self._read]
            self._prefix_text = newest
        else:
            self._prefix_text = text
        self._read = len(self._ids)
        return new_text
