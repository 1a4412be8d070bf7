"""How much of the host's time a device hides: `paceline bench parts overlap`.

Time of steps on a stub of an accelerator, which is done with each step ``--device-ms`` after the one before it: of one
rank the CPU time of its thread and what that waits for, so that other processes do not matter; of several, wall time.
The engine, its plans, the packing of steps and the keys of the noise are real; nothing is launched or computed, and
tokens are made up. *serial*: each step is finished before the next one is launched, so a step takes the host's time and
the device's. *ahead*: as on a GPU (``target/flight.py``). *hidden* is the share of the host's time that is gone. Of
several *ranks* the others are processes, which are sent every step and pack it; what ranks exchange on their devices is
left out.

``--drafts``: each session has a draft, whose messages come as soon as an outcome has left; one in four of its tokens is
wrong, and the right one is its sibling. The time to write messages to bytes and back is left out.

    paceline bench parts overlap [--ranks 1 2] [--sessions 1 16 64 256] [--device-ms 8] [--steps 100]
                                 [--repeats 3] [--drafts]
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from paceline.cli.table import table
from paceline.config import LocalConfig, TargetModel, TargetSetup
from paceline.config.memory import tune_engine_process
from paceline.core import sampling, verification
from paceline.core.processors import Row
from paceline.core.tree import Proposal
from paceline.core.verification import Verdict
from paceline.embedded import TARGET_DIR
from paceline.messages import FromTarget, NodeColumns, Nodes, OpenSession, Outcome
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
_PIECE, _AHEAD, _LONGEST = 4, 16, 4096
"""Tokens of a draft's message, the least that it is ahead of the context, and positions of a text."""
_TEXT = [(at * at * 31 + 7 * at) % 1021 + 1 for at in range(_LONGEST)]
"""The token at each position of all texts."""


class StubDevice:
    """Is done with the steps that it is given one after another."""

    def __init__(self, step_s: float, *, is_alone: bool = False) -> None:
        """``is_alone``: no other process takes part, so that ``now`` is the CPU time of this thread and what it has
        waited for."""
        self.step_s, self._is_alone = step_s, is_alone
        self.busy_until = self._waited_s = 0.0

    def now(self) -> float:
        """The time, seconds."""
        return time.thread_time() + self._waited_s if self._is_alone else time.perf_counter()

    def launch(self) -> None:
        """Queues a step."""
        self.busy_until = max(self.busy_until, self.now()) + self.step_s

    def wait(self, until: float) -> None:
        """Returns at that time."""
        if self._is_alone:
            self._waited_s += max(0.0, until - self.now())
            return
        time.sleep(max(0.0, until - time.perf_counter() - _SPIN_S))
        while time.perf_counter() < until:
            pass


class StubBackend(DeviceBackend):
    """Packs steps as for an accelerator, and computes nothing."""

    def __init__(self, device: StubDevice, runner: ModelRunner, max_sessions: int) -> None:
        cache, dtype, window = runner.cache, runner.dtype, runner.sliding_window
        super().__init__(cache, dtype, window, kernel="triton", recorder=None, max_shapes=1024)
        super().record(runner.step_function, Limits(max_sessions, _STEP_TOKENS, _PAGES))
        self.is_asynchronous = True
        self._stub = device
        self._nothing = torch.zeros(_STEP_TOKENS, 1)

    def run(self, step: StepFunction, plan: StepPlan) -> Outputs:
        """Packs the step, and has the stub run it."""
        shape = self._fits.best(plan.shape) or plan.shape
        self._pack(plan, shape, self._new_buffer(self._num_bytes(shape)))
        self._stub.launch()
        return self._nothing[: plan.num_logits], None


def piece(first: int, parent: int, node_id: int) -> tuple[NodeColumns, int, int]:
    """The nodes that a draft sends of ``_PIECE`` positions from ``first`` on; then the right one of the last position,
    below which the next piece goes on, and the first id of that. The likeliest one there is wrong, and has as many
    tokens below it."""
    last = first + _PIECE - 1
    ids = range(node_id, node_id + 2 * _PIECE + 1)
    right, wrong = [*ids[: _PIECE - 1], ids[-1]], ids[_PIECE - 1 : -1]
    parents = [parent, *right[: _PIECE - 1], *wrong[:-1], right[-2]]
    others = [_TEXT[at] % 1021 + 2 for at in range(last, last + len(wrong))]
    tokens = [*_TEXT[first:last], *others, _TEXT[last]]
    probs = [0.9] * (_PIECE - 1) + [0.6] + [0.9] * _PIECE + [0.3]
    return NodeColumns([*ids], parents, tokens, probs), right[-1], ids[-1] + 1


