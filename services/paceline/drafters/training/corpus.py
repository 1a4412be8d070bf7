"""A corpus for suffix decoding: what a target writes itself, as token ids, and the tokens that it brings.

Suffix decoding (Oliaro et al. 2024, 2411.04975) continues the longest end of a text that it has seen before. A target
repeats its own phrases from answer to answer, so a corpus of its answers has continuations from the first token on. It
has no weights to train, and costs the target no time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.config.methods.suffix import CORPUS_FILE
from paceline.core.processors import SamplerState
from paceline.drafters.protocol import Leaf
from paceline.drafters.suffix import SuffixDrafter
from paceline.drafters.training.features import FeatureCache
from paceline.drafters.training.options import TrainingOptions
from paceline.drafters.training.run import Progress, open_source
from paceline.types import SamplingParams

_SESSION = "replay"


@dataclass(frozen=True, slots=True)
class Replayed:
    """Held-out rounds of suffix decoding."""

    with_corpus: bool
    greedy: bool
    """The target has taken its likeliest tokens; else it has drawn them at temperature 1."""
    accepted: float
    """Mean accepted tokens of a round."""
    standard_error: float
    """Of that mean, over the choice of texts."""


@dataclass(frozen=True, slots=True)
class CorpusReport:
    """A corpus, and what it brings."""

    num_tokens: int
    """Tokens of the corpus."""
    depths: int
    """Most drafted tokens of a round."""
    replayed: list[Replayed]

    def as_json(self) -> dict[str, Any]:
        """Content of ``report.json``."""
        figures = [
            {
                "corpus": one.with_corpus,
                "temperature": 0 if one.greedy else 1,
                f"accepted_per_round_of_{self.depths}": one.accepted,
                "standard_error": one.standard_error,
            }
            for one in self.replayed
        ]
        return {"tokens": self.num_tokens, "held_out": figures}


def write_corpus(options: TrainingOptions, progress: Progress) -> CorpusReport:
    """Continues texts by a target, writes them to ``options.out`` as a corpus, and measures it on held-out texts.

    An interrupted run continues where it was. ``paceline serve`` finds the folder inside the target's or next to it.

    Raises:
        ConfigError: the target or its texts cannot be used.
    """
    source = open_source(options, progress)
    train, held_out = source.features(options, (), progress)
    texts = [token_ids for token_ids, _, _ in _rows(train)]
    options.out.mkdir(parents=True, exist_ok=True)
    _write(options.out / CORPUS_FILE, "".join(f"{json.dumps(text)}\n" for text in texts))
    _write(
        options.out / "config.json",
        json.dumps({"model_type": options.form.kind, "target_model": options.target}) + "\n",
    )
    replayed = []
    for corpus in ([], texts):
        replayed += _replay(corpus, held_out, options.form.depths)
        progress("replay", len(replayed), 4)
    report = CorpusReport(sum(map(len, texts)), options.form.depths, replayed)
    _write(options.out / "report.json", json.dumps(report.as_json(), indent=1) + "\n")
    return report


def _write(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _rows(cache: FeatureCache) -> list[tuple[list[int], int, bool]]:
    """Token ids of each row, how many of them are the prompt's, and whether the others are the target's likeliest."""
    found = []
    for number in range(cache.rows.num_rows):
        token_ids, num_prompt, num_tokens = cache.text(number)
        found.append((token_ids[:num_tokens].tolist(), num_prompt, cache.rows.temperature(number) == 0))
    return found


def _replay(corpus: Sequence[Sequence[int]], cache: FeatureCache, depths: int) -> list[Replayed]:
    """Rounds of ``depths`` drafted tokens along held-out rows, each begun where the last one ended."""
    drafter = SuffixDrafter(corpus=corpus)
    counts: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for token_ids, num_prompt, greedy in _rows(cache):
        counts[greedy].append(_rounds(drafter, token_ids, num_prompt, depths))
    replayed = []
    for greedy, found in counts.items():
        accepted, rounds = torch.tensor(found, dtype=torch.float64).reshape(-1, 2).unbind(-1)
        mean = accepted.sum() / rounds.sum().clamp(min=1)
        error = (accepted - mean * rounds).square().sum().sqrt() / rounds.sum().clamp(min=1)
        replayed.append(Replayed(bool(corpus), greedy, float(mean), float(error)))
    return replayed


def _rounds(drafter: SuffixDrafter, token_ids: Sequence[int], num_prompt: int, depths: int) -> tuple[int, int]:
    """Accepted tokens and rounds of one row."""
    prompt = tuple(token_ids[:num_prompt])
    drafter.open(_SESSION, prompt, SamplerState(SamplingParams(), 0, prompt, vocab_size=max(token_ids) + 1))
    while drafter.prefill():
        pass
    at, accepted, rounds = num_prompt, 0, 0
    while at < len(token_ids):
        path: tuple[int, ...] = ()
        while len(path) < depths:
            candidates = drafter.expand([Leaf(_SESSION, 0, (), path)])
            if not candidates.log_q[0, 0].isfinite():
                break
            path = (*path, int(candidates.token_ids[0, 0]))
        right = 0
        while right < len(path) and at + right < len(token_ids) and path[right] == token_ids[at + right]:
            right += 1
        stop = min(at + right + 1, len(token_ids))
        drafter.advance(_SESSION, token_ids[at:stop], (), ())
        at, accepted, rounds = stop, accepted + right, rounds + 1
    drafter.close(_SESSION)
    return accepted, rounds
