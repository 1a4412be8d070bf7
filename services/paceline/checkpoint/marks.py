"""Marks of a format that are tokens of a tokenizer, as code points that no text holds."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

import regex

_FIRST, _FIRST_SILENT = 0xD800, 0xDC00
_MAX_MARKS = _FIRST_SILENT - _FIRST
_BLANKS = re.compile(r"^\\s\*(?![+?])")
_META = re.compile(r"([\\.^$*+?{}\[\]|()])")


class Marks:
    """The added tokens whose text stands in the patterns of a format; each is two code points, the second silent.

    A lone surrogate stands for each: a tokenizer makes text of bytes in UTF-8, which has none.
    """

    def __init__(
        self, added: Mapping[int, tuple[str, bool]], patterns: Iterable[str], *, by_text: bool = False
    ) -> None:
        """Finds the marks.

        Args:
            added: (text, True if special) of each added token, by id; text of special tokens is never shown.
            patterns: the format's patterns.
            by_text: ordinary tokens may also spell a mark that is not special, as a grammar allows.
        """
        self._by_other_tokens = {text for text, special in added.values() if by_text and not special}
        source = "\0".join(patterns)
        self.chars: dict[int, str] = {}
        """The code point of a mark, by the id of its token."""
        self.shown: dict[int, str] = {}
        """Code point -> the text that a client sees, for ``str.translate``."""
        self.spelled: dict[int, str] = {}
        """Code point -> the text of its token."""
        self._by_text: dict[str, int] = {}
        for token_id, (text, special) in sorted(added.items(), key=lambda item: (-len(item[1][0]), item[0])):
            if not _may_be_mark(text) or text in self._by_text or len(self.chars) == _MAX_MARKS:
                continue
            if _spelled(text).search(source) is None:
                continue
            i = len(self.chars)
            self._by_text[text] = i
            self.chars[token_id] = chr(_FIRST + i)
            self.shown |= {_FIRST + i: "" if special else text, _FIRST_SILENT + i: ""}
            self.spelled |= {_FIRST + i: text, _FIRST_SILENT + i: text}
        self._find = re.compile("|".join(map(re.escape, self._by_text)) or "(?!)")

    def compile(self, pattern: str) -> Any:
        """A pattern in which each mark that is a token means that token, and its text where ``by_text`` allows it."""
        for text, i in self._by_text.items():
            pattern = _spelled(text).sub(_own(i), pattern)
        for text in self._by_other_tokens & self._by_text.keys():
            own = _own(self._by_text[text])
            pattern = pattern.replace(own, f"(?:{own}|{regex.escape(text)})")
        # Blanks before a mark are taken from their first one on, which takes time in proportion to their number.
        return regex.compile(_BLANKS.sub(r"(?:(?<!\\s)\\s*+)?", pattern), regex.DOTALL)

    def of_text(self, text: str) -> str:
        """A text that will be tokenized as a whole, with the marks in it as their code points."""
        return self._find.sub(lambda found: chr(_FIRST + self._by_text[found[0]]), text)


def silent(char: str) -> str:
    """The mark of a token whose text must not be shown, because it ended the answer."""
    return chr(ord(char) - _FIRST + _FIRST_SILENT)


def _own(i: int) -> str:
    """A pattern of the code points of a mark."""
    return f"[{chr(_FIRST + i)}{chr(_FIRST_SILENT + i)}]"


def _may_be_mark(text: str) -> bool:
    return len(text) > 2 and re.search(r"[^\w\s]", text) is not None


@functools.lru_cache(4096)
def _spelled(text: str) -> re.Pattern[str]:
    """The ways to write a text in a regular expression, but for names of its groups."""
    ways = {re.escape(text), _META.sub(r"\\\1", text), *(() if _META.search(text) else (text,))}
    return re.compile(r"(?<!\?P)(?:" + "|".join(map(re.escape, sorted(ways, key=len, reverse=True))) + ")")
