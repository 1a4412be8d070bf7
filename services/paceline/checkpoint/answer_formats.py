"""The forms in which models write reasoning and tool calls, by the names that vLLM gives to their parsers.

A form is a few regions (``answers.py``), so a further model is a further entry. Marks are written as text: where the
tokenizer has a token for one, that token alone is the mark.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from paceline.checkpoint.answers import Kind, Region
from paceline.checkpoint.call_readers import (
    CallReader,
    ElementCalls,
    JsonArguments,
    JsonCalls,
    PythonCalls,
    TemplateCalls,
)

CallIds = Literal["random", "mistral", "kimi"]
"""Form of the id of a call, where the model writes none: the one that the chat template demands."""
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names of the field of a response template that holds reasoning."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Describes how an answer divides into content, reasoning and calls."""

    reasoning: str | None
    """Name of the form of the reasoning. None: there is none."""
    calls: str | None
    """Name of the form of the calls. None: there is none."""
    regions: tuple[Region, ...]
    outside: Kind = "content"
    """Kind of the text outside all regions."""
    call_ids: CallIds = "random"
    named: bool = False
    """The service's configuration names a form."""


def _think(begin: str = "<think>", end: str = "</think>", *, implied: bool = False) -> tuple[Region, ...]:
    return (Region("reasoning", begin, end, implied=implied),)


def _json_calls(begin: str, end: str) -> tuple[Region, ...]:
    return (Region("call", rf"\s*{begin}", end, JsonCalls()),)


def _elements(wrapper: str, begin: str, end: str, key: str, key_end: str) -> tuple[Region, ...]:
    """Calls of elements within a wrapper."""
    reader = ElementCalls(key, key_end)
    return (
        Region("call", rf"\s*<{wrapper}>\s*{begin}", end, reader),
        Region("call", rf"\s*{begin}", end, reader, bare=True),
        Region("nothing", rf"\s*</{wrapper}>", behind_calls=True),
    )


def _deepseek(head: str, tail: str) -> tuple[Region, ...]:
    begin = r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>\s*"
    return (
        Region("call", rf"\s*{begin}{head}", rf"{tail}\s*<｜tool▁call▁end｜>", JsonArguments()),
        Region("nothing", r"\s*<｜tool▁calls▁end｜>", behind_calls=True),
    )


def _dsml(wrapper: str) -> tuple[Region, ...]:
    mark = "｜DSML｜"
    return _elements(
        f"{mark}{wrapper}",
        rf'<{mark}invoke name="(?P<name>[^"\n]+)">',
        rf"</{mark}invoke>",
        rf'<{mark}parameter name="(?P<key>[^"\n]+)"(?:\s+string="(?P<string>true|false)")?\s*>',
        rf"</{mark}parameter>",
    )


_NAME = r"(?P<name>[\w.\-]+)"
_JSON_START = r'(?P<body>\{)\s*"(?:name|type|function)"\s*:'
_LIST_START = r"(?P<body>\[)\s*[A-Za-z_][\w.]*\("

_TURN = r"(?:<\|start\|>assistant)?"
_TO = r"\s{0,4}\bto=[\w.\-]+"
_CONTENT_TYPE = r"(?:\s{0,4}(?:<\|constrain\|>)?\s{0,4}[\w.\-]+)?\s{0,4}<\|message\|>"
_END_OF_MESSAGE = r"<\|end\|>|<\|return\|>|<\|call\|>|(?=<\|start\|>|<\|channel\|>)"
_CALLED = rf"\s{{0,4}}\bto=functions\.{_NAME}"
_MESSAGES = Region("content", rf"{_TURN}(?:{_TO})?\s{{0,4}}<\|channel\|>\w+(?:{_TO})?{_CONTENT_TYPE}", _END_OF_MESSAGE)
_TO_BUILTIN = r"\s{0,4}\bto=(?!functions\.)[\w.\-]+"
_ANALYSIS = Region(
    "reasoning",
    rf"{_TURN}(?:{_TO_BUILTIN}\s{{0,4}}<\|channel\|>\w+|\s{{0,4}}<\|channel\|>(?:analysis(?:{_TO_BUILTIN})?|commentary{_TO_BUILTIN}))"
    rf"{_CONTENT_TYPE}",
    _END_OF_MESSAGE,
)
_HARMONY_CALL = Region(
    "call",
    rf"{_TURN}(?:{_CALLED}\s{{0,4}}<\|channel\|>\w+|\s{{0,4}}<\|channel\|>\w+{_CALLED}){_CONTENT_TYPE}",
    _END_OF_MESSAGE,
    JsonArguments(),
)

