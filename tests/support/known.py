"""Sessions whose texts their drafter knows, for models of any kind of layer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tests.support.hybrids import KnowingDrafter, poison
from tests.support.models import prompt
from tests.support.pump import Pump, Request, assert_same, in_mode, plain_reference

from paceline.model.loading import LoadedModel
from paceline.types import Mode, Result, SamplingParams, SpeculationParams

CONTEXTS = (15, 16, 47, 63, 64, 65, 1, 17, 48, 79, 127, 128)
"""Lengths of prompts: before, at and behind the ends of chunks and pages."""
_PREFIX = prompt(999, 64)


def requests_of(num: int, max_tokens: int = 20) -> dict[str, Request]:
    """Sessions whose prompts end around boundaries; every third shares a page with others."""
    requests = {}
    for i, length in enumerate(CONTEXTS[:num]):
        tokens = [*_PREFIX, *prompt(i, 1 + length % 20)] if i % 3 == 0 else prompt(i, length)
        requests[f"s{i}"] = Request(
            tokens,
            SamplingParams(temperature=(0.0, 0.7)[i % 2], max_tokens=max_tokens, seed=i, ignore_eos=True),
            SpeculationParams(max_draft_tokens=(8, 3, 16)[i % 3]),
        )
    return requests


def with_prefix(requests: dict[str, Request]) -> dict[str, Request]:
    """The requests after two pages that all share."""
    first = [*_PREFIX, *prompt(7, 64)]
    return {name: replace(request, prompt=[*first, *request.prompt]) for name, request in requests.items()}


@dataclass(frozen=True)
class Known:
    """A target, requests, and what each of them gives alone, one token at a time."""

    target: LoadedModel
    requests: dict[str, Request]
    reference: dict[str, Result]

    @classmethod
    def of(cls, target: LoadedModel, requests: dict[str, Request]) -> Known:
        return cls(target, requests, plain_reference(target, requests))

    def pump(self, **options: Any) -> Pump:
        """A pump whose drafter knows the reference; free slots of linear layers hold NaN."""
        texts = {name: [*self.requests[name].prompt, *result.token_ids] for name, result in self.reference.items()}
        drafter = KnowingDrafter(texts, self.target.vocab_size)
        pump = Pump(self.target, None, drafter=drafter, draft_steps=(1, 8), **options)
        if self.target.linear:
            poison(pump.target.runner)
        return pump

    def served(self, *modes: Mode, pages: int, seed: int = 0) -> list[Pump]:
        """Pumps that have served all requests in each mode; asserts that their tokens are the reference's."""
        pumps = [self.pump(seed=seed, pages=pages, max_step_tokens=48) for _ in modes]
        for mode, pump in zip(modes, pumps, strict=True):
            assert_same(pump.run(in_mode(self.requests, mode)), self.reference)
        return pumps

    def served_again(self, pump: Pump) -> int:
        """Lets the pump serve all requests once more, and asserts the same; returns the tokens of prefix hits."""
        before = pump.target.stats.cached_tokens
        pump.results.clear()
        pump.sessions.clear()
        assert_same(pump.run(self.requests, arrivals=0.02), self.reference)
        return int(pump.target.stats.cached_tokens - before)


@functools.cache
def known(make: Callable[..., LoadedModel], of: tuple[Any, ...], num: int, max_tokens: int = 20) -> Known:
    """Sessions of the model ``make(*of)``."""
    return Known.of(make(*of), requests_of(num, max_tokens))


@functools.cache
def known_with_prefix(make: Callable[..., LoadedModel], of: tuple[Any, ...], num: int = 3) -> Known:
    """The same sessions after two pages that all share."""
    return Known.of(make(*of), with_prefix(requests_of(num, max_tokens=12)))
