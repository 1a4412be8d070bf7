"""The bases of every model of the configuration: frozen, without unknown keys, and strict about types."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """Frozen; a key that it does not know is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Strict(Config):
    """Converts no value: ``"32"`` is not a number, and neither is ``yes``."""

    model_config = ConfigDict(strict=True)
