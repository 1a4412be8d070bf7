"""Findings for replicas that do not fit the memory there is, with the nearest settings that do.

Called by ``preflight.service`` for the machine that starts the service, and by ``preflight.device`` in a replica.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

from paceline.checkpoint.size import ModelSize, gib
from paceline.config import DraftSetup, HeadDraftOptions, TargetOptions, TargetSetup
from paceline.errors import ConfigError
from paceline.preflight.estimate import CODE_BYTES, PROCESS_BYTES, MemoryEstimate, draft_estimate, target_estimate
from paceline.preflight.findings import Finding, Severity
from paceline.preflight.heads import known_heads_size
from paceline.preflight.host_memory import fraction_pages
from paceline.types import least_states

_TARGET, _DRAFT = "target_config", "draft_config"
_SHORTEST = 2
"""Tokens: what max_model_len may be at least."""


@dataclass(frozen=True, slots=True)
class Room:
    """The memory for a replica."""

    left: int
    """Free bytes."""
    started: bool = False
    """True: the process has started without a model. ``left`` is the memory that it may add."""
    on_gpu: bool = False
    """True: the memory is a GPU's, which holds no process."""

    def __str__(self) -> str:
        if self.on_gpu and not self.started:
            return f"a GPU has {gib(self.left)}"
        return f"this {'GPU' if self.on_gpu else 'machine'} has {gib(self.left)} left"

    def least(self, estimate: MemoryEstimate) -> int:
        """Lower bound of the bytes that a replica takes of it."""
        there = min(PROCESS_BYTES, estimate.process_bytes) if self.started or self.on_gpu else 0
        return estimate.least_bytes - there

    def expected(self, estimate: MemoryEstimate) -> int:
        """Bytes that a replica is expected to take of it."""
        if self.on_gpu:
            return estimate.device_bytes
        return estimate.total_bytes - (estimate.process_bytes - CODE_BYTES if self.started else 0)


