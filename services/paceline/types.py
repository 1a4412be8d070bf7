"""The values that a client sees: what it asks for, what it gets, what a service says of itself.

Plain data: no tensors, no Ray, no protobuf. What routers and replicas say to each other is in ``messages.py``.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from paceline.errors import InvalidRequestError

MAX_DRAFT_TOKENS = 16
"""The longest proposal that the service accepts (K)."""

MAX_TOKENS = 2**31
"""Counts and token ids of requests are below it."""
MAX_LOGIT_BIAS = 1e4
MAX_SEED = 2**64 - 1

TokenId = Annotated[int, Field(ge=0, lt=MAX_TOKENS)]


class Mode(enum.StrEnum):
    """How a session uses its draft."""

    PLAIN = "plain"
    """No draft: one token per target step."""
    SEQUENTIAL = "sequential"
    """Draft, verify, wait, draft: classic speculative decoding."""
    OVERLAPPED = "overlapped"
    """Draft the continuations of likely outcomes while the target verifies."""


class Acceptance(enum.StrEnum):
    """The rule by which the target accepts draft tokens. Both are greedy matching at temperature 0."""

    COUPLED = "coupled"
    """Draft and target share position-keyed noise: accept what the target itself would have sampled."""
    REJECTION = "rejection"
    """Leviathan et al. 2211.17192: accept with min(1, p/q), recover from norm(max(p - q, 0))."""


class FinishReason(enum.StrEnum):
    """Why a session ended."""

    STOP = "stop"
    """An end-of-sequence token, a stop token id or a stop string."""
    LENGTH = "length"
    """max_tokens or the model's context length."""
    ABORT = "abort"
    """Cancelled by the client."""


class Cause(enum.StrEnum):
    """Where the proposal of a round came from, or why there was none."""

    HIT = "hit"
    """The tree already held a continuation of the last outcome when its step ended."""
    TOKEN = "token"
    """Miss: the draft had grown below this position, but not this next token."""
    K = "k"
    """Miss: the position that was cut at had not been grown at all."""
    LATE = "late"
    """Miss: the continuation arrived after the target had to decide."""
    DRAFT_DOWN = "draft_down"
    """Miss: no draft serves the session now."""
    DISABLED = "disabled"
    """Plain decoding by request, mode or controller."""
    SEQUENTIAL = "sequential"
    """Drafted after the last outcome, as sequential mode does: neither hit nor miss."""
    START = "start"
    """The first round: its context is the prompt, there was no outcome to hit."""


MISSES = (Cause.TOKEN, Cause.K, Cause.LATE, Cause.DRAFT_DOWN)
"""Causes of rounds that found no continuation of the previous outcome."""


