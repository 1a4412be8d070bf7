"""The table of docs/methods.md: every way to use a drafting method, from the entries of ``config/methods``.

``tests/lossless/test_methods.py`` runs each, and ``paceline advise`` chooses among them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from paceline.config.heads import IN_POOL
from paceline.config.methods import ENTRIES, HEADS
from paceline.config.methods.entry import Entry, HeadMethod, Place, PoolMethod, Row

__all__ = ["METHODS", "Method", "Place", "method_named"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Method(Row):
    """One line of the table, and its entry."""

    entry: Entry

    @property
    def place(self) -> Place:
        """Returns where drafters of this method run."""
        return self.entry.place

    @property
    def kind(self) -> str:
        """``draft_config.kind`` in the draft pool, ``heads[].method`` in the target; empty: it needs no
        configuration."""
        return self.entry.kind

    @property
    def drafting(self) -> Entry:
        """The entry that says how it drafts: of a head in the draft pool that of the head."""
        return HEADS[self.options["method"]] if self.entry is IN_POOL else self.entry

    @property
    def needs_model(self) -> bool:
        """True if it reads a checkpoint that is not the target's own."""
        return bool(self.reads) and not self.own_files

    def configuration(self, target: str, model: str | None = None) -> dict[str, Any]:
        """The configuration of a service with this drafter alone, as ``ServiceConfig.parse`` takes it.

        ``target`` and ``model``: directories of checkpoints, or ids that transformers resolves. ``model`` is left out
        where the method needs none.
        """
        assert model is not None or not self.needs_model, f"{self.name} reads a checkpoint"
        target_config: dict[str, Any] = {"model_loading_config": {"model_id": target}}
        draft: dict[str, Any] | None = None
        if isinstance(self.entry, HeadMethod):
            named = {} if model is None else {"model": model}
            target_config["engine_kwargs"] = {"heads": [{"method": self.kind, **named, **self.options}]}
        elif isinstance(self.entry, PoolMethod):
            draft = {"kind": self.kind} | ({"engine_kwargs": dict(self.options)} if self.options else {})
            if model is not None:
                assert self.entry.with_model is not None, f"{self.name} reads no checkpoint"
                self.entry.with_model(draft, model)
        return {"target_config": target_config, "draft_config": draft}


def _line(entry: Entry, row: Row) -> Method:
    more = {"num_speculative_tokens": 4} if isinstance(entry, HeadMethod) else {}
    values = {each.name: getattr(row, each.name) for each in fields(row)}
    return Method(**values | {"entry": entry, "options": {**row.options, **more}})


METHODS: tuple[Method, ...] = tuple(
    _line(entry, row)
    for entry in (*sorted(ENTRIES, key=lambda entry: [*Place].index(entry.place)), IN_POOL)
    for row in entry.rows
)
"""All of them, in the order of the table."""


def method_named(name: str) -> Method:
    """The entry of this name. Raises KeyError if there is none."""
    return {method.name: method for method in METHODS}[name]
