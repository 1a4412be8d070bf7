"""Plain decoding, chains, subtrees, prefix hits and preemption give one text over a KV cache in FP8, on any kernel.

The reference is plain decoding with such a cache: keys and values are divided by the scales of their layer and rounded
once, and every reader sees them rounded.
"""

import functools
import itertools
from typing import Any

import pytest
import torch
from tests.drafters import test_early_exit
from tests.drafters.asked import difference
from tests.lossless.test_engines import mixed_batch
from tests.lossless.test_moved_pages import Asked, Engine, held_by, served
from tests.lossless.test_trees import any_subtrees
from tests.support.compilers import needs_attention
from tests.support.models import noisy_copy, random_model
from tests.support.mutants import Mutant, mutant
from tests.support.pump import Pump, Request, assert_same, plain_reference
from torch import Tensor

from paceline.checkpoint.kv_scales import KVScales
from paceline.model.attention import paged
from paceline.model.kv_cache import from_pages
from paceline.model.loading import LoadedModel, prepare
from paceline.types import Result

SCALES = {0: KVScales(0.013, 0.21), 1: KVScales(0.4, 0.0037)}
"""Of the first layers; later ones have scale 1."""


@functools.cache
def loaded(kernel: Any, kv_cache_dtype: Any = "fp8", noise: float = 0.0) -> LoadedModel:
    """A tiny llama, or one that drafts for it."""
    model = random_model("llama")
    model = noisy_copy(model, noise) if noise else model
    return prepare(model, compile=False, attention=kernel, kv_cache_dtype=kv_cache_dtype, kv_scales=SCALES)


@functools.cache
def reference(kernel: Any, temperature: float = 1.0) -> dict[str, Result]:
    return plain_reference(loaded(kernel), mixed_batch(temperature))


def run(kernel: Any, requests: dict[str, Request], monkeypatch: pytest.MonkeyPatch, draft_dtype: Any = "auto") -> Pump:
    """Few pages, subtrees of any size, prompts in chunks, shared prefixes."""
    any_subtrees(monkeypatch)
    target, draft = loaded(kernel), loaded(kernel, draft_dtype, 0.05)
    pump = Pump(target, draft, seed=4, pages=12, draft_pages=40, max_step_tokens=64)
    pump.run(requests)
    return pump