class _Params(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class SamplingParams(_Params):
    """How the next token is chosen from the target's logits. Validation errors name the field and the range.

    The processors run in the order of the fields (``sampling.py`` states each formula).
    """

    logit_bias: dict[TokenId, float] = Field(default_factory=dict)
    """Added to the logits of these token ids; -inf forbids one."""
    bad_words: tuple[tuple[TokenId, ...], ...] = ()
    """Token id sequences whose last token is forbidden wherever the others precede it."""
    min_tokens: int = Field(default=0, ge=0, lt=MAX_TOKENS)
    """End-of-sequence and stop token ids are forbidden before this many emitted tokens."""
    repetition_penalty: float = Field(default=1.0, gt=0, le=100, allow_inf_nan=False)
    """Divides the positive logits of tokens of prompt and output, and multiplies the negative ones; 1 is off."""
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Subtracted from the logits of tokens that the output has."""
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Subtracted from the logits of tokens once for each time that the output has them."""
    temperature: float = Field(default=0.0, ge=0, le=100, allow_inf_nan=False)
    """0 is greedy: the argmax."""
    top_k: int = Field(default=0, ge=0, lt=MAX_TOKENS)
    """0 keeps every token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Keeps the fewest most likely tokens whose probabilities reach this sum; 1 keeps every token."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Keeps tokens of at least this share of the largest probability; 0 keeps every token."""

    max_tokens: int = Field(default=128, ge=1, lt=MAX_TOKENS)
    """The output ends after so many tokens."""
    stop_token_ids: tuple[TokenId, ...] = ()
    """The output ends with the first of these."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token."""
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    """64-bit key of the session's noise; drawn at random by the session if absent."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}: at most max_tokens ({self.max_tokens}) is allowed")
        for words in self.bad_words:
            if not words:
                raise ValueError("bad_words holds an empty sequence: each needs at least one token id")
        for token_id, bias in self.logit_bias.items():
            if not bias <= MAX_LOGIT_BIAS or -math.inf < bias < -MAX_LOGIT_BIAS:
                allowed = f"at most {MAX_LOGIT_BIAS:g} either way, or -inf, is allowed"
                raise ValueError(f"logit_bias[{token_id}] is {bias}: {allowed}")
        return self

    def check_seed(self) -> None:
        """Raises InvalidRequestError if the seed is out of range, as that of a copy may be: pydantic checks none."""
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise InvalidRequestError(f"seed is {self.seed}: at least 0 and at most {MAX_SEED} is allowed")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises InvalidRequestError if a token id that is named is not below ``vocab_size``."""
        named = {"logit_bias": self.logit_bias, "stop_token_ids": self.stop_token_ids}
        for field_name, token_ids in [*named.items(), *(("bad_words", words) for words in self.bad_words)]:
            if max(token_ids, default=0) >= vocab_size:
                allowed = f"ids in [0, {vocab_size}) are allowed"
                raise InvalidRequestError(f"{field_name} holds token id {max(token_ids)}: {allowed}")


class SpeculationParams(_Params):
    """How one session speculates."""

    mode: Mode = Mode.OVERLAPPED
    """How the draft is used: not at all, in turn with the target, or while the target verifies."""
    acceptance: Acceptance = Acceptance.COUPLED
    """The rule by which the target accepts draft tokens."""
    max_draft_tokens: int = Field(default=8, ge=0, le=MAX_DRAFT_TOKENS)
    """K, the longest proposal."""
    growth: Literal["best_first", "uniform", "geometric"] = "best_first"
    """How the draft spends its tree budget (``draft/growth.py``)."""
    saguaro: float = Field(default=1.0, gt=0, le=1)
    """Rejection rule only: q of the predicted next tokens is scaled by this before sampling; 1 is off."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asks for."""

    request_id: str
    prompt: str | tuple[int, ...] = field(repr=False)
    """Text, or token ids."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    stop: tuple[str, ...] = ()
    """The text ends before the first of these."""


@dataclass(frozen=True, slots=True)
class Round:
    """What one target step did for one session."""

    num_drafted: int
    num_accepted: int
    cause: Cause
    """How this round's proposal came about."""


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """What a replica says of itself: first on every stream, then with every heartbeat."""

    replica_id: str
    kind: str
    """``target``, ``draft`` or ``router``."""
    incarnation: int
    """Grows when the replica's process is started anew."""
    num_sessions: int
    """Open sessions, waiting ones included."""
    num_waiting: int
    max_sessions: int
    """How many it serves at once without queueing."""
    kv_pages_used: int = 0
    kv_pages: int = 0
    busy_s: float = 0.0
    """Seconds since the step in progress began; 0 between steps. A value that only grows is an engine that hangs."""
    pid: int = 0
    node: str = ""
    model: str = ""
    draining: bool = False
    busy_share: float = 0.0
    """Share of the last seconds that an engine was inside steps, as the monitor has measured it; 0 elsewhere."""
    counters: Mapping[str, float] = field(default_factory=dict)
    """Counted events since the replica started."""
    controller: str = ""
    """What its controller has chosen now, and why, in words."""
    measures: Mapping[str, float] = field(default_factory=dict)
    """What that rests on: gauges by name, a label after a colon (``target/explanation.py``)."""


@dataclass(frozen=True, slots=True)
class RouterView:
    """What a router sees of the service, beside its own status."""

    members: Mapping[str, tuple[str, ...]]
    """``target`` or ``draft`` -> ids of the replicas that take sessions."""
    speculating: int
    """Running sessions that may have a draft, by what was asked for."""
    drafting: int
    """Of these, those that have one, or whose target wants one for them."""


@dataclass(frozen=True, slots=True)
class Startup:
    """What a replica that is not ready yet is doing."""

    replica_id: str
    kind: str
    node: str
    doing: str
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class PoolScaling:
    """How the size of a pool is decided, and what was decided last."""

    name: str
    """``target``, ``draft`` or ``router``."""
    wanted: int | None
    """Replicas that there shall be. None: nothing is decided yet, and the pool keeps its size."""
    actual: int
    """Replicas that take sessions now."""
    least: int
    most: int
    demand: float | None
    """Replicas that the load needs now. None: not known, so nothing is changed."""
    signal: str
    """What that demand goes by."""
    reason: str
    """Of the last change."""
    changed_s: float | None
    """Since the last change. None: there was none."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is served, and what a request may ask for."""

    model_id: str
    draft_model_id: str | None
    """None: no draft, every session is plain."""
    tokenizer_fingerprint: str
    """Of the vocabulary and merges, by content."""
    vocab_size: int
    max_context_length: int
    """Prompt and completion together."""
    eos_token_ids: tuple[int, ...]
    dtype: str
    modes: tuple[str, ...]
    acceptances: tuple[str, ...]
    max_draft_tokens: int


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The state of a service; events are counted since its start."""

    version: str
    uptime_s: float
    pools: Mapping[str, tuple[ReplicaStatus, ...]]
    """``target``, ``draft`` or ``router`` -> the newest status of each replica that reports now."""
    sessions_running: int
    sessions_queued: int
    acceptance_rate: float
    """Accepted over drafted tokens; 0 before any was drafted."""
    acceptance_length: float
    """Tokens per round that verified a draft token, the next token included: 1 + accepted / rounds; 1 before any."""
    hit_rate: float
    """Hits over hits and misses; 0 before any."""
    sessions_speculating: int = 0
    """Running sessions that may have a draft, by what was asked for."""
    sessions_drafting: int = 0
    """Of these, those that have one, or whose target wants one for them."""
    scaling: tuple[PoolScaling, ...] = ()
    """Of the pools whose sizes the service decides itself."""
    starting: tuple[Startup, ...] = ()
    """Replicas on their way up."""


@dataclass(slots=True)
class SpeculationStats:
    """Counted events of one session; rates are derived, never stored."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    causes: dict[Cause, int] = field(default_factory=dict)
    acceptance_histogram: dict[int, int] = field(default_factory=dict)
    """Rounds with a proposal, by how many of its tokens were accepted."""

    def add(self, round_: Round) -> None:
        """Counts one round."""
        self.rounds += 1
        self.drafted += round_.num_drafted
        self.accepted += round_.num_accepted
        self.causes[round_.cause] = self.causes.get(round_.cause, 0) + 1
        if round_.num_drafted:
            histogram = self.acceptance_histogram
            histogram[round_.num_accepted] = histogram.get(round_.num_accepted, 0) + 1

    @property
    def hits(self) -> int:
        """Rounds whose proposal was there when the previous step ended."""
        return self.causes.get(Cause.HIT, 0)

    @property
    def misses(self) -> int:
        """Rounds that found no continuation of the previous outcome."""
        return sum(self.causes.get(cause, 0) for cause in MISSES)


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one round adds for the client."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    drafted: tuple[bool, ...]
    """Of each token: whether it was an accepted draft token."""
    segments: tuple[tuple[str, bool], ...]
    """Decided text with the flag of the token that decided it; may lag behind the tokens."""
    round: Round | None
    """None: text that was withheld and is released by the end of the session."""
    usage: Usage | None = None
    """Token counts so far, this chunk included; a client's chunks have none."""

    @property
    def text(self) -> str:
        """All segments in order."""
        return "".join(text for text, _ in self.segments)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a session."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one session, by the session's clock."""

    prefill_s: float
    """From open to the first token."""
    decode_s: float
    """From the first to the last outcome."""
    tokens_per_s: float
    """Tokens after the first outcome per second of decode_s; 0.0 if there were none."""
    queue_s: float = 0.0
    """Before it was opened, as its owner says."""


@dataclass(frozen=True, slots=True)
class Result:
    """A finished session."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    usage: Usage
    speculation: SpeculationStats
    timing: Timing
    seed: int
    matched_stop: int | str | None = None
    """What ended it: the stop or end-of-sequence token id, or the stop string. None unless it was one of these."""


class Generation(Protocol):
    """A request in progress: iterate over its chunks, then read ``result``. One consumer.

    A service's ``client.Stream`` and the local pipeline's generation are two of them.
    """

    def __iter__(self) -> Iterator[Chunk]: ...

    @property
    def result(self) -> Result:
        """The finished request, waiting for it. Raises the PacelineError that it failed with."""

    def cancel(self) -> None:
        """Ends the request now; what has arrived is its result, finish_reason ``abort``."""


PAGE_SIZE = 64
"""KV rows per page; also the key tile of the batch-invariant shapes (``model/shapes.py``)."""


def pages_for(num_rows: int) -> int:
    """Pages that hold ``num_rows`` KV rows."""
    return -(-num_rows // PAGE_SIZE)


START_TIMEOUT_S = 900.0
"""Longest time from the first rank that is up to the last one."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks of one replica meet, and which of them this is. Several replicas of a host do not collide."""

    store: str
    """``file:PATH`` on one host, or ``tcp:HOST:PORT`` of a store that listens already."""
    degree: int
    rank: int = 0
    timeout_s: float = 10.0
    """How much later than another a rank may come to an exchange before it counts as hung."""
    start_timeout_s: float = START_TIMEOUT_S

    def of(self, rank: int) -> Self:
        """The same place for another rank."""
        return replace(self, rank=rank)
