"""Published quantized checkpoints: what is read is what the format means, whole and in slices, on one rank and two.

Mutants: a rank that takes the scales from the beginning of the tensor, or those of another rank; AWQ's outputs in
order; zero points of GPTQ as they are stored; the offset of packed integers left out.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.model.families import small_config
from tests.model.parallel.ranks import Ranks, follow, load
from tests.model.parallel.test_tables import LIMIT, TEXT, logits_of_two
from tests.support.models import prompt, random_model
from tests.support.packed import CONFIG, FORMATS, write_packed
from tests.support.pump import Pump, Request, in_mode
from tests.support.rings import slow
from torch import Tensor
from transformers import Llama4Config

from paceline.checkpoint import packing as packing_module
from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.linear import linear_layers
from paceline.checkpoint.packing import packing_of
from paceline.config import ModelOptions
from paceline.drafters.heads.load import target_table
from paceline.errors import ConfigError
from paceline.model import dequantized
from paceline.model.dequantized import DequantizedFiles, dequantized_files
from paceline.model.loading import load_model, load_pretrained
from paceline.model.parallel.collectives import Collectives
from paceline.model.parallel.runner import LeadingRunner
from paceline.model.quantized import require_whole
from paceline.types import Mode, SamplingParams


def opened(folder: Path) -> DequantizedFiles:
    checkpoint = Checkpoint.open(str(folder))
    packing = packing_of(checkpoint.quantization)
    assert packing is not None
    return dequantized_files(checkpoint, packing)


def close(found: Tensor, means: Tensor) -> bool:
    """Equal up to one rounding from float32 to float32: products of two numbers of few bits are often exact."""
    return torch.allclose(found.double(), means, rtol=3e-7, atol=0)


def differing(folder: Path, means: dict[str, Tensor]) -> list[str]:
    """Names of weights that differ from what they mean, as a whole, in halves or in boxes."""
    files, wrong = opened(folder), []
    assert sorted(files) == sorted(means)
    for name, mean in means.items():
        if not close(files.read(name, torch.float32), mean):
            wrong.append(f"{name} whole")
        for dim in range(mean.dim()):
            half = mean.shape[dim] // 2
            for first, stop in ((0, half), (half, mean.shape[dim]), (half - 3, half + 2)):
                box = [slice(0, size) for size in mean.shape]
                box[dim] = slice(first, stop)
                target = torch.empty(mean[tuple(box)].shape, dtype=torch.float32)
                files.copy(name, tuple(box), target)
                if not close(target, mean[tuple(box)]):
                    wrong.append(f"{name} [{dim}: {first}, {stop}]")
    files.close()
    return wrong


@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_is_what_its_format_means(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, by any slice, a few rows at a time; and its bytes are counted as it will run."""
    monkeypatch.setattr(dequantized, "NUM_AT_ONCE", 5000)
    means = write_packed(tmp_path, name)
    assert differing(tmp_path, means) == []
    size = Checkpoint.open(str(tmp_path)).size("bfloat16")
    assert size is not None
    assert size.num_parameters == sum(mean.numel() for mean in means.values())
    assert size.weights_bytes == 2 * size.num_parameters


