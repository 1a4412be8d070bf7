"""Ranks as processes that run the kernel of ``one_shot.py`` in triton's interpreter over shared memory: a script.

``python -m tests.model.parallel.one_shot_ranks CASE [OLD NEW] ..``: runs a case, of the module with each OLD replaced.
Prints ``holds``, or what does not.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.model.parallel import collectives

SOURCE = Path(collectives.__file__).with_name("one_shot.py")
SLOT, BLOCK, TWICE = 8192, 1024, 3000
COUNTS = (1500, 17, 1025, 256)
NEVER = 1 << 40
context = multiprocessing.get_context("fork")


def load(*changes: str) -> Any:
    """The module, with changes: what is replaced, and by what."""
    text = SOURCE.read_text(encoding="utf-8")
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in text, old
        text = text.replace(old, new)
    path = Path(tempfile.mkdtemp()) / "one_shot.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("one_shot", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def numbers(rank: int, call: int, count: int, dtype: torch.dtype) -> Tensor:
    """Of very different magnitudes, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(1000 * call + rank)
    exponent = torch.randint(-6, 7, (count,), generator=generator)
    return (torch.randn(count, generator=generator) * 2.0**exponent).to(dtype)


def on_ranks(module: Any, degree: int, use: Callable[..., None], dtype: torch.dtype, start: int = 0) -> list[Tensor]:
    """What ``use(end, rank, results)`` writes into its rank's results [8, 8, 2048]; calls count from ``start``."""
    memory = [torch.zeros(module.OneShot.num_bytes(degree, SLOT, BLOCK), dtype=torch.uint8) for _ in range(degree)]
    results = [torch.zeros(8, 8, 2048, dtype=dtype).share_memory_() for _ in range(degree)]
    for each in memory:
        each.share_memory_()[: SLOT // BLOCK * degree * 4].view(torch.int32).fill_(start)

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        told = torch.zeros(1, dtype=torch.int32)
        sizes = {"slot_bytes": SLOT, "block_bytes": BLOCK, "twice_bytes": TWICE}
        end = module.OneShot(rank, memory, told, limit=NEVER, timed=False, **sizes)
        end._calls.fill_(start)
        use(end, rank, results[rank])

    ranks = [context.Process(target=run, args=(rank,), daemon=True) for rank in range(degree)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(600)
        assert rank.exitcode == 0, rank
    return results


def wanted(call: int, count: int, degree: int, dtype: torch.dtype) -> list[Tensor]:
    """The sum in the order of the ranks; in bfloat16 also cut off instead of rounded, as the interpreter casts."""
    terms = [numbers(rank, call, count, dtype) for rank in range(degree)]
    sums = [collectives.sum_in_order(torch.stack(terms))]
    if dtype == torch.bfloat16:
        total = terms[0].float()
        for term in terms[1:]:
            total = total + term.float()
        sums.append((total.view(torch.int32) & -65536).view(torch.float32).to(dtype))
    return sums


def sums(module: Any, degree: int, dtype: torch.dtype, start: int = 0) -> str:
    """Sums of tensors of several sizes, ranks out of step."""

    def use(end: Any, rank: int, results: Tensor) -> None:
        pauses = random.Random(rank)
        for call in range(8):
            given = numbers(rank, call, COUNTS[call % 4], dtype)
            time.sleep(pauses.choice((0, 0, 0.01)))
            results[call, 0, : len(given)] = end.sum(given)

    results = on_ranks(module, degree, use, dtype, start)
    for call in range(8):
        count = COUNTS[call % 4]
        for rank, result in enumerate(results):
            if not any(torch.equal(result[call, 0, :count], each) for each in wanted(call, count, degree, dtype)):
                return f"call {call} of rank {rank} of {degree} in {dtype} is another sum"
    return "holds"


def gathers(module: Any) -> str:
    """Tensors of each size of word, between sums."""

    def use(end: Any, rank: int, results: Tensor) -> None:
        for call, dtype in enumerate((torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.float32)):
            given = (torch.arange(300).view(3, 100) % 50 + 60 * rank).to(dtype)
            results[call, :3, :300] = end.gather(given).flatten(1).float()
            end.sum(torch.ones(5))

    results = on_ranks(module, 3, use, torch.float32)
    expected = torch.arange(300) % 50 + 60.0 * torch.arange(3)[:, None]
    good = all(torch.equal(result[call, :3, :300], expected) for result in results for call in range(5))
    return "holds" if good else "a gather is not what the ranks have"


def overtaken(module: Any) -> str:
    """Rank 1 reads what it waited for only when rank 0 has come to the next call, and so has written again."""
    from triton.runtime.interpreter import InterpreterBuilder

    def use(end: Any, rank: int, results: Tensor) -> None:
        counters, barriers = end._memory[rank][:8].view(torch.int32), 0

        def pause(self: Any) -> None:
            nonlocal barriers
            barriers += 1
            while rank == 1 and barriers % 2 == 0 and barriers < 16 and int(counters[0]) <= barriers // 2:
                time.sleep(0.001)

        InterpreterBuilder.create_barrier = pause
        for call in range(8):
            results[call, 0, :17] = end.sum(numbers(rank, call, 17, torch.float32))
        assert barriers == 16

    results = on_ranks(module, 2, use, torch.float32)
    for call in range(8):
        (want,) = wanted(call, 17, 2, torch.float32)
        if not torch.equal(results[1][call, 0, :17], want):
            return f"rank 1 reads in call {call} what rank 0 wrote for the next"
    return "holds"


def deaths(module: Any) -> str:
    """Rank 1 leaves after two calls: rank 0 has NaN from then on, and writes and counts no more."""
    answers = context.Queue()

    def use(end: Any, rank: int, results: Tensor) -> None:
        for call in range(2):
            end.sum(numbers(rank, call, 17, torch.float32))
        if rank == 1:
            return
        end._limit = 50
        healthy = end.failed()
        third = end.sum(torch.ones(17))
        fourth, gathered = end.sum(torch.ones(17)), end.gather(torch.ones(17, dtype=torch.bfloat16))
        counters = end._memory[1][:8].view(torch.int32).tolist()
        isnan = [bool(each.isnan().all()) for each in (third, fourth, gathered)]
        answers.put(((healthy, end.failed()), isnan, counters))

    on_ranks(module, 2, use, torch.float32)
    answer = answers.get(timeout=60)
    return "holds" if answer == ((False, True), [True] * 3, [3, 2]) else str(answer)


class First:
    """Rank 0 of two alone, with calls from ``start`` on; what rank 1 has done is written by hand."""

    def __init__(self, module: Any, start: int) -> None:
        num_bytes = module.OneShot.num_bytes(2, SLOT, BLOCK)
        self.memory = [torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2)]
        sizes = {"slot_bytes": SLOT, "block_bytes": BLOCK, "twice_bytes": TWICE}
        self.end = module.OneShot(0, self.memory, torch.zeros(1, dtype=torch.int32), limit=5, timed=False, **sizes)
        self.end._calls.fill_(start)

    def counters(self, rank: int) -> Tensor:
        """Those in a rank's memory: [blocks, 2] int32."""
        return self.memory[rank][: SLOT // BLOCK * 8].view(torch.int32).view(-1, 2)

    def come(self, block: int, call: int, given: Tensor) -> None:
        """Rank 1 writes a block of its tensor and raises its counter in the memory of rank 0."""
        slot = SLOT // BLOCK * 8 + (call & 1) * SLOT + block * BLOCK
        values = given.view(torch.uint8)[block * BLOCK : (block + 1) * BLOCK]
        self.memory[1][slot : slot + len(values)] = values
        self.counters(0)[block, 1] = call


def wrapped(module: Any) -> str:
    """Rank 1 is a call ahead, or behind, where one of the two counters has wrapped around."""
    last, first, ones = 2**31 - 1, -(2**31), torch.ones(17)
    ahead, behind = First(module, last - 1), First(module, last)
    ahead.come(0, last, ones)
    ahead.counters(0)[0, 1] = first
    behind.come(0, last, ones)
    summed, missed = ahead.end.sum(ones), behind.end.sum(ones)
    if not torch.equal(summed, ones + ones) or ahead.end.failed():
        return "a rank that is ahead is taken for one behind"
    return "holds" if bool(missed.isnan().all()) and behind.end.failed() else "a rank behind is taken for one ahead"


def owners(module: Any) -> str:
    """Of a two-shot sum rank 1 sends its terms, and dies before it takes the sums of its own blocks, every second one:
    rank 0 gives no other numbers for them, and from there on writes and counts no more."""
    first, given = First(module, 0), numbers(1, 0, 1500, torch.float32)
    for block in range(0, 6, 2):
        first.come(block, 1, given)
    result, sum_of_first = first.end.sum(given), 2 * given[: BLOCK // 4]
    isnan = [bool(part.isnan().all()) for part in result.split(BLOCK // 4)]
    counters = first.counters(1)[:6, 0].tolist()
    if isnan != [False, *[True] * 5] or not first.end.failed():
        return f"blocks without a sum: {isnan}"
    if not torch.equal(result[: BLOCK // 4], sum_of_first):
        return "the block that was complete is another sum"
    return "holds" if counters == [1, 1, 0, 0, 0, 0] else f"rank 0 has counted {counters}"


F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CASES: dict[str, Callable[[Any], str]] = {
    **{f"{degree} {str(dtype)[6:]}": lambda m, d=degree, t=dtype: sums(m, d, t) for degree, dtype in (
        (2, F32), (2, F16), (2, BF16), (3, F32), (3, F16), (3, BF16), (4, F32)
    )},
    "wrap": lambda module: sums(module, 2, F32, 2**31 - 4),
    "gathers": gathers,
    "overtaken": overtaken,
    "deaths": deaths,
    "wrapped": wrapped,
    "owners": owners,
}  # fmt: skip

if __name__ == "__main__":
    case, *change = sys.argv[1:]
    names = list(CASES) if case == "all" else [case]
    print(next((said for name in names if (said := CASES[name](load(*change))) != "holds"), "holds"))
