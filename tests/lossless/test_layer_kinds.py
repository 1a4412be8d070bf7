"""Models of each kind of layer, through both engines: every way of serving has the tokens of plain decoding."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.lossless.test_trees import any_subtrees
from tests.model.families import checkpoint, small_config
from tests.support import hybrids, indexed
from tests.support.compressed import compressed
from tests.support.hybrids import hybrid
from tests.support.known import Known, known, known_with_prefix
from tests.support.mutants import Mutant, mutant
from tests.support.pump import Pump, assert_continued, assert_same
from tests.support.rings import nightly, slow

from paceline.model.kv_cache import KVCache
from paceline.model.loading import LoadedModel, prepare
from paceline.types import Mode

FP32, BF16 = torch.float32, torch.bfloat16
Of = tuple[Any, ...]


@functools.cache
def latent(family: str, dtype: torch.dtype) -> LoadedModel:
    """A small random model of latent attention."""
    return prepare(checkpoint(small_config(family)).to(dtype), compile=False)


@dataclass(frozen=True)
class Kind:
    """A row: models by the arguments of ``make``, the first of them in the fast ring."""

    make: Callable[..., LoadedModel]
    fast: Of
    each: Sequence[Of]
    """In the nightly ring, of twice as many sessions."""
    slow: Sequence[Of] = ()
    slow_trees: Sequence[Of] | None = None
    """Those of ``slow`` where trees have others."""
    num_slow: int = 6
    modes: tuple[Mode, ...] = (Mode.PLAIN, Mode.OVERLAPPED)
    lengths: tuple[int, ...] = (1, 15, 16, 17, 5, 19)
    """Tokens after which sessions go on elsewhere."""

    def known(self, of: Of, num: int = 6) -> Known:
        """Sessions of the model with these arguments."""
        return known(self.make, of, num)

    def prefixed(self) -> Known:
        """Sessions that share two pages, of the model in the fast ring."""
        return known_with_prefix(self.make, self.fast)


KINDS = {
    "linear": Kind(
        hybrid,
        ("qwen3_5_text", BF16),
        [(family, dtype) for family in hybrids.FAMILIES for dtype in (FP32, BF16)],
        [
            ("qwen3_next", FP32),
            *((family, BF16) for family in ("lfm2_moe", "jamba", "nemotron_h", "kimi_linear", "minimax")),
            ("falcon_h1", FP32),
        ],
        modes=tuple(Mode),
    ),
    "latent": Kind(
        latent,
        ("minicpm3", BF16),
        [(family, dtype) for family in ("deepseek_v2", "longcat_flash") for dtype in (FP32, BF16)],
        [("deepseek_v3", FP32)],
        modes=tuple(Mode),
    ),
    "indexed": Kind(
        indexed.indexed,
        ("deepseek_v32", BF16),
        [(family, dtype) for family in indexed.FAMILIES for dtype in (FP32, BF16)],
        [("glm_moe_dsa", FP32)],
        slow_trees=[("hy_v4", FP32)],
    ),
    "compressed": Kind(
        compressed,
        (BF16, 16),
        [(dtype, heavy) for dtype in (FP32, BF16) for heavy in (16, 128)],
        slow_trees=[(FP32, 128)],
        num_slow=12,
        lengths=(1, 3, 4, 5, 16, 19),
    ),
}


def cases(*, trees: bool) -> Iterator[Any]:
    """Parameters: the row, a model and the number of its sessions."""
    for name, kind in KINDS.items():
        yield name, kind.fast, 6
        of_slow = kind.slow_trees if trees and kind.slow_trees is not None else kind.slow
        yield from slow((name, of, kind.num_slow) for of in of_slow)
        yield from nightly((name, of, 12) for of in kind.each)


@pytest.mark.parametrize(("name", "of", "num"), [*cases(trees=False)])
def test_modes_give_identical_tokens(name: str, of: Of, num: int) -> None:
    """Chains, with arrivals, preemption, shared prefixes, prompts in chunks."""
    kind = KINDS[name]
    plain, *drafted = kind.known(of, num).served(*kind.modes, pages=5 if num < 10 else 9)
    assert plain.target.stats.preemptions > 0
    assert plain.target.stats.cached_tokens > 0
    for pump in drafted:
        assert sum(result.speculation.accepted for result in pump.results.values()) > 30


@pytest.mark.parametrize(("name", "of", "num"), [*cases(trees=True)])
def test_any_subtrees_give_identical_tokens(name: str, of: Of, num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Branches that leave each other before, at and behind boundaries of chunks, pages, windows and top-k; the accepted
    one goes on."""
    any_subtrees(monkeypatch)
    (pump,) = KINDS[name].known(of, num).served(Mode.OVERLAPPED, pages=14, seed=4)
    assert pump.target.stats.branches > 15
    assert pump.target.stats.branches_used > 0


@pytest.mark.parametrize(
    ("name", "of"),
    [*((name, kind.fast) for name, kind in KINDS.items()), *slow(("linear", of) for of in KINDS["linear"].slow)],
)
def test_a_session_goes_on_elsewhere(name: str, of: Of) -> None:
    """Another engine continues what the first has generated, as after a migration, from any length."""
    sessions = KINDS[name].known(of)
    assert_continued(sessions.pump(), sessions.requests, sessions.reference, KINDS[name].lengths)


def test_a_draft_with_indexers_gives_identical_tokens() -> None:
    """The draft's trees are masked, and its indexers choose within the mask."""
    sessions = KINDS["indexed"].known(KINDS["indexed"].fast)
    pump = Pump(sessions.target, sessions.target, draft_steps=(1, 8))
    assert_same(pump.run(sessions.requests), sessions.reference)
    assert sum(result.speculation.accepted for result in pump.results.values()) > 30


def prefix_hits(sessions: Known) -> None:
    """A second round of the same prompts hits the first one's pages."""
    pump = sessions.pump(pages=40)
    sessions.served_again(pump)
    assert sessions.served_again(pump) >= len(sessions.requests) * 128


@pytest.mark.parametrize("name", ["latent", "indexed", "compressed"])
def test_prefix_hits_give_identical_tokens(name: str) -> None:
    prefix_hits(KINDS[name].prefixed())


@mutant(KVCache, "match_prefix")
def _latents_are_gone(match: Any, self: KVCache, *given: Any) -> Any:
    pages, hashes = match(self, *given)
    for keys in self.keys:
        keys[pages] = 0
    return pages, hashes


@mutant(KVCache, "match_prefix")
def _index_keys_are_gone(match: Any, self: KVCache, *given: Any) -> Any:
    pages, hashes = match(self, *given)
    for keys, values in zip(self.keys, self.values, strict=True):
        if not values.numel():
            keys[pages] = 0
    return pages, hashes


@mutant(KVCache, "match_prefix")
def _entries_are_gone(match: Any, self: KVCache, *given: Any) -> Any:
    pages, hashes = match(self, *given)
    for keys in self.keys[4:]:
        keys[pages] = 0
    return pages, hashes


@pytest.mark.parametrize(
    ("name", "change"),
    [("latent", _latents_are_gone), ("indexed", _index_keys_are_gone), ("compressed", _entries_are_gone)],
)
def test_a_prefix_whose_contents_are_gone_is_noticed(name: str, change: Mutant, monkeypatch: Any) -> None:
    """As if what layers keep beside keys and values did not belong to the page."""
    sessions = KINDS[name].prefixed()
    change(monkeypatch)
    with pytest.raises(AssertionError):
        prefix_hits(sessions)
