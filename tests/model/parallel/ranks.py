"""Ranks in processes of their own, and what the tests let them do."""

from __future__ import annotations

import itertools
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from tests.support.processes import context
from torch import Tensor

from paceline.checkpoint.files import Checkpoint
from paceline.config import cache_dir
from paceline.core.processors import Row, SamplerState
from paceline.core.sampling import process, sample_coupled
from paceline.model import loading
from paceline.model.compiled.backend import DeviceBackend, Outputs
from paceline.model.compiled.buckets import Limits
from paceline.model.compiled.graphs import record_steps, recordings_bytes
from paceline.model.features import OUT, Features
from paceline.model.kv_cache import KVCache
from paceline.model.loading import LoadedModel, prepare
from paceline.model.parallel.collectives import Collectives, DeviceCollectives, TorchCollectives
from paceline.model.parallel.model import load_shard
from paceline.model.parallel.runner import Follower, LeadingRunner, agreed, lead
from paceline.model.parallel.shared_memory import SharedMemoryCollectives, connect
from paceline.model.runner import ModelRunner
from paceline.model.selftest import check_invariance
from paceline.model.step_plan import SequenceStep, StepPlan, StepShape
from paceline.types import SamplingParams, pages_for

TIMEOUT_S = 300.0
TRANSPORTS = ("gloo", "shared")
WATCHDOG = 134
"""Exit status of a process that ``ImpatientGroup`` ends."""


class Ranks:
    """``degree`` processes that call one function after the other, each as one rank. A context manager."""

    def __init__(self, degree: int, folder: Path) -> None:
        self.degree, self._folder, self._numbers = degree, folder, itertools.count()
        self.processes, self._pipes = [], []
        for rank in range(degree):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, degree), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for child in self.processes:
            child.join(10)
            if child.is_alive():
                child.kill()

    def start(
        self, function: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S, transport: str = "gloo"
    ) -> None:
        """Every rank calls ``function(group, *args)`` over a new group: gloo, shared memory, or the best there is. Its
        cache is that of this process.
        """
        store = str(self._folder / f"store{next(self._numbers)}")
        for pipe in self._pipes:
            pipe.send((function, args, store, timeout_s, transport, str(cache_dir())))

    def result(self, rank: int, within_s: float = 900.0) -> Any:
        """What ``rank`` returned, or the exception that it raised."""
        assert self._pipes[rank].poll(within_s), f"rank {rank} does not answer"
        return self._pipes[rank].recv()

    def run(
        self, function: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S, transport: str = "gloo"
    ) -> list[Any]:
        """The results of all ranks; raises what the first of them raised."""
        self.start(function, *args, timeout_s=timeout_s, transport=transport)
        results = [self.result(rank) for rank in range(self.degree)]
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results


def _serve(pipe: Connection, rank: int, degree: int) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            function, args, path, timeout_s, transport, os.environ["PACELINE_CACHE"] = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        group = None
        try:
            group = meet(dist.FileStore(path, degree), rank, degree, timeout_s, transport)
            pipe.send(function(group, *args))
        except Exception as error:
            error.add_note(traceback.format_exc())
            pipe.send(error)
        finally:
            if group is not None:
                group.close()


def meet(store: dist.Store, rank: int, degree: int, timeout_s: float, transport: str) -> Collectives:
    """One rank's end of an exchange."""
    if transport == "shared":
        return SharedMemoryCollectives(store, rank, degree, timeout_s=timeout_s)
    if transport == "gloo":
        return TorchCollectives(store, rank, degree, timeout_s=timeout_s)
    if transport in ("device", "device alone"):
        with patch.object(dist, "ProcessGroupNCCL", ImpatientGroup, create=True):
            host = SharedMemoryCollectives(dist.PrefixStore("host", store), rank, degree, timeout_s=timeout_s)
            kind = DeviceCollectives if transport == "device" else DeviceAlone
            return kind(host, dist.PrefixStore("device", store), device=torch.device("cpu"))
    return connect(store, rank, degree, device=torch.device("cpu"), timeout_s=timeout_s)


