"""The file of API keys: names, digests and limits. It holds no key: a client's key is hashed and compared.

keys:
  - name: team-a
    sha256: 0f3c...          # of the key's text; a list while a key is being replaced by another
    max_requests: 16         # at once
    tokens_per_minute: 60000 # prompt and generated
    metrics: true            # may see the metrics of all keys
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from paceline.errors import ConfigError
from paceline.errors.files import read_bytes
from paceline.security.files import Signature, signature

log = logging.getLogger(__name__)


class ApiKey(BaseModel):
    """One name, the digests of the keys that stand for it, and its limits at each router. None: no limit.

    ``metrics``: its holder may see the names and amounts of all keys on the page of metrics.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    sha256: tuple[str, ...] = Field(min_length=1)
    max_requests: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    metrics: bool = False

    @model_validator(mode="before")
    @classmethod
    def _one_or_several(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(digests := data.get("sha256"), str | list):
            return data | {"sha256": (digests,) if isinstance(digests, str) else tuple(digests)}
        return data

    @model_validator(mode="after")
    def _digests(self) -> Self:
        for digest in self.sha256:
            if re.fullmatch("[0-9a-fA-F]{64}", digest) is None:
                raise ValueError("sha256 must be 64 hexadecimal digits: the SHA-256 of the key")
            if bytes.fromhex(digest) == hashlib.sha256().digest():
                raise ValueError("sha256 is that of an empty key, which every call would have")
        return self


class KeyRing:
    """The keys of one file, in use until ``refresh`` has read a sound newer version of it."""

    def __init__(self, path: str | Path) -> None:
        """Reads the file. Raises ConfigError."""
        self._path = Path(path).expanduser()
        self._seen = signature([self._path])
        self._keys = read_keys(self._path)
        self.num_failures = 0
        """Versions of the file that could not be used."""

    def refresh(self) -> None:
        """Rereads the file if it has changed; logs, counts and ignores a version that cannot be used."""
        now: Signature = signature([self._path])
        if now == self._seen:
            return
        self._seen = now
        try:
            self._keys = read_keys(self._path)
            log.info("%s: %d API keys are in use from now on", self._path, len(self._keys))
        except ConfigError as error:
            self.num_failures += 1
            log.error("the API keys stay as they were: %s", error)

    @property
    def keys(self) -> Mapping[str, ApiKey]:
        """The keys in use, by name."""
        return self._keys

    def find(self, key: str) -> ApiKey | None:
        """The entry that a key belongs to. The time does not depend on the key, or on whether it is found."""
        given = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        found = None
        for entry in self._keys.values():
            for digest in entry.sha256:
                if hmac.compare_digest(given, bytes.fromhex(digest)):
                    found = entry
        return found


def read_keys(path: Path) -> dict[str, ApiKey]:
    """The keys of a file by name. Raises ConfigError, which quotes nothing of the file but names of settings."""
    try:
        data = yaml.safe_load(read_bytes(path, f"server.api_keys is {str(path)!r}"))
        mode = path.stat().st_mode
    except (UnicodeDecodeError, yaml.YAMLError):
        raise ConfigError(f"server.api_keys is {str(path)!r}: it is not valid YAML") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        log.warning("%s may be read by others (mode %03o): chmod 600 it", path, stat.S_IMODE(mode))
    entries = data.get("keys") if isinstance(data, dict) and set(data) == {"keys"} else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"server.api_keys is {str(path)!r}: a list `keys` with at least one entry is needed")
    return _by_name(path, entries)


def _by_name(path: Path, entries: Iterable[Any]) -> dict[str, ApiKey]:
    keys: dict[str, ApiKey] = {}
    digests: set[str] = set()
    for index, entry in enumerate(entries):
        where = f"server.api_keys is {str(path)!r}: keys[{index}]"
        try:
            key = ApiKey.model_validate(entry)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            place = ".".join(str(part) for part in first["loc"] if part in ApiKey.model_fields)
            raise ConfigError(f"{where}{'.' + place if place else ''}: {first['msg']}") from None
        if key.name in keys:
            raise ConfigError(f"{where}.name is {key.name!r}, which another key has: each name is given once")
        if not digests.isdisjoint(digest.lower() for digest in key.sha256):
            raise ConfigError(f"{where}.sha256 belongs to another key, too: a key has one name")
        digests.update(digest.lower() for digest in key.sha256)
        keys[key.name] = key
    return keys
