"""FlashInfer for whole blocks of prompts: what it is given, and which of its results are believed.

On the CPU, with what its arguments mean (``tests/support/flashinfer.py``). It never ran on a device.
"""

import random
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.model.compiled.test_backend import chain
from tests.support import flashinfer as fake
from tests.support.models import random_model
from tests.support.mutants import mutant
from transformers import GptOssConfig

from paceline.config import ModelOptions, ServiceConfig
from paceline.errors import ConfigError
from paceline.model import loading
from paceline.model.attention import flashinfer
from paceline.model.attention.flashinfer import REQUEST_LEN, Library, Requests, difference, num_by_library
from paceline.model.attention.kernels import no_library
from paceline.model.kv_cache import NO_KV, LayerSpec
from paceline.model.loading import prepare
from paceline.model.step_plan import StepPlan, spans_by_library
from paceline.types import PAGE_SIZE

HEADS, KV_HEADS, DIM = 4, 2, 16
BFLOAT16 = torch.bfloat16
Wrapper = fake.BatchPrefillWithPagedKVCacheWrapper


def library(make: type[Wrapper] = Wrapper) -> Library:
    return Library(torch.device("cpu"), make)


# -- what it is given ----------------------------------------------------------------------------------------


def laid_out(spans: list[tuple[int, int]], row_len: int) -> tuple[Requests, list[tuple[int, np.ndarray]]]:
    """Requests of sessions' chunks, (first position, tokens) each, and of each token its position and page table.

    The chunks come after five tokens of another session, as a step lays them out.
    """
    counts = [5, *(count for _, count in spans)]
    firsts = np.cumsum([0, *counts])
    num_pages = max(-(-(start + count) // PAGE_SIZE) for start, count in [(0, 5), *spans])
    rows, scatter, tables, facts = [], [], [], []
    for number, (start, count) in enumerate([(0, 5), *spans]):
        pages = np.array(random.Random(number).sample(range(1000), num_pages))
        for at in range(0, count, row_len):
            own = min(row_len, count - at)
            scatter += [len(rows) * row_len + place for place in range(own)]
            rows.append(np.minimum(np.arange(start + at, start + at + row_len), start + count - 1))
            tables.append(pages)
        facts += [(start + i, pages) for i in range(count)]
    given = [(int(firsts[1 + i]), count) for i, (_, count) in enumerate(spans)]
    return Requests.of(given, np.array(rows), np.array(scatter), np.array(tables)), facts


def chunks(seed: int) -> list[tuple[int, int]]:
    rng = random.Random(seed)
    return [(rng.randrange(600), rng.randint(1, 300)) for _ in range(rng.randint(1, 4))]


def check_requests(seed: int) -> None:
    """Each token has the place, the request and the pages of its position, whatever the chunk."""
    spans = chunks(seed)
    found, facts = laid_out(spans, 16)
    assert found.tokens.tolist() == [*range(5, 5 + sum(count for _, count in spans))]
    assert len(found.gather) == REQUEST_LEN * len(found.tables)
    for token, place in zip(found.tokens, found.places, strict=True):
        position, pages = facts[token]
        number, at = divmod(int(place), REQUEST_LEN)
        assert at == position % REQUEST_LEN
        assert found.gather[place] == token
        end = position - at + REQUEST_LEN  # of the request's keys
        assert len(found.tables[number]) == end // PAGE_SIZE
        known = found.tables[number][: len(pages)]
        assert (known == pages[: len(known)]).all()
        assert set(found.tables[number]) <= set(pages), "no page of another session"


@mutant(Requests, "of")
def begins_with_the_chunk(of, spans, query_rows, scatter, page_table):
    """Requests begin where a chunk does: a token's place, and the end of its keys, depend on the chunk."""
    row_len = query_rows.shape[1]
    moved = query_rows.copy()
    for first, count in spans:
        rows = scatter[first : first + count] // row_len
        moved[rows] -= moved[rows].min() % REQUEST_LEN
    return of(spans, moved, scatter, page_table)


@mutant(Requests, "of")
def one_request_for_a_chunk(of, spans, query_rows, scatter, page_table):
    """The second half of each chunk is left out."""
    return of([(first, -(-count // 2)) for first, count in spans], query_rows, scatter, page_table)


@pytest.mark.parametrize("seed", range(5))
def test_a_token_has_its_place_whatever_chunk_it_comes_in(seed: int) -> None:
    check_requests(seed)


@pytest.mark.parametrize("change", [begins_with_the_chunk, one_request_for_a_chunk])
def test_a_place_that_depends_on_the_chunk_is_noticed(change, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch)
    with pytest.raises(AssertionError):
        check_requests(0)


def test_the_results_are_those_of_the_reference_and_no_other_token_has_one() -> None:
    spans = chunks(7)
    requests, facts = laid_out(spans, 16)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, HEADS, len(facts), DIM, generator=generator)
    keys, values = (torch.randn(1000, PAGE_SIZE, KV_HEADS, DIM, generator=generator) for _ in range(2))
    into = torch.zeros(1, len(facts), HEADS, DIM)
    planned: list[Wrapper] = []

    class Counted(Wrapper):
        def plan(self, *args, **options):
            planned.append(self)
            super().plan(*args, **options)

    own = library(Counted)
    for _ in range(2):  # as two layers of one step
        own.attend(requests, query, keys, values, 0.3, into)
    assert len(planned) == 1
    assert (into[0, :5] == 0).all()
    for token in range(5, len(facts)):
        position, pages = facts[token]
        k, v = (
            each[torch.from_numpy(pages)].flatten(0, 1)[: position + 1].transpose(0, 1).repeat_interleave(2, 0)
            for each in (keys, values)
        )
        want = F.scaled_dot_product_attention(query[0, :, token, None], k, v, scale=0.3)[:, 0]
        torch.testing.assert_close(into[0, token], want, rtol=1e-5, atol=1e-5)


def test_other_ranks_are_told_which_tokens_are_the_librarys() -> None:
    rng = random.Random(0)
    steps = [replace(chain(rng, 9, 0, [1]), copies=[(3, 4)]), chain(rng, 70, 60, [1, 2, 3]), chain(rng, 5, 4, [5])]
    steps[1].num_by_library, steps[2].num_by_library = 68, 5
    laid_out = StepPlan.of(steps, 1000)
    plan = StepPlan(*laid_out[:5], by_library=spans_by_library(steps))
    assert plan.by_library == ((9, 68), (79, 5))
    found = StepPlan.decode(plan.encode())
    assert (found.by_library, found.copies, found.shape) == (plan.by_library, ((3, 4),), plan.shape)
    assert torch.equal(found.buffer, plan.buffer)


# -- which results are believed ------------------------------------------------------------------------------


def differing(where: Callable[..., object]) -> type[Wrapper]:
    """The rows of the requests of which this holds are off by a bit."""

    class Differing(Wrapper):
        def request(self, number, query, keys, values):
            return super().request(number, query, keys, values) * (1 + 2**-7 * bool(where(self, number, query)))

    return Differing


ByBatch = differing(lambda self, number, query: len(self.lengths) > 1)  # tiles by lengths, as FlashInfer's planner
ByOrder = differing(lambda self, number, query: number == 0 and len(self.lengths) > 1)  # the first is split
BySplit = differing(lambda self, number, query: (query[0] == query[-1]).all())  # by other tokens of the chunk
ByPages = differing(lambda self, number, query: self.tables[number][0] > self.tables[number][-1])


class Farther(Wrapper):
    """Sees all keys of the request."""

    def request(self, number, query, keys, values):
        return super().request(number, query.roll(1, 0), keys, values)


class Unbuilt(Wrapper):
    def plan(self, *args, **options):
        raise RuntimeError("nvcc is missing\nand more")


class Unfinished(Wrapper):
    def request(self, number, query, keys, values):
        return super().request(number, query, keys, values) * torch.nan


@pytest.fixture
def fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short contexts, for the time that these take."""
    monkeypatch.setattr(flashinfer, "TRIED_REQUESTS", (0, 1, 4))


def test_a_library_whose_bits_hold_is_believed() -> None:
    for dtype in flashinfer.DTYPES:
        assert difference(library(), HEADS, KV_HEADS, DIM, dtype) is None


@pytest.mark.usefixtures("fewer")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (ByBatch, "has rows whose bits depend on the other requests of a batch, at position 0"),
        (ByOrder, "has rows whose bits depend on the other requests of a batch, at position 0"),
        (BySplit, "has rows whose bits depend on the tokens of a chunk, at position 0"),
        (ByPages, "has rows whose bits depend on "),
        (Farther, "is off by "),
        (Unfinished, "is off by inf of the largest number at position 0"),
        (Unbuilt, "failed: RuntimeError: nvcc is missing"),
    ],
)
def test_a_library_is_refused_whose_rows_depend_on_what_is_computed_with_them(make, reason: str) -> None:
    assert str(difference(library(make), HEADS, KV_HEADS, DIM, BFLOAT16)).startswith(reason)


# -- which tokens, models and devices -------------------------------------------------------------------------


def test_the_choice_is_a_function_of_the_position_and_the_prompt() -> None:
    """Whole blocks: tokens that two prompts both have whole blocks of are chosen alike."""
    block_len = flashinfer.BLOCK_LEN
    assert block_len % REQUEST_LEN == block_len % PAGE_SIZE == REQUEST_LEN % PAGE_SIZE == 0
    for num_tokens in (0, 1, 511, 512, 513, 1023, 1024, 100_000):
        found = num_by_library(num_tokens, block_len)
        assert found % block_len == 0
        assert 0 <= num_tokens - found < block_len
        assert num_by_library(num_tokens, 0) == 0


PLAIN = {"dtype": BFLOAT16, "layers": [LayerSpec(8, 128, 128), NO_KV], "window": None, "further": ()}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float32}, "takes float16 and bfloat16, and the model has float32"),
        ({"layers": [LayerSpec(1, 576, 0)]}, "attends to keys and values, and the model keeps latents"),
        ({"layers": [LayerSpec(8, 128, 128, True)]}, "reads pages in the model's dtype, and kv_cache_dtype is 'fp8'"),
        (
            {"layers": [LayerSpec(8, 192, 128)]},
            "takes heads of 64, 128, 256 numbers, and the model has 192 and 128",
        ),
        ({"layers": [LayerSpec(8, 80, 80)]}, "takes heads of 64, 128, 256 numbers, and the model has 80 and 80"),
        ({"window": 512}, "attends to the whole context, and the model has layers with windows or chunks"),
        ({"further": {"attention sinks"}}, "computes a plain softmax, and the model has attention sinks"),
        ({}, "needs FlashInfer, and it is not installed (pip install 'paceline[flashinfer]')"),
    ],
)
def test_what_the_library_does_not_compute_is_named(change: dict, reason: str) -> None:
    assert no_library(**PLAIN | change) == reason


def test_an_installed_library_is_taken_and_a_broken_one_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flashinfer")
    module.__spec__ = object()
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    assert "and it cannot be imported: module 'flashinfer' has no attribute" in str(no_library(**PLAIN))
    module.BatchPrefillWithPagedKVCacheWrapper = Wrapper
    assert no_library(**PLAIN) is None


def test_sinks_and_caps_of_scores_are_found_in_the_model() -> None:
    sinks = GptOssConfig(
        num_experts_per_tok=2,
        vocab_size=64,
        num_hidden_layers=1,
        hidden_size=32,
        num_local_experts=2,
        intermediate_size=16,
    )
    found = [loading.probe_layers(random_model(family)).further for family in ("llama", "gemma2", sinks)]
    assert found == [frozenset(), {"caps of its scores"}, {"attention sinks"}]


def test_it_is_refused_on_the_cpu_and_in_a_draft() -> None:
    with pytest.raises(ConfigError, match=r"attention is 'flashinfer', which runs on CUDA only, .* use 'auto' or"):
        prepare(random_model("llama"), compile=False, attention="flashinfer")
    kwargs = {"engine_kwargs": {"attention": "flashinfer"}}
    assert ServiceConfig.parse({"target_config": kwargs}).target_setup().options.attention == "flashinfer"
    with pytest.raises(ConfigError, match="attention is 'flashinfer' in a draft, whose contexts change"):
        ServiceConfig.parse({"draft_config": kwargs})
    assert ModelOptions(attention="flashinfer").attention == "flashinfer"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package whose wrapper is the reference."""
    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = Wrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    return module


@pytest.mark.usefixtures("fewer")
@pytest.mark.parametrize("make", [Wrapper, ByBatch])
def test_no_target_of_a_pool_computes_prompts_in_another_way(make, installed, monkeypatch, caplog) -> None:
    """Sessions move between them: one where its bits do not hold ends with the reason."""
    installed.BatchPrefillWithPagedKVCacheWrapper = make
    monkeypatch.setattr(loading, "kernel_for", lambda *given, **options: "sdpa")  # of a GPU it would be triton
    model = random_model("llama").to(BFLOAT16)
    if make is ByBatch:
        with pytest.raises(ConfigError, match=r"'flashinfer', which has rows whose bits .* use 'auto' or"):
            prepare(model, compile=False, attention="flashinfer")
        return
    with caplog.at_level("INFO", "paceline"):
        assert prepare(model, compile=False, attention="flashinfer").library is not None
    assert "prompts on cpu: FlashInfer, whose bits depend on no batch" in caplog.text


@pytest.mark.usefixtures("fewer", "installed")
@pytest.mark.parametrize("holds_there", [True, False])
def test_one_rank_without_it_is_enough(holds_there: bool, monkeypatch) -> None:
    """All ranks end, since pages of the first one's choice are computed on all."""
    group = SimpleNamespace(least=lambda value: min(value, holds_there))
    monkeypatch.setattr(loading, "share_of", lambda model: SimpleNamespace(group=group))
    model, layers = random_model("llama").to(BFLOAT16), [LayerSpec(KV_HEADS, DIM, DIM), NO_KV]
    with nullcontext() if holds_there else pytest.raises(ConfigError, match="'flashinfer', which fails on another"):
        loading.library_for(model, layers)
