"""Steps packed into few shapes and replayed: on the CPU, with a recorder that calls again what it was given.

Only the recorder of ``graphs.py`` needs a GPU. Which shapes there are, how a step fills one, what a caller keeps and
what happens where recording fails is the same here, and the logits are compared bit for bit.
"""

from __future__ import annotations

import logging
import math
import random
import weakref
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.models import noisy_copy, prompt, random_model, save_pair
from tests.support.pump import Pump, Request, assert_same, plain_reference
from tests.support.rings import slow

from paceline.checkpoint.files import Checkpoint
from paceline.config import ModelOptions, ServiceConfig
from paceline.errors import ConfigError, EngineError
from paceline.model import layout, loading
from paceline.model.compiled.backend import DeviceBackend, HostBackend
from paceline.model.compiled.buckets import Fits, Limits, pack, shapes_to_record
from paceline.model.compiled.graphs import make_backend, record_steps, recordings_bytes
from paceline.model.features import OUT, Features
from paceline.model.loading import LoadedModel, load_model, prepare
from paceline.model.runner import ModelRunner
from paceline.model.selftest import check_invariance, check_replay
from paceline.model.shapes import padded_pages, padded_row_len, padded_tokens
from paceline.model.step_plan import SequenceStep, StepArrays, StepPlan, StepShape, attention_masks, unpack
from paceline.types import PAGE_SIZE, SamplingParams, pages_for

SCRATCH_ROW = 10_000 * PAGE_SIZE
LIMITS = Limits(max_rows=4, max_tokens=64, max_pages=8)
TREES = Limits(max_rows=4, max_tokens=64, max_pages=8, is_tree=True)


class FakeRecorder:
    """Replays by calling again. ``room``: recordings that fit in memory."""

    def __init__(self, room: int = 1000, error: Exception | None = None) -> None:
        self.room, self.error, self.num_replays = room, error, 0

    def has_room(self) -> bool:
        self.room -= 1
        return self.room >= 0

    def record(self, function):
        if self.error is not None:
            raise self.error
        function()

        def replay() -> None:
            self.num_replays += 1
            function()

        return replay


def on_device(model: LoadedModel, pages: int, recorder: FakeRecorder | None = None, most: int = 1000) -> ModelRunner:
    """A runner as on a GPU."""
    runner = model.runner(pages)
    runner.backend = DeviceBackend(
        runner.cache, model.dtype, model.sliding_window, kernel=model.kernel, recorder=recorder, max_shapes=most
    )
    return runner


def chain(rng: random.Random, num_tokens: int, start: int, pages: list[int]) -> SequenceStep:
    span = range(start, start + num_tokens)
    return SequenceStep([rng.randrange(10, 300) for _ in span], span, span, pages, num_logits=num_tokens)


def tree(rng: random.Random, num_tokens: int, start: int, pages: list[int]) -> SequenceStep:
    """Tokens that see the context and some of each other."""
    step = chain(rng, num_tokens, start, pages)
    step.key_positions = torch.arange(start + num_tokens)
    step.visible = step.key_positions < start
    seen = (torch.rand(num_tokens, num_tokens) < 0.5) | torch.eye(num_tokens, dtype=torch.bool)
    step.own_rows = [(start + row.nonzero().flatten()).tolist() for row in seen]
    return step


