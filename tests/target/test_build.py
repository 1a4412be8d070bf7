"""What a target does with the verdict of its self-test when it starts."""

import logging
import weakref

import pytest
import torch
from tests.support.models import save_pair

from paceline.checkpoint.files import Checkpoint
from paceline.config import TargetOptions, TargetSetup
from paceline.errors import ConfigError
from paceline.model import loading
from paceline.model.compiled.background import CompileJob
from paceline.model.compiled.buckets import Limits
from paceline.model.runner import ModelRunner
from paceline.model.selftest import InvarianceReport, check_invariance
from paceline.model.step import Step
from paceline.target import build

HOLDS, FAILS = InvarianceReport(384), InvarianceReport(384, 9, 1, 0.5)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_pair(tmp_path_factory.mktemp("pair")) / "target")


def setup(source: str, wanted: str, **options) -> TargetSetup:
    fields = {"dtype": "float32", "device": "cpu", "compile": False, "batch_invariant": wanted, **options}
    return TargetSetup(source, TargetOptions(**fields), tree_budget=256)


@pytest.mark.parametrize(
    ("wanted", "report", "verdict", "said"),
    [
        ("auto", HOLDS, "yes", "batch-invariant: 384 verified rows"),
        ("auto", FAILS, "no", "NOT batch-invariant here: 9 of 384 rows"),
        ("require", HOLDS, "yes", "batch-invariant: 384 verified rows"),
        ("off", FAILS, "untested", "not tested for batch invariance (batch_invariant is 'off')"),
    ],
)
def test_the_verdict_is_logged_and_kept(wanted, report, verdict, said, source, monkeypatch, caplog) -> None:
    """By default a target that fails starts and warns; one that is not tested says that."""
    monkeypatch.setattr(build, "check_invariance", lambda *given: report)
    with caplog.at_level(logging.INFO, logger=build.log.name):
        engine = build.build_target_engine(setup(source, wanted), lambda events: None)
    assert engine.batch_invariant == verdict
    (record,) = [r for r in caplog.records if said in r.message]
    assert record.levelno == (logging.INFO if verdict == "yes" else logging.WARNING)


def test_a_target_that_must_hold_it_does_not_start_without(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``require``: the reason is the finding."""
    monkeypatch.setattr(build, "check_invariance", lambda *given: FAILS)
    with pytest.raises(ConfigError, match=r"batch_invariant is 'require', and the target .* 9 of 384 rows"):
        build.build_target_engine(setup(source, "require"), lambda events: None)


class Compiled:
    """A compilation that ends at once: with the step that the model has, or with none."""

    def __init__(self, job: CompileJob, load: object) -> None:
        self.job, self.started = job, False

    def start(self) -> None:
        self.started = True

    def wait(self) -> None:
        assert self.started

    def take(self) -> object:
        return self.step

    def close(self) -> None:
        pass

    step: object = None
    execution = "compiling"


@pytest.mark.parametrize(
    ("compiles", "reports", "verdict", "execution"),
    [
        (True, [FAILS, HOLDS], "yes", "compiled"),
        (False, [FAILS], "no", "eager"),
        (True, [HOLDS], "yes", "compiling"),
    ],
)
@pytest.mark.usefixtures("own_cache")
def test_eager_steps_that_are_not_batch_invariant_serve_nobody(
    compiles: bool,
    reports: list[InvarianceReport],
    verdict: str,
    execution: str,
    source: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then the target waits until it is compiled, and is tested again; it stays eager where that cannot be done."""
    monkeypatch.setattr(loading, "find_compiler", lambda: "g++")
    monkeypatch.setattr(build, "check_invariance", lambda *given: reports.pop(0))
    eager = loading.load_pretrained(Checkpoint.open(source), torch.float32)
    monkeypatch.setattr(Compiled, "step", Step(eager) if compiles else None)
    monkeypatch.setattr(build, "Compilation", Compiled)
    engine = build.build_target_engine(setup(source, "auto", compile="auto"), lambda events: None)
    assert (engine.batch_invariant, engine.execution, reports) == (verdict, execution, [])


def test_quantized_weights_are_not_taken_untested_beside_a_draft(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their products may be others for one token than for several."""
    monkeypatch.setattr(build, "check_invariance", lambda *given: HOLDS)
    with pytest.raises(ConfigError, match=r"batch_invariant is 'off': the target .* must be 'auto' or 'require'"):
        build.build_target_engine(setup(source, "off", quantization="int8"), lambda events: None)


def test_the_test_sees_the_steps_and_the_threads_of_the_engine(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the environment asks of OpenMP and MKL: one thread, from before the first product."""
    seen = []

    def check(runner: ModelRunner, max_len: int, max_step_tokens: int) -> InvarianceReport:
        libraries = [line for line in torch.__config__.parallel_info().splitlines() if "get_max_threads" in line]
        seen.append((torch.get_num_threads(), {line.rpartition(" : ")[2] for line in libraries}, max_step_tokens))
        return check_invariance(runner, max_len, max_step_tokens)

    monkeypatch.setattr(build, "check_invariance", check)
    torch.set_num_threads(3)
    try:
        engine = build.build_target_engine(setup(source, "require", max_step_tokens=64), lambda events: None)
    finally:
        torch.set_num_threads(1)
    assert engine.batch_invariant == "yes"
    assert seen == [(1, {"1"}, 64)]


def test_pages_are_sized_by_what_recorded_steps_leave(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A share of what weights, workspace and recordings leave, these measured by a trial that is given up. The mutant:
    pages fill what the recordings need."""
    each, left, trials = 200 << 20, [], []
    recorded: weakref.WeakSet[ModelRunner] = weakref.WeakSet()

    def record(runner: ModelRunner, limits: Limits) -> None:
        recorded.add(runner)
        trials.append(runner.cache.num_pages)

    def pages(kv_fraction: float, max_len: int, page_bytes: int, left_bytes: int) -> int:
        left.append(left_bytes)
        return 40

    monkeypatch.setattr(ModelRunner, "record", record)
    monkeypatch.setattr(build, "left_bytes", lambda *given: (4 << 30) - each * len(recorded))
    monkeypatch.setattr(build, "fraction_pages", pages)
    for records in (False, True):
        monkeypatch.setattr(loading.LoadedModel, "records", records)
        build.build_target_engine(setup(source, "off", kv_fraction=0.5, max_model_len=256), lambda events: None)
        recorded.clear()
    assert left[0] - left[1] == each
    assert trials == [40, 1, 40]
