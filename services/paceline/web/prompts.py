"""Prompts that are made of tokens here: cut to a length, with a gap to fill, and words as sequences of tokens."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from paceline.checkpoint.tokenizer import Tokenizer, check_text
from paceline.errors import InvalidRequestError, PromptTooLongError
from paceline.errors.refusals import shown

_BEFORE, _AFTER = "before", "after"
"""Stand for the text before the gap, and the text after it."""
_FORMS = (
    ("<|fim_prefix|>", _BEFORE, "<|fim_suffix|>", _AFTER, "<|fim_middle|>"),  # Qwen Coder, CodeGemma, Granite 4
    ("<fim_prefix>", _BEFORE, "<fim_suffix>", _AFTER, "<fim_middle>"),  # StarCoder, Granite Code
    ("<fim-prefix>", _BEFORE, "<fim-suffix>", _AFTER, "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", _BEFORE, "<｜fim▁hole｜>", _AFTER, "<｜fim▁end｜>"),
    ("▁<PRE>", _BEFORE, "▁<SUF>", _AFTER, "▁<MID>"),  # Code Llama
    ("[SUFFIX]", _AFTER, "[PREFIX]", _BEFORE),  # Codestral
)
"""Marks of the tokenizers that know how to fill a gap, in the order of the prompt."""
_ENDS = ("▁<EOT>", "<|fim_pad|>", "<fim_pad>", "<|file_sep|>", "<file_sep>", "<|file_separator|>", "<|repo_name|>")
"""Tokens after which nothing belongs in the gap."""
_LIKELY_CHARS = 16
"""Characters of which two tokens are made at least, most often."""
_ODD = "\N{WHITE SMILING FACE}"
"""A text before which a tokenizer may write a space, in place of a text that must stay as it is."""


def filling(
    tokenizer: Tokenizer, before: str | Sequence[int], after: str, max_model_len: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The prompt that has a gap between two texts filled, and the tokens that end what fills it.

    Raises InvalidRequestError if the tokenizer has no marks of a gap, or the texts are too long.
    """
    form, ids, ends = marks_of(tokenizer)
    if not form:
        raise InvalidRequestError(f"suffix is {shown(after)}: this tokenizer has no tokens that mark a gap to fill")
    size, limit = len(before) + len(after), max_model_len * tokenizer.max_token_bytes
    if size > limit:
        raise PromptTooLongError(f"prompt and suffix have {size} characters: at most {limit} can fit the context")
    for text in (before, after):
        if isinstance(text, str):
            check_text(tokenizer, text, max_model_len)
    texts = {
        _BEFORE: list(before) if not isinstance(before, str) else tokenizer.encode_text(before),
        _AFTER: tokens_within(tokenizer, after),
    }
    found = list(opening_tokens(tokenizer))
    for piece in form:
        found += texts[piece] if piece in texts else [ids[piece]]
    return tuple(found), ends


@functools.lru_cache(maxsize=4)
def marks_of(tokenizer: Tokenizer) -> tuple[tuple[str, ...], dict[str, int], tuple[int, ...]]:
    """The form of a prompt with a gap, () if there is none; the ids of its marks, and of the tokens that end it."""
    ids = {**tokenizer.vocab, **{text: token_id for token_id, (text, _) in tokenizer.added_tokens.items()}}
    for form in _FORMS:
        if all(piece in ids or piece in (_BEFORE, _AFTER) for piece in form):
            return form, {piece: ids[piece] for piece in form if piece in ids}, tuple(ids[e] for e in _ENDS if e in ids)
    return (), {}, ()


def opening_tokens(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The special tokens that the tokenizer puts before a prompt."""
    bare, whole = tokenizer.encode_text("a"), list(tokenizer.encode("a"))
    at = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
    return tuple(whole[:at])


def tokens_within(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of a text in the middle of a prompt: without the space that some tokenizers write before each text."""
    odd = tokenizer.encode_text(_ODD)
    if not text or tokenizer.encode_text(f"{_ODD}ab")[len(odd) :] == tokenizer.encode_text("ab"):
        return tokenizer.encode_text(text) if text else []
    ids = tokenizer.encode_text(_ODD + text)
    return ids[len(odd) :] if ids[: len(odd)] == odd else tokenizer.encode_text(text)


def truncated(
    tokenizer: Tokenizer, prompt: str | Sequence[int], num_tokens: int, side: str, *, special: bool = True
) -> tuple[int, ...]:
    """Returns the last (``side`` left) or first tokens of a prompt. Tokens that the tokenizer puts before a text stay.

    ``special``: True: the tokenizer adds its special tokens to a text.
    """
    if not isinstance(prompt, str):
        return _cut(tuple(prompt), num_tokens, side)
    size = _LIKELY_CHARS * num_tokens + 64
    while True:  # a cut text has other tokens at the cut alone
        text = prompt[-size:] if side == "left" else prompt[:size]
        ids = tokenizer.encode(text) if special else tuple(tokenizer.encode_text(text))
        if len(ids) >= 2 * num_tokens or size >= len(prompt):
            break
        size *= 4
    opening = opening_tokens(tokenizer) if special else ()
    if len(ids) <= num_tokens or ids[: len(opening)] != opening or len(opening) >= num_tokens:
        return _cut(ids, num_tokens, side)
    return opening + _cut(ids[len(opening) :], num_tokens - len(opening), side)


def _cut(ids: tuple[int, ...], num_tokens: int, side: str) -> tuple[int, ...]:
    return ids[-num_tokens:] if side == "left" else ids[:num_tokens]


def word_ids(tokenizer: Tokenizer, words: Iterable[str | Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Sequences of tokens that write these words, at the beginning of a text and after a space.

    Raises InvalidRequestError for a word of no token.
    """
    found: list[tuple[int, ...]] = []
    for word in words:
        if not isinstance(word, str):
            found.append(tuple(word))
            continue
        first = tuple(tokenizer.encode_text(word.lstrip()))
        spaced = tuple(tokenizer.encode_text(f" {word.lstrip()}"))
        if not first:
            raise InvalidRequestError(f"bad_words holds {shown(word)}: a word of at least one token is needed")
        found.append(first)
        if spaced[0] != first[0] and len(spaced) == len(first):
            found.append(spaced)
    return tuple(found)
