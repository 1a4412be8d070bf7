"""The embedded target's own heads through its engine: what they bring is what the trainer's replay says of the text."""

import itertools
import json
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.support.replays import Rounds, brought, replayed, rounds_of, texts_of
from tests.support.rings import nightly, slow

from paceline.checkpoint.files import Checkpoint
from paceline.config import HeadOptions, TargetOptions, TargetSetup
from paceline.embedded import HEAD_DIRS, TARGET_DIR, held_out_files
from paceline.messages import DraftState, OpenSession
from paceline.model.loading import load_pretrained
from paceline.target.build import build_target_engine
from paceline.target.control.head_gate import HeadGate
from paceline.target.engine import TargetEngine
from paceline.types import PAGE_SIZE, Mode, SamplingParams, SpeculationParams

DEPTHS, NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 4, 8, 40, 60
OPTIONS = {"dtype": "float32", "device": "cpu", "compile": False, "batch_invariant": "off", "adaptive": False}
METHODS = [*HEAD_DIRS]


def built(method: str) -> TargetEngine:
    sent: list = []
    head = HeadOptions(method=method, model=f"paceline/embedded-{method}", num_speculative_tokens=DEPTHS)
    engine = build_target_engine(TargetSetup(str(TARGET_DIR), TargetOptions(**OPTIONS, heads=[head])), sent.extend)
    engine.sent = sent  # type: ignore[attr-defined]
    return engine


def prompts(num_tokens: int = PROMPT_TOKENS) -> list[tuple[int, ...]]:
    """The beginnings of held-out files."""
    tokenizer, library = Checkpoint.open(str(TARGET_DIR)).tokenizer, Path(sysconfig.get_paths()["stdlib"])
    texts = [(library / name).read_text(encoding="utf-8") for name in held_out_files() if (library / name).exists()]
    encoded = [tokenizer.encode(text[400:2000])[:num_tokens] for text in texts]
    return [ids for ids in encoded if len(ids) == num_tokens][:NUM_PROMPTS]


def rounds(
    engine: TargetEngine,
    mode: Mode,
    temperature: float,
    max_tokens: int = NEW_TOKENS,
    prompt_tokens: int = PROMPT_TOKENS,
) -> Rounds:
    """The tokens of each outcome of each session."""
    engine.sent.clear()
    names = [f"{mode}{temperature}{i}" for i in range(NUM_PROMPTS)]
    for i, (name, ids) in enumerate(zip(names, prompts(prompt_tokens), strict=True)):
        sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=i, ignore_eos=True)
        speculation = SpeculationParams(mode=mode, max_draft_tokens=DEPTHS)
        engine.receive([OpenSession(name, 1, ids, len(ids), i, sampling, speculation)])
        engine.receive([DraftState(name, 1, available=False)])
    while engine.num_sessions:
        engine.step()
    return rounds_of(engine.sent, names)


@pytest.mark.parametrize("method", [*slow(METHODS[:1]), *nightly(METHODS[1:])])
def test_what_a_head_brings_is_what_its_replay_says(method: str) -> None:
    engine = built(method)
    (mounted,) = engine.heads.mounted
    model = load_pretrained(Checkpoint.open(str(TARGET_DIR)), torch.float32).eval()
    read = mounted.head.module, mounted.head.features.boundaries
    for temperature in (0.0, 1.0):
        found = rounds(engine, Mode.OVERLAPPED, temperature)
        assert texts_of(found) == texts_of(rounds(engine, Mode.PLAIN, temperature))
        expected = replayed(model, *read, prompts(), found, DEPTHS, temperature)
        (got, error), wanted = brought(found, expected, PROMPT_TOKENS, DEPTHS), expected.accepted_per_round(DEPTHS)
        print(f"{method} T={temperature:g}: {got:.3f} per round, replay {wanted:.3f} +- {error:.3f}")
        assert abs(got - wanted) <= 2 * error
    assert not mounted.failure


@pytest.mark.parametrize(
    ("method", "is_spoiled"), [*slow([("eagle3", False), ("mtp", True)]), *nightly([("mtp", False)])]
)
def test_prompts_from_the_prefix_cache_keep_their_acceptance(method: str, is_spoiled: bool) -> None:
    """Every round of a prompt whose first pages are cached brings what it brought when they were computed, at both
    temperatures. The mutant has lost what the head keeps there."""
    prompt_tokens, are_equal = 2 * PAGE_SIZE + 20, []
    for temperature in (0.0, 1.0):
        engine = built(method)
        (mounted,) = engine.heads.mounted
        fresh = rounds(engine, Mode.OVERLAPPED, temperature, 40, prompt_tokens)
        assert engine.stats.cached_tokens == 0
        if is_spoiled:
            for pool in (engine.runner.cache.keys, engine.runner.cache.values):
                for layer in pool[-len(mounted.head.layers) :]:
                    layer.zero_()
        cached = rounds(engine, Mode.OVERLAPPED, temperature, 40, prompt_tokens)
        assert engine.stats.cached_tokens >= NUM_PROMPTS * (2 * PAGE_SIZE - 1)
        assert texts_of(fresh) == texts_of(cached)
        assert sum(len(part) - 1 for parts in fresh for part in parts) > NUM_PROMPTS
        are_equal.append(cached == fresh)
        assert not mounted.failure
    assert all(are_equal) is not is_spoiled


@pytest.mark.slow
def test_acceptance_comes_back_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sessions that run through a pause of 16 steps, against the same ones without: about as many tokens of a round
    are accepted. (None would be if the sessions were lost for the head.)"""
    engine, most, off = built("mtp"), 90, range(8, 24)
    (mounted,) = engine.heads.mounted
    brought = []
    for is_paused in (False, True):
        steps = itertools.count()
        step = TargetEngine.step

        def counted(self: TargetEngine, step: Callable = step, steps: Iterator[int] = steps) -> bool:
            self.steps = next(steps)  # type: ignore[attr-defined]
            return step(self)

        with monkeypatch.context() as each:
            each.setattr(TargetEngine, "step", counted)
            if is_paused:
                each.setattr(HeadGate, "wanted", lambda self, num_sessions: engine.steps not in off)  # type: ignore[attr-defined]
            found = rounds(engine, Mode.OVERLAPPED, 1.0, most)
        brought.append([len(part) - 1 for parts in found for part in parts[off.stop + 1 : -1]])
        if is_paused:
            text = texts_of(found)
    assert text == texts_of(rounds(engine, Mode.PLAIN, 1.0, most))
    assert mounted.stats.holes == NUM_PROMPTS
    without, after = (sum(each) / len(each) for each in brought)
    print(f"{after:.3f} tokens a round after the pause, {without:.3f} without it")
    assert after > 0.6 * without > 0.3


def test_the_heads_are_within_their_size_and_described() -> None:
    assert sum(path.stat().st_size for folder in HEAD_DIRS.values() for path in folder.glob("*")) <= 12e6
    for folder in HEAD_DIRS.values():
        assert json.loads((folder / "config.json").read_text(encoding="utf-8"))
        assert not list(folder.glob("*.pt"))
