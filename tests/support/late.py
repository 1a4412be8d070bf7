"""An accelerator in virtual time, in the place of the CPU: it takes steps at once and is done with them later."""

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.pump import Clock
from torch import Tensor

from paceline.core import deferred, verification
from paceline.model.compiled.backend import DeviceBackend, Outputs, StepFunction
from paceline.model.loading import LoadedModel
from paceline.model.parallel import runner as ranks
from paceline.model.runner import ModelRunner
from paceline.model.step_plan import StepPlan
from paceline.target import engine


class LateDevice:
    """Runs steps one after another, each in ``step_s`` of its tokens. The host may go on, and waits where it has to.

    A step is computed when it is launched, as those before it are by then. When it is done its rows are written once
    more: so whoever has been given its pages too early finds other keys in them.
    """

    def __init__(self, clock: Clock, step_s: Callable[[int], float] = lambda num_tokens: 0.0) -> None:
        self.clock, self.step_s = clock, step_s
        self.busy_until = 0.0
        self.num_waits = 0
        self._queue: deque[tuple[float, Callable[[], None]]] = deque()

    def launch(self, num_tokens: int, write: Callable[[], None]) -> None:
        """Queues a step."""
        self.busy_until = max(self.busy_until, self.clock.now) + self.step_s(num_tokens)
        self._queue.append((self.busy_until, write))

    def wait(self, until: float) -> None:
        """Has the host wait for everything that is done by then."""
        self.num_waits += 1
        self.clock.now = max(self.clock.now, until)
        while self._queue and self._queue[0][0] <= until:
            self._queue.popleft()[1]()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Has whoever reads results on the host wait for them."""

        class Download(deferred.Download):
            def __init__(download, *tensors: Tensor) -> None:
                super().__init__(*tensors)
                download.ready_at = self.busy_until

            def wait(download) -> tuple[Tensor, ...]:
                self.wait(download.ready_at)
                return super().wait()

        decide = engine.decide

        def decide_late(*args: Any) -> Any:
            self.wait(self.busy_until)
            return decide(*args)

        for reads in (verification, ranks):
            patch.setattr(reads, "Download", Download)
        patch.setattr(engine, "decide", decide_late)

    def adopt(self, runner: ModelRunner, model: LoadedModel) -> None:
        """Has the steps of a runner run here."""
        runner.backend = LateBackend(self, runner, model)


class LateBackend(DeviceBackend):
    """The steps of one runner on a ``LateDevice``."""

    def __init__(self, device: LateDevice, runner: ModelRunner, model: LoadedModel) -> None:
        super().__init__(
            runner.cache, model.dtype, model.sliding_window, kernel=model.kernel, recorder=None, max_shapes=1000
        )
        self.is_asynchronous = True
        self._late = device

    def run(self, step: StepFunction, plan: StepPlan) -> Outputs:
        outputs = super().run(step, plan)
        rows = torch.tensor([row for row in plan.arrays.write_rows.tolist() if row < self._cache.scratch_row])
        pools = [pool.flatten(0, 1) for pool in (*self._cache.keys, *self._cache.values)]
        written = [pool[rows].clone() for pool in pools]

        def write() -> None:
            for pool, values in zip(pools, written, strict=True):
                pool[rows] = values

        self._late.launch(len(rows), write)
        return outputs
