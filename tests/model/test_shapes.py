"""Batch invariance, bit for bit: one token's logits whatever chunk, batch and key length it is computed in.

The recipe (``shapes.py``) was measured, not derived: a platform may break it. There the self-test must say so, and
that it can say so is tested with runners that are made to differ.
"""

from __future__ import annotations

import itertools
import random
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.compilers import needs_products
from tests.support.models import chunk, prompt, random_model
from tests.support.rings import nightly, slow
from torch import Tensor

from paceline.core.native import has_amx
from paceline.errors import ConfigError, PacelineError
from paceline.model import selftest, shapes
from paceline.model.attention import native as cpu_attention
from paceline.model.compiled import linear as cpu_linear
from paceline.model.compiled import package
from paceline.model.linear import native as linear_attention
from paceline.model.loading import prepare
from paceline.model.runner import ModelRunner
from paceline.model.selftest import check_invariance
from paceline.model.shapes import Shapes, padded_tokens
from paceline.model.step_plan import SequenceStep
from paceline.types import PAGE_SIZE, pages_for

DTYPES = (torch.float32, torch.bfloat16)


def make(dtype: torch.dtype, pages: int = 40, family: str = "llama") -> ModelRunner:
    return prepare(random_model(family, dtype=dtype), compile=False).runner(pages)


def in_chunks(
    runner: ModelRunner, tokens: list[int], start: int, sizes: list[int], pages: list[int], beside=None
) -> Tensor:
    """Logits of tokens[start:], in chunks of the given sizes (the last repeats)."""
    out, at, i = [], start, 0
    while at < len(tokens):
        stop = min(len(tokens), at + sizes[min(i, len(sizes) - 1)])
        steps = [chunk(tokens, at, stop, pages), *(beside(i) if beside else [])]
        out.append(runner.forward(steps)[: stop - at].clone())
        at, i = stop, i + 1
    return torch.cat(out)


def different(a: Tensor, b: Tensor) -> int:
    return int((a != b).any(-1).sum())


def held_here(runner: ModelRunner) -> bool:
    """Whether this platform holds the recipe; if not, the report must say so."""
    report = check_invariance(runner, 2048)
    assert report.holds == ("NOT batch-invariant" not in str(report))
    return report.holds


@pytest.mark.parametrize(
    ("dtype", "family"),
    [
        (torch.float32, "llama"),
        *slow([(torch.bfloat16, "gemma3"), (torch.bfloat16, "llama")]),
        *nightly([(torch.float32, "gemma3"), (torch.float32, "gpt2"), (torch.bfloat16, "gpt2")]),
    ],
)
def test_chunk_sizes_1_to_40(dtype: torch.dtype, family: str) -> None:
    """Verifying n tokens gives the bits of decoding them one by one, n = 1..40, across the 64-key boundary."""
    runner = make(dtype, family=family)
    if not held_here(runner):
        return
    tokens = prompt(1, 100)
    pages = runner.cache.allocate(pages_for(100))
    runner.forward([chunk(tokens, 0, 40, pages)])
    want = in_chunks(runner, tokens, 40, [1], pages)
    for size in range(2, 41):
        assert different(in_chunks(runner, tokens, 40, [size], pages), want) == 0, size


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow([torch.float32])])
def test_key_lengths_across_tiles(dtype: torch.dtype) -> None:
    """Around 256, 320, 512 and 1024 keys, where the attention kernel changes how it splits its sums."""
    runner = make(dtype)
    if not held_here(runner):
        return
    tokens = prompt(2, 1100)
    pages = runner.cache.allocate(pages_for(1100))
    for boundary in (192, 256, 320, 384, 512, 576, 768, 832, 1024):
        start, stop = boundary - 6, boundary + 6
        runner.forward([chunk(tokens[:start], max(0, start - 64), start, pages)])
        want = in_chunks(runner, tokens[:stop], start, [1], pages)
        for sizes in ([2], [5], [12], [7, 5], [1, 11]):
            assert different(in_chunks(runner, tokens[:stop], start, sizes, pages), want) == 0, (boundary, sizes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow([torch.float32])])
