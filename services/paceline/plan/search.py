"""The search for numbers of targets and drafts and for K: the cheapest tokens that keep the promised time per token.

The closed form examines every K, and numbers of replicas around the least sufficient one. The simulation decides: while
it misses the objective, the next best fleet is taken. Plain decoding has to meet the same objective.

Replicas of a kind are equal and sessions are spread evenly over them, so of a large fleet the search simulates a slice.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any

from paceline.plan.closed_form import Load, Prediction, Requests, System, lookahead, plain, predict
from paceline.plan.outcomes import LEAST_PATH_PROB
from paceline.plan.results import Result
from paceline.plan.trees import simulate
from paceline.types import Mode

_SECONDS_PER_HOUR, _MILLION = 3600.0, 1e6
_TRIALS = 12
"""Fleets that are simulated at most."""
_MOST_ROUNDS = 120_000
"""Session rounds of one simulation, about: a second."""
_WHOLE_ROUNDS = 1_000_000
"""Session rounds of the last simulation, of a whole fleet, about: ten seconds."""
_SLICE_SESSIONS, _SLICE_DRAFTS, _SLICE_TARGETS = 2000, 32, 16
"""Minimum sessions, drafts and targets of a slice."""
_LOOKAHEADS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
_BUDGETS = (16, 32, 64, 128, 256, 512, 1024)
_AS_GOOD = 0.995
TOO_EXPENSIVE = 1.25
"""Times the cheapest so far: from there on more drafts only cost more."""
_STEPS_AHEAD = 4
"""Numbers of drafts that are looked at per doubling."""

MOST_TARGET_SESSIONS, MOST_DRAFT_SESSIONS, MOST_FAN_OUT, MOST_TREE_BUDGET = 1024, 16384, 32, 4096
"""The most that the configuration of a service takes."""


class Objective(StrEnum):
    """The time that has to stay below the limit."""

    MEAN = "mean"
    """A session's mean time per output token (TPOT), and the mean time to a request's first tokens (TTFT)."""
    P99 = "p99"
    """The 99th percentile of the time between two messages to a client, each of 1 to K + 1 tokens, and of TTFT."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Per replica and hour, in any currency."""

    target: float
    draft: float

    def per_hour(self, load: Load) -> float:
        """Price of the fleet."""
        return load.targets * self.target + load.drafts * self.draft

    def per_million(self, load: Load, tokens_per_s: float) -> float:
        """Price of a million tokens."""
        return self.per_hour(load) / _SECONDS_PER_HOUR / tokens_per_s * _MILLION


@dataclass(frozen=True, slots=True)
class Wish:
    """The load, its limits and the bounds of a replica."""

    sessions: int
    """Number of sessions at once."""
    limit_s: float
    objective: Objective = Objective.MEAN
    max_sessions: int = 64
    """Most sessions of one target, by its KV memory."""
    requests: Requests | None = None
    """If they arrive by themselves, ``sessions`` is derived of them, for each fleet: a faster one has fewer at once."""
    ttft_limit_s: float = math.inf
    """Limit of the time to the first tokens; needs ``requests``."""
    on_target_nodes: bool = False
    """Drafts run on cores of the targets' hosts, at most one for each target."""

    @property
    def arrives(self) -> bool:
        """True if requests arrive at a rate of their own."""
        return self.requests is not None and self.requests.per_s is not None

    def load(self, sessions: int, targets: int, drafts: int = 0) -> Load:
        """Load of ``sessions`` sessions of these requests."""
        return Load(sessions, targets, drafts, self.requests)


@dataclass(frozen=True, slots=True)
class Fleet:
    """An answer."""

    load: Load
    predicted: Prediction
    simulated: Result
    simulated_load: Load
    """All of it, or a slice."""
    per_hour: float
    per_million: float
    """Cost of a million tokens at the simulated tokens per second, or at the traffic's rate, if it has one."""


def measure(result: Result, objective: Objective) -> float:
    """Seconds that the objective limits."""
    return result.mean_tpot_s if objective is Objective.MEAN else result.gap_s[99]


