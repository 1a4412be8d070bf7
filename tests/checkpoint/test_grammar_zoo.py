"""Structured output over tokenizers of every shape: what a mask allows can come, and what comes has the form.

Each form holds the text of an added token: of one that is special, and of one that is not.
"""

import functools
import json
import re
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, NamedTuple

import jsonschema
import numpy as np
import pytest
from tests.support import zoo
from tests.support.rings import nightly, slow
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from paceline.checkpoint.grammar import Grammars, Matcher
from paceline.checkpoint.pieces import Pieces, bytes_at
from paceline.checkpoint.tokenizer import JsonTokenizer, Tokenizer
from paceline.errors import InvalidRequestError
from paceline.types import StructuredOutput

_MOST_TOKENS = 40
_PROBES = 4


class Form(NamedTuple):
    """A form, and what its outputs are."""

    given: dict[str, Any]
    holds: Callable[[str], bool]

    @property
    def form(self) -> StructuredOutput:
        return StructuredOutput(**self.given)


def _matching(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text, re.DOTALL) is not None


def _valid(schema: dict[str, Any]) -> Callable[[str], bool]:
    return lambda text: jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))


def forms(mark: str) -> dict[str, Form]:
    """Forms whose outputs hold ``mark``, the text of an added token."""
    escaped, choice = re.escape(mark), (f"x{mark}y", f"{mark} é", "e\u0301 世")
    schemas: dict[str, dict[str, Any]] = {
        "JSON const": {"const": f"é{mark}"},
        "JSON enum": {"enum": [mark, f"{mark} b", 3, None]},
        "JSON key": {
            "type": "object",
            "properties": {mark: {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": [mark],
            "additionalProperties": False,
        },
        "JSON pattern": {"type": "string", "pattern": f"^[ab]{escaped}$"},
    }
    tag = {"begin": mark, "content": {"type": "regex", "pattern": "[ab ]{2}"}, "end": f"{mark}\n", "type": "tag"}
    parts = {
        "tag": (tag, rf"{escaped}[ab ]{{2}}{escaped}\n"),
        "const_string": ({"type": "const_string", "value": f"a{mark}b"}, f"a{escaped}b"),
        "triggered tags": (
            {"type": "triggered_tags", "triggers": [mark], "tags": [tag], "at_least_one": True},
            rf"{escaped}[ab ]{{2}}{escaped}\n.*",
        ),
        "tags with separator": (
            {"type": "tags_with_separator", "tags": [tag], "separator": ", ", "at_least_one": True},
            rf"{escaped}[ab ]{{2}}{escaped}\n(, {escaped}[ab ]{{2}}{escaped}\n)*",
        ),
        "free text": ({"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": mark}, f".*{escaped}"),
    }
    return {
        "choice": Form({"choice": choice}, choice.__contains__),
        "regex": Form({"regex": f"[a-c<]{{1,3}}{escaped}( z| 😀)"}, _matching(f"[a-c<]{{1,3}}{escaped}( z| 😀)")),
        "regex that may": Form({"regex": f"(a|{escaped})+ z"}, _matching(f"(a|{escaped})+ z")),
        "Lark": Form({"grammar": f'start: "a" {json.dumps(mark)} B\nB: /[b ]+/'}, _matching(f"a{escaped}[b ]+")),
        "GBNF": Form({"grammar": f'root ::= "a" {json.dumps(mark)} [b ]+'}, _matching(f"a{escaped}[b ]+")),
        **{name: Form({"json_schema": schema}, _valid(schema)) for name, schema in schemas.items()},
        **{name: Form({"structural_tag": {"format": node}}, _matching(p)) for name, (node, p) in parts.items()},
    }


def marks(name: str) -> list[str]:
    """Added tokens of a tokenizer: the first of those that are special, but none that ends, and of the others."""
    added = [
        (text, special)
        for i, (text, special) in sorted(zoo.tokenizer(name).added_tokens.items())
        if i not in zoo.tokenizer(name).eos_token_ids and re.fullmatch(r"[<\[].{3,}[>\]]", text)
    ]
    return [next(text for text, is_special in added if is_special is special) for special in {s for _, s in added}]


@functools.cache
def grammars(name: str) -> Grammars:
    tokenizer = zoo.tokenizer(name)
    return Grammars(tokenizer, tokenizer.vocab_size + 64)


def tokens_of(row: np.ndarray) -> np.ndarray:
    return np.unpackbits(row, bitorder="little").nonzero()[0]


def chosen(allowed: np.ndarray, random: Random, name: str, num_tokens: int) -> int:
    """Some allowed token; late in an output rather one that brings it to its end."""
    late = allowed[np.isin(allowed, _closing(name))] if num_tokens >= 8 and random.random() > 0.3 else allowed[:0]
    return int(random.choice(late if late.size else allowed))


@functools.cache
def _closing(name: str) -> np.ndarray:
    pieces = Pieces(zoo.tokenizer(name)).pieces
    return np.array([i for i in pieces if bytes_at(pieces, i) in (b'"', b"}", b"]")])


def walk(name: str, form: StructuredOutput, random: Random) -> Iterator[tuple[Matcher, tuple[int, ...], np.ndarray]]:
    """An output that the masks allow, token by token: the state, the tokens so far and those that may follow."""
    state, tokens = grammars(name).matcher(form), ()
    ends = [*zoo.tokenizer(name).eos_token_ids]
    while len(tokens) < _MOST_TOKENS:
        allowed = tokens_of(state.masks([()])[0])
        assert allowed.size, (state.failure, tokens)
        yield state, tokens, allowed
        others = allowed[~np.isin(allowed, ends)]
        if not others.size or (len(others) < len(allowed) and random.random() < 0.3):
            return
        token = chosen(others, random, name, len(tokens))
        assert state.append((token,)), (state.failure, tokens, token)
        tokens = (*tokens, token)


def examine(name: str, form: Form, seed: int) -> bool:
    """Walks through one output, with drafts that it does not take; True if it came to its end."""
    random, tokenizer = Random(seed), zoo.tokenizer(name)
    ids, all_ends = [*tokenizer.added_tokens], [*tokenizer.eos_token_ids]
    last: tuple[int, ...] = ()
    ended = False
    for state, tokens, allowed in walk(name, form.form, random):
        ends = {*allowed[np.isin(allowed, all_ends)].tolist()}
        added = allowed[np.isin(allowed, ids) & ~np.isin(allowed, all_ends)][:2]
        probes = [*added.tolist(), *(int(random.choice(allowed)) for _ in range(_PROBES))]
        for probe, row in zip(probes, state.masks([(i,) for i in probes]), strict=True):
            assert probe in ends or not (row == 0xFF).all(), f"{probe} is allowed after {tokens} and cannot come"
        assert np.array_equal(state.masks([()])[0], grammars(name).matcher(form.form, tokens).masks([()])[0])
        last, ended = tokens, bool(ends)
    if ended:
        text = text_of(name, last)
        assert form.holds(text), (text, last)
    return ended


def text_of(name: str, token_ids: tuple[int, ...]) -> str:
    """The text of an answer with its special tokens, as a stream gives it."""
    detokenizer = zoo.tokenizer(name).detokenizer(zoo.tokenizer(name).encode("a"), special=True)
    return "".join(map(detokenizer.add, token_ids)) + detokenizer.flush()


SLOW = ("qwen3", "deepseek_v3")
NIGHTLY = [name for name in zoo.PUBLISHED if name not in ("llama2", *SLOW)]


@pytest.mark.parametrize("name", [*zoo.MADE, "llama2", *slow(SLOW), *nightly(NIGHTLY)])
def test_what_a_mask_allows_can_come_and_what_comes_has_the_form(name: str) -> None:
    for mark in marks(name):
        for kind, form in forms(mark).items():
            assert any(examine(name, form, seed) for seed in range(8)) or kind == "free text", (mark, kind)


def marks_come_as_text(name: str, mark: str) -> bool:
    """True if the token of a mark may come where its text may. Its text may in any case."""
    tokenizer = zoo.tokenizer(name)
    token_id = next(i for i, (text, _) in tokenizer.added_tokens.items() if text == mark)
    found = set()
    for form in (StructuredOutput(choice=(f"x{mark}", "y")), StructuredOutput(regex=f"[xy]({re.escape(mark)}|z)")):
        state = grammars(name).matcher(form, tokenizer.encode_text("\nx")[-1:])
        allowed = {*tokens_of(state.masks([()])[0])}
        found.add(token_id in allowed)
        assert allowed - {token_id} or token_id in allowed
    (whole,) = found
    return whole


@pytest.mark.parametrize("name", zoo.EVERY)
def test_a_mark_is_text_unless_it_is_special(name: str) -> None:
    """A model writes its marks as one token: it must be allowed to. A special token is in no text."""
    added = dict(zoo.tokenizer(name).added_tokens.values())
    for mark in marks(name):
        assert marks_come_as_text(name, mark) is not added[mark], mark


@pytest.mark.parametrize("special", [True, False])
def test_a_tokenizer_whose_marks_are_all_of_one_kind_is_noticed(monkeypatch: pytest.MonkeyPatch, special: bool) -> None:
    """As if whatever is written <...> were special, or nothing were."""
    init = Pieces.__init__

    def mistaken(self: Pieces, tokenizer: Any) -> None:
        init(self, tokenizer)
        for token_id, (text, _) in tokenizer.added_tokens.items():
            self.pieces[token_id] = text if special else text.encode()

    monkeypatch.setattr(Pieces, "__init__", mistaken)
    monkeypatch.setitem(globals(), "grammars", functools.cache(grammars.__wrapped__))
    with pytest.raises(AssertionError):
        test_a_mark_is_text_unless_it_is_special("plain_marks")


@pytest.mark.parametrize("rows", [-3, 64])
def test_an_embedding_of_another_size_than_the_tokenizer_is_bound(rows: int) -> None:
    """Rows without a token are never allowed, nor are tokens without a row."""
    tokenizer = zoo.tokenizer("plain_marks")
    size = tokenizer.vocab_size + rows
    found = Grammars(tokenizer, size, (258,)).matcher(StructuredOutput(regex="(<think>|<pad>|</tool_call>)+"))
    allowed = tokens_of(found.masks([()])[0])
    written = {i for i, (text, special) in tokenizer.added_tokens.items() if not special and text != "</think>"}
    assert {*allowed} == {i for i in (*tokenizer.encode_text("<")[:1], *written) if i < size} - {
        i for i in written if tokenizer.added_tokens[i][0] == "<tool_call>"
    }


def test_a_decoder_that_joins_tokens_by_their_neighbors_is_refused() -> None:
    backend = Backend(models.WordPiece(vocab={"a": 0, "##b": 1, "[UNK]": 2, "</s>": 3}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    grammars = Grammars(Tokenizer("words", JsonTokenizer(backend, "</s>")), 4)
    with pytest.raises(InvalidRequestError, match="whose decoder writes each token by itself"):
        grammars.compile(StructuredOutput(regex="a"))
