"""What can be known of a checkpoint without loading its weights. Raises ConfigError in one clear sentence."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError

_DEFAULT_MAX_MODEL_LEN = 2048


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A causal language model that exists."""

    path: str
    max_model_len: int
    """Longest context that it was trained for, in tokens."""
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    """Rows of the output layer: token ids are below it."""


def require_path(path: str) -> None:
    """Raises ConfigError if ``path`` looks like a local directory and is none, or holds no config.json."""
    directory = Path(path).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise ConfigError(f"{path!r} holds no config.json: a directory with a transformers checkpoint is needed")
    elif directory.exists():
        raise ConfigError(f"{path!r} is a file: the directory of a transformers checkpoint is needed")
    elif path.startswith(("/", "./", "../", "~")) or path.count("/") > 1:
        raise ConfigError(f"model path {path!r} does not exist")


def inspect_checkpoint(path: str) -> Checkpoint:
    """Reads configuration and generation configuration. Raises ConfigError if it is no causal LM."""
    from transformers import AutoConfig, GenerationConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    require_path(path)
    try:
        config = AutoConfig.from_pretrained(path)
    except Exception as error:  # transformers raises whatever its parsers raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"model {path!r} could not be resolved: {reason}") from error
    known: set[str] = set()
    for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        known.update([names] if isinstance(names, str) else names)
    architectures = list(getattr(config, "architectures", None) or [])
    causal = (
        any(name in known for name in architectures)
        if architectures
        else config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )
    if not causal:
        raise ConfigError(
            f"model {path!r} is no causal language model: its architecture is "
            f"{', '.join(architectures) or config.model_type}"
        )
    text_config = config.get_text_config()
    try:
        eos = GenerationConfig.from_pretrained(path).eos_token_id
    except Exception:  # optional file
        eos = None
    if eos is None:
        eos = getattr(text_config, "eos_token_id", None)
    return Checkpoint(
        path=path,
        max_model_len=int(getattr(text_config, "max_position_embeddings", None) or _DEFAULT_MAX_MODEL_LEN),
        eos_token_ids=_as_ids(eos),
        vocab_size=int(text_config.vocab_size),
    )


def _as_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return (int(value),) if isinstance(value, int) else tuple(int(i) for i in value)