def test_prefill_in_any_chunks(dtype: torch.dtype) -> None:
    """The chunks of a prompt depend on who shares the step: logits and later decoding do not."""
    runner = make(dtype)
    if not held_here(runner):
        return
    tokens = prompt(3, 300)
    results = []
    for sizes in ([300], [256, 44], [64], [33], [17, 200, 83], [1, 31, 100]):
        pages = runner.cache.allocate(pages_for(300))
        results.append(in_chunks(runner, tokens, 0, sizes, pages))
        runner.cache.release(pages)
    for other in results[1:]:
        assert different(other, results[0]) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow([torch.float32])])
def test_batch_compositions(dtype: torch.dtype) -> None:
    """Random neighbours, short and long, near and far, before and after: the bits of being alone."""
    runner = make(dtype)
    if held_here(runner):
        assert num_different_in_batches(runner, rounds=12) == 0


def num_different_in_batches(runner: ModelRunner, rounds: int) -> int:
    """Rows of logits, of 40 a round, that differ from decoding alone."""
    rng, num_different = random.Random(0), 0
    tokens = prompt(4, 90)
    pages = runner.cache.allocate(2)
    runner.forward([chunk(tokens, 0, 50, pages)])
    want = in_chunks(runner, tokens, 50, [1], pages)
    others = [prompt(10 + i, 400) for i in range(4)]
    their_pages = [runner.cache.allocate(pages_for(400)) for _ in others]
    for other, held in zip(others, their_pages, strict=True):
        runner.forward([chunk(other, 0, 350, held)])

    for _ in range(rounds):
        at = 50
        while at < 90:
            size = min(rng.randint(1, 9), 90 - at)
            steps = [(chunk(tokens, at, at + size, pages), True)]
            for other, held in rng.sample(list(zip(others, their_pages, strict=True)), rng.randint(0, 4)):
                start = rng.choice((0, 10, 250, 349))
                stop = start + rng.choice((1, 3, 16, 40))
                steps.append((chunk(other, start, stop, held), False))
            rng.shuffle(steps)
            out = runner.forward([s for s, _ in steps]).split([s.num_logits for s, _ in steps])
            got = next(rows for rows, (_, ours) in zip(out, steps, strict=True) if ours)
            num_different += different(got, want[at - 50 : at - 50 + size])
            at += size
    return num_different


# -- the self-test itself -------------------------------------------------------------------------------------------


def perturbed(runner: ModelRunner, differs) -> ModelRunner:
    """The runner with its logits changed by one unit in the last place for some shapes of a step."""
    step = runner.step_function

    def changed(*inputs):
        logits = step(*inputs)
        return torch.nextafter(logits, torch.full_like(logits, 1e9)) if differs(*inputs) else logits

    return ModelRunner(changed, runner.cache, dtype=runner.dtype, sliding_window=None, vocab_size=runner.vocab_size)


@pytest.mark.parametrize(
    "differs",
    [
        lambda ids, *_: ids.shape[1] >= 17,
        lambda ids, *_: 4 < ids.shape[1] <= 8,
        lambda *inputs: inputs[5].shape[0] > 1,  # a neighbour
        lambda ids, *_: ids.shape[1] >= 256,
        lambda *inputs: inputs[5].shape[1] >= 25 and inputs[0].shape[1] > 4,  # verification of a long context
    ],
    ids=["many_tokens", "few_tokens", "neighbours", "largest_step", "long_context"],
)
def test_the_self_test_notices_a_runner_that_differs(differs) -> None:
    """One unit in the last place for some shapes is enough: the report says NOT, with counts."""
    runner = make(torch.float32)
    report = check_invariance(perturbed(runner, differs))
    assert not report.holds
    assert report.num_different > 0
    assert str(report).startswith("NOT batch-invariant here: ")
    assert f"{report.num_different} of {report.num_rows} rows differ" in str(report)
    assert runner.cache.num_used == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_self_test_says_when_it_holds(dtype: torch.dtype) -> None:
    """Its own words, either way, and no page is kept."""
    runner = make(dtype, pages=8)
    report = check_invariance(runner)
    word = "batch-invariant: " if report.holds else "NOT batch-invariant here: "
    assert str(report).startswith(word)
    assert report.num_rows > 4 * 96
    assert runner.cache.num_used == 0


