"""The probe of start-up: heads right by construction pass, and each wrong wiring is named with the right one."""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from tests.drafters.head_files import LAYERS, VOCAB, made, write_target
from tests.model.parallel.ranks import Ranks
from tests.support.models import letters_tokenizer, random_model
from tests.support.rings import nightly
from torch import Tensor
from transformers import LlamaConfig

from paceline.checkpoint.files import Checkpoint
from paceline.config import ModelOptions
from paceline.drafters.heads.drafter import HeadDrafter
from paceline.drafters.heads.load import open_head
from paceline.drafters.heads.module import Attend, HeadModule
from paceline.drafters.heads.probe import (
    NUM_TOKENS,
    TEXTS,
    HeadProbe,
    Sample,
    chance,
    judge,
    score,
    settings_of,
    texts_of,
    write,
)
from paceline.errors import ConfigError
from paceline.model.features import OUT, Features
from paceline.model.loading import load_model, prepare
from paceline.model.parallel.collectives import Collectives
from paceline.model.runner import ModelRunner
from paceline.model.step import Step
from paceline.model.step_plan import SequenceStep

NUM_LAYERS = 6
EVERY = Features((OUT, *range(NUM_LAYERS + 1)), every_position=True)
PROMPTS = [[40 + 7 * i + j for j in range(5 + i)] for i in range(4)]
CONFIG = LlamaConfig(
    vocab_size=300, hidden_size=32, num_hidden_layers=NUM_LAYERS, num_attention_heads=2, num_key_value_heads=1,
    intermediate_size=64, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
)  # fmt: skip


def runner_of_target() -> ModelRunner:
    return prepare(random_model(CONFIG), compile=False, features=EVERY).runner(16)


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return write(runner_of_target(), PROMPTS)


class Knows(HeadModule):
    """Right by construction: it has seen the target's texts, and finds the place by the states that it is given.

    ``tables``: boundaries -> every how many places it goes wrong there; states of other boundaries it does not know.
    """

    def __init__(self, samples: Sequence[Sample], tables: dict[tuple[int, ...], int]) -> None:
        super().__init__()
        self.state_size, self.max_depth = 1, 3
        self.known: dict[bytes, tuple[Sample, int, int]] = {}
        for boundaries, every in tables.items():
            for sample in samples:
                rows = torch.cat([sample.states[b] for b in boundaries], dim=-1)
                for place, row in enumerate(rows):
                    self.known[row.numpy().tobytes()] = (sample, place, every)

    def fuse(self, states: Tensor) -> Tensor:
        return states

    def step(self, token_ids: Tensor, state: Tensor, positions: Tensor, attend: Attend, depth: int) -> Tensor:
        for (token,), row in zip(token_ids[0, :, None].tolist(), state[0], strict=True):
            if (found := self.known.get(row.numpy().tobytes())) is not None:
                assert found[0].token_ids[found[1] + 1 + depth] == token
        return state

    def logits(self, state: Tensor, depth: int) -> Tensor:
        logits = torch.zeros(*state.shape[:-1], 300)
        for at, row in enumerate(state[0]):
            sample, place, every = self.known.get(row.numpy().tobytes(), (None, 0, 0))
            if sample is not None and place % every:
                logits[0, at, sample.token_ids[place + 2 + depth]] = 1.0
        return logits


def head(module: HeadModule, boundaries: tuple[int, ...]) -> HeadDrafter:
    return HeadDrafter(module, kind="knows", features=Features(boundaries, True), vocab_size=300)


NEVER = 10**9
"""It goes wrong at the first place only."""


def examined(samples: Sequence[Sample], drafter: HeadDrafter) -> str | None:
    scores = [score(drafter, setting, samples) for setting in settings_of(drafter, NUM_LAYERS)]
    return judge("h", scores, chance(samples))


