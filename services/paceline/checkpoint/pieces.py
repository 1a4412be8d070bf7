"""Bytes of each ordinary token of a tokenizer, names of its special tokens, and the tokens of any bytes."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.checkpoint.tokenizer import Tokenizer


class Pieces:
    """The content of each token of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        token_bytes = tokenizer.token_bytes
        added = tokenizer.added_tokens
        self.pieces: dict[int, bytes | str] = {}
        """Content of each token, by its id: bytes, or the name of a special token, which is no part of a text."""
        for token, token_id in sorted(tokenizer.vocab.items(), key=lambda item: item[1]):
            name, is_special = added.get(token_id, (token, False))
            self.pieces[token_id] = name if is_special else token_bytes.of(name)
        self.ids: dict[bytes | str, int] = {}
        """The first id of each piece."""
        for token_id, piece in self.pieces.items():
            if piece:
                self.ids.setdefault(piece, token_id)
        around = tokenizer.encode("")
        self.prefix = [token_id for token_id in around if token_id not in tokenizer.eos_token_ids]
        """Token ids that the tokenizer puts before a text."""
        first = tokenizer.encode_text("a")[:1]
        self._adds_space = bool(first) and bytes_at(self.pieces, first[0]).startswith(b" ")

    def encode(self, text: bytes, *, start: bool) -> list[int]:
        """Tokens of a text; bytes that are no UTF-8 become tokens of one byte, as far as there are any."""
        encoded: list[int] = []
        while text:
            try:
                return encoded + self.encode_text(text.decode(), start=start and not encoded)
            except UnicodeDecodeError as error:
                if error.start:
                    encoded += self.encode_text(text[: error.start].decode(), start=start and not encoded)
                single = [self.ids.get(text[i : i + 1]) for i in range(error.start, error.end)]
                encoded += [token_id for token_id in single if token_id is not None]
                text = text[error.end :]
        return encoded

    def encode_text(self, text: str, *, start: bool) -> list[int]:
        """Tokens of a text; one that does not begin at the ``start`` gets no space that it has not."""
        if not self._adds_space:
            return self.tokenizer.encode_text(text)
        if start:
            return self.tokenizer.encode_text(text.removeprefix(" "))
        token_ids, behind = self.tokenizer.encode_text("\n" + text), len(b" \n")
        for i, token_id in enumerate(token_ids):
            behind -= len(bytes_at(self.pieces, token_id))
            if behind <= 0:
                return token_ids[i + 1 :] if behind == 0 else self.tokenizer.encode_text(text)
        return []


def bytes_at(pieces: Mapping[int, bytes | str], token_id: int) -> bytes:
    """The bytes of a token, none of a special one."""
    piece = pieces.get(token_id, b"")
    return piece if isinstance(piece, bytes) else b""
