"""Small schemas of tools that stand for large ones: reading them is bounded, and they are refused by name."""

import json
from typing import Any

import pytest

from paceline.errors import InvalidRequestError
from paceline.types import MAX_STRUCTURED_OUTPUT_BYTES
from paceline.web import arguments, calls
from paceline.web.arguments import MAX_WORK, Work
from paceline.web.call_forms import FORMS

FORMS_OF_THEIR_OWN = ("qwen3_coder", "glm45", "minimax_m2", "gemma4", "pythonic", "hermes", "kimi_k2")


def of(definitions: dict[str, Any], name: str, count: int = 1) -> dict[str, Any]:
    """A function with some arguments of one definition."""
    properties = {f"p{i}": {"$ref": f"#/$defs/{name}"} for i in range(count)}
    return {"type": "object", "$defs": definitions, "properties": properties}


def doubled(levels: int, leaf: dict[str, Any], *, width: int = 2, key: str = "anyOf") -> dict[str, Any]:
    """Each definition is the one before, several times."""
    definitions: dict[str, Any] = {"a0": leaf}
    for i in range(1, levels + 1):
        definitions[f"a{i}"] = {key: [{"$ref": f"#/$defs/a{i - 1}"}] * width}
    return of(definitions, f"a{levels}")


def objects(levels: int) -> dict[str, Any]:
    """Each object has the one before as two of its members."""
    definitions: dict[str, Any] = {"a0": {"type": "string"}}
    for i in range(1, levels + 1):
        members = {name: {"$ref": f"#/$defs/a{i - 1}"} for name in "xy"}
        definitions[f"a{i}"] = {"type": "object", "properties": members, "required": ["x", "y"]}
    return of(definitions, f"a{levels}")


def arrays(levels: int) -> dict[str, Any]:
    """Arrays of sixteen arrays of sixteen arrays .."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema, "minItems": 16, "maxItems": 16}
    return {"type": "object", "properties": {"p": schema}}


STRING, WHOLE = {"type": "string"}, {"type": "integer"}
MANY = {f"p{i}": WHOLE for i in range(3000)}
BOMBS: dict[str, dict[str, Any]] = {
    "alternatives doubled by reference": doubled(15, STRING, width=3),
    "constants doubled by reference": doubled(15, {"const": "x"}),
    "one of many, tripled": doubled(15, STRING, width=3, key="oneOf"),
    "alternatives of numbers": doubled(15, WHOLE, width=3),
    "a long chain": doubled(3000, STRING, width=1),
    "recursion": of({"a": {"anyOf": [{"$ref": "#/$defs/a"}, STRING]}}, "a"),
    "objects doubled by reference": objects(7),
    "arrays of arrays": arrays(7),
    "many arguments of many alternatives": of({"a": {"anyOf": [STRING] * 1200}}, "a", 1200),
    "many arguments of many numbers": of({"a": {"anyOf": [WHOLE] * 3000}}, "a", 3000),
    "many arguments of many values": of({"a": {"enum": list(range(5000))}}, "a", 3000),
    "many arguments with many comments": of({"a": STRING | {f"x-{i}": 1 for i in range(3000)}}, "a", 3000),
    "many objects of many members": of({"a": {"type": "object", "properties": MANY, "required": [*MANY]}}, "a", 3000),
    "many definitions for each of many": {"type": "object", "$defs": MANY, "properties": MANY},
    "many that may all be absent": {"type": "object", "properties": MANY},
    "a large constant in many places": of({"a": {"const": {"k": ["x"] * 5000}}}, "a", 3000),
}


def bound(name: str, schema: dict[str, Any]) -> int | None:
    """Bytes of the form of a call; None if it is refused with the place."""
    function = {"name": "f", "parameters": json.loads(json.dumps(schema))}  # no part is in two places, as in a body
    try:
        form = calls.tag_of([FORMS[name].tag(function, 0, Work(), free=False)])
    except InvalidRequestError:
        return None
    return len(form.structural_tag or "")


@pytest.fixture
def resolutions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the parts of schemas that are looked at."""
    count, plain = [0], arguments.resolved

    def counted(schema: Any, root: Any) -> Any:
        count[0] += 1
        return plain(schema, root)

    monkeypatch.setattr(arguments, "resolved", counted)
    return count


@pytest.mark.parametrize("name", FORMS_OF_THEIR_OWN)
def test_no_schema_takes_more_work_than_a_form_may_have_bytes(name: str, resolutions: list[int]) -> None:
    for what, schema in BOMBS.items():
        resolutions[0] = 0
        size = bound(name, schema)
        assert size is None or size <= MAX_STRUCTURED_OUTPUT_BYTES, what
        assert resolutions[0] <= MAX_WORK, what


def test_work_that_nobody_counts_is_noticed(resolutions: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Work, "spend", lambda *_: None)
    bound("qwen3_coder", doubled(10, STRING, width=3))
    assert resolutions[0] > MAX_WORK


def test_the_tools_of_a_request_share_the_work() -> None:
    work = Work()
    function = {"name": "f", "parameters": of({"a": {"anyOf": [STRING] * 50}}, "a", 20)}

    def bind(count: int) -> None:
        for i in range(count):
            FORMS["qwen3_coder"].tag(function, i, work, free=False)

    bind(1)
    with pytest.raises(
        InvalidRequestError, match=r"tools\[\d+\].function.parameters: #/properties/p\d+ stands for too"
    ):
        bind(20)


def test_what_a_form_surely_exceeds_is_told_before_it_is_written() -> None:
    shared: Any = {"type": "const_string", "value": "x"}
    for _ in range(60):
        shared = {"type": "sequence", "elements": [shared, shared]}
    assert calls.is_longer(shared, MAX_STRUCTURED_OUTPUT_BYTES)
    assert not calls.is_longer({"a": ["b", 1, None]}, len('{"a":["b",1,null]}'))