MUTANTS = {
    "scales from the beginning": ("fp8, blocks", "index_of_scales", lambda own: (
        lambda self, name, stem, dim, size, length, part, **options: own(
            self, name, stem, dim, size, length, slice(0, part.stop - part.start), **options)), "["),
    "zero points as stored": ("gptq", "zero_points", lambda own: (
        lambda self, stem, box, **options: own(self, stem, box, **options) - 1), "whole"),
    "no zero points": ("pack-quantized, zeros", "zero_points", lambda own: lambda self, stem, box: 8, "whole"),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_scales_are_noticed(mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, method, wrong, where = MUTANTS[mutant]
    means = write_packed(tmp_path, name)
    monkeypatch.setattr(DequantizedFiles, method, wrong(getattr(DequantizedFiles, method)))
    assert any(where in found for found in differing(tmp_path, means))


def test_a_rank_that_takes_the_scales_of_another_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the logits of two ranks, whose halves of 320 neurons meet in the middle of a block."""
    write_packed(tmp_path, "fp8, blocks")
    with torch.no_grad():
        want = load_pretrained(Checkpoint.open(str(tmp_path)), torch.float32)(torch.tensor([TEXT])).logits[0]
    assert float((logits_of_two(str(tmp_path)) - want).abs().max()) <= 10 * LIMIT
    monkeypatch.setattr(
        DequantizedFiles, "index_of_scales", MUTANTS["scales from the beginning"][2](DequantizedFiles.index_of_scales)
    )
    assert float((logits_of_two(str(tmp_path)) - want).abs().max()) > 1000 * LIMIT


def test_threads_may_read_at_once(tmp_path: Path) -> None:
    """As transformers does. The mutant: a file that another thread has closed as soon as it was open."""
    means = write_packed(tmp_path, "float-quantized, channel")
    files = opened(tmp_path)
    files._files._handles = Closed()
    for name, mean in means.items():
        assert close(files.read(name, torch.float32), mean)


def test_the_default_dtype_of_another_thread_changes_nothing(tmp_path: Path) -> None:
    """One that builds a model meanwhile sets it for the whole process."""
    means = write_packed(tmp_path, "nvfp4-pack-quantized")
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert differing(tmp_path, means) == []
    finally:
        torch.set_default_dtype(torch.float32)


class Closed(dict[Path, Any]):
    """Forgets what is put into it, at once."""

    def __setitem__(self, key: Path, value: Any) -> None:
        """Stores and forgets."""
        super().__setitem__(key, value)
        self.clear()


def test_outputs_of_awq_in_order_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    means = write_packed(tmp_path, "awq")
    monkeypatch.setattr(packing_module, "AWQ_PLACES", tuple(range(8)))
    assert differing(tmp_path, means)


def test_one_rank_runs_plain_weights(tmp_path: Path) -> None:
    """Loaded by transformers' class, rounded once to the dtype; nothing is told of scales of activations."""
    means = write_packed(tmp_path, "modelopt FP8", beside=True)
    checkpoint = Checkpoint.open(str(tmp_path))
    assert checkpoint.quantization == {"quant_method": "modelopt", "quant_algo": "FP8"}
    assert Checkpoint.ask_transformers(str(tmp_path)).quantization == checkpoint.quantization
    state = load_pretrained(checkpoint, torch.bfloat16).state_dict()
    assert state.keys() == means.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor, means[name].float().bfloat16()), name
    model = load_model(checkpoint, ModelOptions(dtype="bfloat16", device="cpu", compile=False))
    assert (model.quantization, model.batch_dependence) == (None, None)


def requests() -> dict[str, Request]:
    sampled = [SamplingParams(temperature=0.8 * i, seed=i, max_tokens=12) for i in range(2)]
    asked = {f"{i}": Request(prompt(i, 24), each) for i, each in enumerate(sampled)}
    modes = {mode: in_mode(asked, mode) for mode in (Mode.PLAIN, Mode.OVERLAPPED)}
    return {f"{mode.name} {name}": one for mode, those in modes.items() for name, one in those.items()}


def run_engine(
    group: Collectives, path: str, quantization: Any = None
) -> tuple[dict[str, tuple[int, ...]], int] | None:
    """On rank 0: the texts of an engine over all ranks, and the tokens that were accepted."""
    model = load(group, path, torch.float32, quantization=quantization)
    if group.rank > 0:
        follow(model)
        return None
    checkpoint, draft = Checkpoint.open(path), None
    if linear_layers(checkpoint.config) is None:
        draft = load_model(checkpoint, ModelOptions(dtype="float32", device="cpu", compile=False))
    pump = Pump(model, draft, pages=16, max_sessions=8, draft_steps=(2, 6), late=0.1)
    results = pump.run(requests())
    assert isinstance(pump.target.runner, LeadingRunner)
    pump.target.runner.end()
    texts = {name: result.token_ids for name, result in results.items()}
    return texts, sum(result.speculation.accepted for result in results.values())


@pytest.mark.parametrize("name", slow(FORMATS))
def test_two_ranks_give_the_text_of_plain_decoding(name: str, two: Ranks, tmp_path: Path) -> None:
    """And the text of one rank, whose sums are in another order: logits of random weights are rarely so close."""
    write_packed(tmp_path, name)
    require_whole(Checkpoint.open(str(tmp_path)), 2)
    (texts, accepted), _ = two.run(run_engine, str(tmp_path), transport="shared")
    for request, text in texts.items():
        assert text == texts[request.replace(Mode.OVERLAPPED.name, Mode.PLAIN.name)]
    assert accepted > 0
    model = load_model(Checkpoint.open(str(tmp_path)), ModelOptions(dtype="float32", device="cpu", compile=False))
    alone = Pump(model, None, pages=16, max_sessions=8).run(requests())
    assert texts == {request: result.token_ids for request, result in alone.items()}


@pytest.mark.parametrize("quantization", slow(["int8", "int4"]))
def test_two_ranks_give_the_text_of_weights_that_they_round(quantization: str, two: Ranks, tmp_path: Path) -> None:
    random_model(CONFIG).save_pretrained(tmp_path)
    (texts, accepted), _ = two.run(run_engine, str(tmp_path), quantization, transport="shared")
    for request, text in texts.items():
        assert text == texts[request.replace(Mode.OVERLAPPED.name, Mode.PLAIN.name)]
    assert accepted > 0


@pytest.mark.parametrize("family", ["deepseek_v3", *slow(["qwen3_moe", "qwen3_next"])])
def test_families_that_are_published_in_fp8(family: str, tmp_path: Path) -> None:
    """Experts are joined, and what a family keeps in float32 stays so: as if the weights had been stored plain."""
    means = write_packed(tmp_path / "packed", "fp8, blocks", small_config(family))
    (tmp_path / "plain").mkdir()
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config))
    save_file({name: mean.float() for name, mean in means.items()}, tmp_path / "plain" / "model.safetensors")
    found, wanted = (
        load_pretrained(Checkpoint.open(str(tmp_path / kind)), torch.float32).state_dict()
        for kind in ("packed", "plain")
    )
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_a_checkpoint_with_images_is_served_by_its_text_model(tmp_path: Path) -> None:
    """As Llama 4's and Qwen's are published, of which the part for images is not read."""
    text = small_config("llama4_text")
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
              "vision_output_dim": 32, "image_size": 28, "projector_input_dim": 32,
              "projector_output_dim": 32}  # fmt: skip
    means = write_packed(tmp_path, "float-quantized, channel", text)
    stored = load_file(tmp_path / "model.safetensors")
    save_file({f"language_model.{name}": tensor for name, tensor in stored.items()}, tmp_path / "model.safetensors")
    config = Llama4Config(text_config=text.to_dict(), vision_config=vision).to_dict()
    config |= {"quantization_config": FORMATS["float-quantized, channel"][0], "eos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Llama4ForConditionalGeneration"]}))
    state = load_pretrained(Checkpoint.open(str(tmp_path)), torch.float32).state_dict()
    name = "model.layers.0.self_attn.o_proj.weight"
    assert close(state[name], means[name])


