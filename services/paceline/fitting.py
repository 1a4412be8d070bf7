"""Replicas that the memory of this machine does not hold, and the nearest settings with which it would."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from paceline.config import PairConfig
from paceline.errors import ConfigError
from paceline.estimate import PROCESS_BYTES, MemoryEstimate, ModelFacts, draft_estimate, target_estimate
from paceline.findings import Finding, Severity
from paceline.memory import fraction_pages, gib

_TARGET, _DRAFT = "target_config", "draft_config"
_SHORTEST = 2
"""Tokens: what max_model_len may be at least."""


@dataclass(frozen=True, slots=True)
class _Fit:
    """One reading of the estimate against what there is: an error from below, a warning of what load may bring."""

    severity: Severity
    of: Callable[..., MemoryEstimate]
    """The estimate with some settings changed."""
    left: int

    def needed(self, **changes: float) -> int:
        """Bytes of one replica."""
        estimate = self.of(**changes)
        return estimate.least_bytes if self.severity is Severity.ERROR else estimate.total_bytes

    def holds(self, **changes: float) -> bool:
        """Whether a replica fits."""
        return self.needed(**changes) <= self.left

    def largest(self, key: str, least: int, most: int, **others: float) -> int:
        """The largest value from ``least`` to ``most`` that fits, ``least`` - 1 if there is none. What is below one
        that fits must fit too."""
        values = range(least, most + 1)
        return least - 1 + bisect_left(values, True, key=lambda value: not self.holds(**{key: value}, **others))

    def finding(self, key: str, value: float, remedy: str) -> Finding:
        """``remedy``: what to set it to."""
        estimate, here = self.of(), f"and this machine has {gib(self.left)} left"
        if self.severity is Severity.ERROR:
            needs = f"it needs {estimate.num_pages} KV pages, {gib(estimate.least_bytes)} with the weights"
        else:
            needs = f"under load a replica takes about {gib(estimate.total_bytes)}"
        return Finding(self.severity, key, f"{key} is {value}: {needs}, {here}: set it to at most {remedy}")

    def too_large(self, key: str, facts: ModelFacts, **smallest: float) -> Finding:
        """No setting helps. ``smallest``: those that need the least."""
        needed = self.needed(**smallest)
        remedy = "choose a smaller model or a larger machine"
        fitting = facts.num_parameters - -(-(needed - self.left) // facts.item_bytes)
        if fitting > 0:
            remedy = f"choose a smaller model, of at most {fitting:,} parameters, or a larger machine"
        if facts.item_bytes > 2 and needed - facts.weights_bytes // 2 < self.left:
            remedy = "set dtype to bfloat16, or " + remedy
        amount = "at least" if self.severity is Severity.ERROR else "about"
        problem = f"names a model with {facts.num_parameters:,} parameters, which needs {amount} {gib(needed)}"
        message = f"{key} {problem}, and this machine has {gib(self.left)} left: {remedy}"
        return Finding(self.severity, key, message)


def check_target(config: PairConfig, facts: ModelFacts, limit: int, left: int) -> list[Finding]:
    """At most one finding. ``limit``: tokens that the target was made for; ``left``: bytes that there are."""

    def of(**changes: float) -> MemoryEstimate:
        changed = config.model_copy(update=changes)
        return target_estimate(changed, facts, _max_len(changed, limit), left_bytes=left)

    certain, likely = _Fit(Severity.ERROR, of, left), _Fit(Severity.WARNING, of, left)
    if not certain.holds():
        return [_smaller_target(certain, config, facts, limit)]
    if refused := _check_fraction(config, facts, _max_len(config, limit), left):
        return [refused]
    return [] if likely.holds() else [_smaller_target(likely, config, facts, limit)]


def check_draft(config: PairConfig, facts: ModelFacts, limit: int, left: int) -> list[Finding]:
    """The same of a draft model. ``limit``: tokens that both models were made for."""

    def of(**changes: float) -> MemoryEstimate:
        return draft_estimate(config.model_copy(update=changes), facts, _max_len(config, limit))

    for severity in Severity:
        fit = _Fit(severity, of, left)
        if not fit.holds():
            return [_smaller_draft(fit, config, facts)]
    return []


def _max_len(config: PairConfig, limit: int) -> int:
    return min(config.max_model_len or limit, limit)


def _check_fraction(config: PairConfig, facts: ModelFacts, max_len: int, left: int) -> Finding | None:
    """What the replica itself would say of kv_fraction, once it has loaded the model."""
    if config.kv_fraction is None or not facts.page_bytes:
        return None
    try:
        fraction_pages(config.kv_fraction, max_len, facts.page_bytes, left - PROCESS_BYTES - facts.weights_bytes)
    except ConfigError as problem:
        return Finding.error(f"{_TARGET}.engine_kwargs.kv_fraction", str(problem).removeprefix("kv_fraction "))
    return None


def _smaller_target(fit: _Fit, config: PairConfig, facts: ModelFacts, limit: int) -> Finding:
    """The setting that decides how many pages there are, else the number of sessions, else their length."""
    engine, model = f"{_TARGET}.engine_kwargs", f"{_TARGET}.model_loading_config"
    if config.kv_pages is not None:
        if fitting := fit.largest("kv_pages", 1, config.kv_pages):
            return fit.finding(f"{engine}.kv_pages", config.kv_pages, f"{fitting}")
        return fit.too_large(model, facts, kv_pages=1)
    if config.kv_fraction is not None and (share := _largest_fraction(fit, config.kv_fraction)):
        return fit.finding(f"{engine}.kv_fraction", config.kv_fraction, f"{share:g}")
    if fitting := fit.largest("max_sessions", 1, config.max_sessions):
        return fit.finding(f"{engine}.max_sessions", config.max_sessions, f"{fitting}")
    max_len = _max_len(config, limit)
    longest = fit.largest("max_model_len", _SHORTEST, max_len, max_sessions=1)
    if longest < _SHORTEST:
        return fit.too_large(model, facts, max_model_len=_SHORTEST, max_sessions=1)
    sessions = fit.largest("max_sessions", 1, config.max_sessions, max_model_len=longest)
    remedy = f"{longest}" if sessions == config.max_sessions else f"{longest} and max_sessions to at most {sessions}"
    return fit.finding(f"{engine}.max_model_len", max_len, remedy)


def _largest_fraction(fit: _Fit, kv_fraction: float) -> float:
    """In steps of a thousandth; 0 if none fits."""
    steps = range(1, int(kv_fraction * 1000) + 1)
    return bisect_left(steps, True, key=lambda step: not fit.holds(kv_fraction=step / 1000)) / 1000


def _smaller_draft(fit: _Fit, config: PairConfig, facts: ModelFacts) -> Finding:
    """Fewer sessions, else smaller trees of one."""
    engine, sessions = f"{_DRAFT}.engine_kwargs", config.num_draft_sessions
    if fitting := fit.largest("draft_max_sessions", 1, sessions):
        return fit.finding(f"{engine}.max_sessions", sessions, f"{fitting}")
    if fitting := fit.largest("tree_budget", 1, config.tree_budget, draft_max_sessions=1):
        return fit.finding(f"{engine}.tree_budget", config.tree_budget, f"{fitting} and max_sessions to at most 1")
    return fit.too_large(f"{_DRAFT}.model_loading_config", facts, draft_max_sessions=1, tree_budget=1)
