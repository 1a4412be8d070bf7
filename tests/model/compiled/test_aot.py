"""Compiled steps: the tokens of eager, built once per weights."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.support.compilers import needs_attention
from tests.support.models import FAMILIES, noisy_copy, prompt, random_model
from tests.support.pump import Pump, Request, in_mode, plain_reference, requests_for
from tests.support.rings import nightly, slow
from transformers import LlamaConfig, PreTrainedModel

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.kv_scales import KVScales
from paceline.config import ModelOptions
from paceline.model.compiled import aot as compile_module
from paceline.model.compiled import package
from paceline.model.compiled.aot import NoCompilerError, artifact_key
from paceline.model.compiled.package import CompiledPackage
from paceline.model.features import OUT, Features
from paceline.model.kv_cache import FP8, LayerSpec
from paceline.model.loading import LoadedModel, load_model, prepare
from paceline.model.selftest import check_invariance
from paceline.model.shapes import MIN_TOKENS
from paceline.model.step import Step
from paceline.model.step_plan import SequenceStep, StepPlan
from paceline.types import Mode


def smallest() -> PreTrainedModel:
    return random_model(
        LlamaConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            intermediate_size=32, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip


STATES = [Features((0, 1), True), Features((1, 0), True), Features((0, 1), False), Features((0, OUT), True)]


def requests(vocab_size: int) -> dict[str, Request]:
    return requests_for([prompt(i, 3 + 40 * i, vocab_size) for i in range(4)], temperature=[0, 1], max_tokens=16)


def same_tokens(compiled: LoadedModel, eager: LoadedModel) -> None:
    asked = requests(eager.vocab_size)
    want = {n: r.token_ids for n, r in plain_reference(eager, asked).items()}
    for mode in Mode:
        results = Pump(compiled, compiled).run(in_mode(asked, mode))
        assert {n: r.token_ids for n, r in results.items()} == want


@pytest.mark.compiler
@pytest.mark.slow
def test_compiled_tokens_equal_eager_ones_and_the_artifact_is_used_again(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All modes through the engines; the second time nothing is compiled; other weights are another artifact."""
    first = prepare(smallest(), compile=True)
    same_tokens(first, prepare(smallest(), compile=False))
    artifacts = list((own_cache / "compiled").glob("*.pt2"))
    assert len(artifacts) == 1
    report = check_invariance(first.runner(8))
    assert report.holds == ("NOT batch-invariant" not in str(report))

    def unexpected(*args: object) -> None:
        raise AssertionError("compiled a second time")

    monkeypatch.setattr(compile_module, "compile_step", unexpected)
    same_tokens(prepare(smallest(), compile=True), prepare(smallest(), compile=False))
    with pytest.raises(AssertionError, match="a second time"):
        prepare(noisy_copy(smallest(), 0.01), compile=True)
    assert list((own_cache / "compiled").glob("*.pt2")) == artifacts


FP8_LAYER = LayerSpec(1, 8, 8, is_fp8=True)


def test_the_key_tells_everything_apart_that_shapes_the_artifact() -> None:
    """Weights, dtype, window, kernel, configuration and states; equal models have equal keys."""
    base = artifact_key(smallest(), None)
    assert artifact_key(smallest(), None) == base
    changed = smallest()
    with torch.no_grad():
        next(changed.parameters())[0, 0] += 1e-3
    renormed = smallest()
    renormed.config.rms_norm_eps = 1e-3
    others = {
        artifact_key(changed, None),
        artifact_key(smallest().to(torch.bfloat16), None),
        artifact_key(smallest(), 128),
        artifact_key(smallest(), None, "native"),
        artifact_key(smallest(), None, layers=[FP8_LAYER]),
        artifact_key(smallest(), None, layers=[replace(FP8_LAYER, scales=KVScales(0.5, 1.0))]),
        artifact_key(renormed, None),
        *(artifact_key(smallest(), None, features=features) for features in STATES),
    }
    assert len(others | {base}) == 8 + len(STATES)


