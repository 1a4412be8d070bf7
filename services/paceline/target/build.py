"""From configuration to a running target engine; called in the process or thread that will own it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.grammar import Grammars
from paceline.checkpoint.grammar_work import MaskThread
from paceline.checkpoint.linear import require_runnable
from paceline.checkpoint.size import gib
from paceline.config import TargetOptions, TargetSetup
from paceline.core import cuda, native_tree
from paceline.errors import ConfigError
from paceline.messages import FromTarget
from paceline.model import layout
from paceline.model.compiled.background import Compilation, CompileJob, SelfTest
from paceline.model.compiled.buckets import Limits
from paceline.model.compiled.graphs import record_steps, recordings_bytes
from paceline.model.device import occupy, resolve
from paceline.model.loading import LoadedModel, load_model
from paceline.model.parallel.collectives import Collectives
from paceline.model.parallel.runner import Follower, lead, ranked
from paceline.model.runner import ModelRunner
from paceline.model.selftest import InvarianceReport, check_invariance
from paceline.preflight.device import begins_eagerly, left_bytes, require_target
from paceline.preflight.estimate import target_estimate
from paceline.preflight.host_memory import fraction_pages, session_pages, target_pages
from paceline.target.control.report import TargetReport
from paceline.target.cores import TargetCores
from paceline.target.engine import TargetEngine
from paceline.target.heads.mounted import MountedHead
from paceline.target.hints import Hints
from paceline.target.mount import (
    bind_heads,
    features_of,
    load_heads,
    load_hints,
    load_link,
    load_own_mtp,
    open_heads,
    open_link,
    probe_of,
    require_hints,
    with_own_mtp,
)
from paceline.target.origin import origin_of
from paceline.target.states_link import StatesLink
from paceline.types import PAGE_SIZE, Rendezvous

_LEAST_BRANCHES = 16
"""Branches of one step, each a query row of its own, for which steps are recorded where fewer sessions are served."""
log = logging.getLogger(__name__)
stages = logging.getLogger("paceline.startup")


def build_target_engine(
    setup: TargetSetup,
    emit: Callable[[Sequence[FromTarget]], None],
    rendezvous: Rendezvous | None = None,
    *,
    holds_outcomes: bool = False,
) -> TargetEngine:
    """Loads the target, sizes its KV cache and compares the bits of decoding and verification.

    ``rendezvous``: where the target's other ranks come; this is the first. ``holds_outcomes``: see ``TargetEngine``.

    Raises:
        ConfigError: the model cannot be loaded or run, or the settings do not fit it, or the device has no room.
        EngineError: another rank has failed.
    """
    with ranked(setup.source, setup.options, rendezvous) as group:
        checkpoint = _checkpoint(setup)
        model, runner, max_len, heads, link = _runner(setup, checkpoint, group)
        hints = load_hints(setup, checkpoint, model)
        return _engine(setup, checkpoint, emit, model, runner, max_len, heads, link, hints, holds_outcomes)


def build_target_follower(setup: TargetSetup, rendezvous: Rendezvous) -> Follower:
    """Builds another rank of a target. Raises as ``build_target_engine``."""
    with ranked(setup.source, setup.options, rendezvous) as group:
        _, runner, *_ = _runner(setup, _checkpoint(setup), group)
        return Follower(runner)


def _checkpoint(setup: TargetSetup) -> Checkpoint:
    return Checkpoint.open(setup.source, setup.options.trust_remote_code)


def _runner(
    setup: TargetSetup, checkpoint: Checkpoint, group: Collectives | None
) -> tuple[LoadedModel, ModelRunner, int, list[MountedHead], StatesLink | None]:
    """Returns (model, runner with all of its KV pages, longest context, heads, link to a head in the draft pool); the
    last two on the first rank only."""
    options = setup.options
    torch.set_num_threads(1)  # products that are split among threads are not batch-invariant
    placement = resolve(options, occupy(options) if group is None else group.device)
    require_runnable(
        checkpoint.config,
        checkpoint.quantization,
        checkpoint.path,
        device=placement[0].type,
        quantization=options.quantization,
        state_slots=options.state_slots,
        kv_cache_dtype=options.kv_cache_dtype,
    )
    require_hints(setup, checkpoint, placement)
    require_target(setup, checkpoint, placement, group)
    configured, setup = setup, with_own_mtp(setup, checkpoint, placement, group)
    opened, linked = open_heads(setup, checkpoint), open_link(setup, checkpoint)
    probe = probe_of(opened, checkpoint)
    later = begins_eagerly(options, checkpoint, placement)
    features, callback_boundary = features_of(opened, linked), None if options.hints is None else options.hints.boundary
    model = load_model(
        checkpoint,
        options,
        group,
        placement,
        features,
        probe,
        later=later,
        callback_boundary=callback_boundary,
        max_model_len=options.max_model_len,
    )
    max_len = options.max_model_len or model.max_len
    if max_len > model.max_len:
        raise ConfigError(
            f"max_model_len is {max_len}: the target {setup.source!r} was made for at most {model.max_len}"
        )
    leads = group is None or group.rank == 0
    load = load_heads if setup is configured else load_own_mtp
    heads = load(setup, opened, checkpoint, model, probe) if leads else []
    link = load_link(linked, model) if linked is not None and leads else None
    if options.kv_fraction is None:
        num_pages = target_pages(options, max_len)
    else:
        on_gpu = model.device.type == "cuda"
        # The loaded model's size is that of this rank already.
        estimate = target_estimate(
            setup, model.size, max_len, on_gpu=on_gpu, tensor_parallel_size=1, kernel=model.kernel
        )
        recordings = _recordings_bytes(options, model, max_len)
        free = left_bytes(model.device, group) - estimate.reserved_bytes - recordings
        page_bytes = model.size.page_bytes + sum(head.page_bytes(model) for head in opened)
        page_bytes += 0 if linked is None else PAGE_SIZE * linked.state_size * model.dtype.itemsize
        num_pages = fraction_pages(options.kv_fraction, max_len, page_bytes, free)
        log.info("target: %d KV pages are %g of the free %s", num_pages, options.kv_fraction, gib(free))
        if recordings:
            log.info("recorded steps take %s, by a trial", gib(recordings))
    runner = model.runner(num_pages, max_sessions=options.max_sessions, state_slots=options.state_slots)
    bind_heads(heads, runner.cache)
    if link is not None:
        assert runner.features is not None
        link.bind(runner.cache, runner.features)
    return model, runner, max_len, heads, link


def _recordings_bytes(options: TargetOptions, model: LoadedModel, max_len: int) -> int:
    """Bytes of the device that recordings of the target's steps take; 0 where none are made."""
    if not model.records:
        return 0
    stages.info("recording steps, and measuring the memory that they take")
    limits = _limits(options, session_pages(max_len))

    def record(runner: ModelRunner) -> None:
        lead(runner, lambda runner: record_steps(runner, limits, model.max_len, "auto"))

    new_runner = partial(model.runner, 1, max_sessions=options.max_sessions)
    return recordings_bytes(new_runner, record, partial(left_bytes, model.device, model.group))