class ImpatientGroup:
    """Does with limits what NCCL does: a call's own is ignored, and a watchdog ends the process at the group's."""

    class Options:
        _timeout: timedelta

    def __init__(self, store: dist.Store, rank: int, degree: int, options: Options) -> None:
        self._limit_s = options._timeout.total_seconds()
        self._group: Any = dist.ProcessGroupGloo(store, rank, degree, timedelta(hours=1))

    def allgather(self, outputs: list[Tensor], tensor: Tensor, limit: timedelta) -> ImpatientGroup:
        """Enqueues; ``wait`` returns when it is done."""
        watchdog = threading.Timer(self._limit_s, os._exit, (WATCHDOG,))
        watchdog.daemon = True
        watchdog.start()
        self._group.allgather(outputs, tensor).wait()
        watchdog.cancel()
        return self

    def wait(self) -> None:
        """Nothing is left to wait for."""

    def abort(self) -> None:
        """Leaves."""
        self._group.abort()


class DeviceAlone(DeviceCollectives):
    """Waits on the device as well: what ``DeviceCollectives`` is there to avoid."""

    @property
    def host(self) -> Collectives:
        return self

    def all_gather(self, tensor: Tensor, *, timeout_s: float | None = None) -> Tensor:
        return TorchCollectives.all_gather(self, tensor, timeout_s=timeout_s)


def pause_and_step(group: Collectives, path: str, pause_s: float) -> tuple[int, list[int]] | None:
    """Rank 1 loads later than the others, and rank 0 pauses before and between steps: its greedy tokens."""
    if group.rank == 1:
        time.sleep(pause_s)
    model = load(group, path, torch.float32)
    return led(model, pausing, pause_s)


def pausing(runner: ModelRunner, pause_s: float) -> tuple[int, list[int]]:
    """Greedy tokens of three steps, each after a pause."""
    pages = runner.cache.allocate(1)
    tokens = [11]
    for at in range(3):
        time.sleep(pause_s)
        logits = runner.forward([SequenceStep(tokens[-1:], [at], [at], pages, num_logits=1)])
        tokens.append(int(logits[0].argmax()))
    return runner.vocab_size, tokens


def load(
    group: Collectives, path: str, dtype: torch.dtype, compile: bool = False, quantization: Any = None
) -> LoadedModel:
    """A rank's model."""
    return prepare(load_shard(Checkpoint.open(path), dtype, group, quantization), compile=compile)


def led(model: LoadedModel, use: Callable[..., Any], *args: Any) -> Any:
    """What ``use(runner, *args)`` returns on rank 0, or for a whole model; None on the ranks that follow."""
    if model.share is not None and model.share.group.rank > 0:
        follow(model)
        return None
    runner = model.runner(16)
    result = use(runner, *args)
    if isinstance(runner, LeadingRunner):
        runner.end()
    return result


def follow(model: LoadedModel) -> None:
    """Takes the steps of rank 0's next runner."""
    follower = Follower(model.runner(16))
    while follower.step():
        pass


def forward_all(runner: ModelRunner, texts: Sequence[Sequence[int]], num_greedy: int) -> tuple[list[Tensor], list[int]]:
    """Logits of all tokens of several texts, prefilled together, and greedy tokens after the first text."""
    pages = [runner.cache.allocate(pages_for(len(text) + num_greedy)) for text in texts]
    logits = runner.forward(
        [
            SequenceStep(text, range(len(text)), range(len(text)), own, num_logits=len(text))
            for text, own in zip(texts, pages, strict=True)
        ]
    ).split([len(text) for text in texts])
    tokens = [int(logits[0][-1].argmax())]
    while len(tokens) < num_greedy:
        at = len(texts[0]) + len(tokens) - 1
        row = runner.forward([SequenceStep(tokens[-1:], [at], [at], pages[0], num_logits=1)])
        tokens.append(int(row[0].argmax()))
    return [part.clone() for part in logits], tokens


def run_shard(
    group: Collectives, path: str, dtype: torch.dtype, texts: Sequence[Sequence[int]], num_greedy: int
) -> tuple[tuple[list[Tensor], list[int]] | None, int]:
    """``forward_all`` of rank 0, and the number of the rank's parameters."""
    model = load(group, path, dtype)
    return led(model, forward_all, texts, num_greedy), model.size.num_parameters


