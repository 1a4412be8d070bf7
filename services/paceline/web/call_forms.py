"""How a model writes tool calls: the forms that can be demanded, by the names of ``answer_formats.py``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.checkpoint.answer_formats import AnswerFormat
from paceline.checkpoint.answers import Reading, Region
from paceline.checkpoint.call_readers import JsonCalls
from paceline.checkpoint.json_schema import check_parsed
from paceline.errors import InvalidRequestError
from paceline.web.arguments import Arguments, BareObjects, Elements, Format, Keywords, Work, const, sequence

SPACE: Format = {"type": "regex", "pattern": r"[ \n]{0,2}"}
_ANYTHING: Format = {"type": "any_text"}
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """How calls are written: ``opens``, then each call as a tag, ``separator`` between two, then ``closes``."""

    opens: str = ""
    """Text before the first call."""
    separator: str = ""
    """Text between two calls."""
    closes: str = ""
    """Text after the last call."""
    trigger: str | None = None
    """Text with which a call begins in free text. None: there is none, so that only demanded calls can be bound."""

    def tag(self, function: Mapping[str, Any], i: int, work: Work, *, free: bool) -> Format:
        """The tag of a call of the i-th function. ``free``: its arguments are not bound. ``work``: of the request.

        Raises InvalidRequestError for a function that cannot be called so.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Frame:
    """Fixed texts around a part of an answer."""

    begin: str
    end: str


@dataclass(frozen=True, slots=True)
class JsonForm(CallForm):
    """Arguments as JSON, after the name of the function."""

    begin: str
    """Text before the arguments; ``NAME`` stands for the name, quoted as JSON where it is between quotes."""
    end: str
    spaced: bool = False
    """Blanks may stand around the call."""

    def tag(self, function: Mapping[str, Any], i: int, work: Work, *, free: bool) -> Format:
        """Implements ``CallForm.tag``."""
        arguments = _json_arguments(function, i, free=free)
        begin = self.begin.replace('"NAME"', json.dumps(function["name"])).replace("NAME", function["name"])
        if not self.spaced:
            return _tag(begin, arguments, self.end)
        mark, head = begin[: (at := begin.index("{"))], begin[at:]
        tail = self.end[: (at := self.end.index("}") + 1)]
        return _tag(mark, sequence(SPACE, const(head), arguments, const(tail), SPACE), self.end[at:])


def _json_objects(begin: str, end: str, *, key: str = "arguments", **more: Any) -> JsonForm:
    """Objects of name and arguments, each between two texts."""
    return JsonForm(f'{begin}{{"name": "NAME", "{key}": ', "}" + end, **more)


@dataclass(frozen=True, slots=True)
class KimiForm(CallForm):
    """Arguments as JSON after the id of the call, which holds the name and counts the calls."""

    opens: str = "<|tool_calls_section_begin|>"
    closes: str = "<|tool_calls_section_end|>"
    trigger: str | None = "<|tool_calls_section_begin|>"

    def tag(self, function: Mapping[str, Any], i: int, work: Work, *, free: bool) -> Format:
        """Implements ``CallForm.tag``."""
        arguments = _json_arguments(function, i, free=free)
        number = {"type": "regex", "pattern": "0|[1-9][0-9]?"}
        content = sequence(number, const("<|tool_call_argument_begin|>"), arguments)
        return _tag(f"<|tool_call_begin|>functions.{function['name']}:", content, "<|tool_call_end|>")


@dataclass(frozen=True, slots=True)
class ElementForm(CallForm):
    """An element for each argument, within one for the function."""

    begin: str
    """Text before the elements; ``NAME`` stands for the function."""
    end: str
    elements: Elements

    def tag(self, function: Mapping[str, Any], i: int, work: Work, *, free: bool) -> Format:
        """Implements ``CallForm.tag``."""
        begin = self.begin.replace("NAME", function["name"])
        return _tag(begin, self.elements.any if free else _bound(self.elements.arguments, function, i, work), self.end)