def batch(seed: int, kind=chain, cache=None) -> list[SequenceStep]:
    """One to four sessions of one to nine tokens each."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    steps = []
    for _ in range(rng.randint(1, 4)):
        num_tokens, start = rng.randint(1, 9), rng.randint(0, 300)
        count = pages_for(start + num_tokens)
        pages = cache.allocate(count) if cache is not None else rng.sample(range(10_000), count)
        steps.append(kind(rng, num_tokens, start, pages))
    return steps


def packed(plan: StepPlan, shape: StepShape) -> StepArrays:
    buffer = torch.full((shape.num_bytes + 40,), 255, dtype=torch.uint8)
    pack(plan, shape, SCRATCH_ROW, buffer)
    assert bool((buffer[shape.num_bytes :] == 255).all()), "nothing is written behind the step"
    return unpack(shape, buffer)


# -- packing -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("passes")
@pytest.mark.parametrize("kind", [chain, tree])
def test_a_plan_packed_into_its_own_shape_is_the_plan(kind) -> None:
    for seed in range(10):
        plan = StepPlan.of(batch(seed, kind), SCRATCH_ROW)
        arrays = packed(plan, plan.shape)
        for name in StepArrays._fields:
            mine, other = getattr(plan.arrays, name), getattr(arrays, name)
            assert (mine is None) == (other is None), name
            assert mine is None or torch.equal(mine, other), name


@pytest.mark.compiler
def test_both_ways_of_packing_give_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what pads, too."""
    for seed in range(20):
        plan = StepPlan.of(batch(seed, (chain, tree)[seed % 2]), SCRATCH_ROW)
        own = plan.shape
        shape = StepShape(
            own.tokens + 5,
            own.writes + 70,
            own.logit_rows + 3,
            own.rows + 2,
            own.row_len + 4,
            own.pages + 2,
            own.is_tree,
        )
        native = packed(plan, shape)
        with monkeypatch.context() as without:
            without.setattr(layout, "native_module", lambda: None)
            twin = packed(plan, shape)
        for name, mine, other in zip(StepArrays._fields, native, twin, strict=True):
            assert mine is other is None or torch.equal(mine, other), name


@pytest.mark.usefixtures("passes")
@pytest.mark.parametrize("kind", [chain, tree])
def test_padding_reads_and_writes_nothing_that_matters(kind) -> None:
    for seed in range(10):
        plan = StepPlan.of(batch(seed, kind), SCRATCH_ROW)
        own = plan.shape
        shape = StepShape(
            own.tokens + 70,
            own.writes + 80,
            own.logit_rows + 3,
            own.rows + 2,
            own.row_len + 4,
            own.pages + 2,
            own.is_tree,
        )
        arrays, num, plan = packed(plan, shape), own.tokens, plan.arrays
        assert set(arrays.write_rows[own.writes :].tolist()) <= set(range(SCRATCH_ROW, SCRATCH_ROW + PAGE_SIZE))
        assert torch.equal(arrays.write_rows[: own.writes], plan.write_rows)
        assert torch.equal(arrays.write_tokens[: own.writes], plan.write_tokens)
        # Attention's output is found where the token was put.
        assert torch.equal(arrays.gather.reshape(-1)[arrays.scatter[:num]], plan.gather.reshape(-1)[plan.scatter])
        for row, table in enumerate(arrays.page_table):
            real = plan.page_table[row if row < own.rows else 0]
            assert table.tolist() == real.tolist() + real[:1].tolist() * 2
        assert int(arrays.gather.max()) < num
        if kind is tree:
            assert bool(arrays.visible.any(-1).all()), "a place that sees nothing would be NaN"
            assert not bool(arrays.visible[:, :, own.num_keys :].any())
            assert torch.equal(arrays.visible[: own.rows, : own.row_len, : own.num_keys], plan.visible)
        else:
            assert int(arrays.query_rows.max()) < own.num_keys, "added pages are not seen"


def test_a_shape_that_is_too_small_is_refused() -> None:
    plan = StepPlan.of(batch(0), SCRATCH_ROW)
    for change in ({"tokens": 1}, {"logit_rows": 1}, {"row_len": 1}, {"pages": 0}, {"rows": 0}, {"is_tree": True}):
        with pytest.raises(AssertionError, match="does not fit"):
            packed(plan, plan.shape._replace(**change))


# -- which shapes ------------------------------------------------------------------------------------------