def die(group: Collectives, rank: int, operation: str) -> str:
    """Rank ``rank`` is killed while the others wait for it; they say what they are told."""
    group.all_gather(torch.zeros(3))
    if group.rank == rank:
        os.kill(os.getpid(), 9)
    try:
        if operation == "broadcast":
            group.broadcast(None, source=rank)
        else:
            group.all_reduce(torch.ones(5))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def run_compiled(
    group: Collectives, path: str, dtype: torch.dtype, texts: Sequence[Sequence[int]], num_greedy: int
) -> tuple[str, Any, Any]:
    """Kind of the rank's compiled step; of rank 0 also ``forward_all`` eager and compiled."""
    eager = led(load(group, path, dtype), forward_all, texts, num_greedy)
    model = load(group, path, dtype, compile=True)
    compiled = led(model, forward_all, texts, num_greedy)
    return type(getattr(model.step, "step_function", model.step)).__name__, eager, compiled


def run_invariance(group: Collectives, path: str, dtype: torch.dtype, compile: bool) -> str | None:
    """What the self-test of start-up says on rank 0."""
    return led(load(group, path, dtype, compile), lambda runner: str(check_invariance(runner)))


def run_sampled(
    group: Collectives, path: str, rows: Sequence[tuple[int, float]], num_tokens: int
) -> tuple[list[list[int]], list[list[float]], list[list[int]]] | None:
    """Texts of sessions of (seed, temperature; 0 is greedy), sampled where the logits are, their log-probabilities,
    and the tokens that the whole logits give in the same contexts."""
    return led(load(group, path, torch.float32), _sampled, rows, num_tokens)


def _sampled(
    runner: LeadingRunner, rows: Sequence[tuple[int, float]], num_tokens: int
) -> tuple[list[list[int]], list[list[float]], list[list[int]]]:
    states = [
        SamplerState(SamplingParams(temperature=t), s, (11,), vocab_size=runner.vocab_size, device="cpu")
        for s, t in rows
    ]
    pages = [runner.cache.allocate(1) for _ in rows]
    texts: list[list[int]] = [[11] for _ in rows]
    logprobs: list[list[float]] = [[] for _ in rows]
    whole: list[list[int]] = [[] for _ in rows]
    for at in range(num_tokens):
        steps = [SequenceStep([t[-1]], [at], [at], own, num_logits=1) for t, own in zip(texts, pages, strict=True)]
        processed = process(runner.forward(steps), [Row(state) for state in states])
        wanted = sample_coupled(processed)
        token_ids, found = runner.forward_and_pick(steps, [Row(state) for state in states])[1].wait()
        index = torch.tensor(token_ids)[:, None]
        torch.testing.assert_close(torch.tensor(found), processed.log_probs.gather(-1, index)[:, 0])
        for i, token_id in enumerate(token_ids):
            texts[i].append(token_id)
            logprobs[i].append(float(found[i]))
            whole[i].append(int(wanted[i]))
            states[i].append([token_id])
    return [text[1:] for text in texts], logprobs, whole


def die_in_a_step(group: Collectives, path: str, compile: bool) -> str | None:
    """Rank 1 is killed between two steps; what rank 0 is told in the second."""
    model = load(group, path, torch.float32, compile)
    if group.rank == 1:
        threading.Timer(2.0, os.kill, (os.getpid(), 9)).start()
        follow(model)
    runner = model.runner(16)
    steps = [SequenceStep([11, 12, 13], range(3), range(3), runner.cache.allocate(1), num_logits=1)]
    try:
        for _ in range(10_000):
            runner.forward(steps)
            time.sleep(0.01)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


STATES = Features((0, 1, 2, OUT), every_position=True)


def run_states(group: Collectives, path: str, compile: bool) -> tuple[Tensor, Tensor, Tensor, list[int], str] | None:
    """On rank 0: logits and states of a step of two texts, those of a step whose tokens are drawn where the logits are,
    and of compiled ranks what the self-test says."""
    model = prepare(
        load_shard(Checkpoint.open(path), torch.float32, group), compile=compile, features=STATES, attention="sdpa"
    )
    return led(model, _states, compile)


def two_texts(runner: ModelRunner) -> list[SequenceStep]:
    """A step of 7 tokens, with logits of 3."""
    pages = [runner.cache.allocate(1) for _ in range(2)]
    return [
        SequenceStep(range(20, 25), range(5), range(5), pages[0], num_logits=1),
        SequenceStep([30, 31], range(2), range(2), pages[1], num_logits=2),
    ]


