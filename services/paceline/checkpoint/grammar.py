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
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.grammar_matcher import Matcher, StepTime, reason_of
from paceline.checkpoint.grammar_tokenizer import GrammarTokenizer
from paceline.checkpoint.grammar_work import MaskThread, PacedMatcher
from paceline.checkpoint.json_schema import WHITESPACE, as_compiled, read_schema
from paceline.checkpoint.lark import quoted, with_text_of_tokens
from paceline.checkpoint.pieces import Pieces
from paceline.checkpoint.structural_tag import lark_of
from paceline.checkpoint.tokenizer import Tokenizer
from paceline.errors import ConfigError, InvalidRequestError, PacelineError
from paceline.types import StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_COMPILED = 64
"""Maximum compiled grammars in the cache (least recently used leave first), within ``_MAX_COMPILED_BYTES``."""
_MAX_COMPILED_BYTES = 64 << 20
_MAX_GRAMMAR_SYMBOLS = 200_000
MAX_LEXER_STATES = 10_000
"""The most states of one grammar's lexer, each of about 1 KiB: exponential automata come to their end here."""
_MAX_ITEMS_OF_ROW = 8_000
"""The most places within its rules at which a parser may be at once."""
_MAX_ITEMS_OF_GRAMMAR, _MAX_ITEMS_OF_SCHEMA = 10_000, 80_000
"""Maximum items that one mask examines in all places. Rules of a grammar may be ambiguous, so that work grows with the
third power: about 150 ms. Rules of schemas and tags differ in their first characters: about 20 ms."""
_LEXER_FUEL_OF_STEP = 200_000
"""Work of a single mask; all of it takes about 15 ms."""
_INITIAL_LEXER_FUEL = 1_000_000
"""Work of compiling the regular expressions; all of it takes about 20 ms."""
_UNFORCED = '%llguidance {"no_forcing": true}'
"""Appended to each grammar, where it overrides the request's own setting.

Otherwise the library follows text without an alternative to its end, which may never come and has no bound.
"""
_EXCERPT = re.compile(r"^at 1\(8\): failed to compile JSON schema: | 1 \| start: %json .*| \d+ \| %llguidance .*")
"""Parts of a reason that quote text which is not the request's."""
_ATTRIBUTE = re.compile(r"^[ \t]*[A-Za-z_]\w*\[[^\]\n]*\b(temperature|max_tokens)\s*=", re.MULTILINE)
"""Attributes of a Lark rule that ask for more than a form."""


class _Compiled(NamedTuple):
    """A grammar, and the bytes by which the process grew when it was compiled."""

    prototype: LLMatcher
    num_bytes: int


