"""Our own tensor-parallel plans: the ranks add up to the whole, and likely mistakes of each table are noticed."""

import functools
import json
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.model.families import checkpoint, small_config
from tests.model.parallel.ranks import run_invariance
from tests.support.models import prompt
from tests.support.rings import slow
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from paceline.checkpoint.files import Checkpoint
from paceline.errors import ConfigError
from paceline.model.dequantized import DequantizedFiles
from paceline.model.loading import load_pretrained
from paceline.model.local_config import meta_model, shapes_of
from paceline.model.parallel import model as sharded
from paceline.model.parallel.collectives import Collectives
from paceline.model.parallel.plan import ParameterShard, ShardPlan, plan_shards
from paceline.model.quantized import require_whole

FAMILIES = ("gpt2", "gpt_oss", "hunyuan_v1_dense", "stablelm")
LIMIT = 1e-5
Change = Callable[[str, ParameterShard, int], ParameterShard]
"""From the name of a parameter, its shard and the rank to another shard."""


class Neighbors(Collectives):
    """The exchange of two ranks in threads of one process."""

    def __init__(self, rank: int, given: list[Tensor | None], barrier: threading.Barrier) -> None:
        super().__init__(rank, 2, device=torch.device("cpu"), timeout_s=60.0)
        self._given, self._barrier = given, barrier

    def all_gather(self, tensor: Tensor, *, timeout_s: float | None = None) -> Tensor:
        self._given[self.rank] = tensor
        self._barrier.wait(self.timeout_s)
        gathered = torch.stack([given for given in self._given if given is not None])
        self._barrier.wait(self.timeout_s)
        return gathered

    def close(self) -> None:
        self._barrier.abort()


def logits_of_two(path: str, quantization: Any = None) -> Tensor:
    """[tokens, vocab] of TEXT by two ranks, with transformers' own attention."""

    @torch.no_grad()
    def logits(model: PreTrainedModel) -> Tensor:
        found: Tensor = model(torch.tensor([TEXT]), use_cache=False).logits[0]
        return found

    return torch.cat(by_two(logits, path, quantization), dim=-1)


def by_two(run: Callable[[PreTrainedModel], Any], path: str, quantization: Any = None) -> list[Any]:
    """What ``run`` returns of the models of two ranks, in threads."""
    given: list[Tensor | None] = [None, None]
    barrier = threading.Barrier(2)

    def of_rank(rank: int) -> Any:
        group = Neighbors(rank, given, barrier)
        try:
            return run(sharded.load_shard(Checkpoint.open(path), torch.float32, group, quantization))
        except BaseException:
            group.close()
            raise

    with ThreadPoolExecutor(2) as threads:
        return [*threads.map(of_rank, range(2))]


TEXT = prompt(1, 70)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, Tensor]]:
    """A checkpoint of a family whose biases are not zero, and the logits of one process."""

    @functools.cache
    def made(family: str) -> tuple[str, Tensor]:
        model = checkpoint(small_config(family), seed=3)
        folder = str(tmp_path_factory.mktemp(family))
        model.save_pretrained(folder)
        with torch.no_grad():
            return folder, model(torch.tensor([TEXT]), use_cache=False).logits[0]

    return made


