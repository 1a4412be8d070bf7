"""The forward of a step, by the model that each of its sessions began on.

There are two if the target began eagerly. A session keeps the model that computed its first token. Eager and compiled
steps round differently, so a session of both could differ from plain decoding at a near-tie. So only new sessions see
the swap. While there are sessions of both kinds, a step is two forwards, each of which is batch-invariant by itself. KV
pages are shared among sessions of one kind only (``generation``).

A step for which the device has no memory is cut into several forwards, which for the same reason gives the same bits.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.core.tree import NO_PROPOSAL
from paceline.errors import EngineError
from paceline.model.compiled.background import Compilation
from paceline.model.compiled.graphs import is_out_of_memory, release_cached
from paceline.model.layer_callback import heard_by
from paceline.model.parallel.runner import LeadingRunner, NoRoomError, Sampled
from paceline.model.runner import ModelRunner
from paceline.model.step_plan import SequenceStep
from paceline.target.scheduler import Scheduled
from paceline.target.session import TargetSession
from paceline.types import Execution

log = logging.getLogger(__name__)


class NoMemoryError(Exception):
    """The device has no memory for the smallest forward of a session."""

    def __init__(self, session: TargetSession, reason: str) -> None:
        super().__init__(f"the target has no memory for one more token of the session: {reason}")
        self.session = session


class Forwarded(NamedTuple):
    """Result of a forward. If ranks sample tokens of some parts, ``logits`` are of the other parts."""

    logits: Tensor
    """[rows, vocab]: one row per draft token of each verifying part, and one more."""
    sampled: Sequence[Sampled] = ()
    """What the ranks sample for the sessions that allow it, in order; (): the rank with logits decides all parts."""
    states: Tensor | None = None
    """[n, width]: hidden states for the heads, of all tokens or of those with logits; None: no head reads any."""
    guessed: Tensor | None = None
    """[branches, vocab]: logits after the guesses that rode in the step; None: there were none."""
    scored: Tensor | None = None
    """[rows, vocab]: logits of all rows of the parts that are scored; None: there were none."""


class Runners:
    """The runner that new sessions begin on, and an earlier one while sessions that began on it are open."""

    def __init__(self, runner: ModelRunner, compilation: Compilation | None = None) -> None:
        """``compilation``: a started compilation of the model of an eager ``runner``, or None. ``close`` ends it."""
        self.generation = 0
        """Number of the runner that new sessions begin on."""
        self._by_generation = {0: runner}
        self._compilation = compilation

    @property
    def current(self) -> ModelRunner:
        """The runner that new sessions begin on."""
        return self._by_generation[self.generation]

    @current.setter
    def current(self, runner: ModelRunner) -> None:
        self._by_generation[self.generation] = runner

    @property
    def generations(self) -> Mapping[int, ModelRunner]:
        """The runners that sessions have, by their numbers."""
        return self._by_generation

    @property
    def execution(self) -> Execution:
        """Execution of new sessions (``types.Execution``). Any thread may ask."""
        return self.current.execution if self._compilation is None else self._compilation.execution

    def advance(self) -> None:
        """Starts new sessions on the compiled step, once there is one."""
        if self._compilation is not None and (step := self._compilation.take()) is not None:
            compiled = self.current.compiled(step)
            self._by_generation[self.generation + 1] = compiled
            self.generation += 1

    def retain(self, generations: Iterable[int]) -> None:
        """Forgets the runners that no session needs any more, and with an eager one its weights."""
        if len(self._by_generation) > 1:
            kept = {self.generation, *generations}
            self._by_generation = {n: runner for n, runner in self._by_generation.items() if n in kept}

    def in_order(self, parts: list[Scheduled]) -> list[Scheduled]:
        """The parts of a step in the order in which ``forward`` returns their rows."""
        return parts if len(self._by_generation) == 1 else sorted(parts, key=_generation)

    def forward(
        self,
        parts: Sequence[Scheduled],
        *,
        wants_states: bool,
        on_states: Callable[[Sequence[Scheduled], Tensor], None] | None = None,
    ) -> Forwarded:
        """Runs the model on parts that are ``in_order``.

        One of several ranks samples tokens on the ranks, for sessions that allow it. ``on_states`` is called within a
        forward, with its parts and the states of their logits' rows at that boundary (``model/layer_callback.py``).

        Raises:
            NoMemoryError: the device has no memory even for one token of a session.
        """
        runs = []
        for n, those in itertools.groupby(parts, key=_generation):
            runs += _in_memory(self._by_generation[n], [*those], wants_states=wants_states, on_states=on_states)
        done = [one for _, one in runs]
        if len(done) == 1:
            return done[0]
        features = self.current.features
        states = []
        for group, one in runs:
            if one.states is not None:
                assert features is not None
                states.append(one.states[: _num_states(group, every_position=features.every_position)])
        guessed = [one.guessed for one in done if one.guessed is not None]
        scored = [one.scored for one in done if one.scored is not None]
        return Forwarded(
            torch.cat([one.logits for one in done]),
            [sampled for one in done for sampled in one.sampled],
            states=torch.cat(states) if states else None,
            guessed=torch.cat(guessed) if guessed else None,
            scored=torch.cat(scored) if scored else None,
        )

    @property
    def is_asynchronous(self) -> bool:
        """True if ``forward`` only queues a step: there is one runner, on one accelerator."""
        return len(self._by_generation) == 1 and self.current.is_asynchronous

    def forward_ahead(self, parts: Sequence[Scheduled], token_ids: Tensor) -> Forwarded | None:
        """``forward`` of parts that are scheduled ahead: ``token_ids`` [n] on the device are the tokens of the first n.
        None: the device has no memory for them in addition to the step in flight."""
        steps = [step for part in parts for step in part.sequence_steps()]
        try:
            return _run(self.current, parts, steps, 0, wants_states=False, drawn=token_ids)
        except (RuntimeError, MemoryError) as error:
            if not _may_try_again(self.current, error):
                raise
        release_cached()
        return None

    def check(self) -> None:
        """Raises RanksLostError if a step that is done has lost another rank (``ModelRunner.check``)."""
        for runner in self._by_generation.values():
            runner.check()

    def close(self) -> None:
        """Ends the compilation and releases the other ranks of the model, if there are any. Idempotent."""
        if self._compilation is not None:
            self._compilation.close()
        for runner in self._by_generation.values():
            runner.close()


def _generation(part: Scheduled) -> int:
    return part.session.generation


def _num_states(parts: Sequence[Scheduled], *, every_position: bool) -> int:
    """Rows of states that belong to the parts' own tokens; rows of guesses follow."""
    if every_position:
        return sum(part.num_tokens for part in parts)
    return sum(part.num_drafted + 1 for part in parts if part.verifies)


