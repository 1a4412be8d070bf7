"""Sums and gathers of the ranks' tensors on GPUs of one host as one launch each, which a CUDA graph can replay.

    rank 0   memory: counters | slot 0 | slot 1   ◀─┐  every rank writes its own tensor, then raises a counter in the
    rank 1   memory: counters | slot 0 | slot 1   ◀─┘  memory of each rank, waits for its own counters, and reads all

One-shot all-reduce (as in TensorRT-LLM and vLLM), with the bits of ``sum_in_order``: terms are added from the first
rank to the last, in float32, and rounded once. Each program exchanges one block of the tensor and counts its calls on
the device. So all calls have the same launch. Slots are used in turn. A rank that writes to a slot for call k + 2 has
seen all ranks reach call k + 1, so all have read its data of call k. Large sums are two-shot. The owner of a block
waits for all terms, replaces its own term by the sum, and only then raises its counters.

A rank that waits longer than the limit is *broken*. It reports this to its host, and all its later results are NaN. It
neither writes nor raises a counter any more, so the other ranks, which may still read from it, end in the same way.

No device has run this: the kernel was tested in triton's interpreter and compiled for devices. Imports triton, so that
it is imported only where this exchange was chosen (``peers.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

_BLOCK_BYTES = 4096
"""Bytes that one program exchanges: 32 for each of its threads."""
SLOT_BYTES = 8 << 20
"""Bytes of the largest tensor that is exchanged so: 512 tokens of 8,192 numbers in 16 bits."""
_TWICE_BYTES = 1 << 20
"""Sums of more bytes are two-shot: a rank takes the sums of its blocks for all, which moves 2 tensors in place of
``degree``."""
_SUMMED = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_COPIED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORDS = {torch.int8: tl.int8, torch.int16: tl.int16, torch.int32: tl.int32, torch.int64: tl.int64}


@triton.jit
def _raise(addresses, rank, place, call):  # type: ignore[no-untyped-def]
    """Sets a counter in the memory of a rank, after all that the program has written."""
    counters = tl.load(addresses + rank).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(counters + place, call, sem="release", scope="sys")


@triton.jit  # type: ignore[untyped-decorator]
def _sum(addresses, slot, inner, DEGREE: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The terms of a block, from the first rank to the last, in float32."""
    first = (tl.load(addresses) + slot).to(tl.pointer_type(DTYPE))
    total = tl.load(first + inner, volatile=True).to(tl.float32)
    for other in tl.static_range(1, DEGREE):
        theirs = (tl.load(addresses + other) + slot).to(tl.pointer_type(DTYPE))
        total += tl.load(theirs + inner, volatile=True).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["count", "limit"])  # type: ignore[untyped-decorator]
def _exchange(  # type: ignore[no-untyped-def]
    addresses,
    calls,
    broken,
    told,
    given,
    result,
    count,
    limit,
    RANK: tl.constexpr,
    DEGREE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    DTYPE: tl.constexpr,
    SUMS: tl.constexpr,
    TWICE: tl.constexpr,
    TIMED: tl.constexpr,
):
    """One block of ``given`` [count]: ``result`` [count] is the sum, or [DEGREE, count] all ranks' tensors. TWICE: the
    block's owner takes the sum for all, and raises its counters when it is there.

    ``addresses``: [DEGREE] int64, of the ranks' memory: NUM_BLOCKS x DEGREE int32 counters and two slots. ``calls``:
    [NUM_BLOCKS] int32, of this rank. ``broken``, ``told``: int32, on the device and for the host. ``limit``: of a
    wait, in nanoseconds if TIMED, else in looks at a counter.
    """
    block = tl.program_id(0)
    inner = tl.arange(0, BLOCK)
    place = block * BLOCK + inner
    exists = place < count
    call = tl.load(calls + block) + 1  # wraps around, as the counters do
    slot = NUM_BLOCKS * DEGREE * 4 + ((call & 1) * NUM_BLOCKS + block) * BLOCK_BYTES
    owner = block % DEGREE if TWICE else block * 0 + RANK
    own = (tl.load(addresses + RANK) + slot).to(tl.pointer_type(DTYPE))
    late = tl.load(broken)
    if late == 0:
        tl.store(own + inner, tl.load(given + place, mask=exists, other=0))
        tl.debug_barrier()  # every thread has written before the counter says so
        if TWICE:
            _raise(addresses, owner, block * DEGREE + RANK, call)
        else:
            for other in tl.static_range(DEGREE):
                _raise(addresses, other, block * DEGREE + RANK, call)
        counters = tl.load(addresses + RANK).to(tl.pointer_type(tl.int32)) + block * DEGREE
        waited = tl.zeros((), tl.int64)
        began = globaltimer() if TIMED else waited
        for other in tl.static_range(DEGREE):
            behind = tl.atomic_add(counters + other, 0, sem="acquire", scope="sys") - call
            awaited = (owner == RANK) | (owner == other)
            while awaited & (behind < 0) & (waited < limit):
                waited = globaltimer() - began if TIMED else waited + 1
                behind = tl.atomic_add(counters + other, 0, sem="acquire", scope="sys") - call
            late |= (awaited & (behind < 0)).to(tl.int32)
        tl.debug_barrier()  # no thread reads before
        if late != 0:
            tl.store(broken, 1)
            tl.store(told, 1)
        elif TWICE:  # noqa: SIM102 - the other condition is known at run time
            if owner == RANK:
                total = _sum(addresses, slot, inner, DEGREE, DTYPE).to(DTYPE)
                tl.debug_barrier()  # every thread has read its terms
                tl.store(own + inner, total)
                tl.debug_barrier()
                for other in tl.static_range(DEGREE):
                    _raise(addresses, other, block * DEGREE + RANK, call)
    tl.store(calls + block, call)
    if SUMS:
        if TWICE:
            theirs = (tl.load(addresses + owner) + slot).to(tl.pointer_type(DTYPE))
            total = tl.load(theirs + inner, volatile=True).to(tl.float32)
        else:
            total = _sum(addresses, slot, inner, DEGREE, DTYPE)
        total = tl.where(late == 0, total, float("nan"))
        tl.store(result + place, total.to(DTYPE), mask=exists)
    else:
        for other in tl.static_range(DEGREE):
            theirs = (tl.load(addresses + other) + slot).to(tl.pointer_type(DTYPE))
            values = tl.load(theirs + inner, volatile=True)
            tl.store(result + other * count + place, tl.where(late == 0, values, -1), mask=exists)  # all ones: NaN


