"""Cascades: what each drafter of one says is what it would say alone, and a refused configuration says why."""

from __future__ import annotations

import pytest
import torch
from tests.drafters.one_session import OneSession
from tests.support.models import noisy_copy, random_model
from tests.support.mutants import mutant

from paceline.config import (
    DraftSetup,
    NgramOptions,
    ServiceConfig,
    SuffixOptions,
    TargetSetup,
)
from paceline.core.processors import Row
from paceline.core.sampling import best_coupled
from paceline.drafters import cascade
from paceline.drafters.cascade import VerticalDrafter
from paceline.drafters.model import ModelDrafter
from paceline.drafters.protocol import Candidates, Leaf
from paceline.embedded import DRAFT_DIR
from paceline.model.loading import prepare
from paceline.preflight.service import examine

TOP_M, GUESSES = 12, 3
SIZES = {"max_leaves": 8, "max_prefill_tokens": 64, "top_m": TOP_M}


def models():
    """The model that drafts, and a smaller one that guesses for it."""
    large = random_model("llama")
    return large, noisy_copy(large, 0.05)


class Vertical(OneSession):
    """A cascade of two models; every row is compared with transformers on the whole text."""

    def __init__(self, temperature: float) -> None:
        self.large, self.small = models()
        large, small = self.runners = [prepare(model, compile=False).runner(12) for model in models()]
        guesser = ModelDrafter(small, **SIZES)
        super().__init__(VerticalDrafter(large, guesser=guesser, num_guesses=GUESSES, **SIZES), 40, temperature)

    def first(self, model, path) -> int:
        """What a model drafts after a path."""
        return best_coupled(*self.expected(model, path, TOP_M), [Row(self.sampler, tuple(path))], 1)[0][0][0]

    def expand(self, *leaves: Leaf) -> Candidates:
        candidates = self.candidates(leaves)
        for i, leaf in enumerate(leaves):
            guesses: list[int] = []
            while len(guesses) < GUESSES:
                guesses.append(self.first(self.small, (*leaf.path, *guesses)))
            assert candidates.guesses[i] == tuple(guesses)
            for depth in range(GUESSES + 1):
                ids, log_q = self.expected(self.large, (*leaf.path, *guesses[:depth]), TOP_M)
                assert torch.equal(candidates.token_ids[i, depth], ids[0])
                assert torch.allclose(candidates.log_q[i, depth], log_q[0], atol=2e-5)
        return candidates


def growth(temperature: float) -> None:
    """Blocks below blocks, two leaves of one session at once, a hit and a miss."""
    vertical = Vertical(temperature)
    guesses = vertical.expand(Leaf("s", 0, (), ())).guesses[0]
    vertical.expand(Leaf("s", 3, (1, 2, 3), guesses), Leaf("s", 4, (4,), (99,)))
    vertical.commit([guesses[0], guesses[1]], [1, 2], [3])
    vertical.expand(Leaf("s", 6, (3, 6), (guesses[2], 55)))
    vertical.commit([77], [7], [])
    vertical.expand(Leaf("s", 7, (), ()))
    vertical.drafter.close("s")
    vertical.drafter.check_integrity()
    assert [runner.cache.num_used for runner in vertical.runners] == [0, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_row_is_that_of_the_model_after_the_guesses_of_the_smaller_one(temperature: float) -> None:
    growth(temperature)


def _stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smaller model does not learn what was committed."""
    monkeypatch.setattr(VerticalDrafter, "advance", ModelDrafter.advance)


def _shared_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses below different leaves of a session are taken for one another."""
    below = cascade.leaf_below
    monkeypatch.setattr(cascade, "leaf_below", lambda leaf, index, guesses: below(leaf, 0, guesses))


@mutant(ModelDrafter, "no_candidates")
def _late(candidates, self, leaves, tails, m):
    """The candidates of a depth are said to follow one guess too many."""
    made = candidates(self, leaves, tails, m)
    return Candidates(made.token_ids, made.log_q, tuple(guesses[1:] for guesses in made.guesses))


@pytest.mark.parametrize("mutant", [_stale, _shared_ids, _late], ids=lambda m: m.__name__.strip("_"))
def test_mutants_are_caught(mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        growth(1.0)


EMBEDDED = {"model": str(DRAFT_DIR), "options": {"dtype": "float32", "compile": False}}


def test_its_setup_and_its_memory_are_those_of_its_parts() -> None:
    drafters = [EMBEDDED, EMBEDDED, {"kind": "suffix", "options": {"shared_tokens": 1 << 20}}]
    one = {"draft_config": {"model_loading_config": {"model_id": str(DRAFT_DIR)}, "engine_kwargs": EMBEDDED["options"]}}
    config = ServiceConfig.parse({"draft_config": {"kind": "cascade", "engine_kwargs": {"drafters": drafters}}})
    setup = config.draft_setup()
    assert isinstance(setup, DraftSetup)
    assert [part.source for part in setup.parts] == [str(DRAFT_DIR), str(DRAFT_DIR), None]
    assert setup.runs_model
    assert isinstance(setup.parts[2].options, SuffixOptions)
    assert not DraftSetup.for_target(TargetSetup("x"), None, NgramOptions()).runs_model
    pools = [examine(c, ports=False).pools[1].estimate for c in (config, ServiceConfig.parse(one))]
    both, alone = (estimate for estimate in pools if estimate is not None)
    assert both.weights_bytes == 2 * alone.weights_bytes > 0
    assert both.kv_bytes == 2 * alone.kv_bytes > 0
    assert both.process_bytes > alone.process_bytes + (1 << 20)
    missing = {"drafters": [{"model": "/nowhere"}, {"kind": "ngram"}]}
    config = ServiceConfig.parse({"draft_config": {"kind": "cascade", "engine_kwargs": missing}})
    keys = [finding.key for finding in examine(config, ports=False).findings]
    assert "draft_config.engine_kwargs.drafters[0].model" in keys
