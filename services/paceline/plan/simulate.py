"""One simulated run: with the chains below each outcome (``simulation.py``), or with whole trees (``trees.py``)."""

from __future__ import annotations

from paceline.plan.closed_form import Load, System
from paceline.plan.results import Result
from paceline.plan.simulation import Simulation
from paceline.plan.trees import TreeSimulation
from paceline.types import Mode


def simulate(
    system: System,
    load: Load,
    mode: Mode,
    k: int,
    *,
    seconds: float = 2.0,
    seed: int = 0,
    link_spread: float = 0.0,
) -> Result:
    """Simulates ``seconds`` of one load and returns its result.

    ``link_spread``: as of ``Simulation``. Overlapped decoding has whole trees where ``System.trees`` says so.
    """
    trees = system.trees and mode is Mode.OVERLAPPED and k > 0 and load.drafts > 0
    kind = TreeSimulation if trees else Simulation
    return kind(system, load, mode, k, seconds=seconds, seed=seed, link_spread=link_spread).run()
