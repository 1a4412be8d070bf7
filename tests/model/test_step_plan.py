"""A step's plan is laid out by columns as it would be token by token, and is the same plan after a journey as bytes."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.compilers import with_faults

from paceline.model import layout, step_plan
from paceline.model.attention.chunks import Chunks
from paceline.model.kv_cache import flat_rows
from paceline.model.shapes import QUERY_ROW_LEN, Shapes
from paceline.model.step_plan import SequenceStep, StepPlan
from paceline.types import PAGE_SIZE, pages_for

SCRATCH_ROW = 10_000 * PAGE_SIZE
SHAPES = (
    Shapes(),
    Shapes(spare_tokens=3),
    Shapes.needed(native=True, promised=True, spare_tokens=0),
    Shapes.needed(native=False, promised=False, spare_tokens=3),
    Shapes(spare_tokens=63),
)


def _chain(rng: random.Random, num_tokens: int, start: int) -> SequenceStep:
    span = range(start, start + num_tokens)
    pages = rng.sample(range(10_000), pages_for(start + num_tokens))
    return SequenceStep(
        [rng.randrange(150_000) for _ in span], span, span, pages, num_logits=rng.randint(0, num_tokens)
    )


def _tree(rng: random.Random, num_tokens: int, start: int) -> SequenceStep:
    """Its tokens see the same rows, and few of their own."""
    step = _chain(rng, num_tokens, start)
    step.rows = rng.sample(range(start + num_tokens), num_tokens)
    step.positions = [rng.randrange(500) for _ in step.rows]
    num_keys = rng.choice([start + num_tokens, len(step.pages) * PAGE_SIZE])
    step.visible = torch.rand(num_keys) < 0.5
    step.key_positions = torch.randint(0, 500, (num_keys,)) if rng.random() < 0.5 else None
    step.own_rows = [rng.sample(step.rows, rng.randint(0, min(3, num_tokens))) for _ in step.rows]
    return step


def _seen(step: SequenceStep) -> np.ndarray:
    """bool [tokens, rows]: the rows that each token of a tree sees."""
    return np.array([[seen or row in own for row, seen in enumerate(step.visible)] for own in step.own_rows])


def _batch(seed: int) -> list[SequenceStep]:
    """Chunks beside short sequences, pages copied and rows written twice, trees with and without positions."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    longest = (1, 9, 40, 200)[seed % 4]
    steps = [_chain(rng, rng.randint(1, longest), rng.randint(0, 300)) for _ in range(rng.randint(1, 6))]
    for step in steps[::2]:
        step.also = [(rng.randrange(len(step.token_ids)), rng.randrange(SCRATCH_ROW)) for _ in range(rng.randint(0, 4))]
        step.copies = [(rng.randrange(100), rng.randrange(100, 200))] * rng.randint(0, 1)
    if seed % 3 == 0:
        for _ in range(rng.randint(1, 4)):
            steps.insert(rng.randrange(len(steps)), _tree(rng, rng.randint(1, 12), rng.randint(0, 200)))
    return steps


