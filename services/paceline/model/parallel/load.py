"""A rank's share of a checkpoint: only the slices that it holds are read from the safetensors files.

The files are mapped, not read: a page comes into memory when a slice of it is copied. Rows that are split across
columns bring in whole tensors, so a file is closed, and its pages given back, after every ``_MAPPED_BYTES``.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    rename_source_key,
)

from paceline.checkpoint.folder import folder_of
from paceline.checkpoint.gguf.weights import GgufWeights
from paceline.checkpoint.size import names_of
from paceline.checkpoint.translated import INDEX, renamed
from paceline.errors import ConfigError, named
from paceline.model.parallel.plan import ParameterShard, ShardPlan

Progress = Callable[[int, int], None]
"""(bytes that are loaded, bytes of the rank)."""

_SINGLE = "model.safetensors"
_MAPPED_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint tensor that fills a box of a parameter."""

    tensor: str
    expert: int | None = None
    """Index of the tensor along the parameter's first dimension, which the tensor does not have itself."""
    dim: int = 0
    """Dimension of the parameter along which the tensor is joined with others."""
    index: int = 0
    """Place of the tensor among those joined along ``dim``."""


class Files(Protocol):
    """The tensors of a checkpoint by name."""

    path: str

    def __iter__(self) -> Iterator[str]: ...

    def close(self) -> None:
        """Closes the files."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises ConfigError if the files do not hold the tensor."""
        ...

    def copy(self, name: str, box: tuple[slice, ...], target: Tensor) -> None:
        """Copies a box of a tensor to ``target``, which has another dtype perhaps."""
        ...


class GgufFiles:
    """The tensors of GGUF files, each dequantized whole."""

    def __init__(self, path: str, weights: GgufWeights, dtype: torch.dtype) -> None:
        self.path, self._weights, self._dtype = path, weights, dtype
        self._last: tuple[str, Tensor] | None = None

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def close(self) -> None:
        """Forgets the last tensor."""
        self._last = None

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self._weights.weights[name].shape

    def copy(self, name: str, box: tuple[slice, ...], target: Tensor) -> None:
        """Copies a box of a tensor to ``target``."""
        if self._last is None or self._last[0] != name:
            self._last = None
            self._last = name, self._weights.read(name, self._dtype)
        target.copy_(self._last[1][box].reshape(target.shape))