def _limits(options: TargetOptions, num_pages: int) -> Limits:
    """Limits of the target's steps over ``num_pages`` of a session at most."""
    max_rows = max(options.max_sessions, _LEAST_BRANCHES if options.tree_verification == "auto" else 1)
    return Limits(max_rows, options.max_step_tokens, num_pages)


def _engine(
    setup: TargetSetup,
    checkpoint: Checkpoint,
    emit: Callable[[Sequence[FromTarget]], None],
    model: LoadedModel,
    runner: ModelRunner,
    max_len: int,
    heads: Sequence[MountedHead],
    link: StatesLink | None,
    hints: Hints | None,
    holds_outcomes: bool,
) -> TargetEngine:
    options = setup.options
    native_tree.prepare()
    layout.usable()  # compiled now, so that no step waits for it
    cuda.prepare(runner.vocab_size, model.dtype, model.device)
    limits = _limits(options, min(session_pages(max_len), runner.cache.num_pages))
    record_steps(runner, limits, model.max_len, options.cuda_graphs)
    report = _compared(setup, runner, max_len)
    compilation = _compilation(setup, model, max_len, tests=report is not None)
    if compilation is not None and report is not None and not report.holds:
        # Plain decoding would not be what verification gives: nothing is served before it can be compiled.
        stages.info("compiling the model for this machine, which takes about a minute the first time")
        compilation.start()
        compilation.wait()
        if (step := compilation.take()) is not None:
            runner = runner.compiled(step)
            report = _compared(setup, runner, max_len)
        compilation = None
    _judge(setup, model, report)
    engine = TargetEngine(
        runner,
        emit,
        max_sessions=options.max_sessions,
        max_step_tokens=options.max_step_tokens,
        max_model_len=max_len,
        adaptive=options.adaptive,
        trees=options.tree_verification == "auto",
        batch_invariant="untested" if report is None else "yes" if report.holds else "no",
        origin=origin_of(checkpoint, model, _numeric_options(options, model)),
        heads=heads,
        link=link,
        hints=hints,
        grammars=_grammars(checkpoint, model),
        compilation=compilation,
        cores=TargetCores.of(options.cpu_threads, setup.shared_cores, model),
        holds_outcomes=holds_outcomes,
        drafted=setup.tree_budget > 0,
        describe=TargetReport(),
    )
    engine.calibrate()
    if compilation is not None:
        stages.info("serving, slower until the model is compiled in the background")
        compilation.start()
    return engine


