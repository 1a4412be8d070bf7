"""Quantized weights that stay so on a GPU: they are the weights of the dequantized checkpoint, on one rank and on two.

On the CPU, whose operator dequantizes at each call: so logits must have the bits of those of plain weights. The kernel
is tested in ``test_scaled_triton.py``. Mutants: a rank that takes the scales of another, scales of the wrong blocks,
two experts exchanged.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.model.families import small_config
from tests.model.parallel.test_tables import TEXT, logits_of_two, packed
from tests.model.test_dequantized import DOWN, changed
from tests.support.models import random_model
from tests.support.mutants import Mutant, mutant
from tests.support.packed import CONFIG, write_packed
from torch import Tensor

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.packing import Format, packing_of
from paceline.config import ModelOptions
from paceline.errors import ConfigError
from paceline.model import dequantized, quantized, stored_weights
from paceline.model.compiled.parts import _is_part
from paceline.model.dequantized import DequantizedFiles, dequantized_files
from paceline.model.loading import load_model, load_pretrained
from paceline.model.scaled import (
    INT4,
    Scaled,
    ScaledLinear,
    ScaledWeight,
    largest_of,
    round_layers,
    rounded,
    rounded_to_4,
    scaled_layers,
)

CPU = torch.device("cpu")
FORMATS = {
    "fp8, blocks": "fp8", "fp8, tensor": "fp8", "float-quantized, channel": "fp8", "modelopt, channels": "fp8",
    "int-quantized": "int8", "pack-quantized": "int4", "pack-quantized, zeros": "int4", "gptq": "int4",
    "awq": "int4", "nvfp4-pack-quantized": "fp4",
}  # fmt: skip
"""The method of each, as it is called."""


def keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the CPU were a GPU with the kernel; a few rows are read at a time."""
    monkeypatch.setattr(dequantized, "NUM_AT_ONCE", 5000)
    monkeypatch.setattr(stored_weights, "why_not_scaled", lambda device, dtype: None)


