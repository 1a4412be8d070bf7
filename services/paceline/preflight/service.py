"""The check of a whole service before anything is loaded. Reads files and ports; imports no Ray, and torch only where a
model is built without its weights: by ``paceline check``, and for several ranks.

Called by ``paceline check``, which shows the Examination, and by ``paceline serve``, which refuses to start.

An *error* is certain: memory is a lower bound, so a refused service would die by its largest step at the latest. A
*warning* may be all right on another machine or with other requests.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from paceline.checkpoint.files import Checkpoint, embedded_paths
from paceline.checkpoint.folder import local_folder
from paceline.checkpoint.hub import absent, why_not_fetched
from paceline.checkpoint.kv_scales import described
from paceline.checkpoint.linear import require_draft_model, why_not_runnable
from paceline.checkpoint.packing import packing_of, require_weights, why_whole
from paceline.checkpoint.pard import parallel_draft
from paceline.checkpoint.rope import factors_in_use
from paceline.checkpoint.size import ModelSize, gib
from paceline.checkpoint.tokenizer import Tokenizer, load_tokenizer, require_same_tokens
from paceline.checkpoint.vocabulary import require_tokens
from paceline.config import (
    CascadeDraftConfig,
    DraftOptions,
    DraftSetup,
    HeadDraftConfig,
    HeadDraftOptions,
    ModelDraftConfig,
    ModelLoadingConfig,
    ModelOptions,
    ServiceConfig,
    TargetConfig,
    TargetOptions,
    TargetSetup,
    visible_gpus,
)
from paceline.config.devices import needs_gpu, slice_among
from paceline.config.methods.entry import function
from paceline.errors import ConfigError
from paceline.preflight.access import check_access, check_exposure
from paceline.preflight.estimate import (
    RAY_BYTES,
    ROUTER_PROCESS_BYTES,
    MemoryEstimate,
    cascade_estimate,
    draft_estimate,
    modelless_estimate,
    target_estimate,
)
from paceline.preflight.findings import Finding, Severity
from paceline.preflight.fit import Room, check_draft, check_target
from paceline.preflight.gpus import num_gpus, torch_has_gpus
from paceline.preflight.heads import heads_size, known_heads_size, remote_size, require_hint_boundary
from paceline.preflight.host_memory import available_bytes, session_pages
from paceline.preflight.ports import check_ports
from paceline.preflight.tracing import check_tracing
from paceline.types import MAX_DRAFT_TOKENS, PAGE_SIZE

log = logging.getLogger(__name__)

_TARGET, _DRAFT = "target_config", "draft_config"
_MUCH = 10
"""Weights that are dequantized are told of from this part of all on."""


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool of replicas as the service starts it."""

    key: str
    """The model's part of the configuration."""
    model_id: str | None
    """None: it runs no model."""
    num_replicas: int
    """Replicas at the start."""
    on_gpu: bool
    estimate: MemoryEstimate | None
    """Memory of a rank of one replica. None: its model is not on this machine, or cannot be used, as a finding says."""
    rotary: str | None = None
    """A clause that names the set of rotary factors of a model with two of them; None: it has one."""
    kv_scales: str | None = None
    """A clause that names the scales of keys and values in FP8; None: they are in the dtype of the model."""

    @property
    def num_processes(self) -> int:
        """Ranks of all replicas."""
        return self.num_replicas * (1 if self.estimate is None else self.estimate.num_ranks)

    @property
    def least_bytes(self) -> int:
        """Lower bound of the memory that all replicas take of this machine."""
        return 0 if self.on_gpu or self.estimate is None else self.num_processes * self.estimate.least_bytes

    @property
    def machine_bytes(self) -> int:
        """Memory that all replicas are expected to take of this machine, without GPU memory."""
        if self.estimate is None:
            return 0
        return self.num_processes * (self.estimate.host_bytes if self.on_gpu else self.estimate.total_bytes)


