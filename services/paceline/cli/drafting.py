"""The default way of drafting: a head published for the target that is on this machine, else suffix decoding. Heads are
looked for in the model's files, inside and next to its directory, and by the ids in its card."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.folder import read_json
from paceline.checkpoint.mtp import mtp_modules, weight_names
from paceline.checkpoint.size import size_of
from paceline.config import EMBEDDED_TARGET, HeadOptions
from paceline.config.loading import PACKAGED, place_of, resolve
from paceline.config.methods import HEADS
from paceline.config.methods.suffix import CORPUS_FILE, SuffixMatching
from paceline.errors import ConfigError
from paceline.logs import narrate

_OTHERS = "name a draft model with --draft for more"
_METHODS = sorted(
    ((part, method) for method, entry in HEADS.items() for part in entry.published), key=lambda one: -len(one[0])
)
"""Parts of names and the method of heads that each names, the longest first: ``eagle`` is in ``eagle3``."""
_MOST_IDS = 64
"""Ids of a card that are looked up in the cache."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Heads of a target that has no draft, and the line that says how it drafts."""

    heads: list[HeadOptions]
    line: str


def is_embedded(target: str | None) -> bool:
    """True for the embedded target, which has a draft of its own."""
    return target is None or resolve(target) == resolve(EMBEDDED_TARGET)


def choose(target: str, trust_remote_code: bool = False) -> Chosen:
    """Returns the best available method to draft for a target.

    Raises ConfigError for a path that holds no model, or one whose code may not run (``trust_remote_code``).
    """
    checkpoint = Checkpoint.find(target, trust_remote_code)
    if checkpoint is not None and checkpoint.folder is not None:
        size = size_of(checkpoint.config, 0, 1)
        num = len(mtp_modules(weight_names(checkpoint.folder), checkpoint.config, size.num_layers))
        if num and size.mtp_values is not None:
            modules = "MTP module" if num == 1 else "MTP modules"
            return Chosen([], f"drafting by the {num} {modules} in the model's files, and by prompt lookup; {_OTHERS}")
        head = _published(checkpoint, target) or _packaged(target)
        if head is not None and head.suffix is not None:
            (corpus,) = head.suffix.corpus
            return Chosen([head], f"drafting by suffix decoding, with the model's own texts in {corpus}; {_OTHERS}")
        if head is not None:
            return Chosen(
                [head], f"drafting by the {head.method} head in {head.model}, and by prompt lookup; {_OTHERS}"
            )
    return Chosen([HeadOptions(method="suffix")], f"drafting by suffix decoding and prompt lookup; {_OTHERS}")


def method_of(folder: Path) -> str | None:
    """The method of the head in a directory, by its configuration and files; None: it holds no head."""
    config = read_json(folder, "config.json")
    named = [config.get("speculators_model_type"), *(config.get("architectures") or ()), config.get("model_type")]
    named += [key for key in ("dflash_config", "medusa_num_heads") if key in config]
    names = (str(name).lower() for name in (*named, folder.name))
    method = next((method for name in names for part, method in _METHODS if part in name), None)
    if method == "eagle3" and "mask_hidden" in weight_names(folder):
        return "peagle"
    if method == "dflash" and "markov_rank" in config:
        return "dspark"
    keys = {**config, **(config.get("dflash_config") or {})}
    return "jetspec" if method == "dflash" and (keys.get("causal") or keys.get("causal_head")) else method


def _published(target: Checkpoint, source: str) -> HeadOptions | None:
    """The first head on this machine that was published for a target and fits it."""
    for folder in _candidates(target, source):
        if (method := method_of(folder)) is None:
            continue
        try:
            return _fitting(method, folder, target)
        except ConfigError as error:
            narrate(f"paceline: the {method} head in {folder} is left out: {error}")
    return None


def _packaged(target: str) -> HeadOptions | None:
    """Suffix decoding with the texts that this package has of a model; None: it has none."""
    texts = next((one.texts for one in PACKAGED.values() if one.file == place_of(target)), None)
    return None if texts is None else HeadOptions(method="suffix", suffix=SuffixMatching(corpus=[texts]))


def _fitting(method: str, folder: Path, target: Checkpoint) -> HeadOptions:
    """The head in a folder. Raises ConfigError if it does not fit the target."""
    if method == "suffix":
        from paceline.drafters.corpus import read_corpus

        corpus = [str(folder / CORPUS_FILE)]
        for _ in read_corpus(corpus, target):
            pass
        return HeadOptions(method="suffix", suffix=SuffixMatching(corpus=corpus))
    from paceline.drafters.heads.load import open_head  # torch, only where there is a head

    open_head(method, str(folder), target)
    values: dict[str, Any] = {"method": method, "model": str(folder), "probe": False}  # the target serves without it
    return HeadOptions(**values)


def _candidates(target: Checkpoint, source: str) -> Iterator[Path]:
    """Directories that may hold a head of a target: inside its own, next to it with its name, and of its card's ids."""
    assert target.folder is not None
    path = Path(source).expanduser()
    folder = path.resolve() if path.exists() else target.folder
    folder = folder.parent if folder.is_file() else folder  # of a GGUF file
    yield from _folders(folder)
    if path.exists():
        name = folder.name.lower()
        yield from (one for one in _folders(folder.parent) if one != folder and _names(one, name))
    yield from _of_card(folder)


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(one for one in folder.iterdir() if one.is_dir() and (one / "config.json").is_file())
    except OSError:  # it may not be read
        return []


def _names(head: Path, name: str) -> bool:
    """True if a head says that it is for a target: by its directory's name, or by what its configuration names."""
    config = read_json(head, "config.json")
    verifier = ((config.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
    named = (head.name, verifier, config.get("base_model_name_or_path"), config.get("target_model"))
    return any(name in str(one).lower() for one in named)


def _of_card(folder: Path) -> Iterator[Path]:
    """Directories of the Hugging Face cache that a model's card or configuration names by their ids."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    texts = []
    for name in ("README.md", "config.json"):
        try:
            texts.append((folder / name).read_text(encoding="utf-8", errors="replace"))
        except OSError:  # there is none
            continue
    ids = dict.fromkeys(re.findall(r"(?<![\w./-])[\w-][\w.-]*/[\w-][\w.-]*\w", "\n".join(texts)))
    for repository in [*ids][:_MOST_IDS]:
        try:
            found = try_to_load_from_cache(repository, "config.json")
        except HFValidationError:  # no id
            continue
        if isinstance(found, str):
            yield Path(found).parent