class Grammars:
    """Compiles structured outputs for one vocabulary, and caches the results. Thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer | Callable[[], Tokenizer],
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        thread: MaskThread | None = None,
    ) -> None:
        """Describes a vocabulary; nothing is read yet.

        Args:
            tokenizer: the target's, or a function that loads it on demand.
            vocab_size: number of ids in a mask: at least the tokenizer's.
            eos_token_ids: allowed only where the output may end; empty: the tokenizer's.
            thread: does the costly work of ``paced`` matchers; None: they do it themselves.
        """
        self._source, self.vocab_size, self._given_eos = tokenizer, vocab_size, eos_token_ids
        self._thread, self._step = thread, StepTime()
        self._lock, self._compiling = threading.Lock(), threading.Lock()
        self._compiled: OrderedDict[tuple[str, StructuredOutput], _Compiled] = OrderedDict()

    @classmethod
    def of(cls, checkpoint: Checkpoint, vocab_size: int, thread: MaskThread | None = None) -> Self:
        """Describes a checkpoint's own tokenizer, for a model of ``vocab_size`` ids; nothing is read yet."""
        return cls(lambda: checkpoint.tokenizer, vocab_size, checkpoint.eos_token_ids, thread)

    def vocabulary(self) -> tuple[Tokenizer, int, list[int]]:
        """Returns arguments of this class, all loaded, from which another process makes the same grammars.

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
        self._prototype(form, "")

    def matcher(
        self, form: StructuredOutput, token_ids: Sequence[int] = (), *, salt: str = "", lenient: bool = False
    ) -> Matcher:
        """The state of a session whose output is ``token_ids`` so far.

        Args:
            form: the form of the output.
            token_ids: the output so far.
            salt: sessions of the same salt share compiled grammars.
            lenient: places that exceed the bounds of a step are left unconstrained, as a draft may.

        Raises:
            InvalidRequestError: as ``compile``, or the tokens are not the beginning of an output of this form.
        """
        return self._matcher(form, token_ids, salt, lenient=lenient)

    def paced(
        self,
        form: StructuredOutput,
        token_ids: Sequence[int] = (),
        *,
        salt: str = "",
        lenient: bool = False,
        ahead: bool = True,
    ) -> Matcher | PacedMatcher:
        """``matcher`` for an engine, whose steps its work does not hold up: see ``PacedMatcher``.

        ``ahead``: cheap masks are computed before a step is scheduled; False: after its forward was started.
        """
        if self._thread is None:
            return self.matcher(form, token_ids, salt=salt, lenient=lenient)
        return PacedMatcher(
            lambda: self._matcher(form, token_ids, salt, lenient=lenient, step=self._step),
            self._thread,
            self._step,
            self.vocab_size,
            is_made_cheaply=not token_ids and (salt, form) in self._compiled,
            lenient=lenient,
            ahead=ahead,
        )

    def begin_step(self) -> None:
        """Begins a step of the engine, which has a budget for all ``paced`` matchers."""
        self._step.begin()

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        if self._thread is not None:
            self._thread.close()

    def _matcher(
        self,
        form: StructuredOutput,
        token_ids: Sequence[int],
        salt: str,
        *,
        lenient: bool,
        step: StepTime | None = None,
    ) -> Matcher:
        ends, prototype = self._tokenizer.eos_tokens, self._prototype(form, salt)
        found = Matcher(prototype, lambda: self._new(form), self.vocab_size, ends, lenient=lenient, step=step)
        if not found.replay(token_ids):
            raise InvalidRequestError(
                f"the output so far, of {len(token_ids)} tokens, is not the beginning of one that "
                f"structured_output.{form.kind} allows"
            )
        return found

    def try_load(self) -> None:
        """Reads the tokenizer now, so that no request has to wait; one that cannot be used is left to the requests."""
        with contextlib.suppress(PacelineError):
            _ = self._tokenizer

    def _prototype(self, form: StructuredOutput, salt: str) -> LLMatcher:
        if (found := self._kept((salt, form))) is None:
            with self._compiling:  # two requests with one grammar compile it once
                if (found := self._kept((salt, form))) is None:
                    before = resident_bytes()
                    found = self.compile_form(form)
                    with self._lock:
                        self._compiled[salt, form] = _Compiled(found, max(0, resident_bytes() - before))
                        self._forget()
        return found

    def _kept(self, key: tuple[str, StructuredOutput]) -> LLMatcher | None:
        with self._lock:
            if (found := self._compiled.get(key)) is None:
                return None
            self._compiled.move_to_end(key)
            return found.prototype

    def _forget(self) -> None:
        """Drops the grammars that were used longest ago, as far as all together are too many or too large."""
        size = sum(one.num_bytes for one in self._compiled.values())
        while len(self._compiled) > 1 and (len(self._compiled) > MAX_COMPILED or size > _MAX_COMPILED_BYTES):
            size -= self._compiled.popitem(last=False)[1].num_bytes

    def compile_form(self, form: StructuredOutput) -> LLMatcher:
        """Returns the matcher of a form at its beginning. Raises InvalidRequestError."""
        if (character := self._tokens.unwritable(_literals(form, self._tokens.specials))) is not None:
            raise InvalidRequestError(
                f"structured_output.{form.kind} holds {character!r}: no tokens of this model write it"
            )
        matcher = self._new(form)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            reason = _EXCERPT.sub("", reason_of(matcher))
            raise InvalidRequestError(f"structured_output.{form.kind} cannot be compiled: {reason}")
        return matcher

    def _new(self, form: StructuredOutput) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        tokenizer = self._tokenizer
        limits = LLParserLimits(
            initial_lexer_fuel=_INITIAL_LEXER_FUEL,
            step_lexer_fuel=_LEXER_FUEL_OF_STEP,
            max_items_in_row=_MAX_ITEMS_OF_ROW,
            step_max_items=_MAX_ITEMS_OF_SCHEMA if form.grammar is None else _MAX_ITEMS_OF_GRAMMAR,
            max_lexer_states=MAX_LEXER_STATES,
            max_grammar_size=_MAX_GRAMMAR_SYMBOLS,
            verbose_errors=False,
        )
        return LLMatcher(tokenizer, f"{_lark_of(form, self._tokens)}\n{_UNFORCED}", log_level=0, limits=limits)


def _lark_of(form: StructuredOutput, tokens: GrammarTokenizer) -> str:
    from llguidance import LLMatcher, grammar_from

    if form.regex is not None:
        return str(json.loads(LLMatcher.grammar_from_regex(form.regex))["grammars"][0]["lark_grammar"])
    if form.structural_tag is not None:
        return lark_of(form.structural_tag, tokens.specials)
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
        return f"start: TEXT\nTEXT: {' | '.join(map(quoted, form.choice))}"
    text = form.text if form.json_schema is None else json.dumps(as_compiled(read_schema(form.json_schema)))
    try:
        grammar = LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": WHITESPACE})
    except ValueError as error:
        raise InvalidRequestError(f"structured_output.json_schema cannot be compiled: {error}") from None
    return f"start: %json {json.dumps(json.loads(grammar)['grammars'][0]['json_schema'])}"


def resident_bytes() -> int:
    """Memory of this process; 0 where the platform does not tell."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _literals(form: StructuredOutput, specials: Collection[str]) -> str:
    """Returns non-ASCII characters of text that outputs may hold, without names of special tokens in a structural tag,
    which are tokens.
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