@dataclass(frozen=True, slots=True)
class Examination:
    """The pools that the service would start, and everything that is wrong with them."""

    findings: tuple[Finding, ...]
    """Errors first."""
    pools: tuple[Pool, ...]
    left_bytes: int | None
    """Free memory of this machine. None: others run the replicas."""
    gpu_bytes: int | None = None
    """Memory of each GPU. None: not known."""

    @property
    def machine_bytes(self) -> int:
        """Memory that the whole service is expected to take of this machine."""
        return _expected_bytes(self.pools)

    @property
    def may_start(self) -> bool:
        """True if nothing is certain to fail."""
        return all(finding.severity is not Severity.ERROR for finding in self.findings)


def require_service(
    config: ServiceConfig, *, memory: bool = True, cores: bool = True, ports: bool = True, surge: bool = False
) -> None:
    """Logs the warnings. Raises ConfigError, one clause for each error, if there are any."""
    findings = check_service(config, memory=memory, cores=cores, ports=ports, surge=surge)
    for finding in findings:
        if finding.severity is Severity.WARNING:
            log.warning("%s", finding.message)
    errors = [finding.message for finding in findings if finding.severity is Severity.ERROR]
    if errors:
        raise ConfigError("; ".join(errors))


def check_service(
    config: ServiceConfig, *, memory: bool = True, cores: bool = True, ports: bool = True, surge: bool = False
) -> list[Finding]:
    """Returns all findings, errors first. Flags: as for ``examine``."""
    return list(examine(config, memory=memory, cores=cores, ports=ports, surge=surge).findings)


def examine(
    config: ServiceConfig,
    *,
    memory: bool = True,
    cores: bool = True,
    ports: bool = True,
    surge: bool = False,
    forms: bool = False,
    gpu_bytes: int | None = None,
) -> Examination:
    """Examines the pools that would be started, and finds everything that is wrong with them.

    ``memory`` and ``cores``: also checks that this machine has enough of them. They are off if other machines run the
    replicas, or if Ray is configured with more cores. ``ports``: also whether they are free, which they are not where
    the service runs already. ``surge``: also whether a change in place leaves a target, which is moot for a service
    that ends with its command. ``forms``: also whether models can be built and heads have the target's sizes, and how
    large a model without weights would be, which takes torch and seconds. ``gpu_bytes``: memory of each GPU; None: it
    is not known.
    """
    findings: list[Finding] = []
    target_setup, draft_setup, draft_config = config.target_setup(), config.draft_setup(), config.draft_config
    how = {"here": memory, "forms": forms}
    target, draft = _read_model(_TARGET, config.target_config, findings, **how), None
    if isinstance(draft_config, ModelDraftConfig):
        draft = _read_model(_DRAFT, draft_config, findings, **how)
    left = available_bytes() if memory else None
    parts = _read_cascade(config, draft_setup, target, findings, here=memory)
    pools = (
        _target_pool(config, target_setup, target, left or 0, gpu_bytes or 0),
        *_draft_pools(config, draft_setup, target, draft, parts),
        _router_pool(config),
    )
    if target is not None:
        findings += _check_lengths(target_setup.options, target.limit)
        findings += _check_heads(target_setup, target, forms=forms)
        findings += _check_hints(target_setup, target)
        findings += _check_link(target_setup, target)
        if draft is not None:
            assert draft_setup is not None
            max_len, (_, options) = target.max_len(target_setup.options.max_model_len), draft_setup.model
            findings += _check_together(target, draft, max_len, options)
    if target is not None:
        findings += _check_memory(target_setup, draft_setup, pools, target, draft, left, gpu_bytes)
    findings += [Finding.error(key, problem) for key, problem in config.numbered_gpus()]
    if memory:
        findings += _check_gpus(config)
        findings += check_tracing(config)
    if cores:
        findings += _check_cores(config)
    if surge:
        findings += _check_surge(config)
    if ports:
        findings += check_access(config)
        findings += check_ports(config.server.host, config.server.grpc_port, config.server.http_port) or (
            check_exposure(config)
        )
    findings.sort(key=lambda finding: finding.severity is Severity.WARNING)
    return Examination(tuple(findings), pools, left, gpu_bytes)


