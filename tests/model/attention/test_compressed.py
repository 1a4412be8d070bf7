"""Layers that see entries of several tokens: transformers' logits, and the bits of decoding at ends of windows."""

import functools
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.model.attention.test_indexed import by_library
from tests.model.conformance import FP32_LIMIT, assert_follows, assert_invariant, assert_invariant_on_two_ranks
from tests.model.families import checkpoint, small_config
from tests.model.test_linear import chunk, differing_of
from tests.support.compressed import compressed, compressed_config, compressed_model, published_config
from tests.support.models import prompt
from tests.support.mutants import Mutant, mutant
from tests.support.rings import nightly, slow
from torch import Tensor

from paceline.checkpoint.compressed import HEAVY, SLIDING, SPARSE, compressed_values, compressors
from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.linear import require_draft_model, why_not_runnable
from paceline.checkpoint.size import size_of
from paceline.cli.drafting import choose
from paceline.config import ModelOptions
from paceline.drafters.heads.partial_model import layers_from, require_borrowable
from paceline.errors import ConfigError
from paceline.model.attention import compressed as operator
from paceline.model.attention import indexed
from paceline.model.kv_cache import KVCache
from paceline.model.loading import load_model, prepare
from paceline.model.parallel.plan import plan_shards
from paceline.model.runner import ModelRunner
from paceline.model.selftest import check_invariance
from paceline.model.step import Step
from paceline.preflight.estimate import compiles

FP32, BF16 = torch.float32, torch.bfloat16
CONTEXTS = (1, 3, 4, 5, 8, 9, 15, 17, 63, 64, 65, 127, 128, 129, 190)
"""Before, at and behind the ends of windows and pages."""
_SPANS = (0, 37, 38, 100, 125, 127, 128, 129, 255, 256, 257, 300)
"""Steps of a prompt of more than two windows of heavily compressed layers."""


@pytest.mark.parametrize("heavy", [128, *slow([16])])
def test_logits_and_greedy_tokens_are_those_of_transformers(heavy: int) -> None:
    """With prefill in chunks that end before, at and behind ends of windows, beyond top-k."""
    runner = compressed(heavy=heavy, num_heads=16).runner(8)
    assert_follows(runner, compressed_model(heavy), prompt(3, 300), _SPANS[1:-1], 10)


