"""PARD: every row of a block is that of the model on the path and the pard tokens behind it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.draft.fakes import FakeTarget, open_session
from tests.drafters.one_session import OneSession
from tests.support.models import random_model
from tests.support.mutants import mutant

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.pard import parallel_draft
from paceline.config import ServiceConfig
from paceline.draft.engine import DraftEngine
from paceline.drafters.model import ModelDrafter
from paceline.drafters.parallel import ParallelDrafter
from paceline.drafters.protocol import Candidates, Leaf, Plain
from paceline.embedded import DRAFT_DIR
from paceline.errors import ConfigError
from paceline.messages import Commit, Nodes
from paceline.model.loading import prepare
from paceline.preflight.service import check_service

PARD, K, TOP_M = 9, 4, 12


class Checked(OneSession):
    """A drafter whose every block is compared with transformers on the whole text."""

    def __init__(self, family: str = "llama", pages: int = 12) -> None:
        self.model = random_model(family)
        self.runner = prepare(random_model(family), compile=False).runner(pages)
        sizes = {"max_leaves": 8, "max_prefill_tokens": 48, "top_m": TOP_M}
        super().__init__(ParallelDrafter(self.runner, pard_token=PARD, tokens_per_leaf=K, **sizes), 70, 0.8)

    def expand(self, *leaves: Leaf) -> None:
        candidates = self.candidates(leaves)
        assert candidates.token_ids.shape == (len(leaves), K, TOP_M)
        for i, leaf in enumerate(leaves):
            ids, log_q = self.expected(self.model, leaf.path, TOP_M, [PARD] * (K - 1))
            assert torch.equal(candidates.token_ids[i], ids)
            assert torch.allclose(candidates.log_q[i], log_q, atol=2e-5)


def growth(checked: Checked) -> None:
    """Blocks below blocks, whose tokens have no rows of their own; two that share tokens; hits and a miss."""
    checked.expand(Leaf("s", 0, (), ()))
    chain, tokens = (1, 2, 3, 4), (11, 12, 13, 14)  # of the block of the anchor
    checked.expand(Leaf("s", 4, chain, tokens), Leaf("s", 5, (1, 2, 5), (11, 12, 50)))
    checked.expand(Leaf("s", 8, (*chain, 6, 7, 8), (*tokens, 20, 21, 22)))
    checked.commit([11, 12, 13], [1, 2, 3], [4, 6, 7, 8])
    checked.expand(Leaf("s", 10, (4, 6, 7, 8, 9, 10), (14, 20, 21, 22, 23, 24)))
    checked.commit([14, 20, 99], [4, 6, 11], [])
    checked.expand(Leaf("s", 11, (), ()))
    checked.commit([30], [12], [13, 14])  # of the anchor's block, as all of these: none has a row
    checked.expand(Leaf("s", 15, (13, 14, 15), (31, 32, 33)))
    checked.commit([31], [13], [14, 15])
    checked.expand(Leaf("s", 17, (14, 15, 16, 17), (32, 33, 40, 41)))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_blocks_are_those_of_the_model_on_the_whole_text(family: str) -> None:
    checked = Checked(family)
    growth(checked)
    checked.drafter.close("s")
    checked.drafter.check_integrity()
    assert checked.runner.cache.num_used == 0


@mutant(ModelDrafter, "part_of")
def _shifted(part, self, session, leaves):
    """Tokens behind the last one are one position too far."""
    made = part(self, session, leaves)
    for i in range(1, K):
        made.step.positions[-i] += 1
    return made


def _hide(own_rows, rows):
    for own in own_rows:
        own[:] = [row for row in own if row not in rows]


@mutant(ModelDrafter, "part_of")
def _unseen(part, self, session, leaves):
    """A token of the tree without a row is taken to have been computed."""
    made = part(self, session, leaves)
    others = set(made.node_rows) - {leaf.node_id for leaf, _ in leaves}
    _hide(made.step.own_rows[-K:], [made.node_rows[node] for node in others])
    return made


@mutant(ModelDrafter, "part_of")
def _kept(part, self, session, leaves):
    """Pending tokens are forgotten once something below them is computed."""
    made = part(self, session, leaves)
    if leaves[0][0].path and made.num_pending:
        _hide(made.step.own_rows[made.num_pending :], made.step.rows[: made.num_pending])
    return made


@pytest.mark.parametrize("mutant", [_shifted, _unseen, _kept], ids=lambda m: m.__name__.strip("_"))
def test_mutants_are_caught(mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        growth(Checked())


class _Blocks(Plain):
    """A drafter that knows the target's text: tokens are counted up, K at once, guessed or not."""

    kind, max_leaves, tokens_per_leaf, conditional = "blocks", 4, 3, False

    def __init__(self, guesses: bool = False) -> None:
        self.guesses, self.calls, self.last = guesses, 0, 0

    def open(self, session_id, token_ids, sampler, salt=""):
        self.last = token_ids[-1]

    def ready(self, session_id):
        return True

    def expand(self, leaves):
        self.calls += 1
        after = torch.tensor([leaf.path[-1] if leaf.path else self.last for leaf in leaves])
        ids = (after[:, None] + torch.arange(1, 4))[..., None].expand(-1, -1, 2) + torch.tensor([0, 1])
        guesses = tuple((int(first) + 1, int(first) + 3) for first in after) if self.guesses else ()
        return Candidates(ids % 12, torch.tensor([0.9, 0.1]).log().expand(len(leaves), 3, 2), guesses)

    def advance(self, session_id, token_ids, node_ids, kept):
        self.last = token_ids[-1]

    def close(self, session_id):
        pass


