"""The GPU of each rank: those that a launcher has reserved, or consecutive ones of the machine."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tests.support.gpus import Machine, machine_of
from torch._C._distributed_c10d import TCPStore

from paceline.config import TargetOptions
from paceline.errors import ConfigError, EngineError
from paceline.model.parallel.devices import rank_device
from paceline.types import Rendezvous, ReservedGpus

Reserved = Sequence[tuple[str, Sequence[str]]]
"""Node and GPUs of each rank."""


def devices_of(
    machine: Machine, ranks: Reserved, store: str, device: str = "cuda", *, hides: bool = True
) -> list[tuple[list[str], str]]:
    """What each rank sees, and the GPU that it takes. ``hides``: the launcher shows each rank its own GPUs alone."""

    def run(rank: int) -> tuple[list[str], str]:
        node, names = ranks[rank]
        if hides:
            machine.show(names)
        reserved = ReservedGpus(node, tuple(names))
        meeting = Rendezvous(store, len(ranks), rank, start_timeout_s=20, reserved=lambda: reserved)
        chosen = rank_device("a/model", TargetOptions(device=device), meeting)
        return machine.found(), "cpu" if chosen.type == "cpu" else machine.gpu(chosen)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(run, range(len(ranks))))


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"file:{tmp_path / 'meeting'}"


@pytest.mark.parametrize("hides", [True, False], ids=["one GPU is shown to each", "all GPUs are shown to all"])
@pytest.mark.parametrize("names", [["0", "1"], ["2", "3"], ["3", "1"], ["GPU-d0", "GPU-c1"]])
def test_ranks_of_one_host_see_the_gpus_of_all_and_take_their_own(names, hides, store, monkeypatch) -> None:
    """Whatever the launcher shows to each: the second replica of a host does not take the first one's."""
    machine = machine_of(monkeypatch, ["0", "1", "2", "3", "GPU-c1", "GPU-d0"])
    ranks = [("node", [name]) for name in names]
    assert devices_of(machine, ranks, store, hides=hides) == [(names, name) for name in names]


def test_ranks_of_two_hosts_see_those_of_their_own_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same name on another host is another GPU, and ranks of both may come in any order."""
    machine = machine_of(monkeypatch, 4)
    ranks = [("a", ["1"]), ("b", ["1"]), ("b", ["0"]), ("a", ["3"])]
    meeting = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    found = devices_of(machine, ranks, f"tcp:127.0.0.1:{meeting.port}")
    assert found == [(["1", "3"], "1"), (["1", "0"], "1"), (["1", "0"], "0"), (["1", "3"], "3")]


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        ([("a", ["MIG-1"]), ("a", ["MIG-2"])], "GPU MIG-1 is a MIG slice: slices cannot exchange, so only 1 is"),
        ([("a", ["0"]), ("b", ["MIG-2"])], "GPU MIG-2 is a MIG slice"),
        ([("a", ["0"]), ("a", [])], "no GPU is reserved for rank 1: each rank needs one"),
        ([("a", ["0"]), ("a", ["1"]), ("a", ["0"])], "GPU 0 is reserved for ranks 0 and 2: each rank needs its own"),
        ([("a", ["0"]), ("a", ["9"])], "own the GPUs 0, 9, and torch sees 1 GPUs"),
    ],
    ids=["slices", "one slice", "one without a GPU", "one GPU twice", "one that is not there"],
)
def test_gpus_that_ranks_cannot_use_are_refused(ranks, reason, store, monkeypatch) -> None:
    machine = machine_of(monkeypatch, ["0", "1", "2", "3", "MIG-1", "MIG-2"])
    with pytest.raises(ConfigError, match=f"tensor_parallel_size of 'a/model' is {len(ranks)}.*{reason}"):
        devices_of(machine, ranks, store)


def test_ranks_without_reserved_gpus_run_on_the_cpu(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they could see GPUs: these are other replicas'. Asked for CUDA, they are refused."""
    machine = machine_of(monkeypatch, 4)
    ranks: Reserved = [("a", []), ("a", [])]
    assert devices_of(machine, ranks, store, "auto", hides=False) == [([], "cpu")] * 2
    assert devices_of(machine, ranks, store, "cpu", hides=False)[0][1] == "cpu"
    with pytest.raises(ConfigError, match="device is 'cuda' and no CUDA device was found"):
        devices_of(machine, ranks, f"{store}-2", "cuda", hides=False)


def test_a_rank_whose_other_ranks_do_not_come_is_told_so(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_of(monkeypatch, 2)
    own = ReservedGpus("a", ("0",))
    meeting = Rendezvous(store, 2, start_timeout_s=0.1, reserved=lambda: own)
    with pytest.raises(EngineError, match="rank 0 of 2 was not told the GPUs of all ranks"):
        rank_device("a/model", TargetOptions(device="cuda"), meeting)


@pytest.mark.parametrize(
    ("device", "taken", "numbers"),
    [
        ("cuda", (), [0, 1, 2, 3]),
        ("auto", (), [0, 1, 2, 3]),
        ("cuda:3", (), [3, 4, 5, 6]),
        ("auto", (0, 1), [2, 3, 4, 5]),
        ("cuda", range(2, 8), [0, 1, 2, 3]),
        ("cuda:0", (0, 1), [0, 1, 2, 3]),
    ],
)
def test_without_a_launcher_ranks_take_consecutive_gpus(device, taken, numbers, store, monkeypatch) -> None:
    """From the number that the setting names, else those first that no other engine has taken."""
    machine = machine_of(monkeypatch, 8)
    for rank, number in enumerate(numbers):
        chosen = rank_device("a/model", TargetOptions(device=device), Rendezvous(store, 4, rank), taken)
        assert chosen == torch.device("cuda", number) == machine.process.current


@pytest.mark.parametrize(
    ("gpus", "device", "reason"),
    [
        (2, "cuda", "tensor_parallel_size is 4 and there are 2 GPUs: at most 2 are allowed here"),
        (8, "cuda:6", "device is 'cuda:6' with tensor_parallel_size 4: this process sees 8 GPUs, so 'cuda:0' to "),
        (4, "cuda:1", "this process sees 4 GPUs, so only 'cuda:0' is allowed"),
    ],
)
def test_too_few_gpus_are_refused(gpus, device, reason, store, monkeypatch) -> None:
    machine_of(monkeypatch, gpus)
    with pytest.raises(ConfigError, match=reason):
        rank_device("a/model", TargetOptions(device=device), Rendezvous(store, 4))


def test_slices_are_refused_without_a_launcher_too(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_of(monkeypatch, ["MIG-1", "MIG-2"]).show(["MIG-1", "MIG-2"])
    with pytest.raises(ConfigError, match="GPU MIG-1 is a MIG slice"):
        rank_device("a/model", TargetOptions(device="auto"), Rendezvous(store, 2))
