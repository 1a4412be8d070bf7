"""Which part of every parameter a tensor-parallel rank holds, from the plan that comes with the model class.

A rank is the unchanged transformers class, built from a *local* configuration: fewer heads, narrower feed-forward
layers. The class's plan says which layers are split by columns, which by rows. The class is built on the meta device
with one configuration value changed at a time, to find the values that govern them. The shapes of the local model then
tell how much each parameter shrinks. Whatever the plan and the shapes do not explain together is refused.

Reads no weights (``shard_loading.py``) and exchanges nothing (``sharded.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from paceline.errors import ConfigError, reason_of
from paceline.model.local_config import (
    HEADS,
    KV_HEADS,
    REPEATED,
    changed,
    divides,
    head_dim_of,
    meta_model,
    shapes_of,
    smaller,
    values_of,
)
from paceline.model.parallel.linear import FIXED, LinearParts
from paceline.model.parallel.tables import QKV, divided_sizes, own_plan, whole_settings, written_out

Range = tuple[int, int]
"""Half-open: [first, stop)."""

_COLUMN = {"colwise", "colwise_rep", "colwise_gather_output"}
_ROW = {"rowwise", "rowwise_rep", "rowwise_split_input"}
_PACKED = {"packed_colwise", "packed_rowwise"}
_SHARDING = _COLUMN | _ROW | _PACKED | {QKV}
_SUMMING = _ROW | {"moe_tp_experts", "all_reduce"}
_SHARED = {"moe_identity_expert"}
_NEUTRAL = {"replicated_with_grad_allreduce", "replicate", "mla_kv_a_proj", "local_params", "embedding_rowwise"}


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """The part of one parameter or persistent buffer that a rank holds."""

    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    dim: int | None = None
    """The dimension that is split; None: the rank holds all of it."""
    parts: tuple[Range, ...] = ()
    """Ranges of ``dim``, joined in this order. Fused projections have one for each projection."""
    elsewhere: bool = False
    """The rank holds zeros: this term of a sum over the ranks belongs to rank 0."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the part that the rank holds."""
        if self.dim is None:
            return self.shape
        length = sum(stop - first for first, stop in self.parts)
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One rank's share of a model."""

    degree: int
    config: PretrainedConfig
    """Configuration of the rank's own, smaller model. Its vocabulary is the whole one."""
    parameters: Mapping[str, ParameterShard]
    """Shards by name in the state dict; of several names of one tensor only the first."""
    aliases: Mapping[str, str]
    """Other names of tensors in ``parameters``."""
    summed: tuple[str, ...]
    """Modules whose outputs are added over the ranks."""
    gathered: tuple[str, ...]
    """Norms over a dimension that is split: they see the whole of it, and the rank keeps its part."""
    divided: tuple[str, ...]
    """Modules without weights whose input every rank adds to a sum: each adds its part of it."""
    sizes: Mapping[str, int]
    """Attributes of the rank's modules, by their paths, which its configuration does not make small."""
    embedding: str
    head: str
    vocab: Range
    """Token ids whose embedding and logits this rank holds."""
    vocab_width: int
    """Logits of a rank; the last rank's are padded to it."""


def plan_shards(config: PretrainedConfig, rank: int, degree: int) -> ShardPlan:
    """The share of ``rank`` among ``degree`` ranks.

    Raises:
        ConfigError: the class has no plan, the plan does not explain the shapes, or ``degree`` does not divide what
            must be divided; the message lists the degrees that would.
    """
    if not 0 <= rank < degree:
        raise ConfigError(f"tensor-parallel rank {rank} of degree {degree}: ranks are 0 to degree - 1")
    try:
        return _Planner(config, rank, degree).plan()
    except ConfigError:
        raise
    except Exception as error:  # transformers raises whatever its model classes raise
        raise ConfigError(f"{config.model_type} could not be built for {degree} ranks: {reason_of(error)}") from error


