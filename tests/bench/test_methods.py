"""`benchmarks/methods.py`: weights for each row, turns, texts, what fails, and standard errors."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from paceline.drafters.catalogue import METHODS
from paceline.embedded import TARGET_DIR
from paceline.errors import EngineError
from paceline_bench.baselines import GenerateProcess, GenerateRequest

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
PROMPTS = [SimpleNamespace(token_ids=(1, 2)), SimpleNamespace(token_ids=(3, 4))]


@pytest.fixture(scope="module")
def scripts() -> Iterator[Callable[[str], ModuleType]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))  # they find each other in their own folder
        yield importlib.import_module


def answering(scripts: Any, name: str, asked: list[str], token_ids: tuple[int, ...] = (7, 8), **options: Any) -> Any:
    """A row that answers at once, and says that it was asked."""
    methods = scripts("methods")

    def ask(prompt: Any, sampling: Any) -> Any:
        asked.append(name)
        return methods.Answer(token_ids, steps=2, tokens=3, seconds=0.5, drafted=4, accepted=1)

    return methods.Row(name, 4, ask, **options)


def failing(prompt: Any, sampling: Any) -> Any:
    raise EngineError("transformers failed: ValueError: no such layers")


def test_all_answer_a_prompt_before_the_next_and_each_is_first_in_turn(scripts: Any) -> None:
    asked: list[str] = []
    rows = [answering(scripts, name, asked) for name in "abc"]
    scripts("methods").take_turns(rows, PROMPTS, 8, 0.0)
    assert "".join(asked) == "abc" + "abc" + "bca", "a short request of each first, in no figure"
    assert [len(row.answers[0.0]) for row in rows] == [2, 2, 2]


def test_another_text_than_plain_decoding_s_is_no_row(scripts: Any) -> None:
    asked: list[str] = []
    plain, own = answering(scripts, "plain", asked), answering(scripts, "own", asked, (7, 9))
    with pytest.raises(AssertionError, match="own: another text than plain decoding's"):
        scripts("methods").take_turns([plain, own], PROMPTS, 8, 0.0)
    other = answering(scripts, "other", asked, (7, 9), lossless=False)
    scripts("methods").take_turns([plain, other], PROMPTS, 8, 0.0)
    assert len(other.answers[0.0]) == 2


def test_what_another_server_cannot_do_is_its_own_sentence_and_ours_must_work(scripts: Any) -> None:
    methods, asked = scripts("methods"), list[str]()
    plain, theirs = answering(scripts, "plain", asked), methods.Row("theirs", 0, failing, lossless=False)
    methods.take_turns([plain, theirs], PROMPTS, 8, 0.0)
    lines = list(methods.tables([plain, theirs], [0.0]))
    assert lines[-1] == "theirs: transformers failed: ValueError: no such layers"
    assert [line.split() for line in lines if line.startswith("theirs ")] == [["theirs", "own", *"----"]]
    with pytest.raises(EngineError):
        methods.take_turns([plain, methods.Row("ours", 4, failing)], PROMPTS, 8, 0.0)


def test_a_row_has_its_rate_and_the_ratio_to_plain_in_the_same_turns(scripts: Any) -> None:
    methods = scripts("methods")
    plain, own = (methods.Row(name, 0, failing) for name in ("plain", "own"))
    plain.answers[0.0] = [methods.Answer((), 10, 10, 1.0), methods.Answer((), 10, 10, 3.0)]
    own.answers[0.0] = [methods.Answer((), 5, 10, 1.0, 2, 1), methods.Answer((), 5, 15, 1.0, 4, 3)]
    own.plain[0.0] = plain.answers[0.0]
    # (1 + 3) / (2 + 4); its residuals are -1/3 and 1/3: sqrt(2 * 2/9) / 6. So for (10 + 15) / (5 + 5).
    assert methods.line(own, 0.0)[2:] == ("0.667 +- 0.111", "2.500 +- 0.500", "12.5", "2.50")
    assert methods.line(plain, 0.0)[2:] == ("-", "1.000 +- 0.000", "5.0", "1.00")


def test_every_method_that_reads_weights_has_some(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods, flags = scripts("methods"), scripts("train_heads").FLAGS
    for made in ("other_vocabulary", "adapted_for_pard"):
        monkeypatch.setattr(methods, made, lambda folder, *_: str(folder))
    for kind in flags:
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "report.json").touch()
    models = {method.name: methods.model_of(method, tmp_path, tmp_path, 0) for method in METHODS if method.reads}
    assert [name for name, model in models.items() if model is None] == ["Gemma 4's drafter"]
    assert {Path(model).name for model in models.values() if (model or "").startswith(str(tmp_path))} == {
        *flags,
        "other",
        "pard",
    }
    (tmp_path / "eagle" / "report.json").unlink()
    with pytest.raises(SystemExit, match="holds no trained eagle, which"):
        methods.model_of(next(m for m in METHODS if m.name == "EAGLE"), tmp_path, tmp_path, 0)


def test_transformers_own_methods_write_its_own_text(scripts: Any, tmp_path: Path) -> None:
    other = scripts("pool_drafters").other_vocabulary(tmp_path / "other", 3000)
    with GenerateProcess(str(TARGET_DIR), other, "float32", None) as process:
        replies = {}
        for mode in ("transformers", "universal", "early_exit"):
            (replies[mode],) = process.generate(GenerateRequest(mode, ((10, 20, 30, 40, 50),), (12,), 0.0, 0))
        assert {reply.token_ids for reply in replies.values()} == {replies["transformers"].token_ids}
        assert len(replies["transformers"].rounds) == 12
        assert len(replies["early_exit"].rounds) < 12
        with pytest.raises(EngineError, match="ValueError: Could not find `num_mtp_layers` in the model config"):
            process.generate(GenerateRequest("mtp", ((10, 20, 30, 40, 50),), (12,), 0.0, 0))
