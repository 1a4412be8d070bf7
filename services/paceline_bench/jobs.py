"""Requests that a benchmark sends, and what it gets for them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

from paceline.errors import EngineError
from paceline.local import LocalPipeline
from paceline.types import Acceptance, Chunk, Mode, Result, Round, SamplingParams, SpeculationParams
from paceline_bench.prompts import Prompt
from paceline_bench.records import RequestRecord, RoundRecord

TimedChunks = list[tuple[Chunk, float]]
"""Chunks of a request and the seconds after which the client saw them."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request."""

    prompt: Prompt
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer to one request. Times are in seconds since it was submitted, or since all of its unit were."""

    token_ids: tuple[int, ...]
    rounds: tuple[RoundRecord, ...]
    prefill_s: float
    decode_s: float
    cached_tokens: int = 0
    """Prompt tokens whose KV was cached already."""
    num_counted: int | None = None
    """Number of tokens, as counted by a server that does not send their ids."""

    @classmethod
    def timed_by_rounds(
        cls,
        token_ids: tuple[int, ...],
        rounds: tuple[RoundRecord, ...],
        cached_tokens: int = 0,
        num_counted: int | None = None,
    ) -> Self:
        """A reply whose prefill ends with its first round and whose decoding ends with the last."""
        first_s, last_s = (rounds[0].at_s, rounds[-1].at_s) if rounds else (0.0, 0.0)
        return cls(token_ids, rounds, first_s, last_s - first_s, cached_tokens, num_counted)

    @classmethod
    def of_result(cls, result: Result, chunks: TimedChunks) -> Self:
        """Reply of one of our pipelines or services."""
        return cls.timed_by_rounds(result.token_ids, _rounds(chunks), result.usage.cached_tokens)

    def to_record(self, blank: RequestRecord, prompt: Prompt) -> RequestRecord:
        """Fills in a record of the method that answered."""
        return replace(
            blank,
            prompt=prompt.source,
            prompt_tokens=len(prompt.token_ids),
            category=prompt.category,
            token_ids=self.token_ids,
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
            rounds=self.rounds,
            num_counted=self.num_counted,
        )


def _rounds(chunks: TimedChunks) -> tuple[RoundRecord, ...]:
    return tuple(
        RoundRecord(one.num_drafted, one.num_accepted, num_tokens, one.cause.value, at, _producer(one))
        for chunk, at in chunks
        for one, num_tokens in zip(chunk.rounds, chunk.tokens_by_round(), strict=True)
    )


def _producer(round_: Round) -> str:
    if round_.num_drafted == 0:
        return ""
    return "head" if round_.head else "lookup" if round_.lookup else "draft"


def speculation(mode: Mode, draft_tokens: int, acceptance: Acceptance) -> SpeculationParams:
    """Parameters with ``draft_tokens`` as K, which plain mode ignores."""
    return SpeculationParams(mode=mode, acceptance=acceptance, max_draft_tokens=draft_tokens)


def run_jobs(
    pipeline: LocalPipeline, jobs: Sequence[Job], params: SpeculationParams, cache_salt: str = ""
) -> list[Reply]:
    """Runs all jobs concurrently; times of rounds are since all were submitted. ``cache_salt``: prompts are in the
    prefix cache only if one of the same salt was there.

    Raises:
        EngineError, InvalidRequestError: the pipeline failed or refused a job.
    """
    started = time.perf_counter()
    runs = []
    for job in jobs:
        generation = pipeline.submit(job.prompt.token_ids, job.sampling, params, cache_salt=cache_salt)
        chunks: TimedChunks = []

        def collect(generation: Iterator[Chunk], chunks: TimedChunks) -> None:
            with contextlib.suppress(EngineError):  # ``result`` raises it
                for chunk in generation:
                    chunks.append((chunk, time.perf_counter() - started))

        reader = threading.Thread(target=collect, args=(generation, chunks), daemon=True)
        reader.start()
        runs.append((generation, chunks, reader))
    replies = []
    for generation, chunks, reader in runs:
        result = generation.result
        reader.join()
        replies.append(Reply(result.token_ids, _rounds(chunks), result.timing.prefill_s, result.timing.decode_s))
    return replies
