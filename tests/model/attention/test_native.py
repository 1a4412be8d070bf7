"""Attention over pages on the CPU: that it is attention, and that a query's bits are its own.

Mutants and the variant without AVX512-BF16 are compiled from changed sources, in processes of their own: a process
registers the operator once.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.compilers import needs_attention, needs_products, with_faults
from tests.support.models import prompt, random_model
from tests.support.rings import pairs_first
from torch import Tensor

from paceline.errors import EngineError
from paceline.model.attention import native as cpu_attention
from paceline.model.attention.paged import paged_attention
from paceline.model.compiled import linear as cpu_linear
from paceline.model.compiled.package import CompiledPackage, load_package
from paceline.model.loading import prepare
from paceline.model.runner import ModelRunner
from paceline.model.selftest import check_invariance
from paceline.model.step_plan import SequenceStep
from paceline.types import PAGE_SIZE, pages_for

pytestmark = needs_attention

POOL = 9
DTYPES = (torch.float32, torch.bfloat16)
ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _native() -> None:
    assert cpu_attention.unavailable() is None


@dataclass(frozen=True)
class Inputs:
    """Arguments of ``attend`` in its order."""

    query: Tensor
    keys: Tensor
    values: Tensor
    page_table: Tensor
    gather_index: Tensor
    scatter_index: Tensor
    mask: Tensor
    sinks: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def attend(self) -> Tensor:
        return cpu_attention.attend(**vars(self))


def hiding(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -math.inf)


def random_inputs(
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
    rows: int = 2,
    row_len: int = 3,
    pages: int = 3,
    kv_heads: int = 2,
    groups: int = 2,
    key_dim: int = 32,
    value_dim: int = 32,
    masks: str = "causal",
    **options: object,
) -> Inputs:
    """Every token at a place of its own, in pages that rows share. ``masks``: causal, window or tree."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    num_keys, places = pages * PAGE_SIZE, rows * row_len
    key = torch.arange(num_keys)
    last = torch.randint(0, num_keys - row_len + 1, (rows, 1, 1), generator=generator) + torch.arange(row_len)[:, None]
    seen = key <= last
    if masks == "window":
        seen &= key > last - 20
    elif masks == "tree":
        seen &= (torch.rand(seen.shape, generator=generator) < 0.5) | (key == last)
    heads = kv_heads * groups
    return Inputs(
        query=random(1, places, heads, key_dim).transpose(1, 2),
        keys=random(POOL, PAGE_SIZE, kv_heads, key_dim),
        values=random(POOL, PAGE_SIZE, kv_heads, value_dim),
        page_table=torch.stack([torch.randperm(POOL, generator=generator)[:pages] for _ in range(rows)]),
        gather_index=torch.arange(places).view(rows, row_len),
        scatter_index=torch.arange(places),
        mask=hiding(seen, dtype)[:, None],
        scale=key_dim**-0.5,
        **options,
    )


def by_definition(it: Inputs) -> Tensor:
    """In float64: [1, T, num_heads, value_dim]."""
    groups = it.query.shape[1] // it.keys.shape[2]
    out = []
    for place in it.scatter_index.tolist():
        row, j = divmod(place, it.gather_index.shape[1])
        q = it.query[0, :, it.gather_index[row, j]].double()
        k, v = (
            pool[it.page_table[row]].flatten(0, 1).double().repeat_interleave(groups, 1)
            for pool in (it.keys, it.values)
        )
        scores = torch.einsum("hd,khd->hk", q, k) * it.scale
        if it.softcap is not None:
            scores = torch.tanh(scores / it.softcap) * it.softcap
        scores = scores + it.mask[row, 0, j].double()
        if it.sinks is not None:
            scores = torch.cat([scores, it.sinks.double()[:, None]], 1)
        out.append(torch.einsum("hk,khd->hd", torch.softmax(scores, 1)[:, : len(k)], v))
    return torch.stack(out)[None]


# -- it is attention ------------------------------------------------------------------------------------------------


