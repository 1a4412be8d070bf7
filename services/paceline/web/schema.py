"""Bodies of requests: OpenAI's parameters, and additions of servers of open models.

A parameter is honored, or it is a field of ``fields``, which says what becomes of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field, PrivateAttr, ValidationError, ValidationInfo, model_validator

from paceline.checkpoint.tokenizer import Tokenizer
from paceline.errors import InvalidRequestError
from paceline.errors.refusals import Fault, explain, explain_parameter, shown
from paceline.types import (
    MAX_SALT_LEN,
    MAX_SEED,
    MAX_TOKENS,
    MAX_TOP_LOGPROBS,
    LogprobsMode,
    RequestLimits,
    SamplingParams,
    SpeculationParams,
    TokenId,
    as_stop_strings,
    speculation_arguments,
)
from paceline.web.fields import ANY, INERT, OFF, BodyPart, Ignored, Values, check
from paceline.web.forms import FORMS, spelling, take_form
from paceline.web.prompts import truncated, word_ids

MAX_CHOICES = 128
"""Most choices of one request: prompts times ``n``."""

WITHOUT_LOGPROBS = " without logprobs: it only extends these"
"""Follows a parameter of log probabilities that are not asked for."""

_B = TypeVar("_B", bound="Body")


class StreamOptions(BodyPart):
    """Options of a stream."""

    PLACE = "stream_options"
    INERT = MappingProxyType({"include_obfuscation": ANY})  # padding of events

    include_usage: bool = False
    """A last event, without choices, holds the token counts of the whole request."""
    continuous_usage_stats: bool = False
    """Every event holds the token counts so far; needs ``include_usage``. From vLLM."""
    include_speculation: bool = False
    """Every choice of an event says which of its text was drafted, and how its round went."""
    include_trace: bool = False
    """Adds the times of each round and the nodes of the draft's tree to ``include_speculation``."""

    @model_validator(mode="after")
    def _trace(self) -> Self:
        if self.include_trace and not self.include_speculation:
            raise Fault("include_trace", "is true without include_speculation: it only extends that")
        return self


class SpeculationOptions(SpeculationParams):
    """Speculation of a request; ``enabled`` selects the mode."""

    enabled: bool | None = None
    """False: plain decoding. True: not plain decoding."""

    def params(self) -> SpeculationParams:
        """The parameters that were given. Raises InvalidRequestError if they contradict each other."""
        given = {name: getattr(self, name) for name in self.model_fields_set - {"enabled"}}
        return SpeculationParams(**speculation_arguments(given, self.enabled))


