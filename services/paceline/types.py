"""Public values: requests, results and the state of a service, as clients see them.

Plain data: no tensors, no Ray, no protobuf. The messages between routers and replicas are in ``messages.py``.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import json
import logging
import math
import struct
from collections import abc
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from operator import attrgetter, index
from typing import Annotated, Any, Literal, NamedTuple, Protocol, Self, TypedDict, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from paceline.errors import InvalidRequestError, PromptTooLongError
from paceline.errors.refusals import explain_parameter

MAX_DRAFT_TOKENS = 32
"""Longest proposal that the service accepts (K)."""

MAX_TOKENS = 2**31
"""Exclusive upper bound of the counts and token ids in a request."""
MAX_LOGIT_BIAS = 1e4
"""Largest finite logit bias, either way."""
MAX_SEED = 2**64 - 1
"""Largest seed: seeds are 64-bit keys."""
MAX_SALT_LEN = 256
"""Most characters of a ``cache_salt``."""
MAX_REQUEST_ID_LEN = 256
"""Most characters of a request id."""
MAX_STRUCTURED_OUTPUT_BYTES = 65536
"""Most bytes of a schema, a regular expression, a grammar, or of all choices together. Within this bound the slowest
form compiles in a fifth of a second."""

TokenId = Annotated[int, Field(ge=0, lt=MAX_TOKENS)]


class Mode(enum.StrEnum):
    """Way in which a session uses its draft."""

    PLAIN = "plain"
    """Plain decoding without a draft: one token per target step."""
    SEQUENTIAL = "sequential"
    """Classic speculative decoding: draft, verify, wait, draft."""
    OVERLAPPED = "overlapped"
    """The draft grows continuations of likely outcomes while the target verifies."""


class Acceptance(enum.StrEnum):
    """Rule by which the target accepts draft tokens. At temperature 0 both are greedy matching."""

    COUPLED = "coupled"
    """Coupled sampling: draft and target share position-keyed noise, and the token that the target samples decides."""
    REJECTION = "rejection"
    """Rejection sampling (Leviathan et al. 2211.17192): accept with min(1, p/q), recover from norm(max(p - q, 0))."""


class SeedScope(enum.StrEnum):
    """Requests that a seed gives the same noise."""

    PROMPT = "prompt"
    """Requests of the same prompt: the key of the noise is a digest of seed and prompt. So samples of different prompts
    are independent even with one seed."""
    GLOBAL = "global"
    """All requests: the key of the noise is the seed itself. Prompts of one length draw by the same noise then."""


MAX_TOP_LOGPROBS = 20
"""Most likeliest tokens that can be reported for the place of a token."""
MAX_LOGPROB_TOKEN_IDS = 128
"""Maximum tokens that a request can list for their log probabilities at each position."""
TopLogprobs = tuple[tuple[int, float], ...]
"""Likeliest tokens of one position with their log probabilities, ties by id, without forbidden tokens. Or the token
itself and the tokens that the request lists, in its order."""


class TokenLogprob(NamedTuple):
    """Log probability of a token of a prompt, by the target's own distribution: its logits before any processor."""

    logprob: float
    rank: int
    """Place of the token among all, the likeliest first, from 1; equal ones by their ids."""
    top: TopLogprobs = ()
    """Likeliest tokens at its position, in the requested number."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of tokens of a prompt that follow one another."""

    position: int
    """Index of the first of these tokens in the prompt; at least 1, since nothing precedes the first of the prompt."""
    tokens: tuple[TokenLogprob, ...]

    def after(self, position: int) -> PromptLogprobs | None:
        """Returns the part from ``position`` on; None if that is empty."""
        skipped = max(0, position - self.position)
        rest = self.tokens[skipped:]
        return PromptLogprobs(self.position + skipped, rest) if rest else None


class LogprobsMode(enum.StrEnum):
    """Distribution that the log probabilities of emitted tokens are taken from."""

    RAW = "raw_logprobs"
    """The target's own: its logits before any processor, at temperature 1."""
    PROCESSED = "processed_logprobs"
    """The one that tokens are drawn from: after all processors, the temperature included."""


def noise_key(seed: int, scope: SeedScope, prompt_token_ids: Sequence[int]) -> int:
    """Returns the 64-bit key of a session's noise.

    Computed once, where the session begins, and sent to every engine that serves it, so that target, draft and
    their replacements share the noise. Tokens decided since do not count: a migrated session keeps its key.

    Args:
        seed: in ``[0, 2**64)``.
        prompt_token_ids: the request's original prompt, each in ``[0, 2**32)``.
    """
    if scope is SeedScope.GLOBAL:
        return seed
    content = struct.pack(f"<Q{len(prompt_token_ids)}I", seed, *prompt_token_ids)
    return int.from_bytes(hashlib.blake2b(content, digest_size=8, person=b"paceline-noise").digest(), "little")


class FinishReason(enum.StrEnum):
    """Reason why a session ended."""

    STOP = "stop"
    """An end-of-sequence token, a stop token id or a stop string."""
    LENGTH = "length"
    """``max_tokens`` or the model's context length was reached."""
    ABORT = "abort"
    """The client cancelled the request."""


class Cause(enum.StrEnum):
    """Origin of a round's proposal, or the reason why there was none."""

    HIT = "hit"
    """Hit: the tree already held a continuation of the last outcome when its step ended."""
    TOKEN = "token"
    """Miss: the draft had grown at this position, but not with this next token."""
    K = "k"
    """Miss: the draft had not grown at all at the position where the proposal was cut."""
    LATE = "late"
    """Miss: the continuation arrived after the target had to decide."""
    DRAFT_DOWN = "draft_down"
    """Miss: no draft serves the session now."""
    DISABLED = "disabled"
    """Drafting is off, by the request, its mode or the controller, or no draft is configured."""
    SEQUENTIAL = "sequential"
    """Neither hit nor miss: drafted after the last outcome, as sequential mode does."""
    START = "start"
    """First round: its context is the prompt, there was no outcome to hit."""


