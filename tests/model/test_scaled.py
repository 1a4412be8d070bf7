"""Weights of 8 bits that stay so on a GPU: they are the weights of the dequantized checkpoint, on one rank and on two.

On the CPU, whose operator dequantizes at each call: so logits must have the bits of those of plain weights. The kernel
is tested in ``test_scaled_triton.py``. Mutants: a rank that takes the scales of another, scales of the wrong blocks.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.model.families import small_config
from tests.model.parallel.test_tables import TEXT, logits_of_two
from tests.support.models import random_model
from tests.support.mutants import Mutant, mutant
from tests.support.packed import CONFIG, write_packed
from torch import Tensor

from paceline.checkpoint.files import Checkpoint
from paceline.config import ModelOptions
from paceline.errors import ConfigError
from paceline.model import kept, quantized
from paceline.model.compiled.parts import _is_part
from paceline.model.dequantized import DequantizedFiles
from paceline.model.loading import load_model, load_pretrained
from paceline.model.scaled import Scaled, ScaledLinear, largest_of, round_layers, rounded, scaled_layers

CPU = torch.device("cpu")
FORMATS = ["fp8, blocks", "fp8, tensor", "float-quantized, channel", "modelopt, channels"]


def keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the CPU were a GPU with the kernel."""
    monkeypatch.setattr(kept, "why_not_scaled", lambda device, dtype: None)


def logits_of(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    with torch.no_grad():
        logits: Tensor = load_pretrained(Checkpoint.open(str(folder)), dtype)(torch.tensor([TEXT])).logits[0]
    return logits


@pytest.mark.parametrize("name", FORMATS)
def test_kept_weights_are_those_of_the_dequantized_checkpoint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one rank and on two, whose halves of 320 neurons begin in the middle of a block: these are dequantized."""
    write_packed(tmp_path, name)
    plain, of_two = logits_of(tmp_path), logits_of_two(str(tmp_path))
    keep(monkeypatch)
    checkpoint = Checkpoint.open(str(tmp_path))
    model = load_model(checkpoint, ModelOptions(dtype="bfloat16", device="cpu", compile=False))
    assert model.quantization == "fp8"
    loaded = load_pretrained(checkpoint, torch.bfloat16)
    assert len(scaled_layers(loaded)) == 14
    assert type(loaded).__mro__[0].__name__ == "LlamaForCausalLM"
    assert model.num_parameters == checkpoint.size("bfloat16").num_parameters
    assert torch.equal(logits_of(tmp_path), plain)
    assert torch.equal(logits_of_two(str(tmp_path)), of_two)


def test_a_gpu_holds_one_byte_for_each_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is counted before anything is loaded is what the layers hold; a rank has its share of it."""
    write_packed(tmp_path, "fp8, blocks")
    checkpoint = Checkpoint.open(str(tmp_path))
    plain, kept_size = checkpoint.size("bfloat16"), checkpoint.size("bfloat16", on_gpu=True)
    assert checkpoint.size("float32", on_gpu=True).saved_bytes == 0
    keep(monkeypatch)
    model = load_pretrained(checkpoint, torch.bfloat16)
    held = sum(part.codes.nbytes + part.scales.nbytes for part in scaled_layers(model))
    rest = sum(parameter.nbytes for parameter in model.parameters())
    assert kept_size.weights_bytes == held + rest < plain.weights_bytes
    assert kept_size.of_rank(2).saved_bytes == kept_size.saved_bytes // 2


@pytest.mark.parametrize(("family", "num_kept"), [("deepseek_v3", 14), ("qwen3_next", 13)])
def test_families_that_are_published_in_fp8(
    family: str, num_kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts, and what others read head by head, are dequantized."""
    write_packed(tmp_path, "fp8, blocks", small_config(family))
    plain = logits_of(tmp_path)
    keep(monkeypatch)
    model = load_pretrained(Checkpoint.open(str(tmp_path)), torch.bfloat16)
    names = [name for name, part in model.named_modules() if isinstance(part, ScaledLinear)]
    assert not [name for name in names if "kv_b_proj" in name or ".experts." in name]
    assert len(names) == num_kept
    assert torch.equal(logits_of(tmp_path), plain)


@mutant(DequantizedFiles, "read_scaled")
def first_rows(read, files, name, box, group):
    """Scales of the first outputs, for any."""
    rows, columns = box
    return Scaled(
        read(files, name, box, group).codes,
        read(files, name, (slice(0, rows.stop - rows.start), columns), group).scales,
    )


@mutant(DequantizedFiles, "read_scaled")
def one_group(read, files, name, box, group):
    """The scale of an output's first block for all of them."""
    codes, scales = read(files, name, box, group)
    return Scaled(codes, scales[:, :1].expand_as(scales).contiguous())


@pytest.mark.parametrize("wrong", [first_rows, one_group])
def test_wrong_scales_are_noticed(wrong: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_packed(tmp_path, "fp8, blocks")
    right = [logits_of(tmp_path), logits_of_two(str(tmp_path))]
    keep(monkeypatch)
    wrong(monkeypatch)
    found = [logits_of(tmp_path), logits_of_two(str(tmp_path))]
    assert any(not torch.equal(*pair) for pair in zip(found, right, strict=True))


def test_formats_of_other_bits_and_zero_points_are_dequantized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(monkeypatch)
    for name in ("int-quantized", "awq", "modelopt NVFP4"):
        write_packed(tmp_path / name, name)
        assert not scaled_layers(load_pretrained(Checkpoint.open(str(tmp_path / name)), torch.bfloat16))
        assert Checkpoint.open(str(tmp_path / name)).size("bfloat16", on_gpu=True).saved_bytes == 0


def test_a_weight_that_is_no_number_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_packed(tmp_path, "fp8, tensor")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"].view(torch.uint8)[3, 5] = 0xFF
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    keep(monkeypatch)
    problem = r"model\.layers\.1\.mlp\.up_proj\.weight has a quantized weight that is no finite number"
    with pytest.raises(ConfigError, match=problem):
        load_pretrained(Checkpoint.open(str(tmp_path)), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_every_code_is_its_number(dtype: torch.dtype) -> None:
    """Numbers below the normal ones and negative zero among them."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    codes = codes[codes.float().isfinite()][None]
    layer = ScaledLinear(torch.nn.Linear(codes.shape[1], 1, bias=False).bfloat16())
    layer.hold(Scaled(codes, torch.tensor([[0.37]])), CPU, "")
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
        codes, scales = rounded(before[name], largest_of(before[name]))
        assert codes.abs().max() == 127
        own = model.get_submodule(name).weight
        assert float(((own.float() - before[name].float()).abs() / scales).max()) <= 0.51 + 127 / 256  # and bfloat16's
    assert quantized.quantization_of(model) == ("int8", None)


def test_a_gpu_without_the_kernel_dequantizes_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_packed(tmp_path, "fp8, tensor", CONFIG)
    monkeypatch.setattr(kept, "why_not_scaled", lambda device, dtype: "needs a C compiler")
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
