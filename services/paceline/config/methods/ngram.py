"""N-grams: the tokens that followed the last few tokens earlier in the same text (prompt lookup)."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from paceline.config.engines import Growing
from paceline.config.methods.entry import Entry, PoolMethod, Row
from paceline.config.replicas import Drafts
from paceline.errors.refusals import Fault


class NgramOptions(Growing):
    """Options of the n-gram drafter, which copies continuations from earlier occurrences of the last tokens in the
    session's own context."""

    min_match: int = Field(default=1, ge=1, le=16)
    """The shortest suffix that is looked up, in tokens."""
    max_match: int = Field(default=4, ge=1, le=16)
    """The longest suffix that is looked up, in tokens; longer ones are tried first."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_match > self.max_match:
            raise Fault("min_match", f"is {self.min_match}: it must be at most max_match, which is {self.max_match}")
        return self


class NgramDraftConfig(Drafts):
    """The pool of drafts: continuations copied from the session's own context."""

    kind: Literal["ngram"] = "ngram"
    engine_kwargs: NgramOptions = NgramOptions()


_SOURCE = "prompt lookup decoding (Saxena 2023)"
POOL = PoolMethod(
    config=NgramDraftConfig,
    build="paceline.drafters.corpus:build_ngrams",
    vllm_keys={"prompt_lookup_max": "max_match", "prompt_lookup_min": "min_match"},
    host_bytes=lambda options: 0,
    acceptance={
        "chat": (0.4, "Spec-Bench: prompt lookup is 1.65 times as fast as plain decoding"),
        "edits": (
            0.91,
            "benchmarks/results/suffix.txt: files that an agent writes again, K = 8, 5.28 accepted a round",
        ),
    },
    rows=(
        Row(
            name="n-grams",
            source=_SOURCE,
            reads="",
            when="output that repeats its input: summaries, edits, extraction; no model, no training",
        ),
    ),
)
ALWAYS_ON = Entry(
    acceptance=POOL.acceptance,
    rows=(
        Row(
            name="prompt lookup",
            source=_SOURCE,
            reads="",
            when="always on with `adaptive`: it serves what the others miss, at no cost",
        ),
    ),
)
