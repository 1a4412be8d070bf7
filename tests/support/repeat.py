"""A whole drafting method in one file: put into ``config/methods``, it is configured, listed and served.

It proposes the last token again. ``tests/lossless/test_new_method.py`` does so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from paceline.config.engines import Growing
from paceline.config.methods.entry import PoolMethod, Row
from paceline.config.replicas import Drafts


class RepeatOptions(Growing):
    """Options of the drafter that repeats the last token."""

    prob: float = Field(default=0.5, gt=0, lt=1)
    """The probability that it claims."""


class RepeatDraftConfig(Drafts):
    """The pool of drafts: the last token again."""

    kind: Literal["repeat"] = "repeat"
    engine_kwargs: RepeatOptions = RepeatOptions()


class RepeatDrafter:
    """A ``Drafter`` (``drafters/protocol.py``) that keeps the last token of each session."""

    kind, tokens_per_leaf, conditional = "repeat", 1, True
    chainer = ranker = states = None

    def __init__(self, prob: float, max_leaves: int) -> None:
        self.max_leaves, self._log_q, self._last = max_leaves, math.log(prob), dict[str, int]()

    def open(self, session_id: str, token_ids: Sequence[int], sampler: Any, salt: str = "") -> None:
        self._last[session_id] = token_ids[-1]

    def prefill(self) -> bool:
        return False

    def ready(self, session_id: str) -> bool:
        return True

    def expand(self, leaves: Sequence[Any]) -> Any:
        import torch

        from paceline.drafters.protocol import Candidates

        last = [[leaf.path[-1] if leaf.path else self._last[leaf.session_id]] for leaf in leaves]
        return Candidates(torch.tensor(last), torch.full((len(last), 1), self._log_q))

    def advance(self, session_id: str, token_ids: Sequence[int], node_ids: Sequence[int], kept: Sequence[int]) -> None:
        self._last[session_id] = token_ids[-1]

    def close(self, session_id: str) -> None:
        self._last.pop(session_id, None)

    def check_integrity(self) -> None:
        assert all(token >= 0 for token in self._last.values())

    def shutdown(self) -> None:
        self._last.clear()


def build(building: Any) -> RepeatDrafter:
    return RepeatDrafter(building.options.prob, building.max_leaves)


POOL = PoolMethod(
    config=RepeatDraftConfig,
    build=f"{__name__}:build",
    host_bytes=lambda options: 0,
    acceptance={"chat": (0.1, "tests/support/repeat.py")},
    rows=(Row(name="repeats", source="an example", reads="", when="texts that repeat one token"),),
)
