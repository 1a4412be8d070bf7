"""A head of one pass that was just trained, through the target's engine: it brings what the trainer's replay says."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.models import letters_tokenizer
from tests.support.rings import slow
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.checkpoint.files import Checkpoint
from paceline.config import HeadOptions, TargetOptions, TargetSetup
from paceline.drafters.heads.drafter import TOP_M
from paceline.drafters.heads.load import open_head
from paceline.drafters.heads.streaming import open_streams
from paceline.drafters.training.features import states
from paceline.drafters.training.options import HeadForm, Schedule, TrainingOptions
from paceline.drafters.training.replay import Agreement, agreement
from paceline.drafters.training.run import train_head
from paceline.messages import OpenSession, Outcome
from paceline.model.loading import load_pretrained
from paceline.target.build import build_target_engine
from paceline.types import Mode, SamplingParams, SpeculationParams

DEPTHS, STEPS, NUM_TEXTS, PROMPT, NEW = 3, 200, 10, 8, 60


def silent(stage: str, done: int, total: int, note: str = "") -> None:
    """Shows nothing."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that likes to go on with the third next letter, so that a head can learn it in seconds."""
    folder, tokenizer = tmp_path_factory.mktemp("target"), letters_tokenizer()
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=300, num_hidden_layers=2, max_position_embeddings=512, **sizes))
    ids = [tokenizer.encode(letter, add_special_tokens=False)[-1] for letter in string.ascii_lowercase]
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight.normal_()
        rows = model.lm_head.weight.mul_(0.5)
        rows[ids[3:] + ids[:3]] = embedding[ids] / 8
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def letters(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices(string.ascii_lowercase, k=40)) for _ in range(count)]


FORMS = {
    "dflash": HeadForm("dflash", depths=DEPTHS, num_layers=1, num_anchors=16),
    "dspark": HeadForm("dspark", depths=DEPTHS, num_layers=1, num_anchors=16, rank=8),
    "speculative_streaming": HeadForm("speculative_streaming", depths=DEPTHS, boundaries=(1,), num_anchors=16, rank=16),
}


