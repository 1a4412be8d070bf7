"""Turns chats into tokens and separates the parts of their answers: the templates of a tokenizer.

transformers' ``apply_chat_template`` renders; ``answer_formats.py`` knows the forms of answers.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.checkpoint.answer_formats import (
    CALL_PARSERS,
    REASONING_PARSERS,
    AnswerFormat,
    format_of,
    of_response,
    transformers_template,
)
from paceline.checkpoint.answers import Reading
from paceline.checkpoint.folder import folder_of, read_json, require_no_code
from paceline.checkpoint.hub import fetch_gguf, require_fetchable
from paceline.checkpoint.tokenizer import Tokenizer, transformers_tokenizer
from paceline.errors import ConfigError, InvalidRequestError
from paceline.errors.files import read_text

Message = Mapping[str, Any]
"""A message as templates read it: ``role``, ``content`` and what else its role has."""
_ENDS = ("add_generation_prompt", "continue_final_message")
_WANTS_NONE = re.compile(r"content['\"]?\]?\s+is\s+none")
"""A template that tells calls by a message without content."""
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


class Arguments(dict[str, Any]):
    """Arguments of a call: an object for templates that read its members, JSON text where a template prints it."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


class ChatTemplate:
    """The templates of one tokenizer."""

    def __init__(self, tokenizer: Any, given: str | None, format: AnswerFormat) -> None:
        """``tokenizer``: from transformers. ``given``: a template that replaces the tokenizer's own. ``format``: of the
        answers."""
        self._tokenizer, self._given = tokenizer, given
        self.format = format
        self._readings: dict[tuple[int, bool, bool], tuple[Tokenizer, Reading]] = {}

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of rendered chats."""
        return Tokenizer(str(getattr(self._tokenizer, "name_or_path", "")), self._tokenizer)

    @property
    def source(self) -> str:
        """The chat template itself, the one that is taken without tools."""
        return str(self._tokenizer.get_chat_template(self._given))

    @cached_property
    def variables(self) -> frozenset[str]:
        """Variables that the chat template reads."""
        return _variables(self._tokenizer.get_chat_template(self._given))

    @cached_property
    def variables_with_tools(self) -> frozenset[str]:
        """Variables that the template reads that is taken where tools are given."""
        return _variables(self._tokenizer.get_chat_template(self._given, [{}]))

    @property
    def calls_tools(self) -> bool:
        """True if an answer's tool calls can be told from its text."""
        return self.format.calls is not None

    def writes(self, mark: str) -> bool:
        """True if the chat template or the tokenizer has a mark."""
        templates = self._tokenizer.chat_template if self._given is None else self._given
        return mark in str(templates) or any(mark == str(one) for one in self._tokenizer.added_tokens_decoder.values())

    def reading(self, tokenizer: Tokenizer, *, skips_special: bool = True, bound: bool = False) -> Reading:
        """Returns the reading of answers with a tokenizer; it is cached.

        Args:
            tokenizer: the model's.
            skips_special: False: text of special tokens is shown, and all of an answer is content unless a form was
                named.
            bound: a grammar binds the answers (``Reading``).
        """
        key = id(tokenizer), skips_special, bound
        if key not in self._readings:
            regions, outside = self.format.regions, self.format.outside
            added = tokenizer.added_tokens
            if not skips_special:
                regions, outside = (regions, outside) if self.format.named else ((), "content")
                added = {token_id: (text, False) for token_id, (text, _) in added.items()}
            self._readings[key] = tokenizer, Reading(regions, added, outside=outside, bound=bound)
        return self._readings[key][1]

    def begun(
        self,
        prompt: str,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> str:
        """The end of a rendered chat that belongs to its answer, such as an opened thought or the message continued.

        It is the part that the chat without the message lacks.
        """
        continues = bool(options.get("continue_final_message"))
        if not self.format.regions or not (continues or options.get("add_generation_prompt")):
            return ""
        before = messages[:-1] if continues else messages
        try:
            without = self.render(before, tools, {**options, **dict.fromkeys(_ENDS, False)}) if before else ""
        except InvalidRequestError:  # the template wants what was left out
            without = prompt
        if without == prompt:
            content = str(messages[-1].get("content") or "").strip()
            at = prompt.rfind(content) if content else -1
            return prompt[at + len(content) * (not continues) :] if at >= 0 else ""
        return prompt[
            next((i for i, (a, b) in enumerate(zip(prompt, without, strict=False)) if a != b), len(without)) :
        ]

    def reads_field(self, name: str, tools: Sequence[Mapping[str, Any]] | None = None) -> bool:
        """True if the template reads a field of this name, of a message for instance."""
        return name in _fields(self._tokenizer.get_chat_template(self._given, tools=tools))

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, options: Mapping[str, Any]
    ) -> str:
        """Renders the chat as text. ``options``: of ``apply_chat_template``, and variables of the template.

        Raises:
            InvalidRequestError: the template reads no such variable, or refuses the messages.
        """
        own = self._tokenizer.get_chat_template(self._given, tools=tools)
        for name in options.keys() - {*_ENDS} - _variables(own):
            raise InvalidRequestError(
                f"chat_template_kwargs.{name} is {options[name]!r}: the chat template reads no such variable"
            )
        if not any(message["role"] == "developer" for message in messages) or "developer" in own:
            chat = [dict(message) for message in messages]
        else:  # the newer name of system
            chat = [{**m, "role": "system"} if m["role"] == "developer" else dict(m) for m in messages]
        chat = [_as_read(message, own) for message in chat]
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    chat, tools=None if tools is None else list(tools), chat_template=own, tokenize=False, **options
                )
            )
        except Exception as error:  # templates raise what they like
            raise InvalidRequestError(f"messages are refused by the chat template: {error}") from error

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a rendered chat, which brings its special tokens itself."""
        return tuple(self.tokenizer.encode_text(text))


def _as_read(message: dict[str, Any], template: str) -> dict[str, Any]:
    """A message with reasoning under the name that the template reads, and with arguments that can be joined to
    text."""
    if "reasoning_content" in message and "reasoning_content" not in _fields(template):
        name = next((key for key in _REASONING_KEYS if key in _fields(template)), None)
        if name is not None:
            message[name] = message.pop("reasoning_content")
    if message.get("tool_calls"):
        if not message.get("content") and _WANTS_NONE.search(template):
            message["content"] = None
        message["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": Arguments(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
    return message


def _variables(template: str) -> frozenset[str]:
    """Variables that a template reads."""
    from transformers.utils.chat_template_utils import _get_template_variables

    found: frozenset[str] = _get_template_variables(template)
    return found


@functools.lru_cache(maxsize=16)
def _fields(template: str) -> frozenset[str]:
    """Names after a dot, and texts that may be keys, as in ``'key' in message`` and ``message.get('key')``."""
    from jinja2 import nodes
    from transformers.utils.chat_template_utils import _compile_jinja_template

    tree = _compile_jinja_template(template).environment.parse(template)
    texts = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return frozenset({node.attr for node in tree.find_all(nodes.Getattr)} | texts)


def load_chat(
    path: str,
    file: str | None = None,
    trust_remote_code: bool = False,
    *,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
) -> ChatTemplate | None:
    """The chat template of a tokenizer's directory or hub id. None: there is none.

    Args:
        path: the directory or id.
        file: holds a template in place of the tokenizer's own.
        trust_remote_code: Python code that comes with it may run.
        tool_parser: the form of the calls. None: by the marks of template and tokenizer.
        reasoning_parser: the form of the reasoning. None: by the same marks.

    Raises:
        ConfigError: a template cannot be read, or is not valid; or there is no such form.
    """
    for key, name, allowed in (
        ("tool_call_parser", tool_parser, CALL_PARSERS),
        ("reasoning_parser", reasoning_parser, REASONING_PARSERS),
    ):
        if name is not None and name not in allowed:
            raise ConfigError(f"server.{key} is {name!r}: {', '.join(sorted(allowed))} are allowed")
    folder = folder_of(path)
    given = None if file is None else _read(file)
    if given is None and folder is not None and not _has_template(folder):
        return None
    require_fetchable(path)
    fetch_gguf(path)
    try:
        tokenizer = transformers_tokenizer(path, trust_remote_code)
    except Exception as error:  # transformers raises whatever its parsers raise
        require_no_code(path, error)
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(f"no tokenizer could be loaded from {path!r}: {reason[0]}") from error
    if given is None and not tokenizer.chat_template:
        return None
    try:
        _variables(tokenizer.get_chat_template(given))
    except Exception as error:
        line = getattr(error, "lineno", None)
        place = f", line {line}" if line is not None else ""
        raise ConfigError(f"the chat template of {file or path!r} is not valid{place}: {error}") from error
    return ChatTemplate(tokenizer, given, _format(tokenizer, given, folder, tool_parser, reasoning_parser))


def _format(
    tokenizer: Any, given: str | None, folder: Path | None, tool_parser: str | None, reasoning_parser: str | None
) -> AnswerFormat:
    """Finds the answer format: as configured, else by the response template, by marks, or by model type."""
    response = getattr(tokenizer, "response_template", None)
    templates = tokenizer.chat_template if given is None else given
    template = "\n".join(templates.values()) if isinstance(templates, dict) else str(templates)
    added = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    try:
        found = format_of(template, added, response, tool_parser, reasoning_parser)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"the response template of {tokenizer.name_or_path!r} is not valid: {error}") from error
    model_type = None if folder is None else read_json(folder, "config.json").get("model_type")
    if found.regions or found.named or response is not None or model_type is None:
        return found
    by_type = transformers_template(model_type)
    return found if by_type is None else of_response(by_type)


def _has_template(folder: Path) -> bool:
    files = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
    return any((folder / name).exists() for name in files) or bool(
        read_json(folder, "tokenizer_config.json").get("chat_template")
    )


def _read(file: str) -> str:
    text = read_text(file, f"server.chat_template is {file!r}")
    if not text.strip():
        raise ConfigError(f"server.chat_template is {file!r}: it is empty")
    return text
