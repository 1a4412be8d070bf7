"""Moves a step to its device and runs it there: the one place where CPU and accelerator differ.

``HostBackend``: the plan's own tensors and masks made from them; eager or compiled. What the CPU has always done.

``DeviceBackend``: the plan is packed into one page-locked buffer (``buckets.py``), which crosses in one copy that
nothing waits for; masks are made on the device. Decoding and verification take one of few shapes, which can be
recorded and replayed as CUDA graphs (``graphs.py``). Without a recording the same padded step runs eagerly: the
slow reference, to which ``selftest.check_replay`` compares every recording at start-up.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from paceline.errors import EngineError
from paceline.model.attention.flashinfer import BLOCK_LEN, Library, Requests
from paceline.model.attention.kernels import Kernel
from paceline.model.attention.schedule import SPLIT, num_splits, walks
from paceline.model.compiled.buckets import Fits, Limits, pack, shapes_to_record, token_shapes
from paceline.model.kv_cache import KVCache
from paceline.model.linear.operator import LinearInputs, LinearPools
from paceline.model.linear.plan import num_numbers
from paceline.model.shapes import QUERY_ROW_LEN, UNBOUNDED
from paceline.model.step_plan import (
    INTEGER_BYTES,
    StepArrays,
    StepShape,
    arrays_of,
    attention_masks,
    attention_seen,
    sizes_of,
    unpack,
)
from paceline.types import PAGE_SIZE

if TYPE_CHECKING:
    from paceline.model.step_plan import StepPlan

StepFunction = Callable[..., Tensor | tuple[Tensor, Tensor]]
"""The traced signature: see ``StepPlan.inputs`` and ``step.py``."""
Outputs = tuple[Tensor, Tensor | None]
"""Logits ``[num_logits, vocab]``; states ``[n, width]``, with rows of padding at the end, or None if the step
has none.
"""

_PROGRESS_S = 10.0
_ROOMS = 64
"""Most shapes whose input memory is kept. An engine decodes in fewer."""
log = logging.getLogger(__name__)


class Backend(Protocol):
    """Runs the steps of one runner; gradients are off."""

    num_unrecorded: int
    """Steps that ran without a recording although there are recordings."""
    longest_row: int
    """Tokens of a query row at most (``Shapes.longest_row``)."""
    is_asynchronous: bool
    """True if ``run`` only queues a step."""
    block_len: int
    """Tokens of a block of a prompt that a library attends to (``attention/flashinfer.py``); 0: there is none."""

    def run(self, step: StepFunction, plan: StepPlan) -> Outputs:
        """Logits ``[plan.num_logits, vocab]``, and states, on the device, which the caller may keep. Does not wait for
        them."""
        ...

    def record(self, step: StepFunction, limits: Limits) -> None:
        """Prepares for the steps of an engine within ``limits``: may take long, once, before the first session."""
        ...


class HostBackend:
    """Steps in the memory of the host."""

    num_unrecorded = 0
    """None is recorded (``Backend.num_unrecorded``)."""
    longest_row = UNBOUNDED
    """Rows are not cut (``Backend.longest_row``)."""
    is_asynchronous = False
    """``run`` returns when the step is done (``Backend.is_asynchronous``)."""
    block_len = 0
    """There is no library (``Backend.block_len``)."""

    def __init__(self, cache: KVCache, dtype: torch.dtype, window: int | None) -> None:
        self._cache, self._dtype, self._window = cache, dtype, window

    def run(self, step: StepFunction, plan: StepPlan) -> Outputs:
        """Runs the step from the host's own memory (``Backend.run``)."""
        if plan.drawn is not None:
            plan.arrays.tokens[: plan.drawn.shape[0]] = plan.drawn
        logits, states = _outputs(run_plan(step, plan, self._cache, self._dtype, self._window))
        return logits[: plan.num_logits], states

    def record(self, step: StepFunction, limits: Limits) -> None:
        """Prepares nothing (``Backend.record``): every shape runs as it is."""


def run_plan(step: StepFunction, plan: StepPlan, cache: KVCache, dtype: torch.dtype, window: int | None) -> Any:
    """The result of ``step`` for a plan: by its own ``run_plan``, if there is one, which makes no tensors of them."""
    own = getattr(step, "run_plan", None)
    return step(*plan.inputs(cache, dtype, window)) if own is None else own(plan, cache, dtype, window)


def _outputs(result: Tensor | tuple[Tensor, Tensor]) -> Outputs:
    """Logits and states that a step returned, without the batch dimension of one."""
    return (result[0], None) if isinstance(result, Tensor) else (result[0][0], result[1][0])


