"""One forward of a ragged batch: sequences of new tokens in, logits out. Eager or compiled, same inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.model.chain import Chain, Ranked
from paceline.model.compiled.backend import Backend, HostBackend, StepFunction
from paceline.model.compiled.buckets import Limits
from paceline.model.features import Features
from paceline.model.kv_cache import KVCache
from paceline.model.shapes import Shapes
from paceline.model.step_plan import SequenceStep, StepPlan, spans_by_library
from paceline.types import Execution

if TYPE_CHECKING:
    from paceline.model.compiled.background import Compilation


class ModelRunner:
    """Runs steps of one model against one KV cache on one device. Owned by one engine thread."""

    def __init__(
        self,
        step: StepFunction,
        cache: KVCache,
        *,
        dtype: torch.dtype,
        sliding_window: int | None,
        vocab_size: int,
        spare_tokens: int = 0,
        promised: bool = True,
        backend: Backend | None = None,
        features: Features | None = None,
        execution: Execution = "",
    ) -> None:
        """Makes a runner of one model.

        Args:
            step: the model.
            cache: where it keeps keys and values.
            dtype: of the model.
            sliding_window: of its layers that have one.
            vocab_size: logits of a row.
            spare_tokens: padding that each step needs after its last token (``tails.py``).
            promised: verification must have the bits of decoding (``shapes.py``).
            backend: how steps reach the device; by default one by one, from the host's own memory.
            features: the states that ``step`` returns in addition to the logits.
            execution: how ``step`` runs, for the status.
        """
        self.cache = cache
        self.dtype = dtype
        self.sliding_window = sliding_window
        self.vocab_size = vocab_size
        self.features = features
        self.num_forwards = 0
        self.backend = backend or HostBackend(cache, dtype, sliding_window)
        self._spare_tokens, self._promised = spare_tokens, promised
        self._take(step)
        self._execution = execution
        self._compilation: Compilation | None = None
        self._on_swap: Callable[[], None] = lambda: None

    @property
    def execution(self) -> Execution:
        """Execution of the steps (``types.Execution``). Any thread may ask."""
        return self._execution if self._compilation is None else self._compilation.execution

    def compiled(self, step: StepFunction) -> ModelRunner:
        """Makes a runner of the same model, by its compiled ``step``, over the same cache."""
        return ModelRunner(
            step,
            self.cache,
            dtype=self.dtype,
            sliding_window=self.sliding_window,
            vocab_size=self.vocab_size,
            spare_tokens=self._spare_tokens,
            promised=self._promised,
            backend=self.backend,
            features=self.features,
            execution="compiled",
        )

    def follow(self, compilation: Compilation, on_swap: Callable[[], None] = lambda: None) -> None:
        """Switches to the compiled step as soon as it is ready. Only for a draft, whose bits are not promised to
        anyone.

        ``on_swap`` is called at the switch, between two steps. ``close`` ends the worker.
        """
        self._compilation, self._on_swap = compilation, on_swap
        compilation.start()

    @property
    def is_asynchronous(self) -> bool:
        """True if ``forward`` only queues a step, so that ``forward_drawn`` saves time."""
        return self.backend.is_asynchronous

    def check(self) -> None:
        """Raises RanksLostError if a step that is done has lost another rank, so that its tokens mean nothing. Waits
        for nothing."""

    def forward(self, steps: Sequence[SequenceStep]) -> Tensor:
        """Writes the KV of all new tokens and returns logits ``[sum(num_logits), vocab_size]``, steps in order."""
        return self.run_plan(self.plan(steps))[0]

    def forward_drawn(self, steps: Sequence[SequenceStep], token_ids: Tensor) -> Tensor:
        """``forward`` where the step's first tokens are ``token_ids`` [n] int64, which an earlier step draws on the
        device; ``steps`` has any numbers in their place."""
        return self.run_plan(self.plan(steps)._replace(drawn=token_ids))[0]

    def forward_with_states(self, steps: Sequence[SequenceStep]) -> tuple[Tensor, Tensor]:
        """``forward``, and the states that ``features`` name: ``[n, len(boundaries) * hidden]`` of all tokens of the
        step in order, or of those with logits if not ``every_position``."""
        logits, states = self.run_plan(self.plan(steps))
        assert states is not None, "the model was loaded without features"
        return logits, self._of_tokens(states, steps)

    def plan(self, steps: Sequence[SequenceStep]) -> StepPlan:
        """Lays a step of this model out, for the compiled step from the first plan on after it is ready."""
        if self._compilation is not None and (step := self._compilation.take()) is not None:
            self._take(step)
            self._on_swap()
        plan = StepPlan.of(steps, self.cache.scratch_row, self.shapes)
        assert self.cache.linear is None or not plan.shape.is_tree, "linear layers verify branches, no masked trees"
        if self.backend.block_len:
            plan = plan._replace(by_library=spans_by_library(steps))
        return plan if self.cache.linear is None else plan._replace(linear=self.cache.linear.plan(steps))

    def close(self) -> None:
        """Ends the compilation's worker, if there is one. Idempotent."""
        if self._compilation is not None:
            self._compilation.close()

    @property
    def chains(self) -> bool:
        """True if ``run_chain`` may be called."""
        own = getattr(self.step_function, "chains", None)
        return own is not None and isinstance(self.backend, HostBackend) and own(self.dtype)

    def run_chain(self, chain: Chain) -> Ranked:
        """The tokens that a chain of steps of this model ranks, by one call. ``chains`` comes first."""
        ranked: Ranked = self.step_function.run_chain(chain, self.cache, self.dtype, self.sliding_window)  # type: ignore[attr-defined]
        self.num_forwards += len(ranked)
        return ranked

    def _take(self, step: StepFunction) -> None:
        """Runs ``step`` from now on, in the shapes that it needs."""
        self.step_function = step
        native = getattr(step, "is_native", False)
        self.shapes = Shapes.needed(
            native=native,
            promised=self._promised,
            spare_tokens=self._spare_tokens,
            longest_row=self.backend.longest_row,
        )

    def run_plan(self, plan: StepPlan) -> tuple[Tensor, Tensor | None]:
        """Returns logits and states of a plan. The states may have rows of padding at the end."""
        self.num_forwards += 1
        try:
            with torch.no_grad():
                self.cache.copy(plan.copies)
                if plan.linear is not None:
                    self.cache.copy_rows(plan.linear.copies)
                outputs = self.backend.run(self.step_function, plan)
        except BaseException:
            if self.cache.linear is not None:
                self.cache.linear.abandon()
            raise
        if self.cache.linear is not None:
            self.cache.linear.confirm()
        return outputs

    def _of_tokens(self, states: Tensor, steps: Sequence[SequenceStep]) -> Tensor:
        """The states of a step without the rows of its padding."""
        assert self.features is not None
        every = self.features.every_position
        return states[: sum(len(step.token_ids) if every else step.num_logits for step in steps)]

    def announce(self, limits: Limits, max_len: int) -> None:
        """Has the other ranks, if there are any, record the steps that this one is about to (``record_steps``)."""

    def record(self, limits: Limits) -> None:
        """Records the steps of an engine that keeps to ``limits``, where the backend replays steps; see ``Backend``."""
        with torch.no_grad():
            self.backend.record(self.step_function, limits)
