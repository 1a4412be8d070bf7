"""Layers that choose keys by an indexer: transformers' choice, and the bits of decoding below, at and above top-k."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.model.conformance import assert_follows, assert_invariant, assert_invariant_on_two_ranks
from tests.model.test_linear import chunk, differing_of
from tests.support.compilers import needs_attention
from tests.support.indexed import FAMILIES, TOP_K, indexed, indexed_config, indexed_model
from tests.support.models import prompt
from tests.support.rings import nightly, slow
from torch import Tensor

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.indexed import num_indexers
from paceline.checkpoint.linear import why_not_runnable
from paceline.cli.drafting import choose
from paceline.config import ModelOptions
from paceline.drafters.heads.load import open_head
from paceline.drafters.heads.partial_model import layers_from, require_borrowable
from paceline.errors import ConfigError
from paceline.model.attention import indexed as operator
from paceline.model.attention import native
from paceline.model.kv_cache import KVCache, LayerSpec
from paceline.model.loading import load_model
from paceline.model.selftest import check_invariance
from paceline.model.step import Step
from paceline.types import PAGE_SIZE

FP32, BF16 = torch.float32, torch.bfloat16
CONTEXTS = (1, TOP_K - 3, TOP_K, TOP_K + 1, 63, 64, 65, 130)
"""Below, at and above the number of keys that are chosen, and around the ends of pages."""


@pytest.mark.parametrize("family", ["deepseek_v32", *slow(FAMILIES[1:])])
def test_logits_and_greedy_tokens_are_those_of_transformers(family: str) -> None:
    """Beyond top-k, with prefill in chunks; of 16 heads, as no scores are equal then."""
    runner = indexed(family, num_heads=16).runner(8)
    assert_follows(runner, indexed_model(family, 16), prompt(3, 100), (37, 38), 20)


def test_scores_are_sums_in_one_order() -> None:
    """Of any part of queries and keys the same bits; near those of a matrix product."""
    generator = torch.Generator().manual_seed(0)
    queries, keys, weights = (
        torch.randn(*size, generator=generator) for size in ((2, 7, 3, 24), (2, 130, 24), (2, 7, 3))
    )
    scores = operator.index_scores(queries, keys, weights)
    expected = (weights[..., None] * torch.einsum("bnhd,bsd->bnhs", queries, keys).relu()).sum(2)
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
    part = operator.index_scores(queries[1:, 2:3], keys[1:, :17], weights[1:, 2:3])
    assert torch.equal(part, scores[1:, 2:3, :17])


def test_a_choice_in_parts_is_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded: a long prompt is scored a few queries at a time."""
    runner, tokens = indexed().runner(4), list(prompt(1, 150))
    rows = []
    for limit in (2**22, 1):
        monkeypatch.setattr(operator, "MAX_PRODUCTS", limit)
        pages = runner.cache.allocate(3)
        rows.append(runner.forward([chunk(tokens, 0, 150, pages, 150)]))
        runner.cache.release(pages)
    assert torch.equal(*rows)


@needs_attention
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_native_scores_have_the_bits_of_the_reference(dtype: torch.dtype) -> None:
    """Of any step; keys that nobody sees count for nothing."""
    generator = torch.Generator().manual_seed(0)
    for heads, dim, num_rows, row_len in ((3, 24, 2, 7), (1, 128, 1, 1), (16, 40, 3, 2)):
        queries = torch.randn(20, heads, dim, generator=generator).to(dtype)
        pages = torch.randn(9, PAGE_SIZE, dim, generator=generator).to(dtype)
        weights = torch.randn(20, heads, generator=generator)
        table = torch.randint(9, (num_rows, 4), generator=generator)
        gather = torch.randint(20, (num_rows, row_len), generator=generator)
        seen = torch.rand(num_rows, row_len, 4 * PAGE_SIZE, generator=generator) < 0.5
        seen[:, 0, PAGE_SIZE : 2 * PAGE_SIZE] = False
        given = queries, pages, weights, table, gather, seen
        assert torch.equal(native.score_index(*given), operator.score_index(*given))


