"""Quantized targets and drafts: speculation gives the text of the quantized target itself."""

from __future__ import annotations

import functools
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from tests.support.gguf_files import MODELS, write_gguf
from tests.support.models import noisy_copy, prompt, random_model, save_pair
from tests.support.pump import Pump, Request, assert_same, in_mode, plain_reference, requests_for
from tests.support.rings import nightly, slow
from transformers import AutoModelForCausalLM, PreTrainedModel, TorchAoConfig

from paceline.checkpoint.files import Checkpoint
from paceline.config import ModelOptions, TargetOptions, TargetSetup
from paceline.errors import ConfigError
from paceline.model import quantized
from paceline.model.compiled.aot import artifact_key
from paceline.model.compiled.blocks import pack_blocks
from paceline.model.compiled.linear import PackedLinear
from paceline.model.loading import LoadedModel, load_model, load_pretrained, prepare
from paceline.model.quantized import load_options, require_whole
from paceline.model.runner import ModelRunner
from paceline.model.selftest import InvarianceReport, check_invariance
from paceline.model.step import Step
from paceline.target import build
from paceline.types import Mode, SamplingParams

pytestmark = pytest.mark.compiler
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)


@functools.cache
def reloaded(dtype: torch.dtype, quantization: str | None, noise: float = 0.0) -> PreTrainedModel:
    """A random model, or a draft for it, by way of a checkpoint."""
    model = random_model("llama", dtype=dtype)
    with tempfile.TemporaryDirectory() as folder:
        (noisy_copy(model, noise) if noise else model).save_pretrained(folder)
        return load_pretrained(Checkpoint.open(folder), dtype, CPU, quantization)  # type: ignore[arg-type]


def loaded(dtype: torch.dtype, quantization: str | None, noise: float = 0.0) -> LoadedModel:
    return prepare(reloaded(dtype, quantization, noise), compile=False)


def requests() -> dict[str, Request]:
    """Greedy and sampled, short and across a page."""
    return requests_for([prompt(i, 5 + 30 * i) for i in range(4)], temperature=[0.0, 0.8], max_tokens=24)


@torch.no_grad()
def logits_of(model: PreTrainedModel, token_ids: Sequence[int] | None = None) -> torch.Tensor:
    """Logits of some tokens, float32, by transformers' own attention."""
    previous = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        found: torch.Tensor = model(torch.tensor([token_ids or prompt(1, 40)])).logits.float()
    finally:
        model.set_attn_implementation(previous)
    return found


def gap(model: PreTrainedModel, asked: Sequence[int], answer: Sequence[int]) -> float:
    """How far below the largest logit the tokens of a greedy answer are at most."""
    rows = logits_of(model, [*asked, *answer])[0, len(asked) - 1 : -1]
    return float((rows.max(-1).values - rows[torch.arange(len(answer)), torch.tensor(answer)]).max())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_layers_are_rounded_and_nothing_else(dtype: torch.dtype) -> None:
    """The output layer to 8 bits in any case; embeddings and norms as they were; logits are near."""
    plain = reloaded(dtype, None)
    logits = logits_of(plain)
    for quantization, allowed in (("int8", 0.1), ("int4", 0.5)):
        model = reloaded(dtype, quantization)
        packed = {name: part.bits for name, part in model.named_modules() if isinstance(part, PackedLinear)}
        linears = [name for name, part in plain.named_modules() if isinstance(part, torch.nn.Linear)]
        assert packed == {name: 8 if "lm_head" in name else int(quantization[3:]) for name in linears}
        kept = dict(model.named_parameters())
        assert all(torch.equal(kept[name], weight) for name, weight in plain.named_parameters() if name in kept)
        assert [name for name, _ in plain.named_parameters() if name not in kept] == [
            f"{name}.weight" for name in linears
        ]
        found = logits_of(model)
        assert 0 < float((found - logits).norm() / logits.norm()) < allowed
        ready = prepare(model, compile=False)
        assert (ready.quantization, ready.batch_dependence) == (
            {"int8": "int8", "int4": "int4 and int8"}[quantization],
            None,
        )
        assert (ready.size.num_parameters, ready.dtype) == (prepare(plain, compile=False).size.num_parameters, dtype)


