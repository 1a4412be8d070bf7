"""The best use of some devices for one target with each available drafter, in closed form (``closed_form.py``).

A drafter inside the target drafts in turn with verification, on the target's own devices. A drafter in the draft pool
runs while the target verifies, on devices that could have been targets. A head in the pool needs the target's states,
which take time on the link. So it also drafts in turn, unless its acceptance ahead of its states was measured. Every
forecast is compared with plain decoding by targets on all devices. CPU cores may also share the products of a target,
in the numbers that were measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.plan.closed_form import (
    MOST_LEAVES,
    RANKED,
    Load,
    Prediction,
    System,
    colocated,
    overlapped,
    plain,
    sequential,
)
from paceline.plan.outcomes import Outcomes, crossing, expected_tokens
from paceline.plan.times import StepTable

_AS_GOOD = 0.999
"""Draft lengths K within this share of the best count as equal, and the least of them is taken."""
_MOST_SPLITS = 12
"""Numbers of drafts that are looked at."""


@dataclass(frozen=True, slots=True)
class Site:
    """The hardware and the load: devices, sessions, and the target's step."""

    target: StepTable
    """Seconds of a target step by its tokens."""
    devices: int
    target_devices: int
    """Devices of one target replica. At least one replica fits."""
    sessions: int
    """Number of sessions at once, on all targets together."""
    link_s: float = 0.0002
    """One way between target and draft."""
    link_bytes_per_s: float = 1.25e9
    """Rate at which a target sends states: 10 Gbit/s."""
    shared: Mapping[int, StepTable] = field(default_factory=dict)
    """``target`` by the cores that share a target's products (``cpu_threads``), where that was measured."""

    @property
    def targets(self) -> int:
        """Targets that all devices hold, no more than there are sessions."""
        return min(self.devices // self.target_devices, self.sessions)

    def widths(self) -> Iterator[Site]:
        """This site, and with targets of every number of cores that was measured and fits."""
        yield self
        for cores, target in self.shared.items():
            if cores <= self.devices:
                yield replace(self, target=target, target_devices=cores)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A drafter in numbers."""

    name: str
    acceptance: float
    """Probability that a draft token is accepted, given those before it."""
    step: StepTable
    """Seconds of its forward by its tokens."""
    in_pool: bool
    """True: it runs in draft replicas. False: inside the targets."""
    devices: int = 0
    """Devices of one replica; 0: it runs on cores that are available anyway."""
    one_pass: bool = False
    """One forward makes all tokens of a proposal; else one forward makes one."""
    most_tokens: int = 8
    """The longest proposal."""
    guesses: tuple[int, float] | None = None
    """(n, acceptance): each of its forwards verifies n tokens that a drafter without a model guesses (a vertical
    cascade)."""
    riding_rows: int = 0
    """Extra rows that each session adds to each step of the target (lookahead)."""
    state_bytes: int = 0
    """Bytes that the target sends for every token that it decides (a head in the draft pool)."""
    kept: float | None = None
    """R, the share of a head's accepted tokens that is left where it drafts ahead of its states; None: not known."""
    shared: Mapping[int, StepTable] = field(default_factory=dict)
    """Cores that share the target's products -> ``step`` of a drafter inside it; where missing: ``step``."""
    path: StepTable | None = None
    """Seconds of a path of one session by one call, by its tokens, where ``step`` is not from ``shared``; None: each of
    its tokens takes a forward."""
    on_target_nodes: bool = False
    """Each target has one draft on its own node."""
    has_siblings: bool = False
    """Inside a target it drafts several candidates for each position."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """The best that a drafter is expected to bring on the devices."""

    name: str
    targets: int
    target_devices: int
    """Devices of one target."""
    drafts: int
    predicted: Prediction
    times_plain: float
    """Speedup over plain decoding by targets on all devices."""


def forecasts(site: Site, candidates: Sequence[Candidate]) -> list[Forecast]:
    """Plain decoding and every candidate, the most tokens per second first.

    Candidates whose replicas need a device where the targets leave none are missing.
    """
    found = [one for width in site.widths() for one in all_options(width, candidates)]
    best: dict[str, Forecast] = {}
    base = max(p.tokens_per_s for name, *_, p in found if name == "plain")
    for name, devices, load, p in found:
        forecast = Forecast(name, load.targets, devices, load.drafts, p, p.tokens_per_s / base)
        best[name] = max(best.get(name, forecast), forecast, key=lambda each: each.times_plain)
    return sorted(best.values(), key=lambda each: -each.times_plain)


def all_options(site: Site, candidates: Sequence[Candidate]) -> Iterator[tuple[str, int, Load, Prediction]]:
    """Yields (name, devices of a target, load, prediction) of every division of the devices, at its best K."""
    load = Load(site.sessions, site.targets)
    yield "plain", site.target_devices, load, plain(system_of(site, None), load)
    for candidate in candidates:
        for load, predicted in _options(site, candidate):
            yield candidate.name, site.target_devices, load, predicted


def _options(site: Site, candidate: Candidate) -> Iterator[tuple[Load, Prediction]]:
    for load in _loads(site, candidate):
        tried = [predict_load(site, candidate, load, k) for k in range(1, candidate.most_tokens + 1)]
        best = max(p.tokens_per_s for p in tried)
        yield load, next(p for p in tried if p.tokens_per_s >= _AS_GOOD * best)


def _loads(site: Site, candidate: Candidate) -> Iterator[Load]:
    """The ways to divide the devices among targets and drafts."""
    if not candidate.in_pool or candidate.devices == 0:
        yield Load(site.sessions, site.targets, site.targets if candidate.on_target_nodes else int(candidate.in_pool))
        return
    for targets, drafts in divisions(site.devices, site.target_devices, candidate.devices):
        yield Load(site.sessions, min(targets, site.sessions), drafts)


def divisions(devices: int, target_devices: int, draft_devices: int) -> Iterator[tuple[int, int]]:
    """Yields ways (targets, drafts) to divide the devices, at least one of each.

    Tries about a dozen numbers of drafts if many are possible.
    """
    most = (devices - target_devices) // draft_devices
    growth = max(1.0, most ** (1 / _MOST_SPLITS)) if most > 0 else 1.0
    numbers = {math.ceil(growth**i) for i in range(_MOST_SPLITS + 1)} | set(range(1, min(most, _MOST_SPLITS) + 1))
    for drafts in sorted(n for n in numbers if n <= most):
        yield (devices - drafts * draft_devices) // target_devices, drafts


def predict_load(site: Site, candidate: Candidate, load: Load, k: int) -> Prediction:
    """Predicts a candidate's figures under a load with ``k`` draft tokens."""
    system = system_of(site, candidate, k)
    if candidate.state_bytes:
        return _of_states(site, candidate, system, load, k)
    return overlapped(system, load, k) if candidate.in_pool else colocated(system, load, k)


def _of_states(site: Site, candidate: Candidate, system: System, load: Load, k: int) -> Prediction:
    """A head in the draft pool: ahead of its states where R > 1 / (1 + K t_d / T_v), as the service decides it."""
    accepted = expected_tokens(candidate.acceptance, k) - 1.0
    states_s = load.batch * (1.0 + accepted) * candidate.state_bytes / site.link_bytes_per_s
    system = replace(system, link_s=system.link_s + states_s / 2)  # once a round, where the link counts twice
    drafting_s, verify_s = k * system.draft.seconds(1), system.target.seconds(load.batch * (1 + k))
    if candidate.kept is None or candidate.kept <= 1.0 / (1.0 + drafting_s / verify_s):
        return sequential(system, load, k)
    left = Outcomes.derived(equivalent(candidate.kept * accepted, k))
    return overlapped(replace(system, outcomes=left), load, k)


def system_of(site: Site, candidate: Candidate | None, k: int = 1) -> System:
    """Returns the model's system; its K forwards per proposal cost as much as the candidate's own forwards."""
    tokens = site.sessions * (1 + k)
    if candidate is None:
        return System(site.target, site.target, Outcomes.derived(0.0), max_step_tokens=max(256, tokens))
    step, path = candidate.step, candidate.path
    if not candidate.in_pool and site.target_devices in candidate.shared:
        step, path = candidate.shared[site.target_devices], None
    forwards = 1.0 if candidate.one_pass else float(k)
    if candidate.guesses is not None:
        n, guessed = candidate.guesses
        forwards, step = max(1.0, forwards / expected_tokens(guessed, n)), step.of_rows(n + 1)
    system = System(
        site.target.of_rows(1 + candidate.riding_rows / (1 + k)) if candidate.riding_rows else site.target,
        step.times(forwards / k),
        Outcomes.derived(candidate.acceptance),
        path=path,
        link_s=site.link_s if candidate.in_pool else 0.0,
        max_step_tokens=max(256, tokens),
    )
    if candidate.has_siblings and not candidate.in_pool:
        system = replace(system, ranked=RANKED, most_leaves=MOST_LEAVES)
    return replace(system, colocated=not candidate.in_pool)


def equivalent(accepted: float, n: int) -> float:
    """The one acceptance at which ``accepted`` of n tokens are expected to be accepted."""
    return crossing(lambda acceptance: expected_tokens(acceptance, n) - 1.0 < accepted, 1.0)
