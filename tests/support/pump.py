"""Both engines and their sessions in one thread of lockstep, on a virtual clock.

The pump drives real engines through real sessions. Its seeded generator decides who runs, how late messages are and
when sessions arrive, so a run is reproducible and no test sleeps.
"""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tests.support.fakes import Clock

from paceline.checkpoint.grammar import Grammars
from paceline.draft.engine import DraftEngine
from paceline.drafters.model import ModelDrafter
from paceline.model.loading import LoadedModel
from paceline.router.relay import Outbox, Relay
from paceline.router.session import Actions, Session
from paceline.target.engine import TargetEngine
from paceline.target.heads.mounted import MountedHead
from paceline.target.states_link import StatesLink
from paceline.types import Mode, Result, SamplingParams, SpeculationParams


@dataclass(frozen=True)
class Request:
    """What one session asks for."""

    prompt: Sequence[int]
    sampling: SamplingParams
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    eos_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    """Stop strings; the text of token i is the one character 0x4E00 + i."""
    generated: tuple[int, ...] = ()
    """Output of a broken stream, which the session continues."""
    cache_salt: str = ""


def requests_for(
    prompts: Iterable[Sequence[int]], *, eos_token_ids: tuple[int, ...] = (), **options: Any
) -> dict[str, Request]:
    """Requests ``s0``, ``s1``, ...: one for each prompt, with seeds 0, 1, ...

    ``options``: fields of sampling and of speculation; requests take the entries of a list in turn.
    """
    requests = {}
    for i, tokens in enumerate(prompts):
        given = {"seed": i} | options
        own = {key: each[i % len(each)] if isinstance(each, list) else each for key, each in given.items()}
        speculation = {key: own.pop(key) for key in SpeculationParams.model_fields.keys() & own.keys()}
        requests[f"s{i}"] = Request(tokens, SamplingParams(**own), SpeculationParams(**speculation), eos_token_ids)
    return requests


