"""What one engine is built from: its slice of the configuration. Pickles of other versions name this module."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

from paceline.config.engines import Growing
from paceline.config.heads import POOL, HeadDraftOptions, HeadOptions
from paceline.config.loading import resolve
from paceline.config.methods.entry import PoolMethod
from paceline.config.methods.model import DraftOptions
from paceline.config.methods.vertical_cascade import CascadeOptions
from paceline.config.targets import TargetOptions
from paceline.errors.refusals import Fault
from paceline.types import restored

_BESIDE = 8
"""Maximum tokens that a draft model with ``placement: auto`` proposes at once as a head."""


@dataclass(frozen=True, slots=True)
class TargetSetup:
    """Everything that a target engine is built from: its slice of the configuration, validated."""

    __setstate__ = restored

    source: str
    """Directory of the checkpoint, or an id that transformers resolves (cache, then hub)."""
    options: TargetOptions = field(default_factory=TargetOptions)
    tree_budget: int = 0
    """Nodes per session that its drafts may send. 0: there is no draft."""
    link: HeadDraftOptions | None = None
    """The head in the draft pool that it sends hidden states to. None: its drafts read none."""
    shared_cores: int = 0
    """Cores of idle drafts that share the target's products while no session has a draft."""

    @classmethod
    def with_draft(
        cls,
        source: str,
        options: TargetOptions,
        draft: Growing | None = None,
        draft_source: str | None = None,
    ) -> Self:
        """The setup of a target with this draft, whose model it loads, too, if that may serve in either place."""
        link = draft if isinstance(draft, HeadDraftOptions) else None
        if isinstance(draft, DraftOptions) and draft.placement == "auto":
            head = HeadOptions(method="draft_model", model=draft_source, num_speculative_tokens=_BESIDE)
            options = options.model_copy(update={"heads": [*options.heads, head]})
        return cls(source, options, 0 if draft is None else draft.tree_budget, link)

    @property
    def speculates(self) -> bool:
        """True if sessions may be given draft tokens, from a draft or from a head."""
        return self.tree_budget > 0 or bool(self.options.heads)


def require_placement(target: TargetOptions, draft: object, key: str) -> None:
    """Refuses a draft with placement ``auto`` if its target cannot choose; ``key``: of the placement.

    Raises:
        Fault: names the refused value and the allowed ones.
    """
    if not isinstance(draft, DraftOptions) or draft.placement != "auto":
        return
    if not target.adaptive:
        raise Fault(key, "is 'auto' while the target's adaptive is false: 'auto' needs measured times")
    if any(head.method == "draft_model" for head in target.heads):
        raise Fault(key, "is 'auto' with a head of method 'draft_model': 'auto' makes one of this draft itself")


@dataclass(frozen=True, slots=True)
class DraftSetup:
    """Everything that a draft engine is built from: its slice of the configuration, validated, and the few values of
    its target that it follows."""

    __setstate__ = restored

    source: str | None
    """Directory or id of the draft model's checkpoint. None: a drafter without a model."""
    options: Growing
    target_source: str
    """Directory or id of the target's checkpoint, whose vocabulary and context length the drafts share."""
    num_sessions: int
    """Sessions that the engine is sized for."""
    max_model_len: int | None
    """Longest context in tokens. None: the trained length."""
    max_step_tokens: int
    """Prompt tokens of one forward."""
    trusts_target: bool = False
    """True if code that comes with the target's checkpoint may run."""
    tokenizers: tuple[str, str] | None = None
    """Directories or ids of the target's and the draft model's tokenizers. None: their checkpoints'."""
    target_gpus: tuple[int, ...] = ()
    """Numbers of the GPUs that the target owns, if both engines see the same ones. The draft prefers others."""

    @classmethod
    def for_target(cls, target: TargetSetup, source: str | None, options: Growing) -> Self:
        """The setup of a draft for this target."""
        num_sessions = options.max_sessions if isinstance(options, DraftOptions | HeadDraftOptions) else None
        return cls(
            source,
            options,
            target.source,
            num_sessions or target.options.max_sessions,
            target.options.max_model_len,
            target.options.max_step_tokens,
            target.options.trust_remote_code,
        )

    @property
    def parts(self) -> tuple[DraftSetup, ...]:
        """The setups of the drafters of a cascade, as if each were alone; () for any other drafter."""
        options = self.options
        if not isinstance(options, CascadeOptions):
            return ()
        return tuple(
            replace(self, source=drafter.model and resolve(drafter.model), options=drafter.full_options(options))
            for drafter in options.drafters
        )

    @property
    def runs_model(self) -> bool:
        """True if there is a draft model, alone or in a cascade, or a head."""
        return bool(self.options.devices)

    @property
    def entry(self) -> PoolMethod:
        """Entry of its method."""
        return next(entry for entry in POOL.values() if isinstance(self.options, entry.options))

    @property
    def model(self) -> tuple[str, DraftOptions]:
        """Source and options of the draft model. Must not be asked of a drafter without one."""
        assert self.source is not None
        assert isinstance(self.options, DraftOptions)
        return self.source, self.options