def test_the_self_test_reaches_the_largest_step_and_the_longest_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is time; and says how far it came."""
    monkeypatch.setattr(selftest, "MIN_BUDGET_S", 600.0)
    runner, lengths = make(torch.float32, pages=80), []
    step = runner.step_function
    runner.step_function = lambda *inputs: (lengths.append(inputs[0].shape[1]), step(*inputs))[1]
    report = check_invariance(runner, 4096, 512)
    assert report.holds, str(report)
    assert report.max_step_tokens == 512
    assert max(lengths) == runner.shapes.tokens(512)
    assert 4096 - PAGE_SIZE < report.max_context <= 4096
    assert f"steps of up to 512 tokens, contexts of up to {report.max_context}" in str(report)
    assert check_invariance(runner, 300).max_context <= 300


def test_the_self_test_spends_little_time_on_long_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step of a longer context is begun that would take it beyond its time, by the last one."""
    monkeypatch.setattr(selftest, "MIN_BUDGET_S", 0.0)
    now = itertools.count()
    monkeypatch.setattr(selftest.time, "perf_counter", lambda: float(next(now)))
    report = check_invariance(make(torch.float32, pages=80), 4096)
    assert report.max_context < 1000


def test_the_self_test_notices_that_prefill_leaves_other_keys_than_decoding() -> None:
    """As a session that is resumed on another target would: its context comes from one large chunk."""
    runner = make(torch.float32)
    step = runner.step_function

    def changed(*inputs):
        logits = step(*inputs)
        if inputs[0].shape[1] > 200 and inputs[5].shape[0] == 1:  # a long chunk, alone
            for values in inputs[10]:
                flat = values.view(-1, *values.shape[2:])
                flat[inputs[3]] = torch.nextafter(flat[inputs[3]], torch.tensor(1e9))
        return logits

    runner.step_function = changed
    report = check_invariance(runner)
    assert not report.holds


@pytest.mark.parametrize(
    "mistake",
    [
        {"also": ()},  # the second branch has no row of what both share
        {"copies": ()},  # and none of the context in the page that it leaves
    ],
    ids=["shared_rows", "copied_page"],
)
def test_the_self_test_notices_wrong_branches(mistake: dict[str, Any]) -> None:
    """A model whose chunks are right, and whose trees are not."""
    runner = make(torch.float32, pages=8)
    assert "branches of a tree" in str(check_invariance(runner))
    forward = runner.forward

    def wrong(steps):
        return forward([replace(step, **mistake) for step in steps])

    runner.forward = wrong
    report = check_invariance(runner)
    assert not report.holds
    assert runner.cache.num_used == 0


WITHOUT = {
    "least_tokens": {"least_tokens": 1},
    "query_multiple": {"query_multiple": 1},
    "key_pages": {"key_pages": False},
}


@pytest.mark.parametrize(
    ("rule", "dtype"),
    [
        ("least_tokens", torch.float32),
        *slow([("query_multiple", torch.bfloat16), ("key_pages", torch.float32), ("least_tokens", torch.bfloat16)]),
        *nightly([("query_multiple", torch.float32), ("key_pages", torch.bfloat16)]),
    ],
)
def test_each_rule_without_it(rule: str, dtype: torch.dtype) -> None:
    """A rule switched off: either the bits differ and the report says so, or this platform does not need the rule.

    What must never happen is a report that holds although decoding and verification differ here.
    """
    runner = make(dtype, pages=8)
    runner.shapes = replace(runner.shapes, **WITHOUT[rule])
    report = check_invariance(runner)
    assert report.holds == ("NOT batch-invariant" not in str(report))
    tokens = prompt(1, 290)
    pages = runner.cache.allocate(pages_for(290))
    runner.forward([chunk(tokens, 0, 190, pages)])
    want = in_chunks(runner, tokens, 190, [1], pages)
    differ = sum(different(in_chunks(runner, tokens, 190, [n], pages), want) for n in (2, 5, 9, 17))
    assert (differ > 0) == (not report.holds)


EXACT = Shapes.needed(native=True, promised=True, spare_tokens=0)


@pytest.mark.slow
def test_at_least_one_rule_is_needed_in_fp32_where_mkl_is() -> None:
    """The negative control of all of the above: without any rule fp32 differs, if its products come from MKL."""
    runner = make(torch.float32, pages=8)
    assert runner.shapes == replace(Shapes(), spare_tokens=runner.shapes.spare_tokens)
    runner.shapes = EXACT
    report = check_invariance(runner)
    if torch.backends.mkl.is_available() and not has_amx():  # MKL's strict mode needs none
        assert not report.holds
    assert ("NOT batch-invariant" in str(report)) != report.holds