def _plain(steps: list[SequenceStep], shapes: Shapes) -> dict[str, object]:
    """The slow twin: what ``StepPlan.of`` lays out, token by token."""
    lengths = [len(step.token_ids) for step in steps]
    row_len = shapes.row_len(max(lengths))
    if len(steps) > 1 and row_len > QUERY_ROW_LEN and min(lengths) <= row_len // 2:
        row_len = max(QUERY_ROW_LEN, shapes.row_len(min(lengths)))
    seen = [max(step.rows) + 1 if step.visible is None else step.visible.shape[-1] for step in steps]
    num_pages = shapes.pages(max(pages_for(max(s, max(step.rows) + 1)) for s, step in zip(seen, steps, strict=True)))
    names = ("tokens", "positions", "logits_index", "write_rows", "write_tokens", "page_table", "gather", "scatter")
    plan: dict[str, list] = {name: [] for name in (*names, "query_rows", "visible", "key_positions")}
    also: list[tuple[int, int]] = []
    for step in steps:
        base = len(plan["tokens"])
        num_tokens = len(step.token_ids)
        plan["tokens"] += step.token_ids
        plan["positions"] += step.positions
        plan["write_rows"] += [flat_rows(step.pages, row, row + 1)[0] for row in step.rows]
        plan["logits_index"] += range(base + num_tokens - step.num_logits, base + num_tokens)
        also += [(base + token, row) for token, row in step.also]
        for first in range(0, num_tokens, row_len):
            of_row = [*range(first, min(first + row_len, num_tokens))]
            at = len(plan["gather"]) * row_len
            plan["scatter"] += range(at, at + len(of_row))
            of_row += of_row[-1:] * (row_len - len(of_row))
            plan["gather"].append([base + token for token in of_row])
            plan["query_rows"].append([step.rows[token] for token in of_row])
            plan["page_table"].append([*step.pages, *[step.pages[0]] * num_pages][:num_pages])
            sees = np.zeros((row_len, num_pages * PAGE_SIZE), bool)
            position = np.arange(num_pages * PAGE_SIZE)
            for place, token in enumerate(of_row):
                if step.visible is None:
                    sees[place, : step.rows[token] + 1] = True
                else:
                    sees[place, : step.visible.shape[-1]] = _seen(step)[token]
            if step.visible is not None and step.key_positions is not None:
                position[: step.visible.shape[-1]] = step.key_positions.numpy()
            plan["visible"].append(sees)
            plan["key_positions"].append(position)
    plan["write_tokens"] = [*range(len(plan["tokens"])), *(token for token, _ in also)]
    plan["write_rows"] += [row for _, row in also]
    scratch = shapes.tokens(len(plan["write_rows"])) - len(plan["write_rows"])
    plan["write_rows"] += [SCRATCH_ROW + i % PAGE_SIZE for i in range(scratch)]
    plan["write_tokens"] += [0] * scratch
    for name in ("tokens", "positions", "logits_index", "scatter"):
        count = len(plan[name])
        plan[name] += [0] * (shapes.tokens(count) - count)
    trees = any(step.visible is not None for step in steps)
    return {
        name: np.array(values) for name, values in plan.items() if trees or name not in ("visible", "key_positions")
    }


def _is_plain(steps: list[SequenceStep], shapes: Shapes) -> bool:
    try:
        _assert_plain(steps, shapes)
    except AssertionError:
        return False
    return True


def _assert_plain(steps: list[SequenceStep], shapes: Shapes) -> None:
    plan = StepPlan.of(steps, SCRATCH_ROW, shapes)
    for name, expected in _plain(steps, shapes).items():
        assert np.array_equal(getattr(plan.arrays, name).numpy(), expected), name
    assert plan.num_logits == sum(step.num_logits for step in steps)
    assert plan.copies == tuple(pair for step in steps for pair in step.copies)


@pytest.mark.usefixtures("passes")
def test_a_step_is_laid_out_as_it_would_be_token_by_token() -> None:
    for seed in range(48):
        _assert_plain(_batch(seed), SHAPES[seed % len(SHAPES)])


@pytest.mark.compiler
def test_sequences_are_gathered_as_by_python() -> None:
    """Whatever holds their numbers."""
    num_trees = 0
    for seed in range(96):
        steps, shapes = _batch(seed), SHAPES[seed % len(SHAPES)]
        if seed % 2:
            for step in steps:
                step.token_ids, step.pages = tuple(step.token_ids), array("q", step.pages)
        if seed % 4 == 1:
            steps[-1].positions = [*steps[-1].positions]
        assert layout.gather(steps) is not None
        num_trees += any(step.visible is not None for step in steps)
        plan, twin = StepPlan.of(steps, SCRATCH_ROW, shapes), StepPlan._by_python(steps, SCRATCH_ROW, shapes)
        assert torch.equal(plan.buffer, twin.buffer)
        assert (plan.num_logits, plan.shape, plan.copies) == (twin.num_logits, twin.shape, twin.copies)
    assert num_trees > 16


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": []},
        {"token_ids": [1, "2"]},
        {"token_ids": [1, 2**64]},
        {"rows": range(0, 4, 2)},
        {"rows": range(3)},
        {"positions": [0]},
        {"pages": array("i", [0])},
        {"also": [(0, 1, 2)]},
        {"num_logits": None},
        {"own_rows": [[0], [1]]},
        {"visible": torch.ones(2, 2, dtype=torch.bool), "own_rows": [[0], [1]]},
        {"visible": torch.ones(2, dtype=torch.bool)},
        {"visible": torch.ones(2, dtype=torch.bool), "own_rows": [[0]]},
        {"visible": torch.ones(2, dtype=torch.bool), "own_rows": [[0], 1]},
        {"visible": torch.ones(4, dtype=torch.bool)[::2], "own_rows": [[0], [1]]},
        {"visible": torch.ones(2, dtype=torch.bool), "own_rows": [[0], [1]], "key_positions": torch.arange(3)},
        {"copies": [(0, 1)] * 2, "pages": None},
    ],
    ids=str,
)
def test_what_engines_do_not_make_is_left_to_python(change: dict[str, object]) -> None:
    span = range(2)
    right = SequenceStep([1, 2], span, span, [0], num_logits=2)
    assert (layout.gather([right]) is None) == (layout.native_module() is None)
    assert layout.gather([right, replace(right, **change)]) is None
    assert layout.gather([]) is None