class StubDrafts:
    """The drafts of all sessions, which send their tokens as soon as they are told an outcome."""

    def __init__(self) -> None:
        self.inbox: list[Nodes] = []
        self._pieces: list[NodeColumns] = []
        self._sent: dict[str, int] = {}  # pieces, by session
        parent, node_id = 0, 1
        for first in range(_PROMPT_LEN, _LONGEST - _PIECE, _PIECE):
            nodes, parent, node_id = piece(first, parent, node_id)
            self._pieces.append(nodes)

    def heard(self, messages: Sequence[FromTarget]) -> None:
        """Takes the messages of the target."""
        for message in messages:
            if not isinstance(message, Outcome):
                continue
            if message.finish_reason is not None:
                del self._sent[message.session_id]
                continue
            session_id, context_len = message.session_id, message.context_len + len(message.token_ids)
            sent = self._sent.get(session_id, 0)
            while _PROMPT_LEN + sent * _PIECE < context_len + _AHEAD:
                self.inbox.append(Nodes(session_id, message.epoch, context_len, self._pieces[sent]))
                sent += 1
            self._sent[session_id] = sent

    def take(self) -> list[Nodes]:
        """What they have sent since it was last taken."""
        sent, self.inbox = self.inbox, []
        return sent


def own_tokens(rows: Sequence[Row]) -> tuple[list[int], list[float]]:
    """The target's own token of each row, and its log probability."""
    sampling._drawn(rows)  # the host's part of it
    return [_TEXT[row.position] for row in rows], [0.0] * len(rows)


def drawn_by(device: StubDevice) -> type[Any]:
    """What stands for tokens that the device samples (``Drawn``)."""

    class StubDrawn:
        def __init__(self, logits: Tensor, rows: Sequence[Row]) -> None:
            self._own = own_tokens(rows)
            self.token_ids = torch.zeros(len(rows), dtype=torch.int64)
            self._done_at = device.busy_until

        def verdicts(self, proposals: Sequence[Proposal]) -> list[Verdict]:
            """Waits for the step."""
            device.wait(self._done_at)
            return verification._matches(proposals, *self._own)

    return StubDrawn


def decided_by(device: StubDevice) -> Callable[..., list[Verdict]]:
    """What stands for the decision of a step (``decide``), which waits for it."""

    def decide(logits: Tensor, rows: Sequence[Row], proposals: Sequence[Proposal], rules: object) -> list[Verdict]:
        own = own_tokens(rows)
        device.wait(device.busy_until)
        return verification._matches(proposals, *own)

    return decide


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


def open_sessions(engine: TargetEngine, num_sessions: int, max_tokens: int, mode: Mode) -> None:
    """Opens sessions with prompts of their own."""
    vocab_size = engine.runner.vocab_size
    for index in range(num_sessions):
        prompt = tuple((index * 131 + 7 * at) % vocab_size for at in range(_PROMPT_LEN))
        sampling_params = SamplingParams(max_tokens=max_tokens, temperature=1.0, ignore_eos=True)
        speculation = SpeculationParams(mode=mode)
        name = f"s{index}"
        engine.receive([OpenSession(name, 1, prompt, _PROMPT_LEN, index, sampling_params, speculation, ())])


