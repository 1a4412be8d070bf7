"""Calls in the text of an answer: JSON, Python's calls, an element for each argument, fields of response templates."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

from paceline.checkpoint.json_schema import resolved, types_of
from paceline.checkpoint.marks import Marks

_LONGEST_LITERAL = 10
"""Characters after which a fault is the value's, not its end's: ``-Infinity`` has nine."""


class NoCallError(ValueError):
    """The text is no call."""


class UnfinishedCallError(ValueError):
    """The text ends within a string or an argument of the call."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function."""

    name: str
    arguments: str
    """An object, as JSON text."""
    call_id: str = ""
    """The id that the model wrote; empty if it wrote none."""


class Known:
    """The functions that are offered."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        functions = [tool.get("function", tool) for tool in tools]
        self._schemas = {function["name"]: function.get("parameters") or {} for function in functions}

    def __contains__(self, name: str) -> bool:
        return name in self._schemas

    def _types(self, name: str, key: str) -> tuple[str, ...]:
        """The types of an argument that its schema allows; () if there is none."""
        schema = self._schemas.get(name, {})
        try:
            return types_of(resolved(schema, schema).get("properties", {})[key], schema)
        except (LookupError, TypeError, ValueError, AttributeError):
            return ()

    def mended(self, name: str, arguments: Any) -> Any:
        """Arguments of JSON; a string becomes the value that it spells if the schema allows no string."""
        if not isinstance(arguments, dict):
            return arguments
        wrong = {
            key for key, one in arguments.items() if isinstance(one, str) and "string" not in self._types(name, key)
        }
        return {key: self.cast(name, key, one) if key in wrong else one for key, one in arguments.items()}

    def cast(self, name: str, key: str, text: str) -> Any:
        """The value of an argument that is written without JSON's quotes, by the types that its schema allows."""
        for kind in self._types(name, key):
            try:
                return _CASTS[kind](text.strip()) if kind != "string" else text
            except ValueError:
                continue
        return text


def _integer(text: str) -> int:
    number = float(text)
    if not number.is_integer():
        raise ValueError
    return int(text) if re.fullmatch(r"[+-]?\d+", text) else int(number)


def _number(text: str) -> int | float:
    number = float(text)
    if number - number != 0:  # NaN and infinities are no numbers of JSON
        raise ValueError
    return int(text) if re.fullmatch(r"[+-]?\d+", text) else number


def _of(kind: type, text: str) -> Any:
    value = _loads(text)
    if not isinstance(value, kind):
        raise ValueError
    return value


def _one_of(values: Mapping[str, Any], text: str) -> Any:
    if text.lower() not in values:
        raise ValueError
    return values[text.lower()]


_CASTS: dict[str, Any] = {
    "integer": _integer,
    "number": _number,
    "boolean": lambda text: _one_of({"true": True, "1": True, "false": False, "0": False}, text),
    "null": lambda text: _one_of({"null": None, "none": None}, text),
    "object": lambda text: _of(dict, text),
    "array": lambda text: _of(list, text),
    "string": str,
}


class PreparedReader(Protocol):
    """Reads the calls of a region, for one tokenizer."""

    def read(self, body: str, groups: Mapping[str, str], known: Known) -> list[Call]:
        """The calls of a text. ``groups``: named groups of the pattern of its beginning.

        Raises NoCallError, and UnfinishedCallError if a longer text may be a call.
        """
        ...

    def length(self, body: str) -> int | None:
        """Length of the value that a text begins with; None if it has no end yet. Raises NoCallError."""
        ...

    def begun(self, body: str, groups: Mapping[str, str]) -> ArgumentsStream | None:
        """The arguments of the call that a text begins, if they are JSON and have begun."""
        ...


