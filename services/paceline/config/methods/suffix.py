"""Suffix decoding: what followed the longest end of the text, in this text or in others."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from paceline.config.base import Strict
from paceline.config.engines import Growing
from paceline.config.methods.entry import HeadMethod, PoolMethod, Row
from paceline.config.replicas import Drafts
from paceline.errors.refusals import Fault

CORPUS_FILE = "corpus.jsonl"
"""File of the folder that ``paceline write-corpus`` writes: a list of token ids per line."""
TOKEN_BYTES = 400
"""A token in a suffix automaton (measured on source code)."""


class SuffixMatching(Strict):
    """Options of suffix decoding: its texts, and the length of proposals after a match (Oliaro et al. 2024)."""

    max_tree_depth: int = Field(default=24, ge=1, le=256)
    """The longest match, in tokens."""
    min_match: int = Field(default=1, ge=1, le=256)
    """The shortest match, in tokens."""
    max_spec_factor: float = Field(default=4.0, gt=0, le=64)
    """Tokens that are proposed for each token of the context that matches."""
    min_token_prob: float = Field(default=0.1, ge=0, le=1)
    """The least frequency of a candidate among all that have followed the match."""
    shared_tokens: int = Field(default=0, ge=0, le=1 << 24)
    """Tokens of outputs that are kept for other sessions of the same ``cache_salt``, about 0.4 KB each. 0: none, as
    sessions then learn nothing of one another."""
    corpus: list[str] = Field(default_factory=list)
    """Text files (``.jsonl``: one text or one list of token ids per line), read at start-up. Sessions of any salt use
    them. ``paceline/smollm2-texts``: the ones in the package."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_match > self.max_tree_depth:
            depth = self.max_tree_depth
            raise Fault("min_match", f"is {self.min_match}: it must be at most max_tree_depth, which is {depth}")
        return self

    @property
    def shared_bytes(self) -> int:
        """Bytes of the outputs that are kept for other sessions."""
        return TOKEN_BYTES * self.shared_tokens


class SuffixOptions(Growing, SuffixMatching):
    """Options of the suffix drafter. It continues the longest suffix of the text that occurred before: in the session's
    context, in outputs of other sessions, or in a corpus."""


class SuffixDraftConfig(Drafts):
    """The pool of drafts: continuations of the longest end of the text that has occurred before."""

    kind: Literal["suffix"] = "suffix"
    engine_kwargs: SuffixOptions = SuffixOptions()


_SOURCE = "suffix decoding (2411.04975)"
POOL = PoolMethod(
    config=SuffixDraftConfig,
    build="paceline.drafters.corpus:build",
    vllm_keys={f"suffix_decoding_{key}": key for key in ("max_tree_depth", "max_spec_factor", "min_token_prob")},
    host_bytes=lambda options: options.shared_bytes,
    acceptance={
        "chat": (0.4, "Spec-Bench: prompt lookup is 1.65 times as fast as plain decoding"),
        "edits": (
            0.97,
            "benchmarks/results/suffix.txt: files that an agent writes again, K = 8, 6.96 accepted a round",
        ),
    },
    rows=(
        Row(
            name="suffixes",
            source=_SOURCE,
            reads="",
            when="agents that write long passages again, within a session or across sessions (`shared_tokens`, "
            "`corpus`)",
        ),
    ),
)
HEAD = HeadMethod(
    method="suffix",
    model="none",
    published=("suffix",),
    probed=False,
    open="",
    load="paceline.target.mount:load_suffix",
    memory="paceline.preflight.heads:size_of_suffixes",
    examine="paceline.drafters.available:needs_nothing",
    acceptance=POOL.acceptance,
    rows=(
        Row(
            name="suffixes, in the target",
            source=_SOURCE,
            reads="",
            when="the same texts without a draft pool, or with a draft, for tokens that it misses",
        ),
    ),
)
