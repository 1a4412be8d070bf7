"""Structured output by the names of OpenAI (``response_format``, ``text``) and vLLM (``structured_outputs``)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from pydantic import ValidationError

from paceline.errors.refusals import Fault, shown
from paceline.types import StructuredOutput

_OF_VLLM = {"json": "json_schema", "json_object": "json_object", "regex": "regex", "choice": "choice"}
_OF_VLLM |= {"grammar": "grammar", "structural_tag": "structural_tag"}
_ALONE = {f"guided_{name}": _OF_VLLM[name] for name in ("json", "regex", "choice", "grammar")}
_ALONE |= {"json_schema": "json_schema", "regex": "regex", "grammar": "grammar", "ebnf": "grammar"}
FORMS = ("response_format", "structured_outputs", *_ALONE)
"""Parameters of completions and chats that name a form: OpenAI's, vLLM's, its older ones, SGLang's and llama.cpp's."""


def take_form(given: dict[str, Any], names: Collection[str]) -> None:
    """Replaces what ``names`` say about the form of the output by ``structured_output``.

    Raises Fault for a form that is malformed, or named twice.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in [name for name in names if name in given]:
        value = given[name] if name == "text" else given.pop(name)
        if fields := _reader(name)(name, value):
            found[name] = fields
    if not found:
        return
    name, *others = (*found, *(["structured_output"] if "structured_output" in given else []))
    if others:
        raise Fault(others[0], f"is given with {name}: one of them is allowed")
    try:
        given["structured_output"] = StructuredOutput(**found[name])
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        raise Fault(name, f"is not a form: {detail.get('ctx', {}).get('error', detail['msg'])}") from None


def spelling(data: Mapping[str, Any], names: Collection[str]) -> dict[str, str]:
    """Our name of a form of the output -> where a body has it by one of ``names``."""
    found: dict[str, str] = {}
    for name in [name for name in names if data.get(name) is not None]:
        if name in _ALONE:
            found[_ALONE[name]] = name
        elif name == "structured_outputs":
            found |= {ours: f"{name}.{theirs}" for theirs, ours in _OF_VLLM.items()}
        else:
            found |= dict.fromkeys(_OF_VLLM.values(), "text.format" if name == "text" else name)
    return {f"structured_output.{kind}": place for kind, place in found.items()}


def _reader(name: str) -> Callable[[str, Any], dict[str, Any] | None]:
    readers = {"response_format": _response_format, "structured_outputs": _structured_outputs, "text": _text}
    return readers.get(name, lambda name, value: {_ALONE[name]: value})


def _response_format(name: str, value: Any) -> dict[str, Any] | None:
    match value:
        case {"type": "text"}:
            return None
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return {"json_schema": schema}
        case {"type": "json_schema" | "json_object" | "json", "schema": dict(schema)}:  # of llama.cpp
            return {"json_schema": schema}
        case {"type": "json_schema" | "json_object" | "json", "value": dict(schema)}:  # of TGI
            return {"json_schema": schema}
        case {"type": "regex", "value": str(regex)} | {"type": "regex", "pattern": str(regex)}:
            return {"regex": regex}
        case {"type": "grammar", "grammar": str(grammar)}:
            return {"grammar": grammar}
        case {"type": "json_object", **rest} if not rest.keys() & {"schema", "value"}:
            return {"json_object": True}
        case {"type": "structural_tag"}:
            return {"structural_tag": value}
        case {"type": "json_schema", "json_schema": _} | {"type": "json_schema"}:
            raise Fault(name, f"is {shown(value)}: json_schema.schema is needed")
    raise Fault(name, f"is {shown(value)}: type 'text', 'json_object', 'json_schema' or 'structural_tag' is allowed")


def _text(name: str, value: Any) -> dict[str, Any] | None:
    """The ``text`` of a response, whose ``format`` holds the schema itself."""
    if not isinstance(value, dict) or value.keys() - {"format", "verbosity"}:
        raise Fault(name, f"is {shown(value)}: an object with format is allowed")
    if value.get("verbosity") not in (None, "medium"):
        raise Fault("text.verbosity", f"is {shown(value['verbosity'])}: only 'medium' is supported")
    match value.get("format"):
        case None:
            return None
        case {"type": "json_schema", "schema": dict(schema)}:
            return {"json_schema": schema}
        case {"type": "json_schema"} as form:
            raise Fault("text.format", f"is {shown(form)}: schema is needed")
        case form:
            return _response_format("text.format", form)


def _structured_outputs(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Fault(name, f"is {shown(value)}: an object with one of {', '.join(_OF_VLLM)} is allowed")
    fields = {key: form for key, form in value.items() if form not in (None, False)}
    if unknown := sorted(fields.keys() - _OF_VLLM.keys()):
        raise Fault(name, f"holds {unknown[0]!r}, which is not supported: allowed are {', '.join(_OF_VLLM)}")
    if not fields:
        raise Fault(name, f"is {shown(value)}: one of {', '.join(_OF_VLLM)} is needed")
    return {_OF_VLLM[key]: form for key, form in fields.items()}
