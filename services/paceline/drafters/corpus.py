"""The suffix and n-gram drafters of a configuration, and the files of texts that it may continue from."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence

from paceline.checkpoint.files import Checkpoint
from paceline.config import NgramOptions, SuffixMatching
from paceline.config.loading import resolve
from paceline.drafters.building import Building
from paceline.drafters.suffix import SuffixDrafter, ngram_drafter
from paceline.errors import ConfigError
from paceline.errors.files import MOST_TEXT_BYTES, read_text

log = logging.getLogger(__name__)


def suffix_drafter(options: SuffixMatching, target: Checkpoint, max_leaves: int) -> SuffixDrafter:
    """Creates a drafter without sessions, which has read its corpus.

    Args:
        options: what it matches.
        target: the checkpoint whose tokenizer encodes the corpus.
        max_leaves: the most leaves of one ``expand``.

    Raises:
        ConfigError: a file of the corpus cannot be read, or has a line that is neither text nor token ids.
    """
    return SuffixDrafter(
        max_tree_depth=options.max_tree_depth,
        min_match=options.min_match,
        max_spec_factor=options.max_spec_factor,
        min_token_prob=options.min_token_prob,
        shared_tokens=options.shared_tokens,
        corpus=read_corpus(options.corpus, target),
        max_leaves=max_leaves,
    )


def build(building: Building) -> SuffixDrafter:
    """The drafter of a configuration (``config/methods/suffix.py``). Raises as ``suffix_drafter``."""
    return suffix_drafter(building.options, building.target, building.max_leaves)


def build_ngrams(building: Building) -> SuffixDrafter:
    """The drafter of a configuration (``config/methods/ngram.py``)."""
    options: NgramOptions = building.options
    return ngram_drafter(min_match=options.min_match, max_match=options.max_match, max_leaves=building.max_leaves)


def read_corpus(paths: Sequence[str], target: Checkpoint) -> Iterator[Sequence[int]]:
    """Token ids of the texts of files: one text each, or one text or list of token ids per line of ``.jsonl``.

    Raises ConfigError for a file that cannot be read, and for a line that is neither.
    """
    for path in paths:
        started, num_tokens = time.perf_counter(), 0
        text = read_text(resolve(path), f"corpus names {path!r}", MOST_TEXT_BYTES)
        lines = text.splitlines() if path.endswith(".jsonl") else None
        for number, line in enumerate([text] if lines is None else lines, 1):
            token_ids = target.tokenizer.encode(line) if lines is None else _line(path, number, line, target)
            num_tokens += len(token_ids)
            yield token_ids
        log.info("corpus: %d tokens of %s in %.1f s", num_tokens, path, time.perf_counter() - started)


def _line(path: str, number: int, line: str, target: Checkpoint) -> Sequence[int]:
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    if isinstance(value, str):
        return target.tokenizer.encode(value)
    if isinstance(value, list) and all(type(token) is int and 0 <= token < target.vocab_size for token in value):
        return value
    raise ConfigError(
        f"corpus names {path!r}, whose line {number} is neither a JSON string nor a list of token ids in "
        f"[0, {target.vocab_size})"
    )
