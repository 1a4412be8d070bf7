"""The memory that the heads of a target take, from their files: plain numbers, without torch.

Only the first rank holds them. A head that reads hidden states keeps its layers on the target's KV pages; a draft model
has a KV cache of its own. A head shares the target's weights if the target runs eagerly, on one rank and with plain
weights; otherwise it reads its part of them once more. Packed for the native products they take the same memory, but
are no longer shared with a tied table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.folder import local_folder, read_json
from paceline.checkpoint.size import ModelSize, size_of
from paceline.checkpoint.weights import WeightFiles
from paceline.config import DraftOptions, DraftSetup, HeadDraftOptions, HeadOptions, ModelOptions, TargetSetup
from paceline.config.methods.entry import function
from paceline.core import native
from paceline.errors import ConfigError
from paceline.preflight.estimate import HeadsSize, compiles, draft_estimate

TREE_BUDGET = 64
"""Rows of a session's nodes that the KV pages of a draft model in the target have room for."""

_EMBEDDING = re.compile(r"(^|\.)embed_tokens\.weight$")
_LM_HEAD = re.compile(r"(^|\.)(lm_head|shared_head\.head)\.weight$")
_MEDUSA_LM_HEAD = re.compile(r"(^|\.)(lm_head|lm_heads\.\d+|\d+\.\d+)\.weight$")
"""Names of the tables that a head may have of its own."""
_UNREAD = re.compile(r"(^|\.)(t2d|rotary_emb\.inv_freq)$")
"""Tensors of a head's files that it does not load."""
_FIRST_DEPTHS = re.compile(r"\.0\.|proj\.1\.")
"""Tensors of an MLP speculator whose deeper ones are the same."""
_LAYER = re.compile(r"(?:model\.)?(?:language_model\.)?layers\.(\d+)\.")
_LAYER_IDS = ("target_layer_ids", "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")


@dataclass(frozen=True, slots=True)
class Served:
    """The target of a head, and its device."""

    setup: TargetSetup
    target: ModelSize
    max_len: int
    """Tokens of the longest context."""
    on_gpu: bool

    @property
    def lends(self) -> bool:
        """True if heads share the target's weights: they are plain, on one rank, and run eagerly."""
        options = self.setup.options
        plain = self.target.saved_bytes == 0 and options.quantization is None and options.tensor_parallel_size == 1
        return plain and not compiles(options, self.target, self.on_gpu)

    @property
    def table_bytes(self) -> int:
        """Bytes of the target's embedding, or of its LM head."""
        return self.target.vocab_size * self.target.hidden_size * self.target.item_bytes


def draft_setup_of(setup: TargetSetup, head: HeadOptions) -> DraftSetup:
    """A draft model in the target's process as the setup of a draft: it runs as the target does, on one rank."""
    same = setup.options.model_dump(include=set(ModelOptions.model_fields))
    changed = same | {"tensor_parallel_size": 1, "cpu_threads": 1, "tree_budget": TREE_BUDGET, "quantization": None}
    return DraftSetup.for_target(setup, head.source, DraftOptions(**changed))


def known_heads_size(setup: TargetSetup, target: ModelSize, max_len: int, *, on_gpu: bool = False) -> HeadsSize:
    """Returns ``heads_size``, or the size of no heads if a checkpoint cannot be read. Loading reports that error."""
    try:
        return heads_size(setup, target, max_len, on_gpu=on_gpu)
    except ConfigError:
        return HeadsSize()


def heads_size(setup: TargetSetup, target: ModelSize, max_len: int, *, on_gpu: bool = False) -> HeadsSize:
    """The size of the heads of a target, as far as their files are on this machine, and of what its hints need.

    Raises:
        ConfigError: a checkpoint cannot be read.
    """
    total = HeadsSize()
    for head in setup.options.heads:
        one = function(head.entry.memory)(head, Served(setup, target, max_len, on_gpu))
        total = HeadsSize(
            total.weights_bytes + one.weights_bytes,
            total.kv_values + one.kv_values,
            total.page_values + one.page_values,
            total.host_bytes + one.host_bytes,
        )
    if setup.options.hints is not None and compiles(setup.options, target, on_gpu):
        tables = 2 * target.vocab_size * target.hidden_size * target.item_bytes  # read again, the embedding with them
        total = replace(total, weights_bytes=total.weights_bytes + tables)
    if setup.options.hints is not None and (adapter := setup.options.hints.head) is not None:
        _trained_boundary(adapter, read_json(_folder(adapter), "config.json"), target)
        own = _numbers(_shapes(adapter, target)) * target.item_bytes
        total = replace(total, weights_bytes=total.weights_bytes + own)
    if setup.link is None:
        return total
    width, fuse = _link_size(setup.link, target)
    return replace(total, weights_bytes=total.weights_bytes + fuse, kv_values=total.kv_values + width)


