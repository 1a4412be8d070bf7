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
from paceline.web.arguments import const
from paceline.web.call_forms import SPACE, Frame, form_of_calls, frame_of


def bound_calls(
    chat: ChatTemplate,
    tools: Sequence[Mapping[str, Any]],
    choice: Any,
    *,
    parallel: bool,
    in_reasoning: bool,
) -> StructuredOutput | None:
    """The form of an answer that calls tools as it was asked to.

    Args:
        tools: as a chat template reads them.
        choice: ``None``, ``"auto"``, ``"required"``, or the name of a function as ``{"name": ...}``.
        parallel: an answer may hold several calls.
        in_reasoning: the answer begins within its reasoning.

    Returns:
        None if any answer will do: calls are free, and no tool is strict.

    Raises:
        InvalidRequestError: calls of this model have a form that cannot be bound, or the schema of a tool cannot be.
    """
    strict = any(tool["function"].get("strict") for tool in tools)
    free = choice in (None, "auto")
    if free and not strict and parallel:
        return None
    form = form_of_calls(chat.format, chat.writes)
    if form is None or (free and form.trigger is None):
        asked = "parallel_tool_calls is false" if free and not strict else f"tool_choice is {shown(choice)}"
        asked = "tools hold one that is strict" if free and strict else asked
        raise InvalidRequestError(
            f"{asked}, but this model writes calls in the form {chat.format.calls}, which cannot be bound"
            + ("" if form is None else " in free text: tool_choice 'required' or a function's name is allowed")
        )
    named = choice["name"] if isinstance(choice, Mapping) else None
    tags = [
        form.tag(tool["function"], i, free=free and not tool["function"].get("strict"))
        for i, tool in enumerate(tools)
        if named in (None, tool["function"]["name"])
    ]
    one = named is not None or not parallel
    several = {"type": "tags_with_separator", "tags": tags, "separator": form.separator, "at_least_one": True}
    calls: list[dict[str, Any]]
    if not free:
        texts = [const(text) if text else None for text in (form.opens, form.closes)]
        calls = [part for part in (texts[0], several | {"stop_after_first": one}, texts[1]) if part is not None]
    else:
        if form.opens:
            content = several | {"stop_after_first": one}
            tags = [{"type": "tag", "begin": form.opens, "content": content, "end": form.closes}]
        calls = [{"type": "triggered_tags", "triggers": [form.trigger], "tags": tags, "stop_after_first": one}]
    before = [*_reasoning(chat, in_reasoning), *(() if free or chat.format.calls in _UNSPACED else (SPACE,))]
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": [*before, *calls]}}
    try:
        return StructuredOutput(structural_tag=json.dumps(tag))
    except ValueError:
        raise InvalidRequestError("tools are too long to be bound: their schemas have too many bytes") from None


_UNSPACED = ("openai",)
"""Forms whose calls follow the reasoning at once."""
_HARMONY = Frame("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")


def _reasoning(chat: ChatTemplate, in_reasoning: bool) -> list[dict[str, Any]]:
    """The format of the reasoning before a call: none, one that has begun, or one that may come."""
    regions = [region for region in chat.format.regions if region.kind == "reasoning"]
    frame = _HARMONY if chat.format.calls == "openai" else next(filter(None, map(frame_of, regions)), None)
    if frame is None:
        return []
    tag = {"type": "tag", "content": {"type": "any_text"}, "end": frame.end}
    if in_reasoning:
        return [tag | {"begin": ""}]
    return [{"type": "optional", "content": tag | {"begin": frame.begin}}]
