"""A rank's share of a model: what it holds, that the ranks together are the whole, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.model.parallel.ranks import (
    STATES,
    TRANSPORTS,
    Ranks,
    die_in_a_step,
    forward_all,
    run_compiled,
    run_invariance,
    run_sampled,
    run_shard,
    run_states,
    two_texts,
)
from tests.support.models import FAMILIES, prompt, random_model
from tests.support.rings import nightly, slow
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from paceline.checkpoint.files import Checkpoint
from paceline.errors import ConfigError
from paceline.model.loading import load_pretrained, prepare
from paceline.model.parallel.load import CheckpointFiles, read_shard
from paceline.model.parallel.plan import ShardPlan, plan_shards

TEXTS = [prompt(1, 70), prompt(2, 9)]
NUM_GREEDY = 24

SMALL: dict[str, Any] = {
    "vocab_size": 301, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 96, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48,
    "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_topk": 2, "top_k_experts": 2, "moe_k": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "n_shared_experts": 1, "num_shared_experts": 1, "moe_num_shared_experts": 1, "moe_layer_start_index": 1,
    "max_position_embeddings": 2048, "original_max_position_embeddings": 2048, "tie_word_embeddings": False,
    "initializer_range": 0.15, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "layer_types": None,
    "mlp_layer_types": None, "sliding_window": 24, "attention_bias": True, "mlp_bias": True, "use_bias": True,
}  # fmt: skip
"""Of any configuration class, what it knows of these."""
SMALL_LLAMA = {key: value for key, value in SMALL.items() if key in LlamaConfig().to_dict()}


def small(model_type: str, **changes: Any) -> PretrainedConfig:
    """Of any family; what its class leaves open stays open."""
    cls = CONFIG_MAPPING[model_type]
    known = cls().to_dict()
    unset = {key for key, value in known.items() if value is None} - {"layer_types", "mlp_layer_types"}
    return cls(**{key: value for key, value in SMALL.items() if key in known and key not in unset} | changes)


def saved(config: PretrainedConfig, folder: Path) -> tuple[PreTrainedModel, str]:
    """A checkpoint in which no bias is zero and no norm is one."""
    model = random_model(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.save_pretrained(folder)
    return model, str(folder)


def whole(path: str, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[int]]:
    """What one process computes."""
    return forward_all(
        prepare(load_pretrained(Checkpoint.open(path), dtype), compile=False).runner(16), TEXTS, NUM_GREEDY
    )


def check_equal(ranks: Ranks, config: PretrainedConfig, folder: Path, dtype: torch.dtype, limit: float) -> None:
    """The ranks' logits are within ``limit`` of the whole model's largest logit from its own."""
    model, path = saved(config, folder)
    want, tokens = whole(path, dtype)
    results = ranks.run(run_shard, path, dtype, TEXTS, NUM_GREEDY)
    (logits, greedy), _ = results[0]
    scale = max(float(rows.abs().max()) for rows in want)
    for rows, expected in zip(logits, want, strict=True):
        assert rows.shape == expected.shape
        assert rows.dtype is dtype
        assert float((rows - expected).abs().max()) <= limit * scale
    if dtype is torch.float32:
        assert greedy == tokens
    total = sum(parameter.numel() for parameter in model.parameters())
    assert all(num_parameters < total for _, num_parameters in results)


@pytest.mark.slow
def test_odd_vocabularies_tied_embeddings_and_biases(two: Ranks, tmp_path: Path) -> None:
    """301 tokens; one table for both ends; a bias in every layer, added once by those that are summed."""
    config = LlamaConfig(**{**SMALL_LLAMA, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True})
    check_equal(two, config, tmp_path, torch.float32, 1e-5)


@pytest.mark.parametrize("kv_heads", [*slow([1]), *nightly([2])])
def test_kv_heads_that_are_fewer_than_the_ranks_are_repeated(kv_heads: int, tmp_path: Path) -> None:
    """On three ranks one KV head, on four two: neighbours hold the same one."""
    degree = {1: 3, 2: 4}[kv_heads]
    config = LlamaConfig(
        **{**SMALL_LLAMA, "hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": kv_heads}
    )
    with Ranks(degree, tmp_path) as ranks:
        check_equal(ranks, config, tmp_path / "model", torch.float32, 1e-5)


def test_a_checkpoint_of_several_files(two: Ranks, tmp_path: Path) -> None:
    """With an index; a slice is read from whichever file has it."""
    model, _ = saved(FAMILIES["qwen3_moe"](), tmp_path / "whole")
    model.save_pretrained(tmp_path / "parts", max_shard_size="40KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 3
    results = [
        two.run(run_shard, str(tmp_path / kind), torch.float32, TEXTS, 1)[0][0][0] for kind in ("whole", "parts")
    ]
    for rows, same in zip(*results, strict=True):
        assert torch.equal(rows, same)


@pytest.mark.compiler
@pytest.mark.nightly
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.usefixtures("compiled_steps")
def test_compiled_ranks_equal_eager_ones(family: str, two: Ranks, tmp_path: Path) -> None:
    """The exchange survives the export, and is called without the interpreter's lock; all ranks get the same bits."""
    _, path = saved(FAMILIES[family](), tmp_path)
    run = (run_compiled, path, torch.float32, TEXTS, NUM_GREEDY)
    results = two.run(*run, transport="shared", timeout_s=300.0)
    assert [kind for kind, *_ in results] == ["CompiledPackage"] * 2
    _, (eager, tokens), (compiled, same) = results[0]
    for rows, expected in zip(compiled, eager, strict=True):
        assert float((rows - expected).abs().max()) < 1e-5 * float(expected.abs().max())
    assert same == tokens