class CheckpointFiles:
    """The tensors of safetensors files. ``close`` closes the files."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError if ``path`` holds no safetensors files."""
        self.path = path
        directory = folder_of(path) or Path(path).expanduser()
        if not directory.is_dir():
            patterns = ["*.safetensors", "*.json"]
            try:
                directory = Path(snapshot_download(path, allow_patterns=patterns))
            except Exception as error:  # the hub's client raises whatever its transport raises
                raise ConfigError(f"model {path!r} could not be fetched: {error}") from error
        self._file_of: dict[str, Path] = {}
        self._handles: dict[Path, Any] = {}
        self._mapped = 0
        self._stored_names: list[tuple[str, str]] = []
        try:
            if (directory / INDEX).is_file():
                index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
                self._file_of = {name: directory / file for name, file in index["weight_map"].items()}
                self._stored_names = [(known, stored) for stored, known in names_of(index)]
            elif (directory / _SINGLE).is_file():
                self._file_of = dict.fromkeys(self._open(directory / _SINGLE).keys(), directory / _SINGLE)
            else:
                raise ConfigError(
                    f"model {path!r} holds no {_SINGLE}: weights are split, or dequantized, from safetensors only"
                )
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"model {path!r} could not be read: {error}") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def close(self) -> None:
        """Unmaps all files."""
        self._handles.clear()
        self._mapped = 0

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises ConfigError if the file does not hold the tensor."""
        return tuple(self._slice(name).get_shape())

    def type(self, name: str) -> str:
        """The number format of a tensor, as safetensors names it. Raises ConfigError if the file does not hold it."""
        return str(self._slice(name).get_dtype())

    def read(self, name: str) -> Tensor:
        """A whole tensor as it is stored."""
        tensor: Tensor = self._slice(name)[...] if self.shape(name) else self._number(name)
        return tensor.clone()

    def copy(self, name: str, box: tuple[slice, ...], target: Tensor) -> None:
        """Copies a box of a tensor to ``target``, which has another dtype perhaps."""
        if self._mapped > _MAPPED_BYTES:
            self.close()
        whole = self._slice(name)
        shape = whole.get_shape()
        if not shape:
            target.copy_(self._number(name).reshape(target.shape))
            return
        part = whole[box]
        target.copy_(part.reshape(target.shape))
        self._mapped += part.shape[0] * torch.Size(shape[1:]).numel() * part.itemsize  # whole rows come into memory

    def _stored(self, name: str) -> str:
        """The name of a tensor in its file."""
        return renamed(name, self._stored_names) or name

    def _number(self, name: str) -> Tensor:
        tensor: Tensor = self._open(self._file_of[name]).get_tensor(self._stored(name))
        return tensor

    def _slice(self, name: str) -> Any:
        try:
            return self._open(self._file_of[name]).get_slice(self._stored(name))
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"model {self.path!r} is not whole: {name}: {error}") from error

    def _open(self, file: Path) -> Any:
        handle = self._handles.get(file)
        if handle is None:  # transformers reads in several threads, and one may close the files now
            handle = self._handles[file] = safe_open(file, framework="pt", device="cpu")
        return handle


def read_shard(
    files: Files,
    model: PreTrainedModel,
    plan: ShardPlan,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> dict[str, Tensor]:
    """The rank's parameters and persistent buffers by name, as ``dtype`` where they are floating-point numbers.

    ``model`` is asked for the names that the checkpoint uses; it may be on the meta device.

    Raises:
        ConfigError: a tensor is missing, has another shape than the model's, or is stored in a form that only
            transformers' own loader converts.
    """
    sources = sources_of(files, model, plan.parameters, plan.aliases)
    missing = [name for name in plan.parameters if name not in sources]
    if missing:
        raise ConfigError(f"model {files.path!r} is not whole: no weight file holds {named(missing)}")
    kept = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    state = model.state_dict()
    wanted: dict[str, torch.dtype] = {}
    for name in plan.parameters:
        own = state[name].dtype
        high = any(re.search(rf"(^|\.){re.escape(part)}($|\.)", name) for part in kept)
        wanted[name] = own if not own.is_floating_point else torch.float32 if high else dtype
    total = sum(torch.Size(s.local_shape).numel() * wanted[n].itemsize for n, s in plan.parameters.items())
    done, tensors = 0, {}
    for name, shard in plan.parameters.items():
        tensor = torch.empty(shard.local_shape, dtype=wanted[name])
        if shard.elsewhere:
            tensor.zero_()
        else:
            _fill(tensor, shard, sources[name], files, name)
        tensors[name] = tensor
        done += tensor.nbytes
        if progress is not None:
            progress(done, total)
    files.close()
    return tensors


def sources_of(
    files: Files, model: PreTrainedModel, names: Collection[str], aliases: Mapping[str, str]
) -> dict[str, list[Source]]:
    """Checkpoint tensors that fill each of the parameters ``names``, which ``aliases`` give other names. Tensors that
    the model has no place for are left out."""
    transforms = get_model_conversion_mapping(model)
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    renamings = [t for t in transforms if not isinstance(t, WeightConverter)]
    state, prefix = model.state_dict(), model.base_model_prefix
    found: dict[str, list[Source]] = defaultdict(list)
    for tensor in files:
        name, pattern = rename_source_key(tensor, renamings, converters, prefix, state)
        if name not in state and tensor in state:  # a pattern of older names that the model's own one has, too
            name, pattern = tensor, None
        name = aliases.get(name, name)
        if name not in names:
            continue
        if pattern is None:
            found[name] = [Source(tensor)]
        else:
            (converter,) = [c for c in converters if pattern in c.source_patterns][:1]
            found[name].append(_converted(tensor, pattern, converter, files.path))
    return found


def _converted(tensor: str, pattern: str, converter: WeightConverter, path: str) -> Source:
    """The place of one of several tensors in the parameter that they are joined to."""
    operations = list(converter.operations)
    expert: int | None = None
    if operations and isinstance(operations[0], MergeModulelist) and operations[0].dim == 0:
        operations.pop(0)
        plain = pattern.replace(r"\.", ".")  # some dots are escaped, others are not
        numbers = re.search(re.escape(plain).replace(r"\*", r"(\d+)"), tensor)
        expert = int(numbers[1]) if numbers is not None and numbers.groups() else None
    if not operations and expert is not None:
        return Source(tensor, expert)
    if len(operations) == 1 and isinstance(operations[0], Concatenate) and len(converter.target_patterns) == 1:
        return Source(tensor, expert, operations[0].dim, converter.source_patterns.index(pattern))
    kinds = " and ".join(type(operation).__name__ for operation in converter.operations)
    raise ConfigError(f"model {path!r} stores {tensor} in a form ({kinds}) that is not read in slices: use degree 1")


def _fill(tensor: Tensor, shard: ParameterShard, sources: list[Source], files: Files, name: str) -> None:
    """Copies what the rank holds of each source to its place."""
    copied = 0
    for source, box, place in pieces(shard, sources, files, name):
        target = tensor[place]
        files.copy(source, box, target)
        copied += target.numel()
    if copied != tensor.numel():
        raise ConfigError(
            f"model {files.path!r}: the tensors for {name} fill {copied} of its {tensor.numel()} values on this rank"
        )


def pieces(
    shard: ParameterShard, sources: list[Source], files: Files, name: str
) -> Iterator[tuple[str, tuple[slice, ...], tuple[slice, ...]]]:
    """What the rank holds of a parameter: a checkpoint's tensor, a box of it, and its place in the rank's part.

    Raises:
        ConfigError: a tensor does not fit the parameter.
    """
    for source, shape, first in _placed(sources, files):
        if len(shape) != len(shard.shape) or any(f + s > n for f, s, n in zip(first, shape, shard.shape, strict=True)):
            raise ConfigError(
                f"model {files.path!r}: {source.tensor} of shape {shape} does not fit {name} of {shard.shape}"
            )
        for start, taken in _overlaps(shard, first, shape):
            place = [slice(f, f + s) for f, s in zip(first, shape, strict=True)]
            box = [slice(0, s) for s in shape]
            if shard.dim is not None:
                place[shard.dim] = slice(start, start + taken.stop - taken.start)
                box[shard.dim] = taken
            yield source.tensor, tuple(box if source.expert is None else box[1:]), tuple(place)


def _placed(sources: list[Source], files: Files) -> Iterator[tuple[Source, tuple[int, ...], tuple[int, ...]]]:
    """Each source with its shape and its first corner, in the parameter's dimensions."""
    ends: dict[int | None, int] = defaultdict(int)
    for source in sorted(sources, key=lambda s: (s.expert or 0, s.index)):
        shape = files.shape(source.tensor)
        first = [0] * len(shape)
        if source.expert is not None:
            shape, first = (1, *shape), [source.expert, *first]
        if first and (source.dim > 0 or source.expert is None):
            first[source.dim] = ends[source.expert]
            ends[source.expert] += shape[source.dim]
        yield source, shape, tuple(first)


def _overlaps(shard: ParameterShard, first: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[tuple[int, slice]]:
    """(place along the split dimension in the rank's tensor, range in the source) of all that the rank holds."""
    if shard.dim is None:
        yield 0, slice(0)
        return
    offset, length, start = first[shard.dim], shape[shard.dim], 0
    for part_first, part_stop in shard.parts:
        low, high = max(part_first, offset), min(part_stop, offset + length)
        if low < high:
            yield start + low - part_first, slice(low - offset, high - offset)
        start += part_stop - part_first
