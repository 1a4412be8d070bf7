"""Chats as tokens, and answers as messages: the chat template of a tokenizer, and its response template.

Both are transformers' own: ``apply_chat_template`` renders, ``ResponseParser`` tells content, reasoning and tool calls
apart while the text grows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from paceline.checkpoint.folder import read_json, require_no_code
from paceline.checkpoint.json_schema import resolved, types_of
from paceline.errors import ConfigError, InvalidRequestError

Message = Mapping[str, Any]
"""A message as templates read it: ``role``, ``content`` and what else its role has."""


class ChatTemplate:
    """The templates of one tokenizer."""

    def __init__(self, tokenizer: Any, given: str | None, response: Mapping[str, Any] | None) -> None:
        """``tokenizer`` is one of transformers. ``given``: a template in place of its own. ``response``: how an answer
        is told apart; None: all of it is content."""
        self._tokenizer, self._given = tokenizer, given
        self.response = response
        """The response template. None: all of an answer is content."""

    @cached_property
    def variables(self) -> frozenset[str]:
        """Variables that the chat template reads."""
        return _variables(self._tokenizer.get_chat_template(self._given))

    @property
    def calls_tools(self) -> bool:
        """True if an answer's tool calls can be told from its text."""
        return self.response is not None and "tool_calls" in self.response["fields"]

    @property
    def parses_special_tokens(self) -> bool:
        """True if parts of an answer begin with special tokens, which its text does not show."""
        fields = {} if self.response is None else self.response["fields"]
        opens = json.dumps([[field.get("open"), field.get("open_pattern")] for field in fields.values()])
        added = self._tokenizer.added_tokens_decoder.values()
        return any(json.dumps(str(token))[1:-1] in opens for token in added if token.special)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, options: Mapping[str, Any]
    ) -> str:
        """The chat as text. ``options``: those of ``apply_chat_template``, and variables of the template.

        Raises:
            InvalidRequestError: the template reads no such variable, or refuses the messages.
        """
        own = self._tokenizer.get_chat_template(self._given, tools=tools)
        for name in options.keys() - {"add_generation_prompt", "continue_final_message"} - _variables(own):
            raise InvalidRequestError(
                f"chat_template_kwargs.{name} is {options[name]!r}: the chat template reads no such variable"
            )
        if not any(message["role"] == "developer" for message in messages) or "developer" in own:
            chat = [dict(message) for message in messages]
        else:  # the newer name of system
            chat = [{**m, "role": "system"} if m["role"] == "developer" else dict(m) for m in messages]
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
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def parser(self, prefix: str, tools: Sequence[Mapping[str, Any]] | None) -> Any:
        """A new ``ResponseParser`` for an answer to the chat ``prefix``; None if all of it is content.

        Without ``tools`` whatever looks like a call is content.
        """
        if self.response is None:
            return None
        from transformers.utils.chat_parsing import ResponseParser

        fields = dict(self.response["fields"])
        if not tools:
            fields.pop("tool_calls", None)
        elif fields.get("tool_calls", {}).get("content") == "xml-inline":  # arguments are text, cast by their types
            tools = [_with_types(tool) for tool in tools]
        return ResponseParser({**self.response, "fields": fields}, prefix=prefix, tools=list(tools or ()))


def _with_types(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool whose arguments have the types that their schemas say by references, values or combinations, too."""
    function = tool["function"]
    schema = function.get("parameters") or {}
    try:
        properties = resolved(schema, schema).get("properties", {})
        types = {name: {"type": list(types_of(one, schema))} for name, one in properties.items()}
    except (LookupError, TypeError, ValueError, AttributeError):  # no schema: all arguments stay text
        types = {}
    return {"type": "function", "function": {**function, "parameters": {"properties": types}}}


def _variables(template: str) -> frozenset[str]:
    """Variables that a template reads."""
    from transformers.utils.chat_template_utils import _get_template_variables

    found: frozenset[str] = _get_template_variables(template)
    return found


def load_chat(path: str, file: str | None = None, trust_remote_code: bool = False) -> ChatTemplate | None:
    """The chat template of a tokenizer's directory or hub id; ``file`` holds one in its place. None: there is none.

    Raises ConfigError if one cannot be read, or is no valid template.
    """
    folder = Path(path).expanduser()
    given = None if file is None else _read(file)
    if given is None and folder.is_dir() and not _has_template(folder):
        return None
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(
            folder if folder.is_dir() else path, trust_remote_code=trust_remote_code
        )
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
    return ChatTemplate(tokenizer, given, _response_template(tokenizer, folder))


def _has_template(folder: Path) -> bool:
    files = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
    return any((folder / name).exists() for name in files) or bool(
        read_json(folder, "tokenizer_config.json").get("chat_template")
    )


def _read(file: str) -> str:
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"server.chat_template is {file!r}: it cannot be read ({error})") from error
    if not text.strip():
        raise ConfigError(f"server.chat_template is {file!r}: it is empty")
    return text


def _response_template(tokenizer: Any, folder: Path) -> Mapping[str, Any] | None:
    """The response template of a tokenizer, or the one that transformers' own server takes for its model type."""
    if (own := getattr(tokenizer, "response_template", None)) is not None:
        return dict(own)
    model_type = read_json(folder, "config.json").get("model_type")
    if model_type is None:
        return None
    try:
        from transformers.cli.serving.utils import get_response_template
    except ImportError:  # a version without it
        return None
    found: Mapping[str, Any] | None = get_response_template(
        tokenizer, SimpleNamespace(config=SimpleNamespace(model_type=model_type))
    )
    return found
