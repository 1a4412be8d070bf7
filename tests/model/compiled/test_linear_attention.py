"""Compiled models with linear layers: verification has the bits of decoding, and a mistake in slots is noticed."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.model import test_linear
from tests.model.families import checkpoint
from tests.model.test_linear import chunk, differing
from tests.support.compilers import needs_attention
from tests.support.hybrids import FAMILIES, hybrid_config, hybrid_model, poison
from tests.support.models import prompt
from tests.support.rings import nightly, slow
from torch import Tensor

from paceline.errors import ConfigError
from paceline.model.compiled import package
from paceline.model.compiled.package import CompiledPackage
from paceline.model.features import OUT, Features
from paceline.model.linear import layers, native
from paceline.model.loading import prepare
from paceline.model.runner import ModelRunner
from paceline.model.selftest import check_invariance
from paceline.model.step import Step

FP32, BF16 = torch.float32, torch.bfloat16
_KINDS = ["linear_attention", "full_attention"]
_CONV = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
_KIMI = {"num_hidden_layers": 2, "layer_types": _KINDS, "mlp_layer_types": ["dense", "sparse"]}
_SIZES: dict[str, dict[str, Any]] = {
    "kimi_linear": _KIMI, "bailing_hybrid": _KIMI, "lfm2": _CONV, "lfm2_moe": _CONV,
    "bamba": {"num_hidden_layers": 2, "attn_layer_indices": [1]},
    "jamba": {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
    "falcon_h1": {}, "zamba2": {},
}  # fmt: skip
"""What a small model has that differs from the one with two layers of _KINDS."""


def compiled(family: str, dtype: torch.dtype) -> ModelRunner:
    """A runner of a compiled model with one layer of each kind, whose free slots hold NaN. Experts in float32 are an
    operator of transformers, which torch's loader alone can call."""
    sizes = _SIZES.get(family, {"num_hidden_layers": 2, "layer_types": _KINDS})
    model = checkpoint(hybrid_config(family, **sizes)).to(dtype)
    loaded = prepare(model, compile=True)
    has_experts = any("experts" in name for name, _ in model.named_modules())
    assert isinstance(loaded.step, CompiledPackage) or (dtype == FP32 and has_experts)
    assert not isinstance(loaded.step, Step), "it is eager"
    return poison(loaded.runner(60, max_sessions=16))


def logits_of(runner: ModelRunner, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Logits of a prompt that is computed in parts."""
    tokens, pages = prompt(3, 100, runner.vocab_size), runner.cache.allocate(2)
    rows = torch.cat([runner.forward([chunk(tokens, a, b, pages, b - a)]) for a, b in spans])
    runner.cache.release(pages)
    return rows


@needs_attention
@pytest.mark.usefixtures("compiled_steps")
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *slow([("qwen3_5_text", BF16), ("nemotron_h", BF16)]),
        *nightly([*((f, BF16) for f in FAMILIES), *((f, FP32) for f in ("qwen3_next", "kimi_linear", "jamba"))]),
    ],
)
def test_compiled_steps_have_the_bits_of_decoding(family, dtype, monkeypatch) -> None:
    """Trees and chunks around boundaries; rows of siblings are noticed; and one call of a plan is the run of its
    inputs."""
    runner = compiled(family, dtype)
    assert check_invariance(runner, max_len=200, max_step_tokens=64).holds
    monkeypatch.setattr(test_linear, "runner_of", lambda *_: runner)
    assert differing(family, dtype, (16, 47, 65)) == 0
    spans = [(0, 37), (37, 38), (38, 100)]
    by_plan = logits_of(runner, spans)
    with monkeypatch.context() as patch:
        patch.setattr(package, "load_library", lambda: None)
        assert torch.equal(logits_of(runner, spans), by_plan)
    test_linear._rows_of_siblings(monkeypatch)
    assert differing(family, dtype, (46, 63, 79)) > 0  # a short convolution reads few rows before


@needs_attention
@pytest.mark.nightly
@pytest.mark.usefixtures("compiled_steps")
def test_states_that_leave_the_graph_change_no_bit() -> None:
    """What MTP modules read: the compiled step is compared with the bare one, and refused if a bit differs."""
    features = Features((0, OUT), every_position=True)
    model = checkpoint(hybrid_config("qwen3_next", num_hidden_layers=2, layer_types=_KINDS)).to(BF16)
    runner = poison(prepare(model, compile=True, features=features).runner(20))
    report = check_invariance(runner, max_len=200, max_step_tokens=64)
    assert report.holds
    assert not report.num_states_different


def test_without_the_operator_compilation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    test_linear.by_torch(monkeypatch)
    with pytest.raises(ConfigError, match="compile is true, but it has gated delta layers, and they are not to run"):
        prepare(checkpoint(hybrid_config("qwen3_5_text")), compile=True)


@needs_attention
def test_float16_is_not_compiled() -> None:
    assert native.unavailable() is None
    with pytest.raises(ConfigError, match=r"in torch.float16, which are compiled in bfloat16 and float32 alone"):
        prepare(checkpoint(hybrid_config("qwen3_5_text")).to(torch.float16), compile=True)


def test_gpus_whose_kernels_cannot_be_built_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = hybrid_model("qwen3_5_text").named_modules
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda"), named_modules=modules)
    monkeypatch.setattr(layers, "triton_unavailable", lambda: "needs a C compiler")
    assert layers.why_not_on_cuda(on_gpu) == "needs a C compiler"
    monkeypatch.setattr(layers, "triton_unavailable", lambda: None)
    for capability, reason in (((7, 5), "needs compute capability 8.0"), ((9, 0), None)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, of=capability: of)
        assert layers.why_not_on_cuda(on_gpu) == reason
    assert layers.why_not_on_cuda(SimpleNamespace(device=torch.device("cpu"))) is None  # type: ignore[arg-type]
