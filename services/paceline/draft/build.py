"""From configuration to a running draft engine; called in the process or thread that will own it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.grammar import Grammars
from paceline.checkpoint.grammar_work import MaskThread
from paceline.checkpoint.pard import parallel_draft
from paceline.checkpoint.tokenizer import load_tokenizer
from paceline.checkpoint.vocabulary import require_tokens
from paceline.config import DraftSetup
from paceline.core import native_tree, rows
from paceline.draft.engine import DraftEngine
from paceline.draft.report import describe
from paceline.drafters import calibration, parts
from paceline.drafters.building import Building, Built
from paceline.drafters.cascade import VerticalDrafter
from paceline.drafters.heads.load import open_configured
from paceline.drafters.heads.remote import RemoteHead
from paceline.drafters.model import ModelDrafter
from paceline.drafters.parallel import ParallelDrafter
from paceline.drafters.protocol import Drafter
from paceline.drafters.translation import Translation
from paceline.errors import ConfigError, ResourceExhaustedError
from paceline.messages import Nodes, SessionFailed
from paceline.model.compiled.background import Compilation, CompileJob
from paceline.model.compiled.buckets import Limits
from paceline.model.compiled.graphs import record_steps
from paceline.model.device import occupy, resolve
from paceline.model.kv_cache import KVCache
from paceline.model.loading import LoadedModel, load_model
from paceline.model.parallel.collectives import Collectives
from paceline.model.parallel.runner import Follower, ranked
from paceline.model.runner import ModelRunner
from paceline.model.step_plan import SequenceStep
from paceline.preflight.device import begins_eagerly, require_draft, require_head
from paceline.preflight.host_memory import MEASURED_LEAVES, draft_branches, draft_pages
from paceline.types import PAGE_SIZE, Rendezvous, pages_for

_WIDTHS = (4, 6, 8, 12, 16, 24, MEASURED_LEAVES)
_AFFORDABLE = 1.25
_TIMED_FORWARDS = 5
log = logging.getLogger(__name__)
stages = logging.getLogger("paceline.startup")

Emit = Callable[[Sequence[Nodes | SessionFailed]], None]


def affordable_width(runner: ModelRunner) -> int:
    """Measures the largest number of tree nodes whose forward takes at most 1.25 times as long as a forward of one
    node.

    A forward of few tokens waits for the weights, so several tokens cost as much as one. Arithmetic takes over at four
    to eight tokens on plain AVX512, and later with AMX tiles or on GPUs. The measurement also warms the draft up.

    Raises:
        ResourceExhaustedError: no page is free, or the linear layers have too few rows.
    """
    has_branches = runner.cache.linear is not None
    runner.cache.promise(affordable_width, MEASURED_LEAVES)
    pages = runner.cache.allocate(max(1, min(MEASURED_LEAVES, runner.cache.num_available)) if has_branches else 1)
    widths = [n for n in _WIDTHS if n <= len(pages) or not has_branches]

    def steps(num_tokens: int) -> list[SequenceStep]:
        """As a draft runs them: a tree, or branches."""
        if has_branches:
            return [SequenceStep([0], range(1), range(1), [page], 1, committed=0) for page in pages[:num_tokens]]
        span, visible = range(num_tokens), torch.zeros(num_tokens, dtype=torch.bool)
        own = [[*range(row + 1)] for row in span]
        return [SequenceStep([0] * num_tokens, span, span, pages, num_tokens, visible, own_rows=own)]

    def seconds(num_tokens: int) -> float:
        times = []
        for _ in range(_TIMED_FORWARDS):
            started = time.perf_counter()
            runner.forward(steps(num_tokens)).sum().item()
            times.append(time.perf_counter() - started)
        return min(times)

    try:
        seconds(1)
        limit = _AFFORDABLE * seconds(1)
        width = max((n for n in widths if seconds(n) <= limit), default=_WIDTHS[0])
    finally:
        runner.cache.release(pages)
    log.info("draft: %d tree nodes per forward cost at most %.2f times one", width, _AFFORDABLE)
    return width


def build_draft_engine(
    setup: DraftSetup,
    emit: Emit,
    rendezvous: Rendezvous | None = None,
) -> DraftEngine:
    """Loads the drafter that the setup describes.

    ``rendezvous``: where the other ranks of a draft model come; this is the first.

    Raises:
        ConfigError: the draft model cannot be loaded or run, or the device has no room for it.
        EngineError: another rank has failed.
    """
    rows.prepare()
    native_tree.prepare()
    parts.prepare()
    calibration.prepare()
    target = Checkpoint.open(setup.target_source, setup.trusts_target)
    with contextlib.nullcontext() if rendezvous is None else _ranked(setup, rendezvous) as group:
        built = Building(setup, target, group).build()
        return _engine(setup, emit, target, built)


def _ranked(setup: DraftSetup, rendezvous: Rendezvous) -> AbstractContextManager[Collectives | None]:
    return ranked(*setup.model, rendezvous, setup.target_gpus)


def build_draft_follower(setup: DraftSetup, rendezvous: Rendezvous) -> Follower:
    """Builds another rank of a draft model. Raises as ``build_draft_engine``."""
    with _ranked(setup, rendezvous) as group:
        _, runner, _ = _runner(setup, _checkpoint(setup), group)
        return Follower(runner)


def _checkpoint(setup: DraftSetup) -> Checkpoint:
    source, options = setup.model
    return Checkpoint.open(source, options.trust_remote_code)


def _runner(
    setup: DraftSetup, checkpoint: Checkpoint, group: Collectives | None
) -> tuple[LoadedModel, ModelRunner, int]:
    """The model, a runner with all of its KV pages, and the longest context; equal on every rank."""
    options = setup.model[1]
    placement = resolve(options, occupy(options, setup.target_gpus) if group is None else group.device)
    require_draft(setup, checkpoint, placement, group)
    later = begins_eagerly(options, checkpoint, placement)
    model = load_model(checkpoint, options, group, placement, later=later, max_model_len=setup.max_model_len)
    max_len = min(setup.max_model_len or model.max_len, model.max_len)
    branches = draft_branches(setup.options, linear=bool(model.linear))
    pages = draft_pages(setup, max_len, branches)
    runner = model.runner(pages, promised=False, max_sessions=setup.num_sessions, branches=branches)
    return model, runner, max_len


def build_head(building: Building) -> Built:
    """A head that reads the target's hidden states, with pages for its own keys and values.

    Raises:
        ConfigError: its checkpoint, or the target's, cannot be read, or they do not fit together or the device.
    """
    setup, options, target = building.setup, building.options, building.target
    torch.set_num_threads(1)
    placement = resolve(options, occupy(options, setup.target_gpus))
    plan = open_configured(options.head, target)
    max_len = building.max_context_len
    require_head(setup, target, placement)
    stages.info("loading the head")
    head = plan.load(
        placement.dtype,
        placement.device,
        max_leaves=options.tree_step_tokens or MEASURED_LEAVES,
        num_candidates=options.draft_top_m,
        fused=True,
    )
    cache = KVCache(plan.layers, draft_pages(setup, max_len), placement.dtype, placement.device)
    max_context_len = min(max_len, cache.num_pages * PAGE_SIZE)
    drafter = RemoteHead(
        head, cache, width=plan.state_size, max_prefill_tokens=setup.max_step_tokens, max_len=max_context_len
    )
    ahead = None if options.ahead == "auto" else options.ahead
    return Built(drafter, max_context_len, f"{options.head} by the target's states", ahead=ahead)


def build_cascade(building: Building) -> Built:
    """A cascade, which holds what all of its drafters hold. Built from the last one on."""
    setup, made = building.setup, list[Built]()
    for part, length in zip(reversed(setup.parts), (0, *reversed(building.options.all_lengths)), strict=True):
        each, guesser = replace(building, setup=part), made[-1] if made else None
        made.append(each.build() if part.source is None else build_model(each, guesser, length, is_part=True))
    max_context_len = min(each.max_context_len for each in made)
    first = made[-1]
    log.info("draft: a vertical cascade of %s", ", ".join(each.drafter.kind for each in reversed(made)))
    return Built(first.drafter, max_context_len, f"vertical cascade of {first.description}", first.runner)


def build_model(
    building: Building, guesser: Built | None = None, num_guesses: int = 0, *, is_part: bool = False
) -> Built:
    """A draft model. ``guesser``: who guesses tokens for each of its forwards; ``is_part``: of a cascade.

    Raises:
        ConfigError: see ``build_draft_engine``.
    """
    setup, target = building.setup, building.target
    source, options = setup.model
    checkpoint = _checkpoint(setup)
    model, runner, max_len = _runner(setup, checkpoint, building.group)
    max_context_len = min(max_len, runner.cache.num_pages * PAGE_SIZE)
    tokens_per_leaf, pard_token = parallel_draft(checkpoint, options.parallel_tokens)
    if guesser is not None:
        if tokens_per_leaf > 1:
            raise ConfigError(f"{source!r} is a PARD model, which takes no guesses: set its parallel_tokens to 1")
        tokens_per_leaf = num_guesses + 1
    most = max(options.tree_step_tokens or _WIDTHS[-1], tokens_per_leaf)
    max_pages = min(pages_for(max_context_len + options.tree_budget) + 1, runner.cache.num_pages)
    has_branches = runner.cache.linear is not None
    most_rows = most if has_branches else min(most, setup.num_sessions)
    limits = Limits(most_rows, most, max_pages, is_tree=not has_branches)
    record_steps(runner, limits, model.max_len, options.cuda_graphs)
    translation, description = _translation(setup, target, runner.vocab_size, is_part=is_part), "draft model"
    if translation is not None:
        description += f" with {translation.num_shared} of the target's {translation.vocab_size} tokens"
    stages.info("timing forwards of several tokens")
    sizes: dict[str, Any] = {
        "max_leaves": max(1, (options.tree_step_tokens or affordable_width(runner)) // tokens_per_leaf),
        "max_prefill_tokens": setup.max_step_tokens,
        "top_m": options.draft_top_m,
        "translation": translation,
        "max_len": max_context_len,
    }
    drafter: Drafter
    if guesser is not None:
        drafter = VerticalDrafter(runner, guesser=guesser.drafter, num_guesses=num_guesses, **sizes)
        description += f" ({num_guesses} guesses a leaf from {guesser.description})"
    elif tokens_per_leaf > 1:
        log.info("draft: %r predicts %d tokens per forward", source, tokens_per_leaf)
        drafter = ParallelDrafter(runner, pard_token=pard_token, tokens_per_leaf=tokens_per_leaf, **sizes)
        description = f"PARD {description}, {tokens_per_leaf} tokens at once"
    else:
        drafter = ModelDrafter(runner, **sizes)
    if model.load_compiled is not None:

        def measure_again() -> None:
            if options.tree_step_tokens is None:
                with contextlib.suppress(ResourceExhaustedError):  # no page is free: the number stays
                    drafter.max_leaves = max(1, affordable_width(runner) // tokens_per_leaf)

        stages.info("serving eagerly, and compiling in the background")
        job = CompileJob.of(source, options, max_model_len=setup.max_model_len)
        runner.follow(Compilation(job, model.load_compiled), measure_again)
    return Built(drafter, max_context_len, description, runner)


def _translation(setup: DraftSetup, target: Checkpoint, draft_vocab_size: int, *, is_part: bool) -> Translation | None:
    """Between the tokens of both models; None if they are the same. Raises ConfigError if they share too little.

    ``is_part``: of a cascade.
    """
    source, options = setup.model
    if options.vocabulary == "same" and not is_part:
        return None  # it was checked before
    target_source, draft_source = setup.tokenizers or (setup.target_source, source)
    target_tokenizer = load_tokenizer(target_source, setup.trusts_target)
    draft_tokenizer = load_tokenizer(draft_source, options.trust_remote_code)
    shared = require_tokens(target_tokenizer, draft_tokenizer, options.vocabulary)
    if shared is None:
        return None
    log.info("draft: the vocabularies share %s", shared.overlap)
    return Translation(shared, target.vocab_size, draft_vocab_size, *draft_tokenizer.eos_token_ids[:1])


def _engine(setup: DraftSetup, emit: Emit, target: Checkpoint, built: Built) -> DraftEngine:
    grammars = Grammars.of(target, target.vocab_size, MaskThread()) if setup.runs_model else None
    if grammars is not None:
        grammars.try_load()
    return DraftEngine(
        built.drafter,
        emit,
        vocab_size=target.vocab_size,
        tree_budget=setup.options.tree_budget,
        fan_out=setup.options.fan_out,
        min_path_prob=setup.options.min_path_prob,
        max_context_len=built.max_context_len,
        grammars=grammars,
        description=built.description,
        describe=describe,
        ahead=built.ahead,
        runner=built.runner,
    )