# -- models ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Model:
    """A checkpoint on this machine, and its tokenizer."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer | None
    """None: its configuration is here without one."""
    size: ModelSize
    kv_scales: str | None = None
    """As in ``Pool``."""

    @property
    def limit(self) -> int:
        """The longest context that it was made for."""
        return self.checkpoint.max_model_len

    def max_len(self, configured: int | None) -> int:
        """The longest context that it may have."""
        return min(configured or self.limit, self.limit)

    def rotary(self, configured: int | None) -> str | None:
        """See ``Pool.rotary``."""
        return factors_in_use(self.checkpoint.config, self.max_len(configured))


def _read_model(
    pool: str, config: TargetConfig | ModelDraftConfig, findings: list[Finding], *, here: bool, forms: bool = False
) -> _Model | None:
    """Returns the model of a pool; None if it is not on this machine or has a fault, which is added to ``findings``.

    ``here``: True: the replicas run on this machine, and fetch missing files. ``forms``: True: the model is built
    without weights, and a configuration without weights and tokenizer is sized, too.
    """
    options, loading, key = config.engine_kwargs, config.model_loading_config, f"{pool}.model_loading_config"
    scales: str | None = None
    key += ".model_source" if loading.model_source is not None else ".model_id"
    report = Finding.error if here else Finding.warning
    try:
        checkpoint = Checkpoint.find(loading.source, options.trust_remote_code)
        if forms and checkpoint is not None and not checkpoint.has_weights and find_spec("torch") is not None:
            checkpoint = counted(checkpoint)
            findings.append(report(key, _without_weights(checkpoint)))
        how: dict[str, Any] = {"on_gpu": _on_gpu(config), "kv_cache_dtype": options.kv_cache_dtype}
        size = None if checkpoint is None else checkpoint.size(options.dtype, options.quantization, **how)
        if checkpoint is not None and size is not None and options.kv_cache_dtype != "auto":
            scales = described(checkpoint)
        if checkpoint is None or size is None:
            if here and (reason := why_not_fetched()) is not None:
                findings.append(Finding.error(key, absent(loading.source, reason)))
            else:
                missing = f"{absent(loading.source)}: it is fetched when a replica starts, and was not checked"
                findings.append(Finding.warning(key, missing))
            return None
    except ConfigError as error:
        findings.append(Finding.error(key, f"cannot be used: {error}"))
        return None
    key, tokenizer = f"{pool}.model_loading_config", None
    try:
        source = loading.tokenizer
        tokenizer = (
            checkpoint.tokenizer
            if source == loading.source
            else load_tokenizer(str(local_folder(source) or source), options.trust_remote_code)
        )
    except ConfigError as error:
        is_lone = checkpoint.counted is not None
        finding = report if is_lone else Finding.error
        findings.append(finding(f"{key}.tokenizer_source", f"cannot be used: {error}"))
        if not is_lone:
            return None
    most = 0 if tokenizer is None else _num_tokens(tokenizer)
    if most > checkpoint.vocab_size:
        problem = f"has {most} tokens and its model only {checkpoint.vocab_size}: name its own tokenizer"
        findings.append(Finding.error(f"{key}.tokenizer_source", problem))
        return None
    device = "cuda" if _on_gpu(config) else "cpu"
    try:
        require_weights(checkpoint.quantization, options.quantization, checkpoint.path, device, is_here=here)
    except ConfigError as error:
        findings.append(Finding.error(key, f"cannot be used: {error}"))
        forms = False  # the same would be said again
    wrong = why_not_runnable(
        checkpoint.config,
        checkpoint.quantization,
        device=device,
        quantization=options.quantization,
        compile=options.compile,
        kv_cache_dtype=options.kv_cache_dtype,
        state_slots=options.state_slots if isinstance(options, TargetOptions) else None,
    )
    if wrong is not None:
        option, problem = wrong
        findings.append(Finding.error(key if option == "model" else f"{pool}.engine_kwargs.{option}", problem))
        return None
    if _on_gpu(config) and _MUCH * size.dequantized_bytes > size.weights_bytes:
        takes = f"{gib(size.dequantized_bytes)} of {gib(size.weights_bytes)}"
        findings.append(
            Finding.warning(key, f"stores weights in a format that GPUs run dequantized: they take {takes}")
        )
    findings += _check_degree(pool, options, checkpoint)
    if forms and find_spec("torch") is not None and checkpoint.folder not in embedded_paths():
        findings += _check_build(key, options, checkpoint, device)
    if here and options.cpu_threads > 1:
        findings += _check_threads(pool, options)
    return _Model(checkpoint, tokenizer, size, scales)


def _num_tokens(tokenizer: Tokenizer) -> int:
    """One more than the largest id. Added tokens may lie beyond: a text model's rows end where images' rows begin."""
    return 1 + max({*tokenizer.vocab.values()} - tokenizer.added_tokens.keys(), default=-1)


def _without_weights(checkpoint: Checkpoint) -> str:
    """A clause about a checkpoint without weights, which continues a sentence that begins with its key."""
    found = f"names {checkpoint.path!r}, which holds no weights: the sizes are computed from its config.json"
    is_read = checkpoint.quantization is None or packing_of(checkpoint.quantization) is not None
    return found if is_read else f"{found}, as if they were not quantized"


def counted(checkpoint: Checkpoint) -> Checkpoint:
    """Adds the weights that its configuration describes to a checkpoint that has none. Raises ConfigError."""
    from paceline.model.local_config import counts_by_config  # loads torch

    return replace(checkpoint, counted=counts_by_config(checkpoint))


def _check_threads(pool: str, options: ModelOptions) -> list[Finding]:
    """Checks that threads of this machine can share the products of the pool's model."""
    from paceline.preflight.device import why_not_shared

    if (reason := why_not_shared(options)) is None:
        return []
    return [Finding.error(f"{pool}.engine_kwargs.cpu_threads", f"is {options.cpu_threads}: {reason}")]