def remote_size(options: HeadDraftOptions, target: ModelSize) -> ModelSize:
    """Returns the size of a head in the draft pool as a model, with its part of the target's embedding and LM head.

    Raises:
        ConfigError: its checkpoint cannot be read, or is not on this machine.
    """
    head, table = options.head, target.vocab_size * target.hidden_size
    if head.source is None:  # MTP, one layer of the target or more, which borrows both tables
        layers = max(0, target.num_parameters - target.num_tables * table)
        own, numbers = target, layers // max(1, target.num_layers) + 2 * table
    else:
        shapes = _shapes(head, target)
        own, numbers = _own_size(head, target), _numbers(shapes) + _num_borrowed(head.method, shapes) * table
    kv_values = _mtp_values(target) if options.method == "mtp" else own.kv_values or 0
    return replace(
        target,
        num_parameters=numbers,
        kv_values=kv_values,
        num_layers=1 if options.method == "mtp" else own.num_layers,
        hidden_size=own.hidden_size,
        intermediate_size=own.intermediate_size,
        saved_bytes=0,
        is_kv_fp8=False,
    )


def _link_size(options: HeadDraftOptions, target: ModelSize) -> tuple[int, int]:
    """Numbers of one fused state, which a target keeps per token, and bytes of the weights that make it."""
    if options.head.entry.page_states == 1:  # it is the state itself
        return target.hidden_size * (target.num_streams if options.head.method == "mtp" else 1), 0
    head, own = options.head, _own_size(options.head, target)
    config = read_json(_folder(head), "config.json")
    num_states = len(head.boundaries or ()) or head.entry.page_states or _num_states(head, config, own)
    return own.hidden_size, num_states * target.hidden_size * own.hidden_size * target.item_bytes


def _own_size(head: HeadOptions, target: ModelSize) -> ModelSize:
    """Returns the size of a head's layers by its configuration. MTP modules are as large as a layer of the target."""
    folder = _folder(head)
    if head.method == "mtp":
        return target
    config = read_json(folder, "config.json")
    return size_of(config.get("transformer_layer_config") or config, 0, target.item_bytes)


def size_of_nothing(head: HeadOptions, served: Served) -> HeadsSize:
    """A head without weights and texts."""
    return HeadsSize()


def size_of_suffixes(head: HeadOptions, served: Served) -> HeadsSize:
    """The texts of other sessions."""
    return HeadsSize(host_bytes=head.suffix.shared_bytes if head.suffix else 0)


def size_of_draft_model(head: HeadOptions, served: Served) -> HeadsSize:
    """All that a draft model takes in the target's process. Raises ConfigError."""
    options = served.setup.options
    checkpoint = Checkpoint.find(str(head.source), options.trust_remote_code)
    how: dict[str, Any] = {"on_gpu": served.on_gpu, "kv_cache_dtype": options.kv_cache_dtype}
    size = None if checkpoint is None else checkpoint.size(options.dtype, None, **how)
    if checkpoint is None or size is None:
        return HeadsSize()
    longest = min(served.max_len, checkpoint.max_model_len)
    setup = draft_setup_of(served.setup, head)
    return HeadsSize(draft_estimate(setup, size, longest, on_gpu=served.on_gpu).device_bytes)


def size_of_exit(head: HeadOptions, served: Served) -> HeadsSize:
    """The target's first layers and tables, where they are read once more, and an exit head. Raises ConfigError."""
    return _size_of_layers(head, served, _boundary_of(head, served.target))


def size_of_streams(head: HeadOptions, served: Served) -> HeadsSize:
    """The target's last layers and tables, where they are read once more, and their additions. Raises ConfigError."""
    return _size_of_layers(head, served, served.target.num_layers - _boundary_of(head, served.target))


def _boundary_of(head: HeadOptions, target: ModelSize) -> int:
    if head.source is not None:
        return _trained_boundary(head, read_json(_folder(head), "config.json"), target)
    return (head.boundaries or [0])[0]


def _size_of_layers(head: HeadOptions, served: Served, num_layers: int) -> HeadsSize:
    target = served.target
    weights = _numbers(_shapes(head, target)) * target.item_bytes
    if served.lends:
        return HeadsSize(weights)
    packs = target.item_bytes == 2 and not served.on_gpu and native.packs_bfloat16()
    table = served.table_bytes
    layers = max(0, target.weights_bytes - target.num_tables * table) * num_layers // max(1, target.num_layers)
    return HeadsSize(weights + layers + (2 if packs else target.num_tables) * table)


def size_of_mtp(head: HeadOptions, served: Served) -> HeadsSize:
    """Modules of the target's kind, whose weights may be in the target's files. Raises ConfigError."""
    target, kv_values = served.target, _mtp_values(served.target)
    shapes = _shapes(head, target, served.setup.source)
    weights = 0 if head.source is None else _numbers(shapes) * target.item_bytes
    state = target.num_streams * target.hidden_size
    return HeadsSize(weights + _borrowed_bytes(head, served, shapes), kv_values, state)


