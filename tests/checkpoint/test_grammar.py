"""Structured outputs that cannot be compiled, bounds that are met, and what a session's state answers."""

import itertools
import json
from random import Random
from typing import Any, ClassVar

import numpy as np
import pytest
from pydantic import ValidationError
from tests.support import zoo
from tests.support.models import EOS, VOCAB
from tests.support.schemas import json_grammars, json_tokenizer

from paceline.checkpoint import grammar
from paceline.checkpoint.grammar import Grammars, Matcher
from paceline.checkpoint.json_schema import MAX_DEPTH
from paceline.checkpoint.tokenizer import Tokenizer
from paceline.errors import ConfigError, InvalidRequestError
from paceline.types import MAX_STRUCTURED_OUTPUT_BYTES, SamplingParams, StructuredOutput


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": '{"type":'}, "json_schema is not JSON: Expecting value at line 1, column 9"),
    ({"json_schema": "[" * 30_000}, "nested too deep: at most 64 levels"),
    ({"json_schema": "[1]"}, "json_schema is not a JSON object"),
    (
        {"json_schema": {"type": "objekt"}},
        "json_schema: #/type is 'objekt': 'integer', 'number', 'boolean', 'null', 'obj",
    ),
    (
        {"json_schema": {"items": {"type": ["string", "nul"]}}},
        "json_schema: #/items/type is 'nul': 'integer', 'number'",
    ),
    ({"json_schema": {"requird": ["a"]}}, "json_schema: # has 'requird', a keyword that is not supported"),
    ({"json_schema": {"items": {"contains": {}}}}, "#/items has 'contains', a keyword that is not supported"),
    ({"json_schema": {"properties": {"a": {"not": {}}}}}, "#/properties/a has 'not', a keyword that is not supported"),
    ({"json_schema": {"anyOf": [{}, {"if": {}}]}}, "#/anyOf/1 has 'if', a keyword that is not supported"),
    ({"json_schema": {"items": {"x-guidance": {}}}}, "#/items has 'x-guidance', a keyword that is not supported"),
    ({"json_schema": {"properties": {"a": {"nullable": True}}}}, "#/properties/a has 'nullable', a keyword that"),
    ({"json_schema": {"items": [{}]}}, "#/items is a list: prefixItems takes one"),
    ({"json_schema": {"type": "string", "format": "color"}}, "cannot be compiled: Unknown format: color"),
    ({"json_schema": {"$ref": "#/$defs/a"}}, "cannot be compiled: Pointer '/$defs/a' does not exist"),
    ({"json_schema": {"$ref": "http://localhost/a"}}, "does not fetch resources"),
    ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum (5) is greater than maximum (3)"),
    ({"json_schema": {"oneOf": [{"type": "number"}, {"minimum": 1}]}}, "oneOf constraints are not supported"),
    ({"json_schema": nested(MAX_DEPTH + 1)}, "nested too deep: at most 64 levels"),
    ({"json_schema": {"items": {"multipleOf": 999983}}}, "#/items/multipleOf is 999983: at most 100000 is allowed"),
    ({"json_schema": {"multipleOf": 0.1000007}}, "#/multipleOf is 0.1000007: at most 100000 is allowed"),
    ({"json_schema": '{"minimum": ' + "9" * 4000 + "}"}, "json_schema cannot be compiled: number out of range"),
    ({"regex": "[a-z"}, "regex cannot be compiled: at 1(8): invalid regex"),
    ({"regex": r"(a)\1"}, "backreferences are not supported"),
    ({"regex": "(?=a)b"}, "look-around, including look-ahead and look-behind, is not supported"),
    ({"regex": r"a[^\s\S]"}, "regex cannot be compiled: no text has this form"),
    ({"grammar": 'start: "a" b'}, 'grammar cannot be compiled: at 1(8): unknown name: "b"'),
    ({"grammar": "root ::= foo"}, "grammar cannot be compiled: Failed to convert the grammar from GBNF"),
    ({"grammar": 'start: item\nitem[temperature=0.5]: "a"'}, "gives a rule the attribute 'temperature'"),
]


