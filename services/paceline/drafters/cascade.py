"""The vertical cascade: several drafters that draft together (Chen et al. 2023, arXiv 2312.11462).

A smaller drafter guesses the tokens of a draft model, and one forward of the model verifies the guesses. So the model
drafts several tokens in the time of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.core.processors import Row, SamplerState
from paceline.drafters.model import ModelDrafter
from paceline.drafters.protocol import Candidates, Drafter, Leaf
from paceline.drafters.ranking import RankingRow, Rule, rank
from paceline.drafters.rows import Tail
from paceline.model.runner import ModelRunner


class VerticalDrafter(ModelDrafter):
    """A draft model that takes what ``guesser`` guesses after each leaf into its forward.

    Candidates of a depth follow the guesses before it (``Candidates.guesses``): they are of use where the guesses are
    what the model drafts itself.
    """

    kind = "cascade"

    def __init__(self, runner: ModelRunner, *, guesser: Drafter, num_guesses: int, **options: Any) -> None:
        """``num_guesses``: maximum tokens guessed after a leaf; ``options``: a ``ModelDrafter``'s."""
        super().__init__(runner, **options)
        self.tokens_per_leaf = num_guesses + 1
        self._guesser = guesser

    def open(self, session_id: str, token_ids: Sequence[int], sampler: SamplerState, salt: str = "") -> None:
        """Begins the session in both."""
        super().open(session_id, token_ids, sampler, salt)
        self._guesser.open(session_id, token_ids, sampler, salt)

    def prefill(self) -> bool:
        """Does a chunk in each."""
        worked = super().prefill()
        return self._guesser.prefill() or worked

    def advance(self, session_id: str, token_ids: Sequence[int], node_ids: Sequence[int], kept: Sequence[int]) -> None:
        """Extends the context of both."""
        super().advance(session_id, token_ids, node_ids, kept)
        self._guesser.advance(session_id, token_ids, node_ids, kept)

    def close(self, session_id: str) -> None:
        """Ends the session in both."""
        super().close(session_id)
        self._guesser.close(session_id)

    def check_integrity(self) -> None:
        """Asserts the invariants of both."""
        super().check_integrity()
        self._guesser.check_integrity()

    def shutdown(self) -> None:
        """Releases the resources of both."""
        super().shutdown()
        self._guesser.shutdown()

    def _tails(self, leaves: Sequence[Leaf]) -> list[Tail]:
        guesses: list[list[int]] = [[] for _ in leaves]
        open_ = [i for i, leaf in enumerate(leaves) if self._guesser.ready(leaf.session_id)]
        while open_:
            asked = [leaf_below(leaves[i], i, guesses[i]) for i in open_]
            further = []
            for at in range(0, len(asked), self._guesser.max_leaves):
                some = asked[at : at + self._guesser.max_leaves]
                chains = self._chains(some, self._guesser.expand(some))
                for i, chain in zip(open_[at : at + len(some)], chains, strict=True):
                    guesses[i] += chain[: self.tokens_per_leaf - 1 - len(guesses[i])]
                    if chain and len(guesses[i]) < self.tokens_per_leaf - 1:
                        further.append(i)
            open_ = further
        return [self._tail(guessed) for guessed in guesses]

    def _tail(self, guesses: Sequence[int]) -> Tail:
        """Keeps the guesses up to the first without a token of the model."""
        inputs: list[int] = []
        for token_id in guesses:
            own = self._own(token_id)
            if own is None:
                break
            inputs.append(own)
        return Tail(tuple(inputs), tuple(guesses[: len(inputs)]))

    def _chains(self, leaves: Sequence[Leaf], candidates: Candidates) -> list[list[int]]:
        """The tokens that the guesser would draft after each leaf: one, or a block of its own."""
        token_ids, log_q = candidates.token_ids, candidates.log_q
        if self._guesser.tokens_per_leaf == 1:
            token_ids, log_q = token_ids[:, None], log_q[:, None]
        chains: list[list[int]] = [[] for _ in leaves]
        at = list(range(len(leaves)))
        for depth in range(token_ids.shape[1]):
            if not at:
                break
            rows = [self._ranking_row(leaves[i], chains[i]) for i in at]
            index = torch.tensor(at, device=log_q.device)
            rankings = rank(Candidates(token_ids[index, depth], log_q[index, depth]), rows)
            further = []
            for i, ranking in zip(at, rankings, strict=True):
                if not ranking.token_ids:
                    continue
                chains[i].append(ranking.token_ids[0])
                followed = candidates.guesses[i][depth : depth + 1] if candidates.guesses else ranking.token_ids[:1]
                if followed == ranking.token_ids[:1]:
                    further.append(i)
            at = further
        return chains

    def _ranking_row(self, leaf: Leaf, chain: Sequence[int]) -> RankingRow:
        sampler = self._session(leaf.session_id).sampler
        rule = Rule.GREEDY if sampler.greedy else Rule.COUPLED
        return RankingRow(Row(sampler, (*leaf.path, *chain)), rule, fan_out=1)


def leaf_below(leaf: Leaf, index: int, guesses: Sequence[int]) -> Leaf:
    """The leaf after some guesses, whose nodes have negative ids, so that no row of them is kept."""
    if not guesses:
        return leaf
    ids = tuple(-(1 + 64 * index + depth) for depth in range(len(guesses)))
    return Leaf(leaf.session_id, ids[-1], (*leaf.path_ids, *ids), (*leaf.path, *guesses))
