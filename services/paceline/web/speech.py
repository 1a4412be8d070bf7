"""The tokens of an answer as the parts of a message: content, reasoning, tool calls."""

from __future__ import annotations

import secrets
import string
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from paceline.checkpoint.answer_formats import CallIds
from paceline.checkpoint.answers import AnswerParser, Reading, Said, joined
from paceline.checkpoint.marks import silent
from paceline.checkpoint.tokenizer import Tokenizer
from paceline.types import Chunk, SamplingParams


@dataclass(frozen=True, slots=True)
class Part:
    """One part of an answer: text of the content or of the reasoning, or a tool call with what there is of it."""

    kind: str
    """``content``, ``reasoning``, ``tool_call``, or ``tool_arguments`` that go on with the last call."""
    text: str = ""
    """The text; of a call the JSON text of its arguments, or the first of it."""
    name: str = ""
    """The function that is called."""
    call_id: str = ""
    places: tuple[int, ...] = ()
    """Indices of the tokens of the answer, from 0, whose text this is, for content."""


@dataclass(slots=True)
class _Piece:
    """The text of one token, or a mark."""

    text: str
    shown: str
    """The text that clients see. A mark has its text, or none if it is special."""
    place: int | None
    """Index of the token in the answer. None: its text is never content."""


class Speech:
    """One answer, read token by token.

    Its text is the text of the chunks. Where a chunk withholds text, or a stop string cuts it, the marks after that
    text wait or are dropped, too.
    """

    def __init__(
        self,
        parser: AnswerParser,
        reading: Reading,
        tokenizer: Tokenizer,
        token_ids: Sequence[int],
        ends: Collection[int],
        call_ids: CallIds = "random",
        *,
        skips_special: bool = True,
    ) -> None:
        """Describes the answer.

        Args:
            parser: reads it.
            reading: what made the parser.
            tokenizer: that of the model.
            token_ids: the prompt.
            ends: tokens that end the answer and are not shown.
            call_ids: the form of ids of calls.
            skips_special: the text of the chunks shows no special tokens.
        """
        self._parser, self._marks, self._added = parser, reading.marks, reading.added
        self._detokenizer = tokenizer.detokenizer(token_ids, special=not skips_special)
        self._skips_special = skips_special
        self._ends, self._call_ids = frozenset(ends), call_ids
        self._pieces: deque[_Piece] = deque()  # not read yet
        self.num_allowed = 0  # code points of the chunks' text that were not read yet
        self._num_tokens = self._num_calls = self._length = 0
        self._places: deque[tuple[int, int]] = deque()  # (end in the answer as read, index) of each token
        self.num_reasoning_tokens = 0

    def take(self, chunk: Chunk) -> Iterator[Part]:
        """The parts that a chunk completes."""
        for token_id in chunk.token_ids:
            self._add(token_id)
        self.num_allowed += len(chunk.text)
        yield from self._parts(self._read())

    def finish(self) -> Iterator[Part]:
        """The parts that were open at the end."""
        self._pieces.append(_Piece(text := self._detokenizer.flush(), text, None))
        yield from self._parts([*self._read(), *self._parser.feed("", ended=True)])

    @property
    def cuts_call(self) -> bool:
        """True if the answer has ended within its last call."""
        return self._parser.cuts_call

    def _add(self, token_id: int) -> None:
        place, self._num_tokens = self._num_tokens, self._num_tokens + 1
        mark = self._marks.chars.get(token_id)
        if token_id in self._ends:
            if mark is not None:
                self._pieces.append(_Piece(silent(mark), "", None))
            return
        text = self._detokenizer.add(token_id)
        name, special = self._added.get(token_id, ("", False))
        special = special and self._skips_special
        if mark is None or not (special or text.endswith(name)):
            self._pieces.append(_Piece(text, text, place))
            return
        shown = "" if special else name
        if before := text.removesuffix(shown):
            self._pieces.append(_Piece(before, before, None))
        self._pieces.append(_Piece(mark, shown, place))

    def _read(self) -> list[Said]:
        """Returns the parts that the available text decides."""
        said: list[Said] = []
        while self._pieces:
            piece = self._pieces[0]
            text = piece.text
            if len(piece.shown) > self.num_allowed:
                text = piece.shown[: self.num_allowed]
                if not text:
                    break
                piece.text = piece.shown = piece.shown[len(text) :]  # the rest of a cut mark is text
                self.num_allowed = 0
            else:
                self.num_allowed -= len(piece.shown)
                self._pieces.popleft()
                if piece.place is not None:  # one without text is a part of the character that follows
                    self._places.append((self._length + max(len(text), 1), piece.place))
            self._length += len(text)
            if text:
                said += self._parser.feed(text)
        return said

    def _parts(self, said: Iterable[Said]) -> Iterator[Part]:
        for one in joined(said):
            places = self.places_of(one)
            if one.call is not None:
                call_id = one.call.call_id or self._call_id(one.call.name)
                self._num_calls += 1
                yield Part("tool_call", one.call.arguments, one.call.name, call_id)
                continue
            if one.kind == "arguments":
                yield Part("tool_arguments", one.text)
                continue
            if one.kind == "reasoning":
                self.num_reasoning_tokens += len(places)
            yield Part(one.kind, one.text, places=tuple(places) if one.kind == "content" else ())

    def places_of(self, one: Said) -> list[int]:
        """Returns the tokens of this text. Earlier tokens, such as marks, are not part of the answer's text."""
        found = []
        while self._places and self._places[0][0] <= one.end:
            end, place = self._places.popleft()
            if end > one.start:
                found.append(place)
        return found

    def _call_id(self, name: str) -> str:
        """An id in the form that the chat template demands when it is sent back."""
        if self._call_ids == "kimi":
            return f"functions.{name}:{self._num_calls}"
        if self._call_ids == "mistral":
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


def ends_of(sampling: SamplingParams, eos_token_ids: Collection[int]) -> frozenset[int]:
    """The tokens that end an answer and are not shown."""
    if sampling.include_stop_str_in_output:
        return frozenset()
    return frozenset((*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)))
