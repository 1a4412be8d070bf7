"""What the ranks of ``test_flight_ranks.py`` do: the first one serves sessions, and the others take its steps."""

import contextlib
import os
import random
from collections import Counter
from typing import Any

import pytest
import torch
from tests.model.parallel.ranks import load
from tests.support.late import LateDevice
from tests.support.models import pair
from tests.support.mutants import mutant
from tests.support.pump import Pump, Request, in_mode
from tests.target.storm import Storm
from tests.target.test_flight import requests
from torch import Tensor

from paceline.errors import EngineError, RanksLostError
from paceline.messages import Outcome
from paceline.model.compiled.backend import DeviceBackend
from paceline.model.loading import LoadedModel
from paceline.model.parallel.collectives import Collectives, TorchCollectives
from paceline.model.parallel.runner import Follower, RankRunner, Sampled
from paceline.model.runner import ModelRunner
from paceline.model.step_plan import StepPlan
from paceline.target.runners import Runners
from paceline.types import Mode, Result

PAGES = 24
_last: list[Any] = [None]


@mutant(ModelRunner, "run_plan")
def stale_follower(run: Any, runner: ModelRunner, plan: StepPlan) -> Any:
    """Computes the tokens that were sampled one step earlier."""
    before, _last[0] = _last[0], plan.drawn
    if plan.drawn is not None and before is not None and before.shape == plan.drawn.shape:
        plan = plan._replace(drawn=before)
    return run(runner, plan)


@mutant(Runners, "forward_ahead")
def stale_leader(forward: Any, runners: Runners, parts: Any, token_ids: Tensor) -> Any:
    """Sends the tokens of two steps ago."""
    before, _last[0] = _last[0], token_ids
    return forward(runners, parts, before if before is not None and before.shape == token_ids.shape else token_ids)


@mutant(Runners, "forward_ahead")
def tokens_of_others(forward: Any, runners: Runners, parts: Any, token_ids: Tensor) -> Any:
    """Sends each session's token to another one."""
    return forward(runners, parts, token_ids.roll(1))


@mutant(RankRunner, "require_room")
def without_room(require: Any, runner: RankRunner, plan: StepPlan) -> None:
    """Has no memory for one in three of the steps that are launched ahead."""
    with pytest.MonkeyPatch.context() as patch:
        if plan.drawn is not None and random.Random(runner.num_forwards).random() < 0.3:
            patch.setattr(runner, "reserve_step", _no_memory)
        require(runner, plan)


def _no_memory(shape: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@mutant(RankRunner, "check")
def unchecked(check: Any, runner: RankRunner) -> None:
    """Commits whatever has come."""


@mutant(Follower, "step")
def mortal(step: Any, follower: Follower) -> bool:
    """Dies after its 20th step."""
    if follower._runner.num_forwards == 20:
        os.kill(os.getpid(), 9)
    return bool(step(follower))


def broken(patch: pytest.MonkeyPatch) -> None:
    """From the 12th step on a rank does not come on the device: tokens mean nothing, as the exchange knows."""
    num_waits = 0

    def wait(sampled: Sampled) -> tuple[list[int], list[float]]:
        nonlocal num_waits
        num_waits += 1
        token_ids, logprobs = real(sampled)
        return ([0] * len(token_ids), logprobs) if num_waits >= 12 else (token_ids, logprobs)

    def check(group: TorchCollectives) -> None:
        if num_waits >= 12:
            raise RanksLostError("a rank did not come")

    real = Sampled.wait
    patch.setattr(Sampled, "wait", wait)
    patch.setattr(TorchCollectives, "check", check)


def follow(model: LoadedModel, pages: int) -> None:
    """Takes the steps of the first rank."""
    runner = model.runner(pages, max_sessions=16)
    cache, dtype, window = runner.cache, runner.dtype, runner.sliding_window
    runner.backend = DeviceBackend(cache, dtype, window, kernel=model.kernel, recorder=None, max_shapes=1000)
    follower = Follower(runner)
    while follower.step():
        pass


def serve(
    group: Collectives,
    path: str,
    asked: dict[str, Request],
    is_ahead: bool,
    mistakes: tuple[tuple[str, ...], tuple[str, ...]] = ((), ()),
    pages: int = PAGES,
) -> tuple[dict[str, Result], int, dict[str, list[int]]] | None:
    """On rank 0: results, the number of steps ahead, and all tokens of outcomes by session. Of ranks that were lost,
    there are no results.

    ``mistakes``: names of those of each rank. ``is_ahead``: the first rank's steps are queued.
    """
    _last[0] = None
    model = load(group, path, torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        for name in mistakes[group.rank]:
            globals()[name](patch)
        if group.rank:
            follow(model, pages)
            return None
        pump = Pump(model, None, pages=pages, max_step_tokens=100, late=0.1)
        device = LateDevice(pump.clock, lambda n: 1e-3)
        device.install(patch)
        device.adopt(pump.target.runner, model)
        pump.target.runner.backend.is_asynchronous = is_ahead
        tokens: dict[str, list[int]] = {}
        emit = pump.from_target.extend

        def heard(messages: Any) -> None:
            for each in messages:
                if isinstance(each, Outcome):
                    tokens.setdefault(each.session_id, []).extend(each.token_ids)
            emit(messages)

        pump.target.emit = heard
        try:
            results = pump.run(asked)
        except RanksLostError:
            with contextlib.suppress(EngineError):
                group.broadcast(b"")  # the other one ends, if it is there
            return {}, pump.target.stats.steps_ahead, tokens
        pump.target.close()
        return results, pump.target.stats.steps_ahead, tokens


def storm(group: Collectives, path: str, asked: dict[str, Request], seed: int) -> tuple[Any, Counter[str]] | None:
    """On rank 0: results of sessions with drafts in a storm, and what it has counted."""
    model = load(group, path, torch.float32)
    if group.rank:
        follow(model, PAGES)
        return None
    with pytest.MonkeyPatch.context() as patch:
        pump = Storm(model, pair("llama")[1], patch, seed, targets_die=False, pages=PAGES)
        gone = {f"gone{name}": request for name, request in requests(seed + 1, 6).items()}
        results = pump.run(in_mode(asked | gone, Mode.OVERLAPPED))
        pump.require_totals()
        pump.target.close()
    return {name: results[name] for name in asked}, pump.counts
