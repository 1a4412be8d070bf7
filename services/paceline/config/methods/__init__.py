"""Every drafting method, declared once: each module here holds the options and the entries of one.

A new module is a new method; nothing else lists it.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from paceline.config.methods.entry import Entry, HeadMethod, PoolMethod

ENTRIES: tuple[Entry, ...] = tuple(
    value
    for module in sorted(iter_modules(__path__), key=lambda module: (module.name != "model", module.name))
    for value in vars(import_module(f"{__name__}.{module.name}")).values()
    if isinstance(value, Entry)
)
"""All methods by module name; the draft model, which is the default, comes first."""
HEADS: dict[str, HeadMethod] = {entry.method: entry for entry in ENTRIES if isinstance(entry, HeadMethod)}
"""Entries by ``heads[].method``."""
DRAFTERS: dict[str, PoolMethod] = {entry.kind: entry for entry in ENTRIES if isinstance(entry, PoolMethod)}
"""Entries by ``draft_config.kind``. For heads in the pool see ``heads.IN_POOL``."""