@pytest.mark.parametrize(("form", "sentence"), REFUSED, ids=[sentence[:40] for _, sentence in REFUSED])
def test_what_cannot_be_compiled_is_refused_with_the_place(form: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        json_grammars().compile(StructuredOutput(**form))
    assert sentence in str(caught.value)
    assert "structured_output" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


DESCRIPTIONS: dict[str, Any] = {
    "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/cat"}},
    "x-unit": "cm",
    "x-order": ["a"],
    "title": "T",
    "description": "",
    "default": 3,
    "example": {},
    "examples": [1],
    "deprecated": True,
    "xml": {},
    "readOnly": True,
    "writeOnly": False,
    "$comment": "c",
    "externalDocs": {"url": "u"},
    "contentEncoding": "base64",
    "contentMediaType": "image/png",
    "$anchor": "here",
}
"""Keywords that bind nothing."""


@pytest.mark.parametrize("keyword", DESCRIPTIONS)
def test_what_only_describes_a_schema_changes_nothing(keyword: str) -> None:
    """At every place where a schema may be; but not as the name of a property, nor within a value."""
    described = {keyword: DESCRIPTIONS[keyword]}
    integer = {"type": "integer", "minimum": 0, "maximum": 9, **described}
    schema = {
        "$defs": {"cat": {"type": "object", "properties": {keyword: integer}, "required": [keyword], **described}},
        "anyOf": [{"$ref": "#/$defs/cat", **described}, {"type": "array", "items": integer, **described}],
        **described,
    }
    form = StructuredOutput(json_schema=schema)
    name = json.dumps(keyword)
    for text in (f"{{{name}: 3}}", "[1, 2]"):
        assert EOS in tokens_of(matcher(form, text).masks([()])[0])
    for text in ("{}", f"{{{name}: 33", '["'):
        with pytest.raises(InvalidRequestError, match="not the beginning of one"):
            matcher(form, text)


