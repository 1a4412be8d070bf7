"""Tool calls that an answer must make, or must make in a certain form, as structural tags by the response template.

Calls that are JSON objects of ``name`` and ``arguments`` between two fixed texts can be bound (Qwen 2 and 3, Hermes and
the like). Others cannot, and are refused: calls in XML, or in a JSON of their own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.checkpoint.chat import ChatTemplate
from paceline.checkpoint.json_schema import check_parsed
from paceline.errors import InvalidRequestError
from paceline.errors.refusals import shown
from paceline.types import StructuredOutput
from paceline.web.speech import REASONING

_JSON_CALL = {"type": "function", "function": "{content}"}
"""Transform of a response template whose calls are objects of ``name`` and ``arguments``."""
_SPACE = {"type": "regex", "pattern": r"[ \n]{0,2}"}
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class _Frame:
    """Fixed texts around each part of one kind, and what stands between two of them."""

    begin: str
    end: str
    separator: str


def bound_calls(
    chat: ChatTemplate,
    tools: Sequence[Mapping[str, Any]],
    choice: Any,
    *,
    parallel: bool,
    prefix: str,
) -> StructuredOutput | None:
    """The form of an answer that calls tools as it was asked to.

    Args:
        tools: as a chat template reads them.
        choice: ``None``, ``"auto"``, ``"required"``, or the name of a function as ``{"name": ...}``.
        parallel: an answer may hold several calls.
        prefix: the rendered chat, which may have begun the reasoning.

    Returns:
        None if any answer will do: calls are free, and no tool is strict.

    Raises:
        InvalidRequestError: calls of this model have a form that cannot be bound, or the schema of a tool cannot be.
    """
    strict = any(tool["function"].get("strict") for tool in tools)
    free = choice in (None, "auto")
    if free and not strict and parallel:
        return None
    frame = _frame_of_calls(chat)
    if frame is None:
        asked = "parallel_tool_calls is false" if free and not strict else f"tool_choice is {shown(choice)}"
        asked = "tools hold one that is strict" if free and strict else asked
        raise InvalidRequestError(
            f"{asked}, but this model writes calls in a form that cannot be bound: calls must be JSON objects of name "
            "and arguments between two fixed texts"
        )
    named = choice["name"] if isinstance(choice, Mapping) else None
    tags = [
        _tag(frame, tool["function"], i, free)
        for i, tool in enumerate(tools)
        if named in (None, tool["function"]["name"])
    ]
    calls: dict[str, Any]
    if free:
        calls = {"type": "triggered_tags", "triggers": [frame.begin], "tags": tags, "stop_after_first": not parallel}
    else:
        several = {"at_least_one": True, "stop_after_first": named is not None or not parallel}
        calls = {"type": "tags_with_separator", "tags": tags, "separator": frame.separator, **several}
    before = [*_reasoning(chat, prefix), *(() if free else (_SPACE,))]
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": [*before, calls]}}
    try:
        return StructuredOutput(structural_tag=json.dumps(tag))
    except ValueError:
        raise InvalidRequestError("tools are too long to be bound: their schemas have too many bytes") from None


def _tag(frame: _Frame, function: Mapping[str, Any], i: int, free: bool) -> dict[str, Any]:
    """A call of one function. Where calls are ``free``, arguments are bound only if the function is strict."""
    schema = function.get("parameters") or _NO_ARGUMENTS
    if free and not function.get("strict"):
        schema = {"type": "object"}
    check_parsed(schema, f"tools[{i}].function.parameters")
    content = [
        _SPACE,
        {"type": "const_string", "value": f'{{"name": {json.dumps(function["name"])}, "arguments": '},
        {"type": "json_schema", "json_schema": {"type": "object", **schema}},
        {"type": "const_string", "value": "}"},
        _SPACE,
    ]
    return {
        "type": "tag",
        "begin": frame.begin,
        "content": {"type": "sequence", "elements": content},
        "end": frame.end,
    }


def _frame_of_calls(chat: ChatTemplate) -> _Frame | None:
    field = {} if chat.response is None else chat.response["fields"].get("tool_calls", {})
    if field.get("content") != "json" or field.get("content_args") or field.get("transform") != _JSON_CALL:
        return None
    return _frame(field)


def _frame(field: Mapping[str, Any]) -> _Frame | None:
    """The fixed texts of a field of a response template; None if it has others."""
    begin, end = _fixed(field, "open"), _fixed(field, "close")
    if not begin or not end:
        return None
    return _Frame(begin, end, "\n" if str(field.get("open_pattern", "")).startswith(r"\s*") else "")


def _fixed(field: Mapping[str, Any], name: str) -> str | None:
    """The one text that opens or closes a field."""
    if isinstance(literal := field.get(name), str):
        return literal
    pattern = str(field.get(f"{name}_pattern", "")).removeprefix(r"\s*")
    text = re.sub(r"\\([^\w\s])", r"\1", pattern)
    bare = re.sub(r"\\[^\w\s]", "", pattern)  # what is left has no meaning of its own unless it is one of these
    return None if not text or re.search(r"[\\.^$*+?{}\[\]|()]", bare) else text


def _reasoning(chat: ChatTemplate, prefix: str) -> list[dict[str, Any]]:
    """The format of the reasoning before a call: none, one that the prefix has begun, or one that may come."""
    fields = {} if chat.response is None else chat.response["fields"]
    name = next((name for name in REASONING if name in fields), None)
    frame = None if name is None else _frame(fields[name])
    if frame is None:
        return []
    parser = chat.parser(prefix, None)
    events = [*parser.feed("so "), *parser.finalize()[1]]
    tag = {"type": "tag", "content": {"type": "any_text"}, "end": frame.end}
    if any(event["field"] == name for event in events):
        return [tag | {"begin": ""}]
    return [{"type": "optional", "content": tag | {"begin": frame.begin}}]
