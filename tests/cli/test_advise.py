"""``paceline advise``: configurations that are taken, refusals that name what is missing, figures that are measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from tests.drafters.head_files import made
from tests.support.models import save_pair

from paceline.cli import measure as measure_module
from paceline.cli.main import main
from paceline.cli.measure import acceptance_of
from paceline.config import ServiceConfig
from paceline.drafters.at_hand import AtHand
from paceline.drafters.catalogue import method_named
from paceline.errors import ConfigError

STEP = ["--target-step-ms", "10"]


def advised(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main(["advise", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a draft that are not the embedded ones."""
    return save_pair(tmp_path_factory.mktemp("models"))


def test_every_configuration_that_it_prints_is_taken_and_fits_the_devices(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--devices", "6", "--target-devices", "2", "--sessions", "90", *STEP, "--head", "early_exit=6")
    found = advised(capsys, *arguments)
    names = [forecast["name"] for forecast in found["forecasts"]]
    assert found["refused"]["early exit"].startswith("target_config.engine_kwargs.tensor_parallel_size is 2 beside")
    assert {"plain", "n-grams", "suffixes", "Medusa", "MTP", "EAGLE-3", "draft model, overlapped"} < set(names)
    assert {"cascade, vertical", "cascade, horizontal", "lookahead"} < set(names)
    assert found["refused"]["plugin"].startswith("what a plugin brings is known to its author alone")
    for name in names:
        found = advised(capsys, *arguments, "--method", name)
        config = ServiceConfig.parse(found["configuration"])
        forecast = next(each for each in found["forecasts"] if each["name"] == name)
        target, draft = config.target_config, config.draft_config
        assert target.deployment_config.num_replicas == forecast["targets"]
        assert target.engine_kwargs.tensor_parallel_size == 2
        assert target.engine_kwargs.max_sessions * forecast["targets"] >= 90
        assert target.engine_kwargs.max_step_tokens >= target.engine_kwargs.max_sessions
        drafts = 0 if draft is None else draft.deployment_config.num_replicas
        assert drafts == forecast["drafts"]
        model_drafts = drafts if name.startswith(("draft model", "cascade")) else 0
        assert 2 * forecast["targets"] + model_drafts <= 6
        for head in target.engine_kwargs.heads:
            assert head.num_speculative_tokens == forecast["predicted"]["k"]


def test_the_text_ends_with_the_configuration_of_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--devices", "2", *STEP]) == 0
    lines, _, tree = capsys.readouterr().out.partition("\n# ")
    title, _, tree = tree.partition("\n")
    rows = [line.split("  ")[0] for line in lines.splitlines()[3:]]
    assert title.startswith(f"{rows[0]}, of a service (--config)")
    assert "plain" in rows
    assert ServiceConfig.parse(yaml.safe_load(tree)).target_config.model_loading_config.model_id
    assert "not MLP speculator: no checkpoint of it is at hand: name one with --head mlp_speculator=DIRECTORY" in lines
    assert "acceptance of MTP: assumed, one module used for 7 tokens: 3.20 tokens a step" in lines


def test_what_does_not_fit_is_named_with_the_reason(
    pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = made("eagle3").write(tmp_path / "eagle3")
    target = ["--target", str(pair / "target"), *STEP]
    found = advised(capsys, *target, "--head", f"eagle3={head}", "--draft", "paceline/embedded-draft")
    refused = found["refused"]
    assert refused["EAGLE-3"].startswith("hidden_size (it has no embed_tokens) is 32")
    assert refused["draft model, overlapped"].startswith("the draft's tokenizer differs in content from the target's")
    assert refused["draft model, co-located"] == refused["draft model, overlapped"]
    assert "comes without MTP modules" in refused["MTP"]
    modelless = {"n-grams", "suffixes", "suffixes, in the target", "lookahead", "plain"}
    assert modelless == {forecast["name"] for forecast in found["forecasts"]}
    found = advised(capsys, *target, "--draft", str(pair / "draft"))
    assert modelless | {"draft model, co-located"} == {f["name"] for f in found["forecasts"]}
    assert main(["advise", *target, "--draft", str(pair / "draft")]) == 0
    assert "not draft model, overlapped: --devices 1 leaves no device beside one target" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--devices", "2", "--target-devices", "4"], "--devices is 2 while --target-devices is 4: no target fits"),
        (["--devices", "0"], "argument --devices: '0': a whole number from 1 to 100000 is needed"),
        (["--bandwidth-gb-s", "nan"], "argument --bandwidth-gb-s: 'nan': a number above 0 is needed"),
        (["--temperature", "1"], "--temperature is 1.0 without --measure: only that runs the models"),
        (["--measure", "--temperature", "9"], "--temperature is 9: it must be from 0 to 2"),
        (["--measure", "--prompts-file", "/nowhere"], "--prompts-file is '/nowhere': it cannot be read"),
        ([*STEP, "--bandwidth-gb-s", "900"], "--target-step-ms is 10 while --bandwidth-gb-s is 900: give one"),
        (["--method", "EAGLE"], "--method is 'EAGLE': no checkpoint of it is at hand"),
        (["--method", "magic"], "--method is 'magic': possible on these devices are "),
        (["--head", "magic=/x"], "--head magic=/x: method is 'magic': it must be "),
        (["--target", "/nowhere"], "/nowhere"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["advise", *arguments])
    except SystemExit as end:
        status = end.code
    assert status == 2
    error = capsys.readouterr().err.strip()
    assert sentence in error
    assert "\n" not in error


@pytest.mark.slow
def test_measured_acceptance_ranks_heads_as_their_card_does() -> None:
    found = {}
    for name in ("Medusa", "MTP"):
        each = AtHand(method_named(name), f"paceline/embedded-{name.lower()}")
        found[name], source = acceptance_of("paceline/embedded-target", each, ["def read(self, size):\n"], 0.0)
        assert source == "measured, 1 x 48 tokens at temperature 0"
    assert 0 < found["Medusa"] < found["MTP"] < 0.99


@pytest.mark.slow
@pytest.mark.parametrize(("name", "model"), [("lookahead", None), ("cascade, vertical", "paceline/embedded-draft")])
def test_what_drafts_by_several_means_is_measured(name: str, model: str | None) -> None:
    each = AtHand(method_named(name), model)
    value, source = acceptance_of("paceline/embedded-target", each, ["def read(self, size):\n"], 0.0)
    assert source == "measured, 1 x 48 tokens at temperature 0"
    assert 0 < value < 0.99


@pytest.mark.nightly
def test_all_that_is_possible_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text("def read(self, size):\n\nclass Reader:\nimport os\n", encoding="utf-8")
    found = advised(capsys, *STEP, "--measure", "--prompts-file", str(prompts))
    measured = {name: each["value"] for name, each in found["acceptance"].items()}
    assert 0 < measured["Medusa"] < measured["EAGLE-3"] < measured["MTP"] < 0.99
    assert 0.5 < measured["draft model, co-located"] == measured["draft model, overlapped"]
    assert all("3 x 48 tokens at temperature 0" in each["source"] for each in found["acceptance"].values())


def test_what_a_measurement_refuses_is_not_possible(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(target: str, each: AtHand, *_: object) -> tuple[float, str]:
        if each.method.kind == "medusa":
            raise ConfigError("it predicts nothing")
        return 0.5, "measured"

    monkeypatch.setattr(measure_module, "acceptance_of", measure)
    found = advised(capsys, *STEP, "--measure")
    assert found["refused"]["Medusa"] == "it predicts nothing"
    assert "Medusa" not in {forecast["name"] for forecast in found["forecasts"]}
    assert set(found["acceptance"]) > {"MTP", "EAGLE-3"}