def tagged(*, required: bool, cat: str = "cat") -> dict[str, Any]:
    """Two objects that a tag tells apart, as pydantic writes a discriminated union."""
    parts = {
        name: {
            "type": "object",
            "properties": {"kind": {"const": kind, "type": "string"}, of: {"type": "integer"}},
            "required": ["kind"] if required else [],
            "additionalProperties": False,
        }
        for name, kind, of in (("Cat", cat, "a"), ("Dog", "dog", "b"))
    }
    pet = {"oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}], "discriminator": {"propertyName": "kind"}}
    return {"$defs": parts, **pet}


@pytest.mark.parametrize("required", [True, False])
def test_objects_that_a_tag_tells_apart_may_be_one_of_several(required: bool) -> None:
    form = StructuredOutput(json_schema=tagged(required=required))
    for text in ('{"kind": "cat", "a": 3}', '{"kind": "dog"}'):
        assert EOS in tokens_of(matcher(form, text).masks([()])[0])
    for text in ('{"kind": "cat", "b"', '{"kind": "cow"', "{}", '{"a": 3}'):
        with pytest.raises(InvalidRequestError, match="not the beginning of one"):
            matcher(form, text)


def test_objects_of_one_tag_are_not_told_apart() -> None:
    with pytest.raises(InvalidRequestError, match="oneOf constraints are not supported"):
        json_grammars().compile(StructuredOutput(json_schema=tagged(required=True, cat="dog")))


@pytest.mark.parametrize("name", ["plain_marks", "special_marks"])
def test_a_lark_grammar_names_tokens_whether_they_are_special_or_not(name: str) -> None:
    tokenizer = zoo.tokenizer(name)
    begin, end = (tokenizer.encode_text(mark)[0] for mark in ("<think>", "</think>"))
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    written = [begin] if name == "plain_marks" else [i for c in "<think>" for i in tokenizer.encode_text(c)]
    for named in (("<think>", "</think>"), (f"<[{begin}]>", f"<[{end}]>")):
        text = f'start: {named[0]} "<think>" /<pad>|a/ {named[1]} // <think> is no token here'
        state = grammars.matcher(StructuredOutput(grammar=text))
        for token in (begin, *written, *tokenizer.encode_text("a"), end):
            assert token in tokens_of(state.masks([()])[0])
            assert state.append((token,))
        assert {*tokens_of(state.masks([()])[0])} == {*tokenizer.eos_token_ids}
    with pytest.raises(InvalidRequestError, match="cannot be compiled"):
        grammars.compile(StructuredOutput(grammar="start: <no_such_token>"))


def test_what_no_tokens_write_is_refused_before_the_first_token() -> None:
    for form in ({"choice": ("a", "\u4e16")}, {"regex": "a\u4e16"}, {"json_schema": {"const": "\u4e16"}}):
        with pytest.raises(InvalidRequestError, match="holds '\u4e16': no tokens of this model write it"):
            json_grammars().compile(StructuredOutput(**form))


@pytest.mark.parametrize(
    "form",
    [
        {"choice": ("xtrue",)},
        {"regex": "xtrue"},
        {"grammar": '%llguidance {"no_forcing": false}\nstart: "xtrue"'},
        {"grammar": 'root ::= "xtrue"'},
        {"structural_tag": json.dumps({"format": {"type": "const_string", "value": "xtrue"}})},
    ],
)
def test_text_without_an_alternative_is_not_followed_to_its_end(form: dict[str, Any]) -> None:
    """It may have no end, as that of ``start: "x" A "a"`` with ``A: /a*/``. So its next tokens are all that fit."""
    text = json_tokenizer()
    mask = matcher(StructuredOutput(**form), "x").masks([()])[0]
    assert {*tokens_of(mask)} == {text.encode(part)[0] for part in ("t", "tr", "tru", "true")}


def test_any_number_of_choices_is_one_place_in_a_grammar() -> None:
    form = StructuredOutput(choice=tuple(f"c{i}" for i in range(3000)))
    state = matcher(form, "c29")
    assert {EOS, *(json_tokenizer().encode(digit)[0] for digit in "0123456789")} <= tokens_of(state.masks([()])[0])
    assert EOS not in tokens_of(matcher(form, "c").masks([()])[0])


@pytest.mark.parametrize("multiple", [0.01, 1.5, -5, 86400, 10**9])
def test_multiples_of_few_digits_are_supported(multiple: float) -> None:
    json_grammars().compile(StructuredOutput(json_schema={"type": "number", "multipleOf": multiple}))


MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({}, "holds nothing: exactly one of"),
    ({"regex": "a", "choice": ("b",)}, "holds regex and choice: exactly one of"),
    ({"regex": ""}, "structured_output.regex is '': at least one character is needed"),
    ({"choice": ("a", "")}, r"structured_output.choice\[1\] is ''"),
    ({"regex": "a" * (MAX_STRUCTURED_OUTPUT_BYTES + 1)}, "regex has 65537 bytes: at most 65536 are allowed"),
    ({"choice": ("a" * 70_000,)}, "choice has 70000 bytes: at most 65536 are allowed"),
    ({"json_schema": {"a": {1, 2}}}, "cannot be written as JSON"),
    ({"json_schema": True}, "neither true nor false is allowed"),
    ({"regex": "\ud800"}, "regex|Unicode"),
]