class Body(SamplingParams):
    """Fields of all requests for text: the sampling parameters by their own names, and how the answer is sent."""

    INERT: ClassVar[Mapping[str, Values]] = INERT
    RENAMED: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """OpenAI's name of a parameter -> ours."""
    FORMS: ClassVar[tuple[str, ...]] = FORMS
    """Parameters that name the form of the output."""
    OF_LOGPROBS: ClassVar[tuple[str, ...]] = ("top_logprobs", "logprob_token_ids")
    """Parameters of log probabilities, which only an answer with these shows."""
    NO_LOGPROBS: ClassVar[str] = ": it is not supported here"
    """Why an answer shows none."""
    SCORES_PROMPT: ClassVar[bool] = False
    """True: whole answers show log probabilities of the prompt."""

    model: str | None = None
    """The model that is served."""
    stream: bool = False
    """Send server-sent events as the text is made."""
    stream_options: StreamOptions | None = None
    """Options of a stream; refused without one."""
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    """Choices for each prompt. With a seed the i-th, from 0, has the seed plus i."""
    stop: str | list[str] | None = None
    """The text ends before the first of these."""
    return_token_ids: bool = False
    """Choices hold the token ids of their text; the first event also holds the ids of the prompt."""
    return_tokens_as_token_ids: bool = False
    """Log probabilities name tokens by their ids, as ``token_id:ID``."""
    cache_salt: str = Field(default="", max_length=MAX_SALT_LEN)
    """Cached prompts and texts that drafts learn from are shared with requests of the same salt only."""
    speculation: SpeculationOptions = SpeculationOptions()
    """How this request speculates; the choices say how it went."""

    bad_words: tuple[str | tuple[TokenId, ...], ...] = ()  # type: ignore[assignment]  # words become ids
    """Words, or sequences of token ids, that the output does not hold."""
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1, lt=MAX_TOKENS)
    """Maximum prompt tokens; a longer prompt is cut. -1: what the context and ``max_tokens`` leave."""
    truncation_side: Literal["left", "right"] = "left"
    """The side on which the prompt is cut."""
    request_id: str | None = None
    """The id of the request, if the header x-request-id has none."""

    _ignored: Ignored = PrivateAttr(default_factory=Ignored)

    def with_word_ids(self, tokenizer: Tokenizer, limits: RequestLimits) -> Self:
        """This body with the tokens of ``bad_words``. Raises InvalidRequestError for a word without any, and for more
        than ``limits`` allow."""
        words = [word for word in self.bad_words if isinstance(word, str)]
        if not words:
            return self
        self._check_lists(limits, [-(-len(word) // tokenizer.max_token_bytes) for word in words])  # tokens at least
        return self.model_copy(update={"bad_words": word_ids(tokenizer, self.bad_words)})

    def cut(
        self, tokenizer: Tokenizer, prompt: str | tuple[int, ...], max_model_len: int, *, special: bool
    ) -> str | tuple[int, ...]:
        """The prompt, cut to ``truncate_prompt_tokens``. Raises InvalidRequestError for more than the context."""
        most = self.truncate_prompt_tokens
        if most is None:
            return prompt
        if most == -1:
            most = max_model_len - (self.max_tokens if "max_tokens" in self.model_fields_set else 1)
            if most < 1:
                allowed = f"at most {max_model_len - 1} leave room for the prompt"
                raise InvalidRequestError(f"max_tokens is {self.max_tokens}: {allowed}")
        if not 0 < most <= max_model_len:
            allowed = f"1 to {max_model_len}, the context, is allowed, or -1"
            raise InvalidRequestError(f"truncate_prompt_tokens is {self.truncate_prompt_tokens}: {allowed}")
        return truncated(tokenizer, prompt, most, self.truncation_side, special=special)

    @property
    def ignored(self) -> Ignored:
        """The fields of this request that are ignored."""
        return self._ignored

    @classmethod
    def spelling(cls, data: Mapping[str, Any]) -> dict[str, str]:
        """Our names of parameters -> the body's names, which refusals use."""
        renamed = {ours: name for name, ours in cls.RENAMED.items() if name in data and ours not in data}
        return renamed | spelling(data, cls.FORMS)

    @model_validator(mode="before")
    @classmethod
    def _habits(cls, data: Any, info: ValidationInfo) -> Any:
        """Removes fields without effect, and refuses values that are not served."""
        if not isinstance(data, dict):
            return data
        ignored = info.context if isinstance(info.context, Ignored) else Ignored()
        given: dict[str, Any] = {}
        names: dict[str, str] = {}
        for name, value in data.items():
            ours = cls.RENAMED.get(name, name)
            if value is None:
                continue
            if ours in cls.model_fields or ours in cls.FORMS:
                if ours in given and given[ours] != value:
                    other = f"{names[ours]} is {shown(given[ours])}"
                    raise Fault(name, f"is {shown(value)} and {other}: one of them is enough")
                given[ours], names[ours] = value, name
            elif name in cls.INERT:
                check(name, value, cls.INERT[name], ignored)
            else:
                ignored.note(name, value, (*cls.model_fields, *cls.RENAMED, *cls.FORMS))
        take_form(given, cls.FORMS)
        if given.get("top_k") == -1:  # off, for vLLM
            given["top_k"] = 0
        if type(seed := given.get("seed")) is int and -(2**63) <= seed < 0:
            del given["seed"]
            if seed != -1:  # which is no seed, for vLLM and llama.cpp
                given["seed"] = seed % (MAX_SEED + 1)
        return given

    @property
    def shows_logprobs(self) -> bool:
        """True if the answer shows the log probability of each token."""
        return False

    @model_validator(mode="after")
    def _shows(self) -> Self:
        for name in self.OF_LOGPROBS:
            if (value := getattr(self, name)) and not self.shows_logprobs:
                raise Fault(name, f"is {shown(value)}{self.NO_LOGPROBS}")
        return self

    @model_validator(mode="after")
    def _streams(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise Fault("stream_options", "is given without stream: it is for streams only")
        if self.prompt_logprobs is not None and not self.SCORES_PROMPT:
            raise Fault("prompt_logprobs", f"is {self.prompt_logprobs}: it is not supported here")
        if self.prompt_logprobs is not None and self.stream:
            raise Fault(
                "prompt_logprobs", f"is {self.prompt_logprobs} and stream is true: only whole answers have them"
            )
        return self

    def sampling(self, logprobs: bool, top_logprobs: int = 0, prompt_logprobs: int | None = None) -> SamplingParams:
        """Returns the given sampling parameters. ``logprobs``: the answer shows log probabilities, raw ones unless the
        request says otherwise; ``top_logprobs``: number of likeliest tokens shown; ``prompt_logprobs``: the same for
        the prompt, unless the request says otherwise."""
        names = self.model_fields_set & SamplingParams.model_fields.keys()
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        if logprobs:
            given.setdefault("logprobs_mode", LogprobsMode.RAW)
        if top_logprobs:
            given["top_logprobs"] = top_logprobs
        if prompt_logprobs is not None:
            given["prompt_logprobs"] = prompt_logprobs
        return SamplingParams(**given)

    def stop_strings(self, limits: RequestLimits) -> tuple[str, ...]:
        """The stop strings, once all lists are known to be short enough. Raises InvalidRequestError."""
        self._check_lists(limits, map(len, self.bad_words))
        return as_stop_strings(self.stop)

    def _check_lists(self, limits: RequestLimits, bad_words_sizes: Iterable[int]) -> None:
        limits.check(
            stop=as_stop_strings(self.stop),
            stop_token_ids=self.stop_token_ids,
            bad_words=self.bad_words,
            bad_words_sizes=bad_words_sizes,
            logit_bias=self.logit_bias,
            allowed_token_ids=self.allowed_token_ids or (),
        )


class CompletionBody(Body):
    """POST /v1/completions."""

    SCORES_PROMPT = True
    OF_LOGPROBS = ("logprob_token_ids",)
    NO_LOGPROBS = WITHOUT_LOGPROBS
    INERT = MappingProxyType(
        {
            **INERT,
            **dict.fromkeys(("messages", "tools", "functions", "documents", "chat_template_kwargs"), OFF),
        }
    )

    prompt: Any = None
    """Text, token ids, or a list of either."""
    suffix: str = ""
    """The text fills the gap between the prompt and this, where the tokenizer has marks for it."""
    add_special_tokens: bool = True
    """The tokenizer puts its special tokens around a prompt that is text."""
    echo: bool = False
    """The text and the log probabilities begin with the prompt."""
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    """Shows the log probability of each token, and of this many likeliest tokens at its position."""

    @property
    def shows_logprobs(self) -> bool:
        """True if the answer shows the log probability of each token."""
        return self.logprobs is not None

    @property
    def shows_tokens(self) -> bool:
        """True if the answer tells something of each token of the prompt."""
        return self.logprobs is not None or self.return_token_ids or self.prompt_logprobs is not None

    @property
    def _shows_prompt(self) -> bool:
        """True if the answer tells something of the prompt, so that it may have no token."""
        return self.echo or self.prompt_logprobs is not None

    @model_validator(mode="after")
    def _logprobs(self) -> Self:
        if self.suffix and (self.echo or self.truncate_prompt_tokens is not None):
            other = "echo is true" if self.echo else "truncate_prompt_tokens is given"
            raise Fault("suffix", f"is given and {other}: one of them is allowed")
        if self.top_logprobs:
            raise Fault("top_logprobs", f"is {self.top_logprobs}: here logprobs says how many")
        return self

    def sampling_of_prompts(self) -> SamplingParams:
        """The sampling parameters, with the log probabilities of prompts that an echo shows."""
        top = self.logprobs or 0
        echoes = self.echo and (self.logprobs is not None or not self.max_tokens)
        of_prompt = max(top, self.prompt_logprobs or 0) if echoes else None
        return self.sampling(self.logprobs is not None, top, of_prompt)

    def prompts(self) -> list[str | tuple[int, ...]]:
        """The prompts, at least one. Raises InvalidRequestError."""
        prompt = self.prompt
        if prompt is None:
            raise InvalidRequestError("prompt is missing: it is needed")
        if isinstance(prompt, str) or _are_ids(prompt):
            prompt = [prompt]
        found: list[str | tuple[int, ...]] = []
        for i, item in enumerate(prompt if isinstance(prompt, list) else [prompt]):
            if not isinstance(item, str) and not _are_ids(item):
                place = f"prompt[{i}]" if isinstance(prompt, list) else "prompt"
                raise InvalidRequestError(f"{place} is {shown(item)}: text or a list of token ids is allowed")
            if not item and not self.suffix:
                raise InvalidRequestError(f"prompt is {shown(item)}: at least one character or token id is needed")
            found.append(item if isinstance(item, str) else tuple(item))
        if not found:
            raise InvalidRequestError("prompt is []: at least one prompt is needed")
        if len(found) * self.n > MAX_CHOICES:
            raise InvalidRequestError(
                f"prompt holds {len(found)} prompts and n is {self.n}: at most {MAX_CHOICES} choices are allowed"
            )
        return found


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def read(kind: type[_B], data: Any, ignored: Ignored | None = None) -> _B:
    """A body of this kind. Raises InvalidRequestError that names the parameter.

    ``ignored``: collects the fields that have no meaning here; the body has it, too.
    """
    if not isinstance(data, dict):
        raise InvalidRequestError(f"the body is {shown(data)}: a JSON object is needed")
    ignored = Ignored() if ignored is None else ignored
    try:
        body = kind.model_validate(data, context=ignored)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0].get("ctx", {}).get("error")
        sentence = explain(error, kind) if isinstance(fault, Fault) else explain_parameter(error, kind)
        raise InvalidRequestError(sentence) from None
    body._ignored = ignored
    return body
