"""What a replica refuses before it loads: with the numbers of the device that it finds, and what fits there."""

import logging

import pytest
import torch
from tests.support.hybrids import hybrid_model
from tests.support.models import save_pair

from paceline.checkpoint.files import Checkpoint
from paceline.config import DraftOptions, DraftSetup, TargetOptions, TargetSetup
from paceline.draft import build as draft_build
from paceline.draft.build import build_draft_engine
from paceline.errors import ConfigError
from paceline.model.device import Placement
from paceline.preflight import device as preflight
from paceline.preflight.estimate import CODE_BYTES, PROCESS_BYTES, draft_estimate, target_estimate
from paceline.target import build as target_build
from paceline.target.build import build_target_engine

MAX_LEN = 2048


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch):
    def load(*given, **options):
        raise LookupError("loaded")

    monkeypatch.setattr(target_build, "load_model", load)
    monkeypatch.setattr(draft_build, "load_model", load)


@pytest.fixture
def memory(monkeypatch):
    """Sets what the machine has left."""
    return lambda num_bytes: monkeypatch.setattr(preflight, "available_bytes", lambda: num_bytes)


RUN = {"compile": False, "device": "cpu", "dtype": "float32"}


def target_setup(folder, **options):
    return TargetSetup(f"{folder}/target", TargetOptions(**RUN, **options), tree_budget=256)


def draft_setup(folder, **options):
    return DraftSetup.for_target(target_setup(folder), f"{folder}/draft", DraftOptions(**RUN, **options))


def test_a_target_that_fits_is_loaded_and_one_byte_less_is_refused(folder, memory):
    settings = target_setup(folder, kv_pages=100)
    facts = Checkpoint.open(str(folder / "target")).size("float32")
    step = target_estimate(settings, facts, MAX_LEN).workspace_bytes
    memory(facts.weights_bytes + facts.kv_bytes(100) + step)
    with pytest.raises(LookupError):
        build_target_engine(settings, print)
    memory(facts.weights_bytes + facts.kv_bytes(100) + step - 1)
    with pytest.raises(ConfigError, match=r"kv_pages is 100: it needs 100 KV pages, .* set it to at most 99$"):
        build_target_engine(settings, print)
    with pytest.raises(LookupError):
        build_target_engine(target_setup(folder, kv_pages=99), print)


def test_states_that_do_not_fit_are_refused(tmp_path, memory):
    hybrid_model("qwen3_5_text").save_pretrained(tmp_path / "target")
    settings = target_setup(tmp_path, state_slots=60)
    facts = Checkpoint.open(str(tmp_path / "target")).size("float32")
    needed = facts.linear.state_bytes(4)
    with_60 = target_estimate(settings, facts, MAX_LEN)
    memory(with_60.least_bytes - min(PROCESS_BYTES, with_60.process_bytes) - 3 * needed)
    with pytest.raises(ConfigError, match=r"state_slots is 60: .* set it to at most 57$"):
        build_target_engine(settings, print)
    with pytest.raises(LookupError):
        build_target_engine(target_setup(tmp_path, state_slots=57), print)


def test_a_draft_that_does_not_fit_is_refused(folder, memory):
    settings = draft_setup(folder, max_sessions=9)
    estimate = draft_estimate(settings, Checkpoint.open(str(folder / "draft")).size("float32"), MAX_LEN)
    memory(estimate.device_bytes - 1)
    with pytest.raises(ConfigError, match=r"max_sessions is 9: .* this machine has .* set it to at most 8$"):
        build_draft_engine(settings, print)
    memory(estimate.device_bytes)
    with pytest.raises(LookupError):
        build_draft_engine(settings, print)


def test_too_little_for_the_load_is_logged(folder, memory, caplog):
    settings = target_setup(folder, max_sessions=64)
    estimate = target_estimate(settings, Checkpoint.open(str(folder / "target")).size("float32"), MAX_LEN)
    needed = estimate.device_bytes + estimate.tree_bytes + CODE_BYTES
    for num_bytes, expected in ((needed, 0), (needed - 1, 1)):
        caplog.clear()
        memory(num_bytes)
        with caplog.at_level(logging.WARNING, "paceline"), pytest.raises(LookupError):
            build_target_engine(settings, print)
        assert len(caplog.records) == expected
    assert "max_sessions is 64: under load a replica takes about" in caplog.text


def test_a_gpu_holds_no_process(folder, monkeypatch):
    settings = target_setup(folder, kv_pages=100)
    facts = Checkpoint.open(str(folder / "target")).size("float32")
    monkeypatch.setattr(target_build, "resolve", lambda *given: Placement(torch.device("cuda"), torch.float32))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (facts.weights_bytes, 1 << 40))
    with pytest.raises(ConfigError, match=r"which needs at least .* and this GPU has 0.00 GiB left: .*smaller model"):
        build_target_engine(settings, print)


def test_a_model_that_must_be_fetched_is_not_judged(memory, monkeypatch):
    memory(1)
    monkeypatch.setattr(Checkpoint, "open", lambda source, trusted: Checkpoint(source, 2048, (), 128))
    with pytest.raises(LookupError):
        build_target_engine(TargetSetup("org/not-here"), print)


@pytest.mark.parametrize(
    ("options", "device", "eager"),
    [
        ({}, "cpu", True),
        ({"compile": True}, "cpu", False),
        ({"compile": True, "background_compilation": True}, "cpu", True),
        ({"background_compilation": False}, "cpu", False),
        ({"tensor_parallel_size": 2}, "cpu", False),
        ({}, "cuda", False),
    ],
)
def test_a_model_serves_before_it_is_compiled_where_the_options_allow_it(folder, memory, options, device, eager):
    memory(1 << 40)
    placement = Placement(torch.device(device), torch.float32)
    checkpoint = Checkpoint.open(str(folder / "target"))
    assert preflight.begins_eagerly(TargetOptions(**options), checkpoint, placement) is eager


def test_a_model_is_compiled_first_where_both_at_once_would_not_fit(folder, memory, caplog):
    """Five times the weights; unless it is demanded."""
    checkpoint, placement = Checkpoint.open(str(folder / "target")), Placement(torch.device("cpu"), torch.float32)
    memory(needed := 5 * checkpoint.size("float32").weights_bytes)
    assert preflight.begins_eagerly(TargetOptions(), checkpoint, placement)
    memory(needed - 1)
    with caplog.at_level(logging.INFO, logger=preflight.log.name):
        assert not preflight.begins_eagerly(TargetOptions(), checkpoint, placement)
    assert "it is compiled before it serves" in caplog.text
    assert preflight.begins_eagerly(TargetOptions(background_compilation=True), checkpoint, placement)


def test_a_compilation_that_is_demanded_of_a_gpu_is_refused(folder):
    placement = Placement(torch.device("cuda"), torch.float32)
    with pytest.raises(ConfigError, match=r"background_compilation is true, and the model is on device 'cuda'"):
        preflight.begins_eagerly(
            TargetOptions(background_compilation=True), Checkpoint.open(str(folder / "target")), placement
        )
