"""Under the rejection rule the draft's tree, its predicted outcomes and its growth leave the law alone.

The whole path is run many times with fresh seeds: engine, tree, `verification.verify`, two rounds and more.
The joint law of the first three tokens is compared with the target's by a chi-square test at a false-alarm
rate of ``FALSE_ALARM`` each.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from scipy.stats import chi2
from tests.core.test_tree import cut_by_own_probability
from tests.support.rings import slow

from paceline.core.processors import Row, SamplerState
from paceline.core.sampling import process
from paceline.core.tree import Proposal, SpeculationTree
from paceline.core.verification import verify
from paceline.draft.engine import DraftEngine
from paceline.drafters.protocol import Candidates, Leaf
from paceline.messages import Commit, Nodes, SessionFailed
from paceline.types import Acceptance, SamplingParams

from .fakes import TableDrafter, open_session

VOCAB = 3
RUNS = 1000
FALSE_ALARM = 1e-8


def table(text: Sequence[int], salt: int) -> list[float]:
    """[VOCAB] logits after the last token; target (0) and draft (1) differ much."""
    x = 10 * salt + 3 * (text[-1] + 1)
    return [1.3 * math.sin(x + 2.1 * v + salt) for v in range(VOCAB)]


class SmallDrafter(TableDrafter):
    """Three tokens, a draft far from the target."""

    def expand(self, leaves: Sequence[Leaf]) -> Candidates:
        texts = [[*self._texts[leaf.session_id], *leaf.path] for leaf in leaves]
        super().expand(leaves)
        log_q, token_ids = torch.tensor([table(text, 1) for text in texts]).log_softmax(-1).sort(descending=True)
        return Candidates(token_ids, log_q)


def run(
    seeds: range, propose: Callable[[SpeculationTree, int], Proposal], num_tokens: int = 3, **options: object
) -> tuple[Counter[tuple[int, ...]], int]:
    """The first tokens of one session for each seed, and how many draft tokens were accepted in all."""
    sent: list[Nodes | SessionFailed] = []
    engine = DraftEngine(SmallDrafter(max_leaves=256, m=VOCAB), sent.extend, vocab_size=VOCAB, tree_budget=24)
    opened = [
        open_session(f"s{seed}", seed=seed, text=[0], acceptance="rejection", max_draft_tokens=2, **options)
        for seed in seeds
    ]
    engine.receive(opened)
    trees = {o.session_id: SpeculationTree(VOCAB, 1, rejection=True) for o in opened}
    texts: dict[str, list[int]] = {o.session_id: [0] for o in opened}
    states = {
        o.session_id: SamplerState(SamplingParams(temperature=1.0), o.seed, (0,), vocab_size=VOCAB) for o in opened
    }
    accepted = 0
    while any(len(text) <= num_tokens for text in texts.values()):
        for _ in range(12):
            engine.step()
        for message in sent:
            assert isinstance(message, Nodes)
            assert not trees[message.session_id].add(message.nodes).invalid
        sent.clear()
        names = [name for name, text in texts.items() if len(text) <= num_tokens]
        proposals = [propose(trees[name], 2) for name in names]
        before = {name: len(texts[name]) for name in names}
        engine.receive([Commit(n, 0, before[n], (), p.node_ids) for n, p in zip(names, proposals, strict=True)])
        rows, logits = [], []
        for name, proposal in zip(names, proposals, strict=True):
            for i in range(len(proposal) + 1):
                rows.append(Row(states[name], proposal.token_ids[:i]))
                logits.append(table([*texts[name], *proposal.token_ids[:i]], 0))
        verdicts = verify(process(torch.tensor(logits), rows), proposals, [Acceptance.REJECTION] * len(names))
        for name, verdict in zip(names, verdicts, strict=True):
            texts[name] += verdict.token_ids
            states[name].append(verdict.token_ids)
            trees[name].walk(verdict.token_ids)
            accepted += verdict.num_accepted
            assert not verdict.num_invalid
        engine.receive([Commit(n, 0, before[n], v.token_ids) for n, v in zip(names, verdicts, strict=True)])
    engine.check_integrity()
    return Counter(tuple(text[1 : num_tokens + 1]) for text in texts.values()), accepted


def chi_square(counts: Counter[tuple[int, ...]]) -> float:
    """Against the target's own law of as many tokens."""
    total, statistic = sum(counts.values()), 0.0
    cells: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        cells = {
            (*text, v): prob * p
            for text, prob in cells.items()
            for v, p in enumerate(torch.tensor(table([0, *text], 0)).softmax(-1).tolist())
        }
    for text, prob in cells.items():
        statistic += (counts[text] - total * prob) ** 2 / (total * prob)
    return statistic


LIMIT = float(chi2.isf(FALSE_ALARM, VOCAB**3 - 1))


@pytest.mark.parametrize(
    "options",
    [*slow([{}]), {"mode": "sequential"}, *slow([{"saguaro": 0.3}])],
    ids=["best_first", "sequential", "saguaro"],
)
def test_the_law_is_the_targets(options: dict[str, object]) -> None:
    counts, accepted = run(range(RUNS), SpeculationTree.proposal, **options)
    assert accepted > RUNS / 4, "proposals are really used"
    assert chi_square(counts) < LIMIT


def test_a_cut_by_the_drawn_token_is_caught() -> None:
    counts, _ = run(range(RUNS), cut_by_own_probability)
    assert chi_square(counts) > 1.5 * LIMIT
