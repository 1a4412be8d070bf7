"""The tokens that two tokenizers share, so that a draft model of another vocabulary can propose tokens of the target.

Tokens are compared by the bytes of their text, since tokenizers write spaces and bytes differently. Special tokens are
compared by name, and the ends of sequence by role. This is token-level intersection (Timor et al. 2025, arXiv
2502.05202, algorithm 4): the draft proposes shared tokens only, its distribution renormalized over them. Free of torch.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.checkpoint.pieces import Pieces, bytes_at
from paceline.checkpoint.tokenizer import Tokenizer, require_same_tokens
from paceline.errors import TokenizerMismatchError

Vocabulary = Literal["same", "shared"]

LEAST_MASS = 0.9
"""Share of the sample's tokens that a draft must be able to propose."""
LEAST_SHARED = 0.25
"""Share of the smaller vocabulary that the other one must have."""

_PROSE = (
    "The lighthouse had stood on the rocks for two hundred years, and in all that time nobody had thought to ask who "
    "first carried the stones across the bay. When the council finally sent a surveyor, she found 1,482 blocks, none "
    "of which had been cut on the island; most came from quarries more than fifty miles away.\n\n"
    "Why does it matter? Because the cheapest explanation is often wrong. For example, if each boat held only a dozen "
    "blocks, then over a hundred and twenty crossings were needed, and the records show fewer than 40.\n\n"
)
_CODE = (
    "def merge(left, right):\n"
    '    """Merge two sorted lists into one."""\n'
    "    result = []\n"
    "    i = j = 0\n"
    "    while i < len(left) and j < len(right):\n"
    "        if left[i] <= right[j]:\n"
    "            result.append(left[i])\n"
    "            i += 1\n"
    "        else:\n"
    "            result.append(right[j])\n"
    "            j += 1\n"
    "    return result + left[i:] + right[j:]\n\n\n"
    "class Counter(dict):\n"
    "    def update(self, values, default=None):\n"
    "        for key in values:\n"
    '            self[key] = self.get(key, 0) + 1  # raises ValueError if "key" is not hashable\n'
)
_DATA = '{"name": "status", "items": [{"id": 17, "ok": true}, {"id": 18, "ok": false}], "error": null}\n'
SAMPLE = (_PROSE, _CODE, _DATA)
"""Prose, code and data on which the share of shared tokens is measured."""


class SharedVocabulary:
    """The tokens of a target that a draft's tokenizer has too, and the target's texts in the draft's tokens."""

    def __init__(self, target: Tokenizer, draft: Tokenizer) -> None:
        self._target, self._draft = Pieces(target), Pieces(draft)
        ids = self._draft.ids
        self.draft_ids: dict[int, int] = {
            target_id: ids[piece] for piece, target_id in self._target.ids.items() if piece in ids
        }
        """Ids of the draft by ids of the target, of the tokens that both have: one each."""
        for target_id, draft_id in zip(target.eos_token_ids, draft.eos_token_ids, strict=False):
            if target_id not in self.draft_ids and draft_id not in self.draft_ids.values():
                self.draft_ids[target_id] = draft_id

    def encode(self, token_ids: Sequence[int], *, start: bool = True) -> list[int]:
        """The draft's tokens for the text of the target's tokens; special tokens that it lacks are left out.

        ``start``: the text begins there, with whatever the draft's tokenizer puts before one.
        """
        encoded: list[int] = []
        for is_text, run in itertools.groupby(token_ids, lambda token_id: isinstance(self._piece(token_id), bytes)):
            if is_text:
                text = b"".join(bytes_at(self._target.pieces, token_id) for token_id in run)
                encoded += self._draft.encode(text, start=start and not encoded)
            else:
                encoded += [self.draft_ids[token_id] for token_id in run if token_id in self.draft_ids]
        prefix = self._draft.prefix if start else []
        return encoded if encoded[: len(prefix)] == prefix else [*prefix, *encoded]

    def _piece(self, token_id: int) -> bytes | str:
        return self._target.pieces.get(token_id, b"")

    @functools.cached_property
    def overlap(self) -> Overlap:
        """Measures the overlap of the two on ``SAMPLE``."""
        sample = [token_id for text in SAMPLE for token_id in self._target.tokenizer.encode(text)]
        shared = sum(token_id in self.draft_ids for token_id in sample)
        return Overlap(
            len(self.draft_ids),
            self._target.tokenizer.vocab_size,
            self._draft.tokenizer.vocab_size,
            shared / len(sample) if sample else 0.0,
        )


@dataclass(frozen=True, slots=True)
class Overlap:
    """Overlap of two vocabularies."""

    num_shared: int
    target_size: int
    draft_size: int
    mass: float
    """Share of the tokens of a sample, as the target's tokenizer cuts it, that the draft can propose."""

    def __str__(self) -> str:
        return (
            f"{self.num_shared} tokens of the target's {self.target_size} and the draft's {self.draft_size}, which "
            f"are {100 * self.mass:.1f} % of the tokens of a sample"
        )


def require_tokens(target: Tokenizer, draft: Tokenizer, vocabulary: Vocabulary) -> SharedVocabulary | None:
    """The mapping that a draft needs to propose tokens of the target; None where the tokenizers have the same content.

    Raises:
        TokenizerMismatchError: the tokenizers differ while ``vocabulary`` is "same", or share too little.
    """
    if vocabulary == "same":
        require_same_tokens(target, draft, ", or set vocabulary to shared to propose the tokens that both have")
        return None
    if target.fingerprint == draft.fingerprint:
        return None
    shared = SharedVocabulary(target, draft)
    overlap, fewest = shared.overlap, LEAST_SHARED * min(target.vocab_size, draft.vocab_size)
    if overlap.num_shared < fewest or overlap.mass < LEAST_MASS:
        raise TokenizerMismatchError(
            f"vocabulary is shared: the draft {draft.name!r} and the target {target.name!r} share too little: "
            f"{overlap}; at least {100 * LEAST_MASS:g} % and {-(-fewest // 1):g} tokens are needed"
        )
    return shared