_HERMES = _json_calls("<tool_call>", "</tool_call>")
_QWEN_CODER = _elements(
    "tool_call", r"<function=(?P<name>[^>\n]+)>", "</function>", r"<parameter=(?P<key>[^>\n]+)>", "</parameter>"
)
_KIMI = (
    Region(
        "call",
        r"\s*(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*"
        rf"(?P<id>(?:functions\.)?{_NAME}:\d+)\s*<\|tool_call_argument_begin\|>",
        r"<\|tool_call_end\|>",
        JsonArguments(),
    ),
    Region("nothing", r"\s*<\|tool_calls_section_end\|>", behind_calls=True),
)
_MISTRAL = (
    Region("call", r"\s*\[TOOL_CALLS\]\s*(?=\[\s*\{)", None, JsonCalls()),
    Region(
        "call",
        rf"\s*\[TOOL_CALLS\]\s*{_NAME}\s*+(?:\[CALL_ID\]\s*+(?P<id>\w++)\s*+)?(?:\[ARGS\])?\s*+(?=\{{)",
        None,
        JsonArguments(),
    ),
)
_LLAMA_JSON = (
    Region("call", rf"\s*(?:<\|python_tag\|>\s*)?{_JSON_START}", None, JsonCalls(), bare=True),
    Region("nothing", r"\s*;(?=\s*\{)", behind_calls=True),
)
_PYTHONIC = (Region("call", rf"\s*{_LIST_START}", None, PythonCalls(), bare=True),)
_LLAMA_PYTHONIC = (
    Region("call", rf"\s*<\|python_start\|>\s*{_LIST_START}", None, PythonCalls()),
    *_PYTHONIC,
    Region("nothing", r"\s*<\|python_end\|>", behind_calls=True),
)
_GLM = (
    Region(
        "call",
        rf"\s*<tool_call>\s*{_NAME}\s*(?=<arg_key>|</tool_call>)",
        "</tool_call>",
        ElementCalls(r"<arg_key>(?P<key>[^<\n]+?)</arg_key>\s*<arg_value>", "</arg_value>"),
    ),
)
_INVOKED = (
    r'<invoke name="(?P<name>[^"\n]+)">',
    "</invoke>",
    r'<parameter name="(?P<key>[^"\n]+)">',
    "</parameter>",
)

CALLS: Mapping[str, tuple[Region, ...]] = {
    "hermes": _HERMES,
    "granite4": _HERMES,
    "ernie45": _HERMES,
    "llama3_json": _LLAMA_JSON,
    "llama4_json": _LLAMA_JSON,
    "llama4_pythonic": _LLAMA_PYTHONIC,
    "pythonic": _PYTHONIC,
    "mistral": _MISTRAL,
    "deepseek_v3": _deepseek(r"function<｜tool▁sep｜>\s*(?P<name>[\w.\-]+)\s*```json\s*", r"\s*```"),
    "deepseek_v31": _deepseek(r"(?P<name>[\w.\-]+)\s*<｜tool▁sep｜>", ""),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "openai": (_HARMONY_CALL, _MESSAGES),
    "glm45": _GLM,
    "glm47": _GLM,
    "kimi_k2": _KIMI,
    "minimax": _json_calls("<tool_calls>", "</tool_calls>"),
    "minimax_m2": _elements("minimax:tool_call", *_INVOKED),
    "granite": (Region("call", r"\s*(?:<\|tool_call\|>|<tool_call>)\s*(?=\[)", None, JsonCalls()),),
    "qwen3_xml": _QWEN_CODER,
    "qwen3_coder": _QWEN_CODER,
    "mimo": _QWEN_CODER,
    "seed_oss": _elements(
        "seed:tool_call",
        r"<function=(?P<name>[^>\n]+)>",
        "</function>",
        r"<parameter=(?P<key>[^>\n]+)>",
        "</parameter>",
    ),
    "jamba": _json_calls("<tool_calls>", "</tool_calls>"),
    "hunyuan_a13b": _json_calls("<tool_calls>", "</tool_calls>"),
    "internlm": _json_calls(r"<\|action_start\|>\s*<\|plugin\|>", r"<\|action_end\|>"),
    "phi4_mini_json": (Region("call", r"\s*functools(?=\[\s*\{)", None, JsonCalls()),),
}
"""The forms of calls."""

