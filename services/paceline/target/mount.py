"""From configuration to the heads of a target: loaded in its process, on its device, by its first rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.tokenizer import require_same_tokens
from paceline.config import HeadOptions, HintOptions, LookaheadOptions, SuffixMatching, TargetSetup
from paceline.config.methods.entry import function
from paceline.core.processors import SamplerState
from paceline.drafters.colocated import DraftModelHead
from paceline.drafters.corpus import suffix_drafter
from paceline.drafters.heads.early_exit import ExitPlan, open_exit
from paceline.drafters.heads.load import HeadPlan, mtp_layers, open_configured, open_head
from paceline.drafters.heads.module import HeadModule
from paceline.drafters.heads.partial_model import Continued, borrowed_or_read, layers_from, require_borrowable
from paceline.drafters.heads.probe import HeadProbe
from paceline.drafters.heads.reading import TargetFacts
from paceline.drafters.heads.streaming import load_streams, open_streams
from paceline.drafters.lookahead import LookaheadHead
from paceline.drafters.protocol import Features, Head, Leaf
from paceline.errors import ConfigError
from paceline.model.compiled.background import Compilation, CompileJob
from paceline.model.compiled.buckets import Limits
from paceline.model.compiled.graphs import record_steps
from paceline.model.device import Placement
from paceline.model.kv_cache import KVCache
from paceline.model.loading import LoadedModel, load_model
from paceline.model.parallel.collectives import Collectives
from paceline.model.step import Step
from paceline.preflight.device import begins_eagerly, require_draft, require_target
from paceline.preflight.heads import TREE_BUDGET, draft_setup_of, require_hint_boundary
from paceline.preflight.host_memory import draft_branches, draft_pages
from paceline.target.heads.grower import MOST_LEAVES
from paceline.target.heads.mounted import MountedHead, union
from paceline.target.hints import Hints
from paceline.target.states_link import StatesLink
from paceline.types import PAGE_SIZE, SamplingParams, pages_for

log = logging.getLogger(__name__)

_TOP_M = 64
_WARM_UP = "warm-up"
_NO_MTP = "the target %r comes with %d MTP modules, which do not draft: %s"


@dataclass(frozen=True, slots=True)
class OpenedHead:
    """A head of the configuration whose checkpoint fits the target."""

    options: HeadOptions
    plan: HeadPlan | ExitPlan | None
    """None: it reads no states (a draft model, lookahead, suffixes)."""

    @property
    def features(self) -> Features | None:
        """The states that it reads."""
        return None if self.plan is None else self.plan.features

    def page_bytes(self, model: LoadedModel) -> int:
        """Bytes that it adds to a KV page of the target: its own layers, and one state."""
        if self.plan is None:
            return 0
        kv_bytes = PAGE_SIZE * sum(layer.kv_bytes(model.dtype) for layer in self.plan.layers)
        width = len(self.plan.features.boundaries) * model.size.hidden_size
        return kv_bytes + (width * model.dtype.itemsize if self.plan.features.every_position else 0)


@dataclass(frozen=True, slots=True)
class Mounting:
    """Everything that a head is loaded from."""

    setup: TargetSetup
    head: OpenedHead
    target: Checkpoint
    model: LoadedModel
    """The target, which is loaded already."""
    probe: HeadProbe | None
    """Texts that the target has written; None: heads are not tested."""

    @property
    def options(self) -> HeadOptions:
        """The head's part of the configuration."""
        return self.head.options

    @property
    def max_sessions(self) -> int:
        """Sessions of the target at once."""
        return self.setup.options.max_sessions

    def mounted(self, drafter: Head, **more: Any) -> MountedHead:
        """The head by its name; ``more``: of ``MountedHead``."""
        return MountedHead(str(self.options), drafter, num_tokens=self.options.num_speculative_tokens, **more)


