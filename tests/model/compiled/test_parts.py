"""Parts of a model that are compiled for GPUs, on the CPU, which torch compiles by the same rules."""

import itertools
import os

import pytest
import torch
from tests.support.models import prompt, random_model

from paceline.config.environment import CUBLAS_ENVIRONMENT, apply_cublas_environment
from paceline.errors import ConfigError
from paceline.model import loading
from paceline.model.compiled.graphs import WaitingRefused
from paceline.model.compiled.parts import compile_parts
from paceline.model.loading import prepare
from paceline.model.runner import ModelRunner
from paceline.model.selftest import check_invariance
from paceline.model.step_plan import SequenceStep


def logits(runner: ModelRunner) -> torch.Tensor:
    """Of a text in chunks of 1 to 70 tokens."""
    pages, tokens = runner.cache.allocate(2), prompt(3, 100)
    stops = (0, 70, 71, 80, 83, 84)
    with torch.no_grad():
        parts = [
            runner.forward([SequenceStep(tokens[start:stop], (span := range(start, stop)), span, pages, stop - start)])
            for start, stop in itertools.pairwise(stops)
        ]
    runner.cache.release(pages)
    return torch.cat(parts)


@pytest.mark.compiler
@pytest.mark.slow
def test_parts_compute_what_they_did_in_one_variant_for_any_number_of_tokens(monkeypatch, tmp_path) -> None:
    """Two norms of unlike rank, the MLP and the rotary embedding are each compiled once; a model of the same classes
    beside it stays as it is, and what runs under a dispatch mode runs uncompiled."""
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, other = (random_model("qwen3", dtype=torch.bfloat16) for _ in range(2))
    runner, beside = (prepare(each, compile=False, attention="sdpa").runner(20) for each in (model, other))
    before = logits(runner)
    counters.clear()
    # Of each layer two norms, those of queries and keys, an MLP and a rotary embedding; and the last norm.
    assert compile_parts(model) == 6 * len(model.model.layers) + 1
    after = logits(runner)
    assert 0 < (after - before).abs().max() < 0.05 * before.abs().max()
    assert check_invariance(runner).holds
    with WaitingRefused():
        uncompiled = logits(runner)
    assert torch.equal(uncompiled, before)
    assert torch.equal(logits(runner), after)
    assert torch.equal(logits(beside), before)
    assert counters["stats"]["unique_graphs"] == 4


def test_what_has_products_of_its_own_is_no_part() -> None:
    """A layer of experts is no MLP, nor are modules of other names."""
    assert compile_parts(random_model("gpt2")) == 0
    model = random_model("qwen3_moe")
    assert compile_parts(model) == 5 * len(model.model.layers) + 1


def test_memory_of_products_is_set_where_the_user_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "4096")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    apply_cublas_environment()
    assert {name: os.environ[name] for name in CUBLAS_ENVIRONMENT} == {
        "CUBLASLT_WORKSPACE_SIZE": "4096",
        "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    }


def test_a_gpu_that_nothing_can_be_compiled_for_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """``meta`` stands for a device that is no CPU."""
    monkeypatch.setattr(loading, "triton_unavailable", lambda: "needs a C compiler")
    model = random_model("llama").to("meta")
    with pytest.raises(ConfigError, match=r"^compile is true, but triton needs a C compiler: set compile to auto or"):
        prepare(model, compile=True)
    monkeypatch.setattr(loading, "triton_unavailable", lambda: None)
    compiled = prepare(model, compile=True).step.model
    assert "forward" in vars(compiled.model.norm)
    assert "forward" not in vars(prepare(random_model("llama"), compile=False).step.model.model.norm)
