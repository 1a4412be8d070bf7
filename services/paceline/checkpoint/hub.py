"""Tells if a checkpoint that is not on this machine could be fetched."""

from __future__ import annotations

from pathlib import Path

from paceline.checkpoint.folder import folder_of, gguf_on_hub, local_folder, tagged
from paceline.checkpoint.gguf.header import SHARD
from paceline.config.loading import nearest_name
from paceline.errors import ConfigError

_PATIENCE_S = 5.0
_ANY = ("config.json", "tokenizer_config.json", "tokenizer.json")
"""Files of which one is here if a model's or a tokenizer's id has been fetched."""


def why_not_fetched() -> str | None:
    """The reason for which nothing can be fetched from the hub now; None if it answers."""
    from huggingface_hub import constants, get_session

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=_PATIENCE_S)
    except Exception as error:  # of whatever library it speaks HTTP with
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return f"{constants.ENDPOINT} does not answer ({reason})"
    return None


def require_fetchable(source: str) -> None:
    """Raises ConfigError, in seconds, if a checkpoint is neither here nor available on the hub.

    transformers itself would try for half a minute.
    """
    if local_folder(source, *_ANY) is not None:
        return
    if (reason := why_not_fetched()) is not None:
        raise ConfigError(absent(source, reason))


def absent(source: str, reason: str | None = None) -> str:
    """Says that a checkpoint is not on this machine, and with a ``reason`` that it cannot be fetched and what to do."""
    near = nearest_name(source)
    found = f"{source!r} is neither a directory nor in the Hugging Face cache"
    remedy = "name a directory, or fetch it where there is a network" if near is None else f"did you mean {near!r}?"
    return found if reason is None else f"{found}, and cannot be fetched: {reason}; {remedy}"


def fetch_gguf(source: str) -> None:
    """Fetches a GGUF file of the hub, with its shards, if ``source`` is one that is not here.

    Raises ConfigError if it cannot be fetched, or if a repository has no file of a number format, or several.
    """
    found = gguf_on_hub(source)
    if found is None or folder_of(source) is not None:
        return
    from huggingface_hub import HfApi, hf_hub_download

    require_fetchable(source)
    repo, file = found
    try:
        if not file.endswith(".gguf"):
            file = _file_of(repo, file, HfApi().list_repo_files(repo))
        if (shard := SHARD.fullmatch(Path(file).name)) is not None:
            stem, count = file.removesuffix(Path(file).name) + shard["stem"], int(shard["count"])
            for index in range(1, count + 1):
                hf_hub_download(repo, f"{stem}-{index:05}-of-{count:05}.gguf")
        hf_hub_download(repo, file)
    except ConfigError:
        raise
    except Exception as error:  # of the hub's client and whatever it speaks HTTP with
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{file!r} of {repo!r} could not be fetched: {reason}") from error


def _file_of(repo: str, tag: str, names: list[str]) -> str:
    """The file of a number format in a repository. Raises ConfigError unless there is one."""
    found = tagged(names, tag)
    if len(found) != 1:
        held = [name for name in names if name.endswith(".gguf")]
        what = f"{len(found)} GGUF files" if found else "no GGUF file"
        raise ConfigError(
            f"{repo!r} has {what} of {tag!r}: name one of {', '.join(found or held)}"
            if held
            else f"{repo!r} holds no GGUF file"
        )
    return found[0]