def test_an_output_layer_that_is_quantized_is_shared_with_heads_as_plain(tmp_path: Path) -> None:
    """The mutant: codes that are taken for weights."""
    means = write_packed(tmp_path, "fp8, blocks")
    rows, columns = means["lm_head.weight"].shape
    codes, scale = torch.randn(rows, columns).to(torch.float8_e4m3fn), torch.rand(-(-rows // 128), 1)
    changed(tmp_path, {"lm_head.weight": codes, "lm_head.weight_scale_inv": scale})
    checkpoint = Checkpoint.open(str(tmp_path))
    table = target_table(checkpoint, "get_output_embeddings", torch.float32, torch.device("cpu"))
    assert torch.equal(table.weight, codes.float() * scale.repeat_interleave(128, 0)[:rows])


@pytest.mark.parametrize("family", slow(["deepseek_v3", "qwen3_moe", "qwen3_next"]))
def test_families_in_fp8_on_two_ranks(family: str, two: Ranks, tmp_path: Path) -> None:
    write_packed(tmp_path, "fp8, blocks", small_config(family))
    (texts, accepted), _ = two.run(run_engine, str(tmp_path), transport="shared")
    for request, text in texts.items():
        assert text == texts[request.replace(Mode.OVERLAPPED.name, Mode.PLAIN.name)]
    assert (accepted > 0) is (family != "qwen3_next")  # its layers draft in no draft model


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "gptq", "bits": 3}, "'gptq' with bits 3"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'gptq' with checkpoint_format 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*up": {"bits": 8}}}, "'gptq' with dynamic"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "'awq' with version 'gemv'"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "'awq' with zero_point false"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "'modelopt' with quant_algo 'W4A8_AWQ'"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format 'marlin-24' of several kinds"),
        (FORMATS["pack-quantized"][0] | {"format": "mxfp4-pack-quantized"}, "format 'mxfp4-pack-quantized' of 4 bits"),
        ({"quant_method": "torchao"}, "'torchao'"),
    ],
    ids=str,
)
def test_what_is_not_read_is_refused_by_name(config: dict[str, Any], said: str) -> None:
    checkpoint = Checkpoint("m", 64, (2,), 64, quantization=config)
    with pytest.raises(ConfigError) as caught:
        require_whole(checkpoint, 2)
    assert said in str(caught.value)
    assert str(caught.value).endswith(": one process runs quantized weights, so set it to 1")