# -- which rules a model keeps --------------------------------------------------------------------------------------


def test_exact_shapes_are_what_a_step_has() -> None:
    """One token is one token; a step without logits still computes a row, for a size of zero is no shape."""
    for n in range(1, 600):
        assert (EXACT.tokens(n), EXACT.row_len(n), EXACT.pages(n)) == (n, n, n)
    assert EXACT.tokens(0) == 1
    assert Shapes.needed(native=True, promised=True, spare_tokens=3).tokens(5) == 8


def test_a_model_keeps_the_rules_that_it_needs() -> None:
    """All of them where other libraries multiply; none on native kernels; and none of a draft's are for bits."""
    assert Shapes.needed(native=False, promised=True, spare_tokens=2) == Shapes(spare_tokens=2)
    draft = Shapes.needed(native=False, promised=False, spare_tokens=2)
    assert (draft.tokens(1), draft.row_len(1), draft.pages(4)) == (1, 1, 4)
    assert draft.tokens(33) == 36, "oneDNN remembers every number of tokens"
    assert Shapes.needed(native=True, promised=False, spare_tokens=2) == EXACT


class NativeStep:
    """Says that it needs no padding, and computes nothing."""

    is_native = True

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def __call__(self, *inputs: Tensor) -> Tensor:
        return torch.zeros(1, len(inputs[2]), self.vocab_size)


class Compiled:
    """A compilation that has ended."""

    execution = "compiled"

    def __init__(self, step: NativeStep) -> None:
        self.steps = [step]

    def start(self) -> None:
        """Nothing is left to do."""

    def take(self) -> NativeStep | None:
        return self.steps.pop() if self.steps else None


def test_a_runner_pads_by_what_it_runs() -> None:
    """A draft is eager first: its shapes change with its step. A target's keep the rules until its step is native."""
    model = prepare(random_model("llama"), compile=False)
    step = chunk([1, 2, 3], 0, 1, [0])

    def sizes(runner: ModelRunner) -> tuple[int, int]:
        shape = runner.plan([step]).shape
        return shape.tokens, shape.row_len

    for promised, spare in ((True, 2), (False, 0)):
        runner = model.runner(4, promised=promised)
        assert runner.shapes == Shapes.needed(native=False, promised=promised, spare_tokens=spare)
        assert sizes(runner) == ((4, 4) if promised else (1, 1))
        native = NativeStep(runner.vocab_size)
        assert sizes(runner.compiled(native)) == (1 + spare, 1)
        runner.follow(Compiled(native))  # type: ignore[arg-type]
        assert runner.forward([step]).shape == (1, runner.vocab_size)
        assert runner.shapes == Shapes.needed(native=True, promised=promised, spare_tokens=spare)


@needs_products
@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", *nightly(["gemma3"])])
@pytest.mark.usefixtures("own_cache")
def test_a_native_model_has_equal_bits_in_steps_of_any_size(family: str) -> None:
    """Compiled in bfloat16 it computes exactly the tokens of a step; verified, batched and prefilled as it decodes."""
    assert cpu_linear.usable()
    assert cpu_attention.unavailable() is None
    runner = prepare(random_model(family, dtype=torch.bfloat16), compile=True).runner(40)
    assert runner.shapes == replace(EXACT, spare_tokens=runner.shapes.spare_tokens)
    assert runner.plan([chunk([1], 0, 1, [0])]).shape.tokens == 1 + runner.shapes.spare_tokens
    report = check_invariance(runner, 2048)
    assert report.holds, str(report)
    assert num_different_in_batches(runner, rounds=40) == 0
    tokens = prompt(1, 330)
    pages = runner.cache.allocate(pages_for(330))
    want = in_chunks(runner, tokens, 0, [1], pages)
    for sizes in ([330], [2], [3, 1], [5], [17, 1, 2], [63, 1, 64, 129]):
        assert different(in_chunks(runner, tokens, 0, sizes, pages), want) == 0, sizes


