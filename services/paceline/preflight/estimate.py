"""The memory that a rank of a replica takes, from its checkpoint and its settings. Plain numbers: no torch.

``least_bytes`` is certain: a replica that needs more than the machine has cannot run. ``total_bytes`` is expected under
the largest step that the settings allow. It consists of

    process    interpreter, torch, transformers, Ray, and the code that oneDNN keeps for every number of tokens
    weights    parameters, twice where they are compiled: packed, and in the library that they were packed from
    KV         all pages, which are written when the replica starts, and the scratch page; states of linear layers
    trees      objects of the speculation trees under the coupled rule; their KV rows are among the pages
    workspace  allocations of the largest step: activations, gathered keys and values, logits (``workspace_bytes``)

A replica of several ranks splits its matrices and its KV heads among them; all numbers are of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.checkpoint.linear import Slots
from paceline.checkpoint.size import ModelSize
from paceline.config import DraftOptions, DraftSetup, HeadDraftOptions, ModelOptions, TargetSetup
from paceline.core import native
from paceline.model.attention.schedule import MOST_VALUE_DIM
from paceline.model.shapes import most_scored_rows
from paceline.model.workspace import Kernel, workspace_bytes
from paceline.preflight.host_memory import (
    DEFAULT_SESSION_TOKENS,
    MEASURED_LEAVES,
    draft_branches,
    draft_pages,
    draft_session_pages,
    session_pages,
    target_pages,
)
from paceline.types import MAX_DRAFT_TOKENS, PAGE_SIZE

PROCESS_BYTES = 256 << 20
"""The least that a replica takes before it holds a model: interpreter, torch and Ray."""
REPLICA_RAY_BYTES = 130 << 20
"""Memory that Ray was measured to add to the process of a replica."""
CODE_BYTES = 96 << 20
"""Measured maximum of memory that an engine's steps leave allocated on CPUs, in oneDNN and the allocator."""
ENGINE_PROCESS_BYTES = (374 << 20) + REPLICA_RAY_BYTES + CODE_BYTES
"""Memory of an engine's replica without a model: torch and transformers were measured to be 374 MiB."""
ROUTER_PROCESS_BYTES = 160 << 20
"""Memory of a router's replica, which imports no torch."""
RAY_BYTES = 1 << 30
"""Memory that Ray's and Serve's own processes, the monitor and ``paceline serve`` were measured to take together."""

_NODE_BYTES = 1024
"""A node of a speculation tree: Python objects in tree, frontier and row tables."""
_TOKEN_BYTES = 2048
"""Memory of one token in a tokenizer and in tables about it, merges included."""


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes of one rank of a replica by part, and what its KV pages hold."""

    process_bytes: int
    weights_bytes: int = 0
    packed_bytes: int = 0
    """Second copy of the weights, packed by the compiler; 0 when running eagerly."""
    kv_bytes: int = 0
    least_kv_bytes: int = 0
    """KV pages required to start: all of them, or one full-length session's if kv_fraction sizes the cache."""
    linear_bytes: int = 0
    """States and rows of linear layers, all of which are required to start."""
    num_states: int = 0
    """Slots for these states, where there are such layers."""
    copies_bytes: int = 0
    """Copies of the same number of states in host memory, for preempted sessions."""
    tree_bytes: int = 0
    workspace_bytes: int = 0
    num_pages: int = 0
    max_len: int = 0
    """Tokens of the longest context."""
    num_longest: int = 0
    """Sessions of that length that the pages hold."""
    num_typical: int = 0
    """Sessions of ``typical_len`` that the pages hold."""
    num_ranks: int = 1
    """Processes of a replica, each with a device and with these numbers."""
    on_gpu: bool = False
    """The device is a GPU."""

    @property
    def typical_len(self) -> int:
        """Tokens of the contexts that the pages are sized for where nothing is configured."""
        return min(self.max_len, DEFAULT_SESSION_TOKENS)

    @property
    def token_bytes(self) -> float:
        """KV of one token in all layers, heads included."""
        return self.kv_bytes / ((self.num_pages + 1) * PAGE_SIZE)

    @property
    def least_bytes(self) -> int:
        """Lower bound: no replica that reaches its largest step takes less."""
        model = self.weights_bytes + self.least_kv_bytes + self.linear_bytes + self.workspace_bytes
        return min(PROCESS_BYTES, self.process_bytes) + model

    @property
    def host_bytes(self) -> int:
        """Memory that a replica takes of its machine if its model is on a GPU."""
        return self.process_bytes + self.tree_bytes + self.copies_bytes

    @property
    def reserved_bytes(self) -> int:
        """Memory that is allocated on the device after the KV pages, which must leave room for it."""
        host_bytes = self.tree_bytes + self.copies_bytes + CODE_BYTES
        return self.linear_bytes + self.workspace_bytes + (0 if self.on_gpu else host_bytes)

    @property
    def device_bytes(self) -> int:
        """Memory that the model takes on its device."""
        return self.weights_bytes + self.packed_bytes + self.kv_bytes + self.linear_bytes + self.workspace_bytes

    @property
    def total_bytes(self) -> int:
        """All parts."""
        return self.host_bytes + self.device_bytes


