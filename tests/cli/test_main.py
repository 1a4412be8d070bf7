"""The command line against the embedded pair, and every mistake as one sentence with exit status 2."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.fake_service import SEED, WORDS, FakeService, Wire, endless, failing, sentence, silent
from tests.support.refusals import refusal_of
from tests.support.rings import nightly, slow
from tests.web.chats import save_speaking_pair
from transformers import BertConfig, BertForMaskedLM

from paceline import __version__
from paceline.cli.demo import QUESTION, comparison
from paceline.cli.flags import given
from paceline.cli.generate import summary, write_text
from paceline.cli.main import COMMANDS, build_parser, main
from paceline.config import cache_dir
from paceline.embedded import DRAFT_DIR, TARGET_DIR
from paceline.errors import EngineError, InvalidRequestError, NotFoundError, ResourceExhaustedError
from paceline.types import (
    Cause,
    Chunk,
    FinishReason,
    Mode,
    Result,
    Round,
    SamplingParams,
    SpeculationStats,
    Timing,
    Usage,
)

PROMPT = "def read_file(path):\n"


EAGER = ["--dtype", "float32", "--no-compile"]


def command(*arguments):
    return [sys.executable, "-m", "paceline", *arguments]


def run(*arguments):
    # A cluster that other tests have started in this process is none of its business, nor are the ports of it.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=300, env=environment)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_names_itself_where_its_value_is_missing_or_no_number(capsys, name):
    parser = build_parser(name)
    (commands,) = (action for action in parser._actions if action.dest == "command")
    for action in commands.choices[name]._actions:
        if not action.option_strings or action.nargs == 0:
            continue
        flag, spelled = action.option_strings[-1], "/".join(action.option_strings)
        cases = [([flag], "is given without a value: ")] if action.nargs not in ("?", "*") else []
        cases += [([f"{flag}=hot"], "is 'hot': a ")] if action.type in (int, float) else []
        for flags, problem in cases:
            with pytest.raises(SystemExit) as ended:
                parser.parse_args([name, *flags])
            assert ended.value.code == 2
            assert capsys.readouterr().err.startswith(f"paceline {name}: {spelled} {problem}")


def test_a_folder_that_holds_no_model(tmp_path):
    assert "config.json" in refusal_of("generate", PROMPT, "--draft", str(tmp_path))
    file = tmp_path / "model.bin"
    file.write_bytes(b"")
    assert "is a file" in refusal_of("generate", PROMPT, "--draft", str(file))
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"")
    for path in (gguf, tmp_path):
        assert "model.gguf' is cut short: it is empty" in refusal_of("generate", PROMPT, "--draft", str(path))
    gguf.unlink()
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "is a LoRA adapter" in refusal_of("generate", PROMPT, "--draft", str(tmp_path))


def test_a_model_that_is_no_causal_language_model(capfd, tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertForMaskedLM(BertConfig(vocab_size=50, **sizes)).save_pretrained(tmp_path)
    for flags in (["--target", str(tmp_path), "--mode", "plain"], ["--draft", str(tmp_path)]):
        sentence = refusal_of("generate", PROMPT, *flags)
        assert "not a causal language model" in sentence
        assert "BertForMaskedLM" in sentence


def test_a_draft_of_another_tokenizer(tmp_path):
    for name in ("config.json", "model.safetensors", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(DRAFT_DIR / name)
    tokenizer = json.loads((DRAFT_DIR / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    by_id = sorted(vocab, key=vocab.get)
    vocab[by_id[40]], vocab[by_id[41]] = vocab[by_id[41]], vocab[by_id[40]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    sentence = refusal_of("generate", PROMPT, "--draft", str(tmp_path))
    assert "tokenizer differs in content" in sentence
    assert str(tmp_path) in sentence
    assert str(TARGET_DIR) in sentence


def test_standard_input_that_is_empty_or_no_text():
    for data, part in ((b"caf\xe9", "not UTF-8"), (b"", "prompt is empty")):
        done = subprocess.run(command("generate", "-"), input=data, capture_output=True, timeout=300)
        assert done.returncode == 2
        assert part in done.stderr.decode()
        assert done.stderr.count(b"\n") == 1
        assert done.stdout == b""


def test_a_prompt_argument_that_is_no_text():
    assert "not valid Unicode" in refusal_of("generate", "caf\udce9")


@pytest.mark.parametrize("command", [*COMMANDS, "bench"])
def test_help_shows_no_default_that_is_none(capsys, command):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert "Undefined" not in capsys.readouterr().out


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for name in (*COMMANDS, "bench"):
        assert f"\n    {name} " in text or f"\n    {name}\n" in text  # with its line beside or below it
    assert "provided by" not in text
    examples = [line.split("  ")[1] for line in text.partition("examples:\n")[2].splitlines()]
    assert {line.split()[1] for line in examples} == {"generate", "serve", "COMMAND"}
    assert "'bench'" in refusal_of("no-such-command").replace("bench)", "'bench')")


@pytest.mark.slow
def test_weights_that_cannot_be_read(capfd, tmp_path):
    for file in DRAFT_DIR.iterdir():
        most = 100_000 if file.suffix == ".safetensors" else None
        (tmp_path / file.name).write_bytes(file.read_bytes()[:most])
    assert main(["generate", PROMPT, "--target", str(tmp_path), "--mode", "plain", "--no-compile"]) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert f"model {str(tmp_path)!r} could not be loaded" in error


def test_version_and_help(capsys):
    for flag, text in (("--version", __version__), ("--help", "generate")):
        with pytest.raises(SystemExit) as caught:
            main([flag])
        assert caught.value.code == 0
        assert text in capsys.readouterr().out


def test_every_sampling_flag_reaches_its_field():
    flags = "--max-tokens 9 --min-tokens 2 --temperature 0.5 --top-p 0.9 --top-k 4 --min-p 0.1 --seed 3 --ignore-eos"
    penalties = "--repetition-penalty 1.1 --presence-penalty 0.2 --frequency-penalty 0.3"
    kinds = "--seed-scope global --logprobs-mode raw_logprobs --top-logprobs 5 --include-stop-str-in-output"
    args = build_parser().parse_args(f"generate x {flags} {penalties} {kinds}".split(" "))
    sampling = SamplingParams(**given(args, SamplingParams))
    others = {"structured_output", "allowed_token_ids", "logit_bias", "bad_words", "stop_token_ids"}
    others |= {"skip_special_tokens", "prompt_logprobs", "logprob_token_ids"}
    assert sampling.model_dump(exclude=others) == {
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
        "include_stop_str_in_output": True,
        "seed_scope": "global",
        "logprobs_mode": "raw_logprobs",
        "top_logprobs": 5,
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
    looked_up = replace(chunk, round=Round(1, 1, Cause.DISABLED, lookup_drafted=1, lookup_accepted=1))
    write_text([looked_up], other := Terminal())
    assert other.getvalue() == "\x1b[36mab\x1b[0mc\n"
    segments = tuple((text, text != "d") for text in "abcd")
    counts = Round(5, 3, Cause.HIT, head_drafted=2, head_accepted=1, lookup_drafted=1, lookup_accepted=1)
    write_text([replace(chunk, segments=segments, round=counts)], of_three := Terminal())
    assert of_three.getvalue() == "\x1b[32ma\x1b[0m\x1b[33mb\x1b[0m\x1b[36mc\x1b[0md\n"
    monkeypatch.setenv("NO_COLOR", "1")
    write_text([chunk], plain := Terminal())
    assert plain.getvalue() == "abc\n"


def test_the_demo_has_hit_rates_of_a_draft_alone():
    stats = SpeculationStats()
    stats.add(Round(4, 3, Cause.HIT))
    result = Result("x", (1,) * 5, (), FinishReason.STOP, Usage(3, 5), stats, Timing(0.25, 0.5, 8.0), seed=1)
    runs = {Mode.PLAIN: [result], Mode.OVERLAPPED: [result]}
    with_draft, without = comparison(runs, has_draft=True), comparison(runs, has_draft=False)
    assert (with_draft.count("hit rate"), with_draft.count("100%")) == (2, 2)
    assert "hit rate" not in without
    assert "100%" not in without
    assert "accepted    share" in without


def test_summary_line():
    stats = SpeculationStats()
    stats.add(Round(4, 3, Cause.HIT))
    stats.add(Round(0, 0, Cause.TOKEN))
    result = Result("x", (1,) * 5, (), FinishReason.STOP, Usage(3, 5), stats, Timing(0.25, 0.5, 8.0), seed=1)
    assert summary(result) == (
        "5 tokens, 8.0 tokens/s, 2.50 tokens per verification, acceptance 75%, hit rate 50%, prefill 0.250 s"
    )
    stats.add(Round(4, 1, Cause.DISABLED, lookup_drafted=4, lookup_accepted=1))
    assert "acceptance 50%, 1 of 4 looked-up tokens accepted, " in summary(result)
    stats.add(Round(0, 0, Cause.DRAFT_DOWN))
    assert "hit rate 33%" in summary(result), "a draft has served it, and went down"


def test_the_summary_of_a_target_without_a_draft_has_no_hit_rate():
    stats = SpeculationStats()
    stats.add(Round(4, 2, Cause.DRAFT_DOWN, head_drafted=4, head_accepted=2))
    stats.add(Round(0, 0, Cause.DISABLED))
    result = Result("x", (1,) * 4, (), FinishReason.STOP, Usage(3, 4), stats, Timing(0.25, 0.5, 8.0), seed=1)
    assert summary(result) == (
        "4 tokens, 8.0 tokens/s, 2.00 tokens per verification, acceptance 50%, 2 of 4 tokens of heads accepted, "
        "prefill 0.250 s"
    )


@pytest.fixture(scope="module")
def plain_json():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["generate", PROMPT, "--max-tokens", "24", "--mode", "plain", "--json", *EAGER]) == 0
    return json.loads(out.getvalue())


def assert_documented(answer):
    """The form of ``--json``, from a service as from this machine."""
    assert set(answer) == {"text", "token_ids", "finish_reason", "usage", "speculation", "timing"}
    names = {"rounds", "drafted", "accepted", "hits", "misses", "lookup_drafted", "lookup_accepted"}
    assert set(answer["speculation"]) == names | {"head_drafted", "head_accepted"}
    assert set(answer["timing"]) == {"prefill_s", "decode_s", "tokens_per_s"}


@pytest.mark.slow
def test_json_has_its_documented_form(plain_json):
    assert_documented(plain_json)
    assert len(plain_json["token_ids"]) == plain_json["usage"]["completion_tokens"] == 24
    assert plain_json["finish_reason"] == "length"


@pytest.mark.slow
def test_overlapped_from_standard_input_gives_the_same_text_and_says_how_it_ran(plain_json, monkeypatch, capfd):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(PROMPT.encode())))
    assert main(["generate", "-", "--max-tokens", "24", "--verbose", *EAGER]) == 0
    out, err = capfd.readouterr()
    assert out == plain_json["text"] + "\n"
    *log, last = err.splitlines()
    assert "24 tokens, " in last
    assert "tokens/s" in last
    assert all(line.startswith("paceline: ") for line in log)
    assert any("batch-invariant" in line for line in log)
    assert any("compile False" in line for line in log)


@pytest.mark.parametrize("flags", nightly([["--mode", "overlapped"], ["--mode", "sequential"], ["--drafter", "ngram"]]))
def test_any_mode_gives_the_same_tokens(plain_json, flags):
    done = run("generate", PROMPT, "--max-tokens", "24", "--json", "--logprobs", "--top-logprobs", "2", *EAGER, *flags)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["token_ids"] == plain_json["token_ids"]
    assert [len(place) for place in answer["top_logprobs"]] == [2] * 24
    best = [place[0] for place in answer["top_logprobs"]]  # the temperature is 0
    assert [one["token_id"] for one in best] == answer["token_ids"]
    assert [one["logprob"] for one in best] == pytest.approx(answer["logprobs"])


@pytest.mark.nightly
def test_compiling_says_so_once_and_leaves_standard_output_alone(tmp_path):
    arguments = command("generate", PROMPT, "--mode", "plain", "--max-tokens", "8", "--json", "--compile")
    lines = []
    for _ in range(2):
        environment = {**os.environ, "PACELINE_CACHE": str(tmp_path)}
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=500, env=environment)
        assert done.returncode == 0, done.stderr
        assert len(json.loads(done.stdout)["token_ids"]) == 8
        lines.append(done.stderr.splitlines())
    assert all("compil" in line for line in lines[0]), lines[0]
    assert len([line for line in lines[0] if "LlamaForCausalLM" in line]) == 2
    assert lines[1] == []


@pytest.mark.slow
def test_a_model_id_that_nothing_resolves():
    sentence = refusal_of("generate", PROMPT, "--target", "no-such-model-anywhere", "--mode", "plain")
    assert "'no-such-model-anywhere' is neither a directory nor in the Hugging Face cache" in sentence


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    [["--local"], pytest.param([], marks=[pytest.mark.ray, pytest.mark.nightly])],
    ids=["local", "service"],
)
def test_the_demo_compares_both_modes(place):
    done = run("demo", "--max-tokens", "24", "--repeats", "2", *EAGER, *place)
    assert done.returncode == 0, done.stderr
    assert "identical in all 4 runs (24 tokens each)" in done.stdout
    if place:  # the stages of its start and nothing else
        assert all(
            re.fullmatch(r"paceline: (target|draft): .+ \(\d+\.\d s\)", line) for line in done.stderr.splitlines()
        )


@pytest.mark.slow
def test_the_demo_asks_a_model_with_a_chat_template(tmp_path):
    save_speaking_pair(tmp_path)
    done = run("demo", str(tmp_path / "target"), "--local", "--max-tokens", "16", "--repeats", "1", *EAGER)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"> {QUESTION}\n") == 2
    assert re.search(r"first token \d+\.\d s after the start \(cold\), \d+ ms after the request", done.stdout)
    assert "identical in all 2 runs" in done.stdout


def test_an_over_long_prompt_is_refusal_of():
    sentence = refusal_of("generate", PROMPT * 400, "--mode", "plain")
    assert "at most 1023 leave room for a token in the model's context of 1024" in sentence


# -- against a service ---------------------------------------------------------------------------------------------

TEXT = "".join(WORDS)


@pytest.fixture(scope="module")
def shared_service():
    with FakeService() as service:
        yield service


@pytest.fixture
def service(shared_service):
    shared_service.script = sentence
    shared_service.requests.clear()
    return shared_service


def ask(capsys, service, *flags, prompt=PROMPT):
    """Exit status, standard output and standard error of a request to ``service``."""
    status = main(["generate", prompt, "--address", service.address, *flags])
    return status, *capsys.readouterr()


def test_a_service_streams_text_and_a_summary(capsys, service):
    status, out, err = ask(capsys, service)
    assert status == 0
    assert out == TEXT + "\n"
    assert err == (
        "18 tokens, 8.0 tokens/s, 2.00 tokens per verification, acceptance 33%, hit rate 100%, prefill 0.250 s\n"
    )
    assert service.requests[0].text == PROMPT


def test_a_service_gives_the_same_json_as_this_machine(capsys, service):
    status, out, err = ask(capsys, service, "--json")
    assert (status, err) == (0, "")
    answer = json.loads(out)
    assert_documented(answer)
    assert answer["usage"].keys() >= {"prompt_tokens", "completion_tokens"}
    assert answer["text"] == TEXT
    assert len(answer["token_ids"]) == 18
    _, out, _ = ask(capsys, service, "--json", "--logprobs")
    assert json.loads(out)["logprobs"] == [-0.125, -0.25] * 9


def test_every_flag_reaches_the_service(capsys, service):
    flags = (
        "--max-tokens 9 --temperature 0.5 --mode sequential --draft-tokens 3 --request-id r7 --timeout 60 --ignore-eos"
    )
    status, *_ = ask(capsys, service, *flags.split(), "--seed", str(SEED), "--stop", "a", "--stop", "b")
    assert status == 0
    request = service.requests[0]
    params = request.sampling_params
    assert (params.max_tokens, params.temperature, params.seed, params.ignore_eos) == (9, 0.5, SEED, True)
    assert list(params.stop) == ["a", "b"]
    assert (request.speculation.mode, request.speculation.max_draft_tokens) == ("sequential", 3)
    assert request.request_id == "r7"
    assert not request.logprobs


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequestError("token id 5000: 0 to 1023 are allowed"), 2),
        (NotFoundError("no application"), 1),
        (ResourceExhaustedError("the queue is full", 1.0), 1),
        (EngineError("no target is left"), 1),
    ],
)
def test_an_error_of_the_service_is_one_sentence(capsys, service, error, status):
    service.script = failing(error)
    assert ask(capsys, service) == (status, "", f"paceline: {error}\n")


def test_a_service_that_fails_in_mid_stream(capsys, service):
    service.script = failing(EngineError("the target is gone"), after=2)
    status, out, err = ask(capsys, service)
    assert (status, out, err) == (1, "def main", "paceline: the target is gone\n")


def test_a_service_that_is_not_there(capsys):
    with Wire(1) as nobody:
        pass
    status, out, err = ask(capsys, nobody)
    assert (status, out) == (1, "")
    assert err.startswith(f"paceline: the service at {nobody.address} cannot be reached: ")
    assert err.count("\n") == 1


def test_the_time_limit_of_a_request(capsys, service):
    service.script = silent
    status, out, err = ask(capsys, service, "--timeout", "0.2")
    assert (status, out, err) == (1, "", "paceline: the time limit of 0.2 s was over after 0 tokens\n")


def test_text_that_no_protocol_carries():
    sentence = refusal_of("generate", "caf\udce9", "--address", "localhost:1")
    assert "UTF-8" in sentence


@pytest.mark.parametrize("script", [endless, silent])
@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_cancels_the_request(service, script):
    service.script = script
    request_id = f"interrupted-{script.__name__}"
    arguments = command("generate", PROMPT, "--address", service.address, "--request-id", request_id)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(arguments, **pipes, start_new_session=True) as process, killed_at_last(process):
        deadline = time.monotonic() + 300
        while request_id not in service.running:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if script is endless:
            assert process.stdout is not None
            assert process.stdout.read(1)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 130, errors
    assert errors == b"\n"
    service.wait_cancelled(request_id)


@pytest.mark.usefixtures("interruptible")
def test_a_reader_that_goes_away_cancels_the_request(service):
    service.script = endless
    arguments = command("generate", PROMPT, "--address", service.address, "--request-id", "unread")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(arguments, **pipes, start_new_session=True) as process, killed_at_last(process):
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.wait(300) == 1
        assert process.stderr is not None
        assert process.stderr.read() == b""
    service.wait_cancelled("unread")


@contextlib.contextmanager
def killed_at_last(process):
    """``with Popen`` waits for ever for a process that a failed test has left behind, and for those that it started."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise


