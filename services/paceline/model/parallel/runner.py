"""Ranks that take the same steps: the first one decides, the others follow.

    rank 0   plan ─┬─▶ forward ─▶ logits or tokens ─▶ outcomes
                   │      ║  sums inside, the logits' ends outside
    rank 1         └─▶ forward ─▶ nothing

The plan is all that they need. It names the KV pages, whose numbers are the same on every rank. Only the first rank
allocates them; the others clear the same pages before they run the step.

On GPUs no host waits for a device between two steps: a step may begin with tokens that the first rank's GPU still
samples. These go from GPU to GPU at the beginning of the step, so no rank keeps anything from one step to the next.
Each step is announced to all hosts, and has found room on all ranks, before any rank begins it. This also holds while
another step is in flight. A lost rank is noticed when the next step is announced. A rank that hangs on the device is
noticed before a step is committed (``check``).
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from paceline.config import ModelOptions
from paceline.core import cuda
from paceline.core.deferred import Download, upload
from paceline.core.processors import Row
from paceline.core.sampling import RowKeys
from paceline.errors import EngineError, RanksLostError
from paceline.model.compiled.backend import DeviceBackend
from paceline.model.compiled.buckets import Limits
from paceline.model.compiled.graphs import is_out_of_memory, record_steps, release_cached
from paceline.model.kv_cache import KVCache
from paceline.model.parallel.collectives import Collectives
from paceline.model.parallel.devices import rank_device
from paceline.model.parallel.meeting import open_store
from paceline.model.parallel.model import Share
from paceline.model.parallel.shared_memory import connect
from paceline.model.parallel.vocabulary import sample_sharded
from paceline.model.runner import ModelRunner
from paceline.model.step_plan import SequenceStep, StepPlan, StepShape
from paceline.types import Rendezvous

_IDLE_S = 10 * 365 * 86400.0
"""The others wait for a step as long as it takes; a first rank that dies or leaves ends their waiting at once."""
_HEADER = struct.Struct("<IIII")
"""Bytes of the pages that are cleared, of the plan, and of the picks; without a plan of the limits of recordings. Then
the number of the step's tokens that the first rank's device still samples."""
_LIMITS = struct.Struct("<IIII?")
_MULTIPLE = 64
"""Numbers of tokens that shapes do not round up (``padded_tokens``)."""
_START_S = 3600.0
"""A rank may prepare this much longer than another."""


@dataclass(frozen=True, slots=True)
class Picks:
    """Rows of a step's logits whose tokens are sampled on the ranks that hold the logits. All other rows are
    gathered.
    """

    numbers: Tensor
    """[n, 5] int64 on the host: the row, its seed and position, 1 if it is greedy, and the bits of its float32
    temperature, which is 1 on greedy rows."""

    @classmethod
    def of(cls, rows: Sequence[Row | None]) -> Self:
        """Builds the keys of the rows that are not None."""
        picked = [(i, row) for i, row in enumerate(rows) if row is not None]
        keys = torch.tensor([(i, row.state.seed_bits, row.position, row.state.greedy) for i, row in picked])
        temperatures = torch.tensor([row.state.temperature for _, row in picked], dtype=torch.float32)
        return cls(torch.cat((keys, temperatures.view(torch.int32)[:, None].long()), dim=1))

    def encode(self) -> bytes:
        """Packs the keys into a frame for ``decode``."""
        return self.numbers.numpy().tobytes()

    @classmethod
    def decode(cls, frame: bytes) -> Self:
        """Unpacks a frame that another rank has encoded."""
        return cls(torch.frombuffer(bytearray(frame), dtype=torch.int64).view(-1, 5))

    def sample(self, group: Collectives, local: Tensor, vocab: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """``sample_sharded`` of the rows of ``local`` [rows, width], this rank's logits of the tokens ``vocab``."""
        (first, stop), device = vocab, local.device
        index, seeds, positions, greedy, temperatures = upload(self.numbers, device).unbind(-1)
        sampled = (self.numbers[:, 3] == 0).nonzero().squeeze(-1)
        keys = RowKeys(greedy.bool(), seeds, positions, len(self.numbers) - len(sampled))
        picked = local[index, : stop - first]
        return sample_sharded(
            group, picked, first, keys, temperatures.int().view(torch.float32), upload(sampled, device)
        )

    def others(self, num_rows: int) -> list[int]:
        """The rows of the step that are gathered."""
        return sorted({*range(num_rows)}.difference(self.numbers[:, 0].tolist()))