def _in_memory(
    runner: ModelRunner,
    parts: list[Scheduled],
    *,
    wants_states: bool,
    on_states: Callable[[Sequence[Scheduled], Tensor], None] | None,
) -> list[tuple[list[Scheduled], Forwarded]]:
    """Runs the forward of one runner's parts; of their halves if the device has no memory for all."""
    try:
        with nullcontext() if on_states is None else heard_by(partial(on_states, parts)):
            return [(parts, forward_parts(runner, parts, wants_states=wants_states))]
    except (RuntimeError, MemoryError) as error:
        if not _may_try_again(runner, error):
            raise
        reason = str(error).partition("\n")[0]
    release_cached()
    if (halves := _halves(parts)) is None:
        raise NoMemoryError(parts[0].session, reason)
    log.warning("the device has no memory for a step of %d tokens: %s", sum(p.num_tokens for p in parts), reason)
    return [run for half in halves for run in _in_memory(runner, half, wants_states=wants_states, on_states=on_states)]


def _may_try_again(runner: ModelRunner, error: Exception) -> bool:
    """True if a forward failed for lack of memory, and no other rank is in the middle of it."""
    has_begun = isinstance(runner, LeadingRunner) and not isinstance(error, NoRoomError)
    return not has_begun and is_out_of_memory(error)


def without_memory(error: Exception) -> EngineError:
    """The failure of a session's round by a lack of memory of the device; raises an ``error`` of another kind again."""
    if not is_out_of_memory(error):
        raise error
    release_cached()
    reason = str(error).partition("\n")[0]
    log.warning("the device has no memory to decide a step: %s", reason)
    return EngineError(f"the target has no memory to decide a round of the session: {reason}")


def _halves(parts: list[Scheduled]) -> tuple[list[Scheduled], list[Scheduled]] | None:
    """The parts in two groups, or one part as two of fewer tokens; None if it cannot be divided."""
    if len(parts) > 1:
        return parts[: len(parts) // 2], parts[len(parts) // 2 :]
    (part,) = parts
    middle = (part.start + part.stop) // 2
    if middle == part.start:
        return None
    first = Scheduled(part.session, part.start, middle, NO_PROPOSAL, scores=part.scores)
    return [first], [replace(part, start=middle)]


def forward_parts(runner: ModelRunner, parts: Sequence[Scheduled], *, wants_states: bool) -> Forwarded:
    """The forward of parts of one runner."""
    steps: list[SequenceStep] = []
    riding: list[SequenceStep] = []
    for part in parts:
        own = part.sequence_steps()
        steps += own
        riding += part.riding_steps(own[0])
    num_scored = sum(part.num_logits for part in parts if part.scores)
    num_further = num_scored + len(riding)
    forwarded = _run(runner, parts, [*steps, *riding], num_further, wants_states=wants_states)
    if not num_further:
        return forwarded
    num_own = len(forwarded.logits) - num_further
    decided, scored, guessed = forwarded.logits.split_with_sizes((num_own, num_scored, len(riding)))
    return forwarded._replace(
        logits=decided, scored=scored if num_scored else None, guessed=guessed if len(riding) else None
    )


def _run(
    runner: ModelRunner,
    parts: Sequence[Scheduled],
    steps: Sequence[SequenceStep],
    num_further: int,
    *,
    wants_states: bool,
    drawn: Tensor | None = None,
) -> Forwarded:
    """Runs the model; the last ``num_further`` rows of logits decide nothing. ``drawn``: of ``forward_drawn``."""
    if isinstance(runner, LeadingRunner):
        rows = [row if part.session.picks else None for part in parts if part.verifies for row in part.rows()]
        rows += [None] * num_further
        if any(row is not None for row in rows):
            logits, sampled, given = runner.forward_and_pick(steps, rows, drawn)
            return Forwarded(logits, [sampled], given if wants_states else None)
    if wants_states:
        logits, states = runner.forward_with_states(steps)
        return Forwarded(logits, states=states)
    return Forwarded(runner.forward(steps) if drawn is None else runner.forward_drawn(steps, drawn))
