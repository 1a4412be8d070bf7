"""What a worker or a replica is given to build its engine: small, picklable, and free of torch until it is called."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.config import ModelConfig, NgramConfig, PairConfig, cache_dir
from paceline.errors import EngineError, PacelineError
from paceline.runtime.workers import Emit, Engine, settle
from paceline.types import Rendezvous

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TargetFactory:
    """Builds the target engine in its worker; of a tensor-parallel one its first rank."""

    config: PairConfig
    rendezvous: Rendezvous | None = None

    def __call__(self, emit: Emit) -> Engine:
        """See EngineFactory."""
        from paceline.target.build import build_target_engine

        with _building("target", self.config.target):
            return build_target_engine(self.config, emit, self.rendezvous)


@dataclass(frozen=True, slots=True)
class DraftFactory:
    """Builds the draft engine in its worker; of a tensor-parallel one its first rank."""

    config: PairConfig
    rendezvous: Rendezvous | None = None

    def __call__(self, emit: Emit) -> Engine:
        """See EngineFactory."""
        from paceline.draft.build import build_draft_engine

        with _building("draft", self.config.draft):
            return build_draft_engine(self.config, emit, self.rendezvous)


@contextlib.contextmanager
def _building(name: str, config: ModelConfig | NgramConfig | None) -> Iterator[None]:
    """Says how a model is run, and whose it was if building the engine fails in an unforeseen way."""
    if not isinstance(config, ModelConfig):
        yield
        return
    facts = f"dtype {config.dtype}, device {config.device}, compile {config.compile}"
    facts += f", quantization {config.quantization}" if config.quantization else ""
    log.info("%s %s: %s; compiled models are kept in %s", name, config.path, facts, cache_dir() / "compiled")
    try:
        yield
        settle()
    except PacelineError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise EngineError(f"the {name} could not be built from {config.path!r}: {reason}") from error


@dataclass(frozen=True, slots=True)
class FollowerFactory:
    """Builds a follower in its worker: ``build(config, rendezvous)`` is imported there, and torch with it."""

    kind: str
    config: PairConfig
    rendezvous: Rendezvous

    def __call__(self, emit: Emit) -> Engine:
        """See EngineFactory."""
        from paceline.draft.build import build_draft_follower
        from paceline.target.build import build_target_follower

        build = build_target_follower if self.kind == "target" else build_draft_follower
        return build(self.config, self.rendezvous)
