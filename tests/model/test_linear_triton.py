"""Linear layers by the kernels for CUDA: on a GPU, or in triton's interpreter (``attention/test_kernels.py``).

The interpreter rounds to bfloat16 in another way than torch: float16 stands in for it where numbers are compared.
"""

from __future__ import annotations

import importlib.util
import os
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.model.families import checkpoint
from tests.model.parallel.ranks import Ranks, load
from tests.model.test_linear import chunk, differing_of
from tests.model.test_linear_native import random_inputs, random_step
from tests.support.hybrids import hybrid_config, poison
from tests.support.interpreter import hasten
from tests.support.models import prompt
from torch import Tensor

from paceline.checkpoint.linear import Kind, LinearSpec
from paceline.model.linear import layers
from paceline.model.linear.layers import by_torch
from paceline.model.linear.operator import Gates, LinearPools
from paceline.model.linear.plan import LinearSlots, LinearStep
from paceline.model.loading import prepare
from paceline.model.parallel.collectives import Collectives
from paceline.model.parallel.runner import Follower, LeadingRunner
from paceline.model.runner import ModelRunner

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_CAN_RUN = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or not _CAN_RUN, reason="needs triton and a GPU, or TRITON_INTERPRET=1"
)
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
SPECS = {
    Kind.GATED_DELTA: LinearSpec(2, 4, 20, 40, 4),
    Kind.KIMI_DELTA: LinearSpec(2, 2, 16, 16, 4, Kind.KIMI_DELTA),
    Kind.LIGHTNING: LinearSpec(2, 2, 16, 16, 1, Kind.LIGHTNING),
    Kind.MAMBA2: LinearSpec(2, 4, 24, 20, 4, Kind.MAMBA2),
    Kind.CONVOLUTION: LinearSpec(0, 150, 0, 1, 3, Kind.CONVOLUTION),
    Kind.MAMBA: LinearSpec(1, 150, 12, 1, 4, Kind.MAMBA),
}
"""Sizes that end within a tile."""
_NEIGHBOR = 18
"""Tokens of a sequence in the same step, across the end of a chunk."""


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs take more than one group each."""
    if DEVICE == "cuda" or not _CAN_RUN:
        return
    hasten()
    monkeypatch.setattr(kernels(), "NUM_GROUPS", 2)


def kernels() -> ModuleType:
    from paceline.model.linear import triton

    return triton


def difference(kernel: ModuleType, spec: LinearSpec, dtype: torch.dtype, seed: int) -> float:
    """The largest difference of outputs, rows and states from the reference's, relative to 1 and the number itself."""
    step = random_step(random.Random(seed), 3)
    pools, gates = random_inputs(spec, dtype, step, seed, DEVICE)
    ours, numbers = LinearPools(*[pool.clone() for pool in pools]), torch.tensor(step.encode())
    out = kernel.run_step(numbers.to(DEVICE), ours, spec, gates)
    expected = by_torch(numbers, pools, spec, gates)
    assert out.dtype == expected.dtype
    assert out.shape == expected.shape
    pairs = zip((out, *ours), (expected, *pools), strict=True)
    return max(float(((a - b).abs() / (1 + b.abs())).max()) for a, b in pairs if a.numel())


@pytest.mark.parametrize("kind", SPECS)
def test_numbers_are_those_of_the_reference(kind: Kind) -> None:
    """In outputs, states, tails and rows, of sequences that begin and end anywhere in a chunk."""
    for seed in range(2):
        assert difference(kernels(), SPECS[kind], FP32, seed) < 1e-4, f"seed {seed}"
    assert difference(kernels(), SPECS[kind], FP16, 4) < 4e-3


def of_triton(monkeypatch: pytest.MonkeyPatch, kernel: ModuleType) -> None:
    """Runs linear layers by ``kernel`` on the device that there is."""

    def run(inputs: Any, index: int, spec: LinearSpec, gates: Gates) -> Tensor:
        out: Tensor = kernel.run_step(inputs.numbers, inputs.pools[index], spec, gates)
        return out

    monkeypatch.setattr(layers, "run", run)


def whole_model(dtype: torch.dtype) -> ModelRunner:
    """A runner of a model with one linear layer and one with attention, whose free slots hold NaN."""
    changes = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    changes |= {"linear_num_value_heads": 2, "linear_num_key_heads": 1}
    model = checkpoint(hybrid_config("qwen3_next", **changes)).to(DEVICE, dtype)
    return poison(prepare(model, compile=False).runner(24, max_sessions=8))