@dataclass(frozen=True, slots=True)
class _Fit:
    """Compares one bound of the estimate with the memory: the lower bound for errors, the expected amount under load
    for warnings."""

    severity: Severity
    of: Callable[..., MemoryEstimate]
    """The estimate with some settings changed."""
    room: Room

    def needed(self, **changes: float) -> int:
        """Bytes of one replica."""
        return self._of(self.of(**changes))

    def _of(self, estimate: MemoryEstimate) -> int:
        return self.room.least(estimate) if self.severity is Severity.ERROR else self.room.expected(estimate)

    def holds(self, **changes: float) -> bool:
        """True if a replica fits."""
        return self.needed(**changes) <= self.room.left

    def largest(self, key: str, least: int, most: int, **others: float) -> int:
        """Returns the largest value from ``least`` to ``most`` that fits, or ``least`` - 1 if none does.

        If a value fits, all smaller ones must fit, too.
        """
        values = range(least, most + 1)  # needs grow with the value: False, ..., False, True, ..., True
        return least - 1 + bisect_left(values, True, key=lambda value: not self.holds(**{key: value}, **others))

    def finding(self, key: str, value: float, remedy: str) -> Finding:
        """``remedy``: what to set it to."""
        estimate, here = self.of(), f"and {self.room}"
        if self.severity is Severity.ERROR:
            needs = f"it needs {estimate.num_pages} KV pages, {gib(self._of(estimate))} with weights and workspace"
        else:
            needs = f"under load a replica takes about {gib(self._of(estimate))}"
        return Finding(self.severity, key, f"{key} is {value}: {needs}, {here}: set it to at most {remedy}")

    def too_large(self, key: str, size: ModelSize, **smallest: float) -> Finding:
        """Finding that no setting helps. ``smallest``: the settings that need the least memory."""
        needed = self.needed(**smallest)
        larger = "more or larger GPUs (tensor_parallel_size)" if self.of().on_gpu else "a larger machine"
        remedy = f"choose a smaller model or {larger}"
        excess = (needed - self.room.left) * self.of().num_ranks  # each rank holds its share
        fitting = size.num_parameters - -(-excess * size.num_parameters // size.weights_bytes)
        if fitting > 0:
            remedy = f"choose a smaller model, of at most {fitting:,} parameters, or {larger}"
        if size.item_bytes > 2 and needed - size.weights_bytes // 2 < self.room.left:
            remedy = "set dtype to bfloat16, or " + remedy
        amount = "at least" if self.severity is Severity.ERROR else "about"
        problem = f"names a model with {size.num_parameters:,} parameters, which needs {amount} {gib(needed)}"
        message = f"{key} {problem}, and {self.room}: {remedy}"
        return Finding(self.severity, key, message)


def check_target(setup: TargetSetup, size: ModelSize, limit: int, room: Room) -> list[Finding]:
    """Finds at most one fault, with the nearest setting that fits. ``limit``: tokens that the target was made for."""
    options = setup.options
    heads = known_heads_size(setup, size, _max_len(options.max_model_len, limit), on_gpu=room.on_gpu)

    def of(**changes: float) -> MemoryEstimate:
        changed = options.model_copy(update=changes)
        max_len = _max_len(changed.max_model_len, limit)
        return target_estimate(replace(setup, options=changed), size, max_len, on_gpu=room.on_gpu, heads=heads)

    certain, likely = _Fit(Severity.ERROR, of, room), _Fit(Severity.WARNING, of, room)
    if not certain.holds():
        return [_smaller_target(certain, options, size, limit)]
    if options.kv_fraction is not None and size.page_bytes:
        page_bytes = size.of_rank(options.tensor_parallel_size).page_bytes + heads.page_bytes(size.item_bytes)
        refused = _check_fraction(options.kv_fraction, page_bytes, of(), _max_len(options.max_model_len, limit), room)
        return [refused] if refused else []
    return [] if likely.holds() else [_smaller_target(likely, options, size, limit)]


def check_draft(setup: DraftSetup, size: ModelSize, limit: int, room: Room) -> list[Finding]:
    """Finds at most one fault, with the nearest setting that fits. ``limit``: tokens that both models were made for."""
    options, max_len = setup.options, _max_len(setup.max_model_len, limit)

    def of(num_sessions: float = setup.num_sessions, tree_budget: float = options.tree_budget) -> MemoryEstimate:
        changed = options.model_copy(update={"tree_budget": tree_budget})
        changed_setup = replace(setup, options=changed, num_sessions=int(num_sessions))
        return draft_estimate(changed_setup, size, max_len, on_gpu=room.on_gpu)

    for severity in Severity:
        fit = _Fit(severity, of, room)
        if not fit.holds():
            return [_smaller_draft(fit, setup, size)]
    return []


def _max_len(configured: int | None, limit: int) -> int:
    return min(configured or limit, limit)


def _check_fraction(
    kv_fraction: float, page_bytes: int, estimate: MemoryEstimate, max_len: int, room: Room
) -> Finding | None:
    """The refusal of kv_fraction that the replica itself would give, once it has loaded the model."""
    after = room.left - room.least(estimate) + estimate.least_kv_bytes + estimate.workspace_bytes
    try:
        fraction_pages(kv_fraction, max_len, page_bytes, after - estimate.reserved_bytes)
    except ConfigError as problem:
        return Finding.error(f"{_TARGET}.engine_kwargs.kv_fraction", str(problem).removeprefix("kv_fraction "))
    return None


def _smaller_target(fit: _Fit, options: TargetOptions, size: ModelSize, limit: int) -> Finding:
    """The setting that decides how many pages there are, else the number of sessions, else their length."""
    engine, model = f"{_TARGET}.engine_kwargs", f"{_TARGET}.model_loading_config"
    if options.kv_pages is not None:
        if fitting := fit.largest("kv_pages", 1, options.kv_pages):
            return fit.finding(f"{engine}.kv_pages", options.kv_pages, f"{fitting}")
        return fit.too_large(model, size, kv_pages=1)
    if options.state_slots is not None and size.linear is not None:
        least = least_states(options.max_sessions)
        if (fitting := fit.largest("state_slots", least, options.state_slots)) >= least:
            return fit.finding(f"{engine}.state_slots", options.state_slots, f"{fitting}")
    if fitting := fit.largest("max_sessions", 1, options.max_sessions):
        return fit.finding(f"{engine}.max_sessions", options.max_sessions, f"{fitting}")
    max_len = _max_len(options.max_model_len, limit)
    longest = fit.largest("max_model_len", _SHORTEST, max_len, max_sessions=1)
    if longest < _SHORTEST:
        return fit.too_large(model, size, max_model_len=_SHORTEST, max_sessions=1)
    sessions = fit.largest("max_sessions", 1, options.max_sessions, max_model_len=longest)
    remedy = f"{longest}" if sessions == options.max_sessions else f"{longest} and max_sessions to at most {sessions}"
    return fit.finding(f"{engine}.max_model_len", max_len, remedy)


def _smaller_draft(fit: _Fit, setup: DraftSetup, size: ModelSize) -> Finding:
    """Fewer sessions, else smaller trees of one."""
    engine, sessions, budget = f"{_DRAFT}.engine_kwargs", setup.num_sessions, setup.options.tree_budget
    if fitting := fit.largest("num_sessions", 1, sessions):
        return fit.finding(f"{engine}.max_sessions", sessions, f"{fitting}")
    if fitting := fit.largest("tree_budget", 1, budget, num_sessions=1):
        return fit.finding(f"{engine}.tree_budget", budget, f"{fitting} and max_sessions to at most 1")
    model = "engine_kwargs.model" if isinstance(setup.options, HeadDraftOptions) else "model_loading_config"
    return fit.too_large(f"{_DRAFT}.{model}", size, num_sessions=1, tree_budget=1)