def difference(path: str, want: Tensor) -> float:
    """The largest of any logit, relative to the largest one."""
    got = logits_of_two(path)[:, : want.shape[1]]
    return float((got - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_add_up_to_the_whole(family: str, paths: Callable[[str], tuple[str, Tensor]]) -> None:
    assert difference(*paths(family)) <= LIMIT


def added_twice(name: str, shard: ParameterShard, rank: int) -> ParameterShard:
    """Biases of outputs that are summed, on both ranks."""
    return replace(shard, elsewhere=False)


def halves(name: str, shard: ParameterShard, rank: int) -> ParameterShard:
    """Half of the gates and half of the ups, as if all gates came first."""
    if "gate_up_proj" not in name or shard.dim is None:
        return shard
    size = shard.shape[shard.dim] // 4
    return replace(shard, parts=tuple((first, first + size) for first in (rank * size, (2 + rank) * size)))


def sinks_of_the_first(name: str, shard: ParameterShard, rank: int) -> ParameterShard:
    """The sinks of the first rank's heads, on both."""
    return replace(shard, parts=((0, shard.local_shape[0]),)) if name.endswith("sinks") else shard


def one_range(name: str, shard: ParameterShard, rank: int) -> ParameterShard:
    """Of a fused projection the half as it lies there."""
    if "c_attn" not in name or shard.dim is None:
        return shard
    size = shard.shape[shard.dim] // 2
    return replace(shard, parts=((rank * size, (rank + 1) * size),))


def other_rows(name: str, shard: ParameterShard, rank: int) -> ParameterShard:
    """The other rank's inputs of the second feed-forward layer."""
    if "down_proj" not in name or shard.dim is None:
        return shard
    size = shard.local_shape[shard.dim]
    return replace(shard, parts=(((1 - rank) * size, (2 - rank) * size),))


def heads_in_turn(name: str, shard: ParameterShard, rank: int) -> ParameterShard:
    """Queries of every second head, as if heads took turns."""
    if "q_proj" not in name or shard.dim is None:
        return shard
    return replace(shard, parts=tuple((at + 16 * rank, at + 16 * rank + 16) for at in range(0, shard.shape[0], 32)))


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("gpt2", added_twice),
        ("gpt2", one_range),
        ("gpt_oss", added_twice),
        ("gpt_oss", halves),
        ("gpt_oss", sinks_of_the_first),
        ("hunyuan_v1_dense", other_rows),
        ("stablelm", heads_in_turn),
    ],
)
def test_a_mutant_of_a_table_is_noticed(family, change, paths, monkeypatch) -> None:
    def mutated(config: PretrainedConfig, rank: int, degree: int) -> ShardPlan:
        plan = plan_shards(config, rank, degree)
        changed = {name: change(name, shard, rank) for name, shard in plan.parameters.items()}
        assert changed != plan.parameters or rank == 0
        return replace(plan, parameters=changed)

    path, want = paths(family)
    monkeypatch.setattr(sharded, "plan_shards", mutated)
    assert difference(path, want) > 100 * LIMIT


def test_what_the_table_of_gpt_oss_says() -> None:
    """Hand-computed, of 4 heads of 32, 2 KV heads, experts of 96, on the second of two ranks."""
    plan = plan_shards(small_config("gpt_oss"), 1, 2)
    parts = {name.removeprefix("model.layers.1."): shard for name, shard in plan.parameters.items()}
    assert parts["self_attn.q_proj.bias"].parts == ((64, 128),)
    assert parts["self_attn.k_proj.weight"].parts == ((32, 64),)
    assert parts["self_attn.sinks"].parts == ((2, 4),)
    assert (parts["self_attn.o_proj.weight"].dim, parts["self_attn.o_proj.weight"].parts) == (1, ((64, 128),))
    assert parts["self_attn.o_proj.bias"].elsewhere
    experts = "mlp.experts"
    assert (parts[f"{experts}.gate_up_proj"].dim, parts[f"{experts}.gate_up_proj"].parts) == (2, ((96, 192),))
    assert parts[f"{experts}.gate_up_proj_bias"].parts == ((96, 192),)
    assert (parts[f"{experts}.down_proj"].dim, parts[f"{experts}.down_proj"].parts) == (1, ((48, 96),))
    assert parts[f"{experts}.down_proj_bias"].elsewhere
    assert parts["mlp.router.weight"].dim is None
    assert not parts["mlp.router.bias"].elsewhere
    assert set(plan.summed) == {f"model.layers.{i}.{name}" for i in range(2) for name in ("self_attn.o_proj", experts)}


def test_what_the_table_of_gpt2_says() -> None:
    """Its linear layers have [inputs, outputs], and three projections in one."""
    plan = plan_shards(small_config("gpt2"), 1, 2)
    parts = {name.removeprefix("transformer.h.1."): shard for name, shard in plan.parameters.items()}
    ranges = ((32, 64), (96, 128), (160, 192))
    assert (parts["attn.c_attn.weight"].dim, parts["attn.c_attn.weight"].parts) == (1, ranges)
    assert parts["attn.c_attn.bias"].parts == ranges
    assert (parts["attn.c_proj.weight"].dim, parts["attn.c_proj.weight"].parts) == (0, ((32, 64),))
    assert parts["mlp.c_fc.weight"].local_shape == (64, 128)
    assert parts["mlp.c_proj.weight"].local_shape == (128, 64)
    assert parts["attn.c_proj.bias"].elsewhere
    assert parts["mlp.c_proj.bias"].elsewhere
    assert plan.sizes["transformer.h.1.attn.split_size"] == 32
    assert plan.sizes["transformer.h.0.attn.c_attn.nf"] == 96