@dataclass(frozen=True, slots=True)
class PythonForm(CallForm):
    """A list of calls as Python writes them."""

    opens: str = "["
    separator: str = ", "
    closes: str = "]"
    trigger: str | None = None

    def tag(self, function: Mapping[str, Any], i: int, work: Work, *, free: bool) -> Format:
        """As ``CallForm`` has it."""
        if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", function["name"]):
            allowed = "this model writes calls as Python does, with names that Python allows"
            raise InvalidRequestError(f"tools[{i}].function.name is {function['name']!r}: {allowed}")
        return _tag(f"{function['name']}(", _bound(Keywords().arguments, function, i, work), ")")


@dataclass(frozen=True, slots=True)
class BareForm(CallForm):
    """Objects with bare keys and quotes of their own, after the function's name: Gemma 4."""

    trigger: str | None = "<|tool_call>"

    def tag(self, function: Mapping[str, Any], i: int, work: Work, *, free: bool) -> Format:
        """As ``CallForm`` has it."""
        if not re.fullmatch(r"\w+", function["name"]):
            allowed = "this model writes names of letters, digits and underscores"
            raise InvalidRequestError(f"tools[{i}].function.name is {function['name']!r}: {allowed}")
        begin, end, quote = f"<|tool_call>call:{function['name']}", "<tool_call|>", '<|"|>'
        if free:  # free text holds no special token, as the quote is one
            quoted = _tag("", {**_ANYTHING, "excludes": [end]}, quote)
            several = {"type": "tags_with_separator", "tags": [quoted], "separator": ""}
            return _tag(begin + "{", sequence(several, _ANYTHING), end)
        objects = BareObjects(quote, [end, "\x01", "\x02"])
        return _tag(begin, _bound(objects.arguments, function, i, work), end)


_XML = Elements("<parameter=%s>\n", "</parameter>", "\n", ["</function>"])
_HERMES = _json_objects("<tool_call>", "</tool_call>", separator="\n", trigger="<tool_call>", spaced=True)
_QWEN = ElementForm(
    "<tool_call>\n<function=NAME>\n", "</function>\n</tool_call>", _XML, separator="\n", trigger="<tool_call>"
)
_GLM = ElementForm(
    "<tool_call>NAME\n",
    "</tool_call>",
    Elements("<arg_key>%s</arg_key>\n<arg_value>", "</arg_value>", "\n", ["</tool_call>"], gap=""),
    separator="\n",
    trigger="<tool_call>",
)
_MISTRAL_LIST = _json_objects("", "", opens="[TOOL_CALLS] [", separator=", ", closes="]", trigger="[TOOL_CALLS]")
_MISTRAL_NAMED = JsonForm("[TOOL_CALLS]NAME[ARGS]", "", trigger="[TOOL_CALLS]")
_LIST = _json_objects("", "", opens="<tool_calls>[", separator=", ", closes="]</tool_calls>", trigger="<tool_calls>")
_LLAMA = _json_objects("", "", key="parameters", separator="; ")

FORMS: Mapping[str, CallForm] = {
    "hermes": _HERMES,
    "granite4": _HERMES,
    "ernie45": _HERMES,
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "llama4_pythonic": PythonForm(),
    "pythonic": PythonForm(),
    "deepseek_v3": JsonForm(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        opens="<｜tool▁calls▁begin｜>",
        separator="\n",
        closes="<｜tool▁calls▁end｜>",
        trigger="<｜tool▁calls▁begin｜>",
    ),
    "deepseek_v31": JsonForm(
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        opens="<｜tool▁calls▁begin｜>",
        closes="<｜tool▁calls▁end｜>",
        trigger="<｜tool▁calls▁begin｜>",
    ),
    "openai": JsonForm("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", ""),
    "glm45": _GLM,
    "glm47": _GLM,
    "kimi_k2": KimiForm(),
    "minimax": _json_objects(
        "", "", opens="<tool_calls>\n", separator="\n", closes="\n</tool_calls>", trigger="<tool_calls>"
    ),
    "minimax_m2": ElementForm(
        '<invoke name="NAME">\n',
        "</invoke>",
        Elements('<parameter name="%s">', "</parameter>", "\n", ["</invoke>"], gap=""),
        opens="<minimax:tool_call>\n",
        separator="\n",
        closes="\n</minimax:tool_call>",
        trigger="<minimax:tool_call>",
    ),
    "granite": _json_objects("", "", opens="<|tool_call|>[", separator=", ", closes="]", trigger="<|tool_call|>"),
    "qwen3_xml": _QWEN,
    "qwen3_coder": _QWEN,
    "mimo": _QWEN,
    "seed_oss": ElementForm(
        "<seed:tool_call>\n<function=NAME>\n",
        "</function>\n</seed:tool_call>",
        Elements("<parameter=%s>", "</parameter>", "\n", ["</function>"], gap=""),
        separator="\n",
        trigger="<seed:tool_call>",
    ),
    "jamba": _LIST,
    "hunyuan_a13b": _LIST,
    "internlm": _json_objects(
        "<|action_start|><|plugin|>", "<|action_end|>", key="parameters", trigger="<|action_start|>"
    ),
    "phi4_mini_json": _json_objects("", "", opens="functools[", separator=", ", closes="]", trigger="functools["),
    "gemma4": BareForm(),
}
"""The forms that can be demanded. DeepSeek's DSML is none of them: its elements name the type of each value."""

