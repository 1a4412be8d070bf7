"""What a drafting method declares: one entry for each place that it runs in, from which everything else is read.

The configuration's classes and values, the flags, ``paceline advise``, the sizes of ``paceline check`` and the table of
docs/methods.md come from entries. An entry names the functions that need torch or an engine as ``module:function``;
who calls one imports it then (``function``). So the configuration imports no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module
from typing import Any, Literal, get_args

from paceline.config.replicas import Drafts
from paceline.types import Mode

Text = Literal["chat", "code", "edits"]
"""Kinds of text: conversation and prose; source code; output that repeats its input, such as edits of a file."""
TEXTS: tuple[Text, ...] = get_args(Text)


class Place(StrEnum):
    """The place that a drafter runs in."""

    POOL = "draft pool"
    """Runs in draft replicas, on devices of their own."""
    TARGET = "target"
    """Runs in each target replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table of docs/methods.md: a method, or one way to use it."""

    name: str
    """Unique."""
    source: str
    """The paper or project that it is from."""
    reads: str
    """The formats of its checkpoint; empty: it has none."""
    when: str
    """The texts and services that it is for."""
    own_files: bool = False
    """The checkpoint may be in the target's own files."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options in addition to the checkpoint, by the keys of the configuration."""
    mode: Mode = Mode.OVERLAPPED
    """The mode of the requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A method in one place; the part that both places have."""

    rows: tuple[Row, ...]
    acceptance: Mapping[Text, tuple[float, str]]
    """Assumed acceptance of a draft token given its ancestors where nothing was measured, and the source. Published
    accept lengths L of proposals of K tokens are turned into the a of L = (1 - a^(K + 1)) / (1 - a) (2211.17192,
    equation 1). A text that is missing counts as chat. Targets differ: the figures rank methods and promise nothing."""

    of_draft: bool = False
    """True: its checkpoint is a language model of its own (``--draft``)."""

    @property
    def place(self) -> Place:
        """Places in which it can run."""
        return Place.TARGET

    @property
    def kind(self) -> str:
        """``draft_config.kind`` in the draft pool, ``heads[].method`` in the target; empty: it is always on."""
        return ""

    def assumed(self, text: Text) -> tuple[float, str]:
        """(acceptance, its source) for a kind of text."""
        value, source = self.acceptance.get(text) or self.acceptance["chat"]
        return value, f"assumed, {source}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMethod(Entry):
    """A drafter in the draft pool."""

    config: type[Drafts]
    """Class of its ``draft_config``. The default of the field ``kind`` is the method's name."""
    build: str
    """(``drafters.building.Building``) -> a ``Drafter``, or a ``Built`` with what else its engine takes of it."""
    host_bytes: Callable[[Any], int]
    """Bytes of the machine's memory that its options need, in addition to an engine's. For draft models and heads the
    checkpoint gives them (``preflight/service.py``)."""
    examine: str = "paceline.drafters.available:needs_nothing"
    """(Asked) -> ``AvailableMethod``: what one of its forwards reads. Raises ConfigError where it cannot be used."""
    with_model: Callable[[dict[str, Any], str], None] | None = None
    """Names a checkpoint in a ``draft_config``; None: it has none."""
    pool: str = "paceline.preflight.service:pool_of_text"
    """(DraftPool) -> ``Pool``: its replicas and what each takes."""
    vllm_keys: Mapping[str, str] | None = None
    """Keys of vLLM's ``speculative_config`` and those here; None: vLLM has no such drafter."""

    @property
    def place(self) -> Place:
        """Returns where drafters of this method run."""
        return Place.POOL

    @property
    def kind(self) -> str:
        """``draft_config.kind``."""
        return str(self.config.model_fields["kind"].default)

    @property
    def options(self) -> Any:
        """The class of its ``engine_kwargs``."""
        return self.config.model_fields["engine_kwargs"].annotation

    @property
    def named_by_kind(self) -> bool:
        """True if ``--drafter KIND`` is all that it needs: no checkpoint and no option."""
        needed = (field.is_required() for field in self.options.model_fields.values())
        return self.with_model is None and not any(needed)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadMethod(Entry):
    """A drafter inside each target replica. Its defaults suit a head that reads the target's hidden states."""

    method: str
    """``heads[].method``."""
    model: Literal["needed", "optional", "none"] = "needed"
    """Whether it has a checkpoint. ``none``: the field of ``HeadOptions`` with its options, if any, has its name."""
    boundaries: Literal["none", "many", "one"] = "none"
    """Whether the configuration may say which hidden states it reads (many), or at which layer it exits (one)."""
    target_kv: bool = False
    """True: it attends to the target's keys and values."""
    target_layers: bool = False
    """True: it drafts with layers of the target itself."""
    remote: bool = False
    """The states of each position suffice for it, so it may run in the draft pool."""
    probed: bool = True
    """True: the probe can test it on text that its target writes."""
    page_states: int | None = 0
    """Hidden states that it keeps with each page; None: one for each boundary in its configuration."""
    published: tuple[str, ...] = ()
    """Parts of architectures, types and names of directories of its checkpoints, in lower case."""
    read: str = ""
    """(``Reading``) -> ``HeadForm`` of its checkpoint; empty: it has none of its own format."""
    make: str = ""
    """(``HeadForm`` of a training, target, ``Fit``) -> ``HeadModule``; empty: no ``paceline train-head`` for it."""
    write: str = ""
    """(``TrainableHead``, the target's name) -> ``Written``: the files of a trained one."""
    open: str = "paceline.drafters.heads.load:open_configured"
    """(HeadOptions, Checkpoint of the target) -> the plan of its checkpoint, or None."""
    load: str = "paceline.target.mount:load_states"
    """(Mounting) -> ``MountedHead``."""
    memory: str = "paceline.preflight.heads:size_of_states"
    """(HeadOptions, Served) -> ``HeadsSize``."""
    examine: str = "paceline.drafters.available:of_states"
    """(Asked) -> ``AvailableMethod``, as in the pool."""

    @property
    def kind(self) -> str:
        """``heads[].method``."""
        return self.method


def function(name: str) -> Callable[..., Any]:
    """The function that an entry names as ``module:function``."""
    module, _, attribute = name.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), attribute)
    return found