def _read_cascade(
    config: ServiceConfig, setup: DraftSetup | None, target: _Model | None, findings: list[Finding], *, here: bool
) -> list[_Model | None]:
    """Returns the models of a cascade's drafters, None for a drafter without one; adds their faults to ``findings``."""
    if setup is None or not isinstance(config.draft_config, CascadeDraftConfig):
        return []
    models: list[_Model | None] = []
    for i, (part, drafter) in enumerate(zip(setup.parts, config.draft_config.engine_kwargs.drafters, strict=True)):
        model = None
        if drafter.model is not None:
            _, options = part.model
            key = f"{_DRAFT}.engine_kwargs.drafters[{i}]"
            alone = ModelDraftConfig(
                model_loading_config=ModelLoadingConfig(model_id=drafter.model), engine_kwargs=options
            )
            found: list[Finding] = []
            model = _read_model(key, alone, found, here=here)
            if model is not None and target is not None:
                max_len = target.max_len(config.target_config.engine_kwargs.max_model_len)
                found += _check_together(target, model, max_len, options)
            findings += [replace(finding, key=f"{key}.model") for finding in found]
        models.append(model)
    return models


def _check_degree(key: str, options: ModelOptions, checkpoint: Checkpoint) -> list[Finding]:
    """Checks that ranks can share the weights. Takes torch, and seconds, if there are several."""
    size, key = options.tensor_parallel_size, f"{key}.engine_kwargs.tensor_parallel_size"
    if size == 1:
        return []
    if (reason := why_whole(checkpoint.quantization, checkpoint.path)) is not None:
        return [Finding.error(key, f"is {size} and {reason}")]
    if find_spec("torch") is not None:
        from paceline.model.dry_run import require_split

        try:
            require_split(checkpoint, size)
        except ConfigError as error:
            return [Finding.error(key, f"is {size}: {error}")]
    return []


def _check_build(key: str, options: ModelOptions, checkpoint: Checkpoint, device: str) -> list[Finding]:
    """Checks that the model can be built and run as it is loaded. Takes torch and seconds."""
    from paceline.model.dry_run import require_loadable

    try:
        require_loadable(checkpoint, options, device)
    except ConfigError as error:
        return [Finding.error(key, f"cannot be used: {error}")]
    return []


