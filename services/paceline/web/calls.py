"""Tool calls that an answer must make, or must make in a certain form, as structural tags by the response template.

Which forms can be bound is in ``call_forms.py``; a model that writes others refuses what would bind them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.checkpoint.chat import ChatTemplate
from paceline.errors import InvalidRequestError
from paceline.errors.refusals import shown
from paceline.types import StructuredOutput
from paceline.web.call_forms import SPACE, form_of_calls, frame_of
from paceline.web.speech import REASONING


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
    form = form_of_calls(chat)
    if form is None:
        asked = "parallel_tool_calls is false" if free and not strict else f"tool_choice is {shown(choice)}"
        asked = "tools hold one that is strict" if free and strict else asked
        raise InvalidRequestError(
            f"{asked}, but this model writes calls in a form that cannot be bound: they must be JSON objects of name "
            "and arguments between two fixed texts, or as Qwen 3.5 or Gemma 4 write them"
        )
    named = choice["name"] if isinstance(choice, Mapping) else None
    tags = [
        form.tag(tool["function"], i, free=free and not tool["function"].get("strict"))
        for i, tool in enumerate(tools)
        if named in (None, tool["function"]["name"])
    ]
    calls: dict[str, Any]
    if free:
        calls = {
            "type": "triggered_tags",
            "triggers": [form.frame.begin],
            "tags": tags,
            "stop_after_first": not parallel,
        }
    else:
        several = {"at_least_one": True, "stop_after_first": named is not None or not parallel}
        calls = {"type": "tags_with_separator", "tags": tags, "separator": form.frame.separator, **several}
    before = [*_reasoning(chat, prefix), *(() if free else (SPACE,))]
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": [*before, calls]}}
    try:
        return StructuredOutput(structural_tag=json.dumps(tag))
    except ValueError:
        raise InvalidRequestError("tools are too long to be bound: their schemas have too many bytes") from None


def _reasoning(chat: ChatTemplate, prefix: str) -> list[dict[str, Any]]:
    """The format of the reasoning before a call: none, one that the prefix has begun, or one that may come."""
    fields = {} if chat.response is None else chat.response["fields"]
    name = next((name for name in REASONING if name in fields), None)
    frame = None if name is None else frame_of(fields[name])
    if frame is None:
        return []
    parser = chat.parser(prefix, None)
    events = [*parser.feed("so "), *parser.finalize()[1]]
    tag = {"type": "tag", "content": {"type": "any_text"}, "end": frame.end}
    if any(event["field"] == name for event in events):
        return [tag | {"begin": ""}]
    return [{"type": "optional", "content": tag | {"begin": frame.begin}}]