@given(
    rows=st.integers(1, 64), tokens=st.integers(32, 512), pages=st.integers(1, 600), most=st.integers(1, 80),
    is_tree=st.booleans(),
)  # fmt: skip
@settings(max_examples=50)
def test_recorded_shapes_are_few_distinct_and_within_limits(rows, tokens, pages, most, is_tree) -> None:
    limits = Limits(rows, tokens, pages, is_tree)
    shapes = shapes_to_record(limits, most)
    assert 1 <= len(shapes) == len(set(shapes)) <= most
    assert all(s.is_tree == is_tree and s.rows <= rows and s.tokens <= max(16, padded_tokens(tokens)) for s in shapes)
    assert all(s.pages <= padded_pages(pages) and s.tokens <= s.rows * max(16, s.row_len) for s in shapes)
    assert all(s.logit_rows == (s.tokens if s.row_len <= 32 else 16 * s.rows) for s in shapes), (
        "a prompt wants its last"
    )
    assert shapes_to_record(limits, most + 7)[: len(shapes)] == shapes, "more never means other ones"
    every = shapes_to_record(limits, 10_000)
    longest = padded_pages(pages)
    for num_sessions in range(1, min(rows, tokens) + 1):
        num_tokens = padded_tokens(num_sessions)
        decode = StepShape(num_tokens, 2 * num_tokens, num_tokens, num_sessions, 4, longest, is_tree)
        assert best_fit(decode, every) is not None, "every decoding step has a shape"


def test_the_cheapest_shape_that_covers_is_taken() -> None:
    shapes = shapes_to_record(Limits(8, 256, 32), 1000)
    assert best_fit(StepShape(4, 4, 4, 1, 4, 1), shapes) == StepShape(16, 32, 16, 1, 4, 8)
    assert best_fit(StepShape(9, 9, 9, 1, 12, 9), shapes) == StepShape(16, 32, 16, 1, 16, 32)
    assert best_fit(StepShape(12, 32, 12, 3, 4, 3), shapes) == StepShape(16, 32, 16, 4, 4, 8)
    assert best_fit(StepShape(20, 20, 20, 4, 8, 32), shapes) == StepShape(32, 64, 32, 4, 16, 32)
    assert best_fit(StepShape(40, 40, 40, 4, 16, 32), shapes) == StepShape(64, 128, 64, 4, 16, 32)
    assert best_fit(StepShape(124, 124, 4, 1, 124, 3), shapes) == StepShape(128, 256, 16, 1, 128, 8), "a prompt"
    assert best_fit(StepShape(256, 256, 4, 2, 180, 9), shapes) == StepShape(256, 512, 32, 2, 256, 32), "two of them"
    assert best_fit(StepShape(256, 256, 256, 1, 256, 8), shapes) is None, "a prompt with all logits"
    assert best_fit(StepShape(256, 256, 4, 8, 64, 8), shapes) is None, "eight chunks"
    assert best_fit(StepShape(4, 4, 4, 1, 4, 33), shapes) is None, "a longer context"
    assert best_fit(StepShape(4, 4, 4, 1, 4, 1, is_tree=True), shapes) is None


def best_fit(shape: StepShape, recorded: Iterable[StepShape]) -> StepShape | None:
    """The cheapest of ``recorded`` that covers ``shape``; None: the step must run as it is."""
    return min((r for r in recorded if r.covers(shape)), key=lambda r: r.cost, default=None)


def uneven(rng: random.Random, rows: int, total: int) -> list[int]:
    """Tokens of sessions that share so many, the likeliest of them most."""
    counts = [1] * rows
    for _ in range(total - rows):
        counts[min(rows - 1, int(rng.expovariate(4 / rows)))] += 1
    return counts


@pytest.mark.parametrize("most", [64, 256])
def test_steps_of_uneven_sessions_have_shapes(most: int) -> None:
    """A draft's trees of 32 leaves, and verification of 1 to 9 tokens, at any number of sessions; with few recordings,
    those of few sessions."""
    rng, limits = random.Random(0), (Limits(64, 576, 128), Limits(32, 32, 40, is_tree=True))
    targets, drafts = (Fits(shapes_to_record(limit, most)) for limit in limits)
    for rows in (1, 2, 3, 4, 8, 16, 32, 64):
        for _ in range(50):
            counts = [1 + rng.choice((0, 0, 2, 4, 8)) for _ in range(rows)]
            step = StepShape(sum(counts), sum(counts), sum(counts), rows, padded_row_len(max(counts)), 12)
            assert targets.best(step) is not None or (most == 64 and rows > 4), step
            if rows <= 32:
                counts = uneven(rng, rows, 32)
                step = StepShape(32, 32, 32, rows, padded_row_len(max(counts)), 12, is_tree=True)
                assert drafts.best(step) is not None or (most == 64 and rows > 16), step