def test_what_the_table_of_zamba2_says() -> None:
    """Of the adapters of shared layers the second halves are split, as what they are added to; of the first linear
    layer a group of two heads."""
    plan = plan_shards(small_config("zamba2"), 1, 2)
    shared = "model.layers.1.shared_transformer."
    parts = {name.removeprefix(shared): shard for name, shard in plan.parameters.items()}
    for name in ("q_proj", "linear_q_adapter_list.0.1", "linear_v_adapter_list.1.1"):
        assert parts[f"self_attn.{name}.weight"].parts == ((64, 128),)
    for name in ("gate_up_proj", "gate_up_proj_adapter_list.1.1"):
        assert parts[f"feed_forward.{name}.weight"].parts == ((48, 96), (144, 192))
    assert parts["self_attn.linear_q_adapter_list.0.0.weight"].dim is None
    assert parts["self_attn.o_proj.weight"].dim == parts["feed_forward.down_proj.weight"].dim == 1
    assert plan.parameters["model.layers.0.mamba.norm.weight"].parts == ((64, 128),)
    assert f"{shared}self_attn.o_proj" in plan.summed
    assert not any(".2.shared_transformer" in name for name in plan.parameters), "layers share these weights"


def test_norms_of_each_head_stay_on_one_rank() -> None:
    with pytest.raises(ConfigError, match=r"a norm of its own for each head \(qk_layernorm is true\): use degree 1"):
        plan_shards(small_config("stablelm", qk_layernorm=True), 0, 2)


@pytest.mark.parametrize(
    ("family", "degree", "said"),
    [
        ("gpt2", 3, "degree 3 and n_inner 256, which it does not divide: use 1, 2, 4"),
        ("gpt2", 8, "degree 8 and num_attention_heads with 4 heads, which it does not divide: use 1, 2, 4$"),
        ("gpt_oss", 3, "degree 3 and num_attention_heads 4, which it does not divide: use 1, 2, 4$"),
        ("hunyuan_v1_dense", 5, "degree 5 and intermediate_size 96, which it does not divide: use 1, 2, 4$"),
    ],
)
def test_degrees_that_do_not_divide_are_named(family: str, degree: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_shards(small_config(family), 0, degree)


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("family", "dtype"),
    slow([("gpt2", torch.float32), ("gpt_oss", torch.bfloat16), ("hunyuan_v1_dense", torch.bfloat16)]),
)
def test_verified_rows_have_the_bits_of_decoded_ones(family, dtype, two, paths) -> None:
    said = two.run(run_invariance, paths(family)[0], dtype, False, transport="shared")
    assert said[0].startswith("batch-invariant: ")


def packed(folder: Path) -> Tensor:
    """Writes a gpt-oss checkpoint whose experts are in MXFP4. Returns the logits of one process on what they mean."""
    model, generator = checkpoint(small_config("gpt_oss"), seed=3), torch.Generator().manual_seed(5)
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    numbers = torch.cat([numbers, -numbers])
    state = model.state_dict()
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = state.pop(name).shape
        size = experts, outputs, inputs // 32
        blocks = torch.randint(0, 256, (*size, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 125, size, generator=generator, dtype=torch.uint8)
        state |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values = torch.stack([numbers[(blocks & 15).long()], numbers[(blocks >> 4).long()]], -1).flatten(3)
        values = values * torch.exp2(scales.float() - 127)[..., None]
        model.get_parameter(name).data = values.flatten(2).transpose(1, 2).contiguous()
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = model.config.to_dict() | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    with torch.no_grad():
        return model(torch.tensor([TEXT]), use_cache=False).logits[0]


def test_ranks_dequantize_the_experts_of_gpt_oss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a rank's part begins within a group of 32, as the half of 96 does; a rank that cuts at the group's
    beginning is noticed."""
    want = packed(tmp_path)
    opened = Checkpoint.open(str(tmp_path))
    require_whole(opened, 2)
    whole = sum(math.prod(shape) for shape in shapes_of(meta_model(small_config("gpt_oss"))).values())
    assert (size := opened.size()) is not None
    assert (size.num_parameters, size.saved_bytes) == (whole, 0)
    assert difference(str(tmp_path), want) <= LIMIT
    with torch.no_grad():
        alone = load_pretrained(opened, torch.float32)(torch.tensor([TEXT]), use_cache=False).logits[0]
    assert float((alone - want).abs().max()) <= LIMIT
    copy = DequantizedFiles.copy

    def cut_at_groups(self: DequantizedFiles, name: str, box: tuple[slice, ...], target: Tensor) -> None:
        if name.endswith("down_proj"):
            size, first = box[1].stop - box[1].start, box[1].start // 32 * 32
            box = (box[0], slice(first, first + size), *box[2:])
        copy(self, name, box, target)

    monkeypatch.setattr(DequantizedFiles, "copy", cut_at_groups)
    assert difference(str(tmp_path), want) > 100 * LIMIT