def require_plain_text(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares a few sessions with subtrees and the same ones decoded plainly, both as the kernel is now."""
    requests = dict(itertools.islice(mixed_batch(1.0, 12).items(), 6))
    assert_same(run(kernel, requests, monkeypatch).results, plain_reference(loaded(kernel), requests))


@pytest.mark.parametrize(
    ("kernel", "draft_dtype"), [("sdpa", "auto"), pytest.param("native", "fp8", marks=needs_attention)]
)
def test_any_subtrees_give_the_tokens_of_plain_decoding(kernel, draft_dtype, monkeypatch) -> None:
    """Of a draft whose cache is in the dtype of its own option."""
    pump = run(kernel, mixed_batch(1.0), monkeypatch, draft_dtype)
    assert_same(pump.results, reference(kernel))
    stats = pump.target.stats
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
    assert stats.branches > 10
    assert stats.nodes_used > 20
    assert pump.target.runner.cache.num_used == 0


def test_the_option_changes_the_text_of_the_model() -> None:
    exact = plain_reference(loaded("sdpa", "auto"), mixed_batch(1.0))
    different = [name for name, each in reference("sdpa").items() if each.token_ids != exact[name].token_ids]
    assert len(different) > len(exact) // 4


@mutant(paged, "to_fp8")
def another_scale_for_few_tokens(original: Any, rows: Tensor) -> Tensor:
    """Steps that decode round by another scale than those that verify or take a prompt."""
    return original(rows * 1.1 if len(rows) < 8 else rows)  # type: ignore[no-any-return]


@mutant(paged, "to_fp8")
def rounded_twice_in_long_steps(original: Any, rows: Tensor) -> Tensor:
    """By another scale first, as by a writer of its own."""
    first = paged.from_pages(original(rows * 0.7), rows.dtype) / 0.7
    return original(first if len(rows) > 8 else rows)  # type: ignore[no-any-return]


@mutant(paged, "divided")
def scales_of_the_step(original: Any, x: Tensor, scale: float) -> Tensor:
    """Measured anew in each step that takes a prompt."""
    return original(x, float(x.abs().max()) / 448 if x.shape[2] > 8 else scale)  # type: ignore[no-any-return]


def own_rows_are_read_as_they_were_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token attends to its own key and value, and to those of its step, before they are rounded."""
    written: list[tuple[Tensor, Tensor]] = []
    round_, read = paged.to_fp8, paged.from_pages

    def remember(rows: Tensor) -> Tensor:
        kept = round_(rows)
        written.append((kept, rows))
        return kept

    def unrounded(pages: Tensor, dtype: torch.dtype) -> Tensor:
        """The first reader has the keys, the second the values, which were written in this order."""
        wide = read(pages, dtype)
        kept, rows = written.pop(0)
        for own, exact in zip(kept, rows, strict=True):
            wide[(pages == own).flatten(2).all(-1)] = exact
        return wide

    monkeypatch.setattr(paged, "to_fp8", remember)
    monkeypatch.setattr(paged, "from_pages", unrounded)


def native_prompts_are_rounded_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The native writer takes prompts by another scale than what is decoded."""
    nearest = paged.round_to_fp8
    monkeypatch.setattr(paged, "round_to_fp8", lambda rows: nearest(rows * 0.97 if len(rows) > 8 else rows))


@pytest.mark.parametrize(
    ("kernel", "wrong"),
    [
        ("sdpa", None),
        ("sdpa", another_scale_for_few_tokens),
        ("sdpa", rounded_twice_in_long_steps),
        ("sdpa", scales_of_the_step),
        ("sdpa", own_rows_are_read_as_they_were_computed),
        pytest.param("native", native_prompts_are_rounded_otherwise, marks=needs_attention),
    ],
)
def test_a_mutant_changes_texts(kernel: Any, wrong: Mutant | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if wrong is None:
        require_plain_text(kernel, monkeypatch)
        return
    wrong(monkeypatch)
    with pytest.raises(AssertionError):
        require_plain_text(kernel, monkeypatch)


def test_an_early_exit_reads_the_pages_of_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own nodes are not rounded, so it says about what the first layers say. Mutant: without scales."""
    features = test_early_exit.EarlyExit.features
    target = prepare(
        test_early_exit.whole_model("llama"),
        compile=False,
        features=features,
        attention="sdpa",
        kv_cache_dtype="fp8",
        kv_scales=SCALES,
    )
    monkeypatch.setattr(test_early_exit, "target", lambda family: target)
    requests, said = test_early_exit.requests_of(1.0), functools.partial(test_early_exit.said_by, "llama")
    want = plain_reference(target, requests)
    pump, mounted, asked = test_early_exit.pump_of("llama")
    assert_same(pump.run(requests), want)
    assert mounted.stats.rows > 0
    assert difference(asked, said) < 1.0
    with monkeypatch.context() as patch:
        patch.setattr("paceline.drafters.heads.paged.from_pages", lambda pages, dtype, scale: from_pages(pages, dtype))
        pump, _, asked = test_early_exit.pump_of("llama")
        assert_same(pump.run(requests), want)
        assert difference(asked, said) > 2.0


def test_pages_move_between_targets_of_one_dtype_alone() -> None:
    """The identity of a page has the dtype and the bits of what it holds."""
    asked = Asked(200, 1)
    source, text = served(loaded("sdpa"), asked)
    assert held_by(source, Engine(loaded("sdpa")), asked, text) == 4
    assert held_by(source, Engine(loaded("sdpa", "auto")), asked, text) == 0
    other, text = served(loaded("sdpa", "auto"), asked)
    assert held_by(other, Engine(loaded("sdpa")), asked, text) == 0