REASONING: Mapping[str, tuple[Region, ...]] = {
    "deepseek_r1": _think(implied=True),
    "deepseek_v3": _think(),
    "deepseek_v4": _think(),
    "qwen3": _think(),
    "glm45": _think(),
    "glm47": _think(),
    "kimi_k2": (
        Region("reasoning", "<think>", r"</think>|(?=<\|tool_calls_section_begin\|>)"),
        Region("reasoning", "◁think▷", "◁/think▷"),
    ),
    "minimax": _think(implied=True),
    "minimax_m2": _think(implied=True),
    "granite": _think(r"Here(?: is|'s) my thought process:", r"Here(?: is|'s) my response:"),
    "mistral": _think(r"\[THINK\]", r"\[/THINK\]"),
    "openai_gptoss": (_ANALYSIS, _MESSAGES),
    "hunyuan_a13b": (
        *_think(r"<think>\n?", r"\n?</think>"),
        Region("nothing", r"\s*</?answer>\n?"),
    ),
    "ernie45": _think(),
    "mimo": _think(),
    "olmo3": _think(implied=True),
    "nemotron_v3": _think(),
    "seed_oss": _think("<seed:think>", "</seed:think>"),
    "step3": _think(implied=True),
}
"""The forms of reasoning."""
CALL_PARSERS = (*CALLS, "gemma4", "none")
REASONING_PARSERS = (*REASONING, "gemma4", "none")

_IDS: Mapping[str, CallIds] = {"mistral": "mistral", "kimi_k2": "kimi"}