def _check_lengths(options: TargetOptions, limit: int) -> list[Finding]:
    """``limit``: the longest context that the target was made for."""
    engine, max_len = f"{_TARGET}.engine_kwargs", options.max_model_len or limit
    if max_len > limit:
        return [Finding.error(f"{engine}.max_model_len", f"is {max_len}: the target was made for at most {limit}")]
    needed = session_pages(max_len)
    if options.kv_pages is not None and options.kv_pages < needed:
        longest = options.kv_pages * PAGE_SIZE - MAX_DRAFT_TOKENS
        problem = f"is {options.kv_pages}, which holds no session longer than {longest} tokens: {max_len} need {needed}"
        return [Finding.warning(f"{engine}.kv_pages", problem)]
    return []


def _check_heads(setup: TargetSetup, target: _Model, *, forms: bool) -> list[Finding]:
    """Checks that a target's heads are on this machine and that a draft model has its tokens. ``forms``: also checks
    that the other heads have its sizes."""
    findings: list[Finding] = []
    max_len, options = target.max_len(setup.options.max_model_len), setup.options
    for i, head in enumerate(options.heads):
        key = f"{_TARGET}.engine_kwargs.heads[{i}]"
        try:
            alone = options.model_copy(update={"heads": [head], "hints": None})
            heads_size(replace(setup, options=alone), target.size, max_len)
            source = head.source if head.method == "draft_model" else None
            if source is not None and local_folder(source) is not None:
                if target.tokenizer is not None:
                    require_same_tokens(target.tokenizer, load_tokenizer(source, options.trust_remote_code))
            elif forms and head.entry.open and find_spec("torch") is not None:
                function(head.entry.open)(head, target.checkpoint)
        except ConfigError as error:
            findings.append(Finding.error(key, f"is {head}, which does not fit: {error}"))
    return findings


def _check_hints(setup: TargetSetup, target: _Model) -> list[Finding]:
    """Checks that the hints of a target come from a layer that it has, by an exit head that fits it."""
    alone = setup.options.model_copy(update={"heads": []})
    try:
        require_hint_boundary(setup, target.size.num_layers)
        heads_size(replace(setup, options=alone, link=None), target.size, max_len=1)
    except ConfigError as error:
        return [Finding.error(f"{_TARGET}.engine_kwargs.hints", f"is unfit: {error}")]
    return []


def _check_link(setup: TargetSetup, target: _Model) -> list[Finding]:
    """Checks that the head in the draft pool is on this machine."""
    try:
        if setup.link is not None:
            remote_size(setup.link, target.size)
    except ConfigError as error:
        return [Finding.error(f"{_DRAFT}.engine_kwargs.model", f"is unfit: {error}")]
    return []


def _remote_size(options: HeadDraftOptions, target: _Model) -> ModelSize | None:
    """The size of a head in the draft pool; None: its checkpoint cannot be read, as ``_check_link`` says."""
    try:
        return remote_size(options, target.size)
    except ConfigError:
        return None


def _check_together(target: _Model, draft: _Model, max_len: int, options: DraftOptions) -> list[Finding]:
    findings = []
    key = f"{_DRAFT}.model_loading_config"
    try:
        require_draft_model(draft.checkpoint.config, "its model", draft.checkpoint.path)
        if target.tokenizer is not None and draft.tokenizer is not None:
            require_tokens(target.tokenizer, draft.tokenizer, options.vocabulary)
        parallel_draft(draft.checkpoint, options.parallel_tokens)
    except ConfigError as error:
        findings.append(Finding.error(key, f"does not fit: {error}"))
    limit = draft.limit
    if limit < max_len:
        problem = f"names a draft that was made for at most {limit} tokens, and contexts may have {max_len}"
        remedy = f"set {_TARGET}.engine_kwargs.max_model_len to {limit}, or choose another draft"
        if "n_positions" in draft.checkpoint.config:  # from a table, beyond whose end there is nothing
            findings.append(Finding.error(key, f"{problem}, where it fails: {remedy}"))
        else:
            findings.append(Finding.warning(key, f"{problem}, where its proposals are poor: {remedy}"))
    return findings