@dataclass(frozen=True, slots=True)
class HeadsSize:
    """Bytes of all heads of a target."""

    weights_bytes: int = 0
    """Weights, and of a draft model everything that it takes."""
    kv_values: int = 0
    """Numbers that they keep on the target's pages per token."""
    page_values: int = 0
    """Further numbers kept per page: the states of its last position."""
    host_bytes: int = 0
    """Memory of the machine that the heads take on any device."""

    def page_bytes(self, item_bytes: int) -> int:
        """Bytes that they add to a KV page of the target."""
        return (PAGE_SIZE * self.kv_values + self.page_values) * item_bytes


def target_estimate(
    setup: TargetSetup,
    size: ModelSize,
    max_len: int,
    *,
    on_gpu: bool = False,
    left_bytes: int = 0,
    tensor_parallel_size: int | None = None,
    heads: HeadsSize | None = None,
    kernel: Kernel | None = None,
) -> MemoryEstimate:
    """Estimates the memory of one target rank for contexts of up to ``max_len`` tokens.

    Args:
        setup: of the target.
        size: of the whole model.
        max_len: tokens of the longest context.
        on_gpu: True: the model is on a GPU.
        left_bytes: free bytes before the rank starts; kv_fraction is a share of the part that the rest of the rank
            leaves. 0: not known, and kv_fraction counts as one session of full length.
        tensor_parallel_size: number of parts of the model; None: as configured.
        heads: memory of its heads, on the first rank; None: there are none.
        kernel: its attention kernel; None: the one that is expected to run.
    """
    options, heads = setup.options, heads or HeadsSize()
    num_ranks = tensor_parallel_size or options.tensor_parallel_size
    size, slots = size.of_rank(num_ranks), Slots.of(options.max_sessions, options.state_slots)
    longest, typical = session_pages(max_len), session_pages(min(max_len, DEFAULT_SESSION_TOKENS))
    least = longest if options.kv_fraction is not None else target_pages(options, max_len)
    page_bytes = size.page_bytes and size.page_bytes + heads.page_bytes(size.item_bytes)
    estimate = MemoryEstimate(
        process_bytes=ENGINE_PROCESS_BYTES + heads.host_bytes,
        weights_bytes=size.weights_bytes + heads.weights_bytes,
        packed_bytes=_packed_bytes(options, size, on_gpu),
        least_kv_bytes=(least + 1) * page_bytes,
        linear_bytes=size.slots_bytes(slots),
        num_states=slots.states,
        copies_bytes=slots.states * size.linear.state_bytes(size.item_bytes) if size.linear and num_ranks == 1 else 0,
        tree_bytes=options.max_sessions * setup.tree_budget * _NODE_BYTES,
        workspace_bytes=workspace_bytes(
            size,
            options.max_step_tokens,
            options.max_sessions,
            min(longest, least),
            num_logits=max(
                options.max_sessions * (MAX_DRAFT_TOKENS + 1), min(_scored_rows(size), options.max_step_tokens)
            ),
            num_copies=2,
            attention=kernel or _attention_of(options, size, on_gpu),
            has_trees=False,
        ),
        num_ranks=num_ranks,
        on_gpu=on_gpu,
    )
    num_pages = least
    if options.kv_fraction is not None and page_bytes:
        free = left_bytes - (estimate.device_bytes if on_gpu else estimate.total_bytes)
        num_pages = max(least, int(options.kv_fraction * free) // page_bytes - 1)  # one is the scratch page
    return replace(
        estimate,
        kv_bytes=(num_pages + 1) * page_bytes,
        num_pages=num_pages,
        max_len=max_len,
        num_longest=num_pages // longest,
        num_typical=num_pages // typical,
    )


def draft_estimate(setup: DraftSetup, size: ModelSize, max_len: int, *, on_gpu: bool = False) -> MemoryEstimate:
    """Estimates the memory of one rank of a draft model, or of a head, for contexts of up to ``max_len`` tokens."""
    options = setup.options
    assert isinstance(options, DraftOptions | HeadDraftOptions)
    model = options if isinstance(options, DraftOptions) else None
    num_ranks = 1 if model is None else model.tensor_parallel_size
    size, is_linear = size.of_rank(num_ranks), model is not None and size.linear is not None
    branches = draft_branches(options, linear=is_linear)
    slots = Slots.of(setup.num_sessions, branches=branches)
    num_pages = draft_pages(setup, max_len, branches)
    longest = draft_session_pages(options, max_len, branches)
    typical = draft_session_pages(options, min(max_len, DEFAULT_SESSION_TOKENS), branches)
    return MemoryEstimate(
        process_bytes=ENGINE_PROCESS_BYTES + (0 if model is None else _vocabulary_bytes(model, size)),
        weights_bytes=size.weights_bytes,
        packed_bytes=0 if model is None else _packed_bytes(model, size, on_gpu),
        kv_bytes=size.kv_bytes(num_pages),
        least_kv_bytes=size.kv_bytes(num_pages),
        linear_bytes=size.slots_bytes(slots) if is_linear else 0,
        num_states=slots.states,
        tree_bytes=_draft_tree_bytes(setup),
        workspace_bytes=workspace_bytes(
            size,
            setup.max_step_tokens,
            setup.num_sessions,
            min(longest, num_pages),
            num_logits=options.tree_step_tokens or MEASURED_LEAVES,
            num_copies=1,
            attention="sdpa" if model is None else _attention_of(model, size, on_gpu),
            has_trees=not is_linear,
        ),
        num_pages=num_pages,
        max_len=max_len,
        num_longest=num_pages // longest,
        num_typical=num_pages // typical,
        num_ranks=num_ranks,
        on_gpu=on_gpu,
    )


def modelless_estimate(setup: DraftSetup) -> MemoryEstimate:
    """Estimates the memory of a draft replica without a model. A plugin's own is not known."""
    own = setup.entry.host_bytes(setup.options)
    return MemoryEstimate(ENGINE_PROCESS_BYTES + own, tree_bytes=_draft_tree_bytes(setup))


def cascade_estimate(setup: DraftSetup, parts: Sequence[MemoryEstimate], *, on_gpu: bool = False) -> MemoryEstimate:
    """Estimates the memory of a draft replica whose drafters, each estimated alone, share one process and one tree."""
    return MemoryEstimate(
        ENGINE_PROCESS_BYTES + sum(part.process_bytes - ENGINE_PROCESS_BYTES for part in parts),
        weights_bytes=sum(part.weights_bytes for part in parts),
        packed_bytes=sum(part.packed_bytes for part in parts),
        kv_bytes=sum(part.kv_bytes for part in parts),
        least_kv_bytes=sum(part.least_kv_bytes for part in parts),
        linear_bytes=sum(part.linear_bytes for part in parts),
        num_states=sum(part.num_states for part in parts if part.linear_bytes),
        tree_bytes=_draft_tree_bytes(setup),
        workspace_bytes=max(part.workspace_bytes for part in parts),
        on_gpu=on_gpu,
    )


def _vocabulary_bytes(options: DraftOptions, size: ModelSize) -> int:
    """Bytes of two tokenizers and of the table of the tokens that they share; the target's counts as large as the
    draft's."""
    return 2 * size.vocab_size * _TOKEN_BYTES if options.vocabulary == "shared" else 0


def _draft_tree_bytes(setup: DraftSetup) -> int:
    return setup.num_sessions * setup.options.tree_budget * _NODE_BYTES


def _packed_bytes(options: ModelOptions, size: ModelSize, on_gpu: bool) -> int:
    return size.weights_bytes if compiles(options, size, on_gpu) else 0


def compiles(options: ModelOptions, size: ModelSize, on_gpu: bool) -> bool:
    """True if a model with these settings is compiled into a library that holds its weights, as on CPUs. ``auto``
    excludes models with indexers or compressors."""
    return not on_gpu and (options.compile is True or (options.compile == "auto" and not size.index_values))


def _attention_of(options: ModelOptions, size: ModelSize, on_gpu: bool) -> Kernel:
    """The attention kernel that is expected to run (``model/attention/kernels.py``). On a CPU, this machine's; on a GPU
    Triton's, unless heads are too long for it or an indexer chooses keys."""
    if options.attention != "auto":
        return "triton" if options.attention == "flashinfer" else options.attention
    if on_gpu:
        return "triton" if size.value_dim <= MOST_VALUE_DIM and not size.index_values else "sdpa"
    return "native" if native.has_avx512() else "sdpa"


def _scored_rows(size: ModelSize) -> int:
    return most_scored_rows(size.vocab_size) if size.vocab_size else 0