@pytest.mark.compiler
@pytest.mark.nightly
def test_a_compiled_rank_is_compiled_once(two: Ranks, tmp_path: Path, own_cache: Path) -> None:
    """One package for each rank, found again by weights, configuration, degree and rank."""
    _, path = saved(FAMILIES["llama"](), tmp_path / "model")
    for _ in range(2):
        two.run(run_compiled, path, torch.float32, TEXTS, 2, transport="shared")
        assert len(list((own_cache / "compiled").glob("*.pt2"))) == 2


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.parametrize("compile", [False, *nightly([True])], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("compiled_steps")
def test_verified_rows_have_the_bits_of_decoded_ones(
    dtype: torch.dtype, compile: bool, two: Ranks, tmp_path: Path
) -> None:
    """What losslessness rests on: alone or beside others, 1 to 17 tokens a step.

    Feed-forward layers of 96 on each rank: in float32 those of 48 are not invariant here, in one process neither.
    """
    _, path = saved(LlamaConfig(**{**SMALL_LLAMA, "intermediate_size": 192}), tmp_path / "model")
    said = two.run(run_invariance, path, dtype, compile, transport="shared")
    assert said[0].startswith("batch-invariant: ")


@pytest.fixture
def ranks(degree: int, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ranks]:
    """As many as the test's degree; two are those of the module."""
    if degree == 2:
        yield request.getfixturevalue("two")
        return
    with Ranks(degree, tmp_path) as started:
        yield started


@pytest.mark.compiler
@pytest.mark.parametrize("degree", [*slow([2]), *nightly([4])])
def test_tokens_are_sampled_where_their_logits_are(ranks: Ranks, tmp_path: Path) -> None:
    """Greedy and at three temperatures, 300 tokens over the ranks: as from whole rows; the same for each degree."""
    config = LlamaConfig(**{**SMALL_LLAMA, "num_key_value_heads": 4, "pad_token_id": 0})
    _, path = saved(config, tmp_path / "model")
    rows = [(0, 0.0), (1, 1.0), (2, 0.6), (3, 1.7), (4, 0.0), (5, 1.0)]
    texts, logprobs, expected = ranks.run(run_sampled, path, rows, 40, transport="shared")[0]
    alone = ranks.run(run_sampled, path, rows[1:2], 40, transport="shared")[0]
    assert texts == expected
    assert alone[0] == texts[1:2]
    assert alone[1] == logprobs[1:2]
    assert len({tuple(text) for text in texts}) == 5


@pytest.mark.compiler
@pytest.mark.parametrize("degree", [*slow([2]), *nightly([4])])
def test_greedy_tokens_do_not_depend_on_the_degree(ranks: Ranks, tmp_path: Path) -> None:
    config = LlamaConfig(**{**SMALL_LLAMA, "num_key_value_heads": 4})
    _, path = saved(config, tmp_path / "model")
    _, tokens = whole(path, torch.float32)
    for transport in TRANSPORTS:
        (_, greedy), _ = ranks.run(run_shard, path, torch.float32, TEXTS, NUM_GREEDY, transport=transport)[0]
        assert greedy == tokens


@pytest.mark.compiler
@pytest.mark.parametrize(
    "compile",
    [
        pytest.param(False, id="eager", marks=pytest.mark.slow),
        pytest.param(True, id="compiled", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.usefixtures("compiled_steps")
def test_a_rank_that_dies_while_the_engine_runs_is_told_of(compile: bool, tmp_path: Path) -> None:
    """With the same reason whether the step is compiled or not."""
    _, path = saved(FAMILIES["llama"](), tmp_path / "model")
    with Ranks(2, tmp_path) as ranks:
        ranks.start(die_in_a_step, path, compile, timeout_s=120.0, transport="shared")
        assert ranks.result(0) == "RanksLostError: rank 0 of 2: rank 1 has died"


@pytest.mark.compiler
@pytest.mark.parametrize("compile", [False, *nightly([True])], ids=["eager", "compiled"])
@pytest.mark.usefixtures("compiled_steps")
def test_states_of_the_leading_rank_are_those_of_one_process(compile: bool, two: Ranks, tmp_path: Path) -> None:
    """All boundaries, from steps that return logits and from those that draw tokens; compared by the self-test too."""
    _, path = saved(LlamaConfig(**{**SMALL_LLAMA, "intermediate_size": 192, "pad_token_id": 0}), tmp_path / "model")
    model = prepare(load_pretrained(Checkpoint.open(path), torch.float32), compile=False, features=STATES)
    runner = model.runner(16)
    want_logits, want = runner.forward_with_states(two_texts(runner))
    results = two.run(run_states, path, compile, transport="shared", timeout_s=300.0)
    logits, states, again, token_ids, said = results[0]
    assert results[1] is None
    assert states.shape == want.shape == (7, 4 * 64)
    torch.testing.assert_close(states, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits, want_logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(again, states)
    assert token_ids == want_logits.argmax(-1).tolist()
    assert said.startswith("batch-invariant: " if compile else "")
    assert "hidden states" not in said


def test_compiled_ranks_need_shared_memory(two: Ranks, tmp_path: Path) -> None:
    _, path = saved(FAMILIES["llama"](), tmp_path)
    with pytest.raises(ConfigError, match="over shared memory, which these ranks do not: set compile to false"):
        two.run(run_compiled, path, torch.float32, TEXTS, 1)


def plans(config: PretrainedConfig, degree: int) -> list[ShardPlan]:
    return [plan_shards(config, rank, degree) for rank in range(degree)]


@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_parts_of_all_ranks_are_the_whole(family: str) -> None:
    """Every row of every split parameter belongs to exactly one rank."""
    config = FAMILIES[family]()
    ranks = plans(config, 2)
    whole = random_model(config).state_dict()
    assert {*ranks[0].parameters, *ranks[0].aliases} == whole.keys()
    for name, shard in ranks[0].parameters.items():
        assert shard.shape == tuple(whole[name].shape)
        if shard.dim is None:
            assert shard.parts == ()
            continue
        rows = sorted(row for plan in ranks for part in plan.parameters[name].parts for row in range(*part))
        assert rows == list(range(shard.shape[shard.dim]))


def test_what_a_plan_says_of_a_fused_projection() -> None:
    """Hand-computed: queries 0 to 63, keys 64 to 127, values 128 to 191; gates and ups of 96."""
    plan = plan_shards(FAMILIES["phi3"](), 1, 2)
    layer = "model.layers.0"
    assert plan.parameters[f"{layer}.self_attn.qkv_proj.weight"].parts == ((32, 64), (96, 128), (160, 192))
    assert plan.parameters[f"{layer}.self_attn.o_proj.weight"].dim == 1
    assert plan.parameters[f"{layer}.mlp.gate_up_proj.weight"].parts == ((48, 96), (144, 192))
    assert plan.parameters[f"{layer}.mlp.gate_up_proj.weight"].local_shape == (96, 64)
    assert plan.parameters[f"{layer}.input_layernorm.weight"].dim is None
    assert plan.summed == tuple(
        f"model.layers.{i}.{n}" for i in range(2) for n in ("self_attn.o_proj", "mlp.down_proj")
    )
    assert (plan.vocab, plan.vocab_width) == ((150, 300), 150)
    assert plan.config.num_attention_heads == 2
    assert FAMILIES["phi3"]().num_attention_heads == 4


def test_what_a_plan_says_of_experts_and_biases() -> None:
    """Each expert is split; what is added after a sum belongs to rank 0."""
    plan = plan_shards(FAMILIES["qwen3_moe"](), 0, 2)
    experts = plan.parameters["model.layers.1.mlp.experts.gate_up_proj"]
    assert (experts.dim, experts.parts, experts.local_shape) == (1, ((0, 24), (48, 72)), (4, 48, 64))
    assert plan.parameters["model.layers.1.mlp.gate.weight"].dim is None
    assert "model.layers.1.mlp.experts" in plan.summed
    biased = LlamaConfig(**{**SMALL_LLAMA, "attention_bias": True})
    first, second = plans(biased, 2)
    name = "model.layers.0.self_attn.o_proj.bias"
    assert (first.parameters[name].elsewhere, second.parameters[name].elsewhere) == (False, True)
    assert second.parameters["model.layers.0.self_attn.q_proj.bias"].parts == ((32, 64),)


def test_repeated_kv_heads() -> None:
    """Eight ranks, two heads: the first four have the first."""
    config = LlamaConfig(**{**SMALL_LLAMA, "num_attention_heads": 8, "num_key_value_heads": 2})
    parts = [plan.parameters["model.layers.0.self_attn.k_proj.weight"].parts for plan in plans(config, 8)]
    assert parts == [((0, 16),)] * 4 + [((16, 32),)] * 4


def test_a_norm_over_a_whole_projection_is_gathered() -> None:
    """Each rank keeps its weights, and normalizes what all ranks have."""
    plan = plan_shards(small("olmo2"), 0, 2)
    assert plan.gathered[:2] == ("model.layers.0.self_attn.q_norm", "model.layers.0.self_attn.k_norm")
    assert plan.parameters["model.layers.0.self_attn.q_norm.weight"].local_shape == (64,)
    with pytest.raises(
        ConfigError, match=r"normalizes over whole projections .* 2 KV heads cannot be repeated on 4 ranks: use 1, 2$"
    ):
        plan_shards(small("olmo2"), 0, 4)


@pytest.mark.parametrize(
    ("changes", "degree", "said"),
    [
        (
            {"num_attention_heads": 6, "num_key_value_heads": 6},
            4,
            ": degree 4 and num_attention_heads 6, which it does not divide: use 1, 2, 3, 6",
        ),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 3},
            2,
            ": degree 2 and num_key_value_heads 3, neither divides the other: use 1, 3, 6, 12",
        ),
        ({"intermediate_size": 97}, 2, ": degree 2 and intermediate_size 97, which it does not divide: use 1"),
        (
            {"vocab_size": 5, "num_attention_heads": 8, "num_key_value_heads": 8},
            4,
            " has 5 tokens: 4 ranks would not have one each",
        ),
    ],
)
def test_degrees_that_do_not_divide(changes: dict[str, Any], degree: int, said: str) -> None:
    """The value, and the degrees that would work."""
    with pytest.raises(ConfigError) as caught:
        plan_shards(LlamaConfig(**{**SMALL_LLAMA, "hidden_size": 96, **changes}), 0, degree)
    assert str(caught.value) == f"LlamaForCausalLM (llama){said}"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (lambda: small("gptj"), r"GPTJForCausalLM \(gptj\) has no tensor-parallel plan, in transformers or here"),
        (lambda: small("doge"), r"its plan splits .* but not .*: use degree 1"),
    ],
    ids=["gptj", "doge"],
)
def test_plans_that_are_refused(config: Any, said: str) -> None:
    """In one sentence with the reason."""
    with pytest.raises(ConfigError, match=said):
        plan_shards(config(), 0, 2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers.*.input_layernorm": "sequence_parallel"}, "planned with sequence_parallel, which is not supported"),
        (
            {"layers.*.input_layernorm": "colwise"},
            "is to be split, but no known setting governs its size: use degree 1",
        ),
        (
            {"layers.*.self_attn.q_proj": "colwise_gather_output"},
            r"needs the whole output of model\.layers\.0\.self_attn",
        ),
    ],
    ids=["style", "size", "whole output"],
)
def test_plans_of_other_versions(changes: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plan may come to say, and is not understood."""
    monkeypatch.setattr(LlamaConfig, "base_model_tp_plan", {**(LlamaConfig.base_model_tp_plan or {}), **changes})
    with pytest.raises(ConfigError, match=said):
        plan_shards(FAMILIES["llama"](), 0, 2)


def test_shared_experts_that_the_plan_leaves_out_are_split_as_the_others() -> None:
    """afmoe plans its experts only; the size of the shared ones is the same setting."""
    plan = plan_shards(small("afmoe", num_dense_layers=1), 1, 2)
    shared = "model.layers.1.mlp.shared_experts"
    assert plan.parameters[f"{shared}.gate_proj.weight"].parts == ((24, 48),)
    assert plan.parameters[f"{shared}.down_proj.weight"].dim == 1
    assert f"{shared}.down_proj" in plan.summed


def test_an_attention_as_wide_as_the_model_is_split_by_heads() -> None:
    """gpt_neox packs each head's query, key and value side by side; helium's output layer does not follow the heads."""
    layer = "gpt_neox.layers.0.attention"
    plan = plan_shards(small("gpt_neox"), 1, 2)
    assert plan.parameters[f"{layer}.query_key_value.weight"].parts == ((96, 192),)
    assert plan.parameters[f"{layer}.query_key_value.bias"].parts == ((96, 192),)
    assert (plan.parameters[f"{layer}.dense.weight"].dim, plan.parameters[f"{layer}.dense.weight"].parts) == (
        1,
        ((32, 64),),
    )
    with pytest.raises(ConfigError, match=r"degree 3 and num_attention_heads with 4 heads, .*: use 1, 2, 4$"):
        plan_shards(small("gpt_neox"), 0, 3)
    plan = plan_shards(small("helium"), 0, 2)
    assert plan.parameters["model.layers.0.self_attn.o_proj.weight"].parts == ((0, 32),)


def test_feed_forward_layers_that_no_setting_governs_stay_whole() -> None:
    """gemma3n has one width for each layer, and takes statistics over all of it."""
    plan = plan_shards(small("gemma3n_text", num_kv_shared_layers=0), 0, 2)
    assert plan.parameters["model.layers.0.mlp.gate_proj.weight"].dim is None
    assert plan.parameters["model.layers.0.self_attn.q_proj.weight"].dim == 0
    assert {name.rpartition(".")[2] for name in plan.summed} == {"o_proj"}


def test_norms_whose_size_is_that_of_the_model() -> None:
    """olmoe normalizes whole queries and keys, by weights that do not follow the heads."""
    plan = plan_shards(small("olmoe", num_key_value_heads=4), 0, 2)
    assert plan.gathered[:2] == ("model.layers.0.self_attn.q_norm", "model.layers.0.self_attn.k_norm")
    assert plan.parameters["model.layers.0.self_attn.q_norm.weight"].local_shape == (64,)


def test_ranks_outside_the_degree() -> None:
    with pytest.raises(ConfigError, match="rank 2 of degree 2: ranks are 0 to degree - 1"):
        plan_shards(FAMILIES["llama"](), 2, 2)


def read(path: str, config: PretrainedConfig, **options: Any) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return read_shard(CheckpointFiles(path), model, plan_shards(config, 1, 2), torch.float32, **options)


def test_slices_are_converted_and_progress_is_told(tmp_path: Path) -> None:
    """bfloat16 on disk, float32 in memory; the last call says that everything is there."""
    model, path = saved(FAMILIES["llama"](), tmp_path)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    told: list[tuple[int, int]] = []
    tensors = read(path, model.config, progress=lambda done, total: told.append((done, total)))
    assert all(tensor.dtype is torch.float32 for tensor in tensors.values())
    whole = model.state_dict()
    down = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(tensors[down], whole[down][:, 48:].float())
    assert torch.equal(tensors["lm_head.weight"], whole["lm_head.weight"][150:].float())
    assert len(told) == len(tensors)
    assert told[-1] == (sum(t.nbytes for t in tensors.values()),) * 2
    assert told == sorted(told)


def test_checkpoints_that_are_not_whole(tmp_path: Path) -> None:
    """No files, missing tensors, other shapes: named as in the files."""
    config = FAMILIES["llama"]()
    with pytest.raises(ConfigError, match=r"holds no model\.safetensors: weights are split, or dequantized, from"):
        CheckpointFiles(str(tmp_path))
    _, path = saved(config, tmp_path)
    config.num_hidden_layers = 3
    with pytest.raises(
        ConfigError, match=r"no weight file holds model\.layers\.2\.self_attn\.q_proj\.weight.* and 6 more"
    ):
        read(path, config)
    config = FAMILIES["llama"]()
    config.intermediate_size = 48
    with pytest.raises(ConfigError, match=r"gate_proj\.weight of shape \(96, 64\) does not fit"):
        read(path, config)
    config.intermediate_size = 192
    with pytest.raises(ConfigError, match=r"the tensors for .*gate_proj\.weight fill .* of its 6144 values"):
        read(path, config)


def test_a_file_that_the_index_names_and_is_not_there(tmp_path: Path) -> None:
    model, _ = saved(FAMILIES["llama"](), tmp_path / "whole")
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    (tmp_path / index["weight_map"]["lm_head.weight"]).unlink()
    with pytest.raises(ConfigError, match="is not whole"):
        read(str(tmp_path), model.config)


_PEAK = """
import resource, sys, torch
from paceline.checkpoint.files import Checkpoint
from paceline.model.parallel.collectives import Collectives
from paceline.model.parallel.model import load_shard

class Alone(Collectives):
    def all_gather(self, tensor, *, timeout_s=None):
        return torch.stack([tensor] * self.degree)
    def close(self):
        pass

def peak():
    lines = dict(line.split(":") for line in open("/proc/self/status") if ":" in line)
    return int(lines["VmHWM"].split()[0]) * 1024

group = Alone(1, 2, device=torch.device("cpu"), timeout_s=1.0)
load_shard(Checkpoint.open(sys.argv[1]), torch.bfloat16, group)  # imports what is imported late
open("/proc/self/clear_refs", "w").write("5")
before = peak()
model = load_shard(Checkpoint.open(sys.argv[2]), torch.bfloat16, group)
print(peak() - before, sum(p.nbytes for p in model.parameters()))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the high-water mark is reset through /proc")
def test_a_rank_never_holds_more_than_its_share(tmp_path: Path) -> None:
    """Of 340 MB at degree 2 at most 60 % are resident at any time while loading, mapped pages of the files included."""
    _, small_path = saved(FAMILIES["llama"](), tmp_path / "small")
    config = LlamaConfig(**{**SMALL_LLAMA, "vocab_size": 16000, "hidden_size": 1024, "num_attention_heads": 16,
                            "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2816,
                            "num_hidden_layers": 12})  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(tmp_path / "large")
    on_disk = (tmp_path / "large" / "model.safetensors").stat().st_size
    assert on_disk > 300e6
    output = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PEAK, small_path, str(tmp_path / "large")],
        check=True, capture_output=True, text=True, timeout=200,
    ).stdout  # fmt: skip
    peak, held = (int(number) for number in output.split())
    assert 0.49 * on_disk < held < 0.51 * on_disk
    assert peak <= 0.6 * on_disk
