"""A kernel library for whole blocks of prompts: no token of a session depends on chunks, drafts, caches or neighbours.

Its bits differ from our kernels'. A test could miss that, so here all of its results are eight times as large,
with the other sign: what is computed in the other way even once changes the text. On the CPU, with references of both.
"""

from dataclasses import replace

import pytest
from tests.support import flashinfer as fake
from tests.support.models import noisy_copy, prompt, random_model
from tests.support.mutants import mutant
from tests.support.pump import Pump, Request, assert_continued, assert_same, in_mode, plain_reference

from paceline.model import kv_cache
from paceline.model.attention.flashinfer import Library, num_by_library
from paceline.model.loading import LoadedModel, prepare
from paceline.model.selftest import InvarianceReport, check_blocks
from paceline.target import session
from paceline.target.scheduler import Scheduled
from paceline.types import PAGE_SIZE, Mode, SamplingParams

BLOCK_LEN = 2 * PAGE_SIZE
MAX_TOKENS = 16


class Apart(fake.BatchPrefillWithPagedKVCacheWrapper):
    gain = -8.0


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> tuple[LoadedModel, LoadedModel]:
    """A target as on a GPU, with a library, and its draft."""
    weights = random_model("llama")
    draft = prepare(noisy_copy(weights, 0.05), compile=False)
    return fake.loaded(weights, Apart, BLOCK_LEN, monkeypatch), draft


def requests() -> dict[str, Request]:
    """Prompts of whole blocks, of blocks and a rest, and a shorter one; two begin alike for more than a block. The
    output of one ends its second block."""
    shared = prompt(5, BLOCK_LEN + PAGE_SIZE)
    prompts = [
        prompt(0, BLOCK_LEN),
        [*shared, *prompt(1, BLOCK_LEN)],
        [*shared, *prompt(2, PAGE_SIZE - 6)],
        prompt(3, 40),
    ]
    return {
        str(i): Request(each, SamplingParams(temperature=float(i % 2), seed=i, max_tokens=MAX_TOKENS, ignore_eos=True))
        for i, each in enumerate(prompts)
    }


def check_modes(models: tuple[LoadedModel, LoadedModel], mode: Mode, **options) -> Pump:
    """Sessions together, in chunks of other sizes, are those that are computed alone."""
    target, draft = models
    expected = plain_reference(target, requests(), max_step_tokens=BLOCK_LEN)
    pump = Pump(target, draft if mode is not Mode.PLAIN else None, **options)
    assert_same(pump.run(in_mode(requests(), mode)), expected)
    return pump


def check_second_turn(models: tuple[LoadedModel, LoadedModel]) -> None:
    """A second prompt repeats the first one's prompt and output, whose pages are cached: its text is that of a target
    that has never seen them, and so is the first one's after it."""
    target, _ = models
    first = {"first": requests()["2"]}
    pump = Pump(target, None, late=0.0)
    output = pump.run(first)["first"].token_ids
    text = [*first["first"].prompt, *output, *prompt(8, BLOCK_LEN)]
    second = {"second": Request(text, SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True))}
    expected = plain_reference(target, second)
    assert_same({"second": pump.run(second)["second"]}, expected)
    again = {"again": first["first"]}
    assert_same({"again": pump.run(again)["again"]}, plain_reference(target, again))


def test_the_library_is_told_from_our_kernels(models: tuple[LoadedModel, LoadedModel]) -> None:
    """Otherwise this file would show nothing."""
    target, _ = models
    long, without = {"1": requests()["1"]}, replace(target, library=None)
    assert plain_reference(target, long)["1"].token_ids != plain_reference(without, long)["1"].token_ids
    short = {"3": requests()["3"]}
    assert_same(plain_reference(target, short), plain_reference(without, short))


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        (Mode.OVERLAPPED, {"adaptive": False}),
        (Mode.PLAIN, {"pages": 9, "max_step_tokens": 37}),  # sessions are preempted, and computed again
    ],
)
def test_sessions_have_the_tokens_of_plain_decoding(models, mode: Mode, options: dict) -> None:
    pump = check_modes(models, mode, **options)
    assert bool(pump.target.stats.preemptions) == ("pages" in options)


def test_pages_of_a_prompt_and_of_an_output_are_not_taken_for_each_other(models) -> None:
    check_second_turn(models)


@mutant(session, "page_hash")
def one_kind_of_pages(page_hash, previous, token_ids, *, by_library):
    return page_hash(previous, token_ids)


@mutant(kv_cache, "page_hash")
def one_kind_of_pages_is_found(page_hash, previous, token_ids, *, by_library):
    return page_hash(previous, token_ids)


def test_one_kind_of_pages_is_noticed(models, monkeypatch: pytest.MonkeyPatch) -> None:
    one_kind_of_pages(monkeypatch)
    one_kind_of_pages_is_found(monkeypatch)
    with pytest.raises(AssertionError):
        check_second_turn(models)


def check_continued(target: LoadedModel) -> None:
    """A session that goes on elsewhere is computed as it was, though its context has one block more by then."""
    one = {"2": requests()["2"]}
    assert_continued(Pump(target, None, late=0.0), one, plain_reference(target, one), [MAX_TOKENS - 2])


def test_tokens_of_an_output_stay_with_our_kernels(models) -> None:
    check_continued(models[0])


def check_small_chunks(target: LoadedModel) -> None:
    long = {"1": requests()["1"]}
    expected = plain_reference(target, long, max_step_tokens=2 * BLOCK_LEN)
    assert_same(Pump(target, None, late=0.0, max_step_tokens=37).run(long), expected)


@mutant(Scheduled, "sequence_steps")
def blocks_of_the_context(sequence_steps, part):
    """The library attends to whole blocks of the context, whoever has generated them."""
    steps = sequence_steps(part)
    end = min(part.stop, num_by_library(len(part.session.tokens), BLOCK_LEN))
    steps[0].num_by_library = max(0, end - part.start)
    return steps


@mutant(Scheduled, "sequence_steps")
def blocks_that_are_whole_in_a_chunk(sequence_steps, part):
    """The library attends to a chunk only if it is a block."""
    steps = sequence_steps(part)
    if part.stop - part.start < BLOCK_LEN:
        steps[0].num_by_library = 0
    return steps


@pytest.mark.parametrize(
    ("change", "check"),
    [(blocks_of_the_context, check_continued), (blocks_that_are_whole_in_a_chunk, check_small_chunks)],
)
def test_another_choice_is_noticed(change, check, models, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch)
    with pytest.raises(AssertionError):
        check(models[0])


class ByChunk(Apart):
    """A row's bits depend on the other tokens of its request."""

    def request(self, number, query, keys, values):
        rows = super().request(number, query, keys, values)
        return rows * (1 + 2**-7 * bool((query[0] == query[1]).all()))


@pytest.mark.parametrize("make", [Apart, ByChunk])
def test_the_self_test_compares_blocks_of_prompts(models, make) -> None:
    target = replace(models[0], library=Library(models[0].device, make))
    report = InvarianceReport()
    check_blocks(report, target.runner(12), 400, 64)
    assert report.num_rows == BLOCK_LEN + 8, "of the block, and after it"
    assert report.holds == (make is Apart)
