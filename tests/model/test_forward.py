"""The paged forward against transformers' own forward: eight families, chunks, neighbours, windows, trees."""

from __future__ import annotations

import random

import pytest
import torch
from tests.support.models import FAMILIES, SLIDING_WINDOW, chunk, noisy_copy, prompt, random_model
from torch import Tensor

from paceline.model.loading import LoadedModel, prepare
from paceline.model.runner import ModelRunner
from paceline.model.step_plan import SequenceStep
from paceline.types import PAGE_SIZE, pages_for


def reference(family: str, token_ids: list[int]) -> Tensor:
    """[tokens, vocab] logits by transformers alone, its own attention and masks."""
    with torch.no_grad():
        return random_model(family)(torch.tensor([token_ids]), use_cache=False).logits[0]


def loaded(family: str) -> LoadedModel:
    return prepare(random_model(family), compile=False)


def ragged(runner: ModelRunner, texts: list[list[int]], seed: int, longest: int = 40) -> list[Tensor]:
    """Logits of every token of several sequences, in chunks of random length, several sequences in each step."""
    rng = random.Random(seed)
    pages: list[list[int]] = [[] for _ in texts]
    for page in runner.cache.allocate(sum(pages_for(len(t)) for t in texts)):  # pages interleave
        i = rng.choice([i for i, t in enumerate(texts) if len(pages[i]) < pages_for(len(t))])
        pages[i].append(page)
    done, logits = [0] * len(texts), [[] for _ in texts]
    while any(d < len(t) for d, t in zip(done, texts, strict=True)):
        left = [i for i, t in enumerate(texts) if done[i] < len(t)]
        part = [i for i in left if rng.random() < 0.7] or left[:1]
        rng.shuffle(part)
        stops = {i: min(len(texts[i]), done[i] + rng.choice((1, 2, 5, rng.randint(1, longest)))) for i in part}
        out = runner.forward([chunk(texts[i], done[i], stops[i], pages[i]) for i in part])
        for i, rows in zip(part, out.split([stops[i] - done[i] for i in part]), strict=True):
            logits[i].append(rows.clone())
            done[i] = stops[i]
    for p in pages:
        runner.cache.release(p)
    return [torch.cat(rows) for rows in logits]


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_chunks_equal_transformers(family: str) -> None:
    """fp32 within 1e-5 of the logits' scale, the same argmax, whatever shares the step; windows included."""
    runner = loaded(family).runner(16)
    texts = [prompt(i, n) for i, n in enumerate((1, 3, SLIDING_WINDOW + 1, PAGE_SIZE, 150))]
    for seed in range(2):
        for text, got in zip(texts, ragged(runner, texts, seed), strict=True):
            want = reference(family, text)
            assert got.shape == want.shape
            assert (got - want).abs().max() <= 1e-5 * want.abs().max()
            assert torch.equal(got.argmax(-1), want.argmax(-1))