@pytest.fixture
def interruptible():
    """What is started from here does not inherit that SIGINT is ignored, as it is in background jobs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("when", [*slow(["streaming", "starting"]), *nightly(["compiling", "compiling beside"])])
@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_leaves_no_process_behind(when, tmp_path):
    """A real SIGINT to the whole process group, as a terminal sends it."""
    beside = ["--background-compilation"]  # by default the worker is detached, and finishes what it has begun
    flags = {"compiling": ["--compile"], "compiling beside": beside}.get(when, EAGER)
    if when == "streaming":  # with the operators that are there, as in a second run
        (cache_dir() / "operators").mkdir(parents=True, exist_ok=True)
        (tmp_path / "operators").symlink_to(cache_dir() / "operators")
    arguments = command("generate", PROMPT, "--max-tokens", "900", "--ignore-eos", *flags)
    environment = {**os.environ, "PACELINE_CACHE": str(tmp_path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "bufsize": 0}
    with (
        subprocess.Popen(arguments, **pipes, start_new_session=True, env=environment) as process,
        killed_at_last(process),
    ):
        assert process.stdout is not None
        assert process.stderr is not None
        if when.startswith(("streaming", "compiling beside")):
            assert process.stdout.read(1)
        deadline = time.monotonic() + 300
        if when == "compiling beside":
            while not any("compiled.worker" in _command_of(pid) for pid in _processes_with(tmp_path)):
                assert process.poll() is None, "the text had its end before anything was compiled"
                assert time.monotonic() < deadline
                time.sleep(0.05)
        elif when == "compiling":
            assert b"compiling" in process.stderr.read(200)
            time.sleep(10)
        elif when == "starting":
            while len(_processes_with(tmp_path)) < 3:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 130, errors
    assert b"Traceback" not in errors
    assert errors.endswith(b"\n")
    deadline = time.monotonic() + 300  # the interpreter's own helper process ends when it sees its pipe closed
    while left := _processes_with(tmp_path):
        assert time.monotonic() < deadline, [_command_of(pid) for pid in left]
        time.sleep(0.05)


def _command_of(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def _processes_with(path):
    """Processes that have ``path`` as their cache directory."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"PACELINE_CACHE={path}\0".encode() in environment.read_bytes():
                found.append(int(environment.parent.name))
        except OSError:
            continue
    return found
