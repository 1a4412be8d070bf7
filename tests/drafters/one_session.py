"""One session at a drafter of the pool, and its text, by which candidates are compared with transformers."""

from collections.abc import Sequence
from typing import Any

import torch
from tests.support.models import VOCAB, prompt
from torch import Tensor

from paceline.core.processors import Row, SamplerState
from paceline.core.sampling import draft_candidates
from paceline.drafters.protocol import Candidates, Leaf
from paceline.types import SamplingParams


class OneSession:
    """The drafter is checked after each call."""

    def __init__(self, drafter: Any, num_tokens: int, temperature: float) -> None:
        self.drafter, self.text = drafter, prompt(1, num_tokens)
        self.sampler = SamplerState(SamplingParams(temperature=temperature), 3, self.text, vocab_size=VOCAB)
        drafter.open("s", self.text, self.sampler)
        while drafter.prefill():
            drafter.check_integrity()

    def expected(
        self, model: Any, path: Sequence[int], top_m: int, behind: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor]:
        """Candidates after a path, and after each of some tokens behind it, all by the processors of the path."""
        num = len(behind) + 1
        with torch.no_grad():
            logits = model(torch.tensor([[*self.text, *path, *behind]]), use_cache=False).logits[0, -num:]
        return draft_candidates(logits, [Row(self.sampler, tuple(path))] * num, top_m)

    def candidates(self, leaves: Sequence[Leaf]) -> Candidates:
        found: Candidates = self.drafter.expand(leaves)
        self.drafter.check_integrity()
        return found

    def commit(self, tokens: list[int], nodes: list[int], kept: list[int]) -> None:
        self.sampler.append(tokens)
        self.text += tokens
        self.drafter.advance("s", tokens, nodes, kept)
        self.drafter.check_integrity()
