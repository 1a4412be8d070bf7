"""A draft model that was just trained, and chats that a target writes itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.drafters.training.test_served import target  # noqa: F401
from tests.support.models import letters_tokenizer, random_model
from tests.support.training import letters, options_for, silent
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from paceline.checkpoint.chat import ChatTemplate, load_chat
from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.tokenizer import Tokenizer, load_tokenizer
from paceline.cli.main import main
from paceline.config import LocalConfig
from paceline.drafters.training.chats import written_chats
from paceline.drafters.training.draft_model import vocabulary_of
from paceline.drafters.training.options import DRAFT_MODEL, HeadForm, Schedule
from paceline.drafters.training.run import train_head
from paceline.errors import ConfigError
from paceline.local import LocalPipeline
from paceline.types import Mode, SamplingParams, SpeculationParams

TEMPLATE = "{% for m in messages %}<3>{{ m.content }}<4>{% endfor %}{% if add_generation_prompt %}<5>{% endif %}"
EAGER = {"dtype": "float32", "device": "cpu", "compile": False}


@pytest.fixture(scope="module")
def trained(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """A draft of one of the target's two layers, without some of its pairs of letters."""
    form, out = HeadForm(DRAFT_MODEL, depths=3, num_layers=1, draft_vocab_size=260), tmp_path_factory.mktemp("x") / "d"
    train_head(options_for(form, target, out, Schedule(150, 2, 3e-3), texts=60, rows=60, length=64), silent)
    return out


def test_a_trained_draft_is_served_with_its_own_tokens(target: Path, trained: Path) -> None:  # noqa: F811
    draft = Checkpoint.open(str(trained))
    report = json.loads((trained / "report.json").read_text(encoding="utf-8"))[DRAFT_MODEL]
    assert 200 < draft.vocab_size < Checkpoint.open(str(target)).vocab_size == 300
    assert report["greedy"]["accepted_per_round_of_3"] > 1.5
    config = LocalConfig(
        target={"path": str(target), "adaptive": False, **EAGER},
        draft={"path": str(trained), "vocabulary": "shared", **EAGER},
        worker="thread",
    )
    drafted = accepted = 0
    with LocalPipeline(config) as pipeline:
        for temperature in (0.0, 1.0):
            for seed, text in enumerate(letters(4, 1)):
                sampling = SamplingParams(max_tokens=40, temperature=temperature, seed=seed, ignore_eos=True)
                plain, spec = (
                    pipeline.generate(text, sampling, SpeculationParams(mode=mode)).result
                    for mode in (Mode.PLAIN, Mode.SEQUENTIAL)
                )
                assert spec.token_ids == plain.token_ids
                if not temperature:
                    drafted += spec.speculation.drafted
                    accepted += spec.speculation.accepted
    assert accepted > 0.4 * drafted > 0


def test_what_a_smaller_tokenizer_writes_has_its_tokens_and_the_same_text() -> None:
    tokenizer = ChatTemplate(letters_tokenizer(), TEMPLATE, None).tokenizer  # type: ignore[arg-type]
    backend = Backend.from_str(tokenizer.backend_json() or "")
    frequent = [backend.token_to_id(token) for token in ("ab", "cq", "e")]
    small = vocabulary_of(tokenizer, 300, frequent)
    own = Backend.from_str(small.content)
    assert own.encode("abcqab").tokens == ["ab", "cq", "ab"]
    assert own.encode("abcd").tokens == ["ab", "c", "d"]
    assert own.get_vocab_size() == len(small.target_ids) == 10 + 26 + 2
    for token, token_id in own.get_vocab().items():
        assert backend.id_to_token(int(small.target_ids[token_id])) == token
        assert small.read_as[backend.token_to_id(token)] == token_id
    assert own.id_to_token(int(small.read_as[backend.token_to_id("jy")])) == "y"
    whole = vocabulary_of(tokenizer, 300, None)
    assert torch.equal(whole.target_ids, torch.arange(300))
    vocab = {token: i for i, token in enumerate(("a", "b", "c", "d", "ab", "cd", "bc", "abcd"))}
    merges = [("a", "b"), ("c", "d"), ("b", "c"), ("ab", "cd")]
    deep = PreTrainedTokenizerFast(tokenizer_object=Backend(models.BPE(vocab=vocab, merges=merges)))
    small = vocabulary_of(Tokenizer("deep", deep), len(vocab), [vocab["abcd"]])
    assert Backend.from_str(small.content).encode("abcdbc").tokens == ["abcd", "b", "c"]
    assert small.target_ids.tolist() == [0, 1, 2, 3, 4, 5, 7]


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that ends a user's turn now and then."""
    folder, tokenizer = tmp_path_factory.mktemp("chatting"), letters_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    model = random_model("llama")
    with torch.no_grad():
        model.lm_head.weight.mul_(0.1)
    model.save_pretrained(folder)
    return folder


def test_a_target_writes_chats_and_goes_on_where_it_was(chatting: Path, tmp_path: Path) -> None:
    from paceline.model.loading import load_pretrained

    model, chat = load_pretrained(Checkpoint.open(str(chatting)), torch.float32), load_chat(str(chatting))
    assert chat is not None
    path, tokenizer = tmp_path / "chats.jsonl", load_tokenizer(str(chatting))
    found = written_chats(model, chat, 20, 40, 0, path)
    assert len(set(found)) == len(found) == 20
    for prompt in found:
        assert 4 <= len(prompt) <= 40
        assert (prompt[0], prompt[-2:]) == (3, (4, 5)), "as the template has it"
        assert all(token_id >= 10 for token_id in prompt[1:-2]), "no special token in what the user says"
        assert tokenizer.encode(tokenizer.decode(prompt[1:-2])) == prompt[1:-2]
    told: list[int] = []
    assert written_chats(model, chat, 20, 40, 0, path, told.append) == found
    assert not told, "they are kept"
    more = written_chats(model, chat, 30, 40, 0, path)
    assert more[:20] == found
    assert len(set(more)) == 30
    with pytest.raises(ConfigError, match="--prompt-tokens is 3: 3 of a prompt are the chat template's"):
        written_chats(model, chat, 20, 3, 0, tmp_path / "other.jsonl")


def test_a_head_is_trained_on_chats(chatting: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--tokens", 400, "--length", 40, "--held-out-rows", 4, "--depths", 2, "--steps", 2, "--device", "cpu")
    arguments = ("--target", chatting, "--out", tmp_path / "draft", "--chats", 20, "--layers", 1)
    assert main(["train-draft", *map(str, (*arguments, *sizes))]) == 0
    assert "the draft is in" in capsys.readouterr().out
    assert len((tmp_path / "draft" / "features" / "chats.jsonl").read_text().splitlines()) >= 20
    refusals = {
        ("--layers", "3"): "--layers is 3: it must be from 1 to 2",
        ("--data", "x"): "--data is given with --chats",
        ("--temperatures", "as-is"): "--temperatures is given with --chats",
        ("--chats", "1"): "--chats is 1",
    }
    for flags, reason in refusals.items():
        given = ("train-draft", *map(str, arguments), *map(str, sizes), *flags, "--out", str(tmp_path / flags[1]))
        assert main([*given, "--chats", "20"] if flags[0] != "--chats" else list(given)) == 2
        assert reason in capsys.readouterr().err
