"""The traced step around an unchanged transformers model, and what its layers keep in the KV cache."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from paceline.checkpoint.indexed import INDEXED
from paceline.checkpoint.linear import BOTH, CONV, LINEAR, PASSING, Kind, LinearSpec
from paceline.errors import ConfigError, reason_of
from paceline.model.attention.chunks import CHUNKED, adopt_chunks
from paceline.model.attention.compressed import COMPRESSED, replace_compressors, shares_keys
from paceline.model.attention.dropped_arguments import pass_arguments_on
from paceline.model.attention.indexed import PROBE, IndexedStep, indexers_of, replace_indexers
from paceline.model.attention.kernels import Kernel
from paceline.model.attention.latent import adopt_latents, keeps_latents, over_latents
from paceline.model.attention.paged import IMPLEMENTATIONS
from paceline.model.kv_cache import NO_KV, LayerSpec
from paceline.model.layer_callback import LayerCallback
from paceline.model.linear.layers import linear_indices, replace_linear_layers
from paceline.model.linear.operator import LinearInputs
from paceline.model.logit_rows import LogitRows
from paceline.model.states import StateTaps
from paceline.model.tails import SpareTokens

_PROBE = "paceline_probe"
_PROBED_TOKENS = 2
_PROBING = threading.Lock()
"""Attention functions are registered by name for the whole process; engines in threads load side by side."""
_LAYER_TYPES = {"attention", "full_attention", "sliding_attention"}
"""Layers of another kind mask more, or something else, and do not tell the attention function of it."""
_KNOWN = {"s_aux", "indices", "position_ids", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k"}
"""Tensors that the paged attention takes, or that say nothing beyond the step's own plan."""

_FURTHER = {"softcap": "caps of its scores", "s_aux": "attention sinks"}
"""Arguments of an attention function -> what they are, in words."""


class Step(torch.nn.Module):
    """The forward of a step.

    ``(ids [1, T], positions [1, T], logits_index [R], ...) -> logits [1, R, vocab]``. With ``taps`` it also returns
    states ``[1, T or R, width]``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        kernel: Kernel = "sdpa",
        taps: StateTaps | None = None,
        callback: LayerCallback | None = None,
        rows: LogitRows | None = None,
    ) -> None:
        """``rows``: what computes the last layer for the tokens at ``logits_index`` alone; None: all are computed."""
        super().__init__()
        model.set_attn_implementation(IMPLEMENTATIONS[kernel])
        self.model = model
        self.taps = taps
        self.callback = callback
        self.rows = rows
        self.linear = linear_indices(model)
        self.is_indexed = bool(indexers_of(model))

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        logits_index: Tensor,
        write_rows: Tensor,
        write_tokens: Tensor,
        page_table: Tensor,
        gather_index: Tensor,
        scatter_index: Tensor,
        masks: list[Tensor],
        keys: list[Tensor],
        values: list[Tensor],
        linear: list[Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Runs the model; KV, and of linear layers rows and states, are written in place. ``linear``:
        ``LinearInputs.tensors``."""
        if self.taps is not None:
            self.taps.listen()
        if self.callback is not None:
            self.callback.expect(logits_index)
        if self.rows is not None:
            self.rows.expect(logits_index)
        own: dict[str, Any] = {} if linear is None else {"linear": LinearInputs.of(self.linear, linear)}
        if self.is_indexed:
            step = IndexedStep(keys, write_rows, write_tokens, page_table, gather_index, masks[0])
            own["attention_mask"] = step.by_kind
        logits: Tensor = self.model(
            input_ids=ids,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=logits_index,
            keys=keys,
            values=values,
            write_rows=write_rows,
            write_tokens=write_tokens,
            page_table=page_table,
            gather_index=gather_index,
            scatter_index=scatter_index,
            masks=masks,
            token_positions=positions,
            **own,
        ).logits
        return logits if self.taps is None else (logits, self.taps.join(logits_index))


class Probe(NamedTuple):
    """Findings about a model that two tokens have run through."""

    layers: list[LayerSpec]
    """KV that each layer keeps per token, in order; NO_KV of one that does not attend. Then the index keys of each
    indexer, and what each compressor keeps."""
    linear: dict[int, LinearSpec]
    """The linear layers, by index."""
    sliding_window: int | None
    """Window of the layers that have one, or their chunks (``Chunks``); None: no layer has."""
    spare_tokens: int
    """Padding that steps on the CPU need after their last token (``tails.py``)."""
    further: frozenset[str]
    """Names of what some layer's attention has beyond a softmax over scaled products."""


def name_of(model: PreTrainedModel) -> str:
    """Name of a model in messages: its class, and where it comes from."""
    return f"{type(model).__name__} ({model.name_or_path or model.config.get_text_config().model_type})"