# -- the machine -------------------------------------------------------------------------------------------


def _target_pool(config: ServiceConfig, setup: TargetSetup, target: _Model | None, left: int, gpu_bytes: int) -> Pool:
    part = config.target_config
    on_gpu = _on_gpu(part)
    estimate = rotary = scales = None
    if target is not None:
        scales = target.kv_scales
        max_len, rotary = target.max_len(setup.options.max_model_len), target.rotary(setup.options.max_model_len)
        estimate = target_estimate(
            setup,
            target.size,
            max_len,
            on_gpu=on_gpu,
            heads=known_heads_size(setup, target.size, max_len, on_gpu=on_gpu),
            left_bytes=gpu_bytes if on_gpu else left // setup.options.tensor_parallel_size,
        )
    model_id = part.model_loading_config.model_id
    return Pool(_TARGET, model_id, part.deployment_config.first_replicas, on_gpu, estimate, rotary, scales)


@dataclass(frozen=True, slots=True)
class DraftPool:
    """The configuration of the drafts, and the models read for it."""

    part: Any
    """``draft_config``."""
    setup: DraftSetup
    target: _Model | None
    """None: it is not here."""
    draft: _Model | None
    parts: Sequence[_Model | None]
    """Models of a cascade's drafters: None for one without a model, or whose model is not on this machine."""

    def max_len(self, model: _Model) -> int:
        """Tokens of the longest context of a draft model."""
        return min(model.max_len(self.setup.max_model_len), (self.target or model).limit)

    def pool(
        self,
        model_id: str | None,
        estimate: MemoryEstimate | None,
        *,
        on_gpu: bool = False,
        rotary: str | None = None,
        kv_scales: str | None = None,
    ) -> Pool:
        """The pool's line."""
        return Pool(_DRAFT, model_id, self.part.deployment_config.first_replicas, on_gpu, estimate, rotary, kv_scales)


def _draft_pools(
    config: ServiceConfig,
    setup: DraftSetup | None,
    target: _Model | None,
    draft: _Model | None,
    parts: Sequence[_Model | None],
) -> Iterator[Pool]:
    """The pool of drafts, if there is one."""
    if config.draft_config is not None and setup is not None:
        yield function(setup.entry.pool)(DraftPool(config.draft_config, setup, target, draft, parts))


def pool_of_text(given: DraftPool) -> Pool:
    """Drafters without a model."""
    return given.pool(None, modelless_estimate(given.setup))


def pool_of_model(given: DraftPool) -> Pool:
    """A draft model; nothing is known of one that is not here."""
    part, model, on_gpu = given.part, given.draft, _on_gpu(given.part)
    estimate = rotary = scales = None
    if model is not None:
        rotary, scales = model.rotary(given.setup.max_model_len), model.kv_scales
        estimate = draft_estimate(given.setup, model.size, given.max_len(model), on_gpu=on_gpu)
    return given.pool(part.drafter_name, estimate, on_gpu=on_gpu, rotary=rotary, kv_scales=scales)


def pool_of_head(given: DraftPool) -> Pool:
    """A head; nothing is known of one without its target."""
    part, target, on_gpu = given.part, given.target, _on_gpu(given.part)
    size = None if target is None else _remote_size(part.engine_kwargs, target)
    estimate = None
    if target is not None and size is not None:
        estimate = draft_estimate(given.setup, size, target.max_len(given.setup.max_model_len), on_gpu=on_gpu)
    return given.pool(part.drafter_name, estimate, on_gpu=on_gpu)