@pytest.mark.parametrize(("form", "sentence"), MALFORMED, ids=[sentence[:40] for _, sentence in MALFORMED])
def test_a_malformed_one_is_refused_at_once(form: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        StructuredOutput(**form)


def test_it_excludes_going_on_after_the_end() -> None:
    with pytest.raises(ValidationError, match="ignore_eos is true: with structured_output"):
        SamplingParams(ignore_eos=True, structured_output=StructuredOutput(json_object=True))


def test_a_vocabulary_that_cannot_be_bound_is_refused() -> None:
    form = StructuredOutput(json_object=True)

    def nothing() -> Tokenizer:
        raise ConfigError("no tokenizer could be loaded from 'x'")

    class Slow:
        eos_token_id = 7
        added_tokens_decoder: ClassVar[dict[int, Any]] = {}

    class Endless(Slow):
        eos_token_id = None

    for source, sentence in (
        (nothing, "structured_output is given, but no tokenizer could be loaded from 'x'"),
        (Tokenizer("slow", Slow()), "the tokenizer 'slow' has no tokenizer.json form"),
        (Tokenizer("endless", Endless()), "the model has no end-of-sequence token"),
    ):
        grammars = Grammars(source, VOCAB)
        grammars.try_load()  # not an error for those who ask for no structured output
        with pytest.raises(InvalidRequestError, match=sentence):
            grammars.compile(form)


def tokens_of(row: np.ndarray) -> set[int]:
    return {int(i) for i in np.unpackbits(row, bitorder="little").nonzero()[0]}


def matcher(form: StructuredOutput, text: str = "", **options: Any) -> Matcher:
    return json_grammars().matcher(form, json_tokenizer().encode(text) if text else (), **options)


def test_the_end_is_allowed_exactly_where_the_output_may_end() -> None:
    encode = json_tokenizer().encode
    state = matcher(StructuredOutput(regex="a(bc)*"))
    a, b, c = (encode(text)[0] for text in "abc")
    rows = [tokens_of(row) for row in state.masks([(), (a,), (a, b), (a, b, c), (a, EOS), (c,), (a, -1), (a, 9999)])]
    assert rows[0] == {a}
    assert rows[1] == rows[3] == {b, EOS}
    assert rows[2] == {c}
    assert all(len(row) >= VOCAB for row in rows[5:])  # below a forbidden token
    assert tokens_of(state.masks([()])[0]) == {a}  # it went back
    assert state.append((a, b, c, EOS))
    assert not matcher(StructuredOutput(regex="a(bc)*")).append((a, b, EOS))


def test_a_state_that_went_to_and_fro_answers_as_a_new_one() -> None:
    """Whatever was asked before, and whatever was committed then: on the path that was looked at, beside it, beyond."""
    form = StructuredOutput(regex="(a(bc)*d?)*e")
    letters = [json_tokenizer().encode(text)[0] for text in "abcde"]
    random = Random(5)
    state, committed = matcher(form), ()
    num_committed = 0
    for _ in range(300):
        suffixes = [tuple(random.choices(letters, k=random.randrange(5))) for _ in range(random.randrange(1, 5))]
        good = tuple(json_tokenizer().encode("abcbcdabcad"))
        suffixes += [good[: random.randrange(6)] for _ in range(2)]
        found = state.masks(suffixes)
        for suffix, mask in zip(suffixes, found, strict=True):
            fresh = json_grammars().matcher(form, committed)
            assert np.array_equal(fresh.masks([suffix])[0], mask), (committed, suffix)
        path = random.choice(suffixes)
        if path and json_grammars().matcher(form, committed).append(path) and path[-1] != letters[4]:
            assert state.append(path)
            committed, num_committed = (*committed, *path), num_committed + 1
        elif random.random() < 0.1:
            state, committed = matcher(form), ()
    assert num_committed > 50


def test_a_mask_is_that_of_its_own_place_whatever_branch_was_left() -> None:
    """The library keeps its last mask by how far the parser has come, and a branch that was left may be as far."""
    schema = {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]}
    form, begun = StructuredOutput(json_schema=json.dumps(schema)), '{"a'
    quote, space, colon, digit = (json_tokenizer().encode(text)[0] for text in ('"', "\n", ":", "0"))
    pieces = (quote, space, colon, digit)
    paths = [path for length in (2, 3, 4) for path in itertools.product(pieces, repeat=length) if path[0] == quote]
    paths = [path for path in paths if matcher(form, begun).append(path)]
    assert len(paths) > 10
    for left, taken in itertools.permutations(paths, 2):
        state = matcher(form, begun)
        state.masks([left])
        assert state.append(taken)
        (fresh,) = json_grammars().matcher(form, (*json_tokenizer().encode(begun), *taken)).masks([()])
        assert np.array_equal(state.masks([()])[0], fresh), (left, taken)


def test_a_grammar_is_compiled_once_and_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "MAX_COMPILED", 2)
    grammars, compiled = Grammars(json_tokenizer(), VOCAB, (EOS,)), []
    make = grammars.compile_form
    monkeypatch.setattr(grammars, "compile_form", lambda form: (compiled.append(form.regex), make(form))[1])
    for regex in ("a", "b", "a", "c", "a", "b"):
        grammars.compile(StructuredOutput(regex=regex))
    assert compiled == ["a", "b", "c", "b"]