_XML_SAMPLE = (
    "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n<parameter=b>\n3\n</parameter>\n</function>\n"
    "</tool_call>"
)
_SAMPLES: Sequence[tuple[str, CallForm]] = (
    (_XML_SAMPLE, _QWEN),
    ('<|tool_call>call:f{a:<|"|>x<|"|>,b:3}<tool_call|>', BareForm()),
)
"""A call in each form other than JSON that response templates of transformers describe."""
_SAMPLE_TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}},
}


def form_of_calls(answers: AnswerFormat, writes: Callable[[str], bool] = lambda mark: False) -> CallForm | None:
    """The form in which a model writes calls; None if it is none that can be demanded.

    ``writes``: true for a mark that the chat template or the tokenizer has.
    """
    if answers.calls == "mistral":
        return _MISTRAL_NAMED if writes("[ARGS]") else _MISTRAL_LIST
    if (form := FORMS.get(answers.calls or "")) is not None:
        return form
    for region in answers.regions:
        if region.kind == "call" and isinstance(region.reader, JsonCalls) and (frame := frame_of(region)):
            return _json_objects(frame.begin, frame.end, separator="\n", trigger=frame.begin, spaced=True)
    return next((form for sample, form in _SAMPLES if _reads(answers, sample)), None)


def _reads(answers: AnswerFormat, sample: str) -> bool:
    """True if the format finds the call of a sample."""
    parser = Reading(answers.regions, {}, outside=answers.outside).parser([_SAMPLE_TOOL])
    calls = [one.call for one in (*parser.feed(sample), *parser.feed("", ended=True)) if one.call is not None]
    return [(call.name, json.loads(call.arguments)) for call in calls] == [("f", {"a": "x", "b": 3})]


def frame_of(region: Region) -> Frame | None:
    """The fixed texts of a region; None if it has others."""
    begin, end = _fixed(region.opens), _fixed(region.closes or "")
    return Frame(begin, end) if begin and end else None


def _fixed(pattern: str) -> str | None:
    """The one text that a pattern matches, but for blanks before it."""
    pattern = pattern.removeprefix(r"\s*")
    bare = re.sub(r"\\\W", "", pattern)  # the rest has no meaning unless it is one of these
    return None if re.search(r"[\\.^$*+?{}\[\]|()]", bare) else re.sub(r"\\(\W)", r"\1", pattern)


def _parameters(function: Mapping[str, Any], i: int) -> dict[str, Any]:
    schema: dict[str, Any] = function.get("parameters") or _NO_ARGUMENTS
    check_parsed(schema, _name(i))
    return schema


def _json_arguments(function: Mapping[str, Any], i: int, *, free: bool) -> Format:
    """The arguments of a function as JSON. Raises InvalidRequestError, which names the function's schema."""
    schema = {"type": "object"} if free else _parameters(function, i)
    return {"type": "json_schema", "json_schema": {"type": "object", **schema}}


def _bound(arguments: Arguments, function: Mapping[str, Any], i: int, work: Work) -> Format:
    """The arguments of a function. Raises InvalidRequestError, which names the function's schema."""
    schema, name = _parameters(function, i), _name(i)
    try:
        return arguments(schema, name, work)
    except InvalidRequestError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise InvalidRequestError(f"{name} is no valid JSON Schema: {error}") from None


def _name(i: int) -> str:
    return f"tools[{i}].function.parameters"


def _tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}
