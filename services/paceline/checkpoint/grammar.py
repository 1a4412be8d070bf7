"""Structured output: which tokens may come next, by llguidance over the tokenizer of a checkpoint.

A grammar is compiled once and kept; each session then has a matcher of its own, which holds the state after the
committed tokens. It answers for any continuation of these, as the rows of a verification ask, and goes back. Knows
neither models nor logits; llguidance is imported by the first request that needs it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.grammar_tokenizer import GrammarTokenizer
from paceline.checkpoint.json_schema import WHITESPACE, as_compiled, read_schema
from paceline.checkpoint.lark import quoted, with_text_of_tokens
from paceline.checkpoint.pieces import Pieces
from paceline.checkpoint.structural_tag import lark_of
from paceline.checkpoint.tokenizer import Tokenizer
from paceline.errors import ConfigError, InvalidRequestError, PacelineError
from paceline.types import StructuredOutput

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher, LLTokenizer
    from numpy.typing import NDArray

_MAX_COMPILED = 64
"""Compiled grammars that are kept: those that were used last, as far as they fit ``_MAX_COMPILED_BYTES``."""
_MAX_COMPILED_BYTES = 64 << 20
_MAX_GRAMMAR_SYMBOLS = 200_000
_MAX_LEXER_STATES = 10_000
"""The most states of one grammar's lexer, each of about 1 KiB: exponential automata come to their end here."""
_MAX_ITEMS_OF_ROW = 1_000
"""The most ways in which a parser may be within its rules at once. Its work grows with their third power: at most about
a fifth of a second."""
_MAX_ITEMS_OF_STEP = 10_000
_LEXER_FUEL_OF_STEP = 200_000
"""Work of a single mask; all of it takes about 15 ms."""
_INITIAL_LEXER_FUEL = 1_000_000
"""Work of compiling the regular expressions; all of it takes about 20 ms."""
_FREE_S = 0.15
"""CPU time that each session may spend in its grammar, and further time for each of its tokens: see ``Matcher``."""
_FREE_S_PER_TOKEN = 0.005
_MAX_REASON_CHARS = 400
_ATTRIBUTE = re.compile(r"^[ \t]*[A-Za-z_]\w*\[[^\]\n]*\b(temperature|max_tokens)\s*=", re.MULTILINE)
"""Attributes of a Lark rule that ask for more than a form."""


class _Compiled(NamedTuple):
    """A grammar, and the bytes by which the process grew when it was compiled."""

    prototype: LLMatcher
    num_bytes: int


