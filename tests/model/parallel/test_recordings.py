"""Ranks that record their steps and replay them: the same shapes on all, in the order of the first.

On the CPU, with a recorder that calls again what it was given. Only ``peers.py`` and the recorder need GPUs.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.model.parallel.ranks import TIMEOUT_S, Ranks, run_recorded, run_trial

from paceline.core import cuda
from paceline.errors import EngineError, RanksLostError
from paceline.model.parallel import peers
from paceline.model.parallel.collectives import DeviceCollectives
from paceline.model.parallel.runner import RankRunner

COUNTS = [20, 1, 30, 2, 17, 1]


def run(two: Ranks, path: str, rooms: list[int], late: bool = False) -> list[Any]:
    two.start(run_recorded, path, COUNTS, rooms, late, timeout_s=20.0 if late else TIMEOUT_S, transport="shared")
    return [two.result(rank) for rank in range(2)]


@pytest.mark.compiler
def test_ranks_replay_the_same_shapes_in_turn(two: Ranks, path: str) -> None:
    """With the bits of eager ranks, where no step has a recording, and the shapes are the same."""
    eager, recorded = run(two, path, [0, 0]), run(two, path, [1000, 1000])
    assert [shapes for _, *shapes in eager] == [[[], []]] * 2
    (logits, made, replayed), (_, others_made, others_replayed) = recorded
    assert made == others_made
    assert replayed == others_replayed
    assert len(replayed) == len(COUNTS)
    assert len({shape.tokens for shape in replayed}) > 1
    for mine, other in zip(logits, eager[0][0], strict=True):
        assert torch.equal(mine, other)


@pytest.mark.compiler
def test_ranks_record_what_all_of_them_have_memory_for(two: Ranks, path: str) -> None:
    (_, made, replayed), (_, others_made, others_replayed) = run(two, path, [1000, 3])
    assert len(made) == 3
    assert made == others_made
    assert replayed == others_replayed


@pytest.mark.compiler
def test_a_mutant_that_replays_its_own_last_shape_is_told_of(two: Ranks, path: str) -> None:
    error, other = run(two, path, [1000, 1000], late=True)
    assert isinstance(error, RanksLostError)
    assert isinstance(other, RanksLostError)


@pytest.mark.compiler
def test_ranks_agree_on_the_memory_of_recordings(two: Ranks, path: str) -> None:
    """That of the rank whose recordings take most. The mutant: ranks that size their pages differently."""
    (taken, made), (others_taken, others_made) = two.run(run_trial, path, transport="shared")
    assert made == others_made > 1
    assert taken == others_taken == 2 * made


def test_an_exchange_that_failed_on_the_device_ends_the_step() -> None:
    """The device gives NaN, and who takes the next step is told why. Mutant: a runner that does not ask."""
    group = object.__new__(DeviceCollectives)
    group.rank, group.degree, group.timeout_s = 1, 4, 10.0
    group._one_shot = SimpleNamespace(failed=lambda: True)
    with pytest.raises(EngineError, match=r"rank 1 of 4 could not exchange .* \(limit 10 s\): a rank did not come"):
        group.check()
    runner = object.__new__(RankRunner)
    runner.share = SimpleNamespace(group=group)
    with pytest.raises(RanksLostError, match="a rank did not come"), runner.together():
        pass
    assert runner.lost


def test_what_does_not_fit_goes_the_way_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of whole numbers are gathered by one launch and added here; a tensor beyond the slot crosses NCCL."""
    calls = []
    group = object.__new__(DeviceCollectives)
    group._one_shot = SimpleNamespace(
        takes=lambda x: x.nbytes <= 32,
        sums=lambda x: x.nbytes <= 32 and x.is_floating_point(),
        sum=lambda x: calls.append("sum"),
        gather=lambda x: calls.append("gather") or torch.stack([x, x]),
    )
    monkeypatch.setattr(
        "paceline.model.parallel.collectives.TorchCollectives.all_gather",
        lambda self, x, timeout_s=None: calls.append("nccl") or torch.stack([x, x]),
    )
    group.all_reduce(torch.ones(8))
    assert group.all_reduce(torch.ones(4, dtype=torch.int64)).tolist() == [2] * 4
    assert group.all_reduce(torch.ones(9)).tolist() == [2.0] * 9
    assert calls == ["sum", "gather", "nccl"]


def test_why_the_memory_of_gpus_is_not_mapped_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to torch's own refusal, which is the first that is met here; all ranks have to agree."""
    host = SimpleNamespace(rank=0, degree=1, on_one_host=False, timeout_s=1.0, least=int)

    def reason() -> Any:
        return peers.open_peers(host, dist.HashStore(), torch.device("cpu"))

    assert reason() == "the ranks may be on several hosts"
    host.on_one_host = True
    monkeypatch.setattr(peers, "triton_unavailable", lambda: "needs the package triton, which is not installed")
    assert reason() == "it needs the package triton, which is not installed"
    monkeypatch.setattr(peers, "triton_unavailable", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert reason() == "it needs compute capability 8.0"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: cuda.LEAST_CAPABILITY)
    host.least = lambda value: 0
    assert reason() == "another rank cannot"
    host.least = int
    kernel = SimpleNamespace(OneShot=SimpleNamespace(num_bytes=lambda degree: 64))
    monkeypatch.setitem(sys.modules, "paceline.model.parallel.one_shot", kernel)
    for _ in range(2):  # what was registered is gone
        assert reason().startswith("rank 0 cannot map the other GPUs' memory: SymmetricMemory does not support device")
