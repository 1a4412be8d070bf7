"""Which methods can draft for a target with the checkpoints that are at hand, and what one forward of each reads.

Reads configurations and headers of weight files; loads nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.pard import parallel_draft
from paceline.checkpoint.vocabulary import require_tokens
from paceline.config import HeadOptions, LookaheadOptions
from paceline.drafters.catalogue import METHODS, Method
from paceline.drafters.heads.early_exit import open_exit
from paceline.drafters.heads.load import mtp_layers, open_head
from paceline.drafters.heads.streaming import open_streams
from paceline.errors import ConfigError, PacelineError
from paceline.messages import STATE_BYTES
from paceline.types import MAX_DRAFT_TOKENS, Mode

_OF_DRAFTS = ("model", "draft_model", "cascade")
"""Kinds that read the checkpoint of a draft model."""


@dataclass(frozen=True, slots=True)
class AtHand:
    """A method and what it takes, or why it cannot be used."""

    method: Method
    model: str | None = None
    """Checkpoint of the method."""
    refusal: str = ""
    """One sentence; empty: it can be used."""
    forward_bytes: int = 0
    """Bytes of weights that one of its forwards reads; 0: it has none."""
    one_pass: bool = False
    """One forward makes all tokens of a proposal; else one forward makes one."""
    most_tokens: int = MAX_DRAFT_TOKENS
    """Tokens that it can draft in a row."""
    state_bytes: int = 0
    """Bytes that the target sends for every token, of a head in the draft pool."""


def methods_at_hand(
    target: Checkpoint, draft: str | None, heads: Sequence[HeadOptions], plugin: str | None = None
) -> list[AtHand]:
    """Every method of the catalogue that draws no comparison only, with its refusal where there is one.

    Args:
        target: the target, on this machine.
        draft: directory or id of a smaller model; None: there is none.
        heads: heads that are at hand, at most one of a method counts.
        plugin: name of a user's own drafter of which figures are known; None: there is none.
    """
    found = []
    for method in METHODS:
        if method.mode is Mode.SEQUENTIAL or not method.kind:  # for comparisons; always on
            continue
        given = next((head for head in heads if _is_of(method, head)), None)
        source = None if given is None else given.source
        if given is None and method.kind in _OF_DRAFTS:
            source = draft
        try:
            if method.kind == "plugin":
                found.append(_plugin(method, plugin))
            else:
                found.append(_examined(method, target, source, given))
        except PacelineError as error:
            found.append(AtHand(method, source, " ".join(str(error).split())))
    return found


def _plugin(method: Method, name: str | None) -> AtHand:
    """Raises ConfigError for one that is not named."""
    if name is None:
        raise ConfigError(
            "what a plugin brings is known to its author alone: give what you have measured, --plugin NAME=A,MS"
        )
    return AtHand(replace(method, options={**method.options, "drafter": name}))


def head_kind(method: Method) -> str:
    """The kind of head that a method is, wherever it runs; of others their own kind."""
    return str(method.options["method"]) if method.kind == "head" else method.kind


def _is_of(method: Method, head: HeadOptions) -> bool:
    """True if a head is of the method; exits with weights of their own are a different method than exits without."""
    return head.method == head_kind(method) and (
        method.kind != "early_exit" or method.needs_model == (head.model is not None)
    )


def _examined(method: Method, target: Checkpoint, source: str | None, given: HeadOptions | None) -> AtHand:
    """Raises ConfigError or TokenizerMismatchError if the method cannot be used."""
    size, kind = target.size(), head_kind(method)
    assert size is not None
    if method.needs_model and source is None:
        flag = "--draft DIRECTORY" if method.kind in _OF_DRAFTS else f"--head {kind}=DIRECTORY"
        raise ConfigError(f"no checkpoint of it is at hand: name one with {flag}")
    if method.kind == "early_exit":
        if given is None or (given.boundaries is None and source is None):
            raise ConfigError("no layer is named at which the target was trained to exit: --head early_exit=LAYER")
        plan = open_exit(target, given.boundaries[0] if given.boundaries else None, source)
        own = 0 if plan.adapter is None else plan.adapter.num_parameters * size.item_bytes
        exits = replace(method, options={**method.options, "boundaries": [plan.boundary]})
        return AtHand(exits, source, forward_bytes=int(plan.boundary / size.num_layers * size.weights_bytes) + own)
    if method.kind == "speculative_streaming":
        assert source is not None
        streams = open_streams(target, source)
        own = streams.head.num_parameters * size.item_bytes
        above = int((1 - streams.boundary / size.num_layers) * size.weights_bytes)
        return AtHand(method, source, "", above + own, one_pass=True, most_tokens=streams.num_streams)
    if method.kind in _OF_DRAFTS:
        assert source is not None
        draft, vocabulary = Checkpoint.open(source), method.options.get("vocabulary", "same")
        if require_tokens(target.tokenizer, draft.tokenizer, vocabulary) is None and vocabulary == "shared":
            raise ConfigError(f"the draft {source!r} has the target's tokens: it needs no other vocabulary")
        at_once, _ = parallel_draft(draft, method.options.get("parallel_tokens"))
        if at_once > 1 and method.kind == "cascade":
            raise ConfigError(f"the draft {source!r} is a PARD model, which takes no guesses")
        drafts = draft.size()
        assert drafts is not None
        return AtHand(method, source, forward_bytes=drafts.weights_bytes, one_pass=at_once > 1)
    if method.kind == "lookahead":
        return AtHand(method, most_tokens=LookaheadOptions(**method.options["lookahead"]).ngram - 1)
    if kind in ("ngram", "suffix"):
        return AtHand(method)
    if kind == "mtp" and source is None and not mtp_layers(target):
        raise ConfigError(f"the target {target.path!r} comes without MTP modules: --head mtp=DIRECTORY names others")
    head = open_head(kind, source, target)
    most = head.most_tokens or MAX_DRAFT_TOKENS
    state_bytes = STATE_BYTES * head.state_size if method.kind == "head" else 0
    return AtHand(method, source, "", head.num_read * size.item_bytes, head.one_pass, most, state_bytes)