class Sampled:
    """Tokens that the ranks sample, on their way to the first one's host."""

    def __init__(self, token_ids: Tensor, logprobs: Tensor) -> None:
        """Queues the download; waits for nothing. ``token_ids``: [n] int64 on the device. ``logprobs``: [n] float32."""
        self.token_ids = token_ids
        self._download = Download(torch.stack((token_ids.double(), logprobs.double())))

    def wait(self) -> tuple[list[int], list[float]]:
        """Waits for the step: tokens and log-probabilities. If one of these is not finite, the logits had NaN, +inf, or
        -inf only, and the token means nothing."""
        token_ids, logprobs = self._download.wait()[0].tolist()
        return [int(token_id) for token_id in token_ids], logprobs


class NoRoomError(MemoryError):
    """A rank has no memory for a step, which no rank has begun."""


class RankRunner(ModelRunner):
    """A rank's part of each step. Every rank must be given the same steps."""

    def __init__(self, *args: Any, share: Share, step_bytes: Callable[[StepShape], int], **options: Any) -> None:
        """
        Args:
            args, options: see ``ModelRunner``.
            share: the rank's part.
            step_bytes: what a step of a shape allocates.
        """
        super().__init__(*args, **options)
        self.share, self._step_bytes = share, step_bytes
        self.lost = False
        """An exchange has failed: no other can succeed."""

    def run_plan(self, plan: StepPlan) -> tuple[Tensor, Tensor | None]:
        """Runs one step on this rank: logits of the whole vocabulary, and states, which are the same on all ranks."""
        local, states = self._forward(plan)
        return self.gather_logits(local), states

    def _forward(self, plan: StepPlan) -> tuple[Tensor, Tensor | None]:
        """This rank's part of the logits, and states. Tokens that are still being sampled are the first rank's."""
        if plan.drawn is not None:
            drawn = self.share.group.all_gather(plan.drawn)[0]
            plan = plan._replace(drawn=drawn.clamp(min=0))  # a rank that does not come has all bits set
        return super().run_plan(plan)

    def require_room(self, plan: StepPlan) -> None:
        """Finds out whether all ranks have memory for a step, before any of them waits for another within it.

        A replayed step takes none. For others each rank allocates what they take and frees it, which torch keeps for
        them, and tells the others whether it could. On the CPU, where memory is not refused so, no step is looked at.

        Raises:
            NoRoomError: not all have, on every rank.
        """
        backend = self.backend
        if not isinstance(backend, DeviceBackend) or backend.replays(plan, shape := backend.shape_of(plan)):
            return
        reason = None
        try:
            self.reserve_step(shape)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = f"rank {self.share.group.rank}: {error}"
        if not self.share.group.least(int(reason is None)):
            release_cached()
            raise NoRoomError(reason or "another rank has no memory for it")

    def reserve_step(self, shape: StepShape) -> None:
        """Has the allocator keep the memory of a step. Raises torch's error if there is none."""
        torch.empty(self._step_bytes(shape), dtype=torch.uint8, device=self.cache.keys[0].device)

    def run_and_pick(self, plan: StepPlan, picks: Picks) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Logits ``[rows that are not picked, vocab_size]``, of the picked ones tokens and log-probabilities ``[n]``,
        int64 and float32 (see ``sample_sharded``), and states."""
        local, states = self._forward(plan)
        tokens, logprobs = picks.sample(self.share.group, local, self.share.vocab)
        others = upload(picks.others(len(local)), local.device, torch.int64)
        return self.gather_logits(local[others]), tokens, logprobs, states

    def check(self) -> None:
        """Raises RanksLostError if a rank did not come to a step that is done (``ModelRunner.check``)."""
        with self.together():
            pass

    def close(self) -> None:
        """Leaves the other ranks, which end then. Idempotent."""
        self._drain()
        self.share.group.close()

    def _drain(self) -> None:
        """Waits for the steps in flight: ranks read each other's memory in them."""
        device = self.cache.keys[0].device
        if device.type == "cuda" and not self.lost:
            torch.cuda.synchronize(device)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """An exchange that fails leaves the ranks at different steps: none of them can go on (RanksLostError)."""
        try:
            yield
            self.share.group.check()
        except EngineError as error:
            self.lost = True
            raise RanksLostError(str(error)) from error

    def record(self, limits: Limits) -> None:
        """Records the steps (``ModelRunner.record``) whose exchanges can be recorded: larger ones run eagerly."""
        most = self.share.group.recorded_bytes // (self.share.width * self.dtype.itemsize)
        most -= most % _MULTIPLE
        with self.together():
            super().record(replace(limits, max_tokens=min(limits.max_tokens, most)))

    def gather_logits(self, local: Tensor) -> Tensor:
        """Returns logits [n, vocabulary] from each rank's columns [n, vocabulary / ranks]."""
        if not len(local):
            return local.new_empty(0, self.vocab_size)
        return torch.cat(self.share.group.all_gather(local).unbind(), dim=-1)[:, : self.vocab_size]