@pytest.mark.parametrize("family", ["gemma3", "mistral", "gemma2"])
def test_the_sliding_window_matters_here(family: str) -> None:
    """Negative control of the windows above: a token beyond the window changes nothing in a one-layer reach."""
    text = prompt(1, 100)
    changed = [text[0] + 1 if text[0] < 299 else 10, *text[1:]]
    runner = loaded(family).runner(16)
    a, b = (ragged(runner, [t], 0)[0] for t in (text, changed))
    assert not torch.equal(a[1], b[1])
    if family == "mistral":  # all layers slide: two layers of 24 reach 46 tokens back
        assert torch.equal(a[2 * SLIDING_WINDOW :], b[2 * SLIDING_WINDOW :])


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_generate(family: str) -> None:
    """32 tokens by decoding through the runner."""
    model = random_model(family)
    text = prompt(3, 70)
    ids = torch.tensor([text])
    want = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=32, pad_token_id=0)
    runner = loaded(family).runner(4)
    pages = runner.cache.allocate(2)
    tokens = list(text)
    logits = runner.forward([chunk(tokens, 0, len(tokens), pages)])
    for _ in range(32):
        tokens.append(int(logits[-1].argmax()))
        logits = runner.forward([chunk(tokens, len(tokens) - 1, len(tokens), pages)])
    assert tokens == want[0].tolist()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_tree_in_one_region_equals_its_paths(family: str) -> None:
    """Rows out of order, siblings side by side: each leaf's logits are those of its own path."""
    runner = loaded(family).runner(4)
    context = prompt(1, 70)
    pages = runner.cache.allocate(2)
    runner.forward([chunk(context, 0, 70, pages)])
    # token, parent (-1: the context), row; the rows are shuffled on purpose
    nodes = [(11, -1, 75), (12, -1, 72), (13, 0, 80), (14, 0, 71), (15, 2, 90), (16, 3, 70)]
    depth, path = [], []
    for token, parent, _ in nodes:
        depth.append(1 if parent < 0 else depth[parent] + 1)
        path.append([*(path[parent] if parent >= 0 else []), token])
    key_positions, own = torch.arange(91), list[list[int]]()
    visible = key_positions < 70
    for i, (_, parent, row) in enumerate(nodes):
        own.append([*(own[parent] if parent >= 0 else ()), row])
        key_positions[row] = 69 + depth[i]
    out = runner.forward(
        [
            SequenceStep(
                [n[0] for n in nodes], [69 + d for d in depth], [n[2] for n in nodes], pages,
                len(nodes), visible, key_positions, own,
            )
        ]
    )  # fmt: skip
    for i, tokens in enumerate(path):
        want = reference(family, [*context, *tokens])[-1]
        assert (out[i] - want).abs().max() <= 1e-5 * want.abs().max()


def test_nothing_of_other_pages_or_scratch_leaks() -> None:
    """Whatever finite values lie in pages of others, in scratch or beyond the context: the bits do not change."""
    runner = loaded("gemma3").runner(8)
    texts = [prompt(i, n) for i, n in enumerate((100, 63, 250))]
    want = ragged(runner, texts, 0)
    for value in (1e4, -1e4):
        for pool in (*runner.cache.keys, *runner.cache.values):
            pool.fill_(value)
        for got, expected in zip(ragged(runner, texts, 0), want, strict=True):
            assert torch.equal(got, expected)


def test_scratch_is_never_read_even_if_it_is_not_finite() -> None:
    """Padding repeats a session's own page, so a NaN that one session left in scratch harms nobody."""
    runner = loaded("llama").runner(8)
    texts = [prompt(i, n) for i, n in enumerate((100, 63, 250))]
    want = ragged(runner, texts, 0)
    for pool in (*runner.cache.keys, *runner.cache.values):
        pool[-1] = float("nan")
    for got, expected in zip(ragged(runner, texts, 0), want, strict=True):
        assert torch.equal(got, expected)


def test_only_the_logits_that_were_asked_for() -> None:
    """num_logits of each step, in order; prefill chunks may want none."""
    runner = loaded("llama").runner(8)
    a, b = prompt(1, 20), prompt(2, 9)
    pages = [runner.cache.allocate(1), runner.cache.allocate(1)]
    steps = [
        SequenceStep(a, range(20), range(20), pages[0], num_logits=0),
        SequenceStep(b, range(9), range(9), pages[1], num_logits=2),
    ]
    out = runner.forward(steps)
    assert out.shape == (2, runner.vocab_size)
    assert (out - reference("llama", b)[-2:]).abs().max() < 1e-4
    assert runner.num_forwards == 1


def test_the_noisy_copy_is_another_model() -> None:
    """The tests' own helper: neither equal nor unrelated."""
    model = random_model("llama")
    ids = torch.tensor([prompt(0, 40)])
    with torch.no_grad():
        a, b = (m(ids, use_cache=False).logits[0].argmax(-1) for m in (model, noisy_copy(model, 0.05)))
    assert 0.3 < (a == b).float().mean() < 1.0