def probe_layers(model: PreTrainedModel, taps: StateTaps | None = None) -> Probe:
    """Runs two tokens through ``model``. Finds what each layer keeps, and checks for the states that ``taps`` read.

    Replaces the forward of linear layers by one over slots, and that of indexers and layers with compressors by one
    over pages. Latent attention then gives latents to its attention function, and layers that drop arguments pass them
    on. The model runs only with these from then on.

    Raises:
        ConfigError: a layer has no attention, the attention is not ``paged_attention`` (several window sizes, biases,
            masks of its own), or a state is missing.
    """
    config, name = model.config.get_text_config(), name_of(model)
    if getattr(config, "prefix_lm", False):
        raise ConfigError(f"{name} attends to later tokens of a prompt too (prefix_lm); only causal attention works")
    linear = replace_linear_layers(model, name)
    chunks = adopt_chunks(model, name)
    pass_arguments_on(model)
    adopt_latents(model)
    num_layers = config.num_hidden_layers
    indexers = replace_indexers(model, num_layers)
    compressors = replace_compressors(model, num_layers + len(indexers), name)
    adopted = {kind for kind, found in ((CHUNKED, chunks), (INDEXED, indexers)) if found}
    adopted |= COMPRESSED if compressors else set()
    _check_layer_types(config, name, adopted | ({LINEAR, CONV, BOTH, *PASSING} if linear else set()))
    own = ({"linear": None} if linear else {}) | ({"attention_mask": PROBE.by_kind} if indexers else {})
    seen: dict[int, LayerSpec] = {}
    windows: set[int] = set()
    further: set[str] = set()

    @over_latents
    def record(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        if kwargs.get("s_aux") is None and getattr(module, "sinks", None) is not None:
            raise ConfigError(f"{name} has attention sinks that it does not give to its attention function")
        if not getattr(module, "is_causal", True):
            raise ConfigError(f"{name} attends to later tokens too; only causal attention works")
        if "page_table" not in kwargs:
            raise ConfigError(f"{name} does not pass all its arguments on to its attention")
        given = sorted(key for key, value in kwargs.items() if isinstance(value, Tensor) and key not in _KNOWN)
        if (attention_mask is not None and attention_mask is not PROBE) or given:
            raise ConfigError(
                f"{name} gives its attention {' and '.join(given) or 'a mask of its own'}, "
                "which the paged attention does not have"
            )
        values = 0 if keeps_latents(module) or shares_keys(module) else value.shape[3]
        seen[int(module.layer_idx)] = LayerSpec(key.shape[1], key.shape[3], values)
        if kwargs.get("sliding_window") is not None:
            windows.add(int(kwargs["sliding_window"]))
        further.update(name for key, name in _FURTHER.items() if kwargs.get(key) is not None)
        shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
        return query.new_zeros(shape), None

    previous, spare = config._attn_implementation, SpareTokens(_PROBED_TOKENS)
    with _PROBING:
        AttentionInterface.register(_PROBE, record)
        try:
            model.set_attn_implementation(_PROBE)
            with torch.no_grad(), spare:
                ids = torch.zeros(1, _PROBED_TOKENS, dtype=torch.long, device=model.device)
                if taps is not None:
                    taps.listen()
                model(input_ids=ids, use_cache=False, page_table=None, **own)
        except ConfigError:
            raise
        except Exception as error:  # transformers raises whatever its model classes raise
            raise ConfigError(f"{name} does not support a registered attention function: {reason_of(error)}") from error
        finally:
            if previous is not None:
                model.set_attn_implementation(previous)
    attentions = {type(module).__name__ for module in model.modules() if type(module).__name__.endswith("Attention")}
    if not seen and attentions:
        raise ConfigError(
            f"{name} computes its attention by itself ({', '.join(sorted(attentions))}), not through the attention "
            "interface of transformers, where the paged attention would take its place"
        )
    kinds = getattr(config, "layer_types", None) or ()
    passing = [i for i, kind in enumerate(kinds) if linear and kind in PASSING]
    if {*seen, *linear, *passing} != {*range(num_layers)}:
        raise ConfigError(
            f"{name} has {num_layers} layers of which {len(seen)} keep a KV cache; only pure attention decoders work"
        )
    if taps is not None:
        taps.require(_PROBED_TOKENS)
    if chunks is not None:
        windows.add(chunks)
    if len(windows) > 1:
        raise ConfigError(f"{name} has sliding windows of {sorted(windows)} tokens; one size is supported")
    on_cpu = model.device.type == "cpu"
    layers, window = [seen.get(i, NO_KV) for i in range(num_layers)], windows.pop() if windows else None
    kept = [*layers, *indexers, *compressors]
    return Probe(kept, linear, window, spare.count if on_cpu else 0, frozenset(further))


def _check_layer_types(config: PretrainedConfig, name: str, adopted: set[str]) -> None:
    """``adopted``: types whose layers have been given a forward of ours."""
    unknown = {str(kind) for kind in getattr(config, "layer_types", None) or ()} - _LAYER_TYPES - adopted
    if unknown:
        raise ConfigError(
            f"{name} has layers of type {', '.join(sorted(unknown))}; only full, sliding, Llama 4's chunked and "
            f"DeepSeek's indexed and compressed attention works, and of linear layers: {', '.join(Kind)}"
        )