class _Planner:
    def __init__(self, config: PretrainedConfig, rank: int, degree: int) -> None:
        self.config, self.rank, self.degree = written_out(config), rank, degree
        self.model = meta_model(self.config)
        self.name = f"{type(self.model).__name__} ({config.model_type})"
        self.shapes = shapes_of(self.model)
        self.linear = LinearParts.of(self.model, self.shapes, rank, degree)
        own_parts = {_pattern(name.rpartition(".")[0]) for name in self.linear.parameters}
        theirs: dict[str, str] = getattr(self.model, "tp_plan", None) or {}
        plan = {key: style for key, style in theirs.items() if key not in own_parts}
        if not any(style in _SHARDING for key, style in plan.items() if "*" in key):
            if not (own := own_plan(config)):
                raise ConfigError(f"{self.name} has no tensor-parallel plan, in transformers or here: use degree 1")
            plan |= own
        if unknown := sorted(
            {style for style in plan.values() if style not in _SUMMING | _SHARDING | _SHARED | _NEUTRAL}
        ):
            raise ConfigError(f"{self.name} is planned with {', '.join(unknown)}, which is not supported: use degree 1")
        self.styles = plan
        self.embedding, self.head = self._vocabulary_modules()
        outside = (f"{self.embedding}.", f"{self.head}.")
        others = {name: shape for name, shape in self.shapes.items() if name not in self.linear.parameters}
        self.body = {name: shape for name, shape in others.items() if not name.startswith(outside)}

    def plan(self) -> ShardPlan:
        whole = whole_settings(self.config)
        values = {key: value for key, value in values_of(self.config).items() if key not in whole}
        # A single KV head cannot be split: one for each attention head is valid, too.
        other = {key: smaller(value) if value > 1 else values.get(HEADS, 1) for key, value in values.items()}
        follows = {key: self._followers({key: other[key]}) for key, value in values.items() if other[key] != value}
        chosen = {key for key, names in follows.items() if self._is_planned(names)}
        if KV_HEADS in values and HEADS in chosen:
            chosen.add(KV_HEADS)
        elif HEADS not in chosen:
            chosen.discard(KV_HEADS)
        self._leave_whole({name for key in chosen for name in follows.get(key, ())})
        heads = {key: int(getattr(self.config.get_text_config(), key)) for key in self.linear.heads}
        self.split = {key: values[key] for key in chosen} | heads
        self._check_degree(self.split)

        local = {key: max(1, value // self.degree) for key, value in self.split.items() if key not in FIXED}
        config = changed(self.config, local)
        model = meta_model(config)
        shapes = shapes_of(model)
        if shapes.keys() != self.shapes.keys():
            raise ConfigError(f"{self.name} has other parameters with {local}: use degree 1")
        self._check_buffers(model)
        parameters: dict[str, ParameterShard] = {}
        gathered: list[str] = []
        for name, shape in self.body.items():
            keys = {key for key in chosen if name in follows.get(key, ())}
            parameters[name] = self._parameter(
                name, shape, shapes[name], keys, {k: (values[k], local[k]) for k in keys}
            )
            if parameters[name].dim is None and shapes[name] != shape:
                gathered.append(name.rpartition(".")[0])
        gathered += [norm for norm in self._fixed_norms(parameters) if norm not in gathered]
        self._check_gathered(parameters, gathered)
        if gathered and self.degree > values.get(KV_HEADS, self.degree):
            allowed = self._allowed({f"whole {key}": values[key] for key in chosen})
            raise ConfigError(
                f"{self.name} normalizes over whole projections ({gathered[0]}), of which {values[KV_HEADS]} KV "
                f"heads cannot be repeated on {self.degree} ranks: {allowed}"
            )
        summed = (*self._summed(parameters), *self.linear.summed)
        gathered += [*self._add_linear(parameters, shapes), *self.linear.gathered]
        vocab_size = self.shapes[f"{self.head}.weight"][0]
        width = -(-vocab_size // self.degree)
        vocab = (self.rank * width, min((self.rank + 1) * width, vocab_size))
        if (self.degree - 1) * width >= vocab_size:
            raise ConfigError(f"{self.name} has {vocab_size} tokens: {self.degree} ranks would not have one each")
        for module in dict.fromkeys((self.embedding, self.head)):
            for name, shape in self.shapes.items():
                if name.startswith(f"{module}."):
                    # Not every table is as long as the vocabulary: rows beyond the logits are never looked up.
                    split = name.endswith((".weight", ".bias")) and shape[0] >= vocab_size
                    parameters[name] = ParameterShard(shape, 0, (vocab,)) if split else ParameterShard(shape)
        first: dict[int, str] = {}
        aliases: dict[str, str] = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if first.setdefault(id(tensor), name) != name:
                aliases[name] = first[id(tensor)]
        return ShardPlan(
            degree=self.degree,
            config=config,
            parameters={name: shard for name, shard in parameters.items() if name not in aliases},
            aliases=aliases,
            summed=summed,
            gathered=tuple(gathered),
            divided=tuple(name for name, _ in self.model.named_modules() if self._style(name) in _SHARED),
            sizes={path: self._divided_size(path) for path in divided_sizes(self.config)},
            embedding=self.embedding,
            head=self.head,
            vocab=vocab,
            vocab_width=width,
        )

    def _add_linear(self, parameters: dict[str, ParameterShard], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Adds the parts of linear layers, if the smaller model, where it is smaller, holds the same. Returns the norms
        that see the heads of all ranks."""
        gathered = []
        for name, part in self.linear.parameters.items():
            parameters[name] = shard = ParameterShard(self.shapes[name], part.dim, part.ranges, part.elsewhere)
            if part.dim is None and name.endswith("norm.weight") and shard.shape != shapes[name]:
                gathered.append(name.removesuffix(".weight"))
            elif shard.local_shape != shapes[name] and FIXED.isdisjoint(self.linear.heads):
                raise self._only_whole(f"{name} is {shapes[name]} on a rank, not {shard.local_shape}")
        return gathered

    def _divided_size(self, path: str) -> int:
        module, _, name = path.rpartition(".")
        value = int(getattr(self.model.get_submodule(module), name))
        return value if value % self.degree else value // self.degree

    def _only_whole(self, reason: str) -> ConfigError:
        return ConfigError(f"{self.name}: {reason}: use degree 1")

    def _leave_whole(self, governed: set[str]) -> None:
        """Removes feed-forward blocks from the plan if no setting governs any of their sizes. Every rank then holds
        such a block whole, and its output is not summed over the ranks.
        """
        blocks: dict[str, list[str]] = {}
        for name in self.body:
            module, _, _ = name.rpartition(".")
            if self._style(module) in _SHARDING and isinstance(self.model.get_submodule(module), nn.Linear):
                blocks.setdefault(module.rpartition(".")[0], []).append(name)
        for block, names in blocks.items():
            if governed.isdisjoint(names) and not hasattr(self.model.get_submodule(block), "layer_idx"):
                for name in names:
                    self.styles.pop(_pattern(name.rpartition(".")[0]), None)

    def _fixed_norms(self, parameters: dict[str, ParameterShard]) -> list[str]:
        """Norms over whole projections whose size is given by something that is not split: ``q_norm`` of ``q_proj``."""
        found = []
        for name, shard in parameters.items():
            block, _, leaf = name.rpartition(".")[0].rpartition(".")
            projection = f"{block}.{leaf.removesuffix('_norm')}_proj.weight"
            read = parameters.get(projection) if leaf.endswith("_norm") else None
            if read is not None and read.dim == 0 and shard.shape == read.shape[:1] == shard.local_shape:
                found.append(f"{block}.{leaf}")
        return found

    def _check_gathered(self, parameters: dict[str, ParameterShard], gathered: list[str]) -> None:
        """Raises ConfigError for a gather that is not supported.

        A projection that the plan gathers within a layer must be packed, be read by one of the ``gathered`` norms, or
        be split again in the same way.
        """
        readers = {norm.rpartition(".")[0] for norm in gathered}
        readers |= {name.rsplit(".", 2)[0] for name in parameters if self._style_of(name) == "rowwise_split_input"}
        for name, shard in parameters.items():
            if self._style_of(name) == "colwise_gather_output" and len(shard.parts) == 1:
                module = name.rpartition(".")[0]
                if module.rpartition(".")[0] not in readers:
                    raise self._only_whole(f"its plan needs the whole output of {module}")

    def _vocabulary_modules(self) -> tuple[str, str]:
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
            raise ConfigError(f"{self.name} does not have one embedding table and one output layer: use degree 1")
        names = {id(module): name for name, module in self.model.named_modules()}
        return names[id(embedding)], names[id(head)]

    def _style(self, name: str) -> str | None:
        """Style that the plan gives a module or parameter, by its name with layer numbers as ``*``. A number at the end
        may also stand for itself, as of a part of an adapter."""
        module, _, leaf = name.rpartition(".")
        return self.styles.get(_pattern(name)) or self.styles.get(f"{_pattern(module)}.{leaf}")

    def _style_of(self, parameter: str) -> str | None:
        return self._style(parameter) or self._style(parameter.rpartition(".")[0])

    def _followers(self, change: dict[str, int]) -> dict[str, int]:
        """Parameters outside the vocabulary whose shapes follow a configuration value, and the first dimension that
        does."""
        try:
            shapes = shapes_of(meta_model(changed(self.config, change)))
        except (ValueError, RuntimeError, ZeroDivisionError):  # the class does not accept the value at all
            return {}
        return {
            name: next((d for d, size in enumerate(shapes.get(name, ())) if size != shape[d]), 0)
            for name, shape in self.body.items()
            if shapes.get(name) != shape
        }

    def _is_planned(self, follows: dict[str, int]) -> bool:
        """True if the plan splits everything that follows a value, but for norms."""
        planned = {name for name in follows if self._style_of(name) in _SHARDING}
        if not planned:
            return False
        rest = sorted(name for name in follows.keys() - planned if not self._is_norm(name))
        for block in {name.rsplit(".", 2)[0] for name in rest if name.count(".") > 1}:
            own = [name for name in rest if name.rsplit(".", 2)[0] == block]
            if self._is_feed_forward([*own], follows):
                for name in own:
                    self.styles[_pattern(name.rpartition(".")[0])] = "rowwise" if follows[name] else "colwise"
                rest = [name for name in rest if name not in own]
        if rest:
            raise self._only_whole(f"its plan splits {min(planned)} but not {rest[0]}")
        return True

    def _is_feed_forward(self, names: list[str], follows: dict[str, int]) -> bool:
        """True if parameters that the plan leaves out form a feed-forward block: linear layers that widen and one that
        narrows.

        Shared experts are such a block. It can be split by the same setting as the blocks in the plan.
        """
        modules = [self.model.get_submodule(name.rpartition(".")[0]) for name in names]
        weights = [name for name in names if name.endswith(".weight")]
        narrow = [name for name in weights if follows[name] == 1]
        return all(isinstance(module, nn.Linear) for module in modules) and 1 == len(narrow) < len(weights)

    def _is_norm(self, name: str) -> bool:
        """True if a parameter belongs to a layer of vectors, or of one vector for each head."""
        module = self.model.get_submodule(name.rpartition(".")[0])
        leaf = not any(True for _ in module.children())
        head_dim = head_dim_of(self.config)
        return leaf and all(p.dim() == 1 or (p.dim() == 2 and p.shape[1] == head_dim) for p in module.parameters())

    def _check_degree(self, values: dict[str, int]) -> None:
        if all(divides(self.degree, key, value) for key, value in values.items()):
            return
        key, value = next((k, v) for k, v in sorted(values.items()) if not divides(self.degree, k, v))
        reason = "neither divides the other" if key in REPEATED else "which it does not divide"
        raise ConfigError(f"{self.name}: degree {self.degree} and {key} {value}, {reason}: {self._allowed(values)}")

    def _allowed(self, values: dict[str, int]) -> str:
        degrees = range(1, max(values.values()) + 1)
        allowed = [str(d) for d in degrees if all(divides(d, key, value) for key, value in values.items())]
        return f"use {', '.join(allowed)}"

    def _check_buffers(self, model: PreTrainedModel) -> None:
        """Tables, such as rotary frequencies, must not depend on how the model is split."""
        ours = {name: tuple(buffer.shape) for name, buffer in model.named_buffers()}
        for name, buffer in self.model.named_buffers():
            if name not in self.shapes and ours.get(name) != tuple(buffer.shape):
                raise self._only_whole(f"the size of {name} depends on a split dimension")

    def _parameter(
        self, name: str, shape: tuple[int, ...], local: tuple[int, ...], keys: set[str], sizes: dict[str, Range]
    ) -> ParameterShard:
        """``sizes``: whole and local value of each configuration value in ``keys``, which this parameter follows."""
        style = self._style_of(name)
        if style in _SHARDING and not keys and not self._is_whole_bias(name, style):
            return self._by_heads(name, shape, style)
        if shape == local:
            return ParameterShard(shape, elsewhere=self.rank > 0 and self._is_added_bias(name))
        dims = [d for d in range(len(shape)) if shape[d] != local[d]]
        (dim,) = dims if len(dims) == 1 else (-1,)
        expected = self._split_dim(name, shape, style)
        if style not in _SHARDING:
            if len(shape) == 1:
                return ParameterShard(shape)  # a norm over a split dimension: whole, and its input is gathered
            expected = 0
        blocks = self._blocks(name, shape[dim], keys, sizes, style)
        if dim != expected or sum(small for _, small in blocks) != local[dim]:
            raise ConfigError(
                f"{self.name}: {name} of shape {shape} is {local} on a rank, not as planned ({style}): use degree 1"
            )
        parts: list[Range] = []
        start = 0
        for whole, small in blocks:
            pieces = whole // small  # fewer than the ranks where KV heads are repeated
            if whole % small or self.degree % pieces:
                raise ConfigError(
                    f"{self.name}: {whole} rows of {name} do not split into ranks of {small}: use degree 1"
                )
            first = start + self.rank * pieces // self.degree * small
            parts.append((first, first + small))
            start += whole
        return ParameterShard(shape, dim, tuple(parts))

    def _split_dim(self, name: str, shape: tuple[int, ...], style: str | None) -> int:
        """Returns the dimension that a style splits. A Conv1D has its dimensions in reverse: inputs, outputs."""
        last = style in _ROW | {"packed_rowwise"}
        if isinstance(self.model.get_submodule(name.rpartition(".")[0]), Conv1D):
            last = not last
        return len(shape) - 1 if last else max(0, len(shape) - 2)

    def _by_heads(self, name: str, shape: tuple[int, ...], style: str | None) -> ParameterShard:
        """Returns the shard of an attention layer whose number of heads follows from its number of columns.

        The columns follow the width of the model, or differ from layer to layer.
        """
        module, _, _ = name.rpartition(".")
        attention = self.model.get_submodule(module)
        while not hasattr(attention, "layer_idx"):
            module = module.rpartition(".")[0]
            attention = self.model.get_submodule(module)
            if not isinstance(attention, (nn.Sequential, nn.ModuleList)):  # as adapters are in
                break
        dim = self._split_dim(name, shape, style)
        if not hasattr(attention, "layer_idx") or style in _PACKED:
            raise ConfigError(
                f"{self.name}: {name} is to be split, but no known setting governs its size: use degree 1"
            )
        head_dim = int(getattr(attention, "head_dim", 0) or getattr(attention, "head_size", 1))
        heads = {key: value for key, value in values_of(self.config).items() if key in (HEADS, KV_HEADS)}
        heads[name] = shape[dim] // head_dim if shape[dim] % head_dim == 0 else shape[dim]
        if any(value % self.degree for value in heads.values()):
            key, value = next((k, v) for k, v in heads.items() if v % self.degree)
            # By these names KV heads are not repeated, which they are not here.
            counts = {**self.split, **{f"heads of {key}": value for key, value in heads.items()}}
            raise ConfigError(
                f"{self.name}: degree {self.degree} and {key} with {value} heads, which it does not divide: "
                f"{self._allowed(counts)}"
            )
        pieces = 3 if style == QKV else 1
        size = shape[dim] // pieces // self.degree
        firsts = [(piece * self.degree + self.rank) * size for piece in range(pieces)]
        return ParameterShard(shape, dim, tuple((first, first + size) for first in firsts))

    def _blocks(
        self, name: str, length: int, keys: set[str], sizes: dict[str, Range], style: str | None
    ) -> list[Range]:
        """(whole, local) length of each projection that is packed along the split dimension."""
        if keys == {HEADS, KV_HEADS}:
            (heads, ours), (kv_heads, our_kv) = sizes[HEADS], sizes[KV_HEADS]
            if style != "colwise_gather_output" or length % (heads + 2 * kv_heads):
                raise self._only_whole(f"how {name} packs queries, keys and values is not known")
            dim = length // (heads + 2 * kv_heads)
            return [(heads * dim, ours * dim), *[(kv_heads * dim, our_kv * dim)] * 2]
        if len(keys) != 1:
            raise self._only_whole(f"the size of {name} follows {sorted(keys)} together")
        ((whole, small),) = sizes.values()
        packed = style in _PACKED or (style == "colwise_gather_output" and length == 2 * whole)
        count = 2 if packed else 1
        return [(length // count, length // count * small // whole)] * count

    def _is_whole_bias(self, name: str, style: str | None) -> bool:
        return style in _ROW and len(self.shapes[name]) == 1

    def _is_added_bias(self, name: str) -> bool:
        """True if a whole parameter is a term of an output that is summed over the ranks."""
        module = name.rpartition(".")[0]
        return self._style(module) in _SUMMING and name.rpartition(".")[2].endswith("bias")

    def _summed(self, parameters: dict[str, ParameterShard]) -> tuple[str, ...]:
        modules = [name for name, _ in self.model.named_modules() if self._style(name) in _SUMMING]
        for module in modules:
            own = {name: shard for name, shard in parameters.items() if name.startswith(f"{module}.")}
            whole = [name for name, shard in own.items() if shard.dim is None and not self._is_added_bias(name)]
            if whole or all(shard.dim is None for shard in own.values()):
                raise ConfigError(
                    f"{self.name}: {module} is summed over the ranks, but each would hold all of {whole}: use degree 1"
                )
        return tuple(modules)


def _pattern(name: str) -> str:
    """Name of the parameter as a plan names it."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
