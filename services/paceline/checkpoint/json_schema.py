"""Which JSON Schemas can be compiled: keywords that are neither known here nor mere comments are refused by name.

Refusals of values, combinations, formats and references are left to the compiler, which names what it finds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from paceline.errors import InvalidRequestError

MAX_DEPTH = 64
"""Deepest nesting of a schema."""
WHITESPACE = r"[\x20\x0A\x0D\x09]{0,20}"
"""Between the tokens of JSON. Bounded, for a model that begins to indent may never end."""
_NAME = "structured_output.json_schema"

_SCHEMA = frozenset({"additionalProperties", "items"})
_SCHEMAS = frozenset({"anyOf", "allOf", "oneOf", "prefixItems"})
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_VALUES = frozenset(
    {
        *("type", "enum", "const", "$ref", "required", "format", "pattern", "minLength", "maxLength"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("minItems", "maxItems", "minProperties", "maxProperties"),
    }
)
COMMENTS = frozenset(
    {"title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
)
"""Keywords that only describe."""
_IDENTITY = frozenset({"$schema", "$id"})
KEYWORDS = _SCHEMA | _SCHEMAS | _NAMED_SCHEMAS | _VALUES | COMMENTS | _IDENTITY
"""All keywords that a schema may have."""


def check_schema(text: str) -> None:
    """Raises InvalidRequestError for text that is no JSON Schema, or one with a keyword that is not supported."""
    try:
        schema = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidRequestError(
            f"{_NAME} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except RecursionError:
        raise _too_deep(_NAME) from None
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"{_NAME} is not a JSON object: a schema is one")
    check_parsed(schema)


def check_parsed(schema: Mapping[str, Any], name: str = _NAME) -> None:
    """Raises InvalidRequestError, which begins with ``name``, for a keyword of a schema that is not supported."""
    _check(schema, name, "#", 0)


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema with what its ``$ref`` means in its place; ``true`` and ``false`` as objects.

    Raises LookupError for a reference to nothing, or to itself.
    """
    found: dict[str, Any] = {} if schema is True else {"enum": []} if schema is False else dict(schema)
    for _ in range(MAX_DEPTH):
        if "$ref" not in found:
            return found
        reference = found.pop("$ref")
        target: Any = root
        for key in filter(None, str(reference).removeprefix("#").split("/")):
            if not isinstance(target, Mapping) or key not in target:
                raise LookupError(f"$ref is {reference!r}, and there is no such schema")
            target = target[key]
        found = {**target, **found} if isinstance(target, Mapping) else {}
    raise LookupError("$ref leads to itself")


TYPES = ("integer", "number", "boolean", "null", "object", "array", "string")
"""JSON types, those whose text is told from another's first."""


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> tuple[str, ...]:
    """The JSON types that a schema's values may have, in the order of ``TYPES``; () if it says nothing of them.

    Raises LookupError as ``resolved`` does.
    """
    schema = resolved(schema, root)
    found: set[str] | None = None
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        found = {_type_of(value) for value in values}
    elif isinstance(kind := schema.get("type"), str):
        found = {kind}
    elif isinstance(kind, list):
        found = {*kind}
    elif depth < MAX_DEPTH:
        for part in schema.get("allOf", ()):
            some = {*types_of(part, root, depth + 1)}
            found = some if found is None else found & some if some else found
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                parts = [{*types_of(part, root, depth + 1)} for part in schema[keyword]]
                found = set().union(*parts) if all(parts) else found
    return tuple(name for name in TYPES if name in (found or ()))


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
    return "object" if isinstance(value, Mapping) else "array"


def _check(schema: Any, name: str, place: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise _too_deep(name)
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        kind = "a list: prefixItems takes one" if isinstance(schema, list) else repr(schema)
        raise InvalidRequestError(f"{name}: {place} is {kind}: a schema is an object")
    for keyword in schema:
        if keyword not in KEYWORDS:
            raise InvalidRequestError(f"{name}: {place} has {keyword!r}, a keyword that is not supported")
    for at, part in _parts(schema, place):
        _check(part, name, at, depth + 1)


def _parts(schema: Mapping[str, Any], place: str) -> Iterator[tuple[str, Any]]:
    """The schemas within a schema, with their places."""
    for keyword, value in schema.items():
        if keyword in _SCHEMA:
            yield f"{place}/{keyword}", value
        elif keyword in _SCHEMAS and isinstance(value, list):
            yield from ((f"{place}/{keyword}/{i}", part) for i, part in enumerate(value))
        elif keyword in _NAMED_SCHEMAS and isinstance(value, dict):
            yield from ((f"{place}/{keyword}/{name}", part) for name, part in value.items())


def _too_deep(name: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} is nested too deep: at most {MAX_DEPTH} levels")