def test_the_table_of_shapes_takes_the_one_that_a_search_finds() -> None:
    rng = random.Random(7)
    for recorded in (shapes_to_record(Limits(16, 256, 40), 300), shapes_to_record(Limits(4, 32, 9, True), 20), []):
        fits = Fits(recorded)
        for _ in range(300):
            tokens, rows = rng.randint(1, 280), rng.randint(1, 18)
            shape = StepShape(
                tokens, rng.randint(1, 2) * tokens, rng.randint(1, tokens), rows, rng.choice((4, 8, 12, 32)),
                rng.randint(1, 44), is_tree=rng.random() < 0.5,
            )  # fmt: skip
            assert fits.best(shape) == best_fit(shape, recorded)
            assert fits.best(shape) == best_fit(shape, recorded), "remembered"


# -- bits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", torch.bfloat16),
        ("gpt2", torch.float32),
        *slow(
            [
                ("llama", torch.float32),
                ("gemma3", torch.bfloat16),
                ("gemma2", torch.float32),
                ("qwen3_moe", torch.float32),
            ]
        ),
    ],
)
def test_padded_and_replayed_steps_have_the_bits_of_plain_ones(family: str, dtype: torch.dtype) -> None:
    """The CPU's own path against the packed one, eager and replayed; windows, softcap, trees, experts."""
    model = prepare(random_model(family, dtype=dtype), compile=False)
    host, eager, recorder = model.runner(40), on_device(model, 40), FakeRecorder()
    replayed = on_device(model, 40, recorder)
    for seed in range(4):
        kind = tree if seed % 2 else chain
        for runner in (eager, replayed):
            runner.record(TREES if kind is tree else LIMITS)
        steps = batch(seed, kind, host.cache)
        for pools in zip(*((*r.cache.keys, *r.cache.values) for r in (host, eager, replayed)), strict=True):
            pools[0].normal_()  # the contexts
            for pool in pools[1:]:
                pool.copy_(pools[0])
        want, before = host.forward(steps), recorder.num_replays
        for runner in (eager, replayed):
            got = runner.forward(steps)
            assert got.dtype == want.dtype
            if not torch.equal(got, want) and not check_invariance(model.runner(8)).holds:
                pytest.skip("shapes change bits on this platform")
            assert torch.equal(got, want), (seed, runner is replayed)
            for mine, other in zip(runner.cache.keys, host.cache.keys, strict=True):
                assert torch.equal(mine[:-1], other[:-1]), "the same rows are written, beside scratch"
        assert recorder.num_replays == before + 1
        for step in steps:
            host.cache.release(step.pages)


@pytest.mark.parametrize("every_position", [True, False])
def test_states_of_recorded_steps_are_those_of_the_host(every_position: bool) -> None:
    """Bit for bit those of the same shapes run eagerly, without a row of padding; and they stay what they were when
    another step runs."""
    model = prepare(random_model("llama"), compile=False, features=Features((0, 2, OUT), every_position))
    host, eager, recorder = model.runner(80), on_device(model, 80), FakeRecorder()
    device = on_device(model, 80, recorder)
    kept = []
    for runner in (eager, device):
        runner.record(LIMITS)
    for seed in range(10):
        steps = batch(seed, cache=host.cache)
        for step in steps[1:]:
            step.num_logits = 1
        for pools in zip(*((*r.cache.keys, *r.cache.values) for r in (host, eager, device)), strict=True):
            pools[0].normal_()  # the contexts
            for pool in pools[1:]:
                pool.copy_(pools[0])
        kept.append([runner.forward_with_states(steps) for runner in (device, eager, host)])
        for step in steps:
            host.cache.release(step.pages)
    assert recorder.num_replays > 5
    for outputs in kept:
        for got, same, want in zip(*outputs, strict=True):
            assert torch.equal(got, same)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert check_replay(device) == []
    honest = device.backend._replays[shape := device.backend.recorded[1]]

    def corrupt() -> None:
        honest()
        device.backend._states[1, 2] = torch.nextafter(device.backend._states[1, 2], torch.tensor(1e9))

    device.backend._replays[shape] = corrupt
    assert check_replay(device) == [shape]


