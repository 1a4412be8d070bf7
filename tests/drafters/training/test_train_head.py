"""``paceline train-head`` on a tiny target: every kind trains, resumes to the same weights, and is measured."""

from __future__ import annotations

import argparse
import json
import math
import random
import string
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.models import letters_tokenizer, random_model
from tests.support.refusals import refusal_of
from torch import Tensor

from paceline.checkpoint.files import Checkpoint
from paceline.cli.main import main
from paceline.cli.train_head import add_flags, options_of
from paceline.drafters.heads.early_exit import open_exit
from paceline.drafters.heads.exit_adapter import ExitAdapter
from paceline.drafters.heads.load import open_head
from paceline.drafters.heads.module import Unrolled
from paceline.drafters.heads.streaming import load_streams, open_streams
from paceline.drafters.training.features import FeatureCache, Rows
from paceline.drafters.training.kinds import TrainableHead
from paceline.drafters.training.options import BLOCKS, KINDS, SMALLER, HeadForm, Schedule, TrainingOptions
from paceline.drafters.training.run import Report, evaluate, teacher_of, train_head
from paceline.drafters.training.trainer import dspark_loss
from paceline.errors import ConfigError
from paceline.model.features import OUT
from paceline.model.loading import load_pretrained

DEPTHS, STEPS = 2, 6
BOUNDARIES = {"eagle3": (0, 1), "peagle": (0, 1), "early_exit": (1,), "speculative_streaming": (1,)}


class Stopped(Exception):
    """Stands for Ctrl-C."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    random_model("llama").save_pretrained(folder)
    letters_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    texts = ["".join(draw.choices(string.ascii_lowercase, k=draw.randint(30, 90))) for _ in range(30)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


Make = Callable[..., TrainingOptions]


@pytest.fixture(scope="module")
def options(target: Path, data: Path, cache: Path) -> Make:
    """Options of a training of seconds; all share their features."""

    def make(kind: str, out: Path, **changes: object) -> TrainingOptions:
        form = {"depths": DEPTHS, "draft_vocab_size": 40 if kind in SMALLER else None}
        form |= {"boundaries": BOUNDARIES[kind]} if kind in BOUNDARIES else {}
        values = {
            "form": HeadForm(kind, **form),
            "target": str(target),
            "data": [data],
            "out": out,
            "schedule": Schedule(STEPS, batch_rows=2),
            "cache": cache,
            "num_tokens": 20 * 24,
            "length": 24,
            "prompt_tokens": 8,
            "held_out_rows": 6,
            "device": "cpu",
            "dtype": "float32",  # what the machine is best at may be another one
        }
        return TrainingOptions(**(values | changes))

    return make


def silent(stage: str, done: int, total: int, note: str = "") -> None:
    assert 0 <= done <= total


def stop_after(steps: int) -> Callable[..., None]:
    def progress(stage: str, done: int, total: int, note: str = "") -> None:
        if stage == "training" and done == steps:
            raise Stopped

    return progress


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_training_ends_with_the_same_weights_and_they_load(
    kind: str, options: Make, target: Path, tmp_path: Path
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    report = train_head(options(kind, whole), silent)
    with pytest.raises(Stopped):
        train_head(options(kind, parts), stop_after(STEPS // 2))
    train_head(options(kind, parts), silent)
    (file,) = whole.glob("*.safetensors")
    ours, theirs = load_file(file), load_file(parts / file.name)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert (whole / "config.json").read_text() == (parts / "config.json").read_text()
    assert (whole / "report.json").read_text() == (parts / "report.json").read_text()
    assert report.num_steps == STEPS
    plan = open_head(kind, str(whole), Checkpoint.open(str(target)), num_tokens=DEPTHS)
    assert plan.features.boundaries == (BOUNDARIES | dict.fromkeys(BLOCKS, (1,))).get(kind, (OUT,))
    module = plan.load_module(torch.float32, torch.device("cpu"))
    if kind in SMALLER:
        assert module.target_ids is not None
        assert 40 == len(module.target_ids) <= int(module.target_ids.max()), "those that the target writes"
    held = {id(tensor): tensor.numel() for tensor in module.parameters()}
    assert sum(held.values()) == sum(tensor.numel() for key, tensor in ours.items() if key not in ("d2t", "t2d"))
    (again,) = loaded_report(options(kind, whole)).figures
    for name in ("greedy", "sampled"):
        found, expected = (getattr(each, name).probability for each in (again, report.figures[0]))
        if kind == "early_exit":  # the states of the cache are bfloat16, those of the loaded layers are not
            assert float((found - expected).abs().mean()) < 5e-3
        else:
            assert torch.equal(found, expected)


def test_the_confidence_of_dspark_learns_what_is_accepted_and_does_not_teach_the_tokens() -> None:
    """The loss in plain lines; it is least where the head is the target and as sure as it may be."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 7, generator=generator).requires_grad_()
    p, sure = torch.randn(5, 7, generator=generator).softmax(-1), torch.rand(5, generator=generator)
    cross_entropy = -(p * logits.log_softmax(-1)).sum(-1)
    found, q = dspark_loss(cross_entropy, p, logits, sure), logits.softmax(-1)
    drafted = q.detach()
    for row in range(5):
        distance = sum(abs(float(drafted[row, token] - p[row, token])) for token in range(7))
        accepted = sum(min(float(drafted[row, token]), float(p[row, token])) for token in range(7))
        doubt = -accepted * math.log(float(sure[row])) - (1 - accepted) * math.log(1 - float(sure[row]))
        assert float(found.detach()[row]) == pytest.approx(
            0.1 * float(cross_entropy.detach()[row]) + 0.9 * distance + doubt, rel=1e-4
        )
    ours, theirs = (
        torch.autograd.grad(loss.sum(), logits, retain_graph=True)[0]
        for loss in (found, 0.1 * cross_entropy + 0.9 * (q - p).abs().sum(-1))
    )
    torch.testing.assert_close(ours, theirs)
    best = dspark_loss(-(p * p.log()).sum(-1), p, p.log(), torch.ones(5))
    torch.testing.assert_close(best, -0.1 * (p * p.log()).sum(-1), rtol=1e-3, atol=1e-4)