class ArgumentsStream:
    """The arguments of a call, an object of JSON, as they come."""

    def __init__(self, name: str, call_id: str, at: int) -> None:
        """``at``: where they begin in the text of the call."""
        self.name, self.call_id = name, call_id
        self.taken = False
        """True once some were taken."""
        self._at, self._depth = at, 0
        self._in_string = self._escaped = self._ended = False

    def take(self, body: str) -> str:
        """The arguments that have come since, of a text that grows."""
        start = self._at
        for found in _OF_JSON.finditer(body, start):
            if self._ended:
                break
            piece, self._at = found[0], found.end()
            if self._escaped:
                self._escaped = False
            elif piece == "\\":
                self._escaped = True
            elif piece == '"':
                self._in_string = not self._in_string
            elif not self._in_string and piece in ("{", "[", "}", "]"):
                self._depth += 1 if piece in "{[" else -1
                self._ended = self._depth == 0
        self.taken = True
        return body[start : self._at]


_OF_JSON = re.compile(r'[^"\\{}\[\]]+|["\\{}\[\]]')
_BEGUN = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_OBJECT = re.compile(r"\s*(?=\{)")


class CallReader(Protocol):
    """Reader of the calls of a format."""

    @property
    def patterns(self) -> tuple[str, ...]:
        """Regular expressions that may hold marks."""
        ...

    def prepared(self, marks: Marks) -> PreparedReader:
        """The reader for a tokenizer's marks."""
        ...


def _refused(constant: str) -> Any:
    raise NoCallError(f"{constant} is no JSON")


def _finite(text: str) -> float:
    if (number := float(text)) - number != 0:
        raise NoCallError(f"{text} is no number that JSON can hold")
    return number


_DECODER = json.JSONDecoder(strict=False, parse_constant=_refused, parse_float=_finite)


def _loads(text: str) -> Any:
    """The value of a JSON text. Raises NoCallError, and UnfinishedCallError if it ends within a string."""
    value, end = _decoded(text, 0)
    if text[end:].strip():
        raise NoCallError("something follows the value")
    return value


def _decoded(text: str, at: int) -> tuple[Any, int]:
    blank = re.compile(r"\s*").match(text, at)
    assert blank is not None
    try:
        return _DECODER.raw_decode(text, blank.end())
    except json.JSONDecodeError as error:
        if error.msg.startswith("Unterminated string"):
            raise UnfinishedCallError(error.msg) from None
        raise NoCallError(error.msg) from None
    except (RecursionError, ValueError) as error:  # too deep, or a number of too many digits
        raise NoCallError(str(error)) from None


def _json_length(body: str) -> int | None:
    try:
        _, end = _DECODER.raw_decode(body, len(body) - len(body.lstrip()))
    except json.JSONDecodeError as error:
        if not error.msg.startswith("Unterminated string") and error.pos < len(body) - _LONGEST_LITERAL:
            raise NoCallError(error.msg) from None
        return None
    except (RecursionError, ValueError) as error:
        raise NoCallError(str(error)) from None
    return end


def _text_of(arguments: Any) -> str:
    """Arguments as JSON text. Raises NoCallError if they are no object."""
    if isinstance(arguments, str):  # JSON text already
        if arguments.strip() and not isinstance(_loads(arguments), dict):
            raise NoCallError("the arguments are no object")
        return arguments if arguments.strip() else "{}"
    if arguments is None:
        return "{}"
    if not isinstance(arguments, dict):
        raise NoCallError("the arguments are no object")
    return json.dumps(arguments, ensure_ascii=False)


