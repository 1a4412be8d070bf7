"""GPUs of this machine, and whether torch can use them, without loading torch or a driver."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from paceline.config import visible_gpus

DRIVER = Path("/proc/driver/nvidia/gpus")
OTHER_DEVICES = (Path("/dev/kfd"), Path("/dev/dxg"))
"""Devices of which the number of GPUs cannot be read: AMD, and Windows' subsystem."""


def num_gpus() -> int | None:
    """GPUs that a process of this machine may use. None: it has some, and how many cannot be told from here."""
    if any(device.exists() for device in OTHER_DEVICES):
        return None
    found = len([*DRIVER.iterdir()]) if DRIVER.is_dir() else 0
    shown = visible_gpus()
    return found if shown is None else min(found, len(shown))


def torch_has_gpus() -> bool:
    """True unless the torch that is installed is one for CPUs only."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return True
    built = re.findall(r"^(?:cuda|hip)\b[^=\n]*= *(.+)$", text, re.MULTILINE)
    return not built or any(value.strip() != "None" for value in built)