@pytest.mark.usefixtures("passes")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pages": []}, "rows has 0: the page table has 0 pages"),
        ({"rows": [0, 64]}, "rows has 64: the page table has 1 pages, which hold 64 rows"),
        ({"rows": [-1, 0]}, "rows has -1"),
        ({"rows": [0]}, "2, 1 and 2 long"),
        ({"num_logits": 3}, "num_logits has 3: the sequence has 2 tokens"),
        ({"num_logits": -1}, "num_logits has -1"),
        ({"also": [(2, 0)]}, "also has 2"),
        ({"also": [(0, -1)]}, "also has -1"),
        ({"own_rows": [[0], [1]]}, "own_rows is set"),
        ({"visible": torch.ones(2, 2, dtype=torch.bool)}, r"visible is \[2, 2\]"),
        ({"visible": torch.ones(65, dtype=torch.bool)}, r"visible is \[65\]: 1 to 64 rows"),
        ({"visible": torch.ones(2, dtype=torch.bool), "own_rows": [[0], [2]]}, "own_rows has 2: visible has 2 rows"),
        ({"visible": torch.ones(2, dtype=torch.bool), "own_rows": [[0]]}, "own_rows has 1 entries"),
        ({"visible": torch.ones(2, dtype=torch.bool), "key_positions": torch.arange(3)}, r"key_positions is \[3\]"),
    ],
    ids=str,
)
def test_a_sequence_that_does_not_fit_is_refused_with_its_value(change: dict[str, object], message: str) -> None:
    right = SequenceStep([1, 2], range(2), range(2), [0], num_logits=2)
    with pytest.raises(ValueError, match=message):
        StepPlan.of([right, replace(right, **change)], SCRATCH_ROW)


@pytest.mark.compiler
def test_buffers_and_pages_that_do_not_fit_are_refused() -> None:
    right = SequenceStep([1, 2], range(2), range(2), [0], num_logits=2)
    columns = layout.gather([right])[-1]
    sizes, buffer = (2, 2, 2, 1, 2, 1, False), torch.zeros(200, dtype=torch.uint8)
    layout.lay_out(columns, 0, sizes, buffer)
    for place, value, message in (
        (0, 1, "tokens is 1: the step has 2"),
        (4, 0, "row_len or pages is 0"),
        (5, -1, "pages is -1"),
    ):
        changed = [*sizes]
        changed[place] = value
        with pytest.raises(ValueError, match=message):
            layout.lay_out(columns, 0, changed, buffer)
        with pytest.raises(ValueError):
            layout.pack(sizes, buffer, changed, buffer.clone(), 0)
    with pytest.raises(ValueError, match="the buffer has 8 bytes"):
        layout.masks(sizes, buffer[:8], torch.float32, None)
    buffer[88:104] = 0xFF  # gather
    with pytest.raises(ValueError, match="no token's"):
        layout.masks(sizes, buffer, torch.float32, 3)
    with pytest.raises(ValueError, match="strides"):
        layout.lay_out(columns, 0, sizes, buffer[::2])
    pools = [torch.zeros(4, 3), torch.zeros(4, 0)]
    for pages in ([4], [-1]):
        with pytest.raises(ValueError, match=f"page is {pages[0]}: 0 to 3 is allowed"):
            layout.clear_pages(pools, pages)
        with pytest.raises(ValueError, match=f"page is {pages[0]}"):
            layout.copy_pages(pools, [(0, pages[0])])


def test_a_layout_that_is_off_by_one_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = step_plan.ragged_ranges
    monkeypatch.setattr(layout, "native_module", lambda: None)
    monkeypatch.setattr(step_plan, "ragged_ranges", lambda starts, counts: right(starts, counts) + (counts[-1] > 1))
    for seed in (1, 2, 3):
        with pytest.raises(AssertionError):
            _assert_plain(_batch(seed), Shapes())