class Loaded(ExitAdapter):
    """An exit as the service has it: the first layers, run on the tokens themselves."""

    def __init__(self, model: Any) -> None:
        super().__init__(1, 1, 1e-6)
        self._model = [model]

    def unroll(self, states: Tensor, token_ids: Tensor, depths: int) -> Iterator[Tensor]:
        num_rows = states.shape[1] - depths
        logits = self._model[0](token_ids, use_cache=False, attend=Unrolled()).logits[:, 1:]
        for depth in range(depths):
            yield logits[:, depth : depth + num_rows]


def loaded_report(options: TrainingOptions) -> Report:
    """The report of a head as the service loads it from its files."""
    checkpoint = Checkpoint.open(options.target)
    plan = open_head(options.form.kind, str(options.out), checkpoint, num_tokens=DEPTHS)
    model = load_pretrained(checkpoint, torch.float32).eval()
    if plan.method == "early_exit":
        exits = open_exit(checkpoint, None, str(options.out)).load(torch.float32, torch.device("cpu"))
        module = Loaded(exits.model)
    elif plan.method == "speculative_streaming":
        module = load_streams(open_streams(checkpoint, str(options.out)), torch.float32, model.device).module
    else:
        module = plan.load(torch.float32, torch.device("cpu")).module
    head = TrainableHead(options.form, module, plan.features.boundaries, model)
    rows = Rows(**json.loads((options.cache / "held_out" / "cache.json").read_text(encoding="utf-8")))
    rows = replace(rows, temperatures=tuple(rows.temperatures))
    return evaluate(head, teacher_of(model), FeatureCache(options.cache / "held_out", rows), options, STEPS, silent)


