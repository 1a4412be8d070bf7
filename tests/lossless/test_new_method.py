"""A drafting method is one file: ``tests/support/repeat.py``, put among the entries, is configured, listed and served.

Each test runs in a process of its own, whose package is this one and that file.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from paceline.config.heads import IN_POOL
from paceline.config.methods import ENTRIES
from paceline.config.methods.entry import function

PACKAGE = Path(paceline.__file__).parent
ROOT = Path(__file__).parents[2]
TOY = ROOT / "tests" / "support" / "repeat.py"

LISTED = """
import sys
from paceline.checkpoint.files import Checkpoint
from paceline.config import ServiceConfig
from paceline.config.loading import EMBEDDED_TARGET, resolve
from paceline.config.schema import file_schema
assert "torch" not in sys.modules, "an entry imports an engine"
config = ServiceConfig.parse({"draft_config": {"kind": "repeat", "engine_kwargs": {"prob": 0.25}}})
assert config.draft_config.engine_kwargs.prob == 0.25 and config.draft_config.drafter_name == "repeat"
try:
    ServiceConfig.parse({"draft_config": {"kind": "repeat", "engine_kwargs": {"prob": 2.0}}})
except ValueError as error:
    assert str(error) == "draft_config.engine_kwargs.prob is 2.0: it must be more than 0 and less than 1", error
assert "RepeatDraftConfig" in file_schema()["$defs"]

from paceline.cli.flags import drafters, draft_config_of
assert "repeat" in drafters() and draft_config_of("repeat") == {"kind": "repeat"}

from paceline.preflight.service import examine
(pool,) = (p for p in examine(config, memory=False, cores=False, ports=False).pools if p.key == "draft_config")
assert pool.estimate is not None and pool.model_id is None

from paceline.drafters.available import available_methods
found = {each.method.name: each for each in available_methods(Checkpoint.open(resolve(EMBEDDED_TARGET)), None, [])}
assert found["repeats"].refusal == "", found["repeats"]
assert found["repeats"].method.drafting.assumed("code") == (0.1, "assumed, tests/support/repeat.py")

from tests.lossless.methods import methods_page
page = methods_page()
assert "| repeats | " in page and "## repeats" in page and "kind: repeat" in page
"""

DRAFTS = """
import pickle
from paceline.cli.generate import local_config
from paceline.cli.main import build_parser
from paceline.local import LocalPipeline
from paceline.types import Mode, SamplingParams, SpeculationParams

flags = ["--drafter", "repeat", "--no-compile", "--dtype", "float32"]
config = local_config(build_parser().parse_args(["generate", "a text", *flags]))
assert pickle.loads(pickle.dumps(config)) == config, "an engine in a process of its own is told another one"
sampling, text = SamplingParams(max_tokens=24, ignore_eos=True), "one one one one one one one one"
with LocalPipeline(config.model_copy(update={"worker": "thread"})) as pipeline:
    modes = (Mode.PLAIN, Mode.SEQUENTIAL)
    plain, drafted = (pipeline.generate(text, sampling, SpeculationParams(mode=mode)).result for mode in modes)
assert drafted.token_ids == plain.token_ids
assert drafted.speculation.drafted > drafted.speculation.lookup_drafted
assert plain.speculation.drafted == 0
"""


def overlay(folder: Path, text: str) -> dict[str, str]:
    """The environment of a process that imports this package, and ``text`` as the module of one more method."""
    methods = folder / "paceline" / "config" / "methods"
    methods.mkdir(parents=True)
    for there, here in ((PACKAGE, folder / "paceline"), (PACKAGE / "config", folder / "paceline" / "config")):
        for path in there.iterdir():
            if path.name != "__pycache__" and not (here / path.name).exists():
                (here / path.name).symlink_to(path)
    for path in (PACKAGE / "config" / "methods").glob("*.py"):
        (methods / path.name).symlink_to(path)
    (methods / "repeat.py").write_text(text, encoding="utf-8")
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


def run(arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=300, cwd=ROOT
    )


@pytest.mark.slow
def test_one_file_is_configured_and_listed(tmp_path: Path) -> None:
    done = run(["-c", LISTED], overlay(tmp_path, TOY.read_text(encoding="utf-8")))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("build", 'build=f"{__name__}:build",'),
        ("acceptance", 'acceptance={"chat": (0.1, "tests/support/repeat.py")},'),
        ("when", ', when="texts that repeat one token"'),
    ],
)
def test_a_forgotten_field_is_noticed_by_its_name(name: str, field: str, tmp_path: Path) -> None:
    text = TOY.read_text(encoding="utf-8")
    assert text.count(field) == 1
    done = run(["-c", "import paceline.config"], overlay(tmp_path, text.replace(field, "")))
    assert done.returncode != 0
    assert f"missing 1 required keyword-only argument: '{name}'" in done.stderr


def test_every_function_that_an_entry_names_is_there() -> None:
    keys = ("build", "examine", "load", "make", "memory", "open", "pool", "read", "write")
    names = {name for entry in (*ENTRIES, IN_POOL) for key in keys if (name := getattr(entry, key, ""))}
    assert len(names) > 20
    assert all(callable(function(name)) for name in names)
    assert {name.split(".")[1] for name in names} == {"draft", "drafters", "preflight", "target"}


@pytest.mark.slow
def test_one_file_drafts_and_the_text_is_that_of_plain_decoding(tmp_path: Path) -> None:
    done = run(["-c", DRAFTS], overlay(tmp_path, TOY.read_text(encoding="utf-8")))
    assert done.returncode == 0, done.stderr
