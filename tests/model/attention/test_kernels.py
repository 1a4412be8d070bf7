"""Which attention kernel runs, and that ours computes what torch's does: on a GPU, or in triton's interpreter.

``TRITON_INTERPRET=1 pytest tests/model/attention/test_kernels.py`` where triton is installed. The interpreter has no
bfloat16 products, so its numbers are widened here; and it cuts bfloat16 off instead of rounding it. Its products are
made row by row here, as numpy's bits depend on the place of a row.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.model.families import checkpoint, small_config
from tests.support.flashinfer import BatchPrefillWithPagedKVCacheWrapper as Wrapper
from tests.support.in_place import seen_through
from tests.support.interpreter import hasten
from tests.support.models import SLIDING_WINDOW, prompt, random_model
from tests.support.rings import nightly
from transformers import LlamaConfig

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.kv_scales import UNSCALED, KVScales
from paceline.config import ModelOptions, ServiceConfig
from paceline.errors import ConfigError
from paceline.model.attention import flashinfer, schedule
from paceline.model.attention import native as cpu_attention
from paceline.model.attention.flashinfer import Library
from paceline.model.attention.kernels import choose_kernel
from paceline.model.attention.schedule import SPLIT, Seen, num_splits
from paceline.model.compiled.backend import DeviceBackend
from paceline.model.kv_cache import FP8, LayerSpec, from_pages, to_fp8
from paceline.model.loading import LoadedModel, load_model, prepare
from paceline.model.runner import ModelRunner
from paceline.model.step import Step
from paceline.model.step_plan import SequenceStep
from paceline.types import PAGE_SIZE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HAS_TRITON = importlib.util.find_spec("triton") is not None
IS_INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
if HAS_TRITON:
    from paceline.model.attention import triton as kernel
needs_triton = pytest.mark.skipif(
    not (IS_INTERPRETED or (HAS_TRITON and torch.cuda.is_available())),
    reason="needs triton and a GPU, or TRITON_INTERPRET=1",
)
GPU = {
    "device_type": "cuda",
    "capability": (9, 0),
    "dtype": torch.bfloat16,
    "layers": [LayerSpec(8, 128, 128)],
    "indexed": False,
    "no_triton": None,
    "no_native": None,
}
CPU = GPU | {"device_type": "cpu", "capability": None}
ONE_LAYER = LlamaConfig(
    vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    intermediate_size=32,
)  # fmt: skip


def test_the_choice() -> None:
    for wanted in ("auto", "triton"):
        assert choose_kernel(wanted, **GPU) == "triton"
    assert choose_kernel("sdpa", **GPU) == "sdpa"
    for change in ({"capability": (7, 5)}, {"no_triton": "needs a C compiler"}, {"layers": [LayerSpec(8, 577, 512)]}):
        assert choose_kernel("auto", **GPU | change) == "sdpa"
    for dtype in (torch.bfloat16, torch.float32):
        assert choose_kernel("sdpa", **CPU | {"dtype": dtype}) == "sdpa"
        assert choose_kernel("native", **CPU | {"dtype": dtype}) == "native"
        assert choose_kernel("auto", **CPU | {"dtype": dtype}) == "native"
    assert choose_kernel("auto", **CPU | {"dtype": torch.float16}) == "sdpa"
    assert choose_kernel("auto", **CPU | {"no_native": "needs AVX-512"}) == "sdpa"


@pytest.mark.parametrize(
    ("wanted", "change", "reason"),
    [
        ("triton", CPU, "runs on CUDA only, and the model is on device 'cpu'"),
        ("triton", {"capability": (7, 5)}, "needs compute capability 8.0, and the device has 7.5"),
        ("triton", {"dtype": torch.float64}, "takes float32, float16 and bfloat16, and the model has float64"),
        ("triton", {"layers": [LayerSpec(1, 577, 0)]}, "takes keys of up to 576 numbers, and the model has 577"),
        ("triton", {"layers": [LayerSpec(8, 128, 513)]}, "takes values of up to 512 numbers, and the model has 513"),
        ("triton", {"indexed": True}, "attends to all keys, and an indexer of the model chooses some"),
        ("triton", {"no_triton": "needs a C compiler"}, "needs a C compiler"),
        ("native", GPU, "runs on the CPU only, and the model is on device 'cuda'"),
        ("native", CPU | {"dtype": torch.float16}, "takes float32 and bfloat16, and the model has float16"),
        ("native", CPU | {"no_native": "could not be built"}, "could not be built"),
    ],
)
def test_what_cannot_run_is_refused(wanted: str, change: dict, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_kernel(wanted, **GPU | change)
    assert str(caught.value) == f"attention is {wanted!r}, which {reason}: use 'auto' or 'sdpa'"


def test_the_choice_is_stated_and_reaches_both_models(tmp_path, caplog: pytest.LogCaptureFixture) -> None:
    kwargs = {"engine_kwargs": {"attention": "triton"}}
    service = ServiceConfig.parse({"target_config": kwargs, "draft_config": kwargs})
    assert [setup.options.attention for setup in (service.target_setup(), service.draft_setup())] == ["triton"] * 2
    random_model("llama").save_pretrained(tmp_path)
    path, options = str(tmp_path), ModelOptions(device="cpu", compile=False)
    with caplog.at_level(logging.INFO, "paceline"):
        load_model(Checkpoint.open(path), options)
        load_model(Checkpoint.open(path), options.model_copy(update={"attention": "sdpa"}))
    default = "sdpa" if cpu_attention.unavailable() else "native"
    assert f"attention of LlamaForCausalLM on cpu: {default}" in caplog.text
    assert caplog.text.count("attention of LlamaForCausalLM on cpu: sdpa") == 1 + (default == "sdpa")
    with pytest.raises(ConfigError, match="attention is 'triton', which runs on CUDA only"):
        load_model(Checkpoint.open(path), options.model_copy(update={"attention": "triton"}))


# -- the kernel --------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few programs, and products whose rows do not know their neighbors, as on a device."""
    if not IS_INTERPRETED:
        return
    from triton.runtime import interpreter

    def dot(self, a, b, d, *_):
        left, right = (_widened(each.data, each.dtype.scalar) for each in (a, b))
        rows = np.matmul(left[:, None], right, dtype=d.data.dtype)[:, 0]
        return interpreter.TensorHandle(rows + d.data, d.dtype.scalar)

    hasten()
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    monkeypatch.setattr(kernel, "NUM_PROGRAMS", 3)