def step_of(
    engine: TargetEngine, device: StubDevice, num_sessions: int, num_steps: int, drafts: StubDrafts | None
) -> tuple[float, float]:
    """Seconds of a step of decoding sessions, from one's end to the next one's: the median; and its tokens: the mean.

    Messages of drafts are received while a step is in flight, or before the next one where none is.
    """
    num_first = -(-num_sessions * _PROMPT_LEN // (_STEP_TOKENS - num_sessions)) + _FIRST_STEPS
    per_step, mode = (1, Mode.PLAIN) if drafts is None else (2 * _PIECE + 1, Mode.OVERLAPPED)
    open_sessions(engine, num_sessions, per_step * (num_first + num_steps + 1), mode)
    stats, is_serial = engine.stats, not engine.runner.is_asynchronous
    begun, times, emitted = stats.steps, [], []
    while engine.num_sessions:
        if drafts is not None and drafts.inbox and (is_serial or engine.wait_s() is not None):
            engine.receive(drafts.take())
        before = stats.steps
        if not engine.step() and (wait_s := engine.wait_s()) is not None:
            device.wait(device.now() + wait_s)
        if stats.steps > before and num_first <= stats.steps - begun <= num_first + num_steps:
            times.append(device.now())
            emitted.append(stats.tokens_emitted)
            assert engine.num_running == num_sessions
    took_s = statistics.median(after - before for before, after in itertools.pairwise(times))
    return took_s, (emitted[-1] - emitted[0]) / num_steps


def row(
    degree: int, num_sessions: int, device_ms: float, num_steps: int, repeats: int, *, drafted: bool
) -> tuple[str, ...]:
    """The row of a number of ranks and of sessions; ``drafted``: these have drafts. The least of the repeats counts."""
    setup, spawn = new_setup(num_sessions, degree), multiprocessing.get_context("spawn")
    begins, meeting = spawn.Event(), Rendezvous(meeting_file(), degree, timeout_s=60.0) if degree > 1 else None
    others = [
        spawn.Process(target=follow, args=(setup, meeting.of(rank), num_sessions, begins), daemon=True)
        for rank in range(1, degree)
        if meeting is not None
    ]
    for other in others:
        other.start()
    device, drafts = StubDevice(1e-3 * device_ms, is_alone=degree == 1), StubDrafts() if drafted else None
    emit: Callable[[Sequence[FromTarget]], None] = (lambda messages: None) if drafts is None else drafts.heard
    clock: Any = mock.patch.dict(TargetEngine.__init__.__kwdefaults__, clock=device.now)
    with clock, mock.patch.object(TargetEngine, "calibrate"):
        engine = build_target_engine(setup, emit, meeting)
    begins.set()
    engine.runner.backend = backend = StubBackend(device, engine.runner, num_sessions)
    tune_engine_process()
    took: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    with without_exchanges() if others else ExitStack() as stack:
        stack.enter_context(mock.patch.object(target_engine, "Drawn", drawn_by(device)))
        stack.enter_context(mock.patch.object(target_engine, "decide", decided_by(device)))
        stack.enter_context(mock.patch.object(ranks, "Sampled", sampled_by(device)))
        if drafted:
            engine.calibrate()
        for backend.is_asynchronous in (False, True) * repeats:
            took[backend.is_asynchronous].append(step_of(engine, device, num_sessions, num_steps, drafts))
        engine.close()
    for other in others:
        other.join()
    (serial, _), (ahead, tokens) = [(1e3 * seconds, tokens) for seconds, tokens in map(min, took.values())]
    assert backend.num_unrecorded == 0
    assert drafted or engine.stats.steps_ahead > num_steps
    hidden = (serial - ahead) / (serial - device_ms)
    times = (f"{ms:.2f}" for ms in (device_ms, serial, ahead))
    return (str(degree), str(num_sessions), *times, f"{1e3 * tokens / ahead:.0f}", f"{hidden:.0%}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(
        "paceline bench parts overlap", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--device-ms", type=float, default=8.0, help="of a step")
    parser.add_argument("--steps", type=int, default=100, help="per row")
    parser.add_argument("--repeats", type=int, default=3, help="of both ways in turn, of which the least counts")
    parser.add_argument("--drafts", action="store_true", help="of one rank")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows: list[tuple[str, ...]] = [("ranks", "sessions", "device ms", "serial ms", "ahead ms", "tokens/s", "hidden")]
    cells = itertools.product([1] if args.drafts else args.ranks, args.sessions)
    rows += [row(*cell, args.device_ms, args.steps, args.repeats, drafted=args.drafts) for cell in cells]
    print("\n".join(table(rows)))
