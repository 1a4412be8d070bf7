"""How much of the host's time a device hides: `paceline bench parts overlap`.

Wall time of plain steps on a stub of an accelerator, which is done with each step ``--device-ms`` after the one before
it. The engine, its plans, the packing of steps and the keys of the noise are real; nothing is launched or computed, and
tokens are made up. *serial*: each step is finished before the next one is launched, so a step takes the host's time and
the device's. *ahead*: as on a GPU (``target/flight.py``). *hidden* is the share of the host's time that is gone. Of
several *ranks* the others are processes, which are sent every step and pack it; what ranks exchange on their devices is
left out.

    paceline bench parts overlap [--ranks 1 2] [--sessions 1 16 64 256] [--device-ms 8] [--steps 100]
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from paceline.cli.table import table
from paceline.config import LocalConfig, TargetModel, TargetSetup
from paceline.config.memory import settle
from paceline.core import sampling
from paceline.core.processors import Row
from paceline.core.tree import Proposal
from paceline.core.verification import Verdict
from paceline.embedded import TARGET_DIR
from paceline.messages import OpenSession
from paceline.model.compiled.backend import DeviceBackend, Outputs, StepFunction
from paceline.model.compiled.buckets import Limits
from paceline.model.parallel import runner as ranks
from paceline.model.parallel.runner import Picks, RankRunner
from paceline.model.runner import ModelRunner
from paceline.model.step_plan import StepPlan
from paceline.runtime.ranks import meeting_file
from paceline.target import engine as target_engine
from paceline.target.build import build_target_engine, build_target_follower
from paceline.target.engine import TargetEngine
from paceline.types import Mode, Rendezvous, SamplingParams, SpeculationParams

_PROMPT_LEN, _STEP_TOKENS, _PAGES = 120, 640, 16
_FIRST_STEPS = 20
_SPIN_S = 5e-4
"""Sleep is no more exact than this; the rest is waited for in a loop."""


class StubDevice:
    """Is done with the steps that it is given one after another."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.busy_until = 0.0

    def launch(self) -> None:
        """Queues a step."""
        self.busy_until = max(self.busy_until, time.perf_counter()) + self.step_s

    def wait(self, until: float) -> None:
        """Returns at that time."""
        time.sleep(max(0.0, until - time.perf_counter() - _SPIN_S))
        while time.perf_counter() < until:
            pass


class StubBackend(DeviceBackend):
    """Packs steps as for an accelerator, and computes nothing."""

    def __init__(self, device: StubDevice, runner: ModelRunner, max_sessions: int) -> None:
        cache, dtype, window = runner.cache, runner.dtype, runner.sliding_window
        super().__init__(cache, dtype, window, kernel="triton", recorder=None, max_shapes=1024)
        super().record(runner._step, Limits(max_sessions, _STEP_TOKENS, _PAGES))
        self.is_asynchronous = True
        self._stub = device
        self._nothing = torch.zeros(_STEP_TOKENS, 1)

    def run(self, step: StepFunction, plan: StepPlan) -> Outputs:
        """Packs the step, and has the stub run it."""
        shape = self._fits.best(plan.shape) or plan.shape
        self._pack(plan, shape, self._new_buffer(self._num_bytes(shape)))
        self._stub.launch()
        return self._nothing[: plan.num_logits], None


def drawn_by(device: StubDevice) -> type[Any]:
    """What stands for tokens that the device samples (``Drawn``): the same token for all."""

    class StubDrawn:
        def __init__(self, logits: Tensor, rows: Sequence[Row]) -> None:
            sampling._drawn(rows)  # the host's part of it
            self.token_ids = torch.zeros(len(rows), dtype=torch.int64)
            self._done_at = device.busy_until

        def verdicts(self, proposals: Sequence[Proposal]) -> list[Verdict]:
            """Waits for the step."""
            device.wait(self._done_at)
            return [Verdict(0, (9,), (0.0,)) for _ in proposals]

    return StubDrawn


def sampled_by(device: StubDevice) -> type[Any]:
    """What stands for tokens that several ranks sample (``Sampled``): the same token for all."""

    class StubSampled:
        def __init__(self, token_ids: Tensor, logprobs: Tensor) -> None:
            self.token_ids = token_ids
            self._done_at = device.busy_until

        def wait(self) -> tuple[list[int], list[float]]:
            """Waits for the step."""
            device.wait(self._done_at)
            return [9] * len(self.token_ids), [0.0] * len(self.token_ids)

    return StubSampled


def without_exchanges() -> ExitStack:
    """While it is open, ranks exchange nothing within their steps."""

    def sample(picks: Picks, *_: Any) -> tuple[Tensor, Tensor]:
        return torch.zeros(len(picks.numbers), dtype=torch.int64), torch.zeros(len(picks.numbers))

    stack = ExitStack()
    stack.enter_context(mock.patch.object(Picks, "sample", sample))
    stack.enter_context(mock.patch.object(RankRunner, "_forward", ModelRunner.run_plan))
    stack.enter_context(mock.patch.object(RankRunner, "require_room", return_value=None))
    return stack