def _numeric_options(options: TargetOptions, model: LoadedModel) -> tuple[object, ...]:
    """Options that decide bits of logits and that the loaded model does not name. The CPU's kind of steps may change
    while the target serves (``TargetEngine.numerics``)."""
    compiles = options.compile if model.device.type == "cuda" else None
    return options.attention, options.kv_cache_dtype, options.tensor_parallel_size, compiles


def _compilation(setup: TargetSetup, model: LoadedModel, max_len: int, *, tests: bool) -> Compilation | None:
    """The worker that compiles the model while it serves eagerly, not started yet; None: it runs as it is to run."""
    if model.load_compiled is None:
        return None
    test = SelfTest(max_len, setup.options.max_step_tokens) if tests else None
    callback_boundary = None if setup.options.hints is None else setup.options.hints.boundary
    max_model_len = setup.options.max_model_len
    job = CompileJob.of(setup.source, setup.options, model.features, test, callback_boundary, max_model_len)
    return Compilation(job, model.load_compiled)


def _grammars(checkpoint: Checkpoint, model: LoadedModel) -> Grammars:
    """The compiler of structured outputs for the model's vocabulary, with the tokenizer read."""
    grammars = Grammars.of(checkpoint, model.vocab_size, MaskThread())
    grammars.try_load()
    return grammars


def _compared(setup: TargetSetup, runner: ModelRunner, max_len: int) -> InvarianceReport | None:
    """Compares the bits of decoding and verification, and logs the result; None: the test is off."""
    options, path = setup.options, setup.source
    if options.batch_invariant == "off":
        return None
    stages.info("checking that verification gives the same bits as plain decoding")
    started = time.perf_counter()
    report = check_invariance(runner, max_len, options.max_step_tokens)
    level = logging.INFO if report.holds and not report.num_states_different else logging.WARNING
    log.log(level, "target %s: %s, in %.1f s", path, report, time.perf_counter() - started)
    return report


def _judge(setup: TargetSetup, model: LoadedModel, report: InvarianceReport | None) -> None:
    """Refuses a target by what its self-test has found.

    Raises:
        ConfigError: the bits differ where they must not, or were not to be compared where they must be.
    """
    options, path = setup.options, setup.source
    speculates_quantized = setup.speculates and model.quantization is not None
    if report is None and speculates_quantized:
        raise ConfigError(
            f"batch_invariant is 'off': the target {path!r} is quantized by {model.quantization!r} and has a draft "
            "or a head, which needs the test, so it must be 'auto' or 'require'"
        )
    if report is None:
        log.warning("target %s: not tested for batch invariance (batch_invariant is 'off')", path)
    reason = model.batch_dependence if report is None or report.holds else f"it is {report}"
    if speculates_quantized and (reason := model.batch_dependence or reason):
        raise ConfigError(
            f"the target {path!r} is quantized by {model.quantization!r}, and speculation could change its output, for "
            f"{reason}: set draft_config to null and leave heads out for plain decoding, or use another checkpoint"
        )
    if options.batch_invariant == "require" and reason:
        raise ConfigError(
            f"batch_invariant is 'require', and the target {path!r} does not hold it here, for {reason}: "
            "set it to 'auto' to start all the same, or use another checkpoint, dtype or machine"
        )
