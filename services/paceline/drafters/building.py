"""The inputs from which a drafter of the draft pool is built, and the result that its engine uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from paceline.checkpoint.files import Checkpoint
from paceline.config import DraftSetup
from paceline.config.methods.entry import function
from paceline.drafters.protocol import Drafter
from paceline.model.parallel.collectives import Collectives
from paceline.model.runner import ModelRunner

_WIDTH = 64
"""Leaves of one ``expand`` of a drafter without a model, where the configuration names no number."""


class Built(NamedTuple):
    """A drafter, for its engine or for a cascade."""

    drafter: Drafter
    max_context_len: int
    """Tokens of the longest context that it holds."""
    description: str
    """Text for the status of the replica (``DraftEngine.description``)."""
    runner: ModelRunner | None = None
    """Runner of its model, or of the first model of a cascade; None: it has none."""
    ahead: bool | None = None
    """True if a head drafts ahead of outcomes; None: where it has positive expected gain."""


@dataclass(frozen=True, slots=True)
class Building:
    """The configuration of a drafter, and its target."""

    setup: DraftSetup
    target: Checkpoint
    group: Collectives | None = None
    """The other ranks of a draft model."""

    @property
    def options(self) -> Any:
        """The ``engine_kwargs`` of the drafter."""
        return self.setup.options

    @property
    def max_context_len(self) -> int:
        """Tokens of the longest context of a session."""
        return min(self.setup.max_model_len or self.target.max_model_len, self.target.max_model_len)

    @property
    def max_leaves(self) -> int:
        """The most leaves of one ``expand`` that the configuration asks for."""
        return self.setup.options.tree_step_tokens or _WIDTH

    def build(self) -> Built:
        """The drafter, by its method's entry. Raises as that does."""
        entry = self.setup.entry
        found: Drafter | Built = function(entry.build)(self)
        return found if isinstance(found, Built) else Built(found, self.max_context_len, entry.rows[0].name)
