"""The weight files of a checkpoint: names and shapes first, tensors when they are asked for."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.checkpoint.folder import read_json
from paceline.checkpoint.gguf.described import gguf_weights
from paceline.checkpoint.gguf.weights import GgufWeights
from paceline.checkpoint.size import header
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

_STEMS = ("model", "pytorch_model", "medusa_lm_head")
"""Names of weight files without their endings, the ones that are looked for first first."""


@dataclass(frozen=True)
class WeightFiles:
    """All tensors of a checkpoint directory, in one file or in shards, as safetensors, pickled or GGUF."""

    folder: Path
    files: Mapping[str, Path]
    """The file of each tensor."""
    shapes: Mapping[str, tuple[int, ...]]
    """The shape of each tensor."""
    gguf: GgufWeights | None = None
    """Reader of the weights, if the files are GGUF."""

    @classmethod
    def open(cls, folder: Path, single: Iterable[str] = ()) -> WeightFiles:
        """Reads the headers. Pickled files are read whole, and may hold nothing but tensors.

        Args:
            folder: the checkpoint.
            single: stems of further ``.pt`` files in the folder that hold one tensor each, named by its stem.

        Raises:
            ConfigError: there are no weights, or a file is missing, cut short, or holds anything else.
        """
        if (gguf := gguf_weights(folder)) is not None:
            return cls(folder, gguf.files, gguf.shapes, gguf)
        paths = _paths(folder)
        if not paths:
            raise ConfigError(
                f"{str(folder)!r} holds no weights: {', '.join(_STEMS)} with .safetensors, .bin or .pt is looked for"
            )
        files: dict[str, Path] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for path in paths:
            try:
                if path.suffix == ".safetensors":
                    found = {name: entry.shape for name, entry in header(path).items()}
                else:
                    found = {name: tuple(tensor.shape) for name, tensor in _unpickled(path).items()}
            except OSError as error:
                raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror or error}") from error
            files.update(dict.fromkeys(found, path))
            shapes.update(found)
        for path in (folder / f"{stem}.pt" for stem in single):
            if path.is_file():
                files[path.stem], shapes[path.stem] = path, tuple(_unpickled(path)[path.stem].shape)
        return cls(folder, files, shapes)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Returns the tensors of these names on the CPU in their stored dtype; from GGUF files in float32."""
        if self.gguf is not None:
            return {name: self.gguf.read(name) for name in names}
        from safetensors import safe_open

        found: dict[str, Tensor] = {}
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.files[name], []).append(name)
        for path, wanted in by_file.items():
            if path.suffix == ".safetensors":
                with safe_open(path, framework="pt") as file:
                    found.update((name, file.get_tensor(name)) for name in wanted)
            else:
                tensors = _unpickled(path)
                found.update((name, tensors[name]) for name in wanted)
        return found


def _paths(folder: Path) -> list[Path]:
    """Returns the weight files of the first kind that exists."""
    for stem in _STEMS:
        for ending in (".safetensors", ".bin", ".pt"):
            index = read_json(folder, f"{stem}{ending}.index.json").get("weight_map")
            if isinstance(index, dict):
                return [folder / name for name in sorted({str(name) for name in index.values()})]
            if (folder / f"{stem}{ending}").is_file():
                return [folder / f"{stem}{ending}"]
    return []


def _unpickled(path: Path) -> dict[str, Tensor]:
    """The tensors of a pickled file, mapped into memory; code in it is not run."""
    import torch

    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise ConfigError(
            f"{str(path)!r} is not a file of tensors that torch.save has written, or is cut short: nothing else is read"
        ) from error
    if isinstance(found, torch.Tensor):
        return {path.stem: found}
    if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise ConfigError(f"{str(path)!r} holds something other than named tensors: a state dict is needed")
    return found