class Pump:
    """Both engines, their sessions and the wire between them, in one thread.

    ``tamper`` and ``tamper_draft`` may change what goes to the target and to the draft; ``late`` is the chance that a
    queue delivers nothing in a tick, ``pace`` the chance that the target takes its turn.
    """

    def __init__(
        self,
        target: LoadedModel,
        draft: LoadedModel | None,
        *,
        seed: int = 0,
        pages: int = 64,
        draft_pages: int = 64,
        max_sessions: int = 16,
        max_step_tokens: int = 64,
        max_model_len: int = 1024,
        max_leaves: int = 32,
        draft_steps: tuple[int, int] = (0, 6),
        tree_budget: int = 32,
        top_m: int = 64,
        late: float = 0.3,
        pace: float = 0.5,
        tamper: Callable[[Any], list[Any]] | None = None,
        tamper_draft: Callable[[Any], list[Any]] | None = None,
        drafter: Any = None,
        adaptive: bool = True,
        step_s: Callable[[int], float] | None = None,
        heads: Sequence[MountedHead] = (),
        link: StatesLink | None = None,
        ahead: bool | None = None,
        grammars: Grammars | None = None,
        compilation: Any = None,
    ) -> None:
        """``step_s``: seconds of a target forward by the number of its tokens; None: no time passes."""
        self.rng = random.Random(seed)
        self.clock = Clock()
        self.late = late
        self.draft_steps = draft_steps
        self.pace = pace if drafter is not None or draft is not None else 1.0
        self.tamper, self.tamper_draft = tamper, tamper_draft
        self.draft_dead = False
        self.from_target: deque[Any] = deque()
        self.from_draft: deque[Any] = deque()
        self.to_target: deque[Any] = deque()
        self.to_draft: deque[Any] = deque()
        self.relay = Relay()
        self.sessions = self.relay.sessions
        self.results: dict[str, Result] = {}
        self.failures: dict[str, str] = {}
        self.ticks = 0
        self._new_target = functools.partial(
            TargetEngine,
            emit=self.from_target.extend,
            max_sessions=max_sessions,
            max_step_tokens=max_step_tokens,
            max_model_len=max_model_len,
            adaptive=adaptive,
            grammars=grammars,
            clock=self.clock,
        )
        self.target = self._new_target(
            target.runner(pages, max_sessions=max_sessions), heads=heads, link=link, compilation=compilation
        )
        if link is not None:
            assert self.target.runner.features is not None
            link.bind(self.target.runner.cache, self.target.runner.features)
        if step_s is not None:
            forward = self.target.runner.forward

            def timed(steps: Sequence[Any]) -> torch.Tensor:
                self.clock.now += step_s(sum(len(s.token_ids) for s in steps))
                return forward(steps)

            self.target.runner.forward = timed  # type: ignore[method-assign]
        if drafter is None and draft is not None:
            drafter = ModelDrafter(draft.runner(draft_pages), max_leaves=max_leaves, max_prefill_tokens=64, top_m=top_m)
        self.drafter = drafter
        self._new_draft = functools.partial(
            DraftEngine,
            emit=self.from_draft.extend,
            vocab_size=target.vocab_size,
            tree_budget=tree_budget,
            ahead=ahead,
            grammars=grammars,
            clock=self.clock,
        )
        self.draft = None if drafter is None else self._new_draft(drafter)

    def run(self, requests: dict[str, Request], *, arrivals: float = 0.5) -> dict[str, Result]:
        """Serves the requests to the end; ``arrivals`` is the chance of one more in each tick."""
        waiting = list(requests.items())
        idle = 0
        while waiting or len(self.results) + len(self.failures) < len(self.sessions):
            if waiting and (self.rng.random() < arrivals or not self.sessions):
                name, request = waiting.pop(0)
                self.submit(name, request)
            idle = 0 if self.tick() or waiting else idle + 1
            assert idle < 200, "the engines are stuck"
            self.ticks += 1
            assert self.ticks < 100_000, "no end"
        self.settle()
        return self.results

    def settle(self) -> None:
        """Delivers what is still on the wire and checks that nothing is held any more."""
        self.late = 0.0
        for _ in range(50):
            self.tick()
        assert self.target.num_sessions == 0
        assert self.target.runner.cache.num_used == 0
        if self.draft is not None and not self.draft_dead:
            assert self.draft.num_sessions == 0

    def submit(self, name: str, request: Request) -> None:
        """Opens a session."""
        session = Session(
            name,
            request.prompt,
            request.sampling,
            request.speculation,
            decode=lambda ids: "".join(chr(0x4E00 + i) for i in ids),
            stop=request.stop,
            eos_token_ids=request.eos_token_ids,
            generated_token_ids=request.generated,
            cache_salt=request.cache_salt,
            clock=self.clock,
        )
        self.sessions[name] = session
        self.send(session.open(draft_available=self.draft is not None))

    def tick(self) -> bool:
        """One turn of everything; False if nothing was left to do but wait, and the clock was moved on."""
        self.clock.now += self.rng.uniform(1e-4, 3e-3)
        moved = self.deliver(self.to_target, self.target.receive)
        slow = self.rng.random() >= self.pace
        stepped = not slow and self.target.step()
        self.clock.now += 1e-3
        self.target.check_integrity()
        worked = False
        if self.draft is not None and not self.draft_dead:
            moved = self.deliver(self.to_draft, self.draft.receive) or moved
            for _ in range(self.rng.randint(*self.draft_steps)):
                worked = self.draft.step() or worked
            self.draft.check_integrity()
        else:
            self.to_draft.clear()
        moved = self.deliver(self.from_target, self.on_target) or moved
        moved = self.deliver(self.from_draft, self.on_draft) or moved
        if slow or stepped or worked or moved:
            return True
        wait = self.target.wait_s()
        if not (self.to_target or self.from_target or self.from_draft or self.to_draft) and wait is not None:
            self.clock.now += wait / 4  # the draft may still have work that it was not given a turn for
        return False

    def deliver(self, queue: deque[Any], receive: Callable[[list[Any]], None]) -> bool:
        if not queue or self.rng.random() < self.late:
            return False
        count = len(queue) if self.rng.random() < 0.6 else self.rng.randint(1, len(queue))
        receive([queue.popleft() for _ in range(count)])
        return True

    def on_target(self, messages: list[Any]) -> None:
        outbox = self.relay.on_target(messages)
        self._carry_out(outbox)
        for session in outbox.touched.values():
            self.digest(session)

    def on_draft(self, messages: list[Any]) -> None:
        self._carry_out(self.relay.on_draft(messages))

    def _carry_out(self, outbox: Outbox) -> None:
        self.send(outbox)
        for name, reason in (outbox.target_failed | outbox.refused).items():
            self._target_failed(self.sessions[name], reason)
        if self.draft is not None and not self.draft_dead:
            for session in outbox.draft_wanted:
                self.send(session.on_draft_up())

    def _target_failed(self, session: Session, reason: str) -> None:
        self.failures[session.session_id] = reason
        self.send(session.cancel())

    def digest(self, session: Session) -> None:
        self.send(session.digest())
        if session.result is not None and session.session_id not in self.failures:
            self.results[session.session_id] = session.result

    def send(self, actions: Actions | Outbox) -> None:
        for message in actions.to_target:
            self.to_target.extend(self.tamper(message) if self.tamper else [message])
        for command in actions.to_draft:
            self.to_draft.extend(self.tamper_draft(command) if self.tamper_draft else [command])


def plain_reference(target: LoadedModel, requests: dict[str, Request], **options: Any) -> dict[str, Result]:
    """Each request alone, one token at a time."""
    results: dict[str, Result] = {}
    for name, request in requests.items():
        results |= Pump(target, None, late=0.0, **options).run(in_mode({name: request}, Mode.PLAIN))
    return results


def in_mode(requests: dict[str, Request], mode: Mode) -> dict[str, Request]:
    """The same requests, all in one mode."""
    return {
        name: replace(r, speculation=r.speculation.model_copy(update={"mode": mode})) for name, r in requests.items()
    }


def assert_same(results: dict[str, Result], reference: dict[str, Result]) -> int:
    """Token ids and finish reasons are identical, log probabilities within 1e-4; returns the tokens compared."""
    assert results.keys() == reference.keys()
    for name, result in results.items():
        expected = reference[name]
        assert result.token_ids == expected.token_ids, name
        assert result.finish_reason == expected.finish_reason, name
        for got, want in zip(result.logprobs, expected.logprobs, strict=True):
            assert abs(got - want) < 1e-4, name
    return sum(len(r.token_ids) for r in results.values())


def assert_continued(
    pump: Pump, requests: dict[str, Request], reference: dict[str, Result], lengths: Sequence[int]
) -> None:
    """Lets a pump go on from the first tokens of each reference, ``lengths`` of them; the rest must come."""
    cuts = dict(zip(requests, lengths, strict=True))
    begun = {name: replace(one, generated=reference[name].token_ids[: cuts[name]]) for name, one in requests.items()}
    for name, result in pump.run(begun).items():
        assert result.token_ids == reference[name].token_ids[cuts[name] :]
