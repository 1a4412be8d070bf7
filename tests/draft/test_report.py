"""What a draft's status says of its drafter: each kind by name, and figures that are those of its counters."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.draft.fakes import open_session
from tests.support.vocabularies import other_vocabulary

from paceline.config import (
    CascadeOptions,
    DraftOptions,
    DraftSetup,
    HeadDraftOptions,
    NgramOptions,
    SuffixOptions,
    TargetSetup,
)
from paceline.draft.build import build_draft_engine
from paceline.draft.engine import DraftEngine
from paceline.draft.report import describe, explain
from paceline.embedded import DRAFT_DIR, HEAD_DIRS, TARGET_DIR
from paceline.messages import Commit, Nodes, SessionFailed, States

MODEL = {"dtype": "float32", "device": "cpu", "compile": False}
ALONE = {**MODEL, "tree_step_tokens": 16}


def built(options: Any, source: str | Path | None = None) -> tuple[DraftEngine, list[Any]]:
    sent: list[Any] = []
    setup = DraftSetup.for_target(TargetSetup(str(TARGET_DIR)), source and str(source), options)
    return build_draft_engine(setup, sent.extend), sent


def cascade(*others: dict[str, Any], lengths: list[int]) -> CascadeOptions:
    first = {"model": str(DRAFT_DIR), "options": MODEL}
    return CascadeOptions.model_validate({"drafters": [first, *others], "lengths": lengths, "tree_step_tokens": 16})


@pytest.mark.parametrize(
    ("options", "description"),
    [
        (NgramOptions(), "n-grams"),
        (SuffixOptions(), "suffixes"),
        (
            cascade({"kind": "ngram"}, lengths=[4]),
            "vertical cascade of draft model (4 guesses a leaf from n-grams)",
        ),
    ],
    ids=["ngram", "suffix", "vertical"],
)
def test_each_kind_of_drafter_is_named(options: Any, description: str) -> None:
    assert built(options)[0].description == description


def test_a_draft_model_says_what_is_special_about_it(tmp_path: Path) -> None:
    assert built(DraftOptions(**ALONE), DRAFT_DIR)[0].description == "draft model"
    other = other_vocabulary(tmp_path / "other")
    assert built(DraftOptions(**ALONE, vocabulary="shared"), other)[0].description == (
        "draft model with 3000 of the target's 4096 tokens"
    )
    pard = shutil.copytree(DRAFT_DIR, tmp_path / "pard")
    config = json.loads((pard / "config.json").read_text()) | {"pard_token": 4095}
    (pard / "config.json").write_text(json.dumps(config))
    assert built(DraftOptions(**ALONE, parallel_tokens=3), pard)[0].description == "PARD draft model, 3 tokens at once"


def test_a_head_says_whether_it_drafts_ahead_and_what_has_come() -> None:
    options = HeadDraftOptions(method="mtp", model=str(HEAD_DIRS["mtp"]), dtype="float32", device="cpu")
    engine, sent = built(options)
    measured = "drafting ahead of outcomes is being measured (0 ahead, 0 after of 64 rounds each)"
    assert explain(engine) == (
        f"mtp {HEAD_DIRS['mtp']} by the target's states; {measured}; no states have come from a target"
    )
    engine.receive([open_session("s", text=[1, 2, 3, 4])])
    engine.receive([States("s", 0, 1, 384, bytes(2 * 2 * 384)), States("s", 0, 0, 384, bytes(2 * 384))])
    expected = "2 states have come, 768 bytes each, 1 were lost, 1 messages with states came late or twice"
    assert expected in explain(engine)
    assert (engine.stats.states, engine.stats.states_missing, engine.stats.states_dropped) == (2, 1, 1)
    engine.receive([States("s", 0, 3, 2, bytes(4))])
    engine.step()
    assert engine.num_sessions == 0
    (failed,) = [message for message in sent if isinstance(message, SessionFailed)]
    assert "states are [1, 2]: [positions, 384] is read" in failed.message


def test_the_figures_are_those_of_the_counters() -> None:
    engine, sent = built(NgramOptions())
    assert explain(engine) == "n-grams"
    engine.receive([open_session("s", text=[1, 2, 3, 4, 1, 2])])
    while engine.step():
        pass
    nodes = [node for message in sent if isinstance(message, Nodes) for node in message.nodes]
    assert [node.token_id for node in nodes[:2]] == [3, 4]
    engine.receive([Commit("s", 0, 6, (3, 4, 99))])
    stats = engine.stats
    assert (stats.nodes_used, stats.nodes_missed) == (2, 1)
    assert explain(engine) == (
        f"n-grams; {stats.nodes_published / stats.forwards:.3g} nodes a forward; "
        "67% of 3 decided tokens were among its nodes"
    )
    described = describe(engine)
    assert described["controller"] == explain(engine)
    assert described["counters"]["steps_unrecorded"] == 0, "it has no model"
