"""A tokenizer as llguidance is to see it: tokens are the bytes that they stand for in an answer, special ones none.

An added token that is not special, such as the ``<tool_call>`` of Qwen 3, is text. It is allowed wherever its text is
allowed, in any form. A special token is never text, whatever its name spells. So every token of a mask is one that the
grammar takes.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.checkpoint.pieces import Pieces

_MARKER = b"\xff"
"""llguidance's prefix for the name of a special token. It is not valid UTF-8, so no text holds it."""


class GrammarTokenizer:
    """The interface that ``llguidance.LLTokenizer`` needs: the bytes of all tokens, and the tokens of a text."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, pieces: Pieces, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Describes the first ``vocab_size`` ids of a tokenizer; ``eos_token_ids`` are special in any case."""
        self._pieces = pieces
        self.eos_token_ids, self.eos_token_id = eos_token_ids, eos_token_ids[0]
        self.specials: dict[str, int] = {}
        """Id of each special token by its name."""
        self.tokens: list[bytes] = [b""] * vocab_size
        """Bytes of each token, of a special one its name. None: it is in no answer that has a form."""
        for token_id, piece in pieces.pieces.items():
            if token_id >= vocab_size:
                continue
            if isinstance(piece, str) or token_id in eos_token_ids:
                name = piece if isinstance(piece, str) else piece.decode("utf-8", "replace")
                self.specials[name] = token_id
                self.tokens[token_id] = name.encode()
            elif piece == _MARKER or not piece.startswith(_MARKER):
                self.tokens[token_id] = piece
        self._special_ids = {*self.specials.values(), *eos_token_ids}
        self.special_token_ids = sorted(self._special_ids)
        self._longest = max(map(len, self.tokens))

    def __call__(self, text: str) -> list[int]:
        """Returns ordinary tokens that spell a text exactly, up to the first part that no token spells."""
        return self._longest_first(text.encode())

    def unwritable(self, text: str) -> str | None:
        """A character of a text that no tokens write; None if there is none."""
        return next((c for c in dict.fromkeys(text) if not self._longest_first(c.encode(), whole=True)), None)

    def text_of(self, token_id: int) -> str | None:
        """The text of an ordinary token; None: it has none, or a part of a character."""
        if not self._is_ordinary(token_id):
            return None
        try:
            return self.tokens[token_id].decode() or None
        except UnicodeDecodeError:
            return None

    def is_text(self, name: str) -> bool:
        """True for the text of an ordinary token."""
        return self._ordinary(name.encode()) is not None

    def _is_ordinary(self, token_id: int) -> bool:
        return token_id < len(self.tokens) and token_id not in self._special_ids

    def _ordinary(self, part: bytes) -> int | None:
        token_id = self._pieces.ids.get(part)
        return token_id if token_id is not None and self._is_ordinary(token_id) else None

    def _longest_first(self, text: bytes, *, whole: bool = False) -> list[int]:
        """The longest tokens that fit, as far as there are any; ``whole``: none unless they are all of the text."""
        found, at = list[int](), 0
        while at < len(text):
            for end in range(min(len(text), at + self._longest), at, -1):
                if (token_id := self._ordinary(text[at:end])) is not None:
                    found.append(token_id)
                    at = end
                    break
            else:
                return [] if whole else found
        return found
