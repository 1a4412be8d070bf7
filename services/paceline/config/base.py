"""The bases of every model of the configuration: frozen, without unknown keys, and strict about types.

YAML 1.1, which PyYAML, Ray and most tools of Kubernetes read, takes the words on, off, yes and no for booleans and
``1e-3`` for text. A field knows its type, whichever tool read the file, so the word is restored here.

A new option costs one edit: a field of the class that holds it.
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, model_validator

_WORDS = {False: ("off", "no", "n", "false"), True: ("on", "yes", "y", "true")}
"""Words that a reader of YAML 1.1 takes for a boolean."""
_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
"""Numbers that YAML 1.1 takes for text, unless they have both a point and a sign."""


class Config(BaseModel):
    """Frozen; a key that it does not know is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _read_as_meant(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        kinds = {field.alias or name: field.annotation for name, field in cls.model_fields.items()}
        return {key: as_meant(value, kinds[key]) if key in kinds else value for key, value in data.items()}

    def __setstate__(self, state: dict[Any, Any]) -> None:
        """Unpickles a state that another version may have pickled: keys missing there get their defaults, and unknown
        keys are dropped."""
        given, known = state["__dict__"], type(self).model_fields.items()
        values = {key: given.get(key, field.get_default(call_default_factory=True)) for key, field in known}
        super().__setstate__(state | {"__dict__": values})


class Strict(Config):
    """Converts no value: ``"32"`` is not a number, and neither is ``yes``."""

    model_config = ConfigDict(strict=True)


def as_meant(value: Any, annotation: Any) -> Any:
    """A value of a YAML file as a field of this type was meant to have it; values of any other kind are returned."""
    members = _members(annotation)
    if isinstance(value, bool):
        words = [word for member in members if get_origin(member) is Literal for word in get_args(member)]
        if bool not in members:
            return next((word for word in words if str(word).lower() in _WORDS[value]), value)
    elif isinstance(value, str):
        if float in members and str not in members and _EXPONENT.fullmatch(value):
            return float(value)
    elif isinstance(value, list):
        inner = [kind for member in members if get_origin(member) is list for kind in get_args(member)]
        return [as_meant(one, inner[0]) for one in value] if inner else value
    elif isinstance(value, dict):
        inner = [kind for member in members if get_origin(member) is dict for kind in get_args(member)[1:]]
        return {key: as_meant(one, inner[0]) for key, one in value.items()} if inner else value
    return value


def _members(annotation: Any) -> list[Any]:
    """The kinds of values that a type allows."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for one in get_args(annotation) for member in _members(one)]
    return [annotation]
