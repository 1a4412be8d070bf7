"""The header of GGUF files: metadata, and the place of every tensor. Nothing of a tensor is read."""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError

SHARD = re.compile(r"(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf")
"""Name of one of several files that hold a model together."""
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Formats of ``struct`` by the numbers of GGUF's types of metadata."""
_FLOAT, _TEXT, _ARRAY = 6, 8, 9
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MAX_DIMS = 4


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as it lies in a file."""

    file: int
    """Index of the file among the model's files."""
    offset: int
    """First byte in the file."""
    kind: str
    """Name of its number format, such as Q4_K."""
    shape: tuple[int, ...]
    """The outermost dimension first, as torch has it."""


@dataclass(frozen=True)
class Header:
    """The metadata and tensors of a model, in all of its files."""

    files: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Stored]

    @property
    def architecture(self) -> str:
        """The family, by llama.cpp's name."""
        return str(self.metadata.get("general.architecture"))


def read_header(files: Sequence[Path]) -> Header:
    """Reads the headers of the files of one model.

    Raises:
        ConfigError: a file is none of GGUF, is cut short, or holds a tensor in a format that is not decoded.
    """
    metadata: dict[str, Any] = {}
    tensors: dict[str, Stored] = {}
    for index, path in enumerate(files):
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                own, found = _read(content, index, path)
        except OSError as error:
            raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror or error}") from error
        except (struct.error, IndexError, OverflowError, MemoryError) as error:
            raise ConfigError(f"{str(path)!r} is cut short: its header does not end") from error
        except ConfigError:  # a ValueError, too
            raise
        except ValueError as error:  # an empty file cannot be mapped; text that is not UTF-8
            reason = "is cut short: it is empty" if "empty" in str(error) else f"has a damaged header: {error}"
            raise ConfigError(f"{str(path)!r} {reason}") from error
        metadata = {**own, **metadata}  # the first file's stand
        if twice := sorted(found.keys() & tensors.keys()):
            raise ConfigError(f"{str(path)!r} holds {twice[0]}, which another file of the model holds already")
        tensors.update(found)
    count = metadata.get("split.tensors.count", len(tensors))
    if count != len(tensors):
        raise ConfigError(f"{str(files[0])!r} and its shards hold {len(tensors)} tensors of {count}")
    return Header(tuple(files), metadata, tensors)


def _read(content: mmap.mmap, index: int, path: Path) -> tuple[dict[str, Any], dict[str, Stored]]:
    reader = _Reader(content)
    if content[:4] != b"GGUF":
        raise ConfigError(f"{str(path)!r} is not a GGUF file: it does not begin with GGUF")
    reader.at = 4
    version, num_tensors, num_keys = reader.take("IQQ")
    if version not in _VERSIONS:
        raise ConfigError(f"{str(path)!r} is GGUF of version {version}: 2 and 3 are read, in little-endian order")
    metadata = {reader.text(): reader.value() for _ in range(num_keys)}
    entries = []
    for _ in range(num_tensors):
        name, (num_dims,) = reader.text(), reader.take("I")
        if num_dims > _MAX_DIMS:
            raise ConfigError(f"{str(path)!r} has a damaged header: {name} has {num_dims} dimensions")
        shape = tuple(reversed(reader.take(f"{num_dims}Q")))
        entries.append((name, shape, *reader.take("IQ")))
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ConfigError(f"general.alignment is {alignment!r} in {str(path)!r}: a number of bytes is needed")
    start = -(-reader.at // alignment) * alignment
    tensors = {}
    for name, shape, number, offset in entries:
        kind, size = _size(name, shape, number, path)
        if start + offset + size > len(content):
            end = start + offset + size
            raise ConfigError(f"{str(path)!r} is cut short: {name} ends at byte {end} of {len(content)}")
        tensors[name] = Stored(index, start + offset, kind, shape)
    return metadata, tensors


def _size(name: str, shape: tuple[int, ...], number: int, path: Path) -> tuple[str, int]:
    """Name of a number format, and the bytes of a tensor in it. Raises ConfigError if it is not decoded."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    kind = next((one for one in GGMLQuantizationType if one.value == number), None)
    if kind is None or not is_decoded(kind.name):
        allowed = ", ".join(one.name for one in GGMLQuantizationType if is_decoded(one.name))
        stored = f"type {number}" if kind is None else kind.name
        raise ConfigError(f"{name} of {str(path)!r} is stored as {stored}: {allowed} are read")
    block, num_bytes = GGML_QUANT_SIZES[kind]
    if not shape or shape[-1] % block:
        raise ConfigError(f"{name} of {str(path)!r} is {list(shape)}: rows of {kind.name} are multiples of {block}")
    return kind.name, math.prod(shape) // block * num_bytes


@cache
def is_decoded(kind: str) -> bool:
    """True if the ``gguf`` package makes numbers of this format."""
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        block = np.zeros((1, GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]), np.uint8)
        dequantize(block, GGMLQuantizationType[kind])
    except NotImplementedError:
        return False
    return True


class _Reader:
    """Reads consecutive values."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content, self.at = content, 0

    def take(self, formats: str) -> tuple[Any, ...]:
        """Numbers in the formats of ``struct``, packed without gaps."""
        values = struct.unpack_from("<" + formats, self.content, self.at)
        self.at += struct.calcsize("<" + formats)
        return values

    def text(self) -> str:
        """Reads the length of a text, then the text."""
        (length,) = self.take("Q")
        if self.at + length > len(self.content):
            raise IndexError
        self.at += length
        return self.content[self.at - length : self.at].decode("utf-8")

    def value(self) -> Any:
        """Reads the type of a metadata value, then the value."""
        (kind,) = self.take("I")
        return self._value(kind)

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind == _ARRAY:
            of, count = self.take("IQ")
            if of in _SCALARS:
                if self.at + count > len(self.content):
                    raise IndexError
                return list(self.take(f"{count}{_SCALARS[of]}"))
            if count * 8 > len(self.content):
                raise IndexError
            return [self._value(of) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"a value of type {kind}")
        (value,) = self.take(_SCALARS[kind])
        return _shortest(value) if kind == _FLOAT else value


def _shortest(value: float) -> float:
    """The shortest number that is the same in float32: 1e-05, not 9.999999747378752e-06."""
    if not math.isfinite(value):
        return value
    return next(short for digits in range(1, 10) if _float32(short := float(f"{value:.{digits}g}")) == value)


def _float32(value: float) -> float:
    try:
        (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    except OverflowError:
        return math.inf
    return float(rounded)
