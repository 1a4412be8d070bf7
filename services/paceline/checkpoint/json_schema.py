"""Which JSON Schemas can be compiled: keywords that are neither known here nor mere comments are refused by name.

The compiler refuses unsupported values, combinations, formats and references by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any, cast

from paceline.errors import InvalidRequestError

MAX_DEPTH = 64
"""Deepest nesting of a schema."""
WHITESPACE = r"[\x20\x0A\x0D\x09]{0,20}"
"""Between the tokens of JSON. Bounded, for a model that begins to indent may never end."""
MAX_MULTIPLE = 100_000
"""Largest ``multipleOf``, in its last digit that is not 0: its automaton has a state for each remainder."""
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
    {
        *("title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly", "$comment"),
        *("discriminator", "xml", "externalDocs", "contentMediaType", "contentEncoding", "contentSchema", "$anchor"),
        "strict",  # an option of OpenAI's tools that clients put a level too deep
    }
)
_UNENFORCED = frozenset({"uniqueItems"})
"""Keywords that are accepted although no grammar can enforce them: pydantic writes one for every set, and removes
duplicates itself."""
_EXTENSION = "x-"
_EITHER = ("anyOf", "oneOf")
_OWN_EXTENSION = "x-guidance"
"""Keyword that the compiler reads as its own options."""
_IDENTITY = frozenset({"$schema", "$id"})
KEYWORDS = _SCHEMA | _SCHEMAS | _NAMED_SCHEMAS | _VALUES | _IDENTITY
"""Keywords of a schema that are honored."""


def is_comment(keyword: str) -> bool:
    """True for a keyword without effect: it describes, as in schemas of pydantic and OpenAPI, or is not enforced."""
    return keyword in _COMMENTS | _UNENFORCED or (keyword.startswith(_EXTENSION) and keyword != _OWN_EXTENSION)


def read_schema(text: str) -> dict[str, Any]:
    """The schema in a text. Raises InvalidRequestError for no JSON Schema, or a keyword that is not supported."""
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
    return schema


def check_parsed(schema: Mapping[str, Any], name: str = _NAME) -> None:
    """Raises InvalidRequestError, which begins with ``name``, for a keyword of a schema that is not supported."""
    _check(schema, name, "#", 0)


def as_compiled(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema as its compiler takes it, without keywords that only describe. ``oneOf`` of tagged objects becomes
    ``anyOf``, which is equivalent if no value matches two of them."""
    return cast("dict[str, Any]", _as_compiled(schema, schema))


def _as_compiled(schema: Any, root: Mapping[str, Any]) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in _SCHEMA:
            found[keyword] = _as_compiled(value, root)
        elif keyword in _SCHEMAS and isinstance(value, list):
            tagged = None if keyword != "oneOf" or "anyOf" in schema else _tagged(value, root)
            parts = value if tagged is None else tagged
            found[keyword if tagged is None else "anyOf"] = [_as_compiled(part, root) for part in parts]
        elif keyword in _NAMED_SCHEMAS and isinstance(value, Mapping):
            found[keyword] = {name: _as_compiled(part, root) for name, part in value.items()}
        elif not is_comment(keyword):
            found[keyword] = value
    return found


def _tagged(parts: list[Any], root: Mapping[str, Any]) -> list[Any] | None:
    """Returns the objects with the property that distinguishes them made required; None if no property does."""
    try:
        whole = [resolved(part, root) for part in parts]
        names = [name for name in whole[0].get("properties", ()) if all(part.get("type") == "object" for part in whole)]
        for name in names:
            values = [_texts_of(part.get("properties", {}).get(name, {}), root) for part in whole]
            if all(values) and len(set().union(*values)) == sum(map(len, values)):
                return [
                    given
                    if name in part.get("required", ())
                    else {**part, "required": [*part.get("required", ()), name]}
                    for given, part in zip(parts, whole, strict=True)
                ]
    except (LookupError, TypeError, AttributeError):
        return None  # what is no schema, the compiler says
    return None


def _texts_of(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """The texts that a schema lists, if all its values are texts."""
    given = resolved(schema, root)
    values = [given["const"]] if "const" in given else given.get("enum", [])
    return set(values) if all(isinstance(value, str) for value in values) else set()


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
"""JSON types; types whose text is easily distinguished come first."""


def types_of(
    schema: Any, root: Mapping[str, Any], spend: Callable[[int], None] = lambda amount: None
) -> tuple[str, ...]:
    """The JSON types that a schema's values may have, in the order of ``TYPES``; () if it says nothing of them.

    ``spend`` is called with the number of keywords and values that are read, part by part, and may raise.

    Raises LookupError as ``resolved`` does, and for parts that are nested too deep.
    """
    found = _types_of(schema, root, {}, spend, 0)
    return tuple(name for name in TYPES if name in (found or ()))


def _types_of(
    schema: Any, root: Mapping[str, Any], known: dict[int, set[str] | None], spend: Callable[[int], None], depth: int
) -> set[str] | None:
    """Returns the types of a schema; None: any. ``known``: types by schema id; None while one is being examined."""
    if (key := id(schema)) in known:
        return known[key]
    if depth > MAX_DEPTH:
        raise LookupError(f"its parts are nested too deep: at most {MAX_DEPTH} levels are allowed")
    known[key] = None
    given, found = resolved(schema, root), None
    spend(1 + len(given))
    if "const" in given or "enum" in given:
        values = [given["const"]] if "const" in given else given["enum"]
        spend(len(values))
        found = {_type_of(value) for value in values}
    elif isinstance(kind := given.get("type"), str):
        found = {kind}
    elif isinstance(kind, list):
        found = {*kind}
    else:
        for part in given.get("allOf", ()):
            some = _types_of(part, root, known, spend, depth + 1)
            found = some if found is None else found & some if some else found
        for keyword in _EITHER:
            if keyword in given:
                spend(len(given[keyword]))
                parts = [_types_of(part, root, known, spend, depth + 1) for part in given[keyword]]
                found = set[str]().union(*(part for part in parts if part)) if all(parts) else found
    known[key] = found
    return found


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
        if keyword not in KEYWORDS and not is_comment(keyword):
            raise InvalidRequestError(f"{name}: {place} has {keyword!r}, a keyword that is not supported")
    given: Any = schema.get("type")
    for kind in given if isinstance(given, list) else [given]:
        if isinstance(kind, str) and kind not in TYPES:
            allowed = ", ".join(map(repr, TYPES))
            raise InvalidRequestError(f"{name}: {place}/type is {kind!r}: {allowed} are allowed, or a list of them")
    if isinstance(multiple := schema.get("multipleOf"), int | float) and _digits(multiple) > MAX_MULTIPLE:
        raise InvalidRequestError(
            f"{name}: {place}/multipleOf is {multiple}: at most {MAX_MULTIPLE} is allowed, zeros at the end aside"
        )
    for at, part in _parts(schema, place):
        _check(part, name, at, depth + 1)


def _digits(number: float) -> int:
    """The digits of a number, without zeros at either end and without its point."""
    return int("".join(map(str, Decimal(str(number)).normalize().as_tuple().digits))) if math.isfinite(number) else 0


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
