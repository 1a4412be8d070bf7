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
_COMMENTS = frozenset(
    {"title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
)
_IDENTITY = frozenset({"$schema", "$id"})
KEYWORDS = _SCHEMA | _SCHEMAS | _NAMED_SCHEMAS | _VALUES | _COMMENTS | _IDENTITY
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
