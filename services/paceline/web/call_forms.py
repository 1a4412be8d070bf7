"""How a model writes tool calls: the forms that can be bound, found by what its response template reads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.checkpoint.chat import ChatTemplate
from paceline.checkpoint.json_schema import check_parsed
from paceline.errors import InvalidRequestError
from paceline.web.arguments import Arguments, BareObjects, Elements, Format, const, sequence

_JSON_CALL = {"type": "function", "function": "{content}"}
"""Transform of a response template whose calls are objects of ``name`` and ``arguments``."""
SPACE: Format = {"type": "regex", "pattern": r"[ \n]{0,2}"}
_ANYTHING: Format = {"type": "any_text"}
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Frame:
    """Fixed texts around each part of one kind, and what stands between two of them."""

    begin: str
    end: str
    separator: str


class CallForm(Protocol):
    """How calls are written."""

    @property
    def frame(self) -> Frame:
        """The texts around a call."""
        ...

    def tag(self, function: Mapping[str, Any], i: int, *, free: bool) -> Format:
        """The tag of a call of the i-th function, which begins with that of the frame; ``free``: its arguments are not
        bound. Raises InvalidRequestError for a function that cannot be called so."""
        ...


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """Objects of ``name`` and ``arguments`` between two fixed texts: Qwen 2 and 3, Hermes and the like."""

    frame: Frame

    def tag(self, function: Mapping[str, Any], i: int, *, free: bool) -> Format:
        """As ``CallForm`` has it."""
        schema = {"type": "object"} if free else _parameters(function, i)
        content = sequence(
            SPACE,
            const(f'{{"name": {json.dumps(function["name"])}, "arguments": '),
            {"type": "json_schema", "json_schema": {"type": "object", **schema}},
            const("}"),
            SPACE,
        )
        return _tag(self.frame.begin, content, self.frame.end)


class XmlCalls:
    """Elements for function and arguments, within a frame: Qwen 3.5 and Qwen 3 Coder."""

    frame = Frame("<tool_call>", "</tool_call>", "\n")
    SAMPLE = (
        "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n<parameter=b>\n3\n</parameter>\n</function>\n"
        "</tool_call>"
    )
    _elements = Elements("<parameter=%s>\n", "</parameter>", "\n", ["</function>"])

    def tag(self, function: Mapping[str, Any], i: int, *, free: bool) -> Format:
        """As ``CallForm`` has it."""
        begin, end = f"<tool_call>\n<function={function['name']}>\n", "</function>\n</tool_call>"
        if free:
            return _tag(begin, sequence(_tag("", _ANYTHING, "</function>")), "\n</tool_call>")
        return _tag(begin, _bound(self._elements.arguments, function, i), end)


class BareCalls:
    """Objects with bare keys and quotes of their own, behind the function's name: Gemma 4."""

    frame = Frame("<|tool_call>", "<tool_call|>", "")
    QUOTE = '<|"|>'
    SAMPLE = '<|tool_call>call:f{a:<|"|>x<|"|>,b:3}<tool_call|>'
    _objects = BareObjects(QUOTE, ["<tool_call|>", "\x01", "\x02"])

    def tag(self, function: Mapping[str, Any], i: int, *, free: bool) -> Format:
        """As ``CallForm`` has it."""
        if not re.fullmatch(r"\w+", function["name"]):
            allowed = "this model writes names of letters, digits and underscores"
            raise InvalidRequestError(f"tools[{i}].function.name is {function['name']!r}: {allowed}")
        begin = f"<|tool_call>call:{function['name']}"
        if free:  # free text holds no special token, as the quote is one
            quoted = _tag("", {**_ANYTHING, "excludes": [self.frame.end]}, self.QUOTE)
            several = {"type": "tags_with_separator", "tags": [quoted], "separator": ""}
            return _tag(begin + "{", sequence(several, _ANYTHING), self.frame.end)
        return _tag(begin, _bound(self._objects.arguments, function, i), self.frame.end)


_SAMPLED = (XmlCalls(), BareCalls())
_SAMPLE_TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}},
}


def form_of_calls(chat: ChatTemplate) -> CallForm | None:
    """The form in which a model writes calls; None if it is none that can be bound."""
    field = {} if chat.response is None else chat.response["fields"].get("tool_calls", {})
    if field.get("content") == "json" and not field.get("content_args") and field.get("transform") == _JSON_CALL:
        frame = frame_of(field)
        return None if frame is None else JsonCalls(frame)
    return next((form for form in _SAMPLED if _reads(chat, form.SAMPLE)), None)


def _reads(chat: ChatTemplate, sample: str) -> bool:
    """True if the response template finds the call of a sample."""
    parser = chat.parser("", [_SAMPLE_TOOL])
    if parser is None:
        return False
    try:
        parser.feed(sample)
        calls = parser.finalize()[0].get("tool_calls")
    except (ValueError, LookupError, TypeError, AttributeError):
        return False
    made = {"type": "function", "function": {"name": "f", "arguments": {"a": "x", "b": 3}}}
    return bool(calls == [made])


def frame_of(field: Mapping[str, Any]) -> Frame | None:
    """The fixed texts of a field of a response template; None if it has others."""
    begin, end = _fixed(field, "open"), _fixed(field, "close")
    if not begin or not end:
        return None
    return Frame(begin, end, "\n" if str(field.get("open_pattern", "")).startswith(r"\s*") else "")


def _fixed(field: Mapping[str, Any], name: str) -> str | None:
    """The one text that opens or closes a field."""
    if isinstance(literal := field.get(name), str):
        return literal
    pattern = str(field.get(f"{name}_pattern", "")).removeprefix(r"\s*")
    text = re.sub(r"\\([^\w\s])", r"\1", pattern)
    bare = re.sub(r"\\[^\w\s]", "", pattern)  # what is left has no meaning of its own unless it is one of these
    return None if not text or re.search(r"[\\.^$*+?{}\[\]|()]", bare) else text


def _parameters(function: Mapping[str, Any], i: int) -> dict[str, Any]:
    schema: dict[str, Any] = function.get("parameters") or _NO_ARGUMENTS
    check_parsed(schema, _name(i))
    return schema


def _bound(arguments: Arguments, function: Mapping[str, Any], i: int) -> Format:
    """The arguments of a function. Raises InvalidRequestError, which names the function's schema."""
    schema, name = _parameters(function, i), _name(i)
    try:
        return arguments(schema, name)
    except InvalidRequestError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise InvalidRequestError(f"{name} is no valid JSON Schema: {error}") from None


def _name(i: int) -> str:
    return f"tools[{i}].function.parameters"


def _tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}