class LeadersCache(KVCache):
    """The first rank's pages; remembers which were cleared since the last step."""

    def __init__(self, *args: Any) -> None:
        """Allocates the leader's part of the cache (``KVCache``)."""
        super().__init__(*args)
        self.cleared: list[int] = []
        self.state_copies = None  # the other ranks make none

    def clear(self, pages: Sequence[int]) -> None:
        """Zeroes pages on every rank (``KVCache.clear``)."""
        super().clear(pages)
        self.cleared.extend(pages)


class LeadingRunner(RankRunner):
    """The first rank's runner: has the other ranks take every step that it takes."""

    cache: LeadersCache

    def run_plan(self, plan: StepPlan) -> tuple[Tensor, Tensor | None]:
        """Sends the plan to the other ranks and runs it.

        Raises RanksLostError if a rank is gone or does not come in time, and NoRoomError.
        """
        with self.together():
            self._tell(plan, b"")
            self.require_room(plan)
            return super().run_plan(plan)

    def forward_and_pick(
        self, steps: Sequence[SequenceStep], rows: Sequence[Row | None], drawn: Tensor | None = None
    ) -> tuple[Tensor, Sampled, Tensor | None]:
        """Runs ``forward``, but samples tokens in place of the logits where ``rows`` has a row.

        Only for rows whose sole processor is the temperature. Raises as ``run``.

        Args:
            steps: as for ``forward``.
            rows: one for each row of logits; None: its logits are returned.
            drawn: the step's first tokens (``forward_drawn``); None: all are in ``steps``.

        Returns:
            Logits ``[number of None, vocab_size]``; tokens and log-probabilities of the other rows; the states of
            ``forward_with_states``, if the model has any.
        """
        plan, picks = self.plan(steps)._replace(drawn=drawn), Picks.of(rows)
        with self.together():
            self._tell(plan, picks.encode())
            self.require_room(plan)
            logits, tokens, logprobs, states = self.run_and_pick(plan, picks)
        return logits, Sampled(tokens, logprobs), None if states is None else self._of_tokens(states, steps)

    def announce(self, limits: Limits, max_len: int) -> None:
        """Has the other ranks record their part of the steps (``Follower``), and waits until all are ready to.

        Raises RanksLostError if a rank is gone.
        """
        if not isinstance(self.backend, DeviceBackend):
            return
        numbers = (limits.max_rows, limits.max_tokens, limits.max_pages, max_len, limits.is_tree)
        with self.together():
            self._send(b"", _LIMITS.pack(*numbers))
            self.share.group.barrier(timeout_s=_START_S)

    def end(self) -> None:
        """There will be no more steps of this runner: the followers' ``step`` returns False."""
        with self.together():
            self.share.group.broadcast(b"")

    def close(self) -> None:
        """Lets the followers end, and leaves them. Idempotent."""
        if not self.lost:
            self._drain()
            with contextlib.suppress(RanksLostError):
                self.end()
            self.lost = True
        super().close()

    def _tell(self, plan: StepPlan, picks: bytes) -> None:
        self._send(plan.encode(), picks, 0 if plan.drawn is None else len(plan.drawn))

    def _send(self, frame: bytes, more: bytes, num_drawn: int = 0) -> None:
        cleared = torch.tensor(self.cache.cleared, dtype=torch.int32).numpy().tobytes()
        header = _HEADER.pack(len(cleared), len(frame), len(more), num_drawn)
        self.share.group.broadcast(header + cleared + frame + more)
        self.cache.cleared.clear()


