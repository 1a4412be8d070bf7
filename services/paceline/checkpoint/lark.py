"""Lark grammars of requests in terms of llguidance, which knows special tokens alone by their names and ids."""

from __future__ import annotations

import json
import re

from paceline.checkpoint.grammar_tokenizer import GrammarTokenizer

_LEXEME = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/|(?:\#|//)[^\n]*|(?P<token><[^<>\s]+>)', re.DOTALL)
"""Strings, regular expressions and comments, in which ``<name>`` means nothing, and names of tokens."""


def quoted(text: str) -> str:
    """A text as a string of a grammar."""
    return json.dumps(text, ensure_ascii=False)


def with_text_of_tokens(grammar: str, tokens: GrammarTokenizer) -> str:
    """Returns the grammar with names and ids of ordinary tokens (``<think>`` may be one) replaced by their text."""

    def written(found: re.Match[str]) -> str:
        name = found["token"]
        if name is None or name in tokens.specials:
            return found[0]
        if not name.startswith("<["):
            return quoted(name) if tokens.is_text(name) else name
        ids = name[2:-2]
        if ids.isdecimal() and (text := tokens.text_of(int(ids))) is not None:
            return quoted(text)
        return name

    return _LEXEME.sub(written, grammar)
