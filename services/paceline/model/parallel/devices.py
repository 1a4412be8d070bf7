"""The GPU of each rank.

    launcher (Ray)   reserves one GPU for each rank, and shows each process only its own
    ranks            tell each other their GPUs in the store where they meet
    every rank       sees the GPUs of all ranks of its node, in the order of the ranks, and takes its own

NCCL, peer access and shared device memory need processes that see each other's GPUs. Without a launcher every rank
sees all GPUs of the machine, and they take consecutive ones.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from itertools import combinations

import torch

from paceline.config import ModelOptions, show_gpus, visible_gpus
from paceline.config.devices import slice_among
from paceline.errors import ConfigError, EngineError
from paceline.model.device import make_current, resolve_device, resolve_devices
from paceline.model.parallel.meeting import open_store
from paceline.types import Rendezvous, ReservedGpus


def rank_device(path: str, options: ModelOptions, rendezvous: Rendezvous, taken: Sequence[int] = ()) -> torch.device:
    """Chooses a rank's device and makes it the current one. All ranks must call it, before torch counts GPUs.

    Args:
        path: of the model.
        options: of the model.
        rendezvous: of this rank.
        taken: GPUs of another engine (``resolve_devices``).

    Raises:
        ConfigError: the ranks have too few GPUs, or GPUs that cannot exchange.
        EngineError: not all ranks come.
    """
    if options.device == "cpu":
        return torch.device("cpu")
    if rendezvous.reserved is None:
        _require_whole(path, rendezvous.degree, visible_gpus() or ())
        return make_current(resolve_devices(options.device, rendezvous.degree, taken)[rendezvous.rank])
    own = rendezvous.reserved()
    owners = _owners(path, _exchange(rendezvous, own))
    on_node = [(rank, name) for rank, (node, name) in owners.items() if node == own.node]
    show_gpus([name for _, name in on_node])
    kind = resolve_device(options.device)
    if not owners:
        return torch.device(kind)  # the CPU: the launcher has reserved no GPU
    if (num_seen := torch.cuda.device_count()) != len(on_node):
        raise ConfigError(
            f"tensor_parallel_size of {path!r} is {rendezvous.degree}: its ranks on this node own the GPUs "
            f"{', '.join(name for _, name in on_node)}, and torch sees {num_seen} GPUs"
        )
    return make_current(torch.device("cuda", [rank for rank, _ in on_node].index(rendezvous.rank)))


def _exchange(rendezvous: Rendezvous, own: ReservedGpus) -> list[ReservedGpus]:
    """The GPUs of every rank, in the order of the ranks."""
    store = open_store(rendezvous, "gpus")
    store.set(f"rank{rendezvous.rank}", json.dumps([own.node, own.names]))
    keys = [f"rank{rank}" for rank in range(rendezvous.degree)]
    limit_s = rendezvous.start_timeout_s
    try:
        store.wait(keys, timedelta(seconds=limit_s))
    except RuntimeError as error:
        raise EngineError(
            f"rank {rendezvous.rank} of {rendezvous.degree} was not told the GPUs of all ranks (limit {limit_s:g} s)"
        ) from error
    return [ReservedGpus(node, tuple(names)) for node, names in (json.loads(store.get(key)) for key in keys)]


def _owners(path: str, ranks: Sequence[ReservedGpus]) -> dict[int, tuple[str, str]]:
    """Node and name of each rank's GPU, in the order of the ranks; {} if no rank has one.

    Raises:
        ConfigError: only some ranks have a GPU, two ranks have the same one, or one of them is a slice.
    """
    owners = {rank: (reserved.node, reserved.names[0]) for rank, reserved in enumerate(ranks) if reserved.names}
    subject = f"tensor_parallel_size of {path!r} is {len(ranks)}"
    if owners and (missing := sorted(set(range(len(ranks))) - owners.keys())):
        raise ConfigError(f"{subject} and no GPU is reserved for rank {missing[0]}: each rank needs one")
    _require_whole(path, len(ranks), [name for _, name in owners.values()])
    for (first, one), (second, other) in combinations(owners.items(), 2):
        if one == other:
            raise ConfigError(
                f"{subject} and GPU {one[1]} is reserved for ranks {first} and {second}: each rank needs its own"
            )
    return owners


def _require_whole(path: str, degree: int, names: Sequence[str]) -> None:
    """Raises ConfigError for slices of GPUs."""
    if sliced := slice_among(names):
        raise ConfigError(
            f"tensor_parallel_size of {path!r} is {degree} and GPU {sliced} is a MIG slice: slices cannot exchange, so "
            "only 1 is allowed"
        )