@pytest.mark.parametrize(("dtype", "quantization"), [(torch.float32, "int8"), (torch.bfloat16, "int4")], ids=str)
def test_verifying_gives_the_bits_of_decoding(dtype: torch.dtype, quantization: str) -> None:
    """What losslessness rests on."""
    report = check_invariance(loaded(dtype, quantization).runner(32))
    assert report.holds, report


@pytest.mark.parametrize(
    ("target", "draft", "dtype"),
    [
        ("int4", None, torch.bfloat16),
        *slow([(None, "int4", torch.float32), ("int8", "int8", torch.bfloat16)]),
        *nightly([("int8", "int8", torch.float32), ("int8", None, torch.bfloat16), (None, "int8", torch.bfloat16)]),
    ],
)
def test_every_mode_gives_the_text_of_the_target_itself(target: str, draft: str, dtype: torch.dtype) -> None:
    """Plain, overlapped and sequential, whatever the draft is quantized to; and drafts are accepted."""
    models = loaded(dtype, target), loaded(dtype, draft, 0.05)
    asked = requests()
    reference = plain_reference(models[0], asked)
    for mode in (Mode.OVERLAPPED, Mode.SEQUENTIAL, Mode.PLAIN):
        pump = Pump(*models, late=0.1)
        assert assert_same(pump.run(in_mode(asked, mode)), reference) == 4 * 24
        if mode is not Mode.PLAIN:
            assert pump.target.runner.num_forwards < 4 * 24


@pytest.mark.slow
def test_greedy_tokens_are_the_likeliest_of_transformers_own_forward() -> None:
    """Of the same quantized model; those that are not quantized, or to fewer bits, say else.

    Not to the bit: another order of a sum in attention may round an input of a product to the next of 256 numbers.
    """
    greedy = {n: Request(r.prompt, SamplingParams(temperature=0.0, max_tokens=24)) for n, r in requests().items()}
    results = Pump(loaded(torch.float32, "int8"), loaded(torch.float32, None, 0.05)).run(greedy)
    gaps = {}
    for quantization in ("int8", None, "int4"):
        model = reloaded(torch.float32, quantization)
        gaps[quantization] = max(gap(model, greedy[name].prompt, r.token_ids) for name, r in results.items())
    assert gaps["int8"] < 0.02 < gaps[None] < gaps["int4"], gaps