@pytest.mark.parametrize(("dtype", "context", "seed"), [(FP32, 63, 14), (FP32, 16, 8), (BF16, 63, 14)])
def test_any_tree_has_the_bits_of_decoding(
    dtype: torch.dtype, context: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a whole model: a tree of four tokens across ends of chunks and pages, after prefill in random chunks. A token
    of a second branch is accepted."""
    of_triton(monkeypatch, kernels())
    assert differing_of(whole_model(dtype), (context,), seed, _NEIGHBOR) == 0


def _on_rank(group: Collectives, path: str) -> tuple[Tensor, int] | None:
    with pytest.MonkeyPatch.context() as patch:
        of_triton(patch, kernels())
        runner = load(group, path, FP32, False).runner(24, max_sessions=8)
        if group.rank > 0:
            follower = Follower(runner)
            while follower.step():
                pass
            return None
        found = logits_of(runner), differing_of(poison(runner), (16,), 8, _NEIGHBOR)
        assert isinstance(runner, LeadingRunner)
        runner.end()
        return found


def logits_of(runner: ModelRunner) -> Tensor:
    """Of a prompt that is computed in two parts, across the end of a chunk."""
    pages = runner.cache.allocate(1)
    rows = [runner.forward([chunk(prompt(3, 20), a, b, pages, b - a)]) for a, b in ((0, 13), (13, 20))]
    runner.cache.release(pages)
    return torch.cat(rows)


@pytest.mark.nightly
@pytest.mark.skipif(DEVICE == "cuda", reason="ranks are processes of Triton's interpreter")
def test_two_ranks_compute_what_one_does(tmp_path: Path) -> None:
    """With half of the heads each: the numbers of one process by torch, and the bits of decoding."""
    changes = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    model = checkpoint(hybrid_config("qwen3_next", **changes))
    model.save_pretrained(tmp_path / "model")
    with Ranks(2, tmp_path) as ranks:
        logits, found = ranks.run(_on_rank, str(tmp_path / "model"), transport="shared", timeout_s=600.0)[0]
    assert found == 0
    expected = logits_of(prepare(model, compile=False).runner(8))
    assert float((logits - expected).abs().max() / expected.abs().max()) < 2e-5


def changed(tmp_path: Path, right: str, wrong: str) -> ModuleType:
    """The kernels with a mistake."""
    source, path = Path(kernels().__file__ or "").read_text(encoding="utf-8"), tmp_path / "changed.py"
    assert right in source
    path.write_text(source.replace(right, wrong), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("changed", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MUTANTS = {
    "rows before the step's are not read": ("is_known, is_own = place < first", "is_known, is_own = place < 0 * first"),
    "sums of decays begin at the step's first token": ("tl.where(place == first - 1,", "tl.where(place == 16,"),
    "further places are not written": ("for further in range(num_also):", "for further in range(0 * num_also):"),
    "the last row is not folded": ("for t in range(16):", "for t in range(15):"),
    "no inputs before the chunk": ("(slot >= 0) | (in_tail == 0)", "in_tail == 0"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mistakes_are_noticed(name: str, tmp_path: Path) -> None:
    kernel = changed(tmp_path, *MUTANTS[name])
    assert any(difference(kernel, LinearSpec(1, 2, 20, 24, 4), FP32, seed) > 1e-3 for seed in range(6))


def _of_the_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A token's products are rounded by the number of tokens in its step."""
    right = "update = update * tl.sum(tl.where(is_t, strength, 0.0), 0)"
    of_triton(monkeypatch, changed(tmp_path, right, f"{right} * tl.where(count == 1, 1.0000002, 1.0)"))


def _branches_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Sequences do not wait for those whose rows they read."""
    of_triton(monkeypatch, kernels())
    monkeypatch.setattr(kernels(), "NUM_GROUPS", 1)
    monkeypatch.setattr(LinearStep, "groups", lambda self: [range(i, i + 1) for i in range(len(self.sequences))])
    encode = LinearStep.encode

    def backwards(self: LinearStep) -> Any:
        numbers = encode(self)
        groups = [numbers[1 + 3 * i : 4 + 3 * i] for i in range(numbers[0])]
        for i, group in enumerate(reversed(groups)):
            numbers[1 + 3 * i : 4 + 3 * i] = group
        return numbers

    monkeypatch.setattr(LinearStep, "encode", backwards)


def _no_rows_for_branches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rows that branches share are written to the first one alone."""
    of_triton(monkeypatch, changed(tmp_path, *MUTANTS["further places are not written"]))


def _slots_of_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The state is stored behind draft tokens, too."""
    of_triton(monkeypatch, kernels())
    store = LinearSlots.store_state
    monkeypatch.setattr(LinearSlots, "store_state", lambda self, key, must: (store(self, key, must=must) + 1) % 4)


@pytest.mark.parametrize(
    ("mutant", "context"),
    [(_of_the_step, 63), (_branches_at_once, 63), (_no_rows_for_branches, 60), (_slots_of_others, 63)],
)
def test_wrong_trees_are_noticed(mutant: Any, context: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second branch begins behind the end of a page, or within a chunk."""
    mutant(monkeypatch, tmp_path)
    assert differing_of(whole_model(FP32), (context,), 14, _NEIGHBOR) > 0
