"""Log probabilities of tokens as the clients of OpenAI and vLLM read them, and the places of tokens in a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from paceline.checkpoint.token_text import ByteDetokenizer, Detokenizer
from paceline.checkpoint.tokenizer import Tokenizer
from paceline.types import Chunk, TokenLogprob

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot hold."""


def shown(logprob: float) -> float:
    """A log probability as JSON can hold it."""
    return max(logprob, LEAST_LOGPROB)


def bytes_of(tokenizer: Tokenizer, token_id: int, text: Detokenizer | None = None) -> bytes | None:
    """The bytes of a token, a special one included; None where the tokenizer does not tell.

    ``text``: that in which it is the next token; the first one may lose a space.
    """
    if isinstance(text, ByteDetokenizer):
        return text.token(token_id)
    if tokenizer.token_bytes.exact:
        return tokenizer.token_bytes(token_id)
    decoded = tokenizer.decode([token_id], special=True)
    return None if "\N{REPLACEMENT CHARACTER}" in decoded else decoded.encode()


def name_of(token: bytes | None, mark: str = "") -> str:
    """Returns a token as text; a token that is not valid UTF-8 as ``mark`` and escaped bytes."""
    if token is None:
        return "\N{REPLACEMENT CHARACTER}"
    try:
        return token.decode()
    except UnicodeDecodeError:
        return mark + token.decode("utf-8", "backslashreplace")


def token_logprobs(chunk: Chunk, tokenizer: Tokenizer, *, as_ids: bool = False) -> list[dict[str, Any]]:
    """Log probabilities of the tokens of a chunk, and of the likeliest at each position, as chats show them.

    ``as_ids``: tokens are named by their ids.
    """

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        token = bytes_of(tokenizer, token_id)
        name = f"token_id:{token_id}" if as_ids else name_of(token)
        return {"token": name, "logprob": shown(logprob), "bytes": None if token is None else list(token)}

    tops = chunk.top_logprobs or ((),) * len(chunk.token_ids)
    return [
        entry(token_id, logprob) | {"top_logprobs": [entry(*other) for other in top]}
        for token_id, logprob, top in zip(chunk.token_ids, chunk.logprobs, tops, strict=True)
    ]


def prompt_entries(
    scores: Sequence[TokenLogprob | None], token_ids: Sequence[int], tokenizer: Tokenizer
) -> Iterator[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: for each token of a prompt, by id, the likeliest at its position and itself.

    An entry is made when it is written: all of a long prompt take a hundred megabytes.
    """

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": shown(logprob), "rank": rank, "decoded_token": name_of(bytes_of(tokenizer, token_id))}

    for token_id, score in zip(token_ids, scores, strict=True):
        if score is None:
            yield None
            continue
        own = {str(token_id): entry(token_id, score.logprob, score.rank)}
        yield own | {str(other): entry(other, value, i) for i, (other, value) in enumerate(score.top, 1)}


class TokenColumns:
    """OpenAI's ``logprobs`` of a completion: the tokens of its text, by columns."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        """``as_ids``: tokens are named by their ids."""
        self._tokenizer, self._as_ids = tokenizer, as_ids
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._tops: list[dict[str, float] | None] = []
        self._offsets: list[int] = []
        self._num_taken = 0

    def add(
        self,
        token_id: int,
        logprob: float | None,
        top: Sequence[tuple[int, float]],
        offset: int,
        text: Detokenizer | None = None,
    ) -> None:
        """Adds the next token.

        Args:
            token_id: the token.
            logprob: None for the first of a prompt, which nothing precedes.
            top: the likeliest tokens at its position; listed after the token itself, even if likelier.
            offset: characters before its text.
            text: the text that it continues (``bytes_of``).
        """
        name = self._name(token_id, text)
        self._tokens.append(name)
        self._logprobs.append(None if logprob is None else shown(logprob))
        self._offsets.append(offset)
        if logprob is None:
            self._tops.append(None)
            return
        tops = {name: shown(logprob)}  # first, as clients of vLLM read it
        for other, value in top:
            tops.setdefault(self._name(other, text), shown(value))
        self._tops.append(tops)

    def _name(self, token_id: int, text: Detokenizer | None) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        return name_of(bytes_of(self._tokenizer, token_id, text), "bytes:")

    def take(self) -> dict[str, Any] | None:
        """The columns of the tokens that were added since; None if there are none."""
        begin, self._num_taken = self._num_taken, len(self._tokens)
        return self.whole(begin) if begin < len(self._tokens) else None

    def whole(self, begin: int = 0) -> dict[str, Any]:
        """The columns, from one of the tokens on."""
        return {
            "tokens": self._tokens[begin:],
            "token_logprobs": self._logprobs[begin:],
            "top_logprobs": self._tops[begin:],
            "text_offset": self._offsets[begin:],
        }


def echoed(tokenizer: Tokenizer, prompt: str | Sequence[int], token_ids: Sequence[int]) -> tuple[str, list[int]]:
    """Returns the text of a prompt as an answer repeats it, and the offset of each of its tokens in it.

    A prompt given as text is repeated as it is, if its tokens decode to exactly this text. A special token is repeated
    by its name if the prompt holds it, and left out if the tokenizer added it.
    """
    given = prompt if isinstance(prompt, str) else None
    text = tokenizer.detokenizer(special=True)
    special = tokenizer.token_bytes.special_ids
    offsets: list[int] = []
    parts: list[str] = []
    for token_id in token_ids:
        offsets.append(text.place(token_id))
        if given is not None and token_id in special:
            name = name_of(bytes_of(tokenizer, token_id))
            if not given.startswith(name, text.num_chars):
                continue
        parts.append(text.add(token_id))
    found = "".join(parts)
    if given is not None and found == " " + given:  # the tokenizer puts a space before a text
        return given, [max(0, offset - 1) for offset in offsets]
    return found, offsets
