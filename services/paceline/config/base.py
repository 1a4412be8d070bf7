"""What every model of the configuration rests on: frozen, without unknown keys, and strict where it is read from
files.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """Frozen; a key that it does not know is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Strict(Config):
    """Takes a value only as what it is: ``"32"`` is no number, and ``yes`` is none either."""

    model_config = ConfigDict(strict=True)
