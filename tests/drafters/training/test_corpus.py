"""A corpus that a target writes for suffix decoding: what it holds, what is said of it, and who drafts from it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tests.drafters.training.test_served import target  # noqa: F401
from tests.support.local import local_config
from tests.support.training import options_for, silent

from paceline.checkpoint.files import Checkpoint
from paceline.cli.drafting import choose
from paceline.cli.main import main
from paceline.config import HeadOptions, SuffixMatching
from paceline.drafters.training import corpus
from paceline.drafters.training.options import CORPUS, HeadForm, Schedule, TrainingOptions
from paceline.local import LocalPipeline
from paceline.model.loading import load_pretrained
from paceline.types import SamplingParams

EAGER = {"dtype": "float32", "device": "cpu", "compile": False}


def options(target: Path, folder: Path) -> TrainingOptions:  # noqa: F811
    form, sizes = HeadForm(CORPUS, depths=3), {"texts": 60, "rows": 40, "length": 64}
    return options_for(form, target, folder / "corpus", Schedule(1), temperatures=(0.0,), **sizes)


@pytest.fixture(scope="module")
def written(target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, corpus.CorpusReport]:  # noqa: F811
    given = options(target, tmp_path_factory.mktemp("written"))
    return given.out, corpus.write_corpus(given, silent)


@torch.no_grad()
def test_a_corpus_holds_what_the_target_writes(target: Path, written) -> None:  # noqa: F811
    folder, report = written
    texts = [json.loads(line) for line in (folder / "corpus.jsonl").read_text().splitlines()]
    assert len(texts) == 40
    assert report.num_tokens == sum(map(len, texts))
    model = load_pretrained(Checkpoint.open(str(target)), torch.float32, torch.device("cpu")).eval()
    for text in texts[:4]:
        likeliest = model(torch.tensor([text])).logits[0].argmax(-1).tolist()
        assert likeliest[7:-1] == text[8:]


def test_its_report_replays_held_out_rounds_with_and_without_it(written, monkeypatch) -> None:
    folder, report = written
    found = {(one.with_corpus, one.greedy): one.accepted for one in report.replayed}
    assert found[True, True] > found[False, True] + 0.3, "the target repeats itself"
    assert all(0 <= accepted <= 3 for accepted in found.values())
    figures = json.loads((folder / "report.json").read_text())
    assert figures["tokens"] == report.num_tokens
    assert [one["accepted_per_round_of_3"] for one in figures["held_out"]] == [
        *(one.accepted for one in report.replayed)
    ]
    drafter = corpus.SuffixDrafter(corpus=[[5, 6, 7, 8, 9, 10]])
    assert corpus._rounds(drafter, [5, 6, 7, 8, 9], 2, 3) == (3, 1)
    assert corpus._rounds(drafter, [5, 6, 7, 3, 9], 2, 3) == (1, 2), "a round ends with the token that was not drafted"


def test_a_target_drafts_from_the_corpus_in_its_folder(target: Path, written, tmp_path: Path) -> None:  # noqa: F811
    folder, _ = written
    model = tmp_path / "model"
    shutil.copytree(target, model)
    shutil.copytree(folder, model / "texts", ignore=shutil.ignore_patterns("features"))
    chosen = choose(str(model))
    (head,) = chosen.heads
    assert head == HeadOptions(method="suffix", suffix=SuffixMatching(corpus=[str(model / "texts" / "corpus.jsonl")]))
    assert str(model / "texts") in chosen.line
    prompt = json.loads((folder / "corpus.jsonl").read_text().splitlines()[0])[:8]
    results = []
    for heads in ([], [head]):
        with LocalPipeline(local_config(model, heads=heads)) as one:
            results.append(one.generate(prompt, SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.0)).result)
    plain, drafted = results
    assert drafted.token_ids == plain.token_ids
    assert drafted.speculation.head_accepted > 8 > plain.speculation.head_accepted == 0


def test_a_corpus_of_other_tokens_is_left_out_with_the_reason(target: Path, tmp_path: Path, capsys) -> None:  # noqa: F811
    model = tmp_path / "model"
    shutil.copytree(target, model)
    (model / "texts").mkdir()
    (model / "texts" / "config.json").write_text('{"model_type": "suffix"}')
    assert choose(str(model)).heads == [HeadOptions(method="suffix")]
    assert "is left out: corpus names" in capsys.readouterr().err
    (model / "texts" / "corpus.jsonl").write_text("[300]\n")
    assert choose(str(model)).heads == [HeadOptions(method="suffix")]
    assert "whose line 1 is neither a JSON string nor a list of token ids in [0, 300)" in capsys.readouterr().err


def test_the_command_says_what_a_corpus_brings(target: Path, tmp_path: Path, capsys) -> None:  # noqa: F811
    given = options(target, tmp_path)
    flags = ["--target", given.target, "--data", str(given.data[0]), "--out", str(given.out), "--device", "cpu"]
    flags += ["--tokens", "256", "--length", "32", "--prompt-tokens", "8", "--held-out-rows", "4", "--depths", "2"]
    assert main(["write-corpus", *flags]) == 0
    said = capsys.readouterr().out
    assert "with the corpus" in said
    assert f"the corpus is in {given.out}: " in said
    assert main(["write-corpus", *flags, "--depths", "0"]) == 2
    assert "--depths is 0: it must be more than 0" in capsys.readouterr().err
    assert main(["train-head", "suffix", *flags]) == 2
    assert "KIND is 'suffix'" in capsys.readouterr().err