def logits_of(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    with torch.no_grad():
        logits: Tensor = load_pretrained(Checkpoint.open(str(folder)), dtype)(torch.tensor([TEXT])).logits[0]
    return logits


@pytest.mark.parametrize("name", FORMATS)
def test_kept_weights_are_those_of_the_dequantized_checkpoint(name, tmp_path, monkeypatch) -> None:
    """On one rank and on two, whose halves of 320 neurons begin in the middle of a block: these have smaller groups."""
    write_packed(tmp_path, name)
    plain, of_two = logits_of(tmp_path), logits_of_two(str(tmp_path))
    keep(monkeypatch)
    checkpoint = Checkpoint.open(str(tmp_path))
    model = load_model(checkpoint, ModelOptions(dtype="bfloat16", device="cpu", compile=False))
    assert model.quantization == FORMATS[name]
    loaded = load_pretrained(checkpoint, torch.bfloat16)
    assert len(scaled_layers(loaded)) == 14
    assert type(loaded).__mro__[0].__name__ == "LlamaForCausalLM"
    assert model.size.num_parameters == checkpoint.size("bfloat16").num_parameters
    assert torch.equal(logits_of(tmp_path), plain)
    assert torch.equal(logits_of_two(str(tmp_path)), of_two)


def kept_box(folder: Path, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
    """A box of a weight that is dequantized, and the same that stays as it is stored."""
    name, checkpoint = "model.layers.1.mlp.down_proj.weight", Checkpoint.open(str(folder))
    packing = packing_of(checkpoint.quantization)
    assert packing is not None
    files = dequantized_files(checkpoint, packing)
    shape = rows.stop - rows.start, columns.stop - columns.start
    plain, weight = torch.empty(shape, dtype=torch.bfloat16), ScaledWeight(shape, torch.bfloat16)
    files.copy(name, (rows, columns), plain)
    format = files.scaled[name].begun_at(columns.start)
    assert format is not None
    weight.allocate(format, CPU)
    weight.put(files.read_scaled(name, (rows, columns), format), (slice(None),), name)
    return plain, weight.weight


@pytest.mark.parametrize("name", ["gptq", "awq", "pack-quantized, zeros"])
def test_a_part_may_have_one_word_of_inputs(name: str, tmp_path: Path) -> None:
    write_packed(tmp_path, name)
    plain, kept = kept_box(tmp_path, slice(8, 48), slice(72, 80))
    assert torch.equal(kept, plain)


def test_zero_points_beyond_8_bits_are_refused(tmp_path: Path) -> None:
    """They would be others modulo 256."""
    write_packed(tmp_path, "int-quantized")
    changed(tmp_path, {f"{DOWN}weight_zero_point": torch.full((128, 1), 200, dtype=torch.uint8)})
    with pytest.raises(ConfigError, match=r"down_proj.weight_zero_point has zero points that no int8 holds"):
        kept_box(tmp_path, slice(0, 128), slice(0, 320))


def held_bytes(model: torch.nn.Module) -> int:
    """Bytes of all weights as they are held."""
    parts = [part for layer in scaled_layers(model) for part in layer.buffers()]
    return sum(part.nbytes for part in [*parts, *model.parameters()])


@pytest.mark.parametrize("name", ["fp8, blocks", "awq"])
def test_a_gpu_holds_what_is_counted(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is loaded; a rank has its share of it."""
    write_packed(tmp_path, name)
    checkpoint = Checkpoint.open(str(tmp_path))
    plain, kept_size = checkpoint.size("bfloat16"), checkpoint.size("bfloat16", on_gpu=True)
    assert checkpoint.size("float32", on_gpu=True).saved_bytes == 0
    keep(monkeypatch)
    model = load_pretrained(checkpoint, torch.bfloat16)
    assert kept_size.weights_bytes == held_bytes(model) < plain.weights_bytes
    assert kept_size.of_rank(2).saved_bytes == kept_size.saved_bytes // 2


@pytest.mark.parametrize(
    ("family", "format", "num_kept"),
    [("deepseek_v3", "fp8, blocks", 16), ("qwen3_next", "fp8, blocks", 17), ("deepseek_v3", "pack-quantized", 16)],
)
def test_families_that_are_published_quantized(family, format, num_kept, tmp_path, monkeypatch) -> None:
    """Experts are never dequantized as a whole; what others read head by head is."""
    write_packed(tmp_path, format, small_config(family))
    plain, of_two = logits_of(tmp_path), logits_of_two(str(tmp_path))
    keep(monkeypatch)
    read: list[str] = []

    @mutant(DequantizedFiles, "copy")
    def noting(copy, files, name, *rest):
        read.append(name)
        return copy(files, name, *rest)

    noting(monkeypatch)
    model = load_pretrained(Checkpoint.open(str(tmp_path)), torch.bfloat16)
    names = [name for name, part in model.named_modules() if isinstance(part, ScaledWeight)]
    assert not [name for name in names if "kv_b_proj" in name]
    assert len(names) == num_kept
    assert torch.equal(logits_of(tmp_path), plain)
    assert torch.equal(logits_of_two(str(tmp_path)), of_two)
    assert not [name for name in read if ".experts." in name]


@mutant(ScaledWeight, "put")
def exchanged(put, weight, part, place, name):
    """Two experts in each other's place."""
    put(weight, part, (1 - place[0], *place[1:]) if len(place) > 1 and place[0] < 2 else place, name)


def test_experts_of_gpt_oss_stay_in_four_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two ranks as well, where the half of 96 neurons begins within a group of 32; and what is counted is held."""
    packed(tmp_path)
    checkpoint = Checkpoint.open(str(tmp_path))
    plain, of_two = logits_of(tmp_path), logits_of_two(str(tmp_path))
    keep(monkeypatch)
    model = load_pretrained(checkpoint, torch.bfloat16)
    assert [layer.method for layer in scaled_layers(model)] == ["fp4"] * 4
    assert checkpoint.size("bfloat16", on_gpu=True).weights_bytes == held_bytes(model)
    assert torch.equal(logits_of(tmp_path), plain)
    assert torch.equal(logits_of_two(str(tmp_path)), of_two)
    exchanged(monkeypatch)
    assert not torch.equal(logits_of(tmp_path), plain)


@mutant(DequantizedFiles, "read_scaled")
def first_rows(read, files, name, box, format):
    """Scales of the first outputs, for any."""
    rows, columns = box
    return Scaled(
        read(files, name, box, format).codes,
        read(files, name, (slice(0, rows.stop - rows.start), columns), format).scales,
    )


@mutant(DequantizedFiles, "read_scaled")
def one_group(read, files, name, box, format):
    """The scale of an output's first block for all of them."""
    codes, scales, *_ = read(files, name, box, format)
    return Scaled(codes, scales[:, :1].expand_as(scales).contiguous())


@mutant(DequantizedFiles, "read_scaled")
def other_zeros(read, files, name, box, format):
    """The zero points of the next group."""
    part = read(files, name, box, format)
    return part._replace(zeros=part.zeros.roll(1, 1))


@pytest.mark.parametrize(
    ("name", "wrong"), [("fp8, blocks", first_rows), ("fp8, blocks", one_group), ("awq", other_zeros)]
)
def test_wrong_scales_are_noticed(name: str, wrong: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_packed(tmp_path, name)
    right = [logits_of(tmp_path), logits_of_two(str(tmp_path))]
    keep(monkeypatch)
    wrong(monkeypatch)
    found = [logits_of(tmp_path), logits_of_two(str(tmp_path))]
    assert any(not torch.equal(*pair) for pair in zip(found, right, strict=True))


def test_words_of_other_bits_are_dequantized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(monkeypatch)
    write_packed(tmp_path, "pack-quantized, 8 bits")
    assert not scaled_layers(load_pretrained(Checkpoint.open(str(tmp_path)), torch.bfloat16))
    assert Checkpoint.open(str(tmp_path)).size("bfloat16", on_gpu=True).saved_bytes == 0


def kept_in_order(folder: Path) -> bool:
    """True if the weights that are kept are those that are dequantized without ``keep``, and their products."""
    kept, files = load_pretrained(Checkpoint.open(str(folder)), torch.bfloat16), Checkpoint.open(str(folder))
    packing = packing_of(files.quantization)
    assert packing is not None
    plain, right = dequantized_files(files, packing), []
    for path, layer in kept.named_modules():
        if isinstance(layer, ScaledLinear):
            x, want = torch.randn(3, layer.in_features), plain.read(f"{path}.weight", torch.bfloat16)
            right.append(torch.equal(layer.weight, want))
            right.append(torch.allclose(layer(x.bfloat16()).float(), x @ want.float().T, atol=0.1, rtol=0.1))
    assert len(right) == 2 * 14
    return all(right)


@mutant(DequantizedFiles, "order")
def as_stored(order, files, name):
    """Inputs of other groups."""
    return


@pytest.mark.parametrize("name", ["gptq, ordered", "pack-quantized, ordered"])
def test_groups_in_any_order_are_kept_by_ranks_with_all_inputs(name, tmp_path, monkeypatch) -> None:
    """Half of the inputs has no groups of one size; several ranks are counted as if none of them kept any."""
    write_packed(tmp_path, name)
    of_two, checkpoint = logits_of_two(str(tmp_path)), Checkpoint.open(str(tmp_path))
    size, read = checkpoint.size("bfloat16", on_gpu=True), checkpoint.size("bfloat16").weights_bytes
    assert size.weights_bytes < 0.6 * read
    assert size.of_rank(2).weights_bytes == checkpoint.size("bfloat16").of_rank(2).weights_bytes
    keep(monkeypatch)
    assert kept_in_order(tmp_path)
    assert float((logits_of_two(str(tmp_path)) - of_two).abs().max() / of_two.abs().max()) < 0.1
    as_stored(monkeypatch)
    assert not kept_in_order(tmp_path)


def test_an_output_layer_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two ranks has its tokens' part; not where the configuration says that it is the embedding, too."""
    write_packed(tmp_path, "gptq", head=True)
    plain, of_two = logits_of(tmp_path), logits_of_two(str(tmp_path))
    keep(monkeypatch)
    checkpoint = Checkpoint.open(str(tmp_path))
    model = load_pretrained(checkpoint, torch.bfloat16)
    assert isinstance(model.get_output_embeddings(), ScaledLinear)
    assert checkpoint.size("bfloat16", on_gpu=True).weights_bytes == held_bytes(model)
    assert torch.equal(logits_of(tmp_path), plain)
    assert torch.equal(logits_of_two(str(tmp_path)), of_two)
    config = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tied = load_pretrained(Checkpoint.open(str(tmp_path)), torch.bfloat16)
    assert type(tied.get_output_embeddings()) is torch.nn.Linear
    assert len(scaled_layers(tied)) == 14


def test_weights_with_scales_beyond_the_kernel_are_dequantized(tmp_path, monkeypatch, caplog) -> None:
    """Each format has a bound, beyond which a scale times the factor of its exponents is no finite number."""
    name = "model.layers.1.mlp.up_proj.weight"
    write_packed(tmp_path, "fp8, tensor")
    changed(tmp_path, {f"{name}_scale": torch.tensor(256.0)})
    (tmp_path / "experts").mkdir()
    packed(tmp_path / "experts")
    experts = load_file(tmp_path / "experts" / "model.safetensors")
    scales = "model.layers.0.mlp.experts.down_proj_scales"
    changed(tmp_path / "experts", {scales: experts[scales].index_fill(2, torch.tensor([0]), 129)})
    plain = load_pretrained(Checkpoint.open(str(tmp_path)), torch.bfloat16).get_parameter(name)
    keep(monkeypatch)
    model = load_pretrained(Checkpoint.open(str(tmp_path)), torch.bfloat16)
    assert len(scaled_layers(model)) == 13
    assert torch.equal(model.get_parameter(name), plain)
    assert "1 quantized weights of" in caplog.text
    model = load_pretrained(Checkpoint.open(str(tmp_path / "experts")), torch.bfloat16)
    assert len(scaled_layers(model)) == 2


def test_a_weight_that_is_no_number_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_packed(tmp_path, "fp8, tensor")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"].view(torch.uint8)[3, 5] = 0xFF
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    keep(monkeypatch)
    problem = r"model\.layers\.1\.mlp\.up_proj\.weight has a quantized weight that is no finite number"
    with pytest.raises(ConfigError, match=problem):
        load_pretrained(Checkpoint.open(str(tmp_path)), torch.bfloat16)


@pytest.mark.parametrize(("exponent", "dtype"), [(4, torch.float8_e4m3fn), (5, torch.float8_e5m2), (0, torch.int8)])
def test_every_code_is_its_number(exponent: int, dtype: torch.dtype) -> None:
    """Numbers below the normal ones and negative zero among them."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    codes = codes[codes.float().isfinite()][None]
    layer = ScaledLinear(torch.nn.Linear(codes.shape[1], 1, bias=False).bfloat16())
    layer.hold(Scaled(codes, torch.tensor([[0.37]])), Format(8, exponent), CPU, "")
    assert torch.equal(layer.weight.view(torch.int16), (codes.float() * 0.37).bfloat16().view(torch.int16))


def test_int8_rounds_the_linear_layers_of_a_model_with_linear_attention() -> None:
    """By half a step at most; the output layer and narrow gates stay as they are."""
    model = random_model(small_config("qwen3_next"), dtype=torch.bfloat16)
    before = {name: part.weight.detach() for name, part in model.named_modules() if type(part) is torch.nn.Linear}
    round_layers(model, CPU, 16)
    names = [name for name, part in model.named_modules() if isinstance(part, ScaledLinear)]
    assert any("linear_attn" in name for name in names)
    assert "lm_head" not in names
    for name in names:
        codes, scales, *_ = rounded(before[name], largest_of(before[name]))
        assert codes.abs().max() == 127
        own = model.get_submodule(name).weight
        assert float(((own.float() - before[name].float()).abs() / scales).max()) <= 0.51 + 127 / 256  # and bfloat16's
    assert quantized.quantization_of(model) == ("int8", None)


def test_groups_that_a_checkpoint_stores_are_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its configuration says that they are in order: the weights are dequantized."""
    write_packed(tmp_path, "gptq, ordered")
    plain, config = logits_of(tmp_path), json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["desc_act"] = False
    (tmp_path / "config.json").write_text(json.dumps(config))
    keep(monkeypatch)
    assert torch.equal(logits_of(tmp_path), plain)


@pytest.mark.parametrize("inputs", [64, 40])
def test_int4_rounds_each_32_inputs_between_their_bounds(inputs: int) -> None:
    """By half a step at most, zero exactly; a group of one sign has zero as a bound, and one of zeros stays so."""
    weight = torch.randn(16, inputs, generator=torch.Generator().manual_seed(1))
    weight[0], weight[1, :32], weight[2] = weight[0].abs() + 3, 0, 0
    weight[:, 5] = 0
    layer = ScaledLinear(torch.nn.Linear(inputs, 16, bias=False))
    layer.hold(rounded_to_4(weight), INT4, CPU, "")
    groups = torch.nn.functional.pad(weight, (0, -inputs % 32)).view(16, -1, 32)
    steps = (groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)) / 15
    steps = steps.repeat_interleave(32, 1)[:, :inputs]
    assert bool(((layer.weight - weight).abs() <= 0.502 * steps).all())  # of a scale in float16
    assert bool((layer.weight[weight == 0] == 0).all())


def test_a_gpu_without_the_kernel_dequantizes_and_says_so(tmp_path, monkeypatch, caplog) -> None:
    write_packed(tmp_path, "fp8, tensor", CONFIG)
    monkeypatch.setattr(stored_weights, "why_not_scaled", lambda device, dtype: "needs a C compiler")
    files = load_pretrained(Checkpoint.open(str(tmp_path)), torch.bfloat16)
    assert not scaled_layers(files)
    assert "dequantized" not in caplog.text  # on the CPU it is no fault


def test_a_part_with_such_layers_is_traced_whole() -> None:
    """An MLP is compiled as one part, for any number of tokens, with the products as calls within it."""
    model = random_model("llama", dtype=torch.bfloat16)
    round_layers(model, CPU, 16)
    mlp = model.get_submodule("model.layers.0.mlp")
    assert _is_part(mlp)
    with torch.no_grad():
        compiled = torch.compile(mlp.forward, backend="aot_eager", dynamic=True, fullgraph=True)
        for num_tokens in (3, 20):
            x = torch.randn(1, num_tokens, model.config.hidden_size).bfloat16()
            assert torch.equal(compiled(x), mlp(x))