class Grammars:
    """Compiles structured outputs for one vocabulary, and keeps what it has compiled. Thread-safe."""

    def __init__(
        self, tokenizer: Tokenizer | Callable[[], Tokenizer], vocab_size: int, eos_token_ids: Sequence[int] = ()
    ) -> None:
        """Describes a vocabulary; nothing is read yet.

        Args:
            tokenizer: the target's, or what loads it when it is needed.
            vocab_size: ids of the masks, at least those of the tokenizer.
            eos_token_ids: allowed where the output may end, and nowhere else; none: those of the tokenizer.
        """
        self._source, self.vocab_size, self._given_eos = tokenizer, vocab_size, eos_token_ids
        self._lock = threading.Lock()
        self._compiled: OrderedDict[StructuredOutput, _Compiled] = OrderedDict()

    @classmethod
    def of(cls, checkpoint: Checkpoint, vocab_size: int) -> Self:
        """Those of a checkpoint's own tokenizer, for a model of ``vocab_size`` ids; nothing is read yet."""
        return cls(lambda: checkpoint.tokenizer, vocab_size, checkpoint.eos_token_ids)

    def vocabulary(self) -> tuple[Tokenizer, int, list[int]]:
        """What another process makes the same grammars from: the arguments of this class, without anything to load.

        Raises InvalidRequestError if this vocabulary cannot be constrained.
        """
        try:
            source = self._source() if callable(self._source) else self._source
        except ConfigError as error:
            raise InvalidRequestError(f"structured_output is given, but {error}") from error
        ends = sorted({token for token in self._given_eos or source.eos_token_ids if 0 <= token < self.vocab_size})
        if not ends:
            raise InvalidRequestError(
                "structured_output is given, but the model has no end-of-sequence token that could end it"
            )
        if not source.token_bytes.exact:
            raise InvalidRequestError(
                f"structured_output is given, but the tokenizer {source.name!r} has no tokenizer.json form "
                "whose decoder writes each token by itself"
            )
        return source, self.vocab_size, ends

    @cached_property
    def _tokens(self) -> GrammarTokenizer:
        source, vocab_size, ends = self.vocabulary()
        return GrammarTokenizer(Pieces(source), vocab_size, ends)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        wrapper: Any = self._tokens
        return LLTokenizer(wrapper, eos_token=[*self._tokens.eos_token_ids])

    def compile(self, form: StructuredOutput) -> None:
        """Compiles a form, unless that has been done. At most about a fifth of a second, without the interpreter lock.

        Raises:
            InvalidRequestError: it is malformed, too large, or not supported, with the place; or this vocabulary
                cannot be constrained.
        """
        self._prototype(form)

    def matcher(self, form: StructuredOutput, token_ids: Sequence[int] = (), *, lenient: bool = False) -> Matcher:
        """The state of a session whose output is ``token_ids`` so far.

        ``lenient``: places that exceed the bounds of a step are left unconstrained, as a draft may.

        Raises:
            InvalidRequestError: as ``compile``, or the tokens are not the beginning of an output of this form.
        """
        ends = self._tokenizer.eos_tokens
        matcher = Matcher(self._prototype(form), lambda: self._new(form), self.vocab_size, ends, lenient=lenient)
        if not matcher.append(token_ids):
            raise InvalidRequestError(
                f"the output so far, of {len(token_ids)} tokens, is not the beginning of one that "
                f"structured_output.{form.kind} allows"
            )
        return matcher

    def try_load(self) -> None:
        """Reads the tokenizer now, so that no request has to wait; one that cannot be used is left to the requests."""
        with contextlib.suppress(PacelineError):
            _ = self._tokenizer

    def _prototype(self, form: StructuredOutput) -> LLMatcher:
        with self._lock:  # two requests with one grammar compile it once
            found = self._compiled.get(form)
            if found is None:
                before = _resident_bytes()
                prototype = self._compile(form)
                found = self._compiled[form] = _Compiled(prototype, max(0, _resident_bytes() - before))
                self._forget()
            self._compiled.move_to_end(form)
            return found.prototype

    def _forget(self) -> None:
        """Drops the grammars that were used longest ago, as far as all together are too many or too large."""
        size = sum(one.num_bytes for one in self._compiled.values())
        while len(self._compiled) > 1 and (len(self._compiled) > _MAX_COMPILED or size > _MAX_COMPILED_BYTES):
            size -= self._compiled.popitem(last=False)[1].num_bytes

    def _compile(self, form: StructuredOutput) -> LLMatcher:
        if (character := self._tokens.unwritable(_literals(form, self._tokens.specials))) is not None:
            raise InvalidRequestError(
                f"structured_output.{form.kind} holds {character!r}: no tokens of this model write it"
            )
        matcher = self._new(form)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise InvalidRequestError(f"structured_output.{form.kind} cannot be compiled: {_reason(matcher)}")
        return matcher

    def _new(self, form: StructuredOutput) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        tokenizer = self._tokenizer
        limits = LLParserLimits(
            initial_lexer_fuel=_INITIAL_LEXER_FUEL,
            step_lexer_fuel=_LEXER_FUEL_OF_STEP,
            max_items_in_row=_MAX_ITEMS_OF_ROW,
            step_max_items=_MAX_ITEMS_OF_STEP,
            max_lexer_states=_MAX_LEXER_STATES,
            max_grammar_size=_MAX_GRAMMAR_SYMBOLS,
            verbose_errors=False,
        )
        return LLMatcher(tokenizer, _grammar_of(form, self._tokens), log_level=0, limits=limits)