def _set_tokens(buffer: Tensor, token_ids: Tensor | None) -> None:
    """Overwrites the first tokens of a packed step, with which its buffer begins."""
    if token_ids is not None:
        buffer[: INTEGER_BYTES * token_ids.shape[0]].view(torch.int64).copy_(token_ids)


Replay = Callable[[], None]


class Recorder(Protocol):
    """Records a function on the device and returns a callable that replays the recording."""

    def record(self, function: Callable[[], None]) -> Replay:
        """Calls ``function`` as often as it needs. It must read and write the same memory each time."""
        ...

    def has_room(self) -> bool:
        """True if there is memory for one more recording."""
        ...


class _Room(NamedTuple):
    """Device memory for the inputs of a step of one shape, and views of it. Making the views costs more than
    the copy.
    """

    buffer: Tensor
    arrays: StepArrays
    inputs: tuple[Tensor, ...]
    """The first arguments of the traced signature, up to the masks."""
    linear: tuple[list[Tensor], ...]
    """The last argument for a model with linear layers, whose numbers lie after the step's in the buffer; else ()."""

    @classmethod
    def of(cls, shape: StepShape, buffer: Tensor, pools: dict[int, LinearPools]) -> Self:
        it = unpack(shape, buffer)
        index = (it.logits_index, it.write_rows, it.write_tokens, it.page_table, it.gather, it.scatter)
        inputs = it.tokens.unsqueeze(0), it.positions.unsqueeze(0), *index
        linear = (LinearInputs(pools, buffer[shape.num_bytes :].view(torch.int64)).tensors,) if pools else ()
        return cls(buffer, it, inputs, linear)