@pytest.mark.slow
def test_verifying_with_another_copy_of_the_weights_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: decoding reads int8, steps of several tokens read what was not quantized."""
    target, draft = loaded(torch.float32, "int8"), loaded(torch.float32, None, 0.05)
    asked = requests()
    reference = plain_reference(target, asked)
    assert_same(Pump(target, draft).run(asked), reference)
    right, wrong = target.step, loaded(torch.float32, None).step

    def mutant(*inputs: object) -> torch.Tensor:
        num_logits = len(inputs[2].unique())  # type: ignore[attr-defined]
        return (right if num_logits == 1 else wrong)(*inputs)

    make = ModelRunner.__init__

    def init(self: ModelRunner, step: object, *args: object, **kwargs: object) -> None:
        make(self, mutant if step is right else step, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(ModelRunner, "__init__", init)
    assert not check_invariance(target.runner(32)).holds
    results = Pump(target, draft).run(asked)
    assert any(results[name].token_ids != r.token_ids for name, r in reference.items())


def save_torchao(folder: Path, dtype: torch.dtype) -> Checkpoint:
    """A checkpoint that torchao has rounded to int8."""
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig, PerRow

    random_model("llama", dtype=dtype).save_pretrained(folder / "plain")
    config = TorchAoConfig(Int8WeightOnlyConfig(granularity=PerRow(), set_inductor_config=False))
    options = {"dtype": dtype, "quantization_config": config}
    AutoModelForCausalLM.from_pretrained(folder / "plain", **options).save_pretrained(folder / "int8")
    return Checkpoint.open(str(folder / "int8"))


@pytest.mark.slow
def test_a_checkpoint_of_torchao_runs_as_it_is(tmp_path: Path) -> None:
    """Drafted text is its own plain text; to quantize it again is refused."""
    checkpoint = save_torchao(tmp_path, torch.bfloat16)
    model = load_model(checkpoint, ModelOptions(dtype="bfloat16", device="cpu", compile=False))
    assert model.quantization == "torchao"
    asked = requests()
    assert_same(Pump(model, loaded(torch.bfloat16, None, 0.05)).run(asked), plain_reference(model, asked))
    with pytest.raises(ConfigError, match="is quantized by 'torchao' already: set quantization to null"):
        load_model(checkpoint, ModelOptions(quantization="int8", device="cpu"))


@pytest.mark.slow
def test_of_torchao_only_bfloat16_is_compiled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """``auto`` runs eager and says why; ``true`` is refused with the same reason."""
    checkpoint = save_torchao(tmp_path, torch.float32)
    options = ModelOptions(dtype="float32", device="cpu")
    caplog.set_level("INFO", "paceline")
    load_model(checkpoint, options)
    reason = "int8 weights are compiled with dtype 'bfloat16', and dtype is 'float32'"
    assert any(record.getMessage().endswith(f"is not compiled: {reason}") for record in caplog.records)
    with pytest.raises(ConfigError, match=f"^compile is true, but {reason}: set compile to auto or false$"):
        load_model(checkpoint, options.model_copy(update={"compile": True}))


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", ["llama-tied", "llama-biased", "phi3"])
def test_blocks_of_a_file_run_as_they_are_stored(
    name: str, kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 where that is fast; in float32, and elsewhere, they are dequantized while they are read."""
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: True)
    checkpoint = Checkpoint.open(str(write_gguf(tmp_path / "m.gguf", name, random_model(MODELS[name][1]()), kind)))
    options = ModelOptions(dtype="bfloat16", device="cpu", compile=False)
    exact, kept = (load_model(checkpoint, options.model_copy(update={"dtype": d})) for d in ("float32", "bfloat16"))
    assert (exact.quantization, kept.quantization) == (None, "int8" if kind is Kind.Q8_0 else "int4")
    assert kept.size.num_parameters == exact.size.num_parameters
    models = [cast(Step, one.step).model for one in (exact, kept)]
    logits = [logits_of(model) for model in models]
    assert (
        float((logits[1] - logits[0]).norm() / logits[0].norm()) < 0.1
    )  # a wrong order of rows, or a wrong zero, makes it about 1
    layer = models[1].get_submodule("model.layers.0.self_attn.o_proj")
    stored = checkpoint.gguf.blocks("model.layers.0.self_attn.o_proj.weight")
    assert isinstance(layer, PackedLinear)
    assert torch.equal(layer.packed, pack_blocks(stored))
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    assert load_model(checkpoint, options).quantization is None


def test_what_a_file_does_not_hold_in_blocks_can_be_rounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Blocks of 256 are dequantized; ``quantization`` rounds those layers, and leaves the stored blocks alone. If it
    rounds nothing, a warning says so."""
    path = write_gguf(tmp_path / "m.gguf", "llama", random_model(MODELS["llama"][1]()), Kind.BF16)
    model = load_model(Checkpoint.open(str(path)), ModelOptions(dtype="bfloat16", device="cpu", compile=False))
    assert model.quantization is None
    options = ModelOptions(dtype="bfloat16", device="cpu", compile=False, quantization="int4")
    assert load_model(Checkpoint.open(str(path)), options).quantization == "int4 and int8"
    assert "rounds nothing" not in caplog.text
    path = write_gguf(tmp_path / "q.gguf", "llama", random_model(MODELS["llama"][1]()), Kind.Q8_0)
    assert load_model(Checkpoint.open(str(path)), options).quantization == "int8"
    assert "quantization is 'int4' and rounds nothing: the file stores all linear layers in blocks" in caplog.text


def test_quantization_without_a_compiler_or_on_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint("m", 64, (2,), 64)
    monkeypatch.setattr(quantized, "blocks_usable", lambda: False)
    with pytest.raises(ConfigError, match=r"^quantization is 'int4', whose products need a C.. compiler"):
        load_options(checkpoint, "int4", CPU, torch.bfloat16)
    for quantization in ("int8", "int4"):
        problem = rf"^quantization is '{quantization}', whose kernel for CUDA takes bfloat16 and float16"
        with pytest.raises(ConfigError, match=problem):
            load_options(checkpoint, quantization, torch.device("cuda"), torch.float32)


def test_a_model_without_linear_layers_is_refused(tmp_path: Path) -> None:
    """GPT-2 has transformers' own transposed layers; nothing of it would be int8."""
    random_model("gpt2").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"quantization is 'int8', and GPT2LMHeadModel .* has no linear layer"):
        load_model(Checkpoint.open(str(tmp_path)), ModelOptions(quantization="int8", device="cpu", compile=False))


