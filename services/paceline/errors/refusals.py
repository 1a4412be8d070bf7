"""Validation errors as one sentence: the key by its dotted path, its value, what is allowed.

Knows pydantic's errors and trees of models, but not the meaning of settings.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

_SIGNS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
_NOUNS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "tuple": "a list",
    "dict": "a mapping of keys",
    "mapping": "a mapping of keys",
    "model": "a mapping of keys",
    "none": "null",
}
_IN_YAML = " in quotes, as YAML takes on, off, yes and no for true and false"
_LONGEST_VALUE = 60


class Fault(ValueError):
    """A setting that contradicts another one; raised in a model's validator."""

    def __init__(self, key: str, problem: str) -> None:
        """``key`` is relative to the model; ``problem`` continues the sentence that begins with it."""
        super().__init__(f"{key} {problem}".strip())
        self.key = key
        self.problem = problem


def is_http_url(text: str) -> bool:
    """True for a URL of HTTP with a host and, if any, a port that can be connected to."""
    try:
        parts = urlsplit(text)
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and not any(map(str.isspace, text))
        )
    except ValueError:  # a port that is no number or too large, or brackets that do not close
        return False


def explain(error: ValidationError, model: type[BaseModel], elsewhere: Mapping[str, str] | None = None) -> str:
    """One sentence for the first mistake; a key that does not exist comes before the others.

    ``elsewhere``: names of keys that are understood under another path.
    """
    details = error.errors(include_url=False)
    first = next((d for d in details if d["type"] == "extra_forbidden"), details[0])
    if isinstance(first["input"], list):  # one of its items may be what is wrong
        place = ".".join(_locate(model, first)[0])
        first = next((d for d in details if ".".join(_locate(model, d)[0]).startswith(f"{place}[")), first)
    path, owner, field = _locate(model, first)
    fault = first.get("ctx", {}).get("error")
    if isinstance(fault, Fault):
        return f"{'.'.join([*path, *filter(None, fault.key.split('.'))])} {fault.problem}"
    value = shown(first["input"])
    key = ".".join(path)
    if first["loc"][-1] == "[key]":  # of a mapping: all its wrong keys, under which pydantic puts them
        wrong = [d for d in details if d["loc"][-1] == "[key]" and d["loc"][:-2] == first["loc"][:-2]]
        keys = " and ".join(shown(d["input"]) for d in wrong)
        where = key.removesuffix(f".{first['loc'][-2]}.[key]")
        return f"{where} has the key{'s' if len(wrong) > 1 else ''} {keys}: a key must be {_allowed(first, field)}"
    if first["type"] == "extra_forbidden":
        return f"{key} is {value}, but there is no such key: {_suggestion(model, owner, path, elsewhere or {})}"
    if first["type"] == "missing":
        return f"{key} is missing: it is needed"
    if first["type"] == "union_tag_invalid":
        allowed = first["ctx"]["expected_tags"].replace("', '", "' or '")
        return f"{key}.kind is {first['ctx']['tag']!r}: it must be {allowed}"
    same = [d for d in details if _locate(model, d)[0] == path]  # one for each member of a union
    allowed = " or ".join(dict.fromkeys(_allowed(d, field) for d in same))
    return f"{key or 'the configuration'} is {value}: it must be {allowed}"