def _name_of(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise NoCallError("a call names no function")
    return name


@dataclass(frozen=True, slots=True)
class _TextReader:
    """A reader that needs no expressions of its own for a tokenizer."""

    patterns: tuple[str, ...] = ()
    marks: Marks | None = None

    def prepared(self, marks: Marks) -> Self:
        """Implements ``CallReader``."""
        return replace(self, marks=marks)

    def _shown(self, text: str) -> str:
        """Text of the model as clients see it."""
        assert self.marks is not None, "prepared comes first"
        return text.translate(self.marks.shown)


class _JsonReader(_TextReader):
    """A reader of values that end where their JSON does."""

    __slots__ = ()

    def length(self, body: str) -> int | None:
        """Implements ``PreparedReader``."""
        return _json_length(body)


class JsonCalls(_JsonReader):
    """Objects of ``name`` and ``arguments`` (or ``parameters``), or lists of them, one after the other."""

    __slots__ = ()

    def read(self, body: str, groups: Mapping[str, str], known: Known) -> list[Call]:
        """Implements ``PreparedReader``."""
        text, at, calls = self._shown(body), 0, list[Call]()
        while text[at:].strip(" \t\r\n,;"):
            value, at = _decoded(text, at + len(text[at:]) - len(text[at:].lstrip(" \t\r\n,;")))
            calls += self._calls(value, known)
        if not calls:
            raise NoCallError("there is no value")
        return calls

    def begun(self, body: str, groups: Mapping[str, str]) -> ArgumentsStream | None:
        """Implements ``PreparedReader``."""
        found = _BEGUN.match(body)
        return None if found is None else ArgumentsStream(found[1], "", found.end())

    def _calls(self, value: Any, known: Known) -> Iterator[Call]:
        if isinstance(value, list):
            for one in value:
                yield from self._calls(one, known)
            return
        if isinstance(value, dict) and isinstance(inner := value.get("function"), dict):
            value = {**value, **inner}
        if not isinstance(value, dict):
            raise NoCallError("a call is no object")
        name = _name_of(value.get("name", value.get("function")))
        arguments = next((value[key] for key in ("arguments", "parameters") if key in value), None)
        given = value.get("id")
        yield Call(name, _text_of(known.mended(name, arguments)), given if isinstance(given, str) else "")


class JsonArguments(_JsonReader):
    """Reads arguments as JSON, after a beginning that names the function."""

    __slots__ = ()

    def read(self, body: str, groups: Mapping[str, str], known: Known) -> list[Call]:
        """Implements ``PreparedReader``."""
        text = self._shown(body)
        arguments = _loads(text) if text.strip() else None
        if isinstance(arguments, str):
            raise NoCallError("the arguments are no object")
        name = _name_of(groups.get("name"))
        return [Call(name, _text_of(known.mended(name, arguments)), groups.get("id", ""))]

    def begun(self, body: str, groups: Mapping[str, str]) -> ArgumentsStream | None:
        """Implements ``PreparedReader``."""
        found, name = _OBJECT.match(body), groups.get("name", "")
        return None if found is None else ArgumentsStream(name, groups.get("id", ""), found.end())


@dataclass(frozen=True, slots=True)
class ElementCalls:
    """An element for each argument: its name in the beginning, then its text, then its end."""

    begins: str
    """Regular expression with the group ``key``; a group ``string`` says if the value is text, else types do."""
    ends: str
    marks: Marks | None = None
    _begins: Any = None
    _ends: Any = None

    @property
    def patterns(self) -> tuple[str, ...]:
        """Implements ``CallReader``."""
        return (self.begins, self.ends)

    def prepared(self, marks: Marks) -> ElementCalls:
        """Implements ``CallReader``."""
        return ElementCalls(self.begins, self.ends, marks, marks.compile(self.begins), marks.compile(self.ends))

    def read(self, body: str, groups: Mapping[str, str], known: Known) -> list[Call]:
        """Implements ``PreparedReader``."""
        assert self.marks is not None
        name, at, arguments = _name_of(groups.get("name")).strip(), 0, dict[str, Any]()
        while body[at:].strip():
            begin = self._begins.match(body, len(body) - len(body[at:].lstrip()))
            if begin is None:
                raise NoCallError("something stands between the arguments")
            end = self._ends.search(body, begin.end())
            if end is None:
                raise UnfinishedCallError("an argument has no end")
            text = body[begin.end() : end.start()].translate(self.marks.shown)
            text = text.removeprefix("\n").removesuffix("\n")
            arguments[begin["key"].strip()] = self._value(
                begin.groupdict().get("string"), name, begin["key"], text, known
            )
            at = end.end()
        return [Call(name, json.dumps(arguments, ensure_ascii=False), groups.get("id", ""))]

    @staticmethod
    def _value(is_text: str | None, name: str, key: str, text: str, known: Known) -> Any:
        if is_text is None:
            return known.cast(name, key.strip(), text)
        return text if is_text == "true" else _loads(text)

    def length(self, body: str) -> int | None:
        """Implements ``PreparedReader``."""
        raise NoCallError("elements have an end of their own")

    def begun(self, body: str, groups: Mapping[str, str]) -> ArgumentsStream | None:
        """Implements ``PreparedReader``."""
        return None


class PythonCalls(_TextReader):
    """A list of calls as Python writes them, with arguments by name."""

    __slots__ = ()

    def read(self, body: str, groups: Mapping[str, str], known: Known) -> list[Call]:
        """Implements ``PreparedReader``."""
        text = self._shown(body).strip()
        try:
            with warnings.catch_warnings(action="ignore"):  # of escapes that are JSON's
                tree = ast.parse(text, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise NoCallError(str(error)) from None
        if not isinstance(tree, ast.List) or not tree.elts:
            raise NoCallError("it is no list of calls")
        return [self._call(one, text) for one in tree.elts]

    @staticmethod
    def _call(node: ast.expr, text: str) -> Call:
        if not isinstance(node, ast.Call) or node.args or any(one.arg is None for one in node.keywords):
            raise NoCallError("a call has arguments without names")
        arguments = {str(one.arg): _literal(one.value, text) for one in node.keywords}
        return Call(ast.unparse(node.func), json.dumps(arguments, ensure_ascii=False))

    def length(self, body: str) -> int | None:
        """Implements ``PreparedReader``."""
        depth, quote, at = 0, "", 0
        while at < len(body):
            char = body[at]
            if quote:
                at += char == "\\"
                quote = "" if char == quote else quote
            elif char in "\"'":
                quote = char
            elif char in "[({":
                depth += 1
            elif char in "])}":
                depth -= 1
                if depth <= 0:
                    return at + 1
            at += 1
        return None

    def begun(self, body: str, groups: Mapping[str, str]) -> ArgumentsStream | None:
        """Implements ``PreparedReader``."""
        return None


_NAMES = {"true": True, "false": False, "null": None}


def _literal(node: ast.expr, text: str) -> Any:
    """The value of an expression of constants alone, of a source ``text``. Raises NoCallError."""
    match node:
        case ast.Constant(value=str(value)):
            source = ast.get_source_segment(text, node) or ""
            try:
                return str(_loads(source)) if source.startswith('"') else value  # JSON's escapes are not all Python's
            except ValueError:
                return value
        case ast.Constant(value=bool() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [_literal(part, text) for part in parts]
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return {str(_literal(key, text)): _literal(one, text) for key, one in pairs if key is not None}
    raise NoCallError("an argument is no constant")


@dataclass(frozen=True, slots=True)
class TemplateCalls:
    """Calls as a field of a response template of transformers has them."""

    field: Any
    """``ResponseTemplateField`` of transformers."""
    source: tuple[str, ...]
    """Texts of the field's options, which may hold marks."""
    marks: Marks | None = None

    @property
    def patterns(self) -> tuple[str, ...]:
        """Implements ``CallReader``."""
        return self.source

    def prepared(self, marks: Marks) -> TemplateCalls:
        """Implements ``CallReader``."""
        return TemplateCalls(self.field, self.source, marks)

    def read(self, body: str, groups: Mapping[str, str], known: Known) -> list[Call]:
        """Implements ``PreparedReader``."""
        from transformers.utils.chat_parsing.content_parsers import process_field

        assert self.marks is not None
        text = body.translate(self.marks.spelled)
        try:
            if self.field.content == "json" and not self.field.content_args:
                _loads(text)
            value = process_field(text, self.field, {k: v.translate(self.marks.spelled) for k, v in groups.items()})
            functions = [one["function"] for one in (value if isinstance(value, list) else [value])]
            return [self._call(function, known) for function in functions]
        except (NoCallError, UnfinishedCallError):
            raise
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise NoCallError(str(error)) from None

    def _call(self, function: Mapping[str, Any], known: Known) -> Call:
        name, arguments = _name_of(function["name"]), function.get("arguments")
        if self.field.content != "json" and isinstance(arguments, dict):
            arguments = {k: known.cast(name, k, v) if isinstance(v, str) else v for k, v in arguments.items()}
        return Call(name, _text_of(arguments))

    def length(self, body: str) -> int | None:
        """Implements ``PreparedReader``."""
        return None

    def begun(self, body: str, groups: Mapping[str, str]) -> ArgumentsStream | None:
        """Implements ``PreparedReader``."""
        return None