def _mtp_values(target: ModelSize) -> int:
    """Numbers that an MTP module keeps per token. Raises ConfigError if it cannot run."""
    if (values := target.mtp_values) is None:
        raise ConfigError("its modules have indexers of their own, as the target's layers have, which do not run")
    return values


def size_of_states(head: HeadOptions, served: Served) -> HeadsSize:
    """A head that reads hidden states; one that keeps states with the pages has layers of its own there, too.

    Raises:
        ConfigError: its checkpoint cannot be read.
    """
    target, shapes, num_states = served.target, _shapes(head, served.target), head.entry.page_states
    weights = _numbers(shapes) * target.item_bytes + _borrowed_bytes(head, served, shapes)
    if num_states == 0:
        return HeadsSize(weights)
    config, own = read_json(_folder(head), "config.json"), _own_size(head, target)
    num_states = _num_states(head, config, own) if num_states is None else num_states
    return HeadsSize(weights, own.kv_values or 0, num_states * target.hidden_size)


def _borrowed_bytes(head: HeadOptions, served: Served, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Bytes of the target's tables that a head reads once more."""
    return 0 if served.lends else _num_borrowed(head.method, shapes) * served.table_bytes


def _shapes(head: HeadOptions, target: ModelSize, target_source: str = "") -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that a head loads, by name. MTP modules may be in the target's files.

    Raises:
        ConfigError: its checkpoint cannot be read, or is not on this machine.
    """
    if head.source is None and head.method != "mtp":
        return {}
    folder = local_folder(target_source) if head.source is None else _folder(head)
    shapes = {} if folder is None else WeightFiles.open(folder).shapes
    loaded = {name: shape for name, shape in shapes.items() if not _UNREAD.search(name)}
    if head.method == "mtp":
        return {name: shape for name, shape in loaded.items() if _is_mtp(name, target.num_layers)}
    if head.method == "mlp_speculator" and read_json(_folder(head), "config.json").get("tie_weights"):
        return {name: shape for name, shape in loaded.items() if _FIRST_DEPTHS.search(name)}
    return loaded


def _is_mtp(name: str, num_layers: int) -> bool:
    """True for a tensor of an MTP module, by its name in the files of a target with ``num_layers``."""
    layer = _LAYER.match(name)
    return name.startswith("mtp.") or (layer is not None and int(layer[1]) >= num_layers)


def _numbers(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes.values()))


def _num_borrowed(method: str, names: Iterable[str]) -> int:
    """How many of the target's embedding and LM head a head uses, by the names of its own tensors."""
    if method == "mlp_speculator":
        return 0
    if method == "gemma4_assistant":  # the target's embedding
        return 1
    if method == "medusa":
        return int(not any(map(_MEDUSA_LM_HEAD.search, names)))
    return sum(not any(map(own.search, names)) for own in (_EMBEDDING, _LM_HEAD))


def require_hint_boundary(setup: TargetSetup, num_layers: int) -> None:
    """Checks that the boundary of a target's hints, if it sends any, has layers on both sides.

    Raises:
        ConfigError: it has not.
    """
    hints = setup.options.hints
    if hints is not None and hints.boundary >= num_layers:
        raise ConfigError(
            f"hints.boundary is {hints.boundary}: the target {setup.source!r} has {num_layers} layers, so 1 to "
            f"{num_layers - 1} are allowed"
        )


def _trained_boundary(head: HeadOptions, config: Mapping[str, Any], target: ModelSize) -> int:
    """The boundary of an exit head or of streams. Raises ConfigError if that, or its target, is another one than
    configured."""
    boundary, what = config.get("boundary"), "exit head" if head.method == "early_exit" else "head of streams"
    if not isinstance(boundary, int) or (head.boundaries is not None and head.boundaries != [boundary]):
        raise ConfigError(f"boundaries is {head.boundaries}: the {what} {head.source!r} was trained at [{boundary}]")
    for key, wanted in (("num_target_layers", target.num_layers), ("hidden_size", target.hidden_size)):
        if config.get(key) != wanted:
            raise ConfigError(f"{key} of the {what} {head.source!r} is {config.get(key)}: the target has {wanted}")
    return boundary


def _folder(head: HeadOptions) -> Path:
    folder = local_folder(str(head.source))
    if folder is None:
        raise ConfigError(f"head {head.source!r} is not on this machine: fetch it, and name its directory")
    return folder


def _num_states(head: HeadOptions, config: Mapping[str, Any], own: ModelSize) -> int:
    """Number of the target's layers that a block head reads: as named, else one for each layer of its own."""
    if head.boundaries is not None:
        return len(head.boundaries)
    values = {**config, **(config.get("dflash_config") or {})}
    return next((len(values[key]) for key in _LAYER_IDS if isinstance(values.get(key), list)), own.num_layers)
