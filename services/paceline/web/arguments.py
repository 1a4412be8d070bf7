"""Arguments of tool calls that are not written as JSON: the formats of a structural tag for the schema of a function.

Three forms are known. Qwen 3.5: an element for each argument, with text unquoted and everything else as JSON. Gemma 4:
an object with bare keys and strings between quotes of their own. Python: arguments by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.checkpoint.json_schema import is_comment, resolved, types_of
from paceline.errors import InvalidRequestError

Format = dict[str, Any]
"""A format of a structural tag."""
Schema = Mapping[str, Any]

MAX_WORK = 1 << 14
_MAX_DEPTH = 16
_MAX_ITEMS = 16
_EITHER = ("anyOf", "oneOf")
_OF_STRING = {"minLength", "maxLength"}
_OF_ARRAY = {"items", "minItems", "maxItems"}
_OF_OBJECT = {"properties", "required", "additionalProperties"}
_NOTES = {"type", "$defs", "definitions"}
_PYTHONS = {"boolean": ("true", "false", "True", "False"), "null": ("null", "None")}
"""Values that templates write as Python does, and parsers read both ways."""


def const(text: str) -> Format:
    """The format of one text."""
    return {"type": "const_string", "value": text}


def sequence(*elements: Format) -> Format:
    """One format after the other."""
    return {"type": "sequence", "elements": list(elements)} if elements else const("")


def either(formats: Sequence[Format]) -> Format:
    """Any one of some formats."""
    return formats[0] if len(formats) == 1 else {"type": "or", "elements": list(formats)}


class Work:
    """How much of the schemas of one request's tools may still be read, in keywords and values.

    References make a small schema stand for a large one. What takes more than ``MAX_WORK`` has more bytes than the form
    of an answer may have.
    """

    def __init__(self) -> None:
        self._left = MAX_WORK

    def spend(self, amount: int, name: str, place: str) -> None:
        """Charges ``amount`` for the schema at a place. Raises InvalidRequestError if the limit is exceeded."""
        self._left -= amount
        if self._left < 0:
            raise _fault(name, place, f"stands for too much: at most {MAX_WORK} keywords and values can be bound")


class _Function:
    """The schema of one function: what its parts mean, what reading them costs, and how its refusals begin."""

    def __init__(self, schema: Schema, name: str, work: Work) -> None:
        self.root, self._name, self._work = schema, name, work

    def fault(self, place: str, problem: str) -> InvalidRequestError:
        """Returns the error for a problem at a place of the schema."""
        return _fault(self._name, place, problem)

    def spend(self, amount: int, place: str) -> None:
        """``Work.spend``."""
        self._work.spend(amount, self._name, place)

    def resolved(self, schema: Any, place: str, depth: int) -> Schema:
        """``resolved``. Raises InvalidRequestError below ``_MAX_DEPTH`` levels, and for too much work."""
        if depth > _MAX_DEPTH:
            raise self.fault(place, f"is nested too deep for this model: at most {_MAX_DEPTH} levels are allowed")
        found = resolved(schema, self.root)
        self.spend(1 + len(found), place)
        return found

    def types(self, schema: Schema, place: str) -> tuple[str, ...]:
        """``types_of``."""
        return types_of(schema, self.root, lambda amount: self.spend(amount, place))

    def members(self, schema: Schema, place: str) -> tuple[Mapping[str, Any], set[str]]:
        """Returns the properties of an object and the names of the required ones."""
        self.refuse_keywords(schema, _OF_OBJECT, place)
        properties, required = schema.get("properties", {}), set(schema.get("required", ()))
        self.spend(len(properties) + len(required), place)
        if missing := sorted(required - properties.keys()):
            raise self.fault(place, f"requires {missing[0]!r}, which is none of its properties")
        return properties, required

    def refuse_keywords(self, schema: Schema, allowed: set[str], place: str) -> None:
        """Refuses keywords that would not bind."""
        for keyword in sorted(_binding(schema) - allowed):
            raise self.fault(place, f"has {keyword!r}, which cannot bind what this model writes without JSON")

    def as_json(self, schema: Schema) -> Format:
        """The format of a value as JSON, with the definitions that it may refer to."""
        definitions = {key: self.root[key] for key in ("$defs", "definitions") if key in self.root}
        return {"type": "json_schema", "json_schema": {**definitions, **schema}}

    def listed(self, members: Sequence[tuple[bool, Format]], place: str) -> Format:
        """Format of members separated by commas. ``members``: (True if it is required, its format)."""
        comma = const(",")

        def after(rest: Sequence[tuple[bool, Format]]) -> list[Format]:
            parts = ((must, sequence(comma, member)) for must, member in rest)
            return [part if must else {"type": "optional", "content": part} for must, part in parts]

        pivot = next((i for i, (must, _) in enumerate(members) if must), None)
        if pivot is not None:
            before = [{"type": "optional", "content": sequence(member, comma)} for _, member in members[:pivot]]
            return sequence(*before, members[pivot][1], *after(members[pivot + 1 :]))
        self.spend(len(members) ** 2, place)  # each may be the first, before any of the others
        ways = [sequence(member, *after(members[i + 1 :])) for i, (_, member) in enumerate(members)]
        return {"type": "optional", "content": either(ways)} if ways else const("")


class Elements:
    """Arguments as ``begin % name``, a value, ``end``: strings as they are, everything else as JSON."""

    def __init__(self, begin: str, end: str, after: str, forbidden: Sequence[str], gap: str = "\n") -> None:
        """``gap`` precedes each ``end``; ``after`` follows it. ``forbidden``: strings that no text may contain, like
        ``end``."""
        self._begin, self._after, self._forbidden = begin, after, list(forbidden)
        self._end, self._closing = end, gap + end

    @property
    def any(self) -> Format:
        """Any elements at all."""
        head, _, between = self._begin.partition("%s")
        text = {"type": "tag", "begin": "", "content": {"type": "any_text"}}
        parts = [{**text, "end": end} for end in (between, self._end)]
        element = {"type": "tag", "begin": head, "content": sequence(*parts), "end": self._after}
        return {"type": "tags_with_separator", "tags": [element], "separator": ""}

    def arguments(self, schema: Schema, name: str, work: Work) -> Format:
        """All arguments that a schema allows, in its order.

        Raises:
            InvalidRequestError: the schema cannot be bound in this form; it begins with ``name`` and has the place.
        """
        function = _Function(schema, name, work)
        members, required = function.members(function.resolved(schema, "#", 0), "#")
        elements = []
        for key, member in members.items():
            place = f"#/properties/{key}"
            value = either(self._values(member, function, place, 0))
            element = sequence(const(self._begin % key), value, const(self._after))
            elements.append(element if key in required else {"type": "optional", "content": element})
        return sequence(*elements)

    def _values(self, schema: Any, function: _Function, place: str, depth: int) -> list[Format]:
        """The ways to write a value, each with the end of its element."""
        schema = function.resolved(schema, place, depth)
        if (values := _enumerated(schema)) is not None:
            function.spend(len(values), place)
            texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
            for text in texts:
                if text != text.strip() or any(end in text for end in (self._end, *self._forbidden)):
                    raise function.fault(place, f"allows {text!r}, which this model cannot write")
            return [const(text + self._closing) for text in texts]
        types = function.types(schema, place)
        if types and "string" not in types:
            if len(types) == 1 and not _binding(schema) and types[0] in _PYTHONS:
                return [const(text + self._closing) for text in _PYTHONS[types[0]]]
            return [sequence(function.as_json(schema), const(self._closing))]
        if set(types) - {"string", "null"}:
            raise function.fault(place, "allows both text and other values, which this model cannot distinguish")
        parts = next((schema[key] for key in _EITHER if key in schema), None)
        if parts is not None:
            function.refuse_keywords(schema, {*_EITHER}, place)
            found = [one for part in parts for one in self._values(part, function, place, depth + 1)]
            return next(([one] for one in found if one["type"] == "tag"), found)  # free text is any text
        function.refuse_keywords(schema, _OF_STRING, place)
        if schema.keys() & _OF_STRING:
            line = _line(schema.get("minLength", 0), schema.get("maxLength"))
            nothing = [const("None" + self._closing)] if "null" in types else []
            return [sequence({"type": "regex", "pattern": line}, const(self._closing)), *nothing]
        free = {"type": "any_text", "excludes": self._forbidden}
        return [{"type": "tag", "begin": "", "content": free, "end": self._end}]


class Keywords:
    """Arguments as ``name=value`` with the values as JSON, in the order of the schema."""

    def arguments(self, schema: Schema, name: str, work: Work) -> Format:
        """All arguments that a schema allows. Raises InvalidRequestError for a name that Python does not allow."""
        function = _Function(schema, name, work)
        members, required = function.members(function.resolved(schema, "#", 0), "#")
        found = []
        for key, member in members.items():
            if not key.isidentifier():
                raise function.fault(f"#/properties/{key}", "is a name that this model cannot write")
            value = function.as_json(function.resolved(member, f"#/properties/{key}", 0))
            found.append((key in required, sequence(const(f"{key}="), value)))
        return function.listed(found, "#")


def _line(least: int, most: int | None) -> str:
    """One line of text of a length, without spaces at its ends, which parsers take away, and without ``<``."""
    if most is not None and most < 2:
        return rf"[^<\s]{{{least},{most}}}"
    between = f"{{{max(least - 2, 0)},{'' if most is None else most - 2}}}"
    more = rf"[^<\s][^<\n]{between}[^<\s]"
    return {0: rf"([^<\s]|{more})?", 1: rf"[^<\s]|{more}"}.get(least, more)


class BareObjects:
    """Objects as ``{key:value,...}`` with the keys in the order of the alphabet, strings between ``quote``."""

    def __init__(self, quote: str, forbidden: Sequence[str]) -> None:
        """``forbidden``: texts that no string may contain, in addition to ``quote``."""
        self._quote, self._forbidden = quote, list(forbidden)

    def arguments(self, schema: Schema, name: str, work: Work) -> Format:
        """An object of all arguments that a schema allows.

        Raises:
            InvalidRequestError: the schema cannot be bound in this form; it begins with ``name`` and has the place.
        """
        function = _Function(schema, name, work)
        return self._object(function.resolved(schema, "#", 0), function, "#", 0)

    def _value(self, schema: Any, function: _Function, place: str, depth: int) -> Format:
        schema = function.resolved(schema, place, depth)
        if (values := _enumerated(schema)) is not None:
            function.spend(len(values), place)
            return either([const(self._written(value, function, place)) for value in values])
        for key in _EITHER:
            if key in schema:
                function.refuse_keywords(schema, {key}, place)
                parts = enumerate(schema[key])
                return either([self._value(part, function, f"{place}/{key}/{i}", depth + 1) for i, part in parts])
        types = function.types(schema, place)
        if not types:
            raise function.fault(place, "has no type: this model writes values by their types")
        return either([self._of_type(kind, schema, function, place, depth + 1) for kind in types])

    def _of_type(self, kind: str, schema: Schema, function: _Function, place: str, depth: int) -> Format:
        if kind == "object":
            return self._object(schema, function, place, depth)
        if kind == "array":
            return self._array(schema, function, place, depth)
        if kind == "string":
            return self._string(schema, function, place)
        return function.as_json({**schema, "type": kind})

    def _string(self, schema: Schema, function: _Function, place: str) -> Format:
        function.refuse_keywords(schema, _OF_STRING, place)
        quote = const(self._quote)
        if schema.keys() & _OF_STRING:
            length = f"{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}"
            return sequence(quote, {"type": "regex", "pattern": rf"[^<\x01\x02]{length}"}, quote)
        text = {"type": "any_text", "excludes": self._forbidden}
        return {"type": "tag", "begin": self._quote, "content": text, "end": self._quote}

    def _array(self, schema: Schema, function: _Function, place: str, depth: int) -> Format:
        function.refuse_keywords(schema, _OF_ARRAY, place)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if least > _MAX_ITEMS or (most or 0) > _MAX_ITEMS:
            problem = f"asks for a length: at most {_MAX_ITEMS} items can be counted for this model"
            raise function.fault(place, problem)
        if most == 0:
            return const("[]")
        item = self._value(schema.get("items", {}), function, f"{place}/items", depth)
        fixed = [part for _ in range(least - 1) for part in (item, const(","))]
        if most is None:
            tag = {"type": "tag", "begin": "", "content": item, "end": ""}
            several = {"type": "tags_with_separator", "tags": [tag], "separator": ",", "at_least_one": least > 0}
            return sequence(const("["), *fixed, several, const("]"))
        more: Format = const("")
        for _ in range(most - max(least, 1)):
            more = {"type": "optional", "content": sequence(const(","), item, more)}
        last = sequence(item, more)
        return sequence(const("["), *fixed, last if least else {"type": "optional", "content": last}, const("]"))

    def _object(self, schema: Schema, function: _Function, place: str, depth: int) -> Format:
        found, required = function.members(schema, place)
        members = []
        for key in sorted(found, key=str.lower):
            if not key.replace("_", "a").isalnum():
                raise function.fault(f"{place}/properties/{key}", "is a name of signs that this model cannot write")
            value = self._value(found[key], function, f"{place}/properties/{key}", depth)
            members.append((key in required, sequence(const(f"{key}:"), value)))
        return sequence(const("{"), function.listed(members, place), const("}"))

    def _written(self, value: Any, function: _Function, place: str) -> str:
        """A value as the template writes it."""
        function.spend(1, place)
        match value:
            case str():
                if any(text in value for text in (self._quote, *self._forbidden)):
                    raise function.fault(place, f"allows {value!r}, which this model cannot write")
                return f"{self._quote}{value}{self._quote}"
            case Mapping():
                inner = ((key, self._written(value[key], function, place)) for key in sorted(value, key=str.lower))
                return "{" + ",".join(f"{key}:{text}" for key, text in inner) + "}"
            case list():
                return "[" + ",".join(self._written(one, function, place) for one in value) + "]"
        return json.dumps(value)


def _enumerated(schema: Schema) -> list[Any] | None:
    """The values that a schema lists; None: it lists none."""
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _binding(schema: Schema) -> set[str]:
    """Keywords of a schema that bind its values, but for their types."""
    return {keyword for keyword in schema.keys() - _NOTES if not is_comment(keyword)}


def _fault(name: str, place: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name}: {place} {problem}")


Arguments = Callable[[Schema, str, Work], Format]
"""The arguments of a schema in the form of a model; the second argument begins a refusal."""