_CALL_MARKS = (
    ("｜DSML｜tool_calls", "deepseek_v4"),
    ("｜DSML｜", "deepseek_v32"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<seed:tool_call>", "seed_oss"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    ("[TOOL_CALLS]", "mistral"),
    ("```json", "deepseek_v3"),
    ("<｜tool▁sep｜>", "deepseek_v31"),
    ("<|tool_call>", "gemma4"),
    ("<|tool_call|>", "granite"),
    ("<tool_calls>", "minimax"),
    ("<|action_start|>", "internlm"),
    ("<tool_call>", "hermes"),
    ("functools[", "phi4_mini_json"),
    ("<|python_start|>", "llama4_pythonic"),
    ("<|python_tag|>", "llama3_json"),
)
"""Text in a chat template -> the form of its calls; the first match counts."""
_REASONING_MARKS = (
    ("[THINK]", "mistral"),
    ("<seed:think>", "seed_oss"),
    ("◁think▷", "kimi_k2"),
    ("<|channel>thought", "gemma4"),
    ("</think>", "qwen3"),
    ("<think>", "qwen3"),
    ("my thought process:", "granite"),
)
_DEEPSEEK = "<｜tool▁calls▁begin｜>"
_HARMONY = ("<|start|>", "<|channel|>", "<|message|>")


def format_of(
    template: str,
    added: Collection[str],
    response: Mapping[str, Any] | None,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
) -> AnswerFormat:
    """The format of a checkpoint's answers.

    Args:
        template: its chat template.
        added: texts of the tokenizer's added tokens.
        response: its response template, which counts where no form is named.
        tool_parser: a name of ``CALLS``, or ``none``; None: by the marks in the template and among the tokens.
        reasoning_parser: a name of ``REASONING``, or ``none``; None: by the same marks.
    """
    named = tool_parser is not None or reasoning_parser is not None
    if response is not None and not named:
        return of_response(response)
    calls = _call_form(template, added) if tool_parser is None else tool_parser
    reasoning = _reasoning_form(template, added) if reasoning_parser is None else reasoning_parser
    calls, reasoning = (None if name == "none" else name for name in (calls, reasoning))
    if "gemma4" in (calls, reasoning):
        return _gemma(calls, reasoning, named)
    regions = (*REASONING.get(reasoning or "", ()), *CALLS.get(calls or "", ()))
    return AnswerFormat(reasoning, calls, regions, call_ids=_IDS.get(calls or "", "random"), named=named)


def _call_form(template: str, added: Collection[str]) -> str | None:
    if all(mark in added for mark in _HARMONY):
        return "openai"
    for mark, name in _CALL_MARKS:
        if mark in template and (mark != "```json" or _DEEPSEEK in template):
            return name
    if _DEEPSEEK in added:
        return "deepseek_v31"
    return next((name for mark, name in _CALL_MARKS if mark in added), None)


def _reasoning_form(template: str, added: Collection[str]) -> str | None:
    if all(mark in added for mark in _HARMONY):
        return "openai_gptoss"
    for marks in (template, added):
        found = next((name for mark, name in _REASONING_MARKS if mark in marks), None)
        if found is not None:
            return "kimi_k2" if found == "qwen3" and "<|tool_calls_section_begin|>" in added else found
    return None


def of_response(response: Mapping[str, Any]) -> AnswerFormat:
    """The format that a response template of transformers describes. Raises ValueError for one that is malformed."""
    from transformers.utils.chat_parsing.response_templates import load_response_template

    spec = load_response_template(dict(response))
    regions, found = list[Region](), set[Kind]()
    outside: Kind = "nothing"
    for name, one in spec.fields.items():
        kind: Kind = "reasoning" if name in REASONING_FIELDS else "content" if name == "content" else "nothing"
        closes = None if one.close_re is None else one.close_re.pattern
        if name == "tool_calls":
            kind = "call"
        found.add(kind)
        if one.open_re is None:
            outside = kind
            if closes is not None:
                regions.append(Region("nothing", closes, grows=one.close_literal_can_extend or _may_grow(closes)))
            continue
        reader: CallReader | None = None
        if kind == "call":
            plain = one.content == "json" and not one.content_args and one.transform == _JSON_CALL
            reader = JsonCalls() if plain else TemplateCalls(one, tuple(_texts(response["fields"][name])))
        grows = one.open_literal_can_extend or one.close_literal_can_extend or _may_grow(one.open_re.pattern, closes)
        regions.append(Region(kind, one.open_re.pattern, closes or _NEVER, reader, grows=grows))
    reasoning, calls = (_OF_RESPONSE if kind in found else None for kind in ("reasoning", "call"))
    return AnswerFormat(reasoning, calls, tuple(regions), outside=outside)


_JSON_CALL = {"type": "function", "function": "{content}"}
"""Transform of a response template whose calls are objects of ``name`` and ``arguments``."""
_NEVER = "(?!)"
_OF_RESPONSE = "response_template"


def _may_grow(*patterns: str | None) -> bool:
    """True if more text could make a match longer: assumed of every pattern that does not end with literal text."""
    return any(pattern is not None and pattern[-1:] in "*+?})]" for pattern in patterns)


def _texts(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [text for one in value.values() for text in _texts(one)]
    if isinstance(value, (list, tuple)):
        return [text for one in value for text in _texts(one)]
    return [value] if isinstance(value, str) else []


def _gemma(calls: str | None, reasoning: str | None, named: bool) -> AnswerFormat:
    """Gemma 4's, by the response template that transformers has for it."""
    whole = of_response(transformers_template("gemma4") or {})
    kinds = {"call": calls == "gemma4", "reasoning": reasoning == "gemma4"}
    regions = tuple(one for one in whole.regions if kinds.get(one.kind, True))
    others = (*REASONING.get(reasoning or "", ()), *CALLS.get(calls or "", ()))
    return AnswerFormat(reasoning, calls, (*others, *regions), named=named)


def transformers_template(model_type: str) -> Mapping[str, Any] | None:
    """The response template that transformers' own server takes for a model type."""
    try:
        from transformers.cli.serving.utils import get_response_template
    except ImportError:  # a version without it
        return None
    from types import SimpleNamespace

    model = SimpleNamespace(config=SimpleNamespace(model_type=model_type))
    found: Mapping[str, Any] | None = get_response_template(SimpleNamespace(), model)
    return found