def kept(wish: Wish, result: Result) -> bool:
    """Returns whether a simulated fleet keeps both limits."""
    ttft_s = result.mean_ttft_s if wish.objective is Objective.MEAN else result.ttft_s[99]
    return measure(result, wish.objective) <= wish.limit_s and (ttft_s <= wish.ttft_limit_s or wish.requests is None)


def expected(prediction: Prediction, objective: Objective) -> float:
    """Returns whether a fleet keeps both limits in closed form."""
    return prediction.itl_s if objective is Objective.MEAN else prediction.slow_round_s


def concurrency(requests: Requests, itl_s: float, ttft_s: float = 0.0) -> int:
    """Sessions at once that Poisson arrivals exceed 1 % of the time: M/G/infinity, Little's mean, normal tail."""
    assert requests.per_s is not None
    mean = requests.per_s * (ttft_s + requests.output_tokens * itl_s)
    return max(1, math.ceil(mean + 2.33 * math.sqrt(mean)))


def seconds_for(load: Load, prediction: Prediction) -> float:
    """Simulated time: 300 rounds, fewer where very many sessions would take long, at least 25.

    Where requests arrive, a few have to come to their end before the number of sessions is steady.
    """
    seconds = min(300.0, max(25.0, _MOST_ROUNDS / load.sessions)) * prediction.round_s
    requests = load.requests
    if requests is None:
        return seconds
    request_s = prediction.ttft_s + requests.output_tokens * prediction.itl_s
    return max(seconds, (2.0 if requests.per_s is None else 5.0) * request_s)


def slice_of(load: Load) -> Load:
    """Slice of a fleet: replicas and sessions divided by the largest integer that leaves enough of them."""
    fewer = min(
        load.sessions // _SLICE_SESSIONS,
        load.targets // _SLICE_TARGETS,
        load.drafts // _SLICE_DRAFTS if load.drafts else load.targets,
    )
    if fewer <= 1:
        return load
    targets = load.targets // fewer
    share = targets / load.targets
    requests = load.requests
    if requests is not None and requests.per_s is not None:
        requests = replace(requests, per_s=requests.per_s * share)
    return Load(round(load.sessions * share), targets, round(load.drafts * share), requests)


def run(system: System, wish: Wish, load: Load, mode: Mode, k: int, *, seed: int = 0) -> Result:
    """Simulates a fleet for about as long as it takes to tell its rates to a percent."""
    seconds = seconds_for(load, predict(system, load, mode, k))
    if wish.arrives:  # the maximum that has room
        load = replace(load, sessions=wish.max_sessions * load.targets)
    return simulate(system, load, mode, k, seconds=seconds, seed=seed)


def whole(system: System, wish: Wish, fleet: Fleet, *, seed: int = 0) -> Fleet:
    """Simulated without leaving anything out, if only a slice was and that takes ten seconds or so."""
    predicted, load, some = fleet.predicted, fleet.load, fleet.simulated_load
    if some == load or load.sessions * seconds_for(load, predicted) > _WHOLE_ROUNDS * predicted.round_s:
        return fleet
    simulated = run(system, wish, load, predicted.mode, predicted.k, seed=seed)
    per_million = fleet.per_million
    if not wish.arrives:
        per_million *= fleet.simulated.tokens_per_s * load.targets / some.targets / simulated.tokens_per_s
    return replace(fleet, simulated=simulated, simulated_load=load, per_million=per_million)


def cheapest_plain(system: System, wish: Wish, prices: Prices, *, seed: int = 0) -> Fleet | None:
    """Cheapest fleet without drafts; None if even one target per session is too slow."""

    def at(targets: int) -> tuple[Load, Prediction]:
        return _settled(wish, lambda sessions: (lo := wish.load(sessions, targets), plain(system, lo)))

    targets = _least_targets(wish, at)
    if targets is None:
        return None
    for more in range(targets, targets + _TRIALS):
        load, predicted = at(more)
        fleet = _fleet(system, wish, prices, load, predicted, seed)
        if fleet is not None:
            return fleet
    return None