def open_heads(setup: TargetSetup, target: Checkpoint) -> list[OpenedHead]:
    """Examines the checkpoints of the heads, without reading a weight.

    Raises:
        ConfigError: one of them cannot be read, or does not fit the target.
    """
    opened = []
    for options in setup.options.heads:
        plan = function(options.entry.open)(options, target) if options.entry.open else None
        opened.append(OpenedHead(options, plan))
    return opened


def open_exit_head(options: HeadOptions, target: Checkpoint) -> ExitPlan:
    """Examines an early exit. Raises ConfigError."""
    return open_exit(target, options.boundaries[0] if options.boundaries else None, options.source)


def open_stream_head(options: HeadOptions, target: Checkpoint) -> HeadPlan:
    """Examines a head of streams. Raises ConfigError."""
    return open_streams(target, str(options.source), options.num_speculative_tokens)


def with_own_mtp(
    setup: TargetSetup, target: Checkpoint, placement: Placement, group: Collectives | None = None
) -> TargetSetup:
    """The setup with the MTP modules of the target's own files as its head, where it has no other (``mtp_modules``).

    It is as it was, and the log says why, where they cannot be run or there is no room for them. ``group``: the
    target's ranks, all of which must ask.
    """
    options = setup.options
    if options.mtp_modules == "off" or options.heads or setup.link is not None or not (count := mtp_layers(target)):
        return setup
    found = replace(setup, options=options.model_copy(update={"heads": [HeadOptions(method="mtp")]}))
    try:
        if not options.adaptive:
            raise ConfigError("adaptive is false, so they would be asked even where they do not pay")
        if options.quantization is not None:
            raise ConfigError(f"quantization is {options.quantization!r}: MTP layers are run as plain weights only")
        probe_of(open_heads(found, target), target)
        require_target(found, target, placement, group)
    except ConfigError as error:
        log.warning(_NO_MTP, target.path, count, error)
        return setup
    log.info("the target %r comes with %d MTP modules, which draft unless mtp_modules is 'off'", target.path, count)
    return found


def open_link(setup: TargetSetup, target: Checkpoint) -> HeadPlan | None:
    """Examines the checkpoint of the head in the draft pool, without reading a weight; None: there is none.

    Raises:
        ConfigError: it cannot be read, or does not fit the target.
    """
    return None if setup.link is None else open_configured(setup.link.head, target)


def features_of(opened: Sequence[OpenedHead], linked: HeadPlan | None = None) -> Features | None:
    """The states of the target that its heads read, all together, and one in the draft pool; None: none."""
    return union([*(head.features for head in opened), None if linked is None else linked.features])


def load_link(linked: HeadPlan, model: LoadedModel) -> StatesLink:
    """The sender of a target's states to its drafts; ``StatesLink.bind`` follows."""
    fuse = linked.load_fuse(model.dtype, model.device)
    log.info("target: states for the draft's %s head have %d numbers", linked.method, linked.state_size)
    return StatesLink(fuse, linked.features, linked.state_size)


def require_hints(setup: TargetSetup, target: Checkpoint, placement: Placement) -> None:
    """Checks that a target can send hints, if they are configured, without reading a weight.

    Raises:
        ConfigError: the boundary is outside the target or not the exit head's, the exit head cannot be read, the
            target's steps are replayed as CUDA graphs, or it is quantized.
    """
    if (hints := setup.options.hints) is None:
        return
    num_layers = TargetFacts.of(target).num_layers
    require_hint_boundary(setup, num_layers)
    if placement.device.type == "cuda" and setup.options.cuda_graphs is not False:
        raise ConfigError("hints need steps that call back, and CUDA graphs do not: set cuda_graphs to false")
    require_borrowable(f"hints.boundary is {hints.boundary}", target, partial(layers_from, num_layers), ())
    _hint_adapter(hints, target)


def _hint_adapter(options: HintOptions, target: Checkpoint) -> HeadPlan | None:
    """The exit head of hints, of which no weight has been read; None: there is none. Raises ConfigError."""
    if (head := options.head) is None:
        return None
    return open_head(head.method, head.source, target, boundaries=(options.boundary,))


