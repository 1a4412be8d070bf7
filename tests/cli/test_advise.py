"""``paceline advise``: configurations that are taken, refusals that name what is missing, figures that are measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from tests.drafters.head_files import made
from tests.support.models import FAMILIES, letters_tokenizer, random_model, save_pair
from tests.support.packed import write_packed

from paceline.checkpoint.files import Checkpoint, embedded_paths
from paceline.cli import measure as measure_module
from paceline.cli.main import main
from paceline.cli.measure import acceptance_of
from paceline.config import ServiceConfig
from paceline.drafters.available import AvailableMethod
from paceline.drafters.catalogue import method_named
from paceline.errors import ConfigError

STEP = ["--target-step-ms", "10"]
RUN = Path(__file__).parents[2] / "benchmarks" / "results" / "local-light.json"


def advised(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main(["advise", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a draft that are not the embedded ones."""
    return save_pair(tmp_path_factory.mktemp("models"))


@pytest.mark.slow
def test_every_configuration_that_it_prints_is_taken_and_fits_the_devices(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--devices", "6", "--target-devices", "2", "--sessions", "90", *STEP, "--head", "early_exit=6")
    found = advised(capsys, *arguments)
    names = [forecast["name"] for forecast in found["forecasts"]]
    assert found["refused"]["early exit"].startswith("target_config.engine_kwargs.tensor_parallel_size is 2 with")
    assert {"plain", "n-grams", "suffixes", "Medusa", "MTP", "EAGLE-3", "draft model, overlapped"} < set(names)
    assert {"cascade, vertical", "lookahead"} < set(names)
    assert {"MTP, in the pool", "EAGLE-3, in the pool"} < set(names)
    assert found["refused"]["plugin"].startswith("only its author knows what a plugin yields")
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
        model_drafts = drafts if name.startswith(("draft model", "cascade")) or name.endswith("in the pool") else 0
        assert 2 * forecast["targets"] + model_drafts <= 6
        for head in target.engine_kwargs.heads:
            assert head.num_speculative_tokens == forecast["predicted"]["k"]


def test_a_run_of_threads_gives_times_acceptance_and_cpu_threads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cores = [
        {
            "cpu_threads": threads,
            "target_s": [[1, step], [9, 1.4 * step]],
            "draft_s": [[1, depth]],
            "gap_s": 0.0005,
            "tokens_per_s": [],
        }
        for threads, step, depth in ((1, 0.0175, 0.0016), (2, 0.0115, 0.0014))
    ]
    data = json.loads(RUN.read_text(encoding="utf-8"))
    run = tmp_path / "run.json"
    run.write_text(json.dumps(data | {"cores": cores}), encoding="utf-8")
    arguments = ("--from", str(run), "--devices", "2", "--draft", "paceline/embedded-draft")
    found = advised(capsys, *arguments)
    assert found["acceptance"]["draft model, co-located"] == {
        "value": pytest.approx(0.774, abs=1e-3),
        "source": f"measured, {run} at temperature 0",
    }
    assert found["acceptance"]["Medusa"]["source"].startswith("assumed")
    for forecast in found["forecasts"]:
        cores_of_targets = forecast["targets"] * forecast["target_devices"]
        model_drafts = forecast["drafts"] if forecast["name"].startswith(("draft model, o", "cascade")) else 0
        assert cores_of_targets + model_drafts <= 2
    of = {forecast["name"]: forecast for forecast in found["forecasts"]}
    assert of["plain"]["target_devices"] == of["draft model, co-located"]["target_devices"] == 2
    assert of["draft model, overlapped"]["target_devices"] == 1
    for name, threads in (("plain", 2), ("draft model, co-located", 2), ("draft model, overlapped", 1)):
        config = ServiceConfig.parse(advised(capsys, *arguments, "--method", name)["configuration"])
        options = config.target_config.engine_kwargs
        assert (options.cpu_threads, options.tensor_parallel_size) == (threads, 1)
    assert of["plain"]["predicted"]["tokens_per_s"] == pytest.approx(1 / 0.012)
    assert main(["advise", *arguments]) == 0
    assert "cpu_threads: 2" in (printed := capsys.readouterr().out)
    assert "assumed: an H100" not in printed
    assert "not forecast: targets" not in printed
    assert main(["advise", "--from", str(RUN), "--devices", "2"]) == 0
    assert "not forecast: targets of 2 cores. Their steps were not measured: paceline bench local --cpu-threads 2" in (
        capsys.readouterr().out
    )
    colder = advised(capsys, *arguments, "--temperature", "1")["acceptance"]["draft model, overlapped"]["value"]
    assert colder == pytest.approx(0.563, abs=1e-3)


def test_a_draft_on_its_targets_host_is_compared_and_configured(capsys: pytest.CaptureFixture[str]) -> None:
    name = "draft model, overlapped on its target's host"
    arguments = ("--devices", "3", "--sessions", "6", "--target-step-ms", "12", "--host-draft-step-ms", "0.3")
    found = advised(capsys, *arguments, "--method", name)
    forecast = next(each for each in found["forecasts"] if each["name"] == name)
    assert (forecast["targets"], forecast["drafts"]) == (3, 3), "it takes no device from the targets"
    config = ServiceConfig.parse(found["configuration"])
    assert config.draft_config.deployment_config.on_target_nodes
    assert config.draft_options()["ray_actor_options"]["label_selector"] == {"paceline/pool": "target"}
    assert name not in {each["name"] for each in advised(capsys, *arguments[:6])["forecasts"]}
    slow = advised(capsys, *arguments[:-1], "30")["forecasts"]
    assert next(each for each in slow if each["name"] == name)["times_plain"] < forecast["times_plain"]


def test_a_head_in_the_pool_is_forecast_ahead_only_with_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    def mode(*arguments: str) -> str:
        found = advised(capsys, "--devices", "2", *STEP, *arguments)
        return next(f["predicted"]["mode"] for f in found["forecasts"] if f["name"] == "MTP, in the pool")

    assert mode() == mode("--kept", "0.2") == "sequential"
    assert mode("--kept", "1") == "overlapped"
    assert main(["advise", "--devices", "2", *STEP]) == 0
    printed = capsys.readouterr().out
    assert "heads in the draft pool take turns with the target; --kept R is the measured acceptance" in printed


def test_the_target_may_be_named_first_and_an_assumed_device_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "paceline/embedded-target"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(
        "assumed: an H100, 3,350 GB/s and 0.08 ms a layer; name yours by --bandwidth-gb-s, or better --target-step-ms\n"
        "1 device,"
    )
    assert "model_id: paceline/embedded-target" in printed


def test_a_step_takes_time_for_each_layer_unless_it_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """As in small steps on many GPUs, of which the bytes are a small part."""
    size = Checkpoint.open(str(embedded_paths()[0])).size()
    assert size is not None
    for flags, step_ms in (
        (["--bandwidth-gb-s", "1e6"], 0.08 * size.num_layers),
        (["--target-step-ms", "0.01"], 0.01),
    ):
        assert main(["advise", *flags]) == 0
        found = re.search(r"step of one token takes (\S+) ms", capsys.readouterr().out)
        assert found is not None
        assert float(found[1]) == pytest.approx(step_ms, rel=0.02)


def test_a_step_reads_fp8_weights_as_a_gpu_keeps_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_packed(tmp_path, "fp8, blocks")
    letters_tokenizer(300).save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(str(tmp_path))
    kept, plain = checkpoint.size(on_gpu=True), checkpoint.size()
    assert kept is not None
    assert plain is not None
    assert main(["advise", str(tmp_path), "--bandwidth-gb-s", "0.001"]) == 0
    found = re.search(r"step of one token takes (\S+) ms", capsys.readouterr().out)
    assert found is not None
    assert float(found[1]) == pytest.approx(kept.weights_bytes / 1e3, rel=0.01)
    assert kept.weights_bytes < 0.9 * plain.weights_bytes


def test_a_plugin_is_forecast_by_what_was_measured_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    found = advised(capsys, *STEP, "--measured", "bigrams=0.5,0.2", "--method", "plugin")
    assert found["acceptance"]["plugin"] == {"value": 0.5, "source": "given, --measured bigrams"}
    assert found["configuration"]["draft_config"]["kind"] == "plugin"
    assert ServiceConfig.parse(found["configuration"]).draft_config.engine_kwargs.drafter == "bigrams"
    slower = advised(capsys, *STEP, "--measured", "bigrams=0.5,20")
    rates = [
        next(f["predicted"]["tokens_per_s"] for f in each["forecasts"] if f["name"] == "plugin")
        for each in (found, slower)
    ]
    assert rates[0] > rates[1]


def test_a_head_is_forecast_by_what_was_measured_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    """A depth of a twentieth of a step, acceptance 0.6: K tokens cost K / 20 steps and bring 0.6 + 0.36 + .."""
    found = advised(capsys, "--target-step-ms", "11.5", "--measured", "MTP=0.6,0.575")
    assert found["acceptance"]["MTP"] == {"value": 0.6, "source": "given, --measured MTP"}
    headed = next(each for each in found["forecasts"] if each["name"] == "MTP")
    k, row = headed["predicted"]["k"], 1 / 295
    gain = (1 - 0.6 ** (k + 1)) / 0.4 / (k * 0.05 + 1 + k * row)
    assert headed["times_plain"] == pytest.approx(gain, rel=0.01)


def test_the_text_ends_with_the_configuration_of_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--devices", "2", *STEP]) == 0
    lines, _, tree = capsys.readouterr().out.partition("\n# ")
    title, _, tree = tree.partition("\n")
    rows = [line.split("  ")[0] for line in lines.splitlines()[3:]]
    assert title.startswith(f"{rows[0]}, of a service (--config)")
    assert "plain" in rows
    assert ServiceConfig.parse(yaml.safe_load(tree)).target_config.model_loading_config.model_id
    lacking = [line for line in lines.splitlines() if "no checkpoint was found" in line]
    assert len(lacking) == 1
    assert "; MLP speculator;" in lacking[0]
    assert " --head mlp_speculator=DIRECTORY, " in lines
    most = ServiceConfig.parse(yaml.safe_load(tree)).target_config.engine_kwargs.max_sessions
    assert f"# max_sessions {most}: --sessions 1 over --devices 2; further requests wait" in tree
    assert "acceptance of MTP; MTP, in the pool: assumed, one module used for 7 tokens: 3.20 tokens a step" in lines


def test_a_mixture_of_experts_reads_the_experts_of_its_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a configuration without weights: one token reads a few experts, many tokens all of them."""
    config = FAMILIES["qwen3_moe"]()
    config.save_pretrained(tmp_path)
    letters_tokenizer().save_pretrained(tmp_path)
    capsys.readouterr()
    found = advised(capsys, "--target", str(tmp_path), "--bandwidth-gb-s", "1")
    model = random_model(config)
    sizes = {name: one.numel() for name, one in model.named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    share = config.num_experts_per_tok / config.num_experts
    assert 0 < share < 1 < experts
    for tokens, read in ((1, share), (2, 1 - (1 - share) ** 2), (4096, 1.0)):
        (seconds,) = [s for n, s in found["site"]["target"]["points"] if n == tokens]
        read_s = 2e-9 * (sum(sizes.values()) - (1 - read) * experts)
        computed_s = (tokens - 1) * 2e-9 * (sum(sizes.values()) - (1 - share) * experts) / 295
        assert seconds == pytest.approx(read_s + computed_s + 8e-5 * config.num_hidden_layers)
    assert "has no weights here, and so no MTP modules" in found["refused"]["MTP"]


def test_code_of_a_checkpoint_is_trusted_in_the_configuration_too(capsys: pytest.CaptureFixture[str]) -> None:
    found = advised(capsys, *STEP, "--devices", "2", "--method", "draft model, overlapped", "--trust-remote-code")
    config = ServiceConfig.parse(found["configuration"])
    assert config.target_config.engine_kwargs.trust_remote_code
    assert config.draft_config.engine_kwargs.trust_remote_code


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
    out = capsys.readouterr().out
    assert re.search(r"^not draft model, overlapped; .*: --devices 1 leaves no device for a draft$", out, re.MULTILINE)


@pytest.mark.slow
def test_measured_acceptance_ranks_heads_as_their_card_does() -> None:
    found = {}
    for name in ("Medusa", "MTP"):
        each = AvailableMethod(method_named(name), f"paceline/embedded-{name.lower()}")
        found[name], source = acceptance_of("paceline/embedded-target", each, ["def read(self, size):\n"], 0.0)
        assert source == "measured, 1 x 48 tokens at temperature 0"
    assert 0 < found["Medusa"] < found["MTP"] < 0.99


@pytest.mark.slow
@pytest.mark.parametrize(("name", "model"), [("lookahead", None), ("cascade, vertical", "paceline/embedded-draft")])
def test_what_drafts_by_several_means_is_measured(name: str, model: str | None) -> None:
    each = AvailableMethod(method_named(name), model)
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
    def measure(target: str, each: AvailableMethod, *_: object) -> tuple[float, str]:
        if each.method.kind == "medusa":
            raise ConfigError("it predicts nothing")
        return 0.5, "measured"

    monkeypatch.setattr(measure_module, "acceptance_of", measure)
    found = advised(capsys, *STEP, "--measure")
    assert found["refused"]["Medusa"] == "it predicts nothing"
    assert "Medusa" not in {forecast["name"] for forecast in found["forecasts"]}
    assert set(found["acceptance"]) > {"MTP", "EAGLE-3"}