def test_logits_stay_what_they_were_when_another_step_runs() -> None:
    runner = on_device(prepare(random_model("llama"), compile=False), 8, FakeRecorder())
    runner.record(LIMITS)
    pages = runner.cache.allocate(1)
    first = runner.forward([SequenceStep([11], [0], [0], pages, 1)])
    kept = first.clone()
    runner.forward([SequenceStep([12], [1], [1], pages, 1)])
    assert torch.equal(first, kept)


def test_first_tokens_of_a_step_may_lie_on_the_device() -> None:
    """The same bits and the same rows as if the host had known them, replayed or not."""
    model = prepare(random_model("llama"), compile=False)
    recorder = FakeRecorder()
    for runner in (model.runner(8), on_device(model, 8), on_device(model, 8, recorder)):
        runner.record(LIMITS)
        pages = [runner.cache.allocate(1) for _ in range(3)]

        def steps(tokens: list[int], pages: list[list[int]] = pages) -> list[SequenceStep]:
            spans = [range(4, 5), range(7, 8), range(5)]
            texts = [tokens[:1], tokens[1:2], [31, 32, 33, 34, 35]]
            return [SequenceStep(text, span, span, own, 1) for text, span, own in zip(texts, spans, pages, strict=True)]

        want = runner.forward(steps([21, 22]))
        keys = [pool[:-1].clone() for pool in runner.cache.keys]
        assert torch.equal(runner.forward_drawn(steps([0, 0]), torch.tensor([21, 22])), want)
        assert all(torch.equal(pool[:-1], was) for pool, was in zip(runner.cache.keys, keys, strict=True))
        assert not torch.equal(runner.forward_drawn(steps([0, 0]), torch.tensor([22, 21])), want)
    assert recorder.num_replays == 3


def test_steps_that_no_recording_fits_are_counted() -> None:
    model = prepare(random_model("llama"), compile=False)
    with_recordings, without = on_device(model, 8, FakeRecorder()), on_device(model, 8)
    for runner in (with_recordings, without):
        runner.record(Limits(2, 16, 2))
        pages = runner.cache.allocate(4)
        before = runner.backend.num_unrecorded
        for num_tokens in (1, 8, 40, 1, 40):
            runner.forward([SequenceStep([11] * num_tokens, range(num_tokens), range(num_tokens), pages, 1)])
        assert runner.backend.num_unrecorded - before == (2 if runner is with_recordings else 0)


def test_the_self_test_runs_through_replays() -> None:
    recorder = FakeRecorder()
    runner = on_device(prepare(random_model("llama"), compile=False), 3, recorder)
    runner.record(Limits(2, 64, 2))
    report = check_invariance(runner, max_len=64)
    assert recorder.num_replays > 64
    assert report.holds == ("NOT" not in str(report))


@pytest.mark.slow
def test_the_service_says_the_same_through_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Target and draft, greedy and sampled, against plain decoding on the host's own path."""
    model = random_model("llama")
    target, draft = prepare(model, compile=False), prepare(noisy_copy(model, 0.05), compile=False)
    requests = {
        f"r{i}": Request(prompt(i, 20 + 30 * i), SamplingParams(max_tokens=16, temperature=i % 2, seed=i))
        for i in range(4)
    }
    want = plain_reference(target, requests)
    recorders = []

    def backend(cache, dtype, window, kernel, *_):
        recorders.append(FakeRecorder())
        return DeviceBackend(cache, dtype, window, kernel=kernel, recorder=recorders[-1], max_shapes=1000)

    monkeypatch.setattr(loading, "make_backend", backend)
    pump = Pump(target, draft, max_sessions=4)
    pump.target.runner.record(Limits(4, 64, 8))
    pump.drafter.runner.record(Limits(4, 32, 8, is_tree=True))
    assert_same(pump.run(requests), want)
    assert all(recorder.num_replays >= 5 for recorder in recorders), [r.num_replays for r in recorders]


