"""Linear layers that two ranks share: the numbers of one rank, and verification with the bits of decoding."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.model import test_linear
from tests.model.parallel.ranks import Ranks, load
from tests.model.test_linear import chunk, differing
from tests.model.test_linear_native import random_step
from tests.support.compilers import needs_attention
from tests.support.hybrids import FAMILIES, hybrid, hybrid_config, hybrid_model, poison
from tests.support.models import prompt
from tests.support.rings import nightly, slow
from torch import Tensor

from paceline.errors import ConfigError
from paceline.model.linear.layers import linear_modules
from paceline.model.local_config import meta_model
from paceline.model.parallel.collectives import Collectives
from paceline.model.parallel.plan import plan_shards
from paceline.model.parallel.runner import Follower, LeadingRunner
from paceline.model.runner import ModelRunner
from paceline.model.selftest import check_invariance
from paceline.model.step_plan import StepPlan

FP32, BF16 = torch.float32, torch.bfloat16
_PAGES = 60


def logits_of(runner: ModelRunner) -> Tensor:
    """Logits of a prompt that is computed in parts, across chunks and pages."""
    tokens, pages = prompt(3, 100, runner.vocab_size), runner.cache.allocate(2)
    rows = [runner.forward([chunk(tokens, a, b, pages, b - a)]) for a, b in ((0, 37), (37, 38), (38, 100))]
    runner.cache.release(pages)
    return torch.cat(rows)


def unchanged(runner: ModelRunner) -> None:
    pass


def uncopied(runner: ModelRunner) -> None:
    """Rows of branches are not copied on this rank."""
    runner.cache.copy_rows = lambda pairs: None  # type: ignore[method-assign]


def _on_rank(
    group: Collectives, path: str, dtype: torch.dtype, change: Callable[[ModelRunner], None], compile: bool
) -> tuple[Tensor, bool, int] | None:
    runner = load(group, path, dtype, compile).runner(_PAGES, max_sessions=16)
    if group.rank > 0:
        change(runner)
        follower = Follower(runner)
        while follower.step():
            pass
        return None
    assert isinstance(runner, LeadingRunner)
    poison(runner)
    test_linear.runner_of = lambda *_: runner  # type: ignore[assignment]
    logits = logits_of(runner)
    holds = check_invariance(runner, max_len=100, max_step_tokens=64).holds
    found = differing("", dtype, (47, 65))
    runner.end()
    return logits, holds, found


def on_two_ranks(
    family: str,
    dtype: torch.dtype,
    folder: Path,
    change: Callable[[ModelRunner], None] = unchanged,
    *,
    compile: bool = False,
) -> tuple[Tensor, bool, int]:
    """Logits of a prompt, whether the self-test holds, and rows that differ from decoding."""
    hybrid_model(family).save_pretrained(folder / "model")
    given, options = (str(folder / "model"), dtype, change, compile), {"transport": "shared", "timeout_s": 600.0}
    with Ranks(2, folder) as ranks:
        result: tuple[Tensor, bool, int] = ranks.run(_on_rank, *given, **options)[0]
    return result


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *slow([("qwen3_next", FP32), ("lfm2", BF16), ("nemotron_h", FP32), ("kimi_linear", FP32), ("minimax", FP32)]),
        *slow([("jamba", FP32), ("falcon_h1", FP32), ("granitemoehybrid", BF16), ("bamba", FP32), ("zamba2", FP32)]),
        *nightly([(f, d) for f in FAMILIES for d in (FP32, BF16)]),
    ],
)
def test_two_ranks_compute_what_one_does(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    logits, holds, found = on_two_ranks(family, dtype, tmp_path)
    assert holds
    assert found == 0
    if dtype == FP32:
        expected = logits_of(hybrid(family).runner(_PAGES))
        assert float((logits - expected).abs().max() / expected.abs().max()) < 2e-5  # 1.1e-5 on a Zen 4


@needs_attention
@pytest.mark.usefixtures("compiled_steps")
@pytest.mark.parametrize("family", nightly(["qwen3_5_text"]))
def test_compiled_ranks_have_the_bits_of_decoding(family: str, tmp_path: Path) -> None:
    assert on_two_ranks(family, BF16, tmp_path, compile=True)[1:] == (True, 0)


@pytest.mark.parametrize("family", nightly(["qwen3_5_text"]))
def test_a_rank_that_copies_no_rows_is_noticed(family: str, tmp_path: Path) -> None:
    assert on_two_ranks(family, FP32, tmp_path, uncopied)[2] > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_each_rank_holds_half_of_the_heads(family: str) -> None:
    """Together they hold all of each parameter once, but norms, first halves of products and what is added to a sum. Of
    Bamba's one group of keys and queries each holds all."""
    config = hybrid_config(family)
    plans = [plan_shards(config, rank, 2) for rank in range(2)]
    layers = tuple(f"{name}." for name, _ in linear_modules(meta_model(config)))
    for name, shard in plans[0].parameters.items():
        if name.startswith(layers) and not name.endswith(("norm.weight", "_a_proj.weight", "out_proj.bias")):
            assert shard.dim is not None
            held = [i for plan in plans for part in plan.parameters[name].parts for i in range(*part)]
            assert sorted({*held}) == [*range(shard.shape[shard.dim])]
            if family != "bamba" or not name.endswith(("conv1d.weight", "conv1d.bias", "in_proj.weight")):
                assert len(held) == shard.shape[shard.dim]
            else:
                assert len(held) == shard.shape[shard.dim] + 2 * 24


def test_a_frame_holds_what_linear_layers_do() -> None:
    """The other ranks know no more than a step's frame."""
    step = chunk(prompt(1, 20), 0, 20, [0], 1)
    for seed in range(5):
        plan = StepPlan.of([step], scratch_row=640)._replace(linear=random_step(random.Random(seed), 3))
        twin = StepPlan.decode(plan.encode())
        assert twin.linear == plan.linear
        assert torch.equal(twin.buffer, plan.buffer)


@pytest.mark.parametrize(
    ("family", "changes", "heads"),
    [
        ("qwen3_next", {"linear_num_key_heads": 3, "linear_num_value_heads": 6}, "linear_num_key_heads 3"),
        ("nemotron_h", {"n_groups": 1}, "n_groups 1"),
    ],
)
def test_key_heads_bound_the_degree(family: str, changes: dict[str, int], heads: str) -> None:
    with pytest.raises(ConfigError, match=f"degree 2 and {heads}, which it does not divide: use 1"):
        plan_shards(hybrid_config(family, **changes), 0, 2)
