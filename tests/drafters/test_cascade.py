"""Cascades: what each drafter of one says is what it would say alone, and a refused configuration says why."""

from __future__ import annotations

import pytest
import torch
from tests.support.models import VOCAB, noisy_copy, prompt, random_model
from tests.support.mutants import mutant

from paceline.config import (
    CascadeOptions,
    DraftSetup,
    LocalConfig,
    NgramOptions,
    ServiceConfig,
    SuffixOptions,
    TargetModel,
    TargetSetup,
)
from paceline.core.processors import Row, SamplerState
from paceline.core.sampling import best_coupled, draft_candidates
from paceline.drafters import cascade
from paceline.drafters.cascade import VerticalDrafter
from paceline.drafters.model import ModelDrafter
from paceline.drafters.protocol import Candidates, Leaf
from paceline.embedded import DRAFT_DIR, TARGET_DIR
from paceline.errors import ConfigError
from paceline.local import LocalPipeline
from paceline.model.loading import prepare
from paceline.preflight.service import examine
from paceline.types import Mode, SamplingParams, SpeculationParams

TOP_M, GUESSES = 12, 3
SIZES = {"max_leaves": 8, "max_prefill_tokens": 64, "top_m": TOP_M}


def models():
    """The model that drafts, and a smaller one that guesses for it."""
    large = random_model("llama")
    return large, noisy_copy(large, 0.05)


class Vertical:
    """A cascade of two models; every row is compared with transformers on the whole text."""

    def __init__(self, temperature: float) -> None:
        self.large, self.small = models()
        made = (prepare(model, compile=False) for model in models())
        large, small = (loaded.runner(12) for loaded in made)
        guesser = ModelDrafter(small, **SIZES)
        self.runners = (large, small)
        self.drafter = VerticalDrafter(large, guesser=guesser, num_guesses=GUESSES, **SIZES)
        self.text = prompt(1, 40)
        self.sampler = SamplerState(SamplingParams(temperature=temperature), 3, self.text, vocab_size=VOCAB)
        self.drafter.open("s", self.text, self.sampler)
        while self.drafter.prefill():
            pass

    def logits(self, model, path) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([[*self.text, *path]]), use_cache=False).logits[0, -1:]

    def first(self, model, path) -> int:
        """What a model drafts after a path."""
        row = Row(self.sampler, tuple(path))
        ids, log_q = draft_candidates(self.logits(model, path), [row], TOP_M)
        return best_coupled(ids, log_q, [row], 1)[0][0][0]

    def expand(self, *leaves: Leaf) -> Candidates:
        candidates = self.drafter.expand(leaves)
        self.drafter.check_integrity()
        for i, leaf in enumerate(leaves):
            guesses: list[int] = []
            while len(guesses) < GUESSES:
                guesses.append(self.first(self.small, (*leaf.path, *guesses)))
            assert candidates.guesses[i] == tuple(guesses)
            for depth in range(GUESSES + 1):
                path = (*leaf.path, *guesses[:depth])
                ids, log_q = draft_candidates(self.logits(self.large, path), [Row(self.sampler, path)], TOP_M)
                assert torch.equal(candidates.token_ids[i, depth], ids[0])
                assert torch.allclose(candidates.log_q[i, depth], log_q[0], atol=2e-5)
        return candidates

    def commit(self, tokens: list[int], nodes: list[int], kept: list[int]) -> None:
        self.sampler.append(tokens)
        self.text += tokens
        self.drafter.advance("s", tokens, nodes, kept)
        self.drafter.check_integrity()


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
    below = cascade._below
    monkeypatch.setattr(cascade, "_below", lambda leaf, index, guesses: below(leaf, 0, guesses))


@mutant(ModelDrafter, "_candidates")
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafters": [EMBEDDED]}, "drafters is .*: it must be at least"),
        ({"drafters": [{"kind": "ngram"}, EMBEDDED]}, r"drafters\[0\].kind is 'ngram': only a model verifies"),
        ({"drafters": [EMBEDDED, {"kind": "ngram"}], "lengths": [40]}, "lengths holds 40: 1 to 16 are allowed"),
        ({"drafters": [EMBEDDED, {"kind": "ngram"}], "lengths": [1, 2]}, "lengths has 2 entries for 2 drafters"),
        ({"drafters": [{"kind": "model"}, {"kind": "ngram"}]}, r"drafters\[0\].model is null: kind 'model' needs"),
        ({"drafters": [EMBEDDED, {"kind": "ngram", "model": "x"}]}, r"drafters\[1\].model is 'x': kind 'ngram' has"),
        ({"drafters": [EMBEDDED, {"kind": "ngram", "options": {"fan_out": 2}}]}, "options has fan_out: the drafters"),
        ({"drafters": [EMBEDDED, {"kind": "ngram", "options": {"nope": 2}}]}, "options has a wrong nope"),
    ],
)
def test_what_is_no_cascade_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServiceConfig.parse({"draft_config": {"kind": "cascade", "engine_kwargs": options}})


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


@pytest.mark.slow
def test_a_pipeline_serves_it() -> None:
    run = {"dtype": "float32", "compile": False}
    options = CascadeOptions.model_validate({"drafters": [EMBEDDED, {"kind": "ngram"}], "tree_step_tokens": 8})
    target = TargetModel(path=str(TARGET_DIR), batch_invariant="off", adaptive=False, **run)
    sampling = SamplingParams(max_tokens=16, ignore_eos=True)
    with LocalPipeline(LocalConfig(target=target, draft=options, worker="thread", pin_cores=False)) as pipeline:
        plain = pipeline.submit("import os\n\ndef ", sampling, SpeculationParams(mode=Mode.PLAIN)).result
        result = pipeline.submit("import os\n\ndef ", sampling, SpeculationParams(mode=Mode.SEQUENTIAL)).result
    assert result.token_ids == plain.token_ids
    assert result.speculation.accepted > 0