def load_hints(setup: TargetSetup, target: Checkpoint, model: LoadedModel) -> Hints | None:
    """Returns the sender of hints, by the exit head, if there is one, then the target's final norm and LM head; None:
    hints are off.

    Raises:
        ConfigError: the files of the target or of the exit head cannot be read.
    """
    if (options := setup.options.hints) is None:
        return None
    part = partial(layers_from, model.size.num_layers)
    rest = Continued(borrowed_or_read(part, _lasting(model), target, model.dtype, model.device))
    log.info("target: hints are the %d likeliest tokens at boundary %d", options.top, options.boundary)
    if (adapter := _hint_adapter(options, target)) is None:
        return Hints(options, rest.logits)
    return Hints(options, behind(adapter.load_module(model.dtype, model.device), rest.logits))


def behind(adapter: HeadModule, finish: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Returns a function from states to logits: the exit head, then ``finish``."""
    adapter = adapter.eval().requires_grad_(False)
    return lambda states: finish(adapter(states))


def probe_of(opened: Sequence[OpenedHead], target: Checkpoint) -> HeadProbe | None:
    """Texts that the target is to write while it is loaded, so that ``load_heads`` can ask its heads; None: none.

    Raises:
        ConfigError: a file of texts cannot be read, or the target has no tokenizer.
    """
    asked = [
        (head.features.boundaries, head.options.probe_file)
        for head in opened
        if head.features and head.options.probe and head.options.entry.probed
    ]
    return HeadProbe(asked, TargetFacts.of(target).num_layers, target.tokenizer.encode) if asked else None


def load_heads(
    setup: TargetSetup, opened: Sequence[OpenedHead], target: Checkpoint, model: LoadedModel, probe: HeadProbe | None
) -> list[MountedHead]:
    """Loads the heads of a target, which is loaded already and has written for ``probe``; ``bind_heads`` follows.

    Raises:
        ConfigError: one cannot be loaded, or the device has no room for it, or it predicts nothing of the target.
    """
    heads = []
    for head in opened:
        mounted = function(head.options.entry.load)(Mounting(setup, head, target, model, probe))
        heads.append(mounted)
        log.info("target: head %s is loaded", head.options)
    return heads


def load_own_mtp(
    setup: TargetSetup, opened: Sequence[OpenedHead], target: Checkpoint, model: LoadedModel, probe: HeadProbe | None
) -> list[MountedHead]:
    """``load_heads`` for a setup of ``with_own_mtp``; none where that refuses, with the reason in the log."""
    try:
        return load_heads(setup, opened, target, model, probe)
    except ConfigError as error:
        log.warning(_NO_MTP, target.path, mtp_layers(target), error)
        return []


def bind_heads(heads: Sequence[MountedHead], cache: KVCache) -> None:
    """Binds the heads to their layers on the target's pages."""
    for mounted in heads:
        mounted.head.bind(cache, cache.add_layers(mounted.head.layers))


def load_lookahead(mounting: Mounting) -> MountedHead:
    """Lookahead decoding, which reads no checkpoint."""
    sizes = mounting.options.lookahead or LookaheadOptions()
    return mounting.mounted(LookaheadHead(sizes.window, sizes.ngram, sizes.guesses, max_leaves=mounting.max_sessions))


def load_suffix(mounting: Mounting) -> MountedHead:
    """Suffix decoding. Raises ConfigError: its corpus cannot be read."""
    options = mounting.options.suffix or SuffixMatching()
    return mounting.mounted(suffix_drafter(options, mounting.target, mounting.max_sessions))


def load_target_layers(mounting: Mounting) -> MountedHead:
    """A head of layers of the target: an early exit, or streams. Raises ConfigError."""
    plan, model = mounting.head.plan, mounting.model
    assert plan is not None
    load = plan.load if isinstance(plan, ExitPlan) else partial(load_streams, plan)
    own = load(model.dtype, model.device, target=_lasting(model), max_leaves=mounting.max_sessions)
    return mounting.mounted(own)


def load_states(mounting: Mounting) -> MountedHead:
    """A head that reads states. It borrows the target's tables if these are whole modules of this process.

    Raises:
        ConfigError: it cannot be loaded, or the probe finds that it predicts nothing.
    """
    plan, model, options = mounting.head.plan, mounting.model, mounting.options
    assert isinstance(plan, HeadPlan)
    embed = lm_head = None
    if (lasting := _lasting(model)) is not None and model.share is None:
        embed, lm_head = lasting.get_input_embeddings(), lasting.get_output_embeddings()
    max_leaves = MOST_LEAVES * mounting.max_sessions
    drafter = plan.load(model.dtype, model.device, embed=embed, lm_head=lm_head, max_leaves=max_leaves)
    warning = None
    if mounting.probe is not None and options.probe:
        warning = mounting.probe.examine(str(options), drafter, options.probe_file)
    return mounting.mounted(drafter, warning=warning)


def _lasting(model: LoadedModel) -> Any:
    """The module of an eager target, whose weights others can share; None: they are quantized, or it is compiled, or
    about to be."""
    plain = isinstance(model.step, Step) and model.load_compiled is None and model.quantization is None
    return cast(Step, model.step).model if plain else None


def _warm_up(drafter: DraftModelHead, vocab_size: int, device: torch.device) -> None:
    """Drafts a token, and one after it, greedily and at temperature 1. Otherwise compiling and allocating in first
    calls would count as the head's time, so that it is paused for long, and would delay a request."""
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature)
        drafter.open(_WARM_UP, (0, 0), SamplerState(params, 0, (0, 0), vocab_size=vocab_size, device=str(device)))
        drafter.prefill()
        for leaf in (Leaf(_WARM_UP, 0, (), ()), Leaf(_WARM_UP, 1, (1,), (0,))):
            drafter.expand([leaf])
        drafter.close(_WARM_UP)


