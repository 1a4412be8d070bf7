"""Specifications of engines for workers and replicas: small, picklable, and free of torch until they build."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from paceline.config import DraftSetup, ModelOptions, TargetSetup, cache_dir
from paceline.config.memory import tune_engine_process
from paceline.errors import EngineError, PacelineError
from paceline.logs import STAGES
from paceline.messages import FromDraft, FromTarget
from paceline.runtime.workers import Emit, Engine
from paceline.types import Rendezvous

log = logging.getLogger(__name__)
stages = logging.getLogger(STAGES)
_importing = threading.Lock()
"""Two threads that import transformers at once find names of it missing."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Builds one engine, or one rank of it; a worker is given its ``build``."""

    setup: TargetSetup | DraftSetup
    rendezvous: Rendezvous | None = None
    """Meeting point of the ranks of a tensor-parallel engine, and the number of this one; rank 0 is the engine."""
    shares_interpreter: bool = False
    """Another thread of the engine's process sends its messages."""

    @property
    def kind(self) -> str:
        """``target`` or ``draft``."""
        return "target" if isinstance(self.setup, TargetSetup) else "draft"

    def build(self, emit: Emit[Any]) -> Engine[Any]:
        """Builds the engine, or the follower that another rank of it is. Imports torch.

        The messages that it takes and sends depend on the kind of the setup.

        Raises:
            ConfigError: the model cannot be loaded or run, or the settings do not fit it.
            EngineError: another rank has failed, or building failed unexpectedly.
        """
        setup = self.setup
        stages.info("loading %s", setup.source or "a drafter without a model")
        with self._reported():
            return self._target(emit, setup) if isinstance(setup, TargetSetup) else self._draft(emit, setup)

    def _target(self, emit: Emit[FromTarget], setup: TargetSetup) -> Engine[Any]:
        with _importing:
            from paceline.target.build import build_target_engine, build_target_follower

        if self.rendezvous is not None and self.rendezvous.rank > 0:
            return build_target_follower(setup, self.rendezvous)
        return build_target_engine(setup, emit, self.rendezvous, holds_outcomes=self.shares_interpreter)

    def _draft(self, emit: Emit[FromDraft], setup: DraftSetup) -> Engine[Any]:
        with _importing:
            from paceline.draft.build import build_draft_engine, build_draft_follower

        if self.rendezvous is not None and self.rendezvous.rank > 0:
            return build_draft_follower(setup, self.rendezvous)
        return build_draft_engine(setup, emit, self.rendezvous)

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        """Logs how a model runs, and adds its path to unexpected errors."""
        source, options = self.setup.source, self.setup.options
        if not isinstance(options, ModelOptions):
            yield
            return
        how = f"dtype {options.dtype}, device {options.device}, compile {options.compile}"
        how += f", quantization {options.quantization}" if options.quantization else ""
        log.info("loading %s %s: %s; compile cache: %s", self.kind, source, how, cache_dir() / "compiled")
        try:
            yield
            tune_engine_process()
        except PacelineError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise EngineError(f"the {self.kind} could not be built from {source!r}: {reason}") from error