@pytest.fixture(scope="module", params=["dflash", "speculative_streaming", *slow(["dspark"])])
def trained(target: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A head of that target; its folder has the name of its method."""
    folder = tmp_path_factory.mktemp("head")
    data = folder / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in letters(200, 0)), encoding="utf-8")
    options = TrainingOptions(
        form=FORMS[request.param],
        target=str(target),
        data=[data],
        out=folder / request.param,
        schedule=Schedule(STEPS, batch_rows=4, learning_rate=4e-3),
        num_tokens=128 * 40,
        length=40,
        prompt_tokens=PROMPT,
        temperatures=(0.0, 1.0),
        held_out_rows=16,
        device="cpu",
        dtype="float32",
    )
    report = train_head(options, silent)
    assert report.figures[0].greedy.accepted_per_round(DEPTHS) > 1.0
    return folder / request.param


def written(target: Path, source: Path, temperature: float, mode: Mode = Mode.OVERLAPPED) -> list[list[list[int]]]:
    """The tokens of each outcome of each session."""
    head = HeadOptions(method=source.name, model=str(source), num_speculative_tokens=DEPTHS, probe=False)
    values = {"dtype": "float32", "device": "cpu", "compile": False, "batch_invariant": "off", "adaptive": False}
    sent: list[Any] = []
    engine = build_target_engine(TargetSetup(str(target), TargetOptions(**values, heads=[head])), sent.extend)
    encode = Checkpoint.open(str(target)).tokenizer.encode
    for i, text in enumerate(letters(NUM_TEXTS, 1)):
        sampling = SamplingParams(temperature=temperature, max_tokens=NEW, seed=i, ignore_eos=True)
        speculation = SpeculationParams(mode=mode, max_draft_tokens=DEPTHS)
        ids = encode(text)[:PROMPT]
        engine.receive([OpenSession(f"s{i}", 1, ids, len(ids), i, sampling, speculation)])
    while engine.num_sessions:
        engine.step()
    (mounted,) = engine.heads.mounted
    assert not mounted.failure
    outcomes = [message for message in sent if isinstance(message, Outcome)]
    return [[[*o.token_ids] for o in outcomes if o.session_id == f"s{i}"] for i in range(NUM_TEXTS)]


def replayed(target: Path, source: Path, found: list[list[list[int]]], temperature: float) -> Agreement:
    """What the trainer says of these texts, with as many candidates as the engine has."""
    checkpoint = Checkpoint.open(str(target))
    method, device = source.name, torch.device("cpu")
    streams = method == "speculative_streaming"
    head = (
        open_streams(checkpoint, str(source), DEPTHS)
        if streams
        else open_head(method, str(source), checkpoint, num_tokens=DEPTHS)
    ).load(torch.float32, device)
    model = load_pretrained(checkpoint, torch.float32).eval()
    prompts = [checkpoint.tokenizer.encode(text)[:PROMPT] for text in letters(NUM_TEXTS, 1)]
    texts = [[*ids, *itertools.chain(*parts)] for ids, parts in zip(prompts, found, strict=True)]
    token_ids = torch.tensor(texts)

    def unroll(*arguments: Any) -> Iterator[Tensor]:
        for logits in head.module.unroll(*arguments):
            yield logits.masked_fill(logits < logits.topk(TOP_M).values[..., -1:], float("-inf"))

    with torch.no_grad():
        log_p = model(token_ids, use_cache=False).logits.log_softmax(-1)
    return agreement(
        unroll,
        log_p,
        token_ids,
        torch.cat(states(model, token_ids, (1,)), -1).float(),
        torch.full((NUM_TEXTS,), PROMPT),
        torch.full((NUM_TEXTS,), token_ids.shape[1]),
        DEPTHS,
        greedy=temperature == 0,
    )


def test_the_text_is_that_of_plain_decoding(target: Path, trained: Path) -> None:
    for temperature in (0.0, 1.0):
        texts, plain = (
            [list(itertools.chain(*parts)) for parts in written(target, trained, temperature, mode)]
            for mode in (Mode.OVERLAPPED, Mode.PLAIN)
        )
        assert texts == plain


@pytest.mark.parametrize("is_read_rightly", [True, False])
def test_a_trained_head_brings_what_its_replay_says(
    is_read_rightly: bool, target: Path, trained: Path, tmp_path: Path
) -> None:
    """Within two standard errors at temperatures 0 and 1; one whose rows are read from the anchor's on, or whose
    streams are not told the anchor, falls below at 0."""
    source = trained
    if not is_read_rightly:
        source = Path(shutil.copytree(trained, tmp_path / trained.name))
        if trained.name != "speculative_streaming":
            config = json.loads((source / "config.json").read_text(encoding="utf-8"))
            config["sample_from_anchor"] = trained.name == "dflash"
            (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
        else:
            tensors = load_file(source / "model.safetensors")
            tensors["anchor.up.weight"].zero_()
            save_file(tensors, source / "model.safetensors")
    for temperature in (0.0, 1.0) if is_read_rightly else (0.0,):
        found = written(target, source, temperature)
        expected = replayed(target, trained, found, temperature)
        accepted, num_rounds = 0, 0
        for row, parts in enumerate(found):
            t = PROMPT - 1  # the first outcome is the prompt's own
            for part in parts[1:]:
                if t < int(expected.end[row]):
                    accepted, num_rounds = accepted + len(part) - 1, num_rounds + 1
                t += len(part)
        wanted, error = expected.accepted_per_round(DEPTHS), expected.standard_error(DEPTHS)
        print(f"T={temperature:g}: {accepted / num_rounds:.3f} per round, replay {wanted:.3f} +- {error:.3f}")
        assert wanted > 0.4
        if is_read_rightly:
            assert abs(accepted / num_rounds - wanted) <= 2 * error
        else:
            assert accepted / num_rounds < wanted - 2 * error
