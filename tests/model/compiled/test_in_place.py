"""Steps of attention in place are recorded by their number of tokens: which are replayed, and that they say the same.

On the CPU, with the kernel's reference (``tests/support/in_place.py``).
"""

import random
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from tests.model.compiled.test_backend import FakeRecorder, chain, on_device, tree
from tests.support import in_place
from tests.support.models import random_model

from paceline.model.attention import schedule
from paceline.model.attention.schedule import RECORDED_SCRATCH_BYTES, most_sums, num_splits, sum_bytes
from paceline.model.compiled.buckets import Fits, Limits, shapes_to_record, token_shapes
from paceline.model.loading import LoadedModel, prepare
from paceline.model.selftest import check_replay
from paceline.model.shapes import QUERY_ROW_LEN, Shapes, padded_pages
from paceline.model.step import Step
from paceline.model.step_plan import SequenceStep, StepPlan, StepShape
from paceline.types import pages_for

LIMITS = Limits(max_rows=6, max_tokens=96, max_pages=8)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> LoadedModel:
    """A model whose attention is the kernel's reference."""
    kernel = ModuleType("paceline.model.attention.triton")
    kernel.attend_in_place, kernel.write_in_place = in_place.attend_in_place, in_place.write_in_place
    monkeypatch.setitem(sys.modules, kernel.__name__, kernel)
    loaded = prepare(random_model(getattr(request, "param", "llama")), compile=False)
    return replace(loaded, kernel="triton", step=Step(loaded.step.model, "triton"))


def host_of(model: LoadedModel):
    """The same model by torch's attention, from the host's own memory."""
    return replace(model, kernel="sdpa", step=Step(model.step.model, "sdpa")).runner(60)


def agree(model: LoadedModel, device, batches: list[list[SequenceStep]]) -> None:
    """Compares the steps with the host's, from the same contexts."""
    host = host_of(model)
    for step in (step for batch in batches for step in batch):
        step.pages = host.cache.allocate(pages_for(max(step.rows) + 1))
    for batch in batches:
        for pools in zip(*((*r.cache.keys, *r.cache.values) for r in (host, device)), strict=True):
            pools[0].normal_()
            pools[1].copy_(pools[0])
        model.step.model.set_attn_implementation("paceline_paged")
        want = host.forward(batch)
        model.step.model.set_attn_implementation("paceline_paged_triton")
        torch.testing.assert_close(device.forward(batch), want, rtol=1e-4, atol=1e-4)
        for mine, other in zip(device.cache.keys, host.cache.keys, strict=True):
            torch.testing.assert_close(mine[:-1], other[:-1], rtol=1e-4, atol=1e-4)


def mixed(seed: int) -> list[SequenceStep]:
    """Decoding, verification and a chunk of a prompt in one step."""
    rng = random.Random(seed)
    counts = [1, 1 + rng.randrange(9), 1, rng.randrange(17, 60)][: rng.randint(1, 4)]
    return [chain(rng, count, rng.randrange(300), []) for count in counts]


@pytest.mark.parametrize("model", ["llama", "gemma3"], indirect=True)
def test_mixed_steps_are_replayed_and_say_what_the_host_says(model: LoadedModel) -> None:
    """Windows included. Mutants: a row's places counted with its padding; bounds of the window of the row before."""
    recorder = FakeRecorder()
    device = on_device(model, 60, recorder)
    device.record(LIMITS)
    agree(model, device, [mixed(seed) for seed in range(6)])
    assert recorder.num_replays == 6
    assert device.backend.num_unrecorded == 0
    assert check_replay(device) == []


def test_trees_are_seen_through_their_masks(model: LoadedModel) -> None:
    device = on_device(model, 60)
    agree(model, device, [[tree(random.Random(seed), 6, 70 * seed, [])] for seed in range(1, 4)])


def test_a_step_with_more_sums_than_a_recording_has_runs_in_several_calls(model, monkeypatch) -> None:
    """Mutant: a recording that is replayed whatever the contexts are."""
    monkeypatch.setattr(schedule, "most_sums", lambda *_: 20)
    recorder = FakeRecorder()
    device = on_device(model, 60, recorder)
    device.record(LIMITS)
    assert {shape.tokens for shape in device.backend.recorded} == {16}, "others have not even room for their tokens"
    near, far = [chain(random.Random(0), 8, 20, [])], [chain(random.Random(0), 8, 400, [])]
    agree(model, device, [near, far])
    assert recorder.num_replays == 1
    assert device.backend.num_unrecorded == 1
    assert check_replay(device) == []