def _states(runner: LeadingRunner, tested: bool) -> tuple[Tensor, Tensor, Tensor, list[int], str]:
    steps = two_texts(runner)
    logits, states = runner.forward_with_states(steps)
    greedy = SamplerState(SamplingParams(temperature=0.0), 0, (11,), vocab_size=runner.vocab_size, device="cpu")
    _, sampled, again = runner.forward_and_pick(steps, [Row(greedy)] * len(logits))
    token_ids, _ = sampled.wait()
    for step in steps:
        runner.cache.release(step.pages)
    return logits, states, again, token_ids, str(check_invariance(runner)) if tested else ""


class Recording(DeviceBackend):
    """A device's backend over host memory. Replays by calling again; remembers the shapes that it replayed."""

    late = False
    """True: a mutant, which replays the shape of its step before."""

    def __init__(self, *args: Any, room: int, **options: Any) -> None:
        super().__init__(*args, recorder=self, **options)  # type: ignore[arg-type]
        self.room, self.replayed = room, list[StepShape]()

    def has_room(self) -> bool:
        """``Recorder.has_room``: for ``room`` recordings."""
        self.room -= 1
        return self.room >= 0

    def record(self, *args: Any) -> Any:
        """``Backend.record`` of a step, and ``Recorder.record`` of a function."""
        if len(args) == 2:
            return super().record(*args)
        args[0]()
        return args[0]

    def replay(self, plan: StepPlan, shape: StepShape) -> Outputs:
        """Remembers the shape."""
        last = self.replayed[-1] if self.late and self.replayed else shape
        self.replayed.append(shape)
        recordings = self._replays
        self._replays = {**recordings, shape: recordings[last]}
        try:
            return super().replay(plan, shape)
        finally:
            self._replays = recordings


def run_recorded(
    group: Collectives, path: str, counts: Sequence[int], rooms: Sequence[int], late: bool
) -> tuple[list[Tensor], list[StepShape], list[StepShape]]:
    """Logits of steps of a text with so many tokens each, on rank 0; the shapes that this rank has recorded, and
    replayed.

    ``rooms``: recordings that each rank has memory for. ``late``: rank 1 replays the shape of the step before.
    """

    def backend(cache: KVCache, dtype: torch.dtype, window: int | None, kernel: Any, *options: Any) -> Recording:
        return Recording(cache, dtype, window, kernel=kernel, room=rooms[group.rank], max_shapes=100, least=options[2])

    model, logits = load(group, path, torch.float32), list[Tensor]()
    with patch.object(loading, "make_backend", backend):
        runner = model.runner(16)
    assert isinstance(runner.backend, Recording)
    if group.rank > 0:
        follower = Follower(runner)
        follower.step()
        runner.backend.replayed.clear()
        runner.backend.late = late
        while follower.step():
            pass
    else:
        assert isinstance(runner, LeadingRunner)
        record_steps(runner, Limits(max_rows=4, max_tokens=96, max_pages=4), 2048, "auto")
        runner.backend.replayed.clear()
        pages, at = runner.cache.allocate(pages_for(sum(counts))), 0
        for count in counts:
            span = range(at, at + count)
            tokens = [11 + place % 50 for place in span]
            logits.append(runner.forward([SequenceStep(tokens, span, span, pages, num_logits=count)]))
            at += count
        runner.end()
    return logits, runner.backend.recorded, runner.backend.replayed


def run_trial(group: Collectives, path: str) -> tuple[int, int]:
    """The memory that a trial of recordings takes, of which this rank's take ``1 + rank`` each, and their number."""
    backends: list[Recording] = []

    def backend(cache: KVCache, dtype: torch.dtype, window: int | None, kernel: Any, *options: Any) -> Recording:
        backends.append(Recording(cache, dtype, window, kernel=kernel, room=1000, max_shapes=100, least=options[2]))
        return backends[-1]

    def record(runner: ModelRunner) -> None:
        limits = Limits(max_rows=4, max_tokens=96, max_pages=4)
        lead(runner, lambda runner: record_steps(runner, limits, 2048, "auto"))

    def free_bytes() -> int:
        return agreed(1000 - (1 + group.rank) * sum(len(each.recorded) for each in backends), group)

    model = load(group, path, torch.float32)
    with patch.object(loading, "make_backend", backend):
        return recordings_bytes(lambda: model.runner(4), record, free_bytes), len(backends[0].recorded)