@pytest.mark.parametrize(("guesses", "depth"), [(False, 3), (True, 2)])
def test_one_step_publishes_a_chain_of_the_block(guesses: bool, depth: int) -> None:
    """All of it, or as far as the guesses are among the candidates: the second one is one too many."""
    drafter, sent = _Blocks(guesses), []
    engine = DraftEngine(drafter, sent.extend, vocab_size=12, fan_out=1, clock=lambda: 0.0)
    message = open_session(text=(1, 2, 3), temperature=0.0, max_draft_tokens=6)
    target = FakeTarget(message)
    engine.receive([message])
    assert engine.step()
    engine.check_integrity()
    nodes = [node for nodes in sent if isinstance(nodes, Nodes) for node in nodes.nodes]
    assert [node.token_id for node in nodes] == [4, 5, 6][:depth]
    assert [node.parent_id for node in nodes] == [0, 1, 2][:depth]
    for _ in range(8):
        engine.step()
        engine.check_integrity()
    for nodes in sent:
        target.receive(nodes)
    assert list(target.tree.proposal(6).token_ids) == [4, 5, 6, 7, 8, 9]
    assert drafter.calls < 7
    engine.receive([Commit("s", 0, 3, (4, 5))])
    engine.step()
    engine.check_integrity()


def _checkpoint(folder: Path, **config: object) -> Checkpoint:
    content = json.loads((DRAFT_DIR / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(content))
    return Checkpoint.open(str(folder))


def test_the_configuration_of_a_checkpoint_decides(tmp_path: Path) -> None:
    assert parallel_draft(Checkpoint.open(str(DRAFT_DIR)), None) == (1, 0)
    pard = _checkpoint(tmp_path, pard_token=7, spd_type="pard")
    assert parallel_draft(pard, None) == (8, 7)
    assert parallel_draft(pard, 3) == (3, 7)
    assert parallel_draft(pard, 1) == (1, 0)


@pytest.mark.parametrize(
    ("config", "wanted", "message"),
    [
        ({}, 4, "parallel_tokens is 4: the config.json of .* names no pard_token"),
        ({"pard_token": 5000}, None, r"pard_token of .* is 5000: a token id in \[0, 4096\)"),
        ({"pard_token": "<pard>"}, None, "pard_token of .* is '<pard>'"),
        ({"pard_token": 7, "spd_type": "other"}, None, "spd_type of .* is 'other': only 'pard' is known"),
        ({"spd_type": "pard"}, None, "pard_token of .* is missing"),
    ],
)
def test_what_is_no_pard_checkpoint_is_refused(tmp_path: Path, config: dict, wanted: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parallel_draft(_checkpoint(tmp_path, **config), wanted)


def test_the_check_of_a_service_refuses_it() -> None:
    config = {"draft_config": {"engine_kwargs": {"parallel_tokens": 4}}}
    findings = check_service(ServiceConfig.parse(config), ports=False)
    assert any("parallel_tokens is 4" in str(finding) for finding in findings)
