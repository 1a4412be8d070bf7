"""Bodies of requests: OpenAI's parameters, and those that servers of open models add.

A parameter is honored, or refused by its name. Those in ``INERT`` are not served, but some of their values change
nothing, so clients that send these by habit are not turned away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from paceline.errors import InvalidRequestError
from paceline.errors.refusals import Fault, explain, explain_parameter, shown
from paceline.types import (
    MAX_SALT_LEN,
    MAX_TOP_LOGPROBS,
    LogprobsMode,
    RequestLimits,
    SamplingParams,
    SpeculationParams,
    as_stop_strings,
    speculation_arguments,
)
from paceline.web.forms import FORMS, take_form

MAX_CHOICES = 128
"""Most choices of one request: prompts times ``n``."""

_ANY = ...
"""Stands for every value."""
NOTHING: tuple[Any, ...] = ()
"""No value at all."""

INERT: dict[str, tuple[Any, ...]] = {
    "user": (_ANY,),
    "metadata": (_ANY,),
    "safety_identifier": (_ANY,),
    "prompt_cache_key": (_ANY,),
    "prompt_cache_retention": ("in-memory", "in_memory"),
    "service_tier": ("auto", "default"),
    # of vLLM and SGLang
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": NOTHING,
    "prompt_logprobs": NOTHING,
    "priority": (0,),
}
"""Parameter that is not served -> its values that change nothing; null is always one."""

_B = TypeVar("_B", bound="Body")


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    include_usage: bool = False
    """A last event, without choices, holds the token counts of the whole request."""
    continuous_usage_stats: bool = False
    """Every event holds the token counts so far (of vLLM)."""
    include_obfuscation: Literal[False] = False
    """Padding of events is not served."""
    include_speculation: bool = False
    """Every choice of an event says which of its text was drafted, and how its round went."""
    include_trace: bool = False
    """With ``include_speculation``: also when its round ran, and the nodes of the draft's tree."""

    @model_validator(mode="after")
    def _trace(self) -> Self:
        if self.include_trace and not self.include_speculation:
            raise Fault("include_trace", "is true without include_speculation: it is a part of what that adds")
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

    INERT: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType(INERT)
    RENAMED: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """OpenAI's name of a parameter -> ours."""
    FORMS: ClassVar[tuple[str, ...]] = FORMS
    """Parameters that name the form of the output."""

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
    """Choices hold the token ids of their text, and with the first of them those of the prompt."""
    return_tokens_as_token_ids: bool = False
    """Log probabilities name tokens by their ids, as ``token_id:ID``."""
    cache_salt: str = Field(default="", max_length=MAX_SALT_LEN)
    """Cached prompts and texts that drafts learn from are shared with requests of the same salt only."""
    speculation: SpeculationOptions = SpeculationOptions()
    """How this request speculates; the choices say how it went."""

    @model_validator(mode="before")
    @classmethod
    def _habits(cls, data: Any) -> Any:
        """Leaves out what changes nothing, and refuses what is not served."""
        if not isinstance(data, dict):
            return data
        given: dict[str, Any] = {}
        for name, value in data.items():
            if value is None:
                continue
            if name in cls.INERT:
                _check_inert(name, value, cls.INERT[name])
                continue
            ours = cls.RENAMED.get(name, name)
            if ours in given and given[ours] != value:
                raise Fault(name, f"is {shown(value)} and {ours} is {shown(given[ours])}: one of them is enough")
            given[ours] = value
        take_form(given, cls.FORMS)
        if given.get("top_k") == -1:  # off, for vLLM
            given["top_k"] = 0
        return given

    @model_validator(mode="after")
    def _streams(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise Fault("stream_options", "is given without stream: it is for streams only")
        return self

    def sampling(self, logprobs: bool, top_logprobs: int = 0) -> SamplingParams:
        """The sampling parameters that were given. ``logprobs``: the answer shows log probabilities, which are the raw
        ones unless the request says otherwise; ``top_logprobs``: and so many likeliest tokens."""
        names = self.model_fields_set & SamplingParams.model_fields.keys()
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        if logprobs:
            given.setdefault("logprobs_mode", LogprobsMode.RAW)
        if top_logprobs:
            given["top_logprobs"] = top_logprobs
        return SamplingParams(**given)

    def stop_strings(self, limits: RequestLimits) -> tuple[str, ...]:
        """The stop strings, once all lists are known to be short enough. Raises InvalidRequestError."""
        stop = as_stop_strings(self.stop)
        limits.check(
            stop=stop,
            stop_token_ids=self.stop_token_ids,
            bad_words=self.bad_words,
            bad_words_sizes=map(len, self.bad_words),
            logit_bias=self.logit_bias,
            allowed_token_ids=self.allowed_token_ids or (),
        )
        return stop


class CompletionBody(Body):
    """POST /v1/completions."""

    INERT = MappingProxyType(
        {
            **INERT,
            "best_of": (1,),
            "suffix": ("",),
            "add_special_tokens": (True,),
        }
    )

    prompt: Any = None
    """Text, token ids, or a list of either."""
    echo: bool = False
    """The text begins with the prompt."""
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    """The log probability of each token, and of so many likeliest ones in its place."""

    @model_validator(mode="after")
    def _echo(self) -> Self:
        if self.echo and self.logprobs is not None:
            raise Fault("echo", "is true and logprobs is given: log probabilities of the prompt are not served")
        if self.top_logprobs:
            raise Fault("top_logprobs", f"is {self.top_logprobs}: here logprobs says how many")
        return self

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
            if not item:
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


def _check_inert(name: str, value: Any, inert: Sequence[Any]) -> None:
    """Raises Fault for a value that would have to change something."""
    if _ANY in inert or any(value == item and isinstance(value, bool) is isinstance(item, bool) for item in inert):
        return
    if not inert:
        raise Fault(name, f"is {shown(value)}: it is not supported")
    raise Fault(name, f"is {shown(value)}: only {' or '.join(map(shown, inert))} is supported")


def read(kind: type[_B], data: Any) -> _B:
    """A body of this kind. Raises InvalidRequestError that names the parameter."""
    if not isinstance(data, dict):
        raise InvalidRequestError(f"the body is {shown(data)}: a JSON object is needed")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0].get("ctx", {}).get("error")
        sentence = explain(error, kind) if isinstance(fault, Fault) else explain_parameter(error, kind)
        raise InvalidRequestError(sentence) from None
