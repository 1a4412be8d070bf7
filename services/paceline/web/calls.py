"""Answers that must call tools, must call them in a certain form, or must have a form themselves, as structural tags.

Which forms can be bound is in ``call_forms.py``; a model that writes others refuses what would bind them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.checkpoint.chat import ChatTemplate
from paceline.checkpoint.json_schema import read_schema
from paceline.checkpoint.structural_tag import root_of
from paceline.errors import InvalidRequestError
from paceline.errors.refusals import shown
from paceline.types import MAX_STRUCTURED_OUTPUT_BYTES, StructuredOutput
from paceline.web.arguments import Format, Work, const, either, sequence
from paceline.web.call_forms import SPACE, Frame, form_of_calls, frame_of


def bound_calls(
    chat: ChatTemplate,
    tools: Sequence[Mapping[str, Any]],
    choice: Any,
    content: StructuredOutput | None = None,
    *,
    parallel: bool,
    in_reasoning: bool,
) -> StructuredOutput | None:
    """The form of an answer that calls tools as it was asked to, or whose content has the form that was asked for.

    Args:
        tools: as a chat template reads them; none: nothing may be called.
        choice: ``None``, ``"auto"``, ``"required"``, or the name of a function as ``{"name": ...}``.
        content: form of the content. Where calls are free, an answer is either calls or such content; one that must
            call has no content, and no use for its form.
        parallel: an answer may hold several calls.
        in_reasoning: the answer begins within its reasoning.

    Returns:
        None if any answer will do: calls are free, no tool is strict, and the content has no form.

    Raises:
        InvalidRequestError: calls of this model have a form that cannot be bound, or a schema cannot be.
    """
    if not tools:
        thought = _reasoning(chat, SPACE, in_reasoning=True) if in_reasoning else []
        return content if content is None or not thought else tag_of([*thought, *formats_of(chat, content)])
    strict = any(tool["function"].get("strict") for tool in tools)
    free = choice in (None, "auto")
    if free and not strict and parallel and content is None:
        return None
    form = form_of_calls(chat.format, chat.writes)
    if form is None or (free and content is None and form.trigger is None):
        asked = "parallel_tool_calls is false" if free and not strict else f"tool_choice is {shown(choice)}"
        asked = "tools hold one that is strict" if free and strict else asked
        asked = "tools are given with a form of the answer" if free and content is not None else asked
        raise InvalidRequestError(
            f"{asked}, but this model writes calls in the form {chat.format.calls}, which cannot be bound"
            + ("" if form is None else " in free text: tool_choice 'required' or a function's name is allowed")
        )
    named = choice["name"] if isinstance(choice, Mapping) else None
    work = Work()
    tags = [
        form.tag(tool["function"], i, work, free=free and not tool["function"].get("strict"))
        for i, tool in enumerate(tools)
        if named in (None, tool["function"]["name"])
    ]
    one = named is not None or not parallel
    several = {"type": "tags_with_separator", "tags": tags, "separator": form.separator, "at_least_one": True}
    space = [] if chat.format.calls in _UNSPACED else [SPACE]
    if free and content is None:
        if form.opens:
            group = several | {"stop_after_first": one}
            tags = [{"type": "tag", "begin": form.opens, "content": group, "end": form.closes}]
        calls = {"type": "triggered_tags", "triggers": [form.trigger], "tags": tags, "stop_after_first": one}
        return tag_of([*_reasoning(chat, in_reasoning=in_reasoning), calls])
    texts = [const(text) if text else None for text in (form.opens, form.closes)]
    group = several | {"stop_after_first": one}
    at_once = [*space, *(part for part in (texts[0], group, texts[1]) if part is not None)]
    if not free or content is None:
        return tag_of([*_reasoning(chat, in_reasoning=in_reasoning), *at_once])
    answer = either([sequence(*formats_of(chat, content)), sequence(*at_once)])
    return tag_of([*_reasoning(chat, *space, in_reasoning=in_reasoning), answer])


def tag_of(elements: list[Format]) -> StructuredOutput:
    """Returns the structural tag of a sequence of formats. Raises InvalidRequestError where it is too long."""
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}
    if is_longer(tag, MAX_STRUCTURED_OUTPUT_BYTES):
        allowed = f"at most {MAX_STRUCTURED_OUTPUT_BYTES} bytes are allowed for the form of an answer"
        raise InvalidRequestError(f"tools are too long to be bound: {allowed}")
    try:
        return StructuredOutput(structural_tag=json.dumps(tag))
    except ValueError:
        raise InvalidRequestError("tools are too long to be bound: their schemas have too many bytes") from None


def is_longer(value: Any, most: int) -> bool:
    """True if a value surely has more than ``most`` bytes as JSON. It may hold one part in very many places, so the
    look ends there."""
    left, stack = most, [value]
    while stack and left >= 0:
        part = stack.pop()
        if isinstance(part, Mapping):
            left -= 2 + sum(4 + len(key) for key in part)
            stack += part.values()
        elif isinstance(part, list):
            left -= 2 + len(part)
            stack += part
        else:
            left -= len(part) if isinstance(part, str) else 1
    return left < 0


def formats_of(chat: ChatTemplate, content: StructuredOutput) -> list[Format]:
    """The formats of content that has a form. Raises InvalidRequestError."""
    head = [const(_FINAL)] if chat.format.calls == "openai" else []
    if content.choice:
        return [*head, either([const(text) for text in content.choice])]
    if content.regex is not None:
        return [*head, {"type": "regex", "pattern": content.regex}]
    if content.structural_tag is not None:
        return [*head, root_of(content.structural_tag)[0]]
    if content.grammar is not None:
        raise InvalidRequestError(
            "structured_output.grammar is given with tools, or after reasoning that the prompt opens: there a JSON "
            "Schema, a regular expression, choices or a structural tag are allowed"
        )
    return [*head, {"type": "json_schema", "json_schema": read_schema(content.text)}]


_UNSPACED = ("openai",)
"""Forms whose calls follow the reasoning at once."""
_HARMONY = Frame("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")


_FINAL = "<|channel|>final<|message|>"


def _reasoning(chat: ChatTemplate, *then: Format, in_reasoning: bool) -> list[Format]:
    """Formats of the reasoning before an answer, followed by ``then``: absent, already begun, or optional."""
    regions = [region for region in chat.format.regions if region.kind == "reasoning"]
    frame = _HARMONY if chat.format.calls == "openai" else next(filter(None, map(frame_of, regions)), None)
    if frame is None:
        return []
    tag = {"type": "tag", "content": {"type": "any_text"}, "end": frame.end}
    if in_reasoning:
        return [tag | {"begin": ""}, *then]
    thought = tag | {"begin": frame.begin}
    return [{"type": "optional", "content": sequence(thought, *then) if then else thought}]