def _grammar_of(form: StructuredOutput, tokens: GrammarTokenizer) -> str:
    """The form in llguidance's own terms. Raises InvalidRequestError."""
    from llguidance import LLMatcher, grammar_from

    if form.regex is not None:
        return str(LLMatcher.grammar_from_regex(form.regex))
    if form.structural_tag is not None:
        return str(LLMatcher.grammar_from_lark(lark_of(form.structural_tag, tokens.specials)))
    if form.grammar is not None:
        if found := _ATTRIBUTE.search(form.grammar):
            raise InvalidRequestError(
                f"structured_output.grammar gives a rule the attribute {found[1]!r}: it is not supported"
            )
        try:
            return str(grammar_from("grammar", with_text_of_tokens(form.grammar, tokens)))
        except Exception as error:  # whatever its converter raises
            raise InvalidRequestError(f"structured_output.grammar cannot be compiled: {error}") from error
    if form.choice:  # a terminal: however many texts there are, the parser is in one place
        return str(LLMatcher.grammar_from_lark(f"start: TEXT\nTEXT: {' | '.join(map(quoted, form.choice))}"))
    text = form.text if form.json_schema is None else json.dumps(as_compiled(read_schema(form.json_schema)))
    try:
        return str(LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": WHITESPACE}))
    except ValueError as error:
        raise InvalidRequestError(f"structured_output.json_schema cannot be compiled: {error}") from None


def _resident_bytes() -> int:
    """Memory of this process; 0 where the platform does not tell."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _literals(form: StructuredOutput, specials: Collection[str]) -> str:
    """Characters of text that outputs hold: all of a choice, and those of other forms that are no part of their
    notation. Names of special tokens in a structural tag are tokens, not text.
    """
    if form.choice:
        return "".join(form.choice)
    text = form.text
    if form.json_schema is not None or form.structural_tag is not None:
        with contextlib.suppress(ValueError, RecursionError):  # which the checks of these forms say
            text = json.dumps(json.loads(text), ensure_ascii=False)
    if form.structural_tag is not None:
        for name in sorted(specials, key=len, reverse=True):
            text = text.replace(json.dumps(name, ensure_ascii=False)[1:-1], "")
    return "".join(c for c in text if not c.isascii())


def _reason(matcher: LLMatcher) -> str:
    """The fault that the library reports, in one line of bounded length."""
    text = re.sub(r"\s+", " ", matcher.get_error().split("<state>")[0]).strip()
    text = text.removesuffix(" <non-verbose/>")
    if text.startswith("NoExtension"):
        return "no text has this form"
    return text if len(text) <= _MAX_REASON_CHARS else text[:_MAX_REASON_CHARS] + "..."


class Matcher:
    """The state of one session's grammar after its committed tokens. Owned by one engine.

    Its work has a budget of CPU time, which grows with each token. Beyond it the masks behind drafted tokens are not
    computed, so the session is decoded plainly; a session whose committed tokens alone exceed it fails.
    """

    def __init__(
        self,
        prototype: LLMatcher,
        anew: Callable[[], LLMatcher],
        vocab_size: int,
        eos_token_ids: Collection[int],
        *,
        lenient: bool = False,
    ) -> None:
        """``prototype``: its copies share what they have found out; ``anew``: one that has found out nothing."""
        import numpy  # engines have it; the command line is up without it

        self._numpy = numpy
        self.failure = ""
        """Reason why some place could not be decided; empty while none exceeded the bounds."""
        self._anew, self._vocab_size, self._lenient = anew, vocab_size, lenient
        self._eos_token_ids = eos_token_ids
        self._tokens: list[int] = []
        self._path: tuple[int, ...] = ()
        """Tokens behind the committed ones that the state has consumed too."""
        self._known: dict[tuple[int, ...], NDArray[np.uint8]] = {}
        """Masks of continuations of the committed tokens."""
        self._state = prototype.deep_copy()
        self._lost = False
        self._drafted_s = self._committed_s = 0.0
        self._num_bytes = 4 * -(-vocab_size // 32)
        self._unused_mask = self._numpy.empty(self._num_bytes, self._numpy.uint8)

    def append(self, token_ids: Sequence[int]) -> bool:
        """Commits tokens; False if one of them was not allowed, after which none is.

        What comes with or after the end-of-sequence token of a complete output is not looked at.
        """
        began = time.thread_time()
        allowed = self._append(tuple(token_ids))
        self._committed_s += time.thread_time() - began
        return allowed

    def _append(self, tokens: tuple[int, ...]) -> bool:
        followed = self._path[: len(tokens)] == tokens
        num_consumed = len(tokens) if followed else self._move(tokens)
        self._known.clear()
        self._tokens += tokens
        self._path = self._path[len(tokens) :] if followed else ()
        if self._state.is_error():
            num_lacking = self._restart()
            if self._state.is_error():
                return not self._lost  # the next mask tells why
        else:
            num_lacking = len(tokens) - num_consumed
        if num_lacking > len(tokens) or (num_lacking and not self._ends(tokens[-num_lacking])):
            self._lost, self.failure = True, "a token came that it does not allow"
        return not self._lost

    def _ends(self, token_id: int) -> bool:
        return token_id in self._eos_token_ids and bool(self._state.is_accepting() or self._state.is_stopped())

    def masks(self, suffixes: Sequence[tuple[int, ...]]) -> NDArray[np.uint8]:
        """The tokens that may follow each of ``suffixes`` after the committed tokens.

        Suffixes that begin alike share the work, those of later calls too, and what was found stays known until tokens
        are committed. A suffix that the grammar forbids has no next token, and is left unconstrained: no row below a
        forbidden token matters.

        Returns:
            [rows, bytes] with bit v % 8 of byte v // 8 set if token v is allowed; at least one byte per 8 tokens. They
            are not to be modified.
        """
        count, num_bytes = len(suffixes), self._num_bytes
        masks: NDArray[np.uint8] = self._numpy.empty((count, num_bytes), self._numpy.uint8)
        place = masks.__array_interface__["data"][0]
        for row in sorted(range(count), key=suffixes.__getitem__) if count > 1 else range(count):
            suffix = suffixes[row]
            if (known := self._known.get(suffix)) is not None:
                masks[row] = known
            elif self._lost or self._exceeds_budget(suffix):
                masks[row] = 0xFF if self._lenient else 0
            else:
                began = time.thread_time()
                if self._mask_at(place + row * num_bytes, suffix):
                    self._known[suffix] = masks[row]
                else:
                    masks[row] = self._again(suffix) if self._state.is_error() else 0xFF
                taken_s = time.thread_time() - began
                if suffix:
                    self._drafted_s += taken_s
                else:
                    self._committed_s += taken_s
        return masks

    def _exceeds_budget(self, suffix: tuple[int, ...]) -> bool:
        """True if no more work is done for a place; then a place behind the committed tokens fails the session."""
        budget_s = _FREE_S + _FREE_S_PER_TOKEN * len(self._tokens)
        if self._committed_s + self._drafted_s <= budget_s or (not suffix and self._committed_s <= budget_s):
            return False
        if not suffix and not self.failure:
            self._lost = self._lenient
            self.failure = (
                f"its masks take {round(self._committed_s * 1000)} ms of work for {len(self._tokens)} tokens: at most "
                f"{round(_FREE_S * 1000)} ms and {round(_FREE_S_PER_TOKEN * 1000)} ms a token are allowed"
            )
        return True

    def _mask_at(self, place: int, suffix: tuple[int, ...]) -> bool:
        """Writes a mask to a place in memory; False if there is none: the suffix is forbidden, or exceeds a bound."""
        if self._move(suffix) < len(suffix):
            return False
        self._state.unsafe_compute_mask_ptr(place, self._num_bytes)
        return not self._state.is_error()

    def _move(self, suffix: tuple[int, ...]) -> int:
        """Goes to a continuation of the committed tokens, as far as the grammar allows: the number of its tokens."""
        path = self._path
        count = len(path)
        if suffix[:count] != path:
            count = next((i for i, (a, b) in enumerate(zip(path, suffix, strict=False)) if a != b), len(suffix))
            self._state.rollback(len(path) - count)
            if count < len(suffix):  # or the library, which keeps its last mask, may take it for another place's
                place = self._unused_mask.__array_interface__["data"][0]
                self._state.unsafe_compute_mask_ptr(place, self._num_bytes)
        if count < len(suffix):
            count += self._consume(suffix[count:], known=suffix[:count])
        self._path = suffix[:count]
        return count

    def _consume(self, token_ids: Sequence[int], known: tuple[int, ...] | None = None) -> int:
        """Consumes tokens until one is not allowed, or until the state is an error: the number of those consumed.

        The library stops without an error where the work of all tokens exceeds the bound of one step, or the automaton
        that sessions share is full. So a token is not allowed only where the mask says so.

        Args:
            token_ids: the tokens.
            known: the tokens between the committed ones and these; None: the masks of these places are not kept.
        """
        num_in_range = next((i for i, t in enumerate(token_ids) if not 0 <= t < self._vocab_size), len(token_ids))
        given, count = [*token_ids[:num_in_range]], 0
        while count < len(given):
            num_taken = int(self._state.try_consume_tokens(given[count:] if count else given))
            count += num_taken
            if count == len(given) or not self._allows(
                given[count], None if known is None else (*known, *given[:count])
            ):
                break
            if not num_taken:
                self._state.consume_token(given[count])  # makes the state the error that it is
                break
        return count

    def _allows(self, token_id: int, place: tuple[int, ...] | None) -> bool:
        """True if the mask of the state, which is kept for ``place``, allows a token; False if there is no mask."""
        mask = None if place is None else self._known.get(place)
        if mask is None:
            mask = self._numpy.empty(self._num_bytes, self._numpy.uint8)
            self._state.unsafe_compute_mask_ptr(mask.__array_interface__["data"][0], self._num_bytes)
            if self._state.is_error():
                return False
            if place is not None:
                self._known[place] = mask
        return bool(mask[token_id // 8] >> (token_id % 8) & 1)

    def _again(self, suffix: tuple[int, ...]) -> NDArray[np.uint8]:
        """Mask of a row after a bound was exceeded, without what other rows and sessions have left in the caches.

        Whether it can be decided then depends on its tokens alone, as in plain decoding.
        """
        num_lacking = self._restart()
        mask: NDArray[np.uint8] = self._numpy.full(self._num_bytes, 0xFF, self._numpy.uint8)
        if not num_lacking:
            self._mask_at(mask.__array_interface__["data"][0], suffix)
        if num_lacking or self._state.is_error():
            self.failure = _reason(self._state) or "it exceeds the bounds of a step"
            mask[:] = 0xFF if self._lenient else 0
            self._lost = self._lenient
            self._restart()
        return mask

    def _restart(self) -> int:
        """Comes to the committed tokens again, sharing nothing with other sessions: how many were not consumed."""
        self._state, self._path = self._anew(), ()
        return len(self._tokens) - self._consume(self._tokens)