def test_weights_of_other_formats_are_not_split(tmp_path: Path) -> None:
    """Ranks read slices of plain weights, and round those."""
    random_model("llama").save_pretrained(tmp_path)
    checkpoint = Checkpoint.ask_transformers(str(tmp_path))
    require_whole(checkpoint, 2)
    with pytest.raises(ConfigError, match=f"^tensor_parallel_size is 2 and model '{tmp_path}' is .* so set it to 1$"):
        require_whole(replace(checkpoint, quantization={"quant_method": "awq"}), 2)


def test_artifacts_are_told_apart_by_their_weights() -> None:
    """int8 of two models, and int8, int4 and bfloat16 of one."""
    models = [reloaded(torch.bfloat16, q, noise) for q in ("int8", "int4", None) for noise in (0.0, 0.05)]
    assert len({artifact_key(model, None) for model in models}) == 6


@pytest.mark.parametrize(
    ("model", "report", "said"),
    [
        ({}, InvarianceReport(384, 9, 1, 0.5), "it is NOT batch-invariant here: 9 of 384"),
        ({"batch_dependence": "columns are shared"}, InvarianceReport(384, 0, 0, 0.0), "columns are shared"),
    ],
    ids=["measured", "known"],
)
def test_a_target_that_verifies_otherwise_is_refused_with_a_draft(
    model: dict, report: InvarianceReport, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a draft; alone it may run."""
    folder = save_pair(tmp_path)
    monkeypatch.setattr(build, "load_model", lambda *given, **how: replace(load_model(*given, **how), **model))
    monkeypatch.setattr(build, "check_invariance", lambda *given: report)
    options = TargetOptions(dtype="float32", device="cpu", compile=False, quantization="int8")
    target = TargetSetup(str(folder / "target"), options, tree_budget=256)
    with pytest.raises(ConfigError) as caught:
        build.build_target_engine(target, lambda events: None)
    assert "is quantized by 'int8', and speculation could change its output, for " + said in str(caught.value)
    assert str(caught.value).endswith(
        "set draft_config to null and leave heads out for plain decoding, or use another checkpoint"
    )
    build.build_target_engine(replace(target, tree_budget=0), lambda events: None)
    unquantized = replace(target, options=options.model_copy(update={"quantization": None}))
    build.build_target_engine(unquantized, lambda events: None)


@pytest.mark.compiler
@pytest.mark.slow
def test_compiled_blocks_keep_their_bytes_and_their_text(own_cache: Path) -> None:
    """The artifact multiplies by blocks, those of one input at once, and all modes give the text of its own plain
    decoding."""
    target = prepare(reloaded(torch.bfloat16, "int4"), compile=True)
    (artifact,) = (own_cache / "compiled").glob("*.pt2")
    with zipfile.ZipFile(artifact) as package:
        source = "".join(package.read(n).decode() for n in package.namelist() if n.endswith("wrapper.cpp"))
    assert source.count("aoti_torch_cpu_packed_linear(") - 1 == 2 * 4 + 1  # one declares it
    assert "mkldnn" not in source
    report = check_invariance(target.runner(32))
    assert report.holds, report
    asked = requests()
    reference = plain_reference(target, asked)
    draft = loaded(torch.bfloat16, None, 0.05)
    for mode in (Mode.OVERLAPPED, Mode.SEQUENTIAL):
        assert_same(Pump(target, draft, late=0.1).run(in_mode(asked, mode)), reference)