# -- what can go wrong -------------------------------------------------------------------------------------


def test_equal_replays_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    for limits in (LIMITS, TREES):
        runner = on_device(prepare(random_model("gemma3"), compile=False), 9, FakeRecorder(), most=6)
        runner.record(limits)
        with caplog.at_level(logging.INFO, "paceline"):
            assert check_replay(runner) == []
        assert len(runner.backend.recorded) == 6
        assert runner.cache.num_used == 0
    assert "6 recorded steps equal eager ones bit for bit" in caplog.text


class SmallRecorder(FakeRecorder):
    """Has no memory for steps of more than ``most`` tokens, and takes ``each`` bytes of ``free`` for a recording."""

    def __init__(self, most: int = 1 << 30, each: int = 0) -> None:
        super().__init__()
        self.most, self.each, self.free = most, each, 1 << 30

    def record(self, function):
        rooms = [cell.cell_contents for cell in function.__closure__ if isinstance(cell.cell_contents, StepShape)]
        if rooms[0].tokens > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.30 GiB")
        self.free -= self.each
        return super().record(function)


def test_a_shape_without_memory_runs_eagerly_and_the_others_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    """The mutant: one such shape, the largest, which comes first, drops all."""
    runner = on_device(prepare(random_model("llama"), compile=False), 9, SmallRecorder(most=16))
    with caplog.at_level(logging.INFO, "paceline"):
        record_steps(runner, LIMITS, 512, True)
    recorded = runner.backend.recorded
    assert recorded
    assert max(shape.tokens for shape in recorded) == 16
    assert "no memory to record a step of 64 tokens, which runs eagerly: CUDA out of memory" in caplog.text
    steps = [chain(random.Random(0), 9, 0, runner.cache.allocate(1))]
    before = runner.backend.num_unrecorded
    runner.forward(steps)
    assert runner.backend.num_unrecorded == before


def test_the_memory_of_recordings_is_measured_by_a_trial() -> None:
    """Which is given up; what cannot be recorded takes none."""
    model, recorder = prepare(random_model("llama"), compile=False), SmallRecorder(each=1 << 20)
    made: list[weakref.ref] = []

    def new_runner() -> ModelRunner:
        made.append(weakref.ref(runner := on_device(model, 1, recorder)))
        return runner

    def record(runner: ModelRunner) -> None:
        record_steps(runner, LIMITS, 512, "auto")

    taken = recordings_bytes(new_runner, record, lambda: recorder.free)
    assert taken == (1 << 30) - recorder.free > 10 << 20
    assert [one() for one in made] == [None]
    broken = FakeRecorder(error=RuntimeError("it waits"))
    assert recordings_bytes(lambda: on_device(model, 1, broken), record, lambda: 7) == 0


def test_a_rank_without_memory_for_a_shape_that_others_are_in_ends() -> None:
    """It could not exchange with them again. The mutant: it goes on to the next shape."""
    runner = on_device(prepare(random_model("llama"), compile=False), 9, SmallRecorder(most=16))
    runner.backend.least = lambda value: value
    with pytest.raises(EngineError, match="no memory to record a step that other ranks are in: CUDA out of memory"):
        record_steps(runner, LIMITS, 512, "auto")


def test_a_replay_that_differs_in_one_bit_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    runner = on_device(prepare(random_model("llama"), compile=False), 9, FakeRecorder(), most=6)
    runner.record(LIMITS)
    shape = runner.backend.recorded[2]
    honest = runner.backend._replays[shape]

    def corrupt() -> None:
        honest()
        logits = runner.backend._logits
        logits[3, 5] = torch.nextafter(logits[3, 5], torch.tensor(1e9))

    runner.backend._replays[shape] = corrupt
    assert check_replay(runner) == [shape]
    assert len(runner.backend.recorded) == 5
    assert shape not in runner.backend.recorded
    assert "1 of 6 recorded steps differ from eager ones" in caplog.text
    assert check_replay(runner) == []


