"""A machine with GPUs, by which ``torch.cuda`` is replaced. Each thread is a process of its own."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch


@dataclass
class Process(threading.local):
    """What one process sees of the GPUs."""

    visible: list[str] | None = None
    """The value of CUDA_VISIBLE_DEVICES; None: it is not set."""
    counted: list[str] | None = None
    """GPUs that the driver has found, once it was asked: later values of the variable do not count."""
    current: torch.device | None = None


@dataclass
class Machine:
    """A machine, and the process that runs in this thread."""

    gpus: Sequence[str]
    process: Process = field(default_factory=Process)

    def show(self, names: Sequence[str]) -> None:
        """Sets CUDA_VISIBLE_DEVICES."""
        self.process.visible = list(names)

    def found(self) -> list[str]:
        """GPUs of the process, by their names on the machine."""
        if self.process.counted is None:
            visible = self.process.visible
            self.process.counted = [*self.gpus] if visible is None else [gpu for gpu in visible if gpu in self.gpus]
        return self.process.counted

    def gpu(self, device: torch.device) -> str:
        """Name of the GPU that a device is in this process."""
        assert device == self.process.current, "it is the current one"
        return self.found()[device.index]


def machine_of(monkeypatch: pytest.MonkeyPatch, gpus: int | Sequence[str]) -> Machine:
    """A machine with these GPUs in place of this one."""
    from paceline.model.parallel import devices

    machine = Machine([str(number) for number in range(gpus)] if isinstance(gpus, int) else gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(machine.found()))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(machine.found()))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(machine.process, "current", device))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    monkeypatch.setattr(devices, "show_gpus", machine.show)
    monkeypatch.setattr(devices, "visible_gpus", lambda: machine.process.visible)
    return machine