@pytest.mark.parametrize(
    ("calls", "is_native"),
    [
        ((b"packed_linear", b"attend_pages"), True),
        ((b"packed_linear", b"ranks_sum", b"layer_callback", b"attend_pages"), True),
        ((), True),
        ((b"packed_linear", b"_scaled_dot_product_attention"), False),
        ((b"packed_linear", b"attend_pages", b"bmm_out"), False),
        ((b"mkldnn__linear_pointwise", b"attend_pages"), False),
    ],
)
def test_a_package_is_native_if_it_calls_no_other_operator(
    calls: tuple[bytes, ...], is_native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own source; what only manages tensors does not count."""
    path, found = tmp_path / "step.pt2", []
    source = b"aoti_torch_empty_strided(2); " + b"".join(b"aoti_torch_cpu_" + name + b"(x);\n" for name in calls)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("model/step.kernel.cpp", b"for (;;) {}")
        file.writestr("model/step.wrapper.cpp", source)
    monkeypatch.setattr(package, "CompiledPackage", lambda path, *, is_native: found.append(is_native))
    package.load_package(path)
    assert found == [is_native]


@needs_products
def test_every_operator_of_ours_leaves_a_package_native() -> None:
    """A package's source declares them all, also those that it does not call."""
    assert cpu_linear.usable()
    assert cpu_attention.unavailable() is linear_attention.unavailable() is None
    made = [cpu_attention, linear_attention]
    declared = cpu_linear.shims() | {op: shim for each in made for op, shim in each.compiled_shims().items()}
    names = {found for shims in declared.values() for found in package._LIBRARY_CALL.findall("".join(shims).encode())}
    assert len(names) >= 5
    assert names <= package._NATIVE


def test_padded_pages_cover_and_are_stable() -> None:
    """Hand-computed: 4 and 5 pages of a 512-key block become 6; padding never shrinks and is idempotent."""
    assert [shapes.padded_pages(n) for n in range(1, 18)] == [
        1, 2, 3, 6, 6, 6, 7, 8, 9, 10, 11, 14, 14, 14, 15, 16, 17,
    ]  # fmt: skip
    assert [shapes.padded_row_len(n) for n in (1, 4, 5, 8, 9)] == [4, 4, 8, 8, 12]
    for n in range(1, 100):
        assert shapes.padded_pages(n) >= n
        assert shapes.padded_pages(shapes.padded_pages(n)) == shapes.padded_pages(n)


@pytest.mark.slow
def test_a_small_cache_or_a_short_model_is_checked_within_its_bounds() -> None:
    """The self-test adapts to what there is; too little is a configuration error, not a crash."""
    runner = make(torch.float32, pages=3)
    assert check_invariance(runner, max_len=64).num_rows > 0
    gpt2 = prepare(_short_gpt2(), compile=False)
    assert gpt2.max_len == 48
    assert check_invariance(gpt2.runner(8), max_len=gpt2.max_len).num_rows > 0
    with pytest.raises(ConfigError, match="KV pages"):
        check_invariance(make(torch.float32, pages=1))
    assert issubclass(ConfigError, PacelineError)
    assert PAGE_SIZE == 64


def _short_gpt2():
    from transformers import GPT2Config

    return random_model(
        GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=48, tie_word_embeddings=False)
    )


def test_steps_come_in_few_sizes() -> None:
    """Every size costs memory for good; none is padded by more than a quarter."""
    sizes = [padded_tokens(n) for n in range(1, 1025)]
    assert len(set(sizes)) < 60
    assert all(n <= size <= max(4, 1.25 * n) for n, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes)
    runner = make(torch.float32)
    seen = set()
    step = runner.step_function
    runner.step_function = lambda *inputs: (seen.add((inputs[0].shape[1], len(inputs[2]))), step(*inputs))[1]
    pages = runner.cache.allocate(4)
    for n in range(60, 90):
        assert runner.forward([SequenceStep([1] * n, range(n), range(n), pages, num_logits=n - 20)]).shape[0] == n - 20
    spare = runner.shapes.spare_tokens  # behind the last token; where there is room anyway it adds nothing
    assert spare == 2
    assert {size for size, _ in seen} == {60 + spare, 64, 64 + spare, 80, 80 + spare, 96}
    runner.shapes = Shapes()
    seen.clear()
    for n in range(60, 90):
        runner.forward([SequenceStep([1] * n, range(n), range(n), pages, num_logits=n - 20)])
    assert {size for size, _ in seen} == {60, 64, 80, 96}
    assert {size for _, size in seen} == {40, 44, 48, 52, 56, 60, 64, 80}
    assert all(padded_tokens(n, 3) in (padded_tokens(n), padded_tokens(n) + 3) for n in range(1, 1025))
    assert all(padded_tokens(n, 3) - n >= 3 for n in range(1, 1025))
