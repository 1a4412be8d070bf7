"""Throughput of the same devices and sessions in other modes of decoding, to which a fleet is compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from paceline.plan.closed_form import Load, Prediction, System, best_k, plain, predict
from paceline.plan.results import Result
from paceline.plan.search import seconds_for, slice_of
from paceline.plan.trees import simulate
from paceline.types import Mode


@dataclass(frozen=True, slots=True)
class Devices:
    """Devices of one replica of each kind."""

    target: int = 4
    draft: int = 1

    def of(self, load: Load) -> int:
        """Devices that a fleet takes."""
        return load.targets * self.target + load.drafts * self.draft


@dataclass(frozen=True, slots=True)
class Way:
    """One way to use the devices."""

    name: str
    load: Load
    predicted: Prediction
    simulated: Result
    tokens_per_s: float
    """Simulated, of all sessions."""
    per_device: float
    """Tokens per second for each device in use: devices that are too few for a target are left out."""


def ways(system: System, load: Load, k: int, devices: Devices, *, seed: int = 0) -> Iterator[Way]:
    """Yields every way of decoding with the devices and sessions of ``load``, and requests without a pause.

    ``k``: of overlapped decoding; the others use their best K. Co-located: every replica is a target that drafts for
    itself, on the same total of devices. Its draft's step takes as long as on a draft's own device.
    """
    if load.requests is not None:
        load = replace(load, requests=replace(load.requests, per_s=None))
    alone = replace(load, targets=devices.of(load) // devices.target, drafts=0)
    in_turn = replace(system, colocated=True)
    yield _way("plain", system, alone, plain(system, alone), devices, seed)
    yield _way("co-located", in_turn, alone, best_k(in_turn, alone, Mode.SEQUENTIAL), devices, seed)
    yield _way("sequential", system, load, best_k(system, load, Mode.SEQUENTIAL), devices, seed)
    yield _way("overlapped", system, load, predict(system, load, Mode.OVERLAPPED, k), devices, seed)


def _way(name: str, system: System, load: Load, predicted: Prediction, devices: Devices, seed: int) -> Way:
    some = slice_of(load)
    seconds = seconds_for(some, predicted)
    simulated = simulate(system, some, predicted.mode, predicted.k, seconds=seconds, seed=seed)
    tokens_per_s = simulated.tokens_per_s * load.targets / some.targets
    return Way(name, load, predicted, simulated, tokens_per_s, tokens_per_s / devices.of(load))