def pool_of_cascade(given: DraftPool) -> Pool:
    """A cascade; without an estimate if one of its models is missing on this machine."""
    on_gpu = bool(given.part.deployment_options()["ray_actor_options"].get("num_gpus"))
    estimates = []
    for alone, model in zip(given.setup.parts, given.parts, strict=True):
        if alone.source is None:
            estimates.append(modelless_estimate(alone))
        elif model is not None:
            estimates.append(draft_estimate(alone, model.size, given.max_len(model), on_gpu=on_gpu))
    known = len(estimates) == len(given.parts)
    estimate = cascade_estimate(given.setup, estimates, on_gpu=on_gpu) if known else None
    return given.pool(None, estimate, on_gpu=on_gpu)


def _router_pool(config: ServiceConfig) -> Pool:
    replicas = config.router_config.deployment_config.first_replicas
    return Pool("router_config", None, replicas, False, MemoryEstimate(ROUTER_PROCESS_BYTES))


def _check_memory(
    target_setup: TargetSetup,
    draft_setup: DraftSetup | None,
    pools: Sequence[Pool],
    target: _Model | None,
    draft: _Model | None,
    left: int | None,
    gpu_bytes: int | None,
) -> list[Finding]:
    """Checks replicas on CPUs against the free memory of this machine, and replicas on GPUs against the memory of one
    GPU."""
    if target is None:
        return []

    def room(key: str, num_ranks: int) -> Room | None:
        if next(pool.on_gpu for pool in pools if pool.key == key):
            return None if gpu_bytes is None else Room(gpu_bytes, on_gpu=True)
        return None if left is None else Room(left // num_ranks)  # ranks share the machine

    findings: list[Finding] = []
    if (there := room(_TARGET, target_setup.options.tensor_parallel_size)) is not None:
        findings += check_target(target_setup, target.size, target.limit, there)
    if draft_setup is not None:
        size, limit, num_ranks = None, target.limit, 1
        if draft is not None:
            size, limit = draft.size, min(limit, draft.limit)
            num_ranks = draft_setup.model[1].tensor_parallel_size
        elif isinstance(draft_setup.options, HeadDraftOptions):
            size = _remote_size(draft_setup.options, target)
        if size is not None and (there := room(_DRAFT, num_ranks)) is not None:
            findings += check_draft(draft_setup, size, limit, there)
    return findings or ([] if left is None else _check_sum(target_setup.options.kv_fraction, pools, left))


def _expected_bytes(pools: Sequence[Pool]) -> int:
    """Memory that the whole service is expected to take of this machine."""
    return RAY_BYTES + sum(pool.machine_bytes for pool in pools)


def _check_sum(kv_fraction: float | None, pools: Sequence[Pool], left: int) -> list[Finding]:
    """Checks replicas that fit one by one together; names how many of the largest pool fit with the others."""
    least = sum(pool.least_bytes for pool in pools)
    expected = _expected_bytes(pools)
    if expected <= left:
        return []
    needed, amount = (least, "at least") if least > left else (expected, "about")
    problem = f"and the other pools need {amount} {gib(needed)} together, and this machine has {gib(left)} left"
    remedy = "other machines must take some of the replicas"
    largest = max(pools, key=lambda pool: pool.machine_bytes)
    others = expected - largest.machine_bytes
    fitting = (left - others) * largest.num_replicas // max(largest.machine_bytes, 1)
    if fitting >= 1:
        remedy = f"set {largest.key}.deployment_config.num_replicas to at most {fitting}, or {remedy}"
    if share := _fitting_fraction(kv_fraction, pools, left):
        remedy = f"set {_TARGET}.engine_kwargs.kv_fraction to at most {share:g}, or {remedy}"
    return [(Finding.error if least > left else Finding.warning)(_TARGET, f"{problem}: {remedy}")]


def _fitting_fraction(kv_fraction: float | None, pools: Sequence[Pool], left: int) -> float:
    """The kv_fraction with which all replicas fit, in steps of a thousandth; 0 if there is none."""
    target = next(pool for pool in pools if pool.key == _TARGET)
    estimate = target.estimate
    if kv_fraction is None or target.on_gpu or estimate is None or not estimate.kv_bytes:
        return 0.0
    all_kv = target.num_processes * estimate.kv_bytes
    room = (left - _expected_bytes(pools) + all_kv) / target.num_processes
    share = room / (left // estimate.num_ranks - estimate.total_bytes + estimate.kv_bytes)
    return int(1000 * share) / 1000 if room >= estimate.least_kv_bytes else 0.0


def _on_gpu(config: TargetConfig | ModelDraftConfig | HeadDraftConfig) -> bool:
    """True if a replica may put its model into the memory of a GPU, which cannot be seen from here."""
    options = config.deployment_options()
    reserved = options["ray_actor_options"].get("num_gpus") or any(
        bundle.get("GPU") for bundle in options.get("placement_group_bundles", [])
    )
    return config.engine_kwargs.device != "cpu" and bool(reserved)


def _check_gpus(config: ServiceConfig) -> list[Finding]:
    """Ray does not refuse replicas for which there is no GPU: they wait indefinitely."""
    parts = [(_TARGET, config.target_config), (_DRAFT, config.draft_config)]
    findings, reserved = [], {}
    for pool, part in parts:
        if not isinstance(part, TargetConfig | ModelDraftConfig | HeadDraftConfig):
            continue
        device, options = part.engine_kwargs.device, part.deployment_options()
        bundles = options.get("placement_group_bundles") or [{"GPU": options["ray_actor_options"].get("num_gpus")}]
        share = sum(float(bundle.get("GPU") or 0.0) for bundle in bundles)
        if needs_gpu(device) and not torch_has_gpus():
            problem = "and the torch that is installed is one for CPUs: install one for CUDA, or use 'cpu'"
            findings.append(Finding.error(f"{pool}.engine_kwargs.device", f"is {device!r}, {problem}"))
        elif share or needs_gpu(device) or part.accelerator_type is not None:
            num_ranks = getattr(part.engine_kwargs, "tensor_parallel_size", 1)
            if num_ranks > 1 and (sliced := slice_among(visible_gpus() or ())):
                problem = (
                    f"is {num_ranks} and GPU {sliced} is a MIG slice: slices cannot exchange, so only 1 is allowed"
                )
                findings.append(Finding.error(f"{pool}.engine_kwargs.tensor_parallel_size", problem))
            reserved[pool] = share * part.deployment_config.first_replicas
    gpus = num_gpus()
    if gpus is None or not reserved:
        return findings
    if gpus == 0:
        for pool in reserved:
            config_of = config.target_config if pool == _TARGET else config.draft_config
            kind = getattr(config_of, "accelerator_type", None)
            what = f"accelerator_type: {kind}" if kind else "a GPU"
            remedy = "name a Ray cluster that has one (--address), or use 'cpu' without accelerator_type and num_gpus"
            problem = f"asks for {what}, and no NVIDIA driver on this machine shows a GPU: {remedy}"
            findings.append(Finding.error(pool, problem))
    elif (wanted := sum(reserved.values())) > gpus + 1e-9:
        problem = f"and the other pools reserve {wanted:g} GPUs, and this machine has {gpus}: have fewer replicas"
        findings.append(Finding.error(next(iter(reserved)), problem))
    return findings


def _check_surge(config: ServiceConfig) -> list[Finding]:
    """Serve stops a replica that is replaced before its successor starts, unless it may start one more."""
    options = config.target_config.deployment_config
    if options.max_surge_percent or options.first_replicas > 1:
        return []
    given = "null" if options.max_surge_percent is None else options.max_surge_percent
    problem = f"is {given}: a change in place stops the only target before its successor serves"
    remedy = "set it to 100 and have room for one more"
    return [Finding.warning(f"{_TARGET}.deployment_config.max_surge_percent", f"{problem}; {remedy}")]


def _check_cores(config: ServiceConfig) -> list[Finding]:
    """Ray does not refuse replicas for which there is no core: they wait indefinitely."""
    reserved = config.reserved_cpus(lambda deployment: deployment.first_replicas)
    cores = len(os.sched_getaffinity(0))
    if reserved <= cores + 1e-9:
        return []
    problem = f"and the other pools reserve {reserved:g} cores, and this machine has {cores}"
    return [Finding.warning(_TARGET, f"{problem}: without other machines some replicas wait indefinitely")]