def _widened(data: np.ndarray, dtype: object) -> np.ndarray:
    return (data.astype(np.uint32) << 16).view(np.float32) if str(dtype) == "bf16" else data


def walk_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kernel, schedule):
        monkeypatch.setattr(module, "LEAST_WALKS", 1)


def attend(query, keys, values, table, gather, seen, *, sinks=None, scale=0.2, softcap=None, value_scale=1.0):
    """Of queries ``[1, heads, T, dim]``, each of which has one place in ``gather``. ``seen``: or a mask."""
    scatter = gather.flatten().argsort()
    seen = seen if isinstance(seen, Seen) else seen_through(seen)
    return kernel.attend_in_place(query, keys, values, table, gather, scatter, seen, sinks, scale, softcap, value_scale)


def inputs(rows: int, groups: int, row_len: int, pages: int, key_dim: int, value_dim: int, dtype=torch.float32):
    """Tokens in any order, two KV heads, masks of any kind. ``value_dim`` below 0: values are the beginning of keys."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    num_keys = pages * PAGE_SIZE
    mask = torch.zeros(rows, 1, row_len, num_keys)
    mask.masked_fill_(torch.rand(mask.shape, generator=generator) < 0.5, float("-inf"))
    mask[..., 0] = 0
    table = torch.randint(0, 9, (rows, pages), generator=generator)
    gather = torch.randperm(rows * row_len, generator=generator).view(rows, row_len)
    keys = random(9, PAGE_SIZE, 2, key_dim)
    pools = keys, keys[..., :-value_dim] if value_dim < 0 else random(9, PAGE_SIZE, 2, value_dim)
    query = random(1, rows * row_len, 2 * groups, key_dim).transpose(1, 2)
    return query, *pools, table.to(DEVICE), gather.to(DEVICE), mask.to(DEVICE, dtype)


def test_no_size_of_a_step_makes_triton_compile_another_variant() -> None:
    """Sizes and the places of tables in a packed buffer change from step to step."""
    pytest.importorskip("triton")
    changing = {"row_len", "num_pages", "num_rows", "first_row", "first_place"}
    changing |= {f"{of}_stride" for of in ("head", "token", "key_head", "key_token", "value_head", "value_token")}
    for function in (kernel.partial_results, kernel.combine_results, kernel._write):
        parameters = getattr(function, "params", None)
        if parameters is None:
            pytest.skip("triton's interpreter compiles nothing")
        fixed = {p.name for p in parameters if p.do_not_specialize or p.is_constexpr}
        assert changing & {p.name for p in parameters} <= fixed
        pointers = {p.name for p in parameters if p.do_not_specialize_on_alignment}
        varying = {"table", "gather", "first", "stop", "mask", "work", "scatter", "rows", "tokens"}
        assert varying & {p.name for p in parameters} <= pointers


@needs_triton
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(
    ("rows", "groups", "row_len", "pages", "key_dim", "value_dim", "dtype"),
    [
        (2, 2, 4, 6, 32, 32, torch.float32),
        (1, 3, 8, 1, 24, 40, torch.float32),
        (1, 1, 4, 9, 64, 64, torch.float16),
        (1, 2, 2, 3, 576, -512, torch.float32),
        (1, 1, 2, 3, 300, 512, torch.float16),
        (1, 1, 2, 3, 288, -256, torch.float16),
    ],
)
def test_attention_in_place_is_attention(
    rows, groups, row_len, pages, key_dim, value_dim, dtype, softcap, has_sinks
) -> None:
    """Against float64, with odd head dimensions, one page and several splits, masks of any kind."""
    given = query, keys, values, table, gather, mask = inputs(rows, groups, row_len, pages, key_dim, value_dim, dtype)
    sinks = torch.linspace(-1, 3, 2 * groups, device=DEVICE, dtype=dtype) if has_sinks else None
    got = attend(*given, sinks=sinks, softcap=softcap)
    k, v = (pool[table].flatten(1, 2).transpose(1, 2).repeat_interleave(groups, 1).double() for pool in (keys, values))
    scores = query.double()[0][:, gather].transpose(0, 1) @ k.transpose(2, 3) * 0.2
    scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    scores = scores + mask.double()
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(rows, -1, row_len, 1)], -1)
        v = F.pad(v, (0, 0, 0, 1))
    want = (F.softmax(scores, -1) @ v).transpose(1, 2).flatten(0, 1)[None, gather.flatten().argsort()]
    assert got.dtype == dtype
    assert got.shape == want.shape
    error = (3e-6 if dtype == torch.float32 else 2e-3) * max(1.0, (key_dim / 64) ** 0.5)  # scores grow with the sum
    assert (got.double() - want).abs().max() < error


@needs_triton
@pytest.mark.parametrize(
    ("row_len", "more_pages", "key_dim", "value_dim"),
    [(8, 4, 32, 32), *nightly([(40, 33, 32, 32)]), (8, 4, 320, -256)],
)
def test_a_row_has_the_same_bits_in_every_batch(row_len: int, more_pages: int, key_dim: int, value_dim: int) -> None:
    """Alone or beside others, in short or long query rows, before any number of masked pages."""
    query, keys, values, table, gather, mask = inputs(3, 2, row_len, 5, key_dim, value_dim)
    want = attend(query, keys, values, table, gather, mask)
    for row in range(3):
        for place in (0, 5):
            token = gather[row, place]
            alone = query[:, :, token : token + 1].expand(-1, -1, 4, -1)
            seen = mask[row : row + 1, :, place : place + 1].expand(-1, -1, 4, -1)
            longer = F.pad(seen, (0, more_pages * PAGE_SIZE), value=float("-inf"))
            pages = torch.cat([table[row], table[row, :1].expand(more_pages)])[None]
            got = attend(alone, keys, values, pages, torch.arange(4, device=DEVICE)[None], longer)
            assert torch.equal(got[0, 0], want[0, token])


@needs_triton
@pytest.mark.parametrize(("most", "num_calls"), [(1, 9), (6, 6), (18, 2)])
def test_a_step_in_several_calls_has_the_bits_of_one(most: int, num_calls: int, monkeypatch) -> None:
    """A place a call, some places of a row, and some rows, where the last call has less than the others."""
    given = inputs(3, 2, 3, 5, 32, 32)
    want = attend(*given)
    monkeypatch.setattr(schedule, "most_sums", lambda *_: most)
    seen = seen_through(given[-1])
    assert torch.equal(attend(*given[:-1], seen), want)
    assert [len(made) for made, _ in seen._made.values()] == [num_calls]


def bounded(row_lens: list[int], contexts: list[int], window: int | None) -> tuple[Seen, torch.Tensor]:
    """What the last tokens of contexts see, and the scatter of the tokens."""
    longest = max(row_lens)
    stop, scatter = torch.zeros(len(row_lens), longest, dtype=torch.int32), []
    for row, (count, context) in enumerate(zip(row_lens, contexts, strict=True)):
        stop[row] = torch.arange(context - count + 1, context - count + longest + 1).clamp(max=context)
        scatter += [row * longest + place for place in range(count)]
    first = torch.zeros_like(stop) if window is None else (stop - window).clamp(min=0)
    splits = [num_splits(-(-context // PAGE_SIZE)) for context in contexts]
    places = torch.tensor(row_lens, device=DEVICE)
    seen = Seen(first.to(DEVICE), stop.to(DEVICE), places, sizes=(row_lens, splits))
    return seen, torch.tensor(scatter, device=DEVICE)


_WINDOW = 9 * SPLIT * PAGE_SIZE - 3


@needs_triton
@pytest.mark.parametrize(("window", "groups"), [(None, 1), (_WINDOW, 3), *nightly([(None, 3), (_WINDOW, 1)])])
def test_a_token_has_the_same_bits_in_any_row(window: int | None, groups: int) -> None:
    """Decoded alone, verified beside others, in a prompt's chunk, in a long step and recorded with room: one token's
    context is 10 splits, two more than are fetched together."""
    generator = torch.Generator().manual_seed(0)
    context = 10 * SPLIT * PAGE_SIZE - 3
    num_pages = -(-context // PAGE_SIZE)
    pools = [torch.randn(num_pages + 1, PAGE_SIZE, 2, 32, generator=generator).to(DEVICE) for _ in "kv"]
    table = torch.arange(num_pages, device=DEVICE)
    tokens = torch.randn(16, 2 * groups, 32, generator=generator).to(DEVICE)  # the last ones of the context
    found = []
    for row_lens, recorded in (([1], False), ([4], False), ([16], False), ([1, 16, 7], False), ([16, 2], True)):
        seen, scatter = bounded(row_lens, [context] * len(row_lens), window)
        query = torch.cat([tokens[-count:] for count in row_lens])
        gather = torch.zeros(len(row_lens), max(row_lens), dtype=torch.int64, device=DEVICE)
        gather.view(-1)[scatter] = torch.arange(len(query), device=DEVICE)
        if recorded:
            seen.sizes, seen.capacity = None, len(query) * 40
        pages = F.pad(table, (0, 9), value=num_pages).repeat(len(row_lens), 1)
        given = (query.transpose(0, 1)[None], *pools, pages, gather, scatter, seen)
        out = kernel.attend_in_place(*given, None, 0.2, None)[0]
        ends = torch.tensor(row_lens).cumsum(0) - 1
        found += [out[end] for end in ends.tolist()]
    assert all(torch.equal(each, found[0]) for each in found)
    visible = slice(0 if window is None else context - window, context)
    keys, values = (pool.flatten(0, 1)[visible].transpose(0, 1).repeat_interleave(groups, 0) for pool in pools)
    want = F.scaled_dot_product_attention(tokens[-1][:, None], keys, values, scale=0.2)[:, 0]
    assert (found[0] - want).abs().max() < 1e-5


LATENTS = (576, -512)


@needs_triton
@pytest.mark.parametrize(
    ("heads", "groups", "dims", "dtype", "blocks"),
    [
        (1, 4, (64, 64), torch.float32, [16]),
        (1, 4, (64, 64), torch.bfloat16, [64, 16]),
        (2, 4, (128, 128), torch.bfloat16, [64, 16]),
        (1, 3, (24, 40), torch.float16, [64, 16]),
        (1, 2, (256, 256), torch.bfloat16, [32, 16]),
        (1, 4, LATENTS, torch.bfloat16, [32, 16]),
        (1, 1, (64, 64), torch.bfloat16, [16]),
    ],
)
def test_rows_that_are_walked_have_the_bits_of_splits(heads, groups, dims, dtype, blocks, monkeypatch) -> None:
    """In tiles of any size, for each kind of head."""
    walk_all(monkeypatch)
    query = torch.empty(1, heads * groups, 1, dims[0], dtype=dtype, device=DEVICE)
    assert kernel.walked_blocks(dtype, groups, dims[0]) == blocks
    for block in {*blocks, 64} if dtype == torch.float32 else blocks:
        assert kernel.blocks_agree(block, query, heads, dims[1], most=2 * 16 * heads * groups * dims[0])


@needs_triton
@pytest.mark.parametrize("mistake", [None, "large tiles differ", "all walks differ"])
def test_tiles_of_other_bits_are_not_used(mistake: str | None, monkeypatch, caplog) -> None:
    """A device whose matrix units sum in another order for larger tiles. Mutant: large tiles are used unseen."""

    class Inexact:
        def __getitem__(self, grid):
            def launch(*given, BLOCK: int, **sizes):
                walked[grid](*given, BLOCK=BLOCK, **sizes)
                if mistake == "all walks differ" or (mistake == "large tiles differ" and BLOCK > 16):
                    result = given[10]
                    result[0, 5, 1] = torch.nextafter(result[0, 5, 1], result.new_tensor(9))

            return launch

    walked = kernel.walk_pages
    monkeypatch.setattr(kernel, "walk_pages", Inexact())
    monkeypatch.setattr(kernel, "BLOCKS", {})
    walk_all(monkeypatch)
    monkeypatch.setattr(kernel, "NUM_TRIED", 1)
    monkeypatch.setattr(kernel, "can_try", lambda _: True)
    query = torch.empty(1, 4, 1, 32, dtype=torch.float16, device=DEVICE)
    pool = torch.empty(1, PAGE_SIZE, 1, 32, dtype=torch.float16, device=DEVICE)
    found = {None: 64, "large tiles differ": 16, "all walks differ": 0}[mistake]
    with caplog.at_level(logging.WARNING, "paceline"):
        assert kernel.walked_block(query, pool, pool) == found
    assert ("other bits in tiles of 64 queries" in caplog.text) == (mistake is not None)


@needs_triton
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("window", [None, 3 * PAGE_SIZE - 5])
def test_a_prompt_is_walked_beside_tokens_that_are_decoded(window: int | None, recorded: bool, monkeypatch) -> None:
    """Full rows are walked and others are not, each with the bits that it has alone; padding gets zeros."""
    monkeypatch.setattr(schedule, "LEAST_WALKS", 6)
    generator = torch.Generator().manual_seed(1)
    row_lens, contexts = [16, 3, 16, 1, 16], [400, 300, 416, 90, 432]
    seen, scatter = bounded(row_lens, contexts, window)
    pools = [torch.randn(8, PAGE_SIZE, 2, 32, generator=generator).to(DEVICE) for _ in "kv"]
    query = torch.randn(1, 4, len(scatter) + 2, 32, generator=generator).to(DEVICE)
    gather = torch.zeros(5, 16, dtype=torch.int64, device=DEVICE)
    gather.view(-1)[scatter] = torch.arange(len(scatter), device=DEVICE)
    scatter = F.pad(scatter, (0, 2))  # two tokens of padding
    if recorded:
        seen.sizes, seen.capacity = None, 300
    table = torch.arange(7, device=DEVICE).repeat(5, 1)
    sinks = torch.tensor([0.0, 1, 2, 3], device=DEVICE)
    got, alone = (
        kernel._attended(query, *pools, table, gather, scatter, seen, sinks, 0.2, None, block) for block in (32, 0)
    )
    (todo, walked), (_, none) = seen._made.values()
    assert walked.tolist() == [1, 1, 2, 2, 3]
    assert todo[0][1][1].tolist() == [0, 3, 0, 1, 0]
    assert none is None
    assert torch.equal(got[:, :-2], alone[:, :-2])
    assert not got[:, -2:].any() or recorded


@needs_triton
@pytest.mark.parametrize("block", [0, 32])
def test_only_pages_that_are_seen_are_read(block: int, monkeypatch) -> None:
    """What lies before a window and behind the last key may hold anything; a token that sees nothing gets zeros."""
    monkeypatch.setattr(kernel, "walked_block", lambda *_: block)
    monkeypatch.setattr(schedule, "LEAST_WALKS", 1)
    query, keys, values, table, gather, mask = inputs(1, 2, 16, 8, 32, 32)
    table[:] = torch.arange(8)
    mask[..., : 2 * PAGE_SIZE] = mask[..., 5 * PAGE_SIZE :] = float("-inf")
    mask[:, :, 1] = float("-inf")
    want = attend(query, keys, values, table, gather, mask)
    for pool in (keys, values):
        pool[:2], pool[5:] = torch.nan, torch.nan
    got = attend(query, keys, values, table, gather, mask)
    assert torch.equal(got, want)
    assert not got[0, gather[0, 1]].any()
    assert got[0, gather[0, 0]].all()


@needs_triton
def test_keys_and_values_are_written_where_they_belong() -> None:
    """A token to several rows, heads in any layout, dimensions that are no power of two, nothing else touched."""
    key, value = torch.randn(1, 5, 3, 24, device=DEVICE).transpose(1, 2), torch.randn(1, 3, 5, 40, device=DEVICE)
    pools = [torch.zeros(4, PAGE_SIZE, 3, dim, device=DEVICE) for dim in (24, 40)]
    rows, tokens = [7, 200, 70, 71], [4, 4, 0, 2]
    kernel.write_in_place(key, value, *pools, torch.tensor(rows, device=DEVICE), torch.tensor(tokens, device=DEVICE))
    for pool, given in zip(pools, (key, value), strict=True):
        flat = pool.flatten(0, 1)
        assert torch.equal(flat[rows], given[0].transpose(0, 1)[tokens])
        assert torch.equal(flat.any(-1).any(-1).nonzero().flatten().cpu(), torch.tensor(sorted(rows)))


@needs_triton
def test_numbers_are_rounded_to_fp8_as_everywhere() -> None:
    """Numbers of any size, those between two, those beyond the largest, infinity and NaN, divided by the scale of keys
    or of values; no other row is touched."""
    generator = torch.Generator().manual_seed(0)
    every = from_pages(torch.arange(256, dtype=FP8), torch.float32)
    middle = torch.cat(
        [every[:127], (every[:126] + every[1:127]) / 2, torch.tensor([463.0, 1e9, torch.inf, torch.nan])]
    )
    random = torch.randn(512, generator=generator) * torch.logspace(-5, 4, 512)
    given = torch.cat([middle, -middle, random, torch.zeros(14)]).view(1, 1, 16, -1).to(DEVICE)
    for dtype, scales in ((torch.float32, UNSCALED), (torch.float16, KVScales(0.013, 3.1))):
        x = given.to(dtype)
        pools = [torch.zeros(1, PAGE_SIZE, 1, x.shape[-1], dtype=FP8, device=DEVICE) for _ in "kv"]
        rows = torch.arange(16, device=DEVICE)
        kernel.write_in_place(x, x, *pools, rows + 3, rows, scales)
        for pool, scale in zip(pools, scales, strict=True):
            got, want = pool[0, 3:19, 0], to_fp8(x[0, 0].float() / scale)
            is_nan = x[0, 0].isnan()
            assert torch.equal(got[~is_nan], want[~is_nan])
            assert ((got[is_nan] & 0x7F) == 0x7F).all()
            assert not pool[0, :3].any()
            assert not pool[0, 19:].any()


@needs_triton
@pytest.mark.parametrize(
    ("dims", "dtype"), [((32, 32), torch.float32), ((24, 40), torch.float16), ((288, -256), torch.float16)]
)
def test_pages_in_fp8_are_read_as_the_numbers_that_they_stand_for(dims, dtype, monkeypatch) -> None:
    """With the bits of pages of these numbers, by splits and walked, times a scale once they are rounded; every byte
    occurs but those of NaN."""
    monkeypatch.setattr(schedule, "LEAST_WALKS", 1)
    query, keys, values, table, gather, mask = inputs(1, 2, 16, 4, *dims, dtype)
    every = torch.arange(256, dtype=FP8, device=DEVICE)
    every = every[(every & 0x7F) != 0x7F]
    keys = every[torch.arange(keys.numel(), device=DEVICE).view(keys.shape) * 97 % 254]
    own = every[torch.arange(values.numel(), device=DEVICE).view(values.shape) * 89 % 254]
    values = keys[..., : -dims[1]] if dims[1] < 0 else own
    wide = [from_pages(pool, dtype) for pool in (keys, values)]
    wide = [wide[0], wide[0][..., : -dims[1]]] if dims[1] < 0 else wide
    for block in (0, 16):
        monkeypatch.setattr(kernel, "walked_block", lambda *_, size=block: size)
        given = (query * 0.01, table, gather, mask)
        want = attend(given[0], *wide, *given[1:]) * 0.21
        assert torch.equal(attend(given[0], keys, values, *given[1:], value_scale=0.21), want)


@needs_triton
def test_a_device_compares_tiles_of_pages_in_fp8(monkeypatch) -> None:
    walk_all(monkeypatch)
    query = torch.empty(1, 4, 1, 32, dtype=torch.float16, device=DEVICE)
    assert all(kernel.blocks_agree(64, query, 1, dim, fp8=True, most=1) for dim in (32, -16))


def runner_of(loaded: LoadedModel, kind: str, library: Library | None = None) -> ModelRunner:
    cache, window = loaded.runner(6).cache, loaded.sliding_window
    options = {"kernel": kind, "recorder": None, "max_shapes": 8, "library": library}
    given = {"dtype": loaded.dtype, "sliding_window": window, "vocab_size": 300}
    backend = DeviceBackend(cache, loaded.dtype, window, **options)
    return ModelRunner(Step(loaded.step.model, kind), cache, backend=backend, **given)


@needs_triton
@pytest.mark.parametrize("wrong", [False, True])
def test_a_model_with_a_cache_in_fp8_verifies_what_it_decodes(wrong: bool, monkeypatch) -> None:
    """Mutant: long steps write by another scale."""
    if wrong:
        write = kernel.write_in_place

        def scaled(key, value, *rest):
            write(key * 1.1 if key.shape[2] > 8 else key, value, *rest)

        monkeypatch.setattr(kernel, "write_in_place", scaled)
    scales = {0: KVScales(0.4, 0.3)}
    loaded = prepare(random_model(ONE_LAYER).to(DEVICE), compile=False, kv_cache_dtype="fp8", kv_scales=scales)
    runner, tokens = runner_of(loaded, "triton"), prompt(1, 15)
    pages = runner.cache.allocate(2)

    def logits(*ends: int) -> torch.Tensor:
        spans = [range(a, b) for a, b in itertools.pairwise(ends)]
        steps = [SequenceStep(tokens[span.start : span.stop], span, span, pages, len(span)) for span in spans]
        return torch.cat([runner.forward([each]) for each in steps])[-3:]

    assert torch.equal(logits(0, 15), logits(0, 12, 13, 14, 15)) == (not wrong)


@needs_triton
@pytest.mark.parametrize("family", [*nightly(["llama", "gemma2"]), "gemma3", "minicpm3"])
def test_a_model_runs_on_it(family: str) -> None:
    """Chains, a tree, windows, softcap and latents through transformers' own code."""
    model = checkpoint(small_config(family)) if family == "minicpm3" else random_model(family)
    loaded = prepare(model.to(DEVICE), compile=False)
    outputs = []
    for kind in ("sdpa", "triton"):
        runner, tokens = runner_of(loaded, kind), prompt(1, SLIDING_WINDOW + 50)
        pages = runner.cache.allocate(2)
        spans = [range(70), range(70, 71), range(71, 74)]
        chains = [SequenceStep([tokens[i] for i in span], span, span, pages, len(span)) for span in spans]
        logits = [runner.forward([chain]) for chain in chains]
        visible, positions = torch.arange(76) < 74, torch.tensor([*range(74), 74, 74])
        tree = SequenceStep([7, 8], [74, 74], [74, 75], pages, 2, visible, positions, [[74], [75]])
        logits.append(runner.forward([tree]))
        outputs.append(torch.cat(logits))
    assert (outputs[0] - outputs[1]).abs().max() < 1e-4


@needs_triton
@pytest.mark.parametrize("gain", [1.0, *nightly([1.01])])
def test_a_library_takes_rows_of_its_own_beside_it(gain: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block and a rest of a prompt, and another session's token; results of the library that are off are seen."""
    monkeypatch.setattr(flashinfer, "REQUEST_LEN", PAGE_SIZE)
    loaded, outputs = prepare(random_model(ONE_LAYER).to(DEVICE), compile=False), []
    made = type("Made", (Wrapper,), {"gain": gain})
    for kind, library in (("sdpa", None), ("triton", Library(loaded.device, made))):
        runner, span = runner_of(loaded, kind, library), range(PAGE_SIZE + 5)
        pages = runner.cache.allocate(2)
        chunk = SequenceStep(prompt(1, len(span)), span, span, pages, len(span), num_by_library=PAGE_SIZE)
        other = SequenceStep([7], [0], [0], runner.cache.allocate(1), 1)
        outputs.append(runner.forward([other, chunk]))
    far = (outputs[0] - outputs[1]).abs().amax(1) > 1e-4
    assert far.nonzero().flatten().tolist() == ([] if gain == 1 else [*range(1, 1 + PAGE_SIZE)])
