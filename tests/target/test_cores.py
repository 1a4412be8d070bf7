"""Cores that a draft lends its target: taken while no session has a draft, given back before one is asked."""

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.support.compilers import needs_products
from tests.support.models import pair, prompt, random_model
from tests.support.pump import Pump, Request, assert_same, plain_reference
from tests.support.threads import has_more_threads, thread_ids
from tests.target.test_heads import EVERY, known, oracle, pump_with

from paceline.model.loading import LoadedModel, prepare
from paceline.target.control.report import explain
from paceline.target.cores import TargetCores
from paceline.types import Mode, SamplingParams, SpeculationParams

two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")


class SharedCores:
    """Two cores, one of them shared; notes what was wanted of them, and if that was right."""

    most = 2

    def __init__(self, pump: Pump) -> None:
        self._sessions = pump.target.sessions
        self.shared, self.wanted = False, set()

    @property
    def num(self) -> int:
        return 2 if self.shared else 1

    def use(self, *, shared: bool) -> None:
        self.shared = shared
        drafted = any(session.draft_available for session in self._sessions.values())
        self.wanted.add((shared, drafted))


def test_cores_are_lent_while_no_session_has_a_draft() -> None:
    target, draft = pair("llama")
    requests = {
        f"s{i}": Request(
            prompt(i, 12 + i),
            SamplingParams(temperature=1.0, max_tokens=30, seed=i),
            SpeculationParams(mode=Mode.PLAIN if i == 0 else Mode.OVERLAPPED),
        )
        for i in range(4)
    }
    pump = Pump(target, draft, late=0.0, step_s=lambda tokens: 1e-3 * (1 + tokens / 64))
    pump.target.cores = cores = SharedCores(pump)
    plain = {"s0": requests["s0"]}
    assert_same(pump.run(plain), plain_reference(target, plain))
    assert cores.wanted == {(True, False)}
    assert_same(pump.run(requests), plain_reference(target, requests))
    assert cores.wanted == {(True, False), (False, True)}
    costs = pump.target.allocation._costs
    assert set(costs) == {1, 2}
    assert all(cost.known for cost in costs.values()), "learned apart"
    assert f"{cores.num} of 2 cores share its steps" in explain(pump.target)


def test_a_head_learns_apart_by_its_cores_and_by_whether_there_are_drafts() -> None:
    _, _, texts = known(1.0)
    mounted, _ = oracle(EVERY, texts)
    heads = pump_with(EVERY, mounted, adaptive=True).target.heads
    learned = {}
    for circumstances in ((1, True), (1, False), (2, False)):
        heads.use(circumstances[0], drafting=circumstances[1])
        assert mounted.gate.depth_s(1, first=True) is None
        assert mounted.coupled.trials == 0.0
        mounted.gate.observe_depth(1, 2e-3, first=True)
        mounted.coupled.add(8, 4.0, 4)
        learned[circumstances] = mounted.gate, mounted.coupled, mounted.rejection
    for (num_cores, drafting), record in learned.items():
        heads.use(num_cores, drafting=drafting)
        assert (mounted.gate, mounted.coupled, mounted.rejection) == record
    assert len({id(gate) for gate, _, _ in learned.values()}) == 3


def loaded(dtype: torch.dtype, *, compiles: bool) -> LoadedModel:
    """A model on the CPU that serves eagerly; ``compiles``: until its compiled step is there."""
    model = prepare(random_model("llama").to(dtype), compile=False)
    return replace(model, load_compiled=lambda: None) if compiles else model


def in_a_thread(work: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@needs_products
@two_cores
def test_the_thread_that_takes_steps_stays_on_its_own_cores_and_gets_help_from_lent_ones() -> None:
    def work() -> None:
        allowed = sorted(os.sched_getaffinity(0))[:2]
        os.sched_setaffinity(0, allowed)
        before = thread_ids()
        cores = TargetCores.of(1, 1, loaded(torch.bfloat16, compiles=True))
        assert cores is not None
        for shared in (False, True, True, False):
            cores.use(shared=shared)
            assert (cores.num, cores.most) == (1 + shared, 2)
            assert os.sched_getaffinity(0) == {allowed[0]}, "whoever helps has the other core"
            assert has_more_threads(before, shared)

    in_a_thread(work)


@pytest.mark.parametrize(
    ("dtype", "compiles", "reason"),
    [
        (torch.float32, True, "the model is in float32"),
        pytest.param(torch.bfloat16, False, "the model is not compiled", marks=[needs_products, two_cores]),
    ],
)
def test_where_products_cannot_be_shared_no_core_is_lent(dtype, compiles, reason, caplog) -> None:
    model = loaded(dtype, compiles=compiles)
    with caplog.at_level(logging.INFO, "paceline"):
        assert TargetCores.of(1, 0, model) is None
        assert not caplog.records
        assert TargetCores.of(1, 1, model) is None
    assert f"does not share its products with cores of its draft: {reason}" in caplog.text
