"""Flags made of pydantic fields, and the flags that every command has."""

import argparse
import enum
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from paceline.cli.flags import add_fields, add_model_flags, draft_config_of, field_at, given, help_of
from paceline.cli.generate import local_config
from paceline.cli.main import build_parser
from paceline.cli.serve import add_config_flags, read_config
from paceline.config import DraftModel, ModelDraftConfig, ServiceConfig
from paceline.errors import ConfigError


class Color(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


class Inner(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    num_rows: int = Field(default=3, ge=1)
    """Rows of a ``table``, 100 % of them."""
    share: float | None = None
    """KV share. None: all."""
    color: Color = Color.RED
    dtype: Literal["auto", "float32"] = "auto"
    compile: bool | Literal["auto"] = "auto"
    strict: bool = False
    """Refuse more."""


class Outer(BaseModel):
    inner: Inner = Inner()


NAMES = ["num_rows", "share", "color", "dtype", "compile", "strict"]


def parsed(*arguments):
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_fields(parser, Outer, [f"inner.{name}" for name in NAMES])
    return given(parser.parse_args(arguments), Inner)


def test_what_is_not_given_is_left_to_the_field():
    assert parsed() == {}


def test_a_type_gives_the_conversion():
    flags = "--num-rows 4 --share 0.5 --color blue --dtype float32 --no-compile --strict"
    assert parsed(*flags.split()) == {
        "num_rows": 4,
        "share": 0.5,
        "color": "blue",
        "dtype": "float32",
        "compile": False,
        "strict": True,
    }


@pytest.mark.parametrize("arguments", [["--num-rows", "x"], ["--color", "green"], ["--dtype", "int8"]])
def test_a_type_refuses_other_values(arguments):
    with pytest.raises(argparse.ArgumentError):
        parsed(*arguments)


def test_a_docstring_and_a_default_give_the_help():
    texts = {name: help_of(field_at(Outer, f"inner.{name}")) for name in NAMES}
    assert texts["num_rows"] == "rows of a table, 100 %% of them (default: 3)"
    assert texts["share"] == "KV share (default: all)"
    assert texts["dtype"] == "default: auto"
    assert texts["strict"] == "refuse more (default: off)"


MODEL = (
    "--target --model --draft --drafter --head --dtype --max-model-len --compile --no-compile --background-compilation "
    "--no-background-compilation --device --tensor-parallel-size --cpu-threads --draft-device --placement"
)
SERVICE = f"{MODEL} --config --set --targets --drafts --routers --host --grpc-port --http-port "
SERVICE += "--port --no-playground --tls-certificate --tls-key --tls-client-ca --api-keys --chat-template "
SERVICE += "--tool-call-parser --reasoning-parser --served-model-name --cors-origins --allowed-origins "
SERVICE += "--allowed-hosts --max-num-seqs --max-num-batched-tokens --gpu-memory-utilization "
SERVICE += "--kv-cache-dtype --api-key "
SERVICE += "--enable-prefix-caching --enable-force-include-usage "
SERVICE += "--no-enable-prefix-caching --speculative-config --rope-scaling --rope-theta --hf-overrides --revision "
SERVICE += "--trust-remote-code"
CONNECTION = "--tls --tls-ca --tls-certificate --tls-key --tls-server-name --api-key"
FLAGS = {
    "generate": f"{MODEL} --json --logprobs --top-logprobs --local --verbose --address --timeout --request-id "
    f"--resume --no-resume {CONNECTION} --json-schema --json-object --regex --grammar --choice --structural-tag "
    "--stop --max-tokens --min-tokens --temperature --top-p --top-k --min-p --repetition-penalty --presence-penalty "
    "--frequency-penalty --ignore-eos --include-stop-str-in-output --seed --seed-scope --logprobs-mode --mode "
    "--acceptance --draft-tokens",
    "chat": f"{MODEL} --system --chat-template --local --verbose --address --api-key --tls-ca --stop --max-tokens "
    "--min-tokens --temperature --top-p --top-k --min-p --repetition-penalty --presence-penalty --frequency-penalty "
    "--ignore-eos --include-stop-str-in-output --seed --seed-scope --logprobs-mode --mode --acceptance --draft-tokens",
    "serve": f"{SERVICE} --local --address --dashboard --print-environment --verbose",
    "check": f"{SERVICE} --json --against --address --device-memory-gib",
    "config": f"{SERVICE} --markdown --schema",
    "demo": f"{MODEL} --local --verbose --max-tokens --temperature --seed --repeats",
    "status": "--address --json --watch --timeout " + CONNECTION,
}


@pytest.mark.parametrize("command", FLAGS)
def test_a_command_has_its_flags(command):
    (commands,) = (action for action in build_parser(command)._actions if isinstance(action.choices, dict))
    parser = commands.choices[command]
    assert {flag for action in parser._actions for flag in action.option_strings} == {
        *("-h", "--help", "-q", "--quiet"),
        *FLAGS[command].split(),
    }
    for action in parser._actions:
        assert action.help, f"{action.option_strings} says what it does"


@pytest.mark.parametrize(
    ("text", "drafters", "rest"),
    [
        ("vertical=/m/a:4,ngram", ["/m/a", "ngram"], {"lengths": [4]}),
        ("vertical=/m/a,suffix", ["/m/a", "suffix"], {}),
        ("vertical=o/a:2, o/b:3, ngram", ["o/a", "o/b", "ngram"], {"lengths": [2, 3]}),
        ("vertical=c:/b:2,ngram", ["c:/b", "ngram"], {"lengths": [2]}),
        ("vertical=./ngram:1,suffix", ["./ngram", "suffix"], {"lengths": [1]}),
    ],
)
def test_a_cascade_on_the_command_line_is_that_of_a_file(text: str, drafters: list[str], rest: dict[str, Any]) -> None:
    parts = [
        {"kind": name}
        if name in ("ngram", "suffix")
        else {"model": name, "options": {"dtype": "float32", "compile": False}}
        for name in drafters
    ]
    wanted = ServiceConfig.parse({"draft_config": {"kind": "cascade", "engine_kwargs": {"drafters": parts} | rest}})
    found = ServiceConfig.parse({"draft_config": draft_config_of(text, {"dtype": "float32", "compile": False})})
    assert found.draft_config == wanted.draft_config
    parser = argparse.ArgumentParser()
    add_model_flags(parser, ["none"])
    pipeline = local_config(
        parser.parse_args(["--target", "t", "--drafter", text, "--dtype", "float32", "--no-compile"])
    )
    assert wanted.draft_config is not None
    assert pipeline.draft == wanted.draft_config.engine_kwargs


def test_target_and_draft_have_a_device_each() -> None:
    """With Ray and without it, in a cascade, too."""
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    flags = ["--device", "cuda:2", "--draft-device", "cuda:4"]
    local = local_config(parser.parse_args(flags))
    config = read_config(parser.parse_args(flags))
    assert isinstance(local.draft, DraftModel)
    assert isinstance(config.draft_config, ModelDraftConfig)
    assert (local.target.device, local.draft.device) == ("cuda:2", "cuda:4")
    assert (config.target_config.engine_kwargs.device, config.draft_config.engine_kwargs.device) == ("cuda:2", "cuda:4")
    only = local_config(parser.parse_args(flags[:2]))
    assert isinstance(only.draft, DraftModel)
    assert (only.target.device, only.draft.device) == ("cuda:2", "auto")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("vertical=a", "drafters"),
        ("vertical=ngram:3,a", "is 'ngram': only a model verifies what others guess for it"),
        ("vertical=a:3,ngram:2", "--drafter vertical=a:3,ngram:2: ngram:2 is the last drafter"),
        ("vertical=a:3,b,ngram", "lengths has 1 entries for 3 drafters: 2 are needed"),
        ("vertical=a:17,ngram", "lengths holds 17: 1 to 16 are allowed"),
        ("vertical=,ngram", "model"),
    ],
)
def test_a_cascade_that_is_none_is_refused_in_one_sentence(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        ServiceConfig.parse({"draft_config": draft_config_of(text)})
    assert said in str(error.value)
    assert "\n" not in str(error.value)
