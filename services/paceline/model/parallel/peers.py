"""Memory of the other ranks' GPUs, mapped into this process by torch's symmetric memory: what ``one_shot.py`` needs.

No device has run this file: torch's symmetric memory has no CPUs, and no two GPUs were at hand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import GroupName

from paceline.core.cuda import LEAST_CAPABILITY, triton_unavailable
from paceline.model.parallel.collectives import Collectives

if TYPE_CHECKING:
    from paceline.model.parallel.one_shot import OneShot

_NAME = GroupName("paceline")


def open_peers(host: Collectives, store: Store, device: torch.device) -> OneShot | str:
    """This rank's end of exchanges of one launch, or why there are none: the same on all ranks.

    ``host``: the ranks' exchange of host memory. Raises EngineError if a rank is gone.
    """
    reason = _unavailable(host, device)
    if not _all_can(host, reason):
        return reason or "another rank cannot"
    from paceline.model.parallel.one_shot import OneShot  # imports triton

    memory, owner = list[Tensor](), None
    try:
        memory, owner = _mapped(OneShot.num_bytes(host.degree), host, store, device)
        memory[host.rank].zero_()
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        reason = f"rank {host.rank} cannot map the other GPUs' memory: {str(error).strip().partition(chr(10))[0]}"
    if not _all_can(host, reason):
        return reason or "another rank cannot map the GPUs' memory"
    told = torch.zeros(1, dtype=torch.int32, pin_memory=True)  # the device writes to it where it is
    return OneShot(host.rank, memory, told, limit=int(host.timeout_s * 1e9), owner=owner)


def _unavailable(host: Collectives, device: torch.device) -> str | None:
    if not host.on_one_host:
        return "the ranks may be on several hosts"
    if (reason := triton_unavailable()) is not None:
        return f"it {reason}"
    if torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return f"it needs compute capability {'.'.join(map(str, LEAST_CAPABILITY))}"
    return None


def _all_can(host: Collectives, reason: str | None) -> bool:
    return host.least(int(reason is None)) == 1


def _mapped(num_bytes: int, host: Collectives, store: Store, device: torch.device) -> tuple[list[Tensor], Any]:
    """``num_bytes`` of the memory of each rank's GPU, and what it is mapped by. Raises RuntimeError if that fails."""
    import torch.distributed._symmetric_memory as symmetric  # takes a while

    group = dist.ProcessGroup(store, host.rank, host.degree)  # a name for the store: nothing is exchanged over it
    group._set_group_name(_NAME)
    c10d._register_process_group(_NAME, group)
    try:
        own = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(own, _NAME)
        others = [handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in range(host.degree)]
        return [own if rank == host.rank else other for rank, other in enumerate(others)], handle
    finally:
        c10d._unregister_process_group(_NAME)
