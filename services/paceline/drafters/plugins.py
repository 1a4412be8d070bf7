"""Drafters of installed packages: entry points of the group ``paceline.drafters``.

An entry point is a callable that is given a ``DrafterContext`` and the options of the configuration as keyword
arguments, and returns a ``Drafter``. ``docs/own-drafters.md`` has a whole example.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol, cast

from paceline.config.plugins import DRAFTERS, plugin_names
from paceline.drafters.building import Building, Built
from paceline.drafters.protocol import Drafter
from paceline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """Facts of the service that a drafter may need."""

    target: str
    """Directory or id of the target's checkpoint, whose tokenizer is that of all token ids."""
    vocab_size: int
    """Candidates are token ids in [0, vocab_size)."""
    max_context_len: int
    """Tokens of the longest context of a session."""
    num_sessions: int
    """Sessions that are expected at once; more may be opened."""
    max_leaves: int
    """The most leaves of one ``expand`` that the configuration asks for, or 64."""


class MakeDrafter(Protocol):
    """Makes the drafter of a replica, in the process and the thread that will call it."""

    def __call__(self, context: DrafterContext, **options: Any) -> Drafter:
        """``options``: ``draft_config.engine_kwargs.options`` of the configuration."""
        ...


def load_plugin(name: str) -> MakeDrafter:
    """Imports a drafter by the name of its entry point.

    Raises:
        ConfigError: no installed package, or more than one, offers it, or it cannot be imported.
    """
    points = entry_points(group=DRAFTERS, name=name)
    if not points:
        installed = ", ".join(plugin_names()) or "none"
        raise ConfigError(f"drafter is {name!r}: no entry point of {DRAFTERS!r} has this name (installed: {installed})")
    if len({point.value for point in points}) > 1:
        values = ", ".join(sorted(point.value for point in points))
        raise ConfigError(f"drafter is {name!r}: several entry points of {DRAFTERS!r} have this name ({values})")
    try:
        return cast(MakeDrafter, next(iter(points)).load())
    except Exception as error:
        raise ConfigError(f"drafter is {name!r}, which cannot be imported: {type(error).__name__}: {error}") from error


def make_plugin(name: str, context: DrafterContext, options: Mapping[str, Any]) -> Drafter:
    """Makes the drafter of an entry point.

    Raises:
        ConfigError: see ``load_plugin``; or it refuses its options, or what it returns is no ``Drafter``.
    """
    make = load_plugin(name)
    try:
        drafter = make(context, **options)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise ConfigError(f"drafter {name!r} cannot be made with options {dict(options)}: {said}") from error
    wanted = [
        *Drafter.__annotations__,
        *(key for key, value in vars(Drafter).items() if key[0] != "_" and callable(value)),
    ]
    if missing := [key for key in wanted if not hasattr(drafter, key)]:
        raise ConfigError(f"drafter {name!r} made a {type(drafter).__name__}, which has no {', '.join(missing)}")
    for key in ("chainer", "ranker", "states"):  # which a plug-in need not name
        if not hasattr(drafter, key):
            setattr(drafter, key, None)
    return drafter


def build(building: Building) -> Built:
    """The drafter of a configuration (``config/methods/plugin.py``). Raises as ``make_plugin``."""
    setup, options, longest = building.setup, building.options, building.max_context_len
    context = DrafterContext(
        setup.target_source, building.target.vocab_size, longest, setup.num_sessions, building.max_leaves
    )
    return Built(make_plugin(options.drafter, context, options.options), longest, f"plugin {options.drafter}")