def explain_parameter(error: ValidationError, model: type[BaseModel]) -> str:
    """One sentence for the first mistake in the parameters of a request; rules about several of them are quoted."""
    fault = error.errors(include_url=False)[0].get("ctx", {}).get("error")
    if fault is not None:
        return str(fault)
    return explain(error, model).replace("Input should be ", "").replace(_IN_YAML, "")


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key of a tree of models by its dotted path."""
    for name, field in _fields(model).items():
        yield prefix + name
        for inner in _models(field.annotation):
            yield from keys_of(inner, f"{prefix}{name}.")


def bounds_of(field: FieldInfo) -> list[str]:
    """The bounds of a number, such as ``at least 1``; also where the field may hold something else, too."""
    constraints = list(field.metadata)
    for member in get_args(field.annotation):
        if get_origin(member) is Annotated:
            constraints += (one for info in get_args(member)[1:] for one in getattr(info, "metadata", ()))
    return [
        f"{sign} {bound}"
        for constraint in constraints
        for name, sign in _SIGNS.items()
        if (bound := getattr(constraint, name, None)) is not None
    ]


def shown(value: Any) -> str:
    """A value as YAML would write it, cut to a readable length."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def _suggestion(model: type[BaseModel], owner: type[BaseModel], path: list[str], elsewhere: Mapping[str, str]) -> str:
    name, names = path[-1], sorted(_fields(owner))
    known = dict.fromkeys(keys_of(model))
    if name in elsewhere:
        return f"use {elsewhere[name]}"
    if ".".join(path) in known:
        return f"it belongs to another kind, allowed here are {', '.join(names)}"
    if close := difflib.get_close_matches(name, names, n=1, cutoff=0.7):
        return f"did you mean {close[0]}?"
    if homes := [key for key in known if key.rpartition(".")[2] == name]:
        return f"did you mean {' or '.join(homes)}?"
    return f"allowed are {', '.join(names)}"


def _allowed(detail: ErrorDetails, field: FieldInfo | None) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "literal_error":
        return str(context["expected"])
    if kind == "string_pattern_mismatch":
        return f"text that matches {context['pattern']}"
    if kind in ("string_too_short", "too_short"):
        return "at least one " + ("character" if kind == "string_too_short" else "entry")
    if kind in ("string_too_long", "too_long"):
        return f"of at most {context['max_length']} " + ("characters" if kind == "string_too_long" else "entries")
    if (noun := kind.partition("_")[0]) in _NOUNS:
        return _NOUNS[noun] + (_IN_YAML if noun == "string" and isinstance(detail["input"], bool) else "")
    if kind == "union_tag_not_found":
        return _NOUNS["model"]
    bounds = [] if field is None else bounds_of(field)
    if bounds and any(name in context for name in _SIGNS):
        return " and ".join(bounds)
    return detail["msg"]


def _locate(model: type[BaseModel], detail: ErrorDetails) -> tuple[list[str], type[BaseModel], FieldInfo | None]:
    """The dotted path of a mistake, the model that holds the key, and its field if it is one."""
    path: list[str] = []
    owner, field, within = model, None, [model]
    for part in detail["loc"]:
        if isinstance(part, int):
            path[-1] += f"[{part}]"
            within = [] if field is None else _elements(field.annotation)
        elif len(within) > 1:  # the tag of a discriminated union
            within = [m for m in within if part in _tags(m)] or within[:1]
        elif within:
            owner = within[0]
            field = _fields(owner).get(part)
            path.append(part)
            within = _models(field.annotation) if field is not None else []
        elif field is not None and _holds_mapping(field.annotation):
            path.append(part)
    return path, owner, field


def _fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The models that a field may hold, in order."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (list, dict):
        return []
    return [model for inner in get_args(annotation) for model in _models(inner)]


def _elements(annotation: Any) -> list[type[BaseModel]]:
    """The models that the list of a field may hold, also one that may be absent."""
    holds = get_origin(annotation) in (list, tuple)
    inner = [_models(kind) if holds else _elements(kind) for kind in get_args(annotation)]
    return [model for models in inner for model in models]


def _tags(model: type[BaseModel]) -> set[Any]:
    """The tags by which a discriminated union may name a model."""
    kind = model.model_fields.get("kind")
    return {model.__name__, kind.default if kind is not None else None}


def _holds_mapping(annotation: Any) -> bool:
    return get_origin(annotation) is dict or any(_holds_mapping(inner) for inner in get_args(annotation))
