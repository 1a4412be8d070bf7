"""Quantized targets and drafts: speculation gives the text of the quantized target itself."""

from __future__ import annotations

import functools
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.support.models import noisy_copy, prompt, random_model, save_pair
from tests.support.pump import Pump, Request, assert_same, in_mode, plain_reference
from tests.support.rings import nightly, slow
from transformers import PreTrainedModel

from paceline.checkpoint.files import Checkpoint
from paceline.config import ModelOptions, TargetOptions, TargetSetup
from paceline.errors import ConfigError
from paceline.model.attention import native as cpu_attention
from paceline.model.compiled.aot import artifact_key
from paceline.model.loading import LoadedModel, load_model, load_pretrained, prepare
from paceline.model.quantized import require_whole
from paceline.model.runner import ModelRunner
from paceline.model.selftest import InvarianceReport, check_invariance
from paceline.target import build
from paceline.types import Mode, SamplingParams

torchao = pytest.importorskip("torchao")

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
    return {
        f"s{i}": Request(prompt(i, 5 + 30 * i), SamplingParams(temperature=(0.0, 0.8)[i % 2], seed=i, max_tokens=24))
        for i in range(4)
    }


def generated(model: PreTrainedModel, tokens: list[int], length: int) -> list[int]:
    """transformers' own greedy decoding, with its own attention and cache."""
    previous = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        out = model.generate(
            torch.tensor([tokens]), max_new_tokens=length, do_sample=False, pad_token_id=0, eos_token_id=None
        )
    finally:
        model.set_attn_implementation(previous)
    return out[0, len(tokens) :].tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_is_what_torchao_makes_of_the_weights(dtype: torch.dtype) -> None:
    """One scale for each output; embeddings, norms and the output layer as they were."""
    plain, int8 = reloaded(dtype, None), reloaded(dtype, "int8")
    for (name, weight), (_, rounded) in zip(plain.named_parameters(), int8.named_parameters(), strict=True):
        if "proj" not in name:
            assert torch.equal(weight, rounded)
            continue
        assert (rounded.qdata.dtype, rounded.scale.shape) == (torch.int8, (len(weight), 1))
        assert ((rounded.qdata * rounded.scale - weight).abs() <= rounded.scale * 0.51).all()
    model = prepare(int8, compile=False)
    assert (model.quantization, model.batch_dependence) == ("torchao", None)
    assert (model.num_parameters, model.dtype) == (prepare(plain, compile=False).num_parameters, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_verifying_gives_the_bits_of_decoding(dtype: torch.dtype) -> None:
    """What losslessness rests on."""
    report = check_invariance(loaded(dtype, "int8").runner(32))
    assert report.holds, report


@pytest.mark.parametrize(
    ("target", "draft", "dtype"),
    [
        ("int8", None, torch.float32),
        *slow([(None, "int8", torch.float32), ("int8", "int8", torch.bfloat16)]),
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
def test_greedy_equals_generate_of_the_same_quantized_model() -> None:
    """In float32, where two orders of one sum do not change the text; the model that is not quantized says else."""
    model = reloaded(torch.float32, "int8")
    want = {name: generated(model, list(r.prompt), 24) for name, r in requests().items()}
    greedy = {n: Request(r.prompt, SamplingParams(temperature=0.0, max_tokens=24)) for n, r in requests().items()}
    results = Pump(prepare(model, compile=False), loaded(torch.float32, None, 0.05)).run(greedy)
    assert {name: list(r.token_ids) for name, r in results.items()} == want
    other = reloaded(torch.float32, None)
    assert want != {name: generated(other, list(r.prompt), 24) for name, r in requests().items()}


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


@pytest.mark.slow
def test_a_checkpoint_of_torchao_loads_as_it_is(tmp_path: Path) -> None:
    """The same text as what was quantized at loading; to quantize it again is refused."""
    model = reloaded(torch.bfloat16, "int8")
    model.save_pretrained(tmp_path)
    again = load_model(Checkpoint.open(str(tmp_path)), ModelOptions(dtype="bfloat16", device="cpu", compile=False))
    assert again.quantization == "torchao"
    asked = requests()
    assert_same(plain_reference(again, asked), plain_reference(prepare(model, compile=False), asked))
    with pytest.raises(ConfigError, match="is quantized by 'torchao' already: set quantization to null"):
        load_model(Checkpoint.open(str(tmp_path)), ModelOptions(quantization="int8", device="cpu"))


def test_a_model_without_linear_layers_is_refused(tmp_path: Path) -> None:
    """GPT-2 has transformers' own transposed layers; nothing of it would be int8."""
    random_model("gpt2").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"quantization is 'int8', and GPT2LMHeadModel .* has no linear layer"):
        load_model(Checkpoint.open(str(tmp_path)), ModelOptions(quantization="int8", device="cpu", compile=False))


def test_only_bfloat16_is_compiled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """``auto`` runs eager and says why; ``true`` is refused with the same reason."""
    random_model("llama").save_pretrained(tmp_path)
    options = ModelOptions(dtype="float32", quantization="int8", device="cpu")
    caplog.set_level("INFO", "paceline")
    load_model(Checkpoint.open(str(tmp_path)), options)
    reason = "int8 weights are compiled with dtype 'bfloat16', and dtype is 'float32'"
    assert any(record.getMessage().endswith(f"is not compiled: {reason}") for record in caplog.records)
    with pytest.raises(ConfigError, match=f"^compile is true, but {reason}: set compile to auto or false$"):
        load_model(Checkpoint.open(str(tmp_path)), options.model_copy(update={"compile": True}))


def test_quantized_weights_are_not_split(tmp_path: Path) -> None:
    """Ranks read slices of plain weights."""
    random_model("llama").save_pretrained(tmp_path)
    checkpoint = Checkpoint.ask_transformers(str(tmp_path))
    require_whole(checkpoint, None, 2)
    with pytest.raises(ConfigError, match=r"^tensor_parallel_size is 2 and quantization is 'int8': .* so set it to 1$"):
        require_whole(checkpoint, "int8", 2)
    with pytest.raises(ConfigError, match=f"^tensor_parallel_size is 2 and model '{tmp_path}' is quantized"):
        require_whole(replace(checkpoint, quantization={"quant_method": "awq"}), None, 2)


def test_artifacts_are_told_apart_by_their_weights() -> None:
    """int8 of two models, and int8 and bfloat16 of one."""
    models = [reloaded(torch.bfloat16, q, noise) for q in ("int8", None) for noise in (0.0, 0.05)]
    assert len({artifact_key(model, None) for model in models}) == 4


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
    assert "is quantized by 'torchao', and speculation could change its output, for " + said in str(caught.value)
    assert str(caught.value).endswith(
        "set draft_config to null and leave heads out for plain decoding, or use another checkpoint"
    )
    build.build_target_engine(replace(target, tree_budget=0), lambda events: None)
    unquantized = replace(target, options=options.model_copy(update={"quantization": None}))
    build.build_target_engine(unquantized, lambda events: None)


@pytest.mark.compiler
@pytest.mark.nightly
def test_compiled_int8_keeps_its_bytes_and_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The artifact multiplies by int8, and all modes give the text of its own plain decoding."""
    cpu_attention.unavailable()  # from the cache that is kept
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    target = prepare(reloaded(torch.bfloat16, "int8"), compile=True)
    (artifact,) = (tmp_path / "compiled").glob("*.pt2")
    with zipfile.ZipFile(artifact) as package:
        source = "".join(package.read(n).decode() for n in package.namelist() if n.endswith("wrapper.cpp"))
    assert source.count("aoti_torch_cpu__weight_int8pack_mm(") == 2 * 7
    report = check_invariance(target.runner(32))
    assert report.holds, report
    asked = requests()
    reference = plain_reference(target, asked)
    draft = loaded(torch.bfloat16, None, 0.05)
    for mode in (Mode.OVERLAPPED, Mode.SEQUENTIAL):
        assert_same(Pump(target, draft, late=0.1).run(in_mode(asked, mode)), reference)