def test_bad_input_is_one_sentence(target: Path, data: Path, tmp_path: Path) -> None:
    def refused(*arguments: object) -> str:
        return refusal_of("train-head", *map(str, arguments)).removeprefix("paceline: ")

    out = ("--target", target, "--out", tmp_path / "out")
    assert refused("medusae", *out) == (
        "KIND is 'medusae': it must be one of dflash, dspark, jetspec, eagle, eagle3, peagle, early_exit, medusa, "
        "mlp_speculator, mtp, speculative_streaming"
    )
    assert refused("mtp", *out).startswith("--data is missing")
    assert "cannot be read" in refused("mtp", *out, "--data", tmp_path / "nowhere")
    whole = (*out, "--data", data)
    assert "must be from 1 to 300" in refused("eagle3", *whole, "--draft-vocab-size", 301)
    assert "is for mtp, eagle3, peagle: medusa has" in refused("medusa", *whole, "--draft-vocab-size", 30)
    assert "must be from 0 to 1" in refused("eagle3", *whole, "--boundaries", 0, 2, "--device", "cpu")
    assert "must be from 1 to 1" in refused("dflash", *whole, "--boundaries", 0, "--device", "cpu")
    for boundaries in ((), ("--boundary", 1, 1)):
        for kind, side in (("early_exit", "below"), ("speculative_streaming", "from")):
            assert refused(kind, *whole, *boundaries, "--device", "cpu") == (
                f"--boundary is missing: name one, the layers {side} it draft"
            )
    assert "reads the last state alone" in refused("mtp", *whole, "--boundary", 1, "--device", "cpu")
    assert "--layers is 0" in refused("dflash", *whole, "--layers", 0)
    assert "--rank is 0" in refused("speculative_streaming", *whole, "--rank", 0)
    assert "--anchors is 0" in refused("dflash", *whole, "--anchors", 0)
    assert "--inner-dim is for mlp_speculator and early_exit" in refused("mtp", *whole, "--inner-dim", 9)
    assert "is for medusa" in refused("mtp", *whole, "--own-lm-head")
    assert "--steps is 0" in refused("mtp", *whole, "--steps", 0)
    assert "--length is 60" in refused("mtp", *whole, "--length", 60)
    assert "numbers with commas" in refused("mtp", *whole, "--temperatures", "hot")
    (tmp_path / "bad.jsonl").write_text('{"words": 1}\n', encoding="utf-8")
    assert "bad.jsonl:1 is no object" in refused("mtp", *out, "--data", tmp_path / "bad.jsonl")
    (tmp_path / "one.txt").write_text("abc", encoding="utf-8")
    assert "holds one document" in refused("mtp", *out, "--data", tmp_path / "one.txt")


def test_a_folder_of_another_training_or_other_features_is_refused(options: Make, tmp_path: Path) -> None:
    train_head(options("medusa", tmp_path), silent)
    with pytest.raises(ConfigError, match=r"holds a training with learning_rate 0\.001, not 0\.01"):
        train_head(options("medusa", tmp_path, schedule=Schedule(STEPS, 2, 1e-2)), silent)
    with pytest.raises(ConfigError, match="were made with prompt_tokens 8, not 9"):
        train_head(options("medusa", tmp_path / "other", prompt_tokens=9), silent)


def test_the_command_prints_its_report(capsys, target: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "head"
    sizes = ("--tokens", 240, "--length", 24, "--prompt-tokens", 8, "--held-out-rows", 4, "--depths", 2, "--steps", 2)
    arguments = ("medusa", "--target", target, "--data", data, "--out", out, "--device", "cpu", "--compare", target)
    assert main(["train-head", *map(str, (*arguments, *sizes))]) == 0
    printed = capsys.readouterr().out
    assert "medusa, greedy" in printed
    figures = json.loads((out / "report.json").read_text(encoding="utf-8"))
    draft = figures[f"draft {target}"]
    assert draft["greedy"]["accepted_per_round_of_2"] == 2.0, "the target agrees with itself"
    assert draft["temperature_1"]["accepted_per_round_of_2"] == pytest.approx(2.0, abs=0.02)  # states are bfloat16
    assert figures["parameters"] == 2 * (64 * 64 + 64)


@pytest.mark.parametrize("kind", ["mlp_speculator", "speculative_streaming"])
def test_what_was_trained_is_better_than_what_was_not(kind: str, options: Make, tmp_path: Path) -> None:
    losses: list[float] = []

    def progress(stage: str, done: int, total: int, note: str = "") -> None:
        if note:
            losses.append(float(note.removeprefix("loss ")))

    train_head(options(kind, tmp_path, schedule=Schedule(60, 4, 1e-2)), progress)
    assert sum(losses[-5:]) < sum(losses[:5]) - 2.0


@pytest.mark.parametrize(
    ("flags", "num_tokens"),
    [
        (["--chats", "8", "--length", "96", "--temperatures", "0,1"], 8 * 2 * 96),
        (["--chats", "8", "--tokens", "50"], 50),
        (["--data", "texts"], 262_144),
    ],
)
def test_a_few_chats_are_no_more_rows_than_they_are(flags: list[str], num_tokens: int) -> None:
    """More would be copies of them."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    args = parser.parse_args(
        ["mtp", "--target", "t", "--out", "head", *flags], argparse.Namespace(command="train-head")
    )
    assert options_of(args).num_tokens == num_tokens