CASES = [(f, dtype) for f in FAMILIES if f != "qwen3_moe" for dtype in (torch.float32, torch.bfloat16)]
IN_CI = [("llama", torch.bfloat16)]


@pytest.mark.compiler
@pytest.mark.usefixtures("compiled_steps")
@pytest.mark.parametrize(("family", "dtype"), [*slow(IN_CI), *nightly(case for case in CASES if case not in IN_CI)])
def test_compiled_families(family: str, dtype: torch.dtype) -> None:
    """fp32: eager's tokens. bf16 (which rounds differently when fused): the same in every mode, if invariant."""
    compiled = prepare(random_model(family, dtype=dtype), compile=True)
    if dtype is torch.float32:  # whose products are a library's
        assert compiled.runner(8).shapes.least_tokens == MIN_TOKENS
        same_tokens(compiled, prepare(random_model(family), compile=False))
        return
    report = check_invariance(compiled.runner(8))
    if report.holds:
        same_tokens(compiled, compiled)
    else:
        assert "NOT batch-invariant" in str(report)


@needs_attention
@pytest.mark.slow
@pytest.mark.usefixtures("compiled_steps")
def test_a_compiled_step_rounds_keys_and_values_once() -> None:
    """By the native operators, without the interpreter, with the tokens of plain decoding in every mode."""
    compiled = prepare(smallest().to(torch.bfloat16), compile=True, kv_cache_dtype="fp8")
    runner = compiled.runner(8)
    assert {pool.dtype for pool in runner.cache.pools} == {FP8}
    assert isinstance(compiled.step, CompiledPackage)
    assert check_invariance(runner).holds
    same_tokens(compiled, compiled)


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.usefixtures("compiled_steps")
def test_a_compiled_step_leaves_other_threads_their_turn() -> None:
    """Nobody is made to hand the lock over here, so the other thread runs only while a step does without it."""
    model = prepare(smallest(), compile=True)
    runner = model.runner(4)
    pages = runner.cache.allocate(1)
    step, turns, done = SequenceStep([1], [0], [0], pages, num_logits=1), 0, threading.Event()

    def count() -> None:
        nonlocal turns
        while not done.is_set():
            turns += 1
            time.sleep(0)  # hands the lock over itself

    runner.forward([step])
    before, thread = sys.getswitchinterval(), threading.Thread(target=count)
    inputs = StepPlan.of([step], runner.cache.scratch_row).inputs(runner.cache, model.dtype, None)
    try:
        sys.setswitchinterval(1000.0)
        thread.start()
        run, turns = model.step, 0
        assert isinstance(run, CompiledPackage)
        end = time.monotonic() + 30  # a step is short, and the other thread waits for a core as well
        while not turns and time.monotonic() < end:
            run(*inputs)
        seen = turns
    finally:
        sys.setswitchinterval(before)
        done.set()
        thread.join()
    assert seen > 0


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.usefixtures("compiled_steps")
def test_a_package_that_needs_more_than_its_library_is_left_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so, and gives the same logits."""
    model = prepare(smallest(), compile=True)
    monkeypatch.setattr(package, "NEEDS_EXECUTOR", b"")
    by_torch = prepare(smallest(), compile=True)
    assert "hold up other threads" in caplog.text
    logits = []
    for one in (model, by_torch):
        runner = one.runner(4)
        step = SequenceStep([1, 2], [0, 1], [0, 1], runner.cache.allocate(1), num_logits=2)
        logits.append(runner.forward([step]))
    assert torch.equal(*logits)


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.usefixtures("compiled_steps")
def test_one_call_of_a_plan_is_the_run_of_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: chains and trees, two masks, spare tokens; and it holds no tensor once the package is gone."""
    model = prepare(random_model("gemma3"), compile=True)
    runner = model.runner(8)
    step, cache, window = model.step, runner.cache, model.sliding_window
    assert isinstance(step, CompiledPackage)
    assert window is not None
    long, short = cache.allocate(2), cache.allocate(1)
    seen = torch.rand(80, generator=torch.Generator().manual_seed(1)) < 0.5
    seen[70:72] = False
    plans = [
        runner.plan([SequenceStep(prompt(1, 70, model.vocab_size), range(70), range(70), long, num_logits=3)]),
        runner.plan(
            [
                SequenceStep([4, 5], [60, 61], [70, 71], long, 2, seen, torch.arange(80).flip(0), [[70], [71]]),
                SequenceStep([6], [0], [0], short, num_logits=1),
            ]
        ),
    ]
    for plan in plans:
        for pool in (*cache.keys, *cache.values):
            pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(2)))
        before = [pool.clone() for pool in (*cache.keys, *cache.values)]
        expected = step(*plan.inputs(cache, model.dtype, window))
        after = [pool.clone() for pool in (*cache.keys, *cache.values)]
        for pool, old in zip((*cache.keys, *cache.values), before, strict=True):
            pool.copy_(old)
        assert torch.equal(step.run_plan(plan, cache, model.dtype, window), expected)
        assert all(map(torch.equal, (*cache.keys, *cache.values), after))
        assert not torch.equal(step.run_plan(plan, cache, model.dtype, 1), expected), "the window was not seen"
    by_hand = runner.run_plan(plans[0])[0]
    monkeypatch.setattr(package, "load_library", lambda: None)
    assert torch.equal(runner.run_plan(plans[0])[0], by_hand)
    held = weakref.ref(cache.keys[0])
    del model, runner, step, cache, pool, before, after, plan, expected
    gc.collect()
    assert held() is None, "a handle of the cache was not given back"


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.usefixtures("compiled_steps")
def test_compiled_states_are_those_of_eager_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """By our loader and by torch's, which return two tensors then; the self-test compares their bits."""
    features = Features((0, 1, OUT), every_position=True)
    model = prepare(smallest(), compile=True, features=features)
    assert isinstance(model.step, CompiledPackage)
    monkeypatch.setattr(package, "NEEDS_EXECUTOR", b"")
    found = []
    for one in (model, *(prepare(smallest(), compile=compile, features=features) for compile in (True, False))):
        runner = one.runner(6)
        steps = [
            SequenceStep([1, 2, 3], range(3), range(3), runner.cache.allocate(1), num_logits=1),
            SequenceStep([4, 5], range(2), range(2), runner.cache.allocate(1), num_logits=0),
        ]
        found.append(runner.forward_with_states(steps))
        assert torch.equal(runner.forward(steps), found[-1][0])
    (logits, states), by_torch, (eager_logits, eager_states) = found
    assert states.shape == (5, 3 * 32)
    assert torch.equal(logits, by_torch[0])
    assert torch.equal(states, by_torch[1])
    torch.testing.assert_close(logits, eager_logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states, eager_states, rtol=1e-5, atol=1e-5)
    report = check_invariance(model.runner(8))
    assert report.num_states_different <= report.num_different, str(report)


@pytest.mark.usefixtures("own_cache")
def test_without_a_compiler_a_model_runs_eagerly_unless_it_must_be_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in the image. What has been compiled before needs none."""
    smallest().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").unlink(missing_ok=True)
    monkeypatch.setattr(compile_module, "find_compiler", lambda: None)
    path, options = str(tmp_path / "model"), ModelOptions(dtype="float32", device="cpu")
    loaded = load_model(Checkpoint.open(path), options)
    assert isinstance(loaded.step, Step)
    assert "there is no C++ compiler" in caplog.text
    with pytest.raises(NoCompilerError, match="set compile to auto or false"):
        load_model(Checkpoint.open(path), options.model_copy(update={"compile": True}))


@pytest.mark.compiler
def test_the_compiler_is_the_one_that_torch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compile_module.find_compiler() is not None
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("no-such-compiler",))
    assert compile_module.find_compiler() is None