def test_of_equal_scores_the_first_are_chosen() -> None:
    """Whatever lies behind them: hidden keys of a longer table, and fewer keys than top-k."""
    hidden = -torch.inf
    scores = torch.tensor([0.0, 2.0, 0.0, 1.0, 0.0, 0.0, hidden, hidden])
    assert operator.highest(scores[None], 4).tolist() == [[True, True, True, True, *[False] * 4]]
    assert operator.highest(scores[None, :6], 4).tolist() == [[True, True, True, True, False, False]]
    assert operator.highest(scores[None], 7)[0, :6].all()


@pytest.mark.parametrize(
    ("family", "dtype"), [("deepseek_v32", FP32), *slow([(family, BF16) for family in FAMILIES])], ids=str
)
def test_the_self_test_holds(family: str, dtype: torch.dtype) -> None:
    """With branches, across top-k."""
    assert_invariant(indexed(family, dtype).runner(24))


@pytest.mark.parametrize(
    ("family", "dtype", "contexts"),
    [
        ("deepseek_v32", FP32, (TOP_K - 3, TOP_K, 63)),
        *slow([("deepseek_v32", BF16, CONTEXTS), ("glm_moe_dsa", FP32, CONTEXTS)]),
        *nightly([(family, dtype, CONTEXTS) for family in FAMILIES for dtype in (FP32, BF16)]),
    ],
)
def test_any_tree_has_the_bits_of_decoding(family: str, dtype: torch.dtype, contexts: tuple[int, ...]) -> None:
    """Trees of up to 16 tokens after prefill in random chunks, with neighbors that pad the page tables."""
    assert differing_of(indexed(family, dtype).runner(60), contexts) == 0


def test_a_neighbor_of_many_pages_changes_nothing() -> None:
    """Tables are padded to its length."""
    runner, tokens = indexed().runner(24), list(prompt(1, 900))
    own, others = runner.cache.allocate(2), runner.cache.allocate(15)
    runner.forward([chunk(tokens, 0, 70, own)])
    alone = runner.forward([chunk(tokens, 70, 71, own, 1)])
    runner.forward([chunk(tokens[::-1], 0, 899, others)])
    together = runner.forward([chunk(tokens[::-1], 899, 900, others, 1), chunk(tokens, 70, 71, own, 1)])
    assert torch.equal(together[1:], alone)


@pytest.mark.parametrize("family", slow(["glm_moe_dsa"]))
def test_the_self_test_holds_on_two_ranks(family: str, tmp_path: Path) -> None:
    """Each keeps all index keys, and chooses alike."""
    assert_invariant_on_two_ranks(indexed_model(family), tmp_path)


def by_library(scores: Tensor, top_k: int) -> Tensor:
    """``highest``, as a library resolves equal scores."""
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(top_k, -1).indices, True)


def test_a_mutant_that_chooses_among_equals_as_a_library_does_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "highest", by_library)
    assert not check_invariance(indexed().runner(24), max_len=300, max_step_tokens=128).holds


def test_a_mutant_that_copies_no_index_keys_to_branches_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = KVCache.copy

    def wrong(self: KVCache, pairs: list[tuple[int, int]]) -> None:
        kept = [keys.clone() for keys in self.keys[2:]]
        copy(self, pairs)
        for keys, before in zip(self.keys[2:], kept, strict=True):
            keys.copy_(before)

    monkeypatch.setattr(KVCache, "copy", wrong)
    assert differing_of(indexed().runner(60), (63, 65, 100)) > 0