def cheapest(system: System, wish: Wish, prices: Prices, *, seed: int = 0) -> Fleet | None:
    """Overlapped; None if no fleet keeps the limit."""
    candidates = sorted(candidates_of(system, wish, prices), key=lambda c: c[0])
    tried: set[tuple[int, int]] = set()
    for _, load, predicted in candidates:
        if (load.targets, load.drafts) in tried:
            continue  # of one fleet only the K with the cheapest tokens
        if len(tried) == _TRIALS:
            break
        tried.add((load.targets, load.drafts))
        fleet = _fleet(system, wish, prices, load, predicted, seed)
        if fleet is not None:
            return _trimmed(system, wish, prices, fleet, seed)
    return None


def _trimmed(system: System, wish: Wish, prices: Prices, fleet: Fleet, seed: int) -> Fleet:
    """Removes replicas while the simulated fleet keeps the limit and tokens become cheaper: the closed form
    overestimates percentiles, and skips some numbers of drafts."""
    for name in ("targets", "drafts"):
        step = max(1, getattr(fleet.load, name) // 16)
        while step:
            number = getattr(fleet.load, name) - step
            load = replace(fleet.load, **{name: number})
            fewer = None
            enough = load.sessions <= wish.max_sessions * load.targets
            if number >= 1 and enough and (load.drafts <= load.targets or not wish.on_target_nodes):
                predicted = predict(system, load, Mode.OVERLAPPED, fleet.predicted.k)
                fewer = _fleet(system, wish, prices, load, predicted, seed)
            if fewer is not None and fewer.per_million < fleet.per_million:
                fleet = fewer
            else:
                step //= 2
    return fleet


def least_tree_budget(system: System, fleet: Fleet) -> int:
    """The smallest power of two that yields 99.5 % of what 1,024 nodes do."""
    rates = {
        budget: predict(
            replace(system, tree_budget=budget), fleet.load, Mode.OVERLAPPED, fleet.predicted.k
        ).tokens_per_s
        for budget in _BUDGETS
    }
    return next(budget for budget in _BUDGETS if rates[budget] >= _AS_GOOD * rates[_BUDGETS[-1]])


def _fleet(system: System, wish: Wish, prices: Prices, load: Load, predicted: Prediction, seed: int) -> Fleet | None:
    """The fleet with the simulation of a slice of it; None if it misses the limit there."""
    some = slice_of(load)
    simulated = run(system, wish, some, predicted.mode, predicted.k, seed=seed)
    if not kept(wish, simulated):
        return None
    tokens_per_s = simulated.tokens_per_s * load.targets / some.targets
    per_million = prices.per_million(load, _used(wish, tokens_per_s))
    return Fleet(load, predicted, simulated, some, prices.per_hour(load), per_million)


def candidates_of(system: System, wish: Wish, prices: Prices) -> Iterator[tuple[float, Load, Prediction]]:
    """(cost of a million tokens, fleet, prediction) of all fleets that keep the limit in closed form."""
    for k in _LOOKAHEADS:
        least = _least_targets(wish, partial(_overlapped, system, wish, drafts=wish.sessions, k=k))
        if least is None:
            continue
        for targets in dict.fromkeys((least, least + 1, math.ceil(1.1 * least), math.ceil(1.25 * least))):
            best = math.inf
            for drafts in _numbers_of_drafts(wish.sessions):
                load, predicted = _overlapped(system, wish, targets, drafts=drafts, k=k)
                if load.drafts < drafts:
                    break
                if predicted.mode is Mode.OVERLAPPED and keeps(wish, load, predicted):
                    cost = prices.per_million(load, _used(wish, predicted.tokens_per_s))
                    yield cost, load, predicted
                    if cost > TOO_EXPENSIVE * best:
                        break  # drafts yield the less the more there are
                    best = min(best, cost)
        if lookahead(system, max(1, round(wish.sessions / least)), k) < k:
            return  # more would never be verified


def _numbers_of_drafts(most: int) -> list[int]:
    """1, 2, 3, .. and then ``_STEPS_AHEAD`` per doubling, up to one for each session."""
    numbers = {math.ceil(2 ** (i / _STEPS_AHEAD)) for i in range(math.ceil(_STEPS_AHEAD * math.log2(max(most, 1))) + 1)}
    return sorted(n for n in numbers if n <= most)


def _overlapped(system: System, wish: Wish, targets: int, *, drafts: int, k: int) -> tuple[Load, Prediction]:
    if wish.on_target_nodes:
        drafts = min(drafts, targets)

    def at(sessions: int) -> tuple[Load, Prediction]:
        load = wish.load(sessions, targets, drafts)
        return load, predict(system, load, Mode.OVERLAPPED, k)

    return _settled(wish, at)


def _settled(wish: Wish, at: Callable[[int], tuple[Load, Prediction]]) -> tuple[Load, Prediction]:
    """The load with the configured sessions, or with the concurrency that arriving requests reach."""
    load, predicted = at(wish.sessions)
    if wish.requests is None or not wish.arrives:
        return load, predicted
    sessions = 1
    for _ in range(100):
        load, predicted = at(sessions)
        more = concurrency(wish.requests, predicted.itl_s, predicted.ttft_s)
        if more <= sessions:
            return load, predicted
        if more > wish.max_sessions * load.targets:
            break
        sessions = more
    return replace(load, sessions=wish.max_sessions * load.targets + 1), predicted


def _used(wish: Wish, tokens_per_s: float) -> float:
    """The demanded part of a fleet's throughput."""
    if wish.requests is None or wish.requests.per_s is None:
        return tokens_per_s
    return wish.requests.per_s * wish.requests.output_tokens


def keeps(wish: Wish, load: Load, predicted: Prediction) -> bool:
    """True if a fleet is expected to keep the limits, with no more sessions on a target than it holds."""
    return (
        expected(predicted, wish.objective) <= wish.limit_s
        and predicted.ttft_s <= wish.ttft_limit_s
        and load.sessions <= wish.max_sessions * load.targets
    )


def _least_targets(wish: Wish, at: Callable[[int], tuple[Load, Prediction]]) -> int | None:
    """The fewest that keep the limit, by bisection; None if one for each session does not."""
    if not keeps(wish, *at(wish.sessions)):
        return None
    return 1 + bisect_left(range(1, wish.sessions), True, key=lambda targets: keeps(wish, *at(targets)))


def pays(plain: Fleet | None, overlapped: Fleet | None) -> bool:
    """Returns whether tokens are cheaper with drafts, or the limit cannot be kept without."""
    return overlapped is not None and (plain is None or overlapped.per_million < plain.per_million)


def settings_of(system: System, wish: Wish, fleet: Fleet) -> dict[str, Any]:
    """The settings of a fleet: dotted keys of the service's configuration."""
    drafts = max(1, fleet.load.drafts)
    settings: dict[str, Any] = {
        "target_config.deployment_config.num_replicas": fleet.load.targets,
        "draft_config.deployment_config.num_replicas": drafts,
        "target_config.engine_kwargs.max_sessions": math.ceil(fleet.load.sessions / fleet.load.targets),
        "draft_config.engine_kwargs.max_sessions": min(math.ceil(fleet.load.sessions / drafts), MOST_DRAFT_SESSIONS),
        "draft_config.engine_kwargs.tree_budget": least_tree_budget(system, fleet),
        "draft_config.engine_kwargs.fan_out": system.fan_out,
    }
    if wish.on_target_nodes:
        settings["draft_config.engine_kwargs.device"] = "cpu"
        settings["draft_config.deployment_config.on_target_nodes"] = True
        labels = {"paceline/pool": "target"}  # as in the files of ``cluster`` and ``k8s``
        settings["target_config.deployment_config.ray_actor_options.label_selector"] = labels
    if system.min_path_prob != LEAST_PATH_PROB:
        settings["draft_config.engine_kwargs.min_path_prob"] = system.min_path_prob
    return settings