def test_what_was_compiled_is_kept_for_one_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time until an answer tells nobody what others have compiled."""
    grammars, compiled = Grammars(json_tokenizer(), VOCAB, (EOS,)), []
    make = grammars.compile_form
    monkeypatch.setattr(grammars, "compile_form", lambda form: (compiled.append(form.regex), make(form))[1])
    for salt in ("", "key", "other", "key", ""):
        grammars.matcher(StructuredOutput(regex="a"), salt=salt)
        grammars.paced(StructuredOutput(regex="a"), salt=salt)
    assert len(compiled) == 3


def test_a_bound_ends_the_session_and_not_by_what_was_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The automaton of this expression doubles with every character; drafts may not use up what is the text's."""
    monkeypatch.setattr(grammar, "MAX_LEXER_STATES", 40)
    grammars = Grammars(json_tokenizer(), VOCAB, (EOS,))
    form = StructuredOutput(regex="(a|b)*a(a|b){30}")
    a, b = (json_tokenizer().encode(text)[0] for text in "ab")
    plain, drafted, lenient = (grammars.matcher(form, lenient=lenient) for lenient in (False, False, True))
    ends = []
    for state in (plain, drafted):
        for position in range(400):
            if state is drafted:
                state.masks([(a, b) * 3, (b, a) * 3, (b, b, a)])
            allowed = tokens_of(state.masks([()])[0])
            if not allowed:
                break
            assert {a, b} <= allowed
            assert state.append(((a, b)[position * position % 3 % 2],))
        else:
            pytest.fail("no bound was met")
        assert state.failure
        ends.append(position)
    assert ends[0] == ends[1]
    for position in range(ends[0] + 1):
        lenient.append(((a, b)[position * position % 3 % 2],))
    assert len(tokens_of(lenient.masks([()])[0])) >= VOCAB


COSTLY = StructuredOutput(regex="[a-z]*a[a-z]{400}A")
"""Its automaton grows with each output, beyond what the sessions of one grammar may share."""


@pytest.fixture
def costly_output(monkeypatch: pytest.MonkeyPatch) -> tuple[Grammars, list[int]]:
    """A vocabulary whose sessions have filled the automaton that they share, and 300 tokens that the form allows."""
    monkeypatch.setattr(grammar, "MAX_LEXER_STATES", 1500)
    grammars, rng, output = Grammars(json_tokenizer(), VOCAB, (EOS,)), Random(1), list[int]()
    session = grammars.matcher(COSTLY)
    while len(output) < 300:
        output.append(rng.choice(sorted(tokens_of(session.masks([()])[0]) - {EOS})))
        assert session.append((output[-1],)), session.failure
    return grammars, output


def test_an_output_is_taken_up_at_any_length_whatever_other_sessions_have_left(costly_output) -> None:
    """As a target does that takes over a session, and a router for a stream that is resumed."""
    grammars, output = costly_output
    for length in range(0, len(output), 23):
        again = grammars.matcher(COSTLY, output[:length])
        (expected,) = Grammars(json_tokenizer(), VOCAB, (EOS,)).matcher(COSTLY, output[:length]).masks([()])
        (mask,) = again.masks([()])
        assert tokens_of(mask) == tokens_of(expected)
        assert again.failure == ""


def test_drafted_tokens_are_forbidden_only_where_the_mask_says_so(costly_output: tuple[Grammars, list[int]]) -> None:
    """A row below an allowed token is never left unconstrained, as one below a forbidden token is."""
    grammars, output = costly_output
    again = grammars.matcher(COSTLY, output[:40])
    suffixes = [tuple(output[40 : 40 + length]) for length in range(6)]
    masks = again.masks([*suffixes, (*suffixes[2], EOS)])
    for suffix, mask in zip(suffixes, masks, strict=False):
        (alone,) = Grammars(json_tokenizer(), VOCAB, (EOS,)).matcher(COSTLY, [*output[:40], *suffix]).masks([()])
        assert tokens_of(mask) == tokens_of(alone) != set(range(VOCAB))
    assert tokens_of(masks[-1]) >= set(range(VOCAB)), "nothing is known below a forbidden token"


def test_a_state_that_believes_the_library_is_caught(costly_output, monkeypatch) -> None:
    monkeypatch.setattr(Matcher, "known_to_allow", lambda self, token_id, place: False)
    with pytest.raises(InvalidRequestError, match="is not the beginning"):
        test_an_output_is_taken_up_at_any_length_whatever_other_sessions_have_left(costly_output)
