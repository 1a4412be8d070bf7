"""Metrics of a router: one method per event."""

from __future__ import annotations

from prometheus_client import Counter

from paceline.errors import (
    ConfigError,
    DeadlineExceededError,
    EngineError,
    PoisonRequestError,
    RanksLostError,
    RequestCancelledError,
    ResourceExhaustedError,
    RouterStoppedError,
)
from paceline.metrics.catalogue import (
    ACCEPTED_PER_POS,
    ACCEPTED_TOKENS,
    ADMISSION_REJECTIONS,
    AHEAD,
    DRAFT_LINK,
    DRAFT_TOKENS,
    DRAFTS,
    DRAFTS_UP,
    DROPPED,
    E2E,
    FAILED,
    GENERATION_TOKENS,
    INTER_TOKEN,
    MOVED,
    PREFIX_HITS,
    PREFIX_QUERIES,
    PROMPT_TOKENS,
    PROMPT_TOKENS_BY_SOURCE,
    PROMPT_TOKENS_CACHED,
    QUEUE,
    REJECTED,
    REOPENED,
    REQUEST_DECODE,
    REQUEST_GENERATION_TOKENS,
    REQUEST_INFERENCE,
    REQUEST_MAX_GENERATION,
    REQUEST_MAX_TOKENS,
    REQUEST_PER_TOKEN,
    REQUEST_PREFILL,
    REQUEST_PREFILL_COMPUTED,
    REQUEST_PROMPT_TOKENS,
    REQUEST_QUEUE,
    REQUEST_SUCCESS,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    ROUNDS,
    SESSIONS,
    TOKENS_PER_VERIFICATION,
    TTFT,
    WAITING_BY_REASON,
)
from paceline.metrics.registry import Registry
from paceline.types import Cause, FinishReason, Result, Round

_CAUSES_WITH_OUTCOME = frozenset({Cause.HIT, Cause.TOKEN, Cause.K, Cause.LATE, Cause.DRAFT_DOWN})

_FROM_THE_START = {
    MOVED: ("failover", "drain"),
    REOPENED: ("opened",),
    REJECTED: ("queue_full",),
    DROPPED: ("relay", "unknown", "states"),
    FAILED: tuple(
        error.__name__
        for error in (
            ConfigError,
            ResourceExhaustedError,
            DeadlineExceededError,
            RequestCancelledError,
            EngineError,
            PoisonRequestError,
            RanksLostError,
            RouterStoppedError,
        )
    ),
}
"""Counters that show 0 before their first event, by the labels that the router gives them."""