def test_recording_stops_where_memory_does_and_bits_stay(caplog: pytest.LogCaptureFixture) -> None:
    """The shapes are the same without recordings: what fits in memory must not decide about bits."""
    model = prepare(random_model("llama"), compile=False)
    few, none = on_device(model, 9, FakeRecorder(room=3)), on_device(model, 9)
    for runner in (few, none):
        runner.record(LIMITS)
    assert len(few.backend.recorded) == 3
    assert none.backend.recorded == []
    assert few.backend.shapes == none.backend.shapes
    assert "no memory to record more than 3 of" in caplog.text


def test_a_model_that_cannot_be_recorded(caplog: pytest.LogCaptureFixture) -> None:
    """``auto`` goes on eagerly and says so; ``true`` is refused."""
    error = RuntimeError("operation not permitted when stream is capturing\nmore")
    runner = on_device(prepare(random_model("llama"), compile=False), 9, FakeRecorder(error=error))
    record_steps(runner, LIMITS, 1024, "auto")
    assert runner.backend.recorded == []
    assert "cannot be recorded as CUDA graphs and runs eagerly: operation not permitted" in caplog.text
    pages = runner.cache.allocate(1)
    assert runner.forward([SequenceStep([11], [0], [0], pages, 1)]).shape == (1, runner.vocab_size)
    with pytest.raises(
        ConfigError, match=r"^cuda_graphs is true but this model cannot be recorded: operation not .*g$"
    ):
        record_steps(runner, LIMITS, 1024, True)


def test_graphs_are_refused_on_the_cpu(tmp_path) -> None:
    message = r"^cuda_graphs is true but the model runs on device 'cpu': use 'auto' or false, or device 'cuda'$"
    with pytest.raises(ConfigError, match=message):
        load_model(Checkpoint.open(str(save_pair(tmp_path) / "target")), ModelOptions(device="cpu", cuda_graphs=True))
    cache = prepare(random_model("llama"), compile=False).runner(1).cache
    with pytest.raises(ConfigError, match=message):
        make_backend(cache, torch.float32, None, "sdpa", True, 8)
    for choice in ("auto", False):
        assert isinstance(make_backend(cache, torch.float32, None, "sdpa", choice, 8), HostBackend)


def test_the_choice_reaches_both_models() -> None:
    config = ServiceConfig.parse(
        {"target_config": {"engine_kwargs": {"cuda_graphs": False, "max_cuda_graphs": 9}},
         "draft_config": {"engine_kwargs": {"cuda_graphs": True}}}
    )  # fmt: skip
    target, draft = config.target_setup().options, config.draft_setup().options
    assert (target.cuda_graphs, target.max_cuda_graphs) == (False, 9)
    assert (draft.cuda_graphs, draft.max_cuda_graphs) == (True, 256)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_masks_are_zero_where_seen_and_minus_infinity_elsewhere(dtype: torch.dtype) -> None:
    """Row by row as ``SequenceStep`` says: rows up to a token's own, and of those the window's."""
    steps = [SequenceStep([1] * 3, range(70, 73), range(70, 73), [4, 5], 1), SequenceStep([1], [5], [5], [9], 1)]
    plan = StepPlan.of(steps, SCRATCH_ROW).arrays
    whole, near = attention_masks(plan, dtype, window=4)
    for token, (position, row) in enumerate([(70, 0), (71, 0), (72, 0), (5, 1)]):
        place = int(plan.scatter[token]) - row * plan.gather.shape[1]
        for mask, first in ((whole, 0), (near, position - 3)):
            want = [0.0 if first <= key <= position else -math.inf for key in range(mask.shape[-1])]
            assert mask.dtype == dtype
            assert mask[row, 0, place].tolist() == want