MISSES = (Cause.TOKEN, Cause.K, Cause.LATE, Cause.DRAFT_DOWN)
"""Causes of rounds that found no continuation of the previous outcome."""


class _Params(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class _RequestParams(_Params):
    @field_validator("*", mode="before")
    @classmethod
    def _no_bool(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuses true and false where neither is meant: pydantic would take them for 1 and 0."""
        name = info.field_name or ""
        held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        wrong = next((item for item in held if isinstance(item, bool)), None)
        if wrong is None or _takes_bool(cls.model_fields[name].annotation):
            return value
        verb = "is" if wrong is value else "holds"
        raise ValueError(f"{name} {verb} {str(wrong).lower()}: neither true nor false is allowed")


def _takes_bool(annotation: Any) -> bool:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return True  # its own fields are checked
    return annotation in (bool, Any) or any(map(_takes_bool, get_args(annotation)))


class StructuredOutput(_RequestParams):
    """Form that the whole output must have; exactly one field is given.

    The tokens that it does not allow are forbidden, and the end-of-sequence tokens until the output may end. An output
    that ``max_tokens``, a stop string or a stop token id cuts short is the beginning of one of this form.
    """

    json_schema: str | None = None
    """A JSON value that this JSON Schema allows; text, or a mapping that is written as JSON."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """Text that this regular expression matches as a whole (Rust's syntax: no look-around, no backreferences)."""
    grammar: str | None = None
    """Text that this context-free grammar derives: GBNF, whose first rule is ``root``, or Lark, with ``start``."""
    choice: tuple[str, ...] = ()
    """One of these texts."""
    structural_tag: str | None = None
    """Text with tagged parts, such as tool calls, by a structural tag of xgrammar or vLLM; its JSON text, or a mapping
    that is written as JSON."""

    @field_validator("json_schema", "structural_tag", mode="before")
    @classmethod
    def _as_json(cls, value: Any, info: ValidationInfo) -> Any:
        try:
            return json.dumps(value) if isinstance(value, Mapping) else value
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{info.field_name} cannot be written as JSON: {error}") from None

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [name for name in type(self).model_fields if getattr(self, name) not in (None, False, ())]
        if len(given) != 1:
            held = " and ".join(given) if given else "nothing"
            allowed = "exactly one of json_schema, json_object, regex, grammar, choice and structural_tag is allowed"
            raise ValueError(f"structured_output holds {held}: {allowed}")
        texts = self.choice if self.choice else (self.text,)
        for i, text in enumerate(texts):
            if not text:
                name = f"choice[{i}]" if self.choice else self.kind
                raise ValueError(f"structured_output.{name} is '': at least one character is needed")
        try:
            size = sum(len(text.encode()) for text in texts)
        except UnicodeEncodeError as error:
            raise ValueError(f"structured_output is not valid Unicode: {error.reason} at {error.start}") from None
        if size > MAX_STRUCTURED_OUTPUT_BYTES:
            allowed = f"at most {MAX_STRUCTURED_OUTPUT_BYTES} are allowed"
            raise ValueError(f"structured_output.{self.kind} has {size} bytes: {allowed}")
        return self

    @property
    def kind(self) -> str:
        """Name of the field that is given."""
        return next(name for name in type(self).model_fields if getattr(self, name) not in (None, False, ()))

    @property
    def text(self) -> str:
        """The schema, expression, grammar or tag; of choices their JSON list, of any object its schema."""
        if self.json_object:
            return '{"type": "object"}'
        given = self.json_schema or self.regex or self.grammar or self.structural_tag or ""
        return json.dumps(self.choice) if self.choice else given


class SamplingParams(_RequestParams):
    """Choice of the next token from the target's logits. Validation errors name the field and the range.

    The processors run in the order of the fields (``core/processors.py`` states each formula).
    """

    structured_output: StructuredOutput | None = None
    """Forbids the tokens with which the output would not have this form."""
    allowed_token_ids: tuple[TokenId, ...] | None = None
    """Forbids all other tokens, including the ones that end the text; None allows every token."""
    logit_bias: dict[TokenId, float] = Field(default_factory=dict)
    """Added to the logits of these token ids; -inf forbids one."""
    bad_words: tuple[tuple[TokenId, ...], ...] = ()
    """Token id sequences whose last token is forbidden wherever the others precede it."""
    min_tokens: int = Field(default=0, ge=0, lt=MAX_TOKENS)
    """End-of-sequence and stop token ids are forbidden before this many emitted tokens, and a stop string that these
    complete does not end the text."""
    repetition_penalty: float = Field(default=1.0, gt=0, le=100, allow_inf_nan=False)
    """Divides the positive logits of tokens of prompt and output, and multiplies the negative ones; 1 is off."""
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Subtracted from the logits of tokens that the output has."""
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Subtracted from the logits of tokens once for each time that the output has them."""
    temperature: float = Field(default=0.0, ge=0, le=100, allow_inf_nan=False)
    """Divisor of the logits; 0 is greedy: the argmax."""
    top_k: int = Field(default=0, ge=0, lt=MAX_TOKENS)
    """Number of most likely tokens that are kept; 0 keeps every token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Keeps the fewest most likely tokens whose probabilities reach this sum; 1 keeps every token."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Keeps tokens of at least this share of the largest probability; 0 keeps every token."""

    max_tokens: int = Field(default=128, ge=0, lt=MAX_TOKENS)
    """Maximum output tokens; 0 is allowed only with ``prompt_logprobs``. The default is lowered to the rest of the
    context after the prompt."""
    stop_token_ids: tuple[TokenId, ...] = ()
    """The output ends with the first of these."""
    include_stop_str_in_output: bool = False
    """The text ends with the stop string or token that ends it, not before."""
    skip_special_tokens: bool = True
    """Special tokens have no text. False: the text shows them, but for one that ends it."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token."""
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    """64-bit key of the session's noise, drawn at random if absent. The same seed, prompt and parameters give the same
    tokens, except under the rejection rule at temperatures above 0, whose tokens also depend on which draft tokens
    arrive in time."""
    seed_scope: SeedScope = SeedScope.PROMPT
    """Which requests with equal seeds share noise: of the same prompt, or all."""
    logprobs_mode: LogprobsMode = LogprobsMode.PROCESSED
    """Log probabilities before or after the processors, which change no token either way."""
    top_logprobs: int = Field(default=0, ge=0, le=MAX_TOP_LOGPROBS)
    """Likeliest tokens, with their log probabilities, that are reported for the place of each token; 0: none."""
    logprob_token_ids: tuple[TokenId, ...] = Field(default=(), max_length=MAX_LOGPROB_TOKEN_IDS)
    """Tokens whose log probabilities are reported at each position, after the token's own; they replace the likeliest
    ones."""

    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    """Number of likeliest tokens to report at each position of the prompt, with their log probabilities and the prompt
    token's own. They are always the target's raw ones; ``logprobs_mode`` does not apply. None: the prompt has no log
    probabilities."""

    @property
    def _shows_prompt(self) -> bool:
        """True if the answer tells something of the prompt, so that it may have no token."""
        return self.prompt_logprobs is not None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.max_tokens and not self._shows_prompt:
            raise ValueError("max_tokens is 0 and prompt_logprobs is absent: without it at least 1 is allowed")
        if not self.max_tokens and self.logprob_token_ids:
            raise ValueError("max_tokens is 0 and logprob_token_ids is given: with it at least 1 is allowed")
        if self.min_tokens > self.max_tokens and "max_tokens" in self.model_fields_set:  # else see ``with_defaults``
            raise ValueError(f"min_tokens is {self.min_tokens}: at most max_tokens ({self.max_tokens}) is allowed")
        if self.structured_output is not None and self.ignore_eos:
            allowed = "with structured_output, which an end-of-sequence token ends, only false is allowed"
            raise ValueError(f"ignore_eos is true: {allowed}")
        if self.allowed_token_ids == ():
            raise ValueError("allowed_token_ids is empty: at least one token id is needed")
        for words in self.bad_words:
            if not words:
                raise ValueError("bad_words holds an empty sequence: each needs at least one token id")
        for token_id, bias in self.logit_bias.items():
            if not bias <= MAX_LOGIT_BIAS or -math.inf < bias < -MAX_LOGIT_BIAS:
                allowed = f"at most {MAX_LOGIT_BIAS:g} either way, or -inf, is allowed"
                raise ValueError(f"logit_bias[{token_id}] is {bias}: {allowed}")
        return self

    def with_defaults(self, defaults: SamplingParams) -> Self:
        """Returns these parameters; values set in ``defaults`` fill the ones that are not set here.

        ``model_fields_set`` still names the client's fields.

        Raises:
            InvalidRequestError: ``min_tokens`` exceeds the ``max_tokens`` of the defaults.
        """
        added = {name: getattr(defaults, name) for name in defaults.model_fields_set - self.model_fields_set}
        params = self.model_copy(update=added)
        params.__pydantic_fields_set__ = set(self.model_fields_set)
        if params.min_tokens > params.max_tokens:
            allowed = f"at most max_tokens ({params.max_tokens}, by default) is allowed"
            raise InvalidRequestError(f"min_tokens is {params.min_tokens}: {allowed}")
        return params

    def bound(self, form: StructuredOutput) -> Self:
        """These parameters with the form of the output. Raises InvalidRequestError for ``ignore_eos``."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        try:
            return type(self)(**given | {"structured_output": form})
        except ValidationError as error:
            raise InvalidRequestError(explain_parameter(error, type(self))) from error

    def check_seed(self) -> None:
        """Raises InvalidRequestError if the seed is out of range, which pydantic does not check in a copy."""
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise InvalidRequestError(f"seed is {self.seed}: at least 0 and at most {MAX_SEED} is allowed")

    def fitted(self, num_prompt_tokens: int, room: int, what: str = "fit the model's context") -> Self:
        """These parameters with a ``max_tokens`` that ``room`` tokens of prompt and completion leave.

        A ``max_tokens`` that was given stays as it is; the default is lowered. ``what`` names the room.

        Raises:
            PromptTooLongError: prompt and ``max_tokens``, or prompt and ``min_tokens``, do not fit.
            InvalidRequestError: ``logprob_token_ids`` asks for more numbers than ``top_logprobs`` could.
        """
        left = room - num_prompt_tokens
        num_listed, most = len(self.logprob_token_ids), MAX_TOP_LOGPROBS * room
        if num_listed * min(self.max_tokens, left) > most:
            held = f"logprob_token_ids holds {num_listed} ids and max_tokens is {min(self.max_tokens, left)}"
            raise InvalidRequestError(f"{held}: their product may be at most {most}")
        if self.max_tokens <= left:
            return self
        together = f"together at most {room} {what}"
        if "max_tokens" in self.model_fields_set or left < 1:
            given = f"max_tokens is {self.max_tokens}"
            raise PromptTooLongError(f"the prompt has {num_prompt_tokens} tokens and {given}: {together}")
        if self.min_tokens > left:
            given = f"min_tokens is {self.min_tokens}"
            raise PromptTooLongError(f"the prompt has {num_prompt_tokens} tokens and {given}: {together}")
        return self.model_copy(update={"max_tokens": left})

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises InvalidRequestError if a field holds a token id outside [0, vocab_size)."""
        named: dict[str, Collection[int]] = {
            "allowed_token_ids": self.allowed_token_ids or (),
            "logit_bias": self.logit_bias,
            "stop_token_ids": self.stop_token_ids,
            "logprob_token_ids": self.logprob_token_ids,
        }
        for field_name, token_ids in [*named.items(), *(("bad_words", words) for words in self.bad_words)]:
            if max(token_ids, default=0) >= vocab_size:
                allowed = f"ids in [0, {vocab_size}) are allowed"
                raise InvalidRequestError(f"{field_name} holds token id {max(token_ids)}: {allowed}")

    def check_choice(self, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """Raises InvalidRequestError if the fields forbid each of ``vocab_size`` tokens as the first one."""
        ends = {*self.stop_token_ids, *(() if self.ignore_eos else eos_token_ids)}
        forbidden: dict[str, Collection[int]] = {
            "logit_bias": {token_id for token_id, bias in self.logit_bias.items() if bias == -math.inf},
            "bad_words": {words[0] for words in self.bad_words if len(words) == 1},
            "min_tokens": ends if self.min_tokens else (),
        }
        allowed = None if self.allowed_token_ids is None else {*self.allowed_token_ids}
        num = vocab_size if allowed is None else len(allowed)
        if sum(map(len, forbidden.values())) < num:
            return
        ids = set().union(*forbidden.values())
        if len(ids if allowed is None else ids & allowed) >= num:
            given = {"allowed_token_ids": allowed, **forbidden}
            names = " and ".join(name for name, held in given.items() if held)
            raise InvalidRequestError(f"{names} forbid every token: at least one of {vocab_size} must be allowed")


class SamplingFields(TypedDict, total=False):
    """Fields of SamplingParams as keyword arguments, for a type checker: each is described there."""

    structured_output: StructuredOutput | None
    allowed_token_ids: Sequence[int] | None
    logit_bias: Mapping[int, float]
    bad_words: Sequence[Sequence[int]]
    min_tokens: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    max_tokens: int
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    ignore_eos: bool
    seed: int | None
    seed_scope: SeedScope | Literal["prompt", "global"]
    logprobs_mode: LogprobsMode | Literal["raw_logprobs", "processed_logprobs"]
    top_logprobs: int
    logprob_token_ids: Sequence[int]
    prompt_logprobs: int | None


def as_sampling(sampling: SamplingParams | None, fields: SamplingFields) -> SamplingParams:
    """Sampling parameters from either form. Raises InvalidRequestError if both are given, or a field is wrong."""
    if sampling is not None and fields:
        raise InvalidRequestError(f"sampling is given, and so is {', '.join(fields)}: give one or the other")
    try:
        return sampling or SamplingParams.model_validate(fields)
    except ValidationError as error:
        raise InvalidRequestError(explain_parameter(error, SamplingParams)) from error


class RequestLimits(_Params, strict=True):
    """Bounds of one request; one with more is refused with INVALID_ARGUMENT before anything is done for it.

    The length of prompts is bounded by the model's context, in bytes before a text is tokenized.
    """

    max_stop_strings: int = Field(default=64, ge=0)
    """Stop strings."""
    max_stop_chars: int = Field(default=1024, ge=1)
    """Characters of one stop string."""
    max_stop_token_ids: int = Field(default=1024, ge=0)
    """Stop token ids."""
    max_bad_words: int = Field(default=1024, ge=0)
    """Sequences of ``bad_words``."""
    max_bad_words_tokens: int = Field(default=8192, ge=0)
    """Token ids of all sequences of ``bad_words`` together."""
    max_logit_bias: int = Field(default=1024, ge=0)
    """Entries of ``logit_bias``."""
    max_allowed_token_ids: int = Field(default=1024, ge=1)
    """Token ids of ``allowed_token_ids``."""

    def check(
        self,
        *,
        stop: Sequence[str],
        stop_token_ids: Sized,
        bad_words: Sized,
        bad_words_sizes: Iterable[int],
        logit_bias: Sized,
        allowed_token_ids: Sized,
        where: str = "",
    ) -> None:
        """Raises InvalidRequestError for a list that is too long. Nothing is read from the lists before that.

        ``bad_words_sizes``: token ids of each sequence. ``where``: put before the names of the fields.
        """
        held = {
            "stop": (len(stop), "strings", self.max_stop_strings),
            "stop_token_ids": (len(stop_token_ids), "ids", self.max_stop_token_ids),
            "bad_words": (len(bad_words), "sequences", self.max_bad_words),
            "logit_bias": (len(logit_bias), "entries", self.max_logit_bias),
            "allowed_token_ids": (len(allowed_token_ids), "ids", self.max_allowed_token_ids),
        }
        for name, (count, what, limit) in held.items():
            if count > limit:
                raise InvalidRequestError(f"{where}{name} has {count} {what}: at most {limit} are allowed")
        if (count := sum(bad_words_sizes)) > (limit := self.max_bad_words_tokens):
            raise InvalidRequestError(f"{where}bad_words has {count} token ids: at most {limit} are allowed")
        for i, text in enumerate(stop):
            if (count := len(text)) > (limit := self.max_stop_chars):
                raise InvalidRequestError(f"{where}stop[{i}] has {count} characters: at most {limit} are allowed")


@functools.cache
def warn_of_growth() -> None:
    """Logs once that requests name ``growth``."""
    logging.getLogger(__name__).warning("speculation.growth has no effect: drafts grow best first. Leave it out.")


class SpeculationParams(_RequestParams):
    """Speculation of one session."""

    mode: Mode = Mode.OVERLAPPED
    """Use of the draft: not at all, in turn with the target, or while the target verifies."""
    acceptance: Acceptance = Acceptance.COUPLED
    """The rule by which the target accepts draft tokens."""
    max_draft_tokens: int = Field(default=8, ge=0, le=MAX_DRAFT_TOKENS)
    """Longest proposal (K), in tokens from its first to its last; alternatives do not count. 0 is plain
    decoding."""
    saguaro: float = Field(default=1.0, gt=0, le=1)
    """Rejection rule only: q of the predicted next tokens is scaled by this before sampling; 1 is off."""

    @model_validator(mode="before")
    @classmethod
    def _drop_growth(cls, values: Any) -> Any:
        """Clients of earlier versions name the ``growth`` of trees, which changes no text. It is always best first."""
        if isinstance(values, Mapping) and values.get("growth") in ("best_first", "uniform", "geometric"):
            warn_of_growth()
            return {name: value for name, value in values.items() if name != "growth"}
        return values


def speculation_arguments(fields: Mapping[str, Any], enabled: bool | None) -> dict[str, Any]:
    """Arguments of SpeculationParams; ``enabled``, the switch of requests, selects the mode.

    Raises InvalidRequestError if both are given and contradict each other.
    """
    arguments = dict(fields)
    mode = arguments.get("mode")
    if enabled and mode == Mode.PLAIN:
        raise InvalidRequestError(
            "speculation.enabled is true and speculation.mode is 'plain': with true the mode must be 'sequential' or"
            " 'overlapped', or absent"
        )
    if enabled is False:
        if mode not in (None, Mode.PLAIN):
            raise InvalidRequestError(
                f"speculation.enabled is false and speculation.mode is '{mode}': with false the mode must be 'plain' or"
                " absent"
            )
        arguments["mode"] = Mode.PLAIN
    return arguments


def as_prompt(prompt: Any) -> str | tuple[int, ...]:
    """A prompt as a request holds it: text, or the token ids of any sequence of whole numbers.

    Raises InvalidRequestError for bytes and any other type.
    """
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, bytes | bytearray | memoryview):
        raise InvalidRequestError("the prompt is bytes: text or a sequence of token ids is allowed")
    try:
        return tuple(map(index, prompt))
    except TypeError as error:
        raise InvalidRequestError(f"the prompt is neither text nor a sequence of token ids: {error}") from error


def as_stop_strings(stop: Any) -> tuple[str, ...]:
    """Stop strings as a request holds them: one text is one stop string, None is none.

    Raises InvalidRequestError for an empty text and for any other type than text or a sequence of texts.
    """
    if stop is None:
        return ()
    if isinstance(stop, str):
        stop = (stop,)
    elif isinstance(stop, bytes | bytearray | memoryview) or not isinstance(stop, Iterable):
        raise InvalidRequestError(f"stop is {stop!r}: text or a sequence of texts is allowed")
    strings = tuple(stop)
    for i, string in enumerate(strings):
        if not isinstance(string, str) or not string:
            raise InvalidRequestError(f"stop[{i}] is {string!r}: text of at least one character is allowed")
    return strings


def check_request_id(request_id: str) -> None:
    """Raises InvalidRequestError for an id that is too long."""
    if (size := len(request_id)) > MAX_REQUEST_ID_LEN:
        raise InvalidRequestError(f"request_id has {size} characters: at most {MAX_REQUEST_ID_LEN} are allowed")


def request_key(request_id: str, owner: str) -> str:
    """Identifies a request among those in progress: requests of different API keys may have the same id."""
    return f"{owner}\0{request_id}" if owner else request_id  # the name of a key holds no NUL


@dataclass(frozen=True, slots=True)
class Request:
    """A client's request."""

    request_id: str
    """Unique among the requests of its ``owner`` that are in progress."""
    prompt: str | tuple[int, ...] = field(repr=False)
    """Prompt as text or as token ids."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    stop: tuple[str, ...] = ()
    """Stop strings: the text ends before the first of these."""
    generated_token_ids: tuple[int, ...] = field(default=(), repr=False)
    """Output tokens of a stream of this request that broke: the answer goes on after them. Needs a seed."""
    cache_salt: str = field(default="", repr=False)
    """Cached prompts and texts that drafts learn from are shared with requests of the same salt only."""
    owner: str = ""
    """Name of the API key of the caller; empty while the service has no keys."""
    share: str = ""
    """Requests of one share, of an API key or of a body, have one fair part of the places together."""
    trace: bool = False
    """Chunks hold the times and the tree of their round. Over HTTP only."""
    trace_headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """The caller's ``traceparent`` and ``tracestate`` (W3C Trace Context), where requests leave traces."""

    @property
    def key(self) -> str:
        """Identifies the request among those in progress."""
        return request_key(self.request_id, self.owner)

    def of(self, owner: str, *, shares_cache: bool = False) -> Self:
        """Returns this request as one of an API key. Its salt holds the key's name, unless ``shares_cache``."""
        salt = self.cache_salt if shares_cache or not owner else salt_of(owner, self.cache_salt)
        return replace(self, owner=owner, cache_salt=salt, share=owner or self.share)


def salt_of(owner: str, salt: str) -> str:
    """Returns the salt of a key's requests. No salt that another key can send has the same value."""
    named = f"{owner}\0{salt}".encode()  # no two pairs have the same bytes: the name of a key holds no NUL
    return hashlib.blake2b(named, digest_size=16, person=b"api key").hexdigest()


@dataclass(frozen=True, slots=True)
class Round:
    """Effect of one target step on one session."""

    num_drafted: int
    """Tokens of the proposal, which were verified."""
    num_accepted: int
    """Tokens of the proposal that were accepted."""
    cause: Cause
    """Origin of the round's proposal, or the reason why the draft had none."""
    lookup_drafted: int = 0
    """Tokens of the proposal that the target looked up in the session's own text: all or none."""
    lookup_accepted: int = 0
    """Accepted tokens that were looked up."""
    head_drafted: int = 0
    """Tokens of the proposal that a head of the target made: all or none."""
    head_accepted: int = 0
    """Accepted tokens of a head."""

    @property
    def lookup(self) -> bool:
        """True if the target looked the proposal up in the session's own text."""
        return self.lookup_drafted > 0

    @property
    def head(self) -> bool:
        """True if a head of the target made the proposal."""
        return self.head_drafted > 0

    def first(self, num_tokens: int) -> Round:
        """The round if its client gets only the first ``num_tokens`` tokens: the others do not count as accepted."""
        if self.num_accepted <= num_tokens:
            return self
        lookup = min(self.lookup_accepted, num_tokens)
        head = min(self.head_accepted, num_tokens - lookup)
        return replace(self, num_accepted=num_tokens, lookup_accepted=lookup, head_accepted=head)


Execution = Literal["eager", "compiling", "compiled", "failed", ""]
"""How a model runs on a CPU: ``compiling`` is eagerly until its compilation ends, ``failed`` eagerly because that
failed; empty: on another device, or no model."""

BatchInvariant = Literal["yes", "no", "untested", ""]
"""Verdict on a target: if it gave the same bits for verification and for decoding when it started; empty: not known,
or no target."""


def restored(self: Any, state: Sequence[Any]) -> None:
    """``__setstate__`` of a dataclass whose new fields come last, for states pickled by another version: missing fields
    get their defaults, and unknown ones are dropped."""
    own: tuple[Any, ...] = fields(self)
    for each, value in zip(own, state, strict=False):
        object.__setattr__(self, each.name, value)
    for each in own[len(state) :]:
        value = each.default if each.default_factory is MISSING else each.default_factory()
        object.__setattr__(self, each.name, value)


PROTOCOL_VERSION = 2
"""Version of what routers and replicas say to each other (``rpc/protocol.py``)."""
UNSTATED_PROTOCOL = 1
"""Version of the protocol that peers speak which state none."""


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """Status of a replica, sent first on every stream and then with every heartbeat."""

    __setstate__ = restored

    replica_id: str
    kind: str
    """Kind of the replica: ``target``, ``draft`` or ``router``."""
    incarnation: int
    """Number that grows when the replica's process is restarted."""
    num_sessions: int
    """Open sessions, waiting ones included."""
    num_waiting: int
    """Open sessions that wait for room."""
    max_sessions: int
    """Number of sessions that the replica serves at once without queueing."""
    kv_pages_used: int = 0
    """KV pages that sessions hold."""
    kv_pages: int = 0
    """KV pages of the replica's cache; 0 if it has none."""
    busy_s: float = 0.0
    """Seconds since the step in progress began; 0 between steps. A value that only grows is an engine that hangs."""
    pid: int = 0
    """Process id on its node."""
    node: str = ""
    """Address of the node."""
    model: str = ""
    """Model that the replica runs or serves."""
    draining: bool = False
    """True while the replica takes no new sessions."""
    busy_share: float = 0.0
    """Share of the last seconds that the engine spent in steps, measured by the monitor; 0 elsewhere."""
    counters: Mapping[str, float] = field(default_factory=dict)
    """Counted events since the replica started."""
    controller: str = ""
    """Current choice of the target's controller and its reason, in words; of a draft, its drafter and its figures."""
    measures: Mapping[str, float] = field(default_factory=dict)
    """Measurements that the controller's choice uses: gauges by name, with a label after a colon."""
    batch_invariant: str = ""
    """Result of a target's self-test: ``yes``, ``no`` or ``untested``; empty: not known, or no target."""
    execution: str = ""
    """How the replica's model runs on a CPU: ``eager``, ``compiling`` (eagerly until its compilation in the background
    ends), ``compiled`` or ``failed`` (eagerly, as it could not be compiled); empty: on another device, or no model."""
    version: str = ""
    """Version of Paceline that the process runs; empty: one that does not say."""
    protocol: int = UNSTATED_PROTOCOL
    """Version of the protocol between routers and replicas that it speaks."""
    numerics: str = ""
    """Digest of what decides the bits of a target's logits: versions, device, kernels, options; empty: not known."""


@dataclass(frozen=True, slots=True)
class RouterView:
    """State of the service as one router sees it."""

    __setstate__ = restored

    members: Mapping[str, tuple[str, ...]]
    """Pool name (``target`` or ``draft``) -> ids of the replicas that take sessions."""
    speculating: int
    """Running sessions whose requests ask for speculation."""
    drafting: int
    """Speculating sessions that have a draft, or whose target wants one for them."""


@dataclass(frozen=True, slots=True)
class Startup:
    """Progress of a replica that is starting."""

    __setstate__ = restored

    replica_id: str
    kind: str
    """Kind of the replica: ``target``, ``draft`` or ``router``."""
    node: str
    doing: str
    """Current stage of the start, in words."""
    elapsed_s: float
    """Seconds since that stage began."""


@dataclass(frozen=True, slots=True)
class PoolScaling:
    """Size of a pool, and the latest decision about it."""

    __setstate__ = restored

    name: str
    """Name of the pool: ``target``, ``draft`` or ``router``."""
    wanted: int | None
    """Number of replicas that the pool should have. None: not decided yet, so it keeps its size."""
    actual: int
    """Number of replicas that take sessions now."""
    least: int
    """Fewest replicas that the pool may have."""
    most: int
    """Most replicas that the pool may have."""
    demand: float | None
    """Number of replicas that the load needs now. None: unknown, so the size does not change."""
    signal: str
    """Signal from which the demand is computed."""
    reason: str
    """Reason for the last change."""
    changed_s: float | None
    """Seconds since the last change. None: there was none."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model that a service serves, and the choices that a request has."""

    model_id: str
    draft_model_id: str | None
    """Model of the draft. None: there is no draft, every session is plain."""
    tokenizer_fingerprint: str
    """Hash of the tokenizer's vocabulary and merges."""
    vocab_size: int
    max_context_length: int
    """Most tokens of prompt and completion together."""
    eos_token_ids: tuple[int, ...]
    """Token ids that end a completion unless ``ignore_eos`` is set."""
    dtype: str
    """Data type of the target's weights and activations."""
    modes: tuple[str, ...]
    """Values of ``Mode`` that a request may use."""
    acceptances: tuple[str, ...]
    """Values of ``Acceptance`` that a request may use."""
    max_draft_tokens: int
    """Longest proposal that a request may ask for; 0 without a draft."""
    batch_invariant: str = ""
    """Verdict on the targets: if all gave the same bits for verification and for decoding when they started: ``yes``,
    ``no`` or ``untested``; empty while none is up. Without ``yes`` tokens may differ from plain decoding's at
    near-ties."""
    default_sampling: SamplingParams = field(default_factory=SamplingParams)
    """Values of the sampling parameters that a request omits: from the checkpoint's generation_config.json, unless the
    service is configured to ignore it, and the documented defaults."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The state of a service; events are counted since its start."""

    __setstate__ = restored

    version: str
    uptime_s: float
    pools: Mapping[str, tuple[ReplicaStatus, ...]]
    """Pool name (``target``, ``draft`` or ``router``) -> latest status of each replica that reports now."""
    sessions_running: int
    sessions_queued: int
    acceptance_rate: float
    """Accepted tokens over drafted tokens; 0 before any was drafted."""
    acceptance_length: float
    """Mean tokens of the rounds that verified a draft token, the next token included; 1 before any."""
    hit_rate: float
    """Hits over hits and misses; 0 before any."""
    sessions_speculating: int = 0
    """Running sessions whose requests ask for speculation."""
    sessions_drafting: int = 0
    """Speculating sessions that have a draft, or whose target wants one for them."""
    scaling: tuple[PoolScaling, ...] = ()
    """Scaling of the pools whose sizes the service decides itself."""
    starting: tuple[Startup, ...] = ()
    """Replicas that are starting."""
    serve_silent_s: float = 0.0
    """Seconds for which Ray Serve's controller, which replaces and scales replicas, has not answered; 0: it does."""

    def as_json(self) -> dict[str, Any]:
        """Plain data, field by field."""
        plain = replace(
            self,
            pools={
                kind: tuple(replace(one, counters=dict(one.counters), measures=dict(one.measures)) for one in statuses)
                for kind, statuses in self.pools.items()
            },
        )
        return asdict(plain)


_COUNTS = (
    *("rounds", "hits", "misses", "drafted", "accepted"),
    *("lookup_drafted", "lookup_accepted", "head_drafted", "head_accepted"),
)
_counts_of = attrgetter(*_COUNTS)


@dataclass(slots=True)
class SpeculationStats:
    """Counted events of one session; rates are derived, never stored."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    causes: dict[Cause, int] = field(default_factory=dict)
    """Rounds by the cause of their proposal."""
    acceptance_histogram: dict[int, int] = field(default_factory=dict)
    """Rounds with a proposal, by the number of its tokens that were accepted."""
    lookup_drafted: int = 0
    """The part of ``drafted`` that was looked up in the session's own text."""
    lookup_accepted: int = 0
    """The part of ``accepted`` that was looked up in the session's own text."""
    head_drafted: int = 0
    """The part of ``drafted`` that heads of the target made."""
    head_accepted: int = 0
    """The part of ``accepted`` that heads of the target made."""

    def counts(self) -> dict[str, int]:
        """Numbers of rounds and of tokens, by name."""
        return dict(zip(_COUNTS, _counts_of(self), strict=True))

    def add(self, round_: Round) -> None:
        """Counts one round."""
        self.rounds += 1
        self.drafted += round_.num_drafted
        self.accepted += round_.num_accepted
        self.lookup_drafted += round_.lookup_drafted
        self.lookup_accepted += round_.lookup_accepted
        self.head_drafted += round_.head_drafted
        self.head_accepted += round_.head_accepted
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

    @property
    def hit_rate(self) -> float | None:
        """Hits over hits and misses; None: no draft has served the session."""
        outcomes = self.hits + self.misses
        return self.hits / outcomes if outcomes > self.causes.get(Cause.DRAFT_DOWN, 0) else None


@dataclass(frozen=True, slots=True)
class TracedNode:
    """One token of a speculation tree, as a client sees it."""

    node_id: int
    """Unique until a draft is opened again, and larger than ``parent_id``."""
    parent_id: int
    """Node that this token follows; 0 is the last token of the context that the draft was opened with."""
    token_id: int
    text: str
    """Text of this token alone."""
    prob: float
    """Calibrated probability that the target's text takes this token, given that it reaches the parent."""


@dataclass(frozen=True, slots=True)
class TracedStep:
    """Nodes that a draft sent together."""

    at_s: float
    """Time of their arrival at the router, in seconds since the session was opened."""
    step_s: float
    """Duration of the draft's tree step that made them, in seconds; 0 if they came without one."""
    nodes: tuple[TracedNode, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """One round by the clock of the router: its verification, and the draft's work meanwhile."""

    began_s: float
    """Start of the verification, in seconds since the session was opened. Without a draft nothing announces it: the end
    of the previous round then."""
    ended_s: float
    """Arrival of the outcome, in seconds since the session was opened."""
    in_flight: tuple[int, ...]
    """Node ids of the proposal; () if it was empty, or made without a draft."""
    steps: tuple[TracedStep, ...]
    """Messages of the draft since the previous outcome, in order."""
    draft_opened_at: int | None = None
    """Output tokens that a draft was opened with since the previous outcome, which begins a new tree. None: none was
    opened."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a completion: the tokens of one round, or of several that followed one another fast."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log probability of each token, by the ``logprobs_mode`` of the request."""
    drafted: tuple[bool, ...]
    """Flag of each token: True if it was an accepted token of the proposal: of each round the draft's, then
    ``head_accepted`` of a head, then ``lookup_accepted`` looked up."""
    segments: tuple[tuple[str, bool], ...]
    """Decided text with the flag of the token that decided it; may come later than its tokens."""
    round: Round | None
    """Round that decided the tokens, the last one of several. None: withheld text that the end of the session
    releases."""
    usage: Usage | None = None
    """Token counts so far, this chunk included; None in the chunks that a client receives."""
    trace: Trace | None = None
    """Times and tree of the round, for a request that asked for them."""
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """Likeliest tokens at the position of each token, for a request that asked for them; else ()."""
    prompt_logprobs: PromptLogprobs | None = None
    """Log probabilities of tokens of the prompt, in a separate chunk before the output's chunks."""
    last: bool = False
    """No chunk follows: the result is next, at once. False in the chunks that a client receives."""
    earlier_rounds: tuple[Round, ...] = ()
    """Rounds before ``round`` that the chunk holds, too, in order."""

    @property
    def rounds(self) -> tuple[Round, ...]:
        """All rounds of the chunk, in order."""
        return self.earlier_rounds if self.round is None else (*self.earlier_rounds, self.round)

    def tokens_by_round(self) -> list[int]:
        """Number of tokens of each round: those accepted and one more, except where the output ends."""
        numbers = [round_.num_accepted + 1 for round_ in self.earlier_rounds]
        return numbers if self.round is None else [*numbers, len(self.token_ids) - sum(numbers)]

    @property
    def text(self) -> str:
        """Text of all segments, in order."""
        return "".join(text for text, _ in self.segments)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a session."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Prompt tokens whose KV was shared with an earlier session."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations of one session, by the session's clock."""

    prefill_s: float
    """Seconds from opening the session to its first token."""
    decode_s: float
    """Seconds from the first to the last outcome."""
    tokens_per_s: float
    """Tokens after the first outcome per second of ``decode_s``; 0.0 if there were none."""
    queue_s: float = 0.0
    """Seconds that the request waited before its session was opened."""


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a finished session."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    usage: Usage
    speculation: SpeculationStats
    timing: Timing
    seed: int
    matched_stop: int | str | None = None
    """Stop token id, end-of-sequence token id or stop string that ended the session; None if none of them did."""
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """Likeliest tokens at the position of each token, for a request that asked for them; else ()."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    """Log probability of each token of the prompt, for a request that asked for them; else (). The first has none."""


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


def least_states(max_sessions: int) -> int:
    """States of linear layers for that many sessions: each holds one, and a second one while it passes a boundary."""
    return 2 * max_sessions


def pages_for(num_rows: int) -> int:
    """Returns the number of pages that hold ``num_rows`` KV rows."""
    return -(-num_rows // PAGE_SIZE)


START_TIMEOUT_S = 900.0
"""Longest time from the first rank that is up to the last one, in seconds."""


@dataclass(frozen=True, slots=True)
class ReservedGpus:
    """GPUs that a launcher such as Ray has reserved for one process."""

    node: str
    """Node of the process. The names mean the same GPUs in all processes of one node."""
    names: tuple[str, ...]
    """Names as ``CUDA_VISIBLE_DEVICES`` takes them: indices, UUIDs or MIG slices."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Meeting point of the ranks of one replica, and the rank of this one; replicas of one host do not collide."""

    store: str
    """Address of the store: ``file:PATH`` on one host, or ``tcp:HOST:PORT`` of a store that listens already."""
    degree: int
    """Number of ranks."""
    rank: int = 0
    timeout_s: float = 10.0
    """Maximum delay in seconds between ranks at an exchange; after it the late rank counts as hung."""
    start_timeout_s: float = START_TIMEOUT_S
    reserved: abc.Callable[[], ReservedGpus] | None = None
    """Tells a rank which GPUs its launcher has reserved for it; called in the process of the rank. None: no launcher
    reserves GPUs, so each rank takes the GPU of its number among all that it sees."""

    def of(self, rank: int) -> Self:
        """Returns the same meeting point for another rank."""
        return replace(self, rank=rank)
