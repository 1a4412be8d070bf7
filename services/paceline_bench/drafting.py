"""The producer of tokens in ``paceline bench local``: a draft, heads of the target, or neither; what that rules out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.cli.flags import draft_config_of, heads_of
from paceline.config import Device, DraftModel, HeadOptions, ServiceConfig
from paceline.errors import ConfigError
from paceline.types import Mode

NEED_MODEL = ("assisted", "colocated")
"""Baselines that have a draft model of their own in addition to the target."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """The flags that choose what proposes tokens."""

    drafter: str = "model"
    """As of ``paceline generate --drafter``."""
    heads: tuple[str, ...] = ()
    """As of ``paceline generate --head``: METHOD=MODEL[,TOKENS]."""

    @property
    def has_model(self) -> bool:
        """True if the draft is a model."""
        return self.drafter == "model"

    def head_options(self) -> list[HeadOptions]:
        """The heads. Raises ConfigError."""
        return heads_of(self.heads)

    def draft_options(
        self, path: str, tree_step_tokens: int | None, run: dict[str, Any], device: Device = "auto"
    ) -> Any:
        """``draft`` of a LocalConfig; None: there is none. ``run``: how a draft model runs, ``device``: where one does
        that is not a part of a cascade."""
        if self.has_model:
            return DraftModel(path=path, tree_step_tokens=tree_step_tokens, device=device, **run)
        draft = ServiceConfig.parse({"draft_config": draft_config_of(self.drafter, run)}).draft_config
        return None if draft is None else draft.engine_kwargs

    def modes(self, given: Sequence[Mode] | None) -> tuple[Mode, ...]:
        """Returns the modes to compare: as given, or all that make sense.

        Raises:
            ConfigError: a given mode does not make sense.
        """
        if self.drafter != "none":
            return tuple(Mode) if given is None else tuple(given)
        if given is not None and Mode.SEQUENTIAL in given:
            raise ConfigError(
                "--modes holds sequential with --drafter none: there is no draft to take turns with, leave it out"
            )
        return (Mode.PLAIN, Mode.OVERLAPPED) if given is None else tuple(given)

    def baselines(self, given: Sequence[str] | None, default: Sequence[str]) -> tuple[str, ...]:
        """Returns the baselines to compare: as given, or the ones of ``default`` that make sense.

        Raises:
            ConfigError: a given baseline does not make sense.
        """
        if self.has_model:
            return tuple(default if given is None else given)
        for name in given or ():
            if name in NEED_MODEL:
                raise ConfigError(f"--baselines holds {name} with --drafter {self.drafter}: it needs a draft model")
        return tuple(name for name in (default if given is None else given) if name not in NEED_MODEL)

    def check(self, modes: Sequence[Mode], flags: dict[str, object]) -> None:
        """Refuses contradictory flags.

        Args:
            modes: compared modes.
            flags: values of flags that are for a draft model, by their names; None: not given.

        Raises:
            ConfigError: a value does not fit, or a head cannot be read.
        """
        heads = self.head_options()
        if heads and Mode.OVERLAPPED not in modes:
            raise ConfigError(f"--head {self.heads[0]} is given without overlapped in --modes: only that asks heads")
        for flag, value in flags.items():
            if value is not None and not self.has_model:
                raise ConfigError(
                    f"{flag} {value} is given with --drafter {self.drafter}: it is for a draft model alone"
                )
