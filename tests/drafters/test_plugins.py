"""The example of the documentation, installed as a package would be, drafts for the embedded target."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from tests.support.local import local_config
from tests.support.models import save_pair

from paceline.config import PluginOptions, ServiceConfig
from paceline.config.plugins import plugin_names
from paceline.drafters.plugins import DrafterContext, make_plugin
from paceline.errors import ConfigError
from paceline.local import LocalPipeline
from paceline.types import Mode, SamplingParams, SpeculationParams

REPOSITORY = Path(__file__).resolve().parents[2]
CONTEXT = DrafterContext("t", 96, 100, 4, 64)


def blocks(kind):
    """Blocks of code of the page."""
    return re.findall(rf"```{kind}\n(.*?)```", (REPOSITORY / "docs" / "own-drafters.md").read_text(), re.DOTALL)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A folder of installed packages, with the page's own and some that are wrong."""
    package = tmp_path / "my_drafters"
    package.mkdir()
    (package / "__init__.py").write_text(blocks("python")[0])
    info = tmp_path / "my_drafters-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-drafters\nVersion: 1.0\n")
    (line,) = re.findall(r'^bigrams = "(.*)"$', blocks("toml")[0], re.MULTILINE)
    points = f"bigrams = {line}\nabsent = no_such_module:Drafter\nempty = types:SimpleNamespace\n"
    (info / "entry_points.txt").write_text(f"[paceline.drafters]\n{points}")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("my_drafters", None)


def test_the_example_drafts_and_the_text_is_the_target_s_own(installed, tmp_path_factory):
    folder = save_pair(tmp_path_factory.mktemp("models"))
    assert plugin_names() == ["absent", "bigrams", "empty"]
    draft = ServiceConfig.from_file(_written(installed, blocks("yaml")[0])).draft_config
    assert draft.engine_kwargs == PluginOptions(drafter="bigrams", options={"width": 8})
    config = local_config(folder / "target").model_copy(update={"draft": draft.engine_kwargs})
    with LocalPipeline(config) as pipeline:
        for temperature in (0.0, 1.0):
            sampling = SamplingParams(max_tokens=60, temperature=temperature, seed=3, ignore_eos=True)
            results = []
            for mode in (Mode.PLAIN, Mode.SEQUENTIAL):
                generation = pipeline.submit([5, 6, 7, 5, 6, 7, 5], sampling, SpeculationParams(mode=mode))
                list(generation)
                results.append(generation.result)
            assert results[0].token_ids == results[1].token_ids
            assert results[1].speculation.drafted > 0


def _written(folder, text):
    path = folder / "service.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("bigram", {}, "no entry point of 'paceline.drafters' has this name (installed: absent, bigrams, empty)"),
        ("absent", {}, "which cannot be imported: ModuleNotFoundError"),
        ("bigrams", {"depth": 1}, "cannot be made with options {'depth': 1}: TypeError"),
        ("empty", {}, "which has no kind, max_leaves, tokens_per_leaf, conditional, open"),
    ],
)
def test_what_cannot_draft_is_refused_by_name(installed, name, options, told, monkeypatch):
    if name == "empty":
        monkeypatch.setattr("types.SimpleNamespace", lambda context: object())
    with pytest.raises(ConfigError, match=re.escape(told)):
        make_plugin(name, CONTEXT, options)
