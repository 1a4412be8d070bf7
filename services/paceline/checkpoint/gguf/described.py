"""A directory that describes GGUF files as a checkpoint: configuration, tokenizer, and where the files are.

It is made once for each version of the files, in the cache of compiled models, and holds no weight.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from paceline.checkpoint.gguf.config import config_of
from paceline.checkpoint.gguf.header import SHARD, Header, Stored, read_header
from paceline.checkpoint.gguf.tokenizer import end_token_ids, tokenizer_files
from paceline.checkpoint.gguf.weights import GgufTensors, GgufWeights
from paceline.checkpoint.made_once import made_once
from paceline.config import cache_dir
from paceline.config.loading import packaged_sampling
from paceline.errors import ConfigError

INDEX = "gguf.json"
"""The file that says where the GGUF files and their tensors are."""
_FORMAT = 2
"""Goes up whenever the directory would be made otherwise of the same files."""


def files_of(path: Path) -> list[Path]:
    """The GGUF files of the model at a path, none if it is something else. It may be a file, one of several shards, or
    a directory that holds no other weights.

    Raises:
        ConfigError: a shard is missing, or a directory holds several models.
    """
    if path.is_dir():
        if not any(path.glob("*.gguf")) or any(path.glob("*.safetensors")) or any(path.glob("pytorch_model*.bin")):
            return []
        return _only_model(path)
    return _shards(path) if path.suffix == ".gguf" and path.is_file() else []


def _only_model(folder: Path) -> list[Path]:
    names = sorted(one.name for one in folder.glob("*.gguf") if not one.name.startswith("mmproj"))
    firsts = [name for name in names if (shard := SHARD.fullmatch(name)) is None or int(shard["index"]) == 1]
    if len(firsts) != 1:
        held = ", ".join(firsts or names) or "no model but the vision part of one"
        raise ConfigError(f"{str(folder)!r} holds {held}: name the GGUF file of one model")
    return _shards(folder / firsts[0])


def _shards(path: Path) -> list[Path]:
    shard = SHARD.fullmatch(path.name)
    if shard is None:
        return [path]
    count = int(shard["count"])
    files = [path.with_name(f"{shard['stem']}-{index:05}-of-{count:05}.gguf") for index in range(1, count + 1)]
    if missing := [one.name for one in files if not one.is_file()]:
        raise ConfigError(f"{str(path)!r} is one of {count} files, and {missing[0]} is missing in its directory")
    return files


def describe(files: Sequence[Path]) -> Path:
    """The directory that describes the files, which is made if there is none.

    Raises:
        ConfigError: a file is damaged, or holds something that is not read; or the cache cannot be written.
    """
    return made_once(
        cache_dir() / "gguf" / _key(files), lambda draft: _write(draft, read_header([one.absolute() for one in files]))
    )


def _key(files: Sequence[Path]) -> str:
    try:
        stats = [(str(one.resolve()), (found := one.stat()).st_size, found.st_mtime_ns) for one in files]
    except OSError as error:
        raise ConfigError(f"{error.filename!r} cannot be read: {error.strerror or error}") from error
    content = [_FORMAT, version("transformers"), version("tokenizers"), stats]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:24]


def _write(folder: Path, header: Header) -> None:
    what = repr(str(header.files[0]))
    tensors = GgufTensors(header)
    config = config_of(header, lambda name: tensors.numbers(name).reshape(-1).tolist())
    GgufWeights(tensors, config)  # refuses what it would not read
    content, settings = tokenizer_files(header.metadata, config["vocab_size"], what)
    settings["model_max_length"] = config["max_position_embeddings"]
    ends = [one for one in end_token_ids(header.metadata) if one < config["vocab_size"]]
    roles = {f"{role}_token_id": config[f"{role}_token_id"] for role in ("bos", "pad")}
    sampling = _sampling(header.metadata) or dict(packaged_sampling(header.files[0]))
    if sampling:
        sampling["do_sample"] = sampling.get("temperature") != 0
    generation = {"eos_token_id": ends if len(ends) > 1 else ends[0] if ends else None, **roles, **sampling}
    index = {
        "files": [str(one) for one in header.files],
        "tensors": {name: list(asdict(stored).values()) for name, stored in header.tensors.items()},
    }
    values: dict[str, Any] = {
        "config.json": config,
        "tokenizer_config.json": settings,
        "generation_config.json": {key: value for key, value in generation.items() if value is not None},
        INDEX: index,
    }
    texts = {**content, **{name: json.dumps(value, indent=2, ensure_ascii=False) for name, value in values.items()}}
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


_SAMPLING = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
"""Keys of ``general.sampling`` whose names in generation_config.json are other ones."""


def _sampling(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters that a file names. Zeros other than the temperature's turn something off that is off."""
    found = {}
    for key, value in metadata.items():
        name = key.removeprefix("general.sampling.")
        if name != key and (value or name == "temp"):
            written = float(f"{value:.7g}") if isinstance(value, float) else value  # stored in 32 bits
            found[_SAMPLING.get(name, name)] = written
    return found


def describes(folder: Path) -> bool:
    """True for a directory that describes GGUF files."""
    return (folder / INDEX).is_file()


def gguf_weights(folder: Path) -> GgufWeights | None:
    """The weights of the files that a directory describes; None if it describes none. Raises ConfigError."""
    if not describes(folder):
        return None
    index, config = (json.loads((folder / name).read_text(encoding="utf-8")) for name in (INDEX, "config.json"))
    tensors = {
        name: Stored(file, offset, kind, tuple(shape)) for name, (file, offset, kind, shape) in index["tensors"].items()
    }
    files = tuple(Path(one) for one in index["files"])
    for one in files:
        if not os.access(one, os.R_OK):
            raise ConfigError(f"{str(one)!r} cannot be read: it was there when it was described")
    return GgufWeights(GgufTensors(Header(files, {}, tensors)), config)
