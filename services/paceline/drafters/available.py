"""The methods that can draft for a target with the available checkpoints, and the size of one forward of each.

Reads configurations and headers of weight files; loads nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.pard import parallel_draft
from paceline.checkpoint.vocabulary import require_tokens
from paceline.config import HeadOptions, LookaheadOptions
from paceline.config.methods.entry import HeadMethod, PoolMethod, function
from paceline.drafters.catalogue import METHODS, Method, Place
from paceline.drafters.heads.early_exit import open_exit
from paceline.drafters.heads.load import mtp_layers, open_head
from paceline.drafters.heads.streaming import open_streams
from paceline.errors import ConfigError, PacelineError
from paceline.messages import STATE_BYTES
from paceline.types import MAX_DRAFT_TOKENS, Mode

NO_CHECKPOINT = "no checkpoint of it was found: name one with "
"""Beginning of the refusal of a method that needs a checkpoint; the flag that names one follows."""


@dataclass(frozen=True, slots=True)
class AvailableMethod:
    """A method and what it takes, or why it cannot be used."""

    method: Method
    model: str | None = None
    """Checkpoint of the method."""
    refusal: str = ""
    """One sentence; empty: it can be used."""
    forward_bytes: int = 0
    """Bytes of weights that one of its forwards reads; 0: it has none."""
    num_layers: int = 1
    """Layers that one of its forwards computes."""
    one_pass: bool = False
    """One forward makes all tokens of a proposal; else one forward makes one."""
    most_tokens: int = MAX_DRAFT_TOKENS
    """Tokens that it can draft in a row."""
    state_bytes: int = 0
    """Bytes that the target sends for every token, of a head in the draft pool."""
    riding_rows: int = 0
    """Rows of each session that ride in each step of the target (lookahead)."""
    guesses: tuple[int, str] | None = None
    """(n, kind): each of its forwards verifies n tokens of a drafter of this kind (a cascade)."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A method, and what there is for it."""

    method: Method
    target: Checkpoint
    source: str | None
    """The method's checkpoint; None: it has none."""
    head: HeadOptions | None
    """The head of ``--head``; None: there is none of this method."""
    plugin: str | None
    """Name of a user's own drafter."""

    def found(self, **more: Any) -> AvailableMethod:
        """Returns the method as usable. ``more``: known facts about it."""
        return AvailableMethod(self.method, self.source, **more)

    def bytes_of(self, num_parameters: float) -> int:
        """Bytes of ``num_parameters`` weights in the target's number format."""
        size = self.target.size()
        assert size is not None
        return int(num_parameters * size.item_bytes)


def available_methods(
    target: Checkpoint, draft: str | None, heads: Sequence[HeadOptions], plugin: str | None = None
) -> list[AvailableMethod]:
    """Every method of the catalogue that draws no comparison only, with its refusal where there is one.

    Args:
        target: the target, on this machine.
        draft: directory or id of a smaller model; None: there is none.
        heads: available heads; at most one of a method counts.
        plugin: name of a user's own drafter of which figures are known; None: there is none.
    """
    found = []
    for method in METHODS:
        if method.mode is Mode.SEQUENTIAL or not method.kind:  # for comparisons; always on
            continue
        given = next((head for head in heads if _is_of(method, head)), None)
        source = given.source if given is not None else draft if method.entry.of_draft else None
        try:
            found.append(_examined(Asked(method, target, source, given, plugin)))
        except PacelineError as error:
            found.append(AvailableMethod(method, source, " ".join(str(error).split())))
    return found


def _is_of(method: Method, head: HeadOptions) -> bool:
    """True if a head is of the method; exits with weights of their own are a different method than exits without."""
    entry = method.drafting
    return entry is head.entry and (head.entry.boundaries != "one" or method.needs_model == (head.model is not None))


def _examined(asked: Asked) -> AvailableMethod:
    """Raises ConfigError or TokenizerMismatchError if the method cannot be used."""
    method, entry = asked.method, asked.method.entry
    assert isinstance(entry, PoolMethod | HeadMethod)
    if method.needs_model and asked.source is None:
        flag = "--draft DIRECTORY" if entry.of_draft else f"--head {method.drafting.kind}=DIRECTORY"
        raise ConfigError(f"{NO_CHECKPOINT}{flag}")
    found: AvailableMethod = function(entry.examine)(asked)
    return found