HEADS = {
    "grouped": (2, 3, 64, 64),
    "one each": (3, 1, 32, 32),
    "one for all": (1, 7, 128, 128),
    "latent": (1, 4, 192, 128),
    "odd": (2, 2, 24, 40),
    "odder": (1, 2, 17, 5),
    "compressed": (1, 2, 576, 512),
}
"""KV heads, queries per KV head, key dimension, value dimension."""
OPTIONS = [{}, {"softcap": 1.5}, {"sinks": True}, {"softcap": 1.5, "sinks": True}]


@pytest.mark.parametrize(
    ("options", "shape", "masks", "dtype"),
    pairs_first(OPTIONS, list(HEADS), ["causal", "window", "tree"], DTYPES),
    ids=str,
)
def test_it_is_attention(options: dict, shape: str, masks: str, dtype: torch.dtype) -> None:
    kv_heads, groups, key_dim, value_dim = HEADS[shape]
    heads = {"kv_heads": kv_heads, "groups": groups, "key_dim": key_dim, "value_dim": value_dim}
    sinks = torch.linspace(-2, 2, kv_heads * groups) if "sinks" in options else None
    it = random_inputs(dtype=dtype, masks=masks, **heads, **options | {"sinks": sinks})
    got = it.attend()
    assert got.dtype == dtype
    assert (got.double() - by_definition(it)).abs().max() < (5e-6 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_masks_may_add_anything(dtype: torch.dtype) -> None:
    it = random_inputs(dtype=dtype)
    bias = torch.randn(it.mask.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    it = replace(it, mask=it.mask + bias)
    assert (it.attend().double() - by_definition(it)).abs().max() < (5e-6 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_rows_and_many_keys(dtype: torch.dtype) -> None:
    """More places than share a block, more scores than stay near each other: the largest comes last."""
    it = random_inputs(dtype=dtype, rows=1, row_len=75, pages=8)
    it.keys.mul_(4)
    assert (it.attend().double() - by_definition(it)).abs().max() < (2e-5 if dtype == torch.float32 else 5e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_in_any_layout(dtype: torch.dtype) -> None:
    it = random_inputs(dtype=dtype)
    want = it.attend()
    dims_first = it.query.transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(replace(it, query=it.query.contiguous()).attend(), want)
    assert torch.equal(replace(it, query=dims_first).attend(), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_that_sees_nothing_gets_zeros(dtype: torch.dtype) -> None:
    it = random_inputs(dtype=dtype)
    it.mask[1, :, 1] = -math.inf
    out = it.attend()
    assert not out[0, 4].any()
    assert out[0, [0, 1, 2, 3, 5]].any(-1).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["query", "keys", "values"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_spreads_as_by_definition(where: str, value: float, dtype: torch.dtype) -> None:
    """The same places are not finite; in sdpa too, but for infinite bfloat16 scores, of which it makes zeros."""
    it = random_inputs(dtype=dtype, rows=1, pages=1)
    last = int((it.mask[0, 0] == 0).sum(-1).min()) - 1
    if where == "query":
        it.query[0, 1, 1, 3] = value
    else:
        getattr(it, where)[it.page_table[0, 0], last // 2, 1, 3] = value
    got = it.attend()
    assert torch.equal(got.isfinite(), by_definition(it).isfinite())
    assert where == "keys" or not got.isfinite().all()
    if dtype == torch.float32 or where == "values" or math.isnan(value):
        fresh = torch.zeros(1, 2, 3, 32, dtype=dtype)
        by_torch, _ = paged_attention(
            SimpleNamespace(layer_idx=0), it.query, fresh, fresh, None, keys=[it.keys], values=[it.values],
            write_rows=torch.full((3,), int(it.page_table[0, 0]) * PAGE_SIZE + 63),
            write_tokens=torch.arange(3), page_table=it.page_table,
            gather_index=it.gather_index, scatter_index=it.scatter_index, masks=[it.mask], scaling=it.scale,
        )  # fmt: skip
        assert torch.equal(got.isfinite(), by_torch.isfinite())


# -- a query's bits are its own -------------------------------------------------------------------------------------


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32)


def alone(it: Inputs, place: int) -> Inputs:
    """One token, its pages only up to the last that it sees, and NaN wherever it does not look."""
    row, j = divmod(place, it.gather_index.shape[1])
    seen = it.mask[row, 0, j] != -math.inf
    pages = pages_for(int(seen.nonzero()[-1]) + 1)
    table = it.page_table[row, :pages]
    hidden = ~seen[: pages * PAGE_SIZE].view(pages, PAGE_SIZE)
    keys, values = torch.full_like(it.keys, math.nan), torch.full_like(it.values, math.nan)
    for pool, own in ((keys, it.keys), (values, it.values)):
        pool[table] = own[table].masked_fill(hidden[:, :, None, None], math.nan)
    token = it.gather_index[row, j]
    return replace(
        it, query=it.query[:, :, token : token + 1], keys=keys, values=values, page_table=table[None],
        gather_index=torch.zeros(1, 1, dtype=torch.long), scatter_index=torch.zeros(1, dtype=torch.long),
        mask=it.mask[row : row + 1, :, j : j + 1, : pages * PAGE_SIZE],
    )  # fmt: skip


def together(it: Inputs, order: Tensor, more_pages: int, more_places: int) -> Inputs:
    """The rows in another order, every row and page table longer: padding repeats the last token and the first page."""
    gather = it.gather_index[order]
    rows, row_len = gather.shape
    length = row_len + more_places
    scatter = torch.empty_like(it.scatter_index)
    for row in range(rows):
        scatter[gather[row]] = row * length + torch.arange(row_len)
    table, mask = it.page_table[order], it.mask[order]
    mask = torch.cat([mask, mask[:, :, -1:].expand(-1, -1, more_places, -1)], 2)
    return replace(
        it, page_table=torch.cat([table, table[:, :1].expand(-1, more_pages)], 1), scatter_index=scatter,
        gather_index=torch.cat([gather, gather[:, -1:].expand(-1, more_places)], 1),
        mask=torch.nn.functional.pad(mask, (0, more_pages * PAGE_SIZE), value=-math.inf),
    )  # fmt: skip


def num_different(it: Inputs, more_pages: int, more_places: int, seed: int = 0) -> int:
    """Tokens whose bits are others alone than beside all others."""
    order = torch.randperm(len(it.page_table), generator=torch.Generator().manual_seed(seed))
    beside = bits(together(it, order, more_pages, more_places).attend())[0]
    return sum(
        not torch.equal(bits(alone(it, place).attend())[0, 0], beside[token])
        for token, place in enumerate(it.scatter_index.tolist())
    )


@settings(max_examples=120)
@given(
    seed=st.integers(0, 1 << 20),
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 4),
    row_len=st.integers(1, 9) | st.sampled_from([31, 32, 33, 40]),
    pages=st.integers(1, 5),
    heads=st.sampled_from([(1, 1), (1, 3), (2, 3), (2, 1), (1, 8)]),
    dims=st.sampled_from([(16, 16), (64, 64), (40, 24), (48, 96)]),
    masks=st.sampled_from(["causal", "window", "tree"]),
    softcap=st.sampled_from([None, 2.0]),
    more=st.tuples(st.integers(0, 3), st.integers(0, 5)),
)
def test_bits_are_those_of_being_alone(seed, dtype, rows, row_len, pages, heads, dims, masks, softcap, more) -> None:
    """Decoded or verified or prefilled, padded or not, beside anything, whatever lies where it does not look."""
    it = random_inputs(
        seed, dtype=dtype, rows=rows, row_len=row_len, pages=pages, kv_heads=heads[0], groups=heads[1],
        key_dim=dims[0], value_dim=dims[1], masks=masks, softcap=softcap,
    )  # fmt: skip
    assert num_different(it, *more, seed=seed) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_model_verifies_what_it_decodes(dtype: torch.dtype) -> None:
    """The whole step, at contexts beside the edges of blocks, with the rules for query rows and keys switched off."""
    runner = prepare(random_model("llama", dtype=dtype), compile=False, attention="native").runner(12)
    runner.shapes = replace(runner.shapes, query_multiple=1, key_pages=False)
    assert check_invariance(runner).holds
    tokens = prompt(1, 140)
    pages = runner.cache.allocate(3)

    def logits(sizes: list[int]) -> Tensor:
        out, at = [], 0
        for size in sizes:
            span = range(at, at + size)
            out.append(runner.forward([SequenceStep(tokens[span.start : span.stop], span, span, pages, size)]))
            at += size
        return torch.cat(out)

    want = logits([1] * 140)
    for sizes in ([140], [63, 1, 1, 75], [60, 5, 5, 57, 13], [7] * 20):
        assert torch.equal(logits(sizes), want), sizes


# -- nor do they depend on who computes it ----------------------------------------------------------------


_PIECE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
_SHARE = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_int64, _PIECE, ctypes.c_void_p)
ShareBy = Callable[[Callable[[int, Callable[[int], None]], bool]], None]


@pytest.fixture
def share_by() -> Iterator[ShareBy]:
    """Lets a function do the pieces of attention: it takes their number and what does one, and says if it did them."""
    functions = []

    def share_by(function: Callable[[int, Callable[[int], None]], bool]) -> None:
        by = _SHARE(lambda pieces, work, it: function(pieces, partial(work, it)))
        functions.append(by)
        cpu_attention.share_by(ctypes.cast(by, ctypes.c_void_p))

    yield share_by
    cpu_attention.share_by(ctypes.c_void_p(None))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1 << 20),
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 4),
    row_len=st.integers(5, 9) | st.sampled_from([31, 32, 33, 40]),
    pages=st.integers(2, 5),
    heads=st.sampled_from([(1, 3), (2, 3), (3, 1), (1, 16)]),
    dims=st.sampled_from([(64, 64), (40, 24), (48, 96)]),
    masks=st.sampled_from(["causal", "window", "tree"]),
)
def test_bits_do_not_depend_on_pieces(seed, dtype, rows, row_len, pages, heads, dims, masks, share_by: ShareBy) -> None:
    """They are done in any order; there is one for each KV head and at most 32 places of a row. Where that makes few,
    the queries of a KV head are split. Little work is not shared, 2^18 products always are."""
    it = random_inputs(
        seed, dtype=dtype, rows=rows, row_len=row_len, pages=pages, kv_heads=heads[0], groups=heads[1],
        key_dim=dims[0], value_dim=dims[1], masks=masks,
    )  # fmt: skip
    asked = []

    def nobody(pieces: int, work: Callable[[int], None]) -> bool:
        asked.append(pieces)
        return False

    def in_any_order(pieces: int, work: Callable[[int], None]) -> bool:
        asked.append(pieces)
        for piece in torch.randperm(pieces, generator=torch.Generator().manual_seed(seed)).tolist():
            work(piece)
        return True

    share_by(nobody)
    whole = it.attend()
    share_by(in_any_order)
    assert torch.equal(bits(it.attend()), bits(whole))
    if asked or rows * row_len * math.prod(heads) * pages * PAGE_SIZE * sum(dims) >= 1 << 18:
        pieces = rows * -(-row_len // 32)
        each = rows * row_len * heads[1] // pieces
        parts = max(1, min(16 // (pieces * heads[0]), each // 8, heads[1]))
        assert asked == [pieces * heads[0] * parts] * 2


def test_many_heads_of_one_key_have_the_bits_of_each_alone() -> None:
    """As many as latent attention has: their sums are kept for few places at a time. Mutant: a token is found by its
    place in the piece."""
    it = random_inputs(
        dtype=torch.bfloat16, rows=1, row_len=9, pages=2, kv_heads=1, groups=128, key_dim=576, value_dim=512
    )
    whole = it.attend()
    for head in (0, 1, 63, 127):
        assert torch.equal(replace(it, query=it.query[:, head : head + 1]).attend()[0, :, 0], whole[0, :, head])


def test_values_may_be_the_beginning_of_keys() -> None:
    """They are read where they lie."""
    it = random_inputs(kv_heads=1, groups=4, key_dim=48, value_dim=32)
    view = it.keys[..., :32]
    assert torch.equal(replace(it, values=view).attend(), replace(it, values=view.contiguous()).attend())


def test_little_attention_is_not_shared(share_by: ShareBy) -> None:
    def refuse(pieces: int, work: Callable[[int], None]) -> bool:
        raise AssertionError(f"{pieces} pieces")

    share_by(refuse)
    it = random_inputs(rows=1, row_len=1, pages=1)
    assert (it.attend().double() - by_definition(it)).abs().max() < 5e-6


@needs_products
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_bits_do_not_depend_on_threads(num_threads: int) -> None:
    """Tokens decoded, verified and prefilled, the same step often enough that helpers begin and end late."""
    steps = [random_inputs(n, dtype=torch.bfloat16, rows=16 // n, row_len=n * n, pages=5) for n in (1, 2, 4, 8)]
    alone = [it.attend() for it in steps]
    cpu_attention.share_by(cpu_linear.sharer())
    cpu_linear.share_products(num_threads)
    try:
        for it, want in zip(steps * 20, alone * 20, strict=True):
            assert torch.equal(it.attend(), want)
    finally:
        cpu_linear.share_products(1)
        cpu_attention.share_by(ctypes.c_void_p(None))


class _Attention(torch.nn.Module):
    def __init__(self, sinks: Tensor | None) -> None:
        super().__init__()
        self.sinks = sinks

    def forward(self, *inputs: Tensor) -> Tensor:
        return cpu_attention.attend(*inputs, self.sinks, 0.2, 3.0)


@pytest.mark.slow
@pytest.mark.parametrize("with_sinks", [False, True])
def test_compiled_models_call_it_without_the_interpreter(with_sinks: bool, tmp_path: Path) -> None:
    """Through its C function, and with its bits; a failure in it is the engine's."""
    it = random_inputs(dtype=torch.bfloat16)
    model = _Attention(torch.linspace(-1, 1, 4) if with_sinks else None)
    inputs = tuple(vars(it).values())[:7]
    path = tmp_path / "attention.pt2"
    shims = {"aot_inductor.custom_ops_to_c_shims": cpu_attention.compiled_shims()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter's own
        exported = torch.export.export(model, inputs)
        torch._inductor.aoti_compile_and_package(exported, package_path=str(path), inductor_configs=shims)
    step = load_package(path)
    assert isinstance(step, CompiledPackage)
    assert torch.equal(step(*inputs), model(*inputs))
    it.page_table[0, 0] = POOL
    with pytest.raises(EngineError, match="of a compiled model failed"):
        step(*inputs)


_INVARIANCE = """
import os
import sys
from dataclasses import replace
from pathlib import Path
from paceline.model.attention import native as cpu_attention
library = cpu_attention.LIBRARY
cpu_attention.LIBRARY = replace(library, source=Path(sys.argv[1]), options=(*library.options, *sys.argv[2:]))
assert cpu_attention.unavailable() is None
from tests.model.attention.test_native import DTYPES, by_definition, num_different, random_inputs
inputs = [random_inputs(s, dtype=d, pages=4, row_len=5) for s in range(3) for d in DTYPES]
for fault in os.environ["FAULTS"]:
    os.environ["FAULT"] = fault
    print(sum(num_different(it, 1, 1) for it in inputs))
    print(max(float((it.attend().double() - by_definition(it)).abs().max()) for it in inputs))
"""


def in_a_process(tmp_path: Path, faults: Sequence[tuple[str, str]], *options: str) -> list[tuple[int, float]]:
    """Tokens that differ, and the largest error: of the operator as it is, then with one fault of its source at a time.

    They are numbered from 1 (``with_faults``).
    """
    source = tmp_path / "cpu_attention.cpp"
    source.write_text(with_faults(cpu_attention.SOURCE, faults), encoding="utf-8")
    numbers = "".join(map(str, range(len(faults) + 1)))
    environment = {**os.environ, "PACELINE_CACHE": str(tmp_path), "PYTHONPATH": f"{ROOT}:{ROOT / 'services'}"}
    environment["FAULTS"] = numbers
    command = [sys.executable, "-c", _INVARIANCE, str(source), f"-I{cpu_attention.SOURCE.parent}", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    values = done.stdout.split()
    return [(int(different), float(error)) for different, error in zip(values[::2], values[1::2], strict=True)]


MUTANTS = {
    "order of blocks": (
        "for (const Block& block : blocks_) {",
        (
            "if (fault(1) && num_places > 2) std::reverse(blocks_.begin(), blocks_.end());\n"
            "    for (const Block& block : blocks_) {"
        ),
    ),
    "level of the exponents": (
        "const float level = std::max(state.level, _mm512_reduce_max_ps(top));",
        (
            "float level = std::max(state.level, _mm512_reduce_max_ps(top));\n"
            "    if (fault(2) && num_active_ > 2) level += 0.3f;"
        ),
    ),
    "hidden NaN": (
        "const bool apart = block.all != ~0ull && !finite;",
        "const bool apart = !fault(3) && block.all != ~0ull && !finite;",
    ),
}


@pytest.mark.slow
def test_mutants_are_noticed(tmp_path: Path) -> None:
    """Attention all the same, but not with bits of its own; without a fault it has these."""
    right, *wrong = in_a_process(tmp_path, [*MUTANTS.values()])
    assert right[0] == 0
    for name, (different, error) in zip(MUTANTS, wrong, strict=True):
        assert different > 0, name
        assert error < 2e-2, name
    assert right[1] < 2e-2


@pytest.mark.nightly
def test_without_bfloat16_products(tmp_path: Path) -> None:
    """AVX-512 without its BF16 extension: the other instructions are attention too, and invariant."""
    ((different, error),) = in_a_process(tmp_path, [], "-mno-avx512bf16")
    assert different == 0
    assert error < 2e-2


# -- what it refuses ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_table": torch.tensor([[0, 1, 9], [0, 1, 2]])}, r"page_table has 9, which is not in \[0, 9\)"),
        ({"gather_index": torch.tensor([[0, 1, 2], [3, 4, -1]])}, r"gather_index has -1, which is not in \[0, 6\)"),
        ({"scatter_index": torch.arange(1, 7)}, r"scatter_index has 6, which is not in \[0, 6\)"),
        ({"keys": torch.zeros(9, 32, 2, 32)}, "takes pages of 64 rows"),
        ({"mask": torch.zeros(2, 1, 3, 64)}, "places and"),
        ({"mask": torch.zeros(2, 1, 3, 192, dtype=torch.bfloat16)}, "of one dtype"),
        ({"sinks": torch.zeros(3)}, "3 sinks for 4 heads"),
        ({"keys": torch.zeros(9, 64, 2, 16)}, "do not fit"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        replace(random_inputs(), **change).attend()


@pytest.mark.parametrize("reason", ["there is no C++ compiler (g++, c++, clang++)", "g++ could not compile it: error"])
def test_without_it_torch_attends_and_the_log_says_so(
    reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise EngineError(reason)

    monkeypatch.setattr(cpu_attention, "load_operator", fail)
    monkeypatch.setattr(cpu_attention, "unavailable", cpu_attention.unavailable.__wrapped__)
    with caplog.at_level(logging.INFO, "paceline"):
        runner: ModelRunner = prepare(random_model("llama"), compile=False).runner(4)
    assert f"attention is computed by torch, which is slower: {reason}" in caplog.text
    assert "attention of LlamaForCausalLM on cpu: sdpa" in caplog.text
    assert check_invariance(runner).num_rows > 0
