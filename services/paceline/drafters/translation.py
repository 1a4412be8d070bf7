"""A draft model of another vocabulary: its logits over the target's tokens, and the target's text in its own tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paceline.checkpoint.vocabulary import SharedVocabulary


class Translation:
    """Translates between the target's tokens, which the trees hold, and a draft model's (``SharedVocabulary``).

    Args:
        vocab_size: of the target.
        draft_vocab_size: logits of the draft model.
        first: token of the draft model that stands for a context in which nothing has any of its tokens.
    """

    def __init__(self, shared: SharedVocabulary, vocab_size: int, draft_vocab_size: int, first: int = 0) -> None:
        self.vocab_size = vocab_size
        self._shared, self._first = shared, first
        self._ids = {
            target_id: draft_id
            for target_id, draft_id in shared.draft_ids.items()
            if target_id < vocab_size and draft_id < draft_vocab_size
        }
        self._columns = torch.zeros(vocab_size, dtype=torch.int64)
        self._absent = torch.ones(vocab_size, dtype=torch.bool)
        self._columns[list(self._ids)] = torch.tensor(list(self._ids.values()), dtype=torch.int64)
        self._absent[list(self._ids)] = False

    @property
    def num_shared(self) -> int:
        """Tokens of the target that the draft can propose."""
        return len(self._ids)

    def context(self, token_ids: Sequence[int]) -> list[int]:
        """A prompt in the draft's tokens, as its tokenizer cuts the text; at least one."""
        return self._shared.encode(token_ids) or [self._first]

    def token(self, token_id: int) -> int | None:
        """The draft's id of a token, if both have it."""
        return self._ids.get(token_id)

    def committed(self, token_ids: Sequence[int], node_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yields further tokens of the context as draft tokens, each with its node, or -1.

        A shared token is one token, as it was drafted. The text of consecutive other tokens is cut by the draft's
        tokenizer as a whole; it may have no token at all.
        """
        others: list[int] = []
        for token_id, node_id in zip(token_ids, node_ids, strict=True):
            own = self._ids.get(token_id)
            if own is None:
                others.append(token_id)
                continue
            yield from self._cut(others)
            others.clear()
            yield own, node_id
        yield from self._cut(others)

    def logits(self, logits: Tensor) -> Tensor:
        """Returns logits of the target's tokens: -inf for tokens that the draft lacks.

        Args:
            logits: [rows, draft vocabulary].

        Returns:
            [rows, target vocabulary], so that a softmax renormalizes over the shared tokens.
        """
        if self._columns.device != logits.device:
            self._columns, self._absent = self._columns.to(logits.device), self._absent.to(logits.device)
        return logits.index_select(-1, self._columns).masked_fill_(self._absent, -math.inf)

    def _cut(self, token_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
        if token_ids:
            yield from ((token_id, -1) for token_id in self._shared.encode(token_ids, start=False))