def needs_nothing(asked: Asked) -> AvailableMethod:
    """A method without weights."""
    return asked.found()


def of_plugin(asked: Asked) -> AvailableMethod:
    """A user's own drafter. Raises ConfigError for one that is not named."""
    if asked.plugin is None:
        raise ConfigError("only its author knows what a plugin yields: give your measurements as --measured NAME=A,MS")
    return AvailableMethod(replace(asked.method, options={**asked.method.options, "drafter": asked.plugin}))


def of_lookahead(asked: Asked) -> AvailableMethod:
    """Lookahead, by the sizes of its window."""
    sizes = LookaheadOptions(**asked.method.options["lookahead"])
    return asked.found(most_tokens=sizes.ngram - 1, riding_rows=sizes.num_tokens)


def of_exit(asked: Asked) -> AvailableMethod:
    """An early exit. Raises ConfigError for one without a layer, or of another target."""
    head, size = asked.head, asked.target.size()
    if head is None or (head.boundaries is None and asked.source is None):
        raise ConfigError("no layer is named at which the target was trained to exit: --head early_exit=LAYER")
    assert size is not None
    plan = open_exit(asked.target, head.boundaries[0] if head.boundaries else None, asked.source)
    own = 0 if plan.adapter is None else asked.bytes_of(plan.adapter.num_parameters)
    exits = replace(asked.method, options={**asked.method.options, "boundaries": [plan.boundary]})
    below = int(plan.boundary / size.num_layers * size.bytes_read(1))
    return AvailableMethod(exits, asked.source, forward_bytes=below + own, num_layers=plan.boundary)


def of_streams(asked: Asked) -> AvailableMethod:
    """Speculative streaming. Raises ConfigError for a head of another target."""
    size, source = asked.target.size(), asked.source
    assert source is not None
    assert size is not None
    streams = open_streams(asked.target, source)
    above_layers = size.num_layers - streams.features.boundaries[0]
    num_bytes = int(above_layers / size.num_layers * size.bytes_read(1)) + asked.bytes_of(streams.num_parameters)
    return asked.found(forward_bytes=num_bytes, num_layers=above_layers, one_pass=True, most_tokens=streams.most_tokens)


def of_draft(asked: Asked) -> AvailableMethod:
    """A draft model. Raises ConfigError or TokenizerMismatchError for one whose tokens do not fit."""
    source, options = asked.source, asked.method.options
    assert source is not None
    draft, vocabulary = Checkpoint.open(source, asked.target.trust_remote_code), options.get("vocabulary", "same")
    if require_tokens(asked.target.tokenizer, draft.tokenizer, vocabulary) is None and vocabulary == "shared":
        raise ConfigError(f"the draft {source!r} has the target's tokens: it needs no other vocabulary")
    at_once, _ = parallel_draft(draft, options.get("parallel_tokens"))
    size = draft.size()
    assert size is not None
    return asked.found(forward_bytes=int(size.bytes_read(1)), num_layers=size.num_layers, one_pass=at_once > 1)


def of_cascade(asked: Asked) -> AvailableMethod:
    """A cascade, whose first drafter is the model. Raises as ``of_draft``, and ConfigError for a PARD model."""
    found, options = of_draft(asked), asked.method.options
    if found.one_pass:
        raise ConfigError(f"the draft {asked.source!r} is a PARD model, which takes no guesses")
    return replace(found, guesses=(options["lengths"][0], options["drafters"][0]["kind"]))


def of_states(asked: Asked) -> AvailableMethod:
    """A head that reads the target's hidden states. Raises ConfigError for one that does not fit it."""
    kind, source, target = asked.method.drafting.kind, asked.source, asked.target
    if asked.method.own_files and source is None and not mtp_layers(target):
        none = "comes without MTP modules" if target.has_weights else "has no weights here, and so no MTP modules"
        raise ConfigError(f"the target {target.path!r} {none}: --head {kind}=DIRECTORY names others")
    head = open_head(kind, source, target)
    return asked.found(
        forward_bytes=asked.bytes_of(head.num_read),
        one_pass=head.one_pass,
        most_tokens=head.most_tokens or MAX_DRAFT_TOKENS,
        state_bytes=STATE_BYTES * head.state_size if asked.method.place is Place.POOL else 0,
    )