def test_an_algorithm_of_model_optimizer_that_is_not_read(tmp_path: Path) -> None:
    write_packed(tmp_path, "modelopt FP8")
    checkpoint = Checkpoint.open(str(tmp_path))
    other = dataclasses.replace(checkpoint, quantization={"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"})
    with pytest.raises(ConfigError, match=r"'modelopt' with quant_algo 'W4A8_AWQ': FP8, .* NVFP4 are allowed"):
        load_pretrained(other, torch.bfloat16)


def changed(folder: Path, change: dict[str, Tensor | None]) -> None:
    """Replaces tensors of a checkpoint, or with None removes them."""
    tensors: dict[str, Any] = load_file(folder / "model.safetensors") | change
    save_file({name: t for name, t in tensors.items() if t is not None}, folder / "model.safetensors", {"format": "pt"})


DOWN = "model.layers.1.mlp.down_proj."


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("fp8, blocks", {"weight_scale_inv": None}, "stores {0}weight as F8_E4M3, which is not read in its format"),
        ("fp8, blocks", {"weight_scale_inv": torch.ones(2, 2)}, "{0}weight_scale_inv of shape (2, 2) does not fit"),
        ("fp8, blocks", {"weight_scale_inv": torch.ones(1, 3, dtype=torch.uint8)}, "{0}weight_scale_inv as U8"),
        ("fp8, blocks", {"weight": torch.ones(128, 320, dtype=torch.int8)}, "{0}weight_scale_inv as F32"),
        ("gptq", {"qzeros": None}, "no weight file holds {0}qzeros"),
        ("gptq", {"g_idx": torch.full((320,), 9, dtype=torch.int32)}, "{0}g_idx of shape (320,) does not fit"),
        ("gptq", {"qzeros": torch.zeros(5, 9, dtype=torch.int32)}, "{0}qzeros of shape (5, 9) does not fit"),
        ("gptq", {"g_idx": None, "scales": torch.ones(4, 128)}, "{0}qzeros of shape (5, 16) does not fit"),
        ("gptq", {"g_idx": torch.zeros(300, dtype=torch.int32)}, "{0}g_idx of shape (300,) does not fit"),
        ("gptq", {"qweight": torch.zeros(5120, dtype=torch.int32)}, "{0}qweight of shape (5120,) is quantized, and no"),
        ("nvfp4-pack-quantized", {"weight_global_scale": None}, "no weight file holds {0}weight_global_scale"),
        ("pack-quantized", {"weight_shape": torch.tensor([128, 200])}, "{0}weight_shape is (128, 200)"),
        ("awq", {"qweight": None}, "stores {0}scales, and no weight that it belongs to"),
        ("awq", {"act_fn.scales": torch.ones(320)}, "stores {0}act_fn.scales, and no weight that it belongs to"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_damaged_files_are_refused(name: str, change: dict[str, Any], said: str, tmp_path: Path) -> None:
    """Before anything runs, in one sentence."""
    write_packed(tmp_path, name)
    changed(tmp_path, {DOWN + ending: tensor for ending, tensor in change.items()})
    with pytest.raises(ConfigError) as caught:
        load_pretrained(Checkpoint.open(str(tmp_path)), torch.bfloat16)
    assert said.format(DOWN) in str(caught.value)
