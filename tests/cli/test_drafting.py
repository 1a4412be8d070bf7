"""Heads that were published for a target are found on this machine, and the start says which one drafts.

Mutants: ``_names`` that is always true; no look into the target's own directory; a head that does not fit is taken.
"""

import json
import shutil
from pathlib import Path

import pytest
from tests.drafters.head_files import FILES, made, write_target

from paceline.cli.drafting import choose, method_of
from paceline.config import HeadOptions, SuffixMatching
from paceline.config.loading import PACKAGED, Packaged, resolve

UNSAID = ("jetspec_unsaid",)
"""Nothing in these files tells the method from another one."""


@pytest.fixture
def target(tmp_path) -> Path:
    write_target(tmp_path / "models" / "Tiny-8L")
    return tmp_path / "models" / "Tiny-8L"


def drafts_by(folder: Path) -> tuple[str, str | None]:
    chosen = choose(str(folder))
    (head,) = chosen.heads
    assert head.method in chosen.line or head.method == "suffix"
    assert head.model is None or head.model in chosen.line
    return head.method, head.model


@pytest.mark.parametrize("name", [name for name in FILES if not name.startswith("mtp") and name not in UNSAID])
def test_the_method_of_every_published_format_is_found(name, tmp_path):
    head = made(name)
    method = method_of(head.write(tmp_path / "head"))
    assert method == head.method
    HeadOptions(method=method, model="x")


@pytest.mark.parametrize("place", ["Tiny-8L/drafter", "tiny-8l-EAGLE3", "head-of-another-name"])
def test_a_head_inside_or_next_to_the_target_drafts(target, place):
    head = made("eagle3").write(target.parent / place)
    if place == "head-of-another-name":
        assert drafts_by(target) == ("suffix", None), "nothing says that it is this model's"
        config = json.loads((head / "config.json").read_text())
        config["speculators_config"] = {"verifier": {"name_or_path": "org/Tiny-8L"}}
        (head / "config.json").write_text(json.dumps(config))
    assert drafts_by(target) == ("eagle3", str(head.resolve()))


def test_a_head_that_does_not_fit_is_left_out_with_the_reason(target, capsys):
    head = made("eagle3").write(target / "drafter")
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    assert drafts_by(target) == ("suffix", None)
    said = capsys.readouterr().err
    assert said.startswith(f"paceline: the eagle3 head in {head.resolve()} is left out: ")


def test_models_next_to_the_target_are_no_heads(target):
    shutil.copytree(target, target.parent / "Tiny-8L-instruct")
    assert drafts_by(target) == ("suffix", None)


@pytest.mark.parametrize("named_in", ["README.md", "config.json"])
def test_a_head_of_the_cache_that_the_card_names_drafts(target, tmp_path, monkeypatch, named_in):
    cache = tmp_path / "hub"
    repository = cache / "models--org--Tiny-8L-speculator"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    head = made("eagle3").write(repository / "snapshots" / ("0" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    assert drafts_by(target) == ("suffix", None)
    if named_in == "README.md":
        (target / named_in).write_text(
            "---\nbase_model: org/none\n---\nDraft with `org/Tiny-8L-speculator`, see a/b/c.\n"
        )
    else:
        config = json.loads((target / named_in).read_text())
        (target / named_in).write_text(json.dumps(config | {"speculator": "org/Tiny-8L-speculator"}))
    assert drafts_by(target) == ("eagle3", str(head))


def test_a_packaged_model_drafts_from_the_texts_that_come_with_it(monkeypatch, target):
    """By an id, so that it means the same on every node; each line is of the model's tokens."""
    texts = HeadOptions(method="suffix", suffix=SuffixMatching(corpus=["paceline/smollm2-texts"]))
    monkeypatch.setitem(PACKAGED, "smollm2", PACKAGED["smollm2"]._replace(module="none"))
    assert choose(str(target)).heads == [HeadOptions(method="suffix")]
    monkeypatch.setattr(
        Packaged, "file", property(lambda one: target if one.texts == "paceline/smollm2-texts" else None)
    )
    chosen = choose(str(target))
    assert chosen.heads == [texts]
    assert "paceline/smollm2-texts" in chosen.line
    lines = [json.loads(line) for line in Path(resolve("paceline/smollm2-texts")).read_text().splitlines()]
    assert len(lines) == 240
    assert all(0 <= token_id < 49_152 for line in lines for token_id in line)