def load_draft_model(mounting: Mounting) -> MountedHead:
    """A draft model in the target's process, on its device. Raises ConfigError."""
    setup, head, target = mounting.setup, mounting.options, mounting.target
    placement = Placement(mounting.model.device, mounting.model.dtype)
    draft_setup = draft_setup_of(setup, head)
    source, options = draft_setup.model
    checkpoint = Checkpoint.open(source, options.trust_remote_code)
    require_same_tokens(target.tokenizer, checkpoint.tokenizer)
    require_draft(draft_setup, checkpoint, placement)
    later, max_model_len = begins_eagerly(options, checkpoint, placement), setup.options.max_model_len
    model = load_model(checkpoint, options, None, placement, later=later, max_model_len=max_model_len)
    max_len = min(max_model_len or model.max_len, model.max_len)
    branches = draft_branches(draft_setup.options, linear=bool(model.linear))
    pages = draft_pages(draft_setup, max_len, branches)
    runner = model.runner(pages, promised=False, max_sessions=draft_setup.num_sessions, branches=branches)
    num_sessions, max_leaves = setup.options.max_sessions, MOST_LEAVES * setup.options.max_sessions
    max_pages = min(pages_for(max_len + TREE_BUDGET) + 1, runner.cache.num_pages)
    limits = Limits(max_leaves if branches else num_sessions, max_leaves, max_pages, is_tree=not branches)
    record_steps(runner, limits, model.max_len, options.cuda_graphs)
    drafter = DraftModelHead(
        runner, max_leaves=max_leaves, max_prefill_tokens=setup.options.max_step_tokens, top_m=_TOP_M
    )
    _warm_up(drafter, runner.vocab_size, placement.device)
    if model.load_compiled is not None:
        job = CompileJob.of(source, options, max_model_len=max_model_len)
        runner.follow(Compilation(job, model.load_compiled))
    longest = min(max_len, runner.cache.num_pages * PAGE_SIZE)
    return mounting.mounted(drafter, max_len=longest)
