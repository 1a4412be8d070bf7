"""Sums, gathers and messages between real processes; a rank that dies is told of, and leaves nothing behind."""

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.model.parallel.ranks import WATCHDOG, Ranks, die, pause_and_step, pausing
from tests.support.models import save_pair
from tests.support.rings import slow
from torch import Tensor
from torch.distributed import FileStore

from paceline.checkpoint.files import Checkpoint
from paceline.config import TargetOptions
from paceline.errors import EngineError
from paceline.model.loading import load_model
from paceline.model.parallel import shared_memory
from paceline.model.parallel.collectives import Collectives, TorchCollectives, sum_in_order
from paceline.model.parallel.shared_memory import SharedMemoryCollectives, connect

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64]


@pytest.fixture(scope="module", params=[2, *slow([3])])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(request.param, tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


@pytest.fixture(params=[pytest.param("shared", marks=pytest.mark.compiler), *slow(["gloo"])])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def numbers(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Of very different magnitudes, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(100 * rank + size)
    exponent = torch.randint(-6, 7, (size,), generator=generator)
    return (torch.randn(size, generator=generator) * 2.0**exponent).to(dtype)


def reduce_all(group: Collectives, sizes: list[int], dtype: torch.dtype) -> list[Tensor]:
    return [group.all_reduce(numbers(group.rank, size, dtype).view(1, -1)) for size in sizes]


def gather_all(group: Collectives, sizes: list[int]) -> list[Tensor]:
    return [group.all_gather(torch.arange(size) + 1000 * group.rank) for size in sizes]


def reduce_odd_values(group: Collectives, values: Tensor) -> Tensor:
    return group.all_reduce(values if group.rank == 0 else torch.zeros_like(values))


def reduce_often(group: Collectives, rounds: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    for i in range(rounds):
        size = int(torch.randint(1, 3000, (), generator=generator))
        if group.rank == i % group.degree and i % 50 == 0:
            time.sleep(0.005)  # the others get as far as sleeping
        expected = torch.full((size,), float(sum(range(group.degree)) + i * group.degree))
        if not torch.equal(group.all_reduce(torch.full((size,), float(group.rank + i))), expected):
            return False
    return True


def converse(group: Collectives, source: int, lengths: list[int]) -> list[bytes]:
    return [group.broadcast(b"x" * n if group.rank == source else None, source=source) for n in lengths]


def pick(group: Collectives, logits: Tensor, width: int) -> Tensor:
    first = group.rank * width
    return group.argmax(logits[:, first : first + width], first)


def wait_for_rank_0(group: Collectives, told: Path) -> tuple[float, str]:
    if group.rank == 0:
        until_told(group, told)
        return 0.0, ""
    started = time.monotonic()
    with pytest.raises(EngineError) as caught:
        group.broadcast(None, timeout_s=0.5)
    took_s = time.monotonic() - started
    (told / str(group.rank)).touch()
    return took_s, str(caught.value)


def until_told(group: Collectives, told: Path) -> None:
    """Returns when each other rank has made its file, or after a minute."""
    for _ in range(60_000):
        if len(list(told.iterdir())) == group.degree - 1:
            break
        time.sleep(0.001)


def count_while_waiting(group: Collectives, told: Path) -> int:
    if group.rank == 0:
        until_told(group, told)
        group.all_reduce(torch.zeros(1))
        return 0
    waiter = threading.Thread(target=group.all_reduce, args=(torch.zeros(1),))
    waiter.start()
    count = 0
    while waiter.is_alive() and count < 50:
        time.sleep(0.001)
        count += 1
    (told / str(group.rank)).touch()
    waiter.join()
    return count


def disagree(group: Collectives) -> str:
    try:
        group.all_gather(torch.zeros(1 + group.rank))
    except EngineError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_rank_gets_the_bits_of_a_sum_in_rank_order(ranks: Ranks, transport: str, dtype: torch.dtype) -> None:
    """Whatever the size of the tensor, the empty one too; added in float32 and rounded once."""
    sizes = [1, 7, 0, 4096, 200_001]
    results = ranks.run(reduce_all, sizes, dtype, transport=transport)
    for i, size in enumerate(sizes):
        total = numbers(0, size, dtype)
        total = total.float() if dtype.itemsize < 4 else total
        for rank in range(1, ranks.degree):
            total = total + numbers(rank, size, dtype)
        for result in results:
            assert torch.equal(result[i], total.to(dtype).view(1, -1))


def test_sums_round_as_torch_does(ranks: Ranks, transport: str) -> None:
    """Every bfloat16 is kept, infinities and zeros of both signs too; what is no number stays none."""
    values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for got in ranks.run(reduce_odd_values, values, transport=transport):
        number = ~values.isnan()
        assert torch.equal(got[number], values[number])
        assert bool(got[~number].isnan().all())


def test_the_order_of_a_sum_shows_here() -> None:
    """Negative control: three of the numbers above in another order have other bits."""
    terms = torch.stack([numbers(rank, 4096, torch.float32) for rank in range(3)])
    assert not torch.equal(sum_in_order(terms), sum_in_order(terms.flip(0)))
    assert torch.equal(sum_in_order(terms[:2]), sum_in_order(terms[:2].flip(0)))


def test_tensors_are_gathered_in_rank_order(ranks: Ranks, transport: str) -> None:
    sizes = [1, 3, 70_000]
    for result in ranks.run(gather_all, sizes, transport=transport):
        for size, rows in zip(sizes, result, strict=True):
            assert torch.equal(rows, torch.stack([torch.arange(size) + 1000 * r for r in range(ranks.degree)]))


@pytest.mark.compiler
def test_ranks_that_are_late_now_and_then(ranks: Ranks) -> None:
    """Two thousand sums over shared memory with pauses: no round is mixed up with another."""
    assert ranks.run(reduce_often, 2000, transport="shared") == [True] * ranks.degree


def test_messages_arrive_whole(ranks: Ranks, transport: str) -> None:
    """From any rank, the empty one too."""
    lengths = [0, 1, 1000, 3_000_000]
    for source in range(ranks.degree):
        for received in ranks.run(converse, source, lengths, transport=transport):
            assert received == [b"x" * n for n in lengths]


def test_the_largest_logit_of_all_ranks_wins_and_the_first_of_equals(ranks: Ranks, transport: str) -> None:
    """Also where the last rank has fewer tokens than the others."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 50, (200, 31), generator=generator).to(torch.bfloat16)
    want = torch.stack([(row == row.max()).nonzero()[0, 0] for row in logits])
    for got in ranks.run(pick, logits, -(-31 // ranks.degree), transport=transport):
        assert torch.equal(got, want)


def test_nobody_waits_beyond_the_limit(ranks: Ranks, transport: str, tmp_path: Path) -> None:
    """The limit of one message may be shorter than the group's."""
    for rank, (seconds, said) in enumerate(ranks.run(wait_for_rank_0, tmp_path, transport=transport)[1:], 1):
        assert seconds > 0.4
        assert f"rank {rank} of {ranks.degree}" in said
        assert "0.5 s" in said


def test_other_threads_run_while_a_rank_waits(ranks: Ranks, transport: str, tmp_path: Path) -> None:
    """The interpreter's lock is not held: rank 0 comes when the others have counted meanwhile."""
    assert all(count == 50 for count in ranks.run(count_while_waiting, tmp_path, transport=transport)[1:])


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_ranks_at_different_operations_are_told_so(ranks: Ranks) -> None:
    """Over shared memory, by the size of what they exchange."""
    assert ranks.run(disagree, transport="shared")[0] == (
        "rank 0 of 2: rank 1 exchanges 8 bytes where this rank exchanges 4: they are not at the same operation"
    )


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["all_reduce", "broadcast"])
def test_a_killed_rank_is_told_of_and_leaves_nothing(operation: str, transport: str, tmp_path: Path) -> None:
    """Before the limit, with the reason; no entry stays in /dev/shm."""
    entries = set(os.listdir("/dev/shm"))
    with Ranks(2, tmp_path) as ranks:
        ranks.start(die, 1, operation, timeout_s=300.0, transport=transport)
        ranks.processes[1].join(PATIENCE_S)
        said = ranks.result(0, within_s=240.0)
        assert ranks.processes[1].exitcode == -9
        if transport == "shared":
            assert said == "EngineError: rank 0 of 2: rank 1 has died"
        else:
            assert said.startswith("EngineError: rank 0 of 2 could not gather from the other ranks (limit 300 s): ")
        assert not {entry for entry in os.listdir("/dev/shm") if "paceline" in entry} - entries


@pytest.mark.compiler
@pytest.mark.parametrize("make", [TorchCollectives, SharedMemoryCollectives, connect], ids=lambda make: make.__name__)
def test_ranks_that_never_meet_are_told_so(make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one does not come."""
    assert shared_memory.unavailable() is None
    monkeypatch.setattr(shared_memory, "COMPILE_LIMIT_S", 0.0)
    options = {"device": torch.device("cpu")} if make is connect else {}
    with pytest.raises(EngineError, match=r"rank 0 of 2 could not .* \(limit 1 s\): "):
        make(FileStore(str(tmp_path / "store"), 2), 0, 2, timeout_s=1.0, **options)


@pytest.mark.compiler
def test_memory_that_cannot_be_had_is_told_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is allocated then: memory that is only promised would end a step by SIGBUS."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(EngineError, match=r"rank 0 of 2 could not map the shared memory .*No space left on device"):
        SharedMemoryCollectives(FileStore(str(tmp_path / "store"), 2), 0, 2, timeout_s=1.0)


def test_gloo_is_used_and_said_where_there_is_no_compiler(tmp_path, monkeypatch, caplog) -> None:
    """The reason is in the log; a group of one is enough to see it."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr("paceline.core.native.shutil.which", lambda name: None)
    monkeypatch.setattr(shared_memory, "load_library", shared_memory.load_library.__wrapped__)
    store = FileStore(str(tmp_path / "store"), 1)
    group = connect(store, 0, 1, device=torch.device("cpu"), timeout_s=10.0)
    assert isinstance(group, TorchCollectives)
    assert group.all_reduce(torch.ones(2)).tolist() == [1.0, 1.0]
    group.close()
    (record,) = caplog.records
    assert "exchange over gloo" in record.getMessage()
    assert "there is no C++ compiler (g++, c++, clang++)" in record.getMessage()


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_shared_memory_is_chosen_where_all_ranks_have_it(ranks: Ranks) -> None:
    assert ranks.run(kind, transport="best") == ["SharedMemoryCollectives"] * 2


def kind(group: Collectives) -> str:
    return type(group).__name__


LIMIT_S = 2.0
PATIENCE_S = 600.0
"""A process that has not ended by then never does; a slow machine takes some minutes."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_pair(tmp_path_factory.mktemp("models")) / "target")


@pytest.mark.nightly
@pytest.mark.compiler
def test_ranks_on_gpus_may_load_at_different_speeds_and_wait_for_work_as_long_as_it_takes(checkpoint, tmp_path) -> None:
    """NCCL's watchdog ends a process whose operation is enqueued for longer than the group's limit."""
    alone = pause_and_step_alone(checkpoint)
    with Ranks(2, tmp_path) as ranks:
        first, _ = ranks.run(pause_and_step, checkpoint, 1.5 * LIMIT_S, timeout_s=LIMIT_S, transport="device")
        assert first == alone
        assert all(process.is_alive() for process in ranks.processes)


@pytest.mark.compiler
def test_ranks_that_wait_on_their_gpus_are_ended(checkpoint: str, tmp_path: Path) -> None:
    with Ranks(2, tmp_path) as ranks:
        ranks.start(pause_and_step, checkpoint, 1.5 * LIMIT_S, timeout_s=LIMIT_S, transport="device alone")
        ranks.processes[0].join(PATIENCE_S)
        assert ranks.processes[0].exitcode == WATCHDOG


def pause_and_step_alone(checkpoint: str) -> object:
    """What one rank computes that holds the whole model."""
    options = TargetOptions(device="cpu", dtype="float32", compile=False)
    return pausing(load_model(Checkpoint.open(checkpoint), options).runner(16), 0.0)