def test_a_recording_needs_no_sums_of_rows_that_are_walked(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full rows of a prompt in a long context. Mutant: their sums are counted, and the step runs eagerly."""
    monkeypatch.setattr(schedule, "most_sums", lambda *_: 64)
    monkeypatch.setattr(in_place, "PROGRAMS", schedule.LEAST_WALKS)
    recorder = FakeRecorder()
    device = on_device(model, 60, recorder)
    device.record(LIMITS)
    rng = random.Random(0)
    steps = [[chain(rng, count, 400, []), chain(rng, 1, 5, [])] for count in (32, 30, 15)]  # 15: no full row
    agree(model, device, steps)
    assert (recorder.num_replays, device.backend.num_unrecorded) == (3, 0)
    monkeypatch.setattr(in_place, "PROGRAMS", 0)
    other = on_device(model, 60, recorder)
    other.record(LIMITS)
    agree(model, other, steps)
    assert (recorder.num_replays, other.backend.num_unrecorded) == (4, 2)


def test_recorded_tokens_are_few_and_cover_every_spread() -> None:
    """Any sessions up to the limit with any numbers of tokens have a shape, at any length of the contexts."""
    rng = random.Random(0)
    for limits in (Limits(16, 256, 129), Limits(64, 512, 2048), Limits(256, 2048, 2048), Limits(8, 100, 3)):
        shapes = token_shapes(limits, 1000)
        assert len(shapes) == len(set(shapes)) <= 80
        assert token_shapes(limits, 5) == shapes[:5]
        fits = Fits(shapes)
        for _ in range(300):
            counts = [1] * rng.randint(1, min(limits.max_rows, limits.max_tokens))
            for _ in range(rng.randint(0, limits.max_tokens - len(counts))):
                counts[min(len(counts) - 1, int(rng.expovariate(0.5)))] += 1
            rows = sum(-(-count // QUERY_ROW_LEN) for count in counts)
            tokens, pages = sum(counts), padded_pages(rng.randint(1, limits.max_pages))
            found = fits.best(StepShape(tokens, 2 * tokens, min(tokens, 512), rows, QUERY_ROW_LEN, pages))
            assert found is not None, (limits, counts)
            assert found.tokens <= max(16, tokens * 5 // 4 + 16)


LOADS = [
    (16, 256, 8192, (100, 2000), 0),
    (16, 256, 131072, (100, 2000), 4),
    (64, 256, 8192, (100, 2000), 0),
    (64, 256, 131072, (100, 2000), 4),
    (64, 256, 8192, (20, 100), 4),
    (64, 2048, 8192, (100, 2000), 0),
    (256, 256, 8192, (100, 2000), 0),
    (256, 2048, 131072, (100, 2000), 0),
]


@pytest.mark.parametrize(("sessions", "budget", "max_len", "prompts", "drafts"), LOADS)
def test_steps_of_a_closed_loop_are_replayed(sessions, budget, max_len, prompts, drafts) -> None:
    """Prompts beside decoding and verification: at least 99 % of the steps, of a Llama 8B's heads. By the shapes of
    query rows and page tables, which are the mutant, up to all of them run eagerly."""
    most = most_sums(sum_bytes(32, 128), RECORDED_SCRATCH_BYTES)
    limits = Limits(max(sessions, 16), budget, pages_for(max_len + 32))
    fits = Fits(token_shapes(limits, 256))
    former = Fits(shapes_to_record(limits, 256))
    replayed = formerly = 0
    for steps in closed_loop(sessions, budget, prompts, drafts, 100):
        plan = StepPlan.of(steps, 10**7, Shapes(longest_row=QUERY_ROW_LEN))
        sums = sum(len(step.token_ids) * num_splits(len(step.pages)) for step in steps)
        replayed += sums <= most and fits.best(plan.shape) is not None
        formerly += former.best(StepPlan.of(steps, 10**7).shape) is not None
    assert replayed >= 99
    assert formerly < 99


def closed_loop(sessions: int, budget: int, prompts: tuple[int, int], drafts: int, num_steps: int):
    """Steps of sessions whose outputs have 50 to 500 tokens; one that ends is followed by the next."""
    rng = random.Random(0)

    def new() -> list[int]:  # computed, prompt, left
        return [0, int(rng.uniform(*prompts)), int(rng.uniform(50, 500))]

    live = [new() for _ in range(sessions)]
    for session in live:
        session[0] = session[1] - 1 if rng.random() < 0.9 else 0
    for _ in range(num_steps):
        left, steps, done = budget, [], []
        for session in sorted(live, key=lambda s: s[0] < s[1] - 1):
            computed, length, _ = session
            decodes = computed >= length - 1
            count = min(left, 1 + rng.randint(0, drafts) if decodes else length - computed)
            if not count:
                continue
            left -= count
            span, wanted = range(computed, computed + count), count if decodes else int(computed + count == length)
            steps.append(SequenceStep([1] * count, span, span, list(range(pages_for(computed + count))), wanted))
            done.append((session, 1 if decodes else count))
        yield steps
        for session, count in done:
            session[0] += count
            if session[0] >= session[1]:
                session[1], session[2] = session[1] + 1, session[2] - 1
            if session[2] <= 0:
                live[live.index(session)] = new()