class DeviceBackend:
    """Steps in the memory of an accelerator. On the CPU it computes the same, for tests."""

    def __init__(
        self,
        cache: KVCache,
        dtype: torch.dtype,
        window: int | None,
        *,
        kernel: Kernel,
        recorder: Recorder | None,
        max_shapes: int,
        least: Callable[[int], int] = int,
        library: Library | None = None,
    ) -> None:
        """
        Args:
            cache, dtype, window, kernel: of the model.
            library: attends to whole blocks of prompts; None: the kernel does.
            recorder: None: no step is recorded, but all run in the same shapes as if they were.
            max_shapes: recordings at most.
            least: the smallest of what all ranks pass, so that they replay the same steps.
        """
        self.device = cache.keys[0].device
        self.is_asynchronous = self.device.type == "cuda"
        """True on an accelerator (``Backend.is_asynchronous``)."""
        self._in_place = kernel == "triton"
        self._library = library
        self.block_len = BLOCK_LEN if library is not None else 0
        """Tokens of a block of a prompt that the library attends to (``Backend.block_len``)."""
        self.longest_row = QUERY_ROW_LEN if self._in_place else UNBOUNDED
        """Tokens of a query row at most (``Backend.longest_row``)."""
        self._cache, self._dtype, self._window = cache, dtype, window
        self._recorder, self._max_shapes = recorder, max_shapes
        self.least = least
        self.shapes: list[StepShape] = []
        self._fits = Fits()
        self._replays: dict[StepShape, Replay] = {}
        self._num_states: dict[StepShape, int] = {}
        self._most_sums: dict[StepShape, int] = {}  # of each recording, as the next
        self._programs: dict[StepShape, int] = {}  # that walk a full row
        self._room = functools.lru_cache(_ROOMS)(self._new_room)
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._logits = torch.empty(0)
        self._states: Tensor | None = None
        self.num_unrecorded = 0
        """Steps that no recording fitted (``Backend.num_unrecorded``): they take several times as long."""

    @property
    def recorded(self) -> list[StepShape]:
        """Shapes whose steps are replayed."""
        return list(self._replays)

    def run(self, step: StepFunction, plan: StepPlan) -> Outputs:
        """Packs the plan into one buffer, copies it and replays or runs the step (``Backend.run``)."""
        shape = self.shape_of(plan)
        if self.replays(plan, shape):
            return self.replay(plan, shape)
        self.num_unrecorded += bool(self._replays)
        return self.compute(step, plan, shape)

    def shape_of(self, plan: StepPlan) -> StepShape:
        """The shape that a plan runs in."""
        return self._fits.best(plan.shape) or plan.shape

    def replays(self, plan: StepPlan, shape: StepShape) -> bool:
        """True if a plan runs by the recording of ``shape``, which takes no memory."""
        return not plan.by_library and shape in self._replays and self._has_room(shape, plan)

    def _has_room(self, shape: StepShape, plan: StepPlan) -> bool:
        """True if the recording of ``shape`` has room for the partial sums of a plan's attention, and for its numbers
        of linear layers."""
        if not self._has_numbers(shape, plan):
            return False
        own, most = plan.shape, self._most_sums.get(shape)
        if most is None or own.tokens * num_splits(shape.pages if own.is_tree else own.pages) <= most:
            return True
        arrays = arrays_of(own, plan.buffer)
        places, splits = sizes_of(arrays.query_rows, arrays.scatter)
        full = places == QUERY_ROW_LEN
        if walks(int(full.sum()), self._programs[shape]):  # they need no sums
            places[full] = 0
        return not own.is_tree and int(places @ splits) <= most

    def most_keys(self, shape: StepShape) -> int:
        """Keys that every token of a recorded step may see: the part of its page tables for whose partial sums it has
        room."""
        if shape not in self._most_sums or shape.is_tree:
            return shape.num_keys
        return min(shape.num_keys, self._most_sums[shape] // shape.tokens * SPLIT * PAGE_SIZE)

    def compute(self, step: StepFunction, plan: StepPlan, shape: StepShape) -> Outputs:
        """Runs ``plan`` in ``shape``, call by call. Steps of one stream follow each other, so all steps of a shape
        share the memory of their inputs.
        """
        room = self._room(shape) if self._has_numbers(shape, plan) else self._new_room(shape, plan)
        packed = room.buffer if self.device.type == "cpu" else self._new_buffer(len(room.buffer), pinned=True)
        self._pack(plan, shape, packed)
        if packed is not room.buffer:
            room.buffer.copy_(packed, non_blocking=True)
        _set_tokens(room.buffer, plan.drawn)
        logits, states = self._call(step, room, self._inputs(room, shape, packed, plan.by_library))
        return logits[: plan.num_logits], None if states is None else states[: plan.shape.tokens]

    def replay(self, plan: StepPlan, shape: StepShape) -> Outputs:
        """Runs ``plan`` by the recording of ``shape``. Steps of one stream follow each other, so they share memory."""
        packed = self._new_buffer(self._num_bytes(shape), pinned=True)
        self._pack(plan, shape, packed)
        self._buffer[: len(packed)].copy_(packed, non_blocking=True)
        _set_tokens(self._buffer, plan.drawn)
        self._replays[shape]()
        states = (
            None if self._states is None else self._states[: min(self._num_states[shape], plan.shape.tokens)].clone()
        )
        return self._logits[: plan.num_logits].clone(), states

    def forget(self, shape: StepShape) -> None:
        """Steps of ``shape`` run eagerly from now on."""
        del self._replays[shape]

    def record(self, step: StepFunction, limits: Limits) -> None:
        """Records the step shapes within ``limits`` (``Backend.record``).

        The largest first: the smaller ones then find their working memory among what is there.

        A shape that the device has no memory for runs eagerly; one that other ranks are in the middle of ends this one
        (EngineError). Raises what else ``step`` raises while it is recorded, with no recording left.
        """
        shapes_of = token_shapes if self._in_place and not limits.is_tree else shapes_to_record
        self.shapes = shapes_of(limits, self._max_shapes)
        self._fits = Fits(self.shapes)
        self._replays.clear()
        self._most_sums.clear()
        if self._recorder is None:
            return
        started = told = time.perf_counter()
        self._buffer = self._new_buffer(max(self._num_bytes(s) for s in self.shapes)).zero_()
        for shape in sorted(self.shapes, key=lambda s: s.cost, reverse=True):
            if not self.least(self._recorder.has_room()):
                log.warning(
                    "no memory to record more than %d of %d step shapes: the others run eagerly",
                    len(self._replays),
                    len(self.shapes),
                )
                break
            try:
                self._record(step, shape, self._recorder)
            except torch.OutOfMemoryError as error:
                reason = str(error).partition("\n")[0]
                if self.least is not int:
                    raise EngineError(f"no memory to record a step that other ranks are in: {reason}") from error
                log.warning("no memory to record a step of %d tokens, which runs eagerly: %s", shape.tokens, reason)
            except BaseException:
                self._replays.clear()
                raise
            if time.perf_counter() - told > _PROGRESS_S:
                told = time.perf_counter()
                done, total = len(self._replays), len(self.shapes)
                logging.getLogger("paceline.startup").info("recording step shapes, %d of %d", done, total)
        log.info(
            "recorded %d of %d step shapes in %.1f s",
            len(self._replays),
            len(self.shapes),
            time.perf_counter() - started,
        )

    def _record(self, step: StepFunction, shape: StepShape, recorder: Recorder) -> None:
        self._fill_blank(shape)
        room = _Room.of(shape, self._buffer[: self._num_bytes(shape)], self._cache.linear_pools)
        if not len(self._logits):  # of the largest shape that there is, in the dtype that the model gives
            most = max(s.logit_rows for s in self.shapes)
            logits, states = self._call(step, room, self._inputs(room, shape))
            self._logits = logits.new_empty(most, logits.shape[1])
            if states is not None:
                self._states = states.new_empty(max(s.tokens for s in self.shapes), states.shape[1])

        def function() -> None:
            seen = self._inputs(room, shape)
            logits, states = self._call(step, room, seen)
            if self._in_place:
                self._most_sums[shape] = min(each.capacity for each in seen)
                self._programs[shape] = min(each.programs for each in seen)
            self._logits[: shape.logit_rows].copy_(logits)
            if states is not None and self._states is not None:
                self._states[: len(states)].copy_(states)
                self._num_states[shape] = len(states)

        replay = recorder.record(function)
        if self._in_place:
            self._most_sums[shape] = self.least(self._most_sums[shape])
            self._programs[shape] = self.least(self._programs[shape])
        if self._most_sums.get(shape, shape.tokens) >= shape.tokens:
            self._replays[shape] = replay

    def _new_room(self, shape: StepShape, plan: StepPlan | None = None) -> _Room:
        """``plan``: the step whose numbers of linear layers must fit; None: the numbers of most steps must."""
        return _Room.of(shape, self._new_buffer(self._num_bytes(shape, plan)), self._cache.linear_pools)

    def _new_buffer(self, num_bytes: int, *, pinned: bool = False) -> Tensor:
        """uint8 [num_bytes] on the device; ``pinned``: in page-locked memory of the host, which torch hands out again
        only when the copy from it is done."""
        if pinned:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def _num_bytes(self, shape: StepShape, plan: StepPlan | None = None) -> int:
        """Bytes of a step of ``shape`` with the numbers of linear layers, if there are any."""
        if not self._cache.linear_pools:
            return shape.num_bytes
        assert not shape.is_tree, "linear layers verify branches, no masked trees"
        num = num_numbers(shape.tokens) if plan is None or plan.linear is None else plan.linear.most_numbers
        return shape.num_bytes + num * INTEGER_BYTES

    def _has_numbers(self, shape: StepShape, plan: StepPlan) -> bool:
        """True if ``shape`` has room for a plan's numbers of linear layers."""
        return plan.linear is None or plan.linear.most_numbers <= num_numbers(shape.tokens)

    def _pack(self, plan: StepPlan, shape: StepShape, buffer: Tensor) -> None:
        """Writes a plan into a buffer of the host."""
        pack(plan, shape, self._cache.scratch_row, buffer)
        if plan.linear is not None:
            numbers = np.frombuffer(plan.linear.encode(), np.int64)
            buffer.numpy()[shape.num_bytes :].view(np.int64)[: len(numbers)] = numbers

    def _fill_blank(self, shape: StepShape) -> None:
        """A step that touches nothing but the scratch page."""
        arrays = unpack(shape, self._buffer.zero_())
        arrays.write_rows.fill_(self._cache.scratch_row)
        arrays.page_table.fill_(self._cache.scratch_row // PAGE_SIZE)
        if shape.is_tree:
            arrays.visible[..., 0] = True

    def _inputs(
        self,
        room: _Room,
        shape: StepShape,
        packed: Tensor | None = None,
        by_library: Sequence[tuple[int, int]] = (),
    ) -> list[Any]:
        """What the step's attention sees (``paged_attention``): masks, or ``Seen`` of attention in place. ``packed``:
        the host's copy of the buffer; None while a step is recorded, whose contents no one knows. ``by_library``: of
        the plan."""
        if not self._in_place:
            return list(attention_masks(room.arrays, self._dtype, self._window))
        sizes, requests = None, None
        if packed is not None:
            arrays = arrays_of(shape, packed)
            places, splits = sizes_of(arrays.query_rows, arrays.scatter)
            if shape.is_tree:
                splits[:] = num_splits(shape.pages)
            if self._library is not None and by_library:
                requests = Requests.of(by_library, arrays.query_rows, arrays.scatter, arrays.page_table)
                whole = requests.whole_rows(arrays.scatter // shape.row_len, places)
                places[whole] = 0
            sizes = places.tolist(), splits.tolist()
        capacity = shape.tokens * num_splits(shape.pages)
        found = attention_seen(room.arrays, self._dtype, self._window, sizes=sizes, capacity=capacity)
        if self._library is not None and requests is not None:
            for seen in found:
                seen.places.index_fill_(0, torch.from_numpy(whole).to(self.device), 0)
                seen.by_library = partial(self._library.attend, requests)
        return found

    def _call(self, step: StepFunction, room: _Room, seen: list[Any]) -> Outputs:
        """Runs ``step`` on the contents of the buffer; returns logits [shape.logit_rows, vocab], and states."""
        return _outputs(step(*room.inputs, seen, self._cache.model_keys, self._cache.model_values, *room.linear))
