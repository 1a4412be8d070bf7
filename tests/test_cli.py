"""The command line against the embedded pair, and every mistake as one sentence with exit status 2."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest

from paceline import __version__
from paceline.cli import build_parser, main, sampling_params, summary, write_text
from paceline.embedded import DRAFT_DIR, TARGET_DIR
from paceline.router.session import Chunk, Result, Timing, Usage
from paceline.types import Cause, FinishReason, Round, SpeculationStats

PROMPT = "def read_file(path):\n"


def run(*arguments, stdin=None):
    return subprocess.run(
        [sys.executable, "-m", "paceline", *arguments], capture_output=True, text=True, input=stdin, timeout=570
    )


def refused(capsys, *arguments):
    """The one sentence with which the command line refuses ``arguments``."""
    try:
        status = main(arguments)
    except SystemExit as error:
        status = error.code
    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err
    return captured.err


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--temperature", "-1"], ["--temperature is -1.0", "at least 0"]),
        (["--temperature", "nan"], ["--temperature is nan"]),
        (["--temperature", "warm"], ["--temperature", "warm"]),
        (["--top-p", "0"], ["--top-p is 0.0", "more than 0 and at most 1"]),
        (["--top-p", "1.5"], ["--top-p is 1.5", "at most 1"]),
        (["--top-k", "-3"], ["--top-k is -3", "at least 0"]),
        (["--min-p", "2"], ["--min-p is 2.0", "at most 1"]),
        (["--max-tokens", "0"], ["--max-tokens is 0", "at least 1"]),
        (["--min-tokens", "9", "--max-tokens", "8"], ["min_tokens is 9", "at most max_tokens (8)"]),
        (["--seed", "-1"], ["--seed is -1", "at least 0"]),
        (["--repetition-penalty", "0"], ["--repetition-penalty is 0.0", "more than 0"]),
        (["--presence-penalty", "3"], ["--presence-penalty is 3.0", "at most 2"]),
        (["--frequency-penalty", "-3"], ["--frequency-penalty is -3.0", "at least -2"]),
        (["--draft-tokens", "17"], ["--draft-tokens is 17", "at most 16"]),
        (["--mode", "fast"], ["--mode", "fast", "overlapped"]),
        (["--acceptance", "none"], ["--acceptance", "coupled"]),
        (["--dtype", "float16"], ["--dtype", "float16", "bfloat16"]),
        (["--stop", ""], ["--stop is empty"]),
        (["--target", "/no/such/model", "--draft", "x"], ["/no/such/model", "does not exist"]),
        (["--draft", "/no/such/draft"], ["/no/such/draft", "does not exist"]),
        (["--target", ""], ["--target is empty"]),
        (["--target", "x"], ["--target is given without --draft"]),
        (["--drafter", "ngram", "--draft", "x"], ["--drafter ngram"]),
        (["--no-such-flag"], ["--no-such-flag"]),
    ],
)
def test_a_mistake_is_one_sentence(capsys, flags, parts):
    sentence = refused(capsys, "generate", PROMPT, *flags)
    for part in parts:
        assert part in sentence


def test_no_command_and_empty_prompt(capsys):
    assert "COMMAND" in refused(capsys)
    assert "prompt is empty" in refused(capsys, "generate", "")


def test_a_folder_that_holds_no_model(capsys, tmp_path):
    assert "config.json" in refused(capsys, "generate", PROMPT, "--draft", str(tmp_path))
    file = tmp_path / "model.bin"
    file.write_bytes(b"")
    assert "is a file" in refused(capsys, "generate", PROMPT, "--draft", str(file))


def test_a_model_that_is_no_causal_language_model(capsys, tmp_path):
    config = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    sentence = refused(capsys, "generate", PROMPT, "--target", str(tmp_path), "--mode", "plain")
    assert "no causal language model" in sentence
    assert "BertForMaskedLM" in sentence


def test_a_draft_of_another_tokenizer(capsys, tmp_path):
    for name in ("config.json", "model.safetensors", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(DRAFT_DIR / name)
    tokenizer = json.loads((DRAFT_DIR / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    by_id = sorted(vocab, key=vocab.get)
    vocab[by_id[40]], vocab[by_id[41]] = vocab[by_id[41]], vocab[by_id[40]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    sentence = refused(capsys, "generate", PROMPT, "--draft", str(tmp_path))
    assert "tokenizer differs in content" in sentence
    assert str(tmp_path) in sentence
    assert str(TARGET_DIR) in sentence


def test_version_and_help(capsys):
    for flag, text in (("--version", __version__), ("--help", "generate")):
        with pytest.raises(SystemExit) as caught:
            main([flag])
        assert caught.value.code == 0
        assert text in capsys.readouterr().out


def test_every_sampling_flag_reaches_its_field():
    flags = "--max-tokens 9 --min-tokens 2 --temperature 0.5 --top-p 0.9 --top-k 4 --min-p 0.1 --seed 3 --ignore-eos"
    penalties = "--repetition-penalty 1.1 --presence-penalty 0.2 --frequency-penalty 0.3"
    args = build_parser().parse_args(f"generate x {flags} {penalties}".split(" "))
    assert sampling_params(args).model_dump(exclude={"logit_bias", "bad_words", "stop_token_ids"}) == {
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "seed": 3,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "ignore_eos": True,
    }


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_accepted_draft_tokens_are_coloured_on_a_terminal_only(monkeypatch):
    chunk = Chunk((1, 2), (0.0, 0.0), (True, False), (("ab", True), ("c", False)), None)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    terminal, pipe = Terminal(), io.StringIO()
    write_text([chunk], terminal)
    write_text([chunk], pipe)
    assert terminal.getvalue() == "\x1b[32mab\x1b[0mc\n"
    assert pipe.getvalue() == "abc\n"
    monkeypatch.setenv("NO_COLOR", "1")
    write_text([chunk], plain := Terminal())
    assert plain.getvalue() == "abc\n"


def test_summary_line():
    stats = SpeculationStats()
    stats.add(Round(4, 3, Cause.HIT))
    stats.add(Round(0, 0, Cause.TOKEN))
    result = Result("x", (1,) * 5, (), FinishReason.STOP, Usage(3, 5), stats, Timing(0.25, 0.5, 8.0), seed=1)
    assert summary(result) == (
        "5 tokens, 8.0 tokens/s, 2.50 tokens per verification, acceptance 75%, hit rate 50%, prefill 0.250 s"
    )


def test_the_parent_loads_no_torch_to_parse_its_arguments():
    script = "import sys, paceline.cli; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


@pytest.fixture(scope="module")
def plain_json():
    done = run("generate", PROMPT, "--max-tokens", "24", "--mode", "plain", "--dtype", "float32", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_json_has_its_documented_form(plain_json):
    assert set(plain_json) == {"text", "token_ids", "finish_reason", "usage", "speculation", "timing"}
    assert set(plain_json["speculation"]) == {"rounds", "drafted", "accepted", "hits", "misses"}
    assert set(plain_json["timing"]) == {"prefill_s", "decode_s", "tokens_per_s"}
    assert len(plain_json["token_ids"]) == plain_json["usage"]["completion_tokens"] == 24
    assert plain_json["finish_reason"] == "length"


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--mode", "overlapped"], ["--mode", "sequential"], ["--drafter", "ngram"]])
def test_any_mode_gives_the_same_tokens_from_standard_input(plain_json, flags):
    done = run("generate", "-", "--max-tokens", "24", "--dtype", "float32", "--json", *flags, stdin=PROMPT)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["token_ids"] == plain_json["token_ids"]


def test_an_over_long_prompt_is_refused(capsys):
    sentence = refused(capsys, "generate", PROMPT * 400, "--mode", "plain")
    assert "fit the model's context" in sentence


def test_text_goes_to_stdout_and_the_summary_to_stderr():
    done = run("generate", PROMPT, "--max-tokens", "8", "--mode", "plain")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "tokens/s" in done.stderr.splitlines()[-1]
