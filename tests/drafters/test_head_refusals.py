"""Files of heads that do not fit are refused in the sentence of a page, before weights are read.

A line names a file of ``head_files.py`` and its changes: ``KEY=VALUE`` of its configuration, ``without(KEY)``,
``as(METHOD)``, and of its tensors ``drop(NAME)``, ``cut(NAME)``, ``rename(NAME,OTHER)`` and ``add(NAME,SIZE)``.
"""

import fnmatch
import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from tests.drafters.head_files import GEMMA4_VOCAB, HeadFile, made, tiny_target, write_target
from tests.support.golden import check_page, pages_beside
from tests.support.models import letters_tokenizer

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.weights import WeightFiles
from paceline.drafters.heads.load import open_head
from paceline.errors import ConfigError

PARTLY = {
    "dflash2 dflash_config.selector_rank=8": r"is \[12, 32\]: .* be \[8, 32\]|12\]: .* be \[61, 8\]",
    "eagle3 rms_norm_eps=many": "config.json of .* is not valid: ",
    "eagle3 hidden_act=none": r"^config.json of .* is unfit: KeyError: 'none'$",
    "eagle3 eagle_config=true": "^config.json of .* is unfit: TypeError: .bool. object",
    "dflash rms_norm_eps=many": "config.json of .* is not valid: ",
    "gemma4_clusters text_config.num_kv_shared_layers=2": "is not valid: .* must be shared. Expected 4. Got 2",
    "gemma4_clusters text_config.hidden_activation=other": "has layers that cannot be made .*: 'other'",
    "gemma4_clusters text_config.hidden_size_per_layer_input=8": "hidden_size_per_layer_input",
}
"""Refusals in the words of a library, or of one of two tensors."""


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a written target of each family."""
    folder = tmp_path_factory.mktemp("targets")
    for kind in ("llama", "qwen3"):
        write_target(folder / kind, kind)
    gemma = made("gemma4_clusters").target
    tiny_target(gemma).save_pretrained(folder / gemma)
    letters_tokenizer(GEMMA4_VOCAB).save_pretrained(folder / gemma)
    return folder


@pytest.fixture(autouse=True)
def _no_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WeightFiles, "read", lambda *_: pytest.fail("weights were read"))


def change(file: HeadFile, word: str) -> None:
    if called := re.fullmatch(r"(\w+)\((.*)\)", word):
        name, *more = called[2].split(",")
        names = fnmatch.filter(file.tensors, name)
        if called[1] == "as":
            file.method = name
        elif called[1] == "without":
            del file.config[name]
        elif called[1] == "add":
            file.tensors[name] = torch.ones(int(more[0]))
        elif called[1] == "rename":
            file.tensors[more[0]] = file.tensors.pop(name)
        else:
            assert names
            for one in names:
                tensor = file.tensors.pop(one)
                if called[1] == "cut":
                    file.tensors[one] = tensor[:-1]
    else:
        key, _, value = word.partition("=")
        *folders, key = key.split(".")
        values = file.config
        for folder in folders:
            values = values[folder]
        values[key] = yaml.safe_load(value)


def refusal(line: str, targets: Path, folder: Path) -> ConfigError:
    """Of a target and a head that was written with some changes."""
    name, *changes = shlex.split(line)
    file = made(name)
    for word in changes:
        change(file, word)
    source = None if file.method == "mtp" else str(file.write(folder))
    target = Checkpoint.open(str(file.write(folder) if source is None else targets / file.target))
    with pytest.raises(ConfigError) as caught:
        open_head(file.method, source, target, num_tokens=3)
    return caught.value


@pytest.mark.parametrize("page", pages_beside(__file__), ids=lambda page: page.stem)
def test_what_does_not_fit_is_refused_in_the_sentence_of_its_page(page: Path, targets: Path, tmp_path: Path) -> None:
    def refused(line: str) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        return str(refusal(line, targets, folder)).replace(str(folder), "HEAD").replace(str(targets), "TARGETS")

    check_page(page, refused)


@pytest.mark.parametrize("line", PARTLY)
def test_what_a_library_does_not_take_is_refused_in_one_sentence(line: str, targets: Path, tmp_path: Path) -> None:
    said = str(refusal(line, targets, tmp_path))
    assert re.search(PARTLY[line], said)
    assert "\n" not in said
