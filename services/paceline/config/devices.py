"""The setting ``device``, and the GPUs that it names. Imports no torch: callers say how many GPUs they see."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticKnownError

from paceline.errors import ConfigError

ALLOWED_DEVICES = "'auto', 'cpu' or 'cuda', or with the number of a GPU 'cuda:N'"
_PATTERN = "^(auto|cpu|cuda(:[0-9]{1,4})?)$"


def _known(device: str) -> str:
    if not re.fullmatch(_PATTERN, device):
        raise PydanticKnownError("literal_error", {"expected": ALLOWED_DEVICES})
    return device


Device = Annotated[str, AfterValidator(_known), Field(json_schema_extra={"pattern": _PATTERN})]
"""Values of a setting ``device``."""


def slice_among(names: Sequence[str]) -> str | None:
    """The first GPU that is a MIG slice. Neither NCCL nor peer access works between slices: ranks need whole GPUs."""
    return next((name for name in names if name.startswith("MIG-")), None)


def needs_gpu(device: str) -> bool:
    """True if the setting names a GPU: ``cuda`` or ``cuda:N``."""
    return device.startswith("cuda")


def gpu_number(device: str) -> int | None:
    """N of ``cuda:N``. None: the setting leaves the number open."""
    _, _, number = device.partition(":")
    return int(number) if number else None


def preferred_gpus(device: str, num_ranks: int) -> tuple[int, ...]:
    """Numbers of the GPUs that an engine owns if no other engine chose before it; () on the CPU."""
    first = gpu_number(device) or 0
    return () if device == "cpu" else tuple(range(first, first + num_ranks))


def choose_gpus(device: str, num_visible: int, num_ranks: int = 1, taken: Sequence[int] = ()) -> list[int]:
    """Returns the number of each rank's GPU.

    Args:
        device: ``auto``, ``cuda`` or ``cuda:N``.
        num_visible: GPUs that the process sees.
        num_ranks: ranks of the engine; no two of them share a GPU.
        taken: GPUs of another engine. ``auto`` and ``cuda`` choose them last.

    Raises:
        ConfigError: there are too few GPUs, or none of that number.
    """
    if num_visible < num_ranks:
        raise ConfigError(
            f"tensor_parallel_size is {num_ranks} and there are {num_visible} GPUs: "
            f"at most {num_visible} are allowed here"
        )
    first = gpu_number(device)
    if first is None:
        free = [number for number in range(num_visible) if number not in taken]
        return [*free, *(number for number in taken if number < num_visible)][:num_ranks]
    if first + num_ranks > num_visible:
        ranks = "" if num_ranks == 1 else f" with tensor_parallel_size {num_ranks}"
        last = num_visible - num_ranks
        allowed = "only 'cuda:0' is" if last == 0 else f"'cuda:0' to 'cuda:{last}' are"
        raise ConfigError(f"device is {device!r}{ranks}: this process sees {num_visible} GPUs, so {allowed} allowed")
    return list(range(first, first + num_ranks))