def test_what_the_target_writes_is_its_greedy_text_with_its_states(samples: list[Sample]) -> None:
    """As one by one prefill of the whole text gives them, within the rounding of float32."""
    runner = runner_of_target()
    pages = runner.cache.allocate(2)
    for sample, prompt in zip(samples, PROMPTS, strict=True):
        assert sample.token_ids[: sample.num_prompt] == prompt
        text = sample.token_ids[:-1]
        assert len(text) == len(prompt) + NUM_TOKENS - 1
        logits, states = runner.forward_with_states(
            [SequenceStep(text, range(len(text)), range(len(text)), pages, NUM_TOKENS)]
        )
        assert logits.argmax(-1).tolist() == sample.token_ids[sample.num_prompt :]
        for boundary, part in zip(EVERY.boundaries, states.chunk(len(EVERY.boundaries), -1), strict=True):
            torch.testing.assert_close(sample.states[boundary], part, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("boundaries", [(OUT,), (NUM_LAYERS,), (1, 3, 5)])
def test_a_head_that_is_wired_rightly_passes(boundaries, samples, caplog) -> None:
    with caplog.at_level(logging.INFO, "paceline"):
        assert examined(samples, head(Knows(samples, {boundaries: NEVER}), boundaries)) is None
    assert (
        f"head h predicts 1.00, 1.00, 1.00 of the target's tokens (by depth) with boundaries {boundaries}"
        in caplog.text
    )


@pytest.mark.parametrize(
    ("own", "right"),
    [
        ((2, 4, 5), (1, 3, 4)),  # off by one, either way
        ((1, 3, 4), (2, 4, 5)),
        ((OUT,), (NUM_LAYERS,)),  # after the norm in place of before it
        ((NUM_LAYERS,), (OUT,)),
        ((1, 3, 5), (2, NUM_LAYERS // 2, NUM_LAYERS - 3)),  # what EAGLE-3 takes where nothing is said
    ],
)
def test_a_wrong_wiring_is_refused_with_the_right_one(own, right, samples: list[Sample]) -> None:
    with pytest.raises(ConfigError) as error:
        examined(samples, head(Knows(samples, {right: NEVER}), own))
    assert f"head h predicts 0.00, 0.00, 0.00 of the target's tokens (by depth) with boundaries {own}" in str(
        error.value
    )
    assert str(error.value).endswith(f"1.00, 1.00, 1.00 if wired otherwise: let it read boundaries {list(right)}")


def test_a_head_of_another_target_is_refused(samples: list[Sample]) -> None:
    with pytest.raises(ConfigError, match=r"no other setting is better: it is no head of this target"):
        examined(samples, head(Knows(samples, {}), (1, 2, 4)))


def test_a_setting_that_is_clearly_better_is_named_and_one_that_is_hardly_better_is_not(samples: list[Sample]) -> None:
    """Wrong at every 3rd place, against every 20th: 43 % better. Against every 4th: 12 %, which chance may do."""
    own, other = (2, 4, 5), (3, 5, 6)
    warning = examined(samples, head(Knows(samples, {own: 3, other: 20}), own))
    assert warning is not None
    assert "let it read boundaries [3, 5, 6]" in warning
    assert examined(samples, head(Knows(samples, {own: 19, other: 20}), own)) is None
    assert examined(samples, head(Knows(samples, {own: 20, other: 3}), own)) is None


def test_monotonous_text_does_not_refuse_a_good_head(samples: list[Sample]) -> None:
    """Where one token is nearly all of the text, half of it is enough."""
    drafter = head(Knows(samples, {(1,): 3}), (1,))
    scores = [score(drafter, setting, samples) for setting in settings_of(drafter, NUM_LAYERS)]
    assert 0.6 < scores[0].top1[0] < 0.7
    assert judge("h", scores, by_chance=0.9) is None
    weak = head(Knows(samples, {(1,): 1}), (1,))
    with pytest.raises(ConfigError):
        judge("h", [score(weak, setting, samples) for setting in settings_of(weak, NUM_LAYERS)], by_chance=0.01)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The target of the published heads' files."""
    folder = tmp_path_factory.mktemp("target")
    write_target(folder, "llama")
    return Checkpoint.open(str(folder))


def opened(file, folder: Path, target: Checkpoint) -> HeadDrafter:
    source = str(file.write(folder))
    if file.method == "mtp":
        target, source = Checkpoint.open(source), None
    return open_head(file.method, source, target, num_tokens=3).load(torch.float32, torch.device("cpu"))


def unrolled(drafter: HeadDrafter) -> Tensor:
    """Logits of two depths."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, 9, 32 * len(drafter.features.boundaries), generator=generator)
    tokens = torch.randint(VOCAB, (1, 12), generator=generator)
    with torch.no_grad():
        return torch.stack([*drafter.module.unroll(states, tokens, 2)])


@pytest.mark.parametrize(
    ("name", "weights", "advice"),
    [
        ("eagle3", None, "set norm_before_residual to true in its config.json"),
        ("eagle3_norm_before_residual", None, "set norm_before_residual to false in its config.json"),
        ("eagle3", None, "set norm_output to true in its config.json"),
        ("dflash", None, "set sample_from_anchor to true in its config.json"),
        ("dspark", None, "set sample_from_anchor to false in its config.json"),
        ("eagle", r"fc\.weight", "swap their halves"),
        ("eagle3", r"midlayer\.self_attn\.[qkv]_proj\.weight", "swap their halves"),
        ("eagle3_two_layers", r"layers\.0\.self_attn\.[qkv]_proj\.weight", "swap their halves"),
        ("peagle", r"layers\.0\.self_attn\.[qkv]_proj\.weight", "swap their halves"),
        ("mtp_deepseek", rf"model\.layers\.{LAYERS}\.eh_proj\.weight", "swap their halves"),
    ],
)
def test_norms_and_the_order_of_published_heads_are_tried_and_put_back(name, weights, advice, tmp_path, target) -> None:
    """Each change computes what the same file with the other flag, or with its halves swapped, computes."""
    drafter, other = opened(made(name), tmp_path / "own", target), made(name)
    if weights is None:
        _, flag, _, value, *_ = advice.split()
        other.config[flag] = value == "true"
    else:
        for weight in [weight for weight in other.tensors if re.fullmatch(weights, weight)]:
            other.tensors[weight] = other.tensors[weight].roll(32, dims=1)
    want, before = unrolled(opened(other, tmp_path / "other", target)), unrolled(drafter)
    (setting,) = [setting for setting in settings_of(drafter, LAYERS) if setting.advice.endswith(advice)]
    with setting.applied(drafter.module):
        torch.testing.assert_close(unrolled(drafter), want, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(want, before, atol=1e-2)
    assert torch.equal(unrolled(drafter), before)


def test_settings_outside_of_the_target_are_not_tried(samples: list[Sample]) -> None:
    tried = [setting.boundaries for setting in settings_of(head(Knows([], {}), (0, 2, NUM_LAYERS)), NUM_LAYERS)]
    assert tried == [(0, 2, 6), (0, 2, OUT), (2, 3, 3)]


# -- while a target is loaded ------------------------------------------------------------------------------

WORDS = ("abcdefgh", "theloudlionss", "zyxwvutsrq", "quickbrown")


@dataclass
class Collects:
    """Keeps what the target writes."""

    prompts: list[list[int]]
    features: Features = EVERY
    num_pages: int = 8
    samples: list[Sample] = field(default_factory=list)

    def __call__(self, runner: ModelRunner) -> None:
        self.samples = write(runner, self.prompts)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("saved")
    random_model(CONFIG).save_pretrained(folder)
    letters_tokenizer(300).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("compile", [False, *nightly([True])])
@pytest.mark.usefixtures("own_cache")
def test_heads_are_examined_while_their_target_is_loaded(compile: bool, saved: str, tmp_path: Path) -> None:
    """With states that its own steps do not return, before it is compiled; a wrong head ends the start."""
    checkpoint = Checkpoint.open(saved)
    options = ModelOptions(compile=compile, dtype="float32", device="cpu")
    own, right = (2, 3, 5), (1, 2, 4)
    (tmp_path / "texts").write_text("\n\n".join(WORDS), encoding="utf-8")
    file = str(tmp_path / "texts")
    probe = HeadProbe([(own, file), (right, file)], NUM_LAYERS, checkpoint.tokenizer.encode)
    assert set(probe.features.boundaries) == {*range(7)}
    loaded = load_model(checkpoint, options, features=Features((OUT,), False), examination=probe)
    assert loaded.features == Features((OUT,), False)
    assert isinstance(loaded.step, Step) is not compile
    known = probe.samples[file]
    assert [sample.num_prompt for sample in known] == [len(tokens) for tokens in probe.prompts[file]]
    assert probe.examine("h", head(Knows(known, {right: NEVER}), right), file) is None
    warning = probe.examine("h", head(Knows(known, {own: 2, right: 50}), own), file)
    assert warning is not None
    assert warning.endswith("if wired otherwise: let it read boundaries [1, 2, 4]")
    with pytest.raises(ConfigError, match=r"let it read boundaries \[1, 2, 4\]$"):
        probe.examine("h", head(Knows(known, {right: NEVER}), own), file)


def rank_examines(group: Collectives, path: str, prompts: list[list[int]]) -> list[list[int]]:
    """Texts that the target writes on this rank."""
    options = ModelOptions(compile=False, dtype="float32", device="cpu", tensor_parallel_size=2)
    collects = Collects(prompts)
    load_model(Checkpoint.open(path), options, group, examination=collects)
    return [sample.token_ids for sample in collects.samples]


@pytest.mark.slow
def test_the_first_rank_examines_and_the_others_follow(samples: list[Sample], saved: str, tmp_path: Path) -> None:
    with Ranks(2, tmp_path) as ranks:
        texts, none = ranks.run(rank_examines, saved, PROMPTS, transport="shared")
    assert texts == [sample.token_ids for sample in samples]
    assert none == []


def test_texts_come_from_a_file_or_are_our_own(tmp_path: Path) -> None:
    assert texts_of(None) == TEXTS
    file = tmp_path / "texts"
    file.write_text("one\nparagraph\n\n\n\nanother\n\n" + "more\n\n" * 9)
    assert texts_of(str(file)) == ("one\nparagraph", "another", "more", "more")
    for content in (None, b"  \n\n ", b"\xff\xfe\xff"):
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(ConfigError, match=r"^probe_file is '.*texts': it "):
            texts_of(str(file))