class RouterMetrics:
    """Metrics of a router: one method per event. Calls take microseconds; no call is made per token."""

    def __init__(self, registry: Registry, model_name: str) -> None:
        self.registry = registry
        """Holds them."""
        self._model = model_name
        self._drafts = registry.counter(DRAFTS, model_name)
        self._draft_tokens = registry.counter(DRAFT_TOKENS, model_name)
        self._accepted_tokens = registry.counter(ACCEPTED_TOKENS, model_name)
        self._accepted_per_pos: list[Counter] = []  # as long as the longest proposal so far
        self._rounds = {cause: registry.counter(ROUNDS, cause.value) for cause in Cause}
        self._tokens = registry.histogram(TOKENS_PER_VERIFICATION)
        self._ahead = registry.histogram(AHEAD)
        self._generated = registry.counter(GENERATION_TOKENS, model_name)
        self._gap = registry.histogram(INTER_TOKEN, model_name)
        self._queue = registry.histogram(QUEUE)
        self._request_queue = registry.histogram(REQUEST_QUEUE, model_name)
        self._ttft = registry.histogram(TTFT, model_name)
        self._e2e = registry.histogram(E2E, model_name)
        self._prompt_tokens = registry.counter(PROMPT_TOKENS, model_name)
        self._prefill = registry.histogram(REQUEST_PREFILL, model_name)
        self._decode = registry.histogram(REQUEST_DECODE, model_name)
        self._inference = registry.histogram(REQUEST_INFERENCE, model_name)
        self._per_token = registry.histogram(REQUEST_PER_TOKEN, model_name)
        self._request_prompt = registry.histogram(REQUEST_PROMPT_TOKENS, model_name)
        self._request_generation = registry.histogram(REQUEST_GENERATION_TOKENS, model_name)
        self._max_generation = registry.histogram(REQUEST_MAX_GENERATION, model_name)
        self._max_tokens = registry.histogram(REQUEST_MAX_TOKENS, model_name)
        self._computed = registry.counter(PROMPT_TOKENS_BY_SOURCE, model_name, "local_compute")
        self._held = registry.counter(PROMPT_TOKENS_BY_SOURCE, model_name, "local_cache_hit")
        self._cached = registry.counter(PROMPT_TOKENS_CACHED, model_name)
        self._request_computed = registry.histogram(REQUEST_PREFILL_COMPUTED, model_name)
        self._prefix_queries = registry.counter(PREFIX_QUERIES, model_name)
        self._prefix_hits = registry.counter(PREFIX_HITS, model_name)
        reasons = (*(reason.value for reason in FinishReason), "error")
        self._ended = {reason: registry.counter(REQUEST_SUCCESS, model_name, reason) for reason in reasons}
        self._link = registry.histogram(DRAFT_LINK)
        self._running = registry.gauge(REQUESTS_RUNNING, model_name)
        self._waiting = registry.gauge(REQUESTS_WAITING, model_name)
        self._queue_full = registry.counter(ADMISSION_REJECTIONS, model_name, "max_num_queued_reqs")
        self._capacity = registry.gauge(WAITING_BY_REASON, model_name, "capacity")
        self._deferred = registry.gauge(WAITING_BY_REASON, model_name, "deferred")
        self._sessions = {state: registry.gauge(SESSIONS, state) for state in ("waiting", "running", "homeless")}
        self._drafts_up = registry.gauge(DRAFTS_UP)
        for metric, labels in _FROM_THE_START.items():
            for label in labels:
                registry.counter(metric, label)

    def admitted(self, queue_s: float) -> None:
        """A request leaves the queue, ``queue_s`` seconds after it arrived."""
        self._queue.observe(queue_s)
        self._request_queue.observe(queue_s)

    def first_token(self, ttft_s: float) -> None:
        """A request's first token, ``ttft_s`` seconds after it arrived."""
        self._ttft.observe(ttft_s)

    def round(self, stats: Round, num_tokens: int, gap_s: float | None) -> None:
        """One round that emitted ``num_tokens``, ``gap_s`` seconds after the round before; None: it was the first."""
        num_drafted, num_accepted, cause = stats.num_drafted, stats.num_accepted, stats.cause
        if num_drafted:
            self._drafts.inc()
            self._draft_tokens.inc(num_drafted)
            per_pos = self._accepted_per_pos
            while len(per_pos) < num_drafted:
                per_pos.append(self.registry.counter(ACCEPTED_PER_POS, self._model, str(len(per_pos))))
            if num_accepted:
                self._accepted_tokens.inc(num_accepted)
                for counter in per_pos[:num_accepted]:
                    counter.inc()
        self._rounds[cause].inc()
        self._generated.inc(num_tokens)
        self._tokens.observe(num_tokens)
        if cause in _CAUSES_WITH_OUTCOME:
            self._ahead.observe(num_drafted if cause is Cause.HIT else 0)
        if gap_s is not None:
            self._gap.observe(gap_s)

    def finished(self, result: Result, max_tokens: int) -> None:
        """A session has its result; ``max_tokens`` is the most that it could have emitted."""
        timing, usage = result.timing, result.usage
        self._ended[result.finish_reason.value].inc()
        self._prompt_tokens.inc(usage.prompt_tokens)
        num_computed = usage.prompt_tokens - usage.cached_tokens
        self._computed.inc(num_computed)
        self._request_computed.observe(num_computed)
        self._held.inc(usage.cached_tokens)
        self._cached.inc(usage.cached_tokens)
        self._prefix_queries.inc(usage.prompt_tokens)
        self._prefix_hits.inc(usage.cached_tokens)
        self._request_prompt.observe(usage.prompt_tokens)
        self._request_generation.observe(usage.completion_tokens)
        self._max_generation.observe(usage.completion_tokens)
        self._max_tokens.observe(max_tokens)
        self._prefill.observe(timing.prefill_s)
        self._decode.observe(timing.decode_s)
        self._inference.observe(timing.prefill_s + timing.decode_s)
        if usage.completion_tokens > 1:
            self._per_token.observe(timing.decode_s / (usage.completion_tokens - 1))
        self._e2e.observe(timing.queue_s + timing.prefill_s + timing.decode_s)

    def failed(self, reason: str) -> None:
        """An admitted request ended in an error; ``reason`` is one of few, such as the name of its status code."""
        self._ended["error"].inc()
        self.registry.counter(FAILED, reason).inc()

    def rejected(self, reason: str) -> None:
        """A request was refused before it became a session; ``reason`` is one of few."""
        self.registry.counter(REJECTED, reason).inc()
        if reason == "queue_full":
            self._queue_full.inc()

    def dropped(self, kind: str, count: int = 1) -> None:
        """``count`` messages of a kind were stale or malformed, and dropped."""
        self.registry.counter(DROPPED, kind).inc(count)

    def moved(self, reason: str) -> None:
        """A session continues on another target: ``failover`` or ``drain``."""
        self.registry.counter(MOVED, reason).inc()

    def draft_reopened(self, reason: str) -> None:
        """A session was re-opened on a draft."""
        self.registry.counter(REOPENED, reason).inc()

    def sessions(self, waiting: int, running: int, homeless: int) -> None:
        """Sets the number of sessions in each state."""
        self._sessions["waiting"].set(waiting)
        self._sessions["running"].set(running)
        self._sessions["homeless"].set(homeless)
        self._running.set(running)
        self._waiting.set(waiting + homeless)
        self._capacity.set(waiting)
        self._deferred.set(homeless)

    def draft_link(self, latency_s: float) -> None:
        """A measured latency of the link to a draft, in seconds."""
        self._link.observe(latency_s)

    def draft_replicas(self, num_up: int) -> None:
        """Sets the number of drafts that this router has a working link to."""
        self._drafts_up.set(num_up)