def test_sums_are_in_one_order() -> None:
    """Of any number of entries the same bits; near those of a library."""
    x = torch.randn(5, 24, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(operator.ordered_sum(x), x.sum(1))
    assert torch.equal(operator.ordered_sum(x[2:3]), operator.ordered_sum(x)[2:3])


@pytest.mark.parametrize(("dtype", "heavy"), [(FP32, 128), *slow([(BF16, 128), (BF16, 16)])])
def test_the_self_test_holds(dtype: torch.dtype, heavy: int) -> None:
    """With branches, across ends of windows."""
    assert_invariant(compressed(dtype, heavy).runner(24))


@pytest.mark.parametrize(
    ("dtype", "heavy", "contexts"),
    [
        (BF16, 128, (4, 127)),
        *slow([(FP32, 128, CONTEXTS[:8]), (BF16, 128, CONTEXTS[8:])]),
        *nightly([(dtype, heavy, CONTEXTS) for dtype in (FP32, BF16) for heavy in (16, 64, 128)]),
    ],
)
def test_any_tree_has_the_bits_of_decoding(dtype: torch.dtype, heavy: int, contexts: tuple[int, ...]) -> None:
    """Trees of up to 16 tokens after prefill in random chunks, with neighbors that pad the page tables."""
    assert differing_of(compressed(dtype, heavy).runner(60), contexts) == 0


def _compiled_changes() -> dict[str, Any]:
    """A sparse and a heavily compressed layer, and few iterations of what mixes streams: each adds to the graph."""
    return {
        "num_hidden_layers": 2, "layer_types": [SPARSE, HEAVY], "mlp_layer_types": ["hash_moe", "moe"],
        "compress_rates": {SPARSE: 4, HEAVY: 128}, "sliding_window": 16, "index_topk": 8, "index_n_heads": 2,
        "hc_sinkhorn_iters": 2,
    }  # fmt: skip


@functools.cache
def compiled_of(dtype: torch.dtype) -> ModelRunner:
    config = small_config("deepseek_v4", **_compiled_changes())
    return prepare(checkpoint(config).to(dtype), compile=True).runner(60)


@pytest.mark.parametrize("dtype", nightly([FP32, BF16]))
def test_any_tree_of_a_compiled_model_has_the_bits_of_decoding(dtype: torch.dtype) -> None:
    """At the ends of windows and pages; before top-k, and beyond it."""
    assert differing_of(compiled_of(dtype), CONTEXTS) == 0


@pytest.mark.parametrize("dtype", nightly([FP32]))
def test_a_compiled_model_has_the_logits_of_an_eager_one(dtype: torch.dtype) -> None:
    """Of a prompt in steps, over more than one window of 128."""
    tokens, rows = list(prompt(3, 300)), []
    compiled = compiled_of(dtype)
    model = checkpoint(small_config("deepseek_v4", **_compiled_changes()))
    for runner in (compiled, prepare(model.to(dtype), compile=False).runner(60)):
        pages = runner.cache.allocate(5)
        rows.append(torch.cat([runner.forward([chunk(tokens, a, b, pages, b - a)]) for a, b in pairwise(_SPANS)]))
    assert float((rows[0] - rows[1]).abs().max() / rows[1].abs().max()) <= FP32_LIMIT


@mutant(operator, "window_ends")
def _windows_of_the_step(ends: Any, step: Any, rate: int) -> Tensor:
    """Windows begin at the step's first token."""
    found: Tensor = ends(replace(step, positions=step.positions - step.positions[0]), rate)
    return found


@mutant(operator, "window_ends")
def _one_page_of_branches(ends: Any, step: Any, rate: int) -> Tensor:
    """The entry of a token that branches share is stored on the page of the first one."""
    found: Tensor = ends(step, rate)
    tokens = step.write_tokens[found]
    return found[~(tokens[:, None] == tokens).tril(-1).any(1)]


@mutant(operator, "store_entries")
def _entries_of_rejected_tokens(store: Any, pages: Tensor, entries: Any, rows: Tensor, made: Tensor) -> None:
    """An entry that is there stays, as if its window had been committed."""
    slot = rows % 64 // entries.rate if entries.slots > 1 else torch.zeros_like(rows)
    columns = slot[:, None] * entries.dim + torch.arange(entries.dim)
    there = pages.view(len(pages), -1)[(rows // 64)[:, None], columns]
    store(pages, entries, rows, torch.where(there != 0, there, made.to(there.dtype)))


@mutant(operator, "rows_before")
def _rows_of_the_first_branch(found: Any, step: Any, *given: Any) -> Tensor:
    """A branch's entries are made of the rows of the branch that it leaves."""
    one: Tensor = found(replace(step, scatter_index=torch.zeros_like(step.scatter_index)), *given)
    return one


@mutant(KVCache, "copy")
def _no_entries_for_branches(copy: Any, self: KVCache, pairs: Any) -> None:
    """A private page does not get the entries of the page that it is a copy of."""
    copy(self, pairs)
    for _, target in pairs:
        for keys in self.keys[4:]:
            keys[target] = 0


@mutant(indexed, "highest")
def _choice_of_a_library(highest: Any, scores: Tensor, top_k: int) -> Tensor:
    return by_library(scores, top_k)


@pytest.mark.parametrize(
    "change",
    [
        _windows_of_the_step,
        _one_page_of_branches,
        _entries_of_rejected_tokens,
        _rows_of_the_first_branch,
        _no_entries_for_branches,
    ],
)
def test_mutants_are_noticed(change: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """In trees with a branch that ends a window itself, tokens that end one and are rejected, and shared ones."""
    change(monkeypatch)
    runner = compressed(heavy=16).runner(60)
    assert any(differing_of(runner, contexts) for contexts in ((60,), (59, 61)))


def test_a_mutant_that_chooses_among_equals_as_a_library_does_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    _choice_of_a_library(monkeypatch)
    assert not check_invariance(compressed().runner(24), max_len=300, max_step_tokens=128).holds


@pytest.mark.parametrize("heavy", slow([128]))
def test_the_self_test_holds_on_two_ranks(heavy: int, tmp_path: Path) -> None:
    """Each keeps all entries."""
    assert_invariant_on_two_ranks(compressed_model(heavy), tmp_path)


def test_published_and_saved_configurations_keep_the_same() -> None:
    """DeepSeek-V4-Flash names its layers by the tokens of an entry; the last of the list is an MTP module's."""
    published = {"model_type": "deepseek_v4", "num_hidden_layers": 3, "compress_ratios": [0, 4, 128, 0]}
    saved = {"model_type": "deepseek_v4", "num_hidden_layers": 3, "layer_types": [SLIDING, SPARSE, HEAVY]}
    assert compressors(published) == compressors(saved)
    usual = compressors({"model_type": "deepseek_v4", "num_hidden_layers": 4})
    assert [each.rate for each in usual] == [128, 128, 128, 4, 4]
    assert compressed_values(saved) == 4 * 512 + 128 + 4 * 128 + 32 + 2 * 512 + 8
    assert compressed_values({"model_type": "llama", "num_hidden_layers": 3}) is None


def test_what_the_model_keeps_is_known_by_its_configuration() -> None:
    for heavy in (16, 128):
        config = compressed_config(heavy)
        assert size_of(config.to_dict(), 0, 2).kv_values == compressed(heavy=heavy).size.kv_values


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_ranks_hold_what_is_estimated(degree: int) -> None:
    """All of attention, compressors and streams, and a share of experts and tables: 40 of V4-Flash's 284 thousand
    million numbers on each of eight."""
    config = published_config()
    total = sum(tensor.numel() for tensor in checkpoint(config).parameters())
    held = sum(math.prod(shard.local_shape) for shard in plan_shards(config, 0, degree).parameters.values())
    assert size_of(config.to_dict(), total, 2).of_rank(degree).num_parameters == pytest.approx(held, rel=0.01)


def test_weights_that_are_not_compiled_are_counted_once() -> None:
    """A library of compiled steps would hold them a second time."""
    size = size_of(compressed_config().to_dict(), 1000, 2)
    assert not compiles(ModelOptions(), size, False)
    assert compiles(ModelOptions(compile=True), size, False)
    assert compiles(ModelOptions(), replace(size, index_values=0), False)


def test_windows_that_do_not_end_with_pages_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"compress_rates 24 of heavily_\w+ layers: a divisor or a multiple of 64"):
        prepare(checkpoint(compressed_config(24)), compile=False)


def test_what_does_not_run_with_compressed_layers_is_refused() -> None:
    config = compressed_config().to_dict()
    usual: dict[str, Any] = {"device": "cpu", "quantization": None}
    assert why_not_runnable(config, None, **usual) is None
    assert why_not_runnable(config, {"quant_method": "fp8", "weight_block_size": [128, 128]}, **usual) is None
    for stored, changes, key, reason in (
        (None, {"device": "cuda"}, "device", "'cpu' is allowed"),
        (None, {"quantization": "int8"}, "quantization", "null is allowed"),
        (None, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype", "'auto' is allowed"),
        ({"quant_method": "torchao"}, {}, "model", "by 'torchao' and the model has compressed attention layers"),
    ):
        found = why_not_runnable(config, stored, **usual | changes)
        assert found is not None
        assert found[0] == key
        assert reason in found[1]
    with pytest.raises(ConfigError, match="which has compressed attention layers, and these run in a target alone"):
        require_draft_model(config, "draft.model", "a model")


def test_auto_is_eager_and_its_layers_are_refused_as_heads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """These would attend to the keys of a window alone."""
    compressed_model().save_pretrained(tmp_path)
    found, options = Checkpoint.open(str(tmp_path)), ModelOptions(device="cpu", dtype="float32")
    with caplog.at_level("INFO", "paceline.model.loading"):
        assert isinstance(load_model(found, options).step, Step)
    assert "is not compiled: layers with compressors take about a minute each to compile" in caplog.text
    with pytest.raises(ConfigError, match="layers of deepseek_v4 choose keys by indexers, which heads do not run"):
        require_borrowable("method", found, lambda family: layers_from(1, family), [1])
    assert "MTP" not in choose(str(tmp_path)).line