def test_a_mutant_that_reads_index_keys_of_another_session_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = operator.IndexedStep.choose

    def wrong(self: operator.IndexedStep, *given: object) -> Tensor:
        pages = self.page_table.roll(1, 0)
        other = operator.IndexedStep(
            self.pools, self.write_rows, self.write_tokens, pages, self.gather_index, self.mask
        )
        return choose(other, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(operator.IndexedStep, "choose", wrong)
    assert differing_of(indexed().runner(60), (63, 65)) > 0


def test_its_layers_and_mtp_modules_are_refused_as_heads(tmp_path: Path) -> None:
    """These would attend to all keys, or have index keys of their own."""
    indexed_model("deepseek_v32").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file) | {"model.layers.2.eh_proj.weight": torch.zeros(64, 128)}
    save_file(weights, file, metadata={"format": "pt"})
    checkpoint, message = Checkpoint.open(str(tmp_path)), "layers of deepseek_v32 choose keys by indexers, which heads"
    with pytest.raises(ConfigError, match=message):
        open_head("mtp", None, checkpoint)
    with pytest.raises(ConfigError, match=message):
        require_borrowable("method", checkpoint, lambda family: layers_from(1, family), [1])
    assert "MTP" not in choose(str(tmp_path)).line


@pytest.mark.parametrize("family", FAMILIES)
def test_index_keys_are_counted(family: str, tmp_path: Path) -> None:
    """By the configuration alone as by the tensors that there are; ranks keep all of them."""
    loaded, config = indexed(family), indexed_config(family)
    pools = loaded.layers[config.num_hidden_layers :]
    assert pools == [LayerSpec(1, 24, 0)] * num_indexers(config.to_dict())
    assert loaded.size.num_layers == config.num_hidden_layers
    indexed_model(family).save_pretrained(tmp_path)
    size = Checkpoint.open(str(tmp_path)).size("float32")
    assert size is not None
    assert size.index_values == 24 * len(pools)
    cache = KVCache(loaded.layers, 2, FP32, "cpu")
    assert size.kv_bytes(2) == sum(pool.nbytes for pool in (*cache.keys, *cache.values))
    rank = size.of_rank(2)
    assert rank.kv_values == size.kv_values


def test_layers_that_share_a_choice_are_counted_by_any_of_their_settings() -> None:
    """As transformers reads them."""
    glm = {"model_type": "glm_moe_dsa", "num_hidden_layers": 12}
    assert num_indexers(glm) == 12
    assert num_indexers(glm | {"index_topk_freq": 4}) == 4
    assert num_indexers(glm | {"index_topk_pattern": "FFSSSFSSSFSS"}) == 4
    assert num_indexers({"model_type": "hy_v4", "num_hidden_layers": 34}) == 10
    assert num_indexers({"model_type": "qwen4_exp_text", "num_hidden_layers": 4}) == 0


def test_what_does_not_run_with_indexers_is_refused_and_auto_is_eager(tmp_path, caplog) -> None:
    """``paceline check`` asks ``why_not_runnable``."""
    indexed_model("deepseek_v32").save_pretrained(tmp_path)
    checkpoint, options = Checkpoint.open(str(tmp_path)), ModelOptions(device="cpu", dtype="float32")
    with caplog.at_level("INFO", "paceline.model.loading"):
        assert isinstance(load_model(checkpoint, options).step, Step)
    assert "is not compiled: layers with indexers are not compiled" in caplog.text
    with pytest.raises(ConfigError, match="compile is true, but layers with indexers are not compiled: set compile to"):
        load_model(checkpoint, options.model_copy(update={"compile": True}))
    with pytest.raises(ConfigError, match="quantization is 'int8' and the model has indexed attention layers, which"):
        load_model(checkpoint, options.model_copy(update={"quantization": "int8"}))
    plain = {"quantization": None}
    found = [
        why_not_runnable(checkpoint.config, None, device="cuda", **plain),
        why_not_runnable(checkpoint.config, {"quant_method": "quanto"}, device="cpu", **plain),
        why_not_runnable(checkpoint.config, None, device="cpu", compile=True, **plain),
        why_not_runnable({"text_config": {"model_type": "llama4_text"}}, None, device="cpu", compile=True, **plain),
    ]
    assert [wrong and wrong[0] for wrong in found] == ["device", "model", "compile", "compile"]