def follow(setup: TargetSetup, rendezvous: Rendezvous, max_sessions: int, begins: Any) -> None:
    """Takes the steps of the first rank, and only packs them as soon as ``begins`` is set."""
    torch.set_num_threads(1)
    follower = build_target_follower(setup, rendezvous)
    runner = follower._runner

    def begin(plan: StepPlan) -> None:
        if begins.is_set() and not isinstance(runner.backend, StubBackend):
            runner.backend = StubBackend(StubDevice(0.0), runner, max_sessions)
            without_exchanges()

    with mock.patch.object(runner, "require_room", side_effect=begin):
        while follower.step():
            pass


def new_setup(max_sessions: int, degree: int) -> TargetSetup:
    """A target with the embedded model, which will compute nothing."""
    options: dict[str, Any] = {"dtype": "bfloat16", "compile": False, "batch_invariant": "off"}
    limits: dict[str, Any] = {"max_sessions": max_sessions, "max_step_tokens": _STEP_TOKENS}
    limits["tensor_parallel_size"] = degree
    return LocalConfig(target=TargetModel(path=str(TARGET_DIR), **limits, **options), draft=None).target_setup()


def open_sessions(engine: TargetEngine, num_sessions: int, num_steps: int) -> None:
    """Opens sessions with prompts of their own."""
    vocab_size = engine.runner.vocab_size
    for index in range(num_sessions):
        prompt = tuple((index * 131 + 7 * at) % vocab_size for at in range(_PROMPT_LEN))
        sampling_params = SamplingParams(max_tokens=num_steps, temperature=1.0, ignore_eos=True)
        speculation = SpeculationParams(mode=Mode.PLAIN)
        name = f"s{index}"
        engine.receive([OpenSession(name, 1, prompt, _PROMPT_LEN, index, sampling_params, speculation, ())])


def step_s(engine: TargetEngine, num_sessions: int, num_steps: int) -> float:
    """Seconds of a step of decoding sessions, from one's end to the next one's: the median."""
    num_prefills = -(-num_sessions * _PROMPT_LEN // (_STEP_TOKENS - num_sessions))
    open_sessions(engine, num_sessions, num_prefills + _FIRST_STEPS + num_steps + 1)
    for _ in range(num_prefills + _FIRST_STEPS):
        engine.step()
    times = [time.perf_counter()]
    for _ in range(num_steps):
        engine.step()
        times.append(time.perf_counter())
    assert engine.num_running == num_sessions
    while engine.step():
        pass
    return statistics.median(after - before for before, after in itertools.pairwise(times))


def row(degree: int, num_sessions: int, device_ms: float, num_steps: int) -> tuple[str, ...]:
    """The row of a number of ranks and of sessions."""
    setup, spawn = new_setup(num_sessions, degree), multiprocessing.get_context("spawn")
    begins, meeting = spawn.Event(), Rendezvous(meeting_file(), degree, timeout_s=60.0) if degree > 1 else None
    others = [
        spawn.Process(target=follow, args=(setup, meeting.of(rank), num_sessions, begins), daemon=True)
        for rank in range(1, degree)
        if meeting is not None
    ]
    for other in others:
        other.start()
    engine, device = build_target_engine(setup, lambda messages: None, meeting), StubDevice(1e-3 * device_ms)
    begins.set()
    engine.runner.backend = backend = StubBackend(device, engine.runner, num_sessions)
    settle()
    took = []
    with without_exchanges() if others else ExitStack() as stack:
        stack.enter_context(mock.patch.object(target_engine, "Drawn", drawn_by(device)))
        stack.enter_context(mock.patch.object(ranks, "Sampled", sampled_by(device)))
        with mock.patch.object(engine._scheduler, "schedule_ahead", return_value=[]):
            took.append(1e3 * step_s(engine, num_sessions, num_steps))
        took.append(1e3 * step_s(engine, num_sessions, num_steps))
        engine.close()
    for other in others:
        other.join()
    serial, ahead = took
    assert backend.num_unrecorded == 0
    assert engine.stats.steps_ahead > num_steps
    hidden = (serial - ahead) / (serial - device_ms)
    times = (f"{ms:.2f}" for ms in (device_ms, serial, ahead))
    return (str(degree), str(num_sessions), *times, f"{1e3 * num_sessions / ahead:.0f}", f"{hidden:.0%}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(
        "paceline bench parts overlap", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--device-ms", type=float, default=8.0, help="of a step")
    parser.add_argument("--steps", type=int, default=100, help="per row")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows: list[tuple[str, ...]] = [("ranks", "sessions", "device ms", "serial ms", "ahead ms", "tokens/s", "hidden")]
    cells = itertools.product(args.ranks, args.sessions)
    rows += [row(*cell, args.device_ms, args.steps) for cell in cells]
    print("\n".join(table(rows)))
