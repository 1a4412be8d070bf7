"""The graphs of one model, which differ in the hidden states that leave them: the logits have the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.model.test_logit_rows import config, logits_of
from tests.support.models import FAMILIES, noisy_copy, prompt, random_model

from paceline.errors import ConfigError
from paceline.model.compiled import aot
from paceline.model.features import OUT, Features
from paceline.model.loading import LoadedModel, prepare
from paceline.model.step_plan import SequenceStep
from paceline.types import pages_for

ALL: dict[str, Any] = {"callback_boundary": 1, "features": Features((0, OUT), every_position=True)}
HINTS: dict[str, Any] = {"callback_boundary": 1}
LAST: dict[str, Any] = {"features": Features((0, OUT), every_position=True)}
"""With it the last layer computes all rows, where the bare graph has those whose logits are wanted."""
SOME: dict[str, Any] = {"features": Features((1, 2), every_position=False)}
BOTH: dict[str, Any] = {"callback_boundary": 1, "features": Features((0, 1, 2), every_position=True)}


def rows_of(loaded: LoadedModel) -> list[torch.Tensor]:
    """Logits of prompts, of tokens one by one, of a chunk beside another session, and of branches."""
    runner, vocab_size = loaded.runner(12), loaded.vocab_size
    found, text = logits_of(runner), prompt(2, 130, vocab_size)
    pages, other = runner.cache.allocate(pages_for(len(text))), runner.cache.allocate(1)

    def chunk(start: int, stop: int) -> SequenceStep:
        span = range(start, stop)
        return SequenceStep(text[start:stop], span, span, pages, num_logits=stop - start)

    found += [runner.forward([chunk(0, 70)]), *(runner.forward([chunk(at, at + 1)]) for at in range(70, 90))]
    found.append(runner.forward([chunk(90, 107), SequenceStep([11, 12], range(2), range(2), other, num_logits=2)]))
    rows, own = torch.arange(110), [[107], [108], [109]]
    branches = SequenceStep(
        [20, 21, 22], [107] * 3, range(107, 110), pages, 3, rows < 107, rows.clamp(max=107), own_rows=own
    )
    return [*found, runner.forward([branches])]


def check(model: Any, variants: list[dict[str, Any]]) -> None:
    bare = rows_of(prepare(model(), compile=True))
    for options in variants:
        rows = rows_of(prepare(model(), compile=True, **options))
        for number, (got, want) in enumerate(zip(rows, bare, strict=True)):
            assert torch.equal(got, want), (options, number)


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.usefixtures("compiled_steps")
def test_hints_and_states_change_no_bit() -> None:
    """In bfloat16, where a compiler that fuses may leave roundings out; all that may leave a graph leaves one."""
    check(lambda: random_model(config(), dtype=torch.bfloat16), [ALL])


@pytest.mark.compiler
@pytest.mark.nightly
@pytest.mark.usefixtures("compiled_steps")
@pytest.mark.parametrize(("family", "dtype"), [*((f, torch.bfloat16) for f in FAMILIES), ("llama", torch.float32)])
def test_hints_and_states_change_no_bit_of_a_family(family: str, dtype: torch.dtype) -> None:
    check(lambda: random_model(family, dtype=dtype), [HINTS, LAST, SOME, BOTH])


@pytest.mark.compiler
@pytest.mark.nightly
@pytest.mark.usefixtures("compiled_steps")
def test_a_graph_with_other_bits_is_not_kept(monkeypatch: pytest.MonkeyPatch, compiled_steps: Path) -> None:
    """The compiler may fuse as it likes: the graph with hints has other bits and is refused."""
    monkeypatch.setitem(aot.COMPILER, "emulate_precision_casts", False)
    monkeypatch.setattr(aot, "VERSION", "fused")  # among the artifacts of others
    before = {*(compiled_steps / "compiled").glob("*.pt2")}
    with pytest.raises(ConfigError, match=r"^compile is true, but the compiled step of .* has other logits"):
        prepare(random_model(config(), dtype=torch.bfloat16), compile=True, **HINTS)
    assert len({*(compiled_steps / "compiled").glob("*.pt2")} - before) == 1, "the bare one"


@pytest.mark.parametrize("mutant", [False, True])
def test_a_step_with_other_logits_than_the_bare_one_is_noticed(mutant: bool, tmp_path: Path) -> None:
    """The comparison itself, with eager steps: the mutant has other weights."""
    model = random_model(config())
    bare = prepare(model, compile=False)
    step = prepare(noisy_copy(model, 1e-3) if mutant else model, compile=False, **SOME).step
    path = tmp_path / "step.pt2"
    path.touch()
    asked = (step, bare.step, aot.StepGraph(model, bare.layers, None, "sdpa"), path)
    if mutant:
        with pytest.raises(ConfigError, match=r"other logits than without in \d+ of 192 rows: set comp"):
            aot._require_same_logits(*asked)
    else:
        aot._require_same_logits(*asked)
    assert path.exists() is not mutant