class OneShot:
    """One rank's end. All ranks must make the same calls in the same order, replayed or not, each on one stream."""

    def __init__(
        self,
        rank: int,
        memory: Sequence[Tensor],
        told: Tensor,
        *,
        limit: int,
        timed: bool = True,
        slot_bytes: int = SLOT_BYTES,
        block_bytes: int = _BLOCK_BYTES,
        twice_bytes: int = _TWICE_BYTES,
        owner: Any = None,
    ) -> None:
        """
        Args:
            rank: whose end this is.
            memory: [num_bytes] uint8 of each rank, as this one maps it; all of it zero before the first call.
            told: [1] int32 that the host reads and the device can write.
            limit: of a wait for the other ranks: nanoseconds; without ``timed`` looks at a counter.
            timed: the device has a clock, as the interpreter has not.
            slot_bytes: most bytes of a tensor.
            block_bytes: bytes that a program exchanges, a power of two.
            twice_bytes: sums of more bytes are two-shot.
            owner: what the other ranks' memory is mapped by, for as long as this object is.
        """
        self._rank, self._memory, self._told = rank, memory, told
        self._limit, self._timed, self._owner = limit, timed, owner
        self._twice_bytes = twice_bytes
        self.slot_bytes, self._block_bytes = slot_bytes, block_bytes
        device = memory[rank].device
        self._addresses = torch.tensor([each.data_ptr() for each in memory], device=device)
        self._calls = torch.zeros(slot_bytes // block_bytes, dtype=torch.int32, device=device)
        self._broken = torch.zeros(1, dtype=torch.int32, device=device)

    @staticmethod
    def num_bytes(degree: int, slot_bytes: int = SLOT_BYTES, block_bytes: int = _BLOCK_BYTES) -> int:
        """Bytes of a rank's memory."""
        return slot_bytes // block_bytes * degree * 4 + 2 * slot_bytes

    def takes(self, tensor: Tensor) -> bool:
        """True if ``tensor`` fits a slot, and has something to exchange."""
        return 0 < tensor.nbytes <= self.slot_bytes

    def sums(self, tensor: Tensor) -> bool:
        """True if ``sum`` takes ``tensor``."""
        return self.takes(tensor) and tensor.dtype in _SUMMED

    def sum(self, tensor: Tensor) -> Tensor:
        """The ranks' sum, as ``sum_in_order`` takes it; NaN if a rank did not come (``failed``)."""
        result = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        self._launch(tensor.contiguous(), result, _SUMMED[tensor.dtype], sums=True)
        return result

    def gather(self, tensor: Tensor) -> Tensor:
        """``[degree, *shape]``: the ranks' tensors; all bits are set if a rank did not come (``failed``)."""
        result = tensor.new_empty(len(self._memory), *tensor.shape)
        word = _COPIED[tensor.element_size()]
        self._launch(tensor.contiguous().view(word), result.view(word), _WORDS[word], sums=False)
        return result

    def failed(self) -> bool:
        """True once this rank has waited longer than the limit. Does not wait for the device."""
        return bool(self._told[0])

    def _launch(self, given: Tensor, result: Tensor, dtype: tl.dtype, *, sums: bool) -> None:
        size = self._block_bytes // given.element_size()
        _exchange[(triton.cdiv(given.numel(), size),)](
            self._addresses,
            self._calls,
            self._broken,
            self._told,
            given,
            result,
            given.numel(),
            self._limit,
            RANK=self._rank,
            DEGREE=len(self._memory),
            BLOCK=size,
            BLOCK_BYTES=self._block_bytes,
            NUM_BLOCKS=len(self._calls),
            DTYPE=dtype,
            SUMS=sums,
            TWICE=sums and given.nbytes > self._twice_bytes,
            TIMED=self._timed,
        )