FAULTS = {
    "local = std::min(begin + p, tokens - 1)": "local = std::min(begin + p, tokens - 1 - (fault(0) && tokens > 1))",
    "pages[p < tables ? p : 0]": "pages[p < tables ? p : fault(1) ? tables - 1 : 0]",
    "first += tokens, pages += tables": "first += tokens, pages += tables - (fault(2) && i == 1)",
    "sees + width, 0, s.keys() - width": "sees + width - fault(3), 0, s.keys() - width + fault(3)",
    "row + (i - from) % kPage": "row + (i - (fault(4) ? 0 : from)) % kPage",
    "j <= *own": "j + fault(5) <= *own",
    "begin + p < tokens - 1) own": "begin + p < tokens - 1 - fault(6)) own",
}
"""Texts of the source, and the same with a fault (``with_faults``)."""


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The native layout with all faults, none of which is on."""
    changed = tmp_path_factory.mktemp("faulty") / "layout.cpp"
    changed.write_text(with_faults(layout.SOURCE, FAULTS.items()), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "SOURCE", changed)
        return layout.native_module.__wrapped__()


@pytest.mark.compiler
@pytest.mark.parametrize("number", range(len(FAULTS)))
def test_a_native_layout_that_is_wrong_is_noticed(number: int, faulty: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "native_module", lambda: faulty)
    if number == 0:
        assert all(_is_plain(_batch(seed), Shapes(spare_tokens=3)) for seed in range(48)), "without a fault it is right"
    monkeypatch.setenv("FAULT", str(number))
    assert not all(_is_plain(_batch(seed), Shapes(spare_tokens=3)) for seed in range(48))


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_native_masks_are_those_of_torch(dtype: torch.dtype) -> None:
    for seed in range(24):
        plan = StepPlan.of(_batch(seed), SCRATCH_ROW, SHAPES[seed % len(SHAPES)])
        for window in (None, 1, 50, Chunks(1), Chunks(50)):
            made, expected = plan.masks(dtype, window), step_plan.attention_masks(plan.arrays, dtype, window)
            assert [mask.shape for mask in made] == [mask.shape for mask in expected]
            for mask, twin in zip(made, expected, strict=True):
                assert torch.equal(mask, twin)


@pytest.mark.parametrize("seed", range(20))
def test_a_decoded_plan_is_the_encoded_one(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    steps = [_chain(rng, rng.randint(1, 40), rng.randint(0, 300)) for _ in range(rng.randint(1, 5))]
    steps[0].copies = [(3, 4)] * (seed % 3)
    if seed % 2:
        steps.append(_tree(rng, rng.randint(1, 12), rng.randint(0, 200)))
    plan = StepPlan.of(steps, SCRATCH_ROW, SHAPES[seed % len(SHAPES)])
    twin = StepPlan.decode(plan.encode())
    assert torch.equal(plan.buffer, twin.buffer)
    for field in ("num_logits", "shape", "copies"):
        assert getattr(plan, field) == getattr(twin, field), field
    for window in (None, 50):
        for mine, other in zip(plan.masks(torch.float32, window), twin.masks(torch.float32, window), strict=True):
            assert torch.equal(mine, other)


@pytest.mark.usefixtures("passes")
def test_the_sliding_window_counts_positions_and_not_rows() -> None:
    """A tree's rows lie behind each other while its positions do not."""
    step = SequenceStep([5, 6], [10, 10], [10, 11], [0], num_logits=2)
    step.visible, step.own_rows = torch.ones(12, dtype=torch.bool), [[], []]
    step.key_positions = torch.tensor([*range(10), 10, 10])
    _, near = StepPlan.of([step], SCRATCH_ROW).masks(torch.float32, 3)
    assert (near[0, 0, :2] == 0).nonzero()[:, 1].tolist() == [8, 9, 10, 11] * 2


def test_padding_stays_within_the_page_that_it_may_overwrite() -> None:
    """However much of it a model needs behind the last token."""
    step = SequenceStep([1] * 65, range(65), range(65), [0, 1], num_logits=1)
    plan = StepPlan.of([step], SCRATCH_ROW, Shapes(spare_tokens=63)).arrays
    assert len(plan.tokens) >= 65 + 63
    assert int(plan.write_rows[65:].max()) < SCRATCH_ROW + 64
    assert int(plan.write_rows[65:].min()) >= SCRATCH_ROW