class Follower:
    """An engine that takes the steps of the first rank until that one leaves."""

    def __init__(self, runner: ModelRunner) -> None:
        """``runner``: of a rank's model."""
        assert isinstance(runner, RankRunner)
        self._runner = runner
        self._ended = False

    def receive(self, messages: Sequence[Any]) -> None:
        """Nobody talks to a follower."""
        assert not messages

    def step(self) -> bool:
        """Waits for the next step and takes it; False if there are no more.

        Raises RanksLostError when a rank has left or does not come.
        """
        runner = self._runner
        if self._ended:
            return False
        with runner.together():
            message = runner.share.group.broadcast(None, timeout_s=_IDLE_S)
            if not message:
                self._ended = True
                return False
            num_cleared, num_plan, num_picks, num_drawn = _HEADER.unpack_from(message)
            start = _HEADER.size + num_cleared
            if num_cleared:
                pages = torch.frombuffer(bytearray(message[_HEADER.size : start]), dtype=torch.int32)
                runner.cache.clear(pages.tolist())
            if not num_plan:
                self._record(message[start:])
                return True
            plan = StepPlan.decode(message[start : start + num_plan])
            if num_drawn:  # the first rank has them
                unknown = torch.zeros(num_drawn, dtype=torch.int64, device=runner.cache.keys[0].device)
                plan = plan._replace(drawn=unknown)
            try:
                runner.require_room(plan)
            except NoRoomError:
                return True  # the first rank tries a smaller one
            if num_picks:
                runner.run_and_pick(plan, Picks.decode(message[start + num_plan :]))
            else:
                runner.run_plan(plan)
        return True

    def _record(self, frame: bytes) -> None:
        """Prepares as the leader's engine does, and records the same steps in the same order."""
        runner, (rows, tokens, pages, max_len, is_tree) = self._runner, _LIMITS.unpack(frame)
        cuda.prepare(runner.vocab_size, runner.dtype, runner.cache.keys[0].device)
        runner.share.group.barrier(timeout_s=_START_S)
        record_steps(runner, Limits(rows, tokens, pages, is_tree), max_len, "auto")

    def wait_s(self) -> float | None:
        """0 while steps may come: waiting for the leader is part of a step. None after the last (``Engine.wait_s``)."""
        return None if self._ended else 0.0

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        """Leaves the other ranks. Idempotent."""
        self._runner.close()


def lead(runner: ModelRunner, use: Callable[[ModelRunner], None]) -> None:
    """Calls ``use`` for a whole model or on the first rank, while the other ranks take the same steps."""
    if isinstance(runner, LeadingRunner):
        try:
            use(runner)
        finally:
            if not runner.lost:
                runner.end()
    elif isinstance(runner, RankRunner):
        follower = Follower(runner)
        while follower.step():
            pass
    else:
        use(runner)


@contextlib.contextmanager
def ranked(
    path: str, options: ModelOptions, rendezvous: Rendezvous | None, taken: Sequence[int] = ()
) -> Iterator[Collectives | None]:
    """The exchange with the other ranks while an engine is built; left if that fails. None without a rendezvous.

    ``path``: of the model. ``taken``: GPUs of another engine (``resolve_devices``).

    Raises:
        ConfigError: the ranks have too few GPUs, or GPUs that cannot exchange.
        EngineError: not all ranks come.
    """
    if rendezvous is None:
        yield None
        return
    group = connect_rank(rendezvous, rank_device(path, options, rendezvous, taken))
    try:
        yield group
    except BaseException:
        group.close()
        raise


def connect_rank(rendezvous: Rendezvous, device: torch.device) -> Collectives:
    """Connects this rank to the others of its group."""
    return connect(
        open_store(rendezvous),
        rendezvous.rank,
        rendezvous.degree,
        device=device,
        timeout_s=rendezvous.timeout_s,
        start_timeout_s=rendezvous.start_timeout_s,
    )


def agreed(value: int, group: Collectives | None) -> int:
    """The smallest of the ranks' values."""
    return value if group is None else group.least(value)
