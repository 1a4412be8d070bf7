"""Hints to drafts while a step runs: the likeliest tokens of an early exit, by the target's final norm and LM head.

Bhendawade et al. 2025 (Mirror speculative decoding, arXiv:2510.13161)::

    target   layers 0 .. b-1 ── norm, LM head ── layers b .. L-1 ── verdicts
                                   └ Hint ─▶                          └ Outcome ─▶
    draft    grows below the outcomes that it finds likely, then below outcomes that both find likely

The exit delays the step by one product with the LM head and the top of its rows. A hint decides nothing: the draft
expands other nodes first, and may add some that the target verifies like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.config import HintOptions
from paceline.core.deferred import upload
from paceline.core.processors import Row
from paceline.core.sampling import draft_candidates
from paceline.messages import Hint
from paceline.target.scheduler import Scheduled
from paceline.target.session import TargetSession
from paceline.types import Mode


class Hints:
    """The hints of one target. Owned by the engine's thread."""

    def __init__(self, options: HintOptions, exit: Callable[[Tensor], Tensor]) -> None:
        """``exit``: states at the boundary ``[n, hidden]`` -> logits ``[n, vocabulary]``."""
        self.options = options
        self.num_sent = 0
        """Places of steps for which a hint was sent."""
        self.num_bytes = 0
        """Bytes of the hints that were sent."""
        self._exit = exit

    def of(self, parts: Sequence[Scheduled], states: Tensor) -> list[Hint]:
        """Returns the hints to the drafts of a step's sessions.

        Args:
            parts: of the step, in order.
            states: [R, hidden] at the boundary; rows of the verifying parts come first.
        """
        told: list[tuple[TargetSession, tuple[int, ...], slice]] = []
        index: list[int] = []
        rows: list[Row] = []
        start = 0
        for part in parts:
            if not part.verifies:
                continue
            if _wanted(part.session):
                node_ids, of_part = _places(part), part.rows()
                told.append((part.session, tuple(node_ids.values()), slice(len(rows), len(rows) + len(node_ids))))
                index += [start + i for i in node_ids]
                rows += [of_part[i] for i in node_ids]
            start += part.num_drafted + 1
        if not told:
            return []
        with torch.inference_mode():
            logits = self._exit(states[upload(index, states.device)])
            token_ids, log_p = draft_candidates(logits, rows, self.options.top)
        ids, values = token_ids.to("cpu", torch.int32).numpy(), log_p.to("cpu", torch.float32).numpy()
        hints, weight = [], self.options.weight
        for session, nodes, at in told:
            packed = ids[at].tobytes() + values[at].tobytes()
            hints.append(Hint(session.session_id, session.draft_epoch, session.num_tokens, nodes, weight, packed))
            self.num_bytes += len(packed)
        self.num_sent += len(rows)
        return hints


def _wanted(session: TargetSession) -> bool:
    """True if the draft of a session works while the target does."""
    return session.draft_available and session.mode is Mode.OVERLAPPED and session.max_draft() > 0


def _places(part: Scheduled) -> dict[int, int]:
    """The draft's node of the token before each row of a part, where the draft knows it."""
    return {0: 0, **dict(enumerate(part.proposal.draft_ids, 1))}
