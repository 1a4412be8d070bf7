"""Structural tags: what their grammars take and what they refuse, and what is no structural tag."""

from typing import Any

import pytest
from tests.support.schemas import json_grammars, json_tokenizer

from paceline.errors import InvalidRequestError
from paceline.types import StructuredOutput

CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/name"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"name": {"type": "string", "maxLength": 5}},
}


def tag(begin: str, content: Any, end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def of(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema}


THOUGHT = {"type": "optional", "content": tag("<4>", {"type": "any_text"}, "<5>")}
"""Special tokens of the vocabulary begin and end it."""
CALLS = [tag("<call>a", of(CITY), "</call>"), tag("<call>b", of({"type": "integer"}), "</call>")]
SPECIAL = [tag("<6>a", of(CITY), "<8>")]
A, B = '<call>a{"city": "rome"}</call>', "<call>b12</call>"
TEXT = {"type": "any_text"}


def sequence(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def triggered(tags: Any, *triggers: str, **flags: bool) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": list(triggers), "tags": tags, **flags}


def several(tags: Any, separator: str = "", **flags: bool) -> dict[str, Any]:
    return {"type": "tags_with_separator", "tags": tags, "separator": separator, **flags}


CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "free text until a trigger": (
        triggered(CALLS, "<call>"),
        ["", "so", A, f"so{A}then{B}{A}", "<call", "so </call>"],
        ["<call>x", '<call>a{"town"', "<call>b1</call>"[:-1] + "x", "so<5>"],
    ),
    "at most one": (triggered(CALLS, "<call>", stop_after_first=True), ["so", f"so{A}"], [f"{A}x", A + A]),
    "at least one, at once": (triggered(CALLS, "<call>", at_least_one=True), [A, f"{A}so{B}"], ["so", "<6>"]),
    "exactly one": (
        triggered(CALLS, "<call>", at_least_one=True, stop_after_first=True),
        [A, B],
        ["so", f"{A}x"],
    ),
    "two triggers": (
        triggered([*CALLS, tag("[", of({"type": "boolean"}), "]")], "<call>", "["),
        [f"so{A}[true]", "so[false]so"],
        ["so[x", "so<call>c", "[truex"],
    ),
    "a special token as trigger": (
        sequence(THOUGHT, triggered(SPECIAL, "<6>")),
        ["so", '<4>so<5>so<6>a{"city":"rome"}<8>', "<4><5>", "<6"],
        ["<6>b", "<8>", "<4>so<8>", "so<4>"],
    ),
    "calls alone": (
        sequence(THOUGHT, several(CALLS, "\n", at_least_one=True)),
        [A, f"{A}\n{B}", f"<4>so<5>{B}"],
        ["so", A + B, f"{A}\nso", f"<4>so{A}<8>"],
    ),
    "one call alone": (several(CALLS, at_least_one=True, stop_after_first=True), [A], [A + A, "so"]),
    "no call or several": (several(CALLS, ", "), ["", A, f"{A}, {B}"], [f"{A}, so", f"{A}{B}"]),
    "a thought that was begun": (
        sequence(tag("", TEXT, "</th>"), several(CALLS)),
        ["so</th>", f"</th>{A}"],
        ["</th>x"],
    ),
    "free text without some": (
        sequence(tag("(", TEXT | {"excludes": ["a\n", "<x>"]}, ")"), TEXT | {"excludes": ["."]}),
        ["(so)", "(<x)so", "(a)\n<x>"],
        ["(<x>", "(so a\n", "(so)so."],
    ),
    "free text without some up to a special token": (
        tag("<4>", TEXT | {"excludes": ["no"]}, "<5>"),
        ["<4>so<5>", "<4><5>", "<4>n<5>"],
        ["<4>so no", "<4>so<6>"],
    ),
    "the older spelling": (
        {"structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}], "triggers": ["<f"]},
        ["so", "so<f>12</f>so"],
        ["<f>x", "<fx"],
    ),
    "one of several": (
        {
            "type": "or",
            "elements": [{"type": "const_string", "value": "caf\u00e9"}, {"type": "regex", "pattern": r"a/\/b"}],
        },
        ["caf\u00e9", "a//b"],
        ["a/b", "b"],
    ),
}


def structural(node: dict[str, Any]) -> StructuredOutput:
    tagged = node if "structures" in node else {"format": node}
    return StructuredOutput(structural_tag={"type": "structural_tag", **tagged})


@pytest.mark.parametrize("name", CASES)
def test_it_takes_what_the_tag_allows_and_nothing_else(name: str) -> None:
    node, whole, wrong = CASES[name]
    encode = json_tokenizer().encode
    for text in whole:
        matcher = json_grammars().matcher(structural(node), encode(text))
        (mask,) = matcher.masks([()])
        assert mask[0] >> 7 & 1, f"the output may end after {text!r}"
    for text in wrong:
        with pytest.raises(InvalidRequestError, match="not the beginning of one"):
            json_grammars().matcher(structural(node), encode(text))


WRONG: list[tuple[Any, str]] = [
    ({"format": 3}, "# is"),
    ({"format": {"type": "xml"}}, "#/format/type is 'xml': any_text, const_string"),
    ({"type": "tag", "format": TEXT}, "#/type is 'tag': only 'structural_tag'"),
    ({"format": {"type": "regex"}}, "#/format/pattern is null: text is needed"),
    ({"format": {"type": "any_text", "excludes": [3]}}, r"#/format/excludes is \[3\]: a list of texts is needed"),
    ({"format": {"type": "regex", "pattern": "a", "excludes": ["b"]}}, "#/format/excludes is .* but regex has no"),
    ({"format": sequence(TEXT, {"type": "const_string", "value": "x"})}, "#/format/elements/0 is any_text"),
    ({"format": sequence(triggered(CALLS, "<call>"), TEXT)}, "#/format/elements/0 is followed by"),
    ({"format": triggered(CALLS, "<other>")}, "#/format/tags/0/begin is '<call>a': it must begin with exactly one"),
    ({"format": several([])}, r"#/format/tags is \[\]"),
    ({"format": several([TEXT])}, "#/format/tags/0 is"),
    ({"format": tag("a", of({"not": {}}), "b")}, "#/format/content/json_schema: # has 'not'"),
    ({"format": {"type": "regex", "pattern": "("}}, "cannot be compiled"),
    ({"structures": [{"begin": "a"}], "triggers": ["a"]}, "#/structures/0 is"),
]


@pytest.mark.parametrize(("node", "sentence"), WRONG)
def test_what_is_wrong_is_named_with_its_place(node: Any, sentence: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"structured_output.structural_tag:? {sentence}"):
        json_grammars().compile(StructuredOutput(structural_tag=node))


def test_nesting_has_a_limit() -> None:
    node: dict[str, Any] = TEXT
    for _ in range(100):
        node = {"type": "optional", "content": node}
    with pytest.raises(InvalidRequestError, match="nested too deep: at most 64"):
        json_grammars().compile(structural(node))
